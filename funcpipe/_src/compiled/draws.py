"""Random draws of a traced stage: found in the trace, keyed when the program runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, NamedTuple

import torch
from torch import Tensor

from funcpipe._src.compiled.known import UNKNOWN, Known
from funcpipe._src.core.plain_tensors import bytes_of, is_plain
from funcpipe._src.core.torch_names import WatchingMode, without_modes
from funcpipe._src.data.stage import SCOPE, Stage
from funcpipe._src.stages.drawing import draws_nothing, may_draw
from funcpipe._src.stages.rng import Keys, borrowed, locate, twin_of


class DrawOp(NamedTuple):
    """One operation that draws."""

    part: Stage | None  # the stage of a composition that contains it. None: the stage itself
    layer: str  # the path of the layer whose method ran; "" for none
    nth: int  # the number of earlier draws under the same key
    what: Any


def draws(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> bool:
    """Whether an operation draws random numbers with these arguments."""
    if not may_draw(func) or draws_nothing(func, tuple(args), dict(kwargs)):
        return False
    first = out[0] if isinstance(out, (tuple, list)) else out
    return not isinstance(first, Tensor) or first.numel() > 0


class Watch(WatchingMode):
    """A mode that records draws, and each operation with its plain arguments.

    Attributes:
        draws: the draws, in order.
        steps: a line for each operation. Two calls of a pure function with the same shapes give the
            same lines.
    """

    def __init__(self, places: Mapping[int, str]) -> None:
        super().__init__()
        self.places = places
        self.draws: list[DrawOp] = []
        self.steps: list[str] = []
        self._counts: Counter[tuple[int, str]] = Counter()
        self._known = Known()

    supports_higher_order_operators = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation and record it."""
        kwargs = kwargs or {}
        number = self._known.number(func, args, kwargs)
        if number is not UNKNOWN:
            return number
        out = func(*args, **kwargs)
        self._known.note(func, args, kwargs, out)
        # "prim" operations only query a tensor, and depend on what torch has cached.
        if getattr(func, "namespace", "") != "prim":
            numbers = f" {_digest(args[0])}" if func is torch.ops.aten.lift_fresh.default else ""
            self.steps.append(f"{func} {_words(args)} {_words(kwargs)}{numbers}")
        if draws(func, args, kwargs, out):
            layer = locate(self.places)
            part = SCOPE.get()
            # The same key as in an eager stage, so compiled and eager stages draw the same numbers.
            key = (id(part), layer)
            self.draws.append(DrawOp(part, layer, self._counts[key], func))
            self._counts[key] += 1
        return out


def _words(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{value.dtype}{list(value.shape)}"
    if isinstance(value, (list, tuple)):
        return f"[{' '.join(map(_words, value))}]"  # pyright: ignore[reportUnknownArgumentType]
    if isinstance(value, dict):
        return " ".join(f"{name}={_words(item)}" for name, item in value.items())  # pyright: ignore
    return repr(value)


def _digest(constant: Tensor) -> str:
    """A short text for the numbers of a tensor that was made outside of torch."""
    with without_modes(), torch.no_grad():
        if is_plain(constant) and constant.device.type == "cpu":
            return blake2b(bytes_of(constant.contiguous()), digest_size=8).hexdigest()
    return ""


@dataclass(slots=True, eq=False)
class Keyring:
    """The generators of a program's draws for one microbatch, each seeded with its key."""

    keys: Keys
    stage: int
    draws: Sequence[DrawOp]
    microbatch: int

    def of(self, draw: int, device: torch.device) -> torch.Generator:
        """Return the generator of a draw. Raises DrawError if the draw has no key."""
        return self._seed(draw, torch.Generator(device))

    def run(self, draw: int, device: torch.device, func: Any, *args: Any, **kwargs: Any) -> Any:
        """Run an operation that takes no generator argument."""
        twin = twin_of(func, device.type)
        if twin is not None:
            return twin(*args, **kwargs, generator=self.of(draw, device))
        with borrowed(device) as generator:
            self._seed(draw, generator)
            return func(*args, **kwargs)

    def _seed(self, draw: int, generator: torch.Generator) -> torch.Generator:
        part, layer, nth, func = self.draws[draw]
        self.keys.claim(self.stage, layer, func, part)
        path = self.keys.path(self.stage, layer, part)
        return generator.manual_seed(self.keys.number(path, nth, self.microbatch))
