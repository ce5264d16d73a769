"""The programs of a stage for one signature: F, B, I, W, written when they are first needed."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from funcpipe.programs.cut import Backward, Cut
from funcpipe.programs.joint import Joint
from funcpipe.programs.source import Box, Code


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

    whole: Code
    inputs: Code
    weights: Code
    operands: Code
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

    ``P`` holds the tensors of parameters and state, ``X`` those of input, skips, feeds and target, ``R`` the keys of
    random draws, ``K`` what F keeps, ``G`` the gradients that come in, ``L`` what I leaves for W, ``S`` the sums into
    which the gradients of the parameters are added.

    Attributes:
        joint: the traced graph.
        forward: ``F(P, X) -> outputs, K``.
        alone: ``A(P, X) -> outputs``, where no backward follows.
        residual_bytes: of K: what lies in memory between F and its backward.
    """

    def __init__(self, joint: Joint, *, fuse: bool) -> None:
        self.joint, self.fuse, self._cut = joint, fuse, Cut(joint)
        self._given = [Box("P", joint.params), Box("X", joint.inputs)]
        self._halves: dict[frozenset[int], Half] = {}
        self._writing = threading.Lock()
        self.residual_bytes = nbytes(self._cut.kept)

    @cached_property
    def forward(self) -> Code:
        """F where a backward follows."""
        cut = self._cut
        return self._write("F", cut.forward, "[{0}], [{1}]", [self.joint.outs, cut.kept])

    @cached_property
    def alone(self) -> Code:
        """F where none does."""
        return self._write("A", self._cut.alone, "[{0}]", [self.joint.outs])

    def _write(self, name: str, part: Any, returns: str, results: Any) -> Code:
        boxes = [*self._given, *([Box("R")] if self.joint.draws else [])]
        return Code(name, boxes, part, returns, results, module=self.joint.module)

    @property
    def backward(self) -> Code:
        """B."""
        return self.half(frozenset()).whole

    @property
    def backward_input(self) -> Code:
        """I."""
        return self.half(frozenset()).inputs

    @property
    def backward_weight(self) -> Code:
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
            with self._writing:
                found = self._halves[missing] = self._backward(self._cut.without(missing))
        return found

    def _backward(self, cut: Backward) -> Half:
        params, kept, given = (
            Box("P", self.joint.params),
            Box("K", self._cut.kept, emptied=True),
            Box("G", self.joint.cotangents, emptied=True),
        )
        rows = ", ".join(f"[{{{number}}}]" for number in range(len(cut.wanted)))
        more: dict[str, Any] = {"module": self.joint.module}
        sums: dict[str, Any] = {"sums": cut.sums, "fused": cut.products if self.fuse else ()}
        rest = [None if number in cut.products else node for number, node in enumerate(cut.sums)]
        factors = [[one.left for one in cut.products.values()], [one.right for one in cut.products.values()]]
        left = f"[{rows}], [{{{len(cut.wanted)}}}]"
        return Half(
            Code("B", [params, kept, given], cut.whole, f"[{rows}]", cut.wanted, **more, **sums),
            Code("I", [params, kept, given], cut.inputs, left, [*cut.wanted, cut.left], **more),
            Code("W", [params, Box("L", cut.left, emptied=True)], cut.weights, "", [], **more, **sums),
            Code(
                "V",
                [params, Box("L", cut.left, emptied=True)],
                cut.operands,
                "[{0}], [{1}]",
                factors,
                **more,
                sums=rest,
            ),
            [(number, one.turned) for number, one in cut.products.items()],
            nbytes(cut.left),
        )

    def __str__(self) -> str:
        return "\n".join(map(str, (self.forward, self.backward, self.backward_input, self.backward_weight)))


def nbytes(nodes: Iterable[fx.Node]) -> int:
    """Bytes of some values; what shares memory counts once."""
    seen: dict[int, int] = {}
    for node in nodes:
        val = node.meta["val"]
        for one in val if isinstance(val, (tuple, list)) else (val,):  # pyright: ignore
            if isinstance(one, Tensor):
                seen[id(one.untyped_storage())] = one.numel() * one.element_size()
    return sum(seen.values())
