"""Run a chain of layers without data, to measure what each keeps for its backward and its peak
memory.

Layers run one after the other under FakeTensor, each forward followed by its backward. The pass
keeps the values between layers as numbers, not as tensors. After a forward it drops them, so
whatever is still alive is kept by the autograd graph.
"""

from __future__ import annotations

import gc
import itertools
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from funcpipe._src.core.collector import collector_off
from funcpipe._src.core.torch_names import (
    FakeTensorMode,
    WatchingMode,
    lazy_clone_operation,
    storage_number,
)
from funcpipe._src.core.tree import (
    Spec,
    Tree,
    cow_clone_unchecked,
    flatten,
    is_differentiable,
    leaves,
    map_tensors,
    unflatten,
)
from funcpipe._src.data.stage import Out, normalise, side_loss
from funcpipe._src.measuring.row import Layer, blame
from funcpipe._src.stages.context import no_autocast_cache
from funcpipe._src.stages.split_backward import walk_to_inputs

_ALIAS: Any = torch.ops.aten.alias.default


class Live(WatchingMode):
    """Counts the storages that operations create, each once, until they are freed.

    Attributes:
        now: bytes alive.
        peak: the largest number of bytes alive since `restart`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._sizes: dict[int, int] = {}
        """The counted bytes of each storage that is alive, by its `storage_number`."""

    def restart(self) -> int:
        """Start a new peak. Returns the bytes alive."""
        self.peak = self.now
        return self.now

    def forget(self) -> None:
        """Stop counting the storages that are alive now."""
        self._sizes = dict.fromkeys(self._sizes, 0)
        self.now = 0

    def known(self, tensors: Iterable[Any]) -> None:
        """Exclude the storages of these tensors from the count."""
        for tensor in tensors:
            if isinstance(tensor, Tensor) and self._watch(tensor):
                key = storage_number(tensor.untyped_storage())
                self.now -= self._sizes[key]
                self._sizes[key] = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation, and count the storages of its results."""
        # A copy-on-write clone takes no memory before the first write.
        out = _ALIAS(args[0]) if func is lazy_clone_operation else func(*args, **(kwargs or {}))
        for item in out if isinstance(out, (tuple, list)) else (out,):  # pyright: ignore[reportUnknownVariableType]
            for tensor in item if isinstance(item, (tuple, list)) else (item,):  # pyright: ignore[reportUnknownVariableType]
                if isinstance(tensor, Tensor):
                    self._watch(tensor)
        return out

    def _watch(self, tensor: Tensor) -> bool:
        """Count a storage. Returns False for a tensor without storage."""
        # Fake tensors report a real device, so only true meta tensors are excluded.
        if tensor.layout is not torch.strided or tensor.device.type == "meta":
            return False
        storage = tensor.untyped_storage()
        key = storage_number(storage)
        if key not in self._sizes:
            weakref.finalize(storage, self._gone, key)
            self._sizes[key] = storage.nbytes()
            self.now += self._sizes[key]
            self.peak = max(self.peak, self.now)
        return True

    def _gone(self, key: int) -> None:
        """End the count of a storage that was freed."""
        self.now -= self._sizes.pop(key)

    def holds(self, key: int) -> bool:
        """Whether a storage, given by its `storage_number`, is alive."""
        return key in self._sizes


Bytes = dict[int, int]  # sizes of the values between layers, by the values' numbers


def merged(rows: Iterable[Bytes]) -> Bytes:
    """The values of all rows, each once."""
    return {value: size for row in rows for value, size in row.items()}


class WeightResidual(NamedTuple):
    """The memory that an eager layer keeps between I and W, in bytes."""

    inner: int  # tensors in the graph that the layer makes
    kept: Bytes  # tensors in the graph that the layer gets
    gradients: int  # the gradients that wait for W

    @property
    def nbytes(self) -> int:
        return self.inner + sum(self.kept.values()) + self.gradients


NOTHING_WAITS = WeightResidual(0, {}, 0)  # I is the whole backward


