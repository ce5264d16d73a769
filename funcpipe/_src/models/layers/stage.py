"""Run one stage of a model that is cut between blocks: the model's forward on a private copy.

The copy has only the stage's tensors. The stage's blocks run. Blocks of other stages return their
input, and tensors of other stages are `Unknown`. An output that depends on an Unknown raises
PlanError, in every call.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from functools import partial
from typing import Any, Self, cast

import torch
from torch import Tensor, nn

from funcpipe._src.core.errors import PlanError
from funcpipe._src.core.frames import REGIONS, frames
from funcpipe._src.core.torch_names import drop_hooks, hooks_of
from funcpipe._src.core.tree import (
    Tree,
    cow_clone,
    flatten,
    is_differentiable,
    locations,
    map_leaves,
    map_tensors,
    under_transform,
)
from funcpipe._src.data.identity import words_of_layers
from funcpipe._src.data.stage import Out
from funcpipe._src.models.attributes import ModuleAttributes
from funcpipe._src.models.configs import is_of_transformers
from funcpipe._src.models.layers.find import TRACED, Layers, within
from funcpipe._src.models.layers.look import SideOutputs, arguments_for_all_blocks
from funcpipe._src.models.layers.slices import SliceCaches
from funcpipe._src.models.layers.unknown import (
    UnknownValueError,
    first_unknown,
    is_unknown,
    unknown,
    unknown_like,
)
from funcpipe._src.models.module import ModuleCopy, ModuleFn, Params, Skeleton, State
from funcpipe._src.models.skippable import Skips
from funcpipe._src.models.traced.signature import as_call
from funcpipe._src.models.unfit import refuse_left_activations, shared_places

INPUTS = "inputs"
"""The skip in which the model's inputs travel from the first stage to all other stages."""


class _Leave(BaseException):
    """Ends a forward after the stage's last block, with what the block returned."""

    def __init__(self, out: Tree) -> None:
        self.out = out


class LayersFn(ModuleFn):
    """The blocks from ``first`` to before ``last`` as a function of their parameters.

    Without ``caches`` for slices, the stage runs whole sequences only.
    """

    def __init__(
        self,
        shape: Skeleton,
        skips: Skips,
        cut: Layers,
        first: int,
        last: int,
        caches: SliceCaches | None = None,
    ) -> None:
        self.cut, self.first, self.last, self.caches = cut, first, last, caches
        self.verified: set[tuple[bool, bool]] = set()  # (training, with gradients) of forwards
        self.numbers = {name: number for number, name in enumerate(cut.names)}
        tables = {
            alias
            for alias, buffer in shape.module.named_buffers(remove_duplicate=False)
            if not is_differentiable(buffer) and alias.rpartition(".")[0] not in shape.norms
        }
        aliases = {
            alias for alias in shape.canonical if self._has_tensor(alias, table=alias in tables)
        }
        super().__init__(shape, skips, aliases, spread=True)
        blocks = {name: shape.module.get_submodule(name) for name in cut.names}
        own = {name: blocks.pop(name) for name in cut.names[first:last]}
        # Not ``shared``, which is checked around the whole forward: all stages run the modules
        # around the blocks.
        self.shared_by_blocks = shared_places(own, blocks)

    @property
    def sliceable(self) -> bool:
        """Whether the stage can run slices: a transformers model needs caches for them."""
        return self.caches is not None or not is_of_transformers(self.skeleton)

    def _has_tensor(self, alias: str, *, table: bool) -> bool:
        """Whether the stage has a tensor of its blocks, of its end, or of other modules.

        Every stage has the integer tables and masks of both ends, which forwards read.
        """
        cut = self.cut
        prefix = f"{cut.path}." if cut.path else ""
        if alias.startswith(prefix):
            number = self.numbers.get(prefix + alias.removeprefix(prefix).partition(".")[0])
            if number is not None:
                return self.first <= number < self.last
        before, after = (
            any(within(alias, root) for root in roots) for roots in (cut.entry, cut.exit)
        )
        if table or not (before or after):
            return True
        return (before and self.first == 0) or (after and self.last == len(cut))

    def copy(self) -> LayersCopy:
        """Make a private copy that runs the stage."""
        return LayersCopy(self)

    def described(self) -> Iterable[tuple[str, str]]:
        """The modules that only this stage runs, in words."""
        named = self.skeleton.named_modules()
        return words_of_layers((path, layer) for path, layer in named if self._runs_alone(path))

    def layers(self) -> list[str]:
        """The paths of the modules that only this stage runs: they are the keys of draws."""
        return [path for path in super().layers() if self._runs_alone(path)]

    def _runs_alone(self, path: str) -> bool:
        """Return whether only this stage runs the module at a path."""
        cut = self.cut
        before = cut.entry if self.first == 0 else ()
        after = cut.exit if self.last == len(cut) else ()
        own = cut.names[self.first : self.last]
        roots = (*own, *before, *(root for root in after if root not in cut.entry))
        return any(within(path, root) for root in roots)


