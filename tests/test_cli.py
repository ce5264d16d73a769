"""The command line: pictures, the table, files in and out; a mistake is one message and status 2,
before any work."""

from __future__ import annotations

import io
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.pipelining import schedules as theirs

import funcpipe as fp
from funcpipe.__main__ import main
from funcpipe._src.cli import demo
from funcpipe._src.cli.words import FAMILIES

ROOT = Path(__file__).parent.parent


def shown(capsys, words: str) -> str:
    """What a command prints."""
    assert 0 == main(shlex.split(words))
    out, err = capsys.readouterr()
    assert "" == err
    return out


def refused(capsys, words: str) -> str:
    """The message of a command that must fail, and prints nothing else."""
    with pytest.raises(SystemExit) as left:
        main(shlex.split(words))
    assert 2 == left.value.code
    out, err = capsys.readouterr()
    assert "" == out
    assert "Traceback" not in err
    return err


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")


def test_version_names_what_a_report_needs(capsys):
    with pytest.raises(SystemExit) as left:
        main(["--version"])
    assert 0 == left.value.code
    assert f"funcpipe {fp.__version__} (torch {torch.__version__})\n" == capsys.readouterr().out


# draw


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_drawn(family, capsys):
    found = shown(capsys, f"draw {family} --stages 4 --microbatches 4 --devices 2 --width 100")
    assert fp.draw(FAMILIES[family](4, 4, num_devices=2)).text(100) + "\n" == found


def test_draw_with_costs_and_remat(capsys):
    found = shown(
        capsys,
        "draw 1f1b --stages 2 --microbatches 3 --remat --cost forward=1,backward=3,comm=0.5 "
        "--width 80",
    )
    schedule = fp.schedules.remat(fp.schedules.one_f_one_b(2, 3))
    cost = fp.Cost(1, 1.5, 1.5, backward=3, comm=0.5)
    assert fp.draw(fp.simulate(schedule, cost)).text(80) + "\n" == found


@pytest.mark.parametrize(("suffix", "begins"), [(".svg", "<svg"), (".txt", "1F1B")])
def test_draw_into_a_file(suffix, begins, capsys):
    assert "" == shown(capsys, f"draw 1f1b --stages 2 --microbatches 3 --output picture{suffix}")
    assert Path(f"picture{suffix}").read_text(encoding="utf-8").startswith(begins)


def test_draw_writes_a_trace_beside_the_picture(capsys):
    timeline = fp.simulate(fp.schedules.one_f_one_b(2, 3))
    assert fp.draw(timeline).text(90) + "\n" == shown(
        capsys, "draw 1f1b --stages 2 --microbatches 3 --width 90 --trace trace.json"
    )
    assert timeline.chrome_trace() == json.loads(Path("trace.json").read_text())


# compare


def test_compare_shows_every_family_best_first(capsys):
    lines = shown(
        capsys, "compare --stages 8 --microbatches 32 --cost forward=1,backward=2,comm=0.1"
    ).splitlines()
    assert "8 stages on 4 devices, 32 microbatches" == lines[0]
    heads = ["schedule", "makespan", "bubble", "span bubble", "idle", "peak memory", "legal"]
    assert heads == re.split("  +", lines[2])
    rows = {cells[0]: cells[1:] for cells in map(str.split, lines[3:])}
    assert set(FAMILIES) == set(rows)
    for name, (makespan, bubble, span_bubble, idle, peak, legal) in rows.items():
        timeline = fp.simulate(FAMILIES[name](8, 32, num_devices=4), fp.Cost(backward=2, comm=0.1))
        assert (f"{timeline.makespan:.6g}", f"{timeline.bubble:.1%}") == (makespan, bubble)
        assert (f"{timeline.span_bubble:.1%}", f"{timeline.idle:.1%}") == (span_bubble, idle)
        assert (f"{max(timeline.peak):.6g}", "yes") == (peak, legal)
    times = [float(cells[0]) for cells in rows.values()]
    assert sorted(times) == times


