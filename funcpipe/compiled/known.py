"""Numbers that a trace knows: tensors computed from constants alone, such as positions and masks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from funcpipe.core.torch_names import OpOverload, pytree, schema, without_modes

_MOST = 1 << 18
"""Numbers in a tensor that are worth knowing."""

_NUMBERS = {torch.ops.aten._local_scalar_dense.default, torch.ops.aten.equal.default, torch.ops.aten.is_nonzero.default}
"""What takes numbers out of a tensor."""

UNKNOWN: Any = object()


class Known:
    """The numbers of those tensors of a trace that depend on no input.

    A stage may branch on them: whether positions run on, whether a mask masks anything. It decides as in eager.
    """

    def __init__(self) -> None:
        self._real: dict[
            int, tuple[Tensor, Tensor]
        ] = {}  # by id; holds the tensor of the trace, so that ids stay its own

    def number(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """What an operation that takes numbers out gives; UNKNOWN where it is of other tensors, or another operation."""
        if func not in _NUMBERS:
            return UNKNOWN
        found = self._of(args, kwargs)
        if found is None:
            return UNKNOWN
        with without_modes(), torch.no_grad():
            return func(*found[0], **found[1])

    def note(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> None:
        """An operation has run; compute it on the numbers that are known, too."""
        if not isinstance(func, OpOverload):
            return
        found = None if torch.Tag.nondeterministic_seeded in func.tags else self._of(args, kwargs)
        results = [leaf for leaf in pytree.tree_leaves(out) if isinstance(leaf, Tensor)]
        if found is None or any(one.numel() > _MOST for one in results) or "empty" in str(func):
            if schema(func).is_mutable:
                self._forget([leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)])
            return
        try:
            with without_modes(), torch.no_grad():
                real = func(*found[0], **found[1])
        except Exception:  # what is wrong with it shows elsewhere
            return
        pairs = zip(pytree.tree_leaves(out), pytree.tree_leaves(real), strict=True)
        self._real.update({id(one): (one, its) for one, its in pairs if isinstance(one, Tensor)})

    def _of(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, Any] | None:
        """The arguments with numbers for tensors; None where one has none, or lies on a device that computes late."""
        leaves, spec = pytree.tree_flatten((tuple(args), dict(kwargs)))
        if any(isinstance(leaf, Tensor) and id(leaf) not in self._real for leaf in leaves):
            return None
        if any(isinstance(leaf, torch.device) and leaf.type != "cpu" for leaf in leaves):
            leaves = [torch.device("cpu") if isinstance(leaf, torch.device) else leaf for leaf in leaves]
        return pytree.tree_unflatten(
            [self._real[id(leaf)][1] if isinstance(leaf, Tensor) else leaf for leaf in leaves], spec
        )  # pyright: ignore

    def _forget(self, written: Sequence[Tensor]) -> None:
        """Numbers that nobody knows were written: into these, and into what shares memory with them."""
        reals = [self._real[id(one)][1] for one in written if id(one) in self._real]
        gone = {one.untyped_storage().data_ptr() for one in reals}
        self._real = {key: pair for key, pair in self._real.items() if pair[1].untyped_storage().data_ptr() not in gone}
