"""Keyed randomness: a draw depends only on the seed, the layer, the draw's number and the
microbatch.

CPU operations share one generator per process, and ``F.dropout`` takes no generator. So `drawing`
catches every random operation of a forward, and this module runs it with a generator that is seeded
by a key. The Python stack shows which layer draws: the innermost layer of the stage whose method
runs.
"""

from __future__ import annotations

import hashlib
import operator
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any

import torch
from torch import Tensor

from funcpipe._src.core.errors import DrawError, PlanError
from funcpipe._src.core.frames import frames, region_of
from funcpipe._src.core.torch_names import schema
from funcpipe._src.data.stage import SCOPE, Stage
from funcpipe._src.stages.drawing import CatchDraws, MeanOverTargets

_global_draw = threading.Lock()


def fold_in(seed: int, data: int | str) -> int:
    """Make a new seed from a seed and a number or a name, such as the training step or the epoch.

    Use it to give each step its own seed: ``fp.run(..., seed=fp.fold_in(seed, step))``. The
    function is named after ``jax.random.fold_in``.

    >>> fp.fold_in(0, 1) == fp.fold_in(0, 1), fp.fold_in(0, 1) == fp.fold_in(1, 0)
    (True, False)

    Args:
        seed: any int.
        data: an int or a str. An int and its decimal text give different seeds.

    Returns:
        An int from 0 to 2**63 - 1, a BLAKE2b hash.

    Raises:
        PlanError: ``seed`` is not an int, or ``data`` is neither an int nor a str.
    """
    try:
        return _mix(operator.index(seed), data if isinstance(data, str) else operator.index(data))
    except TypeError:
        raise PlanError(
            f"fold_in takes a seed and an int or a name: fold_in(seed, step); got {seed!r} and "
            f"{data!r}"
        ) from None


