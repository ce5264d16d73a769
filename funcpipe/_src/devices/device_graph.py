"""Record the work that a function queues on a device, and replay it without its Python (CUDA
graphs).

`engine.graphs` decides what to record: whole runs, or programs of compiled stages.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar
from weakref import ref

import torch
from torch import Tensor

from funcpipe._src.core.border import fills
from funcpipe._src.core.errors import FuncpipeError
from funcpipe._src.core.plain_tensors import address, is_plain, materialized
from funcpipe._src.core.torch_names import (
    TorchDispatchMode,
    clear_workspaces,
    copy_all,
    pytree,
    version,
)

T = TypeVar("T")

_WARM = 2
"""The number of runs before the rehearsal, because libraries choose kernels at their first calls."""

_recording = threading.Lock()
"""Held during a recording: to begin one, a thread waits for the device, and CUDA forbids that while
another thread records."""


class Unrecordable(Exception):
    """Raised for work that runs but cannot be recorded. The message has the reason."""


class DeviceGraph:
    """Records work and replays it: a `torch.cuda.CUDAGraph`, recorded on its own stream.

    During a recording, other threads may use the device ("thread_local"). But they must not wait
    for the whole device.
    """

    def __init__(self, module: Any, device: torch.device) -> None:
        self.module, self.device = module, device
        self._graph: Any = module.CUDAGraph()
        self._stream: Any = module.Stream(device)
        self._home: Any = module.current_stream(device)
        self._done: Any = None

    def warm(self, work: Callable[[], object]) -> None:
        """Run the work without recording, on the recording's stream.

        Torch requires a stream other than the default stream.
        """
        current = self.module.current_stream(self.device)
        self._stream.wait_stream(current)
        with self.module.stream(self._stream):
            work()
        current.wait_stream(self._stream)

    def rehearse(self, work: Callable[[], object]) -> None:
        """Run the work once more. Raises Unrecordable if it cannot be recorded.

        A failed recording leaks memory in torch, so find the obstacles before.
        """
        with Rehearsal(self.device):
            self.warm(work)

    def record(self, work: Callable[[], T]) -> T:
        """Run the work's Python, and record what it queues. The device does not run it."""
        recording = self.module.graph(
            self._graph, stream=self._stream, capture_error_mode="thread_local"
        )
        # Enter the stream here, too: torch does not restore the stream if a recording fails to end.
        with _recording, self.module.device(self.device), self.module.stream(self._stream):
            # A workspace made during the recording is in the graph's memory, so other work must not
            # use it: clear workspaces before and after.
            clear_workspaces()
            try:
                with recording:
                    return work()
            finally:
                clear_workspaces()

    def play(self) -> None:
        """Replay the recording on the current stream, with the memory of the recording."""
        with self.module.device(self.device):
            self._graph.replay()

    @contextmanager
    def turn(self, memory: Sequence[Tensor]) -> Generator[None]:
        """Return a context whose queued work runs after that of the previous context.

        Replays share the graph's ``memory``, so they must not overlap, on any streams.
        """
        current = self.module.current_stream(self.device)
        if self._done is not None:
            current.wait_event(self._done)
        if current != self._home:
            for tensor in memory:
                tensor.record_stream(current)
        yield
        self._done = self.module.Event()
        self._done.record(current)


class Rehearsal(TorchDispatchMode):
    """Refuses operations that a graph cannot contain: they wait for numbers of the device, or copy
    them to another device."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation that can be recorded. Raises Unrecordable for any other."""
        kwargs = kwargs or {}
        on_device = any(
            isinstance(leaf, Tensor) and leaf.device.type == self.device.type
            for leaf in pytree.arg_tree_leaves(*args, **kwargs)
        )
        tags = getattr(func, "tags", ())
        if on_device and (
            torch.Tag.data_dependent_output in tags or torch.Tag.dynamic_output_shape in tags
        ):
            raise Unrecordable(f"{func} waits for numbers on {self.device}")
        result = func(*args, **kwargs)
        if "attention" in func.name():
            result = pytree.tree_map_only(Tensor, self._as_recorded, result)
        tensors = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)]
        elsewhere = [leaf.device for leaf in tensors if leaf.device.type != self.device.type]
        if on_device and elsewhere:
            raise Unrecordable(f"{func} copies numbers from {self.device} to {elsewhere[0]}")
        return result

    def _as_recorded(self, leaf: Tensor) -> Tensor:
        """Return a result of attention as a recording would return it.

        The keys of its draws are on the host, but on the device during a recording.
        """
        key = leaf.device.type == "cpu" and not leaf.ndim and not leaf.is_floating_point()
        return leaf.to(self.device) if key else leaf


