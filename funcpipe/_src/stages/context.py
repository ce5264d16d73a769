"""Settings that threads do not inherit and every stage must see: autocast, inference mode, default
device."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Generator, Iterable
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any, NamedTuple, TypeAlias, TypeVar

import torch
from torch.autograd.graph import disable_saved_tensors_hooks

from funcpipe._src.core.errors import FuncpipeError, PlanError, Where
from funcpipe._src.core.torch_names import DeviceContext, modes_on
from funcpipe._src.core.tree import under_transform
from funcpipe._src.data.plan import Plan

T = TypeVar("T")

Casts: TypeAlias = dict[str, tuple[bool, torch.dtype]]
"""By kind of device: is autocast on, and to which type."""

_KINDS = ("cpu", "cuda") if torch.backends.cuda.is_built() else ("cpu",)

RUNNING: ContextVar[Callable[[], Where] | None] = ContextVar("funcpipe_running", default=None)
"""Inside of a run: returns the action that this thread is in. A stage that calls `run` is
refused."""


def checked_plan(name: str, plan: Any) -> Plan:
    """The argument itself where it is a plan. Raises PlanError where it is not."""
    if isinstance(plan, Plan):
        return plan
    raise PlanError(
        f"{name} takes a plan; got a {type(plan).__name__}; make one: fp.make_plan(stages, "
        "schedule, loss=...)"
    )


def refuse_transforms(name: str) -> None:
    """Refuse transforms of torch.func: runs use autograd themselves. Raises FuncpipeError."""
    if under_transform():
        raise FuncpipeError(
            f"{name} computes gradients itself and cannot be called under torch.func (grad, vmap, "
            "jvp, ...); transform fp.apply(stages, params, inputs), the composed pure function; "
            "for gradients of outputs there is fp.vjp, and fp.Pipe inside a module"
        )


def outside_of_graphs(work: T) -> T:
    """The function, as one that torch.compile does not trace where it traces the caller."""
    return torch.compiler.disable(work) if torch.compiler.is_compiling() else work  # pyright: ignore


def not_carried() -> list[str]:
    """The names of what the caller has switched on and other threads cannot take over."""
    functions = [mode for mode in modes_on("function") if not isinstance(mode, DeviceContext)]
    names = [f"function mode {type(mode).__name__}" for mode in functions]
    names += [f"dispatch mode {type(mode).__name__}" for mode in modes_on("dispatch")]
    if saved_tensors_are_hooked():
        names.append("saved-tensor hooks")
    return names


def saved_tensors_are_hooked() -> bool:
    """Whether this thread has hooks on the tensors that autograd saves."""
    try:
        with disable_saved_tensors_hooks("funcpipe looks whether there are any"):
            return False
    except RuntimeError:  # they cannot be switched off while there are
        return True


class ThreadSettings(NamedTuple):
    """The settings of a thread that its computations depend on.

    Attributes:
        inference: whether inference mode is on.
        device: the default device; None: it is not set.
        autocast: by kind of device, is autocast on, and to which type.
    """

    inference: bool
    device: torch.device | None
    autocast: Casts


def settings_now() -> ThreadSettings:
    """The settings of this thread."""
    device = (
        torch.get_default_device() if modes_on("function") else None
    )  # a default device is such a mode
    return ThreadSettings(torch.is_inference_mode_enabled(), device, autocast_now())


class CallerContext:
    """The settings of a run's caller, to be entered on every thread that works for the run."""

    def __init__(self) -> None:
        self.settings = settings_now()

    def entered(self) -> AbstractContextManager[object]:
        """Enter these settings on this thread."""
        now = settings_now()
        return nullcontext() if now == self.settings else self._changed(now)

    @contextmanager
    def _changed(self, now: ThreadSettings) -> Generator[None]:
        inference, device, autocast = self.settings
        with ExitStack() as stack:
            if inference is not now.inference:
                stack.enter_context(torch.inference_mode(inference))
            for kind, (
                on,
                dtype,
            ) in autocast.items():  # also switch off autocast that the caller did not have
                if on or now.autocast[kind][0]:
                    stack.enter_context(
                        torch.autocast(kind, dtype if on else None, on, cache_enabled=False)
                    )
            if device != now.device:
                stack.enter_context(device or torch.device("cpu"))
            yield

    def computing(self) -> AbstractContextManager[object]:
        """Enter these settings, disable autocast's cache, and keep backwards on this thread."""
        return _Computing(self.entered())


