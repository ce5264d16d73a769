"""`RankSchedule`: a plan on ranks with the methods of torch.distributed.pipelining's schedules."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from funcpipe._src.batch.marks import Microbatches, Replicate
from funcpipe._src.core.errors import BatchError, DrawError, FuncpipeError, PlanError, raise_all
from funcpipe._src.core.sparse_gradients import add_gradient
from funcpipe._src.core.tree import Tree, leaves
from funcpipe._src.data.losses import ALIKE, Weighing
from funcpipe._src.data.plan import Plan
from funcpipe._src.data.result import Result
from funcpipe._src.data.stage import Stage
from funcpipe._src.engine.execute import LaneExecutor
from funcpipe._src.engine.failures import add_note
from funcpipe._src.engine.options import RunOptions
from funcpipe._src.engine.run import run
from funcpipe._src.lower.plan import make_plan
from funcpipe._src.optimizing.leaf_gradients import of_result
from funcpipe._src.stages.rng import fold_in


class RankSchedule:
    """An object with the methods of torch's pipeline schedules. `Ranks.schedule` makes it.

    Use it in training loops that are written for torch.distributed.pipelining. `step` adds
    gradients to ``.grad``, and keeps the state and the seed for the next step.

    Gradients are as in torch's schedules: the gradient of the sum of the microbatches' losses,
    divided by the number of microbatches. With ``scale_grads=False`` nothing is divided. Use that
    for a loss that returns a sum. A loss that returns ``(sum, weight)``, a loss with a method
    ``weigh``, and a plan with ``weight=`` define weights of microbatches. Then gradients are
    divided by the total weight. Sum, number and weight are over the microbatches of all replicas.

    Attributes:
        plan: the plan that was given to `ranks`.
        params: a tuple with one tree per stage, None for stages of other ranks.
        state: the state for the next step, in the same form.
        seed: the seed of all steps, or None. Step k draws with ``fold_in(seed, k)``.
        steps: the number of steps made.
        scale_grads: whether gradients are divided by the number of microbatches.
        result: the `Result` of the last step or evaluation, with the ``losses`` of all replicas.
            None before the first.
    """

    def __init__(
        self,
        plan: Plan,
        executor: LaneExecutor,
        params: Sequence[Tree],
        state: Sequence[Tree] | None,
        seed: int | None,
        *,
        scale_grads: bool = True,
    ) -> None:
        if plan.loss is None or not plan.schedule.has_backward:
            raise PlanError(
                "ranks.schedule needs a plan with a loss and backwards: make_plan(stages, "
                "schedule, loss=...); for forwards alone call fp.run"
            )
        if plan.schedule.num_slices > 1:
            raise PlanError(
                "torch's schedules do not cut sequences into slices, so ranks.schedule cannot "
                "weight the losses of slices; run the plan: fp.run(plan, params, batch, "
                "executor=ranks)"
            )
        self.plan, self.params, self.state, self.seed = plan, params, state, seed
        self.scale_grads, self.steps = scale_grads, 0
        self.result: Result | None = None
        self._executor = executor
        self._plans: dict[tuple[bool, ...], Plan] = {}

    # -- the attributes of torch's schedules that trainers read

    @property
    def n_microbatches(self) -> int:
        """The number of microbatches."""
        return self.plan.num_microbatches

    @property
    def num_stages(self) -> int:
        """The number of stages of all ranks."""
        return self.plan.num_stages

    @property
    def stages(self) -> tuple[Stage, ...]:
        """The stages of this rank, in order."""
        return tuple(
            [
                stage
                for stage, tree in zip(self.plan.stages, self.params, strict=True)
                if tree is not None
            ]
        )

    @property
    def loss_fn(self) -> Any:
        """The loss of the plan."""
        return self.plan.loss

    # torch has no public names for these, so trainers read the private ones.
    _n_microbatches, _num_stages, _stages, _loss_fn = n_microbatches, num_stages, stages, loss_fn
    _has_backward = True

    # -- steps

    def step(
        self,
        *args: Any,
        target: Any = None,
        losses: list[Tensor] | None = None,
        return_outputs: bool = True,
        loss_kwargs: Mapping[str, Any] | None = None,
        arg_mbs: Sequence[Any] | None = None,
        kwarg_mbs: Sequence[Mapping[str, Any]] | None = None,
        target_mbs: Sequence[Any] | None = None,
        **feeds: Any,
    ) -> Any:
        """Run forwards and backwards, and add the gradients to ``.grad`` of the trained leaves.

        Give a whole batch (``args``, ``target``, ``feeds``), or the microbatches that you cut
        yourself (``arg_mbs``, ``kwarg_mbs``, ``target_mbs``).

        Args:
            args: the inputs ``[B, ...]``, on the rank of stage 0. Several inputs are passed as a
                tuple.
            target: the target ``[B, ...]``, on the rank of the last stage.
            losses: a list. Its contents are replaced by the losses of this replica's microbatches.
            return_outputs: whether to return the outputs of the last stage. The same on all ranks.
                False saves the memory of the outputs.
            loss_kwargs: further keyword arguments of the loss, on the rank of the last stage, such
                as the number of tokens of all replicas. They are the same for each microbatch.
            arg_mbs: the inputs of each microbatch, on the rank of stage 0: a list of tuples of
                arguments.
            kwarg_mbs: the feeds of each microbatch: a list of dicts with the same keys.
            target_mbs: the targets of each microbatch, on the rank of the last stage.
            feeds: the feeds ``[B, ...]`` of the whole batch, by name.

        Returns:
            The outputs of the last stage, on its rank; else None.

        Raises:
            BatchError: a whole batch and microbatches are given, or the lists differ in length.
            FuncpipeError: gradients are disabled.
            PeerError: another rank failed, also in its arguments.
        """
        with self._telling():
            if not torch.is_grad_enabled():
                raise FuncpipeError(
                    "schedule.step computes gradients, but is called under torch.no_grad(); call "
                    "schedule.eval there"
                )
            plan = self._plan_of(outputs=return_outputs, keywords=loss_kwargs is not None)
            batch = _batch(self.plan, args, target, feeds, arg_mbs, kwarg_mbs, target_mbs)
            given = _given(plan, batch, loss_kwargs)
            seed = None if self.seed is None else fold_in(self.seed, self.steps)
        result = self._run(plan, given, batch[-1], seed)
        self.state, self.steps = result.state, self.steps + 1
        factor = 1.0 if self.scale_grads or result.weight is None else result.weight
        with torch.no_grad():
            for entry in of_result(self.params, result):
                if not entry.reached:  # stays None, so that the optimizer does not step the leaf
                    continue
                leaf = entry.leaf
                gradient = entry.gradient if factor == 1.0 else entry.gradient * factor
                leaf.grad = gradient if leaf.grad is None else add_gradient(leaf.grad, gradient)
        _put_own(result, losses)
        return result.outputs

    def eval(
        self,
        *args: Any,
        target: Any = None,
        losses: list[Tensor] | None = None,
        return_outputs: bool = True,
        loss_kwargs: Mapping[str, Any] | None = None,
        arg_mbs: Sequence[Any] | None = None,
        kwarg_mbs: Sequence[Mapping[str, Any]] | None = None,
        target_mbs: Sequence[Any] | None = None,
        compute_loss: bool = True,
        **feeds: Any,
    ) -> Any:
        """Run the forwards, and return the outputs of the last stage on its rank, else None.

        Computes no gradients and changes no state. Arguments are as in `step`. Without targets,
        pass ``compute_loss=False`` on all ranks; then ``losses`` becomes empty.
        """
        keywords = loss_kwargs if compute_loss else None
        with self._telling():
            plan = self._plan_of(
                backward=False,
                loss=compute_loss,
                outputs=return_outputs,
                keywords=keywords is not None,
            )
            batch = _batch(self.plan, args, target, feeds, arg_mbs, kwarg_mbs, target_mbs)
            given = _given(plan, batch, keywords)
        result = self._run(plan, given, batch[-1], None)
        _put_own(result, losses)
        return result.outputs

    def _plan_of(
        self,
        *,
        backward: bool = True,
        loss: bool = True,
        outputs: bool = True,
        keywords: bool = False,
    ) -> Plan:
        """Return the plan of a step or an evaluation, which is made once."""
        key = backward, loss, outputs, keywords
        if key not in self._plans:
            plan = self.plan
            made = make_plan(
                plan.stages,
                plan.schedule if backward else plan.schedule.forwards(),
                devices=plan.devices,
                loss=plan.loss if loss else None,
                weight=plan.weight if loss else None,
                ties=plan.ties if backward else (),
                train=plan.train and backward,
                outputs=outputs,
                merge=plan.merge,
                spare_slots=plan.spare_slots,
            )
            made = replace(made, state=plan.state)
            if loss and plan.weight is None and not isinstance(plan.loss, Weighing):
                made = replace(made, counts=ALIKE)  # torch weights all microbatches alike
            self._plans[key] = _with_keywords(made) if keywords else made
        return self._plans[key]

    @contextmanager
    def _telling(self) -> Generator[None]:
        """Return a context for the work before a run, which sends errors inside to the other ranks.

        An error counts as this run. Otherwise a loop that goes on after the error would give its
        next batch to the present run of the other ranks.
        """
        try:
            yield
        except Exception:
            with self._executor.running(RunOptions()):
                raise

    def _run(self, plan: Plan, given: Any, feeds: dict[str, Any], seed: int | None) -> Result:
        options: dict[str, Any] = {
            "state": self.state,
            "feeds": feeds or None,
            "seed": seed,
            "executor": self._executor,
        }
        try:
            self.result = run(plan, self.params, given, **options)
        except (DrawError, PlanError) as error:
            for words, name in (("no seed was given", "seed"), ("state= is missing", "state")):
                if words in str(error):
                    add_note(error, f"give {name}= once, to ranks.schedule(params, {name}=...)")
            raise
        return self.result

    def zero_grad(self) -> None:
        """Set ``.grad`` of all leaves to None."""
        for leaf in leaves([tree for tree in self.params if tree is not None]):
            leaf.grad = None


def _batch(
    plan: Plan,
    args: tuple[Any, ...],
    target: Any,
    feeds: dict[str, Any],
    arg_mbs: Sequence[Any] | None,
    kwarg_mbs: Sequence[Mapping[str, Any]] | None,
    target_mbs: Sequence[Any] | None,
) -> tuple[Any, Any, dict[str, Any]]:
    """Return inputs, target and feeds. Raises BatchError."""
    lists = {"arg_mbs": arg_mbs, "kwarg_mbs": kwarg_mbs, "target_mbs": target_mbs}
    faults = [
        f"{name} is a list with one entry per microbatch; got a {type(entries).__name__}"
        for name, entries in lists.items()
        if entries is not None and not isinstance(entries, (list, tuple))
    ]
    raise_all("no such microbatches:", faults, BatchError)
    whole = [
        *(["inputs"] if args else []),
        *(["target="] if target is not None else []),
        *[f"{name}=" for name in feeds],
    ]
    ready = {name: entries for name, entries in lists.items() if entries is not None}
    if whole and ready:
        raise BatchError(
            f"{', '.join(whole)} and {', '.join(ready)} are given; give a whole batch or "
            "microbatches, not both"
        )
    count = plan.num_microbatches
    faults = [
        f"{name} has {len(entries)} entries, but the plan has {count} microbatches"
        for name, entries in ready.items()
        if len(entries) != count
    ]
    names = sorted({name for entry in kwarg_mbs or () for name in entry})
    faults += [
        f"kwarg_mbs[{number}] has no {name!r}, which other entries have"
        for number, entry in enumerate(kwarg_mbs or ())
        for name in names
        if name not in entry
    ]
    raise_all("the microbatches do not fit the plan:", faults, BatchError)
    if not ready:
        return _arguments(args), target, feeds
    inputs = [_arguments(entry) for entry in arg_mbs or ()]
    return (
        Microbatches(inputs) if any(entry is not None for entry in inputs) else None,
        None if target_mbs is None else Microbatches(target_mbs),
        {name: Microbatches([entry[name] for entry in kwarg_mbs or ()]) for name in names},
    )


def _given(
    plan: Plan, batch: tuple[Any, Any, dict[str, Any]], keywords: Mapping[str, Any] | None
) -> Any:
    """Return the batch for `run`."""
    inputs, target, _ = batch
    if keywords is not None:
        target = _beside(target, Replicate(dict(keywords)))
    return inputs if plan.loss is None else (inputs, target)


def _arguments(args: Any) -> Any:
    """Return the positional arguments of a microbatch as one value; None for no arguments."""
    if not isinstance(args, (tuple, list)):
        return args
    return args[0] if len(args) == 1 else tuple(args) or None


# -- keyword arguments of the loss travel beside the target


def _beside(target: Any, keywords: Replicate) -> Any:
    """Put keyword arguments beside the target, or beside the target of each microbatch."""
    if isinstance(target, Microbatches):
        return Microbatches([(each, keywords.value) for each in target])
    return target, keywords


def _with_keywords(plan: Plan) -> Plan:
    """Return the plan for targets with keyword arguments beside them."""
    loss, weight, weigh = plan.loss, plan.weight, plan.counts.weigh
    assert loss is not None

    def with_keywords(y: Any, target: Any) -> Any:
        target, keywords = target
        return loss(y, target, **keywords)

    return replace(
        plan,
        loss=with_keywords,
        weight=None if weight is None else lambda target: weight(target[0]),
        counts=replace(
            plan.counts,
            loss=None,
            weigh=None if weigh is None else lambda inputs, target: weigh(inputs, target[0]),
        ),
    )


def _put_own(result: Result, losses: list[Tensor] | None) -> None:
    """Replace the contents of a list by the losses of this replica's microbatches."""
    if losses is not None:
        first = result.stats.first_microbatch
        losses[:] = result.losses[first : first + result.stats.num_microbatches]
