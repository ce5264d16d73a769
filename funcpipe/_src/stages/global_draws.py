"""Find recomputations that draw other numbers than their forward from Python's or numpy's
generator.

Torch's draws are keyed, so a recomputation repeats them. The global generators of Python and numpy
only advance. So a forward that will be computed again reads their positions before and after, which
takes less than a microsecond. If a position changed, the stage or another thread, such as a data
loader, drew a number. Then the outputs of forward and recomputation are compared.
"""

from __future__ import annotations

import ctypes
import random
import sys
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from funcpipe._src.core.errors import DrawError
from funcpipe._src.stages.bound import StageOut

_WORDS = 624
"""The number of 32-bit words of a Mersenne twister, the generator of both. A position follows."""


class Recomputations:
    """The forwards of a stage during which a global generator moved, by microbatch, until their
    recomputation."""

    def __init__(self, stage: int) -> None:
        self.stage = stage
        self.moved: dict[int, list[Tensor]] = {}
        self._positions: Callable[[], tuple[Any, ...]] | None = None

    def positions(self) -> tuple[Any, ...]:
        """Return the present positions of the generators."""
        if self._positions is None:
            self._positions = _reader()
        return self._positions()

    def note(self, microbatch: int, before: tuple[Any, ...], out: StageOut) -> None:
        """Record the outputs of a forward that will be computed again, if a generator moved."""
        if self.positions() != before:
            # Clones, because the next stage may write into its input.
            self.moved[microbatch] = [leaf.clone() for leaf in _leaves(out)]

    def compare(self, microbatch: int, out: StageOut) -> None:
        """Compare a recomputation with its forward. Raises DrawError where the numbers differ."""
        before = self.moved.pop(microbatch, None)
        if before is None or all(map(_are_same, before, _leaves(out))):
            return
        raise DrawError(
            f"stage {self.stage} computes microbatch {microbatch} again for its backward and gets "
            "other numbers than its forward, which drew from the global generator of numpy or of "
            "Python's random; draw with torch (torch.rand, F.dropout), keyed by run(..., seed=), "
            "or do not recompute: use a schedule without fp.schedules.remat, or "
            "fp.Pipe(checkpoint='never')"
        )


def _leaves(out: StageOut) -> list[Tensor]:
    """Return the tensors that a forward returned, detached."""
    leaves = [leaf for border in (out.y, *out.stash.values()) for leaf in border.leaves]
    if out.report.loss is not None:
        leaves.append(out.report.loss.sum)
    return [leaf.detach() for leaf in leaves if isinstance(leaf, Tensor)]


def _are_same(first: Tensor, second: Tensor) -> bool:
    """Return whether two tensors are bit-identical; on devices other than the CPU, up to rounding.

    On accelerators some kernels round differently in each call.
    """
    if first.device.type == "cpu" or not first.is_floating_point():
        # As bytes, so that NaN equals NaN.
        first, second = (each.reshape(-1).view(torch.uint8) for each in (first, second))
        return torch.equal(first, second)
    first, second = first.float(), second.float()
    return torch.allclose(
        second, first, rtol=0.01, atol=0.01 * float(first.abs().mean()), equal_nan=True
    )


def _reader() -> Callable[[], tuple[Any, ...]]:
    """Return a function that reads the positions of both generators; numpy's only if numpy.random
    is imported."""
    python = _python_reader()
    numpy: Any = sys.modules.get("numpy.random")
    if numpy is None:
        return lambda: (python(),)
    other = _numpy_reader(numpy)
    return lambda: (python(), other())


@cache
def _python_reader() -> Callable[[], Any]:
    """Return a reader of the position and the first word of ``random``'s generator, behind its
    object's head."""
    generator: Any = random.random.__self__  # pyright: ignore[reportFunctionMemberAccess]
    start = id(generator) + object.__basicsize__
    if generator.__class__ is random.Random and sys.implementation.name == "cpython":
        words = (ctypes.c_uint32 * (_WORDS + 1)).from_address(start)
        if (*words[1:], words[0]) == random.getstate()[1]:
            return _memory(start)
    return random.getstate


def _numpy_reader(numpy: Any) -> Callable[[], Any]:
    """Return a reader of the last word and the position, which are neighbours in numpy's memory."""
    generator: Any = numpy.get_bit_generator() if hasattr(numpy, "get_bit_generator") else None
    if type(generator).__name__ == "MT19937":
        return _memory(generator.ctypes.state_address + 4 * (_WORDS - 1))
    return lambda: str(numpy.get_state(legacy=False))


def _memory(address: int) -> Callable[[], int]:
    """Return a function that reads 8 bytes at an address."""
    word = ctypes.c_uint64.from_address(address)
    return lambda: word.value
