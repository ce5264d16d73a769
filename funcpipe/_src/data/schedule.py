"""A schedule: which action each device runs, in which order. Numbers only."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

from funcpipe._src.core.errors import ScheduleError, raise_all
from funcpipe._src.core.notebook import picture, shown
from funcpipe._src.core.remembered import declared_fields
from funcpipe._src.core.shown import count_text, guarded
from funcpipe._src.data.kinds import (
    ADDS,
    COMPUTES,
    COUNTED,
    KINDS,
    ONCE,
    SPELLING,
    WHOLE,
    WITHOUT_BACKWARD,
    Flow,
    flowing,
)
from funcpipe._src.data.kinds import Kind as Kind
from funcpipe._src.data.spelling import ACTION, is_word, unread, words_of


class Action(NamedTuple):
    """One kind of work of one stage on one microbatch, printed ``2F0``: stage 2, forward,
    microbatch 0.

    A microbatch may be cut along its sequence into slices, each an action of its own: ``2F0.1`` is
    its slice 1.

    What stands once a batch (`Kind.G`) has microbatch 0, and is printed without: ``2G``. Of what
    stands several times for all microbatches (`Kind.U`) the number says which time it is: ``2U0``,
    later ``2U1``.
    """

    kind: Kind
    stage: int
    microbatch: int = 0
    slice: int | None = None

    def __str__(self) -> str:
        kind, stage, microbatch, number = self
        if number is None:
            return f"{stage}{kind.value}{'' if kind in ONCE else microbatch}"
        return f"{stage}{kind.value}{microbatch}.{number}"

    @classmethod
    def parse(cls, text: str) -> Action:
        """Read one action.

        >>> fp.Action.parse("12W3.0") == fp.Action(fp.Kind.W, 12, 3, 0), fp.Action.parse("2G") == fp.Action(fp.Kind.G, 2)
        (True, True)

        Raises:
            ScheduleError: the text is anything else than stage, letter, microbatch (or none), and
                perhaps a slice.
        """
        match = ACTION.fullmatch(text)
        if match is None:
            raise ScheduleError(f"{text!r} is no action: write {SPELLING}")
        stage, kind, microbatch, number, once = match.groups()
        return cls(
            Kind(once or kind),
            int(stage),
            int(microbatch or 0),
            None if number is None else int(number),
        )

    def needs(self) -> Sequence[Action]:
        """What it may wait for: of its own stage and microbatch, and of the next stages that values
        come from.

        Of slices also the one before (backward: after) it, whose carry it reads.

        >>> print(*fp.Action(fp.Kind.B, 1, 0).needs())
        1F0 2B0 2I0
        >>> print(*fp.Action(fp.Kind.F, 1, 0, slice=1).needs())
        0F0.1 1F0.0
        """
        kind, stage, _, number = self
        row = KINDS[kind]
        awaited = [self._replace(kind=row.after)] if row.after is not None else []
        if row.flow is not None:
            step = 1 if row.flow is Flow.FORWARD else -1
            awaited += [
                self._replace(kind=other, stage=stage - step) for other in flowing(row.flow)
            ]
            if number is not None and number >= step:
                awaited += [
                    self._replace(kind=other, slice=number - step) for other in flowing(row.flow)
                ]
        return awaited


def action_of(kind: Kind, stage: int, piece: int, num_slices: int) -> Action:
    """The action of a piece: a microbatch, or one of so many slices that each has."""
    if num_slices == 1 or kind in WHOLE:
        return Action(kind, stage, piece)
    return Action(kind, stage, *divmod(piece, num_slices))


Pair = tuple[Action, Action]
"""Two actions of a device, one after the other in its order, that overlap."""


@dataclass(frozen=True)
class Schedule:
    """The order of actions on each device.

    Schedules compare, hash and pickle by orders and pairs; the name is a label. The constructor
    checks nothing: `check` does, which `make_plan` and `simulate` call.

    Attributes:
        orders: one tuple of Actions per device, in the order in which the device runs them.
        name: what to call it in pictures.
        pairs: which neighbours in an order overlap, as (first, second). Both begin when both can; a
            CUDA device runs them on two streams, so that one computes while the other waits for a
            link (all-to-all of experts), a CPU lane runs them one after the other. Printed ``(0F3
            1B1)``.
    """

    orders: tuple[tuple[Action, ...], ...]
    name: str = field(default="custom", compare=False)
    pairs: frozenset[Pair] = frozenset()

    def __post_init__(self) -> None:
        if type(self.orders) is not tuple or not all(type(order) is tuple for order in self.orders):
            object.__setattr__(self, "orders", _rows(self.orders))
        if not isinstance(self.pairs, frozenset):
            object.__setattr__(self, "pairs", _frozen(self.pairs))

    @classmethod
    def parse(cls, text: str, *, name: str = "custom") -> Schedule:
        """Read the text form: one line per device, actions apart by spaces, ``#`` starts a comment.

        Two actions in parentheses overlap.

        >>> print(fp.Schedule.parse("0F0 (0F1 0B0) 0B1"))
        0F0 (0F1 0B0) 0B1

        Raises:
            ScheduleError: some words are no actions; each is named with its line.
        """
        if not isinstance(text, str):
            raise ScheduleError(
                "parse takes text, a line for each device, such as '0F0 0B0'; got a "
                f"{type(text).__name__}"
            )
        orders: list[tuple[Action, ...]] = []
        pairs: list[Pair] = []
        faults: list[str] = []
        for number, line in enumerate(text.split("\n"), 1):
            groups = [*words_of(line.partition("#")[0])]
            bad = [word for group in groups for word in group if not is_word(word)]
            faults += [f"line {number}: {word!r} {unread(word)}" for word in bad]
            if groups and not bad:
                read = [tuple(map(Action.parse, group)) for group in groups]
                orders.append(tuple(action for group in read for action in group))
                pairs += [(group[0], group[1]) for group in read if len(group) == 2]
        raise_all(f"write {SPELLING}; two that overlap as in (0F3 1B1):", faults, ScheduleError)
        return cls(tuple(orders), name, frozenset(pairs))

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def lines(self) -> Iterator[str]:
        """The order of each device in words."""
        for order in self.orders:
            words = [str(action) for action in order]
            for at in self.joined(order):
                words[at : at + 2] = f"({words[at]}", f"{words[at + 1]})"
            yield " ".join(words)

    def joined(self, order: Sequence[Action]) -> list[int]:
        """The positions in an order of those that overlap with the action after them."""
        if not self.pairs:
            return []
        return [at for at, pair in enumerate(pairwise(order)) if pair in self.pairs]

    def reordered(self, orders: Sequence[Sequence[Action]], name: str) -> Schedule:
        """Return a schedule with other orders. Pairs that are still neighbours stay pairs.

        >>> schedule = fp.Schedule.parse("(0F1 0B0)")
        >>> print(schedule.reordered([[*schedule.orders[0], fp.Action(fp.Kind.B, 0, 1)]], "longer"))
        (0F1 0B0) 0B1
        """
        kept = tuple(map(tuple, orders))
        pairs = self.pairs
        if pairs:
            pairs = pairs.intersection(pair for order in kept for pair in pairwise(order))
        return Schedule(kept, name, pairs)

    @guarded
    def __repr__(self) -> str:
        slices = f" of {self.num_slices} slices" if self.num_slices > 1 else ""
        stages, microbatches = (
            count_text(self.num_stages, "stage"),
            count_text(self.num_microbatches, "microbatch"),
        )
        return (
            f"<Schedule {self.name}: {stages}, {microbatches}{slices}, "
            f"{count_text(self.num_devices, 'device')}>"
        )

    _repr_html_ = shown(picture)

    __getstate__ = declared_fields

    @property
    def num_devices(self) -> int:
        """How many devices (lanes) the schedule has."""
        return len(self.orders)

    @cached_property
    def num_stages(self) -> int:
        """How many stages: one more than the largest index."""
        return 1 + max((action[1] for order in self.orders for action in order), default=-1)

    @cached_property
    def num_microbatches(self) -> int:
        """Count the microbatches: one more than the largest index. Numbers of U do not count."""
        numbers = (
            action[2] for order in self.orders for action in order if action[0] not in COUNTED
        )
        return 1 + max(numbers, default=-1)

    @cached_property
    def num_slices(self) -> int:
        """How many slices each microbatch is cut into, along its sequence; 1: it is whole."""
        numbers = {action[3] for order in self.orders for action in order if type(action) is Action}
        return 1 + max((number for number in numbers if type(number) is int), default=0)

    @cached_property
    def num_pieces(self) -> int:
        """How many pieces the batch has: the slices of its microbatches, or these where they are
        whole."""
        return self.num_microbatches * self.num_slices

    @cached_property
    def device_of(self) -> tuple[int, ...]:
        """The device of each stage, by stage index; -1 for a stage without actions."""
        devices = [-1] * self.num_stages
        for device, order in enumerate(self.orders):
            for action in order:
                devices[action[1]] = device
        return tuple(devices)

    @cached_property
    def has_backward(self) -> bool:
        """Does any action compute gradients."""
        kinds = {action[0] for order in self.orders for action in order}
        return not kinds.issubset(WITHOUT_BACKWARD)

    @cached_property
    def steps(self) -> bool:
        """Does it step parameters (S)."""
        return any(action[0] is Kind.S for order in self.orders for action in order)

    @cached_property
    def is_ascending(self) -> bool:
        """Do the gradients of every stage accumulate in ascending microbatch order (then such
        schedules agree).

        Those of slices accumulate from the last of a microbatch to its first.
        """
        # A stage that splits its backward adds at W, one that does not at I; both must ascend, and
        # B counts for both.
        last: dict[tuple[Kind, int], tuple[int, int]] = {}
        for order in self.orders:
            for kind, stage, microbatch, number in order:
                if kind not in ADDS:
                    continue
                place = microbatch, -(number or 0)
                for half in (Kind.I, Kind.W) if kind is Kind.B else (kind,):
                    if last.get((half, stage), place) > place:
                        return False
                    last[half, stage] = place
        return True

    def backward_order(self, stage: int) -> tuple[Action, ...]:
        """The backwards of a stage (B, I, W) as its device runs them: the order in which its weight
        gradients accumulate.

        They are added at B and, of a split one, at W; by an eager stage those that do not wait for
        W at I.

        >>> print(*fp.Schedule.parse("0F0 0F1 0I0 0I1 0W1 0W0").backward_order(0))
        0I0 0I1 0W1 0W0
        """
        order = self.orders[self.device_of[stage]]
        return tuple(a for a in order if a.stage == stage and a.kind in ADDS)

    def first(self, num_microbatches: int) -> Schedule:
        """The schedule of the first few microbatches: every action of the others dropped, the order
        kept.

        U that no remaining action needs are dropped, too, and the others are numbered anew.

        >>> print(fp.Schedule.parse("0U0 0F0 0F1 0U1 0F2 0F3").first(2))
        0U0 0F0 0F1

        Raises:
            ScheduleError: ``num_microbatches`` is not a whole number from 1.
        """
        if type(num_microbatches) is not int or num_microbatches < 1:
            raise ScheduleError(
                f"first takes a number of microbatches, from 1; got {num_microbatches!r}"
            )
        if num_microbatches >= self.num_microbatches:
            return self
        kept = select(
            self.orders,
            lambda action: action.kind in COUNTED or action.microbatch < num_microbatches,
        )
        return self.reordered([recounted(order) for order in kept], self.name)

    def forwards(self) -> Schedule:
        """The forwards alone: the schedule that evaluates with every stage where it trains.

        >>> print(fp.Schedule.parse("0F0 0F1 0B0 0B1").forwards())
        0F0 0F1
        """
        return self.reordered(
            select(self.orders, lambda action: action.kind is Kind.F), f"{self.name} forwards"
        )


def _rows(orders: Any) -> tuple[tuple[Any, ...], ...]:
    """Orders as given, in lists. Raises ScheduleError for what has no rows; what are actions is for
    `check`."""
    rows: list[tuple[Any, ...]] = []
    for row in (
        orders
        if isinstance(orders, Iterable) and not isinstance(orders, (str, Mapping))
        else [orders]
    ):
        if isinstance(row, (str, Mapping, Action)) or not isinstance(row, Iterable):
            read = (
                "; Schedule.parse reads text, a line for each device"
                if isinstance(row, str)
                else ""
            )
            raise ScheduleError(
                f"orders has for each device a tuple of Actions; got {type(row).__name__}{read}"
            )
        rows.append(tuple(row))
    return tuple(rows)


def _frozen(pairs: Any) -> frozenset[Any]:
    """Pairs as given, in lists or sets. Raises ScheduleError for what is none at all; what are
    pairs is for `check`."""
    try:
        return frozenset(tuple(pair) if isinstance(pair, list) else pair for pair in pairs)
    except TypeError:
        example = "pairs={(fp.Action(fp.Kind.F, 0, 1), fp.Action(fp.Kind.B, 0, 0))}"
        raise ScheduleError(
            f"pairs is a set of pairs of actions, as {example}; got {pairs!r}"
        ) from None


def serving(order: Sequence[Action]) -> frozenset[Action]:
    """What is counted and serves something: its stage computes after it, and before the next."""
    if all(action.kind not in COUNTED for action in order):
        return frozenset()
    found: set[Action] = set()
    waiting: set[int] = set()  # stages that compute before their next one
    for action in reversed(order):
        if action.kind in COMPUTES:
            waiting.add(action.stage)
        elif action.kind in COUNTED and action.stage in waiting:
            waiting.remove(action.stage)
            found.add(action)
    return frozenset(found)


def recounted(order: tuple[Action, ...]) -> tuple[Action, ...]:
    """Return an order without counted actions that no other action needs; the remaining ones are
    numbered from 0."""
    out: list[Action] = []
    served, times = serving(order), Counter[int]()
    for action in order:
        if action.kind not in COUNTED:
            out.append(action)
        elif action in served:
            out.append(action._replace(microbatch=times[action.stage]))
            times[action.stage] += 1
    return tuple(out)


def select(orders: Sequence[Iterable[Action]], keep: Any) -> tuple[tuple[Action, ...], ...]:
    """The orders with only the actions for which ``keep(action)`` holds."""
    return tuple(tuple(filter(keep, order)) for order in orders)
