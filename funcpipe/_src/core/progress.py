"""Report the progress of a long call, to a function or on stderr.

Does not use a thread: the call itself reports between its steps, at most ten times per second.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Generator
from contextlib import ExitStack, closing, contextmanager
from importlib import import_module
from math import inf
from time import perf_counter
from typing import Any, NamedTuple, TextIO, TypeAlias

from funcpipe._src.core.errors import PlanError

EVERY = 0.1  # the least seconds between two reports of one phase
_EVERY_LINE = 10.0
"""The least seconds between two lines of one phase, if a line cannot be overwritten."""
_WIDE = 20  # the columns of a bar of letters


class CallProgress(NamedTuple):
    """The progress of a long call, as the function ``progress=`` receives it.

    ``str`` of a progress is one line.

    >>> print(fp.typing.CallProgress("search", "rules", 40, 100, "schedules", 1.5))
    search: rules, 40 of 100 schedules, 1.5 s

    Attributes:
        call: the name of the function: "search", "profile", "plan_for", "split" or "warmup".
        phase: the name of the present phase; "done" at the end.
        done: the number of finished units.
        total: the number of all units; None: not known yet. A call may end earlier.
        unit: the name of a unit, such as "schedules".
        seconds: the seconds since the call began.
        limit: the time limit of the call in seconds; None: no limit.
        best: the best value so far; None: not known, or the call does not search.
        gap: the largest possible distance of ``best`` from the optimum, as a share of the lower
            bound. None: not known.
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
        """The finished share of the call, from 0 to 1: of its units or of its time, the larger."""
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
            words.append(gap_words(self.gap))
        return f"{self.call}: {', '.join(words)}"


def gap_words(gap: float) -> str:
    """Say how far a schedule is from the shortest."""
    return f"at most {gap:.2%} above the shortest" if gap else "nothing shorter exists"


ProgressTo: TypeAlias = bool | Callable[[CallProgress], object]
"""The argument ``progress``: a function that receives reports, or whether to show them."""


class Teller:
    """Sends the reports of one call. All methods are cheap if no one listens.

    Attributes:
        on: whether someone listens.
        total: the number of all units; None: not known yet.
        look: returns the best value and its gap, each None if not known.
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
        self._to = tell
        limited = None if limit == inf else limit
        self._report = CallProgress(call, "begins", 0, total, unit, 0.0, limited)
        self._began = self._last = perf_counter()

    def phase(self, name: str, done: int | None = None) -> None:
        """Begin a phase, and report it if it is new."""
        if self._to is None or (name == self._report.phase and done is None):
            return
        done = self._report.done if done is None else done
        self._report = self._report._replace(phase=name, done=done)
        self._tell(perf_counter())

    def to(self, done: int) -> None:
        """Set the number of finished units, and report it unless the last report is recent."""
        if self._to is not None:
            self._report = self._report._replace(done=done)
            self.again()

    def again(self) -> None:
        """Report the elapsed time, unless the last report is recent."""
        if self._to is not None and (now := perf_counter()) - self._last >= EVERY:
            self._tell(now)

    def _tell(self, now: float) -> None:
        assert self._to is not None
        best, gap = self.look()
        seconds = now - self._began
        self._to(self._report._replace(total=self.total, seconds=seconds, best=best, gap=gap))
        self._last = perf_counter()  # read again, so that a slow listener does not slow the call


@contextmanager
def telling(
    call: str, progress: ProgressTo, *, unit: str, total: int | None = None, limit: float = inf
) -> Generator[Teller]:
    """Yield the `Teller` of a call. Removes the display at the end, also after an exception.

    Args:
        call: the name of the call.
        progress: a function that receives reports; True: show reports on stderr; False: no reports.
        unit: the name of a unit.
        total: the number of all units.
        limit: the time limit of the call in seconds.

    Raises:
        PlanError: ``progress`` is none of these. An exception of the function ends the call.
    """
    if not (isinstance(progress, bool) or callable(progress)):
        raise PlanError(
            f"progress must be a function, True or False; got {progress!r}; progress=True shows a "
            "bar, progress=print prints each report"
        )
    with ExitStack() as stack:
        tell = None if isinstance(progress, bool) else progress
        if progress is True:
            tell = stack.enter_context(closing(display())).show
        told = Teller(call, tell, unit=unit, total=total, limit=limit)
        yield told
        told.phase("done")


def display(file: TextIO | None = None) -> _RichBar | _TextDisplay:
    """Choose a display for a file (stderr): rich's bar, an overwritten line, or several lines."""
    out: TextIO = file or sys.stderr
    terminal = out.isatty() and os.environ.get("TERM") != "dumb"
    if terminal:
        try:
            return _RichBar(out)
        except ImportError:  # the extra `demo` has it
            pass
    # A notebook is not a terminal, but \r overwrites the line there too.
    notebook = type(out).__module__.startswith("ipykernel")
    return _TextDisplay(out, anew=terminal or notebook, stays=notebook)


class _RichBar:
    """A bar of rich, without rich's thread. Disappears when the call ends."""

    def __init__(self, file: TextIO) -> None:
        rich, bars = import_module("rich.console"), import_module("rich.progress")
        text = bars.TextColumn("{task.description}", markup=False)
        # Its own console, so that bars of the caller do not collide with it. Without redirection,
        # so that prints of the caller go where they went before.
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
    """A line of a terminal that is overwritten."""

    def __init__(self, file: TextIO) -> None:
        self._file, self._wide = file, 0

    def write(self, text: str) -> None:
        """Replace the last text."""
        self._file.write(f"\r{text:<{self._wide}}")
        self._file.flush()
        self._wide = len(text)

    def end(self, *, stays: bool) -> None:
        """Begin the next line, or clear this line."""
        if self._wide:
            self._file.write("\n" if stays else f"\r{' ' * self._wide}\r")
            self._file.flush()


def bar(share: float) -> str:
    """Return a bar of letters, filled to a share from 0 to 1."""
    full = int(_WIDE * min(1.0, share))
    return f"[{'#' * full}{' ' * (_WIDE - full)}]"


class _TextDisplay:
    """A display of text: one overwritten line, or a new line now and then."""

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
