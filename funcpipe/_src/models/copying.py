"""Copy modules so that functions in attributes call the copy, not the original."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from functools import partial
from pathlib import Path
from types import CellType, FunctionType, MethodType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from funcpipe._src.core.errors import PlanError
from funcpipe._src.core.torch_names import ORIGINAL_CALLABLE

_COMPILER = str(Path(torch.__file__).parent / "_dynamo")

M = TypeVar("M", bound=nn.Module)


def copied(module: M, change: Callable[[Tensor], Tensor] = lambda tensor: tensor) -> M:
    """Copy a module's structure around its tensors, each passed through ``change``.

    ``deepcopy`` shares functions between copy and original. An attribute such as ``layer.forward =
    torch.compile(layer.forward)``, or a closure over the layer, would call the original. So the
    copy gets the same function, bound to the copy, and without torch.compile. Raises PlanError for
    an attribute that calls the original in another way.
    """
    # deepcopy uses the entries of memo in place of copies, so tensors are replaced, not copied.
    tensors = [*module.parameters(), *module.buffers()]
    memo: dict[int, Any] = {id(tensor): change(tensor) for tensor in tensors}
    try:
        new = deepcopy(module, memo)
        _rebind_attributes(module, memo)
    except PlanError:
        raise
    except Exception as error:
        raise PlanError(
            f"the module cannot be copied ({error}); stages have a copy of its structure, so "
            "tensors that a forward computed must not be kept as attributes (instead of "
            "torch.nn.utils.weight_norm use torch.nn.utils.parametrizations.weight_norm)"
        ) from error
    return new


def _rebind_attributes(module: nn.Module, memo: dict[int, Any]) -> None:
    """Let the functions in attributes of the copies in ``memo`` call the copies."""
    originals = {id(each): each for each in module.modules() if id(each) in memo}
    for number, original in originals.items():
        table = vars(memo[number])
        for name, value in vars(original).items():
            # Only functions in the copy that still reach an original need a new binding.
            if not callable(value) or not _reaches(table.get(name), originals, set()):
                continue
            bound = _Rebind(originals, memo).of(value)
            if _reaches(bound, originals, set()):
                raise PlanError(
                    f"its attribute {name!r} (a {type(value).__name__}) calls the module itself, "
                    "and the attribute of a copy would still call the original; write it as a "
                    "method of a subclass"
                )
            if isinstance(bound, MethodType) and bound.__func__ is getattr(
                type(bound.__self__), name, None
            ):
                del table[name]  # the class has this method anyway
            else:
                table[name] = bound


class _Rebind:
    """Makes functions that call ``originals`` (by id) call their copies in ``memo``."""

    def __init__(self, originals: dict[int, nn.Module], memo: dict[int, Any]) -> None:
        self.originals, self.memo = originals, memo
        self.made: dict[int, FunctionType] = {}

    def of(self, value: Any) -> Any:
        """Return a value in which copies take the places of originals."""
        if not _reaches(value, self.originals, set()):
            return value
        if isinstance(value, MethodType):
            return MethodType(self.of(value.__func__), self.of(value.__self__))
        if isinstance(value, FunctionType):
            return self._function(value)
        if isinstance(value, partial):
            keywords = {name: self.of(each) for name, each in value.keywords.items()}
            return partial(self.of(value.func), *map(self.of, value.args), **keywords)
        if type(value) in (list, tuple):
            return type(value)(map(self.of, value))
        if type(value) is dict:
            return {key: self.of(each) for key, each in value.items()}  # pyright: ignore[reportUnknownVariableType]
        return deepcopy(value, self.memo)

    def _function(self, value: FunctionType) -> Any:
        if ORIGINAL_CALLABLE in vars(value):
            return self.of(_as_written(value))
        if id(value) in self.made:  # the function refers to itself
            return self.made[id(value)]
        cells = tuple(CellType() for _ in value.__closure__ or ())
        new = FunctionType(value.__code__, value.__globals__, value.__name__, None, cells)
        # Registered before its cells are filled: a cell may contain the function itself.
        self.made[id(value)] = new
        for cell, old in zip(cells, value.__closure__ or (), strict=True):
            if _is_full(old):
                cell.cell_contents = self.of(old.cell_contents)
        new.__defaults__ = self.of(value.__defaults__)
        new.__kwdefaults__ = self.of(value.__kwdefaults__)
        vars(new).update({name: self.of(each) for name, each in vars(value).items()})
        return new


def _as_written(value: Any) -> Any:
    """Return the function that was given to torch.compile."""
    value = vars(value)[ORIGINAL_CALLABLE]
    # The compiler wraps methods of torch's layers in one more function.
    while isinstance(value, FunctionType) and value.__code__.co_filename.startswith(_COMPILER):
        value = vars(value)["__wrapped__"]
    return value


def _reaches(value: Any, originals: dict[int, nn.Module], seen: set[int]) -> bool:
    """Return whether a call of a value can reach one of these modules."""
    if id(value) in seen:
        return False
    seen.add(id(value))
    inside: list[Any] = []
    if isinstance(value, nn.Module):
        return id(value) in originals
    if isinstance(value, MethodType):
        inside = [value.__func__, value.__self__]
    elif isinstance(value, FunctionType):
        inside = [cell.cell_contents for cell in value.__closure__ or () if _is_full(cell)]
        inside += [value.__defaults__, value.__kwdefaults__, vars(value)]
    elif isinstance(value, partial):
        inside = [value.func, value.args, value.keywords]
    elif isinstance(value, (list, tuple)):
        inside = [*value]  # pyright: ignore[reportUnknownArgumentType]
    elif isinstance(value, dict):
        inside = [*value.values()]  # pyright: ignore[reportUnknownArgumentType]
    elif callable(value) and not isinstance(value, type):
        inside = [*getattr(value, "__dict__", {}).values()]
    return any(_reaches(each, originals, seen) for each in inside)


def _is_full(cell: CellType) -> bool:
    try:
        _ = cell.cell_contents
    except ValueError:
        return False
    return True
