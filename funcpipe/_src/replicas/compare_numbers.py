"""Compare the initial numbers of replicas and of tied leaves between processes.

Every process makes its own model. If one process has another seed, or alone has read a checkpoint,
it trains another model. Without this check no error would show, because gradients are summed
anyway. funcpipe sends no numbers: it cannot know which process is right, and parameters belong to
the caller.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

from funcpipe._src.core.errors import RanksError, raise_all
from funcpipe._src.core.tree import Tree, flatten, locations
from funcpipe._src.data.plan import Plan
from funcpipe._src.engine.part import PlanPart
from funcpipe._src.replicas.gathered import GatheredParams
from funcpipe._src.replicas.same_numbers import ComparedLeaves, Digests, digest_of, digests_of
from funcpipe._src.stages.trainable import resolve_ties


def compare_numbers(
    part: PlanPart,
    plan: Plan,
    trees: Sequence[Tree],
    states: Sequence[Tree],
    spread: Mapping[int, GatheredParams],
) -> None:
    """Compare the numbers of parameters and state with other processes. Raises RanksError."""
    groups = resolve_ties(
        plan, trees, [[False] * len(flatten(tree)[0]) for tree in trees], part.stages
    )
    places = {stage: locations(trees[stage], f"params[{stage}]") for stage in part.stages}
    tied = [[places[stage][leaf] for stage, leaf in group if leaf >= 0] for group in groups]
    digests: dict[str, str] = {}
    for stage in sorted(part.stages):
        cuts = spread[stage].cuts if stage in spread else {}
        wanted = None if part.replicas > 1 else {place for row in tied for place in row}
        digests |= {**digests_of(trees[stage], f"params[{stage}]", cuts, wanted)}
        digests |= {**digests_of(states[stage], f"state[{stage}]", {}, wanted)}
    everyone = part.exchange("the numbers of parameters and state", (digests, tied))
    refuse_different(everyone, part.names)
    part.compared.settle()


def compare_tied(
    compared: ComparedLeaves,
    trees: Sequence[Tree],
    leaves: Sequence[Sequence[Any]],
    ties: Sequence[Sequence[tuple[int, int]]],
) -> None:
    """Compare tied leaves of one process that are separate tensors. Raises PlanError."""
    apart = [group for group in ties if len({id(leaves[stage][leaf]) for stage, leaf in group}) > 1]
    compared.begin()
    if not apart or not compared.has_new(
        leaves[stage][leaf] for group in apart for stage, leaf in group
    ):
        return
    faults: list[str] = []
    for group in apart:
        places = [locations(trees[stage], f"params[{stage}]")[leaf] for stage, leaf in group]
        numbers = [digest_of(leaves[stage][leaf]) for stage, leaf in group]
        faults += [
            f"{place} has other numbers than {places[0]}"
            for place, each in zip(places, numbers, strict=True)
            if each != numbers[0]
        ]
    raise_all(
        "leaves that are tied are one parameter, so give all of them the same numbers:", faults
    )
    compared.settle()


def refuse_different(
    everyone: Sequence[tuple[Digests, Sequence[Sequence[str]]]], names: Sequence[str]
) -> None:
    """Raise RanksError if replicas, or tied leaves, have different numbers.

    Args:
        everyone: for every process, by replica and rank: its digests, and the locations of its
            leaves of each tie.
        names: the name of each process in errors.
    """
    first: dict[str, tuple[str, str]] = {}  # by location, the first process with it, and its digest
    faults: list[str] = []
    for name, (digests, _) in zip(names, everyone, strict=True):
        for place, digest in digests.items():
            other, wanted = first.setdefault(place, (name, digest))
            if digest != wanted:
                faults.append(f"{place}: {name} has other numbers than {other}")
    for rows in zip(*[ties for _, ties in everyone]):
        places = [place for place in dict.fromkeys(chain(*rows)) if place in first]
        for place in places[1:]:
            (name, digest), (other, wanted) = first[place], first[places[0]]
            if digest != wanted:
                faults.append(
                    f"{place} of {name} has other numbers than {places[0]} of {other}, and they "
                    "are tied"
                )
    title = (
        "the processes do not begin with the same numbers; call torch.manual_seed(0) in all of "
        "them before the model is made, or fp.load the same checkpoint in all of them before the "
        "first run:"
    )
    raise_all(title, faults, RanksError, most=8)
