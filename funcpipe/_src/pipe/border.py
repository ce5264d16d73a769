"""Connect a `Pipe` to the caller's autograd: one node, whose backward is the pullback of the
run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
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

# -- inputs and outputs
# -------------------------------------------------------------------------------


_Build = Callable[[Iterable[Any]], Tree]


def opened(tree: Tree) -> tuple[list[Any], _Build]:
    """Flatten a tree, and the trees of each `Microbatches` in it.

    Returns the leaves, and a function that builds such a tree of other leaves. The function keeps
    no leaf.
    """
    outer, spec = flatten(tree)
    leaves: list[Any] = []
    builds: list[Callable[[Iterator[Any]], Any]] = []
    for leaf in outer:
        if isinstance(leaf, Microbatches):
            parts = [opened(tree) for tree in leaf]
            leaves += [each for part, _ in parts for each in part]
            inner = [build for _, build in parts]
            builds.append(lambda values, inner=inner: Microbatches(each(values) for each in inner))
        else:
            leaves.append(leaf)
            builds.append(next)

    def build(values: Iterable[Any]) -> Tree:
        remaining = iter(values)
        return unflatten(spec, [each(remaining) for each in builds])

    return leaves, build


def input_leaves(inputs: Tree) -> list[Any]:
    """The leaves of inputs or of their gradients, without marks."""
    return [bare(leaf) for leaf in opened(inputs)[0]]


def input_flags(inputs: Tree) -> Tree:
    """A tree like the inputs: which leaves require gradients."""
    leaves, build = opened(inputs)
    return build(_requires_grad(bare(leaf)) for leaf in leaves)


def tensors_of(outputs: Tree) -> list[Tensor]:
    """The tensors of outputs, in order; for outputs that are not joined, of each microbatch."""
    return [leaf for leaf in opened(outputs)[0] if isinstance(leaf, Tensor)]


def _requires_grad(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.requires_grad


def count_microbatches(inputs: Tree, chunks: int) -> int:
    """The number of microbatches of these inputs. The run itself checks whether they fit."""
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
        "a Pipe cuts its inputs along their rows, so at least one input must be a tensor that is "
        f"not replicated; got {kinds}"
    )


def _attached(outputs: Tree, pullback: Pullback) -> list[bool]:
    """For each leaf of the opened outputs, whether it can have a gradient."""
    if isinstance(outputs, Microbatches):
        return [*chain.from_iterable(pullback.attached)]
    out: list[bool] = []
    for leaf, *flags in zip(flatten(outputs)[0], *pullback.attached, strict=True):
        # In `Microbatches`, there is one leaf of each microbatch.
        out += flags if isinstance(leaf, Microbatches) else [any(flags)]
    return out


def _cotangents(outputs: Tree) -> Callable[[Iterable[Tensor | None]], Tree]:
    """Make a function that builds cotangents of the outputs from one gradient per tensor."""
    leaves, build = opened(outputs)
    are_tensors = [isinstance(leaf, Tensor) for leaf in leaves]

    def without_empty(leaf: Any) -> Any:
        empty = isinstance(leaf, Microbatches) and all(each is None for each in opened(leaf)[0])
        return None if empty else leaf

    def cotangents(gradients: Iterable[Tensor | None]) -> Tree:
        remaining = iter(gradients)
        tree = build(next(remaining) if is_tensor else None for is_tensor in are_tensors)
        return map_leaves(without_empty, tree)

    return cotangents


# -- the node
# -------------------------------------------------------------------------------


class _Node(torch.autograd.Function):
    """The autograd node that attaches computed outputs to the parameters and inputs that they
    depend on.

    Between forward and backward it keeps the pullback of the run, the form of the outputs, the
    place of each parameter that requires a gradient, and the flags of the inputs' leaves.
    """

    @staticmethod
    def forward(
        ctx: Any, kept: tuple[Any, ...], outputs: list[Tensor], detached: list[Tensor], *_: Tensor
    ) -> Any:
        ctx.pullback, ctx.form, ctx.places, ctx.wanted = kept
        # Outputs without a gradient stay None. Zeros would make unused parameters look used.
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*detached)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        return None, None, None, *_gradients(ctx, gradients)


def _gradients(ctx: Any, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
    """The gradients of the parameters, then of the inputs; None where plain autograd has none."""
    if torch.is_grad_enabled():
        raise FuncpipeError(
            "a Pipe computes its gradients itself, so they have no graph, and create_graph=True is "
            "not possible; for second derivatives call the layers without the pipe: "
            "nn.Sequential(*pipe)"
        )
    if all(gradient is None for gradient in gradients):
        return [None] * (len(ctx.places) + sum(ctx.wanted))
    # Taken out first: the residuals are freed as the backward runs, and a second backward raises.
    pullback, ctx.pullback = ctx.pullback, None
    if pullback is None:
        raise FuncpipeError(
            "the backward of this output of a Pipe has already run, and it freed the values that a "
            "backward needs, also with retain_graph=True; add the losses and call backward once, "
            "or call the pipe again"
        )
    with without_saved_tensor_hooks():
        grads, input_grads = pullback(ctx.form(gradients))
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
    """Attach outputs of a `vjp` to the caller's graph.

    ``params`` are those that require gradients, each as ((stage, name), tensor). If the caller
    drops the outputs, the memory that the backwards need is freed.
    """
    leaves, build = opened(outputs)
    flagged = zip(leaves, _attached(outputs, pullback), strict=True)
    detached = [leaf for leaf, flag in flagged if isinstance(leaf, Tensor) and not flag]
    roots = [leaf for leaf in input_leaves(inputs) if _requires_grad(leaf)]
    flags = [_requires_grad(leaf) for leaf in input_leaves(inputs)]
    kept = pullback, _cotangents(outputs), [place for place, _ in params], flags
    training = [param for _, param in params]
    attached = iter(_Node.apply(kept, tensors_of(outputs), detached, *training, *roots))
    return build(next(attached) if isinstance(leaf, Tensor) else leaf for leaf in leaves)


class without_saved_tensor_hooks:
    """A context that keeps hooks on saved tensors (``torch.utils.checkpoint``, ``save_on_cpu``) out
    of the stages of a pipe.

    ``checkpoint=`` controls what a pipe keeps for its backwards. With such hooks inside, a pipe in
    a checkpointed region would be run again by its own backward.

    This is a class, not a generator: an error that passes through may be a StopIteration.
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
    "fp.Pipe was called under hooks on saved tensors (torch.utils.checkpoint, save_on_cpu), but "
    "this torch lacks the functions that keep the hooks out of the stages; call the pipe outside "
    "of the hooks; checkpoint= sets what a pipe keeps"
)
