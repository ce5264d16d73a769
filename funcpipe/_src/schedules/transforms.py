"""Transform schedules: insert R, O and L, G, U or S, split backwards into I and W, pair actions.

The rules for pairs are in `pairs`.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

from funcpipe._src.core.errors import ScheduleError, raise_all
from funcpipe._src.data.kinds import ADDS, COMPUTES, ONCE
from funcpipe._src.data.schedule import Action, Kind, Schedule
from funcpipe._src.schedules.legal import MOST_FAULTS, check
from funcpipe._src.schedules.pairs import joinable, together

_Inserted = dict[int, list[Action]]
"""Actions to insert before, or after, some positions of an order."""


def refuse_unfit(
    name: str, schedule: object, kinds: Collection[Kind] = (), *, because: str, once: str = ""
) -> None:
    """Raise ScheduleError unless the object is a schedule with backwards and without ``kinds``,
    which the transform inserts. ``because`` and ``once`` end the messages."""
    if not isinstance(schedule, Schedule):
        raise ScheduleError(
            f"{name} takes a schedule; got a {type(schedule).__name__} (of a plan: "
            f"fp.schedules.{name}(plan.schedule))"
        )
    if not schedule.has_backward:
        raise ScheduleError(f"schedule {schedule.name!r} has no backwards, so {because}")
    if any(action.kind in kinds for order in schedule.orders for action in order):
        letters = " or ".join(kind.value for kind in kinds)
        raise ScheduleError(
            f"schedule {schedule.name!r} has {letters} already; apply {name} once, {once}"
        )


def _refuse_choice(name: str, choose: object) -> None:
    if not callable(choose):
        raise ScheduleError(
            f"{name} must be a function (action) -> bool; got {choose!r}; e.g. {name}=lambda "
            "action: action.stage == 1"
        )


def never(action: Action) -> bool:
    """Return False: the default of ``remat(keep=)``, which keeps no residual.

    >>> fp.schedules.never(fp.Action.parse("2F0"))
    False
    """
    return False


def remat(schedule: Schedule, *, keep: Callable[[Action], bool] = never) -> Schedule:
    """Recompute residuals instead of keeping them: insert ``R`` just before a backward.

    A device then holds the inputs of its stages and one residual at a time. The field also calls
    this activation checkpointing. ``R`` writes the residual only, so statistics of batch norm are
    not counted twice.

    >>> print(fp.schedules.remat(fp.schedules.one_f_one_b(2, 2), keep=lambda action: action.stage == 1))
    0F0 0F1 0R0 0B0 0R1 0B1
    1F0 1B0 1F1 1B1

    Args:
        schedule: a schedule with backwards.
        keep: a function of a forward: True keeps the residual of that forward. Default: keep none.
            GPipe's ``except_last`` is ``keep=lambda action: action.microbatch == last``.

    Raises:
        ScheduleError: ``schedule`` is not a schedule, has no backwards, or has ``R`` already.
    """
    refuse_unfit(
        "remat", schedule, [Kind.R], because="there is nothing to compute again", once="with keep="
    )
    _refuse_choice("keep", keep)

    def again(order: tuple[Action, ...]) -> dict[int, list[Action]]:
        return {
            at: [action._replace(kind=Kind.R)]
            for at, action in enumerate(order)
            if action.kind in (Kind.B, Kind.I) and not keep(action._replace(kind=Kind.F))
        }

    return _with(schedule, "remat", [(again(order), {}) for order in schedule.orders])


def delay(schedule: Schedule, *, group: int = 1) -> Schedule:
    """Split each backward into I and W, and run W in groups.

    W of a stage run as soon as ``group`` of them wait, and at the end. So the gradient of the input
    goes back as early as possible, as in the zero-bubble schedules (arXiv 2401.10241). Up to
    ``group`` more microbatches of a stage keep their weight residuals. Pairs whose actions are
    still neighbours remain, with I in place of B.

    >>> print(fp.schedules.delay(fp.schedules.one_f_one_b(2, 4), group=2))
    0F0 0F1 0I0 0F2 0I1 0W0 0W1 0F3 0I2 0I3 0W2 0W3
    1F0 1I0 1F1 1I1 1W0 1W1 1F2 1I2 1F3 1I3 1W2 1W3

    Args:
        schedule: a schedule with backwards, whole or split.
        group: the number of W of a stage that run one after the other, at least 1. Default: 1.

    Raises:
        ScheduleError: ``schedule`` is not a schedule, has no backwards, or ``group`` is not a
            positive int.
    """
    refuse_unfit("delay", schedule, because="there is no W to delay")
    if type(group) is not int or group < 1:
        raise ScheduleError(f"group is the number of W in a row, at least 1; got {group!r}")
    pairs = frozenset((_split(first), _split(second)) for first, second in schedule.pairs)
    orders = [_delayed(order, group) for order in schedule.orders]
    return replace(schedule, pairs=pairs).reordered(orders, f"{schedule.name}+delay")


def _split(action: Action) -> Action:
    return action._replace(kind=Kind.I) if action.kind is Kind.B else action


def _delayed(order: tuple[Action, ...], group: int) -> tuple[Action, ...]:
    out: list[Action] = []
    waiting: dict[int, list[Action]] = {}
    for action in order:
        kind, stage = action.kind, action.stage
        if kind is Kind.W:
            continue
        if kind in ONCE:
            # G and S need all gradients of their stage, so no W may come after them.
            out += waiting.pop(stage, [])
        if kind not in (Kind.B, Kind.I):
            out.append(action)
            continue
        out.append(action._replace(kind=Kind.I))
        weights = waiting.setdefault(stage, [])
        weights.append(action._replace(kind=Kind.W))
        if len(weights) == group:
            out += weights
            weights.clear()
    return tuple(out + [action for weights in waiting.values() for action in weights])


def reduce_grads(schedule: Schedule) -> Schedule:
    """Sum the gradients of each stage over its replicas: insert ``G`` after the last backward.

    ``G`` runs on the link to the other replicas while the device works on other stages. Without
    replicas, ``G`` does nothing. To step parameters too, apply `step_params` after this function.

    >>> print(fp.schedules.reduce_grads(fp.schedules.one_f_one_b(2, 2)))
    0F0 0F1 0B0 0B1 0G
    1F0 1B0 1F1 1B1 1G

    Args:
        schedule: a schedule with backwards.

    Raises:
        ScheduleError: ``schedule`` is not a schedule, has no backwards, or has ``G`` already.
    """
    refuse_unfit(
        "reduce_grads",
        schedule,
        (Kind.G,),
        because="there are no gradients to reduce",
        once="and last",
    )

    return _with(
        schedule, "reduce", [({}, _behind(order, ADDS, Kind.G)) for order in schedule.orders]
    )


def step_params(schedule: Schedule) -> Schedule:
    """Step the parameters of each stage during the run: insert ``S`` after the last backward.

    If a stage has ``G``, its ``S`` comes at the end of its device's order, so that the device does
    other work while the sums are on their way.

    Pass the optimizer to `run`. The run undoes the steps if it fails, if gradients must be clipped,
    or if they are not finite under a loss scale. The zero-bubble paper calls this post-validation
    (arXiv 2401.10241, section 4).

    >>> print(fp.schedules.step_params(fp.schedules.one_f_one_b(2, 2)))
    0F0 0F1 0B0 0B1 0S
    1F0 1B0 1F1 1B1 1S

    Args:
        schedule: a schedule with backwards.

    Raises:
        ScheduleError: ``schedule`` is not a schedule, has no backwards, or has ``S`` already.
    """
    refuse_unfit(
        "step_params", schedule, (Kind.S,), because="there is nothing to step by", once="and last"
    )

    return _with(schedule, "step", [({}, _steps(order)) for order in schedule.orders])


def _steps(order: Sequence[Action]) -> _Inserted:
    """Return the S of one device, by the position after which they come.

    S of stages with a G come at the end, in the order of the G: the first sums arrive first.
    """
    summed = [action.stage for action in order if action.kind is Kind.G]
    after = {
        at: steps
        for at, steps in _behind(order, ADDS, Kind.S).items()
        if steps[0].stage not in summed
    }
    after.setdefault(len(order) - 1, []).extend(Action(Kind.S, stage) for stage in summed)
    return after


def _behind(order: Sequence[Action], kinds: Collection[Kind], kind: Kind) -> _Inserted:
    """Return an action of ``kind`` for each stage, after the stage's last action of ``kinds``."""
    last = {action.stage: at for at, action in enumerate(order) if action.kind in kinds}
    return {at: [Action(kind, stage)] for stage, at in last.items()}


