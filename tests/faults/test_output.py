"""Row 29: a full disk, a closed pipe, a broken stderr: what is lost is the output, not the run."""

from __future__ import annotations

import ctypes
import io
import os
import resource
import sys

import pytest
import torch
from common import assert_same_result
from fault_rig import SCHEDULES, M, Rig, S, nothing_unheard, together

import funcpipe as fp


@pytest.fixture(scope="module")
def rig():
    return Rig()


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_trace_that_cannot_be_written(rig, executor, tmp_path):
    """Row 29: the disk is full, no such folder: an OSError of the call that writes; result and
    timeline stay usable."""
    plan = rig.plan(SCHEDULES[0])
    result = rig.run(plan, executor(plan), record=True)
    for path in ("/dev/full", tmp_path / "none" / "trace.json"):
        with pytest.raises(OSError, match="No space left|No such file"):
            result.timeline.to_chrome_trace(path)
    result.timeline.to_chrome_trace(tmp_path / "trace.json")
    assert (tmp_path / "trace.json").stat().st_size > 100
    assert_same_result(rig.expected, result)
    assert_same_result(rig.expected, rig.run(plan, executor(plan)))


def demo(capsys, monkeypatch, *words, out=None):
    """The demo's status and what it wrote; ``out`` in the place of stdout."""
    from funcpipe.__main__ import main

    if out is not None:
        monkeypatch.setattr(sys, "stdout", out)
    try:
        status = main(["demo", "--epochs", "1", "--batch", "512", "--microbatches", "2", *words])
    except SystemExit as left:
        status = left.code
    finally:
        monkeypatch.undo()
    return status, capsys.readouterr()


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_the_demo_with_a_full_disk(capsys, monkeypatch):
    """Row 29: the trace is lost, with one line that says so; accuracy and proof are not."""
    status, shown = demo(capsys, monkeypatch, "--trace", "/dev/full")
    assert "test accuracy" in shown.out
    assert "checked: loss" in shown.out
    assert "No space left" in shown.err
    assert 1 == len(shown.err.strip().splitlines())
    assert status


class Broken(io.StringIO):
    """A pipe whose reader has left."""

    def write(self, text):
        raise BrokenPipeError(32, "Broken pipe")


def test_the_demo_into_a_closed_pipe(capsys, monkeypatch):
    """Row 29: ``funcpipe demo | head``: a status and at most one line, no traceback."""
    status, shown = demo(capsys, monkeypatch, out=Broken())
    assert status
    assert len(shown.err.strip().splitlines()) <= 1


def test_the_watchdog_without_stderr(monkeypatch):
    """Row 29: its report is printed when code does not react; where that fails, the run still ends
    with RunTimeout."""
    libc = ctypes.CDLL(None)
    stuck = lambda p, x: (libc.usleep(1_600_000), x)[1] if x.any() else x
    plan = fp.make_plan(
        [fp.stage(stuck)], fp.schedules.fill_drain(1, 1, backward=False), devices="cpu"
    )
    fp.run(plan, ((),), torch.zeros(1), executor="serial")
    with nothing_unheard():
        monkeypatch.setattr(sys, "stderr", Broken())
        try:
            # Not on the main thread: there a signal would end the sleep.
            (error,) = together(
                lambda: fp.run(plan, ((),), torch.ones(1), executor="serial", timeout=0.2)
            )
        finally:
            monkeypatch.undo()
    assert isinstance(error, fp.RunTimeout)


def test_a_file_that_may_not_grow(rig, tmp_path):
    """Row 29: a quota in the middle of a trace is an OSError too, not a trace that looks whole."""
    plan = rig.plan(fp.schedules.fill_drain(S, M))
    timeline = rig.run(plan, "serial", record=True).timeline
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        with pytest.raises(OSError, match="File too large"):
            timeline.to_chrome_trace(tmp_path / "trace.json")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
