"""Who looks at the bubble alone takes unequal stages for a good pipeline: wherever it stands, idle
stands beside it."""

from dataclasses import replace

import torch
from torch import nn

import funcpipe as fp
from funcpipe.__main__ import main
from funcpipe._src.data.result import RunStats

UNEQUAL = fp.Cost(forward=[8, 3, 3], backward=[16, 6, 6])


def test_no_text_has_a_bubble_without_idle(tmp_path, capsys):
    """1.0 % of bubble where devices idle 42.3 %: timeline, drawing, report and command line say
    both, and what it is."""
    timeline = fp.simulate(fp.schedules.one_f_one_b(3, 8), UNEQUAL)
    stages, _, _ = zip(*[fp.from_module(nn.Linear(4, 4)) for _ in range(3)], strict=True)
    plan = fp.make_plan(
        stages, fp.schedules.one_f_one_b(3, 8), loss=nn.functional.mse_loss, devices="cpu"
    )
    stats = RunStats("threads", "", 1, 8, 194.0, tuple(pool.slots for pool in plan.program.pools))
    measured = replace(timeline, unit="s")
    report = fp.report(
        plan, fp.Result(torch.tensor(0.5), 1.0, (), (), None, (), (), None, measured, stats)
    )
    file = tmp_path / "cost.json"
    file.write_text(fp.schedules.to_json(UNEQUAL))
    main(["compare", "--stages", "3", "--microbatches", "8", "--cost", str(file)])
    drawing = fp.draw(timeline)
    pictures = [
        str(drawing),
        drawing.svg(),
        str(report),
        report._repr_html_(),
        capsys.readouterr().out,
    ]
    said = "equal work on all devices would save"
    for text in (str(timeline), *pictures):
        for word in ("bubble", "1.0%", "idle", "42.3%", "imbalance", "41.7%", said):
            assert word in text.replace("\n", " "), (word, text)


def test_the_bubble_of_a_search_has_idle_beside_it():
    """No schedule helps against unequal stages, and the search says so."""
    found = fp.search(UNEQUAL, num_devices=3, num_microbatches=4, evaluations=50)
    assert found.timeline.imbalance > 0.3
    assert f"idle {found.timeline.idle:.1%} of all device time; imbalance" in str(found)


def test_equal_stages_have_nothing_to_balance():
    """Then idle is the bubble, and nobody is sent to fp.models.balance."""
    timeline = fp.simulate(fp.schedules.one_f_one_b(3, 8))
    assert (timeline.idle, timeline.imbalance) == (timeline.bubble, 0.0)
    assert "imbalance" not in f"{timeline} {fp.draw(timeline)} {fp.draw(timeline).svg()}"