def gather_params(
    schedule: Schedule, *, whole: int | None = None, ahead: int | Sequence[int] = 1
) -> Schedule:
    """Gather the parameters of each stage before it computes: insert ``U``.

    For sharded parameters, ``U`` gathers the shards over the link to the other replicas. For
    parameters at home in host memory (``fp.place(..., home="cpu")``), ``U`` copies them to the
    device. The device works on meanwhile, and the stage waits for the parameters. After their last
    use before the next ``U`` of the stage, the device frees the gathered parameters.

    Without ``whole``, each stage is gathered once: ZeRO-1 or 2 (arXiv 1910.02054), where optimizer
    state and sums of gradients are sharded. With ``whole``, a device has the whole parameters of a
    few stages at a time: ZeRO-3 or FSDP. This suits breadth-first schedules (`looped_bfs`, arXiv
    2211.05953).

    >>> print(fp.schedules.gather_params(fp.schedules.looped_bfs(4, 2, num_devices=2), whole=1))
    0U0 0F0 2U0 0F1 2F0 2F1 2B0 0U1 2B1 0B0 0B1
    1U0 1F0 3U0 1F1 3F0 3F1 3B0 1U1 3B1 1B0 1B1

    Args:
        schedule: any schedule.
        whole: the largest number of stages of a device with whole parameters at a time, at least 1.
            Stages whose ``U`` is under way do not count. If a stage must be freed, the stage with
            the latest next use is freed. None: all stages.
        ahead: the number of computing actions (F, B, I, W, R) of the device between a ``U`` and the
            first action of its stage, one number or one for each stage. Default: 1.

    Raises:
        ScheduleError: ``schedule`` is not a schedule or has ``U`` already, or an option is out of
            range.
    """
    if not isinstance(schedule, Schedule):
        raise ScheduleError(f"gather_params takes a schedule; got a {type(schedule).__name__}")
    if schedule.gathered_stages:
        raise ScheduleError(f"schedule {schedule.name!r} has U already; apply gather_params once")
    if whole is not None and (type(whole) is not int or whole < 1):
        raise ScheduleError(
            "whole is the number of stages of a device with whole parameters at a time, at least "
            f"1, or None; got {whole!r}"
        )
    each = [*ahead] if isinstance(ahead, Sequence) else [ahead] * schedule.num_stages
    if len(each) != schedule.num_stages or any(type(n) is not int or n < 0 for n in each):
        raise ScheduleError(
            "ahead is the number of computing actions between U and its stage's first action, at "
            f"least 0, or one number for each of {schedule.num_stages} stages; got {ahead!r}"
        )
    gathers = [_gathers(order, whole, each) for order in schedule.orders]
    return _with(schedule, "gather", [(before, {}) for before in gathers])


