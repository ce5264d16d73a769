"""Optimizer steps within a run: step a stage when its gradients are complete, undo if necessary.

A lane steps a stage before three facts are known: whether the other gradients are finite, the norm
of all gradients, and whether the run fails. So copies of parameters and optimizer state are kept
until then. This is post-validation (arXiv 2401.10241, section 4). `optim` has `step` after a run.
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

from funcpipe._src.core.plain_tensors import is_plain, memory_number
from funcpipe._src.core.torch_names import STEPPED
from funcpipe._src.core.tree import flatten, leaves, unflatten
from funcpipe._src.data.exchange import alone
from funcpipe._src.data.result import Result
from funcpipe._src.engine.prepare import Prepared
from funcpipe._src.engine.unused import UnusedLeaf, unused_leaves
from funcpipe._src.optimizing.leaf_gradients import LeafGradient, by_leaf, of_result
from funcpipe._src.optimizing.norms import LocalNorm, local_norm, norm_of, norm_of_norms, on_host
from funcpipe._src.optimizing.optim import (
    apply_gradients,
    held_by,
    held_of,
    refuse_unheld,
    steps_by_leaf,
)
from funcpipe._src.optimizing.same_options import compared
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
"""Optimizers of torch that update each number of a leaf separately. Muon, for example, multiplies
whole matrices."""
_CLIPPING = 1e-6  # the number that torch's clipping adds to a norm before the division


@dataclass
class _Spent:
    """The facts that remain of a stage's gradients after a step has consumed them."""

    norms: list[LocalNorm]  # the norm of each gradient
    trained: int  # the number of gradients
    unused: list[UnusedLeaf]  # the leaves among these that no backward reached


class Steps(NamedTuple):
    """The facts of one process's steps in one batch, which are sent to the other processes."""

    norms: list[LocalNorm]  # the norms of the gradients that the steps have consumed
    stand: bool  # whether every stage was stepped


Settings: TypeAlias = Sequence[Mapping[str, Any]]
"""The settings of each group of an optimizer, such as the learning rate."""


