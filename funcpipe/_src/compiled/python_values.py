"""The Python values that a stage and a loss read besides their arguments: a program has them as
they were at its trace.

Tensors are not among them: a trace refuses those that it was not given.
"""

from __future__ import annotations

import datetime
import dis
import enum
import random
import sys
from collections import deque
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from functools import partial
from operator import is_
from pathlib import PurePath
from types import BuiltinFunctionType, CodeType, FrameType, FunctionType, MethodType, ModuleType
from typing import Any, Self, TypeGuard

import torch
from torch import Tensor, nn

from funcpipe._src.core.torch_names import children_of
from funcpipe._src.data.stage import Stage

_FOREIGN = {*sys.stdlib_module_names, "torch", "numpy", "optree"} - {"__main__"}
"""Packages whose code reads no values of the user's, but through attributes of objects that the
user's code names."""

_LAYERS = "torch.nn.modules."

_TORCH = (torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format)
_STDLIB = (enum.Enum, PurePath, datetime.date, datetime.timedelta, range, slice)
_VALUES = (bool, int, float, complex, str, bytes, type(None), *_TORCH, *_STDLIB)
"""Values that their text tells from others."""

_MANY = 1000
"""Of a container with more entries only the number is looked at."""

_LARGE = 2**20
"""Bytes of an array whose numbers are looked at."""

_OF_MODULES = frozenset(vars(nn.Module())) - {"training"}
"""Attributes that every module has."""

_ABSENT: Any = object()


