"""Schedules and actions: which action each device runs, in which order.

Contains numbers and their text form only: stages and functions are bound in a `Plan`.
`schedules/legal.py` checks schedules, `schedules/families.py` makes them.
"""

from __future__ import annotations

import re
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


def _letters(kinds: Iterable[Kind]) -> str:
    return f"[{''.join(kind.value for kind in kinds)}]"


ACTION = re.compile(
    rf"([0-9]{{1,9}})(?:({_letters(kind for kind in Kind if kind not in ONCE)})([0-9]{{1,9}})(?:\.([0-9]{{1,9}}))?"
    rf"|({_letters(ONCE)}))"
)
"""The spelling of an action: stage, kind, microbatch and maybe slice; or stage and a kind without a
number."""

_WORDS = re.compile(r"\(\s*([^\s()]+)\s+([^\s()]+)\s*\)(?!\S)|(\([^()]*\)\S*|\S+)")


def words_of(line: str) -> Iterator[tuple[str, ...]]:
    """Yield the words of a line: each alone, or two together for a pair such as ``(0F3 1B1)``."""
    for first, second, alone in _WORDS.findall(line):
        yield (alone,) if alone else (first, second)


def is_word(word: str) -> bool:
    """Return whether a word spells an action."""
    return ACTION.fullmatch(word) is not None


def unread(word: str) -> str:
    """Say what is wrong with a word that does not spell an action."""
    if "(" in word or ")" in word:
        return (
            "is not a pair: write two actions in parentheses, with a space between them and "
            "around the parentheses"
        )
    return "is not an action"


class Action(NamedTuple):
    """One step of a device: a kind of work, a stage and a microbatch.

    Printed as stage, kind, microbatch: ``2F0`` is the forward of stage 2 for microbatch 0. If a
    microbatch is cut into slices along its sequence, each slice has its own action: ``2F0.1``.

    >>> action = fp.Action(fp.Kind.F, 2, 0, slice=1)
    >>> print(action, action.stage)
    2F0.1 2

    Attributes:
        kind: the kind of work.
        stage: the index of the stage, from 0.
        microbatch: the index of the microbatch, from 0. G and S run once per batch: they have
            microbatch 0, and are printed without a number (``2G``). U runs for all microbatches:
            its number counts the U of its stage (``2U0``, then ``2U1``).
        slice: the index of the slice, from 0; None: the action is for the whole microbatch.
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
        """Read one action from its printed form, such as ``2F0``, ``2F0.1`` or ``2G``.

        >>> fp.Action.parse("12W3.0") == fp.Action(fp.Kind.W, 12, 3, 0), fp.Action.parse("2G") == fp.Action(fp.Kind.G, 2)
        (True, True)

        Raises:
            ScheduleError: the text is not an action.
        """
        match = ACTION.fullmatch(text)
        if match is None:
            raise ScheduleError(f"{text!r} is not an action: write {SPELLING}")
        stage, kind, microbatch, number, once = match.groups()
        return cls(
            Kind(once or kind),
            int(stage),
            int(microbatch or 0),
            None if number is None else int(number),
        )

    def needs(self) -> Sequence[Action]:
        """Return the actions whose results this action may read.

        These are the action before it on the same stage and microbatch, and the actions of the
        neighbouring stage that sends to it. With slices, also the slice whose carry it reads: the
        previous slice for a forward, the next slice for a backward. Skips are not included.

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
    """Return the action for a piece: a microbatch, or a slice if microbatches are cut."""
    if num_slices == 1 or kind in WHOLE:
        return Action(kind, stage, piece)
    return Action(kind, stage, *divmod(piece, num_slices))


Pair = tuple[Action, Action]  # two neighbouring actions in the order of a device that overlap


