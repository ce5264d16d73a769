"""Checks a run and binds its stages, before the first action."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from funcpipe.core.errors import BatchError, FuncpipeError, PlacementError, PlanError, Where, raise_all
from funcpipe.core.lowered import Lowered
from funcpipe.core.plan import Plan
from funcpipe.core.stage import names_of
from funcpipe.core.torch_names import has_gradient_hooks
from funcpipe.core.tree import Leaves, Tree, flatten, locations
from funcpipe.lower.plan import program_for
from funcpipe.runtime import microbatch
from funcpipe.runtime.bound import Bound, Program, Shares
from funcpipe.runtime.check_finite import FiniteBound
from funcpipe.runtime.context import RUNNING, checked_plan, cores, refuse_transforms
from funcpipe.runtime.eager import EagerBound
from funcpipe.runtime.options import RunOptions
from funcpipe.runtime.place import misplaced, place, plan_devices
from funcpipe.runtime.rng import Keys
from funcpipe.runtime.trainable import Trainable, refuse_undeclared_ties, resolve_ties, trainable_leaves


@dataclass(frozen=True)
class Prepared:
    """A run that is checked, its batch cut and its stages bound.

    Attributes:
        plan: the plan.
        program: its program for the microbatches that have rows.
        batch: the batch, cut.
        shares: how much each microbatch counts.
        params, state: as given, one tree per stage.
        bounds: the stages with their parameters.
        where: the torch device of each lane.
        threads: intra-op threads of a lane.
        ties: groups of (stage, leaf number).
        strict: is a trainable leaf that no backward reached an error.
        options: as the user gave them.
    """

    plan: Plan
    program: Lowered
    batch: microbatch.Batch
    shares: Shares
    params: tuple[Tree, ...]
    state: tuple[Tree, ...]
    bounds: Sequence[Bound]
    where: tuple[torch.device, ...]
    threads: int
    ties: tuple[tuple[tuple[int, int], ...], ...]
    strict: bool
    options: RunOptions

    def at(self, stage: int, microbatch: int | None, word: str) -> Where:
        """The coordinates of something that a stage does."""
        lane, phase = self.plan.schedule.device_of[stage], self.bounds[stage].phase
        word = f"{word} ({phase})" if phase else word
        return Where(stage, self.plan.stages[stage].name, microbatch, word, f"{lane} ({self.where[lane]})")


def prepare(
    name: str,
    plan: Plan,
    params: Sequence[Tree],
    batch: Any,
    options: RunOptions,
    *,
    halves: bool = False,
) -> Prepared:
    """Check everything that can be checked, cut the batch, bind the stages. Nothing has run when it raises.

    With ``halves`` the program is that of a `vjp`.
    """
    checked_plan(name, plan)
    refuse_transforms(name)
    if RUNNING.get():
        raise FuncpipeError(
            f"{name} was called inside of a stage of another run; a stage is one step of a plan: use fp.apply there, "
            "or fp.compose to nest stages"
        )
    backward = plan.schedule.has_backward
    if halves:
        _check_halves(plan, backward)
    else:
        _check_modes(name, plan, backward)
    _check_options(options)
    seed, feeds, trainable = checked_seed(options.seed), options.feeds, options.trainable
    trees = _per_stage("params", params, plan)
    states = _states(options.state, plan)
    devices = plan_devices(plan)
    faults = misplaced(plan, trees, devices, "params") + misplaced(plan, states, devices, "state")
    raise_all("tensors must lie where their stage runs; move them with fp.place(plan, params):", faults, PlacementError)
    inputs, target = split_batch(plan, batch)
    batch_trees = _NamedTrees(
        {"inputs": inputs, "target": target, **{f"feeds[{name!r}]": tree for name, tree in (feeds or {}).items()}}
    )
    if all(device.type != "meta" for device in devices):
        _refuse_meta(batch_trees)
    if backward and not halves:
        _refuse_attached(batch_trees)
    cut = microbatch.cut(plan, inputs, target, feeds)
    if (plan.outputs or halves) and plan.merge is None:
        _refuse_unsaid_axes(cut)
    shares = microbatch.shares(cut, plan, options.loss_scale)
    leaves = [flatten(tree)[0] for tree in trees]
    trained = trainable_leaves(trees, trainable) if backward else [[False] * len(row) for row in leaves]
    ties = resolve_ties(plan, trees, trained)
    if backward:
        refuse_undeclared_ties(trees, trained, ties)
    if backward and not halves:
        _refuse_untrained(trees, leaves, states, trained)
        _refuse_frozen(leaves, trainable)
    # A caller who set fewer threads than there are cores leaves the others to other work.
    available = min(len(cores()), torch.get_num_threads())
    threads = options.threads_per_lane or max(1, available // plan.num_devices)
    checks = _checks(options.check)
    bounds = _bind(plan, trees, states, trained, Keys(seed, plan.stages), shares, checks)
    program = program_for(plan, cut.num_microbatches, halves=halves)
    return Prepared(
        plan, program, cut, shares, trees, states, bounds, devices, threads, ties, "used" in checks, options
    )


def _check_options(options: RunOptions) -> None:
    """Raise PlanError for options that are of a wrong type or out of range."""
    feeds, scale, threads, timeout = options.feeds, options.loss_scale, options.threads_per_lane, options.timeout
    if feeds is not None and not isinstance(feeds, Mapping):
        raise PlanError(f"feeds is a dict with a tree for each name that stages feed on; got a {type(feeds).__name__}")
    if not isinstance(scale, (int, float)) or not 0 < scale < float("inf"):
        raise PlanError(f"loss_scale is a number above 0 (a scaler's get_scale()); got {scale!r}")
    if threads is not None and (not isinstance(threads, int) or threads < 1):
        raise PlanError(f"threads_per_lane is a positive int or None; got {threads!r}")
    if timeout is not None and (isinstance(timeout, bool) or not (isinstance(timeout, (int, float)) and timeout > 0)):
        raise PlanError(f"timeout is a number of seconds above 0, or None; got {timeout!r}")


def checked_seed(seed: Any) -> int | None:
    """A seed as an int, None where there is none. Raises PlanError."""
    if seed is None:
        return None
    try:
        return operator.index(seed)  # numpy's integers too
    except TypeError:
        raise PlanError(f"seed is an int; got a {type(seed).__name__}") from None


def _refuse_unsaid_axes(cut: microbatch.Batch) -> None:
    """Raise BatchError where no input is cut along axis 0: the axis of the outputs' rows is not known then."""
    axes = sorted({axis for axis in cut.axes if axis is not None})
    if axes and axes[0] > 0:
        raise BatchError(
            f"the inputs are cut along axis {', '.join(map(str, axes))}, and nothing says how outputs are joined: "
            f"make_plan(..., merge={axes[0]}), or merge=0, 'each', or a tree of these like the outputs"
        )


