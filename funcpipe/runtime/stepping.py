"""The optimizer's steps inside of a run: a stage's once its gradients are whole, undone where it was a step too many.

A stage is stepped before it is known whether the others' gradients are finite, what the norm of all is, and whether the run will
fail: what its parameters and the optimizer's state were is kept until then (post-validation, arXiv 2401.10241, section 4).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from funcpipe.core.exchange import alone
from funcpipe.core.program import LaneProgram, Run
from funcpipe.core.result import Result
from funcpipe.core.schedule import Kind
from funcpipe.core.torch_names import STEPPED, storage_number
from funcpipe.core.tree import flatten, leaves, unflatten
from funcpipe.runtime.leaf_gradients import LeafGradient, by_leaf
from funcpipe.runtime.norms import norm_of
from funcpipe.runtime.optim import apply_gradients, held_of, is_torchs, refuse_unheld
from funcpipe.runtime.plain_tensors import is_plain
from funcpipe.runtime.prepare import Prepared
from funcpipe.runtime.replicas import Summed
from funcpipe.runtime.steps import Step
from funcpipe.runtime.transport import Mailbox

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
"""Those of torch's that step each number of a leaf by itself; Muon, say, multiplies whole matrices."""
_CLIPPING = 1e-6
"""What torch's clipping adds to a norm before it divides."""


@dataclass
class _Kept:
    """What a leaf and the optimizer's state of it were before a step.

    Attributes:
        leaf: what was stepped.
        numbers: of the leaf.
        state: of the optimizer, each value with a copy of it; None: it had none.
    """

    leaf: Tensor
    numbers: Tensor
    state: Mapping[str, tuple[Any, Any]] | None

    @classmethod
    def of(cls, leaf: Tensor, optimizer: torch.optim.Optimizer) -> _Kept:
        """What is now."""
        state = optimizer.state.get(leaf)
        kept = None if state is None else {name: (value, _copied(value)) for name, value in state.items()}
        return cls(leaf, leaf.detach().clone(), kept)

    def restore(self, optimizer: torch.optim.Optimizer) -> None:
        """Make it so again; tensors are the objects that they were."""
        self.leaf.detach().copy_(self.numbers)
        if self.state is None:
            optimizer.state.pop(self.leaf, None)
            return
        now = optimizer.state[self.leaf]
        now.clear()
        for name, (value, copy) in self.state.items():
            now[name] = value if isinstance(value, Tensor) else copy
            if isinstance(value, Tensor):
                value.detach().copy_(copy)


class Stepping:
    """The steps of one run.

    Attributes:
        stepped: the stages that were, on their lanes.
        late: did the loss give weights that nobody knew before.
    """

    def __init__(self, ready: Prepared) -> None:
        self.ready, self.optimizer, self.max_norm = ready, ready.options.optimizer, ready.options.max_norm
        self.stepped: set[int] = set()
        self.late = False
        self._kept: dict[int, _Kept] = {}
        self._sums: dict[int, list[Tensor | None]] = {}
        self._early: frozenset[int] = frozenset()
        if self.optimizer is not None:
            mine = [leaf for stage in ready.bounds for leaf in leaves(ready.params[stage])]
            refuse_unheld(self.optimizer, mine)
            # Gradients of losses that weigh late are scaled when all lanes are done. Replicas with as many microbatches come to
            # each S in one order, so that none waits there for one that waits for it.
            if ready.even and not ready.plan.stages[-1].seen.late and in_parts(self.optimizer, mine):
                self._early = frozenset(ready.bounds) - _joined(ready)

    def waiting(self, program: LaneProgram, steps: Sequence[Step], box: Mailbox) -> list[Step]:
        """The steps of a lane, where each S first waits, in the mailbox, for what other replicas have of its gradients."""
        out = [*steps]
        for number, call in enumerate(program.calls):
            if call.kind is Kind.S:
                out[number] = self._waiting(steps[number], call.stage, box)
        return out

    def _waiting(self, step: Step, stage: int, box: Mailbox) -> Step:
        def waited(reads: list[Any], run: Run) -> Sequence[Any]:
            if self.ready.even:
                # In all replicas, also in one that does not step here: others may wait for it.
                self.ready.reduce(stage, box)
                if stage in self._early:
                    if Summed(stage) not in box.came:
                        box.wait(Summed(stage))
                    self._sums[stage] = box.came[Summed(stage)]()
            return step(reads, run)

        return waited

    def step(self, stage: int) -> None:
        """Step a stage whose gradients are whole, on the lane that has it; not if others decide about these."""
        sums = self._sums.pop(stage, None)
        if sums is None or self.ready.bounds[stage].written():  # what was written is told when the run ends
            return
        tree, spread = self.ready.params[stage], self.ready.spread.get(stage)
        row = sums if spread is None else spread.as_given(sums)
        entries = self._scaled(by_leaf((tree,), (unflatten(flatten(tree)[1], row),), ()))
        self.stepped.add(stage)
        self._step(entries)

    def _scaled(self, entries: list[LeafGradient]) -> list[LeafGradient]:
        """The gradients without the loss scale."""
        scale = self.ready.shares.loss_scale
        return entries if scale == 1.0 else [replace(each, gradient=each.gradient / scale) for each in entries]

    def _keep(self, entries: Iterable[LeafGradient]) -> None:
        """Keep what is now, but for what is kept already."""
        for entry in entries:
            if id(entry.leaf) not in self._kept:
                self._kept[id(entry.leaf)] = _Kept.of(entry.leaf, self.optimizer)

    def _step(self, entries: Sequence[LeafGradient]) -> None:
        """Step what the optimizer holds of these, as outside of the run: in no mode that stages compute in."""
        part = part_of(self.optimizer, [entry.leaf for entry in entries])
        if part is None:
            return
        held = {id(leaf) for group in part.param_groups for leaf in group["params"]}
        stepped = [entry for entry in entries if id(entry.leaf) in held]
        self._keep(stepped)
        with _no_autocast(stepped):
            apply_gradients(part, stepped)

    def settle(self, result: Result) -> Result:
        """All is known: keep the steps, or undo them and make those that clipped, or late, gradients want."""
        assert result.grads is not None
        params, grads, scale = self.ready.params, result.grads, result.loss_scale
        if self.late:
            self.ready.plan.stages[-1].seen.late = True
        entries = self._scaled(by_leaf(params, grads, result.ties))
        norm = norm_of([(entry.stage, entry.gradient) for entry in entries if entry.counts], result.exchange)
        held = held_of(self.optimizer, entries) if entries or result.exchange == alone else []
        skips = scale != 1.0 and not bool(norm.isfinite())
        clips = self.max_norm is not None and not bool(self.max_norm / (norm + _CLIPPING) >= 1.0)
        if self.late or skips or clips:
            self.restore()
        for leaf in leaves(params):
            leaf.grad = None  # what an earlier backward left there is not stepped
        if skips or not held:
            return replace(result, norm=norm)
        if self._early and not clips:
            self._step([entry for entry in held if entry.stage not in self.stepped])
            setattr(self.optimizer, STEPPED, True)
        else:
            if self._early:
                self._keep(held)
            with _no_autocast(held):
                apply_gradients(self.optimizer, held, norm, self.max_norm)
        if self._early:
            _in_order(self.optimizer)
        return replace(result, norm=norm)

    def restore(self) -> None:
        """Make parameters and the optimizer's state what they were; it stays known."""
        with torch.no_grad():
            for kept in self._kept.values():
                kept.restore(self.optimizer)
        self.stepped.clear()