def test_compare_says_what_unequal_stages_lose(capsys):
    """The bubble is that of the busiest device; what the others wait for besides has a column, and
    is explained."""
    cost = fp.Cost(forward=[8, 3, 3], backward=[16, 6, 6])
    Path("cost.json").write_text(fp.schedules.to_json(cost))
    table, note = shown(capsys, "compare --stages 3 --microbatches 8 --cost cost.json").split(
        "\n\n"
    )[1:]
    heads, *rows = (re.split("  +", line) for line in table.splitlines())
    (found,) = [dict(zip(heads, row, strict=True)) for row in rows if row[0] == "1f1b"]
    assert ("1.0%", "42.3%", "41.7%") == (found["bubble"], found["idle"], found["imbalance"])
    words = (
        "the share of the makespan that equal work on all devices would save at the same bubble "
        "(fp.models.balance)"
    )
    assert f"imbalance: {words}\n" == note
    said = facts(
        shown(capsys, "search --devices 3 --microbatches 4 --cost cost.json --evaluations 30")
    )
    words = (
        "imbalance 41.7%: equal work on all devices would save 41.7% of the makespan at the same "
        "bubble"
    )
    assert words == said["idle"].partition(", ")[2]


def test_compare_says_why_not(capsys):
    table, note = shown(capsys, "compare --stages 6 --microbatches 8 --devices 4").split("\n\n")[1:]
    rows = table.splitlines()[1:]
    assert note.startswith("imbalance: ")  # two devices have two stages
    verdicts = {row.split()[0]: row.split("  ")[-1] for row in rows}
    assert set(FAMILIES) == set(verdicts)
    for name, family in FAMILIES.items():
        said = "yes"
        try:
            family(6, 8, num_devices=4)
        except fp.ScheduleError as error:
            said = "no: " + str(error).splitlines()[1].strip(" *")
        assert said == verdicts[name]
    assert {"yes"} < set(verdicts.values())


def test_compare_with_a_limit_puts_what_does_not_fit_last(capsys):
    rows = shown(
        capsys, "compare --stages 4 --microbatches 16 --devices 4 --device-memory 4"
    ).splitlines()[3:]
    fits = [row for row in rows if row.endswith("  yes")]
    assert rows[: len(fits)] == fits
    assert 0 < len(fits) < len(rows)
    (row,) = [row for row in rows if row.startswith("fill-drain")]
    assert row.endswith("no: needs 16, a device has 4")


def test_compare_with_ones_own(capsys):
    """Files stand in the table; other counts and illegal ones are said, and nothing else fails for
    it."""
    Path("mine.json").write_text(fp.schedules.to_json(fp.schedules.one_f_one_b(2, 3)))
    Path("other.txt").write_text(str(fp.schedules.one_f_one_b(2, 4)))
    Path("stuck.csv").write_text("0F0,0B0\n1F0")
    found = shown(
        capsys, "compare mine.json other.txt stuck.csv --stages 2 --microbatches 3 --devices 2"
    )
    rows = {row.split()[0]: row for row in found.splitlines()[3:]}
    assert rows["mine.json"].split()[1:] == rows["1f1b"].split()[1:]
    assert "no: has 2 stages, 4 microbatches" in rows["other.txt"]
    assert "no: has 2 stages, 1 microbatches" in rows["stuck.csv"]
    found = shown(capsys, "compare stuck.csv --stages 2 --microbatches 1 --devices 2")
    assert "no: 1B0 is missing (or 1I0 and 1W0)" in found


def test_compare_takes_the_counts_of_the_first_file(capsys):
    """Each count can still be given."""
    Path("mine.json").write_text(
        fp.schedules.to_json(fp.schedules.interleaved(6, 4, num_devices=3))
    )
    Path("other.txt").write_text(str(fp.schedules.one_f_one_b(2, 4)))
    found = shown(capsys, "compare mine.json other.txt")
    assert found.startswith("6 stages on 3 devices, 4 microbatches\n")
    rows = {row.split()[0]: row for row in found.splitlines()[3:]}
    assert rows["mine.json"].split()[1:] == rows["interleaved"].split()[1:]
    assert "no: has 2 stages, 4 microbatches" in rows["other.txt"]
    found = shown(capsys, "compare mine.json --devices 6 --microbatches 2")
    assert found.startswith("6 stages on 6 devices, 2 microbatches\n")
    assert "no: has 6 stages, 4 microbatches" in found


def test_compare_with_a_search(capsys):
    """Its row is what `search` finds; no family within the limit is shorter, and it says how far
    from the shortest it is."""
    words = "compare --stages 8 --microbatches 12 --device-memory 5"
    lines = shown(capsys, f"{words} --search 100").splitlines()
    found = fp.search(
        fp.Cost(), num_devices=4, num_microbatches=12, num_stages=8, memory_limit=5, evaluations=100
    )
    assert lines[3].startswith("search")
    assert f"{found.makespan:.6g}" == lines[3].split()[1]
    assert lines[3].endswith(f"yes, at most {found.gap:.2%} above the shortest")
    assert shown(capsys, words).splitlines()[3:] == [
        line for line in lines[3:] if not line.startswith("search")
    ]


