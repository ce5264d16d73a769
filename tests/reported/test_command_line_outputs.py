"""The command line raises an error for outputs that it cannot write, before any work."""

from __future__ import annotations

import pytest

import funcpipe as fp
from funcpipe import cli
from funcpipe._src.cli import demo, words


@pytest.fixture
def no_work(monkeypatch, tmp_path):
    """Make searches, simulations and training fail."""

    def work(*args, **options):
        raise AssertionError("work was begun")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(fp, "search", work)
    monkeypatch.setattr(fp, "simulate", work)
    return tmp_path


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--slices 2 --output x.csv", "no slices: leave out --slices, or write a .json file"),
        ("--remat --slices 2 --output x.csv", "leave out --remat and --slices"),
        ("--offload --output x.csv", "leave out --offload"),
        ("--output x.png", "x.png does not end in .json"),
        ("--output x", "x does not end in"),
        ("--output missing/x.json", "there is no folder missing"),
        ("--output folder.json", "it is a folder"),
        (f"--output {'x' * 5000}.json", "cannot be written"),
        ("--output link.json", "link.json cannot be written: there is no folder"),
    ],
)
def test_search_refuses_before_it_searches(words, says, no_work, capsys):
    (no_work / "folder.json").mkdir()
    (no_work / "link.json").symlink_to("missing/there.json")
    before = sorted(no_work.iterdir())
    with pytest.raises(SystemExit) as error:
        cli.main(["search", "--devices", "2", "--microbatches", "4", *words.split()])
    assert 2 == error.value.code
    assert says in capsys.readouterr().err
    assert before == sorted(no_work.iterdir())


@pytest.mark.parametrize(
    "words",
    ["--output missing/x.svg", "--output x.json", "--trace x.svg", "--trace missing/x.json"],
)
def test_draw_refuses_before_it_simulates(words, no_work, capsys):
    with pytest.raises(SystemExit):
        cli.main(["draw", "1f1b", "--stages", "2", "--microbatches", "2", *words.split()])
    assert "x." in capsys.readouterr().err


def test_an_output_with_slices_is_written_where_it_can_be(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = "search --devices 2 --microbatches 2 --slices 2 --evaluations 20 --output x.json"
    assert 0 == cli.main(words.split())
    capsys.readouterr()
    assert 2 == fp.schedules.from_json((tmp_path / "x.json").read_text()).num_slices


def test_a_file_that_exists_is_left_as_it_is_until_it_is_written(tmp_path):
    file = tmp_path / "x.json"
    file.write_text("old")
    assert "" == words.unwritable(str(file))
    assert "old" == file.read_text()
    assert "" == words.unwritable(str(tmp_path / "new.json"))
    assert [file] == [*tmp_path.iterdir()]


@pytest.mark.parametrize("option", ["report", "trace"])
def test_the_demo_refuses_before_it_trains(option, tmp_path):
    with pytest.raises(fp.FuncpipeError, match="there is no folder"):
        demo.main(demo.DemoOptions(**{option: str(tmp_path / "missing" / "x.json")}))
