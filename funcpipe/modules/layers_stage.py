"""One stage of a layer cut: the model's own forward on a private copy in which other stages' modules are stubs.

Values that only another stage has are NaN here: an output that depends on them is NaN too, and is refused. Their
shapes, types and devices are right, which is all that masks and rotary tables are made from.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, Self, cast

import torch
from torch import Tensor

from funcpipe.core.errors import PlanError
from funcpipe.core.frames import REGIONS, frames
from funcpipe.core.stage import Out
from funcpipe.core.torch_names import without_modes
from funcpipe.core.tree import Tree, cow_clone, flatten, is_differentiable, map_leaves, map_tensors, under_transform
from funcpipe.modules.layers_find import TRACED, Layers, within
from funcpipe.modules.layers_look import asked, beside, differs, incomplete, marked, nans
from funcpipe.modules.layers_slices import SliceCaches
from funcpipe.modules.layers_stub import Blank, Leave, outer_paths, outline, real, stub
from funcpipe.modules.module import ModuleCopy, ModuleFn, Params, Skeleton, State
from funcpipe.modules.signature import as_call
from funcpipe.modules.skippable import Skips

INPUTS = "inputs"
"""The skip in which the model's inputs travel from the first stage to all others."""


class LayersFn(ModuleFn):
    """Some blocks of a model as a function of their parameters.

    Attributes:
        cut: the stack, and the modules before and after it.
        first, last: the stage's blocks, ``last`` excluded.
        verified: (training, with gradients) for each mode in which a forward was verified.
        caches: what makes the caches of slices; None: it runs whole sequences only.
    """

    def __init__(
        self, shape: Skeleton, skips: Skips, cut: Layers, first: int, last: int, caches: SliceCaches | None = None
    ) -> None:
        self.cut, self.first, self.last, self.caches = cut, first, last, caches
        self.verified: set[tuple[bool, bool]] = set()
        self.numbers = {name: number for number, name in enumerate(cut.names)}
        tables = {
            alias
            for alias, buffer in shape.module.named_buffers(remove_duplicate=False)
            if not is_differentiable(buffer) and alias.rpartition(".")[0] not in shape.norms
        }
        aliases = {alias for alias in shape.canonical if self._holds(alias, table=alias in tables)}
        super().__init__(shape, skips, aliases, spread=True)

    @property
    def sliceable(self) -> bool:
        """Models of transformers attend to all that they see, unless they were cut to run slices."""
        library: Any = sys.modules.get("transformers")
        return self.caches is not None or library is None or not isinstance(self.skeleton, library.PreTrainedModel)

    def _holds(self, alias: str, *, table: bool) -> bool:
        """Does the stage hold a tensor: one of its blocks, of its end of the stack, or of modules that all stages run.

        Every stage holds tables of ints and masks of both ends: they are small, and forwards read them from outside.
        """
        cut = self.cut
        prefix = f"{cut.path}." if cut.path else ""
        if alias.startswith(prefix):
            number = self.numbers.get(prefix + alias.removeprefix(prefix).partition(".")[0])
            if number is not None:
                return self.first <= number < self.last
        before, after = (any(within(alias, root) for root in roots) for roots in (cut.entry, cut.exit))
        if table or not (before or after):
            return True
        return (before and self.first == 0) or (after and self.last == len(cut))

    def copy(self) -> LayersCopy:
        """A private copy that runs the stage."""
        return LayersCopy(self)

    def layers(self) -> list[str]:
        """The paths of the modules that only this stage runs: shared ones draw nothing twice, and name no stage."""
        cut = self.cut
        roots = list(cut.names[self.first : self.last])
        roots += cut.entry if self.first == 0 else ()
        roots += [root for root in cut.exit if root not in cut.entry] if self.last == len(cut) else []
        return [path for path in super().layers() if any(within(path, root) for root in roots)]


