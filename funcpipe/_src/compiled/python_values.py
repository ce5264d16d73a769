"""Find the Python values that a stage and a loss read besides their arguments, for the signature.

A program contains these values as they were in its trace. Tensors are not included, because a trace
raises TraceError for tensors that are not arguments.
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
"""Packages whose code reads none of the user's values, except attributes of objects that the
user's code names."""

_LAYERS = "torch.nn.modules."

_TORCH = (torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format)
_STDLIB = (enum.Enum, PurePath, datetime.date, datetime.timedelta, range, slice)
_VALUES = (bool, int, float, complex, str, bytes, type(None), *_TORCH, *_STDLIB)
"""Types whose values are distinguished by their text."""

_MANY = 1000  # for a container with more entries, only the number of entries is compared

_LARGE = 2**20  # the largest size in bytes of an array whose numbers are compared

_OF_MODULES = frozenset(vars(nn.Module())) - {"training"}  # attributes that every module has

_ABSENT: Any = object()


class Executed:
    """A context that records the Python code of the user, and of torch's layers, that this thread
    runs.

    Code of installed packages counts only if the stage or the loss is from them (``roots``). Other
    packages count and log for themselves, for example in callbacks of the garbage collector.

    Attributes:
        codes: the code of the user's functions.
        namespaces: the globals of the functions, by id, with the names that the functions use.
        names: every name and string in any recorded code.
        draws: whether Python's own module ``random`` runs.
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

    # Returns None, so Python traces calls only, not the lines of each function.
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
    # Wrappers of this package, and constructors that Python has written for named tuples. The first
    # trace of a process calls more of these than later ones, and its key must not differ.
    if root == "funcpipe" or root.startswith("namedtuple_"):
        return True
    return root in _FOREIGN or (code is not None and code.co_filename.startswith("<frozen"))


def _is_installed(code: CodeType) -> bool:
    return "site-packages" in code.co_filename or "dist-packages" in code.co_filename


def _roots_of(stage: Stage, loss: Any) -> set[str]:
    """The packages of a stage's functions and layers, and of a loss."""
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
    """The values that the recorded code can reach from a stage's functions and a loss.

    `key` is cheap if nothing has changed: each value is read at its place and compared.

    Attributes:
        found: the values, by path.
    """

    def __init__(self, stage: Stage, loss: Any) -> None:
        self.stage, self.loss, self.executed = stage, loss, Executed(_roots_of(stage, loss))
        self.ignored: set[str] = set()
        self.found: dict[str, Hashable] = {}
        self.generators: dict[str, str] = {}

    def look(self) -> None:
        """Find all values, and the place where each can be read."""
        self.found, self.generators = {}, {}
        self._rows: list[tuple[Callable[[str, Any], Any], str, Any]] = []
        self._views: list[tuple[Any, Sequence[Any]]] = []
        self._arrays: list[tuple[Any, bytes]] = []
        self._alive: dict[int, Any] = {}  # keeps values alive, so that their ids stay unique
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
        """Describe what a call has changed since the last `look`. Containers that the call fills
        are ignored from now on."""
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
        """Whether both read the same places."""
        a, b = self.executed, other.executed
        return a.codes == b.codes and a.names == b.names and self.ignored == other.ignored

    # -- looking
    # -------------------------------------------------------------------------------

    def _any(self, path: str, value: Any) -> None:
        """Record a value, and look for values inside it."""
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
        if _never_changes(value):  # but the place may get another value
            self._note(path, (getattr(value, "__module__", ""), value.__name__))
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
        elif isinstance(value, random.Random) or _is_numpy(value, "Generator", "RandomState"):
            self.generators[path] = _state(value)
        elif isinstance(value, ModuleType):
            self._table(path, vars(value).get, sorted(self.executed.names & vars(value).keys()))
        else:
            self._object(path, value)

    def _note(self, path: str, token: Hashable) -> None:
        if path in self.ignored:
            return
        while path in self.found:  # another function has a value of the same name
            path += "'"
        self.found[path] = token

    def _table(self, path: str, get: Callable[[str, Any], Any], names: Sequence[str]) -> None:
        """Look at named values."""
        for name in names:
            place, value = f"{path}.{name}".lstrip("."), get(name, _ABSENT)
            if place in self.ignored:
                continue
            self._rows.append((get, name, value))
            if value is not _ABSENT:
                self._any(place, value)

    def _entries(self, path: str, container: Any) -> None:
        self._note(f"len({path})", len(container))
        if len(container) > _MANY:
            return
        views, pairs = [container], enumerate(container)
        if isinstance(container, Mapping):
            views, pairs = [container.keys(), container.values()], container.items()
        if not isinstance(container, tuple):
            self._views += [(view, list(view)) for view in views]
        for key, entry in pairs:
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
        """Look at the attributes of an object or a class that the code names, and at those of
        its classes."""
        names = self.executed.names
        mro = (value if isinstance(value, type) else type(value)).__mro__
        classes = [kind for kind in mro if not _is_foreign(kind.__module__)]
        of_classes = {name for kind in classes for name in names & vars(kind).keys()}
        own = {} if isinstance(value, type) else getattr(value, "__dict__", {})
        is_ours = type(value).__module__.startswith("funcpipe.")
        wanted = {*own} if is_ours else names & (own.keys() | of_classes)
        if isinstance(value, nn.Module):
            self._entries(path, children_of(value))
            wanted -= _OF_MODULES
            if path.startswith("the module"):  # a run sets the mode, and the signature contains it
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
    """A hashable key of some values, with a cached hash."""

    def __init__(self, found: Mapping[str, Hashable]) -> None:
        self.values = tuple(found.items())
        self._hash = hash(self.values)

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, ValuesKey) and self.values == other.values)

    def __hash__(self) -> int:
        return self._hash


def _same(a: Any, b: Any) -> bool:
    """Whether two values are one object, or equal plain values."""
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
    """The value of a closure's cell, or the default for an empty cell."""
    try:
        return cell.cell_contents
    except ValueError:
        return default


def _never_changes(value: Any) -> bool:
    """Whether a value is a module or a class of another package."""
    if isinstance(value, ModuleType):
        return _is_foreign(value.__name__)
    return isinstance(value, type) and _is_foreign(value.__module__)


def _is_numpy(value: Any, *kinds: str) -> bool:
    kind = type(value)
    return kind.__module__.startswith("numpy") and any(
        base.__name__ in kinds for base in kind.__mro__
    )


class GlobalDraws:
    """Find out whether the stage draws with the global generators of Python and numpy.

    Another thread may draw at the same time. So a generator counts only if the code names it and
    every call advances it.
    """

    def __init__(self) -> None:
        self.moved = {"random", "numpy.random"}
        self._states = _global_states()

    def look(self) -> None:
        """Compare the generators after a call."""
        states = _global_states()
        self.moved &= {name for name, state in states.items() if self._states.get(name) != state}
        self._states = states

    def named(self, executed: Executed) -> list[str]:
        """Describe the generators that advanced and that the code names."""
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
