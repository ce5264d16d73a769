"""The command line: draw, compare, search and convert schedules, and run the demo.

This file has the commands and their options. `_src/cli/words.py` parses arguments,
`_src/cli/show.py` prints results.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch

import funcpipe as fp
from funcpipe._src.cli.show import COLUMNS, found, picture, wrapped
from funcpipe._src.cli.words import (
    COST,
    FAMILIES,
    FORMATS,
    SOURCE,
    SUFFIXES,
    as_cost,
    as_count,
    as_index,
    as_limits,
    as_placement,
    as_positive,
    bounded,
    line,
    read,
    source,
    writable,
)
from funcpipe._src.core.progress import gap_words
from funcpipe._src.core.table import Table
from funcpipe._src.data.result import NEGLIGIBLE


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command of the command line.

    Args:
        argv: the words after ``funcpipe``. None: the arguments of the process.

    Returns:
        The exit status: 0, or 1 if the reader of the output has closed the pipe.

    Raises:
        SystemExit: after one message. With status 2 for wrong arguments, or files that cannot be
            read or written; with status 130 after Ctrl-C.
    """
    parser = _parser()
    words = vars(parser.parse_args(argv))
    del words["command"]
    run = words.pop("run")
    try:
        run(**words)
        sys.stdout.flush()
    except BrokenPipeError:  # `funcpipe draw ... | head`
        with suppress(OSError, ValueError):
            # Python flushes stdout once more at its end, and would print another error.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (fp.FuncpipeError, OSError, UnicodeError) as error:
        parser.exit(2, f"funcpipe: {error}\n")
    except KeyboardInterrupt:
        parser.exit(130, "funcpipe: interrupted\n")
    return 0


