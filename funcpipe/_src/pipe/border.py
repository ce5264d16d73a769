"""Connect a `Pipe` to the caller's autograd: one node, whose backward is the pullback of the
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
    """The leaves of inputs or of their gradients; for inputs that are already cut, of all
    microbatches."""
    trees = inputs.trees if isinstance(inputs, Microbatches) else (inputs,)
    return [bare(leaf) for tree in trees for leaf in flatten(tree)[0]]


def input_flags(inputs: Tree) -> Tree:
    """A tree like the inputs: which leaves require gradients."""
    return _map_microbatches(lambda leaf: _requires_grad(bare(leaf)), inputs)


def _map_microbatches(fn: Callable[[Any], Any], tree: Tree) -> Tree:
    """Apply ``fn`` to the leaves of a tree, and to the leaves of each microbatch in a
    `Microbatches`."""

    def mapped(leaf: Any) -> Any:
        return (
            Microbatches(_map_microbatches(fn, tree) for tree in leaf)
            if isinstance(leaf, Microbatches)
            else fn(leaf)
        )

    return map_leaves(mapped, tree)


def _requires_grad(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.requires_grad


def count_microbatches(inputs: Tree, chunks: int) -> int:
    """The number of microbatches of these inputs. The run itself checks whether they can be cut.

    Raises:
        BatchError: no input can be cut.
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
        "a Pipe cuts its inputs along their rows, so at least one input must be a tensor that is "
        f"not replicated; got {kinds}"
    )


# -- outputs
# -------------------------------------------------------------------------------


def tensors_of(outputs: Tree) -> list[Tensor]:
    """The tensors of outputs, in order; for outputs that are not joined, of each microbatch."""
    tensors: list[Tensor] = []
    for leaf in flatten(outputs)[0]:
        if isinstance(leaf, Microbatches):
            tensors += [tensor for tree in leaf for tensor in tensors_of(tree)]
        elif isinstance(leaf, Tensor):
            tensors.append(leaf)
    return tensors


_Form = Callable[[Iterator["Tensor | None"]], Tree]


def _form(outputs: Tree) -> _Form:
    """Make a function that builds trees of gradients like the outputs, as a pullback takes them.
    It keeps no tensor."""
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
    """For each tensor of the outputs, whether it can have a gradient."""
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
    """Attach outputs of a `vjp` to the caller's graph.

    If the caller drops the outputs, the memory that the backwards need is freed.

    Args:
        outputs, pullback: the result of `vjp`.
        params: the parameters that require gradients, each as ((stage, name), tensor).
        inputs: the inputs of the call.
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
    return _map_microbatches(
        lambda leaf: next(attached) if isinstance(leaf, Tensor) else leaf, outputs
    )


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
