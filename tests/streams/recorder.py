"""Streams, events, copies and an allocator that only write down what happens, on CPU tensors; and
the proof of order.

Every stream has a vector clock. An operation advances its stream's; an event takes a copy of it; a
wait joins it in. A block of memory remembers who read and wrote it, and when. An access that does
not know of one that it must follow is a race, whatever the clock on the wall said. The allocator
follows torch's: a block that dies may be given out again by the next allocation on its own stream,
unless streams recorded on it still work; what is shared copy-on-write cannot be recorded.

A recorder can leave out one wait or one recording (``skip``): the proof must then fail, else the
wait is for nothing.
"""

from __future__ import annotations

import re
import threading
import time
import traceback
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from funcpipe._src.core.tree import flatten
from funcpipe._src.devices.stream import StreamBackend

Clock = dict[str, int]


class Point(NamedTuple):
    """A wait or a recording: what, in which function of the runtime, and did it tell the stream
    anything new."""

    words: str
    site: str
    news: bool


def _site() -> str:
    stack = traceback.extract_stack(limit=12)
    shared = "/streams.py"  # every stage of an overlap waits and records in there
    batches = [
        f for f in stack if "/_src/prefetch/" in f.filename and not f.filename.endswith(shared)
    ]
    run = re.compile(r"/_src/(engine|stages|devices|optimizing|replicas|processes)/")
    frames = batches or [f for f in stack if run.search(f.filename)]
    return f"{frames[-1].name}: {frames[-1].line}"


class Stream:
    """A queue of operations, in order."""

    def __init__(self, recorder: Recorder, name: str, device: torch.device | None) -> None:
        self.recorder, self.name, self.device = recorder, name, device
        self.clock: Clock = {}
        self.waits: dict[str, int] = {}  # since the last operation: for whom, which point

    def step(self) -> int:
        """One more operation; it knows what the host knew when it was queued."""
        self.join(self.recorder.host.clock)
        self.waits = {}
        self.clock[self.name] = self.clock.get(self.name, 0) + 1
        return self.clock[self.name]

    def join(self, clock: Clock) -> None:
        for name, count in clock.items():
            self.clock[name] = max(self.clock.get(name, 0), count)

    def wait(self, name: str, clock: Clock) -> None:
        """Queue a wait for what a stream of this name had done."""
        with self.recorder.lock:  # threads share streams
            self._wait(name, clock)

    def _wait(self, name: str, clock: Clock) -> None:
        recorder, waits = self.recorder, self.waits
        if name in waits:  # two in a row for one stream: the second is enough
            recorder.points[waits[name]] = recorder.points[waits[name]]._replace(news=False)
        news = self.clock.get(name, 0) < clock.get(name, 0)
        waits[name] = len(recorder.points)
        if recorder.point(f"{self.name} waits for {name}", news):
            self.join(clock)

    def wait_event(self, event: Event) -> None:
        self.wait(event.stream, event.clock or {})

    def wait_stream(self, other: Stream) -> None:
        self.wait(other.name, other.clock)


class Event:
    """What a stream had done at some moment."""

    def __init__(self, recorder: Recorder, timed: bool) -> None:
        self.recorder, self.stream, self.timed, self.seconds = recorder, "", timed, 0.0
        self.clock: Clock | None = None

    def record(self, stream: Stream) -> None:
        self.clock, self.stream, self.seconds = dict(stream.clock), stream.name, self.recorder.now()

    def elapsed_time(self, other: Event) -> float:
        assert self.timed
        assert other.timed
        return (other.seconds - self.seconds) * 1e3

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        self.recorder.host.wait(self.stream, self.clock or {})

    def wait(self, stream: Stream) -> None:
        stream.wait_event(self)


@dataclass
class Block:
    """Memory, from its allocation to the death of the last tensor that has it."""

    label: str
    home: Stream | None
    device: torch.device | None
    storages: dict[int, StorageWeakRef] = field(default_factory=dict)
    reads: Clock = field(default_factory=dict)
    writes: Clock = field(default_factory=dict)
    recorded: set[str] = field(default_factory=set)


