"""Aliases of the caller's tensors that stages compute with: the same memory, gradients and versions of their own."""

from __future__ import annotations

from collections.abc import Sequence
from operator import is_
from typing import Any

import torch
from torch import Tensor

from funcpipe.core.errors import PlanError
from funcpipe.core.torch_names import version
from funcpipe.core.tree import Spec, Tree, flatten, locations, unflatten
from funcpipe.runtime.border import share
from funcpipe.runtime.plain_tensors import address


def alias_of(leaf: Any, trainable: bool) -> Any:
    """An alias of a parameter, for a stage to compute with: it shares memory and has a gradient of its own."""
    if not isinstance(leaf, Tensor):
        return leaf
    alias = leaf.detach()
    if leaf.is_inference() and not torch.is_inference_mode_enabled():
        alias = alias.clone()  # autograd takes no tensor made in inference mode
    return alias.requires_grad_() if trainable else alias


def guarded(leaf: Any) -> Any:
    """A copy-on-write copy of a plain tensor on the CPU, where that costs nothing; any other leaf itself."""
    plain = type(leaf) in (Tensor, torch.nn.Parameter) and leaf.is_cpu and not leaf.is_inference()
    # What has no memory yet, parameters that are gathered later, cannot be copied on a write.
    there = plain and (leaf.untyped_storage().nbytes() or not leaf.numel())
    return share([leaf])[0] if there else leaf


def differ(kept: Any, original: Any) -> bool:
    """Whether a guarded tensor was written to: it was moved (some kernels move it too) and has other numbers."""
    if kept is original or address(kept) == address(original):
        return False
    return not bool(((kept == original) | ((kept != kept) & (original != original))).all())


def refuse_rebinding(params: Tree, spec: Spec, aliases: Sequence[Any]) -> None:
    """Refuse a stage that put other values into its params, which the next microbatch would compute with.

    ``spec`` and ``aliases`` are what it got. Raises PlanError, which names them.
    """
    leaves, new_spec = flatten(params)
    if new_spec == spec and all(map(is_, leaves, aliases)):
        return
    pairs = zip(locations(unflatten(spec, aliases), "params"), leaves, aliases, strict=False)
    where = ", ".join(name for name, leaf, alias in pairs if leaf is not alias)
    raise PlanError(
        f"the stage puts other values into its params ({where or 'its keys changed'}), and the next microbatch would "
        "compute with them; a stage is pure: w = params['w'] * 2 makes a value of its own, params['w'] = ... does not"
    )


def versions(leaves: Sequence[Any]) -> list[int]:
    """How often each leaf was written to; under inference mode torch does not count."""
    return [version(leaf) if isinstance(leaf, Tensor) and not leaf.is_inference() else 0 for leaf in leaves]