def in_parts(optimizer: torch.optim.Optimizer, tensors: Iterable[Any]) -> bool:
    """Is each leaf stepped by itself, so that parts of an optimizer can be stepped one by one: torch's own do so.

    Others may count in their groups, look at all leaves, or hold another optimizer; hooks get the whole one. And a step is
    of all that have a gradient, so there are to be no others than these ``tensors`` of the run. Of parts of tensors only what
    goes number by number can: the rest asks other processes, one lane beside the other.
    """
    held = _held(optimizer)
    if type(optimizer) not in _BY_NUMBER and not all(map(is_plain, held)):
        return False
    patched = "step" in vars(optimizer) and getattr(optimizer.step, "__wrapped__", None) is not type(optimizer).step
    hooked = any(value for name, value in vars(optimizer).items() if name.endswith("_hooks"))
    return is_torchs(optimizer) and not (patched or hooked) and {*map(id, held)} <= {*map(id, tensors)}


def part_of(optimizer: torch.optim.Optimizer, tensors: Sequence[Any]) -> torch.optim.Optimizer | None:
    """The optimizer for some of its parameters, with the same state; None: it holds none of them.

    Parts of different parameters can be stepped at the same time.
    """
    ids = {id(leaf) for leaf in tensors}
    groups: list[dict[str, Any]] = []
    for group in optimizer.param_groups:
        kept = [at for at, leaf in enumerate(group["params"]) if id(leaf) in ids]
        lists = {name: [group[name][at] for at in kept] for name in ("params", "param_names") if name in group}
        if kept:
            groups.append({**group, **lists})
    if not groups:
        return None
    part: torch.optim.Optimizer = object.__new__(type(optimizer))  # `copy` takes what is saved, so no hooks
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


def _held(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [leaf for group in optimizer.param_groups for leaf in group["params"]]


def _in_order(optimizer: torch.optim.Optimizer) -> None:
    """Put the state of the leaves in their order, whichever was stepped first: so it is saved in it."""
    state = optimizer.state
    for leaf in _held(optimizer):
        if leaf in state:
            state[leaf] = state.pop(leaf)


def _joined(ready: Prepared) -> set[int]:
    """The stages whose leaves are tied to those of others, or share their memory: a write into one is seen in the other."""
    tied = {stage for group in ready.ties for stage, _ in group}
    memories = {stage: {*map(_memory, leaves(ready.params[stage]))} for stage in ready.bounds}
    seen = Counter(number for numbers in memories.values() for number in numbers)
    return tied | {stage for stage, numbers in memories.items() if any(seen[number] > 1 for number in numbers)}


def _memory(leaf: Any) -> int:
    """A number that leaves of the same memory share."""
    return storage_number(leaf.untyped_storage()) if is_plain(leaf) else id(leaf)


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else deepcopy(value)
