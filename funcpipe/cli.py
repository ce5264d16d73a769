"""The command line: look at schedules, compare them, convert them; and the demo."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NoReturn

import funcpipe as fp

FAMILIES: Mapping[str, Callable[..., fp.Schedule]] = {
    "fill-drain": fp.fill_drain,
    "1f1b": fp.one_f_one_b,
    "eager-1f1b": fp.eager_one_f_one_b,
    "looped-bfs": fp.looped_bfs,
    "interleaved": fp.interleaved,
    "zero-bubble": fp.zero_bubble,
    "zb-h2": fp.zb_h2,
    "zbv": fp.zbv,
    "v-half": fp.v_half,
    "v-min": fp.v_min,
    "dualpipe-v": fp.dualpipe_v,
}
_MOST = 10**6
"""Actions of a kind: more are a slip of the fingers, and would take minutes."""
_SUFFIXES = ".json, .csv (of torch.distributed.pipelining) or .txt (a line for each device)"
_SOURCE = f"""\
SCHEDULE is a family, which then needs --stages and --microbatches, or a file.
  families: {", ".join(FAMILIES)}
  files:    {_SUFFIXES}
"""
_COST = """\
Costs are times in one unit of your choice, and memory in another. What is not given is 1; weight_residual .5, comm 0.
  forward, backward_input, backward_weight   time of F, I and W
  backward                                   time of B; given without I and W, these take half of it each
  remat, comm                                time of R (else as F); of one hop between devices
  residual, weight_residual                  memory from F to B or I; what I leaves until W
