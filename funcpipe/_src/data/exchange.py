"""What the processes of a plan have to say to each other about a result; a process alone has nobody
to ask."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any


def lies_over(tensor: Any, processes: Sequence[int]) -> bool:
    """Is this a DTensor whose mesh are these processes, in a row."""
    mesh = getattr(tensor, "device_mesh", None)
    return mesh is not None and mesh.mesh.tolist() == [*processes]


def entire(tensor: Any) -> Any:
    """A tensor; of a DTensor all of it, and every process that has a part of it must ask."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def numbers(gradient: Any) -> Any:
    """Return the numbers of a gradient; for a sparse gradient, of its rows only, because all others
    are 0."""
    return gradient.coalesce().values() if gradient.is_sparse else gradient


@dataclass(frozen=True)
class Exchange:
    """``exchange(subject, value)`` returns the values of all processes of a plan, by replica and
    rank.

    Attributes:
        call: the function that exchanges values.
        copies: the processes that have the same stages as this one, by replica, as
            torch.distributed numbers them.
        telling: returns a context for a named step. An error inside the context is sent to the
            other processes.
    """

    call: Callable[[str, Any], list[Any]]
    copies: tuple[int, ...] = ()
    telling: Callable[[str], AbstractContextManager[object]] = nullcontext

    def __call__(self, about: str, mine: Any) -> list[Any]:
        """What every process gives."""
        return self.call(about, mine)

    def here(self, tensor: Any) -> Any:
        """What this process has of a tensor that is spread over the copies; any other one as it
        is."""
        return tensor.to_local() if lies_over(tensor, self.copies) else tensor

    def finite(self, about: str, tensors: Iterable[Any]) -> bool:
        """Are all numbers of these tensors finite, and of those that the others give."""
        finite = [
            bool(entire(numbers(self.here(tensor)).isfinite().all())) for tensor in tensors
        ]  # no early end: every process must take part for every tensor
        return all(self(about, all(finite)))


def _nobody_else(about: str, mine: Any) -> list[Any]:
    return [mine]


alone = Exchange(_nobody_else)
"""The exchange of a process that has no others."""


def claimed_by(path: str, members: Collection[int]) -> tuple[int, ...]:
    """Claim a path for the processes of a pipeline, for as long as their job runs.

    Returns:
        The processes of another pipeline that has claimed the path; () if ``members`` have it now.
        If two pipelines share a process, they run one after the other, so the later pipeline takes
        the path over.
    """
    import torch.distributed as dist

    group: Any = dist.group.WORLD
    store, key, mine = (
        group.get_group_store(),
        f"funcpipe/saves/{path}",
        ",".join(map(str, sorted(members))),
    )
    found = store.compare_set(key, "", mine).decode()
    while found != mine:
        others = tuple(map(int, found.split(",")))
        if not {*others} & {*members}:
            return others
        found = store.compare_set(key, found, mine).decode()
    return ()