@dataclass(frozen=True)
class Schedule:
    """The order of actions on each device.

    Schedules compare, hash and pickle by their orders and pairs. The constructor does not check
    whether a schedule is legal: `check` does, and `make_plan` and `simulate` call `check`.

    >>> schedule = fp.Schedule.parse("0F0 0F1 0B0 0B1")
    >>> schedule.num_stages, schedule.num_microbatches, schedule.num_devices
    (1, 2, 1)

    Attributes:
        orders: one tuple of Actions per device, in the order in which the device runs them.
        name: the name in pictures and messages; schedules with different names can be equal.
        pairs: the neighbouring actions that overlap, as (first, second); printed ``(0F3 1B1)``.
            Both actions begin when both can begin. A CUDA device runs them on two streams, so that
            one computes while the other waits for a link between devices. A CPU lane runs them one
            after the other.
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
        """Read a schedule from text: one line per device, actions separated by spaces.

        Two actions in parentheses overlap. A ``#`` starts a comment.

        >>> print(fp.Schedule.parse("0F0 (0F1 0B0) 0B1  # stage 0"))
        0F0 (0F1 0B0) 0B1

        Args:
            text: the schedule, as `str` prints it.
            name: the name of the schedule.

        Raises:
            ScheduleError: some words are not actions; the message lists each with its line. Whether
                the schedule is legal is not checked.
        """
        if not isinstance(text, str):
            raise ScheduleError(
                "parse takes text with one line per device, such as '0F0 0B0'; got a "
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
        if faults and text.endswith((".txt", ".json", ".csv")):
            faults = [
                f"{text!r} is the name of a file; give Path({text!r}).read_text() to Schedule.parse, "
                "schedules.from_json or schedules.from_torch_csv, the one that reads its format"
            ]
        raise_all(
            f"write {SPELLING}; two overlapping actions as in (0F3 1B1):", faults, ScheduleError
        )
        return cls(tuple(orders), name, frozenset(pairs))

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def lines(self) -> Iterator[str]:
        """Yield the order of each device as text."""
        for order in self.orders:
            words = [str(action) for action in order]
            for at in self.joined(order):
                words[at : at + 2] = f"({words[at]}", f"{words[at + 1]})"
            yield " ".join(words)

    def joined(self, order: Sequence[Action]) -> list[int]:
        """Return the positions in an order of the actions that overlap with their successor."""
        if not self.pairs:
            return []
        return [at for at, pair in enumerate(pairwise(order)) if pair in self.pairs]

    def reordered(self, orders: Sequence[Sequence[Action]], name: str) -> Schedule:
        """Return a schedule with other orders. Pairs whose actions are still neighbours remain.

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
        stages = count_text(self.num_stages, "stage")
        microbatches = count_text(self.num_microbatches, "microbatch")
        return (
            f"<Schedule {self.name}: {stages}, {microbatches}{slices}, "
            f"{count_text(self.num_devices, 'device')}>"
        )

    _repr_html_ = shown(picture)

    __getstate__ = declared_fields

    @property
    def num_devices(self) -> int:
        """The number of devices."""
        return len(self.orders)

    @cached_property
    def num_stages(self) -> int:
        """The number of stages: one more than the largest stage index."""
        return 1 + max((action[1] for order in self.orders for action in order), default=-1)

    @cached_property
    def num_microbatches(self) -> int:
        """The number of microbatches: one more than the largest index. U's numbers do not count."""
        numbers = (
            action[2] for order in self.orders for action in order if action[0] not in COUNTED
        )
        return 1 + max(numbers, default=-1)

    @cached_property
    def num_slices(self) -> int:
        """The number of slices of each microbatch, along its sequence; 1: it is not cut."""
        numbers = {action[3] for order in self.orders for action in order if type(action) is Action}
        return 1 + max((number for number in numbers if type(number) is int), default=0)

    @cached_property
    def num_pieces(self) -> int:
        """The number of pieces of the batch: all slices, or microbatches if they are not cut."""
        return self.num_microbatches * self.num_slices

    @cached_property
    def device_of(self) -> tuple[int, ...]:
        """The index of each stage's device, by stage index; -1 for a stage without actions."""
        devices = [-1] * self.num_stages
        for device, order in enumerate(self.orders):
            for action in order:
                devices[action[1]] = device
        return tuple(devices)

    @cached_property
    def has_backward(self) -> bool:
        """Whether any action computes gradients."""
        kinds = {action[0] for order in self.orders for action in order}
        return not kinds.issubset(WITHOUT_BACKWARD)

    @cached_property
    def steps(self) -> bool:
        """Whether the schedule steps parameters (S)."""
        return any(action[0] is Kind.S for order in self.orders for action in order)

    @cached_property
    def gathered_stages(self) -> frozenset[int]:
        """The stages whose parameters are gathered before use (U)."""
        return frozenset(
            action[1] for order in self.orders for action in order if action[0] in COUNTED
        )

    @cached_property
    def is_ascending(self) -> bool:
        """Whether the gradients of every stage accumulate in ascending microbatch order.

        Two such schedules give bit-identical gradients. The slices of one microbatch accumulate
        from the last to the first.
        """
        # A stage that splits its backward adds weight gradients at W, other stages add them at I.
        # So both I and W must ascend, and B counts for both.
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
        """Return the backwards of a stage (B, I, W) in the order in which its device runs them.

        The stage's weight gradients accumulate in this order. B adds all of them. In a split
        backward W adds them, except those that an eager stage already adds at I.

        >>> print(*fp.Schedule.parse("0F0 0F1 0I0 0I1 0W1 0W0").backward_order(0))
        0I0 0I1 0W1 0W0
        """
        order = self.orders[self.device_of[stage]]
        return tuple(a for a in order if a.stage == stage and a.kind in ADDS)

    def first(self, num_microbatches: int) -> Schedule:
        """Return the schedule without the actions of later microbatches; the order stays.

        Each U that no remaining action needs is dropped too. The remaining U are renumbered.

        >>> print(fp.Schedule.parse("0U0 0F0 0F1 0U1 0F2 0F3").first(2))
        0U0 0F0 0F1

        Args:
            num_microbatches: the number of microbatches to keep, at least 1. If the schedule has no
                more microbatches than that, it is returned unchanged.

        Raises:
            ScheduleError: ``num_microbatches`` is not a whole number of at least 1.
        """
        if type(num_microbatches) is not int or num_microbatches < 1:
            raise ScheduleError(
                "first takes the number of microbatches to keep, at least 1; got "
                f"{num_microbatches!r}"
            )
        if num_microbatches >= self.num_microbatches:
            return self
        kept = select(
            self.orders,
            lambda action: action.kind in COUNTED or action.microbatch < num_microbatches,
        )
        return self.reordered([recounted(order) for order in kept], self.name)

    def forwards(self) -> Schedule:
        """Return the schedule with the forwards only, to evaluate with each stage on its device.

        >>> print(fp.Schedule.parse("0F0 0F1 0B0 0B1").forwards())
        0F0 0F1
        """
        return self.reordered(
            select(self.orders, lambda action: action.kind is Kind.F), f"{self.name} forwards"
        )


