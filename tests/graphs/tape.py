"""A graph of the CPU that tests put in the place of a device's: it writes down every operation, and
does it again.

As a CUDA graph it knows memory and operations and nothing of Python: numbers that Python took from
tensors cannot be taken (the device would have to wait), those that Python brought in are frozen,
and what is played writes where it was written when it was recorded.
"""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from funcpipe._src.core.plain_tensors import address
from funcpipe._src.devices.stream import StreamBackend

READS = {
    torch.ops.aten._local_scalar_dense.default,
    torch.ops.aten.equal.default,
    torch.ops.aten.is_nonzero.default,
}
"""Operations that give numbers to Python."""


class _Recording(TorchDispatchMode):
    def __init__(self, tape: Tape) -> None:
        super().__init__()
        self.tape = tape

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in READS and args[0].dtype is not torch.uint8:  # states of the host's generator are
            raise RuntimeError("operation not permitted when stream is capturing\nmore words")
        inputs = {
            address(one)
            for one in pytree.tree_leaves((args, kwargs))
            if isinstance(one, torch.Tensor)
        }
        out = func(*args, **(kwargs or {}))
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise RuntimeError("a draw was recorded")
        made = [one for one in pytree.tree_leaves(out) if isinstance(one, torch.Tensor)]
        fresh = [one.numel() > 0 and address(one) not in inputs for one in made]
        # A lazy copy shares its memory until someone writes; a device's graph would have a copy.
        lazy = "lazy_clone" in str(func)
        self.tape.operations.append(
            (func, args, kwargs or {}, made, [lazy or one for one in fresh])
        )
        return out


class Tape:
    """What `funcpipe._src.devices.device_graph.DeviceGraph` does, on the CPU."""

    def __init__(self) -> None:
        self.operations = []
        self.warm_runs = self.plays = self.turns = 0

    def warm(self, work):
        self.warm_runs += 1
        work()

    def rehearse(self, work):
        self.warm(work)

    def record(self, work):
        with _Recording(self):
            out = work()
        for (
            *_,
            made,
            fresh,
        ) in self.operations:  # nobody may lean on numbers that were there when it was recorded
            for one, new in zip(made, fresh, strict=True):
                if new:
                    with torch.no_grad():
                        one.detach().fill_(float("nan") if one.is_floating_point() else 0)
        return out

    def play(self):
        self.plays += 1
        with torch.no_grad():
            for func, args, kwargs, made, fresh in self.operations:
                found = pytree.tree_leaves(func(*args, **kwargs))
                for one, old, new in zip(
                    [x for x in found if isinstance(x, torch.Tensor)], made, fresh, strict=True
                ):
                    if new:
                        old.detach().copy_(one)

    def turn(self, memory):
        self.turns += 1
        return nullcontext()


class Tapes(StreamBackend):
    """The CPU, with graphs."""

    def __init__(self) -> None:
        self.made = []

    def graph(self, device):
        self.made.append(Tape())
        return self.made[-1]
