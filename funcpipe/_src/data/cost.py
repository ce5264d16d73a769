"""The times and the memory of actions, by stage.

`Cost` holds the numbers. `measured_cost.py` computes them from a timeline, `view/play.py` and
`schedules/clock.py` simulate with them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import accumulate
from statistics import fmean
from typing import Any, NamedTuple, cast

from funcpipe._src.core.errors import ScheduleError, raise_all
from funcpipe._src.core.shown import guarded, some
from funcpipe._src.data.cost_shares import are_lengths, one_each, slice_shares
from funcpipe._src.data.kinds import KINDS, Kind

PerStage = float | Sequence[float]  # one number for all stages, or one number per stage
_HALVES = {"backward_input": "backward_weight", "backward_weight": "backward_input"}
"""The two halves of B, each with the other half."""
_OPTIONAL = (*_HALVES, "backward", "remat", "bandwidth")
"""Fields that may be None: their value then follows from the other fields."""
LENGTHS = {
    "slices": "length of each slice",
    "slice_times": "time of each slice",
    "microbatches": "factor of each microbatch",
    "microbatch_sizes": "memory factor of each microbatch",
    "speeds": "speed of each device",
}
"""The fields with one number per slice, per microbatch or per device, not per stage."""
_ROUNDING = 1e-9
"""Relative tolerance: by rounding, I may be longer than B by this much. W is then 0."""


class Skip(NamedTuple):
    """A value that one stage stashes and a later stage pops, for `Cost.skips`.

    >>> fp.Cost(skips=[fp.schedules.Skip(0, 3, 0.5)]).skips
    (Skip(stash=0, pop=3, size=0.5),)

    Attributes:
        stash: the index of the stage that stashes the value.
        pop: the index of the stage that pops the value; larger than ``stash``.
        size: the memory of the value for one microbatch, in the unit of `Cost.residual`. The
            gradient of the value has the same size.
    """

    stash: int
    pop: int
    size: float


def _numbers_text(value: Any) -> str:
    return f"({some(map(_numbers_text, value))})" if isinstance(value, tuple) else f"{value:.4g}"  # pyright: ignore[reportUnknownArgumentType]


@dataclass(frozen=True)
class Cost:
    """The times of actions, in one unit of your choice, and their memory, in another unit.

    Each field is one number for all stages, or a sequence with one number per stage, unless its
    description says otherwise. All numbers are for a whole microbatch of factor 1. If microbatches
    are cut into slices, each slice takes its share.

    >>> cost = fp.Cost(forward=[1, 2], backward=[2, 4], comm=0.1)
    >>> cost.of(fp.Kind.B, 1), cost.of(fp.Kind.I, 1)
    (4, 2.0)

    Attributes:
        forward: the time of F. Default: 1.
        backward_input: the time of I. None: B minus W, or half of B if W is None too, or 1 if
            ``backward`` is None.
        backward_weight: the time of W. None: B minus I, or half of B if I is None too, or 1 if
            ``backward`` is None.
        backward: the time of B. None: the sum of I and W. If all three are given, B may differ from
            the sum, as measurements do.
        remat: the time of R. None: the time of F.
        forward_link: the part of the time of F, and of R, in which the device only waits for other
            devices, such as an all-to-all of experts. An overlapping action can compute in this
            time. Default: 0.
        backward_link: the same part of the time of B, and of I. Default: 0.
        offload: the time of O, and of L, on the link between a device and its host. The device
            works on meanwhile. Default: 1.
        reduce: the time of G, on the link between the replicas of a stage. The device works on
            meanwhile. Default: 0.
        gather: the time of U, on the same link as G. The device works on meanwhile. Default: 0.
        step: the time of S. Default: 0.
        comm: the latency of a hop between devices, from the end of an action to the start of an
            action that reads its value. One number, or S - 1 numbers: from each stage to the next
            stage and back. Default: 0.
        bandwidth: the memory that crosses from one device to another per unit of time, one number.
            Values between the same two devices cross one after the other. None: no limit.
        output: the memory of a stage's output, and of its gradient. An output occupies memory of
            its reader from its arrival to the start of the action that reads it, where it becomes
            part of the residual. If that action keeps no residual, to its end. Default: 0.
        skips: the skips, as `Skip` or (stash, pop, size). They occupy links and memory like
            outputs. A skip with several pops needs one entry per pop. Default: none.
        residual: the memory that F (or R, or L) takes at its start, until the end of B or W (or of
            O). Default: 1.
        weight_residual: the part of the residual that stays after I, until the end of W. Default:
            0.5, from the zero-bubble paper (arXiv 2401.10241, table 1). Traced programs measure 0.6
            to 1.6 times ``residual``.
        slices: the lengths of a microbatch's slices, in any unit. (): the lengths of the plan, or
            equal lengths.
        slice_times: the times of a microbatch's slices, in any unit, as `Timeline.cost` measures
            them. (): computed from ``slices`` and ``attention``.
        attention: the share ``a`` of a stage's time that causal attention takes for a whole
            microbatch, one number from 0 to 1. The time of attention grows with the square of the
            length. A slice from x to y, as shares of the sequence, takes ``(1 - a) (y - x) + a (y²
            - x²)`` of the time, and ``y - x`` of the memory. Default: 0.
        microbatches: the factor of each microbatch, for microbatches of unequal work, as
            `fp.batches.pack` returns them. Microbatch m takes ``microbatches[m]`` times the time of
            each of its actions, and as many times the memory. G, S and U run for all microbatches
            together: they and ``comm`` have no factor. (): all factors are 1.
        microbatch_sizes: the memory factor of each microbatch, if it differs from its time factor:
            for residuals, outputs, skips, O and L. (): the factors of ``microbatches``.
        speeds: the speed of each device, for unequal devices. The other fields have the times on a
            device of speed 1. A stage computes for this time divided by the speed of its device;
            links, moves and hops keep their time. (): all speeds are 1.
    """

    forward: PerStage = 1.0
    backward_input: PerStage | None = None
    backward_weight: PerStage | None = None
    backward: PerStage | None = field(default=None, kw_only=True)
    remat: PerStage | None = field(default=None, kw_only=True)
    forward_link: PerStage = field(default=0.0, kw_only=True)
    backward_link: PerStage = field(default=0.0, kw_only=True)
    offload: PerStage = field(default=1.0, kw_only=True)
    reduce: PerStage = field(default=0.0, kw_only=True)
    gather: PerStage = field(default=0.0, kw_only=True)
    step: PerStage = field(default=0.0, kw_only=True)
    comm: PerStage = field(default=0.0, kw_only=True)
    bandwidth: float | None = field(default=None, kw_only=True)
    output: PerStage = field(default=0.0, kw_only=True)
    skips: Sequence[Skip] = field(default=(), kw_only=True)
    residual: PerStage = field(default=1.0, kw_only=True)
    weight_residual: PerStage = field(default=0.5, kw_only=True)
    slices: Sequence[float] = field(default=(), kw_only=True)
    slice_times: Sequence[float] = field(default=(), kw_only=True)
    attention: float = field(default=0.0, kw_only=True)
    microbatches: Sequence[float] = field(default=(), kw_only=True)
    microbatch_sizes: Sequence[float] = field(default=(), kw_only=True)
    speeds: Sequence[float] = field(default=(), kw_only=True)

    @guarded
    def __repr__(self) -> str:
        """Show the fields that differ from ``Cost()``, to four digits."""
        changed = {
            f.name: getattr(self, f.name)
            for f in fields(self)
            if getattr(self, f.name) != f.default
        }
        return f"Cost({', '.join(f'{name}={_numbers_text(value)}' for name, value in changed.items())})"

    def __post_init__(self) -> None:
        faults: list[str] = []
        for name, value in list(vars(self).items()):
            if name in ("skips", "attention", *LENGTHS) or (value is None and name in _OPTIONAL):
                continue
            numbers, form = (value,), "a number from 0"
            if name != "bandwidth":
                form += ", or a sequence of them"
                if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
                    numbers = tuple(value)
                    object.__setattr__(self, name, numbers)
            if not all(map(_is_amount, numbers)):
                faults.append(f"{name} is {form}; got {getattr(self, name)!r}")
        faults += self._take_skips(self.skips) + self._take_lengths()
        if self.bandwidth == 0:
            faults.append("bandwidth must be more than 0; give None for no limit")
        faults = faults or self._long_halves() or self._long_links()
        raise_all("no such cost:", faults, ScheduleError)

    def _take_skips(self, skips: Any) -> list[str]:
        """Store the skips as a tuple of `Skip`. Return the faults in them."""
        if isinstance(skips, str) or not isinstance(skips, Sequence):
            return [f"skips must be a sequence of (stash, pop, size); got {skips!r}"]
        rows = [
            tuple(row) if isinstance(row, (tuple, list)) else (row,)
            for row in cast("Sequence[Any]", skips)
        ]
        bad = [row for row in rows if not _is_skip(row)]
        if not bad:
            object.__setattr__(self, "skips", tuple(Skip(*row) for row in rows))
        return [
            (
                "skips must contain (stash, pop, size), with stages 0 <= stash < pop and a size of "
                f"at least 0; got {row!r}"
            )
            for row in bad
        ]

    def _take_lengths(self) -> list[str]:
        """Store the fields of `LENGTHS` as tuples. Return faults, also those of ``attention``."""
        faults: list[str] = []
        for name, word in LENGTHS.items():
            values: Any = getattr(self, name)
            if not are_lengths(values):
                faults.append(f"{name} must have the {word}, numbers above 0; got {values!r}")
            else:
                object.__setattr__(self, name, tuple(values))
        rows = () if faults else (self.microbatches, self.microbatch_sizes)
        if len({len(row) for row in rows if row}) > 1:
            faults.append(
                "microbatches and microbatch_sizes must have one number per microbatch; got "
                f"{len(self.microbatches)} and {len(self.microbatch_sizes)} numbers"
            )
        if not isinstance(self.attention, (int, float)) or not 0 <= self.attention <= 1:
            faults.append(f"attention must be a share from 0 to 1; got {self.attention!r}")
        return faults

    def _long_halves(self) -> list[str]:
        """Return a fault for each half of B that is longer than B, if the other half is not
        given."""
        faults: list[str] = []
        for name, other in _HALVES.items():
            whole, half = self.backward, getattr(self, name)
            if whole is None or half is None or getattr(self, other) is not None:
                continue
            faults += [
                f"{name}{where} is {_pick(half, stage):g}, more than backward, which is "
                f"{_pick(whole, stage):g}; give {other} too"
                for stage, where in _stages(whole, half)
                if _pick(half, stage) > _pick(whole, stage) * (1 + _ROUNDING)
            ]
        return faults

    def _long_links(self) -> list[str]:
        """Return a fault for each link time that exceeds the time of its action."""
        faults: list[str] = []
        for kind, row in KINDS.items():
            if row.link is None or not getattr(self, row.link):
                continue
            names = {name for names in row.times for name in names}
            names |= {"backward", *_HALVES} if names & {"backward", *_HALVES} else set[str]()
            link = getattr(self, row.link)
            faults += [
                f"{row.link}{where} is a part of the time of {kind}, which is "
                f"{self.of(kind, stage):g}; got {_pick(link, stage):g}"
                for stage, where in _stages(link, *(getattr(self, name) for name in names))
                if _pick(link, stage) > self.of(kind, stage)
            ]
        return faults

    def slice_shares(self, num_slices: int) -> list[tuple[float, float]]:
        """Return each slice's share of its microbatch's time and memory.

        >>> fp.Cost(slices=[3, 1], attention=0.5).slice_shares(2)
        [(0.65625, 0.75), (0.34375, 0.25)]

        Args:
            num_slices: the number of slices per microbatch.

        Returns:
            (share of the time, share of the memory) for each slice. Each of the two adds up to 1.

        Raises:
            ScheduleError: ``slices`` or ``slice_times`` has another number of slices.
        """
        return slice_shares(self.slices, self.slice_times, self.attention, num_slices)

    def piece_shares(self, num_microbatches: int, num_slices: int = 1) -> list[tuple[float, float]]:
        """Return each piece's share of the time and memory of a microbatch of factor 1.

        A piece is a slice of a microbatch, or a microbatch if they are not cut. A slice takes its
        share of its own microbatch.

        >>> fp.Cost(microbatches=[1, 3], slices=[3, 1]).piece_shares(2, 2)
        [(0.75, 0.75), (0.25, 0.25), (2.25, 2.25), (0.75, 0.75)]

        Args:
            num_microbatches: the number of microbatches.
            num_slices: the number of slices per microbatch.

        Returns:
            (share of the time, share of the memory) for each piece: ascending microbatches, and of
            each microbatch ascending slices.

        Raises:
            ScheduleError: ``microbatches``, ``microbatch_sizes``, ``slices`` or ``slice_times`` has
                another number of them.
        """
        slices = self.slice_shares(num_slices)
        return [
            (factor * time, memory * size)
            for factor, memory in self.factors(num_microbatches)
            for time, size in slices
        ]

    def factors(self, num_microbatches: int) -> list[tuple[float, float]]:
        """Return the (time factor, memory factor) of each microbatch.

        >>> fp.Cost(microbatches=[1, 3], microbatch_sizes=[1, 2]).factors(2)
        [(1, 1), (3, 2)]

        Raises:
            ScheduleError: the cost has factors for another number of microbatches.
        """
        rows = (
            one_each(name, "microbatches", getattr(self, name), num_microbatches)
            for name in ("microbatches", "microbatch_sizes")
        )
        times, sizes = rows
        return list(zip(times, sizes if self.microbatch_sizes else times, strict=True))

    @property
    def mean_time(self) -> float:
        """The mean time factor of the microbatches; 1 without factors."""
        return fmean(self.microbatches or (1.0,))

    @property
    def largest_size(self) -> float:
        """The largest memory factor of the microbatches; 1 without factors."""
        return max(self.microbatch_sizes or self.microbatches or (1.0,))

    @property
    def num_stages(self) -> int | None:
        """The number of stages (or layers) of the cost's sequences; None: no field is a
        sequence."""
        return next((len(row) + (name == "comm") for name, row in rows_of(self).items()), None)

    def of(self, kind: Kind, stage: int) -> float:
        """Return the time of one action of a kind on a stage, for a whole microbatch of factor 1.

        >>> fp.Cost(forward=[1, 2]).of(fp.Kind.F, 1)
        2
        """
        for names in KINDS[kind].times:
            values = [self._time(name, stage) for name in names]
            if None not in values:
                return sum(value for value in values if value is not None)
        return 0.0

    def _time(self, name: str, stage: int) -> float | None:
        """Return the time in a field; None if no field gives it.

        The time of a half of B may follow from the other fields.
        """
        value: PerStage | None = getattr(self, name)
        if value is not None or name not in _HALVES:
            return None if value is None else _pick(value, stage)
        if self.backward is None:
            return 1.0
        whole, other = _pick(self.backward, stage), getattr(self, _HALVES[name])
        return whole / 2 if other is None else max(0.0, whole - _pick(other, stage))

    def _half(self, name: str) -> PerStage:
        """Return the time of a half of B, given or derived: one number, or one per stage."""
        given: PerStage | None = getattr(self, name)
        if given is not None:
            return given
        fields = self.backward, self.backward_input, self.backward_weight
        return _by_stage(lambda stage: self._time(name, stage) or 0.0, *fields)

    def both(self, one: tuple[Kind, int, float], other: tuple[Kind, int, float]) -> float:
        """Return the time of two actions that overlap, from their common start to their common end.

        The device computes for one action at a time, and a link works for one action at a time. No
        action is faster than alone. So the time is the largest of three: the computing time of
        both, the link time of both, and the longer action. DeepSeek calls such a pair F&B (arXiv
        2412.19437, table 2).

        >>> cost = fp.Cost(1, 1, 1, forward_link=0.5, backward_link=0.25)
        >>> cost.both((fp.Kind.F, 0, 1.0), (fp.Kind.B, 1, 1.0))
        2.25

        Args:
            one: (kind, stage, share) of the first action. The share is the part of its microbatch's
                time: 1 for a whole microbatch.
            other: the same of the second action.

        Raises:
            ScheduleError: an argument is not such a tuple, or the cost has no such stage.
        """
        try:
            alone = [self.of(kind, stage) * share for kind, stage, share in (one, other)]
            waits = [self._link(kind, stage) * share for kind, stage, share in (one, other)]
        except (KeyError, IndexError, TypeError, ValueError):
            raise ScheduleError(
                "both takes two tuples (kind, stage, share), such as (fp.Kind.F, 0, 1.0), with "
                f"stages of the cost; got {one!r} and {other!r}"
            ) from None
        # sum(alone) - sum(waits) is the computing time of both actions.
        return max(sum(alone) - sum(waits), sum(waits), *alone)

    @property
    def hides(self) -> bool:
        """Whether any action waits for a link, so that an overlapping action can hide the wait."""
        return any(
            max(per_stage(value, 1), default=0.0) > 0
            for value in (self.forward_link, self.backward_link)
        )

    def computing(self) -> Cost:
        """Return the cost without the link times: the computing that no overlap can hide.

        >>> fp.Cost([1, 2], 1, backward=2, forward_link=0.5, backward_link=[0, 1]).computing().backward
        (2, 1)
        """

        def less(name: str, link: str) -> PerStage | None:
            waits: PerStage = getattr(self, link)
            halved = name in _HALVES and waits
            value: PerStage | None = self._half(name) if halved else getattr(self, name)
            if value is None:
                return None
            return _by_stage(lambda stage: _pick(value, stage) - _pick(waits, stage), value, waits)

        forward, back = "forward_link", "backward_link"
        times = {"forward": forward, "remat": forward, "backward_input": back, "backward": back}
        changed: dict[str, Any] = {name: less(name, link) for name, link in times.items()}
        if self.backward_link:  # a W that follows from B keeps its time
            changed["backward_weight"] = self._half("backward_weight")
        return replace(self, **changed, forward_link=0.0, backward_link=0.0)

    def _link(self, kind: Kind, stage: int) -> float:
        name = KINDS[kind].link
        return _pick(getattr(self, name), stage) if name is not None else 0.0

    def group(self, sizes: Sequence[int]) -> Cost:
        """Turn the cost of layers into the cost of stages that each join neighbouring layers.

        Times and residuals of the layers add up. The output of a stage is the output of its last
        layer. Hops and skips within a stage vanish. Skips between the same two stages add up to
        one skip.

        >>> fp.Cost([1, 2, 3], output=[4, 5, 6]).group([2, 1]).forward
        (3, 3)

        Args:
            sizes: the number of layers of each stage, as `fp.models.balance` returns them.

        Raises:
            ScheduleError: a size is not positive, or the sizes do not add up to the cost's layers.
        """
        counts = list(sizes)
        layers = sum(counts)
        if not counts or any(count < 1 for count in counts):
            raise ScheduleError(f"sizes must be positive numbers; got {counts}")
        self.check_stages(
            layers, f"sizes {counts} add up to {layers} layers, but the cost differs:"
        )
        ends = list(accumulate(counts))
        stage_of = [stage for stage, count in enumerate(counts) for _ in range(count)]

        def sums(value: PerStage | None) -> tuple[float, ...] | None:
            if value is None:
                return None
            row = per_stage(value, layers)
            return tuple(
                sum(row[end - count : end]) for end, count in zip(ends, counts, strict=True)
            )

        skips: dict[tuple[int, int], float] = {}
        for stash, pop, size in self.skips:
            ends_at = stage_of[stash], stage_of[pop]
            if ends_at[0] != ends_at[1]:
                skips[ends_at] = skips.get(ends_at, 0.0) + size
        kept = ("comm", "bandwidth", "output", "skips", *LENGTHS, "attention")
        fields: dict[str, Any] = {
            name: value if name in kept else sums(value) for name, value in vars(self).items()
        }
        # Without B, the halves may be implicit ones of each layer, which must be added up, too.
        if self.backward is None:
            fields |= {name: sums(self._half(name)) for name in _HALVES}
        # The output of a stage, and the hop after it, are those of its last layer.
        fields["output"] = tuple(per_stage(self.output, layers)[end - 1] for end in ends)
        if isinstance(self.comm, Sequence):
            fields["comm"] = tuple(self.comm[end - 1] for end in ends[:-1])
        fields["skips"] = tuple(Skip(*places, size) for places, size in skips.items())
        return Cost(**fields)

    def latency(self, stage: int, to: int) -> float:
        """Return the latency between the devices of two stages.

        A skip over several stages has the latency of the slowest hop.

        >>> fp.Cost(comm=[0.1, 0.3]).latency(0, 2)
        0.3
        """
        if isinstance(self.comm, Sequence):
            return max(self.comm[min(stage, to) : max(stage, to)])
        return self.comm

    def check_stages(self, num_stages: int, title: str = "") -> None:
        """Raise ScheduleError if a sequence does not have one number per stage."""
        faults: list[str] = []
        for name, row in rows_of(self).items():
            if len(row) != num_stages - (name == "comm"):
                hint = f" (it needs {num_stages - 1}, one per hop)" if name == "comm" else ""
                faults.append(f"{name} has {len(row)} numbers{hint}")
        faults += [
            f"{skip} is popped by a stage that does not exist"
            for skip in self.skips
            if skip.pop >= num_stages
        ]
        one = f"a cost needs one number, or one for each of {num_stages} stages"
        raise_all(title or f"{one} (of layers: cost.group(sizes)):", faults, ScheduleError)


def rows_of(cost: Cost) -> dict[str, tuple[float, ...]]:
    """Return the fields that are sequences, with one number per stage (``comm``: per hop)."""
    others = ("skips", *LENGTHS)
    return {
        name: value
        for name, value in vars(cost).items()
        if isinstance(value, tuple) and name not in others
    }


def _is_amount(value: Any) -> bool:
    return isinstance(value, (int, float)) and 0 <= value < float("inf")


def _is_skip(row: tuple[Any, ...]) -> bool:
    if len(row) != 3 or type(row[0]) is not int or type(row[1]) is not int:
        return False
    return 0 <= row[0] < row[1] and _is_amount(row[2])


def _stages(*fields: PerStage | None) -> Iterator[tuple[int, str]]:
    """Yield each stage that all sequences among the fields have, and its name for messages.

    If no field is a sequence, only stage 0 is yielded, with an empty name.
    """
    rows = [field for field in fields if isinstance(field, tuple)]
    for stage in range(min(map(len, rows), default=1)):
        yield stage, f" of stage {stage}" if rows else ""


def _by_stage(time: Callable[[int], float], *fields: PerStage | None) -> PerStage:
    """Return ``time(stage)`` for each stage of the fields; one number if none is a sequence."""
    times = [time(stage) for stage, _ in _stages(*fields)]
    return tuple(times) if any(isinstance(field, tuple) for field in fields) else times[0]


def per_stage(value: PerStage, num_stages: int) -> tuple[float, ...]:
    """Return a tuple with the number of each stage."""
    return tuple(value) if isinstance(value, Sequence) else (value,) * num_stages


def _pick(value: PerStage, stage: int) -> float:
    return value[stage] if isinstance(value, Sequence) else value