class _NamedTrees:
    """Trees by name, taken apart once."""

    def __init__(self, trees: Mapping[str, Tree]) -> None:
        self.trees = [(root, tree, flatten(tree)[0]) for root, tree in trees.items()]

    def found(self, wrong: Callable[[Any], bool]) -> list[tuple[str, Any]]:
        """The wrong leaves with their places; places cost much, so they are made only for trees with a wrong leaf."""
        return [
            (place, leaf)
            for root, tree, leaves in self.trees
            if any(map(wrong, leaves))
            for place, leaf in zip(locations(tree, root), leaves, strict=True)
            if wrong(leaf)
        ]


def _refuse_attached(trees: _NamedTrees) -> None:
    """Raise BatchError for leaves of the batch that ask for a gradient: none goes from a run into its batch."""
    faults = [f"{place} {_why(leaf)}" for place, leaf in trees.found(_asks)]
    raise_all(
        "no gradient goes from a run into its batch, and what made these values would not be trained. Make "
        "it the first stage; or take the gradients of the inputs by fp.vjp, or by fp.Pipe inside of an "
        "autograd graph; or hand the values in detached, x.detach():",
        faults,
        BatchError,
    )


def _bare(leaf: Any) -> Any:
    return leaf.value if isinstance(leaf, (microbatch.Replicate, microbatch.Axis)) else leaf


def _why(leaf: Any) -> str:
    """Why a leaf of a batch asks for a gradient, as words for a fault."""
    bare = _bare(leaf)
    node = bare.grad_fn if isinstance(bare, Tensor) else None
    return "requires a gradient" if node is None else f"was computed by {node.name()}"


