"""One stage of a layer cut: the model's own forward on a private copy in which other stages' modules are stubs.

What a stub cannot know it fills with NaN: if a stage's output depends on it after all, that shows, and is refused. Only
shapes, types and devices of such values are right, which is what masks and rotary tables are made from.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, Self, cast

import torch
from torch import Tensor

from funcpipe.core.errors import PlanError
from funcpipe.core.frames import REGIONS, frames
from funcpipe.core.torch_names import without_modes
from funcpipe.core.tree import Tree, cow_clone, flatten, is_differentiable, map_leaves, under_transform
from funcpipe.modules.layers_find import TRACED, Layers, within
from funcpipe.modules.layers_look import asked, beside, differs, incomplete, marked, nans
from funcpipe.modules.layers_stub import Blank, Leave, outer_paths, outline, real, stub
from funcpipe.modules.module import ModuleCopy, ModuleFn, Params, Skeleton, State
from funcpipe.modules.signature import as_call
from funcpipe.modules.skippable import Skips

INPUTS = "inputs"
"""The skip in which the model's inputs travel from the first stage to all others."""


class LayersFn(ModuleFn):
    """Some blocks of a model as a function of their parameters.

    Attributes:
        cut: the stack, and what stands around it.
        first, last: the stage's blocks, ``last`` excluded.
        verified: (training, with gradients) for each mode in which a forward was looked at.
    """

    def __init__(self, shape: Skeleton, skips: Skips, cut: Layers, first: int, last: int) -> None:
        self.cut, self.first, self.last = cut, first, last
        self.verified: set[tuple[bool, bool]] = set()
        self.numbers = {name: number for number, name in enumerate(cut.names)}
        tables = {
            alias
            for alias, buffer in shape.module.named_buffers(remove_duplicate=False)
            if not is_differentiable(buffer) and alias.rpartition(".")[0] not in shape.norms
        }
        held = {alias for alias in shape.canonical if self._holds(alias, table=alias in tables)}
        super().__init__(shape, skips, held, spread=True)

    def _holds(self, alias: str, *, table: bool) -> bool:
        """Is a tensor the stage's: of its blocks, of its side of the stack, or of what all stages run.

        So are tables of ints and masks at both ends: they are small, and forwards look at them from outside.
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
        """A copy to run."""
        return LayersCopy(self)

    def layers(self) -> list[str]:
        """The paths of what only this stage runs: what all stages share draws nothing twice, and names no stage."""
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
        self.cut, self.first, self.last = cut, owner.first, owner.last
        self.filled: torch.device | None = None
        self.looks = self.passing = False  # is this call looked at; do its blocks give what arrived
        self.ends: list[Any] = []  # of the graphs of what the blocks returned, in a call that is looked at
        self.outer = {path: self.module.get_submodule(path) for path in outer_paths(cut.path)}
        modules = [
            (path, one) for path, one in self.module.named_modules() if path not in self.outer and path != cut.path
        ]
        around = [*cut.names, *cut.entry, *cut.exit]
        helpers = [one for path, one in modules if not any(within(path, root) for root in around)]
        self.sleepers = [*self.outer.values(), *helpers] if self.first else []
        self._reset()
        self._put_stubs()
        self.attributes = [(vars(layer), dict(vars(layer))) for layer in self.module.modules()]
        self._set_train(self.train)

    def install(self, params: Params, state: State) -> Self:
        """Put tensors in the places of the stage's parameters and buffers, NaN in those of other stages."""
        super().install(params, state)
        given = next(iter([*params.values(), *(state or {}).values()]), None)
        device = given.device if given is not None else torch.device("cpu")
        if device != self.filled:
            self._fill(float("nan"), device)
        return self

    def _fill(self, value: float, device: torch.device) -> None:
        """Give what other stages hold a type, a shape and a device, but no memory and no numbers."""
        for table, local, tensor in self.absent:
            known = is_differentiable(tensor)
            table[local] = (
                torch.full((), value, dtype=tensor.dtype, device=device).expand(tensor.shape) if known else None
            )
        self.filled, self.unknown = device, value

    # -- one call --------------------------------------------------------------------------------------------------

    def _reset(self) -> None:
        """Forget the call."""
        self.running = self.begun = self.inside = False
        self.at = 0  # the next block that should run
        self.x: Tree = None  # what arrived
        self.nothing: Tree = None  # the same without numbers
        self.calls: list[tuple[str, Tree]] = []  # of entries, in their order: what they returned

    def _run(self, x: Tree, extras: dict[str, Any]) -> tuple[Any, dict[str, Tree]]:
        """The stage's output on one microbatch, and what later stages need besides."""
        inputs, calls = extras["skips"][INPUTS] if self.first else (x, ())
        travels = self.first == 0 and self.last < len(self.cut)
        # What a forward writes in place into its inputs, the forwards of later stages write again.
        kept = (
            map_leaves(lambda leaf: cow_clone(leaf) if isinstance(leaf, Tensor) else leaf, inputs) if travels else None
        )
        mode = self.train, torch.is_grad_enabled()
        self.looks, self.ends = mode not in self.owner.verified, []
        y, made = self._forward(x, inputs, calls)
        if self.looks:
            self._verify(y, x, inputs, calls)
            self.owner.verified.add(mode)
            self.looks, self.ends = False, []
        return y, {INPUTS: (kept, made)} if travels else {}

    def _forward(self, x: Tree, inputs: Tree, calls: tuple[Any, ...]) -> tuple[Tree, tuple[Any, ...]]:
        """The model's forward, left after the stage's last block; and what the entries returned in the first stage."""
        args, kwargs = as_call(inputs)
        self._refuse_collecting(args, kwargs)
        for path, layer in self.outer.items():
            self.places[id(layer)] = path or "forward"
        for table in self.asleep:
            table["training"] = False
        self.running, self.x, self.calls = True, x, list(reversed(calls))
        self.entered = [path for path, _ in calls]
        try:
            y = self.module(*args, **kwargs)
            reached = self.at
        except Leave as left:
            return left.out, tuple(self.calls) if self.first == 0 else ()
        finally:
            self._begin()
            self._reset()
        if self.last < len(self.cut) or reached < self.first:
            raise PlanError(
                f"the forward of {type(self.module).__name__} ended without "
                f"{self.cut.names[min(reached, self.last - 1)]!r}: it does not run the blocks of {self.cut.path!r} "
                f"one after the other; {TRACED}"
            )
        return y, ()

    def _begin(self) -> None:
        """The stack begins."""
        self.begun = True
        for table in self.asleep:
            table["training"] = True

    def _set_train(self, train: bool) -> None:
        super()._set_train(train)
        # Before the stack, later stages repeat what the first one did: for shapes and masks, without drawing.
        self.asleep = [vars(layer) for layer in self.sleepers if layer.training]

    # -- stubs -----------------------------------------------------------------------------------------------------

    def _put_stubs(self) -> None:
        """Give modules of the copy other forwards; their attributes stay."""
        cut = self.cut
        me = cast("LayersCopy", weakref.proxy(self))  # no cycle: who drops this drops the tensors
        for number, name in enumerate(cut.names):
            layer = self.module.get_submodule(name)
            if not self.first <= number < self.last:
                stub(layer, partial(LayersCopy._foreign_block, me, number))
            else:
                vars(layer)["forward"] = partial(LayersCopy._own_block, me, number, real(layer))
        if self.first == 0 and self.last == len(cut):
            return
        for root in cut.entry:
            for path, layer in self.module.get_submodule(root).named_modules(prefix=root):
                if self.first == 0:
                    vars(layer)["forward"] = partial(LayersCopy._first_call, me, path, root, real(layer))
                elif self.last == len(cut) and root in cut.exit:
                    vars(layer)["forward"] = partial(LayersCopy._later_call, me, path, root, real(layer))
                else:
                    stub(layer, partial(LayersCopy._later_call, me, path, root, None))
        for root in cut.exit if self.last < len(cut) else ():
            if root not in cut.entry:
                stub(self.module.get_submodule(root), partial(LayersCopy._too_early, me, root))

    def _foreign_block(self, number: int, /, *args: Any, **kwargs: Any) -> Tree:
        """A block of another stage: the one before the stage's first gives what arrived."""
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

    def _own_block(self, number: int, real: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Tree:
        """A block of the stage."""
        if not self.running:  # computed again, in a backward
            return real(*args, **kwargs)
        if number == 0:
            self._begin()
        out = self.x if self.passing else real(*args, **kwargs)
        self.at = number + 1
        if self.looks and self._gives_output():
            out, ends = marked(out)
            self.ends += ends
        if self.at == self.last < len(self.cut):
            self._refuse_region()
            raise Leave(out)
        self._between()
        return out

    def _between(self) -> None:
        """What the modules around the stack draw between two blocks, or after all, is not what they drew before."""
        for path, layer in self.outer.items():
            self.places[id(layer)] = f"{path or 'forward'}#{self.at}"

    def _first_call(self, path: str, root: str, real: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Tree:
        """An entry in the first stage: later stages are told what it returned, without the numbers."""
        if not self.running or self.begun or self.inside:
            return real(*args, **kwargs)
        self.inside = True
        try:
            out = real(*args, **kwargs)
        finally:
            self.inside = False
        told = out if root in self.cut.carry else map_leaves(outline, out)
        self.calls.append((path, told))
        return out

    def _later_call(self, path: str, root: str, real: Callable[..., Any] | None, /, *args: Any, **kwargs: Any) -> Tree:
        """An entry in a later stage: it returns what it did in the first, without the numbers."""
        if not self.running or self.begun:
            if real is not None:
                return real(*args, **kwargs)
            both = f"entry=[{root!r}], " if any(within(name, root) for name in self.entered) else ""
            raise PlanError(
                f"{path!r} runs after the first block of {self.cut.path!r} began; if it runs after the last one, say "
                f"so: layers=fp.models.find_layers(model, {both}exit=[{root!r}]); else {TRACED}"
            )
        if not self.calls or self.calls[-1][0] != path:
            expected = f"{self.calls[-1][0]!r} should" if self.calls else "nothing more did in the first stage"
            raise PlanError(
                f"{path!r} runs before the blocks of {self.cut.path!r} where {expected}: every stage must do the same "
                f"there; {TRACED}"
            )
        _, told = self.calls.pop()
        return map_leaves(lambda leaf: self._dense(leaf) if isinstance(leaf, Blank) else leaf, told)

    def _too_early(self, root: str, /, *args: Any, **kwargs: Any) -> Tree:
        """A module that was thought to run after the stack."""
        raise PlanError(
            f"{root!r} is registered after the blocks of {self.cut.path!r}, but runs before the last of them; if it "
            f"runs before the first, say so: layers=fp.models.find_layers(model, entry=[{root!r}]); else {TRACED}"
        )

    # -- what is not known here ------------------------------------------------------------------------------------

    def _unknown(self, like: Tensor) -> Tensor:
        """A tensor of the type and shape of another, without memory."""
        return torch.full((), self.unknown, dtype=like.dtype, device=self.filled).expand(like.shape)

    def _dense(self, blank: Blank) -> Tensor:
        """The same with memory: what follows an entry may write in place."""
        return torch.full(blank.shape, self.unknown, dtype=blank.dtype, device=self.filled)

    def _verify(self, y: Tree, x: Tree, inputs: Tree, calls: tuple[Any, ...]) -> None:
        """Refuse an output that depends on what is not known in this stage; looked at once."""
        if self._gives_output():
            self._refuse_incomplete(y, x, inputs, calls)
        before = nans(y)
        if before is None or not any(bool(one.any()) for one in before):
            return
        assert self.filled is not None
        self._fill(0.0, self.filled)
        try:
            after = nans(self._again(x, inputs, calls))
        finally:
            self._fill(float("nan"), self.filled)
        if after is not None and all(torch.equal(a, b) for a, b in zip(before, after, strict=True)):
            return  # it has NaN of its own
        entries = ", ".join(self.cut.entry) or "none"
        mended = "layers=fp.models.find_layers(model, "
        raise PlanError(
            f"blocks {self.cut.path}[{self.first}:{self.last}], or what follows them, use more than what the block "
            "before them returned: what another module returned, or its parameters, which another stage holds. If it "
            f"is what an entry ({entries}) returned, let it travel: {mended}carry=[...]); if the end uses a parameter "
            f"of an entry, give it to both ends: {mended}entry=[...], exit=[...]); else {TRACED}"
        )

    def _refuse_incomplete(self, y: Tree, x: Tree, inputs: Tree, calls: tuple[Any, ...]) -> None:
        """Refuse an output that holds what blocks hand out beside what they return."""
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
        """The output of another forward, which leaves no trace."""
        collected = [layer.deferral.collected for layer in self.norms]
        for layer in self.norms:
            layer.deferral.collected = None
        try:
            with torch.no_grad():
                return self._forward(x, inputs, calls)[0]
        finally:
            for layer, seen in zip(self.norms, collected, strict=True):
                layer.deferral.collected = seen

    def _of_blocks(self) -> set[int]:
        """The ids of the tensors that the blocks alone have."""
        prefix = f"{self.cut.path}." if self.cut.path else ""
        found: dict[bool, set[int]] = {True: set(), False: set()}
        for path, layer in self.module.named_modules(remove_duplicate=False):
            inside = path.startswith(prefix) and any(within(path, name) for name in self.cut.names)
            found[inside] |= {id(one) for one in layer.parameters(recurse=False)}
        return found[True] - found[False]

    def _refuse_collecting(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.first == 0 and self.last < len(self.cut) and (names := asked(self.module.forward, args, kwargs)):
            raise PlanError(
                f"the inputs ask for {names}, which are collected from all blocks, and a stage sees its own only; "
                f"leave them out, or {TRACED}"
            )

    def _refuse_region(self) -> None:
        """Leaving from inside of torch.utils.checkpoint would leave it half done."""
        for frame in frames() if self.looks else ():
            if frame.f_code is LayersCopy._forward.__code__:
                break
            if frame.f_code in REGIONS:
                raise PlanError(
                    f"{type(self.module).__name__} runs its blocks inside torch.utils.checkpoint, which a stage cannot "
                    "leave; switch that off, and make plans with fp.schedules.remat(schedule)"
                )
