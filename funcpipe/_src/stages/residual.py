"""The residual of an eager forward: an autograd graph, whose saved tensors can wait in host
memory."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
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
"""The leaves of a border that hold its gradients, by their numbers among all."""


@dataclass(slots=True, eq=False)
class EagerResidual:
    """The graph of one forward: its outputs, its losses, and the leaves at its inputs."""

    microbatch: int
    y: list[Any]
    stash: dict[str, list[Any]]
    total: Tensor | None
    """The sum of its losses, with the graph."""
    loss: Loss | None
    """The loss without its graph."""
    side: tuple[Any, Any] | None
    x_count: int
    x: GradientLeaves
    skips: list[tuple[int, GradientLeaves]]
    replay: AbstractContextManager[Any] | None = None
    """Inside of it the backward draws what the forward drew; None: it draws nothing."""
    _moved: int | None = None
    _pieces: Sequence[SavedPiece] = ()
    _event: Any = None

    @property
    def nbytes(self) -> int:
        """Bytes of the inputs and outputs; what autograd saved in between is not counted. Of a
        moved one what moved."""
        if self._moved is not None:
            return self._moved
        named = [
            *self.y,
            *(leaf for leaves in self.stash.values() for leaf in leaves),
            *self.x.values(),
        ]
        named += [leaf for _, leaves in self.skips for leaf in leaves.values()]
        return sum(leaf.nbytes for leaf in named if isinstance(leaf, Tensor))

    def inputs(self) -> list[Tensor]:
        """The leaves of its input and its skips that have a gradient."""
        leaves = [*self.x.values()]
        for _, of_skip in self.skips:
            leaves += of_skip.values()
        return leaves

    def roots(self, *, loss: bool = True) -> list[Tensor]:
        """Return the results that require gradients: the loss, the outputs, stashed values and the
        auxiliary loss."""
        ends: list[Any] = [self.total, *self.y] if loss and self.total is not None else [*self.y]
        for leaves in self.stash.values():
            ends += leaves
        if self.side is not None:
            ends.append(self.side[0])
        return [end for end in ends if isinstance(end, Tensor) and end.requires_grad]

    def outset(
        self, y: Gradients | None, stash: dict[str, list[Gradients]]
    ) -> tuple[list[Tensor | GradientEdge], list[Tensor]]:
        """Return the tensors from which a backward begins, and their gradients: outputs and stashed
        values."""
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
        """What a backward has left at its inputs."""
        skips = [_gradients_of(*skip) for skip in self.skips] if self.skips else []
        return Cotangents(_gradients_of(self.x_count, self.x), skips)

    def move(self, to: HostStream, *, fixed: frozenset[int] = frozenset()) -> Any:
        """Move what autograd saved to the host, or back; see `saved_tensors` for what stays.

        Of the outputs only their places in the graph are kept, of the leaves at the inputs only
        their shapes: a backward needs no more, and where it needs their numbers autograd saved
        them. The losses stay: they are single numbers.

        Returns:
            The event after which it is there; None: it is.

        Raises:
            RuntimeError: autograd's own, where a saved tensor was modified in place.
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
        for leaves in (self.x, *(leaves for _, leaves in self.skips)):
            for leaf in leaves.values():
                if (
                    is_plain(leaf)
                    and leaf.numel()
                    and to.takes(leaf)
                    and address(leaf) not in fixed
                ):
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
        self._pieces, self._event = (
            (),
            None,
        )  # autograd alone holds what came back, and frees it as its backward goes
        return event


def _edges(leaves: Sequence[Any]) -> list[Any]:
    """The graph edges of the leaves; None for those that require no gradient."""
    return [
        get_gradient_edge(leaf) if isinstance(leaf, Tensor) and leaf.requires_grad else None
        for leaf in leaves
    ]


def _gradients_of(count: int, leaves: GradientLeaves) -> Gradients:
    """The gradients of so many values, some of which have leaves; None for the others."""
    gradients: Gradients = [None] * count
    for index, leaf in leaves.items():
        if leaf.grad is not None:
            gradients[index] = dense(leaf.grad)
    return gradients


def add_root(
    end: Any, gradient: Tensor | None, roots: list[Tensor | GradientEdge], gradients: list[Tensor]
) -> None:
    """Add an output and its gradient to the roots of a backward, if both exist. An offloaded output
    is a graph edge."""
    if gradient is not None and (
        isinstance(end, GradientEdge) or (isinstance(end, Tensor) and end.requires_grad)
    ):
        roots.append(end)
        gradients.append(gradient)