def _gathers(
    order: tuple[Action, ...], whole: int | None, ahead: Sequence[int]
) -> dict[int, list[Action]]:
    """Return the U of one device, by the position before which they come."""
    computing = [at for at, action in enumerate(order) if action.kind in COMPUTES]
    uses: dict[int, deque[int]] = defaultdict(deque)
    for place, at in enumerate(computing):
        uses[order[at].stage].append(place)
    before: dict[int, list[Action]] = defaultdict(list)
    times: dict[int, int] = defaultdict(int)
    here: set[int] = set()
    left: dict[int, int] = {}
    """By stage, the first place where it may be gathered again: its parameters are freed there."""
    for place, at in enumerate(computing):
        stage = order[at].stage
        uses[stage].popleft()
        if stage not in here:
            if whole is not None and len(here) >= whole:
                gone = max(here, key=lambda other: uses[other][0] if uses[other] else len(order))
                here.remove(gone)
                left[gone] = place
            here.add(stage)
            before[computing[max(left.get(stage, 0), place - ahead[stage])]].append(
                Action(Kind.U, stage, times[stage])
            )
            times[stage] += 1
    return before


def always(action: Action) -> bool:
    """Return True: the default of ``offload(move=)``, which moves each residual.

    >>> fp.schedules.always(fp.Action.parse("2F0"))
    True
    """
    return True


def offload(
    schedule: Schedule, *, move: Callable[[Action], bool] = always, ahead: int = 1
) -> Schedule:
    """Offload residuals to host memory: insert ``O`` after a forward, and ``L`` before its
    backward.

    Between ``O`` and ``L`` the residual occupies no memory of the device. The device works on while
    residuals move. If ``L`` would directly follow ``O``, the residual stays on the device.
    PipeOffload (arXiv 2503.01328) moves the residuals that wait longest, such as those of the first
    stages of `interleaved`: choose them with ``move``.

    >>> print(fp.schedules.offload(fp.schedules.one_f_one_b(3, 3)))
    0F0 0O0 0F1 0O1 0L0 0F2 0O2 0L1 0B0 0L2 0B1 0B2
    1F0 1F1 1O1 1B0 1L1 1F2 1B1 1B2
    2F0 2B0 2F1 2B1 2F2 2B2

    Args:
        schedule: a schedule with backwards.
        move: a function of a forward: True offloads the residual of that forward. Default: move
            all.
        ahead: the number of computing actions (F, B, I, W, R) of the device between ``L`` and the
            backward. The residual comes back during these actions. Default: 1. 0: the device waits
            for the residual.

    Raises:
        ScheduleError: ``schedule`` is not a schedule, has no backwards, or has ``O`` already; or
            ``move`` picks a residual that ``R`` recomputes.
    """
    refuse_unfit(
        "offload",
        schedule,
        [Kind.O, Kind.L],
        because="no residual waits for one",
        once="with move=",
    )
    _refuse_choice("move", move)
    if type(ahead) is not int or ahead < 0:
        raise ScheduleError(
            "ahead is the number of computing actions between L and the backward, at least 0; got "
            f"{ahead!r}"
        )
    moved = _with(
        schedule, "offload", [_moves(schedule, order, move, ahead) for order in schedule.orders]
    )
    rematted = {a[1:] for order in schedule.orders for a in order if a.kind is Kind.R}
    faults = [
        f"{a._replace(kind=Kind.F)}, but its residual is computed again by "
        f"{a._replace(kind=Kind.R)}"
        for order in moved.orders
        for a in order
        if a.kind is Kind.O and a[1:] in rematted
    ]
    raise_all(
        f"a residual of {schedule.name!r} is computed again or moved, not both; let move= return "
        "False for these forwards. It picked",
        faults,
        ScheduleError,
        most=MOST_FAULTS,
    )
    return moved


