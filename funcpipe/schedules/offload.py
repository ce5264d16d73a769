"""Offload as a pass: Schedule -> Schedule, an ``O`` after a forward and an ``L`` in time for its backward."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Container, Mapping, Sequence

from funcpipe.core.errors import ScheduleError, bullets
from funcpipe.core.schedule import Action, Kind, Schedule

_MOST_FAULTS = 20


def always(action: Action) -> bool:
    """Move every residual."""
    return True


def offload(schedule: Schedule, *, move: Callable[[Action], bool] = always, ahead: int = 1) -> Schedule:
    """Let residuals wait in host memory: insert ``O`` straight after a forward, ``L`` in time for its backward.

    Between the two the residual occupies no memory of the device, which goes on meanwhile. Where the backward follows
    so soon that ``L`` would stand next to ``O``, nothing is gained and the residual stays. PipeOffload (arXiv
    2503.01328) moves those that wait for longest: ``move`` picks them, such as the first chunks of `interleaved`.

    >>> from funcpipe.schedules.families import one_f_one_b
    >>> print(offload(one_f_one_b(3, 3)))
    0F0 0O0 0F1 0O1 0L0 0F2 0O2 0L1 0B0 0L2 0B1 0B2
    1F0 1F1 1O1 1B0 1L1 1F2 1B1 1B2
    2F0 2B0 2F1 2B1 2F2 2B2

    Args:
        schedule: a schedule with backwards.
        move: given the forward of a (stage, microbatch), should its residual be moved.
        ahead: how many computing actions (F, B, I, W, R) of the device run between ``L`` and the backward; while they
            do, the residual is on its way back. 0: the device waits for it.

    Raises:
        ScheduleError: this is no schedule, it has no backwards, it has ``O`` already, or a residual that is picked is
            computed again by ``R``.
    """
    _refuse(schedule, move, ahead)
    orders = tuple(_moved(order, move, ahead) for order in schedule.orders)
    faults = [
        f"{stage}F{microbatch}, but its residual is computed again by {stage}R{microbatch}"
        for order in orders
        for stage, microbatch in sorted(_of(order, Kind.O) & _of(order, Kind.R))
    ]
    if faults:
        more = len(faults) - _MOST_FAULTS
        faults = faults[:_MOST_FAULTS] + ([f"and {more} more"] if more > 0 else [])
        raise ScheduleError(
            bullets(
                f"a residual of {schedule.name!r} is computed again or moved, not both; let move= leave these out. It "
                "picked",
                faults,
            )
        )
    return Schedule(orders, f"{schedule.name}+offload")


def _refuse(schedule: Schedule, move: Callable[[Action], bool], ahead: int) -> None:
    if not isinstance(schedule, Schedule):
        raise ScheduleError(
            f"offload takes a schedule; got a {type(schedule).__name__} (of a plan: fp.offload(plan.schedule))"
        )
    if not callable(move):
        raise ScheduleError(
            f"move is a function (action) -> bool; got {move!r}; e.g. move=lambda action: action.stage == 1"
        )
    if type(ahead) is not int or ahead < 0:
        raise ScheduleError(
            f"ahead is how many computing actions stand between L and the backward, from 0; got {ahead!r}"
        )
    if not schedule.has_backward:
        raise ScheduleError(f"schedule {schedule.name!r} has no backwards, so no residual waits for one")
    if any(action.kind in (Kind.O, Kind.L) for order in schedule.orders for action in order):
        raise ScheduleError(f"schedule {schedule.name!r} has O or L already; apply offload once, with move=")


def _of(order: tuple[Action, ...], kind: Kind) -> set[tuple[int, int]]:
    return {(action.stage, action.microbatch) for action in order if action.kind is kind}


def _moved(order: tuple[Action, ...], move: Callable[[Action], bool], ahead: int) -> tuple[Action, ...]:
    """The order of one device with its O and L."""
    forwards = {(stage, m): at for at, (kind, stage, m) in enumerate(order) if kind is Kind.F}
    away: set[int] = set()
    loads: dict[int, list[Action]] = defaultdict(list)  # what to bring back before each position
    for at, (kind, stage, m) in enumerate(order):
        made = forwards.get((stage, m))
        if kind not in (Kind.B, Kind.I) or made is None or at - ahead <= made + 1 or not move(order[made]):
            continue
        away.add(made)
        loads[at - ahead].append(Action(Kind.L, stage, m))
    return with_moves(order, away, loads)


def with_moves(
    order: Sequence[Action], away: Container[int], loads: Mapping[int, Sequence[Action]]
) -> tuple[Action, ...]:
    """An order with an O after each forward at a position in ``away``, and the L of ``loads`` before their positions."""
    out: list[Action] = []
    for at, action in enumerate(order):
        out += loads.get(at, [])
        out.append(action)
        if at in away:
            out.append(Action(Kind.O, action.stage, action.microbatch))
    return tuple(out)
