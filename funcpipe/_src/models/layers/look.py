"""Refuse outputs of a layer cut that would be incomplete, in the first forward of a stage.

A stage runs its own blocks only, so values that a model collects over all blocks would be
incomplete. If flags ask for such values, the stage raises PlanError before anything runs. In the
last stage, a dispatch mode follows values that blocks pass on beside their output. Examples are a
list that blocks append to, and an attribute that the model's end sums up.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from funcpipe._src.core.errors import PlanError
from funcpipe._src.core.torch_names import WatchingMode, storage_number, without_modes
from funcpipe._src.core.tree import Tree, map_tensors, tensors_in
from funcpipe._src.models.layers.unknown import Unknown, is_write

_BY_NUMBER = ("output_hidden_states", "output_attentions")
"""Flags that take indices of layers as well as True."""


def asks_for_all_blocks(name: str, value: Any) -> bool:
    """Whether a flag of a configuration or of a call asks for values of all blocks."""
    name = name.lstrip("_")  # a configuration stores a property under "_name"
    return (value is True and name.startswith("output_")) or (
        name in _BY_NUMBER and value is not None and value is not False
    )


def arguments_for_all_blocks(
    forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[str]:
    """List the arguments of a call that ask for values of all blocks."""
    arguments = kwargs
    if any(isinstance(value, (bool, int, list)) for value in args):
        try:
            arguments = {
                **inspect.signature(forward).bind_partial(*args, **kwargs).arguments,
                **kwargs,
            }
        except (TypeError, ValueError):
            return []  # the call itself will raise a better error
    return [
        name
        for name, value in arguments.items()
        if asks_for_all_blocks(name, value) or (name == "use_cache" and value is True)
    ]


class SideOutputs(WatchingMode):
    """A dispatch mode that follows tensors that blocks pass on beside their output.

    A tensor is followed if a block made it or got it, or if an operation computed it from a
    followed tensor. Outputs of blocks are not followed: copies replace them. Numbers that a block
    reads from a tensor (``item``) and keeps cannot be followed.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self._inside = False
        # Storages of followed tensors. The weak reference reserves the storage's number: without
        # it, a new storage could get the number of a freed one.
        self._memory: dict[int, StorageWeakRef] = {}
        # Tensors followed by identity, because tensors that are not followed share their memory.
        self._views: dict[int, Tensor] = {}

    def block(self, call: Callable[..., Any], args: Any, kwargs: Any) -> Tree:
        """Call a block, and return copies of its output."""
        outer, self._inside = self._inside, True
        try:
            with without_modes():
                args, kwargs = map_tensors(self._view, args), map_tensors(self._view, kwargs)
            out = call(*args, **kwargs)
        finally:
            self._inside = outer
        with without_modes():  # the mode must not follow these copies
            return map_tensors(lambda tensor: tensor.clone() if _memory(tensor) else tensor, out)

    def follows(self, tensor: Any) -> bool:
        """Return whether a tensor depends on values that a block handed out beside its output."""
        if not isinstance(tensor, Tensor):
            return False
        return id(tensor) in self._views or (_memory(tensor) or 0) in self._memory

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Follow the results of an operation that runs in a block or takes a followed tensor."""
        out = func(*args, **(kwargs or {}))
        given = list(tensors_in([*args, *(kwargs or {}).values()]))
        followed = any(map(self.follows, given))
        if not (self._inside or followed):
            return out
        if func is torch.ops.aten._local_scalar_dense.default and not self._inside:
            raise PlanError(
                "the model reads a number from values that blocks pass on beside their output"
            )
        known = {_memory(tensor) for tensor in given}
        writes = is_write(func)
        for tensor in tensors_in(out):
            memory = _memory(tensor)
            if memory is None:
                continue
            if memory not in known or (writes and followed):
                self._memory[memory] = StorageWeakRef(tensor.untyped_storage())
            elif followed:
                self._views[id(tensor)] = tensor
        return out

    def _view(self, tensor: Tensor) -> Tensor:
        if _memory(tensor) is None:
            return tensor
        view = tensor.view_as(tensor)
        self._views[id(view)] = view
        return view


def _memory(tensor: Tensor) -> int | None:
    """Return the number of a tensor's memory; None for a tensor without memory."""
    if tensor.layout is not torch.strided or isinstance(tensor, Unknown):
        return None
    try:
        return storage_number(tensor.untyped_storage())
    except (NotImplementedError, RuntimeError):
        return None
