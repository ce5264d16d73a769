"""Where a `Pipe` meets the caller's autograd: one node, whose backward is the pullback of the
run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from funcpipe._src.batch.marks import Axis, Microbatches
from funcpipe._src.core.errors import BatchError, FuncpipeError
from funcpipe._src.core.torch_names import pop_saved_hooks, push_saved_hooks, top_saved_hooks
from funcpipe._src.core.tree import Tree, flatten, map_leaves, unflatten
from funcpipe._src.engine.vjp import Pullback
from funcpipe._src.models.example import bare
from funcpipe._src.stages.context import saved_tensors_are_hooked

# -- inputs
# -------------------------------------------------------------------------------


def input_leaves(inputs: Tree) -> list[Any]:
    """The leaves of inputs (or of their gradients), of all microbatches where those are given
    ready."""
    trees = inputs.trees if isinstance(inputs, Microbatches) else (inputs,)
    return [bare(leaf) for tree in trees for leaf in flatten(tree)[0]]


def input_flags(inputs: Tree) -> Tree:
    """Which leaves of inputs require gradients: a tree like them."""
    return _mapped(lambda leaf: _requires_grad(bare(leaf)), inputs)


def _mapped(fn: Callable[[Any], Any], tree: Tree) -> Tree:
    """A tree with ``fn`` applied to its leaves, and to those of every microbatch where they are
    apart."""

    def mapped(leaf: Any) -> Any:
        return (
            Microbatches(_mapped(fn, tree) for tree in leaf)
            if isinstance(leaf, Microbatches)
            else fn(leaf)
        )

    return map_leaves(mapped, tree)


def _requires_grad(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.requires_grad


def count_microbatches(inputs: Tree, chunks: int) -> int:
    """How many microbatches these inputs make; whether they can be cut at all is for the run to
    say.

    Raises:
        BatchError: there is nothing to cut.
    """
    if isinstance(inputs, Microbatches):
        return max(1, min(len(inputs), chunks))
    leaves = flatten(inputs)[0]
    for leaf in leaves:
        axis, value = (leaf.axis, leaf.value) if isinstance(leaf, Axis) else (0, leaf)
        if isinstance(value, Tensor):
            rows = value.shape[axis] if -value.dim() <= axis < value.dim() else 1
            return max(1, min(rows, chunks))
    kinds = ", ".join(dict.fromkeys(type(leaf).__name__ for leaf in leaves)) or "nothing"
    raise BatchError(
        "a Pipe cuts its inputs along their rows, so one of them is a tensor that is not "
        f"replicated; got {kinds}"
    )


# -- outputs
# -------------------------------------------------------------------------------


def tensors_of(outputs: Tree) -> list[Tensor]:
    """The tensors of outputs, in order; those of every microbatch where they are not joined."""
    tensors: list[Tensor] = []
    for leaf in flatten(outputs)[0]:
        if isinstance(leaf, Microbatches):
            tensors += [tensor for tree in leaf for tensor in tensors_of(tree)]
        elif isinstance(leaf, Tensor):
            tensors.append(leaf)
    return tensors


_Form = Callable[[Iterator["Tensor | None"]], Tree]


def _form(outputs: Tree) -> _Form:
    """A function that makes trees of gradients like the outputs, as a pullback takes them; keeps no
    tensor of them."""
    leaves, spec = flatten(outputs)
    parts = [
        [_form(tree) for tree in leaf]
        if isinstance(leaf, Microbatches)
        else isinstance(leaf, Tensor)
        for leaf in leaves
    ]

    def cotangent(part: Any, gradients: Iterator[Tensor | None]) -> Any:
        if not isinstance(part, list):
            return next(gradients) if part else None
        trees = [form(gradients) for form in part]
        return (
            None
            if all(leaf is None for tree in trees for leaf in flatten(tree)[0])
            else Microbatches(trees)
        )

    return lambda gradients: unflatten(spec, [cotangent(part, gradients) for part in parts])


def _attached(outputs: Tree, pullback: Pullback) -> list[bool]:
    """For each tensor of the outputs: whether it can have a gradient."""
    by_microbatch = pullback.attached
    if isinstance(outputs, Microbatches):
        rows = [
            (flatten(tree)[0], flags) for tree, flags in zip(outputs, by_microbatch, strict=True)
        ]
        return [
            flag
            for row in rows
            for leaf, flag in zip(*row, strict=True)
            if isinstance(leaf, Tensor)
        ]
    out: list[bool] = []
    for leaf, *flags in zip(flatten(outputs)[0], *by_microbatch, strict=True):
        if isinstance(leaf, Tensor):
            out.append(any(flags))
        elif isinstance(leaf, Microbatches):  # one leaf of each microbatch
            out += [
                flag for value, flag in zip(leaf, flags, strict=True) if isinstance(value, Tensor)
            ]
    return out


# -- the node
# -------------------------------------------------------------------------------


class _Node(torch.autograd.Function):
    """Outputs that were computed already, attached to the parameters and inputs that they depend
    on.

    Between the forwards and the backwards it keeps the pullback of the run, the form of its
    outputs, the stage and name of each parameter that requires a gradient, and which leaves of the
    inputs do.
    """

    @staticmethod
    def forward(
        ctx: Any, kept: tuple[Any, ...], outputs: list[Tensor], detached: list[Tensor], *_: Tensor
    ) -> Any:
        ctx.pullback, ctx.form, ctx.places, ctx.wanted = kept
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*detached)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        return None, None, None, *_back(ctx, gradients)


def _back(ctx: Any, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
    """The gradients of the parameters, then of the inputs; None where plain autograd has none."""
    if torch.is_grad_enabled():
        raise FuncpipeError(
            "a Pipe computes its gradients itself, so they have no graph of their own and "
            "create_graph=True is not possible; for second derivatives call the layers without "
            "the pipe: nn.Sequential(*pipe)"
        )
    if all(gradient is None for gradient in gradients):
        return [None] * (len(ctx.places) + sum(ctx.wanted))
    pullback, ctx.pullback = ctx.pullback, None
    if pullback is None:
        raise FuncpipeError(
            "the backward of this output of a Pipe was done already, and what it needs is freed "
            "by the first one, retain_graph=True or not; add the losses and call backward once, "
            "or call the pipe again"
        )
    with without_saved_tensor_hooks():
        grads, input_grads = pullback(ctx.form(iter(gradients)))
    unused = set(pullback.unused)
    out = [None if place in unused else grads[place[0]][place[1]] for place in ctx.places]
    if any(ctx.wanted):
        pairs = zip(input_leaves(input_grads), ctx.wanted, strict=True)
        out += [gradient for gradient, wanted in pairs if wanted]
    return out


def attach(
    outputs: Tree,
    pullback: Pullback,
    params: Sequence[tuple[tuple[int, str], Tensor]],
    inputs: Tree,
) -> Tree:
    """Outputs of a `vjp`, attached to the caller's graph; dropping them frees what the backwards
    need.

    ``params`` are those that require gradients, each after its stage and its name there.
    """
    tensors = tensors_of(outputs)
    detached = [
        tensor
        for tensor, flag in zip(tensors, _attached(outputs, pullback), strict=True)
        if not flag
    ]
    leaves = input_leaves(inputs)
    flags = [_requires_grad(leaf) for leaf in leaves]
    kept = pullback, _form(outputs), [place for place, _ in params], flags
    roots = [
        *(param for _, param in params),
        *(leaf for leaf, flag in zip(leaves, flags, strict=True) if flag),
    ]
    attached = iter(_Node.apply(kept, tensors, detached, *roots))
    return _mapped(lambda leaf: next(attached) if isinstance(leaf, Tensor) else leaf, outputs)


class without_saved_tensor_hooks:
    """Hooks on saved tensors (``torch.utils.checkpoint``, ``save_on_cpu``) do not reach into the
    stages of a pipe.

    What a pipe keeps for its backwards is its own affair (``checkpoint=``). With such hooks inside
    of it a pipe in a checkpointed region would be run again by its own backward.

    No generator: what passes through may be an error that is a StopIteration.
    """

    def __enter__(self) -> None:
        self.taken: list[Any] = []
        if top_saved_hooks and pop_saved_hooks and push_saved_hooks:
            while (hooks := top_saved_hooks(True)) is not None:
                pop_saved_hooks()
                self.taken.append(hooks)
        elif saved_tensors_are_hooked():
            raise FuncpipeError(_HOOKED)

    def __exit__(self, *error: object) -> None:
        while self.taken:
            push_saved_hooks(*self.taken.pop())


_HOOKED = (
    "fp.Pipe was called under hooks on saved tensors (torch.utils.checkpoint, save_on_cpu), and "
    "this torch has no names by which they could be kept out of its stages; call it outside of "
    "them: what a pipe keeps is set by checkpoint="
)
