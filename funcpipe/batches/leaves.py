"""The leaves of a batch: tensors, objects that can move, and what is handed on as it is."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from funcpipe.core.tree import Tree, flatten, locations, map_leaves, map_tensors
from funcpipe.runtime.plain_tensors import materialized
from funcpipe.runtime.stream import StreamBackend


def moves(leaf: Any) -> bool:
    """Can the leaf go to a device: a tensor, or an object with ``to(device)`` (torchrec's Pipelineable is such)."""
    return isinstance(leaf, Tensor) or (not isinstance(leaf, type) and callable(getattr(leaf, "to", None)))


def _records(leaf: Any) -> bool:
    """Can a stream be recorded on it: a tensor, or an object with ``record_stream`` (torchrec's Multistreamable)."""
    return isinstance(leaf, Tensor) or callable(getattr(leaf, "record_stream", None))


def recordable(tree: Tree) -> Iterator[Any]:
    """The leaves on which a stream can be recorded."""
    return filter(_records, flatten(tree)[0])


def streamed(backend: StreamBackend, tree: Tree) -> bool:
    """May some leaf lie on a device with streams, where work on it may still be under way."""
    for leaf in recordable(tree):
        if isinstance(leaf, Tensor):
            if backend.streamed(leaf) is not None:
                return True
        else:
            device = getattr(leaf, "device", None)
            device = device() if callable(device) else device
            if not isinstance(device, torch.device) or backend.asynchronous(device):
                return True
    return False


def materialized_tree(tree: Tree) -> Tree:
    """The tree without memory that is shared copy-on-write, on which no stream could be recorded."""
    if any(isinstance(leaf, Tensor) and materialized(leaf) is not leaf for leaf in flatten(tree)[0]):
        return map_tensors(materialized, tree)
    return tree


def unknown(tree: Tree) -> list[str]:
    """The paths of objects in a batch that can move, and on whose memory no stream can be recorded."""
    leaves = zip(flatten(tree)[0], locations(tree, "batch"), strict=True)
    return [f"{place} ({type(leaf).__name__})" for leaf, place in leaves if moves(leaf) and not _records(leaf)]


def awaited(batch: Tree) -> Tree:
    """Every awaitable of a batch, waited for: a stage of its own, so that the wait is queued where it belongs.

    A stage may return what is not there yet (an asynchronous collective, torchrec's ``Awaitable``). It goes on as it
    is; this stage calls ``wait()`` on each such leaf, in its own thread and on its own stream, and puts in its place
    what that returns. A handle whose ``wait`` returns None or a bool (``torch.distributed.Work``) becomes None.

    >>> class Later:
    ...     def wait(self):
    ...         return 7
    >>> fp.batches.awaited({"now": 1, "then": Later()})
    {'now': 1, 'then': 7}

    Args:
        batch: any tree.
    """

    def wait(leaf: Any) -> Any:
        if isinstance(leaf, type) or not callable(getattr(leaf, "wait", None)):
            return leaf
        value = leaf.wait()
        return None if isinstance(value, bool) else value

    return map_leaves(wait, batch)
