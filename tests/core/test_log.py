"""Logging: what is decided can be heard under the name funcpipe; nothing is shown to those who did
not ask."""

from __future__ import annotations

import logging
import subprocess
import sys
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import funcpipe as fp
from funcpipe._src.core import log as logs

BATCH = (torch.ones(4, 8), torch.ones(4, 8))
PARAMS = (torch.ones(8, 8), torch.ones(8, 8))


def product(w: Any, x: Any) -> Any:
    """A stage."""
    return x @ w


def branching(w: Any, x: Any) -> Any:
    """A stage that cannot be traced: it branches on a number in a tensor."""
    return x @ w if x.sum() > 0 else x


def plan_of(*stages: fp.Stage) -> fp.Plan:
    return fp.make_plan(stages, fp.schedules.one_f_one_b(2, 2), loss=F.mse_loss, devices="cpu")


@pytest.fixture
def heard(caplog):
    caplog.set_level(logging.DEBUG, logger="funcpipe")

    def take() -> list[tuple[str, str]]:
        found = [
            (record.levelname, record.getMessage())
            for record in caplog.records
            if record.name == "funcpipe"
        ]
        caplog.clear()
        return found

    return take


def test_the_executor_is_told_once_aloud(heard):
    """And at DEBUG for each further run; another one is a new decision."""
    plan = plan_of(fp.stage(product), fp.stage(product))
    message = "1F1B runs by threads, because: two or more lanes compute on the CPU"
    fp.run(plan, PARAMS, BATCH)
    assert heard() == [("INFO", message)]
    fp.run(plan, PARAMS, BATCH)
    assert heard() == [("DEBUG", message)]
    fp.run(plan, PARAMS, BATCH, executor="serial")
    assert heard() == [("INFO", "1F1B runs by serial, because: asked for")]
    fp.run(plan_of(*plan.stages), PARAMS, BATCH)
    assert heard() == [("INFO", message)]


def test_programs_are_told_and_why_there_are_none(heard):
    compiled, eager = (fp.compile_stage(fp.stage(fn), fallback=True) for fn in (product, branching))
    plan = plan_of(compiled, eager)
    fp.run(plan, PARAMS, BATCH)
    messages = {words.partition(" for ")[0].partition(",")[0]: level for level, words in heard()}
    assert messages["compiled stage product"] == "INFO"
    assert messages["stage branching runs eagerly"] == "INFO"
    fp.run(plan, PARAMS, BATCH)
    assert [level for level, _ in heard()] == ["DEBUG"], "the second run compiles nothing"


@pytest.mark.filterwarnings("ignore:.*was traced 2 times:UserWarning")
def test_programs_that_are_dropped_are_told(heard):
    plan = plan_of(fp.stage(product), fp.compile_stage(fp.stage(product), max_programs=1))
    for rows in (4, 6):
        fp.run(plan, PARAMS, (torch.ones(rows, 8), torch.ones(rows, 8)))
    assert ("INFO", "dropped the least recently used programs: max_programs=1") in heard()


def test_graphs_that_are_refused_are_told(heard):
    plan = plan_of(fp.stage(product), fp.stage(product))
    with fp.graphs(plan) as graphs:
        for _ in range(2):
            fp.run(plan, PARAMS, BATCH, executor=graphs)
    refused = [entry for entry in heard() if "no graph" in entry[1]]
    message = "a run of 1F1B is not a graph: cpu has no graphs"
    assert refused == [("INFO", message), ("DEBUG", message)]


def test_how_a_model_is_cut_is_told(heard):
    fp.split(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), 2)
    ((level, words),) = heard()
    assert level == "INFO"
    assert words.startswith("cut Sequential between its layers: <Split: stages 2: 0 | 1;")


def test_nothing_is_put_together_that_nobody_reads(monkeypatch):
    """Where the level is higher, a decision costs a look at it: no set of what was said, no
    text."""
    monkeypatch.setattr(logs, "_said", None)
    logs.log.setLevel(logging.WARNING)
    try:
        fp.run(plan_of(fp.stage(product), fp.stage(product)), PARAMS, BATCH)
    finally:
        logs.log.setLevel(logging.NOTSET)


def test_nothing_is_printed_by_default():
    """Not even where the program has a handler, as long as it does not ask for INFO."""
    run = "t.fp.run(t.plan_of(*[t.fp.stage(t.product)] * 2), t.PARAMS, t.BATCH)"
    code = f"import logging, tests.core.test_log as t; {run}; logging.basicConfig(); {run}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == done.stderr == ""


def test_the_level_is_the_programs():
    """A library adds a handler that does nothing, and leaves level and propagation alone."""
    assert logs.log.level == logging.NOTSET
    assert logs.log.propagate
    assert [type(handler) for handler in logs.log.handlers] == [logging.NullHandler]