class Stepping:
    """The optimizer steps of one run.

    Args:
        ready: the prepared run.
        undo: the copies to restore, shared by several runs. None: copies for this run only.
        spends: whether a step consumes the gradients, so that only their norms remain.

    Attributes:
        stepped: the stages that lanes have stepped.
        postponed: the ids of their leaves that wait until it is known whether a replica used them.
        late: whether the loss returned weights, which were unknown before.
        early: the stages that lanes can step during the run.
        settings: the settings of the optimizer's groups for this run. None: their present settings.
    """

    def __init__(self, ready: Prepared, undo: Undo | None = None, *, spends: bool = False) -> None:
        self.ready = ready
        self.optimizer = ready.options.optimizer
        self.max_norm = ready.options.max_norm
        self.undo, self.spends = undo or Undo(self.optimizer), spends
        self.settings: Settings | None = None
        self.stepped: set[int] = set()
        self.postponed: set[int] = set()
        self.late = False
        self.early: frozenset[int] = frozenset()
        self._spent: dict[int, _Spent] = {}
        self._moved = False
        mine = [leaf for stage in ready.bounds for leaf in leaves(ready.params[stage])]
        if self.optimizer is not None:
            refuse_unheld(self.optimizer, mine)
        # A loss that returns weights scales gradients only when all lanes are done, so its stages
        # cannot step early. Nor with different numbers of microbatches: replicas would reach their
        # S in different orders and wait for each other in a cycle.
        apart = spends if self.optimizer is None else in_parts(self.optimizer, mine)
        if apart and ready.even and not ready.plan.stages[-1].seen.late:
            self.early = frozenset(ready.bounds) - _joined(ready)

    def step(self, stage: int, reduction: Reduction) -> None:
        """Step a stage with complete gradients on its lane. A no-op unless the stage is in
        ``early``."""
        if stage not in self.early:
            return
        sums = reduction.sums_on_lane()
        if self.spends:
            reduction.spend()
        if self.ready.bounds[stage].params.written():  # the end of the run raises the error
            return
        tree, spread = self.ready.params[stage], self.ready.spread.get(stage)
        row = sums if spread is None else spread.as_given(sums)
        unused = unused_leaves(self.ready, [stage])
        numbers = {(0, number) for _, number, _ in unused}
        grads = unflatten(flatten(tree)[1], row)
        entries = self._scaled(by_leaf((tree,), (grads,), (), numbers))
        if self.ready.part.replicas > 1:
            # Another replica may have used these leaves. The end of the run knows.
            self.postponed |= {id(entry.leaf) for entry in entries if not entry.reached}
        self._step([entry for entry in entries if entry.reached])
        self.stepped.add(stage)
        if self.spends:
            norms = [local_norm(stage, entry.gradient, self.ready.part.others) for entry in entries]
            trained = sum(gradient is not None for gradient in sums)
            self._spent[stage] = _Spent(norms, trained, unused)
            self.ready.bounds[stage].params.spend()

    def _scaled(self, entries: list[LeafGradient]) -> list[LeafGradient]:
        """Return the gradients divided by the loss scale."""
        scale = self.ready.shares.loss_scale
        return (
            entries
            if scale == 1.0
            else [replace(each, gradient=each.gradient / scale) for each in entries]
        )

    def _step(self, entries: Sequence[LeafGradient]) -> None:
        """Step the optimizer's leaves among these, without the stages' autocast."""
        if self.optimizer is None:
            return
        part = part_of(self.optimizer, [entry.leaf for entry in entries], self.settings)
        if part is None:
            return
        self._moved = True
        held = {id(leaf) for group in part.param_groups for leaf in group["params"]}
        stepped = [entry for entry in entries if id(entry.leaf) in held]
        self.undo.keep(entry.leaf for entry in stepped)  # before the step, which may be undone
        with _no_autocast(stepped):
            apply_gradients(part, stepped)

    def settle(self, result: Result) -> Result:
        """Finish the steps at the end of a run: keep them, or undo and make them again.

        Steps are undone if gradients are clipped, not finite, or were weighted late.
        """
        assert result.grads is not None
        params = self.ready.params
        if self.late:
            self.ready.plan.stages[-1].seen.late = True
        entries = self._scaled(of_result(params, result))
        norm = norm_of(
            [(entry.stage, entry.gradient) for entry in entries if entry.counts],
            result.exchange,
            **compared(self.optimizer, params, entries, result.ties, result.exchange),
        )
        held = held_of(self.optimizer, entries) if entries or result.exchange == alone else []
        skips, clips = self._skips(norm), self._clips(norm)
        if self.late or skips or clips:
            self.restore()
        for leaf in leaves(params):
            leaf.grad = None  # a gradient of an earlier ``backward()`` must not be stepped
        if skips or not held:
            return replace(result, norm=norm)
        if self.early and not clips:
            self._step(
                [
                    entry
                    for entry in held
                    if entry.stage not in self.stepped or id(entry.leaf) in self.postponed
                ]
            )
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
        """Return whether a step with this norm is skipped."""
        return self.ready.shares.loss_scale != 1.0 and not bool(norm.isfinite())

    def _clips(self, norm: Tensor) -> bool:
        """Return whether gradients with this norm are clipped."""
        return self.max_norm is not None and not bool(self.max_norm / (norm + _CLIPPING) >= 1.0)

    def restore(self) -> None:
        """Restore parameters and optimizer state, and keep the copies."""
        self.undo.restore()
        self.stepped.clear()

    # -- for runs whose steps consume the gradients

    @property
    def whole(self) -> bool:
        """Whether every stage of this process can be stepped on its lane."""
        return self.early == frozenset(self.ready.bounds)

    @property
    def reached(self) -> tuple[int, list[UnusedLeaf]]:
        """The number of trained leaves, and the leaves that no backward reached."""
        spent = [self._spent[stage] for stage in self.ready.bounds if stage in self._spent]
        return sum(each.trained for each in spent), [leaf for each in spent for leaf in each.unused]

    @property
    def steps(self) -> Steps:
        """The facts of this process's steps for the other processes."""
        spent = [self._spent[stage] for stage in self.ready.bounds if stage in self._spent]
        norms = on_host([norm for each in spent for norm in each.norms])
        complete = self.stepped == {*self.ready.bounds} and not self.postponed
        return Steps(norms, complete and (self._moved or not norms))

    def settled(self, result: Result, everyone: Sequence[Steps]) -> Result | None:
        """Return the result with its norm, or None if all processes must undo the steps."""
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
        """Clean up after the last of several batches, as `settle` does for one."""
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
    """Return whether parts of an optimizer can be stepped separately, each on its lane.

    - Torch's own optimizers and FunctionalOptimizer update each leaf separately. Others may count in their groups, read all
      leaves, or wrap another optimizer.
    - Hooks expect one step of the whole optimizer.
    - A step updates all leaves with a gradient, so the optimizer must have no leaves besides the
      ``tensors`` of the run.
    - For sharded tensors, an optimizer must update each number separately. Others, such as Muon,
      communicate, and lanes would communicate at the same time.
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
        steps_by_leaf(optimizer)
        and not (patched or hooked)
        and {*map(id, held)} <= {*map(id, tensors)}
    )


def part_of(
    optimizer: torch.optim.Optimizer, tensors: Sequence[Any], settings: Settings | None = None
) -> torch.optim.Optimizer | None:
    """Return an optimizer of some parameters, which shares the state; None if it has none of them.

    Parts with different parameters can be stepped at the same time. ``settings`` replaces the
    settings of the groups.
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
    # Not `copy.copy`, which copies only what a checkpoint saves.
    part: torch.optim.Optimizer = object.__new__(type(optimizer))
    vars(part).update(vars(optimizer))
    vars(part).pop("step", None)  # the wrapper of a scheduler, which steps the whole optimizer
    part.param_groups = groups
    return part


@contextmanager
def _no_autocast(entries: Iterable[LeafGradient]) -> Generator[None]:
    """Return a context without autocast: an optimizer's step must compute in full precision."""
    with ExitStack() as modes:
        for kind in {entry.leaf.device.type for entry in entries}:
            if torch.is_autocast_enabled(kind):
                modes.enter_context(torch.autocast(kind, enabled=False))
        yield


def _in_order(optimizer: torch.optim.Optimizer) -> None:
    """Sort the optimizer's state by its leaves, so that checkpoints do not depend on step order."""
    state = optimizer.state
    for leaf in held_by(optimizer):
        if leaf in state:
            state[leaf] = state.pop(leaf)


def _joined(ready: Prepared) -> set[int]:
    """Return the stages with leaves that are tied to, or share memory with, another stage.

    A step of one stage would change the other stage.
    """
    tied = {stage for group in ready.ties for stage, _ in group}
    memories = {stage: {*map(memory_number, leaves(ready.params[stage]))} for stage in ready.bounds}
    seen = Counter(number for numbers in memories.values() for number in numbers)
    return tied | {
        stage for stage, numbers in memories.items() if any(seen[number] > 1 for number in numbers)
    }