class Measured(NamedTuple):
    """The memory of one layer, in bytes."""

    inner: int  # tensors kept for the backward that the layer makes and does not pass on
    kept: Bytes  # tensors kept for the backward that the layer gets or passes on
    # `inputs`, `outputs`, `stash`, `pops`: the values that the layer gets and passes on; stash and
    # pops by name.
    inputs: Bytes
    outputs: Bytes
    stash: dict[str, Bytes]
    pops: dict[str, Bytes]
    gradient: int  # the gradient of the output
    forward: int  # the peak of the tensors that the forward makes
    # The peak that the backward adds to the memory before it (kept tensors, the gradient of the
    # output, gradient sums).
    backward: int
    weights: WeightResidual  # memory that the layer keeps between I and W
    has_input: bool  # whether an input of the layer has a gradient. If not, W is the whole backward

    def held(self) -> Bytes:
        """The values of the residual, without the inner ones: kept, or at the borders."""
        return merged(
            (self.kept, self.inputs, self.outputs, *self.stash.values(), *self.pops.values())
        )


class _TensorSpec(NamedTuple):
    """A description of a tensor between layers, without the tensor."""

    value: int
    nbytes: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    grad: bool


class _PlacedTree(NamedTuple):
    """A tree between layers: its tensors as descriptions, its other leaves as they are."""

    leaves: list[Any]
    spec: Spec

    def places(self) -> list[_TensorSpec]:
        return [leaf for leaf in self.leaves if isinstance(leaf, _TensorSpec)]

    def bytes(self) -> Bytes:
        return {place.value: place.nbytes for place in self.places()}


class _Source(torch.autograd.Function):
    """The end of the gradients of inputs: it appends them to a list. Unlike a leaf, it does not
    keep the input alive."""

    @staticmethod
    def forward(ctx: Any, handle: Tensor, x: Tensor, arrived: list[Any]) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.arrived = arrived
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[None, None, None]:
        ctx.arrived += grads
        return None, None, None


class _Forward(NamedTuple):
    """The results of a layer's forward."""

    # The storage and the size of each value that the layer gets or passes on.
    storages: dict[int, tuple[int, int]]
    # `y`, `stash`: its output and its stash.
    y: _PlacedTree
    stash: dict[str, _PlacedTree]
    # The roots of its graph, with descriptions of their gradients.
    roots: list[tuple[GradientEdge, _TensorSpec]]
    peak: int  # the peak of the forward


