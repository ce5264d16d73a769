"""Checks that refuse arguments of a run which are wrong, or which mean something else to the run.

`prepare` calls them. Checks of a whole plan are in `lower`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.forward_ad import unpack_dual

from funcpipe._src.batch import microbatch
from funcpipe._src.batch.marks import Axis, Microbatches, Replicate
from funcpipe._src.core.errors import BatchError, PlanError, raise_all
from funcpipe._src.core.torch_names import has_gradient_hooks, in_forward_mode
from funcpipe._src.core.tree import Leaves, Tree, flatten, locations
from funcpipe._src.data.plan import Plan
from funcpipe._src.data.stage import Bindable, Stage
from funcpipe._src.engine.options import RunOptions
from funcpipe._src.optimizing.optim import check_options
from funcpipe._src.stages.trainable import Trainable


def refuse_unsaid_axes(cut: microbatch.Batch) -> None:
    """Raise BatchError if no input is cut along axis 0, so that the outputs' axis is unknown."""
    axes = sorted({axis for axis in cut.axes if axis is not None})
    if axes and axes[0] > 0:
        raise BatchError(
            f"the inputs are cut along axis {', '.join(map(str, axes))}, so the plan must say "
            f"along which axis to join the outputs: make_plan(..., merge={axes[0]}) or fp.Pipe(..., "
            f"merge={axes[0]}), or merge=0, 'each', or a tree of these like the outputs"
        )


class NamedTrees:
    """Trees by name, flattened once for several checks."""

    def __init__(self, trees: Mapping[str, Tree]) -> None:
        self.trees = [(root, tree, flatten(tree)[0]) for root, tree in trees.items()]

    def found(self, wrong: Callable[[Any], bool]) -> list[tuple[str, Any]]:
        """Return the wrong leaves with their locations."""
        # Locations are expensive, so they are made only for trees with a wrong leaf.
        return [
            (location, leaf)
            for root, tree, leaves in self.trees
            if any(map(wrong, leaves))
            for location, leaf in zip(locations(tree, root), leaves, strict=True)
            if wrong(leaf)
        ]


def refuse_attached(trees: NamedTrees) -> None:
    """Raise BatchError for leaves of the batch that require a gradient, which they would not
    get."""
    faults = [f"{location} {_why(leaf)}" for location, leaf in trees.found(_asks)]
    raise_all(
        "fp.run computes no gradients of its batch, so the layers that made these values would "
        "not be trained. Make these layers the first stage, use fp.vjp, use fp.Pipe within an "
        "autograd graph, or give detached values, x.detach():",
        faults,
        BatchError,
    )


def _bare(leaf: Any) -> Any:
    return leaf.value if isinstance(leaf, (Replicate, Axis)) else leaf


def _why(leaf: Any) -> str:
    """Return why a leaf of a batch requires a gradient, as words for a fault."""
    bare = _bare(leaf)
    node = bare.grad_fn if isinstance(bare, Tensor) else None
    return "requires a gradient" if node is None else f"was computed by {node.name()}"


def _asks(leaf: Any) -> bool:
    if isinstance(leaf, Microbatches):
        return any(_asks(inner) for tree in leaf for inner in flatten(tree)[0])
    bare = _bare(leaf)
    return isinstance(bare, Tensor) and bare.requires_grad


def refuse_absent(name: str, trees: Sequence[Tree], stages: Sequence[Stage]) -> None:
    """Raise PlanError if stages of modules have no parameters, as with the trees of one rank.

    A function may have None as its parameters.
    """
    missing = [
        number
        for number, (tree, stage) in enumerate(zip(trees, stages, strict=True))
        if tree is None and isinstance(stage.fn, Bindable)
    ]
    if name == "params" and missing:
        raise PlanError(
            f"params has None for stages {missing}, but this process runs all stages; in several "
            "processes, where each rank has the trees of its own stages, give executor=ranks; "
            "otherwise give the tree of each stage"
        )