class LayersCopy(ModuleCopy):
    """A private copy of the model in which other stages' modules are stubs."""

    owner: LayersFn

    def __init__(self, owner: LayersFn) -> None:
        super().__init__(owner)
        cut = owner.cut
        self.cut, self.first, self.last, self.caches = cut, owner.first, owner.last, owner.caches
        self.carried: Tree = None  # what the slice before handed on
        self.arguments: dict[str, Any] = {}  # of the model's forward, where slices may run
        self.filled: torch.device | None = None
        self.looks = self.passing = False  # is this call verified; do its blocks return what arrived
        self.ends: list[Any] = []  # nodes of autograd that made what the blocks returned, in such a call
        self.outer = {path: self.module.get_submodule(path) for path in outer_paths(cut.path)}
        modules = [
            (path, layer) for path, layer in self.module.named_modules() if path not in self.outer and path != cut.path
        ]
        around = [*cut.names, *cut.entry, *cut.exit]
        helpers = [layer for path, layer in modules if not any(within(path, root) for root in around)]
        self.sleepers = [*self.outer.values(), *helpers] if self.first else []
        self._reset()
        self._put_stubs()
        self.attributes = [(vars(layer), dict(vars(layer))) for layer in self.module.modules()]
        self._set_train(self.train)

    def install(self, params: Params, state: State) -> Self:
        """Put tensors in the places of the stage's parameters and buffers, NaN in those of other stages."""
        super().install(params, state)
        tensor = next(iter([*params.values(), *(state or {}).values()]), None)
        device = tensor.device if tensor is not None else torch.device("cpu")
        if device != self.filled:
            self._fill(float("nan"), device)
        return self

    def _fill(self, value: float, device: torch.device) -> None:
        """Put stand-ins in the places of other stages' tensors: of their type and shape, but without memory."""
        self.filled, self.unknown = device, value
        for table, local, tensor in self.absent:
            table[local] = self._unknown(tensor) if is_differentiable(tensor) else None

    # -- one call --------------------------------------------------------------------------------------------------

    def _reset(self) -> None:
        """Clear the state of a call."""
        self.running = self.begun = self.inside = False
        self.at = 0  # the next block that should run
        self.x: Tree = None  # what the stage before returned
        self.nothing: Tree = None  # the same without numbers
        self.calls: list[tuple[str, Tree]] = []  # of entries, in order: path, what it returned

    def _run(self, x: Tree, extras: dict[str, Any]) -> tuple[Any, dict[str, Tree]]:
        """The stage's output on one microbatch, and the skip for later stages."""
        inputs, calls = extras["skips"][INPUTS] if self.first else (x, ())
        travels = self.first == 0 and self.last < len(self.cut)
        # What a forward writes in place into its inputs, the forwards of later stages write again.
        kept = map_tensors(cow_clone, inputs) if travels else None
        mode = self.train, torch.is_grad_enabled()
        self.looks, self.ends = mode not in self.owner.verified, []
        self.carried = extras.get("carry")
        try:
            y, returned = self._forward(x, inputs, calls)
            carry = self.caches.carry(self.arguments, self.first, self.last) if self.caches else ()
            if self.looks:
                self._verify(y, x, inputs, calls)
                self.owner.verified.add(mode)
                self.looks, self.ends = False, []
        finally:
            self.carried, self.arguments = None, {}
        return Out(y, carry=carry) if self.caches else y, {INPUTS: (kept, returned)} if travels else {}

    def _forward(self, x: Tree, inputs: Tree, calls: tuple[Any, ...]) -> tuple[Tree, tuple[Any, ...]]:
        """The output of the stage's last block, or of the model; in the first stage also what the entries returned."""
        args, kwargs = as_call(inputs)
        self._refuse_collecting(args, kwargs)
        if self.caches is not None:
            args, kwargs = (), self.caches.given(args, kwargs, self.carried, self.first, self._unknown)
            self.arguments = kwargs
        for path, layer in self.outer.items():
            self.places[id(layer)] = path or "forward"
        for table in self.asleep:
            table["training"] = False
        self.running, self.x, self.calls = True, x, list(reversed(calls))
        self.entered = [path for path, _ in calls]
        try:
            y = self.module(*args, **kwargs)
            reached = self.at
        except Leave as leave:
            return leave.out, tuple(self.calls) if self.first == 0 else ()
        finally:
            self._begin()
            self._reset()
        if self.last < len(self.cut) or reached < self.first:
            raise PlanError(
                f"the forward of {type(self.module).__name__} ended without "
                f"{self.cut.names[min(reached, self.last - 1)]!r}: it does not run the blocks of {self.cut.path!r} "
                f"one after the other; {TRACED}"
            )
        return self.caches.without(y) if self.caches is not None else y, ()

    def _begin(self) -> None:
        """Note that the stack has begun: the modules around it draw again."""
        self.begun = True
        for table in self.asleep:
            table["training"] = True

    def _set_train(self, train: bool) -> None:
        super()._set_train(train)
        # Before the stack, later stages repeat what the first one did: for shapes and masks, without drawing.
        self.asleep = [vars(layer) for layer in self.sleepers if layer.training]

    # -- stubs -----------------------------------------------------------------------------------------------------

    def _put_stubs(self) -> None:
        """Replace the forwards of modules of the copy; their attributes stay."""
        cut = self.cut
        proxy = cast("LayersCopy", weakref.proxy(self))  # no cycle: who drops this drops the tensors
        for number, name in enumerate(cut.names):
            layer = self.module.get_submodule(name)
            if not self.first <= number < self.last:
                stub(layer, partial(LayersCopy._foreign_block, proxy, number))
            else:
                vars(layer)["forward"] = partial(LayersCopy._own_block, proxy, number, real(layer))
        if self.first == 0 and self.last == len(cut):
            return
        for root in cut.entry:
            for path, layer in self.module.get_submodule(root).named_modules(prefix=root):
                if self.first == 0:
                    vars(layer)["forward"] = partial(LayersCopy._first_call, proxy, path, root, real(layer))
                elif self.last == len(cut) and root in cut.exit:
                    vars(layer)["forward"] = partial(LayersCopy._later_call, proxy, path, root, real(layer))
                else:
                    stub(layer, partial(LayersCopy._later_call, proxy, path, root, None))
        for root in cut.exit if self.last < len(cut) else ():
            if root not in cut.entry:
                stub(self.module.get_submodule(root), partial(LayersCopy._too_early, proxy, root))

    def _foreign_block(self, number: int, /, *args: Any, **kwargs: Any) -> Tree:
        """The forward of another stage's block: the one just before this stage returns what arrived."""
        if number >= self.first or number != self.at:
            raise PlanError(
                f"{self.cut.names[number]!r} runs where {self.cut.names[min(self.at, self.last - 1)]!r} should: "
                f"{type(self.module).__name__} does not run each block of {self.cut.path!r} once, one after the "
                f"other; {TRACED}"
            )
        self.at = number + 1
        if self.at < self.first:
            if self.nothing is None:  # once for all of them
                self.nothing = map_leaves(lambda leaf: self._unknown(leaf) if is_differentiable(leaf) else leaf, self.x)
            return self.nothing
        self._begin()
        self._between()
        return self.x

    def _own_block(self, number: int, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Tree:
        """The forward of a block of this stage; after the last one it leaves the model's forward."""
        if not self.running:  # computed again, in a backward
            return forward(*args, **kwargs)
        if number == 0:
            self._begin()
        out = self.x if self.passing else forward(*args, **kwargs)
        self.at = number + 1
        if self.looks and self._gives_output():
            out, nodes = marked(out)
            self.ends += nodes
        if self.at == self.last < len(self.cut):
            self._refuse_region()
            raise Leave(out)
        self._between()
        return out

    def _between(self) -> None:
        """Have the modules around the stack draw other random numbers after each block."""
        for path, layer in self.outer.items():
            self.places[id(layer)] = f"{path or 'forward'}#{self.at}"

    def _first_call(self, path: str, root: str, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Tree:
        """The forward of an entry in the first stage: records what it returned for later stages, without numbers."""
        if not self.running or self.begun or self.inside:
            return forward(*args, **kwargs)
        self.inside = True
        try:
            out = forward(*args, **kwargs)
        finally:
            self.inside = False
        record = out if root in self.cut.carry else map_leaves(outline, out)
        self.calls.append((path, record))
        return out

    def _later_call(
        self, path: str, root: str, forward: Callable[..., Any] | None, /, *args: Any, **kwargs: Any
    ) -> Tree:
        """The forward of an entry in a later stage: returns what it did in the first, without numbers."""
        if not self.running or self.begun:
            if forward is not None:
                return forward(*args, **kwargs)
            entry = f"entry=[{root!r}], " if any(within(name, root) for name in self.entered) else ""
            raise PlanError(
                f"{path!r} runs after the first block of {self.cut.path!r} began; if it runs after the last one, say "
                f"so: layers=fp.models.find_layers(model, {entry}exit=[{root!r}]); else {TRACED}"
            )
        if not self.calls or self.calls[-1][0] != path:
            expected = f"{self.calls[-1][0]!r} should" if self.calls else "nothing more did in the first stage"
            raise PlanError(
                f"{path!r} runs before the blocks of {self.cut.path!r} where {expected}: every stage must do the same "
                f"there; {TRACED}"
            )
        _, record = self.calls.pop()
        return map_leaves(lambda leaf: self._dense(leaf) if isinstance(leaf, Blank) else leaf, record)

    def _too_early(self, root: str, /, *args: Any, **kwargs: Any) -> Tree:
        """The forward of an exit in a stage before the last: it runs too early. Raises PlanError."""
        raise PlanError(
            f"{root!r} is registered after the blocks of {self.cut.path!r}, but runs before the last of them; if it "
            f"runs before the first, say so: layers=fp.models.find_layers(model, entry=[{root!r}]); else {TRACED}"
        )

    # -- values of other stages ------------------------------------------------------------------------------------

    def _unknown(self, like: Tensor) -> Tensor:
        """A stand-in of the type and shape of a tensor, without memory."""
        return torch.full((), self.unknown, dtype=like.dtype, device=self.filled).expand(like.shape)

    def _dense(self, blank: Blank) -> Tensor:
        """A stand-in with memory: what follows an entry may write in place."""
        return torch.full(blank.shape, self.unknown, dtype=blank.dtype, device=self.filled)

    def _verify(self, y: Tree, x: Tree, inputs: Tree, calls: tuple[Any, ...]) -> None:
        """Refuse an output that depends on values that only other stages have. Raises PlanError."""
        if self._gives_output():
            self._refuse_incomplete(y, x, inputs, calls)
        before = nans(y)
        if before is None or not any(bool(mask.any()) for mask in before):
            return
        assert self.filled is not None
        self._fill(0.0, self.filled)
        try:
            after = nans(self._again(x, inputs, calls))
        finally:
            self._fill(float("nan"), self.filled)
        if after is not None and all(torch.equal(a, b) for a, b in zip(before, after, strict=True)):
            return  # the NaN are the model's own
        entries = ", ".join(self.cut.entry) or "none"
        remedy = "layers=fp.models.find_layers(model, "
        raise PlanError(
            f"blocks {self.cut.path}[{self.first}:{self.last}], or what follows them, use more than what the block "
            "before them returned: what another module returned, or its parameters, which another stage holds. If it "
            f"is what an entry ({entries}) returned, let it travel: {remedy}carry=[...]); if the end uses a parameter "
            f"of an entry, give it to both ends: {remedy}entry=[...], exit=[...]); else {TRACED}"
        )

    def _refuse_incomplete(self, y: Tree, x: Tree, inputs: Tree, calls: tuple[Any, ...]) -> None:
        """Refuse an output made of what blocks hand out beside what they return. Raises PlanError."""
        if place := beside(y, self.ends, self._of_blocks()):
            raise incomplete(place)
        leaves = [leaf for leaf in flatten(y)[0] if isinstance(leaf, Tensor)]
        if under_transform() or (self.ends and all(map(is_differentiable, leaves))) or len(leaves) < 2:
            return
        self.passing = True  # without a graph, the form of the output tells
        try:
            with without_modes():
                other = self._again(x, inputs, calls)
        except Exception:
            return  # these blocks give something else than the one before them
        finally:
            self.passing = False
        if place := differs(y, other):
            raise incomplete(place)

    def _gives_output(self) -> bool:
        """Is this the last of several stages."""
        return bool(self.first) and self.last == len(self.cut)

    def _again(self, x: Tree, inputs: Tree, calls: tuple[Any, ...]) -> Tree:
        """The output of one more forward, without gradients or statistics."""
        collected = [layer.deferral.collected for layer in self.norms]
        for layer in self.norms:
            layer.deferral.collected = None
        try:
            with torch.no_grad():
                return self._forward(x, inputs, calls)[0]
        finally:
            for layer, moments in zip(self.norms, collected, strict=True):
                layer.deferral.collected = moments

    def _of_blocks(self) -> set[int]:
        """The ids of the tensors that the blocks alone have."""
        prefix = f"{self.cut.path}." if self.cut.path else ""
        ids: dict[bool, set[int]] = {True: set(), False: set()}
        for path, layer in self.module.named_modules(remove_duplicate=False):
            inside = path.startswith(prefix) and any(within(path, name) for name in self.cut.names)
            ids[inside] |= {id(parameter) for parameter in layer.parameters(recurse=False)}
        return ids[True] - ids[False]

    def _refuse_collecting(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.first == 0 and self.last < len(self.cut) and (names := asked(self.module.forward, args, kwargs)):
            raise PlanError(
                f"the inputs ask for {names}, which are collected from all blocks, and a stage sees its own only; "
                f"leave them out, or {TRACED}"
            )

    def _refuse_region(self) -> None:
        """Refuse to leave the forward from inside of torch.utils.checkpoint. Raises PlanError."""
        for frame in frames() if self.looks else ():
            if frame.f_code is LayersCopy._forward.__code__:
                break
            if frame.f_code in REGIONS:
                raise PlanError(
                    f"{type(self.module).__name__} runs its blocks inside torch.utils.checkpoint, which a stage cannot "
                    "leave; switch that off, and make plans with fp.schedules.remat(schedule)"
                )
