"""Who runs an execution: this thread, a fresh thread for each lane, or threads that are kept."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext, suppress
from functools import partial
from time import perf_counter
from typing import Any

from funcpipe.core.closed import lent
from funcpipe.core.errors import PlanError
from funcpipe.core.plan import Plan
from funcpipe.core.program import Role, Wire
from funcpipe.core.remembered import Remembered
from funcpipe.core.result import RunStats
from funcpipe.core.stage import bindable
from funcpipe.core.tree import map_leaves
from funcpipe.runtime.border import Border
from funcpipe.runtime.context import RUNNING, Context, intra_op_threads, not_carried
from funcpipe.runtime.execute import Execution, run_serial
from funcpipe.runtime.lanes import Lanes, parallel
from funcpipe.runtime.prepare import Prepared
from funcpipe.runtime.stream import Place
from funcpipe.runtime.watchdog import interrupting

_SMALL = 100e-6
"""Seconds per action below which two Python threads are slower than one (the GIL changes hands at every operation)."""


class Drive:
    """An execution with its executor; it runs in one go (`run`) or in two halves (`vjp`).

    Attributes:
        ready: what is run.
        execution: the lanes with their stores.
        seconds: of everything that ran so far, by the wall clock.
    """

    def __init__(self, ready: Prepared, executor: Any, *, record: bool, timeout: float | None) -> None:
        if timeout is not None and (
            isinstance(timeout, bool) or not (isinstance(timeout, (int, float)) and timeout > 0)
        ):
            raise PlanError(f"timeout is a number of seconds above 0, or None; got {timeout!r}")
        self.ready, self.timeout = ready, timeout
        self.threaded, self.reason, self.crew = _choose(executor, ready)
        alone = [sum(other == device for other in ready.where) == 1 for device in ready.where]
        places = [
            Place(device, alone=one, lane=lane)
            for lane, (device, one) in enumerate(zip(ready.where, alone, strict=True))
        ]
        timed = record or self.threaded
        self.execution = Execution(
            ready.plan, ready.program, ready.bounds, places, _numbered(ready), threaded=self.threaded, timed=timed
        )
        self.context = Context()
        self.seconds = 0.0

    def go(self, start: int = 0, stop: int | None = None) -> None:
        """Run the actions from one position of the plan order to another."""
        execution, ready = self.execution, self.ready
        execution.aim(start, len(ready.program.order) if stop is None else stop)
        places = [lane.place for lane in execution.lanes]
        token = RUNNING.set(partial(execution.where, execution.lanes[0]))
        began = perf_counter()
        done = False
        try:
            for place in places:
                place.fork()
            if not self.threaded:
                guard = interrupting(execution, self.timeout)
                with guard, self.context.entered(), intra_op_threads(ready.threads):
                    run_serial(execution)
            elif self.crew is not None and not (start and self.crew.closed):  # the lanes may end between two halves
                self.crew.run(execution, self.context, ready.threads, self.timeout)
            else:
                with Lanes(len(places)) as fresh:
                    fresh.run(execution, self.context, ready.threads, self.timeout)
            done = True
        finally:
            RUNNING.reset(token)
            # Streams that a failure has spoilt cannot wait for each other; what is said of that is not the failure.
            for place in places:
                with nullcontext() if done else suppress(RuntimeError):
                    place.join()
        self.seconds += perf_counter() - began

    def give(self, wire: Wire, pieces: Sequence[Border]) -> None:
        """What the caller gives for the next part, one value per microbatch."""
        first = self.ready.program.wires.index(wire) * len(pieces)
        self.execution.caller.update({first + m: piece for m, piece in enumerate(pieces)})

    def collect(self, role: Role) -> dict[tuple[int, int], Any]:
        """What the caller takes, by (stage, microbatch); it leaves the stores."""
        found = self.execution.collect(role)
        for (stage, microbatch), value in found.items():
            place = self.execution.lanes[self.ready.plan.schedule.device_of[stage]].place
            if place.asynchronous and isinstance(value, Border):
                found[stage, microbatch] = Border([place.hand(leaf) for leaf in value.leaves], value.spec, value.flags)
            elif place.asynchronous:
                found[stage, microbatch] = map_leaves(place.hand, value)
        return found

    def settle(self) -> None:
        """The caller's stream has read what it wanted of the lanes' memory."""
        for lane in self.execution.lanes:
            lane.place.settle()

    def done(self) -> None:
        """Everything has run: every value was freed, and how long an action takes is remembered."""
        self.execution.check_empty()
        busy = self.execution.busy() if self.execution.timed else self.seconds
        # For the next choice of an executor.
        self.ready.plan.__dict__["_mean_action"] = busy / max(1, len(self.ready.program.order))

    def stats(self) -> RunStats:
        """How it went so far."""
        name = "threads" if self.threaded else "serial"
        count = self.ready.batch.num_microbatches
        return RunStats(name, self.reason, self.ready.threads, count, self.seconds, self.execution.most())


def _numbered(ready: Prepared) -> dict[int, Border]:
    """What the caller gives, by value number."""
    out: dict[int, Border] = {}
    count = ready.program.num_microbatches
    for index, (role, _, name, _) in enumerate(ready.program.wires):
        found: list[Border] | None = None
        if role is Role.INPUT:
            found = ready.batch.inputs
        elif role is Role.TARGET:
            found = ready.batch.target
        elif role is Role.FEED:
            found = ready.batch.feeds[name]
        if found is not None:
            out.update({index * count + m: border for m, border in enumerate(found)})
    return out


def _choose(executor: Any, ready: Prepared) -> tuple[bool, str, Lanes | None]:
    """Threads or not, why, and whose."""
    plan = ready.plan
    uncarried = [*not_carried(), *_shared(plan)]
    if isinstance(executor, Lanes):
        if executor.count != plan.num_devices:
            raise PlanError(
                f"these lanes are {executor.count}, the plan has {plan.num_devices}; make them with fp.lanes(plan)"
            )
        _refuse_uncarried(uncarried)
        return True, "asked for", executor
    if executor == "serial":
        return False, "asked for", None
    if executor == "threads":
        _refuse_uncarried(uncarried)
        return True, "asked for", None
    if executor is not None:
        raise PlanError(
            f"executor is 'threads', 'serial', fp.lanes(plan), for fp.run also fp.graphs(plan), or None; got {executor!r}"
        )
    if uncarried:
        return False, f"threads cannot take over {', '.join(uncarried)}", None
    if not parallel(ready.where):
        return False, "fewer than two lanes compute on the CPU", None
    mean = plan.__dict__.get("_mean_action")
    if mean is not None and mean < _SMALL:
        return (
            False,
            f"actions took {mean * 1e6:.0f} us on average, and threads pay from about {_SMALL * 1e6:.0f} us",
            None,
        )
    return True, "two or more lanes compute on the CPU", None


def _lent_twice(plan: Plan) -> list[str]:
    """Modules into which functions of several lanes put parameters of their own, each while it computes."""
    lanes: dict[int, set[int]] = {}
    names: dict[int, str] = {}
    for stage, whole in enumerate(plan.stages):
        for part in whole.simple():
            for key, (name, _) in ({} if bindable(part.fn) else lent(part.fn)).items():
                lanes.setdefault(key, set()).add(plan.schedule.device_of[stage])
                names[key] = name
    return [
        f"the module {names[key]!r}, which stages of lanes {sorted(users)} call with parameters of their own"
        for key, users in lanes.items()
        if len(users) > 1
    ]


_shared = Remembered(_lent_twice)


def _refuse_uncarried(found: Sequence[str]) -> None:
    if found:
        own = "; or give each stage a module of its own, copy.deepcopy(module)" * any(
            "the module" in one for one in found
        )
        raise PlanError(f"{', '.join(found)} cannot be taken over by other threads; use executor='serial'{own}")
