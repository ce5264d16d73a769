"""Records the work that a function queues on a device, and plays it again without its Python (CUDA
graphs)."""

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
"""How often work runs before it is rehearsed and recorded: libraries choose kernels at their first
calls."""

_recording = threading.Lock()
"""To begin a recording waits for the device, which is not allowed while another thread records."""


class Unrecordable(Exception):
    """Work that runs and cannot be recorded; the message says what stood in the way."""


class DeviceGraph:
    """Records work and plays it: a graph of a device, `torch.cuda.CUDAGraph`, recorded on a stream
    of its own.

    Other threads may use the device meanwhile ("thread_local"), but for what waits for all of it.
    """

    def __init__(self, module: Any, device: torch.device) -> None:
        self.module, self.device = module, device
        self._graph: Any = module.CUDAGraph()
        self._stream: Any = module.Stream(device)
        self._home: Any = module.current_stream(device)
        self._done: Any = None

    def warm(self, work: Callable[[], object]) -> None:
        """Do the work unrecorded, where it will be recorded; torch asks for a stream that is not
        the default one."""
        current = self.module.current_stream(self.device)
        self._stream.wait_stream(current)
        with self.module.stream(self._stream):
            work()
        current.wait_stream(self._stream)

    def rehearse(self, work: Callable[[], object]) -> None:
        """Do the work once more. Raises Unrecordable where it could not be recorded.

        A recording that fails costs torch memory, so what can be seen before is refused before.
        """
        with Rehearsal(self.device):
            self.warm(work)

    def record(self, work: Callable[[], T]) -> T:
        """Run the work's Python, and keep what it queues instead of running that."""
        recording = self.module.graph(
            self._graph, stream=self._stream, capture_error_mode="thread_local"
        )
        # The stream once more: torch leaves its own behind where a recording cannot be ended.
        with _recording, self.module.device(self.device), self.module.stream(self._stream):
            # Workspaces that are made while it is recorded are the graph's own, and nobody else's
            # afterwards.
            clear_workspaces()
            try:
                with recording:
                    return work()
            finally:
                clear_workspaces()

    def play(self) -> None:
        """Run what was recorded on the current stream, on the memory that it was recorded with."""
        with self.module.device(self.device):
            self._graph.replay()

    @contextmanager
    def turn(self, memory: Sequence[Tensor]) -> Generator[None]:
        """What is queued inside, on this memory, runs after what was queued in the turn before, on
        any stream."""
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
    """Refuses operations that a graph of a device cannot hold: they wait for its numbers, or take
    them elsewhere."""

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
            raise Unrecordable(f"{func} waits for numbers of {self.device}")
        result = func(*args, **kwargs)
        if "attention" in func.name():
            result = pytree.tree_map_only(Tensor, self._as_recorded, result)
        tensors = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)]
        elsewhere = [leaf.device for leaf in tensors if leaf.device.type != self.device.type]
        if on_device and elsewhere:
            raise Unrecordable(f"{func} gives numbers of {self.device} to {elsewhere[0]}")
        return result

    def _as_recorded(self, leaf: Tensor) -> Tensor:
        """A result of attention. The keys of its draws lie on the host, and on the device while
        that is recorded."""
        key = leaf.device.type == "cpu" and not leaf.ndim and not leaf.is_floating_point()
        return leaf.to(self.device) if key else leaf


class Recorded:
    """A function of tensors, recorded on tensors of its own; a call fills these, plays, and copies
    the results out.

    So a call is as pure as the function, and its inputs and its results lie in memory twice.

    Attributes:
        nbytes: of its own tensors.
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
        """Run the work some times, then record it.

        Args:
            graph: that records.
            device: where the work is done.
            tensors: of the sizes, strides and types that every call will have; on any device.
            work: takes the recording's own tensors, and returns tensors of the device.
            steady: a tensor that the call before got too, and that was not written to since, is not
                copied again. (Writes through ``.data`` are not counted by torch.)

        Raises:
            Unrecordable: it ran, and the device refused to record it, or would have.
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
        """The results, copied where memory is shared lazily. Raises Unrecordable for what cannot be
        copied out."""
        own_ids = {id(tensor) for tensor in self._own}
        for result in results:
            if result.device.type != device.type or not is_plain(result):
                raise Unrecordable(
                    f"it gives a {type(result).__name__} on {result.device}, where a plain tensor "
                    f"on {device} is wanted"
                )
        return [result if id(result) in own_ids else materialized(result) for result in results]

    def __call__(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The function's results for these tensors; of a tensor that it returns unchanged, the one
        that came in."""
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
        """Whether this own tensor has the tensor's numbers, copied at the call before."""
        if tensor.is_inference():  # torch does not count writes into it
            return False
        before = self._before[number]
        if before is not None and before[0]() is tensor and before[1] == version(tensor):
            return True
        self._before[number] = ref(tensor), version(tensor)
        return False


class _Made(NamedTuple):
    """A result in the recording's memory.

    Attributes:
        size: its own.
        part: what has memory of its own; all of it, if no axis is expanded.
        dense: the part has no gaps.
    """

    size: torch.Size
    part: Tensor
    dense: bool

    @classmethod
    def of(cls, result: Tensor) -> _Made:
        """That of a result."""
        part = _written_once(result.detach())
        return cls(result.size(), part, fills(part))

    def room(self) -> Tensor:
        """Memory for a copy of the part, with the same strides."""
        part = self.part
        if self.dense:
            return torch.empty_like(part)
        return torch.empty_strided(part.size(), part.stride(), dtype=part.dtype, device=part.device)

    def whole(self, copy: Tensor) -> Tensor:
        """The result, of a copy of its part."""
        return copy if copy.size() == self.size else copy.expand(self.size)


def _written_once(tensor: Tensor) -> Tensor:
    """The part of a tensor that holds each number once, where it is expanded."""
    strides = tensor.stride()
    return (
        tensor[tuple(slice(1) if stride == 0 else slice(None) for stride in strides)]
        if 0 in strides
        else tensor
    )


def _copy_together(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy tensors of one device, those of each type in few kernels: torch does so where all are
    alike."""
    alike: dict[Any, tuple[list[Tensor], list[Tensor]]] = {}
    for target, source in zip(targets, sources, strict=True):
        key = target.dtype, source.dtype, target.stride() == source.stride()
        group = alike.setdefault(key, ([], []))
        group[0].append(target)
        group[1].append(source)
    for group in alike.values():
        copy_all(*group)


def _record(graph: DeviceGraph, work: Callable[[], T]) -> T:
    messages: list[str] = []  # of the work's own error: ending the recording then raises another

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
    """A copy on the device; a leaf that requires gradients as the tensor does. What is expanded is
    written out."""
    detached = tensor.detach()
    if 0 in tensor.stride():
        twin = detached.to(device, copy=True)
    else:
        twin = torch.empty_strided(
            tensor.size(), tensor.stride(), dtype=tensor.dtype, device=device
        ).copy_(detached)
    return twin.requires_grad_(tensor.requires_grad)
