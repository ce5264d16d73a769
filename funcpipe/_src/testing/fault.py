"""Make a stage fail on purpose at one action of a run: `FaultAt`."""

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
    """The error that `FaultAt` raises by default."""

    def __init__(self, message: str = "raised by funcpipe.testing.FaultAt") -> None:
        super().__init__(message)


@dataclass(frozen=True)
class FaultAt:
    """Make a stage fail at one action of a run.

    Call it with stages: ``FaultAt(stage, microbatch, kind)(stages) -> stages``. FaultAt works with
    all schedules, executors and kinds of stages, and needs no feed, because it reads the action
    from the run. Outside of a run, the stages behave as before. You can apply several faults: each
    call takes stages and returns stages.

    >>> import torch, funcpipe as fp
    >>> stages = funcpipe.testing.FaultAt(1, 0, "F")([fp.stage(lambda p, x: x), fp.stage(lambda p, x: x)])
    >>> plan = fp.make_plan(stages, fp.schedules.fill_drain(2, 2, backward=False), devices="cpu")
    >>> try:
    ...     fp.run(plan, ((), ()), torch.ones(2, 1))
    ... except funcpipe.testing.Fault as error:
    ...     print(error.funcpipe)
    in 1F0 of stage 1 at microbatch 0 on device 1 (cpu)

    Args:
        stage: the index of the failing stage in the given stages.
        microbatch: the index of the microbatch.
        kind: the action that fails, as a `Kind` or its letter. F: the forward. R: the forward that
            remat repeats; a plan without remat has none. B: the backward; in a split backward, I.
            I: only in a split backward. If the input of an eager stage needs no gradient, the whole
            backward is in W, and B and I fail there.
        error: the failure. An exception or its type is raised after the forward, or when the
            gradients of the outputs arrive. An instance keeps the run's frames in its traceback as
            long as the plan has it; a type does not. A function is called with each floating tensor
            that the forward returns, or with each gradient at the start of the backward. It returns
            a new tensor, or None for the same tensor: ``lambda t: t * float("nan")``, ``lambda t:
            time.sleep(60)``. Default: `Fault`.

    Raises:
        PlanError: the stage or the kind does not exist. W is not possible, because it continues
            from the state that I leaves.
    """

    stage: int
    microbatch: int
    kind: Kind | str
    _: KW_ONLY
    error: Strike = Fault

    def __post_init__(self) -> None:
        faults = [
            f"{name} must be an index from 0; got {value!r}"
            for name, value in (("stage", self.stage), ("microbatch", self.microbatch))
            if not isinstance(value, int) or value < 0
        ]
        try:
            object.__setattr__(self, "kind", Kind(self.kind))
        except ValueError:
            faults.append(f"kind is F, B, I or R; got {self.kind!r}")
        if self.kind is Kind.W:
            faults.append(
                "kind is W, but W starts after the gradients of the outputs have arrived, which is "
                "when a fault in a backward is raised; use 'I'"
            )
        if not isinstance(self.error, BaseException) and not callable(self.error):
            faults.append(
                f"error is an exception, its type, or a function of a tensor; got {self.error!r}"
            )
        raise_all("no such fault:", faults)

    def __call__(self, stages: Sequence[Stage]) -> tuple[Stage, ...]:
        """Return the stages, with the fault in one of them.

        Args:
            stages: a stage, or a tuple or list of stages.

        Raises:
            PlanError: the argument is not stages, or has too few.
        """
        sequence = (stages,) if isinstance(stages, Stage) else stages
        if not isinstance(sequence, (tuple, list)):
            raise PlanError(
                "FaultAt(...) takes stages and gives stages, before the plan is made; got a "
                f"{type(sequence).__name__}"
            )
        if self.stage >= len(sequence):
            raise PlanError(
                f"FaultAt(stage={self.stage}) got {len(sequence)} stages, so the last stage is "
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
            # Without a gradient the backward never runs, and a test would pass without its fault.
            if torch.is_grad_enabled() and not any(
                leaf.requires_grad for leaf in leaves(tuple(normalise(out)))
            ):
                raise PlanError(
                    f"{self} can never fail: no tensor that the stage returns requires a gradient, "
                    "so its backward is empty; make its parameters trainable (trainable=True)"
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
            raise self.error.with_traceback(None)  # else the traceback would grow with each run
        if isinstance(self.error, type) and issubclass(self.error, BaseException):
            raise self.error
        new: list[Tensor | None] = []
        for tensor in tensors:
            changed = None if tensor is None else self.error(tensor)
            new.append(tensor if changed is None else changed)
        return new


class _FailingBackward(torch.autograd.Function):
    """The identity on the outputs of a stage, which fails when their gradients arrive.

    One node serves all outputs. With a node or a hook for each output, a backward that raises would
    keep tensors of its run.
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
    """Change the selected tensors of a stage's result in one call, each once."""
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
    """The action that a run performs on this thread. None: no run."""
    position = RUNNING.get()
    return None if position is None else Action.parse(position().action.split()[0])
