"""Write and read schedules and costs as JSON with a version.

Reading a written file gives an equal object. The reader expects hostile files: it takes data and
never runs code, bounds all sizes, and reports all faults at once, each with its place. The text
form is `Schedule.parse` and `str`; torch's CSV is in `torch_csv`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, cast

from funcpipe._src.core.errors import ScheduleError, raise_all
from funcpipe._src.data.cost import Cost
from funcpipe._src.data.kinds import SPELLING
from funcpipe._src.data.schedule import Action, Pair, Schedule, is_word, unread, words_of
from funcpipe._src.schedules.legal import MOST_FAULTS

VERSION = 1  # the version of the JSON format. The reader rejects other versions

_MOST = 10**6
"""The upper bound of stage and microbatch numbers in a file, so that loops over them stay fast."""
_MOST_LETTERS = 200


def to_json(thing: Schedule | Cost) -> str:
    """Write a schedule or a cost as JSON text. `from_json` returns an equal object.

    >>> print(fp.schedules.to_json(fp.schedules.one_f_one_b(2, 2)))
    {
     "funcpipe": "schedule",
     "version": 1,
     "name": "1F1B",
     "orders": [
      "0F0 0F1 0B0 0B1",
      "1F0 1B0 1F1 1B1"
     ]
    }

    Args:
        thing: the schedule or the cost. For a plan, give ``plan.schedule``.

    Returns:
        The JSON text, with one line per field and per device.

    Raises:
        ScheduleError: ``thing`` is neither, or contains something that the reader would reject:
            NaN, indices below 0, or names that do not print.
    """
    if not isinstance(thing, (Schedule, Cost)):
        is_plan = hasattr(thing, "schedule")
        hint = "; for a plan: fp.schedules.to_json(plan.schedule)" if is_plan else ""
        raise ScheduleError(
            f"to_json takes a Schedule or a Cost; got a {type(thing).__name__}{hint}"
        )
    if isinstance(thing, Schedule):
        fields: dict[str, Any] = {"name": thing.name, "orders": [*thing.lines()]}
    else:
        fields = {name: getattr(thing, name) for name in thing.__dataclass_fields__}
    try:
        text = _page({"funcpipe": type(thing).__name__.lower(), "version": VERSION, **fields})
    except (TypeError, ValueError) as error:
        raise ScheduleError(f"this {type(thing).__name__} has no JSON: {error}") from None
    # Read the text back, so that no file is written that cannot be read.
    back = from_json(text)
    if isinstance(thing, Schedule) and back != thing:
        raise ScheduleError(
            "this Schedule has no JSON: some of its pairs are not neighbours; fp.schedules.check "
            "lists them"
        )
    return text


def from_json(text: str) -> Schedule | Cost:
    """Read a schedule or a cost from JSON text.

    The text may come from an untrusted source: nesting, numbers, sizes and names are bounded, and
    unknown or repeated fields raise. Whether a schedule is legal is not checked here: `make_plan`
    and `simulate` call `check`.

    >>> fp.schedules.from_json('{"funcpipe": "schedule", "version": 1, "orders": ["0F0 0B0"]}')
    <Schedule custom: 1 stage, 1 microbatch, 1 device>
    >>> fp.schedules.from_json('{"funcpipe": "cost", "version": 1, "forward": [1, 2]}').forward
    (1, 2)

    Args:
        text: the JSON text, written by `to_json` or by hand. Missing fields of a cost get the
            defaults of `Cost`.

    Returns:
        A `Schedule` or a `Cost`, by the field ``"funcpipe"``.

    Raises:
        ScheduleError: the text is not such JSON. The message lists all faults with their places.
    """
    data = _loads(text)
    kind, version = data.pop("funcpipe", None), data.pop("version", None)
    if kind not in ("schedule", "cost"):
        raise ScheduleError(
            f'"funcpipe" names the kind of object, one of schedule, cost; got {shown(kind)}'
        )
    if type(version) is not int or version != VERSION:
        raise ScheduleError(
            f'"version" must be {VERSION}, the only version that this funcpipe reads; got '
            f"{shown(version)}"
        )
    faults: list[str] = []
    thing = _schedule(data, faults) if kind == "schedule" else _cost(data, faults)
    raise_all(f"this is not a {kind} in JSON:", faults, ScheduleError, most=MOST_FAULTS)
    return thing


def _page(fields: Mapping[str, Any]) -> str:
    """Write JSON with a line for each field and for each device's order, so that diffs are
    readable."""
    lines: list[str] = []
    for key, value in fields.items():
        if key == "orders" and value:
            rows = ",\n  ".join(json.dumps(row, allow_nan=False) for row in value)
            lines.append(f'"{key}": [\n  {rows}\n ]')
        else:
            lines.append(f'"{key}": {json.dumps(value, allow_nan=False)}')
    return "{\n " + ",\n ".join(lines) + "\n}"


def _loads(text: str) -> dict[str, Any]:
    """Read a JSON object. Reject repeated keys, long numbers and NaN."""
    if not isinstance(text, str):
        raise ScheduleError(
            f"from_json takes text; got a {type(text).__name__}; for a file: Path(...).read_text()"
        )
    try:
        data = json.loads(
            text, object_pairs_hook=_once, parse_int=_integer, parse_constant=_constant
        )
    except RecursionError:
        raise ScheduleError("this JSON is nested too deep") from None
    except ValueError as error:
        raise ScheduleError(f"the text is not JSON that funcpipe reads: {error}") from None
    if not isinstance(data, dict):
        raise ScheduleError(f'the JSON must be an object {{"funcpipe": ...}}; got {shown(data)}')
    return data


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(
            f"field {shown(next(key for key in keys if keys.count(key) > 1))} appears twice"
        )
    return fields


def _integer(text: str) -> int:
    if len(text) > 18:
        raise ValueError(f"a number of {len(text)} digits")
    return int(text)


def _constant(text: str) -> Any:
    raise ValueError(f"{text} is not a number in JSON")


def _schedule(data: dict[str, Any], faults: list[str]) -> Schedule:
    faults += _unknown(data, ("orders", "name"))
    orders, name = data.get("orders"), data.get("name", "custom")
    if "orders" not in data:
        faults.append("orders: missing")
    elif not isinstance(orders, list):
        faults.append(f"orders: a list; got {shown(orders)}")

    def rows() -> Iterator[tuple[str, Iterable[tuple[str, ...]]]]:
        for at, row in enumerate(orders if isinstance(orders, list) else ()):
            if isinstance(row, str):
                yield f"orders[{at}]", words_of(row)
            else:
                faults.append(f'orders[{at}]: a text like "0F0 0B0"; got {shown(row)}')

    schedule = read_schedule(rows(), cast("str", name), faults)
    # Names appear in pictures, so they must not move a terminal's cursor.
    if not isinstance(name, str) or len(name) > _MOST_LETTERS or not name.isprintable():
        words = f"a text of at most {_MOST_LETTERS} letters that print"
        faults.append(f"name: {words}; got {shown(name)}")
    return schedule


def _cost(data: dict[str, Any], faults: list[str]) -> Cost:
    declared = Cost.__dataclass_fields__
    faults += _unknown(data, tuple(declared))
    fields = {name: data[name] for name in declared if name in data}
    unsound: list[str] = []
    for name, value in fields.items():
        if name == "skips":
            unsound += _unsound_skips(value)
        elif value is not None or declared[name].default is not None:
            listed = isinstance(value, list) and name != "bandwidth"
            numbers = cast("list[Any]", value) if listed else [value]
            bad = [number for number in numbers if not _is_number(number)]
            form = (
                "a number from 0" if name == "bandwidth" else "a number from 0, or a list of them"
            )
            unsound += [f"{name}: {form}; got {shown(number)}" for number in bad[:1]]
    faults += unsound
    if not unsound:
        try:
            return Cost(**fields)
        # Cost checks rules between numbers, such as that a skip goes forward.
        except ScheduleError as error:
            faults += [line.strip(" *") for line in str(error).split("\n")[1:]]
    return Cost()  # not used: `from_json` raises the faults


def _unsound_skips(rows: Any) -> list[str]:
    if not isinstance(rows, list):
        return [f"skips: a list; got {shown(rows)}"]
    return [
        f"skips[{at}]: [stash, pop, size]; got {shown(row)}"
        for at, row in enumerate(cast("list[Any]", rows))
        if not (isinstance(row, list) and len(cast("list[Any]", row)) == 3)
        or not (all(map(_is_index, row[:2])) and _is_number(row[2]))
    ]


def _unknown(data: dict[str, Any], fields: Sequence[str]) -> list[str]:
    """Return a fault for each field that is not one of ``fields``."""
    return [
        f"{shown(name)}: no such field; the fields are {', '.join(fields)}"
        for name in data
        if name not in fields
    ]


def read_schedule(
    rows: Iterable[tuple[str, Iterable[Sequence[str]]]], name: str, faults: list[str]
) -> Schedule:
    """Read the orders of a schedule. Words that are not actions are faults.

    Args:
        rows: for each device its place in the text, and its words: single words and pairs.
        name: the name of the schedule.
        faults: the list to which faults are added.
    """
    known: dict[str, Action] = {}  # a file repeats few words many times

    def read(word: str, place: str) -> list[Action]:
        if word not in known:
            if not is_word(word):
                faults.append(f"{place}: {shown(word)} {unread(word)}; write {SPELLING}")
                return []
            action = Action.parse(word)
            if not (_is_index(action.stage) and _is_index(action.microbatch)):
                faults.append(f"{place}: {word}: stages and microbatches must be below {_MOST}")
                return []
            known[word] = action
        return [known[word]]

    orders: list[tuple[Action, ...]] = []
    pairs: set[Pair] = set()
    for place, groups in rows:
        found = [[action for word in group for action in read(word, place)] for group in groups]
        orders.append(tuple(chain.from_iterable(found)))
        pairs |= {(group[0], group[1]) for group in found if len(group) == 2}
    return Schedule(tuple(orders), name, frozenset(pairs))


def _is_index(value: Any) -> bool:
    return type(value) is int and 0 <= value < _MOST


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value < float("inf")


def shown(value: Any) -> str:
    """Show the start of a value on one line.

    Nested lists and objects are shown by their type only, because a repr may be as long as the
    file.
    """
    if isinstance(value, (list, dict)):
        value = value[:4] if isinstance(value, list) else list(value)[:4]
        flat = [
            type(item).__name__ if isinstance(item, (list, dict)) else shown(item) for item in value
        ]
        return f"[{', '.join(flat)}, ...]"
    text = repr(value[:40] if isinstance(value, str) else value)
    return text if len(text) <= 44 else text[:40] + "..."