def test_compare_with_a_search_that_may_compute_again(capsys):
    """The families always do, so within a tight limit the search is shorter; without leave it finds
    nothing."""
    words = "compare --stages 4 --devices 4 --microbatches 8 --device-memory 1.4"
    again, never = (
        shown(capsys, f"{words} {more} --search 60").splitlines()[3:] for more in ("--remat", "")
    )
    times = {row.split()[0]: float(row.split()[1]) for row in again if "yes" in row}
    assert len(times) > 1
    assert min(times, key=lambda name: times[name]) == "search"
    assert times["search"] < min(time for name, time in times.items() if name != "search")
    (row,) = [row for row in never if row.startswith("search")]
    assert float(row.split()[1]) > times["search"]


def test_costs_from_a_file(capsys):
    cost = fp.Cost([1, 2], [3, 4], [5, 6])
    Path("cost.json").write_text(fp.schedules.to_json(cost))
    found = shown(capsys, "draw 1f1b --stages 2 --microbatches 3 --cost cost.json --width 80")
    assert fp.draw(fp.simulate(fp.schedules.one_f_one_b(2, 3), cost)).text(80) + "\n" == found
    assert "one for each of 4 stages" in refused(
        capsys, "compare --stages 4 --microbatches 4 --cost cost.json"
    )


# convert


@pytest.mark.parametrize("first", ["json", "csv", "txt"])
@pytest.mark.parametrize("second", ["json", "csv", "txt"])
def test_formats_there_and_back(first, second, capsys):
    assert "" == shown(
        capsys, f"convert interleaved --stages 4 --microbatches 6 --devices 2 a.{first}"
    )
    shown(capsys, f"convert a.{first} b.{second}")
    shown(capsys, f"convert b.{second} c.json")
    found = fp.schedules.from_json(Path("c.json").read_text())
    assert fp.schedules.interleaved(4, 6, num_devices=2) == found


# search


def facts(text: str) -> dict[str, str]:
    """What `search` says above the drawing: a fact a line."""
    return dict(re.split("  +", line, maxsplit=1) for line in text.split("\n\n")[1].splitlines())


SEARCH = (
    "search --devices 4 --microbatches 8 --cost forward=5,backward_input=6,backward_weight=4,comm=1"
)


def test_files_of_windows_editors(capsys):
    """A byte order mark is no part of a schedule, and another encoding is named with the file."""
    text = str(fp.schedules.fill_drain(2, 2))
    Path("marked.txt").write_text(text, encoding="utf-8-sig")
    assert shown(capsys, "draw marked.txt")
    Path("wide.txt").write_text(text, encoding="utf-16")
    assert "wide.txt is not UTF-8" in refused(capsys, "draw wide.txt")


def test_search_says_what_it_found(capsys):
    text = shown(capsys, f"{SEARCH} --device-memory 5 --evaluations 60 --width 100")
    cost = fp.Cost(5, 6, 4, comm=1)
    found = fp.search(cost, num_devices=4, num_microbatches=8, memory_limit=5, evaluations=60)
    span = f"{found.span:.6g}, bubble {found.timeline.span_bubble:.1%}"
    assert "4 stages on 4 devices, 8 microbatches" == text.splitlines()[0]
    assert {
        "source": found.source,
        "makespan": f"{found.makespan:.6g}, bubble {found.timeline.bubble:.1%}",
        **({"span": span} if found.span != found.makespan else {}),
        "idle": f"{found.timeline.idle:.1%}",
        "peak memory": f"{max(found.peak):.6g}",
        "lower bound": (
            f"{found.lower_bound:.6g} of the makespan: at most {found.gap:.2%} above the shortest"
        ),
        "ended by": f"evaluations, {found.evaluations} schedules timed",
    } == facts(text)
    assert text.endswith("\n\n" + fp.draw(found.timeline).text(100) + "\n")


def test_search_proves_where_it_can(capsys):
    """What the proofs of arXiv 2401.10241 and exact solvers say of the same problem."""
    said = facts(shown(capsys, "search --devices 4 --microbatches 8 --device-memory 4"))
    assert "27 of the makespan: nothing shorter exists" == said["lower bound"]
    assert "span" not in said, "it is the makespan"
    assert said["ended by"].startswith("bound, ")


def test_search_with_a_solver_proves_what_no_bound_does(capsys):
    """The makespan that OR-Tools proved for this row before there was a search (4 devices, 8
    microbatches, 3 residuals)."""
    pytest.importorskip("ortools")
    words = "search --devices 4 --microbatches 8 --device-memory 3 --evaluations 200"
    open_, proven = (facts(shown(capsys, f"{words} {more}")) for more in ("", "--exact"))
    assert "at most" in open_["lower bound"]
    assert "31 of the makespan: nothing shorter exists" == proven["lower bound"]
    assert proven["makespan"].startswith("31,")