A file has a number for each stage: {"funcpipe": "cost", "version": 1, "forward": [1, 1, 1, 2]}. What fp.profile
measured goes into one with fp.to_json.
"""


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
{_SOURCE}            a .json may also hold a timeline, fp.to_json(result.timeline)

{_COST}
examples:
  funcpipe draw 1f1b --stages 4 --microbatches 8
  funcpipe draw zero-bubble --stages 4 --microbatches 8 --cost forward=1,backward=2,comm=0.1 --output zb.svg
  funcpipe draw schedule.csv --width 100
""")  # fmt: skip
    one.add_argument("schedule", metavar="SCHEDULE", help="a family or a file; see below")
    _counts(one)
    one.add_argument(
        "--cost", type=_cost, metavar="COST", help="what actions cost: name=number,... or a JSON file; see below"
    )
    one.add_argument("--width", type=_count, metavar="COLUMNS", help="of the text; default: the terminal's")
    one.add_argument("--output", metavar="FILE", help="write the picture instead: .svg, .html or .txt")

    many = command("compare", _compare, "compare all families: makespan, bubble, peak memory, legal or why not", f"""\
All run the same stages on the same devices; by default two stages a device where the number of stages is even, since
the interleaved families need several. The best makespan comes first.
  bubble       idle share of one isolated batch, 1 - work / makespan
  peak memory  the most that any device holds in residuals, in the unit of `residual`

{_COST}
examples:
  funcpipe compare --stages 8 --microbatches 32
  funcpipe compare --stages 8 --microbatches 32 --cost forward=1,backward=2,comm=0.1 --device-memory 20
  funcpipe compare mine.json --stages 8 --microbatches 32 --devices 4 --cost profiled.json
""")  # fmt: skip
    many.add_argument("files", nargs="*", metavar="FILE", help=f"more schedules: {_SUFFIXES}")
    _counts(many, required=True)
    many.add_argument(
        "--cost", type=_cost, metavar="COST", help="what actions cost: name=number,... or a JSON file; see below"
    )
    many.add_argument("--device-memory", type=float, metavar="LIMIT", help="of a device, for residuals, in their unit")

    into = command("convert", _convert, "write a schedule in another format", f"""\
{_SOURCE}FILE's ending says the format, as above. torch's CSV is for a rank each; load it with
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


def _counts(parser: argparse.ArgumentParser, *, required: bool = False) -> None:
    """The options that a family is made from."""
    parser.add_argument("--stages", type=_count, metavar="S", required=required, help="how many stages")
    parser.add_argument("--microbatches", type=_count, metavar="M", required=required, help="how many microbatches")
    parser.add_argument("--devices", type=_count, metavar="D", help="how many devices")
    parser.add_argument("--remat", action="store_true", help="compute every residual again instead of holding it")


def _draw(*, cost: fp.Cost | None, width: int | None, output: str | None, **source: Any) -> None:
    if width is not None and width < 40:
        raise fp.FuncpipeError(f"--width is at least 40 columns; got {width}")
    if output is not None:
        _writable(output, (".svg", ".html", ".htm", ".txt"))
    found = _source(**source)
    if isinstance(found, fp.Timeline) and cost is not None:
        raise fp.FuncpipeError(f"{source['schedule']} is a timeline: it has its times, leave out --cost")
    drawing = fp.draw(found if isinstance(found, fp.Timeline) else fp.simulate(found, cost or fp.Cost()))
    if output is None:
        print(drawing.text(width, color=sys.stdout.isatty() and "NO_COLOR" not in os.environ))
    else:
        drawing.save(output)


def _compare(*, files: list[str], stages: int, microbatches: int, devices: int | None, remat: bool,
             cost: fp.Cost | None, device_memory: float | None) -> None:  # fmt: skip
    _bounded(stages, microbatches)
    cost = cost or fp.Cost()
    cost.check_stages(stages)
    mine = [(file, _read(file)) for file in files]
    devices = devices or (stages // 2 if stages % 2 == 0 else stages)
    rows: list[tuple[float, tuple[str, str, str, str, str]]] = []

    def row(name: str, make: Callable[[], fp.Schedule | fp.Timeline]) -> None:
        try:
            schedule = make()
            if isinstance(schedule, fp.Timeline):
                raise fp.ScheduleError("is a timeline, not a schedule")
            if (schedule.num_stages, schedule.num_microbatches) != (stages, microbatches):
                raise fp.ScheduleError(f"has {schedule.num_stages} stages, {schedule.num_microbatches} microbatches")
            if schedule.num_devices != devices:
                raise fp.ScheduleError(f"has {schedule.num_devices} devices")
            found = fp.simulate(fp.remat(schedule) if remat else schedule, cost)
        except fp.ScheduleError as error:
            rows.append((float("inf"), (name, "-", "-", "-", f"no: {_line(error)}")))
            return
        peak = max(found.peak)
        fits = device_memory is None or peak <= device_memory
        verdict = "yes" if fits else f"no: needs {peak:g}, a device has {device_memory:g}"
        numbers = (f"{found.makespan:.6g}", f"{found.bubble:.1%}", f"{peak:.6g}")
        rows.append((found.makespan if fits else float("inf"), (name, *numbers, verdict)))

    for name, family in FAMILIES.items():
        row(name, lambda family=family: family(stages, microbatches, num_devices=devices))
    for file, schedule in mine:
        row(file, lambda schedule=schedule: schedule)
    rows.sort(key=lambda one: one[0])
    print(f"{stages} stages on {devices} devices, {microbatches} microbatches{', remat' * remat}\n")
    print(_table([("schedule", "makespan", "bubble", "peak memory", "legal"), *(cells for _, cells in rows)]))


def _convert(*, file: str, **source: Any) -> None:
    _writable(file, (".json", ".csv", ".txt"))
    schedule = _source(**source)
    if isinstance(schedule, fp.Timeline):
        raise fp.FuncpipeError(f"{source['schedule']} is a timeline; convert takes a schedule")
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


def _source(*, schedule: str, stages: int | None, microbatches: int | None, devices: int | None,
            remat: bool) -> fp.Schedule | fp.Timeline:  # fmt: skip
    """The schedule that the words mean: a family with its counts, or a file."""
    family = FAMILIES.get(schedule)
    if family is None:
        found = _read(schedule)
        if stages or microbatches or devices:
            raise fp.FuncpipeError(f"{schedule} says its own counts: leave out --stages, --microbatches, --devices")
    elif not stages or not microbatches:
        raise fp.FuncpipeError(f"{schedule} is a family: say --stages and --microbatches")
    else:
        _bounded(stages, microbatches)
        found = family(stages, microbatches, num_devices=devices)
    return fp.remat(found) if remat and isinstance(found, fp.Schedule) else found


def _read(name: str) -> fp.Schedule | fp.Timeline:
    """A file's schedule or timeline; its ending says the format."""
    path = Path(name)
    suffix = path.suffix.lower()
    if suffix not in (".json", ".csv", ".txt"):
        near = get_close_matches(name.lower().replace("_", "-"), FAMILIES, n=1)
        hint = f"; did you mean {near[0]}?" if near else f"; the families are {', '.join(FAMILIES)}"
        raise fp.FuncpipeError(f"{name!r} is no family, and no file that ends in .json, .csv or .txt{hint}")
    text = path.read_text(encoding="utf-8")
    try:
        match suffix:
            case ".json":
                found = fp.from_json(text)
            case ".csv":
                found = fp.from_torch_csv(text, name=path.stem)
            case _:
                found = fp.Schedule.parse(text, name=path.stem)
    except fp.ScheduleError as error:
        raise fp.ScheduleError(f"{name}: {error}") from None
    if isinstance(found, fp.Cost):
        raise fp.FuncpipeError(f"{name} is a cost; it goes to --cost")
    return found


def _writable(name: str, suffixes: tuple[str, ...]) -> None:
    """Refuse a file that cannot be written, before the work that makes it."""
    path = Path(name)
    if path.suffix.lower() not in suffixes:
        raise fp.FuncpipeError(f"{name} does not end in {', '.join(suffixes[:-1])} or {suffixes[-1]}")
    if not path.absolute().parent.is_dir():
        raise fp.FuncpipeError(f"{name} cannot be written: there is no folder {path.parent}")


def _bounded(stages: int, microbatches: int) -> None:
    if stages * microbatches > _MOST:
        raise fp.FuncpipeError(f"{stages} stages times {microbatches} microbatches are more than {_MOST} forwards")


def _count(text: str) -> int:
    """A positive number; the type of an option."""
    if not (text.isascii() and text.isdigit() and len(text) < 10 and int(text)):
        raise argparse.ArgumentTypeError(f"a whole number from 1; got {text[:40]!r}")
    return int(text)


def _cost(text: str) -> fp.Cost:
    """``forward=1,backward=2``, or a JSON file; the type of an option."""

    def refuse(reason: object) -> NoReturn:
        raise argparse.ArgumentTypeError(str(reason))

    try:
        if "=" not in text:
            found = fp.from_json(Path(text).read_text(encoding="utf-8"))
            return found if isinstance(found, fp.Cost) else refuse(f"{text} is a {type(found).__name__}, not a cost")
        fields: dict[str, Any] = {}
        for part in text.split(","):
            name, _, number = (word.strip() for word in part.partition("="))
            if name not in fp.Cost.__dataclass_fields__ or name in fields:
                problem = "is given twice" if name in fields else "is no cost"
                refuse(f"{name!r} {problem}; costs are {', '.join(fp.Cost.__dataclass_fields__)}")
            try:
                fields[name] = float(number)
            except ValueError:
                refuse(f"{name} is a number; got {number!r}")
        if "backward" in fields:
            for half in ("backward_input", "backward_weight"):
                fields.setdefault(half, fields["backward"] / 2)
        return fp.Cost(**fields)
    except (fp.ScheduleError, OSError, UnicodeError) as error:
        refuse(_line(error))


def _line(error: Exception) -> str:
    """A message on one line: the first fault, and how many more."""
    lines = str(error).split("\n")
    first = lines[min(1, len(lines) - 1)].strip(" *")
    return first + f" (and {len(lines) - 2} more)" * (len(lines) > 2)


def _table(rows: list[tuple[str, str, str, str, str]]) -> str:
    """Columns as wide as they need; numbers to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join([row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:4], widths[1:4], strict=True)), row[4]])
        for row in rows
    )
