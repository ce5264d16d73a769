"""Watch settings that a stage must leave unchanged: settings of the process and of its thread.

Torch has one copy of most switches for the whole process: attention kernels, the default dtype,
anomaly detection, the level of forward-mode derivatives. While lanes run, hooks replace the
functions that change switches, and the originals return afterwards. On threads that run no lane a
hook calls the original. If several lanes run on threads, the hook raises PlanError before the
change. Otherwise stages of other lanes would see it, and two contexts that overlap would leave the
wrong setting. On one thread a stage may change a switch until its action ends.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import cache, partial
from types import ModuleType
from typing import Any, NamedTuple, NoReturn, Self

import torch
from torch.backends import ContextProp

from funcpipe._src.core.errors import PlanError
from funcpipe._src.core.torch_names import FORWARD_MODE, switch_of
from funcpipe._src.stages.context import autocast_now, set_autocast


class Switch(NamedTuple):
    """A setting that torch keeps once for the whole process."""

    name: str  # the public call that changes it, for messages
    # `owner`, `setter`: the object and the attribute where torch looks up the setter.
    owner: Any
    setter: str
    # Returns the setter's arguments for the present setting; None: torch has no getter.
    read: Callable[[], tuple[Any, ...]] | None
    write: Callable[..., Any]  # restores a setting
    refusal: str = ""  # why a stage may never call the setter, or ""


_SWITCHES = {
    "torch.set_default_dtype": ("default_dtype",),
    "torch.set_default_tensor_type": ("default_tensor_type",),
    "torch.set_float32_matmul_precision": ("float32_matmul_precision",),
    "torch.utils.deterministic": ("deterministic_fill_uninitialized_memory",),
    "torch.nn.attention.sdpa_kernel": (
        *(
            f"sdp_use_{kernel}"
            for kernel in ("flash", "mem_efficient", "math", "cudnn", "overrideable", "fa3")
        ),
        "sdp_priority_order",
    ),
    "torch.backends.cudnn": (
        "cudnn_enabled",
        "cudnn_benchmark",
        "cudnn_deterministic",
        "cudnn_allow_tf32",
    ),
    "torch.backends.mkldnn": ("mkldnn_enabled", "mkldnn_deterministic"),
    "torch.backends.nnpack": ("nnpack_enabled",),
    "torch.backends.quantized.engine": ("qengine",),
    "torch.backends.cuda": (
        "cublas_allow_tf32",
        "cublas_allow_fp16_accumulation",
        "cublas_allow_fp16_reduced_precision_reduction",
        "cublas_allow_bf16_reduced_precision_reduction",
        "math_sdp_allow_fp16_bf16_reduction",
        "blas_preferred_backend",
        "linalg_preferred_backend",
    ),
}
"""The words in the names of setters that `switch_of` knows, by the public call that calls them."""


_NO_SEEDS = (
    "which has no effect within a run, because the run's seed and the layer determine each draw; "
    "give fp.run(..., seed=), or, for the same numbers in each call, draw them when you make the "
    "model and register a buffer"
)


@cache
def switches() -> Sequence[Switch]:
    """List the switches of this torch. Changes of other settings are not seen."""
    owner, deterministic, _ = switch_of("deterministic_algorithms")
    found = [
        Switch(
            "torch.use_deterministic_algorithms",
            owner,
            deterministic,
            lambda: (
                torch.are_deterministic_algorithms_enabled(),
                torch.is_deterministic_algorithms_warn_only_enabled(),
            ),
            lambda mode, warn_only: torch.use_deterministic_algorithms(mode, warn_only=warn_only),
        ),
        Switch(
            "torch.autograd.set_detect_anomaly",
            torch,
            "set_anomaly_enabled",
            _anomaly_mode,
            torch.set_anomaly_enabled,
        ),
        Switch(
            "torch.backends.mha.set_fastpath_enabled",
            torch.backends.mha,
            "set_fastpath_enabled",
            lambda: (torch.backends.mha.get_fastpath_enabled(),),
            torch.backends.mha.set_fastpath_enabled,
        ),
        Switch(
            "torch.set_num_threads",
            torch,
            "set_num_threads",
            lambda: (torch.get_num_threads(),),
            torch.set_num_threads,
        ),
        Switch(
            "torch.set_flush_denormal", torch, "set_flush_denormal", None, torch.set_flush_denormal
        ),
        *(
            Switch("torch.manual_seed", owner, "manual_seed", None, torch.manual_seed, _NO_SEEDS)
            for owner in (torch, torch.random)
        ),
    ]
    for name, words in _SWITCHES.items():
        for word in words:
            owner, setter, getter = switch_of(word)
            if hasattr(owner, setter):
                read = None if getter is None else partial(_arguments, getter)
                found.append(Switch(name, owner, setter, read, getattr(owner, setter)))
    return found


def _arguments(getter: Callable[[], Any]) -> tuple[Any, ...]:
    """Return a getter's result as the arguments of its setter."""
    found = getter()
    return found if isinstance(found, tuple) else (found,)  # pyright: ignore[reportUnknownVariableType]


