"""Match each stash with its pops, and find all mismatches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from funcpipe._src.core.errors import raise_all
from funcpipe._src.data.stage import Stage, names_of


class Route(NamedTuple):
    """The route of a skip: the stage that stashes it, and the stages that pop it, ascending."""

    stash: int
    pops: tuple[int, ...]


def routes(stages: Sequence[Stage]) -> dict[str, Route]:
    """Return the route of each skip that is popped.

    Raises:
        PlanError: a name is stashed twice, popped before or without a stash, or never popped. The
            message lists all mismatches.
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
