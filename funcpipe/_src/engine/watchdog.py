"""Watch for ``timeout=``: if no action begins, report what each lane does, and end the run."""

from __future__ import annotations

import ctypes
import faulthandler
import signal
import sys
import threading
import traceback
from collections.abc import Sequence
from contextlib import suppress
from time import monotonic
from typing import Self

from funcpipe._src.core.errors import PACKAGE, RunTimeout
from funcpipe._src.data.program import Receive
from funcpipe._src.engine.execute import Execution
from funcpipe._src.engine.lane import Lane
from funcpipe._src.engine.mail import Stop
from funcpipe._src.replicas.replicas import Summed
from funcpipe._src.replicas.sharded import Gathered

_GRACE = 1.0  # seconds that a thread gets to react before its stack is printed


class LaneWatch:
    """Detects that no lane has begun an action for the timeout.

    It has no thread: the thread that waits for the lanes calls `look` repeatedly. `Watchdog` has a
    thread.

    Attributes:
        pause: the seconds between two looks.
        report: what each lane does, after no lane has begun an action for the timeout; else "".
    """

    def __init__(self, executions: Sequence[Execution], timeout: float) -> None:
        self.executions, self.timeout, self.pause = executions, timeout, min(1.0, timeout / 20)
        self.report = ""
        self._seen, self._since = list[int](), 0.0
        self._has_backstop = False

    def start(self) -> None:
        """Start to measure the time."""
        self._seen, self._since = self._marks(), monotonic()
        self._backstop()

    def end(self) -> None:
        """End the watch. You may call it twice, and after an interrupted start."""
        if self._has_backstop:
            faulthandler.cancel_dump_traceback_later()

    def look(self) -> bool:
        """Look at the lanes. Return whether no lane has begun an action for the timeout."""
        marks, now = self._marks(), monotonic()
        if marks != self._seen:
            self._seen, self._since = marks, now
            self._backstop()
        elif now - self._since >= self.timeout:
            self.report = describe(self.executions, now - self._since)
        return bool(self.report)

    def _marks(self) -> list[int]:
        return [self.executions[0].executor.beats(), *begun(self.executions)]

    def _backstop(self) -> None:
        """Start Python's own timer, which prints stacks even while C code keeps the GIL.

        The process has one such timer, so only runs with a timeout of the user take it.
        """
        if not self.executions[0].ready.options.takes_faulthandler:
            return
        self._has_backstop = True  # set first: an interruption may come right after the call
        try:
            faulthandler.dump_traceback_later(self.timeout + _GRACE)
        # In notebooks, stderr is not a file.
        except (AttributeError, ValueError, OSError, RuntimeError, OverflowError):
            pass


class Watchdog(LaneWatch):
    """A context in which a thread watches the calling thread's lanes. Raises RunTimeout at its end.

    After the timeout, the thread interrupts the calling thread. The main thread gets SIGINT, which
    also ends a sleep. Other threads get an exception at their next bytecode.
    """

    def __init__(self, executions: Sequence[Execution], timeout: float) -> None:
        super().__init__(executions, timeout)
        self._caller = threading.get_ident()
        self._over = threading.Event()
        self._gate = threading.Lock()
        self._thread = threading.Thread(target=self._watch, name="funcpipe watchdog", daemon=True)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        try:
            self.end()
        except (KeyboardInterrupt, Stop):  # the watchdog's interruption came during `end`
            if not self.report:
                raise
            self.end()
        if self.report:
            raise RunTimeout(self.report) from None

    def start(self) -> None:
        """Start the thread."""
        super().start()
        self._thread.start()

    def end(self) -> None:
        """End the thread. You may call it twice, and after an interrupted start."""
        # Under the gate: after this, the thread interrupts nobody.
        with self._gate:
            self._over.set()
        super().end()
        if self._thread.is_alive():
            self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(self.pause):
            with self._gate:
                if self._over.is_set():
                    return
                if self.look():
                    self._interrupt()
                    break
        if not self._over.wait(_GRACE):
            with suppress(OSError, ValueError):  # stderr is a closed pipe or file
                print(f"funcpipe: {self.report}", file=sys.stderr, flush=True)

    def _interrupt(self) -> None:
        main = threading.main_thread().ident == self._caller
        if (
            main
            and signal.getsignal(signal.SIGINT) is signal.default_int_handler
            and hasattr(signal, "pthread_kill")
        ):
            signal.pthread_kill(self._caller, signal.SIGINT)
        else:
            ctypes.pythonapi.PyThreadState_SetAsyncExc(
                ctypes.c_ulong(self._caller), ctypes.py_object(Stop)
            )


