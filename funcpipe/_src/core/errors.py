"""The exceptions of funcpipe: refusals list every fault, failures of stages say where they
happened."""

from __future__ import annotations

import copyreg
import functools
import os
from collections.abc import Collection, Iterable
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, NoReturn


class FuncpipeError(Exception):
    """The base of everything that funcpipe itself raises.

    Attributes:
        everywhere: does every process of the plan raise it by itself, so that none has to be told.
    """

    everywhere: bool = False


class ScheduleError(FuncpipeError, ValueError):
    """A schedule is wrong by itself: the numbers show it, no stage is needed to see it."""


class PlanError(FuncpipeError, ValueError):
    """Stages, schedule and options do not fit together."""


class TraceError(PlanError):
    """A compiled stage cannot be made a program.

    Attributes:
        cause: what came from torch or from the stage itself, where that is all that is known.
    """

    cause: Exception | None = None


class RanksError(PlanError):
    """The processes that run one plan together do not fit: every rank raises it, and says which
    differ in what."""

    everywhere = True


class BatchError(FuncpipeError, ValueError):
    """A batch, its feeds or its weights cannot be cut into microbatches."""


class PlacementError(FuncpipeError, ValueError):
    """A tensor lies on another device than the plan says."""


class CheckpointError(FuncpipeError, ValueError):
    """A checkpoint is not there, not whole, damaged, or of something else than it is loaded
    into."""


class DrawError(FuncpipeError, RuntimeError):
    """A stage draws random numbers in a way that cannot be keyed."""


class Where(NamedTuple):
    """The coordinates of a failure.

    Attributes:
        stage: index of the stage, None outside of any stage.
        name: the stage's name, "" if it has none.
        microbatch: index of the microbatch, None where none is meant.
        action: what ran, as printed in a schedule (``2F0``), or a word (``commit``).
        device: logical device (lane) with its torch device, ``"1 (cpu)"``.
        batch: number of the batch in an `overlap`, None outside of any.
    """

    stage: int | None
    name: str
    microbatch: int | None
    action: str
    device: str
    batch: int | None = None

    def __str__(self) -> str:
        parts = [f"in {self.action}"]
        if self.stage is not None:
            parts.append(f"of stage {self.stage}" + (f" ({self.name!r})" if self.name else ""))
        if self.microbatch is not None:
            parts.append(f"at microbatch {self.microbatch}")
        if self.device:
            parts.append(f"on device {self.device}")
        if self.batch is not None:
            parts.append(f"at batch {self.batch}")
        return " ".join(parts)


class _StageErrors(type):
    """The metaclass of StageError and of those that `_both` makes; pickle finds these by the
    classes they combine."""


def _recipe(kind: type) -> str | tuple[Any, ...]:
    combined = "[" in kind.__name__
    return (_both, kind.__bases__[1:]) if combined else kind.__qualname__


def _found_by_recipe(metaclass: type[_StageErrors]) -> type[_StageErrors]:
    copyreg.pickle(metaclass, _recipe)  # pyright: ignore[reportArgumentType]  a string is the name to find it by
    return metaclass


_found_by_recipe(_StageErrors)


class StageError(FuncpipeError, metaclass=_StageErrors):
    """User code failed inside a run.

    What ``run`` raises for an ``Exception`` of the user's is an instance of this class *and* of the
    user's own type, so both ``except StageError`` and ``except ValueError`` catch it. ``__cause__``
    is the original. Exceptions that are not an ``Exception`` (KeyboardInterrupt, SystemExit) arrive
    as the very object. Both carry `funcpipe`, the coordinates, and a note that says them.

    >>> broken = fp.stage(lambda p, x: 1 / 0)
    >>> plan = fp.make_plan([broken], fp.schedules.fill_drain(1, 2, backward=False), devices="cpu")
    >>> try:
    ...     fp.run(plan, ((),), torch.ones(2))
    ... except ZeroDivisionError as error:
    ...     print(error.funcpipe.action, isinstance(error, fp.StageError))
    0F0 True
    """

    funcpipe: Where = Where(None, "", None, "", "")


class NotFiniteError(StageError, ArithmeticError):
    """With ``check="finite"``: a stage made NaN or Inf. It is the first in its lane's order."""


class RunTimeout(FuncpipeError, TimeoutError):
    """With ``timeout=``: nothing went on for so long. The message says what every lane did last and
    waits for."""


class PeerError(FuncpipeError, ConnectionError):
    """Another process of the plan failed, or is lost. The message contains its error, or the last
    known facts.

    Attributes:
        rank: of that process, among all that run the plan (with replicas, those of one after those
            of the other); None: nobody knows which.
        process: the number of that process in the job, as in torch.distributed and in torchrun's
            logs; None: unknown.
        funcpipe: the coordinates of its failure, where it failed inside of a stage.
    """

    rank: int | None = None
    process: int | None = None
    funcpipe: Where | None = None


def bullets(title: str, faults: Iterable[str], most: int | None = None) -> str:
    """One message for many faults: a title, then a line for each, or for so many and how many more
    there are."""
    lines = list(faults)
    if most is not None and len(lines) > most:
        lines[most:] = [f"and {len(lines) - most} more"]
    return "\n".join([title, *(f"  * {line}" for line in lines)])


def raise_all(
    title: str,
    faults: Collection[str],
    kind: type[Exception] = PlanError,
    *,
    most: int | None = None,
) -> None:
    """Raise one error for all faults, if there are any; its message lists no more than ``most`` of
    them."""
    if faults:
        raise kind(bullets(title, faults, most))


