"""Catch operations that draw random numbers on a thread, without cost for other operations.

Torch's dispatcher reads a set of keys of the thread. For one of these keys, which torch keeps for
tests, this module registers a kernel for each operation that may draw. The kernel passes the
operation to the thread's catcher. All other operations ignore the key, and a thread without a
catcher does not have the key. So every draw is caught: in the stage itself, in an inner module, in
a branch of ``torch.cond``, or in a function of ``torch.compile``. `rng` gives draws their keys.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import lru_cache, wraps
from typing import Any, NamedTuple, Self

import torch
import torch.utils.checkpoint
from torch import Tensor

from funcpipe._src.core.errors import DrawError
from funcpipe._src.core.torch_names import (
    OpOverload,
    TorchDispatchMode,
    backward_number,
    dispatch_key,
    higher_order_operators,
    include_key,
    operations_with,
    schema,
)

_SEEDED = torch.Tag.nondeterministic_seeded
_KEY = "TESTING_ONLY_GenericMode"
_DRAW_NOTHING = {"aten::_fused_sdp_choice", "aten::_scaled_dot_product_flash_attention_for_cpu"}
"""Operations that never draw although torch tags them so: one chooses a kernel, the other refuses
dropout."""

_CHANCES = ("dropout_p", "dropout", "p")
_SWITCHES = ("train", "training")


class CatchDraws:
    """A context that passes each operation of this thread that may draw to `caught`.

    The innermost catcher gets the operation. The outermost catcher switches the key on, which costs
    more than entering inner catchers. So a thread that enters catchers often enters an outer
    catcher first: an instance of this class, which lets draws pass except in backwards.
    """

    __slots__ = ("_asking", "_outer")

    means: list[MeanOverTargets] | None = None
    """A list for the means of cross entropies computed in this context; None: not recorded."""

    def caught(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the operation's result. Raises DrawError in a backward.

        Operations that this method calls are not caught again.
        """
        if self._outer is not None:
            return self._outer.caught(func, args, kwargs)
        if backward_number() >= 0:
            raise DrawError(
                f"the stage draws random numbers ({func}) in its backward, where no draw has a "
                "key: a custom autograd.Function or a hook draws there; draw in the forward, and "
                "save the drawn values (ctx.save_for_backward)"
            )
        return func(*args, **kwargs)

    def __enter__(self) -> Self:
        self._outer = _thread.catcher
        if self._outer is None:
            kernels = _kernels or _register()
            self._asking = kernels if kernels.work else _Everything()
            self._asking.__enter__()
        _thread.catcher = self
        return self

    def __exit__(self, *error: object) -> None:
        _thread.catcher = self._outer
        if self._outer is None:
            self._asking.__exit__(None, None, None)


class _Thread(threading.local):
    """The catcher of this thread, and whether the thread is within `beside_others`."""

    catcher: CatchDraws | None = None
    beside = False


_thread = _Thread()
_registering = threading.Lock()
_generator = threading.RLock()
"""Held by the thread that reads or writes the state of the CPU's generator. Reentrant, because a
garbage collection within may call the same functions."""
_kernels: _Kernels | None = None


def _register() -> _Kernels:
    """Return the kernels of this process, and register them for the first catcher."""
    global _kernels
    with _registering:
        if _kernels is None:
            _kernels = _Kernels()
            _make_checkpoints_safe()
        return _kernels


@contextmanager
def beside_others(*, several: bool) -> Generator[None]:
    """Return a context. With ``several``, other threads draw from the same device generators."""
    before, _thread.beside = _thread.beside, several
    try:
        yield
    finally:
        _thread.beside = before


def _make_checkpoints_safe() -> None:
    """Make ``torch.utils.checkpoint`` safe on several lanes.

    A device's generator is global. A recomputation of one lane would reset the generator while
    another lane draws. Within `beside_others` the regions need no restore, because their draws are
    keyed.

    The state of the CPU's generator is read by one thread at a time. Torch holds the generator's
    mutex while it makes the Python object of the state. If that begins a garbage collection which
    gives up the GIL, and another thread waits for the mutex with the GIL, both wait for ever.
    """
    states = torch.utils.checkpoint.get_device_states
    torch.random.get_rng_state = torch.get_rng_state = _one_at_a_time(torch.get_rng_state)
    torch.random.set_rng_state = torch.set_rng_state = _one_at_a_time(torch.set_rng_state)

    @wraps(states)
    def states_outside(*args: Any) -> Any:
        return ([], []) if _thread.beside else states(*args)

    torch.utils.checkpoint.get_device_states = states_outside


