"""Find operations of a traced forward that must stay in one stage, and the positions where cuts
may lie."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import fx

from funcpipe._src.models.traced.export import Captured, is_marker
from funcpipe._src.models.traced.nodes import writes_of


@dataclass(frozen=True)
class Bond:
    """Operations that must be in one stage."""

    nodes: tuple[fx.Node, ...]  # the operations, in order
    # For a write in place, the last of its ``nodes``; the first is its target.
    wrote: fx.Node | None = None
    buffer: str = ""  # the buffer that they write or read, if it is the reason

    def fault(self, stages: Mapping[fx.Node, int]) -> str:
        """The message if a cut separates the operations, for these stages of operations, or ""."""
        parts = sorted({stages[node] for node in self.nodes})
        if len(parts) < 2:
            return ""
        if self.wrote is None:
            return (
                f"the buffer {self.buffer!r}, which the forward writes, is used in stages {parts}"
            )
        root = self.nodes[0]
        return (
            f"{self.wrote.name} in stage {stages[self.wrote]} writes in place into {root.name} of "
            f"stage {stages[root]}"
        )


def bonds(captured: Captured) -> list[Bond]:
    """List the operations that stay together: for writes in place, then for buffers."""
    body = captured.body
    inside = set(body)
    writes: list[Bond] = []
    buffers: dict[fx.Node, set[fx.Node]] = {}
    for node, root in writes_of(captured.module):
        if root in inside:
            writes.append(Bond((root, node), wrote=node))
        else:
            buffers.setdefault(root, set()).add(node)
    for root, writers in buffers.items():
        users = tuple(node for node in body if node in writers or root in node.all_input_nodes)
        writes.append(Bond(users, buffer=captured.sources.get(root.name, ("", root.name))[1]))
    return writes


def free(captured: Captured) -> list[bool]:
    """For each operation of the body, whether a stage may begin with it."""
    body = captured.body
    numbers = {node: number for number, node in enumerate(body)}
    allowed = [node.target is not operator.getitem and not is_marker(node) for node in body]
    for bond in bonds(captured):
        joined = [numbers[node] for node in bond.nodes]
        first, last = min(joined), max(joined)
        allowed[first + 1 : last + 1] = [False] * (last - first)
    return allowed


def joining_buffers(captured: Captured) -> list[str]:
    """List the written buffers with layers between their first and last use."""
    body = captured.body
    numbers = {node: number for number, node in enumerate(body)}
    found: list[str] = []
    for bond in bonds(captured):
        if bond.buffer:
            uses = [numbers[node] for node in bond.nodes]
            between = [node for node in body[min(uses) : max(uses)] if node not in bond.nodes]
            inputs = {value.name for node in between for value in node.all_input_nodes}
            if any(captured.sources.get(name, ("",))[0] == "param" for name in inputs):
                found.append(bond.buffer)
    return found


def moved(places: Sequence[int], allowed: Sequence[bool]) -> list[int]:
    """Move each place to the nearest place where a stage may begin, of two the later; 0 stays.

    >>> moved([0, 2, 3], [True, True, False, False, True])
    [0, 1, 4]
    """
    legal = [place for place, may in enumerate(allowed) if may] or [0]
    return [
        place and min(legal, key=lambda start: (abs(start - place), -start)) for place in places
    ]