def located(error: BaseException, where: Where) -> BaseException:
    """What a run raises for ``error``: it knows where it happened and keeps the type that the user
    raised.

    An ``Exception`` becomes an instance of StageError and of its own type, built without running
    the user's ``__init__``. Types that refuse it (final classes, odd layouts) become a plain
    StageError. Anything else stays the very object, with the coordinates attached.
    """
    if isinstance(error, StageError) and "funcpipe" in error.__dict__:
        return error  # it has its coordinates
    if isinstance(error, StageError) or not isinstance(error, Exception):
        _attach(error, where)
        return error
    new = _twin(error)
    _attach(new, where)
    error.with_traceback(
        without_own_frames(error.__traceback__)
    )  # a frozen dataclass refuses assignments
    new.__cause__ = error
    return new


_PACKAGE = str(Path(__file__).parents[1])


def without_own_frames(trace: TracebackType | None) -> TracebackType | None:
    """Return a traceback without the frames of this package. A traceback with no other frames stays
    as it is.

    With ``FUNCPIPE_TRACEBACKS=full`` in the environment every frame stays.
    """
    others: list[TracebackType] = []
    step = None if os.environ.get("FUNCPIPE_TRACEBACKS") == "full" else trace
    while step is not None:
        others += [] if step.tb_frame.f_code.co_filename.startswith(_PACKAGE) else [step]
        step = step.tb_next
    shorter: TracebackType | None = None
    for step in reversed(others):
        shorter = TracebackType(shorter, step.tb_frame, step.tb_lasti, step.tb_lineno)
    return shorter or trace


def at_batch(error: BaseException, where: Where) -> BaseException:
    """The same error, which knows the batch of an overlap that it belongs to; what a run inside of
    it said stays."""
    inner: Where | None = error.__dict__.get("funcpipe")
    _attach(error, where)
    if inner is not None and inner.batch is None:
        error.__dict__["funcpipe"] = inner._replace(batch=where.batch)
    return error


def fail(error: BaseException, where: Where) -> NoReturn:
    """Raise what a run raises for ``error``."""
    failure = located(error, where)
    try:
        raise failure
    finally:
        del failure, error  # the traceback's frames must not point back at the exception


def _attach(error: BaseException, where: Where) -> None:
    # Not setattr and not add_note: a frozen dataclass may be an exception.
    fields = error.__dict__
    fields["funcpipe"] = where
    fields.setdefault("__notes__", []).append(str(where))


def _twin(error: Exception) -> StageError:
    kind = _both(type(error))
    if kind is not None:
        try:
            return _blank(kind, error)
        except Exception:
            pass
    plain = StageError(f"{type(error).__name__}: {error}")
    vars(plain)["__notes__"] = list(getattr(error, "__notes__", ()))
    return plain


@functools.lru_cache(maxsize=256)
def _both(kind: type[Exception]) -> type[StageError] | None:
    """A class that is StageError and ``kind``, or None where Python refuses such a class."""

    def text(self: Exception) -> str:
        return kind.__str__(self)

    def reduce(self: Exception) -> Any:
        # A class made at run time cannot be found by pickle: the plain form travels.
        return (
            _plain,
            (
                f"{kind.__name__}: {self}",
                self.__dict__.get("funcpipe"),
                self.__dict__.get("__notes__", []),
            ),
        )

    body = {
        "__module__": kind.__module__,
        "__str__": text,
        "__reduce__": reduce,
        "__doc__": StageError.__doc__,
    }
    try:
        metaclass = _StageErrors
        if not issubclass(
            metaclass, type(kind)
        ):  # a metaclass of the user's; copyreg goes by exact types
            metaclass = _found_by_recipe(type(type(kind).__name__, (_StageErrors, type(kind)), {}))
        return metaclass(f"StageError[{kind.__name__}]", (StageError, kind), body)
    except TypeError:
        return None


def _plain(message: str, where: Where, notes: list[str]) -> StageError:
    error = StageError(message)
    vars(error).update(funcpipe=where, __notes__=notes)
    return error


def _blank(kind: type[StageError], source: Exception) -> StageError:
    """An instance of ``kind`` with everything that ``source`` holds, the user's ``__init__`` not
    run."""
    try:
        new = kind.__new__(kind, *source.args)
    except TypeError:  # MemoryError's own is refused where MemoryError is not the first base
        new = BaseException.__new__(kind, *source.args)
    try:
        native(type(source)).__init__(new, *source.args)
    except TypeError:
        pass  # wants other arguments than it keeps; its fields are copied below
    new.args = source.args
    fields = {key: value for key, value in source.__dict__.items() if key != "__notes__"}
    vars(new).update(fields, __notes__=list(getattr(source, "__notes__", ())))
    for name in _members(type(source)):
        try:
            value = getattr(source, name)
            if value is not None:
                BaseException.__setattr__(new, name, value)
        except (AttributeError, TypeError):
            continue  # read-only or unset
    return new


def native(kind: type) -> Any:
    """The nearest class made in C, which makes the instances."""
    return next(base for base in kind.__mro__ if not base.__flags__ & (1 << 9))


def _members(kind: type) -> Iterable[str]:
    """Names of the slots and C fields of an exception class: errno, name, object, start, ..."""
    for base in kind.__mro__:
        if base is BaseException or base is object:
            return
        for name, value in vars(base).items():
            if type(value).__name__ in (
                "member_descriptor",
                "getset_descriptor",
            ) and not name.startswith("__"):
                yield name
