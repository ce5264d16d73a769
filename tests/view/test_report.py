"""Reports: what they say equals what the run says, counted anew; pages are whole, small and
safe."""

from __future__ import annotations

import os
import pickle
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch
from torch import nn

import funcpipe as fp
from funcpipe._src.data.result import RunStats

VOID = {"meta"}


def plan_and_params(
    schedule: fp.Schedule, *, width: int = 8, name: str = "part"
) -> tuple[fp.Plan, tuple[Any, ...]]:
    """One linear layer for each stage."""
    made = [
        fp.from_module(nn.Linear(width, width), name=f"{name} {stage}")
        for stage in range(schedule.num_stages)
    ]
    stages, params, _ = zip(*made, strict=True)
    return fp.make_plan(stages, schedule, loss=nn.functional.mse_loss, devices="cpu"), params


def recorded(plan: fp.Plan, params: tuple[Any, ...], rows: int = 16, **options: Any) -> fp.Result:
    x = torch.ones(rows, 8)
    return fp.run(plan, params, (x, x), record=True, **options)


def pretended(plan: fp.Plan, cost: fp.Cost, **stats: Any) -> fp.Result:
    """A result whose timeline is simulated, in seconds: the same on every machine."""
    slots = tuple(pool.slots for pool in plan.program.pools)
    known = RunStats(
        **{
            "executor": "threads",
            "reason": "asked for",
            "threads_per_lane": 1,
            "num_microbatches": plan.num_microbatches,
            "seconds": 0.025,
            "slots": slots,
        }
        | stats
    )
    timeline = replace(
        fp.simulate(plan.schedule.first(known.num_microbatches), cost), unit="s", comm=0.0
    )
    return fp.Result(torch.tensor(0.5), 1.0, (), (), None, (), (), None, timeline, known)


def table(report: fp.typing.Report, title: str) -> list[dict[str, str]]:
    """The rows of a table by heading."""
    (found,) = [one for one in report.findings.tables if one.title == title]
    return [dict(zip(found.heads, row, strict=True)) for row in found.rows]


