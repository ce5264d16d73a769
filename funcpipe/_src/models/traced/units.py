"""Find where a traced forward may be cut: operations that must stay in one stage, and units for
policies, which are runs of operations of one block."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from torch import Tensor, fx, nn

from funcpipe._src.models.policy import Units
from funcpipe._src.models.traced.export import Captured, is_marker
from funcpipe._src.models.traced.nodes import layer_of, row_bytes, writes_of


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


def units_of_graph(
    captured: Captured, model: nn.Module, num_stages: int | None, *, total: int | None = None
) -> tuple[Units, list[int]]:
    """Return the units, and the index of the node at which each begins.

    A unit is a run of operations of one entry of a ModuleList or Sequential, or of one layer
    outside of any list. Of nested lists the outermost counts, unless that gives fewer units with
    parameters than stages. A unit at which no stage can begin starts at the nearest possible
    operation (`free`). If that leaves nothing of the unit, it is merged with its neighbour. So any
    cut between units is legal.

    ``total`` is the wanted number of units, the sum of given sizes. If some depth of nested lists
    gives this number, that depth counts. If none does, but the model lists so many units, these
    count, and some cuts between them are illegal.
    """
    lists = [
        path
        for path, module in model.named_modules()
        if isinstance(module, (nn.ModuleList, nn.Sequential)) and len(module) > 1
    ]
    allowed = free(captured)
    depths = range(2 + max((path.count(".") for path in lists), default=-1))
    # A generator, because most models need only the first of these.
    divisions = (
        _units(captured, model, [path for path in lists if path.count(".") >= depth], allowed)
        for depth in depths
    )
    passed: list[tuple[Units, list[int]]] = []
    fitting: list[tuple[Units, list[int]]] = []
    for division in divisions:
        passed.append(division)
        if sum(map(bool, division[0].parameters)) >= (num_stages or 1):
            fitting.append(division)
            if total is None:
                break
    candidates = [*fitting, *reversed(passed)]
    for division in candidates:
        if len(division[0]) == total:
            return division
    as_listed = candidates[0] if total is None else _units(captured, model, lists, None)
    return as_listed if len(as_listed[0]) == total else candidates[0]


def _units(
    captured: Captured, model: nn.Module, lists: Sequence[str], allowed: Sequence[bool] | None
) -> tuple[Units, list[int]]:
    body = captured.body
    blocks = [_block(layer_of(node).partition("@")[0], lists) for node in body]
    containers = {path[:i] for path in blocks for i, letter in enumerate(path) if letter == "."} | {
        ""
    }
    starts: list[int] = []
    names: list[str] = []
    # Operations of a container between its layers belong to the layer before them.
    for number, name in enumerate(blocks):
        if name not in containers and (not names or name != names[-1]):
            names.append(name)
            starts.append(number if starts else 0)
    if not names:
        names, starts = ["model"], [0]
    if allowed is not None:
        # Backwards, because later entries replace earlier ones: of units that were moved to one
        # place, the first gives the name.
        first = {
            place: name
            for name, place in reversed(list(zip(names, moved(starts, allowed), strict=True)))
        }
        names, starts = list(first.values())[::-1], list(first)[::-1]
    bounds = [*starts, len(body)]
    counted: set[str] = set()
    weights = dict(model.named_parameters())
    parameters: list[int] = []
    borders: list[int] = []
    for start, stop in pairwise(bounds):
        read = {value.name for node in body[start:stop] for value in node.all_input_nodes}
        sources = [captured.sources[name] for name in read & captured.sources.keys()]
        used = {name for kind, name in sources if kind == "param"}
        parameters.append(sum(weights[name].nbytes for name in used - counted))
        counted |= used
        borders.append(_alive(captured, body, stop))
    return Units(tuple(names), tuple(parameters), tuple(borders)), starts


def _block(path: str, lists: Sequence[str]) -> str:
    """The entry of the outermost list that contains a layer, or the layer itself."""
    for container in lists:
        prefix = f"{container}." if container else ""
        if path.startswith(prefix) and path != container:
            return prefix + path[len(prefix) :].partition(".")[0]
    return path


def _alive(captured: Captured, body: Sequence[fx.Node], stop: int) -> int:
    """Bytes per row of the values that are computed before a position and read after it."""
    before = set(body[:stop])
    alive = {value for node in body[stop:] for value in node.all_input_nodes if value in before}
    return sum(
        row_bytes(value.meta.get("val"))
        for value in alive
        if isinstance(value.meta.get("val"), Tensor)
    )
