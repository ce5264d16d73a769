"""The programs of a stage for one signature: F, B, I, W, written when they are first needed."""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from funcpipe._src.compiled.backend import Backend
from funcpipe._src.compiled.cut import Cut, CutBackward, Part
from funcpipe._src.compiled.joint import Joint
from funcpipe._src.compiled.recompute import memory_of
from funcpipe._src.compiled.source import Code
from funcpipe._src.core.shown import guarded
from funcpipe._src.core.tracing import tracing
from funcpipe._src.core.words import size_of

_CROSS_ENTROPIES = (
    torch.ops.aten.nll_loss_forward.default,
    torch.ops.aten.nll_loss2d_forward.default,
)
"""Called with scores, target, weight, reduction (1 for a mean) and ignore_index."""


class Programs:
    """The programs of one stage for one signature; printed, their text.

    ``P`` holds the tensors of parameters and state, and then what C computes of these, once a run;
    ``X`` those of input, skips, feeds and target, ``R`` the keys of random draws, ``K`` what F
    keeps, ``G`` the gradients that come in, ``L`` what I leaves for W, ``S`` the sums into which
    the gradients of the parameters are added.

    Attributes:
        joint: the traced graph.
        once: ``C(P) -> values``, of parameters and state alone; None: there are none.
        forward: ``F(P, X) -> outputs, K``.
        alone: ``A(P, X) -> outputs``, where no backward follows.
        residual_bytes: of K: what lies in memory between F and its backward.
        once_bytes: of what C computes: it lies in memory from the first F to the end of the run, or
            until parameters that are gathered give their memory back.
    """

    def __init__(self, joint: Joint, *, fuse: bool, backend: Backend | None = None) -> None:
        self.joint, self._backend, self._cut = joint, backend, Cut(joint, fuse=fuse)
        self._backwards: dict[frozenset[int], CutBackward[Code]] = {}
        self.residual_bytes = sum(memory_of(self._cut.kept).values())
        once = self._cut.once
        self.once = (
            None if once is None else Code(once, joint.module)
        )  # it runs once: no backend builds it
        present = memory_of(joint.params[: len(joint.params) - len(joint.once)])
        self.once_bytes = sum(
            size for memory, size in memory_of(joint.once).items() if memory not in present
        )

    @cached_property
    def means(self) -> list[tuple[bool, int]]:
        """The means of cross entropies in the graph: are their classes weighed, and which class is
        left out."""
        nodes = [node for node in self.joint.module.graph.nodes if node.target in _CROSS_ENTROPIES]
        return [(node.args[2] is not None, node.args[4]) for node in nodes if node.args[3] == 1]

    def complete(self, bare: list[Tensor]) -> list[Tensor]:
        """What P holds: the tensors of parameters and state, and what is computed of them."""
        return bare if self.once is None else [*bare, *self.once.call(bare)]

    def _code(self, part: Part) -> Code:
        with tracing:
            return Code(part, self.joint.module, self._backend)

    @cached_property
    def forward(self) -> Code:
        """F where a backward follows."""
        return self._code(self._cut.forward)

    @cached_property
    def alone(self) -> Code:
        """F where none does."""
        return self._code(self._cut.alone)

    @property
    def backward(self) -> Code:
        """B."""
        return self.half().whole

    @property
    def backward_input(self) -> Code:
        """I."""
        return self.half().inputs

    @property
    def backward_weight(self) -> Code:
        """W."""
        return self.half().weights

    @property
    def weight_residual_bytes(self) -> int:
        """Bytes of L: what lies in memory between I and W."""
        return sum(memory_of(self.half().left).values())

    def half(self, missing: frozenset[int] = frozenset()) -> CutBackward[Code]:
        """The backward where the roots with these numbers have no gradient."""
        backward = self._backwards.get(missing)
        if backward is None:
            with tracing:
                *parts, left = self._cut.backward(missing)
                written = CutBackward(*map(self._code, parts), left=left)
                backward = self._backwards.setdefault(missing, written)
        return backward

    def build(self, *, split: bool, remat: bool) -> None:
        """Have a backend build what a step needs: F, A as well for ``remat``, and I and W for
        ``split``, else B."""
        half = self.half()
        forwards = (self.forward, self.alone) if remat else (self.forward,)
        for program in (*forwards, *((half.inputs, half.weights) if split else (half.whole,))):
            program.build()

    @guarded
    def __repr__(self) -> str:
        backend = "graph" if self._backend is None else "built by a backend"
        return (
            f"<Programs: {backend}; {size_of(self.residual_bytes)} kept from F to B; print them "
            "to read them>"
        )

    def __str__(self) -> str:
        parts = [] if self.once is None else [self.once]
        return "\n".join(
            map(
                str,
                (*parts, self.forward, self.backward, self.backward_input, self.backward_weight),
            )
        )
