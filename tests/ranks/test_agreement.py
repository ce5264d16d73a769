"""A process whose facts have not changed sends none, and all processes still agree."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest

import funcpipe as fp
from funcpipe._src.batch.shares import Weighed
from funcpipe._src.engine.agreement import Agreed, PreviousWords, Word, agree
from funcpipe._src.processes.wire_format import pack_message, unpack_message, unpack_tree


def word(**facts: Any) -> Word:
    """The word of a process with 8 rows in 4 microbatches."""
    given = {
        "plan": "p",
        "options": {"seed": 1},
        "rows": 8,
        "ready": None,
        "lacks": (),
        "merged": True,
        "parts": (2, 2, 2, 2),
        "weighed": Weighed(None),
        "marked": True,
        "ties": (),
    }
    return Word(**{**given, **facts})


class Processes:
    """The processes of a team, which exchange what all of them send."""

    def __init__(self, count: int) -> None:
        self.last = [PreviousWords() for _ in range(count)]
        self.sent: list[Word | None] = []

    def run(self, words: Sequence[Word]) -> list[Agreed]:
        """One exchange: what each process sends, then the facts in each process."""
        names = tuple(f"rank {rank}" for rank in range(len(words)))
        derive = partial(agree, limit=4, replicas=1, replica=0, names=names)
        self.sent = []
        for rank, mine in enumerate(words):
            with pytest.raises(InterruptedError):
                self.last[rank].agree(self._send, rank, mine, derive)
        facts: list[Agreed] = []
        errors: list[fp.RanksError] = []
        for rank, mine in enumerate(words):
            try:
                facts.append(self.last[rank].agree(lambda *_: [*self.sent], rank, mine, derive))
            except fp.RanksError as error:
                errors.append(error)
        if errors:
            assert [str(error) for error in errors] == [str(errors[0])] * len(words)
            raise errors[0]
        assert facts == [facts[0]] * len(words)
        return facts

    def _send(self, about: str, mine: Word | None) -> list[Word | None]:
        self.sent.append(mine)
        raise InterruptedError


def test_an_unchanged_word_is_not_sent_again() -> None:
    team, words = Processes(3), [word(), word(rows=None, merged=None), word()]
    first = team.run(words)
    assert team.sent == words
    assert team.run([word(), word(rows=None, merged=None), word()]) == first
    assert team.sent == [None, None, None]


def test_a_changed_word_changes_the_facts_of_all() -> None:
    team, middle = Processes(3), word(rows=None, merged=None)
    team.run([word(), middle, word()])
    short = word(rows=6, parts=(2, 2, 1, 1))
    (facts, *_) = team.run([short, middle, short])
    assert team.sent == [short, None, short]
    assert facts.parts == ((2, 2, 1, 1),)
    assert team.run([short, middle, short])[0].parts == ((2, 2, 1, 1),)
    assert team.run([word(), middle, word()])[0].parts == ((2, 2, 2, 2),)


def test_after_an_error_of_all_the_words_before_still_count() -> None:
    team = Processes(2)
    team.run([word(), word()])
    with pytest.raises(fp.RanksError, match="seed: rank 1 has 2, rank 0 has 1"):
        team.run([word(), word(options={"seed": 2})])
    with pytest.raises(fp.RanksError, match="seed: rank 1 has 2, rank 0 has 1"):
        team.run([word(), word(options={"seed": 2})])
    assert team.run([word(), word()])[0].parts == ((2, 2, 2, 2),)
    assert team.sent == [None, None]


def test_messages_of_exchanges() -> None:
    for tree in (None, (1, "x"), {"a": None}):
        *place, data = unpack_message(pack_message(7, "the start", tree))
        assert (place, unpack_tree(data)) == ([7, "the start"], tree)
    assert len(pack_message(7, "", None)) == 12
    for data in (b"", b"\0" * 11, pack_message(7, "\u00e9", None)[:-1]):
        with pytest.raises(fp.PlanError, match="a message from another process is damaged"):
            unpack_message(data)
    with pytest.raises(fp.PlanError, match="is damaged"):
        unpack_tree(unpack_message(pack_message(7, "the start", (1, 2))[:-3])[-1])
