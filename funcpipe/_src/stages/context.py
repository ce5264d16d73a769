"""Settings of the caller that its threads do not inherit but stages must see.

These are autocast, inference mode and the default device; also the number of intra-op threads, and
cores. `switches` watches the settings that stages change.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Generator, Iterable
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any, TypeAlias, TypeVar

import torch
from torch.autograd.graph import disable_saved_tensors_hooks

from funcpipe._src.core.errors import FuncpipeError, PlanError, Where
from funcpipe._src.core.torch_names import DeviceContext, modes_on
from funcpipe._src.core.tree import under_transform
from funcpipe._src.data.plan import Plan

T = TypeVar("T")

Casts: TypeAlias = dict[str, tuple[bool, torch.dtype]]
"""By kind of device: whether autocast is on, and its dtype."""

_KINDS = ("cpu", "cuda") if torch.backends.cuda.is_built() else ("cpu",)

LOSS_CHECKS: ContextVar[bool] = ContextVar("funcpipe_loss_checks", default=True)
"""Whether a run may check its loss, which reads numbers on the host. A recorded graph cannot."""

RUNNING: ContextVar[Callable[[], Where] | None] = ContextVar("funcpipe_running", default=None)
"""Within a run: a function that returns the action of this thread. `run` refuses a call there."""


def checked_plan(name: str, plan: Any) -> Plan:
    """Return the argument if it is a plan, else raise PlanError."""
    if isinstance(plan, Plan):
        return plan
    raise PlanError(
        f"{name} takes a plan; got a {type(plan).__name__}; make one: fp.make_plan(stages, "
        "schedule, loss=...)"
    )


def refuse_transforms(name: str) -> None:
    """Raise FuncpipeError under a transform of torch.func, because runs use autograd."""
    if under_transform():
        raise FuncpipeError(
            f"{name} computes gradients itself and cannot be called under torch.func (grad, vmap, "
            "jvp, ...); transform fp.apply(stages, params, inputs), the composed pure function; "
            "for gradients of outputs use fp.vjp, or fp.Pipe within a module"
        )


def outside_of_graphs(work: T) -> T:
    """Return the function, disabled for torch.compile if torch.compile traces the caller."""
    return torch.compiler.disable(work) if torch.compiler.is_compiling() else work  # pyright: ignore


def not_carried() -> list[str]:
    """Return the names of the caller's active modes that other threads cannot inherit."""
    functions = [mode for mode in modes_on("function") if not isinstance(mode, DeviceContext)]
    names = [f"function mode {type(mode).__name__}" for mode in functions]
    names += [f"dispatch mode {type(mode).__name__}" for mode in modes_on("dispatch")]
    if saved_tensors_are_hooked():
        names.append("saved-tensor hooks")
    return names


def saved_tensors_are_hooked() -> bool:
    """Return whether this thread has saved-tensor hooks."""
    try:
        with disable_saved_tensors_hooks("funcpipe looks whether there are any"):
            return False
    except RuntimeError:  # torch cannot disable hooks while some are active
        return True


class CallerContext:
    """The settings of this thread that its computations depend on. Each thread of a run enters the
    settings of the run's caller."""

    def __init__(self) -> None:
        self.inference = torch.is_inference_mode_enabled()
        # A default device is a function mode; without modes, torch need not be asked.
        self.device = torch.get_default_device() if modes_on("function") else None
        self.autocast = autocast_now()

    def entered(self) -> AbstractContextManager[object]:
        """Enter these settings on this thread."""
        now = CallerContext()
        return nullcontext() if vars(now) == vars(self) else self._changed(now)

    @contextmanager
    def _changed(self, now: CallerContext) -> Generator[None]:
        with ExitStack() as stack:
            if self.inference is not now.inference:
                stack.enter_context(torch.inference_mode(self.inference))
            # Also switch autocast off if this thread has it and the caller has not.
            for kind, (enabled, dtype) in self.autocast.items():
                if enabled or now.autocast[kind][0]:
                    stack.enter_context(
                        torch.autocast(
                            kind, dtype if enabled else None, enabled, cache_enabled=False
                        )
                    )
            if self.device != now.device:
                stack.enter_context(self.device or torch.device("cpu"))
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
        # With the cache, two uses of a weight share one cast node, so their gradients would be
        # summed in the smaller type. And the cache is global: a thread that leaves autocast would
        # empty it for the others.
        self._cache = torch.is_autocast_cache_enabled()
        torch.set_autocast_cache_enabled(False)
        self._on_this_thread = torch.autograd.set_multithreading_enabled(False)

    def __exit__(self, *error: Any) -> None:
        self._on_this_thread.__exit__(*error)
        torch.set_autocast_cache_enabled(self._cache)
        self._settings.__exit__(*error)


@contextmanager
def no_autocast_cache() -> Generator[None]:
    """Return a context without autocast's cache.

    A cast that was cached in a forward without autograd has no graph, and would cut the graph of
    the next forward.
    """
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


_setting = threading.Lock()
_live: list[int] = []
_outside = 0
"""The number that a new thread reads, as of the last check; 0: never checked. A check starts a
thread. So it is made only if no run is active and the caller has another number. A number that
another thread has set since is missed."""


class intra_op_threads:
    """A context that sets the intra-op threads of this thread, and restores the caller's number.

    In torch, the last number that any thread has set is also the number of threads that never set
    one. Two consequences for runs of several user threads that overlap:

    - A caller that reads the number of another run takes the number from before the runs instead.
    - After the last run, the number for new threads is restored.

    It is not a generator, because an error that passes through may be a StopIteration.
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
    """Return the result of ``ask`` on a new thread, or ``otherwise`` if no thread can start."""
    answers: list[T] = []
    thread = threading.Thread(target=lambda: answers.append(ask()), daemon=True)
    try:
        thread.start()
    except RuntimeError:  # the interpreter is shutting down
        return otherwise
    thread.join()
    return answers[0]


def cores() -> list[int]:
    """Return the numbers of the cores that this process may use."""
    return (
        sorted(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else list(range(os.cpu_count() or 1))
    )


def pin(lanes: Iterable[int], num_lanes: int, available: list[int]) -> None:
    """Limit this thread, and threads that it starts, to the lanes' share of the cores.

    Otherwise the kernel often puts two lanes on one core.
    """
    count = len(available)
    if count >= num_lanes > 1 and hasattr(os, "sched_setaffinity"):
        shares = [
            available[lane * count // num_lanes : (lane + 1) * count // num_lanes] for lane in lanes
        ]
        os.sched_setaffinity(0, [core for share in shares for core in share])


def autocast_now() -> Casts:
    """Return the autocast settings of this thread."""
    return {
        kind: (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in _KINDS
    }


def set_autocast(casts: Casts) -> None:
    """Set the autocast settings of this thread."""
    for kind, (enabled, dtype) in casts.items():
        torch.set_autocast_enabled(kind, enabled)
        torch.set_autocast_dtype(kind, dtype)


def autocasting() -> list[str]:
    """Return the kinds of device with active autocast."""
    return [kind for kind in _KINDS if torch.is_autocast_enabled(kind)]


def no_autocast() -> AbstractContextManager[Any]:
    """Return a context without autocast, for backwards.

    A backward computes in the types that its forward chose. Autocast would also cast operations for
    which the stage had switched autocast off.
    """
    stack = ExitStack()
    for kind in autocasting():
        stack.enter_context(torch.autocast(kind, enabled=False))
    return stack