def _one_at_a_time(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that one thread calls at a time."""

    @wraps(function)
    def locked(*args: Any, **kwargs: Any) -> Any:
        with _generator:  # a thread that waits for this lock gives up the GIL
            return function(*args, **kwargs)

    return locked


class _Kernels:
    """The kernels of the drawing operations. As a context, it gives this thread the key.

    Attributes:
        work: whether this version of torch accepts the kernels.
    """

    def __init__(self) -> None:
        self.work, self._passing = True, 0
        try:
            self._key = dispatch_key(_KEY)
            include_key(self._key, False)
            higher_order_operators.values()
            self._libraries = (
                torch.library.Library("_", "IMPL"),
                torch.library.Library("aten", "IMPL"),
            )
            self._libraries[0].fallback(torch.library.fallthrough_kernel, _KEY)
            for operation in filter(may_draw, operations_with(_SEEDED)):
                self._libraries[1].impl(operation.name(), self._kernel(operation), _KEY)
            self._libraries[1].impl(
                "nll_loss_nd", self._noting_means(torch.ops.aten.nll_loss_nd.default), _KEY
            )
        except (AttributeError, RuntimeError) as error:
            self.work = False
            warnings.warn(
                f"torch {torch.__version__} accepts no kernels under its key {_KEY} ({error}); "
                "funcpipe keys random numbers by a dispatch mode instead, which costs some "
                "microseconds for each operation of a run",
                RuntimeWarning,
                stacklevel=2,
            )

    def __enter__(self) -> None:
        """Give this thread the key."""
        known = higher_order_operators
        # A higher-order operator does not pass a key unless it is registered for the key.
        if len(known) > self._passing:
            for operation in list(known.values())[self._passing :]:
                operation.fallthrough(self._key)
            self._passing = len(known)
        include_key(self._key, True)

    def __exit__(self, *error: object) -> None:
        include_key(self._key, False)

    def _kernel(self, operation: Any) -> Callable[..., Any]:
        key = self._key

        def kernel(*args: Any, **kwargs: Any) -> Any:
            include_key(key, False)
            try:
                catcher = _thread.catcher
                # torch.compile traces now and draws later, when the operation is caught. A thread
                # of autograd inherits the key, but has no catcher.
                if (
                    catcher is None
                    or draws_nothing(operation, args, kwargs)
                    or torch.compiler.is_compiling()
                ):
                    return operation(*args, **kwargs)
                return catcher.caught(operation, args, kwargs)
            finally:
                include_key(key, True)

        return kernel

    def _noting_means(self, operation: Any) -> Callable[..., Any]:
        """Return a kernel for cross entropies, which records the means and their targets."""
        key = self._key

        def kernel(
            scores: Any,
            target: Any,
            weight: Any = None,
            reduction: int = 1,
            ignore_index: int = -100,
        ) -> Any:
            include_key(key, False)
            try:
                catcher = _thread.catcher
                while catcher is not None and catcher.means is None:
                    catcher = catcher._outer
                if catcher is not None and catcher.means is not None and reduction == 1:
                    catcher.means.append(MeanOverTargets(target, weight is not None, ignore_index))
                return operation(scores, target, weight, reduction, ignore_index)
            finally:
                include_key(key, True)

        return kernel


class MeanOverTargets(NamedTuple):
    """A mean of torch's cross entropy: its targets, whether classes have weights, and the ignored
    class."""

    target: Tensor
    weighed: bool
    ignored: int


class _Everything(TorchDispatchMode):
    """Catches draws as a dispatch mode, for versions of torch that accept no kernels.

    Slower than `_Kernels`, because a dispatch mode sees every operation.
    """

    supports_higher_order_operators = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Pass an operation that may draw to the catcher."""
        catcher, kwargs = _thread.catcher, kwargs or {}
        if catcher is None or not may_draw(func) or draws_nothing(func, args, kwargs):
            return func(*args, **kwargs)
        return catcher.caught(func, args, kwargs)


def may_draw(func: Any) -> bool:
    """Return whether an operation draws random numbers with some arguments."""
    return (
        isinstance(func, OpOverload) and _SEEDED in func.tags and func.name() not in _DRAW_NOTHING
    )


def draws_nothing(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether an operation draws nothing with these arguments, as in evaluation."""
    switches, chances = _arguments(func)
    values = [_value(argument, args, kwargs) for argument in switches]
    if any(value is False for value in values):
        return True
    probabilities = [_value(argument, args, kwargs) for argument in chances]
    return bool(probabilities) and not any(probabilities)


@lru_cache(maxsize=512)
def _arguments(func: Any) -> tuple[list[tuple[int, str, Any]], list[tuple[int, str, Any]]]:
    """Return the arguments that switch draws on, and the dropout probabilities.

    Each is (position, name, default).
    """
    rows = [
        (place, argument.name, argument.default_value if argument.has_default_value() else None)
        for place, argument in enumerate(schema(func).arguments)
    ]
    # "p" is a dropout probability only in dropouts: bernoulli(p=0) still advances the generator.
    chance_names = _CHANCES if "dropout" in schema(func).name else _CHANCES[:2]
    return [row for row in rows if row[1] in _SWITCHES], [
        row for row in rows if row[1] in chance_names
    ]


def _value(argument: tuple[int, str, Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    place, name, default = argument
    return args[place] if place < len(args) else kwargs.get(name, default)