def _parser() -> argparse.ArgumentParser:
    from funcpipe._src.cli import demo

    parser = argparse.ArgumentParser(
        prog="funcpipe",
        description="Pipeline-parallel training as pure functions. Schedules are data: look at "
        "them before any GPU runs.",
        epilog="funcpipe COMMAND --help explains a command, with examples.",
    )
    version = f"funcpipe {fp.__version__} (torch {torch.__version__})"
    parser.add_argument("--version", action="version", version=version)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    compared = "compare all families: makespan, bubble, idle, peak memory, legal or not"
    searched = "search for a short schedule, for your costs and a memory limit"
    shown = (
        "train a small U-Net on scikit-learn's digits through a pipeline, draw its timeline, "
        "check its numbers"
    )
    for name, run, about, epilog, options in (
        ("draw", _draw, "draw the timeline of a schedule", _DRAW_HELP, _DRAW),
        ("compare", _compare, compared, _COMPARE_HELP, _COMPARE),
        ("search", _search, searched, _SEARCH_HELP, _SEARCH),
        ("convert", _convert, "write a schedule in another format", _CONVERT_HELP, _CONVERT),
        ("demo", lambda **words: demo.main(demo.DemoOptions(**words)), shown, "", demo.OPTIONS),
    ):
        command = commands.add_parser(
            name,
            help=about,
            description=wrapped(about[0].upper() + about[1:] + "."),
            epilog=wrapped(epilog),
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.set_defaults(run=run)
        for option, settings in options.items():
            command.add_argument(option, **settings)
    return parser


_DRAW_HELP = f"""\
{SOURCE}
{COST}
examples:
  funcpipe draw 1f1b --stages 4 --microbatches 8
  funcpipe draw zero-bubble --stages 4 --microbatches 8 --cost forward=1,backward=2,comm=0.1 --output zb.svg
  funcpipe draw schedule.csv --width 100
"""
_COMPARE_HELP = f"""\
All schedules have the same counts of stages, devices and microbatches. By default these are the counts of the first
FILE. Without a file there are two stages per device if the number of stages is even, because the interleaved families
need several. The best makespan comes first.
  bubble       share of the makespan in which the busiest device waits: the loss by the schedule
  span bubble  the bubble if batches follow each other: the share of the longest time from a device's first start to
               its last end
  idle         share of all device time of one batch without work: the loss by the schedule and by unequal work
  imbalance    1 - mean work / most work of a device, shown if it is not negligible: the share of the
               makespan that equal work on all devices would save at the same bubble (fp.models.balance);
               1 - idle = (1 - bubble) (1 - imbalance)
  peak memory  the most memory of any device, in the unit of `residual`

{COST}
examples:
  funcpipe compare --stages 8 --microbatches 32
  funcpipe compare --stages 8 --microbatches 32 --cost forward=1,backward=2,comm=0.1 --device-memory 20
  funcpipe compare mine.json --cost profiled.json
  funcpipe compare --stages 8 --microbatches 12 --device-memory 6 --search 200
"""
_SEARCH_HELP = f"""\
The search simulates all families, then improves rules and single actions step by step. With --exact, a solver then
looks for a proof. The output has
  makespan     the end of one isolated batch
  span         the longest time from a device's first start to its last end: the time per batch if batches follow each
               other. Shown if it is not the makespan. --objective selects the one to minimize
  lower bound  no schedule for these costs, devices and limits is shorter
  ended by     bound: no shorter schedule exists; evaluations; or seconds: another run may find another schedule

{COST}
examples:
  funcpipe search --devices 4 --microbatches 8 --cost forward=5,backward_input=6,backward_weight=4,comm=1
  funcpipe search --devices 4 --stages 8 --microbatches 8 --device-memory 5 --evaluations 500 --output found.json
  funcpipe search --devices 3 --microbatches 4 --device-memory 2 --exact
  funcpipe search --devices 4 --microbatches 8 --device-memory 2 --remat --evaluations 500 --output found.svg
  funcpipe search --devices 4 --microbatches 8 --device-memory 8 --objective span --output torch.csv
"""
_CONVERT_HELP = f"""\
{SOURCE}The ending of FILE selects the format, as above. torch's CSV has a row for each rank. Load it with
_PipelineScheduleRuntime(...)._load_csv(FILE), or name it in torchtitan's pipeline_parallel_schedule_csv.

examples:
  funcpipe convert interleaved --stages 8 --microbatches 16 --devices 4 torch.csv
  funcpipe convert torch.csv schedule.json
"""

_IMBALANCE = (
    "imbalance: the share of the makespan that equal work on all devices would save at the same "
    "bubble (fp.models.balance)"
)

OptionTable: TypeAlias = Mapping[str, Mapping[str, Any]]
"""The keywords of `argparse` for each option."""


def _value(
    metavar: str, help: str, parse: Callable[[str], Any] = str, **settings: Any
) -> Mapping[str, Any]:
    """Return the keywords of an option with a value."""
    return {"metavar": metavar, "help": help, "type": parse, **settings}


def _flag(help: str) -> Mapping[str, Any]:
    """Return the keywords of an option without a value."""
    return {"action": "store_true", "help": help}


_SCHEDULE: OptionTable = {"schedule": _value("SCHEDULE", "a family or a file; see below")}
_COUNTS: OptionTable = {
    "--stages": _value("S", "the number of stages", as_count),
    "--microbatches": _value("M", "the number of microbatches", as_count),
    "--devices": _value("D", "the number of devices", as_count),
    "--slices": _value(
        "K", "the number of slices of each microbatch, along its sequence", as_count
    ),
    "--remat": _flag("recompute every residual instead of keeping it"),
}
_COST: OptionTable = {
    "--cost": _value(
        "COST", "the costs of actions: name=number,... or a JSON file; see below", as_cost
    )
}
_WIDTH: OptionTable = {
    "--width": _value(
        "COLUMNS", "the width of the text; default: the width of the terminal", as_count
    )
}
_PROGRESS: OptionTable = {
    "--progress": {
        "action": argparse.BooleanOptionalAction,
        "help": "show the progress of the search on stderr; default: if that is a terminal",
    }
}
_DRAW: OptionTable = {
    **_SCHEDULE,
    **_COUNTS,
    **_COST,
    **_WIDTH,
    "--output": _value("FILE", "write the picture instead: .svg or .txt"),
    "--trace": _value("FILE", "also write a .json trace, to zoom into at ui.perfetto.dev"),
}
_COMPARE: OptionTable = {
    "files": _value("FILE", f"more schedules: {SUFFIXES}", nargs="*"),
    **{name: _COUNTS[name] for name in ("--stages", "--microbatches", "--devices", "--remat")},
    **_COST,
    "--device-memory": _value(
        "LIMIT", "the memory of a device, in the unit of residual", as_positive
    ),
    "--search": _value(
        "N",
        "also show the result of `search` with N schedules; with --remat the search may "
        "recompute residuals, the families always do",
        as_count,
    ),
    **_PROGRESS,
}
_SEARCH: OptionTable = {
    "--devices": {**_COUNTS["--devices"], "required": True, "dest": "num_devices"},
    "--microbatches": {**_COUNTS["--microbatches"], "required": True, "dest": "num_microbatches"},
    "--stages": _value(
        "S",
        "the number of stages; default: from the cost or the placement, or D",
        as_count,
        dest="num_stages",
    ),
    "--slices": {**_COUNTS["--slices"], "dest": "num_slices", "default": 1},
    **_COST,
    "--device-memory": _value(
        "LIMIT",
        "the memory of a device, in the unit of residual, or of each device: 4,4,3",
        as_limits,
        dest="memory_limit",
    ),
    "--placement": _value(
        "SHAPE",
        "line (neighbours on each device), loop (stage s on device s mod D), v (down the "
        "devices and back up), or the device of each stage: 0,1,1,0; default: try all",
        as_placement,
    ),
    "--remat": _flag("allow to recompute residuals"),
    "--offload": _flag("allow to move residuals to the host and back"),
    "--objective": {
        "choices": ("makespan", "span"),
        "default": "makespan",
        "help": "default: makespan",
    },
    "--exact": _flag(
        "let OR-Tools (extra `solve`) find the shortest schedule and prove it, in the rest "
        "of --seconds; for up to about 4 devices and 8 microbatches"
    ),
    "--evaluations": _value(
        "N", "the number of schedules to simulate at most; default: 10000", as_count, default=10_000
    ),
    "--seconds": _value("S", "the time limit; default: 30", as_positive, default=30.0),
    "--seed": _value("N", "the seed of the random changes; default: 0", as_index, default=0),
    **_PROGRESS,
    **_WIDTH,
    "--output": _value(
        "FILE",
        "also write the schedule (.json, .csv of torch.distributed.pipelining, .txt) or the "
        "picture (.svg)",
    ),
}
_CONVERT: OptionTable = {
    **_SCHEDULE,
    "file": _value("FILE", "the file to write: .json, .csv or .txt"),
    **_COUNTS,
}


def _draw(
    *, cost: fp.Cost | None, width: int | None, output: str | None, trace: str | None, **words: Any
) -> None:
    _wide(width)
    if output is not None:
        writable(output, (".svg", ".txt"))
    if trace is not None:
        writable(trace, (".json",))
    timeline = fp.simulate(source(**words), cost or fp.Cost())
    if output is None:
        picture(timeline, width)
    else:
        fp.draw(timeline).save(output)
    if trace is not None:
        timeline.to_chrome_trace(trace)


class _Row(NamedTuple):
    """A row of the table: a schedule, its timeline if there is one, and its legality in words."""

    name: str
    timeline: fp.Timeline | None
    legal: str

    @property
    def makespan(self) -> float:
        return (
            self.timeline.makespan
            if self.timeline and self.legal.startswith("yes")
            else float("inf")
        )


def _compare(
    *,
    files: list[str],
    stages: int | None,
    microbatches: int | None,
    devices: int | None,
    remat: bool,
    cost: fp.Cost | None,
    device_memory: float | None,
    search: int | None,
    progress: bool | None,
) -> None:
    loaded = [(file, read(file)) for file in files]
    if loaded:
        own = loaded[0][1]
        stages, microbatches = stages or own.num_stages, microbatches or own.num_microbatches
        devices = devices or own.num_devices
    if not stages or not microbatches:
        raise fp.FuncpipeError("without a FILE, give --stages and --microbatches")
    bounded(stages, microbatches)
    cost = cost or fp.Cost()
    cost.check_stages(stages)
    devices = devices or (stages // 2 if stages % 2 == 0 else stages)
    counts = {"num_devices": devices, "num_microbatches": microbatches, "num_stages": stages}
    makers: list[tuple[str, Callable[[], fp.Schedule | fp.typing.Found]]] = []
    for name, family in FAMILIES.items():
        makers.append((name, partial(family, stages, microbatches, num_devices=devices)))
    makers += [(file, lambda schedule=schedule: schedule) for file, schedule in loaded]
    if search is not None:
        searched = partial(
            fp.search,
            cost,
            **counts,
            remat=remat,
            progress=_shows(progress),
            memory_limit=device_memory,
            evaluations=search,
            seconds=float("inf"),
        )
        makers.append(("search", searched))

    def row(name: str, make: Callable[[], fp.Schedule | fp.typing.Found]) -> _Row:
        try:
            result = make()
            searched = isinstance(result, fp.typing.Found)
            timeline = result.timeline if searched else _timed(result, counts, remat, cost)
        except fp.ScheduleError as error:
            return _Row(name, None, f"no: {line(error)}")
        peak = max(timeline.peak)
        if device_memory is not None and peak > device_memory * (1 + 1e-9):
            return _Row(name, timeline, f"no: needs {peak:g}, a device has {device_memory:g}")
        return _Row(name, timeline, f"yes, {gap_words(result.gap)}" if searched else "yes")

    rows = sorted((row(*maker) for maker in makers), key=lambda row: row.makespan)
    print(f"{stages} stages on {devices} devices, {microbatches} microbatches{', remat' * remat}\n")
    unequal = any(row.timeline is not None and row.timeline.imbalance >= NEGLIGIBLE for row in rows)
    shown = {head: show for head, show in COLUMNS.items() if unequal or head != "imbalance"}
    cells = tuple(
        (name, *("-" if timeline is None else show(timeline) for show in shown.values()), legal)
        for name, timeline, legal in rows
    )
    print(
        Table("Schedules", ("schedule", *shown, "legal"), cells, words=(0, len(shown) + 1)).text()
    )
    if unequal:
        print(f"\n{_IMBALANCE}")


def _timed(
    schedule: fp.Schedule, counts: Mapping[str, int], remat: bool, cost: fp.Cost
) -> fp.Timeline:
    """Simulate a schedule. Raises ScheduleError if its counts differ from the given counts."""
    stages, microbatches = schedule.num_stages, schedule.num_microbatches
    if (stages, microbatches) != (counts["num_stages"], counts["num_microbatches"]):
        raise fp.ScheduleError(f"has {stages} stages, {microbatches} microbatches")
    if schedule.num_devices != counts["num_devices"]:
        raise fp.ScheduleError(f"has {schedule.num_devices} devices")
    return fp.simulate(fp.schedules.remat(schedule) if remat else schedule, cost)


def _shows(progress: bool | None) -> bool:
    return sys.stderr.isatty() if progress is None else progress


def _search(
    *,
    cost: fp.Cost | None,
    width: int | None,
    output: str | None,
    progress: bool | None,
    **options: Any,
) -> None:
    _wide(width)
    bounded(
        options["num_stages"] or 2 * options["num_devices"],
        options["num_microbatches"] * options["num_slices"],
    )
    if output is not None:
        writable(output, (*FORMATS, ".svg"))
        unfit = {
            "--remat": options["remat"],
            "--offload": options["offload"],
            "--slices": options["num_slices"] > 1,
        }
        if Path(output).suffix.lower() == ".csv" and any(unfit.values()):
            given = " and ".join(name for name, on in unfit.items() if on)
            raise fp.FuncpipeError(
                f"torch's schedules have no R, O or L, and no slices: leave out {given}, or write "
                "a .json file"
            )
    result = fp.search(cost or fp.Cost(), progress=_shows(progress), **options)
    found(result)
    picture(result.timeline, width)
    if output is not None:
        if Path(output).suffix.lower() in FORMATS:
            _write(result.schedule, output)
        else:
            fp.draw(result.timeline).save(output)


def _convert(*, file: str, **words: Any) -> None:
    writable(file, FORMATS)
    _write(source(**words), file)


def _write(schedule: fp.Schedule, file: str) -> None:
    """Write a schedule to a file, in the format of the file's ending."""
    match Path(file).suffix.lower():
        case ".json":
            text = fp.schedules.to_json(schedule) + "\n"
        case ".csv":
            text = fp.schedules.to_torch_csv(schedule)
        case _:
            text = f"{schedule}\n"
    Path(file).write_text(text, encoding="utf-8", newline="\n")


def _wide(width: int | None) -> None:
    if width is not None and width < 40:
        raise fp.FuncpipeError(f"--width must be at least 40 columns; got {width}")
