"""FaultAt: makes a stage fail on purpose at one action of a run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from funcpipe._src.core.errors import PlanError, raise_all
from funcpipe._src.core.tree import Tree, flatten, is_differentiable, leaves, unflatten
from funcpipe._src.data.schedule import Action, Kind
from funcpipe._src.data.stage import Out, Stage, normalise, side_loss
from funcpipe._src.stages.context import RUNNING
from funcpipe._src.testing.around import StageCall, hooked

Strike: TypeAlias = BaseException | type[BaseException] | Callable[[Tensor], Tensor | None]


class Fault(Exception):
    """What `FaultAt` raises unless it is told otherwise."""

    def __init__(self, message: str = "raised by funcpipe.testing.FaultAt") -> None:
        super().__init__(message)


@dataclass(frozen=True)
class FaultAt:
    """Make a stage fail at one action of a run: ``FaultAt(stage, microbatch, kind)(stages) ->
    stages``.

    The action is the run's own, so no feed has to carry a number, and every schedule, executor,
    remat and kind of stage works. Called outside of a run the stages do what they did before.
    Faults add up: each takes stages and gives stages.

    >>> import torch, funcpipe as fp
    >>> stages = funcpipe.testing.FaultAt(1, 0, "F")([fp.stage(lambda p, x: x), fp.stage(lambda p, x: x)])
    >>> plan = fp.make_plan(stages, fp.schedules.fill_drain(2, 2, backward=False), devices="cpu")
    >>> try:
    ...     fp.run(plan, ((), ()), torch.ones(2, 1))
    ... except funcpipe.testing.Fault as error:
    ...     print(error.funcpipe)
    in 1F0 of stage 1 at microbatch 0 on device 1 (cpu)

    Args:
        stage: index of the stage in what it is called on.
        microbatch: index of the microbatch.
        kind: F; R (the forward that remat repeats; a plan without remat has none); B (the backward,
            also where the schedule splits it and it is I); I (only where it is split). The backward
            of an eager stage whose input needs no gradient is all in W, and so are these then. A
            `Kind` or its letter.
        error: what ``raise`` takes, raised once the forward is done, or where the gradients of the
            outputs arrive. An instance is raised itself, and its traceback then keeps the run's
            frames as long as the plan has it; a type does not. Or a function: it gets every
            floating tensor that the forward hands out, or every gradient that the backward begins
            with, and gives another or None for the same: ``lambda t: t * float("nan")``, ``lambda
            t: time.sleep(60)``.

    Raises:
        PlanError: no such stage or kind. W is refused: it goes on with what I has left of a
            backward.
    """

    stage: int
    microbatch: int
    kind: Kind | str
    _: KW_ONLY
    error: Strike = Fault

    def __post_init__(self) -> None:
        faults = [
            f"{name} is an index from 0; got {value!r}"
            for name, value in (("stage", self.stage), ("microbatch", self.microbatch))
            if not isinstance(value, int) or value < 0
        ]
        try:
            object.__setattr__(self, "kind", Kind(self.kind))
        except ValueError:
            faults.append(f"kind is F, B, I or R; got {self.kind!r}")
        if self.kind is Kind.W:
            faults.append(
                "kind is W, which goes on with what I has left: the gradients of the outputs, "
                "where faults of a backward strike, have arrived; use 'I'"
            )
        if not isinstance(self.error, BaseException) and not callable(self.error):
            faults.append(
                f"error is an exception, its type, or a function of a tensor; got {self.error!r}"
            )
        raise_all("no such fault:", faults)

    def __call__(self, stages: Sequence[Stage]) -> tuple[Stage, ...]:
        """The stages, one of them with the fault in it."""
        sequence = (stages,) if isinstance(stages, Stage) else stages
        if not isinstance(sequence, (tuple, list)):
            raise PlanError(
                "FaultAt(...) takes stages and gives stages, before the plan is made; got a "
                f"{type(sequence).__name__}"
            )
        if self.stage >= len(sequence):
            raise PlanError(
                f"FaultAt(stage={self.stage}) was given {len(sequence)} stages; the last is stage "
                f"{len(sequence) - 1}"
            )
        failing = hooked(sequence[self.stage], self._around)
        return (*sequence[: self.stage], failing, *sequence[self.stage + 1 :])

    def _around(self, call: StageCall, params: Tree, x: Tree, extras: dict[str, Any]) -> Any:
        out = call(params, x, extras)
        action = running()
        if action is None or action.microbatch != self.microbatch:
            return out
        if self.kind in (Kind.B, Kind.I):
            if torch.is_grad_enabled() and not any(
                leaf.requires_grad for leaf in leaves(tuple(normalise(out)))
            ):
                raise PlanError(
                    f"{self} can never strike: nothing that the stage returns requires a "
                    "gradient, so its backward is empty; make its parameters trainable "
                    "(trainable=True)"
                )
            return _over(
                out,
                lambda leaf: leaf.requires_grad,
                lambda tensors: _FailingBackward.apply(self, *tensors),
            )
        return _over(out, is_differentiable, self._strike) if action.kind is self.kind else out

    def _strike(self, tensors: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        """Raise the error, or change the tensors."""
        if isinstance(self.error, BaseException):
            raise self.error.with_traceback(None)  # else it would grow with every run
        if isinstance(self.error, type) and issubclass(self.error, BaseException):
            raise self.error
        new: list[Tensor | None] = []
        for tensor in tensors:
            changed = None if tensor is None else self.error(tensor)
            new.append(tensor if changed is None else changed)
        return new


class _FailingBackward(torch.autograd.Function):
    """The identity on the outputs of a stage; the fault strikes when their gradients are there.

    One node for all of them: with one for each, or hooks, a backward that raises keeps tensors of
    its run.
    """

    @staticmethod
    def forward(ctx: Any, fault: FaultAt, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.fault = fault
        ctx.set_materialize_grads(False)
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        fault: FaultAt = ctx.fault
        action = running()
        if fault.kind is Kind.I and (action is None or action.kind not in (Kind.I, Kind.W)):
            return (None, *gradients)
        return (None, *fault._strike(gradients))


def _over(
    out: Any, selects: Callable[[Any], bool], change: Callable[[Sequence[Tensor]], Sequence[Any]]
) -> Any:
    """What a stage returned with the selected tensors changed in one call; one that stands twice
    stays one."""
    result = normalise(out)
    loss = side_loss(result)
    loss_sum = None if loss is None else loss[0]
    values, spec = flatten((result.y, dict(result.stash), loss_sum))
    tensors = {id(leaf): leaf for leaf in values if isinstance(leaf, Tensor) and selects(leaf)}
    new = dict(zip(tensors, change(tuple(tensors.values())), strict=True))
    y, stash, loss_sum = unflatten(spec, [new.get(id(leaf), leaf) for leaf in values])
    if not isinstance(out, Out):
        return y
    return Out(y, stash, result.stats, () if loss is None else (loss_sum, loss[1]), result.carry)


def running() -> Action | None:
    """The action that a run performs on this thread; None outside of a run."""
    position = RUNNING.get()
    return None if position is None else Action.parse(position().action.split()[0])