def test_search_passes_every_word_on(capsys):
    """What is said differs from the default as the same arguments of fp.search make it differ."""
    words = (
        f"{SEARCH} --stages 8 --device-memory 6,6,6,5 --placement v --remat --objective span "
        "--evaluations 50 --seed 3"
    )
    said = facts(shown(capsys, words))
    found = fp.search(
        fp.Cost(5, 6, 4, comm=1),
        num_devices=4,
        num_microbatches=8,
        num_stages=8,
        placement="v",
        memory_limit=(6, 6, 6, 5),
        remat=True,
        objective="span",
        evaluations=50,
        seed=3,
    )
    assert "0,1,2,3,3,2,1,0" == said["placement"]
    assert said["span"].startswith(f"{found.span:.6g},")
    assert said["lower bound"].startswith(f"{found.lower_bound:.6g} of the span: ")
    said = facts(
        shown(capsys, "search --devices 2 --microbatches 3 --placement 0,1,1,0,1 --device-memory 9")
    )
    assert "0,1,1,0,1" == said["placement"]


def test_search_offloads_if_it_may(capsys):
    """Within a limit that no schedule without offload could be so short in."""
    words = (
        "search --devices 1 --stages 3 --microbatches 2 --cost offload=0.1 --device-memory 4 "
        "--evaluations 50"
    )
    kept, moved = (
        shown(capsys, f"{words} {more} --output found.txt") for more in ("", "--offload")
    )
    assert float(facts(moved)["makespan"].split(",")[0]) <= float(
        facts(kept)["makespan"].split(",")[0]
    )


def test_search_is_repeatable(capsys):
    """The same number of evaluations and seed: the same words, to the letter."""
    words = f"{SEARCH} --stages 8 --device-memory 5 --evaluations 150"
    first, again, other = (shown(capsys, f"{words} --seed {seed}") for seed in (1, 1, 2))
    assert re.search("ended by     evaluations, 1[0-9]+ schedules timed", first)
    assert first == again
    assert float(facts(first)["lower bound"].split()[0]) <= float(
        facts(other)["makespan"].split(",")[0]
    )


def test_search_within_seconds_says_that_another_run_may_differ(capsys):
    said = facts(shown(capsys, f"{SEARCH} --stages 8 --device-memory 99 --seconds 1e-6"))
    assert said["ended by"].startswith("seconds, ")
    assert said["ended by"].endswith("; another run may find another")


@pytest.mark.parametrize(
    ("suffix", "read"),
    [
        ("json", fp.schedules.from_json),
        ("csv", fp.schedules.from_torch_csv),
        ("txt", fp.Schedule.parse),
    ],
)
def test_search_writes_the_schedule(suffix, read, capsys):
    shown(
        capsys,
        f"{SEARCH} --device-memory 8 --objective span --evaluations 60 --output found.{suffix}",
    )
    found = fp.search(
        fp.Cost(5, 6, 4, comm=1),
        num_devices=4,
        num_microbatches=8,
        memory_limit=8,
        objective="span",
        evaluations=60,
    )
    assert found.schedule == read(Path(f"found.{suffix}").read_text())


def test_search_writes_the_picture(capsys):
    shown(capsys, f"{SEARCH} --device-memory 4 --evaluations 20 --output found.svg")
    assert Path("found.svg").read_text(encoding="utf-8").startswith("<svg")


@pytest.mark.parametrize(
    "words",
    [
        "--stages 8 --placement v --device-memory 5",
        "--stages 5 --device-memory 9",
        "--device-memory 8 --objective span",
    ],
)
def test_torch_loads_what_was_found(words, capsys):
    """By its own loader, which validates the order and adds its sends and receives."""
    shown(
        capsys, f"search --devices 4 --microbatches 8 --evaluations 80 {words} --output found.csv"
    )
    found = fp.schedules.from_torch_csv(Path("found.csv").read_text())
    devices, stages = found.num_devices, found.num_stages
    local = [
        FakeStage(stage, stages, devices)
        for stage, device in enumerate(found.device_of)
        if device == 0
    ]
    runtime: Any = theirs._PipelineScheduleRuntime(local, 8, loss_fn=lambda y, t: y.sum())  # pyright: ignore
    runtime._load_csv("found.csv", format="compute_only")
    rows = [" ".join(map(str, runtime.pipeline_order[rank])) for rank in range(devices)]
    assert str(found).split("\n") == rows
    assert any("SEND_F" in str(action) for action in runtime.pipeline_order_with_comms[0])