def refuse_untrained(
    trees: Sequence[Tree],
    leaves: Sequence[Leaves],
    states: Sequence[Tree],
    trained: list[list[bool]],
) -> None:
    """Raise PlanError for state that requires gradients, and params that are arrays or have
    hooks."""
    states_by_name = NamedTrees({f"state[{stage}]": tree for stage, tree in enumerate(states)})
    faults = [
        f"{location} requires a gradient, but state gets none: put it into params, or detach it"
        for location, _ in states_by_name.found(_asks)
    ]
    swapped = ""
    if faults and not any(_asks(leaf) for row in leaves for leaf in row):
        swapped = "; if params and state are swapped, call run(plan, params, batch, state=state)"
    for stage, (tree, row, flags) in enumerate(zip(trees, leaves, trained, strict=True)):
        reasons = [_untrained(leaf, flag, stage) for leaf, flag in zip(row, flags, strict=True)]
        if any(reasons):
            pairs = zip(locations(tree, f"params[{stage}]"), reasons, strict=True)
            faults += [f"{location} {reason}" for location, reason in pairs if reason]
    raise_all(f"these tensors would not be trained as they are marked{swapped}:", faults, most=8)


def _untrained(leaf: Any, trained: bool, stage: int) -> str:
    """Return why a leaf of the params would not be trained as it is marked, or ""."""
    if not isinstance(leaf, Tensor):
        array = hasattr(leaf, "__array__") and getattr(leaf, "ndim", 0) > 0
        return (
            f"is a {type(leaf).__name__}, but only tensors get gradients: torch.from_numpy(array)"
            if array
            else ""
        )
    if not trained:
        return ""
    if has_gradient_hooks(leaf):
        return (
            "has hooks on its gradient, which a run does not call: apply them to "
            f"result.grads[{stage}] before fp.step, and remove them (the handle's remove())"
        )
    return ""


def refuse_frozen(leaves: Sequence[Leaves], trainable: Trainable, *, marked: bool) -> None:
    """Raise PlanError if ``trainable`` is None and every Parameter is frozen."""
    if trainable is not None or marked:
        return
    if any(isinstance(leaf, torch.nn.Parameter) for row in leaves for leaf in row):
        raise PlanError(
            "every parameter is frozen (requires_grad is False), so there is nothing to train; "
            "call leaf.requires_grad_() on the parameters to train, or run(..., trainable=True) "
            "for gradients of all; to evaluate: fp.make_plan(stages, schedule.forwards())"
        )


def refuse_tangents(leaves: Sequence[Leaves], trees: NamedTrees) -> None:
    """Raise PlanError for forward-mode derivatives of the caller, which a run would drop."""
    if not in_forward_mode():
        return

    def is_dual(leaf: Any) -> bool:
        return isinstance(leaf, Tensor) and unpack_dual(leaf).tangent is not None

    if any(is_dual(leaf) for row in leaves for leaf in row) or trees.found(is_dual):
        raise PlanError(
            "params or batch contain dual tensors of torch.autograd.forward_ad, whose tangents a "
            "run would drop; compute forward-mode derivatives of fp.apply(stages, params, inputs)"
        )


def refuse_meta(trees: NamedTrees) -> None:
    """Raise BatchError for tensors of the batch on the meta device."""
    missing = trees.found(lambda leaf: isinstance(leaf, Tensor) and leaf.is_meta)
    faults = [f"{location} is on the meta device and has no numbers" for location, _ in missing]
    raise_all("the batch cannot be run:", faults, BatchError)


def refuse_unstepped(name: str, plan: Plan, options: RunOptions, *, alone: bool) -> None:
    """Raise PlanError if a schedule's steps and the options of a run do not fit together."""
    if not plan.schedule.steps:
        if options.optimizer is not None or options.max_norm is not None:
            raise PlanError(
                f"schedule {plan.schedule.name!r} has no S, so fp.run would not step the "
                "optimizer; fp.schedules.step_params(schedule) adds S; or leave optimizer= and "
                "max_norm= out and call fp.step after the run"
            )
    elif name == "vjp":
        raise PlanError(
            f"schedule {plan.schedule.name!r} steps (S), but vjp cannot step; use a schedule "
            "without step_params, and fp.step"
        )
    elif name in ("run", "run_batches"):
        if options.optimizer is None and alone:
            raise PlanError(
                f"schedule {plan.schedule.name!r} steps (S), but the run got no optimizer: "
                f"fp.{name}(..., optimizer=torch.optim.AdamW(fp.leaves(params))); for gradients "
                "alone use a schedule without step_params"
            )
        check_options(options.optimizer, options.max_norm, None, optional=not alone)


