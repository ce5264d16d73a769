"""The signature of a traced model: what the trace assumed about the inputs, and the structure of
the output."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx

from funcpipe._src.core.errors import BatchError, raise_all
from funcpipe._src.core.tree import Spec, Tree, flatten, unflatten


@dataclass(frozen=True)
class Guard:
    """The assumptions of a trace about one leaf of the inputs."""

    name: str  # the name of the leaf in the graph
    constant: Any  # the leaf itself, if it is not a tensor
    dtype: torch.dtype | None  # None for a constant
    shape: tuple[Any, ...]  # for each dimension its size, or (symbol, least, most)

    @staticmethod
    def of(node: fx.Node, ranges: Mapping[Any, Any]) -> Guard:
        """The guard of a placeholder."""
        value = node.meta["val"]
        return Guard(
            node.name, None, value.dtype, tuple(_size(size, ranges) for size in value.shape)
        )

    @property
    def rows(self) -> int | None:
        """The dimension that is the number of rows. None: there is none."""
        return next((dim for dim, size in enumerate(self.shape) if not isinstance(size, int)), None)

    def faults(self, value: Any, sizes: dict[str, tuple[int, str]]) -> list[str]:
        """Describe how a leaf differs from the traced leaf."""
        if self.dtype is None:
            alike = type(value) is type(self.constant)
            if value is self.constant or (alike and value == self.constant):
                return []
            return [
                f"{self.name} was {self.constant!r} in the trace, and the graph contains this "
                f"value as a constant; got {value!r}"
            ]
        if not isinstance(value, Tensor):
            return [f"{self.name} was a tensor; got a {type(value).__name__}"]
        if value.dtype != self.dtype or value.dim() != len(self.shape):
            return [f"{self.name} was {self}; got {value.dtype} {tuple(value.shape)}"]
        out: list[str] = []
        for dim, (size, expected) in enumerate(zip(value.shape, self.shape, strict=True)):
            if isinstance(expected, int):
                if size != expected:
                    got = f"got {tuple(value.shape)}: dimension {dim} is fixed"
                    out.append(f"{self.name} was {self}; {got}")
                continue
            symbol, least, most = expected
            first = sizes.setdefault(symbol, (size, self.name))
            if first[0] != size:
                out.append(f"{self.name} has {size} rows and {first[1]} has {first[0]}")
            elif not least <= size <= most:
                out.append(
                    f"{self.name} has size {size} in dimension {dim}; the trace is valid for "
                    f"{least} to {most}"
                )
        return out

    def several(self) -> Guard:
        """The guard for at least two rows."""
        shape = tuple(
            size if isinstance(size, int) else (size[0], max(2, size[1]), size[2])
            for size in self.shape
        )
        return replace(self, shape=shape)

    def __str__(self) -> str:
        sizes = ", ".join(str(size) if isinstance(size, int) else "rows" for size in self.shape)
        return f"{str(self.dtype).removeprefix('torch.')} [{sizes}]"


def _form(spec: Spec) -> str:
    """Write the arguments and keywords of a structure as a call, such as ``(*, mask=[*, *])``."""
    args, kwargs = unflatten(spec, ["*"] * spec.num_leaves)
    words = [*map(repr, args), *(f"{name}={value!r}" for name, value in kwargs.items())]
    return f"({', '.join(words)})".replace("'*'", "*")


def _size(size: Any, ranges: Mapping[Any, Any]) -> Any:
    if isinstance(size, int):
        return size
    bounds = ranges.get(size.node.expr)
    least, most = (0, float("inf")) if bounds is None else (bounds.lower, bounds.upper)
    most = int(str(most)) if str(most).isdigit() else float("inf")
    return str(size.node.expr), int(least), most


@dataclass(frozen=True)
class Signature:
    """The flattening of a model's inputs, and the structure of its output."""

    guards: tuple[Guard, ...]  # for each leaf of the inputs
    keywords: tuple[str, ...]  # of the forward, as in the example
    in_spec: Spec  # of (args, kwargs)
    out_spec: Spec

    def values(self, x: Tree) -> dict[str, Any]:
        """The leaves of the inputs by name. Raises BatchError if they differ from the trace."""
        args, kwargs = as_call(x)
        if set(kwargs) != set(self.keywords):
            raise BatchError(
                f"the model was traced with the keywords {sorted(self.keywords)}; got "
                f"{sorted(kwargs)}; call fp.split again with an example that has these keywords"
            )
        leaves, spec = flatten((args, kwargs))
        if spec != self.in_spec:
            raise BatchError(
                f"the model was traced with the inputs {_form(self.in_spec)}; got {_form(spec)}; * "
                "is a tensor or a number; call fp.split again with an example of this form"
            )
        sizes: dict[str, tuple[int, str]] = {}
        faults = [
            fault
            for guard, leaf in zip(self.guards, leaves, strict=True)
            for fault in guard.faults(leaf, sizes)
        ]
        raise_all(
            "the inputs differ from the example of the trace; call fp.split again with an example "
            "like these inputs:",
            faults,
            BatchError,
        )
        return {guard.name: leaf for guard, leaf in zip(self.guards, leaves, strict=True)}

    def output(self, ends: Sequence[tuple[str, Any]], values: Mapping[str, Any]) -> Any:
        """Build the model's output: each end is ("value", its name) or ("constant", itself)."""
        leaves = [values[end] if kind == "value" else end for kind, end in ends]
        return unflatten(self.out_spec, leaves)


def as_call(x: Tree) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Turn inputs into arguments of a forward: a mapping by keyword, others by position."""
    if isinstance(x, Mapping):
        return (), {str(key): value for key, value in x.items()}
    return (tuple(x) if type(x) is tuple else (x,)), {}


def as_input(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tree:
    """Invert `as_call`."""
    return kwargs or (args[0] if len(args) == 1 else args)