def _asks(leaf: Any) -> bool:
    if isinstance(leaf, microbatch.Microbatches):
        return any(_asks(inner) for tree in leaf for inner in flatten(tree)[0])
    bare = _bare(leaf)
    return isinstance(bare, Tensor) and bare.requires_grad


def _refuse_untrained(
    trees: Sequence[Tree], leaves: Sequence[Leaves], states: Sequence[Tree], trained: list[list[bool]]
) -> None:
    """Raise PlanError for state that requires gradients, params that are arrays, and params with gradient hooks."""
    states_by_name = _NamedTrees({f"state[{stage}]": tree for stage, tree in enumerate(states)})
    faults = [
        f"{place} requires a gradient, and state gets none: put it into params, or detach it"
        for place, _ in states_by_name.found(_asks)
    ]
    for stage, (tree, row, flags) in enumerate(zip(trees, leaves, trained, strict=True)):
        whys = [_untrained(leaf, flag, stage) for leaf, flag in zip(row, flags, strict=True)]
        if any(whys):
            pairs = zip(locations(tree, f"params[{stage}]"), whys, strict=True)
            faults += [f"{place} {why}" for place, why in pairs if why]
    raise_all("these would not be trained as they say:", faults)


def _untrained(leaf: Any, trained: bool, stage: int) -> str:
    """Why a leaf of the params would not be trained as it says; "" where it would."""
    if not isinstance(leaf, Tensor):
        array = hasattr(leaf, "__array__") and getattr(leaf, "ndim", 0) > 0
        return f"is a {type(leaf).__name__}, and gradients are of tensors: torch.from_numpy(array)" if array else ""
    if not trained:
        return ""
    if has_gradient_hooks(leaf):
        return (
            f"has hooks on its gradient, which a run does not call: apply them to result.grads[{stage}] before "
            "fp.step, and take them off (the handle's remove())"
        )
    return ""


def _refuse_frozen(leaves: Sequence[Leaves], trainable: Trainable) -> None:
    """Raise PlanError where ``trainable`` is None and every Parameter is frozen."""
    tensors = [leaf for row in leaves for leaf in row if isinstance(leaf, Tensor)]
    if trainable is not None or any(leaf.requires_grad for leaf in tensors):
        return
    if any(isinstance(leaf, torch.nn.Parameter) for leaf in tensors):
        raise PlanError(
            "every parameter is frozen (requires_grad is False), so there is nothing to train; leaf.requires_grad_() "
            "on what is trained, run(..., trainable=True) for gradients all the same, or evaluate: "
            "fp.make_plan(stages, schedule.forwards())"
        )


def _refuse_meta(trees: _NamedTrees) -> None:
    """Raise BatchError for tensors of the batch on the meta device."""
    missing = trees.found(lambda leaf: isinstance(leaf, Tensor) and leaf.is_meta)
    faults = [f"{place} is on the meta device and has no numbers" for place, _ in missing]
    raise_all("the batch cannot be run:", faults, BatchError)


def _bind(
    plan: Plan,
    trees: Sequence[Tree],
    states: Sequence[Tree],
    trained: list[list[bool]],
    keys: Keys,
    shares: Shares,
    checks: set[str],
) -> list[Bound]:
    """Bind every stage to its parameters and state."""
    bounds: list[Bound] = []
    for index, (part, params, state) in enumerate(zip(plan.stages, trees, states, strict=True)):
        program: Program = part.program or EagerBound
        loss = plan.loss if index == plan.num_stages - 1 else None
        options: dict[str, Any] = {"trainable": trained[index], "train": plan.train, "keys": keys}
        options["backwards"] = plan.schedule.has_backward
        try:
            bound = program(part, index, params, state, loss=loss, shares=shares, **options)
        except PlanError as error:
            raise PlanError(f"{names_of(plan.stages)[index]}: {error}") from None
        if checks & {"finite", "finite-op"}:
            bound = FiniteBound(bound, params, index, shares, operations="finite-op" in checks)
        bounds.append(bound)
    return bounds


