"""`run_batches`: train on several batches without a pause between them.

This module decides whether batches can run together, and undoes them after errors. `together` runs
them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from funcpipe._src.core.errors import BatchError, PlanError, StageError
from funcpipe._src.core.tree import Tree, flatten
from funcpipe._src.data.plan import Plan
from funcpipe._src.data.result import Result
from funcpipe._src.engine.arguments import checked_seed
from funcpipe._src.engine.execute import LaneExecutor
from funcpipe._src.engine.executors import executor_for
from funcpipe._src.engine.failures import add_note, in_batch
from funcpipe._src.engine.options import Executor, ExecutorLike, RunOptions
from funcpipe._src.optimizing.optim import check_options, held_by, steps_by_leaf
from funcpipe._src.optimizing.rates import Rates, refuse_scheduler
from funcpipe._src.optimizing.together import run_together
from funcpipe._src.optimizing.undo import Undo
from funcpipe._src.stages.context import checked_plan, outside_of_graphs
from funcpipe._src.stages.params import versions
from funcpipe._src.stages.rng import fold_in
from funcpipe._src.stages.trainable import Trainable


def run_batches(
    plan: Plan,
    params: Sequence[Tree],
    batches: Iterable[Any],
    *,
    optimizer: Optimizer | None = None,
    max_norm: float | None = None,
    scheduler: Any = None,
    state: Sequence[Tree] | None = None,
    feeds: Sequence[Mapping[str, Tree]] | None = None,
    seed: int | None = None,
    trainable: Trainable = None,
    loss_scale: float = 1.0,
    record: bool = False,
    ranges: bool = False,
    executor: ExecutorLike = None,
    threads_per_lane: int | None = None,
    check: str | Sequence[str] = (),
    timeout: float | None = None,
) -> tuple[Result, ...]:
    """Train on several batches; each device begins the next batch after it has stepped its stages.

    Parameters, optimizer state and results are bit-identical to one `run` per batch. No device
    waits for the others between batches: while the last stages work on a batch, the first stages
    already work on the next batch. This is the post-validation of the zero-bubble paper (arXiv
    2401.10241, section 4). With `ranks`, no process waits for the others. On one thread, which is
    the default on CUDA, the actions of all batches are queued one after the other.

    After an error, parameters, optimizer and scheduler are restored to their values before the
    first batch. For that, `run_batches` keeps a copy of parameters and optimizer state, or two
    copies if batches run one by one. Batches run one by one in these cases:

    - the first batch that the stages ever train on;
    - a plan with ties, or stages whose parameters share memory;
    - a loss that returns ``(sum, weight)``;
    - an optimizer with hooks, or with leaves that are not in ``params``;
    - replicas with different numbers of microbatches, or with state that a batch changes;
    - all batches again, after an undo, if gradients of one were clipped, or not finite under a loss
      scale.


    >>> layer = fp.stage(lambda w, x: x * w)
    >>> schedule = fp.schedules.step_params(fp.schedules.one_f_one_b(2, 2))
    >>> plan = fp.make_plan([layer, layer], schedule, loss=nn.functional.mse_loss, devices="cpu")
    >>> params = torch.tensor(2.0), torch.tensor(3.0)
    >>> batches = [(torch.ones(4), torch.zeros(4)), (2 * torch.ones(4), torch.ones(4))]
    >>> optimizer = torch.optim.SGD(fp.leaves(params), lr=0.01)
    >>> results = fp.run_batches(plan, params, batches, optimizer=optimizer)
    >>> [round(float(result.loss), 2) for result in results], [round(float(leaf), 2) for leaf in fp.leaves(params)]
    ([36.0, 64.85], [0.75, 2.23])

    Args:
        plan: a plan whose schedule has steps (`schedules.step_params`).
        params: as in `run`.
        batches: a list of batches as in `run`. All batches are read first and stay in memory until
            the end, so a loader must not reuse its tensors. With `ranks`, each rank gives the same
            number of batches, None for a batch that the rank does not read.
        optimizer: one of torch's own optimizers, or an `optim.FunctionalOptimizer`. With `ranks`,
            each rank has its own optimizer of its own leaves.
        max_norm: as in `step`. Clipping makes all batches run again one by one, so choose a
            ``max_norm`` that rarely clips.
        scheduler: a learning rate scheduler of the optimizer. It steps after each batch. None, the
            default: constant rates.
        state: the state for the first batch, as in `run`. Each later batch gets the new state of
            the batch before.
        feeds: a list with the feeds of each batch, as in `run`.
        seed: an int. Batch k draws as a run with ``seed=fold_in(seed, k)``.
        trainable, loss_scale, record, ranges, executor, threads_per_lane, check, timeout: as in
            `run`.

    Returns:
        The `Result` of each batch. ``norm`` is the norm of the gradients. ``grads`` is None, because
        the step has used the gradients.

    Raises:
        PlanError, PlacementError, BatchError: arguments do not fit together.
        StageError, NotFiniteError, RunTimeout, PeerError: as in `run`. A note names the batch.
    """
    options = RunOptions(
        state=state,
        seed=seed,
        trainable=trainable,
        loss_scale=loss_scale,
        threads_per_lane=threads_per_lane,
        check=check,
        record=record,
        ranges=ranges,
        timeout=timeout,
        optimizer=optimizer,
        max_norm=max_norm,
    )
    try:
        return outside_of_graphs(_run_all)(
            plan, params, batches, feeds, scheduler, executor, options
        )
    except StageError as error:  # the cause has the user's frames, so drop the frames of the run
        raise error.with_traceback(None) from error.__cause__


def _run_all(
    plan: Plan,
    params: Sequence[Tree],
    batches: Iterable[Any],
    feeds: Sequence[Mapping[str, Tree]] | None,
    scheduler: Any,
    executor: ExecutorLike,
    options: RunOptions,
) -> tuple[Result, ...]:
    chosen = executor_for(executor, checked_plan("run_batches", plan))
    work = _Work(plan, params, chosen, options, scheduler)
    try:
        work.do(batches, feeds)
    except BaseException as error:
        work.restore()
        add_note(
            error,
            "run_batches has undone all steps: parameters, optimizer and scheduler are as before",
        )
        raise
    finally:
        work.close()
    return tuple(work.results)


class _Work:
    """The progress of one `run_batches`: finished results, remaining batches, and the undo."""

    def __init__(
        self,
        plan: Plan,
        params: Sequence[Tree],
        executor: Executor,
        options: RunOptions,
        scheduler: Any,
    ) -> None:
        self.plan, self.params, self.executor = plan, params, executor
        self.options, self.scheduler = options, scheduler
        self.results: list[Result] = []
        self.left: list[tuple[Any, RunOptions]] = []
        self.lanes = executor if isinstance(executor, LaneExecutor) else None
        self._runs = 0 if self.lanes is None else self.lanes.runs
        self._before: tuple[Undo, Rates] | None = None

    def do(self, batches: Iterable[Any], feeds: Sequence[Mapping[str, Tree]] | None) -> None:
        """Run all batches: together if possible, else one by one."""
        together = self._together(partial(self._check, batches, feeds))
        if together or not self.left:
            return
        undo, rates = self._before = (
            Undo(self.options.optimizer),
            Rates(self.options.optimizer, self.scheduler),
        )
        undo.keep(held_by(self.options.optimizer))
        # False: perhaps only because some stage has never run (`together._can_go_on`). So run one
        # batch, and try again. None: they ran and were undone, so each must run by itself.
        if together is not None:
            self._one(rates)
            self._together()
        while self.left:
            self._one(rates)
        if self.lanes is not None:  # ranks wait here for each other, so that all hear of an error
            with self.lanes.running(self.options):
                self.lanes.part(self.plan).exchange("all batches", None)

    def restore(self) -> None:
        """Restore parameters, optimizer and scheduler after an error."""
        for each in self._before or ():
            each.restore()
        if self.lanes is not None:  # other ranks may be further: let all agree on the next number
            self.lanes.runs = self._runs + 1

    def close(self) -> None:
        """Release the copies for the undo."""
        if self._before is not None:
            self._before[0].close()

    def _check(self, batches: Iterable[Any], feeds: Sequence[Mapping[str, Tree]] | None) -> None:
        """Raise PlanError for arguments that do not fit; else list the batches with their
        options."""
        options = self.options
        _refuse_unstepped(self.plan, options)
        if self.scheduler is not None:
            refuse_scheduler(options.optimizer, self.scheduler)
        listed = _listed("batches is a list of batches as fp.run takes them", batches, _unwritten)
        rule = f"feeds has a dict for each of {len(listed)} batches"
        feeds_of = [None] * len(listed) if feeds is None else _listed(rule, feeds)
        if len(feeds_of) != len(listed):
            raise PlanError(f"{rule}; got {len(feeds_of)}")
        seed = checked_seed(options.seed)
        seeds = [None if seed is None else fold_in(seed, number) for number in range(len(listed))]
        options_of = [
            replace(options, feeds=names, seed=key)
            for names, key in zip(feeds_of, seeds, strict=True)
        ]
        self.left = [*zip(listed, options_of, strict=True)]

    def _together(self, check: Callable[[], None] = lambda: None) -> bool | None:
        """Run all remaining batches together.

        Returns:
            True if done. False if they cannot run together. None if they ran, and were undone
            because gradients were clipped or not finite.
        """
        if self.lanes is None:
            check()
            return False
        undo, rates = Undo(self.options.optimizer), None
        try:
            # All within the run, so that other processes are told of errors.
            with self.lanes.running(self.options) as running:
                check()
                rates = Rates(self.options.optimizer, self.scheduler)
                watch = {
                    "timeout": running.timeout,
                    "takes_faulthandler": running.takes_faulthandler,
                }
                batches = [
                    (batch, replace(self._with_state(options), **watch))
                    for batch, options in self.left
                ]
                results = run_together(
                    self.lanes, self.plan, self.params, batches, len(self.results), undo, rates
                )
            if results is None:
                undo.restore()
                rates.restore()
        except BaseException:
            undo.restore()
            if rates is not None:
                rates.restore()
            raise
        finally:
            undo.close()
        if results:
            self.results += results
            self.left = []
        return None if results is None else bool(results)

    def _one(self, rates: Rates) -> None:
        """Run the next batch by itself."""
        batch, options = self.left.pop(0)
        try:
            result = self.executor.run(self.plan, self.params, batch, self._with_state(options))
        except BaseException as error:
            add_note(error, in_batch(len(self.results)))
            raise
        self.results.append(replace(result, grads=None))
        rates.step()

    def _with_state(self, options: RunOptions) -> RunOptions:
        """Return the options with the state that the last finished batch returned."""
        return replace(options, state=self.results[-1].state) if self.results else options


def _unwritten(batches: Iterable[Any]) -> Iterator[Any]:
    """Yield the batches. Raise BatchError at the end if reading has changed an earlier batch."""
    seen: list[tuple[list[Tensor], list[int]]] = []
    for batch in batches:
        tensors = [leaf for leaf in flatten(batch)[0] if isinstance(leaf, Tensor)]
        seen.append((tensors, versions(tensors)))
        yield batch
    written = [number for number, (tensors, old) in enumerate(seen) if versions(tensors) != old]
    if written:
        raise BatchError(
            f"batches {written} have changed while later batches were read: the loader reuses its "
            "tensors, and run_batches reads all batches first; yield copies, such as x.clone()"
        )


def _listed(rule: str, values: Any, read: Callable[[Any], Iterable[Any]] = iter) -> list[Any]:
    """Return the values as a list. Raises PlanError with the ``rule`` if they are not iterable."""
    if isinstance(values, (Tensor, Mapping, str, bytes)) or not isinstance(values, Iterable):
        raise PlanError(f"{rule}; got a {type(values).__name__}")
    return [*read(values)]


def _refuse_unstepped(plan: Plan, options: RunOptions) -> None:
    """Raise PlanError if the schedule has no steps, or the optimizer's steps cannot be undone."""
    if not plan.schedule.steps:
        raise PlanError(
            f"schedule {plan.schedule.name!r} has no S, so run_batches would not step between "
            "batches; fp.schedules.step_params(schedule) adds S; to evaluate, call fp.run for "
            "each batch"
        )
    optimizer = options.optimizer
    check_options(optimizer, options.max_norm, None, optional=True)
    if optimizer is not None and not steps_by_leaf(optimizer):
        raise PlanError(
            f"{type(optimizer).__name__} is not one of torch's own optimizers, so run_batches "
            "cannot undo its steps if a batch fails; call fp.run(..., optimizer=optimizer) for "
            "each batch, or write its rule as an fp.optim.FunctionalOptimizer"
        )
