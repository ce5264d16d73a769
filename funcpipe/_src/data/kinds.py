"""The kinds of actions, and one table with the properties of each kind.

All code that looks at actions without running them reads this table: the check, the clock, costs,
memory, parsers and pictures. The table does not own what an action reads and writes
(``lower/effects.py``), nor what an action does with a stage (``engine/steps.py``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum


class Kind(Enum):
    """The kind of work that an action does.

    F, B and W are letters of the zero-bubble paper (arXiv 2401.10241) and of torch; I is the
    paper's B.

    >>> fp.Kind("F") is fp.Kind.F
    True
    """

    F = "F"
    """Forward of one microbatch through one stage."""
    B = "B"
    """Whole backward: the gradients of the input and of the weights."""
    I = "I"
    """Backward of the input. In an eager stage also the weight gradients that need no W."""
    W = "W"
    """Backward of the weights: the weight gradients that `I` did not compute."""
    R = "R"
    """Remat: compute the residual that `F` did not keep."""
    O = "O"
    """Offload: begin to move the residual to host memory, while the device works on."""
    L = "L"
    """Load: begin to move the residual back from host memory, while the device works on."""
    G = "G"
    """Reduce: begin to sum the gradients of a stage over its replicas; once per batch."""
    U = "U"
    """Unshard: begin to gather the parameters of a stage from its replicas or from host memory; once
    or several times per batch."""
    S = "S"
    """Step: step the optimizer of a stage after its last gradient; once per batch."""

    # Members are singletons, so the hash of the identity is enough. It is ten times faster than the
    # hash of the name, which Enum computes in Python, and tables are keyed by kinds everywhere.
    __hash__ = object.__hash__

    def __str__(self) -> str:
        return self.value


class Resource(Enum):
    """What an action occupies while it runs."""

    DEVICE = "device"  # the device itself: it computes, and runs nothing else
    TO_HOST = "to host"  # the link from the device to its host; the device works on
    FROM_HOST = "from host"  # the link from the host to the device; the device works on
    NETWORK = "network"  # the link to the other replicas of its stages; the device works on


class Flow(Enum):
    """The direction in which values go between stages."""

    FORWARD = "forward"  # activations and skips, from earlier to later stages
    BACKWARD = "backward"  # gradients of activations and skips, from later to earlier stages


class Held(Enum):
    """An amount of memory of one stage for one microbatch."""

    RESIDUAL = "residual"  # the data that a forward keeps for its backward
    WEIGHT_RESIDUAL = "weight residual"  # the rest of the residual after I, kept for W
    DIFFERENCE = "what the backward of the input needs alone"
    """The residual without the weight residual: what I frees."""


class Scope(Enum):
    """The work that one action of a kind covers."""

    MICROBATCH = "microbatch"  # one microbatch, or one slice
    STAGE = "stage"
    """One stage, once per batch. The action has no number, and comes after the last action that
    adds to the stage's gradients."""
    RUN = "run"
    """All actions of a stage from here to the stage's next action of this kind. They wait for this
    action. Its number counts such actions of the stage."""


@dataclass(frozen=True, kw_only=True)
class KindRow:
    """The properties of a kind of action."""

    word: str  # the name of the kind in pictures
    scope: Scope = Scope.MICROBATCH  # the work that one action of the kind covers
    # The kind that must come before, on the same stage and microbatch; None: no kind.
    after: Kind | None = Kind.F
    # Whether the kind comes before the backward (B or I) of its stage and microbatch.
    before_backward: bool = False
    pair: Kind | None = None  # the kind that must accompany this kind; None: no kind
    # The kind that a stage and microbatch can have in place of this kind.
    excludes: Kind | None = None
    # The direction of the values that the action receives from other stages and sends at its end;
    # None: the action does not exchange values with other stages.
    flow: Flow | None = None
    # `takes`, `frees`: the memory that the action takes at its start, and frees at its end.
    takes: Held | None = None
    frees: Held | None = None
    adds: bool = False  # whether the action adds to the gradients of the weights
    # The duration, as sums of fields of `Cost`: the first sum without a None.
    times: tuple[tuple[str, ...], ...]
    # The field of `Cost` with the part of the duration in which the action waits for a link between
    # devices; None: the action computes all the time.
    link: str | None = None
    units: int = 1  # the duration in plan order
    resource: Resource = Resource.DEVICE  # what the action occupies
    # Red, green, blue. The colours are near those of Okabe and Ito, but far enough apart for people
    # with colour blindness, and light enough for dark letters.
    colour: tuple[int, int, int]
    # The nearest of a terminal's 256 colours, then lighter colours for a device's later stages.
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
        adds=True,  # an eager stage adds gradients of biases and the like at I, not at W
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
"""The properties of each kind."""

ONCE = tuple(kind for kind, row in KINDS.items() if row.scope is Scope.STAGE)
"""The kinds that appear once per stage and batch, without a microbatch: G and S."""

COUNTED = tuple(kind for kind, row in KINDS.items() if row.scope is Scope.RUN)
"""The kinds whose number counts their appearances in the stage, not microbatches: U."""

SPELLING = (
    f"stage, one of {' '.join(kind.value for kind in Kind if kind not in ONCE)}, microbatch, as "
    f"in 2F0 (2F0.1: its slice 1); or stage and one of {' '.join(kind.value for kind in ONCE)}, "
    "as in 2G"
)
"""The spelling of actions, for messages."""

LINKS = tuple(resource for resource in Resource if resource is not Resource.DEVICE)
"""The links of a device."""

MOVES = tuple(kind for kind, row in KINDS.items() if row.resource is not Resource.DEVICE)
"""The kinds that run on a device's links (to its host, to other replicas) while the device
computes: O, L, G and U."""

COMPUTES = tuple(
    kind
    for kind, row in KINDS.items()
    if row.resource is Resource.DEVICE and row.scope is Scope.MICROBATCH
)
"""The kinds in which a stage computes with its parameters: F, B, I, W and R."""

WHOLE = (*ONCE, *COUNTED)
"""The kinds for all microbatches together, which have no slices: G, S and U."""

BY_SIZE = tuple(
    kind for kind, row in KINDS.items() if row.resource in (Resource.TO_HOST, Resource.FROM_HOST)
)
"""The kinds that move memory to or from the host. For a slice they take its share of the
microbatch's memory, not of the time."""

WITHOUT_BACKWARD = tuple(
    kind for kind, row in KINDS.items() if row.flow is Flow.FORWARD or row.scope is Scope.RUN
)
"""The kinds of a batch without gradients: F and U."""

ADDS = tuple(kind for kind, row in KINDS.items() if row.adds)
"""The kinds that add to the gradients of the weights: B, I and W."""


def flowing(flow: Flow) -> tuple[Kind, ...]:
    """Return the kinds that send values to other stages in a direction."""
    return tuple(kind for kind, row in KINDS.items() if row.flow is flow)
