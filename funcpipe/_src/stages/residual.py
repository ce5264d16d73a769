"""`EagerResidual`: the autograd graph of an eager forward, whose saved tensors can be offloaded.

`saved_tensors` takes the tensors out of the graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import chain
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from funcpipe._src.core.border import add_gradients, dense
from funcpipe._src.core.plain_tensors import address, is_plain
from funcpipe._src.data.result import Loss
from funcpipe._src.devices.host_link import HostStream
from funcpipe._src.stages.bound import Cotangents, Gradients
from funcpipe._src.stages.saved_tensors import SavedPiece, saved_pieces, take_out

GradientLeaves: TypeAlias = dict[int, Tensor]
"""The leaves of a border that receive its gradients, by leaf number."""


@dataclass(slots=True, eq=False)
class EagerResidual:
    """The graph of one forward: its outputs, its losses, and the leaves of its inputs."""

    microbatch: int
    y: list[Any]
    stash: dict[str, list[Any]]
    total: Tensor | None  # the sum of the microbatch's losses, with its graph
    loss: Loss | None  # the loss without its graph
    side: tuple[Any, Any] | None
    x_count: int
    x: GradientLeaves
    skips: list[tuple[int, GradientLeaves]]
    replay: AbstractContextManager[Any] | None = None
    """A context in which the backward repeats the forward's draws; None: it draws nothing."""
    _moved: int | None = None
    _pieces: Sequence[SavedPiece] = ()
    _event: Any = None

    @property
    def nbytes(self) -> int:
        """The bytes of inputs and outputs, without tensors that autograd saved in between.

        After a move, the bytes that came back from the host.
        """
        if self._moved is not None:
            return self._moved
        outputs = [*self.y, *chain.from_iterable(self.stash.values())]
        return sum(leaf.nbytes for leaf in outputs + self.inputs() if isinstance(leaf, Tensor))

    def inputs(self) -> list[Tensor]:
        """Return the leaves of the input and the skips that get gradients."""
        leaves = [*self.x.values()]
        for _, of_skip in self.skips:
            leaves += of_skip.values()
        return leaves

    def roots(self, *, loss: bool = True) -> list[Tensor]:
        """Return the results that require gradients: loss, outputs, stash and auxiliary loss."""
        ends: list[Any] = [self.total, *self.y] if loss and self.total is not None else [*self.y]
        for leaves in self.stash.values():
            ends += leaves
        if self.side is not None:
            ends.append(self.side[0])
        return [end for end in ends if isinstance(end, Tensor) and end.requires_grad]

    def outset(
        self, y: Gradients | None, stash: dict[str, list[Gradients]]
    ) -> tuple[list[Tensor | GradientEdge], list[Tensor]]:
        """Return the outputs and stashed values from which a backward begins, and their
        gradients."""
        roots: list[Tensor | GradientEdge] = []
        gradients: list[Tensor] = []
        if y is not None:
            for end, gradient in zip(self.y, y, strict=True):
                add_root(end, gradient, roots, gradients)
        for name, parts in stash.items():
            for end, gradient in zip(
                self.stash[name], add_gradients(None, *parts) or (), strict=True
            ):
                add_root(end, gradient, roots, gradients)
        return roots, gradients

    def cotangents(self) -> Cotangents:
        """Return the gradients that a backward has left at the inputs."""
        skips = [_gradients_of(*skip) for skip in self.skips] if self.skips else []
        return Cotangents(_gradients_of(self.x_count, self.x), skips)

    def move(self, to: HostStream, *, fixed: frozenset[int] = frozenset()) -> Any:
        """Move the tensors that autograd saved to the host, or back; see `saved_tensors`.

        The residual drops the numbers of outputs and input leaves. A backward needs only the
        outputs' graph edges and the leaves' shapes; if it needs numbers, autograd has saved them.
        The losses stay on the device, because they are single numbers.

        Returns:
            The event after which the copies are ready; None: they are ready.

        Raises:
            RuntimeError: autograd's error for a saved tensor that was modified in place.
        """
        with torch.no_grad():
            return self._leave(to, fixed) if to.out else self._return(to)

    def _leave(self, to: HostStream, fixed: frozenset[int]) -> Any:
        self.y = _edges(self.y)
        self.stash = {name: _edges(leaves) for name, leaves in self.stash.items()}
        ends = [
            self.y,
            *self.stash.values(),
            (self.total, self.side[0] if self.side else None),
        ]
        roots = [edge for row in ends for edge in row if isinstance(edge, (Tensor, GradientEdge))]
        self._pieces = saved_pieces(take_out(roots, to, fixed))
        copies, self._event = to.copy([piece.flat for piece in self._pieces])
        for piece, copy in zip(self._pieces, copies, strict=True):
            piece.empty()
            piece.flat = copy
        for leaf in self.inputs():
            if is_plain(leaf) and leaf.numel() and to.takes(leaf) and address(leaf) not in fixed:
                # By .data: the graph ends at this very tensor, so it must stay the same object.
                leaf.data = to.place.backend.hollow(leaf)
        self._moved = 0
        return self._event

    def _return(self, to: HostStream) -> Any:
        alive = [piece for piece in self._pieces if piece.alive]
        copies, event = to.copy([piece.flat for piece in alive], self._event)
        for piece, copy in zip(alive, copies, strict=True):
            piece.flat = copy
            piece.restore()
        self._moved = sum(copy.nbytes for copy in copies)
        # Drop the pieces, so that autograd alone holds the tensors and frees them in its backward.
        self._pieces, self._event = (), None
        return event


def _edges(leaves: Sequence[Any]) -> list[Any]:
    """Return the graph edges of the leaves, None for leaves that require no gradient."""
    return [
        get_gradient_edge(leaf) if isinstance(leaf, Tensor) and leaf.requires_grad else None
        for leaf in leaves
    ]


def _gradients_of(count: int, leaves: GradientLeaves) -> Gradients:
    """Return ``count`` gradients: those of the leaves, None for values without a leaf."""
    gradients: Gradients = [None] * count
    for index, leaf in leaves.items():
        if leaf.grad is not None:
            # Kernels round differently by layout, and a copy to another device is dense, too.
            gradients[index] = dense(leaf.grad)
    return gradients


def add_root(
    end: Any, gradient: Tensor | None, roots: list[Tensor | GradientEdge], gradients: list[Tensor]
) -> None:
    """Add an output and its gradient to the roots of a backward, if both exist.

    The output is a graph edge after an offload.
    """
    if gradient is not None and (
        isinstance(end, GradientEdge) or (isinstance(end, Tensor) and end.requires_grad)
    ):
        roots.append(end)
        gradients.append(gradient)