class _Computing:
    """The context of `CallerContext.computing`, without generators: every run enters it."""

    def __init__(self, settings: AbstractContextManager[object]) -> None:
        self._settings = settings

    def __enter__(self) -> None:
        self._settings.__enter__()
        # A cached cast is one graph node: two uses of a weight would be summed in the small type.
        # The cache belongs to the process: a thread that leaves autocast empties it.
        self._cache = torch.is_autocast_cache_enabled()
        torch.set_autocast_cache_enabled(False)
        self._on_this_thread = torch.autograd.set_multithreading_enabled(False)

    def __exit__(self, *error: Any) -> None:
        self._on_this_thread.__exit__(*error)
        torch.set_autocast_cache_enabled(self._cache)
        self._settings.__exit__(*error)


@contextmanager
def no_autocast_cache() -> Generator[None]:
    """Without autocast's cache: a cast kept from a forward without autograd would cut the next
    forward's graph."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


_setting = threading.Lock()
_live: list[int] = []
_outside = 0
"""The number that a thread reads which never set one, when last asked; 0: never asked. Asking takes
a new thread, so it is done when no run goes on and the caller's number is not this one; one set
since by another thread is missed."""


class intra_op_threads:
    """Sets the number of intra-op threads of this thread, and puts the caller's number back
    afterwards.

    A number set on one thread is what every thread reads that never set any, from its first
    computation on. So while runs of several user threads overlap, one that reads the number of
    another run takes what a new thread read before them; and what new threads read is put back
    after the last run where a caller's number is another (his own, or that of a run during which he
    began to compute).

    No generator: what passes through may be an error that is a StopIteration.
    """

    def __init__(self, count: int) -> None:
        self.count = count

    def __enter__(self) -> None:
        global _outside
        with _setting:
            self.before = torch.get_num_threads()
            if self.before in _live:
                self.before = _outside
            elif not _live and self.before != _outside:
                _outside = _elsewhere(torch.get_num_threads, self.before)
            _live.append(self.count)
            torch.set_num_threads(self.count)

    def __exit__(self, *error: object) -> None:
        with _setting:
            _live.remove(self.count)
            torch.set_num_threads(self.before)
            if not _live and self.before != _outside:
                _elsewhere(lambda: torch.set_num_threads(_outside), None)


def _elsewhere(ask: Callable[[], T], otherwise: T) -> T:
    """The result of ``ask`` on a new thread; ``otherwise`` where no thread can be started any
    more."""
    answers: list[T] = []
    thread = threading.Thread(target=lambda: answers.append(ask()), daemon=True)
    try:
        thread.start()
    except RuntimeError:  # the interpreter is about to end
        return otherwise
    thread.join()
    return answers[0]


def cores() -> list[int]:
    """The processors that this process may use."""
    return (
        sorted(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else list(range(os.cpu_count() or 1))
    )


def pin(lanes: Iterable[int], num_lanes: int, available: list[int]) -> None:
    """Give this thread the share of some lanes in the cores: the kernel likes to put two on one.
    Ends with the thread.

    Threads that it starts have that share, too.
    """
    count = len(available)
    if count >= num_lanes > 1 and hasattr(os, "sched_setaffinity"):
        shares = [
            available[lane * count // num_lanes : (lane + 1) * count // num_lanes] for lane in lanes
        ]
        os.sched_setaffinity(0, [core for share in shares for core in share])


def autocast_now() -> Casts:
    """The autocast settings of this thread."""
    return {
        kind: (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in _KINDS
    }


def set_autocast(casts: Casts) -> None:
    """Set the autocast of this thread."""
    for kind, (enabled, dtype) in casts.items():
        torch.set_autocast_enabled(kind, enabled)
        torch.set_autocast_dtype(kind, dtype)


def autocasting() -> list[str]:
    """The kinds of device with autocast on."""
    return [kind for kind in _KINDS if torch.is_autocast_enabled(kind)]


def no_autocast() -> AbstractContextManager[Any]:
    """Backwards run in the types that their forwards chose; what a stage did with autocast off must
    stay exact."""
    stack = ExitStack()
    for kind in autocasting():
        stack.enter_context(torch.autocast(kind, enabled=False))
    return stack
