"""The command line: look at schedules, compare them, search for them, convert them; and the demo."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import funcpipe as fp
from funcpipe.cli_words import (
    COST,
    FAMILIES,
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
)  # fmt: skip
from funcpipe.core.result import NEGLIGIBLE, imbalance_of, percent

_SCHEDULES = (".json", ".csv", ".txt")
_COLUMNS: dict[str, Callable[[fp.Timeline], str]] = {
    "makespan": lambda timeline: f"{timeline.makespan:.6g}",
    "bubble": lambda timeline: percent(timeline.bubble),
    "span bubble": lambda timeline: percent(timeline.span_bubble),
    "idle": lambda timeline: percent(timeline.idle),
    "imbalance": lambda timeline: percent(timeline.imbalance),
    "peak memory": lambda timeline: f"{max(timeline.peak):.6g}",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        argv: the words after ``funcpipe``; None: those of the process.

    Returns:
        The exit status: 0, or 1 where the reader of the output has left.

    Raises:
        SystemExit: with 2 where the words make no sense or a file cannot be read or written, after one message.
    """
    parser = _parser()
    given = vars(parser.parse_args(argv))
    del given["command"]
    run = given.pop("run")
    try:
        run(**given)
        sys.stdout.flush()
    except BrokenPipeError:  # `funcpipe draw ... | head`
        with suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes once more when it ends
        return 1
    except (fp.FuncpipeError, OSError, UnicodeError) as error:
        parser.exit(2, f"funcpipe: {error}\n")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="funcpipe",
        description="Pipeline-parallel training as pure functions. Schedules are data: look at them before any GPU runs.",
        epilog="funcpipe COMMAND --help explains a command, with examples.",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, run: Callable[..., None], words: str, more: str) -> argparse.ArgumentParser:
        made = commands.add_parser(name, help=words, description=words[0].upper() + words[1:] + ".", epilog=more,
                                   formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
        made.set_defaults(run=run)
        return made

    one = command("draw", _draw, "draw a schedule: who does what when", f"""\
{SOURCE}            a .json may also hold a timeline, fp.to_json(result.timeline)

{COST}
examples:
  funcpipe draw 1f1b --stages 4 --microbatches 8
  funcpipe draw zero-bubble --stages 4 --microbatches 8 --cost forward=1,backward=2,comm=0.1 --output zb.svg
  funcpipe draw schedule.csv --width 100
""")  # fmt: skip
    one.add_argument("schedule", metavar="SCHEDULE", help="a family or a file; see below")
    _counts(one)
    _cost(one)
    _width(one)
    one.add_argument("--output", metavar="FILE", help="write the picture instead: .svg or .txt")
    one.add_argument("--trace", metavar="FILE", help="also write a .json trace, to zoom into at ui.perfetto.dev")

    many = command("compare", _compare, "compare all families: makespan, bubble, idle, peak memory, legal or not", f"""\
All run the same stages on the same devices; by default two stages a device where the number of stages is even, since
the interleaved families need several. The best makespan comes first.
  bubble       share of the makespan in which the busiest device waits: what the schedule loses
  span bubble  the same where batches follow each other: of the longest time from a device's first start to its last end
  idle         share of all device time of one batch: what the schedule and unequal work lose together
  imbalance    1 - mean work / most work of a device, shown where it is not negligible: the most that fp.balance wins at
               the same bubble; 1 - idle = (1 - bubble) (1 - imbalance)
  peak memory  the most that any device holds, in the unit of `residual`

{COST}
examples:
  funcpipe compare --stages 8 --microbatches 32
  funcpipe compare --stages 8 --microbatches 32 --cost forward=1,backward=2,comm=0.1 --device-memory 20
  funcpipe compare mine.json --stages 8 --microbatches 32 --devices 4 --cost profiled.json
  funcpipe compare --stages 8 --microbatches 12 --device-memory 6 --search 200
""")  # fmt: skip
    many.add_argument("files", nargs="*", metavar="FILE", help=f"more schedules: {SUFFIXES}")
    _counts(many, required=True)
    _cost(many)
    many.add_argument("--device-memory", type=as_positive, metavar="LIMIT", help="of a device, in the unit of residual")
    many.add_argument("--search", type=as_count, metavar="N", help="also what `search` finds, timing N schedules; "
                      "with --remat it may compute residuals again, the families always do")  # fmt: skip

    _search_words(command)

    into = command("convert", _convert, "write a schedule in another format", f"""\
{SOURCE}FILE's ending says the format, as above. torch's CSV is for a rank each; load it with
_PipelineScheduleRuntime(...)._load_csv(FILE), or name it in torchtitan's pipeline_parallel_schedule_csv.

examples:
  funcpipe convert interleaved --stages 8 --microbatches 16 --devices 4 torch.csv
  funcpipe convert torch.csv schedule.json
""")  # fmt: skip
    into.add_argument("schedule", metavar="SCHEDULE", help="a family or a file; see below")
    into.add_argument("file", metavar="FILE", help="what to write: .json, .csv or .txt")
    _counts(into)

    from funcpipe import demo

    show = command("demo", lambda **words: _demo(demo, words), "train a small U-Net on scikit-learn's digits through a "
                   "pipeline, draw its timeline, prove its numbers", "")  # fmt: skip
    demo.arguments(show)
    return parser


def _search_words(command: Callable[..., argparse.ArgumentParser]) -> None:
    find = command("search", _search, "search a schedule: short, for your costs, within a memory limit", f"""\
First every family is timed, then greedy schedules, then rules and single actions are improved step by step; with
--exact, a solver proves at the end. Said is
  makespan     of one isolated batch; span: the longest device from its first start to its last end, the cost of one
               of many batches that follow each other. --objective says which one is made short
  lower bound  no schedule for these costs, devices and limits takes less
  ended by     bound: nothing is left to find; evaluations; or seconds, then another run may find another schedule

{COST}
examples:
  funcpipe search --devices 4 --microbatches 8 --cost forward=5,backward_input=6,backward_weight=4,comm=1
  funcpipe search --devices 4 --stages 8 --microbatches 8 --device-memory 5 --evaluations 500 --output found.json
  funcpipe search --devices 3 --microbatches 4 --device-memory 2 --exact
  funcpipe search --devices 4 --microbatches 8 --device-memory 2 --remat --evaluations 500 --output found.svg
  funcpipe search --devices 4 --microbatches 8 --device-memory 8 --objective span --output torch.csv
""")  # fmt: skip
    find.add_argument("--devices", type=as_count, metavar="D", required=True, help="how many devices")
    find.add_argument("--microbatches", type=as_count, metavar="M", required=True, help="how many microbatches")
    find.add_argument("--stages", type=as_count, metavar="S", help="default: as the cost or the placement says, or D")
    _cost(find)
    find.add_argument("--device-memory", type=as_limits, metavar="LIMIT",
                      help="of a device, in the unit of residual, or of each: 4,4,3")  # fmt: skip
    find.add_argument("--placement", type=as_placement, metavar="SHAPE", help="line (neighbours on each device), loop "
                      "(stage s on device s mod D), v (down the devices and back up), or the device of each stage: "
                      "0,1,1,0; default: whichever is best")  # fmt: skip
    find.add_argument("--remat", action="store_true", help="residuals may be computed again")
    find.add_argument("--offload", action="store_true", help="residuals may be moved to the host and back")
    find.add_argument("--objective", choices=("makespan", "span"), default="makespan", help="default: makespan")
    find.add_argument("--exact", action="store_true", help="let OR-Tools (extra `solve`) find the shortest of all and "
                      "prove it, for what is left of --seconds; for up to about 4 devices and 8 microbatches")  # fmt: skip
    find.add_argument("--evaluations", type=as_count, metavar="N", default=10_000,
                      help="time at most so many schedules; default: 10000")  # fmt: skip
    find.add_argument("--seconds", type=as_positive, metavar="S", default=30.0, help="at most so long; default: 30")
    find.add_argument("--seed", type=as_index, metavar="N", default=0, help="of the random changes; default: 0")
    _width(find)
    find.add_argument("--output", metavar="FILE", help="also write the schedule (.json, .csv of "
                      "torch.distributed.pipelining, .txt) or the picture (.svg)")  # fmt: skip


def _counts(parser: argparse.ArgumentParser, *, required: bool = False) -> None:
    """The options that a family is made from."""
    parser.add_argument("--stages", type=as_count, metavar="S", required=required, help="how many stages")
    parser.add_argument("--microbatches", type=as_count, metavar="M", required=required, help="how many microbatches")
    parser.add_argument("--devices", type=as_count, metavar="D", help="how many devices")
    parser.add_argument("--remat", action="store_true", help="compute every residual again instead of holding it")


def _cost(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--cost", type=as_cost, metavar="COST", help="what actions cost: name=number,... or a JSON file; see below"
    )


def _width(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--width", type=as_count, metavar="COLUMNS", help="of the text; default: the terminal's")


def _draw(*, cost: fp.Cost | None, width: int | None, output: str | None, trace: str | None, **words: Any) -> None:
    _wide(width)
    if output is not None:
        writable(output, (".svg", ".txt"))
    if trace is not None:
        writable(trace, (".json",))
    found = source(**words)
    if isinstance(found, fp.Timeline) and cost is not None:
        raise fp.FuncpipeError(f"{words['schedule']} is a timeline: it has its times, leave out --cost")
    timeline = found if isinstance(found, fp.Timeline) else fp.simulate(found, cost or fp.Cost())
    if output is None:
        _show(timeline, width)
    else:
        fp.draw(timeline).save(output)
    if trace is not None:
        timeline.to_chrome_trace(trace)


def _compare(*, files: list[str], stages: int, microbatches: int, devices: int | None, remat: bool,
             cost: fp.Cost | None, device_memory: float | None, search: int | None) -> None:  # fmt: skip
    bounded(stages, microbatches)
    cost = cost or fp.Cost()
    cost.check_stages(stages)
    mine = [(file, read(file)) for file in files]
    devices = devices or (stages // 2 if stages % 2 == 0 else stages)
    rows: list[tuple[float, fp.Timeline | None, str, str]] = []

    def row(name: str, make: Callable[[], fp.Schedule | fp.Timeline | fp.Found]) -> None:
        try:
            made = make()
            found = (
                made.timeline
                if isinstance(made, fp.Found)
                else _timed(made, (stages, microbatches, devices), remat, cost)
            )
        except fp.ScheduleError as error:
            rows.append((float("inf"), None, name, f"no: {line(error)}"))
            return
        peak = max(found.peak)
        fits = device_memory is None or peak <= device_memory * (1 + 1e-9)
        verdict = f"yes{f', {_proof(made)}' if isinstance(made, fp.Found) else ''}"
        says = verdict if fits else f"no: needs {peak:g}, a device has {device_memory:g}"
        rows.append((found.makespan if fits else float("inf"), found, name, says))

    for name, family in FAMILIES.items():
        row(name, lambda family=family: family(stages, microbatches, num_devices=devices))
    for file, schedule in mine:
        row(file, lambda schedule=schedule: schedule)
    if search is not None:
        row("search", lambda: fp.search(cost, num_devices=devices, num_microbatches=microbatches, num_stages=stages,
                                        memory_limit=device_memory, remat=remat, evaluations=search,
                                        seconds=float("inf")))  # fmt: skip
    rows.sort(key=lambda one: one[0])
    print(f"{stages} stages on {devices} devices, {microbatches} microbatches{', remat' * remat}\n")
    unequal = any(found is not None and found.imbalance >= NEGLIGIBLE for _, found, _, _ in rows)
    heads = [head for head in _COLUMNS if unequal or head != "imbalance"]
    cells = (
        (name, *("-" if found is None else _COLUMNS[head](found) for head in heads), says)
        for _, found, name, says in rows
    )
    print(_table([("schedule", *heads, "legal"), *cells]))
    if unequal:
        print("\nimbalance: the most that fp.balance wins at the same bubble")


def _timed(made: fp.Schedule | fp.Timeline, counts: tuple[int, int, int], remat: bool, cost: fp.Cost) -> fp.Timeline:
    """A schedule by the clock. Raises ScheduleError where it is none for these stages, microbatches and devices."""
    if isinstance(made, fp.Timeline):
        raise fp.ScheduleError("is a timeline, not a schedule")
    if (made.num_stages, made.num_microbatches) != counts[:2]:
        raise fp.ScheduleError(f"has {made.num_stages} stages, {made.num_microbatches} microbatches")
    if made.num_devices != counts[2]:
        raise fp.ScheduleError(f"has {made.num_devices} devices")
    return fp.simulate(fp.remat(made) if remat else made, cost)


def _search(*, devices: int, microbatches: int, stages: int | None, cost: fp.Cost | None,
            device_memory: float | tuple[float, ...] | None, placement: str | tuple[int, ...] | None, remat: bool,
            offload: bool, objective: Literal["makespan", "span"], exact: bool, evaluations: int, seconds: float,
            seed: int, width: int | None, output: str | None) -> None:  # fmt: skip
    _wide(width)
    bounded(stages or 2 * devices, microbatches)
    if output is not None:
        writable(output, (*_SCHEDULES, ".svg"))
        if Path(output).suffix.lower() == ".csv" and (remat or offload):
            raise fp.FuncpipeError(
                "torch's schedules have no R, O or L: leave out --remat and --offload, or write .json"
            )
    found = fp.search(cost or fp.Cost(), num_devices=devices, num_microbatches=microbatches, num_stages=stages,
                      memory_limit=device_memory, placement=placement, remat=remat, offload=offload,
                      objective=objective, exact=exact, evaluations=evaluations, seconds=seconds, seed=seed)  # fmt: skip
    _tell(found)
    _show(found.timeline, width)
    if output is not None:
        if Path(output).suffix.lower() in _SCHEDULES:
            _write(found.schedule, output)
        else:
            fp.draw(found.timeline).save(output)


def _tell(found: fp.Found) -> None:
    """What a search found, a fact a line."""
    schedule, timeline = found.schedule, found.timeline
    print(f"{schedule.num_stages} stages on {schedule.num_devices} devices, {schedule.num_microbatches} microbatches\n")
    if schedule.num_stages > schedule.num_devices:
        print(f"placement    {','.join(map(str, schedule.device_of))}")
    print(f"source       {found.source}")
    print(f"makespan     {found.makespan:.6g}, bubble {percent(timeline.bubble)}")
    print(f"span         {found.span:.6g}, bubble {percent(timeline.span_bubble)}")
    print("idle         " + ", ".join(filter(None, (percent(timeline.idle), imbalance_of(timeline)))))
    print(f"peak memory  {max(found.peak):.6g}")
    print(f"lower bound  {found.lower_bound:.6g} of the {found.objective}: {_proof(found)}")
    again = "; another run may find another" * (found.ended == "seconds")
    print(f"ended by     {found.ended}, {found.evaluations} schedules timed{again}\n")


def _proof(found: fp.Found) -> str:
    return f"at most {found.gap:.2%} above the shortest" if found.gap else "nothing shorter exists"


def _convert(*, file: str, **words: Any) -> None:
    writable(file, _SCHEDULES)
    schedule = source(**words)
    if isinstance(schedule, fp.Timeline):
        raise fp.FuncpipeError(f"{words['schedule']} is a timeline; convert takes a schedule")
    _write(schedule, file)


def _write(schedule: fp.Schedule, file: str) -> None:
    """The schedule into a file; its ending says the format."""
    match Path(file).suffix.lower():
        case ".json":
            text = fp.to_json(schedule) + "\n"
        case ".csv":
            text = fp.to_torch_csv(schedule)
        case _:
            text = f"{schedule}\n"
    Path(file).write_text(text, encoding="utf-8", newline="\n")


def _demo(demo: Any, words: dict[str, Any]) -> None:
    demo.main(demo.Options(**{**words, "remat": None if words["remat"] is None else tuple(words["remat"])}))


def _wide(width: int | None) -> None:
    if width is not None and width < 40:
        raise fp.FuncpipeError(f"--width is at least 40 columns; got {width}")


def _show(timeline: fp.Timeline, width: int | None) -> None:
    """Draw on the terminal."""
    print(fp.draw(timeline).text(width, color=sys.stdout.isatty() and "NO_COLOR" not in os.environ))


def _table(rows: Sequence[Sequence[str]]) -> str:
    """Columns as wide as they need; numbers to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(
            [row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:-1], widths[1:-1], strict=True)), row[-1]]
        )
        for row in rows
    )
