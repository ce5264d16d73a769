"""Send DTensors as local tensors, and make DTensors of them over meshes of the receiver.

A mesh has the same names in all processes, but each process has its own part of it. So a form
contains the names, and `Meshes` finds the mesh. `wire_format` owns the bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from funcpipe._src.core.border import Border
from funcpipe._src.core.errors import PlanError
from funcpipe._src.core.tree import Spec, Tree, flatten

_RETURN_PLAIN = "return a plain tensor from the stage: y.to_local() or y.full_tensor()"


class Spread(NamedTuple):
    """The form of a DTensor, without its local tensor and without its mesh."""

    # `size`, `strides`: the shape and the strides of the whole tensor.
    size: tuple[int, ...]
    strides: tuple[int, ...]
    # One word and one argument per axis of the mesh, as in `_PLACEMENTS`.
    placements: tuple[tuple[str, Any], ...]
    # `names`, `sizes`: the names and the sizes of the axes of the mesh.
    names: tuple[str, ...]
    sizes: tuple[int, ...]
    at: tuple[int, ...]  # the coordinate of the sending process in the mesh

    @classmethod
    def of(cls, tensor: Any) -> Spread:
        """Return the form of a DTensor. Raises PlanError if it cannot go to another process."""
        mesh = tensor.device_mesh
        if not mesh.mesh_dim_names:
            raise PlanError(
                f"a DTensor over the mesh {mesh.mesh.tolist()} cannot go to another process, "
                "because the mesh has no names by which the other process finds its own; give "
                f"names, init_device_mesh(..., mesh_dim_names=), or {_RETURN_PLAIN}"
            )
        placements: list[tuple[str, Any]] = []
        for placement in tensor.placements:
            word = type(placement).__name__
            if word not in _PLACEMENTS:
                raise PlanError(
                    f"a DTensor with the placement {placement} cannot go to another process; "
                    f"redistribute it to Shard, Replicate or Partial, or {_RETURN_PLAIN}"
                )
            name, _ = _PLACEMENTS[word]
            placements.append((word, getattr(placement, name) if name else None))
        numbers = tuple(tensor.shape), tensor.stride(), tuple(placements)
        return cls(*numbers, *_axes(mesh), tuple(mesh.get_coordinate()))

    @classmethod
    def read(cls, code: Sequence[Any]) -> Spread:
        """Return the form that was written to JSON. Raises ValueError for anything else."""
        size, strides, placements, names, sizes, at = code
        for word, argument in placements:
            if word not in _PLACEMENTS or type(argument) is not _PLACEMENTS[word][1]:
                raise ValueError(f"{word} of {argument!r} is not a placement")
        if not len(placements) == len(names) == len(sizes) == len(at) or not all(
            isinstance(name, str) for name in names
        ):
            raise ValueError(f"{names} of sizes {sizes} is not a mesh of {len(placements)} axes")
        numbers = (*size, *strides, *sizes, *at)
        if len(size) != len(strides) or any(type(n) is not int or n < 0 for n in numbers):
            raise ValueError(f"no DTensor has size {size} and strides {strides}")
        placed = tuple((word, argument) for word, argument in placements)
        return cls(tuple(size), tuple(strides), placed, tuple(names), tuple(sizes), tuple(at))

    def joined(self, local: Tensor, mesh: Any) -> Tensor:
        """Return the DTensor with this local tensor over a mesh."""
        from torch.distributed import tensor as distributed

        placements = [
            getattr(distributed, word)(*(() if argument is None else (argument,)))
            for word, argument in self.placements
        ]
        return distributed.DTensor.from_local(
            local,
            mesh,
            placements,
            run_check=False,
            shape=torch.Size(self.size),
            stride=self.strides,
        )


_PLACEMENTS: Mapping[str, tuple[str, type]] = {
    "Shard": ("dim", int),
    "Replicate": ("", type(None)),
    "Partial": ("reduce_op", str),
}
"""By class of torch.distributed.tensor: the attribute and the type of its argument."""


_Axes: TypeAlias = tuple[tuple[str, ...], tuple[int, ...]]


def _axes(mesh: Any) -> _Axes:
    return tuple(mesh.mesh_dim_names), tuple(mesh.shape)


def _shown(axes: _Axes) -> str:
    return f"the mesh ({', '.join(f'{name}={size}' for name, size in zip(*axes, strict=True))})"


class Meshes:
    """The meshes of this process, by the names and sizes of their axes.

    They come from DTensors among the parameters and states here, and from DTensors that this
    process has sent: their gradients come back.

    Args:
        trees: the parameters and the states.
    """

    def __init__(self, trees: Tree) -> None:
        self._trees = trees
        self._by_axes: dict[_Axes, list[Any]] | None = None

    def add(self, mesh: Any) -> None:
        """Remember the mesh of a DTensor that goes to another process."""
        same = self._all().setdefault(_axes(mesh), [])
        if mesh not in same:
            same.append(mesh)

    def find(self, spread: Spread, number: int) -> Any:
        """Return the mesh of a received DTensor, which is leaf ``number`` of its value.

        Raises PlanError if this process has no such mesh, or several.
        """
        axes = spread.names, spread.sizes
        found = self._all().get(axes, [])
        what = f"leaf {number} of a value from another stage is a DTensor over {_shown(axes)}"
        if len(found) != 1:
            have = f"{len(found)} of them" if found else ", ".join(map(_shown, self._all()))
            raise PlanError(
                f"{what}. Among the parameters and states of this process there must be one mesh "
                f"with these axes; they have {have or 'no DTensors'}. Use "
                'parallelize_module(part, mesh["tp"], ...) with the same axes in all stages, or '
                f"{_RETURN_PLAIN}"
            )
        (mesh,) = found
        if tuple(mesh.get_coordinate()) != spread.at:
            raise PlanError(
                f"{what}. It came from the process at {[*spread.at]} in its mesh, but this process "
                f"is at {[*mesh.get_coordinate()]}, so it needs another part. Take the meshes of "
                'all stages from one init_device_mesh(..., mesh_dim_names=("pp", "tp")), and pass '
                'mesh["pp"] to fp.ranks'
            )
        return mesh

    def _all(self) -> dict[_Axes, list[Any]]:
        if self._by_axes is None:
            self._by_axes = {}
            for leaf in flatten(self._trees)[0]:
                mesh = getattr(leaf, "device_mesh", None)
                if mesh is not None and mesh.mesh_dim_names:
                    self.add(mesh)
        return self._by_axes


class ReceivedDTensors(Border):
    """A border with DTensors, which are made when a stage first reads the leaves.

    The receiving thread cannot make them: their error must name the stage that reads them.
    """

    __slots__ = ("_unmade",)

    def __init__(
        self,
        leaves: list[Any],
        spec: Spec,
        flags: Sequence[bool],
        spreads: Mapping[int, Spread],
        meshes: Meshes,
    ) -> None:
        self._unmade: tuple[Mapping[int, Spread], Meshes] | None = spreads, meshes
        super().__init__(leaves, spec, flags)

    @property
    def leaves(self) -> list[Any]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The leaves of the tree."""
        leaves: list[Any] = _leaves_slot.__get__(self)
        if self._unmade is not None:
            spreads, meshes = self._unmade
            leaves = leaves[:]
            for number, spread in spreads.items():
                leaves[number] = spread.joined(leaves[number], meshes.find(spread, number))
            self._unmade, self.leaves = None, leaves
        return leaves

    @leaves.setter
    def leaves(self, leaves: list[Any]) -> None:
        _leaves_slot.__set__(self, leaves)


_leaves_slot: Any = vars(Border)["leaves"]
"""The slot of `Border.leaves`, which `ReceivedDTensors` reads through its property."""
