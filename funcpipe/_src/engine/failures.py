"""Notes and order of the errors of failing lanes."""

from __future__ import annotations

from typing import NoReturn

import torch

from funcpipe._src.core.errors import Where
from funcpipe._src.core.tree import Tree
from funcpipe._src.data.lowered import Lowered
from funcpipe._src.data.plan import Plan
from funcpipe._src.data.program import Role
from funcpipe._src.data.schedule import Schedule
from funcpipe._src.engine.lane import Lane
from funcpipe._src.schedules.memory import residual_peak


def add_note(error: BaseException, note: str) -> None:
    """Add a note to an error, also to an error whose class hides `add_note`."""
    error.__dict__.setdefault("__notes__", []).append(note)


def in_batch(number: int) -> str:
    """Return the note that names the failing one of several batches."""
    return f"in batch {number} of these (the first is 0)"


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether the error says that memory is exhausted."""
    words = ("can't allocate memory", "out of memory")
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or (
        isinstance(error, RuntimeError) and any(word in str(error) for word in words)
    )


def position_of(lane: Lane, program: Lowered) -> int:
    """Return a lane's position in the plan order, -1 before its first action."""
    left = lane.begun
    for position, number in enumerate(program.lane_order):
        left -= number == lane.program.lane
        if left == 0:
            return position
    return -1


def too_much(lane: Lane, schedule: Schedule) -> str:
    """Return a note for an out-of-memory error: the residuals of a lane, and remedies."""
    kinds = zip(lane.program.slots, lane.slots, strict=True)
    roles = Role.RESIDUAL, Role.WEIGHT_RESIDUAL
    held = [
        getattr(value, "nbytes", 0)
        for kind, value in kinds
        if kind.role in roles and value is not None
    ]
    number = lane.program.lane
    peak = residual_peak(schedule.orders[number], schedule) * schedule.num_slices
    return (
        f"device {number} holds {len(held)} residuals (the schedule's most is {peak:g}) with "
        f"{sum(held) / 2**20:.1f} MiB at their borders{_free(lane.place.device)}; to use less "
        "memory: more microbatches of fewer rows, fp.schedules.remat(schedule), "
        "fp.schedules.offload(schedule), or a schedule that holds fewer residuals "
        "(fp.schedules.one_f_one_b)"
    )


def whole_pair(plan: Plan, where: Where, x: Tree) -> str:
    """Return a note for an error of the first stage that got a pair, in a plan without a loss; ""
    otherwise. The pair may be right, so it is no error by itself."""
    if plan.loss is not None or where.stage != 0 or type(x) is not tuple or len(x) != 2:
        return ""
    return (
        "the plan has no loss, so the first stage got the whole batch, a pair; give the inputs "
        "alone, or a plan with a loss: fp.make_plan(..., loss=loss), with loss=split.loss for the "
        "model's own"
    )


def _free(device: torch.device) -> str:
    if device.type != "cuda":
        return ""
    free, total = torch.cuda.mem_get_info(device)
    return f", {free / 2**30:.1f} of {total / 2**30:.1f} GiB are free"


def raise_located(failures: list[tuple[tuple[int, int], BaseException]]) -> NoReturn:
    """Raise the earliest failure: first batch, then plan order. The others become notes."""
    failures.sort(key=lambda failure: failure[0])
    first = failures[0][1]
    for _, other in failures[1:]:
        add_note(
            first,
            f"also failed: {type(other).__name__}: {other} ({getattr(other, 'funcpipe', '')})",
        )
    failures.clear()
    try:
        raise first
    finally:
        del first  # the traceback's frames must not point back at the exception
