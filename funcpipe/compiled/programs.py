"""The programs of a stage for one signature: F, B, I, W, written when they are first needed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from funcpipe.compiled.backend import Backend, Built
from funcpipe.compiled.cut import Backward, Cut, Part, Product, gather
from funcpipe.compiled.joint import Joint, tracing
from funcpipe.compiled.recompute import memory_of
from funcpipe.compiled.source import Box, Code


class Half(NamedTuple):
    """The backward of a stage, in one piece and in two.

    Attributes:
        whole: ``B(P, K, G, S) -> gradients of input and skips``.
        inputs: ``I(P, K, G) -> gradients, L``.
        weights: ``W(P, L, S)``.
        operands: ``V(P, L, S) -> left factors, right factors``: W without its products, which are made later.
        products: the numbers of their sums, and whether the left factors are to be transposed.
        weight_bytes: of L.
    """

    whole: Code | Built
    inputs: Code | Built
    weights: Code | Built
    operands: Code | Built
    products: list[tuple[int, bool]]
    weight_bytes: int

    def merge(self, factors: Sequence[tuple[list[Tensor], list[Tensor]]], sums: Sequence[Tensor | None]) -> None:
        """Add the products of several microbatches: one larger product for each sum."""
        for at, (number, turned) in enumerate(self.products):
            left = torch.cat([one[at] for one, _ in factors], 0 if turned else 1)
            total = sums[number]
            assert total is not None
            total.addmm_(left.t() if turned else left, torch.cat([one[at] for _, one in factors]))


class Programs:
    """The programs of one stage for one signature; printed, their text.

    ``P`` holds the tensors of parameters and state, and then what C computes of these, once a run; ``X`` those of input,
    skips, feeds and target, ``R`` the keys of random draws, ``K`` what F keeps, ``G`` the gradients that come in, ``L``
    what I leaves for W, ``S`` the sums into which the gradients of the parameters are added.

    Attributes:
        joint: the traced graph.
        once: ``C(P) -> values``, of parameters and state alone; None: there are none.
        forward: ``F(P, X) -> outputs, K``.
        alone: ``A(P, X) -> outputs``, where no backward follows.
        residual_bytes: of K: what lies in memory between F and its backward.
        once_bytes: of what C computes: it lies in memory from the first F to the end of the run.
    """

    def __init__(self, joint: Joint, *, fuse: bool, backend: Backend | None = None) -> None:
        self.joint, self.fuse, self.backend, self._cut = joint, fuse, backend, Cut(joint)
        self._given = [Box("P", joint.params), Box("X", joint.inputs), *([Box("R")] if joint.draws else [])]
        self._halves: dict[frozenset[int], Half] = {}
        self.residual_bytes = nbytes(self._cut.kept)
        bare = joint.params[: len(joint.params) - len(joint.once)]
        self.once = (
            self._make("C", [Box("P", bare)], gather(joint.once, stop={*bare}), [joint.once]) if joint.once else None
        )
        self.once_bytes = nbytes([*bare, *joint.once]) - nbytes(bare)

    def complete(self, given: list[Tensor]) -> list[Tensor]:
        """What P holds: the tensors of parameters and state, and what is computed of them."""
        return given if self.once is None else [*given, *self.once.call(given)]

    @cached_property
    def forward(self) -> Code | Built:
        """F where a backward follows."""
        return self._make("F", self._given, self._cut.forward, [self.joint.outs, self._cut.kept])

    @cached_property
    def alone(self) -> Code | Built:
        """F where none does."""
        return self._make("A", self._given, self._cut.alone, [self.joint.outs])

    def build(self, *, split: bool, remat: bool) -> None:
        """Have a backend build what a step needs: F, also without what it keeps (``remat``), I and W (``split``) or B."""
        half = self.half(frozenset())
        forwards = (self.forward, self.alone) if remat else (self.forward,)
        for program in (*forwards, *((half.inputs, half.weights) if split else (half.whole,))):
            if isinstance(program, Built):
                program.build()

    def _make(
        self,
        name: str,
        boxes: Sequence[Box],
        part: Part,
        results: Sequence[Sequence[fx.Node | None]],
        sums: Sequence[fx.Node | None] | None = None,
        products: Mapping[int, Product] | None = None,
        columns: Sequence[int] = (),
    ) -> Code | Built:
        """Write a program, or have it built. One that draws is written: no backend knows keys; so is C, which runs once."""
        with tracing:
            module, fused = self.joint.module, products if self.fuse and products else {}
            if self.backend is not None and name in _PACK and not any("draw" in node.meta for node in part.nodes):
                return Built(name, boxes, part, results, _PACK[name], module=module, backend=self.backend, sums=sums or (), products=fused)  # fmt: skip
            rows = [f"[{{{number}}}]" for number in range(len(results))]
            return Code(
                name,
                boxes,
                part,
                _RETURNS[name](rows),
                results,
                module=module,
                sums=sums,
                fused=[*fused, *(columns if self.fuse else ())],
            )

    @property
    def backward(self) -> Code | Built:
        """B."""
        return self.half(frozenset()).whole

    @property
    def backward_input(self) -> Code | Built:
        """I."""
        return self.half(frozenset()).inputs

    @property
    def backward_weight(self) -> Code | Built:
        """W."""
        return self.half(frozenset()).weights

    @property
    def weight_residual_bytes(self) -> int:
        """Bytes of L: what lies in memory between I and W."""
        return self.half(frozenset()).weight_bytes

    def half(self, missing: frozenset[int]) -> Half:
        """The backward where the roots with these numbers have no gradient."""
        found = self._halves.get(missing)
        if found is None:
            with tracing:
                found = self._halves.get(missing) or self._backward(self._cut.without(missing))
                self._halves[missing] = found
        return found

    def _backward(self, cut: Backward) -> Half:
        params, kept, given = (
            Box("P", self.joint.params),
            Box("K", self._cut.kept, emptied=True),
            Box("G", self.joint.cotangents, emptied=True),
        )
        rest = [None if number in cut.products else node for number, node in enumerate(cut.sums)]
        factors = [[one.left for one in cut.products.values()], [one.right for one in cut.products.values()]]
        left = Box("L", cut.left, emptied=True)
        return Half(
            self._make("B", [params, kept, given], cut.whole, cut.wanted, cut.sums, cut.products, cut.columns),
            self._make("I", [params, kept, given], cut.inputs, [*cut.wanted, cut.left]),
            self._make("W", [params, left], cut.weights, [], cut.sums, cut.products, cut.columns),
            self._make("V", [params, left], cut.operands, factors, rest),
            [(number, one.turned) for number, one in cut.products.items()],
            nbytes(cut.left),
        )

    def __str__(self) -> str:
        parts = [] if self.once is None else [self.once]
        return "\n".join(map(str, (*parts, self.forward, self.backward, self.backward_input, self.backward_weight)))


_RETURNS: dict[str, Callable[[list[str]], str]] = {
    "C": lambda rows: rows[0],
    "F": ", ".join,
    "A": lambda rows: rows[0],
    "B": lambda rows: f"[{', '.join(rows)}]",
    "I": lambda rows: f"[{', '.join(rows[:-1])}], {rows[-1]}",
    "W": lambda rows: "",
    "V": ", ".join,
}
"""What each program returns, of its lists; and the same for those that a backend builds."""

_PACK: dict[str, Callable[[list[list[Any]]], Any]] = {
    "F": lambda rows: rows,
    "A": lambda rows: rows[0],
    "B": lambda rows: rows,
    "I": lambda rows: (rows[:-1], rows[-1]),
    "W": lambda rows: None,
    "V": lambda rows: rows,
}


def nbytes(nodes: Iterable[fx.Node]) -> int:
    """Bytes of some values; what shares memory counts once."""
    return sum(memory_of(nodes).values())