class FakeStage:
    """What torch's schedule classes ask of a stage when they are made; no process group."""

    def __init__(self, index: int, stages: int, devices: int) -> None:
        self.stage_index, self.num_stages, self.group_size, self.group_rank = (
            index,
            stages,
            devices,
            0,
        )
        self.is_first, self.is_last = index == 0, index == stages - 1
        self.has_backward, self.submod = True, None
        self.stage_index_to_group_rank: dict[int, int] = {}


def test_a_found_schedule_is_drawn_compared_and_converted(capsys):
    """It is a file like any other."""
    shown(
        capsys,
        "search --devices 2 --stages 4 --microbatches 4 --device-memory 3 --evaluations 50 "
        "--output a.json",
    )
    shown(capsys, "convert a.json b.csv")
    assert "peak" in shown(capsys, "draw b.csv --width 80")
    rows = shown(
        capsys, "compare a.json --stages 4 --microbatches 4 --device-memory 3"
    ).splitlines()
    assert any(row.startswith("a.json") and row.endswith("yes") for row in rows)


# mistakes


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("", "required: COMMAND"),
        ("train", "invalid choice"),
        ("draw 1f1b --stages 0 --microbatches 3", "a whole number from 1; got '0'"),
        ("draw 1f1b --stages x --microbatches 3", "a whole number from 1; got 'x'"),
        ("draw 1f1b --stages 999999999 --microbatches 999999999", "more than 1000000 forwards"),
        ("compare --stages 999999 --microbatches 999999", "more than 1000000 forwards"),
        ("draw 1f1b", "give --stages and --microbatches"),
        ("draw 1F1B --stages 2 --microbatches 2", "did you mean 1f1b?"),
        ("draw one_f_one_b --stages 2 --microbatches 2", "the families are fill-drain"),
        ("draw nothing.json", "No such file"),
        ("draw .", "is neither a family"),
        ("draw broken.json", "broken.json: the text is not JSON"),
        ("draw broken.txt", "broken.txt: write stage"),
        ("draw binary.csv", "decode"),
        ("draw a.json --stages 2", "has its own counts"),
        ("draw cost.json", "give it as --cost"),
        ("draw a.json --width 39", "at least 40"),
        ("draw a.json --output a.png", "does not end in .svg or .txt"),
        ("draw a.json --output no/a.svg", "there is no folder no"),
        ("draw a.json --trace a.svg", "a.svg does not end in .json"),
        ("draw stuck.json", "cannot come to its end"),
        ("draw rematted.json --remat", "has R already"),
        (
            "draw looped-bfs --stages 3 --microbatches 2 --devices 2",
            "num_devices must divide num_stages",
        ),
        ("draw a.json --cost speed=1", "'speed' is not a cost; costs are forward"),
        ("draw a.json --cost forward=1,forward=2", "is given twice"),
        ("draw a.json --cost forward=fast", "forward is a number; got 'fast'"),
        ("draw a.json --cost forward=nan", "forward is a number from 0"),
        ("draw a.json --cost forward=-1", "forward is a number from 0"),
        ("draw a.json --cost a.json", "is a Schedule, not a cost"),
        ("draw a.json --cost no.json", "No such file"),
        ("compare --stages 4", "without a FILE, give --stages and --microbatches"),
        ("compare no.json --stages 4 --microbatches 4", "No such file"),
        (
            "compare --stages 4 --microbatches 4 --device-memory much",
            "a number above 0; got 'much'",
        ),
        ("compare --stages 4 --microbatches 4 --device-memory nan", "a number above 0; got 'nan'"),
        ("compare --stages 4 --microbatches 4 --search 0", "a whole number from 1; got '0'"),
        ("search --devices 4", "required: --microbatches"),
        ("search --devices 4 --microbatches 0", "a whole number from 1; got '0'"),
        (
            "search --devices 4 --microbatches 8 --stages 3",
            "num_devices must be at most the number of stages",
        ),
        ("search --devices 999999 --microbatches 999999", "more than 1000000 forwards"),
        ("search --devices 4 --microbatches 8 --device-memory 0", "a number above 0; got '0'"),
        ("search --devices 4 --microbatches 8 --device-memory 4,x", "a number above 0; got 'x'"),
        ("search --devices 4 --microbatches 8 --device-memory 4,4", "one for each of 4 devices"),
        (
            "search --devices 4 --microbatches 8 --device-memory 1e-9",
            "no schedule within a memory limit",
        ),
        (
            "search --devices 4 --microbatches 8 --placement w",
            "line, loop, v, or the device of each stage",
        ),
        (
            "search --devices 4 --microbatches 8 --placement 0,1",
            "num_devices must be at most the number of stages",
        ),
        (
            "search --devices 4 --microbatches 8 --stages 6 --placement v",
            "twice as many stages as devices",
        ),
        (
            "search --devices 2 --microbatches 8 --stages 4 --cost cost3.json",
            "one for each of 4 stages",
        ),
        ("search --devices 4 --microbatches 8 --cost skips=1", "skips can be given in a file only"),
        ("search --devices 4 --microbatches 8 --cost bandwidth=0", "bandwidth must be more than 0"),
        ("search --devices 4 --microbatches 8 --objective bubble", "invalid choice: 'bubble'"),
        ("search --devices 4 --microbatches 8 --evaluations 0", "a whole number from 1; got '0'"),
        ("search --devices 4 --microbatches 8 --seconds 0", "a number above 0; got '0'"),
        ("search --devices 4 --microbatches 8 --seconds inf", "a number above 0; got 'inf'"),
        ("search --devices 4 --microbatches 8 --seed -1", "a whole number from 0; got '-1'"),
        ("search --devices 4 --microbatches 8 --seed x", "a whole number from 0; got 'x'"),
        ("search --devices 4 --microbatches 8 --width 39", "at least 40"),
        (
            "search --devices 4 --microbatches 8 --output a.png",
            "does not end in .json, .csv, .txt or .svg",
        ),
        ("search --devices 4 --microbatches 8 --output no/a.json", "there is no folder no"),
        ("search --devices 4 --microbatches 8 --output folder.csv", "it is a folder"),
        (
            "search --devices 4 --microbatches 8 --remat --output a.csv",
            "torch's schedules have no R, O or L",
        ),
        (
            "search --devices 4 --microbatches 8 --offload --output a.csv",
            "torch's schedules have no R, O or L",
        ),
        ("convert a.json b.yaml", "does not end in .json, .csv or .txt"),
        ("convert a.json no/b.csv", "there is no folder no"),
        ("convert rematted.json b.csv", "it has R"),
        ("convert a.json folder.csv", "it is a folder"),
        ("demo --epochs 0", "--epochs is a whole number from 1; got 0"),
        ("demo --batch 2000", "--batch is at most 1497"),
        ("demo --batch 0", "--batch is a whole number from 1; got 0"),
        ("demo --microbatches 200", "--microbatches is at most --batch; got 200 for 128 rows"),
        (
            "demo --report no/report.html",
            "--report no/report.html cannot be written: there is no folder no",
        ),
        ("demo --trace .", "--trace . cannot be written: it is a folder"),
        ("demo --remat 0 4", "--remat names stages 0 to 3; got 4"),
        ("demo --remat -1", "--remat names stages 0 to 3; got -1"),
        ("demo --remat x", "invalid int value: 'x'"),
        ("demo --device nowhere", "--device nowhere: "),
        ("demo --devices 5", "num_devices must be at most num_stages"),
        ("demo --seed -1", "--seed is a whole number from 0"),
    ],
)
def test_a_mistake_is_one_message(words, says, capsys, monkeypatch):
    """And it comes before any work: no images are read, no search begins."""
    monkeypatch.setattr(demo, "digits", lambda seed: pytest.fail("the demo began"))
    if words.startswith("search") and "e-9" not in words:
        monkeypatch.setattr(
            "funcpipe._src.search.search._search", lambda *_: pytest.fail("the search began")
        )
    Path("a.json").write_text(fp.schedules.to_json(fp.schedules.one_f_one_b(2, 2)))
    Path("rematted.json").write_text(
        fp.schedules.to_json(fp.schedules.remat(fp.schedules.one_f_one_b(2, 2)))
    )
    Path("stuck.json").write_text(
        fp.schedules.to_json(fp.Schedule.parse("0F0 0B0 0F1 0B1\n1F1 1B1 1F0 1B0"))
    )
    Path("cost.json").write_text(fp.schedules.to_json(fp.Cost()))
    Path("cost3.json").write_text(fp.schedules.to_json(fp.Cost([1, 2, 3])))
    Path("broken.json").write_text("{")
    Path("broken.txt").write_text("0F0 zero")
    Path("binary.csv").write_bytes(b"\xff\xfe")
    Path("folder.csv").mkdir()
    before = sorted(Path().iterdir())
    message = refused(capsys, words)
    assert says in message
    assert before == sorted(Path().iterdir())