def begun(executions: Sequence[Execution]) -> list[int]:
    """Return the number of actions that each lane has begun in each execution."""
    return [lane.begun for execution in executions for lane in execution.lanes]


def _at_work(executions: Sequence[Execution]) -> list[tuple[Execution, Lane]]:
    """Return each lane of this process with its present execution, or its last one."""
    rows = [
        [(execution, execution.lanes[seat]) for execution in executions]
        for seat in range(len(executions[0].lanes))
    ]
    return [max(row, key=_lateness) for row in rows]


def _lateness(at: tuple[Execution, Lane]) -> tuple[bool, int]:
    """Return a sort key for the executions of a lane. The maximum is the present execution.

    If the lane is in none, the maximum is the last execution that began, else the first.
    """
    execution, lane = at
    number = execution.number or 0
    return lane.thread != 0, number if lane.begun else -1 - number


def lane_states(executions: Sequence[Execution]) -> list[tuple[bool, str]]:
    """Describe each lane of this process: whether it is in an action, and what it does."""
    states: list[tuple[bool, str]] = []
    for execution, lane in _at_work(executions):
        working = _is_working(execution, lane)
        number = lane.program.lane
        settling = execution.settling and lane.place.asynchronous
        busy = settling or (working and execution.boxes[number].waits is None)
        states.append(
            (
                busy,
                f"device {number} ({lane.place.device}) {_state(execution, lane, working=working)}",
            )
        )
    return states


def _is_working(execution: Execution, lane: Lane) -> bool:
    turn = execution.executor.threaded or lane.program.lane == execution.turn
    return lane.thread != 0 and turn and lane.done < lane.stop


def describe(executions: Sequence[Execution], seconds: float) -> str:
    """Return a report: the last action of each lane, its present wait, and its Python stack."""
    lines = [f"no action began in any lane for {seconds:.1f} s:"]
    lines += [f"  * {words}" for _, words in lane_states(executions)]
    frames = sys._current_frames()
    stacks: list[str] = []
    for execution, lane in _at_work(executions):
        frame = frames.get(lane.thread)
        if frame is not None and _is_working(execution, lane):
            shown = [
                entry
                for entry in traceback.extract_stack(frame)
                if not entry.filename.startswith(PACKAGE)
                and not entry.filename.endswith("threading.py")
            ]
            if shown:
                stacks.append(f"device {lane.program.lane} is at:")
                stacks += [
                    f"  {line}"
                    for text in traceback.format_list(shown[-12:])
                    for line in text.rstrip().split("\n")
                ]
    del frames
    lanes = [lane for execution in executions for lane in execution.lanes]
    done, total = (
        sum(count)
        for count in zip(
            *[(lane.done - lane.first, lane.stop - lane.first) for lane in lanes], strict=True
        )
    )
    lines.append(f"{done} of {total} actions are done")
    return "\n".join([*lines, *stacks])


def _state(execution: Execution, lane: Lane, *, working: bool) -> str:
    program = lane.program
    has_done_any = lane.done > lane.first
    last = (
        f"did {program.action(program.runs[lane.done - 1])}" if has_done_any else "did nothing yet"
    )
    if not working:
        if execution.settling and lane.place.asynchronous:
            return f"{last}, and its device has not finished the queued work"
        return last if lane.done < lane.stop else f"{last} and is done"
    current = str(execution.where(lane)).removeprefix("in ").rsplit(" on device", 1)[0]
    waits = execution.boxes[program.lane].waits
    if waits is None:
        return f"{last} and is in {current}"
    if isinstance(waits, Gathered):
        return (
            f"{last} and waits, before {current}, for the parts of its parameters that other "
            "replicas have"
        )
    if isinstance(waits, Summed):
        return f"{last} and waits, before {current}, for the gradients of other replicas"
    if isinstance(waits, tuple):
        role = execution.ready.program.lane(waits[0]).slots[waits[1]].role
        return f"did {current} and waits until device {waits[0]} frees a slot for {role.value}"
    instructions = program.parts[lane.done]
    received = [
        receive.value
        for receive in instructions
        if type(receive) is Receive and receive.slot == waits
    ]
    if not received:  # the lane has continued meanwhile
        return f"{last} and is in {current}"
    return f"{last} and waits, before {current}, for {program.value(received[0])}"