def _moves(
    schedule: Schedule, order: tuple[Action, ...], move: Callable[[Action], bool], ahead: int
) -> tuple[_Inserted, _Inserted]:
    """Return the L of one device by the position before which they come, and the O by the position
    after which they come."""
    joined = {*schedule.joined(order)}
    forwards = {action: at for at, action in enumerate(order) if action.kind is Kind.F}
    away: _Inserted = {}
    loads: _Inserted = defaultdict(list)  # what to bring back before each position
    for at, action in enumerate(order):
        forward = (
            forwards.get(action._replace(kind=Kind.F)) if action.kind in (Kind.B, Kind.I) else None
        )
        if forward is None:
            continue
        end, begin = forward + (forward in joined), at - ahead - (at - ahead - 1 in joined)
        if begin > end + 1 and move(order[forward]):
            away.setdefault(end, []).append(action._replace(kind=Kind.O))
            loads[begin].append(action._replace(kind=Kind.L))
    return loads, away


def _with(schedule: Schedule, word: str, added: Sequence[tuple[_Inserted, _Inserted]]) -> Schedule:
    """Return a schedule with inserted actions before and after some positions of each order.

    Nothing is inserted between the two actions of a pair: it comes before or after both.
    """
    orders: list[tuple[Action, ...]] = []
    for order, (before, after) in zip(schedule.orders, added, strict=True):
        for at in schedule.joined(order):
            if at + 1 in before:
                before.setdefault(at, []).extend(before.pop(at + 1))
            if at in after:
                after[at + 1] = [*after.pop(at), *after.get(at + 1, ())]
        orders.append(inserted(order, before, after))
    return schedule.reordered(orders, f"{schedule.name}+{word}")


def inserted(
    order: Sequence[Action],
    before: Mapping[int, Sequence[Action]],
    after: Mapping[int, Sequence[Action]],
) -> tuple[Action, ...]:
    """Return an order with inserted actions before and after some of its positions."""
    out: list[Action] = []
    for at, action in enumerate(order):
        out += (*before.get(at, ()), action, *after.get(at, ()))
    return tuple(out)


def pair(schedule: Schedule, *, join: Callable[[Action, Action], bool] | None = None) -> Schedule:
    """Pair each forward with a neighbouring backward, if neither waits for the other.

    The two actions of a pair overlap. This saves time if stages wait for links between devices
    (`Cost.forward_link`). Otherwise it costs time: both actions begin when both can begin, and
    their results are ready when both have ended.

    >>> print(fp.schedules.pair(fp.schedules.one_f_one_b(2, 3)))
    0F0 0F1 0B0 0F2 0B1 0B2
    1F0 (1B0 1F1) (1B1 1F2) 1B2

    Here ``(0F1 0B0)`` cannot be a pair on the first device: 0B0 needs the result of ``(1B0 1F1)``,
    and that pair needs 0F1.

    Args:
        schedule: a schedule with backwards. Its own pairs remain.
        join: ``(action, next action) -> bool``: whether two neighbours, an F and a B or I, become a
            pair. None: all that can.

    Raises:
        ScheduleError: ``schedule`` is not a schedule, is not legal, or has no backwards.
    """
    refuse_unfit("pair", schedule, because="there is nothing for forwards to overlap with")
    if join is not None and not callable(join):
        raise ScheduleError(
            f"join must be a function (action, action) -> bool, or None; got {join!r}"
        )
    check(schedule)
    return together(schedule, joinable(schedule, join))


def unpair(schedule: Schedule) -> Schedule:
    """Remove all pairs from a schedule: their actions run one after the other.

    >>> print(fp.schedules.unpair(fp.Schedule.parse("0F0 (0F1 0B0) 0B1")))
    0F0 0F1 0B0 0B1

    Raises:
        ScheduleError: ``schedule`` is not a schedule.
    """
    if not isinstance(schedule, Schedule):
        raise ScheduleError(f"unpair takes a schedule; got a {type(schedule).__name__}")
    return replace(schedule, pairs=frozenset()) if schedule.pairs else schedule
