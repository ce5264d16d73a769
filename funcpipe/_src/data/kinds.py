"""The kinds of actions, and the one table of what is true of each.

Whatever walks over actions without running them reads this table: the check, the clock, costs,
memory, parsers, pictures. What an action does with values is the row of its kind in
``lower/effects.py``, what it does with a stage its step in ``engine/steps.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum


class Kind(Enum):
    """What an action does; the closed set, by the letters of the zero-bubble paper (arXiv
    2401.10241) and torch."""

    F = "F"
    """Forward of one microbatch through one stage."""
    B = "B"
    """The whole backward: gradients of the input and of the weights."""
    I = "I"
    """Backward of the input only (the paper's B)."""
    W = "W"
    """Backward of the weights only; what `I` left to do."""
    R = "R"
    """Remat: compute again the residual that `F` did not keep."""
    O = "O"
    """Offload: begin to move the residual to host memory, while the device goes on."""
    L = "L"
    """Load: begin to move it back."""
    G = "G"
    """Reduce: begin to sum the gradients of a stage over its replicas; once a batch."""
    U = "U"
    """Unshard: begin to gather the parameters of a stage of which each replica holds a part; once
    or several times."""
    S = "S"
    """Step: the optimizer's step of a stage, once its gradients are whole; once a batch."""

    # Members are singletons: identity is hash enough, and ten times faster than hashing the name in
    # Python.
    __hash__ = object.__hash__

    def __str__(self) -> str:
        return self.value


class Resource(Enum):
    """What an action occupies."""

    DEVICE = "device"
    """It computes: the device does nothing else."""
    TO_HOST = "to host"
    """The link from the device to its host; the device goes on."""
    FROM_HOST = "from host"
    """The link from the host to the device; the device goes on."""
    NETWORK = "network"
    """The link to the other replicas of its stages; the device goes on."""


class Flow(Enum):
    """Which way values go between stages."""

    FORWARD = "forward"
    """Activations and skips, from earlier stages to later ones."""
    BACKWARD = "backward"
    """Their gradients, the other way."""


class Held(Enum):
    """Memory of one stage for one microbatch."""

    RESIDUAL = "residual"
    """What a forward keeps for its backward."""
    WEIGHT_RESIDUAL = "weight residual"
    """What is left of it for the backward of the weights."""
    DIFFERENCE = "what the backward of the input needs alone"


class Scope(Enum):
    """What one action of a kind is for."""

    MICROBATCH = "microbatch"
    """A microbatch, or a slice of one."""
    STAGE = "stage"
    """A stage, once a batch: the action has no number. It comes after everything that adds to the
    stage's gradients."""
    RUN = "run"
    """A run of actions of a stage: those from here to the next action of this kind. The action's
    number counts the runs of the stage, and what the stage computes in the run waits for the
    action."""


@dataclass(frozen=True, kw_only=True)
class KindRow:
    """What is true of a kind of action.

    Attributes:
        word: what it does, in pictures.
        scope: what one action is for.
        after: the kind that must stand before it, of the same stage and microbatch; None: it comes
            first.
        before_backward: does it stand before the backward (B or I) of its stage and microbatch.
        pair: the kind with which it comes in pairs.
        excludes: the kind that a stage and microbatch has in its place.
        flow: which values of other stages it waits for, and hands on at its end; None: it stays
            within its stage.
        takes, frees: the memory that it takes at its start, and frees at its end.
        adds: does it add to the gradients of the weights.
        times: how long it takes, as sums of fields of `Cost`: the first sum that has no None.
        link: the field of `Cost` that says for how much of this time it waits for a link between
            devices; None: it computes all the time.
        units: how long it takes in plan order.
        resource: what it occupies.
        colour: red, green, blue: near those of Okabe and Ito, moved apart until everybody can tell
            any two of them apart, also without one of the three cones; all are light enough for
            dark letters.
        codes: the nearest of a terminal's 256 colours, then lighter ones for a device's further
            stages.
    """

    word: str
    scope: Scope = Scope.MICROBATCH
    after: Kind | None = Kind.F
    before_backward: bool = False
    pair: Kind | None = None
    excludes: Kind | None = None
    flow: Flow | None = None
    takes: Held | None = None
    frees: Held | None = None
    adds: bool = False
    times: tuple[tuple[str, ...], ...]
    link: str | None = None
    units: int = 1
    resource: Resource = Resource.DEVICE
    colour: tuple[int, int, int]
    codes: tuple[int, ...]


KINDS: Mapping[Kind, KindRow] = {
    Kind.F: KindRow(
        word="forward",
        after=None,
        flow=Flow.FORWARD,
        takes=Held.RESIDUAL,
        times=(("forward",),),
        link="forward_link",
        colour=(90, 200, 250),
        codes=(75, 117, 153),
    ),
    Kind.B: KindRow(
        word="backward",
        flow=Flow.BACKWARD,
        excludes=Kind.I,
        frees=Held.RESIDUAL,
        adds=True,
        times=(("backward",), ("backward_input", "backward_weight")),
        link="backward_link",
        units=2,
        colour=(244, 172, 12),
        codes=(214, 221, 229),
    ),
    Kind.I: KindRow(
        word="backward of input",
        flow=Flow.BACKWARD,
        pair=Kind.W,
        excludes=Kind.B,
        frees=Held.DIFFERENCE,
        adds=True,  # to the parameters that do not wait for W, of an eager stage
        times=(("backward_input",),),
        link="backward_link",
        colour=(222, 112, 46),
        codes=(208, 216, 223),
    ),
    Kind.W: KindRow(
        word="backward of weights",
        after=Kind.I,
        pair=Kind.I,
        frees=Held.WEIGHT_RESIDUAL,
        adds=True,
        times=(("backward_weight",),),
        colour=(74, 153, 120),
        codes=(36, 79, 158),
    ),
    Kind.R: KindRow(
        word="remat",
        before_backward=True,
        excludes=Kind.O,
        takes=Held.RESIDUAL,
        times=(("remat",), ("forward",)),
        link="forward_link",
        colour=(178, 128, 172),
        codes=(139, 182, 225),
    ),
    Kind.O: KindRow(
        word="offload",
        before_backward=True,
        pair=Kind.L,
        excludes=Kind.R,
        frees=Held.RESIDUAL,
        times=(("offload",),),
        units=0,
        resource=Resource.TO_HOST,
        colour=(216, 211, 229),
        codes=(252, 254, 255),
    ),
    Kind.L: KindRow(
        word="load",
        after=Kind.O,
        before_backward=True,
        pair=Kind.O,
        takes=Held.RESIDUAL,
        times=(("offload",),),
        units=0,
        resource=Resource.FROM_HOST,
        colour=(244, 204, 185),
        codes=(180, 223, 230),
    ),
    Kind.G: KindRow(
        word="reduce",
        scope=Scope.STAGE,
        after=None,
        times=(("reduce",),),
        units=0,
        resource=Resource.NETWORK,
        colour=(129, 126, 239),
        codes=(99, 141, 183),
    ),
    Kind.U: KindRow(
        word="unshard",
        scope=Scope.RUN,
        after=None,
        times=(("gather",),),
        units=0,
        resource=Resource.NETWORK,
        colour=(142, 177, 111),
        codes=(113, 150, 156),
    ),
    Kind.S: KindRow(
        word="step",
        scope=Scope.STAGE,
        after=None,
        times=(("step",),),
        colour=(152, 229, 117),
        codes=(119, 155, 157),
    ),
}
"""A row for each kind."""

ONCE = tuple(kind for kind, row in KINDS.items() if row.scope is Scope.STAGE)
"""The kinds that stand once a batch, without a microbatch."""

COUNTED = tuple(kind for kind, row in KINDS.items() if row.scope is Scope.RUN)
"""The kinds whose number counts the times that they stand for their stage."""

SPELLING = (
    f"stage, one of {' '.join(kind.value for kind in Kind if kind not in ONCE)}, microbatch, as "
    f"in 2F0 (2F0.1: its slice 1); or stage and one of {' '.join(kind.value for kind in ONCE)}, "
    "as in 2G"
)
"""How actions are written, in messages."""

LINKS = tuple(resource for resource in Resource if resource is not Resource.DEVICE)
"""The links of a device."""

MOVES = tuple(kind for kind, row in KINDS.items() if row.resource is not Resource.DEVICE)
"""The kinds that run on a device's links (to its host, to other replicas), while the device
works."""

COMPUTES = tuple(
    kind
    for kind, row in KINDS.items()
    if row.resource is Resource.DEVICE and row.scope is Scope.MICROBATCH
)
"""The kinds in which a stage computes with its parameters."""

WHOLE = (*ONCE, *COUNTED)
"""The kinds that are for all microbatches, so that they have no slice of one."""

BY_SIZE = tuple(
    kind for kind, row in KINDS.items() if row.resource in (Resource.TO_HOST, Resource.FROM_HOST)
)
"""The kinds that move memory: for a slice they take its share of the microbatch's memory, not of
the time."""

WITHOUT_BACKWARD = tuple(
    kind for kind, row in KINDS.items() if row.flow is Flow.FORWARD or row.scope is Scope.RUN
)
"""The kinds of a batch that computes no gradients."""

ADDS = tuple(kind for kind, row in KINDS.items() if row.adds)
"""The kinds that add to the gradients of the weights."""


def flowing(flow: Flow) -> tuple[Kind, ...]:
    """The kinds that hand values on to other stages, this way."""
    return tuple(kind for kind, row in KINDS.items() if row.flow is flow)
