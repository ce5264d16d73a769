"""The optimizer's steps inside of a run: a stage's once its gradients are whole, undone where it
was a step too many.

A stage is stepped before it is known whether the others' gradients are finite, what the norm of all
is, and whether the run will fail: what its parameters and the optimizer's state were is kept until
then (post-validation, arXiv 2401.10241, section 4).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from funcpipe._src.core.plain_tensors import is_plain
from funcpipe._src.core.torch_names import STEPPED, storage_number
from funcpipe._src.core.tree import flatten, leaves, unflatten
from funcpipe._src.data.exchange import alone
from funcpipe._src.data.result import Result
from funcpipe._src.engine.prepare import Prepared
from funcpipe._src.engine.unused import UnusedLeaf, unused_leaves
from funcpipe._src.optimizing.leaf_gradients import LeafGradient, by_leaf
from funcpipe._src.optimizing.norms import LocalNorm, local_norm, norm_of, norm_of_norms, on_host
from funcpipe._src.optimizing.optim import apply_gradients, held_of, is_torchs, refuse_unheld
from funcpipe._src.optimizing.undo import Undo
from funcpipe._src.replicas.replicas import Reduction

_BY_NUMBER = (
    torch.optim.Adadelta,
    torch.optim.Adagrad,
    torch.optim.Adam,
    torch.optim.Adamax,
    torch.optim.AdamW,
    torch.optim.ASGD,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.SGD,
)
"""Those of torch's that step each number of a leaf by itself; Muon, say, multiplies whole
matrices."""
_CLIPPING = 1e-6
"""What torch's clipping adds to a norm before it divides."""


@dataclass
class _Spent:
    """What is left of the gradients of a stage that a step has used up.

    Attributes:
        norms: of each.
        trained: how many they were.
        unused: those of these that no backward reached.
    """

    norms: list[LocalNorm]
    trained: int
    unused: list[UnusedLeaf]


class Steps(NamedTuple):
    """Of the steps of a process in one batch.

    Attributes:
        norms: of the gradients that they have used up.
        stand: was every stage stepped.
    """

    norms: list[LocalNorm]
    stand: bool


Settings: TypeAlias = Sequence[Mapping[str, Any]]
"""Of each group of an optimizer what it is stepped with."""


