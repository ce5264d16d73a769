"""The last states of a fold, which stages with ``lag`` read by number."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from funcpipe.batches.stage import Fold
from funcpipe.batches.streams import Mark, StreamSet
from funcpipe.core.errors import FuncpipeError
from funcpipe.core.torch_names import version as written
from funcpipe.core.tree import Tree, flatten, locations


class State(NamedTuple):
    """A state of the fold.

    Attributes:
        tree: itself.
        marks: after which it is there.
        versions: where it has which tensors, and their counts of in-place writes as they were when it was made.
    """

    tree: Tree
    marks: tuple[Mark, ...]
    versions: tuple[tuple[str, Tensor, int], ...]


class States:
    """The states that are still read. The loop adds them, each under the number of batches that it has seen.

    Args:
        fold: with the states before the first batch; None: there are none.
        start: the number of the first batch.
        lag: the largest with which a stage reads them.
        here: the streams of the loop.
    """

    def __init__(self, fold: Fold | None, start: int, lag: int, here: StreamSet) -> None:
        self._lag, self._here, self._newest = lag, here, start
        known = (*fold.earlier, fold.init)[-lag - 1 :] if fold else (None,)
        self._first = start - len(known) + 1
        self._kept = {self._first + at: self._made(tree) for at, tree in enumerate(known)}

    def read(self, batch: int, lag: int) -> State:
        """The state that a stage with this lag reads for a batch; its lead is no larger, so it is there."""
        return self._kept[max(batch - lag, self._first)]

    def until(self, index: int) -> tuple[Tree, ...]:
        """Those of at most so many batches, the newest last."""
        return tuple(state.tree for number, state in sorted(self._kept.items()) if number <= index)

    def add(self, tree: Tree) -> None:
        """A new state.

        Raises:
            FuncpipeError: an older one was written into, and somebody reads it.
        """
        for place, tensor, version in (entry for state in self._kept.values() for entry in state.versions):
            if written(tensor) != version:
                raise FuncpipeError(
                    f"the fold writes into its state in place ({place}), and a stage with lag= reads older states; return "
                    "new tensors (clone, or an optimizer that is a function)"
                )
        new, self._newest = self._made(tree), self._newest + 1
        self._kept[self._newest] = new
        self._kept.pop(self._newest - self._lag - 1, None)

    def _made(self, tree: Tree) -> State:
        """A state as the fold left it. Only an older one that is read must not be written into."""
        pairs = zip(flatten(tree)[0], locations(tree, "state"), strict=True) if self._lag else ()
        tensors = [(place, leaf) for leaf, place in pairs if isinstance(leaf, Tensor) and not leaf.is_inference()]
        return State(tree, self._here.marks(), tuple((place, leaf, written(leaf)) for place, leaf in tensors))
