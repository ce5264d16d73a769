"""Find the trainable leaves that no backward reached, over all processes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

from funcpipe._src.core.errors import raise_all
from funcpipe._src.core.tree import paths
from funcpipe._src.data.stage import names_of
from funcpipe._src.engine.prepare import Prepared
from funcpipe._src.stages.trainable import key_of

UnusedLeaf: TypeAlias = tuple[int, int, str]  # (stage, leaf number, name) of a parameter


def unused_leaves(ready: Prepared, stages: Iterable[int] | None = None) -> list[UnusedLeaf]:
    """Return the trainable leaves that no backward of this process reached.

    ``stages`` limits the search to some stages of this process.
    """
    return [
        (stage, number, repr(_key(ready, stage, number)))
        for stage in (ready.bounds if stages is None else stages)
        for number in ready.bounds[stage].params.unused()
    ]


def unused_in_all(ready: Prepared, unused: Iterable[Sequence[UnusedLeaf]]) -> list[UnusedLeaf]:
    """Return the leaves that no backward of any replica reached, from the lists of all processes.

    A tied leaf is unused only if all members of its tie are: each gets the sum over all.
    """
    counts = Counter(leaf for leaves in unused for leaf in leaves)
    found = [leaf for leaf, count in counts.items() if count == ready.part.replicas]
    names = {(stage, name) for stage, _, name in found}
    groups = [{(stage, repr(key)) for stage, key in group} for group in ready.plan.ties]
    used = {member for group in groups if not group <= names for member in group}
    return [leaf for leaf in found if (leaf[0], leaf[2]) not in used]


def unused_keys(ready: Prepared, unused: Sequence[UnusedLeaf]) -> tuple[tuple[int, Any], ...]:
    """Return (stage, path) of the unused leaves of this process.

    Raises PlanError for any unused leaf if the run has ``check="used"``.
    """
    if ready.strict:
        faults = [f"{key} of {names_of(ready.plan.stages)[stage]}" for stage, _, key in unused]
        raise_all(
            'these trainable leaves got no gradient (check="used"); use them, freeze them '
            "(trainable=, requires_grad), or leave the check out:",
            faults,
        )
    return tuple(
        [
            (stage, _key(ready, stage, number))
            for stage, number, _ in unused
            if stage in ready.bounds
        ]
    )


def _key(ready: Prepared, stage: int, number: int) -> Any:
    """Return a leaf's path in the form that users write."""
    return key_of(paths(ready.params[stage])[number])
