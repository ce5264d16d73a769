"""Match every stash with its pops: who makes a skip, who takes it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from funcpipe._src.core.errors import raise_all
from funcpipe._src.data.stage import Stage, names_of


class Route(NamedTuple):
    """The way of one skip: the stage that makes it, and those that take it, ascending."""

    stash: int
    pops: tuple[int, ...]


def routes(stages: Sequence[Stage]) -> dict[str, Route]:
    """The route of each skip that someone pops.

    Raises:
        PlanError: with every mismatch: stashed twice, popped before or without a stash, never
            popped.
    """
    labels = names_of(stages)
    stashed: dict[str, int] = {}
    pops: dict[str, list[int]] = {}
    faults: list[str] = []
    everyone = {
        name: index for index, part in enumerate(stages) for name in (*part.stash, *part.offers)
    }
    for index, part in enumerate(stages):
        for name in part.pop:
            if name in stashed:
                pops.setdefault(name, []).append(index)
            elif name in everyone:
                faults.append(
                    f"{labels[index]} pops {name!r}, but only {labels[everyone[name]]}, which "
                    "comes later, stashes it"
                )
            else:
                faults.append(f"{labels[index]} pops {name!r}, but no stage stashes it")
        for name in (*part.stash, *part.offers):
            if name in stashed:
                faults.append(
                    f"{labels[index]} stashes {name!r} again; {labels[stashed[name]]} did already"
                )
            stashed.setdefault(name, index)
    optional = {name for part in stages for name in part.offers}
    faults += [
        f"{labels[index]} stashes {name!r}, but no later stage pops it"
        for name, index in stashed.items()
        if name not in pops and name not in optional
    ]
    raise_all("stash and pop do not match:", faults)
    return {name: Route(stashed[name], tuple(taken)) for name, taken in pops.items()}