class Stepping:
    """The steps of one run.

    Args:
        ready: the run.
        undo: what knows how all was, of several runs before the first of them; None: of this one.
        spends: are the gradients used up as they are stepped, so that only their norms are left.

    Attributes:
        stepped: the stages that were, on their lanes.
        late: did the loss give weights that nobody knew before.
        early: the stages that can be stepped on their lanes.
        settings: what the groups of the optimizer are stepped with, where it is not what they have.
    """

    def __init__(self, ready: Prepared, undo: Undo | None = None, *, spends: bool = False) -> None:
        self.ready, self.optimizer, self.max_norm = (
            ready,
            ready.options.optimizer,
            ready.options.max_norm,
        )
        self.undo, self.spends = undo or Undo(self.optimizer), spends
        self.settings: Settings | None = None
        self.stepped: set[int] = set()
        self.late = False
        self.early: frozenset[int] = frozenset()
        self._spent: dict[int, _Spent] = {}
        self._moved = False
        mine = [leaf for stage in ready.bounds for leaf in leaves(ready.params[stage])]
        if self.optimizer is not None:
            refuse_unheld(self.optimizer, mine)
        # Gradients of losses that weigh late are scaled when all lanes are done. Replicas with as
        # many microbatches come to each S in one order, so that none waits there for one that waits
        # for it.
        apart = spends if self.optimizer is None else in_parts(self.optimizer, mine)
        if apart and ready.even and not ready.plan.stages[-1].seen.late:
            self.early = frozenset(ready.bounds) - _joined(ready)

    def step(self, stage: int, reduction: Reduction) -> None:
        """Step a stage whose gradients are whole, on the lane that has it; not if others decide
        about these."""
        if stage not in self.early:
            return
        sums = reduction.sums_on_lane()
        if self.spends:
            reduction.spend()
        if self.ready.bounds[stage].params.written():  # what was written is told when the run ends
            return
        tree, spread = self.ready.params[stage], self.ready.spread.get(stage)
        row = sums if spread is None else spread.as_given(sums)
        entries = self._scaled(by_leaf((tree,), (unflatten(flatten(tree)[1], row),), ()))
        self._step(entries)
        self.stepped.add(stage)
        if self.spends:
            norms = [local_norm(stage, entry.gradient, self.ready.part.others) for entry in entries]
            trained = sum(gradient is not None for gradient in sums)
            self._spent[stage] = _Spent(norms, trained, unused_leaves(self.ready, [stage]))
            self.ready.bounds[stage].params.spend()

    def _scaled(self, entries: list[LeafGradient]) -> list[LeafGradient]:
        """The gradients without the loss scale."""
        scale = self.ready.shares.loss_scale
        return (
            entries
            if scale == 1.0
            else [replace(each, gradient=each.gradient / scale) for each in entries]
        )

    def _step(self, entries: Sequence[LeafGradient]) -> None:
        """Step what the optimizer holds of these, as outside of the run: in no mode that stages
        compute in."""
        if self.optimizer is None:
            return
        part = part_of(self.optimizer, [entry.leaf for entry in entries], self.settings)
        if part is None:
            return
        self._moved = True
        held = {id(leaf) for group in part.param_groups for leaf in group["params"]}
        stepped = [entry for entry in entries if id(entry.leaf) in held]
        self.undo.keep(entry.leaf for entry in stepped)
        with _no_autocast(stepped):
            apply_gradients(part, stepped)

    def settle(self, result: Result) -> Result:
        """All is known: keep the steps, or undo them and make those that clipped, or late,
        gradients want."""
        assert result.grads is not None
        params, grads = self.ready.params, result.grads
        if self.late:
            self.ready.plan.stages[-1].seen.late = True
        entries = self._scaled(by_leaf(params, grads, result.ties))
        norm = norm_of(
            [(entry.stage, entry.gradient) for entry in entries if entry.counts], result.exchange
        )
        held = held_of(self.optimizer, entries) if entries or result.exchange == alone else []
        skips, clips = self._skips(norm), self._clips(norm)
        if self.late or skips or clips:
            self.restore()
        for leaf in leaves(params):
            leaf.grad = None  # what an earlier backward left there is not stepped
        if skips or not held:
            return replace(result, norm=norm)
        if self.early and not clips:
            self._step([entry for entry in held if entry.stage not in self.stepped])
            setattr(self.optimizer, STEPPED, True)
        else:
            if self.early:
                self.undo.keep(entry.leaf for entry in held)
            with _no_autocast(held):
                apply_gradients(self.optimizer, held, norm, self.max_norm)
        if self.early:
            _in_order(self.optimizer)
        return replace(result, norm=norm)

    def _skips(self, norm: Tensor) -> bool:
        """Is nothing stepped with gradients of this norm."""
        return self.ready.shares.loss_scale != 1.0 and not bool(norm.isfinite())

    def _clips(self, norm: Tensor) -> bool:
        """Are gradients of this norm clipped."""
        return self.max_norm is not None and not bool(self.max_norm / (norm + _CLIPPING) >= 1.0)

    def restore(self) -> None:
        """Make parameters and the optimizer's state what they were; it stays known."""
        self.undo.restore()
        self.stepped.clear()

    # -- where gradients are spent
    # -------------------------------------------------------------------------------

    @property
    def whole(self) -> bool:
        """Can every stage that is here be stepped on its lane."""
        return self.early == frozenset(self.ready.bounds)

    @property
    def reached(self) -> tuple[int, list[UnusedLeaf]]:
        """How many leaves were trained, and those that no backward reached."""
        spent = [self._spent[stage] for stage in self.ready.bounds if stage in self._spent]
        return sum(each.trained for each in spent), [leaf for each in spent for leaf in each.unused]

    @property
    def steps(self) -> Steps:
        """What all must know of the steps of this process."""
        spent = [self._spent[stage] for stage in self.ready.bounds if stage in self._spent]
        norms = on_host([norm for each in spent for norm in each.norms])
        return Steps(norms, self.stepped == {*self.ready.bounds} and (self._moved or not norms))

    def settled(self, result: Result, everyone: Sequence[Steps]) -> Result | None:
        """All is known: the result of the steps as they are; None where they are to be undone, for
        all processes alike."""
        norm = norm_of_norms([each.norms for each in everyone], result.exchange)
        if self.late:
            self.ready.plan.stages[-1].seen.late = True
        if (
            self.late
            or not all(each.stand for each in everyone)
            or self._skips(norm)
            or self._clips(norm)
        ):
            return None
        return replace(result, norm=norm)

    def done(self) -> None:
        """After the last of several: let all be as `settle` leaves it."""
        for leaf in leaves(self.ready.params):
            leaf.grad = None
        if self.optimizer is not None:
            setattr(self.optimizer, STEPPED, True)
            _in_order(self.optimizer)


