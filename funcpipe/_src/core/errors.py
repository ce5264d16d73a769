"""The exceptions of funcpipe, and the wrapping of exceptions that user code raises in a run.

Checks list all faults in one error. Errors of stages carry their coordinates: stage, microbatch,
action and device.
"""

from __future__ import annotations

import copyreg
import functools
import os
from collections.abc import Collection, Iterable
from pathlib import Path
from types import GetSetDescriptorType, MemberDescriptorType, TracebackType
from typing import Any, NamedTuple, NoReturn


class FuncpipeError(Exception):
    """The base class of all errors that funcpipe raises.

    >>> try:
    ...     fp.Schedule.parse("0F0 0X0")
    ... except fp.FuncpipeError as error:
    ...     print(type(error).__name__)
    ScheduleError

    Attributes:
        everywhere: whether each process of the plan raises the error by itself, so that no process
            has to report it to the others.
    """

    everywhere: bool = False


class ScheduleError(FuncpipeError, ValueError):
    """A schedule, a cost or a search is wrong by its numbers alone, without any stage.

    The message lists all faults. See `fp.schedules.check` for the rules of a schedule.
    """


class PlanError(FuncpipeError, ValueError):
    """Stages, schedule and options do not fit together, or an argument is wrong."""


class TraceError(PlanError):
    """A compiled stage cannot be traced to a program.

    Attributes:
        cause: the error of torch or of the stage, if funcpipe knows no better explanation; else
            None.
    """

    cause: Exception | None = None


class RanksError(PlanError):
    """The processes that run a plan together disagree, for example about the plan or the batch.

    Each rank raises this error. The message says which ranks differ, and in what.
    """

    everywhere = True


class BatchError(FuncpipeError, ValueError):
    """A batch, its feeds or its weights cannot be cut into microbatches, or outputs not merged."""


class PlacementError(FuncpipeError, ValueError):
    """A tensor is on another device than the plan says."""


class CheckpointError(FuncpipeError, ValueError):
    """A checkpoint is missing or damaged, or does not fit the model or the optimizer."""


class DrawError(FuncpipeError, RuntimeError):
    """A stage draws random numbers in a way that funcpipe cannot key by seed and microbatch."""


class Where(NamedTuple):
    """The coordinates of a failure, as ``error.funcpipe`` of a `StageError`.

    >>> print(fp.typing.Where(2, "head", 0, "2F0", "1 (cpu)"))
    in 2F0 of stage 2 ('head') at microbatch 0 on device 1 (cpu)

    Attributes:
        stage: the index of the stage; None: the failure was outside of a stage.
        name: the stage's name; "" for none.
        microbatch: the index of the microbatch; None: the failure concerns no single microbatch.
        action: the action as printed in a schedule (``2F0``), or a word (``commit``).
        device: the index of the device (lane) with its torch device, ``"1 (cpu)"``.
        batch: the number of the batch in an `fp.batches.overlap`; None outside of an overlap.
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
    """The metaclass of StageError and of the classes that `_both` makes.

    Pickle looks up reducers by metaclass, and so finds the recipe to make a combined class again.
    """


def _recipe(kind: type) -> str | tuple[Any, ...]:
    combined = "[" in kind.__name__
    return (_both, kind.__bases__[1:]) if combined else kind.__qualname__


def _found_by_recipe(metaclass: type[_StageErrors]) -> type[_StageErrors]:
    copyreg.pickle(metaclass, _recipe)  # pyright: ignore[reportArgumentType]  a string is the name to find it by
    return metaclass


_found_by_recipe(_StageErrors)


class StageError(FuncpipeError, metaclass=_StageErrors):
    """Your code raised an exception inside a run: a stage, a loss, a weight or a commit.

    `run` raises an instance of this class *and* of the original type. So both ``except
    fp.StageError`` and ``except ValueError`` catch a ValueError. ``__cause__`` is the original
    error. KeyboardInterrupt and SystemExit are not wrapped. All carry the coordinates, in
    ``error.funcpipe`` and in a note below the message.

    >>> broken = fp.stage(lambda p, x: 1 / 0)
    >>> plan = fp.make_plan([broken], fp.schedules.fill_drain(1, 2, backward=False), devices="cpu")
    >>> try:
    ...     fp.run(plan, ((),), torch.ones(2))
    ... except ZeroDivisionError as error:
    ...     print(error.funcpipe.action, isinstance(error, fp.StageError))
    0F0 True

    Attributes:
        funcpipe: the coordinates of the failure.
    """

    funcpipe: Where = Where(None, "", None, "", "")


class NotFiniteError(StageError, ArithmeticError):
    """A stage computed NaN or Inf in a run with ``check="finite"``.

    The error names the first such action in the order of its lane.
    """


class RunTimeout(FuncpipeError, TimeoutError):
    """No lane made progress for the ``timeout=`` of a run.

    The message says the last action of each lane, and what the lane waits for.
    """


class PeerError(FuncpipeError, ConnectionError):
    """Another process of the plan failed, or the connection to it was lost.

    The message contains the error of the other process, or the last known facts about it.

    Attributes:
        rank: the rank of the other process among all processes of the plan, counted replica after
            replica. None: not known.
        process: the number of the other process in the job, as in torch.distributed and in the logs
            of torchrun. None: not known.
        funcpipe: the coordinates of the failure, if the other process failed inside a stage.
    """

    rank: int | None = None
    process: int | None = None
    funcpipe: Where | None = None


def bullets(title: str, faults: Iterable[str], most: int | None = None) -> str:
    """Write one message for many faults: a title, then at most ``most`` lines of faults."""
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
    """Raise one error for all faults, if there are any. The message lists at most ``most``."""
    if faults:
        raise kind(bullets(title, faults, most))


def located(error: BaseException, where: Where) -> BaseException:
    """Return the exception that a run raises for ``error``, with its coordinates.

    An ``Exception`` becomes an instance of StageError and of its own type, built without running
    the user's ``__init__``. If Python cannot combine the types (final classes, odd layouts), it
    becomes a plain StageError. Other exceptions stay the same object, with coordinates attached.
    """
    if isinstance(error, StageError) and "funcpipe" in error.__dict__:
        return error  # it has its coordinates
    if isinstance(error, StageError) or not isinstance(error, Exception):
        _attach(error, where)
        return error
    new = _twin(error)
    _attach(new, where)
    # with_traceback, because an exception that is a frozen dataclass refuses assignments.
    error.with_traceback(without_own_frames(error.__traceback__))
    new.__cause__ = error
    return new


PACKAGE = str(Path(__file__).parents[1])
"""The folder of this package's code, whose frames are left out of tracebacks and stacks."""


