"""Find the values that a stage can reach besides its arguments, by the names in its code."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Mapping
from types import FunctionType, MethodType, ModuleType
from typing import Any

from torch import Tensor, nn

from funcpipe._src.core.captured import captured_values, is_foreign
from funcpipe._src.core.torch_names import TABLES
from funcpipe._src.data.stage import Stage

_MANY = 1000  # containers with more entries are not searched; only their length is recorded


class Reached:
    """The leaves that one stage closes over, and the leaves in attributes of ``module``."""

    def __init__(self, stage: Stage, module: nn.Module | None = None) -> None:
        # Leaves by name: tensors, numbers, strings, None, lengths of containers.
        self.found: dict[str, Any] = {}
        self._seen: set[int] = set()
        for part in stage.simple():
            self._look("", part.fn)
        for path, layer in module.named_modules() if module is not None else ():
            for key, value in vars(layer).items():
                if key not in TABLES:
                    self._look(f"{path}.{key}".lstrip("."), value)

    def _look(self, name: str, value: Any) -> None:
        """Record a leaf, or search an object that may contain leaves."""
        if isinstance(value, (Tensor, bool, int, float, complex, str, bytes, type(None))):
            self._note(name, value)
            return
        if id(value) in self._seen or isinstance(value, (type, ModuleType)):
            return
        self._seen.add(id(value))
        if isinstance(value, nn.Module):
            self._module(name, value)
        elif isinstance(value, functools.partial):
            self._look(name, value.func)
            self._entries(name, value.args)
            self._entries(name, value.keywords)
        elif isinstance(value, MethodType):
            self._look(name, value.__func__)
            self._look(name or "self", value.__self__)
        elif isinstance(value, FunctionType):
            self._function(value)
        elif isinstance(value, (list, tuple, set, frozenset, deque, Mapping)):
            self._entries(name, value)
        elif isinstance(value, Stage):
            self._look(name, value.fn)
        elif hasattr(value, "skeleton"):  # a module stage: its tensors are arguments, not captured
            for layer in value.skeleton.modules():
                self._look(name, type(layer).forward)
        elif not is_foreign(type(value)) and hasattr(value, "__dict__"):
            if callable(value):
                self._look(name, type(value).__call__)
            for key, attribute in vars(value).items():
                self._look(f"{name}.{key}".lstrip("."), attribute)
        else:  # a wrapper such as functools.cache
            wrapped = getattr(value, "__wrapped__", None)
            if wrapped is not None:
                self._look(name, wrapped)

    def _note(self, name: str, value: Any) -> None:
        while name in self.found:  # another function has a value with the same name
            name += "'"
        self.found[name] = value

    def _entries(self, name: str, container: Any) -> None:
        self._note(f"len({name})", len(container))
        if len(container) > _MANY:
            return
        pairs = container.items() if isinstance(container, Mapping) else enumerate(container)
        for key, entry in pairs:
            self._look(f"{name}[{key!r}]", entry)

    def _module(self, name: str, module: nn.Module) -> None:
        for path, layer in module.named_modules(prefix=name):
            parameters = layer.named_parameters(recurse=False, remove_duplicate=False)
            for key, value in (
                *parameters,
                *layer.named_buffers(recurse=False, remove_duplicate=False),
            ):
                self._look(f"{path}.{key}".lstrip("."), value)
            for key, value in vars(layer).items():
                if isinstance(value, (Tensor, bool, int, float, list, dict)) and not key.startswith(
                    "_"
                ):
                    self._look(f"{path}.{key}".lstrip("."), value)
            self._look("", type(layer).forward)

    def _function(self, fn: FunctionType) -> None:
        if is_foreign(fn):
            return
        for key, value in captured_values(fn).items():
            self._look(key, value)
        for default in (*(fn.__defaults__ or ()), *(fn.__kwdefaults__ or {}).values()):
            if not isinstance(default, (bool, int, float, str, type(None))):
                self._look(f"a default of {fn.__name__}", default)
