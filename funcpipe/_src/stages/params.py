"""The parameters and the state of a stage in one run: aliases, gradient sums, and write guards."""

from __future__ import annotations

from collections.abc import Sequence
from operator import is_
from typing import Any

import torch
from torch import Tensor

from funcpipe._src.core.border import share
from funcpipe._src.core.errors import PlanError
from funcpipe._src.core.plain_tensors import address
from funcpipe._src.core.torch_names import version
from funcpipe._src.core.tree import Tree, flatten, locations, unflatten
from funcpipe._src.stages.gradient_sums import GradientSums


class StageParams:
    """The parameters and the state that a stage is bound to, with the gradient sums.

    A stage may wrongly write to its parameters, also by ``.data``, which torch does not count. With
    ``guard``, such writes go to copy-on-write copies, so the caller's tensors stay unchanged.

    Attributes:
        leaves, spec: the caller's tree.
        trainable: for each leaf, whether it gets a gradient.
        aliases: for each leaf, the tensor that the stage computes with.
        tree: the aliases as a tree.
        inputs: the aliases that get gradients.
        input_ids: the ids of ``inputs``.
        sums: the gradient sums of ``inputs``.
        state_leaves: the copies of the state that the stage reads.
    """

    def __init__(self, tree: Tree, trainable: Sequence[bool], *, guard: bool) -> None:
        self.leaves, self.spec = flatten(tree)
        self.trainable = trainable
        self._memory = [guarded(leaf) for leaf in self.leaves] if guard else self.leaves
        self._versions = versions(self.leaves)
        self.aliases = [
            alias_of(leaf, want) for leaf, want in zip(self._memory, trainable, strict=True)
        ]
        self.tree = unflatten(self.spec, self.aliases)
        self.inputs = [alias for alias, want in zip(self.aliases, trainable, strict=True) if want]
        self.input_ids = frozenset(map(id, self.inputs))
        self.sums = GradientSums(self.inputs)
        self.state_leaves: list[Any] = []
        self._state_given: list[Any] = []
        self._state_at: list[int | None] = []
        # Drops values computed from the parameters alone. Called before parameters change or lose
        # their memory.
        self.forget = _nothing_to_forget

    def take_state(self, leaves: list[Any]) -> None:
        """Bind copies of a state. A copy takes memory only when it is written."""
        self._state_given, self.state_leaves = leaves, share(leaves)
        pairs = zip(self.state_leaves, leaves, strict=True)
        self._state_at = [
            address(kept) if _shares_memory(kept, given) else None for kept, given in pairs
        ]

    def rebase(self) -> None:
        """Accept the present parameters as unwritten, after an optimizer step inside the run."""
        self._versions = versions(self.leaves)

    def spend(self) -> None:
        """Drop the gradient sums: a step has used them."""
        self.sums.clear()
        self.forget()

    def grads(self) -> list[Tensor | None]:
        """Return the gradient sum of each leaf, None for leaves that are not trainable."""
        return self._by_leaf(self.sums.all())

    def present_grads(self) -> list[Tensor | None]:
        """Return the present gradient sum of each leaf, None if no gradient has come yet."""
        return self._by_leaf(self.sums.present())

    def _by_leaf(self, totals: Sequence[Tensor | None]) -> list[Tensor | None]:
        sums = dict(zip(map(id, self.inputs), totals, strict=True))
        return [sums.get(id(alias)) for alias in self.aliases]

    def unused(self) -> list[int]:
        """Return the trainable leaves (by number) that no backward added to."""
        untouched = {id(self.inputs[number]) for number in self.sums.untouched()}
        return [number for number, alias in enumerate(self.aliases) if id(alias) in untouched]

    def written(self) -> list[int]:
        """Return the leaves (by number) that the stage wrote into or replaced; all leaves if it
        changed the keys."""
        leaves, spec = flatten(self.tree)
        if spec != self.spec:
            return [*range(len(self.leaves))]
        counts = zip(self._versions, versions(self.leaves), strict=True)
        rows = zip(counts, self.aliases, leaves, self._memory, self.leaves, strict=False)
        return [
            number
            for number, ((old, new), alias, leaf, kept, original) in enumerate(rows)
            if old != new or alias is not leaf or differ(kept, original)
        ]

    def written_state(self) -> list[int]:
        """Return the state leaves (by number) that the stage wrote into, also by ``.data``.

        A write moves a copy that shared memory with the caller's tensor. Other copies are not
        checked: the caller may have changed its tensor meanwhile, as `Pipe` does.
        """
        rows = zip(self.state_leaves, self._state_given, self._state_at, strict=True)
        return [
            number
            for number, (kept, given, before) in enumerate(rows)
            if before is not None and address(kept) != before and differ(kept, given)
        ]

    def refuse_rebinding(self) -> None:
        """Refuse a stage that has replaced values in its params.

        The next microbatch would compute with these values.

        Raises:
            PlanError: names the values.
        """
        leaves, spec = flatten(self.tree)
        if spec == self.spec and all(map(is_, leaves, self.aliases)):
            return
        pairs = zip(
            locations(unflatten(self.spec, self.aliases), "params"),
            leaves,
            self.aliases,
            strict=False,
        )
        names = ", ".join(name for name, leaf, alias in pairs if leaf is not alias)
        raise PlanError(
            f"the stage puts other values into its params ({names or 'its keys changed'}), and "
            "the next microbatch would compute with these values; a stage is pure: write w = "
            "params['w'] * 2, not params['w'] = ..."
        )

    def release(self) -> None:
        """Release all tensors."""
        self.sums.clear()
        self.inputs, self.aliases, self.leaves, self._memory = [], [], [], []
        self.state_leaves, self._state_given, self._state_at = [], [], []
        self.tree = None
        self.forget = _nothing_to_forget


def _nothing_to_forget() -> None:
    """Do nothing: the stage keeps no values computed from its parameters."""


def alias_of(leaf: Any, trainable: bool) -> Any:
    """Return an alias of a parameter, which shares its memory but has its own ``.grad``."""
    if not isinstance(leaf, Tensor):
        return leaf
    # An alias shares the version counter of its leaf, so `written` sees writes into it.
    alias = leaf.detach()
    if leaf.is_inference() and not torch.is_inference_mode_enabled():
        alias = alias.clone()  # autograd refuses tensors made in inference mode
    return alias.requires_grad_() if trainable else alias


def guarded(leaf: Any) -> Any:
    """Return a copy-on-write copy of a plain CPU tensor, which costs nothing; else the leaf."""
    plain = type(leaf) in (Tensor, torch.nn.Parameter) and leaf.is_cpu and not leaf.is_inference()
    # Sharded parameters have no memory until they are gathered, so there is nothing to copy.
    there = plain and (leaf.untyped_storage().nbytes() or not leaf.numel())
    return share([leaf])[0] if there else leaf


def _shares_memory(kept: Any, given: Any) -> bool:
    plain = type(given) is Tensor and given.is_cpu and given.layout is torch.strided
    return plain and given.numel() > 0 and address(kept) == address(given)


def differ(kept: Any, original: Any) -> bool:
    """Return whether a guarded tensor was written to.

    A write moves its memory. Some kernels move the memory without writing, so compare the numbers.
    """
    if kept is original or address(kept) == address(original):
        return False
    return not bool(((kept == original) | ((kept != kept) & (original != original))).all())


def versions(leaves: Sequence[Any]) -> list[int]:
    """Return the version counter of each leaf, 0 for inference tensors, which have none."""
    return [
        version(leaf) if isinstance(leaf, Tensor) and not leaf.is_inference() else 0
        for leaf in leaves
    ]
