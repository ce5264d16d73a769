"""Levels: one stage that can be run in several ways, which keep different amounts for its backward."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from funcpipe.core.errors import PlanError, raise_all
from funcpipe.core.stage import Stage, refuse_others

_DECLARED = ("stash", "pop", "feeds", "state", "carry", "offers", "evaluation")
"""What the other stages, the caller and the plan see of a stage."""


def levels(*ways: Stage) -> Stage:
    """One stage that runs in several ways: with the same parameters it computes the same, and keeps less for its backward.

    A schedule says at which level each microbatch of it runs: `Schedule.levels`, printed ``0F3@1``. `search` finds such
    schedules from the costs of all levels. In a schedule without, and called by itself, the stage is the first way.

    Gradients are those of one way, to the bit where the ways agree to the bit. But where backwards are split, eager ways add
    weight gradients at I and compiled ones at W: a stage that has both adds them in an order of its own.

    >>> def layer(w, x):
    ...     return torch.tanh(x @ w)
    >>> both = fp.levels(fp.compile_stage(fp.stage(layer)), fp.compile_stage(fp.stage(layer), recompute=True))
    >>> both
    <Stage 'layer': layer; compiled; 2 levels>
    >>> schedule = fp.Schedule.parse("0F0@1 0F1 0B0 0B1")
    >>> plan = fp.make_plan(both, schedule, loss=nn.functional.mse_loss, devices="cpu")

    Args:
        ways: stages for the same parameters and state, level 0 first: such as an eager one, one with layers in a
            ``torch.utils.checkpoint``, and those that `compile_stage` gives with several ``recompute``. What is known of a
            stage is that of the first: its name, what it shares, how its state is committed; and what others draw at random is
            keyed by its layers, or its parts where they have as many. `check_stage` finds what ways do not agree in.

    Returns:
        The first, with the others as its ``ways``.

    Raises:
        PlanError: something else than stages, ways that have levels themselves, or that declare different things.
    """
    if not ways:
        raise PlanError("levels needs at least one way: fp.levels(keep, again), level 0 first")
    refuse_others("levels", ways, "fp.levels(keep, again)")
    first, *others = ways
    faults = [
        f"way {level} ({way.name!r}) has levels already; give its ways" for level, way in enumerate(ways) if way.ways
    ]
    for level, way in enumerate(others, start=1):
        for name in _DECLARED:
            if getattr(way, name) != getattr(first, name):
                faults.append(f"{name} is {getattr(way, name)!r} in way {level}, and {getattr(first, name)!r} in way 0")
        if (way.commit is None) != (first.commit is None):
            faults.append(f"of way {level} and way 0 only one changes its state at the end of a batch (commit)")
        if _shared(way) != _shared(first):
            faults.append(f"way {level} shares other parameters with other stages than way 0")
    raise_all("levels are ways to compute one stage, and these are not:", faults)
    return replace(first, ways=tuple(others))


def _shared(stage: Stage) -> set[tuple[object, str]]:
    """Which parameters others hold, too, by what the model calls them: another copy of it has others of these names."""
    return {(path, shared.name) for path, shared in stage.shares}


def ways_of(stages: Iterable[Stage]) -> list[Stage]:
    """All stages with all their ways."""
    return [way for stage in stages for way in (stage, *stage.ways)]


def way_at(stage: Stage, level: int) -> Stage:
    """A stage as it runs at a level."""
    return stage.ways[level - 1] if level else stage
