"""Record values by name, and find later which of them have changed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from funcpipe._src.core.torch_names import version
from funcpipe._src.core.tree import Tree, flatten, locations
from funcpipe._src.testing.match import differences


class Snapshot:
    """Values by name at the time of construction; for tensors also their bits and their number of
    writes.

    Attributes:
        values: the values themselves.
    """

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.values = dict(values)
        tensors = (
            (name, value) for name, value in self.values.items() if isinstance(value, Tensor)
        )
        self._bits = {name: (_writes(tensor), tensor.detach().clone()) for name, tensor in tensors}

    def changes(self, values: Mapping[str, Any]) -> list[str]:
        """The names that were added or removed, or whose values (of tensors, bits) changed."""
        common = [name for name in self.values if name in values]
        changed = [name for name in common if self._differs(name, values[name])]
        changed += [
            name for name in (*self.values, *values) if (name in values) != (name in self.values)
        ]
        grown = tuple(f"{name[4:-1]}[" for name in changed if name.startswith("len("))
        return [
            name for name in changed if not name.startswith(grown)
        ]  # a container is named by its length alone

    def written(self, tree: Tree, root: str) -> list[str]:
        """The leaves of a tree, named by `named`, that were written to or replaced."""
        leaves = named(tree, root)
        if leaves.keys() != self.values.keys():
            return [root]
        return [
            name
            for name, leaf in leaves.items()
            if leaf is not self.values[name]
            or (isinstance(leaf, Tensor) and self._differs(name, leaf))
        ]

    def restore(self) -> None:
        for name, (_, bits) in self._bits.items():
            if differences(self.values[name], bits, "")[0]:
                self.values[name].data.copy_(bits)

    def _differs(self, name: str, value: Any) -> bool:
        before = self.values[name]
        if not isinstance(before, Tensor) or not isinstance(value, Tensor):
            return type(before) is not type(value) or not (before == value or before != before)
        writes, bits = self._bits[name]
        rewritten = value is before and writes != _writes(value)
        return rewritten or bool(differences(value, bits, "")[0])


def named(tree: Tree, root: str) -> dict[str, Any]:
    """The leaves of a tree by their places."""
    return dict(zip(locations(tree, root), flatten(tree)[0], strict=True))


def _writes(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else version(tensor)