class _WatchedThread(threading.local):
    """The watch of this thread; None: the thread runs no lane."""

    watch: SwitchWatch | None = None


_thread = _WatchedThread()


class SwitchWatch:
    """Watches this thread while it runs the actions of lanes.

    Call `check` after each action that ``touched`` a setting or left another grad mode.

    Args:
        alone: whether no other thread runs lanes of this run.

    Attributes:
        touched: whether a setter ran since the last `check`.
        grad: the grad mode in which each action begins.
    """

    __slots__ = ("_alone", "_casts", "_changed", "_depth", "_outer", "_refusal", "grad", "touched")

    def __init__(self, *, alone: bool) -> None:
        self._alone, self._refusal, self.touched = alone, "", False
        self._changed: dict[tuple[int, str], tuple[Switch, tuple[Any, ...]]] = {}

    def __enter__(self) -> Self:
        self.grad = torch.is_grad_enabled()
        self._casts = autocast_now()
        self._depth = autocast_depth()
        _hooks.put()
        self._outer, _thread.watch = _thread.watch, self
        return self

    def __exit__(self, *error: object) -> None:
        if error[0] is not None:  # without an error `check` has restored all
            self._restore()
        _leave_autocast(self._depth)
        _thread.watch = self._outer
        _hooks.take_off()

    def before(self, switch: Switch, values: tuple[Any, ...]) -> None:
        """Note that a stage is about to change a switch. Raises PlanError if other stages would see the
        change."""
        if switch.refusal:
            self._refuse(f"the stage calls {switch.name}, {switch.refusal}")
        present = None if switch.read is None else switch.read()
        if present == values or (present is not None and present[: len(values)] == values):
            return  # torch.compile sets switches to their present values
        if not self._alone:
            if (
                switch.setter == "set_anomaly_enabled"
                and present is not None
                and not (present[1] and (*values, True)[1])
            ):
                # Without NaN checks only messages change, and torch.cond does this in a backward.
                return
            self._refuse(
                f"the stage calls {switch.name}, which changes a setting of the whole process, "
                "while stages of other lanes run on other threads; use executor='serial', or "
                "call it around the run"
            )
        if present is None:
            raise PlanError(
                f"the stage calls {switch.name}, which funcpipe cannot restore afterwards; call "
                "it around the run"
            )
        self.touched = True
        self._changed.setdefault((id(switch.owner), switch.setter), (switch, present))

    def before_forward_mode(self) -> None:
        """Raise PlanError if a stage is about to compute forward-mode derivatives beside other
        lanes."""
        if not self._alone:
            self._refuse(
                "the stage computes forward-mode derivatives (torch.func.jvp, jacfwd, hessian or "
                "torch.autograd.forward_ad), of which torch has one level for the whole process, "
                "while stages of other lanes run on other threads; use executor='serial'"
            )

    def _refuse(self, message: str) -> NoReturn:
        """Raise, and let `check` raise again: a stage may catch the error and go on with wrong
        numbers."""
        self.touched, self._refusal = True, message
        raise PlanError(message)

    def check(self) -> None:
        """Put back what an action changed. Raises PlanError if it left a setting changed."""
        left, self.touched = self._restore(), False
        if self._refusal:
            raise PlanError(self._refusal)
        if left:
            raise PlanError(
                f"the stage changes {', '.join(left)} and does not restore it, so other stages "
                "would see the change; enter and leave it within the stage (with ...:), or set it "
                "around the run"
            )

    def _restore(self) -> list[str]:
        """Restore all changed settings, and return their names."""
        left: dict[str, None] = {}
        for switch, values in [*self._changed.values()]:  # `write` calls `before`, too
            if switch.read is not None and switch.read() != values:
                switch.write(*values)
                left[switch.name] = None
        self._changed.clear()
        if torch.is_grad_enabled() is not self.grad:
            torch.set_grad_enabled(self.grad)
            left["torch.set_grad_enabled"] = None
        if autocast_now() != self._casts:
            set_autocast(self._casts)
            left["autocast"] = None
        return [*left]


def autocast_depth() -> int:
    """Return the number of autocast contexts around this call on this thread."""
    torch.autocast_increment_nesting()
    return torch.autocast_decrement_nesting()


def _leave_autocast(depth: int) -> None:
    """Leave contexts that a stage left open: torch keeps casts of parameters until the last context
    ends."""
    while autocast_depth() > depth:
        if torch.autocast_decrement_nesting() == 0:
            torch.clear_autocast_cache()


