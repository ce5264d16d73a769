"""Read and write actions as text: stage, kind, microbatch, slice. Parentheses join two that
overlap."""

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
"""How an action is spelled: stage, then kind and microbatch (and slice), or a kind that has
none."""

_WORDS = re.compile(r"\(\s*([^\s()]+)\s+([^\s()]+)\s*\)(?!\S)|(\([^()]*\)\S*|\S+)")


def words_of(line: str) -> Iterator[tuple[str, ...]]:
    """The words of a line, each alone, or two together where they stand as a pair: ``(0F3
    1B1)``."""
    for first, second, alone in _WORDS.findall(line):
        yield (alone,) if alone else (first, second)


def is_word(word: str) -> bool:
    """Return whether a word is an action."""
    return ACTION.fullmatch(word) is not None


def unread(word: str) -> str:
    """What is wrong with a word that is no action."""
    if "(" in word or ")" in word:
        return (
            "is no pair: in parentheses stand two actions, with a space between them, and around "
            "the parentheses"
        )
    return "is no action"
