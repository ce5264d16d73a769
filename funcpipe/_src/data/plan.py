"""A plan: the lowered program with its stages, its loss and its options.

`lower/plan.py` makes plans, `engine/` runs them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeAlias

from funcpipe._src.core.errors import raise_all
from funcpipe._src.core.notebook import page, picture, shown
from funcpipe._src.core.remembered import declared_fields
from funcpipe._src.core.shown import (
    Facts,
    function_words,
    guarded,
    line,
    named,
    some,
    stages_words,
    tied_words,
)
from funcpipe._src.core.table import Table
from funcpipe._src.data.losses import BY_ROWS, Counts
from funcpipe._src.data.lowered import Lowered
from funcpipe._src.data.schedule import Schedule
from funcpipe._src.data.stage import Stage, names_of

Ties: TypeAlias = tuple[tuple[tuple[int, Any], ...], ...]
"""Groups of (stage, path): the leaves of each group are one parameter."""


_TIME_FIRST = tuple(
    f"torch.nn.modules.{name}("
    for name in ("rnn.RNN", "rnn.LSTM", "rnn.GRU", "activation.MultiheadAttention")
)
"""The first words about torch's layers whose input has time on axis 0, unless ``batch_first``."""


@dataclass(frozen=True, eq=False)
class Plan:
    """A schedule lowered for stages, with a loss: `run`, `simulate` and `draw` take a plan.

    `make_plan` makes plans. ``print(plan)`` shows the program of each lane.

    >>> double = fp.stage(lambda params, x: params * x, name="double")
    >>> plan = fp.make_plan([double], fp.schedules.fill_drain(1, 2, backward=False), devices="cpu")
    >>> plan.num_stages, plan.num_microbatches, plan.num_devices
    (1, 2, 1)

    Attributes:
        stages: the stages.
        schedule: the schedule.
        program: the lowered program, plain data.
        devices: a torch device (or its name) for each lane. None: the run chooses the devices.
        loss: ``(y, target) -> loss``; None: the plan has no loss.
        weight: ``target -> number``, the weight of a microbatch. None: the loss gives its weight.
        ties: groups of (stage, path) that are one parameter.
        train: the value of ``train`` for stages that take it.
        outputs: whether a run returns the merged outputs of the last stage.
        merge: the rule to join the outputs of microbatches; see `make_plan`.
        state: the state of the model at the time of its split. None: not known.
        counts: the weighting of microbatches by the loss itself.
        spare_slots: the number of slots on each edge between lanes, beyond those needed if values
            took no time.
        slices: the lengths of a microbatch's slices, in any unit; () for equal lengths.
        carry: whether a run takes the carry of an earlier run, and returns its own.
    """

    stages: tuple[Stage, ...]
    schedule: Schedule
    program: Lowered = field(repr=False)
    devices: tuple[Any, ...] | None = None
    loss: Callable[..., Any] | None = None
    weight: Callable[..., Any] | None = None
    ties: Ties = ()
    train: bool = True
    outputs: bool = False
    merge: Any = None
    state: tuple[Any, ...] | None = field(default=None, repr=False)
    counts: Counts = BY_ROWS
    spare_slots: int = 0
    slices: tuple[float, ...] = ()
    carry: bool = False

    __getstate__ = declared_fields

    def __post_init__(self) -> None:
        # dataclasses.replace would keep the program of the old schedule, the rule of the old loss.
        fixed = {
            "schedule": len(self.program.order) == sum(map(len, self.schedule.orders)),
            "loss": self.counts.loss is None or self.counts.loss is self.loss,
        }
        raise_all(
            "a plan is made for its schedule and its loss; call make_plan again:",
            [f"{name}= was replaced" for name, same in fixed.items() if not same],
        )

    @property
    def num_stages(self) -> int:
        """The number of stages."""
        return len(self.stages)

    @property
    def num_microbatches(self) -> int:
        """The largest number of microbatches. A batch with fewer rows has fewer microbatches."""
        return self.schedule.num_microbatches

    @property
    def num_devices(self) -> int:
        """The number of lanes."""
        return self.schedule.num_devices

    @cached_property
    def fingerprint(self) -> str:
        """A hash of all options but the functions. Processes with equal plans have equal hashes."""
        # Functions are left out: their hashes differ between processes.
        weighing = self.weight is None, self.counts.summed, type(self.counts.weigh).__name__
        options = self.spare_slots, self.slices, self.merge, self.carry, self.train, self.outputs
        declared = [
            (s.name, s.stash, s.pop, s.feeds, s.state, s.commit is None, s.offers, s.carry)
            for s in self.stages
        ]
        parts = str(self.schedule), self.loss is None, self.ties, weighing, options, declared
        return hashlib.blake2b(repr(parts).encode(), digest_size=16).hexdigest()

    @cached_property
    def hints(self) -> tuple[str, ...]:
        """Sentences about likely mistakes in the plan, for ``print`` and notebooks."""
        hints: list[str] = []
        for number, stage in enumerate(self.stages):
            if self.train and stage.evaluation:
                hints.append(
                    f"stage {number} stays in evaluation mode, as its module was: model.train() "
                    "before it is made a stage"
                )
            paths = [
                path
                for path, words in stage.described()
                if words.startswith(_TIME_FIRST) and "batch_first=True" not in words
            ]
            if paths:
                hints.append(
                    f"layer {paths[0]!r} of stage {number} has batch_first=False, so axis 0 of its "
                    "input is time, but a run cuts axis 0 into microbatches: make the layer with "
                    "batch_first=True, or pass fp.Axis(x, 1)"
                )
        return tuple(hints)

    @property
    def facts(self) -> Facts:
        """The facts for ``repr`` and for notebooks, as (name, words)."""
        schedule = self.schedule
        slices = f" of {schedule.num_slices} slices" if schedule.num_slices > 1 else ""
        devices = (
            "devices chosen at the run"
            if self.devices is None
            else some(dict.fromkeys(self.devices))
        )
        return [
            ("schedule", schedule.name),
            ("stages", stages_words(part.name for part in self.stages)),
            ("microbatches", f"{self.num_microbatches}{slices}"),
            ("lanes", f"{self.num_devices} on {devices}"),
            ("loss", "none" if self.loss is None else function_words(self.loss)),
            ("tied", tied_words(self.ties)),
            ("", named(len(self.hints), "hint")),
        ]

    @guarded
    def __repr__(self) -> str:
        return line("Plan", self.facts)

    @shown
    def _repr_html_(self) -> str:
        heads = ("stage", "name", "lane", "function", "stash", "pop", "feeds", "state", "compiled")
        rows = [
            (
                *(str(number), part.name, str(lane), function_words(part.fn)),
                *map(some, (part.stash, part.pop, part.feeds)),
                *("yes" if flag else "" for flag in (part.state, part.program is not None)),
            )
            for number, (part, lane) in enumerate(
                zip(self.stages, self.schedule.device_of, strict=True)
            )
        ]
        facts = [*self.facts[:-1], *[("hint", hint) for hint in self.hints]]
        return page(
            "Plan",
            facts,
            Table("Stages", heads, tuple(rows), tuple(range(len(heads)))).html(),
            picture(self),
        )

    def __str__(self) -> str:
        devices = "unbound" if self.devices is None else ", ".join(map(str, self.devices))
        program = self.program
        total = sum(len(lane.instructions) for lane in program.lanes)
        head = f"plan: {self.schedule!r} on {devices}; {total} instructions"
        slots = [f"  {lane.head()}" for lane in program.lanes]
        return "\n".join([head, *[f"  {hint}" for hint in self.hints], *slots, *program.lines()])


def forgotten_state(stages: Sequence[Stage], origin: str) -> str:
    """Say that ``state=`` is missing, because training changes the state of some stages; "" if not.

    ``origin`` is the user's name for the object with the model's state; "" without such an object.
    """
    changing = [
        label
        for label, part in zip(names_of(stages), stages, strict=True)
        if part.commit is not None and not part.evaluation
    ]
    if not changing:
        return ""
    begins = (
        f"{origin}.state for the statistics the model came with"
        if origin
        else "the state that training began with"
    )
    return (
        f"state= is missing: training changes the state of {', '.join(changing)}; give "
        f"result.state, or {begins}"
    )
