"""Schedules and costs as files: JSON with a version.

What is written is read back equal. What is read may come from anywhere: it is data and never code,
it is read in one pass, and everything wrong with it is said at once, with its place. The text form
is `Schedule.parse` and `str`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from funcpipe._src.core.errors import ScheduleError, raise_all
from funcpipe._src.data.cost import Cost
from funcpipe._src.data.kinds import SPELLING
from funcpipe._src.data.schedule import Action, Pair, Schedule
from funcpipe._src.data.spelling import is_word, unread, words_of
from funcpipe._src.schedules.legal import MOST_FAULTS

VERSION = 1
"""Of the JSON; a reader refuses any other."""

_MOST = 10**6
"""Stages and microbatches of a file are fewer: what walks over them stays quick whatever the file
says."""
_MOST_LETTERS = 200

Fault = Callable[[str], None]
"""Takes note of something wrong, ``place: what``."""


def to_json(thing: Schedule | Cost) -> str:
    """A schedule or a cost as JSON; `from_json` gives back an equal one.

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
        thing: what to write. Of a plan, its ``schedule``.

    Raises:
        ScheduleError: it is neither, or holds what JSON or a reader has no place for: NaN, indices
            below 0, names that do not print.
    """
    if not isinstance(thing, (Schedule, Cost)):
        hint = (
            "; of a plan: fp.schedules.to_json(plan.schedule)" if hasattr(thing, "schedule") else ""
        )
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
    back = from_json(text)  # nothing is written that could not be read
    if isinstance(thing, Schedule) and isinstance(back, Schedule) and back != thing:
        raise ScheduleError(
            "this Schedule has no JSON: some of its pairs are no neighbours; fp.schedules.check "
            "names them"
        )
    return text


def from_json(text: str) -> Schedule | Cost:
    """Read what `to_json` wrote, or a person.

    The text may be hostile: nesting, numbers, sizes and names are bounded, unknown and repeated
    fields are refused. Whether a schedule is legal is for `check`, which `make_plan` and `simulate`
    call.

    >>> fp.schedules.from_json('{"funcpipe": "schedule", "version": 1, "orders": ["0F0 0B0"]}')
    <Schedule custom: 1 stage, 1 microbatch, 1 device>
    >>> fp.schedules.from_json('{"funcpipe": "cost", "version": 1, "forward": [1, 2]}').forward
    (1, 2)

    Args:
        text: the JSON. Left-out fields of a cost have the defaults of `Cost`.

    Raises:
        ScheduleError: it is no such JSON; every fault is named with its place.
    """
    data = _loads(text)
    kind, version = data.pop("funcpipe", None), data.pop("version", None)
    read = _READERS.get(kind) if isinstance(kind, str) else None
    if read is None:
        raise ScheduleError(
            f'"funcpipe" says what this is, one of {", ".join(_READERS)}; got {shown(kind)}'
        )
    if type(version) is not int or version != VERSION:
        raise ScheduleError(
            f'"version" is {VERSION}, the only one that this funcpipe reads; got {shown(version)}'
        )
    faults: list[str] = []
    thing = read(data, faults.append)
    raise_all(f"this is no {kind} that funcpipe reads:", faults, ScheduleError, most=MOST_FAULTS)
    assert thing is not None
    return thing


def _page(fields: Mapping[str, Any]) -> str:
    """JSON with a line for each field, and for each device's order: such files can be compared line
    by line."""
    lines: list[str] = []
    for key, value in fields.items():
        if key == "orders" and value:
            rows = ",\n  ".join(json.dumps(row, allow_nan=False) for row in value)
            lines.append(f'"{key}": [\n  {rows}\n ]')
        else:
            lines.append(f'"{key}": {json.dumps(value, allow_nan=False)}')
    return "{\n " + ",\n ".join(lines) + "\n}"


def _loads(text: str) -> dict[str, Any]:
    """The object that the text is, without repeated keys, long numbers, NaN."""
    if not isinstance(text, str):
        raise ScheduleError(
            f"from_json takes text; got a {type(text).__name__}; of a file: Path(...).read_text()"
        )
    try:
        data = json.loads(
            text, object_pairs_hook=_once, parse_int=_integer, parse_constant=_constant
        )
    except RecursionError:
        raise ScheduleError("this JSON is nested too deep") from None
    except ValueError as error:
        raise ScheduleError(f"this is no JSON that funcpipe reads: {error}") from None
    if not isinstance(data, dict):
        raise ScheduleError(f'this JSON is no object {{"funcpipe": ...}}; got {shown(data)}')
    return data


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(
            f"field {shown(next(key for key in keys if keys.count(key) > 1))} stands twice"
        )
    return fields


def _integer(text: str) -> int:
    if len(text) > 18:
        raise ValueError(f"a number of {len(text)} digits")
    return int(text)


def _constant(text: str) -> Any:
    raise ValueError(f"{text} is no number in JSON")


def _schedule(data: dict[str, Any], fault: Fault) -> Schedule:
    _fields(data, need=("orders",), may=("name",), fault=fault)
    known: dict[str, Action] = {}
    orders: list[tuple[Action, ...]] = []
    pairs: set[Pair] = set()
    for at, row in enumerate(_field(data, "orders", [], _is_list, "a list", fault)):
        if not isinstance(row, str):
            fault(f'orders[{at}]: a text like "0F0 0B0"; got {shown(row)}')
            continue
        place = f"orders[{at}]"
        read = [read_actions(words, place, known=known, fault=fault) for words in words_of(row)]
        orders.append(tuple(action for group in read for action in group))
        pairs |= {(group[0], group[1]) for group in read if len(group) == 2}
    name = _field(data, "name", "custom", _is_label, _LABEL, fault)
    return Schedule(tuple(orders), name, frozenset(pairs))


def _cost(data: dict[str, Any], fault: Fault) -> Cost | None:
    declared = Cost.__dataclass_fields__
    _fields(data, need=(), may=tuple(declared), fault=fault)
    fields = {name: data[name] for name in declared if name in data}
    faults: list[str] = []
    for name, value in fields.items():
        if name == "skips":
            rows = _field(data, name, [], _is_list, "a list", faults.append)
            faults += [
                f"skips[{at}]: [stash, pop, size]; got {shown(row)}"
                for at, row in enumerate(rows)
                if not _is_skip(row)
            ]
        elif value is not None or declared[name].default is not None:
            _numbers(value, name, faults.append, single=name == "bandwidth")
    if not faults:
        try:
            return Cost(**fields)
        except (
            ScheduleError
        ) as error:  # what only the cost itself knows, as that a skip goes forward
            faults += [line.strip(" *") for line in str(error).split("\n")[1:]]
    for text in faults:
        fault(text)
    return None


def _is_skip(row: Any) -> bool:
    return (
        isinstance(row, list)
        and len(row) == 3
        and all(map(_is_index, row[:2]))
        and _is_number(row[2])
    )


_READERS: Mapping[str, Callable[[dict[str, Any], Fault], Schedule | Cost | None]] = {
    "schedule": _schedule,
    "cost": _cost,
}


def _fields(data: dict[str, Any], *, need: Sequence[str], may: Sequence[str], fault: Fault) -> None:
    """Every field that is needed, and no other than may be there."""
    for name in need:
        if name not in data:
            fault(f"{name}: missing")
    for name in data:
        if name not in need and name not in may:
            fault(f"{shown(name)}: no such field; there are {', '.join((*need, *may))}")


def read_actions(
    words: Sequence[str], place: str, *, known: dict[str, Action], fault: Fault
) -> tuple[Action, ...]:
    """The actions that the words are. A file repeats few words often; each is read once."""
    actions: list[Action] = []
    for word in words:
        action = known.get(word)
        if action is None:
            if not is_word(word):
                fault(f"{place}: {shown(word)} {unread(word)}; write {SPELLING}")
                continue
            action = Action.parse(word)
            if not (_is_index(action.stage) and _is_index(action.microbatch)):
                fault(f"{place}: {word}: stages and microbatches are below {_MOST}")
                continue
            known[word] = action
        actions.append(action)
    return tuple(actions)


def _field(
    data: Mapping[str, Any],
    name: str,
    default: Any,
    is_sound: Callable[[Any], bool],
    words: str,
    fault: Fault,
) -> Any:
    """A field, or what takes its place where it is left out, or is none of what the words say."""
    value = data.get(name, default)
    if is_sound(value):
        return value
    fault(f"{name}: {words}; got {shown(value)}")
    return default


def _numbers(value: Any, name: str, fault: Fault, *, single: bool = False) -> None:
    """It is a number, or unless it must be single a list of them."""
    values = value if _is_list(value) and not single else (value,)
    bad = [number for number in values if not _is_number(number)]
    if bad:
        fault(f"{name}: a number from 0{', or a list of them' * (not single)}; got {shown(bad[0])}")


_LABEL = f"a text of at most {_MOST_LETTERS} letters that print"
"""A name for pictures, never of a file; short, and nothing in it moves a terminal's cursor."""


def _is_label(value: Any) -> bool:
    return isinstance(value, str) and len(value) <= _MOST_LETTERS and value.isprintable()


def _is_list(value: Any) -> bool:
    return isinstance(value, list)


def _is_index(value: Any) -> bool:
    return type(value) is int and 0 <= value < _MOST


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value < float("inf")


def shown(value: Any) -> str:
    """The start of a value, on one line. Of a list or an object only its kind: its repr may be as
    long as the file."""
    if isinstance(value, (list, dict)):
        value = value[:4] if isinstance(value, list) else list(value)[:4]
        flat = [
            type(item).__name__ if isinstance(item, (list, dict)) else shown(item) for item in value
        ]
        return f"[{', '.join(flat)}, ...]"
    text = repr(value[:40] if isinstance(value, str) else value)
    return text if len(text) <= 44 else text[:40] + "..."