class _SetterHook:
    """Replaces a setter, and equals it, because torch's compiler looks functions up in tables."""

    def __init__(self, switch: Switch, setter: Callable[..., Any]) -> None:
        self.switch, self.setter = switch, setter
        self.__name__ = self.__qualname__ = switch.setter

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if _thread.watch is not None:
            _thread.watch.before(self.switch, (*args, *kwargs.values()))
        return self.setter(*args, **kwargs)

    def __eq__(self, other: object) -> bool:
        return other is self or other is self.setter

    def __hash__(self) -> int:
        return hash(self.setter)


def _hooked_property(setter: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the setter of ``torch.backends`` attributes, which hold their functions since the import
    of torch."""

    def hooked(prop: Any, module: Any, value: Any) -> None:
        if _thread.watch is not None:
            switch = Switch(
                "an attribute of torch.backends", prop, "", lambda: (prop.getter(),), prop.setter
            )
            _thread.watch.before(switch, (value,))
        setter(prop, module, value)

    return hooked


def _hooked_precision(
    getter: Callable[[str, str], str], setter: Callable[..., Any]
) -> Callable[..., Any]:
    """Wrap the setter of ``fp32_precision``, one switch for each backend and operation."""

    def hooked(backend: str, operation: str, value: str) -> Any:
        if _thread.watch is not None:
            name = "fp32_precision of torch.backends"
            read, write = partial(getter, backend, operation), partial(setter, backend, operation)
            switch = Switch(
                name, torch.backends, f"{backend} {operation}", lambda: (read(),), write
            )
            _thread.watch.before(switch, (value,))
        return setter(backend, operation, value)

    return hooked


def _hooked_autocast(setter: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a setter of autocast, a setting of the thread: a stage may change it until its action
    ends."""

    def hooked(*args: Any, **kwargs: Any) -> Any:
        if _thread.watch is not None:
            _thread.watch.touched = True
        return setter(*args, **kwargs)

    return hooked


def _hooked_entry(entry: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function that begins forward-mode derivatives."""

    def hooked(*args: Any, **kwargs: Any) -> Any:
        if _thread.watch is not None and args[-1:] != (False,):  # False switches them off
            _thread.watch.before_forward_mode()
        return entry(*args, **kwargs)

    return hooked


class _Hooks:
    """The hooks of this process, installed while any thread watches."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._watches = 0
        self._places: list[tuple[Any, dict[str, Any], dict[str, Any]]] = []
        self._anomaly = (False, True)

    def put(self) -> None:
        """Count one more watching thread, and install the hooks for the first."""
        with self._lock:
            self._watches += 1
            if self._watches == 1:
                self._anomaly = _anomaly_mode()
                self._places = self._places or _all_places()
                for owner, _, hooks in self._places:
                    _set(owner, hooks)

    def take_off(self) -> None:
        """Count one watching thread less, and remove the hooks after the last."""
        with self._lock:
            self._watches -= 1
            if not self._watches:
                for owner, originals, _ in self._places:
                    _set(owner, originals)
                # Threads that enter and leave anomaly mode alternately would leave it on.
                if _anomaly_mode() != self._anomaly:
                    torch.set_anomaly_enabled(*self._anomaly)


def _anomaly_mode() -> tuple[bool, bool]:
    return torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()


def _set(owner: Any, attributes: dict[str, Any]) -> None:
    """Set attributes of a module at once, or of a class one by one."""
    if isinstance(owner, ModuleType):
        vars(owner).update(attributes)
    else:
        for name, value in attributes.items():
            setattr(owner, name, value)


def _all_places() -> list[tuple[Any, dict[str, Any], dict[str, Any]]]:
    """List the modules and classes to hook, each with its original attributes and with the
    hooks."""
    found: list[tuple[Any, str, Callable[[Any], Any]]]
    found = [(each.owner, each.setter, partial(_SetterHook, each)) for each in switches()]
    found += [
        (torch, name, _hooked_autocast) for name in vars(torch) if name.startswith("set_autocast_")
    ]
    found += [(owner, name, _hooked_entry) for owner, name in FORWARD_MODE]
    owner, name, getter = switch_of("fp32_precision_setter")
    found.append((owner, name, partial(_hooked_precision, getter)))
    found.append((ContextProp, "__set__", _hooked_property))
    places: dict[int, tuple[Any, dict[str, Any], dict[str, Any]]] = {}
    for owner, name, make_hook in found:
        if not hasattr(owner, name):  # other versions of torch lack it
            continue
        _, originals, hooks = places.setdefault(id(owner), (owner, {}, {}))
        originals[name] = getattr(owner, name)
        hooks[name] = make_hook(originals[name])
    return [*places.values()]


_hooks = _Hooks()
