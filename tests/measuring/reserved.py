"""What torch 1.3 would have reserved on a P40 while torchgpipe trained: its allocator, fed with
what every layer makes.

The published tables say what the allocator had reserved, not what was alive. `parts` runs a model's
parts under FakeTensor and writes down each storage that is made and freed; `reserved` plays that
back, for all microbatches, in the order in which torchgpipe runs them, to an `Allocator`. Besides
what is alive there are three things in it:

- Each device has pools of memory, one for each stream, and what one pool has no other gets.
  torchgpipe copies the inputs of microbatch i, and the gradients that come back, on a stream of
  their own, and torch has 32 of those.
- Segments are cut into blocks, and blocks that do not fit are left over.
- Convolutions with 3x3 filters want room to transform these (Winograd, tiles of 6x6), and do
  without where there is none.
"""

from __future__ import annotations

import itertools
import weakref
from bisect import bisect_left, insort
from collections.abc import Callable, Hashable, Sequence
from math import prod
from typing import Any, NamedTuple

import torch
from measuring.unet import Join, Keep
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

MiB, GiB = 2**20, 2**30
ROOM = int(21.9 * GiB)
"""A P40's 22.4 GiB, without half a GiB for the CUDA context; a guess, which moves the U-Net on two
devices alone by much."""

STREAMS = 32
"""So many streams torch has on a device; who asks for more gets the first ones again."""


# -- the allocator
# -------------------------------------------------------------------------------


class Block:
    """A piece of a segment, between its neighbours."""

    def __init__(
        self, address: int, size: int, before: Block | None = None, after: Block | None = None
    ) -> None:
        self.address, self.size, self.before, self.after, self.free = (
            address,
            size,
            before,
            after,
            False,
        )


Free = list[tuple[int, int, Block]]
"""Free blocks by size, equal ones by address."""