class Missed(Exception):
    """What was left out is missed; the rest of the run would tell nothing more."""


class Recorder(StreamBackend):
    """A backend for devices "cpu:0", "cpu:1", ...; "cpu" stays a device without streams.

    Attributes:
        points: every wait and every recording, in words, in order.
        faults: every broken rule, in words.
        hasty: is the first one raised.
    """

    def __init__(self, skip: int | None = None, *, hasty: bool = False) -> None:
        self.skip, self.hasty = skip, hasty
        self.points: list[Point] = []
        self.faults: list[str] = []
        self.blocks: dict[int, Block] = {}
        self.dead: dict[str, list[Block]] = {}
        self.host = Stream(self, "host", None)
        self.streams: dict[str, Stream] = {"host": self.host}
        self.local = threading.local()
        self.lock = threading.RLock()
        self.kept: list[object] = []

    def point(self, words: str, news: bool = True) -> bool:
        """Count a wait or a recording. False: it is the one to leave out.

        Args:
            words: what it is.
            news: does it tell the stream anything that it does not know by what it waited for
                before.
        """
        with self.lock:
            self.points.append(Point(words, _site(), news))
            return len(self.points) - 1 != self.skip

    def fault(self, words: str) -> None:
        if words not in self.faults:
            self.faults.append(words)
        if self.hasty:
            raise Missed(words)

    # -- the backend
    # -------------------------------------------------------------------------------

    def asynchronous(self, device: torch.device) -> bool:
        return device.index is not None

    def module(self, device: torch.device) -> Recorder:
        return self

    def lies_on(self, tensor: torch.Tensor, device: torch.device) -> bool:
        found = self.streamed(tensor)
        return found == device if found is not None or self.asynchronous(device) else True

    def streamed(self, tensor: torch.Tensor) -> torch.device | None:
        with self.lock:
            # else memory that the host has taken again passes for what lay there before
            self.reap()
            block = self.blocks.get(address(tensor))
        return None if block is None else block.device

    def copy(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        source = self.streamed(tensor)
        self.local.quiet = True
        try:
            new = tensor.clone()
        finally:
            self.local.quiet = False
        with self.lock:
            reader = self.host if source is None else self.current_stream(source)
            writer = self.current_stream(device) if self.asynchronous(device) else reader
            if (
                source is not None and writer is not reader
            ):  # torch orders a copy between devices on both streams
                reader.join(writer.clock)
                self.read(self.block(tensor), reader)
                writer.join(reader.clock)
            else:
                self.read(self.block(tensor), reader)
            self.allocate(new, writer, device if self.asynchronous(device) else None)
        return new

    def record(self, tensor: torch.Tensor, stream: Stream) -> None:
        cow = torch._C._is_cow_tensor(tensor)
        if self.point(f"{stream.name} is recorded on a tensor") and not cow:
            with self.lock:
                self.block(tensor).recorded.add(stream.name)
        if cow:
            self.fault(f"{stream.name} was recorded on memory that is shared copy-on-write")

    def room(self, like: torch.Tensor, count: int, device: torch.device | None) -> torch.Tensor:
        self.local.quiet = True
        try:
            new = torch.empty(count, dtype=like.dtype)
        finally:
            self.local.quiet = False
        with self.lock:
            self.reap()
            if device is None or not self.asynchronous(device):
                # Page-locked memory: torch gives it out again when the streams that copied from or
                # to it are done.
                block = self.blocks[address(new)] = Block(f"{count} of the host", None, None)
                storage = new.untyped_storage()
                block.storages[storage._cdata] = StorageWeakRef(storage)
            else:
                self.allocate(new, self.current_stream(device), device)
        return new

    def fill(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self.local.quiet = True
        try:
            target.copy_(source)
        finally:
            self.local.quiet = False
        with self.lock:
            device = self.streamed(source) or self.streamed(target) or self.local.stack[-1].device
            assert device is not None
            stream = self.current_stream(device)
            self.read(self.block(source), stream)
            self.write(self.block(target), stream)

    def page_locked(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def grow(self, tensor: torch.Tensor, device: torch.device) -> None:
        self.local.quiet = True
        try:
            super().grow(tensor, device)
        finally:
            self.local.quiet = False
        if self.asynchronous(device):
            with self.lock:
                self.reap()
                self.allocate(tensor, self.current_stream(device), device)

    def shrink(self, tensor: torch.Tensor) -> None:
        self.freed(tensor)
        super().shrink(tensor)

    def hollow(self, tensor: torch.Tensor) -> torch.Tensor:
        self.local.quiet = True
        try:
            return super().hollow(tensor)
        finally:
            self.local.quiet = False

    def pace(self, event: Event) -> None:
        """For the sake of memory alone; no order may hang on it."""

    now = staticmethod(time.perf_counter)
    """When an event is over."""

    # -- torch.cuda
    # -------------------------------------------------------------------------------

    def Stream(self, device: torch.device) -> Stream:
        with self.lock:
            name = f"stream {len(self.streams)} of {device}"
            self.streams[name] = Stream(self, name, device)
            return self.streams[name]

    def Event(self, enable_timing: bool = False) -> Event:
        return Event(self, enable_timing)

    def set_device(self, device: torch.device) -> None:
        """Every thread has all devices."""

    def current_stream(self, device: torch.device) -> Stream:
        stack = [s for s in getattr(self.local, "stack", []) if s.device == device]
        if stack:
            return stack[-1]
        name = f"the caller's stream of {device}"
        with self.lock:
            return self.streams.setdefault(name, Stream(self, name, device))

    def set_stream(self, stream: Stream) -> None:
        """Within ``stream``: another one in its place."""
        self.local.stack = [*self.local.stack[:-1], stream]

    @contextmanager
    def stream(self, stream: Stream):
        self.local.stack = [*getattr(self.local, "stack", []), stream]
        outer = getattr(self.local, "mode", False)
        try:
            if outer:
                yield
            else:
                with self.watching():
                    yield
        finally:
            self.local.stack = self.local.stack[:-1]

    @contextmanager
    def watching(self):
        """Operations of this thread are written down."""
        self.local.mode = True
        try:
            with _Mode(self):
                yield
        finally:
            self.local.mode = False

    # -- memory
    # -------------------------------------------------------------------------------

    def block(self, tensor: torch.Tensor) -> Block:
        """The block of a tensor; memory from before the record is nobody's."""
        self.reap()
        at = address(tensor)
        if at not in self.blocks:
            self.blocks[at] = Block(f"{tuple(tensor.shape)} of the caller", None, None)
        found = self.blocks[at]
        storage = tensor.untyped_storage()
        found.storages.setdefault(storage._cdata, StorageWeakRef(storage))
        return found

    def put(self, tree: object, device: torch.device) -> None:
        """Tensors of the caller lie on a device, written on his stream."""
        for leaf in flatten(tree)[0]:
            if isinstance(leaf, torch.Tensor):
                self.kept.append(leaf)
                with self.lock:
                    block = self.block(leaf)
                    block.device, block.home = device, self.current_stream(device)
                    block.writes = {block.home.name: block.home.step()}

    def reap(self) -> None:
        """Blocks whose last tensor died go back to the stream that they came from."""
        expired = torch.UntypedStorage._expired  # asked of every block before every operation
        for at, block in list(self.blocks.items()):
            storages = block.storages
            gone = [key for key, ref in storages.items() if expired(ref.cdata)]
            for key in gone:
                del storages[key]
            if not storages:
                self._free(at)

    def freed(self, tensor: torch.Tensor) -> None:
        """The memory of a tensor goes, though the tensor lives."""
        with self.lock:
            self.reap()
            if address(tensor) in self.blocks:
                self._free(address(tensor))

    def _free(self, at: int) -> None:
        block = self.blocks.pop(at)
        if block.home is not None:
            self.dead.setdefault(block.home.name, []).append(block)

    def allocate(self, tensor: torch.Tensor, stream: Stream, device: torch.device | None) -> None:
        """New memory, taken from the stream's dead blocks as far as the proof goes."""
        at = address(tensor)
        self.give_out(stream)
        self.blocks[at] = block = Block(
            f"{tuple(tensor.shape)} made on {stream.name}", stream, device
        )
        storage = tensor.untyped_storage()
        block.storages[storage._cdata] = StorageWeakRef(storage)
        block.writes[stream.name] = stream.step()

    def give_out(self, stream: Stream) -> None:
        stream.join(self.host.clock)
        for block in self.dead.pop(stream.name, []):
            for name, count in (*block.reads.items(), *block.writes.items()):
                if (
                    name not in block.recorded
                    and stream.clock.get(name, 0) < count
                    and name != stream.name
                ):
                    self.fault(
                        f"{block.label} is given out again on {stream.name} while {name} may "
                        "still use it"
                    )

    def read(self, block: Block, stream: Stream) -> None:
        now = stream.step()
        self._follows(block, block.writes, stream, "read", "written")
        block.reads[stream.name] = now

    def write(self, block: Block, stream: Stream) -> None:
        now = stream.step()
        self._follows(block, block.writes, stream, "written", "written")
        self._follows(block, block.reads, stream, "written", "read")
        block.writes[stream.name] = now

    def _follows(self, block: Block, others: Clock, stream: Stream, did: str, must: str) -> None:
        for name, count in others.items():
            if stream.clock.get(name, 0) < count:
                self.fault(
                    f"{block.label} is {did} on {stream.name}, which does not wait until it is "
                    f"{must} on {name}"
                )

    def finish(self) -> list[str]:
        """The end of the record: every stream may give out what died on it. Returns the faults."""
        self.reap()
        for stream in list(self.streams.values()):
            self.give_out(stream)
        return self.faults


def address(tensor: torch.Tensor) -> int:
    """Where the tensor's memory begins; lazily shared memory has one address."""
    return torch._C._data_address(tensor)


def _tensors(tree: object) -> list[torch.Tensor]:
    """Those that have memory: not the fake ones with which programs are written."""
    leaves = [leaf for leaf in flatten(tree)[0] if isinstance(leaf, torch.Tensor) and leaf.numel()]
    return [leaf for leaf in leaves if not isinstance(leaf, FakeTensor) and not leaf.is_meta]


class _Mode(TorchDispatchMode):
    """Writes down what every operation reads and writes, on the stream on which it would run."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        recorder, kwargs = self.recorder, kwargs or {}
        if getattr(recorder.local, "quiet", False):
            return func(*args, **kwargs)
        with recorder.lock:
            inputs = _tensors((args, kwargs))
            before = [(tensor, recorder.block(tensor), address(tensor)) for tensor in inputs]
            out = func(*args, **kwargs)
            self._note(func, before, _tensors(out))
        return out

    def _note(self, func, before, outputs) -> None:
        recorder = self.recorder
        devices = {block.device for _, block, _ in before if block.device is not None}
        stream = recorder.host
        if len(devices) > 1:
            recorder.fault(f"{func} mixes tensors of {sorted(map(str, devices))}")
        if devices:
            stream = recorder.current_stream(next(iter(devices)))
        elif not before and getattr(recorder.local, "stack", []):
            stream = recorder.local.stack[-1]
        known = {at for _, _, at in before}
        mutable = func._schema.is_mutable
        if not mutable and outputs and all(address(one) in known for one in outputs):
            for one in outputs:  # a view, or a lazy copy: no memory is touched
                recorder.block(one)
            return
        for tensor, block, at in before:
            recorder.read(block, stream)
            if mutable and address(tensor) != at:  # written into: its own memory from now on
                recorder.allocate(tensor, stream, stream.device)
        if mutable:
            written = {id(one) for one in outputs}
            for tensor, block, at in before:
                if id(tensor) in written and address(tensor) == at:
                    recorder.write(block, stream)
        for one in outputs:
            if address(one) not in known and address(one) not in {address(t) for t, _, _ in before}:
                recorder.allocate(one, stream, stream.device)
