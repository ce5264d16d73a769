"""Stand-ins for tensors of other stages: shape, type and device, but no numbers.

A stage that is cut between blocks runs the model's own forward, which also uses tensors of other
stages: parameters of embeddings, and outputs of earlier blocks. `Unknown` tensors replace them.
Each operation with an Unknown returns Unknown tensors, computed on the meta device. So the data
flow between stages is exact: an output is either right, or Unknown and raises PlanError. The
outcome does not depend on numbers, so it is the same in every call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, Self, cast

import torch
from torch import Tensor

from funcpipe._src.core.errors import PlanError
from funcpipe._src.core.tensor_layout import TensorLayout
from funcpipe._src.core.torch_names import (
    OpOverload,
    innermost_tensor,
    plain_function,
    schema,
    without_modes,
    wrapper_tensor,
)
from funcpipe._src.core.tree import Tree, flatten, map_leaves, tensors_in

_ATEN = torch.ops.aten
_FILLS: dict[Any, Callable[[tuple[Any, ...]], Any]] = {
    _ATEN.zeros_like: lambda args: 0,
    _ATEN.new_zeros: lambda args: 0,
    _ATEN.ones_like: lambda args: 1,
    _ATEN.new_ones: lambda args: 1,
    _ATEN.full_like: lambda args: args[1],
    _ATEN.new_full: lambda args: args[2],
}
"""Operations that need only a tensor's shape and type, with the number that they fill in. Their
results are known."""


class UnknownValueError(PlanError):
    """Raised if a forward needs the numbers of a tensor that another stage has."""

    def __init__(self, source: str, need: str) -> None:
        super().__init__(f"{need} {source!r}, which another stage has")
        self.source, self.need = source, need


class Unknown(Tensor):
    """A tensor whose numbers another stage has. ``source`` names their origin, for messages."""

    source: str
    __torch_function__: Any = plain_function

    def __new__(cls, layout: TensorLayout, device: torch.device, source: str) -> Self:
        """Make a tensor with a layout that claims to be on ``device``."""
        made = wrapper_tensor(
            cls, layout.size, strides=layout.strides, dtype=layout.dtype, device=device
        )
        made.source = source
        return made

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"<Unknown {self.dtype} {list(self.shape)} of {self.source}>"

    def __deepcopy__(self, memo: dict[int, Any]) -> Unknown:
        return Unknown(TensorLayout.of(self), self.device, self.source)

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Return the result of an operation, without numbers."""
        kwargs = dict(kwargs or {})
        first = next(
            tensor
            for tensor in tensors_in([*args, *kwargs.values()])
            if isinstance(tensor, Unknown)
        )
        written = [
            args[place] if place < len(args) else kwargs.get(each.name)
            for place, each in _written(func)
        ]
        # A write of unknown numbers into a known tensor would make its numbers wrong.
        if any(not isinstance(tensor, Unknown) for tensor in tensors_in(written)):
            raise UnknownValueError(
                first.source, f"{func.name()} writes into a tensor of this stage the numbers of"
            )
        device = first.device
        if kwargs.get("device") is not None:
            device, kwargs["device"] = torch.device(kwargs["device"]), torch.device("meta")
        if func is _ATEN.index.Tensor:
            args = (args[0], _as_places(args[1]))
        known = (
            _map(_layout, args),
            tuple((name, _map(_layout, value)) for name, value in kwargs.items()),
        )
        try:
            # Arguments that cannot be hashed bypass the cache.
            outcome = _outcome if _is_hashable(known) else _outcome.__wrapped__
            out = outcome(func, *known, kinds=_map(type, known))
        except Exception as error:
            name = func.name() if hasattr(func, "name") else str(func)
            raise UnknownValueError(first.source, f"{name} needs the numbers of") from error
        if written:
            if [_layout(tensor) for tensor in written] != (
                [out] if isinstance(out, TensorLayout) else list(out or ())
            ):
                raise UnknownValueError(
                    first.source, f"{func.name()} changes in place the shape of"
                )
            return written[0] if isinstance(out, TensorLayout) else written
        fill = _FILLS.get(func.overloadpacket)
        if fill is not None:
            return out.on(device).fill_(fill(args))
        return _map(
            lambda leaf: (
                Unknown(leaf, device, first.source) if isinstance(leaf, TensorLayout) else leaf
            ),
            out,
        )


def is_unknown(leaf: Any) -> bool:
    """Return whether a leaf is `Unknown`, also inside a transform of torch.func."""
    return isinstance(leaf, Unknown) or (
        isinstance(leaf, Tensor) and isinstance(innermost_tensor(leaf), Unknown)
    )


def first_unknown(tree: Tree) -> Unknown | None:
    """Return the first `Unknown` leaf of a tree."""
    return next(
        (cast("Unknown", innermost_tensor(leaf)) for leaf in flatten(tree)[0] if is_unknown(leaf)),
        None,
    )


def unknown(shape: Sequence[int], dtype: torch.dtype, device: torch.device, source: str) -> Unknown:
    """Make an `Unknown` tensor of a shape and type, with its numbers at ``source``."""
    return Unknown(TensorLayout.contiguous(shape, dtype), device, source)


def unknown_like(tree: Tree, source: str) -> Tree:
    """Replace the tensors and numbers in a tree by `Unknown` tensors; all else stays."""

    def without_numbers(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return Unknown(TensorLayout.of(leaf), leaf.device, source)
        if isinstance(leaf, (bool, int, float, complex)):
            return unknown((), torch.result_type(leaf, leaf), torch.device("cpu"), source)
        return leaf

    return map_leaves(without_numbers, tree)


@lru_cache(maxsize=4096)
def _outcome(func: Any, args: Any, kwargs: Any, *, kinds: Any) -> Any:
    """Compute the layouts of an operation's results, by torch's kernels for the meta device.

    ``kinds`` has the types of the arguments: True, 1 and 1.0 would be one cache key.
    """

    def tensor(leaf: Any) -> Any:
        return leaf.on("meta") if isinstance(leaf, TensorLayout) else leaf

    with without_modes():  # a running trace must not see these operations
        return _map(
            _layout,
            func(*_map(tensor, args), **{name: _map(tensor, value) for name, value in kwargs}),
        )


def _layout(leaf: Any) -> Any:
    return TensorLayout.of(leaf) if isinstance(leaf, Tensor) else leaf


def _is_hashable(value: Any) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True


@lru_cache(maxsize=512)
def _written(func: Any) -> list[tuple[int, Any]]:
    """Return the arguments that an operation writes into, each with its position."""
    arguments = enumerate(schema(func).arguments) if isinstance(func, OpOverload) else ()
    return [
        (place, each)
        for place, each in arguments
        if each.alias_info is not None and each.alias_info.is_write
    ]


def is_write(func: Any) -> bool:
    """Return whether an operation writes into one of its arguments."""
    return bool(_written(func))


def _as_places(indices: Any) -> list[Any]:
    """Replace masks among indices by positions: their number depends on the mask's numbers."""
    out: list[Any] = []
    for index in indices:
        is_mask = (
            isinstance(index, Tensor)
            and not is_unknown(index)
            and index.dtype in (torch.bool, torch.uint8)
        )
        out += index.nonzero().unbind(1) if is_mask else [index]
    return out


def _map(change: Callable[[Any], Any], value: Any) -> Any:
    """Pass the arguments of an operation through ``change``; lists become tuples."""
    if isinstance(value, (list, tuple)) and not isinstance(value, TensorLayout):
        return tuple(_map(change, item) for item in cast("list[Any]", value))
    return change(value)
