"""`Given`: the arguments of a run, checked as far as one process can check them alone.

`refusals` has checks of single arguments. What several processes must agree on follows in
`prepare`.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch

from funcpipe._src.batch import microbatch
from funcpipe._src.core.errors import (
    BatchError,
    FuncpipeError,
    PlacementError,
    PlanError,
    raise_all,
)
from funcpipe._src.core.tree import Leaves, Tree, flatten
from funcpipe._src.data.plan import Plan, forgotten_state
from funcpipe._src.data.stage import names_of, refuse_changed_models
from funcpipe._src.engine.options import RunOptions
from funcpipe._src.engine.part import PlanPart, whole
from funcpipe._src.engine.place import misplaced, place
from funcpipe._src.engine.refusals import (
    NamedTrees,
    refuse_absent,
    refuse_attached,
    refuse_halves,
    refuse_meta,
    refuse_modes,
    refuse_options,
    refuse_tangents,
    refuse_unsaid_axes,
    refuse_unstepped,
)
from funcpipe._src.replicas.gathered import GatheredParams
from funcpipe._src.replicas.host_params import HostParams, at_home, refuse_odd
from funcpipe._src.replicas.sharded import ShardedParams
from funcpipe._src.stages.context import RUNNING, checked_plan, refuse_transforms


@dataclass(frozen=True)
class Given:
    """The arguments of a run, checked.

    "Here" means in this process.
    """

    plan: Plan
    part: PlanPart  # the part of the plan that runs here
    options: RunOptions
    halves: bool  # whether the run is a `vjp`
    seed: int | None  # the seed as an int, or None
    # `params`, `state`: one tree per stage. None for stages of other processes.
    params: tuple[Tree, ...]
    state: tuple[Tree, ...]
    leaves: Sequence[Leaves]  # the leaves of each tree of ``params``
    devices: Sequence[torch.device]  # the `torch.device` of each lane
    # The parameters here that are gathered before use, by stage.
    spread: Mapping[int, GatheredParams]
    batch: Mapping[str, Tree]  # the trees of inputs, target and feeds, by name
    uncut: microbatch.Uncut  # the batch, checked
    cut: microbatch.Batch  # the batch, cut as far as this process can tell

    @property
    def stages(self) -> Collection[int]:
        """The stages here."""
        return self.part.stages

    @property
    def alone(self) -> bool:
        """Whether all stages are here."""
        return len(self.part.stages) == self.plan.num_stages

    @property
    def backward(self) -> bool:
        """Whether the run has backwards."""
        return self.plan.schedule.has_backward

    @property
    def inputs(self) -> Tree:
        """The inputs of the batch. None: they are not here."""
        return self.batch["inputs"]

    @property
    def target(self) -> Tree:
        """The target of the batch. None: there is none, or it is not here."""
        return self.batch["target"]


def check_arguments(
    name: str,
    plan: Plan,
    params: Sequence[Tree],
    batch: Any,
    options: RunOptions,
    part: PlanPart | None,
    *,
    halves: bool,
) -> Given:
    """Check the arguments of a run, and cut the batch as far as this process can tell.

    The arguments are those of `prepare`. Raises PlanError, PlacementError, BatchError.
    """
    checked_plan(name, plan)
    refuse_transforms(name)
    if RUNNING.get():
        raise FuncpipeError(
            f"{name} was called within a stage of another run; use fp.apply there, or fp.compose "
            "to nest stages"
        )
    if halves:
        refuse_halves(plan)
    else:
        refuse_modes(name, plan)
    refuse_options(options)
    part = part or whole(plan)
    here = part.stages
    alone = len(here) == plan.num_stages
    refuse_unstepped(name, plan, options, alone=part.replicas == 1 and alone)
    refuse_changed_models([plan.stages[stage] for stage in here], params)
    seed = checked_seed(options.seed)
    trees = _per_stage("params", params, plan, here)
    states = _states(options.state, plan, here)
    devices = part.devices(plan)
    leaves = [flatten(tree)[0] for tree in trees]
    spread = _spread(plan, part, trees, devices)
    home = [stage for stage, each in spread.items() if isinstance(each, HostParams)]
    faults = misplaced(plan, trees, devices, "params", leaves, home)
    faults += misplaced(plan, states, devices, "state")
    raise_all(
        "tensors must be on the device of their stage; move them with fp.place(plan, params):",
        faults,
        PlacementError,
    )
    inputs, target = (None, None) if batch is None and not alone else split_batch(plan, batch)
    feeds = options.feeds or {}
    by_name = {"inputs": inputs, "target": target}
    by_name |= {f"feeds[{name!r}]": tree for name, tree in feeds.items()}
    named = NamedTrees(by_name)
    if all(device.type != "meta" for device in devices):
        refuse_meta(named)
    refuse_tangents(leaves, named)
    if plan.schedule.has_backward and not halves:
        refuse_attached(named)
    uncut = microbatch.look(plan, inputs, target, feeds, here)
    cut = uncut.cut(uncut.parts, uncut.slices)
    if (plan.outputs or halves) and plan.merge is None:
        refuse_unsaid_axes(cut)
    arguments = trees, states, leaves, devices, spread
    return Given(plan, part, options, halves, seed, *arguments, by_name, uncut, cut)


def _spread(
    plan: Plan, part: PlanPart, trees: Sequence[Tree], devices: Sequence[torch.device]
) -> dict[int, GatheredParams]:
    """Return the parameters of this process that are gathered before use, by stage.

    These are sharded parameters, and parameters in host memory of stages with U. Raises PlanError,
    PlacementError.
    """
    out: dict[int, GatheredParams] = {}
    gathered = plan.schedule.gathered_stages
    faults: list[str] = []
    for stage in part.stages:
        device = devices[plan.schedule.device_of[stage]]
        cuts = part.spread(stage, trees[stage])
        if cuts:
            out[stage] = ShardedParams(stage, trees[stage], cuts, part)
        elif stage in gathered and any(at_home(leaf, device) for leaf in flatten(trees[stage])[0]):
            faults += refuse_odd(trees[stage], f"params[{stage}]", device)
            if part.replicas > 1:
                faults.append(f"params[{stage}] are in host memory, and the plan has replicas")
            out[stage] = HostParams(stage, trees[stage], device)
    raise_all(
        "parameters at home in host memory are plain tensors of a plan with one replica; place "
        "others on their devices with fp.place(plan, params):",
        faults,
        PlacementError,
    )
    return out


def _per_stage(name: str, trees: Any, plan: Plan, here: Collection[int]) -> tuple[Tree, ...]:
    count, labels = plan.num_stages, ", ".join(names_of(plan.stages))
    entries = tuple(cast("Sequence[Tree]", trees)) if isinstance(trees, (tuple, list)) else None
    if entries is not None and len(entries) == count:
        if len(here) == count:
            refuse_absent(name, entries, plan.stages)
            return entries
        others = [
            stage
            for stage in range(count)
            if stage not in here and flatten(entries[stage])[0] not in ([], [None])
        ]
        if others:
            raise PlanError(
                f"{name} has trees for stages {others}, which other ranks have; give None there, "
                f"as fp.place(plan, {name}, ranks) does"
            )
        missing = [stage for stage in sorted(here) if entries[stage] is None]
        if name == "params" and missing:
            raise PlanError(
                f"params has None for stages {missing}, which are here; give their trees"
            )
        return tuple(entry if stage in here else None for stage, entry in enumerate(entries))
    got = f"a {type(trees).__name__}" if entries is None else f"{len(entries)}"
    hint = f"; for one stage that is ({name},)" if count == 1 else ""
    raise PlanError(
        f"{name} is a tuple with one tree for each of {count} stages ({labels}), () for none; got "
        f"{got}{hint}"
    )


def _states(state: Any, plan: Plan, here: Collection[int]) -> tuple[Tree, ...]:
    labels = names_of(plan.stages)
    if state is None:
        committing = [part for part in plan.stages if part.commit is not None and plan.train]
        changing = [
            label for label, part in zip(labels, plan.stages, strict=True) if part in committing
        ]
        needing = [labels[i] for i, part in enumerate(plan.stages) if part.state]
        forgotten = (
            "" if plan.state is None or plan.train else forgotten_state(plan.stages, "split")
        )
        if forgotten:  # the statistics in the plan may be older than training
            raise PlanError(forgotten)
        if plan.state is not None and not changing:
            return tuple(
                tree if stage in here else None
                for stage, tree in enumerate(place(plan, plan.state))
            )
        if plan.state is not None:
            changes = "needs" if all(part.evaluation for part in committing) else "changes"
            ranks = ", ranks" if len(here) < plan.num_stages else ""
            raise PlanError(
                f"state= is missing: a batch {changes} the state of {', '.join(changing)}; pass "
                f"state=fp.place(plan, split.state{ranks}) to the first run, and state=result.state "
                "of the previous run to later runs"
            )
        if needing:
            raise PlanError(
                f"state= is missing: {', '.join(needing)} "
                f"{'has' if len(needing) == 1 else 'have'} state; give state=split.state, or a "
                "tuple of the states that fp.from_module returned, to the first run, and "
                "state=result.state of the previous run to later runs"
            )
        return tuple(() if stage in here else None for stage in range(plan.num_stages))
    states = _per_stage("state", state, plan, here)
    faults: list[str] = []
    for number, (label, part, tree) in enumerate(zip(labels, plan.stages, states, strict=True)):
        if part.state and tree is None and number in here:
            faults.append(
                f"{label} declares state, but state[{number}] is None; give its tree, or, in "
                "several processes, executor=ranks"
            )
        if not part.state and tree is not None and flatten(tree)[0]:
            faults.append(f"{label} declares no state, but state[{number}] is not ()")
    raise_all("state does not fit the stages:", faults)
    return states


def checked_seed(seed: Any) -> int | None:
    """Return a seed as an int, or None. Raises PlanError."""
    if seed is None:
        return None
    try:
        return operator.index(seed)  # numpy's integers too
    except TypeError:
        raise PlanError(f"seed is an int; got a {type(seed).__name__}") from None


def split_batch(plan: Plan, batch: Any) -> tuple[Tree, Tree]:
    """Return a batch as inputs and target. Raises BatchError."""
    if plan.loss is None:
        return batch, None
    if not isinstance(batch, (tuple, list)) or len(batch) != 2:  # pyright: ignore[reportUnknownArgumentType]
        got = f"a {type(batch).__name__}" + (
            f" of {len(batch)}" if isinstance(batch, (tuple, list)) else ""
        )  # pyright: ignore
        raise BatchError(
            f"the plan has a loss, so a batch is (inputs, target); got {got}; target may be None"
        )
    return batch[0], batch[1]