class Recorded:
    """A function of tensors, recorded on its own copies of the tensors.

    A call fills the copies, replays the graph, and copies the results. So a call is as pure as the
    function. Inputs and results are in memory twice.

    Attributes:
        nbytes: the bytes of the input copies.
    """

    def __init__(
        self,
        graph: DeviceGraph,
        device: torch.device,
        tensors: Sequence[Tensor],
        work: Callable[[list[Tensor]], Sequence[Tensor]],
        *,
        steady: bool = False,
    ) -> None:
        """Run the work several times, then record it.

        Args:
            graph: the graph that records.
            device: the device of the work.
            tensors: example inputs with the sizes, strides and types of all later calls, on any
                device.
            work: a function from the recording's tensors to tensors on the device.
            steady: whether to skip the copy of an input that is the same tensor as in the last
                call, with the same version counter. Torch does not count writes through ``.data``.

        Raises:
            Unrecordable: the work runs, but cannot be recorded.
            Exception: raised by the work.
        """
        self._graph, self._steady, self._lock = graph, steady, threading.Lock()
        self._own = [_twin(tensor, device) for tensor in tensors]
        for _ in range(_WARM):
            graph.warm(lambda: work(self._own))
        graph.rehearse(lambda: self._checked(work(self._own), device))
        results = _record(graph, lambda: self._checked(work(self._own), device))
        self._places = [address(tensor) for tensor in self._own]
        numbers = {id(tensor): number for number, tensor in enumerate(self._own)}
        self._passed = [numbers.get(id(tensor)) for tensor in results]
        self._made = [
            _Made.of(tensor)
            for tensor, number in zip(results, self._passed, strict=True)
            if number is None
        ]
        self._before: list[tuple[ref[Tensor], int] | None] = [None] * len(self._own)
        self.nbytes = sum(tensor.untyped_storage().nbytes() for tensor in self._own)

    def _checked(self, results: Sequence[Tensor], device: torch.device) -> list[Tensor]:
        """Return the results without lazy copies. Raises Unrecordable for other than plain
        tensors."""
        own_ids = {id(tensor) for tensor in self._own}
        for result in results:
            if result.device.type != device.type or not is_plain(result):
                raise Unrecordable(
                    f"a result is a {type(result).__name__} on {result.device}, not a plain tensor "
                    f"on {device}"
                )
        return [result if id(result) in own_ids else materialized(result) for result in results]

    def __call__(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return the function's results for these tensors.

        For an input that the function returns unchanged, return the caller's tensor.
        """
        with self._lock, torch.no_grad(), self._graph.turn(self._own):
            self._fill(tensors)
            self._graph.play()
            copies = [each.room() for each in self._made]
            _copy_together(copies, [each.part for each in self._made])
        made = map(_Made.whole, self._made, copies)
        return [next(made) if number is None else tensors[number] for number in self._passed]

    def _fill(self, tensors: Sequence[Tensor]) -> None:
        targets: list[Tensor] = []
        sources: list[Tensor] = []
        for number, (target, source) in enumerate(zip(self._own, tensors, strict=True)):
            if self._steady and self._is_there(number, source):
                continue
            if target.device == source.device:
                targets.append(target)
                sources.append(source.detach())
            else:
                target.copy_(source.detach(), non_blocking=True)
        _copy_together(targets, sources)
        if [address(tensor) for tensor in self._own] != self._places:
            raise FuncpipeError("internal error: the memory that a graph reads from has moved")

    def _is_there(self, number: int, tensor: Tensor) -> bool:
        """Return whether the input copy already has the tensor's numbers, from the last call."""
        if tensor.is_inference():  # torch counts no writes to inference tensors
            return False
        before = self._before[number]
        if before is not None and before[0]() is tensor and before[1] == version(tensor):
            return True
        self._before[number] = ref(tensor), version(tensor)
        return False


class _Made(NamedTuple):
    """A result in the recording's memory."""

    size: torch.Size  # the size of the result
    part: Tensor  # the result without its expanded axes, so that each number appears once
    dense: bool  # whether the part has no gaps

    @classmethod
    def of(cls, result: Tensor) -> _Made:
        """Describe a result."""
        part = _written_once(result.detach())
        return cls(result.size(), part, fills(part))

    def room(self) -> Tensor:
        """Return memory for a copy of the part, with the same strides."""
        part = self.part
        if self.dense:
            return torch.empty_like(part)
        return torch.empty_strided(part.size(), part.stride(), dtype=part.dtype, device=part.device)

    def whole(self, copy: Tensor) -> Tensor:
        """Return the result, from a copy of its part."""
        return copy if copy.size() == self.size else copy.expand(self.size)


def _written_once(tensor: Tensor) -> Tensor:
    """Return the part of a tensor without expanded axes, so that each number appears once."""
    strides = tensor.stride()
    return (
        tensor[tuple(slice(1) if stride == 0 else slice(None) for stride in strides)]
        if 0 in strides
        else tensor
    )


def _copy_together(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy tensors on one device with few kernels.

    Torch fuses copies only if all have the same types and equal strides, so group them.
    """
    alike: dict[Any, tuple[list[Tensor], list[Tensor]]] = {}
    for target, source in zip(targets, sources, strict=True):
        key = target.dtype, source.dtype, target.stride() == source.stride()
        group = alike.setdefault(key, ([], []))
        group[0].append(target)
        group[1].append(source)
    for group in alike.values():
        copy_all(*group)


def _record(graph: DeviceGraph, work: Callable[[], T]) -> T:
    # The work's own error. Afterwards the end of the recording raises another, less useful error.
    messages: list[str] = []

    def noting() -> T:
        try:
            return work()
        except Exception as error:
            messages.append(_line(error))
            raise

    try:
        return graph.record(noting)
    except Exception as error:
        raise Unrecordable((messages or [_line(error)])[0]) from None


def _line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"


def _twin(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a copy on the device: a leaf with the same strides and ``requires_grad``.

    An expanded tensor becomes dense, because a copy into expanded memory would overwrite itself.
    """
    detached = tensor.detach()
    if 0 in tensor.stride():
        twin = detached.to(device, copy=True)
    else:
        twin = torch.empty_strided(
            tensor.size(), tensor.stride(), dtype=tensor.dtype, device=device
        ).copy_(detached)
    return twin.requires_grad_(tensor.requires_grad)