def without_own_frames(trace: TracebackType | None) -> TracebackType | None:
    """Return a traceback without the frames of this package, if it has other frames.

    With ``FUNCPIPE_TRACEBACKS=full`` in the environment, all frames stay.
    """
    others: list[TracebackType] = []
    step = None if os.environ.get("FUNCPIPE_TRACEBACKS") == "full" else trace
    while step is not None:
        others += [] if step.tb_frame.f_code.co_filename.startswith(PACKAGE) else [step]
        step = step.tb_next
    shorter: TracebackType | None = None
    for step in reversed(others):
        shorter = TracebackType(shorter, step.tb_frame, step.tb_lasti, step.tb_lineno)
    return shorter or trace


def at_batch(error: BaseException, where: Where) -> BaseException:
    """Attach the number of an overlap's batch to an error; coordinates of an inner run stay."""
    inner: Where | None = error.__dict__.get("funcpipe")
    _attach(error, where)
    if inner is not None and inner.batch is None:
        error.__dict__["funcpipe"] = inner._replace(batch=where.batch)
    return error


def fail(error: BaseException, where: Where) -> NoReturn:
    """Raise the exception that a run raises for ``error``."""
    failure = located(error, where)
    try:
        raise failure
    finally:
        del failure, error  # the traceback's frames must not point back at the exception


def _attach(error: BaseException, where: Where) -> None:
    # Writes into __dict__, because setattr and add_note fail for an exception that is a frozen
    # dataclass.
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
    """Return a class that is a StageError and a ``kind``; None if Python cannot make one."""

    def text(self: Exception) -> str:
        return kind.__str__(self)

    def reduce(self: Exception) -> Any:
        # Pickle cannot find a class made at run time, so it gets a plain StageError instead.
        where, notes = self.__dict__.get("funcpipe"), self.__dict__.get("__notes__", [])
        return _plain, (f"{kind.__name__}: {self}", where, notes)

    body = {
        "__module__": kind.__module__,
        "__str__": text,
        "__reduce__": reduce,
        "__doc__": StageError.__doc__,
    }
    try:
        metaclass = _StageErrors
        # If the user's class has its own metaclass, both metaclasses must be combined. The new one
        # is registered again, because copyreg looks up exact types.
        if not issubclass(metaclass, type(kind)):
            metaclass = _found_by_recipe(type(type(kind).__name__, (_StageErrors, type(kind)), {}))
        return metaclass(f"StageError[{kind.__name__}]", (StageError, kind), body)
    except TypeError:
        return None


def _plain(message: str, where: Where, notes: list[str]) -> StageError:
    error = StageError(message)
    vars(error).update(funcpipe=where, __notes__=notes)
    return error


def _blank(kind: type[StageError], source: Exception) -> StageError:
    """Make a ``kind`` with the fields of ``source``, without the user's ``__init__``."""
    try:
        new = kind.__new__(kind, *source.args)
    except TypeError:  # MemoryError.__new__ fails if MemoryError is not the first base
        new = BaseException.__new__(kind, *source.args)
    try:
        native(type(source)).__init__(new, *source.args)
    except TypeError:
        pass  # its __init__ takes other arguments than it keeps; the fields are copied below
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
    """Return the nearest base class made in C, which allocates the instances."""
    return next(base for base in kind.__mro__ if not base.__flags__ & (1 << 9))


def _members(kind: type) -> Iterable[str]:
    """Yield the slots and C fields of an exception class: errno, name, object, start, ..."""
    for base in kind.__mro__:
        if base is BaseException or base is object:
            return
        for name, value in vars(base).items():
            is_field = isinstance(value, (MemberDescriptorType, GetSetDescriptorType))
            if is_field and not name.startswith("__"):
                yield name
