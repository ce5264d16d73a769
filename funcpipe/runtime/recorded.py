"""Work on one device, recorded once with all that it queues, and played again without its Python (CUDA graphs)."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol, TypeVar
from weakref import ref

import torch
from torch import Tensor

from funcpipe.core.errors import FuncpipeError
from funcpipe.runtime.plain import address

T = TypeVar("T")

_WARM = 3
"""How often work runs before it is recorded: libraries make workspaces and choose kernels at their first calls."""


class Unrecordable(Exception):
    """Work that runs and cannot be recorded; the message says what stood in the way."""


class Graph(Protocol):
    """What records and plays; a device's (`DeviceGraph`), or one that tests put in its place."""

    def warm(self, work: Callable[[], object]) -> None:
        """Do the work as it is done before it is recorded."""
        ...

    def record(self, work: Callable[[], T]) -> T:
        """Do the work's Python, and keep what it queues instead of running it."""
        ...

    def play(self) -> None:
        """Run what was queued, on the memory that it was recorded with."""
        ...

    def turn(self) -> AbstractContextManager[None]:
        """What is queued inside comes after what was queued in the turn before, whatever the streams."""
        ...


class DeviceGraph:
    """A graph of a device, `torch.cuda.CUDAGraph`, recorded on a stream of its own.

    Other threads may use the device meanwhile ("thread_local").
    """

    def __init__(self, module: Any, device: torch.device) -> None:
        self.module, self.device = module, device
        self._graph: Any = module.CUDAGraph()
        self._stream: Any = module.Stream(device)
        self._done: Any = None

    def warm(self, work: Callable[[], object]) -> None:
        """See `Graph`; torch asks for a stream that is not the default one."""
        current = self.module.current_stream(self.device)
        self._stream.wait_stream(current)
        with self.module.stream(self._stream):
            work()
        current.wait_stream(self._stream)

    def record(self, work: Callable[[], T]) -> T:
        """See `Graph`."""
        recording = self.module.graph(self._graph, stream=self._stream, capture_error_mode="thread_local")
        with self.module.device(self.device), recording:
            return work()

    def play(self) -> None:
        """See `Graph`; on the current stream."""
        with self.module.device(self.device):
            self._graph.replay()

    @contextmanager
    def turn(self) -> Generator[None]:
        """See `Graph`."""
        current = self.module.current_stream(self.device)
        if self._done is not None:
            current.wait_event(self._done)
        yield
        self._done = self.module.Event()
        self._done.record(current)


class Recorded:
    """A function of tensors, recorded on tensors of its own: calls fill these, play, and copy the results out.

    So a call is pure as the function is, and holds its memory twice: own tensors in, own tensors out.

    Attributes:
        nbytes: of the tensors that it reads from.
    """

    def __init__(
        self,
        graph: Graph,
        device: torch.device,
        given: Sequence[Tensor],
        work: Callable[[list[Tensor]], Sequence[Tensor]],
        *,
        steady: bool = False,
    ) -> None:
        """Run the work some times, then record it.

        Args:
            graph: that records.
            device: where the work is done.
            given: tensors of the sizes, strides and types that every call will have; on any device.
            work: gets own tensors, and gives tensors of the device.
            steady: a tensor that was given to the call before, and was not written to since, is not copied again.
                (Writes through ``.data`` are not counted by torch.)

        Raises:
            Unrecordable: it ran, and the device refused to record it.
            Exception: what the work raises.
        """
        self._graph, self._steady, self._lock = graph, steady, threading.Lock()
        self._own = [_twin(one, device) for one in given]
        for _ in range(_WARM):
            graph.warm(lambda: work(self._own))
        self._results = list(_record(graph, lambda: work(self._own)))
        self._places = [address(one) for one in self._own]
        numbers = {id(one): number for number, one in enumerate(self._own)}
        self._passed = [numbers.get(id(one)) for one in self._results]
        self._before: list[tuple[ref[Tensor], int] | None] = [None] * len(self._own)
        self.nbytes = sum(one.untyped_storage().nbytes() for one in self._own)

    def __call__(self, given: Sequence[Tensor]) -> list[Tensor]:
        """The function's results for these tensors; what it hands on as it came is what was given."""
        with self._lock, torch.no_grad(), self._graph.turn():
            self._fill(given)
            self._graph.play()
            return [
                _copy(one) if number is None else given[number]
                for one, number in zip(self._results, self._passed, strict=True)
            ]

    def _fill(self, given: Sequence[Tensor]) -> None:
        near: tuple[list[Tensor], list[Tensor]] = [], []
        for number, (own, one) in enumerate(zip(self._own, given, strict=True)):
            if self._steady and self._is_there(number, one):
                continue
            if own.device == one.device:
                near[0].append(own)
                near[1].append(one.detach())
            else:
                own.copy_(one.detach(), non_blocking=True)
        if near[0]:
            torch._foreach_copy_(*near)  # pyright: ignore
        if [address(one) for one in self._own] != self._places:
            raise FuncpipeError("internal error: the memory that a graph reads from has moved")

    def _is_there(self, number: int, tensor: Tensor) -> bool:
        if tensor.is_inference():  # torch does not count writes into it
            return False
        before = self._before[number]
        if before is not None and before[0]() is tensor and before[1] == tensor._version:
            return True
        self._before[number] = ref(tensor), tensor._version
        return False


def _record(graph: Graph, work: Callable[[], T]) -> T:
    first: list[Exception] = []  # to end a recording that failed is an error of its own

    def noting() -> T:
        try:
            return work()
        except Exception as error:
            first.append(error)
            raise

    try:
        return graph.record(noting)
    except Exception as error:
        cause = (first or [error])[0]
        raise Unrecordable(f"{type(cause).__name__}: {(str(cause).strip() or '?').splitlines()[0]}") from error


def _twin(tensor: Tensor, device: torch.device) -> Tensor:
    """A copy on the device, laid out the same; a leaf that requires gradients as the tensor does."""
    return tensor.detach().to(device, copy=True).requires_grad_(tensor.requires_grad)


def _copy(tensor: Tensor) -> Tensor:
    """A copy with the strides of the original; what is expanded is copied once."""
    tensor = tensor.detach()
    part = tensor[tuple(slice(1) if stride == 0 else slice(None) for stride in tensor.stride())]
    new = torch.empty_strided(part.size(), part.stride(), dtype=part.dtype, device=part.device)
    return new.copy_(part).expand(tensor.size())