def _hooks(register: Callable[[Callable[..., None]], Any]) -> Mapping[int, Any]:
    """Return torch's table of hooks behind a registering function. The table is the same object for
    every handle."""
    handle = register(lambda *_: None)
    hooks = handle.hooks_dict_ref()
    handle.remove()
    return hooks


_GLOBAL_HOOKS = (
    _hooks(register_optimizer_step_pre_hook),
    _hooks(register_optimizer_step_post_hook),
)


def in_parts(optimizer: torch.optim.Optimizer, tensors: Iterable[Any]) -> bool:
    """Is each leaf stepped by itself, so that parts of an optimizer can be stepped one by one:
    torch's own do so.

    Others may count in their groups, look at all leaves, or hold another optimizer. Hooks, of this
    optimizer or of all, expect the whole optimizer, once a step. And a step is of all that have a
    gradient, so there are to be no others than these ``tensors`` of the run. Of parts of tensors
    only what goes number by number can: the rest asks other processes, one lane beside the other.
    """
    held = held_by(optimizer)
    if type(optimizer) not in _BY_NUMBER and not all(map(is_plain, held)):
        return False
    patched = (
        "step" in vars(optimizer)
        and getattr(optimizer.step, "__wrapped__", None) is not type(optimizer).step
    )
    hooked = any(_GLOBAL_HOOKS) or any(
        value for name, value in vars(optimizer).items() if name.endswith("_hooks")
    )
    return (
        is_torchs(optimizer) and not (patched or hooked) and {*map(id, held)} <= {*map(id, tensors)}
    )


def part_of(
    optimizer: torch.optim.Optimizer, tensors: Sequence[Any], settings: Settings | None = None
) -> torch.optim.Optimizer | None:
    """The optimizer for some of its parameters, with the same state; None: it holds none of them.

    Parts of different parameters can be stepped at the same time. With ``settings`` its groups have
    others.
    """
    ids = {id(leaf) for leaf in tensors}
    groups: list[dict[str, Any]] = []
    for group, own in zip(
        optimizer.param_groups, settings or [{}] * len(optimizer.param_groups), strict=True
    ):
        kept = [at for at, leaf in enumerate(group["params"]) if id(leaf) in ids]
        lists = {
            name: [group[name][at] for at in kept]
            for name in ("params", "param_names")
            if name in group
        }
        if kept:
            groups.append({**group, **own, **lists})
    if not groups:
        return None
    part: torch.optim.Optimizer = object.__new__(
        type(optimizer)
    )  # `copy` takes what is saved, so no hooks
    vars(part).update(vars(optimizer))
    vars(part).pop("step", None)  # a scheduler has put one there, which steps all of it
    part.param_groups = groups
    return part


@contextmanager
def _no_autocast(entries: Iterable[LeafGradient]) -> Generator[None]:
    """Inside, nothing is cast: a step of an optimizer is none of what autocast is for."""
    with ExitStack() as modes:
        for kind in {entry.leaf.device.type for entry in entries}:
            if torch.is_autocast_enabled(kind):
                modes.enter_context(torch.autocast(kind, enabled=False))
        yield


def held_by(optimizer: torch.optim.Optimizer | None) -> list[Tensor]:
    """All leaves of an optimizer."""
    return [
        leaf
        for group in (optimizer.param_groups if optimizer is not None else ())
        for leaf in group["params"]
    ]


def _in_order(optimizer: torch.optim.Optimizer) -> None:
    """Put the state of the leaves in their order, whichever was stepped first: so it is saved in
    it."""
    state = optimizer.state
    for leaf in held_by(optimizer):
        if leaf in state:
            state[leaf] = state.pop(leaf)


def _joined(ready: Prepared) -> set[int]:
    """The stages whose leaves are tied to those of others, or share their memory: a write into one
    is seen in the other."""
    tied = {stage for group in ready.ties for stage, _ in group}
    memories = {stage: {*map(_memory, leaves(ready.params[stage]))} for stage in ready.bounds}
    seen = Counter(number for numbers in memories.values() for number in numbers)
    return tied | {
        stage for stage, numbers in memories.items() if any(seen[number] > 1 for number in numbers)
    }


def _memory(leaf: Any) -> int:
    """A number that leaves of the same memory share."""
    return storage_number(leaf.untyped_storage()) if is_plain(leaf) else id(leaf)