class Executed:
    """While on, notes the Python code that this thread runs, of the user's and of layers of
    torch's.

    Code of installed packages counts only where the stage or the loss is from them (``roots``):
    others count and log for themselves, in callbacks of the garbage collector, say.

    Attributes:
        codes: of the user's functions.
        namespaces: their globals, by id, with the names that they use.
        names: every name and string in any code that was noted.
        draws: does Python's own module for random numbers run.
    """

    def __init__(self, roots: Collection[str]) -> None:
        self._roots = roots
        self.codes: set[CodeType] = set()
        self.namespaces: dict[int, tuple[dict[str, Any], set[str]]] = {}
        self.names: set[str] = set()
        self.draws = False
        self._seen: set[CodeType] = set()

    def __enter__(self) -> Self:
        self._outer = sys.gettrace()
        sys.settrace(self._note)
        return self

    def __exit__(self, *error: object) -> None:
        sys.settrace(self._outer)

    def _note(self, frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if event != "call" or code in self._seen:
            return
        self._seen.add(code)
        module = frame.f_globals.get("__name__") or ""
        self.draws |= module == "random"
        if _is_foreign(module, code) or (
            _is_installed(code) and module.partition(".")[0] not in self._roots
        ):
            if module.startswith(_LAYERS):
                self.names.update(code.co_names)
            return
        self.codes.add(code)
        names = {
            *code.co_names,
            *(text for text in code.co_consts if isinstance(text, str) and text.isidentifier()),
        }
        self.names |= names
        for namespace, kinds in (
            (frame.f_globals, ("LOAD_GLOBAL", "LOAD_NAME")),
            (sys.modules, ("IMPORT_NAME",)),
        ):
            used = {
                row.argval for row in dis.get_instructions(code) if row.opname in kinds
            } & namespace.keys()
            if used:
                self.namespaces.setdefault(id(namespace), (namespace, set()))[1].update(used)


def _is_foreign(module: str, code: CodeType | None = None) -> bool:
    root = module.partition(".")[0]
    if root == "funcpipe":  # a stage may be a function of its own
        return True
    return root in _FOREIGN or (code is not None and code.co_filename.startswith("<frozen"))


def _is_installed(code: CodeType) -> bool:
    return "site-packages" in code.co_filename or "dist-packages" in code.co_filename


def _roots_of(stage: Stage, loss: Any) -> set[str]:
    """The packages that a stage's functions and layers, and a loss, are from."""
    found: list[Any] = [loss, type(loss), getattr(loss, "func", None)]
    for part in stage.simple():
        skeleton = getattr(part.fn, "skeleton", None)
        found += [part.fn, type(part.fn), getattr(part.fn, "func", None)]
        found += (
            [kind for layer in skeleton.modules() for kind in type(layer).__mro__]
            if skeleton is not None
            else []
        )
    return {(getattr(each, "__module__", None) or "").partition(".")[0] for each in found}


class PythonValues:
    """The values that are reached from a stage's functions and a loss by the code that was seen to
    run.

    `key` costs next to nothing where nothing has changed: each value is looked up where it was
    found, and compared.

    Attributes:
        found: what was found, by its path.
    """

    def __init__(self, stage: Stage, loss: Any) -> None:
        self.stage, self.loss, self.executed = stage, loss, Executed(_roots_of(stage, loss))
        self.ignored: set[str] = set()
        self.found: dict[str, Hashable] = {}
        self.generators: dict[str, str] = {}

    def look(self) -> None:
        """Look for all values, and where each can be looked up."""
        self.found, self.generators = {}, {}
        self._rows: list[tuple[Callable[[str, Any], Any], str, Any]] = []
        self._views: list[tuple[Any, Sequence[Any]]] = []
        self._arrays: list[tuple[Any, bytes]] = []
        self._alive: dict[int, Any] = {}  # ids stay their own
        for part in self.stage.simple():
            skeleton = getattr(part.fn, "skeleton", None)  # a module's runs are on copies of it
            self._any(
                "the module" if skeleton is not None else "",
                part.fn if skeleton is None else skeleton,
            )
        if self.loss is not None:
            self._any("loss", self.loss)
        for namespace, names in [*self.executed.namespaces.values()]:
            self._table("", namespace.get, sorted(names & namespace.keys()))
        self._key = ValuesKey(self.found)

    def key(self) -> ValuesKey:
        """The key of all values as they are now."""
        if not self._unchanged():
            self.look()
        return self._key

    def _unchanged(self) -> bool:
        for get, name, value in self._rows:
            current = get(name, _ABSENT)
            if current is not value and not _same(current, value):
                return False
        for view, values in self._views:
            if len(view) != len(values):
                return False
            if not all(map(is_, view, values)) and not all(map(_same, view, values)):
                return False
        return all(array.tobytes() == numbers for array, numbers in self._arrays)

    def changes(self) -> list[str]:
        """What a call has changed since the last look, in words; containers that it fills are no
        longer looked at."""
        found, generators = self.found, self.generators
        self.look()
        changed = {
            path for path in {*found} | {*self.found} if found.get(path) != self.found.get(path)
        }
        pairs = [(path, found.get(path), self.found.get(path)) for path in changed]
        lines = [
            f"{path} was {old[1]}, then {new[1]}"
            for path, old, new in pairs
            if _is_value(old) and _is_value(new)
        ]
        if changed and not lines:
            self.ignored |= changed | {path[4:-1] for path in changed if path.startswith("len(")}
            self.look()
        drawing = [
            path for path, state in generators.items() if self.generators.get(path, state) != state
        ]
        return sorted(lines) + [f"the generator {path} drew numbers" for path in drawing]

    def same_code(self, other: PythonValues) -> bool:
        """Do both look at the same places."""
        a, b = self.executed, other.executed
        return a.codes == b.codes and a.names == b.names and self.ignored == other.ignored

    # -- looking
    # -------------------------------------------------------------------------------

    def _any(self, path: str, value: Any) -> None:
        """Note a value, and look into one that has others."""
        if path in self.ignored:
            return
        if isinstance(value, _VALUES) or _is_numpy(value, "generic"):
            self._note(
                path,
                (type(value), repr(value) if isinstance(value, (float, complex)) else str(value)),
            )
            return
        if isinstance(value, Tensor):
            self._note(path, ("tensor", str(value.dtype), tuple(value.shape)))
            return
        if isinstance(value, ModuleType) and _is_foreign(value.__name__):
            return
        kind = type(value)
        self._note(path, (kind.__module__, kind.__qualname__, _name_of(value)))
        if id(value) in self._alive:
            return
        self._alive[id(value)] = value
        wrapped = getattr(value, "__dict__", {}).get("__wrapped__")
        if wrapped is not None:
            self._any(f"{path}()", wrapped)
        if isinstance(value, FunctionType):
            self._function(path, value)
        elif isinstance(value, MethodType):
            self._any(f"{path}()", value.__func__)
            self._any(path or "self", value.__self__)
        elif isinstance(value, partial):
            self._any(f"{path}()", value.func)
            self._entries(f"{path}.args", value.args)
            self._entries(f"{path}.keywords", value.keywords)
        elif isinstance(value, (property, staticmethod, classmethod)):
            self._any(f"{path}()", value.fget if isinstance(value, property) else value.__func__)
        elif isinstance(value, (list, tuple, set, frozenset, deque, Mapping)):
            self._entries(path, value)
        elif _is_numpy(value, "ndarray"):
            numbers = value.tobytes() if value.nbytes <= _LARGE else b""
            self._note(f"{path}[:]", (str(value.dtype), value.shape, numbers))
            if numbers:
                self._arrays.append((value, numbers))
        elif isinstance(value, random.Random) or _is_numpy(
            value, "random.Generator", "random.RandomState"
        ):
            self.generators[path] = _state(value)
        elif isinstance(value, ModuleType):
            self._table(path, vars(value).get, sorted(self.executed.names & vars(value).keys()))
        else:
            self._object(path, value)

    def _note(self, path: str, token: Hashable) -> None:
        if path in self.ignored:
            return
        while path in self.found:  # of the same name in another function
            path += "'"
        self.found[path] = token

    def _table(self, path: str, get: Callable[[str, Any], Any], names: Sequence[str]) -> None:
        """Look at named values."""
        rows = [(name, get(name, _ABSENT)) for name in names]
        rows = [(name, value) for name, value in rows if not _never_changes(value)]
        rows = [
            (name, value)
            for name, value in rows
            if f"{path}.{name}".lstrip(".") not in self.ignored
        ]
        self._rows += [(get, name, value) for name, value in rows]
        for name, value in rows:
            if value is not _ABSENT:
                self._any(f"{path}.{name}".lstrip("."), value)

    def _entries(self, path: str, container: Any) -> None:
        self._note(f"len({path})", len(container))
        if len(container) > _MANY:
            return
        views = (
            [container.keys(), container.values()]
            if isinstance(container, Mapping)
            else [container]
        )
        if not isinstance(container, tuple):
            self._views += [(view, list(view)) for view in views]
        for key, entry in (
            container.items() if isinstance(container, Mapping) else enumerate(container)
        ):
            self._any(f"{path}[{key!r}]", entry)

    def _function(self, path: str, fn: FunctionType) -> None:
        self._note(f"{path} (code)", fn.__code__)
        if fn.__code__ not in self.executed.codes and not (fn.__module__ or "").startswith(
            "funcpipe."
        ):
            return
        for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True):
            if name in self.ignored or name == "__class__":
                continue
            get = partial(_content, cell)
            value = get(name, _ABSENT)
            self._rows.append((get, name, value))
            if value is not _ABSENT:
                self._any(name, value)
        names = fn.__code__.co_varnames[: fn.__code__.co_argcount]
        defaults = dict(zip(reversed(names), reversed(fn.__defaults__ or ()), strict=False)) | (
            fn.__kwdefaults__ or {}
        )
        for name, value in defaults.items():
            self._any(f"{name} of {fn.__name__}", value)

    def _object(self, path: str, value: Any) -> None:
        """The attributes of an object, or a class, that the code names; those of its classes,
        too."""
        names = self.executed.names
        classes = (
            []
            if value is None
            else list((value if isinstance(value, type) else type(value)).__mro__)
        )
        classes = [
            kind
            for kind in classes
            if not _is_foreign(kind.__module__) and kind.__module__ != "builtins"
        ]
        of_classes = {name for kind in classes for name in names & vars(kind).keys()}
        own = {} if isinstance(value, type) else getattr(value, "__dict__", {})
        is_ours = type(value).__module__.startswith("funcpipe.")
        wanted = {*own} if is_ours else names & (own.keys() | of_classes)
        if isinstance(value, nn.Module):
            self._entries(path, children_of(value))
            wanted -= _OF_MODULES
            if path.startswith("the module"):  # its mode is a run's
                wanted.discard("training")
        self._table(path, own.get, sorted(wanted))
        for kind in classes:
            self._table(path, vars(kind).get, sorted(names & vars(kind).keys()))
            slots = vars(kind).get("__slots__", ())
            if slots and not isinstance(value, type):
                slots = [slots] if isinstance(slots, str) else slots
                self._table(
                    path, partial(getattr, value), [name for name in slots if name in names]
                )


