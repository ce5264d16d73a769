"""The text form of actions: stage, kind, microbatch, slice. Parentheses join overlapping actions.

This module only recognizes words. `Action.parse` and `Schedule.parse` read them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from funcpipe._src.data.kinds import ONCE, Kind


def _letters(kinds: Iterable[Kind]) -> str:
    return f"[{''.join(kind.value for kind in kinds)}]"


ACTION = re.compile(
    rf"([0-9]{{1,9}})(?:({_letters(kind for kind in Kind if kind not in ONCE)})([0-9]{{1,9}})(?:\.([0-9]{{1,9}}))?"
    rf"|({_letters(ONCE)}))"
)
"""The spelling of an action: stage, kind, microbatch and maybe slice; or stage and a kind without a
number."""

_WORDS = re.compile(r"\(\s*([^\s()]+)\s+([^\s()]+)\s*\)(?!\S)|(\([^()]*\)\S*|\S+)")


def words_of(line: str) -> Iterator[tuple[str, ...]]:
    """Yield the words of a line: each alone, or two together for a pair such as ``(0F3 1B1)``."""
    for first, second, alone in _WORDS.findall(line):
        yield (alone,) if alone else (first, second)


def is_word(word: str) -> bool:
    """Return whether a word spells an action."""
    return ACTION.fullmatch(word) is not None


def unread(word: str) -> str:
    """Say what is wrong with a word that does not spell an action."""
    if "(" in word or ")" in word:
        return (
            "is not a pair: write two actions in parentheses, with a space between them and "
            "around the parentheses"
        )
    return "is not an action"
