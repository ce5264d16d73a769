"""How much Python runs for one action: calls of the package's functions, and files, counted by
``sys.setprofile``.

The host's time for an action is what a small stage waits for, so a feature may not add a branch to
every action.
"""

import sys
from collections import defaultdict
from pathlib import Path

import torch
import torch.nn.functional as F

import funcpipe as fp
from funcpipe._src.engine.lane import Lane

PACKAGE = str(Path(fp.__file__).parent)
S, M = 2, 4
LIMITS = {"0F": (15, 6), "1F": (22, 7), "0B": (12, 5), "1B": (15, 7)}
"""By stage and kind: the most calls, and the most files."""


def counted(monkeypatch) -> dict[str, list[str]]:
    """For each action of a run in this thread the files of the functions that it called."""
    stage = fp.stage(lambda p, x: F.linear(x, p["w"]))
    plan = fp.make_plan([stage] * S, fp.schedules.one_f_one_b(S, M), loss=F.mse_loss, devices="cpu")
    params = tuple({"w": torch.eye(4)} for _ in range(S))
    batch = torch.ones(2 * M, 4), torch.zeros(2 * M, 4)
    for _ in range(2):
        fp.run(plan, params, batch, executor="serial", trainable=True)
    files: dict[str, list[str]] = defaultdict(list)
    real = Lane.advance

    def advance(self):
        called = files[str(self.program.action(self.program.runs[self.done]))]

        def note(frame, event, argument):
            generated = (
                frame.f_code.co_filename == "<string>"
            )  # what namedtuple and dataclass write
            if event == "call" and (generated or frame.f_code.co_filename.startswith(PACKAGE)):
                called.append(
                    frame.f_globals["__name__"] if generated else frame.f_code.co_filename
                )

        sys.setprofile(note)
        try:
            real(self)
        finally:
            sys.setprofile(None)

    monkeypatch.setattr(Lane, "advance", advance)
    fp.run(plan, params, batch, executor="serial", trainable=True)
    return files


def test_an_action_calls_few_functions(monkeypatch):
    """The last microbatch, whose graph is not looked at any more."""
    files = counted(monkeypatch)
    for name, (calls, most_files) in LIMITS.items():
        called = files[f"{name}{M - 1}"]
        own = {file for file in called if file.startswith(PACKAGE)}
        assert 0 < len(called) <= calls, (name, len(called), sorted(own))
        assert len(own) <= most_files, (name, sorted(own))
