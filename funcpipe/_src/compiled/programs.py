"""The programs of a stage for one signature: F, B, I and W, each written at its first use.

`cut` decides what each program computes, `source` writes the code.
"""

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
"""Their arguments: scores, target, weight, reduction (1 for a mean), ignore_index."""


class Programs:
    """The programs of one stage for one signature; ``print`` shows their Python code.

    The programs use these lists of tensors:

    - ``P``: parameters and state, then the values that C computes from them once per run;
    - ``X``: input, skips, feeds and target;
    - ``R``: the keys of random draws;
    - ``K``: the values that F keeps for the backward;
    - ``G``: the incoming gradients;
    - ``L``: the values that I leaves for W;
    - ``S``: the sums to which the gradients of the parameters are added.

    >>> layer = fp.compile_stage(fp.Stage(lambda w, x: x @ w))
    >>> programs = fp.make_programs(layer, torch.ones(3, 3), torch.ones(2, 3))
    >>> programs.residual_bytes
    24

    Attributes:
        joint: the traced graph.
        once: ``C(P) -> values``, computed from parameters and state alone, once per run. None:
            there are none.
        forward: ``F(P, X) -> outputs, K``.
        alone: ``A(P, X) -> outputs``, a forward without a backward.
        residual_bytes: bytes of K, which stay in memory between F and its backward.
        once_bytes: bytes of the results of C. They stay in memory from the first F to the end of
            the run, or until gathered parameters are freed.
    """

    def __init__(self, joint: Joint, *, fuse: bool, backend: Backend | None = None) -> None:
        self.joint, self._backend, self._cut = joint, backend, Cut(joint, fuse=fuse)
        self._backwards: dict[frozenset[int], CutBackward[Code]] = {}
        self.residual_bytes = sum(memory_of(self._cut.kept).values())
        once = self._cut.once
        # C runs once per run, so a backend would not pay for its build.
        self.once = None if once is None else Code(once, joint.module)
        present = memory_of(joint.params[: len(joint.params) - len(joint.once)])
        self.once_bytes = sum(
            size for memory, size in memory_of(joint.once).items() if memory not in present
        )

    @cached_property
    def means(self) -> list[tuple[bool, int]]:
        """The means of cross entropies in the graph.

        Each is a pair: whether the classes have weights, and the ignored class.
        """
        nodes = [node for node in self.joint.module.graph.nodes if node.target in _CROSS_ENTROPIES]
        return [(node.args[2] is not None, node.args[4]) for node in nodes if node.args[3] == 1]

    def complete(self, bare: list[Tensor]) -> list[Tensor]:
        """Return P: the tensors of parameters and state, and the results of C.

        Args:
            bare: the tensors of parameters and state.
        """
        return bare if self.once is None else [*bare, *self.once.call(bare)]

    def _code(self, part: Part) -> Code:
        with tracing:
            return Code(part, self.joint.module, self._backend)

    @cached_property
    def forward(self) -> Code:
        """F, the forward before a backward."""
        return self._code(self._cut.forward)

    @cached_property
    def alone(self) -> Code:
        """A, the forward without a backward."""
        return self._code(self._cut.alone)

    @property
    def backward(self) -> Code:
        """B, the whole backward."""
        return self.half().whole

    @property
    def backward_input(self) -> Code:
        """I, the gradients of the inputs."""
        return self.half().inputs

    @property
    def backward_weight(self) -> Code:
        """W, the gradients that I leaves."""
        return self.half().weights

    @property
    def weight_residual_bytes(self) -> int:
        """Bytes of L, which stay in memory between I and W."""
        return sum(memory_of(self.half().left).values())

    def half(self, missing: frozenset[int] = frozenset()) -> CutBackward[Code]:
        """Return the backward programs for the case that some outputs have no gradient.

        Args:
            missing: the indices of the outputs without a gradient.
        """
        backward = self._backwards.get(missing)
        if backward is None:
            with tracing:
                *parts, left = self._cut.backward(missing)
                written = CutBackward(*map(self._code, parts), left=left)
                # Two lanes may both have found nothing: then both use the first one written.
                backward = self._backwards.setdefault(missing, written)
        return backward

    def build(self, *, split: bool, remat: bool) -> None:
        """Let the backend build the programs that a step needs.

        Args:
            split: True: I and W. False: B.
            remat: True: also A.
        """
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