class Pass:
    """The pass over the layers, with the kernels of a device; with backwards if the layers
    train."""

    def __init__(self, *, train: bool, device: torch.device) -> None:
        self.train, self.device = train, device
        self.fake: Any = FakeTensorMode(allow_non_fake_inputs=True)
        self.live = Live()
        self.numbers = itertools.count()
        self.skips: dict[str, _PlacedTree] = {}
        self.arrived: list[Any] = []
        self.handle = torch.empty(0)
        """The leaf at which gradients of inputs arrive, of the last forward."""

    def run(
        self,
        layers: Sequence[Layer],
        example: Tree,
        feeds: Mapping[str, Tree],
        trainable: Sequence[Sequence[bool]],
    ) -> list[Measured]:
        """Measure every layer. An error of a layer is raised with the layer's name."""
        placed_feeds = {
            name: self._held(map_tensors(self._like, tree), {}) for name, tree in feeds.items()
        }
        x = self._held(map_tensors(self._like, example), {})
        out: list[Measured] = []
        for number, (layer, flags) in enumerate(zip(layers, trainable, strict=True)):
            placed = x
            try:
                # The same modes as in a run, whatever the caller's modes are.
                with torch.inference_mode(False), no_autocast_cache(), collector_off():
                    measured, x = self._layer(layer, x, placed_feeds, flags)
            except Exception as error:
                with self.fake:
                    tree = self._tree(placed, None, {})
                blame(error, number, layer, "memory", tree)
            out.append(measured)
        return out

    # -- one layer

    def _layer(
        self, layer: Layer, x: _PlacedTree, feeds: dict[str, _PlacedTree], flags: Sequence[bool]
    ) -> tuple[Measured, _PlacedTree]:
        stage, memo = layer.stage, dict[int, Tensor]()
        values, spec = flatten(layer.params)
        params = [
            self._parameter(leaf, flag and self.train, memo)
            for leaf, flag in zip(values, flags, strict=True)
        ]
        state = map_tensors(self._like, layer.state)
        # These tensors are counted by `memory` itself, not as activations.
        self.live.known([*params, *(leaf.grad for leaf in leaves(params)), *leaves(state)])
        fn = stage.bind(unflatten(spec, params), state)
        pops = {name: self.skips[name] for name in stage.pop}
        # Memory that an earlier layer keeps in its objects, or that a reference cycle keeps, must
        # not count for this layer.
        if self.live.now:
            gc.collect()
            self.live.forget()
        self.live.restart()
        forward = partial(self._forward, stage, fn, x, pops, feeds, state)
        has_input = any(place.grad for tree in (x, *pops.values()) for place in tree.places())
        weights = NOTHING_WAITS
        with self.fake, self.live, torch.set_grad_enabled(self.train):
            out = forward()
            kept = self._kept(out)
            handed_on = merged(tree.bytes() for tree in (out.y, *out.stash.values()))
            received = merged(tree.bytes() for tree in (x, *pops.values()))
            inner = self._living() - sum(
                size for value, size in kept.items() if value in handed_on and value not in received
            )
            backward = self._backward(out.roots)
            out.roots.clear()
            if self.train and not stage.carry:  # for slices, I is the whole backward
                weights = self._weights(params, received, has_input, forward)
        fn.release()
        gradient = sum(
            prod(place.size) * place.dtype.itemsize for place in out.y.places() if place.grad
        )
        self.skips |= out.stash
        measured = Measured(
            inner,
            kept,
            inputs=x.bytes(),
            outputs=out.y.bytes(),
            stash={name: tree.bytes() for name, tree in out.stash.items()},
            pops={name: tree.bytes() for name, tree in pops.items()},
            gradient=gradient,
            forward=out.peak,
            backward=backward,
            weights=weights,
            has_input=has_input,
        )
        return measured, out.y

    def _forward(
        self,
        stage: Any,
        fn: Callable[..., Any],
        x: _PlacedTree,
        pops: dict[str, _PlacedTree],
        feeds: dict[str, _PlacedTree],
        state: Tree,
    ) -> _Forward:
        storages: dict[int, Tensor] = {}
        handle = self.handle = torch.empty(0, device=self.device, requires_grad=True)
        arguments = self._tree(x, handle, storages)
        skips = {name: self._tree(tree, handle, storages) for name, tree in pops.items()}
        fed = {name: self._tree(feeds[name], None, storages) for name in stage.feeds}
        self.live.restart()
        keys = {storage_number(base.untyped_storage()): value for value, base in storages.items()}
        # From here only the layer and its graph keep the inputs alive, as in a run.
        storages.clear()
        out: Out = normalise(fn(arguments, **stage.extras(skips, fed, state, self.train)))
        forward = self.live.peak
        y = self._held(out.y, keys)
        stash = {name: self._held(tree, keys) for name, tree in out.stash.items()}
        side = side_loss(out)
        ends = [*leaves(out.y), *leaves(out.stash), *leaves((side or ())[:1])]
        roots = [
            (get_gradient_edge(leaf), self._place(leaf, keys))
            for leaf in ends
            if leaf.requires_grad
        ]
        sizes = merged(tree.bytes() for tree in (x, y, *pops.values(), *stash.values()))
        by_value = {value: (key, sizes[value]) for key, value in keys.items() if value in sizes}
        return _Forward(by_value, y, stash, roots, forward)

    def _kept(self, out: _Forward) -> Bytes:
        """The values of a forward that its graph keeps alive."""
        return {v: size for v, (key, size) in out.storages.items() if self.live.holds(key)}

    def _gradients(self, roots: Iterable[tuple[GradientEdge, _TensorSpec]]) -> list[Tensor]:
        return [
            torch.empty_strided(place.size, place.stride, dtype=place.dtype, device=self.device)
            for _, place in roots
        ]

    def _backward(self, roots: list[tuple[GradientEdge, _TensorSpec]]) -> int:
        """Run the backward. Returns the peak that it adds to the kept memory."""
        if not roots:
            return 0
        grads = self._gradients(roots)
        self.live.known(grads)
        start = self.live.restart()
        with torch.autograd.set_multithreading_enabled(False):
            torch.autograd.backward([edge for edge, _ in roots], grads)
        self.arrived.clear()
        return self.live.peak - start

    def _weights(
        self,
        params: Sequence[Any],
        received: Bytes,
        has_input: bool,
        forward: Callable[[], _Forward],
    ) -> WeightResidual:
        """Measure the memory between I and W: run a forward and I as a run does, and count the
        live tensors."""
        before = self._living()
        out = forward()
        edges, gradients = [edge for edge, _ in out.roots], self._gradients(out.roots)
        out.roots.clear()
        trained = [leaf for leaf in params if isinstance(leaf, Tensor) and leaf.requires_grad]
        if not edges or not trained:
            return NOTHING_WAITS
        with torch.autograd.set_multithreading_enabled(False):
            waiting = walk_to_inputs(edges, gradients, [self.handle] if has_input else [], trained)
        self.arrived.clear()
        del edges, gradients
        if not waiting:
            return NOTHING_WAITS
        arrived = [gradient.untyped_storage() for walk in waiting for gradient in walk.gradients]
        waits = sum({storage_number(storage): storage.nbytes() for storage in arrived}.values())
        kept = {value: size for value, size in self._kept(out).items() if value in received}
        return WeightResidual(self._living() - before - waits, kept, waits)

    def _living(self) -> int:
        """Return the bytes alive, without those that only a reference cycle keeps."""
        gc.collect(0)  # all objects of the layer, because automatic collections are off
        return self.live.now

    # -- values between layers

    def _like(self, leaf: Tensor) -> Tensor:
        """A fake tensor with the shape, strides and dtype of a leaf."""
        with self.fake:
            if leaf.layout is not torch.strided:
                return torch.empty(leaf.shape, dtype=leaf.dtype, device=self.device)
            return torch.empty_strided(
                leaf.shape, leaf.stride(), dtype=leaf.dtype, device=self.device
            )

    def _parameter(self, leaf: Any, trains: bool, memo: dict[int, Tensor]) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        if id(leaf) not in memo:
            parameter = memo[id(leaf)] = self._like(leaf)
            if trains:
                parameter.requires_grad_()
                parameter.grad = self._like(leaf)
        return memo[id(leaf)]

    def _held(self, tree: Tree, keys: dict[int, int]) -> _PlacedTree:
        """Describe a tree without its tensors. ``keys`` has the numbers of known storages, and
        gets the new ones."""
        values, spec = flatten(tree)
        return _PlacedTree(
            [self._place(leaf, keys) if isinstance(leaf, Tensor) else leaf for leaf in values], spec
        )

    def _place(self, tensor: Tensor, keys: dict[int, int]) -> _TensorSpec:
        tensor = tensor.to_dense() if tensor.layout is not torch.strided else tensor
        storage = tensor.untyped_storage()
        number = storage_number(storage)
        if number not in keys:
            keys[number] = next(self.numbers)
        value, grad = keys[number], tensor.requires_grad
        size, stride, offset = tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset())
        return _TensorSpec(value, storage.nbytes(), size, stride, offset, tensor.dtype, grad)

    def _tree(
        self, placed: _PlacedTree, handle: Tensor | None, storages: dict[int, Tensor]
    ) -> Tree:
        """Make the tree, with tensors in memory that does not count. Leaves of one storage share
        one."""
        out: list[Any] = []
        for leaf in placed.leaves:
            if not isinstance(leaf, _TensorSpec):
                out.append(leaf)
                continue
            if leaf.value not in storages:
                base = storages[leaf.value] = torch.empty(
                    leaf.nbytes, dtype=torch.uint8, device=self.device
                )
                self.live.known([base])
            flat = storages[leaf.value].view(leaf.dtype)
            tensor = flat.as_strided(leaf.size, leaf.stride, leaf.offset)
            if leaf.grad and handle is not None and is_differentiable(tensor):
                tensor = _Source.apply(handle, tensor, self.arrived)
            out.append(cow_clone_unchecked(tensor) if handle is not None else tensor)  # pyright: ignore[reportArgumentType]
        return unflatten(placed.spec, out)