def _check_modes(name: str, plan: Plan, backward: bool) -> None:
    if not backward:
        return
    if plan.loss is None:
        raise PlanError(
            f"the plan's schedule has backwards but the plan has no loss, so {name} does not know where gradients "
            "begin: make_plan(..., loss=fn); for gradients of outputs use fp.vjp; for outputs alone a forward-only "
            "schedule, fp.schedules.fill_drain(..., backward=False)"
        )
    if not torch.is_grad_enabled() or torch.is_inference_mode_enabled():
        mode = "inference_mode" if torch.is_inference_mode_enabled() else "no_grad"
        raise PlanError(
            f"the plan has backwards, but {name} was called under torch.{mode}; evaluate with the forwards alone: "
            "fp.make_plan(stages, schedule.forwards(), ...)"
        )


def _checks(check: Any) -> set[str]:
    """The words of ``check=``. Raises PlanError."""
    words = {check} if isinstance(check, str) else set(check) if isinstance(check, Iterable) else {repr(check)}
    unknown = sorted(str(word) for word in words - {"finite", "finite-op", "used"})
    if unknown:
        raise PlanError(f"check is any of 'finite', 'finite-op', 'used'; got {', '.join(unknown)}")
    return words


def _check_halves(plan: Plan, backward: bool) -> None:
    if plan.loss is not None:
        raise PlanError(
            "vjp is for plans without a loss, and this one has one: fp.run gives its gradients; or leave loss= out "
            "of make_plan and give the cotangents of the outputs"
        )
    if not backward:
        raise PlanError(
            "the plan's schedule has no backwards to pull cotangents through; use fp.schedules.fill_drain(num_stages, "
            "num_microbatches), or fp.run for outputs alone"
        )
    if torch.is_inference_mode_enabled():
        raise PlanError("vjp was called under torch.inference_mode, where autograd records nothing; call it outside")


def _per_stage(name: str, trees: Any, plan: Plan) -> tuple[Tree, ...]:
    count, labels = plan.num_stages, ", ".join(names_of(plan.stages))
    entries = tuple(cast("Sequence[Tree]", trees)) if isinstance(trees, (tuple, list)) else None
    if entries is not None and len(entries) == count:
        return entries
    got = f"a {type(trees).__name__}" if entries is None else f"{len(entries)}"
    hint = f"; for one stage that is ({name},)" if count == 1 else ""
    raise PlanError(
        f"{name} is a tuple with one tree for each of {count} stages ({labels}), () for none; got {got}{hint}"
    )


def _states(state: Any, plan: Plan) -> tuple[Tree, ...]:
    labels = names_of(plan.stages)
    if state is None:
        changing = [labels[i] for i, part in enumerate(plan.stages) if part.commit is not None and plan.train]
        needing = [labels[i] for i, part in enumerate(plan.stages) if part.state]
        if plan.state is not None and not changing:
            return place(plan, plan.state)
        if plan.state is not None:
            raise PlanError(
                f"state= is missing: a batch changes that of {', '.join(changing)}; give fp.place(plan, plan.state) "
                "with the first batch, and with every other one the result.state of the one before"
            )
        if needing:
            raise PlanError(
                f"state= is missing: {', '.join(needing)} {'has' if len(needing) == 1 else 'have'} state; give "
                "state=, a tuple with one tree per stage (fp.from_module returns each; the new one is in "
                "result.state)"
            )
        return ((),) * plan.num_stages
    states = _per_stage("state", state, plan)
    faults: list[str] = []
    for number, (label, part, tree) in enumerate(zip(labels, plan.stages, states, strict=True)):
        if part.state and tree is None:
            faults.append(f"{label} declares state, but state[{number}] is None")
        if not part.state and tree is not None and flatten(tree)[0]:
            faults.append(f"{label} declares no state, but state[{number}] is not ()")
    raise_all("state does not fit the stages:", faults)
    return states


def split_batch(plan: Plan, batch: Any) -> tuple[Tree, Tree]:
    """A batch as inputs and target. Raises BatchError."""
    if plan.loss is None:
        return batch, None
    if not isinstance(batch, (tuple, list)) or len(batch) != 2:  # pyright: ignore[reportUnknownArgumentType]
        got = f"a {type(batch).__name__}" + (f" of {len(batch)}" if isinstance(batch, (tuple, list)) else "")  # pyright: ignore
        raise BatchError(f"the plan has a loss, so a batch is (inputs, target); got {got}; target may be None")
    return batch[0], batch[1]
