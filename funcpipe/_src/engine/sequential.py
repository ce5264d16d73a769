"""`run_sequential`, the oracle of `run`: a plain loop over stages and microbatches.

It has no lanes, no slots and no program, so an error in these shows as a difference from `run`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from time import perf_counter
from typing import Any

from funcpipe._src.core.border import Border
from funcpipe._src.core.errors import StageError, Where, fail
from funcpipe._src.core.tree import Tree
from funcpipe._src.data.plan import Plan
from funcpipe._src.data.result import Carry, Result, RunStats
from funcpipe._src.data.schedule import Action, Kind, action_of
from funcpipe._src.data.stage import CARRY
from funcpipe._src.devices.stream import CopyEdge, Place
from funcpipe._src.engine.finish import finish, release
from funcpipe._src.engine.options import RunOptions
from funcpipe._src.engine.prepare import Prepared, prepare
from funcpipe._src.engine.switches import SwitchWatch
from funcpipe._src.lower.skips import routes
from funcpipe._src.stages.bound import Gradients, StageArgs
from funcpipe._src.stages.context import RUNNING, CallerContext, intra_op_threads, outside_of_graphs
from funcpipe._src.stages.drawing import CatchDraws
from funcpipe._src.stages.observed import ObserveFn
from funcpipe._src.stages.trainable import Trainable


def run_sequential(
    plan: Plan,
    params: Sequence[Tree],
    batch: Any,
    *,
    state: Sequence[Tree] | None = None,
    feeds: Mapping[str, Tree] | None = None,
    carry: Carry | None = None,
    seed: int | None = None,
    trainable: Trainable = None,
    loss_scale: float = 1.0,
    threads_per_lane: int | None = None,
    check: str | Sequence[str] = (),
    observe: ObserveFn | None = None,
) -> Result:
    """Run a plan as a plain loop over microbatches and stages, on the calling thread.

    Use `run_sequential` in tests: the results of `run` must be bit-identical. The loop sums the
    gradients of a stage in the order of the stage's backwards (B, I, W) in the schedule. Arguments,
    result and errors are as in `run`. A schedule with steps computes gradients only.

    >>> double = fp.stage(lambda w, x: x * w)
    >>> schedule = fp.schedules.one_f_one_b(2, 2)
    >>> plan = fp.make_plan([double, double], schedule, loss=nn.functional.mse_loss, devices="cpu")
    >>> weights, batch = (torch.tensor(2.0), torch.tensor(3.0)), (torch.ones(4), torch.zeros(4))
    >>> expected, result = fp.run_sequential(plan, weights, batch), fp.run(plan, weights, batch)
    >>> expected.loss == result.loss, expected.grads == result.grads
    (tensor(True), True)

    Args:
        plan, params, batch: as in `run`.
        state, feeds, carry, seed, trainable, loss_scale, threads_per_lane, check: as in `run`.

    Returns:
        A `Result`, without timeline.

    Raises:
        PlanError, PlacementError, BatchError, StageError, NotFiniteError: as in `run`.
    """
    options = RunOptions(
        state=state,
        feeds=feeds,
        carry=carry,
        seed=seed,
        trainable=trainable,
        loss_scale=loss_scale,
        threads_per_lane=threads_per_lane,
        check=check,
        observe=observe,
    )
    try:
        return outside_of_graphs(_run)(plan, params, batch, options)
    except StageError as error:  # the cause has the user's frames, so drop the frames of the run
        raise error.with_traceback(None) from error.__cause__


def _run(plan: Plan, params: Sequence[Tree], batch: Any, options: RunOptions) -> Result:
    ready = prepare("run_sequential", plan, params, batch, options)
    loop = Loop(ready)
    token = RUNNING.set(loop.where)
    began = perf_counter()
    try:
        with intra_op_threads(ready.threads), CallerContext().computing():
            ready.gather_all()
            with loop.switches, CatchDraws():
                loop.run()
            seconds = perf_counter() - began
            stats = RunStats(
                "sequential", "the oracle", ready.threads, ready.batch.num_microbatches, seconds
            )
            backward = ready.plan.schedule.has_backward
            values = loop.reports, loop.outputs
            result = finish(ready, *values, None, stats, backward=backward, carries=loop.carried)
            release(ready)
            return result
    finally:
        RUNNING.reset(token)


class Loop:
    """The plain loop and its values.

    Pieces are microbatches, or the slices of all microbatches.
    """

    def __init__(self, ready: Prepared) -> None:
        self.ready, self.plan, self.routes = ready, ready.plan, routes(ready.plan.stages)
        self.reports: dict[tuple[int, int], Any] = {}
        self.outputs: dict[tuple[int, int], Any] = {}
        self.residuals: dict[tuple[int, int], Any] = {}
        self.grads: dict[tuple[int, int], Gradients] = {}
        self.skip_grads: dict[tuple[str, int, int], Gradients] = {}
        self.carries: dict[int, Border] = {}  # by stage, the carry from the slice that ran last
        self.carried: dict[tuple[int, int], Border] = {}
        """By (stage, piece), the carry from each piece."""
        self.carry_grads: dict[tuple[int, int], Gradients] = {}
        """By (stage, piece), the gradients of the carry that the piece received."""
        self.at = (0, 0, "F")
        self.switches = SwitchWatch(alone=True)

    def run(self) -> None:
        """Run each piece forward, then all backwards that are next in their stage's order and have
        their values."""
        schedule = self.plan.schedule.first(self.ready.batch.num_microbatches)
        backwards = [deque(schedule.backward_order(stage)) for stage in range(self.plan.num_stages)]
        try:
            for piece in range(self.ready.batch.num_pieces):
                for _ in self.forward(piece, keep=schedule.has_backward):
                    self.switches.check()
                # Last stage first, because a backward needs the gradient from the next stage.
                for stage, waiting in reversed([*enumerate(backwards)]):
                    while waiting and self._may(waiting[0], stage):
                        self._backward(waiting.popleft())
                        self.switches.check()
        except BaseException as error:
            fail(error, self.where())

    def _may(self, action: Action, stage: int) -> bool:
        """Return whether the values that a backward reads exist.

        If the backward of the next stage has run, the backwards of all later stages have run, too.
        """
        piece = self.piece_of(action)
        if action.kind is Kind.W:
            return True  # the order has its I before it
        return (stage, piece) in self.residuals and (
            stage == self.plan.num_stages - 1 or (stage, piece) in self.grads
        )

    def where(self) -> Where:
        """Return the coordinates of the present action, for errors."""
        stage, piece, letter = self.at
        action = action_of(Kind(letter), stage, piece, self.slices)
        return self.ready.at(stage, action.microbatch, str(action))

    @property
    def slices(self) -> int:
        """The number of slices of a microbatch."""
        return self.plan.schedule.num_slices

    def piece_of(self, action: Action) -> int:
        """Return the number of an action's piece."""
        return action.microbatch * self.slices + (action.slice or 0)

    def _moved(self, value: Border, stage: int) -> Border:
        """Return the value on the stage's device."""
        place = Place(self.ready.where[self.plan.schedule.device_of[stage]], alone=True)
        if not place.asynchronous and all(
            getattr(leaf, "device", place.device).type == "cpu" for leaf in value.leaves
        ):
            return value
        ticket = CopyEdge(None, place).send(value)
        place.wait(ticket[1])
        return ticket[0]

    def forward(self, piece: int, *, keep: bool) -> Iterator[int]:
        """Run a piece through all stages; yield each stage's number after it has run."""
        plan, batch = self.plan, self.ready.batch
        x = batch.inputs[piece]
        skips: dict[str, Border] = {}
        for stage, definition in enumerate(plan.stages):
            self.at = (stage, piece, "F")
            last = stage == plan.num_stages - 1
            carried = [batch.carry[stage][piece]] if stage in batch.carry else []
            if definition.carry and piece % self.slices:
                carried = [self.carries[stage]]
            args = StageArgs(
                self._moved(x, stage),
                [*(self._moved(skips[name], stage) for name in definition.pop), *carried],
                [self._moved(batch.feeds[name][piece], stage) for name in definition.feeds],
                self._moved(batch.target[piece], stage)
                if last and batch.target is not None
                else None,
                piece,
            )
            out = self.ready.bounds[stage].forward(args, keep=keep)
            self.reports[stage, piece] = out.report
            if out.residual is not None:
                self.residuals[stage, piece] = out.residual
            if definition.carry:
                self.carries[stage] = out.stash[CARRY]
                if plan.carry:
                    self.carried[stage, piece] = out.stash[CARRY]
            skips.update({name: value for name, value in out.stash.items() if name in self.routes})
            x = out.y
            if plan.outputs and last:
                self.outputs[stage, piece] = x
            yield stage

    def _backward(self, action: Action) -> None:
        """Run a B, an I or a W."""
        kind, stage, piece = action.kind, action.stage, self.piece_of(action)
        self.at = (stage, piece, kind.value)
        definition, bound = self.plan.stages[stage], self.ready.bounds[stage]
        if kind is Kind.W:
            bound.backward_weight(self.residuals.pop((stage, piece)))
            return
        y = self.grads.pop((stage, piece), None)
        # Later poppers first, as in the effects table: another order of addition would round
        # differently, and the oracle would not be bit-identical to `run`.
        stash = {
            name: [
                self._to(self.skip_grads.pop((name, popper, piece)), stage)
                for popper in sorted(self.routes[name].pops, reverse=True)
            ]
            for name in (*definition.stash, *definition.offers)
            if name in self.routes
        }
        if definition.carry and (piece + 1) % self.slices:
            stash[CARRY] = [self.carry_grads.pop((stage, piece + 1))]
        y_grads = None if y is None else self._to(y, stage)
        residual = self.residuals.pop((stage, piece))
        if kind is Kind.I:
            cotangents, self.residuals[stage, piece] = bound.backward(
                residual, y_grads, stash, split=True
            )
        else:
            cotangents, _ = bound.backward(residual, y_grads, stash)
        if stage:
            self.grads[stage - 1, piece] = cotangents.x
        names = (
            (*definition.pop, CARRY) if definition.carry and piece % self.slices else definition.pop
        )
        for name, gradient in zip(names, cotangents.skips, strict=True):
            if name == CARRY:
                self.carry_grads[stage, piece] = gradient
            else:
                self.skip_grads[name, stage, piece] = gradient

    def _to(self, gradients: Gradients, stage: int) -> Gradients:
        return self._moved(Border(list(gradients), None, ()), stage).leaves  # pyright: ignore[reportArgumentType]
