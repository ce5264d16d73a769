"""Parse the arguments of the command line: families, files, counts and costs."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from inspect import signature
from pathlib import Path
from typing import Any, NoReturn

import funcpipe as fp

FAMILIES: Mapping[str, Callable[..., fp.Schedule]] = {
    "fill-drain": fp.schedules.fill_drain,
    "1f1b": fp.schedules.one_f_one_b,
    "eager-1f1b": fp.schedules.eager_one_f_one_b,
    "looped-bfs": fp.schedules.looped_bfs,
    "interleaved": fp.schedules.interleaved,
    "zero-bubble": fp.schedules.zero_bubble,
    "zb-h2": fp.schedules.zb_h2,
    "zbv": fp.schedules.zbv,
    "v-half": fp.schedules.v_half,
    "v-min": fp.schedules.v_min,
    "dualpipe-v": fp.schedules.dualpipe_v,
}
SHAPES = ("line", "loop", "v")
FORMATS = (".json", ".csv", ".txt")
SUFFIXES = ".json, .csv (of torch.distributed.pipelining) or .txt (a line for each device)"
SOURCE = f"""\
SCHEDULE is a file, or a family with --stages and --microbatches.
  families: {", ".join(FAMILIES)}
  files:    {SUFFIXES}
"""
COST = """\
Costs are times in one unit of your choice, and memory in another. The default is 1. The default of weight_residual is
0.5, of comm, output, reduce, gather, step, attention, the links and skips 0, and bandwidth is unlimited.
  forward, backward_input, backward_weight   time of F, I and W
  backward                                   time of B; I and W take half of it each, or the rest of the other half
  forward_link, backward_link                part of the time of F, and of B, that waits for links; pairs hide it
  remat, offload                             time of R (default: as F); of O, and of L, while the device works
  reduce                                     time of G, while the device works
  attention                                  share of a stage's time that attention takes, with slices
  comm                                       latency of a hop between devices
  bandwidth                                  memory that crosses a link per unit of time, one value after the other
  output                                     memory of a stage's output, and of its gradient
  residual, weight_residual                  memory from F to B or I; the part that stays from I to W
A file can have a number for each stage (comm: for each hop), and the skips as [stash, pop, size]:
  {"funcpipe": "cost", "version": 1, "forward": [1, 1, 1, 2], "skips": [[0, 3, 0.5]]}
To write such a file from the result of fp.models.profile, use fp.schedules.to_json.
"""
_MOST = 10**6  # the most forwards: more are a typing error, and would take minutes


def source(
    *,
    schedule: str,
    stages: int | None,
    microbatches: int | None,
    devices: int | None,
    slices: int | None,
    remat: bool,
) -> fp.Schedule:
    """Return the schedule of a family with the given counts, or of a file."""
    family = FAMILIES.get(schedule)
    if family is None:
        result = read(schedule)
        if stages or microbatches or devices or slices:
            raise fp.FuncpipeError(
                f"{schedule} has its own counts: leave out --stages, --microbatches, --devices, "
                "--slices"
            )
    elif not stages or not microbatches:
        raise fp.FuncpipeError(f"{schedule} is a family: give --stages and --microbatches")
    elif slices and "num_slices" not in signature(family).parameters:
        raise fp.FuncpipeError(f"{schedule} does not support slices: leave out --slices")
    else:
        bounded(stages, microbatches * (slices or 1))
        result = family(
            stages, microbatches, num_devices=devices, **({"num_slices": slices} if slices else {})
        )
    return fp.schedules.remat(result) if remat else result


def read_text(path: Path) -> str:
    """Read a file of UTF-8, with or without a byte order mark, as editors of Windows write it.

    Raises:
        ScheduleError: the file is not UTF-8.
    """
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise fp.ScheduleError(f"{path} is not UTF-8: {error}; save it as UTF-8") from None


def read(name: str) -> fp.Schedule:
    """Read the schedule of a file, in the format of the file's ending."""
    path = Path(name)
    suffix = path.suffix.lower()
    if suffix not in FORMATS:
        near = get_close_matches(name.lower().replace("_", "-"), FAMILIES, n=1)
        hint = f"; did you mean {near[0]}?" if near else f"; the families are {', '.join(FAMILIES)}"
        raise fp.FuncpipeError(
            f"{name!r} is neither a family nor a file that ends in .json, .csv or .txt{hint}"
        )
    text = read_text(path)
    try:
        match suffix:
            case ".json":
                loaded = fp.schedules.from_json(text)
            case ".csv":
                loaded = fp.schedules.from_torch_csv(text, name=path.stem)
            case _:
                loaded = fp.Schedule.parse(text, name=path.stem)
    except fp.ScheduleError as error:
        raise fp.ScheduleError(f"{name}: {error}") from None
    if isinstance(loaded, fp.Cost):
        raise fp.FuncpipeError(f"{name} is a cost, not a schedule; give it as --cost {name}")
    return loaded