def refuse_options(options: RunOptions) -> None:
    """Raise PlanError for options with a wrong type or value."""
    feeds = options.feeds
    scale = options.loss_scale
    threads = options.threads_per_lane
    timeout = options.timeout
    if options.observe is not None and not callable(options.observe):
        raise PlanError(
            "observe is a function (action, name, value), called for each value of each action; "
            f"got {options.observe!r}"
        )
    if not isinstance(options.ranges, bool):
        raise PlanError(f"ranges is True or False; got {options.ranges!r}")
    if feeds is not None and not isinstance(feeds, Mapping):
        raise PlanError(
            "feeds is a dict with a tree for each feed that stages declare; got a "
            f"{type(feeds).__name__}"
        )
    if not isinstance(scale, (int, float)) or not 0 < scale < float("inf"):
        raise PlanError(f"loss_scale is a number above 0 (a scaler's get_scale()); got {scale!r}")
    if threads is not None and (not isinstance(threads, int) or threads < 1):
        raise PlanError(f"threads_per_lane is a positive int or None; got {threads!r}")
    if timeout is not None and (
        isinstance(timeout, bool) or not (isinstance(timeout, (int, float)) and timeout > 0)
    ):
        raise PlanError(f"timeout is a number of seconds above 0, or None; got {timeout!r}")


def refuse_modes(name: str, plan: Plan) -> None:
    """Raise PlanError if a plan with backwards has no loss, or autograd is disabled."""
    if not plan.schedule.has_backward:
        return
    if plan.loss is None:
        raise PlanError(
            f"the plan's schedule has backwards but the plan has no loss, so {name} does not know "
            "where gradients begin: make_plan(..., loss=fn); for a loss in the model's output give "
            "fp.split(..., loss=path), such as loss='0'; for gradients of outputs use fp.vjp; for "
            "outputs alone use a schedule without backwards, schedule.forwards()"
        )
    if not torch.is_grad_enabled() or torch.is_inference_mode_enabled():
        mode = "inference_mode" if torch.is_inference_mode_enabled() else "no_grad"
        raise PlanError(
            f"the plan has backwards, but {name} was called under torch.{mode}; to evaluate, make "
            "a plan of forwards: fp.make_plan(stages, schedule.forwards(), ...)"
        )


def refuse_halves(plan: Plan) -> None:
    """Raise PlanError for a plan that a `vjp` cannot run."""
    if plan.loss is not None:
        raise PlanError(
            "vjp takes a plan without a loss, but this plan has a loss: fp.run computes its "
            "gradients; or leave loss= out of make_plan and give cotangents of the outputs"
        )
    if plan.schedule.num_slices > 1:
        raise PlanError(
            f"vjp takes whole microbatches, but the plan's schedule {plan.schedule.name!r} cuts "
            "them into slices; use a schedule without num_slices="
        )
    if not plan.schedule.has_backward:
        raise PlanError(
            "vjp needs a schedule with backwards, and the plan's schedule has none; use "
            "fp.schedules.fill_drain(num_stages, num_microbatches), or fp.run for outputs alone"
        )
    if torch.is_inference_mode_enabled():
        raise PlanError(
            "vjp was called under torch.inference_mode, where autograd records nothing; call it "
            "outside"
        )


def checked_words(check: Any) -> set[str]:
    """Return the words of ``check=``. Raises PlanError."""
    words = (
        {check}
        if isinstance(check, str)
        else set(check)
        if isinstance(check, Iterable)
        else {repr(check)}
    )
    unknown = sorted(str(word) for word in words - {"finite", "used"})
    if unknown:
        raise PlanError(f"check is any of 'finite', 'used'; got {', '.join(unknown)}")
    return words
