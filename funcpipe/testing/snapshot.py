"""Values as they were at some time: which of them are others now."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from funcpipe.core.torch_names import version
from funcpipe.core.tree import Tree, flatten, locations
from funcpipe.testing.match import differences


class Snapshot:
    """Values by name as they are now; of tensors also their bits, and how often they were written to.

    Attributes:
        values: the values themselves.
    """

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.values = dict(values)
        tensors = ((name, value) for name, value in self.values.items() if isinstance(value, Tensor))
        self._bits = {name: (_writes(tensor), tensor.detach().clone()) for name, tensor in tensors}

    def changes(self, now: Mapping[str, Any]) -> list[str]:
        """The names that have come or gone, or whose values are others now; a tensor with the same bits is no other."""
        both = [name for name in self.values if name in now]
        other = [name for name in both if self._differs(name, now[name])]
        other += [name for name in (*self.values, *now) if (name in now) != (name in self.values)]
        grown = tuple(f"{name[4:-1]}[" for name in other if name.startswith("len("))
        return [name for name in other if not name.startswith(grown)]  # its length says it of a container

    def written(self, tree: Tree, root: str) -> list[str]:
        """The leaves of a tree, taken as `named` gives them, that were written to or put in the place of others."""
        now = named(tree, root)
        if now.keys() != self.values.keys():
            return [root]
        return [
            name
            for name, leaf in now.items()
            if leaf is not self.values[name] or (isinstance(leaf, Tensor) and self._differs(name, leaf))
        ]

    def restore(self) -> None:
        """Give tensors the numbers that they had."""
        for name, (_, bits) in self._bits.items():
            if differences(self.values[name], bits, "")[0]:
                self.values[name].data.copy_(bits)

    def _differs(self, name: str, now: Any) -> bool:
        before = self.values[name]
        if not isinstance(before, Tensor) or not isinstance(now, Tensor):
            return type(before) is not type(now) or not (before == now or before != before)
        writes, bits = self._bits[name]
        return (now is before and writes != _writes(now)) or bool(differences(now, bits, "")[0])


def named(tree: Tree, root: str) -> dict[str, Any]:
    """The leaves of a tree by their places."""
    return dict(zip(locations(tree, root), flatten(tree)[0], strict=True))


def _writes(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else version(tensor)