def _mix(*parts: int | str) -> int:
    # The first letter of the type keeps 1 and "1" apart, and the separator keeps ("a", "bc") and
    # ("ab", "c") apart. Shifted to 63 bits, a valid seed for every generator.
    text = "\x1f".join(f"{type(part).__name__[0]}{part}" for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


class Keys:
    """The keys of one run: the seed, and the stage that draws at each path.

    Microbatches are numbered over all replicas. ``first`` is the number of this replica's first
    microbatch.
    """

    def __init__(self, seed: int | None, stages: Sequence[Stage], first: int = 0) -> None:
        self.seed, self.first = seed, first
        self.stages = stages
        self.owners: dict[str, tuple[int, int]] = {}

    def path(self, stage: int, layer: str, part: Stage | None = None) -> str:
        """Return the path of a drawing layer, which is unique in the model.

        So the draws do not depend on the cuts. If two stages come from separate modules and have
        layers with the same path, the stage's name comes first. A function stage draws by its name.
        ``part`` is the simple stage within a composition, by default the running one.
        """
        part = self._part(stage, part)
        return (
            f"{part.name}.{layer}" if layer and id(part) in self._clashing else layer or part.name
        )

    def number(self, path: str, nth: int, microbatch: int) -> int:
        """Return the generator's seed for a draw."""
        return _mix(self.seed or 0, path, nth, self.first + microbatch)

    def claim(self, stage: int, layer: str, what: Any, part: Stage | None = None) -> None:
        """Check that a draw has a seed and its own path.

        Raises:
            DrawError: there is no seed, no path, or another stage draws at the same path. ``what``
                is the operation.
        """
        if self.seed is None:
            raise DrawError(
                f"stage {stage} draws random numbers ({what}), but no seed was given: run(..., "
                "seed=step); a new seed for each step, e.g. fp.fold_in(seed, step)"
            )
        part = self._part(stage, part)
        path = self.path(stage, layer, part)
        if layer and not part.name and id(part) in self._clashing:
            raise DrawError(
                f"stage {stage} draws random numbers in its layer {layer!r} and has no name, "
                "while another stage has layers at the same paths; give the stages names "
                "(name=), so that they draw different numbers"
            )
        if not path:
            raise DrawError(
                f"stage {stage} draws random numbers but has no name to key them by; give it one: "
                "name=..."
            )
        owner = self.owners.setdefault(path, (stage, id(part)))
        if owner != (stage, id(part)):
            raise DrawError(
                f"two stages ({owner[0]} and {stage}) draw random numbers as {path!r} and would "
                "draw equal numbers; give each stage its own name (name=)"
            )

    def _part(self, stage: int, part: Stage | None) -> Stage:
        """Return the simple stage that draws: ``part`` if given, else the running one."""
        return part or SCOPE.get() or self.stages[stage]

    @cached_property
    def _clashing(self) -> set[int]:
        """The simple stages that share the path of a layer with another."""
        parts = [part for stage in self.stages for part in stage.simple()]
        counts = Counter(path for part in parts for path in part.layers())
        return {id(part) for part in parts if any(counts[path] > 1 for path in part.layers())}


@dataclass(slots=True, eq=False)
class RegionDraws:
    """The draws of a ``torch.utils.checkpoint`` region, which a recomputation repeats in order."""

    # The operation and the generator's seed of each draw.
    draws: list[tuple[Any, int]] = field(default_factory=list)
    repetition: Any = None  # the recomputation that ran last
    repeated: int = 0  # the number of draws which that recomputation has repeated

    def next_seed(self, repetition: Any) -> int:
        """Return the seed of the next draw of a recomputation; 0 if the forward drew no more."""
        if self.repetition != repetition:
            # Torch may have ended an earlier recomputation before its last draw.
            self.repetition, self.repeated = repetition, 0
        return self.draws[self.repeated][1] if self.repeated < len(self.draws) else 0

    def is_repeated_by(self, func: Any) -> bool:
        """Count a draw of the recomputation. Return whether it repeats a draw of the forward."""
        self.repeated += 1
        return self.repeated <= len(self.draws) and self.draws[self.repeated - 1][0] is func


class KeyedDraws(CatchDraws):
    """A context in which random operations of one action use generators seeded by their keys.

    Attributes:
        counts: the number of draws so far, by path.
        regions: the draws of each ``torch.utils.checkpoint`` region, by a weak reference to its
            `Region.identity`.
        in_backward: whether only the recomputation of a region may draw.
    """

    def __init__(
        self,
        keys: Keys,
        stage: int,
        places: Mapping[int, str],
        microbatch: int,
        regions: dict[weakref.ref[Any], RegionDraws] | None = None,
    ) -> None:
        self.keys, self.stage, self.places, self.microbatch = keys, stage, places, microbatch
        self.in_backward = regions is not None
        self.counts: dict[str, int] = {}
        self.regions = {} if regions is None else regions
        self.means: list[MeanOverTargets] | None = None

    def forget(self) -> None:
        """Begin the next action: reset the counts of draws."""
        self.counts, self.regions = {}, {}

    def replay(self) -> KeyedDraws | None:
        """Return the context for a backward that repeats draws; None: no checkpoint region
        drew."""
        return (
            KeyedDraws(self.keys, self.stage, self.places, self.microbatch, self.regions)
            if self.regions
            else None
        )

    def caught(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation that may draw, with its key."""
        device = _device(args, kwargs)
        twin = twin_of(func, device.type)
        if kwargs.get("generator") is not None:
            raise DrawError(
                f"stage {self.stage} draws with its own generator in {func}, so the draw would not "
                "depend on the run's seed; leave the generator out: run(..., seed=) keys all draws"
            )
        if twin is not None:
            generator = torch.Generator(device)
            return self._draw(
                generator, func, lambda: twin(*args, **kwargs | {"generator": generator})
            )
        with borrowed(device) as generator:
            return self._draw(generator, func, lambda: func(*args, **kwargs))

    def _draw(self, generator: torch.Generator, func: Any, call: Callable[[], Any]) -> Any:
        """Run an operation with a generator seeded by its key.

        Count the draw only if the generator has moved: attention without dropout draws nothing.
        """
        layer = locate(self.places)
        path = self.keys.path(self.stage, layer)
        regions, repeated, seed = self._regions()
        if repeated is None:
            seed = self.keys.number(path, self.counts.get(path, 0), self.microbatch)
        generator.manual_seed(seed)
        start = generator.get_state()
        try:
            return call()
        finally:  # torch ends a recomputed region by an exception as soon as it has its values
            if not torch.equal(generator.get_state(), start):
                if repeated is None:
                    self.keys.claim(self.stage, layer, func)
                    self.counts[path] = self.counts.get(path, 0) + 1
                elif not repeated.is_repeated_by(func):
                    self._refuse(func, path, repeated)
                for region in regions:
                    self.regions.setdefault(region, RegionDraws()).draws.append((func, seed))

    def _regions(self) -> tuple[list[weakref.ref[Any]], RegionDraws | None, int]:
        """Return the checkpoint regions that run for the first time, and the draws and the next
        seed of the region that runs again.

        A recomputation runs its inner regions for the first time, because each call of
        ``checkpoint`` is a new region. In a forward, a recomputation of an unknown region is
        around the whole run.
        """
        regions: list[weakref.ref[Any]] = []
        for frame in frames():
            region = region_of(frame)
            if region is None:
                continue
            key = weakref.ref(region.identity)
            if region.repetition is None:
                regions.append(key)
                continue
            known = self.regions.get(key) or (RegionDraws() if self.in_backward else None)
            if known is not None:
                return regions, known, known.next_seed(region.repetition)
            break
        return regions, RegionDraws() if self.in_backward else None, 0

    def _refuse(self, func: Any, path: str, repeated: RegionDraws) -> None:
        """Raise DrawError for a draw in a backward that repeats no draw of the forward."""
        if repeated.repetition is None:
            raise DrawError(
                f"{path!r} draws random numbers in the backward of stage {self.stage}; only what "
                "torch.utils.checkpoint computes again may draw there"
            )
        raise DrawError(
            f"torch.utils.checkpoint computes a region of stage {self.stage} again, and {path!r} "
            f"draws other random numbers there than in the forward ({func}); make the region do "
            "the same in each call, or use fp.schedules.remat instead of checkpoint"
        )


def locate(places: Mapping[int, str]) -> str:
    """Find the innermost layer that draws, in the Python stack; "" for none."""
    for frame in frames():
        code = frame.f_code
        if code.co_argcount and code.co_varnames[0] == "self":
            layer = places.get(id(frame.f_locals.get("self")))
            if layer is not None:
                return layer
    return ""


@contextmanager
def borrowed(device: torch.device) -> Generator[torch.Generator]:
    """Return a context with the device's global generator, whose state is restored afterwards.

    For operations that accept no generator.
    """
    with _global_draw:
        generator = default_generator(device)
        state = generator.get_state()
        try:
            yield generator
        finally:
            generator.set_state(state)


def default_generator(device: torch.device) -> torch.Generator:
    """Return the global generator of a device."""
    if device.type == "cpu":
        return torch.default_generator
    module = torch.get_device_module(device.type)
    return module.default_generators[
        device.index if ":" in str(device) else module.current_device()
    ]


@cache
def twin_of(func: Any, device: str = "") -> Callable[..., Any] | None:
    """Return the overload of a random operation that takes a generator, or an equal function for a
    device, or None."""
    if func is torch.ops.aten.native_dropout.default and device == "cpu":
        return _dropout_of_cpu

    def takes(overload: Any) -> bool:
        return any(argument.name == "generator" for argument in schema(overload).arguments)

    if takes(func):
        return func
    signature = [(argument.name, str(argument.type)) for argument in schema(func).arguments]
    packet = func.overloadpacket
    for name in packet.overloads():
        other = getattr(packet, name)
        other_signature = [
            (argument.name, str(argument.type))
            for argument in schema(other).arguments
            if argument.name != "generator"
        ]
        if takes(other) and other_signature == signature:
            return other
    return None


def _dropout_of_cpu(
    input: Tensor, p: float, train: bool | None, *, generator: Any
) -> tuple[Tensor, Tensor]:
    """Compute `torch.native_dropout` as torch does on the CPU, where it takes no generator."""
    mask = torch.empty_like(input).bernoulli_(1 - p, generator=generator)
    return input * mask * (0.0 if p == 1 else 1 / (1 - p)), mask.bool()


def _device(args: Any, kwargs: Any) -> torch.device:
    if kwargs.get("device") is not None:
        return torch.device(kwargs["device"])
    for value in (*args, *kwargs.values()):
        for item in value if isinstance(value, (list, tuple)) else (value,):  # pyright: ignore
            if isinstance(item, Tensor):
                return item.device
    return torch.get_default_device()
