"""Catches operations that draw random numbers, on the threads that ask for it, at no cost for any
other operation.

Torch's dispatcher looks at a set of keys that every thread has for itself. Under one of them, which
torch keeps for tests, the operations that may draw have a kernel written here: it hands the
operation to whoever catches on this thread. All others pass the key without noticing it, and a
thread that catches nothing never has it. So a draw is seen wherever it comes from: the stage
itself, a module deep inside, a branch of ``torch.cond``, a function that ``torch.compile`` made.
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
"""Operations that torch says may draw, and that do not: one chooses a kernel, the other refuses
dropout."""

_CHANCES = ("dropout_p", "dropout", "p")
_SWITCHES = ("train", "training")


class CatchDraws:
    """Pass every operation of this thread that may draw, inside the context, to `caught` of the
    innermost catcher.

    The outermost catcher asks torch for the draws of this thread, which costs more than entering
    inner ones. So code that enters catchers often enters an outer one first, of this class: it lets
    draws pass, except in backwards.
    """

    __slots__ = ("_asking", "_outer")

    means: list[MeanOverTargets] | None = None
    """Where cross entropies that are computed inside are noted."""

    def caught(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the operation's result. Operations in here are not caught again. Raises DrawError
        in a backward."""
        if self._outer is not None:
            return self._outer.caught(func, args, kwargs)
        if backward_number() >= 0:
            raise DrawError(
                f"the stage draws random numbers ({func}) in its backward, where no draw has a "
                "key: a custom autograd.Function or a hook draws there; draw in the forward, and "
                "keep what was drawn (ctx.save_for_backward)"
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
    """The catcher of this thread, whether it is `beside_others`, and the list for means over
    targets."""

    catcher: CatchDraws | None = None
    beside = False


_thread = _Thread()
_registering = threading.Lock()
_kernels: _Kernels | None = None


def _register() -> _Kernels:
    """The kernels of this process, registered when the first catcher is entered."""
    global _kernels
    with _registering:
        if _kernels is None:
            _kernels = _Kernels()
            _leave_generators_alone()
        return _kernels


@contextmanager
def beside_others(*, several: bool) -> Generator[None]:
    """Inside, with ``several``, this thread is one of those that draw at the same time, by the same
    generators of devices."""
    before, _thread.beside = _thread.beside, several
    try:
        yield
    finally:
        _thread.beside = before


def _leave_generators_alone() -> None:
    """Let ``torch.utils.checkpoint`` keep no state of a device's generator inside of
    `beside_others`, and set none.

    What its regions draw there is keyed. A device's generator is the process's: set back by a
    region that one lane computes again, it would be another one's in the middle of a draw.
    """
    states = torch.utils.checkpoint.get_device_states

    @wraps(states)
    def states_outside(*args: Any) -> Any:
        return ([], []) if _thread.beside else states(*args)

    torch.utils.checkpoint.get_device_states = states_outside


class _Kernels:
    """The kernels of the drawing operations, under a key of their own; inside of ``with`` this
    thread has the key.

    They ``work`` where this torch takes them.
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
                f"torch {torch.__version__} takes no kernels under its key {_KEY} ({error}); "
                "random numbers are keyed by a dispatch mode instead, which costs some "
                "microseconds at every operation of a run",
                RuntimeWarning,
                stacklevel=2,
            )

    def __enter__(self) -> None:
        """Put the key into this thread's set."""
        known = higher_order_operators
        if (
            len(known) > self._passing
        ):  # each operation over functions must be told which keys pass it
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
                # What torch.compile traces is caught when it runs. A thread of autograd's has the
                # key but no catcher.
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
        """Return the kernel through which all cross entropies pass. It notes the targets that their
        means leave out."""
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
    """Catches draws as a dispatch mode, which sees every operation, where torch takes no kernels of
    ours."""

    supports_higher_order_operators = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Hand an operation that may draw to the catcher."""
        catcher, kwargs = _thread.catcher, kwargs or {}
        if catcher is None or not may_draw(func) or draws_nothing(func, args, kwargs):
            return func(*args, **kwargs)
        return catcher.caught(func, args, kwargs)


def may_draw(func: Any) -> bool:
    """Whether this is an operation that draws random numbers, at least with some arguments."""
    return (
        isinstance(func, OpOverload) and _SEEDED in func.tags and func.name() not in _DRAW_NOTHING
    )


def draws_nothing(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether an operation that may draw does not with these arguments: in evaluation, or with
    dropout of 0."""
    switches, chances = _arguments(func)
    values = [_value(argument, args, kwargs) for argument in switches]
    if any(value is False for value in values):
        return True
    probabilities = [_value(argument, args, kwargs) for argument in chances]
    return bool(probabilities) and not any(probabilities)


@lru_cache(maxsize=512)
def _arguments(func: Any) -> tuple[list[tuple[int, str, Any]], list[tuple[int, str, Any]]]:
    """The arguments that switch an operation's draws on, and the probabilities of these: (place,
    name, default)."""
    rows = [
        (place, argument.name, argument.default_value if argument.has_default_value() else None)
        for place, argument in enumerate(schema(func).arguments)
    ]
    chance_names = (
        _CHANCES if "dropout" in schema(func).name else _CHANCES[:2]
    )  # in bernoulli p is something else
    return [row for row in rows if row[1] in _SWITCHES], [
        row for row in rows if row[1] in chance_names
    ]


def _value(argument: tuple[int, str, Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    place, name, default = argument
    return args[place] if place < len(args) else kwargs.get(name, default)