class Page(HTMLParser):
    """Tags must be balanced; keeps texts and attributes."""

    def __init__(self, content: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[tuple[str, str]] = []
        self.feed(content)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID and not self.get_starttag_text().endswith("/>"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if data.strip():
            self.texts.append((self.open[-1] if self.open else "", data))


def test_text_of_a_report() -> None:
    """Golden: every number of it follows from the schedule, F 1 ms, B 2 ms, 0.5 ms for a hop."""
    plan, params = plan_and_params(fp.schedules.one_f_one_b(2, 3))
    made = fp.report(
        plan,
        pretended(plan, fp.Cost(0.001, backward=0.002, comm=0.0005)),
        params=params,
        title="golden",
    )
    assert (
        made.text(110)
        == """\
golden
  schedule             1F1B
  stages               2
  lanes                2
  microbatches         3
  executor             threads
  because              asked for
  threads per lane     1
  loss                 0.5
  wall clock           25 ms
  makespan, measured   14 ms
  makespan, simulated  12 ms
  difference           2 ms (14.3% of the measured)
  bubble, measured     35.7%
  bubble, simulated    25.0%
  idle, measured       35.7%
  idle, simulated      25.0%
  busiest lane         1 (9 ms, 64.3%)

1F1B, measured in ms: makespan 14 ms, bubble 35.7%, idle 35.7%
                                                      busy  peak
device 0 │F0 F1 ·········B0─── F2 B1─── ······B2─── │  64%     2
device 1 │·····F0 B0─── F1 B1─── ···F2 B2─── ·······│  64%     1
         └───────────────┴──────────────┴───────────┘
          0              5              10 ms

1F1B, simulated in ms: makespan 12 ms, bubble 25.0%, idle 25.0%
                                                      busy  peak
device 0 │F0 F1 ······B0─── F2 B1─── ···B2───       │  75%     2
device 1 │···F0 B0─── F1 B1─── F2 B2─── ······      │  75%     1
         └───────────────┴──────────────┴───────────┘
          0              5              10 ms
F forward  B backward  · idle

Stages
  stage  name    lane  parameters  bytes  F mean, ms  F total, ms  B mean, ms  B total, ms  of its lane
  0      part 0     0          72  288 B       1.000        3.000       2.000        6.000       100.0%
  1      part 1     1          72  288 B       1.000        3.000       2.000        6.000       100.0%

Lanes
  lane  device  stages  actions  busy, ms   busy   idle  idle, simulated  residuals
  0     cpu     0             6      9.00  64.3%  35.7%            25.0%          2
  1     cpu     1             6      9.00  64.3%  35.7%            25.0%          1

Values between lanes
  from    to      value   most at a time  slots
  caller  lane 0  input                1      1
  lane 0  lane 1  act                  2      2
  caller  lane 1  target               1      1
  lane 1  lane 0  grad                 1      1

Simulated: each action takes the mean measured time of its kind and stage, and hands over in no time; the
difference is hand-over, waiting, and the spread of the measured times."""
    )


@pytest.mark.parametrize("executor", ["threads", "serial"])
@pytest.mark.parametrize(
    "schedule",
    [
        fp.schedules.one_f_one_b(2, 4),
        fp.schedules.interleaved(4, 4, num_devices=2),
        fp.schedules.remat(fp.schedules.fill_drain(3, 4, num_devices=2)),
        fp.schedules.zero_bubble(2, 5),
        fp.schedules.fill_drain(1, 2),
    ],
    ids=lambda schedule: f"{schedule.name}-{schedule.num_stages}",
)
def test_numbers_are_those_of_the_run(schedule: fp.Schedule, executor: str) -> None:
    """Counted anew from the spans, one by one."""
    plan, params = plan_and_params(schedule)
    result = recorded(plan, params, executor=executor)
    made, measured = fp.report(plan, result, params=params), result.timeline
    assert measured is not None
    assert made.measured == measured
    shown = dict(made.findings.headline)
    assert shown["executor"] == executor
    assert float(shown["loss"]) == pytest.approx(float(result.loss), rel=1e-5)
    assert shown["bubble, measured"] == f"{measured.bubble:.1%}"
    assert shown["idle, measured"] == f"{measured.idle:.1%}"

    unit = {"ns": 1e9, "us": 1e6, "ms": 1e3, "s": 1.0}
    for stage, row in enumerate(table(made, "Stages")):
        assert (row["stage"], row["name"]) == (str(stage), plan.stages[stage].name)
        assert row["parameters"] == str(sum(leaf.numel() for leaf in params[stage].values()))
        own = [span for span in measured.spans if span.action.stage == stage]
        for kind in {span.action.kind for span in own}:
            times = [span.end - span.start for span in own if span.action.kind is kind]
            for what, expected in (("mean", fmean(times)), ("total", sum(times))):
                (head,) = [head for head in row if head.startswith(f"{kind.value} {what}, ")]
                digits = len(row[head].partition(".")[2])
                scale = unit[head.rpartition(" ")[2]]
                assert abs(float(row[head]) - expected * scale) <= 0.51 * 10**-digits
        lane = int(row["lane"])
        everything = sum(span.end - span.start for span in measured.spans if span.device == lane)
        share = sum(span.end - span.start for span in own) / everything
        assert row["of its lane"] == f"{share:.1%}"
    for lane, row in enumerate(table(made, "Lanes")):
        busy = (
            sum(span.end - span.start for span in measured.spans if span.device == lane)
            / measured.makespan
        )
        assert (row["busy"], row["idle"]) == (f"{busy:.1%}", f"{1 - busy:.1%}")
        assert int(row["actions"]) == len(schedule.orders[lane])
    seen = [
        (row["value"], int(row["most at a time"]), int(row["slots"]))
        for row in table(made, "Values between lanes")
    ]
    pools = plan.program.pools
    assert seen == [
        (pool.role.value, most, pool.slots)
        for pool, most in zip(pools, result.stats.slots, strict=True)
    ]
    assert all(most <= slots for _, most, slots in seen)


def test_the_simulated_timeline_is_the_schedule_with_the_mean_times() -> None:
    """The same actions in the same order on each lane, each as long as the mean of its kind and
    stage."""
    plan, params = plan_and_params(fp.schedules.zero_bubble(2, 4))
    made = fp.report(plan, recorded(plan, params))
    means: dict[tuple[fp.Kind, int], float] = {
        key: fmean(times) for key, times in made.measured.by_kind.items()
    }
    assert made.simulated.unit == made.measured.unit == "s"
    for lane, order in enumerate(plan.schedule.orders):
        spans = sorted(span for span in made.simulated.spans if span.device == lane)
        assert tuple(span.action for span in spans) == order
        for span in spans:
            assert span.end - span.start == pytest.approx(means[span.action[:2]], abs=1e-12)


@pytest.mark.parametrize(
    "schedule",
    [
        fp.schedules.one_f_one_b(3, 6),
        fp.schedules.remat(fp.schedules.interleaved(4, 4, num_devices=2)),
        fp.schedules.zero_bubble(3, 5),
        fp.schedules.fill_drain(2, 3),
    ],
    ids=lambda schedule: schedule.name,
)
def test_levels_are_the_residuals_alive_and_their_most_is_the_peak(schedule: fp.Schedule) -> None:
    """At the middle of every action and of every gap: forwards (or remats) begun less backwards
    ended."""
    plan, _ = plan_and_params(schedule)
    made = fp.report(plan, pretended(plan, fp.Cost(1.0, 1.5, 0.75, comm=0.25)))
    spans, kind = made.measured.spans, fp.Kind
    again = {span.action[1:] for span in spans if span.action.kind is kind.R}
    edges = sorted({time for span in spans for time in (span.start, span.end)})
    for lane, levels in enumerate(made.findings.held):
        assert max(level.amount for level in levels) == made.measured.peak[lane]
        for before, after in zip(edges, edges[1:], strict=False):
            now, alive = (before + after) / 2, 0.0
            for span in (span for span in spans if span.device == lane):
                taken = span.action.kind is kind.R or (
                    span.action.kind is kind.F and span.action[1:] not in again
                )
                alive += taken and span.start < now
                alive -= {kind.B: 1.0, kind.I: 0.5, kind.W: 0.5}.get(span.action.kind, 0.0) * (
                    span.end < now
                )
            assert sum(level.amount for level in levels if level.start < now < level.end) == alive


def scales(page: str) -> list[float]:
    """Pixels per millisecond of everything that starts late enough to tell."""
    pattern = r'<rect (?:class="held" )?x="([\d.]+)".*?<title>.*?: ([\d.]+) to [\d.]+ ms</title>'
    return [float(x) / float(start) for x, start in re.findall(pattern, page) if float(start) > 5]


def test_both_timelines_and_the_memory_have_one_scale() -> None:
    """The pixel of a time is the same in the three pictures."""
    plan, _ = plan_and_params(fp.schedules.one_f_one_b(2, 4))
    page = fp.report(plan, pretended(plan, fp.Cost(0.001, 0.002, 0.001, comm=0.004)))._repr_html_()
    charts = re.findall(r"<svg.*?</svg>", page, re.S)
    assert [16, 16] == [chart.count("<rect") for chart in charts[:2]]
    found = [scales(chart) for chart in charts]
    assert [True, True, True] == [
        len(some) > least for some, least in zip(found, (5, 5, 1), strict=True)
    ]
    assert max(map(max, found)) == pytest.approx(min(map(min, found)), rel=0.003)
    assert 1 == len({re.findall(r'viewBox="0 0 (\d+)', chart)[0] for chart in charts})
    first = charts[2].split("<g transform")[
        1
    ]  # holds something from its first forward to its last backward
    bars = [
        (float(x), float(w))
        for x, w in re.findall(r'<rect x="([\d.]+)" y=.*? width="([\d.]+)"', first)
    ]
    assert len(bars) == 3
    assert [pytest.approx(x) for x, _ in bars[1:]] == [x + w for x, w in bars[:-1]]


def test_a_simulated_timeline_may_be_longer_than_the_measured_one() -> None:
    """Where slow actions met fast ones the mean times take longer; the longer timeline gives the
    scale."""
    plan, _ = plan_and_params(fp.schedules.fill_drain(2, 2, backward=False))
    spans = [(0, 0.0, 1.0, "0F0"), (0, 1.0, 4.0, "0F1"), (1, 1.0, 4.0, "1F0"), (1, 4.0, 5.0, "1F1")]
    slow = tuple(
        fp.typing.Span(lane, a * 1e-2, b * 1e-2, fp.Action.parse(text))
        for lane, a, b, text in spans
    )
    result = replace(pretended(plan, fp.Cost()), timeline=fp.Timeline(slow, 2, unit="s"))
    made = fp.report(plan, result)
    assert (0.05, 0.06) == (made.measured.makespan, pytest.approx(made.simulated.makespan))
    assert dict(made.findings.headline)["difference"] == "-10 ms (-20.0% of the measured)"
    page = made._repr_html_()
    found = scales(page)
    assert max(found) == pytest.approx(min(found), rel=0.003)
    assert (
        max(
            float(x) + float(w) for x, w in re.findall(r'<rect x="([\d.]+)" width="([\d.]+)"', page)
        )
        <= 640
    )


def test_a_batch_with_fewer_microbatches_is_simulated_with_as_many() -> None:
    """The schedule's first ones."""
    plan, params = plan_and_params(fp.schedules.one_f_one_b(2, 8))
    made = fp.report(plan, recorded(plan, params, rows=3))
    assert dict(made.findings.headline)["microbatches"] == "3 of 8"
    assert {span.action for span in made.simulated.spans} == {
        span.action for span in made.measured.spans
    }
    assert len(made.simulated.spans) == 12
    assert any("3 of the plan's 8 microbatches" in remark for remark in made.findings.remarks)
    assert all(
        int(row["most at a time"]) <= int(row["slots"])
        for row in table(made, "Values between lanes")
    )


def test_a_page_has_one_legend() -> None:
    plan, _ = plan_and_params(fp.schedules.one_f_one_b(2, 3))
    page = fp.report(plan, pretended(plan, fp.Cost(0.001, 0.001, 0.001)))._repr_html_()
    assert page.count('class="legend"') == 1


def test_forwards_alone_hold_no_residuals() -> None:
    """No memory chart, and no kind that did not run."""
    made = [fp.from_module(nn.Linear(8, 8)) for _ in range(2)]
    stages, params, _ = zip(*made, strict=True)
    plan = fp.make_plan(stages, fp.schedules.fill_drain(2, 3, backward=False), devices="cpu")
    report = fp.report(plan, fp.run(plan, params, torch.ones(6, 8), record=True))
    assert report.findings.held == ()
    assert report._repr_html_().count("<svg") == 2
    assert "loss" not in dict(report.findings.headline)
    assert not [head for head in table(report, "Stages")[0] if head.startswith("B ")]


def test_remarks_name_what_is_worth_a_look() -> None:
    """Each where it holds, none where it does not."""
    plan, _ = plan_and_params(fp.schedules.one_f_one_b(2, 3))
    even = pretended(plan, fp.Cost(0.001, backward=0.002))
    assert fp.report(plan, even).findings.remarks == ()
    nearly = pretended(plan, fp.Cost((0.001, 0.00118), backward=(0.002, 0.00238)))
    assert fp.report(plan, nearly).findings.remarks == ()
    (uneven,) = fp.report(
        plan, pretended(plan, fp.Cost((0.001, 0.002), backward=(0.002, 0.004)))
    ).findings.remarks
    assert uneven.startswith("Lane 1 works 100% longer than lane 0")
    assert "takes 18 ms instead of 21 ms (-14.3%), simulated: fp.models.balance" in uneven
    (short,) = fp.report(
        plan, pretended(plan, fp.Cost((0.00009, 0.001), backward=(0.00291, 0.002)))
    ).findings.remarks
    assert short.startswith("3 of 12 actions take less than 100 us on average (F of stage 0)")
    (serial,) = fp.report(
        plan, replace(even, stats=replace(even.stats, executor="serial", reason="why"))
    ).findings.remarks
    assert serial.startswith("One thread ran all 2 lanes (why)")
    (unused,) = fp.report(plan, replace(even, unused=((1, "bias"),))).findings.remarks
    assert "'bias' of stage 1 ('part 1')" in unused


def test_what_balance_would_win_is_simulated() -> None:
    """Between the bubble, which hardly shows unequal stages, and the imbalance, which stands for
    the same bubble."""
    plan, _ = plan_and_params(fp.schedules.one_f_one_b(3, 8))
    report = fp.report(
        plan, pretended(plan, fp.Cost([0.008, 0.003, 0.003], backward=[0.016, 0.006, 0.006]))
    )
    shown = dict(report.findings.headline)
    assert ("1.0%", "42.3%", "41.7%") == tuple(
        shown[f"{name}, measured"] for name in ("bubble", "idle", "imbalance")
    )
    (remark,) = report.findings.remarks
    assert (
        "takes 140 ms instead of 194 ms (-27.8%), simulated: fp.models.balance with the times of "
        "fp.models.profile" in remark
    )
    for picture in (report._repr_html_(), report.text(100)):
        words = (
            "imbalance 41.7%: equal work on all devices would save 41.7% of the makespan at the "
            "same bubble"
        )
        assert words in " ".join(picture.split())
    plan, _ = plan_and_params(
        fp.schedules.one_f_one_b(3, 1)
    )  # one microbatch: nobody ever works beside another
    (remark,) = fp.report(
        plan, pretended(plan, fp.Cost((0.008, 0.003, 0.003), backward=(0.016, 0.006, 0.006)))
    ).findings.remarks
    assert remark.endswith("(+0.0%), simulated.")
    plan, _ = plan_and_params(fp.schedules.one_f_one_b(2, 3))
    _, remark = fp.report(
        plan, pretended(plan, fp.Cost((0.001, 0), backward=(0.002, 0)))
    ).findings.remarks
    assert remark.startswith(
        "Lane 0 works while nothing is done by lane 1, and the others wait for it."
    )


def test_a_backward_that_is_not_split_is_told_and_its_w_is_not_called_short() -> None:
    """Where nothing waits, I is the whole backward; more rows would not make W longer."""
    plan, _ = plan_and_params(fp.schedules.zero_bubble(2, 3))
    (remark,) = fp.report(plan, pretended(plan, fp.Cost(0.001, 0.002, 1e-6))).findings.remarks
    assert remark.startswith("W takes no time: stages 0-1 do the whole backward in I")
    assert fp.report(plan, pretended(plan, fp.Cost(0.001, 0.002, 0.001))).findings.remarks == ()


@pytest.mark.parametrize("width", [40, 60, 80, 200])
@pytest.mark.parametrize(
    "schedule",
    [fp.schedules.one_f_one_b(2, 4), fp.schedules.remat(fp.schedules.zero_bubble(16, 20))],
    ids=lambda schedule: schedule.name,
)
def test_text_is_never_wider_than_asked(schedule: fp.Schedule, width: int) -> None:
    """Tables have their columns, some below others; sentences wrap."""
    plan, params = plan_and_params(schedule, name="a long name of a stage")
    made = fp.report(
        plan, pretended(plan, fp.Cost(0.001, 0.002, 1e-6), reason="why " * 40), params=params
    )
    lines = made.text(width).split("\n")
    assert max(map(len, lines)) <= width
    for table in made.findings.tables:
        block = [line.split() for line in lines[lines.index(table.title) + 1 :]]
        heads = [words for words in block[: block.index([])] if words[0] == table.heads[0]]
        assert {word for head in table.heads for word in head.split()} <= {
            word for words in heads for word in words
        }
    assert [line for line in lines if ", measured in " in line]
    assert [line for line in lines if ", simulated in " in line]
    with pytest.raises(ValueError, match="a report is at least 40 columns wide; got width=39"):
        made.text(39)


def test_devices_that_the_run_chose_are_those_of_the_gradients() -> None:
    """A plan without devices= still says where its lanes were."""
    plan, params = plan_and_params(fp.schedules.one_f_one_b(2, 3))
    free = replace(plan, devices=None)
    assert [row["device"] for row in table(fp.report(free, recorded(free, params)), "Lanes")] == [
        "cpu",
        "cpu",
    ]


@pytest.mark.slow
def test_huge_pages_stay_small() -> None:
    """Every action is drawn, or none is and the page says where to see them."""
    for microbatches, is_drawn in ((52, True), (86, False)):
        plan, _ = plan_and_params(fp.schedules.zero_bubble(32, microbatches))
        content = fp.report(plan, pretended(plan, fp.Cost(0.001, 0.001, 0.001)))._repr_html_()
        assert len(content.encode()) < 2_000_000
        actions = len(re.findall(r"<rect x=[^>]*><title>[^<]*, microbatch", content))
        assert actions == is_drawn * 2 * sum(map(len, plan.schedule.orders))
        assert ("<svg" in content) == is_drawn
        assert ("report.measured.to_chrome_trace(" in content) != is_drawn
        Page(content)


def test_unused_parameters_of_a_real_run_are_named() -> None:
    """From the run itself."""

    @fp.stage(name="careless")
    def careless(params: Any, x: Any) -> Any:
        return x * params["used"]

    plan = fp.make_plan(
        [careless], fp.schedules.fill_drain(1, 2), loss=nn.functional.mse_loss, devices="cpu"
    )
    params = ({"used": torch.ones(8), "idle": torch.ones(8)},)
    remarks = fp.report(plan, recorded(plan, params)).findings.remarks
    assert any("'idle' of stage 0 ('careless')" in remark for remark in remarks)


@pytest.mark.parametrize(
    "name", ["<script>alert('x')</script> & \"co\"", "a\x00b\x1b[31m\ud800\uffff\n\nc", "名" * 40]
)
def test_names_are_escaped(name: str, tmp_path: Path) -> None:
    """Titles, stages, schedules and reasons."""
    schedule = fp.Schedule(fp.schedules.one_f_one_b(2, 3).orders, name)
    plan, params = plan_and_params(schedule, name=name)
    result = pretended(plan, fp.Cost(0.001, 0.002), reason=name)
    made = fp.report(plan, replace(result, unused=((0, name),)), params=params, title=name)
    made.save(tmp_path / "x.html")
    content = (tmp_path / "x.html").read_text(encoding="utf-8")
    assert "<script" not in content
    assert not re.search(r"[\x00-\x09\x0b-\x1f]", str(made))
    page = Page(content)
    shown = " ".join(name.split()) if name.isprintable() else "a b [31m c"
    assert {"h1", "title", "dd", "td"} <= {tag for tag, text in page.texts if shown in text}


def test_a_page_needs_nothing_else_and_follows_dark_mode(tmp_path: Path) -> None:
    """No script, no address, no id that could clash; colours of the viewer's mode."""
    plan, params = plan_and_params(fp.schedules.one_f_one_b(2, 3))
    made = fp.report(plan, recorded(plan, params), params=params)
    made.save(tmp_path / "x.html")
    content = (tmp_path / "x.html").read_text(encoding="utf-8")
    page = Page(content)
    assert not {"script", "link", "img", "iframe", "object"} & {tag for tag, _ in page.tags}
    assert not {"src", "href", "id", "onclick", "onload"} & {
        name for _, attrs in page.tags for name in attrs
    }
    assert "url(" not in content
    assert "@import" not in content
    assert "prefers-color-scheme:dark" in content
    assert "color-scheme:light dark" in content
    assert made._repr_html_() in content
    assert "prefers-color-scheme" not in made._repr_html_()
    hovers = [text for tag, text in page.texts if tag == "title" and "microbatch" in text]
    assert len(hovers) == 24
    assert (
        sum(
            bool(re.match(r"1B2 backward, stage 1, microbatch 2: [\d.]+ to [\d.]+ \w+$", one))
            for one in hovers
        )
        == 2
    )
    for selector in re.findall(
        r"([^{}]+)\{", "".join(re.findall(r"<style>(.*?)</style>", made._repr_html_(), re.S))
    ):
        assert all(
            one.strip().startswith((".funcpipe-report", ".funcpipe")) for one in selector.split(",")
        )


@pytest.mark.parametrize(
    ("schedule", "most"),
    [
        (fp.schedules.one_f_one_b(2, 4), 40_000),
        (fp.schedules.interleaved(32, 64, num_devices=16), 2_000_000),
        (fp.schedules.zero_bubble(16, 64), 2_000_000),
    ],
    ids=["2x4", "32x64 on 16", "ZB 16x64"],
)
def test_pages_stay_small(schedule: fp.Schedule, most: int) -> None:
    """Two rectangles for each action, and one for each level."""
    plan, params = plan_and_params(schedule)
    content = fp.report(
        plan, pretended(plan, fp.Cost(0.001, 0.001, 0.001, comm=0.0003)), params=params
    )._repr_html_()
    assert content.count("microbatch ") >= 2 * sum(map(len, schedule.orders))
    assert len(content.encode()) < most
    Page(content)


def test_what_cannot_be_reported_is_refused() -> None:
    """With the call that mends it."""
    plan, params = plan_and_params(fp.schedules.one_f_one_b(2, 3))
    x = torch.ones(6, 8)
    with pytest.raises(fp.PlanError, match="record=True"):
        fp.report(plan, fp.run(plan, params, (x, x)))
    result = recorded(plan, params)
    other, _ = plan_and_params(fp.schedules.fill_drain(2, 3))
    with pytest.raises(fp.PlanError, match="pass the plan of the run"):
        fp.report(other, result)
    with pytest.raises(fp.PlanError, match="params has 1 trees, the plan has 2 stages"):
        fp.report(plan, result, params=params[:1])


@pytest.mark.parametrize("swapped", [True, False])
def test_other_things_are_refused(swapped: bool) -> None:
    """Arguments in the wrong order, a timeline for a result."""
    plan, params = plan_and_params(fp.schedules.one_f_one_b(2, 3))
    result = recorded(plan, params)
    wrong: Any = (result, plan) if swapped else (plan, result.timeline)
    with pytest.raises(
        TypeError,
        match=r"report takes a Plan and the Result of fp.run\(plan, ..., record=True\); got a ",
    ):
        fp.report(*wrong)


def test_save_replaces_the_whole_file_or_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that was there stays when writing fails, and no part of a new one is left."""
    plan, params = plan_and_params(fp.schedules.one_f_one_b(2, 3))
    made = fp.report(plan, recorded(plan, params))
    file = tmp_path / "report.html"
    file.write_text("old")
    seen: list[str] = []
    replaced = os.replace

    def watched(source: Any, target: Any) -> None:
        assert file.read_text() == "old"
        seen.append(Path(source).read_text(encoding="utf-8"))
        replaced(source, target)

    monkeypatch.setattr(os, "replace", watched)
    made.save(str(file))
    assert seen == [file.read_text(encoding="utf-8")]
    assert seen[0].startswith("<!doctype html>")
    assert seen[0].endswith("</html>\n")
    (tmp_path / "folder").mkdir()
    monkeypatch.setattr(os, "replace", replaced)
    with pytest.raises(OSError, match="folder"):
        made.save(tmp_path / "folder")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder", "report.html"]


def test_a_report_is_data() -> None:
    """Compares, hashes, pickles, and keeps no tensor alive."""
    plan, params = plan_and_params(fp.schedules.one_f_one_b(2, 3))
    made = fp.report(plan, recorded(plan, params), params=params)
    copy = pickle.loads(pickle.dumps(made))
    assert copy == made
    assert hash(copy) == hash(made)
    assert b"torch" not in pickle.dumps(made)
    assert (str(copy), copy._repr_html_()) == (str(made), made._repr_html_())


@pytest.mark.parametrize(
    "schedule",
    [
        fp.schedules.one_f_one_b(3, 5),
        fp.schedules.zero_bubble(3, 5),
        fp.schedules.remat(fp.schedules.interleaved(4, 4, num_devices=2)),
    ],
    ids=lambda schedule: schedule.name,
)
def test_the_cost_of_a_timeline_simulates_to_itself(schedule: fp.Schedule) -> None:
    """With every time a binary fraction, to the bit."""
    count = schedule.num_stages
    stages = [2.0**stage for stage in range(count)]
    cost = fp.Cost(
        stages,
        [3 * t for t in stages],
        [t / 2 for t in stages],
        remat=[t / 4 for t in stages],
        comm=0.5,
    )
    first = fp.simulate(schedule, cost)
    assert fp.simulate(schedule, first.cost()) == first


def test_the_cost_of_a_timeline_fills_in_what_did_not_run() -> None:
    """B is I and W; I and W are half of B each; R is F; of a mean each run counts once."""
    whole = fp.simulate(fp.schedules.one_f_one_b(2, 4), fp.Cost(3.0, backward=(8.0, 4.0))).cost()
    assert (whole.backward_input, whole.backward_weight, whole.remat) == (
        (4.0, 2.0),
        (4.0, 2.0),
        (3.0, 3.0),
    )
    halves = fp.simulate(fp.schedules.zero_bubble(2, 4), fp.Cost(1.0, 2.0, 0.5)).cost()
    assert halves.backward == (2.5, 2.5)
    spans = tuple(
        fp.typing.Span(0, t, t + d, fp.Action(fp.Kind.F, 0, m))
        for m, (t, d) in enumerate([(0.0, 1.0), (2.0, 4.0)])
    )
    assert fp.Timeline(spans, 1).cost().forward == (2.5,)
    assert fp.Timeline((), 0).cost().forward == ()
