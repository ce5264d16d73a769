"""How far a long call has come: told to a function, or shown on stderr while the call runs.

Nothing here runs in a thread of its own: the call itself tells, between its steps, at most ten
times a second.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from importlib import import_module
from math import inf
from time import perf_counter
from typing import Any, NamedTuple, Protocol, TextIO, TypeAlias

from funcpipe._src.core.errors import PlanError

EVERY = 0.1
"""Seconds between two that are told at least, while the phase stays."""
_EVERY_LINE = 10.0
"""Seconds between two lines at least, where a line cannot be written anew, while the phase
stays."""
_WIDE = 20
"""Columns of a bar of letters."""


class CallProgress(NamedTuple):
    """How far a long call has come; ``str`` of it is one line.

    Attributes:
        call: the function: "search", "profile", "plan_for", "split", "warmup".
        phase: what it does now; "done" at last.
        done: how much of what it counts is done.
        total: of how much; None: not known yet. It may end earlier.
        unit: what it counts, "schedules".
        seconds: since the call began.
        limit: the seconds after which it is cut short; None: it has no such limit.
        best: the best value so far; None: none is known, or nothing is searched.
        gap: how far above the lower bound the best is at most, of 1; None: not known.
    """

    call: str
    phase: str
    done: int
    total: int | None
    unit: str
    seconds: float
    limit: float | None = None
    best: float | None = None
    gap: float | None = None

    @property
    def share(self) -> float:
        """How much of the call is over, of 1: of what it counts or of its seconds, whichever is
        more."""
        counted = self.done / self.total if self.total else 0.0
        timed = self.seconds / self.limit if self.limit else 0.0
        return 1.0 if self.phase == "done" else min(1.0, max(counted, timed))

    def __str__(self) -> str:
        of = "" if self.total is None else f" of {self.total}"
        words = [self.phase, f"{self.done}{of} {self.unit}"]
        words.append(
            f"{self.seconds:.1f} s" + ("" if self.limit is None else f" of {self.limit:g} s")
        )
        if self.best is not None:
            words.append(f"best {self.best:.6g}")
        if self.gap is not None:
            words.append(
                f"at most {self.gap:.2%} above the shortest"
                if self.gap
                else "nothing shorter exists"
            )
        return f"{self.call}: {', '.join(words)}"


ProgressTo: TypeAlias = bool | Callable[[CallProgress], object]
"""The argument ``progress``: a function that is told, or whether to show it."""


class Teller:
    """What a call tells; everything is free where nobody listens.

    Attributes:
        on: does somebody listen.
        total: of how many steps; None: not known yet.
        look: gives the best value and its gap, or None for what is not known.
    """

    def __init__(
        self,
        call: str = "",
        tell: Callable[[CallProgress], object] | None = None,
        *,
        unit: str = "steps",
        total: int | None = None,
        limit: float = inf,
    ) -> None:
        self.on = tell is not None
        self.total = total
        self.look: Callable[[], tuple[float | None, float | None]] = lambda: (None, None)
        self._call, self._to, self._unit, self._limit = (
            call,
            tell,
            unit,
            None if limit == inf else limit,
        )
        self._phase, self._done = "begins", 0
        self._began = self._last = perf_counter()

    def phase(self, name: str, done: int | None = None) -> None:
        """Another phase begins. It is told where it is new."""
        if self._to is None or (name == self._phase and done is None):
            return
        self._phase, self._done = name, self._done if done is None else done
        self._tell(perf_counter())

    def to(self, done: int) -> None:
        """So much is done; told where the last time is long enough ago."""
        if self._to is None:
            return
        self._done = done
        self.again()

    def again(self) -> None:
        """Still at it; told where the last time is long enough ago."""
        if self._to is not None and (now := perf_counter()) - self._last >= EVERY:
            self._tell(now)

    def _tell(self, now: float) -> None:
        assert self._to is not None
        row = (
            self._call,
            self._phase,
            self._done,
            self.total,
            self._unit,
            now - self._began,
            self._limit,
        )
        self._to(CallProgress(*row, *self.look()))
        self._last = perf_counter()  # what takes long is told less often


@contextmanager
def telling(
    call: str, progress: ProgressTo, *, unit: str, total: int | None = None, limit: float = inf
) -> Generator[Teller]:
    """Where a call tells how far it has come. What is shown is taken away at the end, however the
    call ends.

    Args:
        call: its name.
        progress: who is told: a function; True: stderr shows it; False: nobody.
        unit: what is counted.
        total: of how many.
        limit: the seconds after which the call is cut short.

    Raises:
        PlanError: progress is none of these. What the function raises ends the call.
    """
    if not (isinstance(progress, bool) or callable(progress)):
        raise PlanError(
            f"progress is a function, True or False; got {progress!r}; progress=True shows it, "
            "progress=print prints it"
        )
    if isinstance(progress, bool):
        shown = display() if progress else None
        tell: Callable[[CallProgress], object] | None = None if shown is None else shown.show
    else:
        shown, tell = None, progress
    try:
        told = Teller(call, tell, unit=unit, total=total, limit=limit)
        yield told
        told.phase("done")
    finally:
        if shown is not None:
            shown.close()


class Display(Protocol):
    """Something that shows progress."""

    def show(self, progress: CallProgress) -> None:
        """Show it, in place of the last one."""
        ...

    def close(self) -> None:
        """Leave the terminal as it was."""
        ...


def display(file: TextIO | None = None) -> Display:
    """How stderr, or another file, can show progress: a bar of rich, a line that is written anew,
    or several lines."""
    out: TextIO = file or sys.stderr
    terminal = out.isatty() and os.environ.get("TERM") != "dumb"
    if terminal:
        try:
            return _RichBar(out)
        except ImportError:  # the extra `demo` has it
            pass
    notebook = type(out).__module__.startswith(
        "ipykernel"
    )  # no terminal, but \r begins a line anew
    return _TextDisplay(out, anew=terminal or notebook, stays=notebook)


class _RichBar:
    """A bar of rich, without its thread; it goes when the call ends."""

    def __init__(self, file: TextIO) -> None:
        rich, bars = import_module("rich.console"), import_module("rich.progress")
        text = bars.TextColumn("{task.description}", markup=False)
        # With its own console, so bars of the caller's do not meet it; what the caller prints goes
        # where it went.
        self._bar: Any = bars.Progress(
            bars.BarColumn(_WIDE),
            text,
            console=rich.Console(file=file),
            auto_refresh=False,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._task: Any = None

    def show(self, progress: CallProgress) -> None:
        if self._task is None:
            self._task = self._bar.add_task("", total=1.0)
            self._bar.start()
        self._bar.update(
            self._task, completed=progress.share, description=str(progress), refresh=True
        )

    def close(self) -> None:
        self._bar.stop()


class TextLine:
    """A line of a terminal that is written anew."""

    def __init__(self, file: TextIO) -> None:
        self._file, self._wide = file, 0

    def write(self, text: str) -> None:
        """Put a text in the place of the last one."""
        self._file.write(f"\r{text:<{self._wide}}")
        self._file.flush()
        self._wide = len(text)

    def end(self, *, stays: bool) -> None:
        """Begin the next line, or leave this one empty."""
        if self._wide:
            self._file.write("\n" if stays else f"\r{' ' * self._wide}\r")
            self._file.flush()


def bar(share: float) -> str:
    """A bar of letters, filled to a share of 1."""
    full = int(_WIDE * min(1.0, share))
    return f"[{'#' * full}{' ' * (_WIDE - full)}]"


class _TextDisplay:
    """The same as text: one line that is written anew; where a file cannot have that, a line now
    and then."""

    def __init__(self, file: TextIO, *, anew: bool, stays: bool) -> None:
        self._file, self._stays = file, stays
        self._line = TextLine(file) if anew else None
        self._phase, self._next = "", 0.0

    def show(self, progress: CallProgress) -> None:
        if self._line is not None:
            columns = shutil.get_terminal_size().columns - 1
            self._line.write(f"{bar(progress.share)} {progress}"[:columns])
        elif progress.phase != self._phase or progress.seconds >= self._next:
            self._file.write(f"{progress}\n")
            self._file.flush()
            self._phase, self._next = progress.phase, progress.seconds + _EVERY_LINE

    def close(self) -> None:
        if self._line is not None:
            self._line.end(stays=self._stays)
