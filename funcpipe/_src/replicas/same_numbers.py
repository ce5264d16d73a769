"""Hash the numbers of parameters, state and batches, and record which parameters were compared."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Iterator, Mapping, MutableMapping
from typing import Any, TypeAlias
from weakref import ReferenceType, ref

from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from funcpipe._src.batch.marks import Axis, Microbatches, Replicate
from funcpipe._src.core.plain_tensors import here, is_plain, memory_view
from funcpipe._src.core.torch_names import version
from funcpipe._src.core.tree import Tree, flatten, locations
from funcpipe._src.replicas.replicas import Sharding

Digests: TypeAlias = Mapping[str, str]
"""By the location of a tensor, written as in Python, a hash of its numbers."""

_TWICE = 2
"""The number of consecutive runs that compare new leaves. A caller with new leaves in every step
computes them from the compared leaves, so further runs compare nothing."""


class ComparedLeaves:
    """Records the compared parameter leaves, so that each leaf is compared only once.

    Attributes:
        had_batch: whether a batch was compared. Only the first batch is compared, because hashes of
            each batch would take time in each run.
    """

    def __init__(self) -> None:
        self.had_batch = False
        self._known: dict[int, ReferenceType[Tensor]] = {}
        self._new: list[Tensor] = []
        self._in_a_row = 0

    def begin(self) -> None:
        """Begin a run, with no leaves to compare yet."""
        self._new = []

    def has_new(self, leaves: Iterable[Any]) -> bool:
        """Return whether there are leaves to compare; of runs prepared together, for the first."""
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        new = [
            leaf
            for leaf in tensors
            if (known := self._known.get(id(leaf))) is None or known() is not leaf
        ]
        if not new:
            self._in_a_row = 0
        if not new or self._new or self._in_a_row >= _TWICE:
            return False
        self._new = new
        return True

    def settle(self) -> None:
        """Record that the new leaves were compared and are equal everywhere."""
        # Drop freed leaves: a new tensor may get the id of a freed one.
        self._known = {key: each for key, each in self._known.items() if each() is not None}
        self._known |= {id(leaf): ref(leaf) for leaf in self._new}
        self._in_a_row += bool(self._new)
        self._new = []

    def forget(self) -> None:
        """Compare all leaves again in the next run.

        After a failure, one process may have stepped and another not.
        """
        self.__init__()


class WholeDigests:
    """The hashes of whole tensors, by the local part that `place` has kept."""

    def __init__(self) -> None:
        self._digests: MutableMapping[Tensor, tuple[int, str]] = WeakIdKeyDictionary()

    def keep(self, part: Tensor, whole: Tensor) -> None:
        """Record the hash of the whole tensor."""
        self._digests[part] = version(here(part.detach())), digest_of(whole)

    def digest(self, part: Tensor) -> str:
        """Return the hash of the whole tensor, or "" if unknown.

        It is unknown after a write to the part, for example by `load`.
        """
        kept = self._digests.get(part)
        if kept is None or kept[0] != version(here(part.detach())):
            return ""
        return kept[1]


whole_digests = WholeDigests()


def digest_of(leaf: Any) -> str:
    """Return a hash of a tensor's numbers, or "" if they cannot be read."""
    if not isinstance(leaf, Tensor):
        return ""
    own = here(leaf.detach())
    if not is_plain(own) or own.is_meta:
        return ""
    own = own.resolve_conj().resolve_neg().contiguous().cpu()
    digest = hashlib.blake2b(f"{tuple(own.shape)} {own.dtype}".encode(), digest_size=8)
    if own.numel():
        digest.update(memory_view(own))
    return digest.hexdigest()


def digests_of(
    tree: Tree,
    root: str,
    cuts: Mapping[int, Sharding | None],
    wanted: Collection[str] | None = None,
) -> Digests:
    """Return hashes of a tree's tensors at the ``wanted`` locations (None: all).

    For a tensor that is sharded over replicas, the hash is of the whole tensor.
    """
    digests: dict[str, str] = {}
    for number, (place, leaf) in enumerate(
        zip(locations(tree, root), flatten(tree)[0], strict=True)
    ):
        if wanted is not None and place not in wanted:
            continue
        digest = whole_digests.digest(leaf) if cuts.get(number) is not None else digest_of(leaf)
        if digest:
            digests[place] = digest
    return digests


def digests_of_batch(trees: Mapping[str, Tree]) -> Digests:
    """Return hashes of the tensors of a batch, by location and shape.

    Processes compare tensors of one shape only, because a process may cut its microbatches itself,
    and another not.
    """
    return {
        f"{place} of shape {tuple(tensor.shape)}": digest
        for root, tree in trees.items()
        for place, tensor in _tensors_of(tree, root)
        if (digest := digest_of(tensor))
    }


def _tensors_of(tree: Tree, root: str) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a batch, also in marks and ready-made microbatches, with locations."""
    for leaf, place in zip(flatten(tree)[0], locations(tree, root), strict=True):
        if isinstance(leaf, Microbatches):
            yield from _tensors_of(leaf.trees, place)
        bare = leaf.value if isinstance(leaf, (Replicate, Axis)) else leaf
        if isinstance(bare, Tensor):
            yield place, bare
