"""Progress of long calls: what is told, what is shown, and that it changes nothing."""

from __future__ import annotations

import io
import signal
import sys
from typing import Any

import pytest
import torch
from torch import nn

import funcpipe as fp
from funcpipe._src.core.progress import CallProgress, display, telling

COST = fp.Cost(5, 6, 4, comm=1)
SEARCH: dict[str, Any] = {
    "num_devices": 4,
    "num_microbatches": 8,
    "memory_limit": 5,
    "evaluations": 300,
    "seconds": 1e6,
}
LAYERS = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
ROWS = torch.ones(6, 4)


class Net(nn.Module):
    """A model that only a trace cuts."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x):
        return self.second(self.first(x).relu())


def warm(progress):
    stages = [fp.compile_stage(fp.Stage(lambda w, x: x * w, name)) for name in ("one", "two")]
    plan = fp.make_plan(
        stages, fp.schedules.one_f_one_b(2, 2), loss=nn.functional.mse_loss, devices="cpu"
    )
    return fp.warmup(plan, (torch.ones(4), torch.ones(4)), (ROWS[:4], ROWS[:4]), progress=progress)


CALLS = {
    "search": lambda progress: fp.search(COST, **SEARCH, progress=progress),
    "plan_for": lambda progress: fp.models.plan_for(
        fp.Cost([1.0] * 6),
        num_devices=2,
        num_microbatches=3,
        evaluations=60,
        seconds=1e6,
        progress=progress,
    ),
    "profile": lambda progress: fp.models.profile(
        LAYERS, ROWS, repeats=2, warmup=1, progress=progress
    ),
    "split": lambda progress: fp.split(Net(), 2, example=ROWS, progress=progress),
    "warmup": warm,
}


@pytest.fixture
def always(monkeypatch):
    """Every step is told, however soon it comes after the last."""
    monkeypatch.setattr("funcpipe._src.core.progress.EVERY", 0.0)


@pytest.mark.parametrize("name", CALLS)
def test_every_long_call_tells(name, always):
    told: list[CallProgress] = []
    CALLS[name](told.append)
    assert {name} == {one.call for one in told}
    assert all(
        first.done <= then.done and first.seconds <= then.seconds
        for first, then in zip(told, told[1:])
    )
    assert [one.phase == "done" for one in told] == [False] * (len(told) - 1) + [True]
    assert told[-1].share == 1.0
    assert len({one.phase for one in told}) > 2
    if name in ("profile", "split", "warmup"):  # the others may end before all is spent
        assert told[-1].done == told[-1].total


@pytest.mark.parametrize("name", CALLS)
def test_what_the_function_raises_ends_the_call(name, always):
    """As it is, at any time, and the same call works afterwards."""
    count = 0

    class Enough(Exception):
        pass

    def stop(progress):
        nonlocal count
        count += 1
        if count == 3:
            raise Enough

    with pytest.raises(Enough):
        CALLS[name](stop)
    assert 3 == count
    CALLS[name](False)


def test_a_search_finds_the_same_whoever_listens(always):
    """The same schedule after the same evaluations; and every phase of it is told, with the best so
    far."""
    told: list[CallProgress] = []
    quiet, heard = (
        fp.search(COST, **SEARCH, progress=progress) for progress in (False, told.append)
    )
    assert quiet == heard
    phases = list(dict.fromkeys(one.phase for one in told))
    assert [phase for phase in phases if phase != "bounds"] == [
        "published",
        "rules",
        "moves",
        "done",
    ]
    best = [one.best for one in told if one.best is not None]
    assert sorted(best, reverse=True) == best
    last = told[-1]
    assert (last.best, last.gap, last.done, last.total) == (
        heard.value,
        heard.gap,
        heard.evaluations,
        300,
    )
    assert len(told) > 300  # each evaluation, where nothing holds them back
    assert f"search: done, {heard.evaluations} of 300 schedules, " in str(last)
    assert str(last).endswith(f"best {heard.value:.6g}, at most {heard.gap:.2%} above the shortest")


def test_plan_for_chooses_the_same_whoever_listens():
    told: list[CallProgress] = []
    quiet, heard = (CALLS["plan_for"](progress) for progress in (False, told.append))
    assert quiet == heard
    assert told[-1].best == heard.found.value
    assert any(one.phase.startswith("search 1 of ") for one in told)


def test_a_profile_of_several_lanes_tells_in_the_callers_thread(always):
    import threading

    threads: set[Any] = set()
    told: list[CallProgress] = []

    def tell(progress):
        threads.add(threading.current_thread())
        told.append(progress)

    fp.models.profile(
        LAYERS, ROWS, repeats=2, warmup=0, lanes=2, progress=tell, measure_memory=False
    )
    assert {threading.current_thread()} == threads
    assert (12, 12) == (told[-1].done, told[-1].total)


def test_it_is_told_ten_times_a_second_at_most():
    told: list[CallProgress] = []
    with telling("count", told.append, unit="steps", total=10**5) as telling_:
        telling_.phase("counts")
        for done in range(1, 10**5 + 1):
            telling_.to(done)
    assert 2 <= len(told) <= 3 + told[-1].seconds / 0.1
    assert 10**5 == told[-1].done


@pytest.mark.parametrize("name", CALLS)
def test_other_things_are_refused(name):
    with pytest.raises(fp.FuncpipeError, match="progress must be a function, True or False; got 3"):
        CALLS[name](3)


# what is shown


class Terminal(io.StringIO):
    """A file that is a terminal."""

    def isatty(self) -> bool:
        return True


ONE = CallProgress("search", "rules", 50, 200, "schedules", 1.25, 5.0, 102.0, 0.02)


def test_share_is_of_steps_or_of_seconds():
    assert 0.25 == ONE.share
    assert 0.5 == ONE._replace(seconds=2.5).share
    assert 1.0 == ONE._replace(done=300).share == ONE._replace(phase="done").share
    assert 0.0 == ONE._replace(total=None, limit=None).share


def test_a_line_on_a_terminal_is_written_anew_and_taken_away(monkeypatch):
    monkeypatch.setitem(sys.modules, "rich.console", None)
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setenv("TERM", "xterm")
    file = Terminal()
    shown = display(file)
    shown.show(ONE)
    shown.show(ONE._replace(best=7.0, gap=None, limit=None, total=None))
    shown.close()
    first, second, third, empty = file.getvalue().split("\r")[1:]
    assert "[#####               ] search: rules, 50 of 200 schedules, 1" == first + "1"
    assert len(first) == 59
    assert second.startswith("[                    ] search: rules, 50 schedules, 1.2 s, ")
    assert (" " * 59, "") == (third, empty)


def test_a_bar_of_rich_leaves_no_trace(monkeypatch):
    pytest.importorskip("rich")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    file = Terminal()
    shown = display(file)
    shown.show(ONE)
    assert (
        "search: rules, 50 of 200 schedules, 1.2 s of 5 s, best 102, at most 2.00% above the "
        "shortest" in file.getvalue()
    )
    assert file.getvalue().count("\x1b[?25l") == 1  # the cursor is hidden
    shown.close()
    assert file.getvalue().count("\x1b[?25h") == 1
    assert file.getvalue().rstrip().endswith("\x1b[2K")  # the line is wiped


def test_no_terminal_gets_lines():
    """One for each phase, and one now and then."""
    file = io.StringIO()
    shown = display(file)
    for one in (ONE, ONE, ONE._replace(phase="moves"), ONE._replace(phase="moves", seconds=20.0)):
        shown.show(one)
    shown.close()
    assert [
        str(ONE),
        str(ONE._replace(phase="moves")),
        str(ONE._replace(phase="moves", seconds=20.0)),
    ] == (file.getvalue().splitlines())


def test_true_shows_on_stderr(capsys):
    fp.search(COST, **SEARCH, progress=True)
    out, err = capsys.readouterr()
    assert "" == out
    assert err.splitlines()[-1].startswith("search: done, ")


@pytest.mark.parametrize("rich", [True, False])
def test_ctrl_c_takes_the_bar_away(monkeypatch, rich, always):
    """In the middle of a search; the cursor is back, and the line is empty."""
    if rich:
        pytest.importorskip("rich")
    else:
        monkeypatch.setitem(sys.modules, "rich.console", None)
    monkeypatch.setenv("TERM", "xterm")
    file = Terminal()
    monkeypatch.setattr(sys, "stderr", file)
    monkeypatch.setattr(
        "funcpipe._src.search.search.climb", lambda *_, **__: signal.raise_signal(signal.SIGINT)
    )
    with pytest.raises(KeyboardInterrupt):
        fp.search(COST, **SEARCH, progress=True)
    assert "rules" in file.getvalue()
    assert file.getvalue().rstrip("\r\n").endswith("\x1b[2K" if rich else " ")
