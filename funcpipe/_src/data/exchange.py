"""Exchange facts about a result between the processes of a plan.

Does not own the transport: `processes/` provides the functions that exchange values.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet


def lies_over(tensor: Any, processes: Sequence[int]) -> bool:
    """Return whether a tensor is a DTensor over a mesh of exactly these processes, in order."""
    mesh = getattr(tensor, "device_mesh", None)
    return mesh is not None and mesh.mesh.tolist() == [*processes]


def entire(tensor: Any) -> Any:
    """Return a tensor; for a DTensor its full tensor. All processes of a DTensor must call this."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def numbers(gradient: Any) -> Any:
    """Return the numbers of a gradient; for a sparse gradient, of its rows only, because all others
    are 0."""
    return gradient.coalesce().values() if gradient.is_sparse else gradient


@dataclass(frozen=True)
class Exchange:
    """``exchange(subject, value)`` returns the values of all processes of a plan, by replica and
    rank."""

    call: Callable[[str, Any], list[Any]]  # the function that exchanges values
    # The processes that have the same stages as this one, by replica, as torch.distributed numbers
    # them.
    copies: tuple[int, ...] = ()
    # Returns a context for a named step. An error inside the context is sent to the other
    # processes.
    telling: Callable[[str], AbstractContextManager[object]] = nullcontext

    def __call__(self, about: str, mine: Any) -> list[Any]:
        """Return the values of all processes for a named subject."""
        return self.call(about, mine)

    def here(self, tensor: Any) -> Any:
        """Return this process's part of a tensor that is spread over the copies; others as they
        are."""
        return tensor.to_local() if lies_over(tensor, self.copies) else tensor

    def finite(self, about: str, tensors: Iterable[Any]) -> bool:
        """Return whether all numbers are finite, in this and in all other processes."""
        # A list, without an early end: `full_tensor` is a collective, so each process must reach it
        # for each tensor. With a generator, one process could stop early and the others would hang.
        finite = [bool(entire(numbers(self.here(tensor)).isfinite().all())) for tensor in tensors]
        return all(self(about, all(finite)))


def _nobody_else(about: str, mine: Any) -> list[Any]:
    return [mine]


alone = Exchange(_nobody_else)  # the exchange of a run in a single process


def claimed_by(path: str, members: Collection[int]) -> tuple[int, ...]:
    """Claim a path for the processes of a pipeline, for as long as their job runs.

    Returns:
        The processes of another pipeline that has claimed the path; () if ``members`` have it now.
        If two pipelines share a process, they run one after the other, so the later pipeline takes
        the path over.
    """
    import torch.distributed as dist

    group: Any = dist.group.WORLD
    store = group.get_group_store()
    key = f"funcpipe/saves/{path}"
    mine = ",".join(map(str, sorted(members)))
    # compare_set is atomic: of several pipelines that claim at once, one wins, the others see it.
    found = store.compare_set(key, "", mine).decode()
    while found != mine:
        others = tuple(map(int, found.split(",")))
        if not {*others} & {*members}:
            return others
        found = store.compare_set(key, found, mine).decode()
    return ()


open_pipelines: WeakSet[Any] = WeakSet()
"""The open `ranks` of this process whose stages are divided among several processes."""
