"""run_batches: runs a plan that steps on several batches, with no pause between them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

from torch import Tensor
from torch.optim import Optimizer

from funcpipe._src.core.errors import PlanError, StageError
from funcpipe._src.core.tree import Tree
from funcpipe._src.data.plan import Plan
from funcpipe._src.data.result import Result
from funcpipe._src.engine.execute import LaneExecutor
from funcpipe._src.engine.executors import executor_for
from funcpipe._src.engine.failures import add_note, in_batch
from funcpipe._src.engine.options import Executor, ExecutorLike, RunOptions
from funcpipe._src.engine.prepare import checked_seed
from funcpipe._src.optimizing.optim import check_options, is_torchs
from funcpipe._src.optimizing.rates import Rates, refuse_scheduler
from funcpipe._src.optimizing.stepping import held_by
from funcpipe._src.optimizing.together import Batches, run_together
from funcpipe._src.optimizing.undo import Undo
from funcpipe._src.stages.context import checked_plan, outside_of_graphs
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
    """Train on several batches, each device beginning the next one as soon as it has stepped its
    stages.

    Parameters, the optimizer's state and the results are those of one `run` after the other, bit
    for bit. In between no device waits for the others: while the last stages still work on a batch,
    the first ones are at the next one already (the zero-bubble paper's post-validation, arXiv
    2401.10241, section 4). With `ranks` no process waits for all either.

    It is all batches or none: after an error parameters, the optimizer and the scheduler are what
    they were before the first.

    Some batches go one by one all the same: of a plan with ties, with an optimizer that has hooks
    or holds other leaves, of replicas that have state which a batch changes or other numbers of
    microbatches, and the first that a plan ever runs. Where gradients of one turn out to be
    clipped, or not finite under a loss scale, what was done is undone, and all are done again one
    by one. What undoes steps is a copy of parameters and the optimizer's state; one by one there
    are two. On one thread (the default on CUDA) it is the devices that do not wait: their actions
    of all batches are queued one after the other.

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
        plan: of a schedule that steps (`schedules.step_params`).
        params: as for `run`.
        batches: a list of such as `run` takes; all are held until the end, so none is written over
            by the next. With `ranks` as many on every rank, None where it reads none.
        optimizer: one of torch's own. With `ranks` each has one of its own leaves.
        max_norm: as for `step`; batches whose gradients are above it take longer, see above.
        scheduler: a learning rate scheduler of the optimizer, stepped after each batch.
        state: as for `run`; each batch gets that which the one before has left.
        feeds: of each batch, as for `run`.
        seed: batch k draws as a run with ``fold_in(seed, k)``.
        trainable, loss_scale, record, ranges, executor, threads_per_lane, check, timeout: as for
            `run`.

    Returns:
        The result of each batch. Their gradients are spent: ``grads`` is None, ``norm`` is what it
        was.

    Raises:
        PlanError, PlacementError, BatchError: something does not fit.
        StageError, NotFiniteError, RunTimeout, PeerError: as for `run`; a note says in which batch.
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
    except StageError as error:  # its cause has the user's frames, so frames of the run are dropped
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
            "no batch of these is stepped: parameters, optimizer and scheduler are as they were",
        )
        raise
    finally:
        work.close()
    return tuple(work.results)


class _Work:
    """Batches that are done, and those that are left."""

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
        """All of them: together, or what is first one by one."""
        together = self._together(partial(self._check, batches, feeds))
        if together or not self.left:
            return
        undo, rates = self._before = (
            Undo(self.options.optimizer),
            Rates(self.options.optimizer, self.scheduler),
        )
        undo.keep(held_by(self.options.optimizer))
        if together is not None:  # what is not known before the first run is known after it
            self._one(rates)
            self._together()
        while self.left:
            self._one(rates)
        if self.lanes is not None:  # one whose last step fails tells it to those that are done
            with self.lanes.running(self.options):
                self.lanes.part(self.plan).exchange("all batches", None)

    def restore(self) -> None:
        """After an error: let all be as it was."""
        for each in self._before or ():
            each.restore()
        if self.lanes is not None:  # others may have begun another one
            self.lanes.runs = self._runs + 1

    def close(self) -> None:
        """Nothing will be restored any more."""
        if self._before is not None:
            self._before[0].close()

    def _check(self, batches: Iterable[Any], feeds: Sequence[Mapping[str, Tree]] | None) -> None:
        """Raise PlanError for what cannot be run so; else note what is asked for."""
        options = self.options
        _refuse_unstepped(self.plan, options)
        if self.scheduler is not None:
            refuse_scheduler(options.optimizer, self.scheduler)
        given = _listed("batches is a list of what run takes as batch", batches)
        told = f"feeds has a dict for each of {len(given)} batches"
        fed = [None] * len(given) if feeds is None else _listed(told, feeds)
        if len(fed) != len(given):
            raise PlanError(f"{told}; got {len(fed)}")
        seed = checked_seed(options.seed)
        seeds = [None if seed is None else fold_in(seed, number) for number in range(len(given))]
        every = [replace(options, feeds=own, seed=key) for own, key in zip(fed, seeds, strict=True)]
        self.left = [*zip(given, every, strict=True)]

    def _together(self, check: Callable[[], None] = lambda: None) -> bool | None:
        """Do all that are left at once. False: they cannot be done so; None: they were, and it is
        undone."""
        if self.lanes is None:
            check()
            return False
        rates: Rates | None = None

        def begin() -> Batches:
            nonlocal rates
            check()
            rates = Rates(self.options.optimizer, self.scheduler)
            each = [(batch, self._with_state(options)) for batch, options in self.left]
            return Batches(
                self.plan, self.params, each, partial(rates.ahead, len(each)), len(self.results)
            )

        try:
            results = run_together(self.lanes, self.options, begin)
            if results is None and rates is not None:
                rates.restore()
        except BaseException:
            if rates is not None:
                rates.restore()
            raise
        if results:
            self.results += results
            self.left = []
        return None if results is None else bool(results)

    def _one(self, rates: Rates) -> None:
        """Do the first of those that are left."""
        batch, options = self.left.pop(0)
        try:
            result = self.executor.run(self.plan, self.params, batch, self._with_state(options))
        except BaseException as error:
            add_note(error, in_batch(len(self.results)))
            raise
        self.results.append(replace(result, grads=None))
        rates.step()

    def _with_state(self, options: RunOptions) -> RunOptions:
        """The options of the next batch: its state is that which the last one has left."""
        return replace(options, state=self.results[-1].state) if self.results else options


def _listed(told: str, values: Any) -> list[Any]:
    """The values as a list. Raises PlanError: they are none."""
    if isinstance(values, (Tensor, Mapping, str, bytes)) or not isinstance(values, Iterable):
        raise PlanError(f"{told}; got a {type(values).__name__}")
    return [*cast("Iterable[Any]", values)]


def _refuse_unstepped(plan: Plan, options: RunOptions) -> None:
    """Raise PlanError where nothing is stepped between batches, or not by what can be undone."""
    if not plan.schedule.steps:
        raise PlanError(
            f"schedule {plan.schedule.name!r} has no S, so nothing is stepped between its batches: "
            "fp.schedules.step_params(schedule) puts it in; to evaluate, call fp.run for each batch"
        )
    optimizer = options.optimizer
    check_options(optimizer, options.max_norm, None, optional=True)
    if optimizer is not None and not is_torchs(optimizer):
        raise PlanError(
            f"{type(optimizer).__name__} is none of torch's own optimizers, so nobody knows how "
            "to undo its steps where a batch fails; call fp.run(..., optimizer=optimizer) for "
            "one batch after the other"
        )
