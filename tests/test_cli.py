"""The command line: pictures, the table, files in and out; a mistake is one message and status 2, before any work."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import funcpipe as fp
from funcpipe import demo
from funcpipe.__main__ import main
from funcpipe.cli import FAMILIES

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


# draw


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_drawn(family, capsys):
    found = shown(capsys, f"draw {family} --stages 4 --microbatches 4 --devices 2 --width 100")
    assert fp.draw(FAMILIES[family](4, 4, num_devices=2)).text(100) + "\n" == found


def test_draw_with_costs_and_remat(capsys):
    found = shown(
        capsys, "draw 1f1b --stages 2 --microbatches 3 --remat --cost forward=1,backward=3,comm=0.5 --width 80"
    )
    schedule = fp.remat(fp.one_f_one_b(2, 3))
    cost = fp.Cost(1, 1.5, 1.5, backward=3, comm=0.5)
    assert fp.draw(fp.simulate(schedule, cost)).text(80) + "\n" == found


@pytest.mark.parametrize(("suffix", "begins"), [(".svg", "<svg"), (".html", "<!"), (".txt", "1F1B")])
def test_draw_into_a_file(suffix, begins, capsys):
    assert "" == shown(capsys, f"draw 1f1b --stages 2 --microbatches 3 --output picture{suffix}")
    assert Path(f"picture{suffix}").read_text(encoding="utf-8").startswith(begins)


def test_draw_a_timeline(capsys):
    timeline = fp.simulate(fp.interleaved(4, 3))
    Path("run.json").write_text(fp.to_json(timeline))
    assert fp.draw(timeline).text(90) + "\n" == shown(capsys, "draw run.json --width 90")
    assert "it has its times" in refused(capsys, "draw run.json --cost comm=1")


# compare


def test_compare_shows_every_family_best_first(capsys):
    lines = shown(capsys, "compare --stages 8 --microbatches 32 --cost forward=1,backward=2,comm=0.1").splitlines()
    assert "8 stages on 4 devices, 32 microbatches" == lines[0]
    assert ["schedule", "makespan", "bubble", "peak", "memory", "legal"] == lines[2].split()
    rows = {cells[0]: cells[1:] for cells in map(str.split, lines[3:])}
    assert set(FAMILIES) == set(rows)
    for name, (makespan, bubble, peak, legal) in rows.items():
        timeline = fp.simulate(FAMILIES[name](8, 32, num_devices=4), fp.Cost(backward=2, comm=0.1))
        assert (f"{timeline.makespan:.6g}", f"{timeline.bubble:.1%}") == (makespan, bubble)
        assert (f"{max(timeline.peak):.6g}", "yes") == (peak, legal)
    times = [float(cells[0]) for cells in rows.values()]
    assert sorted(times) == times


def test_compare_says_why_not(capsys):
    rows = shown(capsys, "compare --stages 6 --microbatches 8 --devices 4").splitlines()[3:]
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
    rows = shown(capsys, "compare --stages 4 --microbatches 16 --devices 4 --device-memory 4").splitlines()[3:]
    fits = [row for row in rows if row.endswith("  yes")]
    assert rows[: len(fits)] == fits
    assert 0 < len(fits) < len(rows)
    (row,) = [row for row in rows if row.startswith("fill-drain")]
    assert row.endswith("no: needs 16, a device has 4")


def test_compare_with_ones_own(capsys):
    """Files stand in the table; other counts and illegal ones are said, and nothing else fails for it."""
    Path("mine.json").write_text(fp.to_json(fp.one_f_one_b(2, 3)))
    Path("other.txt").write_text(str(fp.one_f_one_b(2, 4)))
    Path("stuck.csv").write_text("0F0,0B0\n1F0")
    found = shown(capsys, "compare mine.json other.txt stuck.csv --stages 2 --microbatches 3 --devices 2")
    rows = {row.split()[0]: row for row in found.splitlines()[3:]}
    assert rows["mine.json"].split()[1:] == rows["1f1b"].split()[1:]
    assert "no: has 2 stages, 4 microbatches" in rows["other.txt"]
    assert "no: has 2 stages, 1 microbatches" in rows["stuck.csv"]
    found = shown(capsys, "compare stuck.csv --stages 2 --microbatches 1 --devices 2")
    assert "no: 1B0 is missing (or 1I0 and 1W0)" in found


def test_costs_from_a_file(capsys):
    cost = fp.Cost([1, 2], [3, 4], [5, 6])
    Path("cost.json").write_text(fp.to_json(cost))
    found = shown(capsys, "draw 1f1b --stages 2 --microbatches 3 --cost cost.json --width 80")
    assert fp.draw(fp.simulate(fp.one_f_one_b(2, 3), cost)).text(80) + "\n" == found
    assert "one for each of 4 stages" in refused(capsys, "compare --stages 4 --microbatches 4 --cost cost.json")


# convert


@pytest.mark.parametrize("first", ["json", "csv", "txt"])
@pytest.mark.parametrize("second", ["json", "csv", "txt"])
def test_formats_there_and_back(first, second, capsys):
    assert "" == shown(capsys, f"convert interleaved --stages 4 --microbatches 6 --devices 2 a.{first}")
    shown(capsys, f"convert a.{first} b.{second}")
    shown(capsys, f"convert b.{second} c.json")
    found = fp.from_json(Path("c.json").read_text())
    assert fp.interleaved(4, 6, num_devices=2) == found


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
        ("draw 1f1b", "say --stages and --microbatches"),
        ("draw 1F1B --stages 2 --microbatches 2", "did you mean 1f1b?"),
        ("draw one_f_one_b --stages 2 --microbatches 2", "the families are fill-drain"),
        ("draw nothing.json", "No such file"),
        ("draw .", "is no family"),
        ("draw broken.json", "broken.json: this is no JSON"),
        ("draw broken.txt", "broken.txt: write stage"),
        ("draw binary.csv", "decode"),
        ("draw a.json --stages 2", "says its own counts"),
        ("draw cost.json", "it goes to --cost"),
        ("draw a.json --width 39", "at least 40"),
        ("draw a.json --output a.png", "does not end in .svg, .html, .htm or .txt"),
        ("draw a.json --output no/a.svg", "there is no folder no"),
        ("draw stuck.json", "cannot come to its end"),
        ("draw rematted.json --remat", "has R already"),
        ("draw looped-bfs --stages 3 --microbatches 2 --devices 2", "num_devices divides num_stages"),
        ("draw a.json --cost speed=1", "'speed' is no cost; costs are forward"),
        ("draw a.json --cost forward=1,forward=2", "is given twice"),
        ("draw a.json --cost forward=fast", "forward is a number; got 'fast'"),
        ("draw a.json --cost forward=nan", "forward is a number from 0"),
        ("draw a.json --cost forward=-1", "forward is a number from 0"),
        ("draw a.json --cost a.json", "is a Schedule, not a cost"),
        ("draw a.json --cost no.json", "No such file"),
        ("compare --stages 4", "required: --microbatches"),
        ("compare no.json --stages 4 --microbatches 4", "No such file"),
        ("compare --stages 4 --microbatches 4 --device-memory much", "invalid float"),
        ("convert a.json b.yaml", "does not end in .json, .csv or .txt"),
        ("convert a.json no/b.csv", "there is no folder no"),
        ("convert rematted.json b.csv", "it has R"),
        ("convert a.json folder.csv", "Is a directory"),
        ("demo --epochs 0", "--epochs is a whole number from 1; got 0"),
        ("demo --batch 2000", "--batch is at most 1497"),
        ("demo --batch 0", "--batch is a whole number from 1; got 0"),
        ("demo --microbatches 200", "--microbatches is at most --batch; got 200 for 128 rows"),
        ("demo --report no/report.html", "--report no/report.html cannot be written: there is no folder no"),
        ("demo --trace .", "--trace is a file; got '.'"),
        ("demo --remat 0 4", "--remat names stages 0 to 3; got 4"),
        ("demo --remat -1", "--remat names stages 0 to 3; got -1"),
        ("demo --remat x", "invalid int value: 'x'"),
        ("demo --device nowhere", "--device nowhere: "),
        ("demo --devices 5", "num_devices is at most num_stages"),
        ("demo --seed -1", "--seed is a whole number from 0"),
    ],
)
def test_a_mistake_is_one_message(words, says, capsys, monkeypatch):
    """And it comes before any work: no images are read."""
    monkeypatch.setattr(demo, "digits", lambda seed: pytest.fail("the demo began"))
    Path("a.json").write_text(fp.to_json(fp.one_f_one_b(2, 2)))
    Path("rematted.json").write_text(fp.to_json(fp.remat(fp.one_f_one_b(2, 2))))
    Path("stuck.json").write_text(fp.to_json(fp.Schedule.parse("0F0 0B0 0F1 0B1\n1F1 1B1 1F0 1B0")))
    Path("cost.json").write_text(fp.to_json(fp.Cost()))
    Path("broken.json").write_text("{")
    Path("broken.txt").write_text("0F0 zero")
    Path("binary.csv").write_bytes(b"\xff\xfe")
    Path("folder.csv").mkdir()
    before = sorted(Path().iterdir())
    message = refused(capsys, words)
    assert says in message
    assert before == sorted(Path().iterdir())


def test_the_demos_mistakes_come_all_at_once():
    options = demo.Options(epochs=0, batch=0, remat=(9,), report="no/a.html")
    with pytest.raises(fp.FuncpipeError) as caught:
        demo.main(options)
    assert 4 == str(caught.value).count("  * ")


def test_the_demos_own_options_are_sound():
    """With any number of stages."""
    for stages in (1, 2, 4):
        demo.refuse(demo.Options(stages=stages))


# help, pipes, pages


@pytest.mark.parametrize("command", ["draw", "compare", "convert"])
def test_help_teaches_with_examples_that_run(command, capsys):
    """Each example of a help text is a command that works, in a folder with the files that it names."""
    with pytest.raises(SystemExit) as left:
        main([command, "--help"])
    assert 0 == left.value.code
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 120
    examples = re.findall(r"^  funcpipe (.+)$", text.partition("examples:")[2], flags=re.M)
    assert len(examples) >= 2
    Path("schedule.csv").write_text(fp.to_torch_csv(fp.one_f_one_b(2, 2)))
    Path("mine.json").write_text(fp.to_json(fp.interleaved(8, 32, num_devices=4)))
    Path("profiled.json").write_text(fp.to_json(fp.Cost([1.0] * 8)))
    for example in examples:
        shown(capsys, example)


def test_a_reader_that_leaves_is_no_error():
    """``funcpipe ... | head``: nothing on stderr."""
    words = [sys.executable, "-m", "funcpipe", "draw", "1f1b", "--stages", "2", "--microbatches", "2"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT) as process:
        process.stdout.close()
        assert b"" == process.stderr.read()
    assert 1 == process.returncode


def test_the_page_shows_what_is_printed(capsys):
    """docs/howto/command_line.md: each ``sh`` block, and the ``text`` block behind it."""
    page = (ROOT / "docs" / "howto" / "command_line.md").read_text()
    found = re.findall(r"^```sh\n(.*?)^```\n(?:\n```text\n(.*?)^```\n)?", page, flags=re.M | re.S)
    assert len(found) >= 4
    for commands, printed in found:
        out = "".join(shown(capsys, line.removeprefix("python -m funcpipe ")) for line in commands.splitlines())
        assert (printed or "") == out