class ValuesKey:
    """The key of some values, which knows its hash."""

    def __init__(self, found: Mapping[str, Hashable]) -> None:
        self.values = tuple(found.items())
        self._hash = hash(self.values)

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, ValuesKey) and self.values == other.values)

    def __hash__(self) -> int:
        return self._hash


def _same(a: Any, b: Any) -> bool:
    """Are these one object, or equal values."""
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, Tensor):
        return a.dtype == b.dtype and a.shape == b.shape
    return isinstance(a, _VALUES) and repr(a) == repr(b)


def _is_value(token: Any) -> TypeGuard[tuple[type, str]]:
    return type(token) is tuple and isinstance(token[0], type)


def _name_of(value: Any) -> str:
    return (
        value.__qualname__ if isinstance(value, (type, FunctionType, BuiltinFunctionType)) else ""
    )


def _content(cell: Any, name: str, default: Any) -> Any:
    """The value of a closure's cell, which may have none."""
    try:
        return cell.cell_contents
    except ValueError:
        return default


def _never_changes(value: Any) -> bool:
    """Is it of another package: a module or a class."""
    if isinstance(value, ModuleType):
        return _is_foreign(value.__name__)
    return isinstance(value, type) and _is_foreign(value.__module__)


def _is_numpy(value: Any, *kinds: str) -> bool:
    numpy = sys.modules.get("numpy")
    if numpy is None or not type(value).__module__.startswith("numpy"):
        return False
    names = [kind.rpartition(".")[2] for kind in kinds]
    return any(base.__name__ in names for base in type(value).__mro__)