def _rows(orders: Any) -> tuple[tuple[Any, ...], ...]:
    """Convert the orders that a user gave to tuples.

    Raises ScheduleError if a row is not a sequence. Only `check` looks whether its items are
    actions.
    """
    listed = isinstance(orders, Iterable) and not isinstance(orders, (str, Mapping))
    rows: list[tuple[Any, ...]] = []
    for row in orders if listed else [orders]:
        if isinstance(row, (str, Mapping, Action)) or not isinstance(row, Iterable):
            text = isinstance(row, str)
            read = "; Schedule.parse reads text with one line per device" if text else ""
            raise ScheduleError(
                f"orders must have one tuple of Actions per device; got {type(row).__name__}{read}"
            )
        rows.append(tuple(row))  # at once: a row of a generator may depend on its loop variable
    return tuple(rows)


def _frozen(pairs: Any) -> frozenset[Any]:
    """Convert the pairs that a user gave to a frozenset of tuples.

    Raises ScheduleError if they cannot be a set. Only `check` looks whether its items are pairs.
    """
    try:
        return frozenset(tuple(pair) if isinstance(pair, list) else pair for pair in pairs)
    except TypeError:
        example = "pairs={(fp.Action(fp.Kind.F, 0, 1), fp.Action(fp.Kind.B, 0, 0))}"
        raise ScheduleError(
            f"pairs must be a set of pairs of actions, as in {example}; got {pairs!r}"
        ) from None


def serving(order: Sequence[Action]) -> frozenset[Action]:
    """Return the counted actions (U) that their stage needs: it computes before its next U."""
    if all(action.kind not in COUNTED for action in order):
        return frozenset()
    found: set[Action] = set()
    waiting: set[int] = set()  # stages that compute before their next counted action
    for action in reversed(order):
        if action.kind in COMPUTES:
            waiting.add(action.stage)
        elif action.kind in COUNTED and action.stage in waiting:
            waiting.remove(action.stage)
            found.add(action)
    return frozenset(found)


def recounted(order: tuple[Action, ...]) -> tuple[Action, ...]:
    """Return an order without the counted actions (U) that no other action needs, renumbered."""
    out: list[Action] = []
    # U are numbered per stage, so dropping one renumbers all later U of its stage.
    served, times = serving(order), Counter[int]()
    for action in order:
        if action.kind not in COUNTED:
            out.append(action)
        elif action in served:
            out.append(action._replace(microbatch=times[action.stage]))
            times[action.stage] += 1
    return tuple(out)


def select(orders: Sequence[Iterable[Action]], keep: Any) -> tuple[tuple[Action, ...], ...]:
    """Return the orders with only the actions for which ``keep(action)`` is true."""
    return tuple(tuple(filter(keep, order)) for order in orders)