def test_the_demos_mistakes_come_all_at_once():
    options = demo.DemoOptions(epochs=0, batch=0, remat=(9,), report="no/a.html")
    with pytest.raises(fp.FuncpipeError) as caught:
        demo.main(options)
    assert 4 == str(caught.value).count("  * ")


def test_the_demo_knows_every_family(monkeypatch):
    """And runs one that it did not list of itself: up to the plan, where this test has seen
    enough."""
    assert tuple(FAMILIES) == tuple(demo.OPTIONS["--schedule"]["choices"])
    plans = []

    def place(plan, params, ranks):
        plans.append(plan)
        raise KeyboardInterrupt

    monkeypatch.setattr(fp, "place", place)
    with pytest.raises(KeyboardInterrupt):
        demo.main(demo.DemoOptions(schedule="zbv"))
    assert "ZB-V+remat" == plans[0].schedule.name


def test_the_demos_own_options_are_sound():
    """With any number of stages."""
    for stages in (1, 2, 4):
        demo.refuse(demo.DemoOptions(stages=stages))


# help, pipes, pages


@pytest.mark.parametrize("command", ["draw", "compare", "search", "convert"])
def test_help_teaches_with_examples_that_run(command, capsys):
    """Each example of a help text is a command that works, in a folder with the files that it
    names."""
    with pytest.raises(SystemExit) as left:
        main([command, "--help"])
    assert 0 == left.value.code
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 120
    examples = re.findall(r"^  funcpipe (.+)$", text.partition("examples:")[2], flags=re.M)
    assert len(examples) >= 2
    Path("schedule.csv").write_text(fp.schedules.to_torch_csv(fp.schedules.one_f_one_b(2, 2)))
    Path("mine.json").write_text(
        fp.schedules.to_json(fp.schedules.interleaved(8, 32, num_devices=4))
    )
    Path("profiled.json").write_text(fp.schedules.to_json(fp.Cost([1.0] * 8)))
    for example in examples:
        shown(capsys, example)