def writable(name: str, suffixes: tuple[str, ...]) -> None:
    """Raise FuncpipeError if a file cannot be written, before the work that makes it."""
    path = Path(name)
    if path.suffix.lower() not in suffixes:
        raise fp.FuncpipeError(
            f"{name} does not end in {' or '.join(', '.join(suffixes).rsplit(', ', 1))}"
        )
    if reason := unwritable(name):
        raise fp.FuncpipeError(reason)


def unwritable(name: str) -> str:
    """Say why a file cannot be written; "" if it can."""
    try:
        path = Path(name).resolve()
        if path.is_dir():
            return f"{name} cannot be written: it is a folder"
        if not path.parent.is_dir():
            return (
                f"{name} cannot be written: there is no folder "
                f"{path.parent if Path(name).is_symlink() else Path(name).parent}"
            )
        if path.exists():
            return "" if os.access(path, os.W_OK) else f"{name} cannot be written: no permission"
        path.touch()  # only a write reveals a read-only disk, or a name that is too long
        path.unlink()
    except OSError as error:
        return f"{name} cannot be written: {error.strerror}"
    return ""


def bounded(stages: int, microbatches: int) -> None:
    """Raise FuncpipeError for counts that would take minutes."""
    if stages * microbatches > _MOST:
        raise fp.FuncpipeError(
            f"{stages} stages times {microbatches} microbatches are more than {_MOST} forwards"
        )


def as_count(text: str, least: int = 1) -> int:
    """Parse a whole number, as the type of an option."""
    if not (text.isascii() and text.isdigit() and len(text) < 10 and int(text) >= least):
        raise argparse.ArgumentTypeError(f"a whole number from {least}; got {text[:40]!r}")
    return int(text)


def as_index(text: str) -> int:
    """Parse a whole number that may be 0, as the type of an option."""
    return as_count(text, 0)


def as_positive(text: str) -> float:
    """Parse a positive number, as the type of an option."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"a number above 0; got {text[:40]!r}")
    return number


def as_limits(text: str) -> float | tuple[float, ...]:
    """Parse a number, or one per device, ``20`` or ``20,20,16``, as the type of an option."""
    return tuple(map(as_positive, text.split(","))) if "," in text else as_positive(text)


def as_placement(text: str) -> str | tuple[int, ...]:
    """Parse ``line``, ``loop``, ``v`` or ``0,1,1,0``, as the type of an option."""
    if text in SHAPES:
        return text
    try:
        return tuple(map(as_index, text.split(",")))
    except argparse.ArgumentTypeError:
        shapes = ", ".join(SHAPES)
        raise argparse.ArgumentTypeError(
            f"{shapes}, or the device of each stage as 0,1,1,0; got {text[:40]!r}"
        ) from None


def as_cost(text: str) -> fp.Cost:
    """Parse ``forward=1,backward=2``, or read a JSON file, as the type of an option."""

    def refuse(reason: object) -> NoReturn:
        raise argparse.ArgumentTypeError(str(reason))

    try:
        if "=" not in text:
            loaded = fp.schedules.from_json(read_text(Path(text)))
            return (
                loaded
                if isinstance(loaded, fp.Cost)
                else refuse(f"{text} is a {type(loaded).__name__}, not a cost")
            )
        fields: dict[str, Any] = {}
        for part in text.split(","):
            name, _, number = (word.strip() for word in part.partition("="))
            if name not in fp.Cost.__dataclass_fields__ or name in fields:
                problem = "is given twice" if name in fields else "is not a cost"
                refuse(f"{name!r} {problem}; costs are {', '.join(fp.Cost.__dataclass_fields__)}")
            if name == "skips":
                refuse("skips can be given in a file only: [[stash, pop, size], ...]")
            try:
                fields[name] = float(number)
            except ValueError:
                refuse(f"{name} is a number; got {number!r}")
        return fp.Cost(**fields)
    except (fp.ScheduleError, OSError) as error:
        refuse(line(error))


def line(error: Exception) -> str:
    """Return a message on one line: the first fault, and the number of further faults."""
    lines = str(error).split("\n")
    first = lines[min(1, len(lines) - 1)].strip(" *")
    return first + f" (and {len(lines) - 2} more)" * (len(lines) > 2)