class Allocator:
    """torch 1.3's caching allocator: two pools a stream, best fit, neighbours that are free join.

    Attributes:
        reserved: bytes of all segments.
        peak: the most that were.
    """

    def __init__(self, room: int) -> None:
        self.room, self.reserved, self.peak = room, 0, 0
        self._pools: dict[tuple[int, bool], Free] = {}
        self._used: dict[Hashable, tuple[Block, Free]] = {}
        self._end = 0  # segments get ever new addresses

    def take(self, key: Hashable, nbytes: int, stream: int = 0, *, must: bool = True) -> bool:
        """Memory under a key; False: there is no more, and it need not be."""
        size = max(512, -(-nbytes // 512) * 512)
        small = size <= MiB
        free = self._pools.setdefault((stream, small), [])
        at = bisect_left(free, (size,))
        block = free.pop(at)[2] if at < len(free) else self._segment(size, small=small, must=must)
        if block is None:
            return False
        rest = block.size - size
        if rest >= 512 if small else rest > MiB:
            after = Block(block.address + size, rest, block, block.after)
            if block.after is not None:
                block.after.before = after
            block.size, block.after = size, after
            self._put(after, free)
        block.free = False
        self._used[key] = block, free
        return True

    def give(self, key: Hashable) -> None:
        """Give memory back, into its pool."""
        block, free = self._used.pop(key)
        if (one := block.before) is not None and one.free:
            self._out(one, free)
            block.address, block.size, block.before = one.address, block.size + one.size, one.before
            if one.before is not None:
                one.before.after = block
        if (one := block.after) is not None and one.free:
            self._out(one, free)
            block.size, block.after = block.size + one.size, one.after
            if one.after is not None:
                one.after.before = block
        self._put(block, free)

    def space(self, nbytes: int) -> None:
        """Room for a moment, where there is some."""
        if self.take("space", nbytes, must=False):
            self.give("space")

    def _segment(self, size: int, *, small: bool, must: bool) -> Block | None:
        whole = (
            2 * MiB if small else 20 * MiB if size < 10 * MiB else -(-size // (2 * MiB)) * 2 * MiB
        )
        if self.reserved + whole > self.room:
            for free in self._pools.values():  # give the device back what nobody uses
                for entry in [entry for entry in free if entry[2].before is entry[2].after is None]:
                    free.remove(entry)
                    self.reserved -= entry[0]
            if self.reserved + whole > self.room and not must:
                return None
        self.reserved += whole
        self.peak = max(self.peak, self.reserved)
        self._end += whole
        return Block(self._end - whole, whole)

    def _put(self, block: Block, free: Free) -> None:
        block.free = True
        insort(free, (block.size, block.address, block))

    def _out(self, block: Block, free: Free) -> None:
        del free[bisect_left(free, (block.size, block.address))]


# -- what a part makes
# -------------------------------------------------------------------------------


class Event(NamedTuple):
    """A storage is made, or (no bytes) freed; number -1: room for a moment."""

    number: int
    nbytes: int


class Part(NamedTuple):
    """The layers of one device: bytes of tensors, and what one microbatch makes and frees.

    Attributes:
        weights, given, handed: parameters; what it gets from and hands to other devices.
        forward, sent: a forward that keeps nothing; when its outputs are gone.
        again, backward, end: a forward that keeps all; the backward; when the gradients of inputs
            are gone.
    """

    weights: list[int]
    given: list[int]
    handed: list[int]
    forward: list[Event]
    sent: list[Event]
    again: list[Event]
    backward: list[Event]
    end: list[Event]


class Record(TorchDispatchMode):
    """Writes down which storages operations make, and when these are gone."""

    def __init__(self) -> None:
        super().__init__()
        self._events: list[Event] = []
        self._alive: dict[int, weakref.ref[Any]] = {}
        self._numbers = itertools.count()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else torch imports its compiler

    def since(self) -> list[Event]:
        """What happened since this was asked last."""
        events, self._events = self._events, []
        return events

    def watch(self, tensor: Tensor, *, known: bool = False) -> None:
        """Write down when a storage is made and freed, unless it was known before."""
        storage = tensor.untyped_storage()
        key, number = storage._cdata, next(self._numbers)
        if key in self._alive or not storage.nbytes():
            return

        def gone(_: Any) -> None:
            del self._alive[key]
            if not known:
                self._events.append(Event(number, 0))

        self._alive[key] = weakref.ref(storage, gone)
        if not known:
            self._events.append(Event(number, storage.nbytes()))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, Tensor):
                self.watch(tensor)
        if func is torch.ops.aten.convolution.default:
            self._convolution(args[0], args[1], args[3])
        elif func is torch.ops.aten.convolution_backward.default:
            self._convolution(args[1], args[2], args[4])
            self._convolution(args[1], args[2], args[4])
        return out

    def _convolution(self, x: Tensor, weight: Tensor, stride: list[int]) -> None:
        if tuple(weight.shape[2:]) == (3, 3) and tuple(stride) == (1, 1):
            taken, given = weight.shape[:2]
            tiles = x.shape[0] * -(-x.shape[2] // 4) * -(-x.shape[3] // 4)  # each gives 4x4 numbers
            self._events.append(Event(-1, 4 * 36 * (given * taken + tiles * (given + taken))))


def _tensors(value: Any) -> list[Tensor]:
    return list(value) if isinstance(value, tuple) else [value]


def _bytes(tensors: Sequence[Tensor]) -> list[int]:
    return [prod(one.shape) * one.dtype.itemsize for one in tensors]


def _run(layers: nn.Sequential, x: Any, popped: Sequence[Tensor]) -> tuple[Any, list[Tensor]]:
    """The output, and the skips for parts to come. Skips pair like brackets: the last one kept is
    joined first."""
    kept, others = list[Tensor](), list(popped)
    for layer in layers:
        if isinstance(layer, Keep):
            kept.append(x)
        elif isinstance(layer, Join):
            x = torch.cat((x, kept.pop() if kept else others.pop()), dim=1)
        else:
            x = layer(x)
    return x, kept


def parts(
    make: Callable[[], nn.Sequential], size: tuple[int, ...], balance: Sequence[int]
) -> list[Part]:
    """Run every part once without and once with a backward, on a microbatch without numbers."""
    out: list[Part] = []
    with FakeTensorMode(allow_non_fake_inputs=True):
        model, x, skips, at = make(), torch.empty(size), list[Tensor](), 0
        for count in balance:
            layers = model[at : at + count]
            at += count
            depth, wanted = 0, 0
            for layer in layers:
                depth += isinstance(layer, Keep) - isinstance(layer, Join)
                wanted = max(wanted, -depth)
            popped = [skips.pop() for _ in range(wanted)][::-1]
            part, x, kept = _part(layers, x, popped, first=not out)
            skips += kept
            out.append(part)
    return out


def _part(
    layers: nn.Sequential, x: Any, popped: list[Tensor], *, first: bool
) -> tuple[Part, Any, list[Tensor]]:
    for one in layers.parameters():
        one.grad = torch.empty_like(one)
    record, given = Record(), [*_tensors(x), *popped]
    for one in (
        *layers.parameters(),
        *(one.grad for one in layers.parameters()),
        *layers.buffers(),
        *given,
    ):
        record.watch(one, known=True)
    with record, torch.no_grad():
        y, kept = _run(layers, x, popped)
        forward = record.since()
    handed = [*_tensors(y), *kept]
    following = [torch.empty_like(one) for one in handed]
    taken = tuple(following[: len(following) - len(kept)]) if isinstance(y, tuple) else following[0]
    sizes = _bytes(handed)
    del y, kept, handed
    sent = record.since()
    leaves = [one.detach().requires_grad_(not first) for one in given]
    with record:
        inputs, others = leaves[: len(leaves) - len(popped)], leaves[len(leaves) - len(popped) :]
        y, kept = _run(layers, tuple(inputs) if isinstance(x, tuple) else inputs[0], others)
        again, ends = record.since(), [*_tensors(y), *kept]
        del y, kept
    gradients = [torch.empty_like(one) for one in ends]
    for one in gradients:
        record.watch(one, known=True)
    with record:
        torch.autograd.backward(ends, gradients)
        backward = record.since()
    del ends, gradients, inputs, others, leaves
    weights = _bytes(list(layers.parameters()))
    part = Part(weights, _bytes(given), sizes, forward, sent, again, backward, record.since())
    return part, taken, following[len(_tensors(taken)) :]


# -- a step
# -------------------------------------------------------------------------------


def reserved(part: Part, chunks: int, *, state: int, batch: int = 0, last: bool = False) -> int:
    """Bytes that one device has reserved at its peak: all forwards, then all backwards, the last
    microbatch's first.

    Args:
        part: its layers.
        chunks: microbatches; each but the last is computed again.
        state: numbers that the optimizer keeps for each weight.
        batch: bytes of the batch, on the first device, which has no copies of inputs.
        last: is it the last device, to which no gradients are copied.
    """
    memory = Allocator(ROOM)
    for copy, (number, nbytes) in itertools.product(range(2 + state), enumerate(part.weights)):
        memory.take(("weight", copy, number), nbytes)
    if batch:
        memory.take("batch", batch)

    def play(what: str, chunk: int, events: list[Event]) -> None:
        for number, nbytes in events:
            if number < 0:
                memory.space(nbytes)
            elif nbytes:
                memory.take((what, chunk, number), nbytes)
            else:
                memory.give((what, chunk, number))

    def copied(what: str, chunk: int, sizes: list[int]) -> None:
        for number, nbytes in enumerate(sizes):
            memory.take((what, chunk, number), nbytes, 1 + chunk % STREAMS)

    def done(what: str, chunk: int, sizes: list[int]) -> None:
        for number in range(len(sizes)):
            memory.give((what, chunk, number))

    given, handed = [] if batch else part.given, [] if last else part.handed
    for chunk in range(chunks):
        copied("given", chunk, given)
        if chunk < chunks - 1:
            play("forward", chunk, part.forward)
        else:
            play("again", chunk, part.again)
        if chunk:  # outputs are there until the next device has copied them
            play("forward", chunk - 1, part.sent)
    for chunk in reversed(range(chunks)):
        copied("gradient", chunk, handed)
        if chunk < chunks - 1:
            play("again", chunk, part.again)
        play("again", chunk, part.backward)
        done("gradient", chunk, handed)
        if chunk < chunks - 1:  # and so are gradients of inputs
            play("again", chunk + 1, part.end)
        done("given", chunk, given)
    return memory.peak