def test_a_reader_that_leaves_is_no_error():
    """``funcpipe ... | head``: nothing on stderr."""
    words = [
        sys.executable,
        "-m",
        "funcpipe",
        "draw",
        "1f1b",
        "--stages",
        "2",
        "--microbatches",
        "2",
    ]
    with subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT
    ) as process:
        process.stdout.close()
        assert b"" == process.stderr.read()
    assert 1 == process.returncode


def test_the_page_shows_what_is_printed(capsys):
    """docs/howto/command_line.md: each ``sh`` block, and the ``text`` block behind it; written as
    tests/test_documents.py says."""

    def run(block: re.Match[str]) -> str:
        lines = block["commands"].splitlines()
        out = "".join(shown(capsys, line.removeprefix("python -m funcpipe ")) for line in lines)
        printed = f"\n```text\n{out}```\n" if block["printed"] is not None else out
        return f"```sh\n{block['commands']}```\n{printed}"

    path = ROOT / "docs" / "howto" / "command_line.md"
    page = path.read_text()
    text, blocks = re.subn(
        r"^```sh\n(?P<commands>.*?)^```\n(?P<printed>\n```text\n.*?^```\n)?",
        run,
        page,
        flags=re.M | re.S,
    )
    assert blocks >= 4
    if os.environ.get("FUNCPIPE_PAGES") == "write":
        path.write_text(text)
    assert text == path.read_text()


# on a terminal


