"""Track tensors of a trace whose numbers are known: computed from constants alone, such as
positions and masks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from funcpipe._src.core.torch_names import OpOverload, pytree, schema, without_modes

_MOST = 1 << 18  # the largest number of elements of a tensor whose numbers are kept

_NUMBERS = {
    torch.ops.aten._local_scalar_dense.default,
    torch.ops.aten.equal.default,
    torch.ops.aten.is_nonzero.default,
}
"""Operations that read numbers from a tensor."""

UNKNOWN: Any = object()


class Known:
    """The numbers of those tensors of a trace that depend on no input.

    A stage may branch on them: whether positions are consecutive, whether a mask masks anything.
    The branch is the same as in the eager stage.
    """

    def __init__(self) -> None:
        # By id. The entry keeps the tensor of the trace alive, so that its id stays unique.
        self._real: dict[int, tuple[Tensor, Tensor]] = {}

    def number(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """The result of an operation that reads numbers. UNKNOWN for other tensors and
        operations."""
        if func not in _NUMBERS:
            return UNKNOWN
        arguments = self._of(args, kwargs)
        if arguments is None:
            return UNKNOWN
        with without_modes(), torch.no_grad():
            return func(*arguments[0], **arguments[1])

    def note(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> None:
        """Repeat an operation that has run on the known numbers, if all its tensors are known."""
        if not isinstance(func, OpOverload):
            return
        arguments = (
            None if torch.Tag.nondeterministic_seeded in func.tags else self._of(args, kwargs)
        )
        results = [leaf for leaf in pytree.tree_leaves(out) if isinstance(leaf, Tensor)]
        if (
            arguments is None
            or any(tensor.numel() > _MOST for tensor in results)
            # The numbers of a new empty tensor are arbitrary, so they are not known.
            or "empty" in str(func)
        ):
            if schema(func).is_mutable:
                self._forget(pytree.tree_leaves((args, kwargs)))
            return
        try:
            with without_modes(), torch.no_grad():
                real = func(*arguments[0], **arguments[1])
        except Exception:  # the operation itself raises the error in the trace
            return
        pairs = zip(pytree.tree_leaves(out), pytree.tree_leaves(real), strict=True)
        self._real.update(
            {id(traced): (traced, value) for traced, value in pairs if isinstance(traced, Tensor)}
        )

    def _of(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, Any] | None:
        """The arguments with real numbers. None: some tensor is unknown."""
        leaves, spec = pytree.tree_flatten((tuple(args), dict(kwargs)))
        if any(isinstance(leaf, Tensor) and id(leaf) not in self._real for leaf in leaves):
            return None

        def real(leaf: Any) -> Any:
            if isinstance(leaf, Tensor):
                return self._real[id(leaf)][1]
            return torch.device("cpu") if isinstance(leaf, torch.device) else leaf

        return pytree.tree_unflatten(map(real, leaves), spec)

    def _forget(self, written: Sequence[Any]) -> None:
        """Forget the numbers of tensors that were written into, and of all tensors that share
        their memory."""
        reals = [self._real[id(leaf)][1] for leaf in written if id(leaf) in self._real]
        storages = {real.untyped_storage().data_ptr() for real in reals}
        self._real = {
            key: pair
            for key, pair in self._real.items()
            if pair[1].untyped_storage().data_ptr() not in storages
        }