class LayersCopy(ModuleCopy):
    """A private copy of the model that runs the blocks of one stage."""

    owner: LayersFn

    def __init__(self, owner: LayersFn) -> None:
        super().__init__(owner)
        cut = owner.cut
        self.cut, self.first, self.last, self.caches = cut, owner.first, owner.last, owner.caches
        self.carried: Tree = None  # the carry of the previous slice
        self.arguments: dict[str, Any] = {}  # of the model's forward, where slices may run
        self.device: torch.device | None = None  # the device of `Unknown` tensors
        self.is_first_call = False  # the first in this mode, over all copies
        # Follows tensors that blocks pass on beside their output, in a checked call.
        self.side_outputs: SideOutputs | None = None
        steps = cut.path.split(".") if cut.path else []
        # The modules that contain the list, the model itself first.
        outer = [".".join(steps[:depth]) for depth in range(len(steps))]
        self.outer = {path: self.module.get_submodule(path) for path in outer}
        around = [
            layer
            for path, layer in self.module.named_modules()
            if path != cut.path and not any(within(path, name) for name in cut.names)
        ]
        self.evaluation_layers = around if self.first else []
        self.unhooked: list[str] = []  # blocks of other stages whose hooks this stage does not run
        self._reset()
        self._put_stubs()
        self.attributes = ModuleAttributes(self.module, all_names=True)
        self._set_train(self.train)

    def install(self, params: Params, state: State) -> Self:
        """Put tensors in the places of the stage's tensors, and `Unknown` in all other places."""
        super().install(params, state)
        tensor = next(iter([*params.values(), *(state or {}).values()]), None)
        device = tensor.device if tensor is not None else torch.device("cpu")
        if device != self.device:
            self.device = device
            for table, local, outline, name in self.absent:
                table[local] = unknown(outline.shape, outline.dtype, device, name)
        return self

    # -- one call
    # -------------------------------------------------------------------------------

    def _reset(self) -> None:
        """Clear the state of a call."""
        self.running = self.begun = False
        self.at = 0  # the next block that should run
        self.x: Tree = None  # the output of the previous stage
        self.earlier: Tree = None  # the output of earlier blocks: ``x`` without numbers
        # (path, output) of each call of an entry, in order.
        self.travelling: list[tuple[str, Tree]] = []

    def _run(self, x: Tree, extras: dict[str, Any]) -> tuple[Any, dict[str, Tree]]:
        """Return the stage's output on one microbatch, and the skip for later stages."""
        inputs, travelling = extras["skips"][INPUTS] if self.first else (x, ())
        travels = self.first == 0 and self.last < len(self.cut)
        # A copy-on-write clone: if a forward writes in place into its inputs, the forwards of later
        # stages repeat the write, so they need the original values.
        kept = map_tensors(cow_clone, inputs) if travels else None
        mode = self.train, torch.is_grad_enabled()
        self.is_first_call = mode not in self.owner.verified and not under_transform()
        # Only in the last of several stages, which gives the model's output.
        gives_output = bool(self.first) and self.last == len(self.cut)
        self.side_outputs = SideOutputs() if self.is_first_call and gives_output else None
        self.carried = extras.get("carry")
        try:
            with self.side_outputs or nullcontext():
                y, returned = self._forward(x, inputs, travelling)
            carry = self.caches.carry(self.arguments, self.first, self.last) if self.caches else ()
            self._refuse_unknown(y, carry)
            if self.side_outputs is not None:
                self._refuse_incomplete(y, self.side_outputs)
            if self.is_first_call:
                self.owner.verified.add(mode)
        finally:
            self.carried, self.arguments, self.side_outputs = None, {}, None
        stash = {INPUTS: (kept, returned)} if travels else {}
        return Out(y, carry=carry) if self.caches else y, stash

    def _forward(
        self, x: Tree, inputs: Tree, travelling: tuple[Any, ...]
    ) -> tuple[Tree, tuple[Any, ...]]:
        """Run the model's forward up to the stage's last block, or to its end.

        Returns the output, and in the first stage the travelling entries.
        """
        args, kwargs = as_call(inputs)
        self._refuse_collecting(args, kwargs)
        if self.caches is not None:
            blank = partial(unknown_like, source="keys and values of other blocks")
            args, kwargs = (), self.caches.given(args, kwargs, self.carried, self.first, blank)
            self.arguments = kwargs
        for path, layer in self.outer.items():
            self.places[id(layer)] = path or "forward"
        for table in self.evaluation_tables:
            table["training"] = False
        self.running, self.x, self.travelling = True, x, list(travelling)
        try:
            y = self.module(*args, **kwargs)
            reached = self.at
        except _Leave as leave:
            return leave.out, tuple(self.travelling) if self.first == 0 else ()
        except UnknownValueError as error:
            raise self._refusal(error.need, error.source) from error
        except Exception as error:
            if self.unhooked and not isinstance(error, PlanError):
                error.add_note(
                    f"In this stage the blocks {', '.join(self.unhooked)} only pass on their "
                    "input, and their hooks do not run. A model that collects the outputs of its "
                    f"blocks cannot be cut between blocks; {TRACED}"
                )
            raise
        finally:
            self._begin()
            self._reset()
        if self.last < len(self.cut) or reached < self.first:
            raise PlanError(
                f"the forward of {type(self.module).__name__} ended without "
                f"{self.cut.names[min(reached, self.last - 1)]!r}, so it does not run the blocks "
                f"of {self.cut.path!r} one after the other; {TRACED}"
            )
        return self.caches.without(y) if self.caches is not None else y, ()

    def _begin(self) -> None:
        """Note that the blocks have begun: the modules around them draw random numbers again."""
        self.begun = True
        for table in self.evaluation_tables:
            table["training"] = True

    def _set_train(self, train: bool) -> None:
        super()._set_train(train)
        # Before the blocks, later stages repeat the first stage's work to get shapes and masks. In
        # evaluation mode these modules draw no random numbers a second time.
        self.evaluation_tables = [vars(layer) for layer in self.evaluation_layers if layer.training]

    # -- blocks, and entries that travel
    # -------------------------------------------------------------------------------

    def _put_stubs(self) -> None:
        """Replace the forwards of the copy's blocks by callbacks. All attributes remain."""
        cut = self.cut
        # A weak proxy avoids a reference cycle: tensors are freed as soon as this object is
        # dropped.
        proxy = cast("LayersCopy", weakref.proxy(self))
        for number, name in enumerate(cut.names):
            block = self.module.get_submodule(name)
            if self.first <= number < self.last:
                _intercept(block, partial(LayersCopy._own_block, proxy, number))
                continue
            self.unhooked += [repr(name)] if hooks_of(block) else []
            vars(block)["forward"] = partial(LayersCopy._foreign_block, proxy, number)
            drop_hooks(block)  # they run in the stage that has the block
            # Tensors that an earlier forward of the model left in attributes are stale.
            for table in map(vars, block.modules()):
                kept = {key: value for key, value in table.items() if isinstance(value, Tensor)}
                table.update(unknown_like(kept, name))
        for root in cut.entry if self.first or self.last < len(cut) else ():
            entry = self.module.get_submodule(root)
            _intercept(entry, partial(LayersCopy._entry, proxy, root))
            for layer in entry.modules() if self.first else ():
                if layer is not entry and hooks_of(layer):
                    _intercept(layer, partial(LayersCopy._without_hooks, proxy))

    def _foreign_block(self, number: int, /, *args: Any, **kwargs: Any) -> Tree:
        """Return unknown values in place of an earlier block, or the stage's input."""
        if number >= self.first or number != self.at:
            raise PlanError(
                f"{self.cut.names[number]!r} runs where "
                f"{self.cut.names[min(self.at, self.last - 1)]!r} should: "
                f"{type(self.module).__name__} does not run each block of {self.cut.path!r} once, "
                f"one after the other; {TRACED}"
            )
        self.at = number + 1
        if self.at < self.first:
            if self.earlier is None:  # one tree serves all these blocks
                self.earlier = unknown_like(self.x, self.cut.names[number])
            return self.earlier
        self._begin()
        self._between()
        return self.x

    def _own_block(
        self, number: int, call: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> Tree:
        """Call a block of this stage, with its hooks. The last block ends the model's forward."""
        if not self.running:  # computed again, in a backward
            return call(*args, **kwargs)
        if number == 0:
            self._begin()
        shared, path = self.owner.shared_by_blocks, self.cut.names[number]
        checks = bool(shared) and self.is_first_call and torch.is_grad_enabled()
        block = {path: self.module.get_submodule(path)} if checks else {}
        with refuse_left_activations(block, shared, f"; or {TRACED}") if checks else nullcontext():
            if self.side_outputs is None:
                out = call(*args, **kwargs)
            else:
                out = self.side_outputs.block(call, args, kwargs)
        self.at = number + 1
        if self.at == self.last < len(self.cut):
            self._refuse_region()
            raise _Leave(out)
        self._between()
        return out

    def _between(self) -> None:
        """Let the modules around the blocks draw other random numbers after each block."""
        for path, layer in self.outer.items():
            self.places[id(layer)] = f"{path or 'forward'}#{self.at}"

    def _entry(self, root: str, call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Tree:
        """Call an entry before the blocks in the first stage, and record its output. Later stages
        return the record, without numbers unless the entry is in `Layers.carry`."""
        if not self.running or self.begun:
            return call(*args, **kwargs)
        if self.first == 0:
            out = call(*args, **kwargs)
            record = out if root in self.cut.carry else map_leaves(_shape_only, out)
            self.travelling.append((root, record))
            return out
        if not self.travelling or self.travelling[0][0] != root:
            expected = (
                f"{self.travelling[0][0]!r} should"
                if self.travelling
                else "no other module did in the first stage"
            )
            raise PlanError(
                f"{root!r} runs before the blocks of {self.cut.path!r} where {expected}; every "
                f"stage must run the same modules there; {TRACED}"
            )
        _, record = self.travelling.pop(0)
        if root in self.cut.carry:
            return record
        return map_leaves(partial(_from_shape, source=root), record)

    def _without_hooks(self, call: partial[Any], /, *args: Any, **kwargs: Any) -> Tree:
        """Call a module inside an entry of a later stage: the first stage ran its hooks."""
        before = self.running and not self.begun
        return call.args[0].forward(*args, **kwargs) if before else call(*args, **kwargs)

    # -- what other stages have
    # -------------------------------------------------------------------------------

    def _refuse_unknown(self, y: Tree, carry: Tree) -> None:
        """Raise PlanError for an output that depends on tensors of other stages."""
        found = first_unknown((y, carry))
        if found is not None:
            named = zip(locations(y, "its output"), flatten(y)[0], strict=True)
            places = (place for place, leaf in named if is_unknown(leaf))
            raise self._refusal(f"{next(places, 'its carry')} depends on", found.source)

    def _refusal(self, need: str, source: str) -> PlanError:
        """Make the error of a stage that needs numbers of another stage, with the remedy."""
        cut = self.cut
        call = "layers=fp.models.find_layers(model, "
        entries = [root for root in cut.entry if within(source, root)]
        exits = [root for root in cut.exit if within(source, root)]
        remedy = ""
        # Each call repeats the present lists. Without a remedy here, all were tried.
        if exits and not entries:
            remedy = (
                f"; or, if {exits[0]!r} runs before the blocks, give {call}"
                f"entry={[*cut.entry, *exits]})"
            )
        elif entries and not exits and not {*entries} & {*cut.carry}:
            after = [*cut.exit, *entries]
            remedy = (
                f"; or, if {entries[0]!r} runs after the blocks, give {call}exit={after}); if both "
                f"ends use it, give {call}entry={[*cut.entry]}, exit={after}); if later blocks use "
                f"its output, let the output travel: {call}carry={[*cut.carry, *entries]})"
            )
        return PlanError(
            f"blocks {cut.path}[{self.first}:{self.last}], or the modules around them, use more "
            f"than the output of the previous block: {need} {source!r}, which another stage "
            f"has (with x = x + block(x) outside of the blocks, they use all earlier blocks); "
            f"{TRACED}{remedy}"
        )

    def _refuse_incomplete(self, y: Tree, side_outputs: SideOutputs) -> None:
        """Raise PlanError for an output made from side outputs of blocks."""
        for place, leaf in zip(locations(y, "output"), flatten(y)[0], strict=True):
            if side_outputs.follows(leaf):
                raise PlanError(
                    f"{place} is made of values that blocks pass on beside their output (collected "
                    "by hooks or in a list, or kept as attributes), but the last stage has only "
                    f"its own blocks, so {place} would be incomplete; do without it, or {TRACED}"
                )

    def _refuse_collecting(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.first or self.last == len(self.cut):
            return
        if names := arguments_for_all_blocks(self.module.forward, args, kwargs):
            raise PlanError(
                f"the inputs ask for {names}, which are collected from all blocks, but a stage "
                f"has only its own blocks; leave them out, or {TRACED}"
            )

    def _refuse_region(self) -> None:
        """Raise PlanError if the forward would end inside torch.utils.checkpoint."""
        for frame in frames() if self.is_first_call else ():
            if frame.f_code is LayersCopy._forward.__code__:
                break
            if frame.f_code in REGIONS:
                raise PlanError(
                    f"{type(self.module).__name__} runs its blocks inside torch.utils.checkpoint, "
                    "which a stage cannot leave; turn checkpointing off, and make plans with "
                    "fp.schedules.remat(schedule)"
                )


def _intercept(layer: nn.Module, called: Callable[..., Any]) -> None:
    """Send every call of a module to ``called``. The first argument of ``called`` is the original
    call, with hooks.

    The module gets a new class, because Python looks up ``__call__`` in the class.
    """
    kind = type(layer)

    def call(self: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        return called(partial(kind.__call__, self), *args, **kwargs)

    names = {
        "__call__": call,
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
        "__doc__": kind.__doc__,
    }
    layer.__class__ = type(kind.__name__, (kind,), names)


def _shape_only(leaf: Any) -> Any:
    """Replace a leaf that can have a gradient by an empty tensor with the shape after axis 0."""
    return leaf.new_empty((0, *leaf.shape)) if is_differentiable(leaf) else leaf


def _from_shape(leaf: Any, source: str) -> Any:
    """Make the `Unknown` tensor for a leaf of `_shape_only`."""
    if not is_differentiable(leaf):
        return leaf
    return unknown(leaf.shape[1:], leaf.dtype, leaf.device, source)