class Terminal(io.StringIO):
    """A stdout or stderr that is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def terminal(monkeypatch):
    """Makes both streams a terminal that knows colours, from within a test: pytest puts its own
    there before."""

    def install() -> tuple[Terminal, Terminal]:
        out, err = Terminal(), Terminal()
        monkeypatch.setattr(sys, "stdout", out)
        monkeypatch.setattr(sys, "stderr", err)
        return out, err

    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    return install


def without_colors(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


def widest(text: str) -> int:
    return max(map(len, without_colors(text).splitlines()))


COMPARE = "compare --stages 6 --microbatches 8 --devices 4"


def test_a_table_is_not_cut_on_a_narrow_terminal(terminal, monkeypatch):
    """No number is cut; the terminal wraps."""
    monkeypatch.setenv("COLUMNS", "50")
    out, _ = terminal()
    main(COMPARE.split())
    lines = out.getvalue().splitlines()
    assert any(re.match(r"zb-h2 +50 +4.0% +0.0% +28.0% +25.0% +14  yes$", line) for line in lines)


def test_a_terminal_gets_the_table_of_a_pipe(terminal, capsys, monkeypatch):
    out, _ = terminal()
    main(COMPARE.split())
    text = out.getvalue()
    monkeypatch.undo()
    main(COMPARE.split())
    assert capsys.readouterr().out == text


@pytest.mark.parametrize(("name", "value"), [("NO_COLOR", "1"), ("TERM", "dumb")])
def test_colours_can_be_left_out(name, value, terminal, monkeypatch):
    """The table and the picture."""
    monkeypatch.setenv(name, value)
    out, _ = terminal()
    main(COMPARE.split())
    if name == "NO_COLOR":
        main(["draw", "1f1b", "--stages", "2", "--microbatches", "3"])
    assert not re.search(r"\x1b\[[0-9;]*3[0-9]", out.getvalue())


def test_a_picture_is_cut_and_says_so(terminal, monkeypatch):
    """Where it was asked to be wider than the terminal: it never wraps, and its colours end."""
    out, _ = terminal()
    main(["draw", "1f1b", "--stages", "4", "--microbatches", "8", "--width", "120"])
    text = out.getvalue()
    assert widest(text) == 80
    (note,) = re.findall(r"cut: the picture has \d+ columns, the terminal 80; .*\n.*\n?", text)
    assert "| less -S" in note
    for line in text.splitlines():
        assert line.count("\x1b[38") == line.count("\x1b[0m")
    out, _ = terminal()
    main(["draw", "1f1b", "--stages", "4", "--microbatches", "8"])
    assert widest(out.getvalue()) <= 80
    assert "cut: " not in out.getvalue()


def test_a_picture_that_is_no_terminals_is_whole(capsys):
    assert widest(shown(capsys, "draw 1f1b --stages 4 --microbatches 8 --width 120")) > 80


@pytest.mark.parametrize("command", ["", "draw", "compare", "search", "convert", "demo"])
@pytest.mark.parametrize("columns", [60, 100])
def test_help_wraps_and_explains_every_option(command, columns, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(columns))
    with pytest.raises(SystemExit):
        main([*command.split(), "--help"])
    text = capsys.readouterr().out
    long = [
        line
        for line in text.splitlines()
        if len(line) > columns and not line.startswith("  funcpipe ")
    ]
    assert [] == long
    options = re.findall(r"^  (-\S+(?: [^ a-z]\S*)*)(?:  +(\S.*))?\n( {20,}\S)?", text, flags=re.M)
    assert options
    assert [] == [option for option, words, below in options if not words and not below]


def test_a_search_shows_its_progress_on_a_terminal(terminal):
    """And nowhere else, if it is not asked for; what it finds is the same."""
    words = f"{SEARCH} --device-memory 5 --evaluations 60"
    out, err = terminal()
    main(shlex.split(words))
    assert "search: done, " in err.getvalue()
    quiet, nothing = terminal()
    main(shlex.split(f"{words} --no-progress"))
    assert (out.getvalue(), "") == (quiet.getvalue(), nothing.getvalue())


def test_progress_is_shown_anywhere_if_asked_for(capsys):
    for words in (f"{SEARCH} --evaluations 30", "compare --stages 4 --microbatches 4 --search 30"):
        main(shlex.split(f"{words} --progress"))
        assert capsys.readouterr().err.splitlines()[-1].startswith("search: done, ")


def test_ctrl_c_is_one_message(capsys, monkeypatch):
    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("funcpipe._src.search.search.climb", interrupted)
    with pytest.raises(SystemExit) as left:
        main(shlex.split(f"{SEARCH} --device-memory 5"))
    assert 130 == left.value.code
    assert ("", "funcpipe: interrupted\n") == capsys.readouterr()


def test_the_demo_distributed_is_the_demo_with_two_processes(monkeypatch):
    heard: list[demo.DemoOptions] = []
    monkeypatch.setattr(demo, "main", heard.append)
    for words in ("demo", "demo --distributed", "demo --processes 2"):
        main(words.split())
    alone, distributed, two = heard
    assert (1, 2) == (alone.processes, distributed.processes)
    assert two == distributed


def test_slices(capsys):
    """Of families that have them; a search takes them too."""
    text = shown(capsys, "draw 1f1b --stages 2 --microbatches 2 --slices 3 --width 120")
    assert "1F1B, 3 slices" in text
    said = facts(shown(capsys, "search --devices 2 --microbatches 2 --slices 3 --evaluations 30"))
    assert said["lower bound"].endswith("nothing shorter exists")
    assert "zbv does not support slices: leave out --slices" in refused(
        capsys, "draw zbv --stages 4 --microbatches 2 --slices 2"
    )