class GlobalDraws:
    """Tells whether the stage draws with the generators of Python and numpy, which the whole
    process shares.

    Another thread may draw at the same time. So only generators that the code names count, and of
    these only such as every call moves.
    """

    def __init__(self) -> None:
        self.moved = {"random", "numpy.random"}
        self._states = _global_states()

    def look(self) -> None:
        """Look which have moved, after each call."""
        states = _global_states()
        self.moved &= {name for name, state in states.items() if self._states.get(name) != state}
        self._states = states

    def named(self, executed: Executed) -> list[str]:
        """Those that moved and are named in the code, in words."""
        values = [
            space.get(name) for space, names in executed.namespaces.values() for name in names
        ]
        owners = [type(getattr(value, "__self__", None)) for value in values]
        named = "random" in executed.names
        kinds = {
            "random": named
            or executed.draws
            or any(issubclass(owner, random.Random) for owner in owners),
            "numpy.random": named
            or any(owner.__module__.startswith("numpy.random") for owner in owners),
        }
        return [f"it draws with {name}" for name in sorted(self.moved) if kinds[name]]


def _global_states() -> dict[str, str]:
    numpy: Any = sys.modules.get("numpy")
    states = {"random": str(hash(random.getstate()))}
    return states if numpy is None else states | {"numpy.random": str(numpy.random.get_state())}


def _state(generator: Any) -> str:
    if isinstance(generator, random.Random):
        return str(hash(generator.getstate()))
    state = (
        generator.bit_generator.state
        if hasattr(generator, "bit_generator")
        else generator.get_state()
    )
    return str(state)
