"""Prepare a run before its first action: check arguments, cut the batch, bind the stages.

`refusals` has checks of single arguments, and `agreement` derives the facts that all processes
share.
"""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from threading import Lock
from typing import Any, cast

import torch
from torch import Tensor

from funcpipe._src.batch import microbatch
from funcpipe._src.batch.carried import given_carry
from funcpipe._src.batch.shares import Weighed, shares_of, weighed
from funcpipe._src.core.errors import (
    BatchError,
    FuncpipeError,
    PlacementError,
    PlanError,
    Where,
    raise_all,
)
from funcpipe._src.core.sparse_gradients import dense
from funcpipe._src.core.tree import Tree, flatten
from funcpipe._src.data.lowered import Lowered
from funcpipe._src.data.plan import Plan, forgotten_state
from funcpipe._src.data.stage import Stage, names_of, refuse_changed_models
from funcpipe._src.devices.stream import Place
from funcpipe._src.engine.agreement import Word, weights_of_all
from funcpipe._src.engine.mail import Mailbox
from funcpipe._src.engine.options import RunOptions
from funcpipe._src.engine.part import PlanPart, whole
from funcpipe._src.engine.place import misplaced, place
from funcpipe._src.engine.refusals import (
    NamedTrees,
    checked_words,
    refuse_absent,
    refuse_attached,
    refuse_frozen,
    refuse_halves,
    refuse_meta,
    refuse_modes,
    refuse_options,
    refuse_unsaid_axes,
    refuse_unstepped,
    refuse_untrained,
)
from funcpipe._src.lower.plan import program_for
from funcpipe._src.replicas.compare_numbers import compare_numbers, compare_tied
from funcpipe._src.replicas.gathered import GatheredParams
from funcpipe._src.replicas.host_params import HostParams, at_home, refuse_odd
from funcpipe._src.replicas.replicas import Reduction, Sharding
from funcpipe._src.replicas.same_numbers import digests_of_batch
from funcpipe._src.replicas.sharded import ShardedParams
from funcpipe._src.stages.bound import Bound, Program, Shares
from funcpipe._src.stages.check_finite import FiniteBound
from funcpipe._src.stages.context import RUNNING, checked_plan, cores, refuse_transforms
from funcpipe._src.stages.eager import EagerBound
from funcpipe._src.stages.observed import ObservedBound, ObserveFn
from funcpipe._src.stages.rng import Keys
from funcpipe._src.stages.trainable import (
    is_marked,
    refuse_undeclared_ties,
    resolve_ties,
    tied_members,
    trainable_leaves,
)


@dataclass(frozen=True)
class Prepared:
    """A checked run, with its batch cut and its stages bound.

    "Here" means in this process.

    Attributes:
        plan: the plan.
        part: the part of the plan that runs here.
        program: the program for the microbatches that have rows.
        batch: the cut batch, with the values that the stages here read.
        shares: the share of each microbatch in the loss.
        params, state: one tree per stage, as given. None for stages of other processes.
        bounds: the stages here, bound to their parameters.
        where: the `torch.device` of each lane.
        threads: the number of intra-op threads of a lane.
        ties: groups of (stage, leaf number). The number is -1 for a leaf of another process.
        layouts: the layout of each member of each tie, if some members are in other processes.
        spread: the parameters here that are gathered before use, by stage.
        even: whether all replicas have the same number of microbatches.
        strict: whether a trainable leaf that no backward reached is an error.
        options: the options of the run, as given.
    """

    plan: Plan
    part: PlanPart
    program: Lowered
    batch: microbatch.Batch
    shares: Shares
    params: tuple[Tree, ...]
    state: tuple[Tree, ...]
    bounds: Mapping[int, Bound]
    where: tuple[torch.device, ...]
    threads: int
    ties: tuple[tuple[tuple[int, int], ...], ...]
    layouts: tuple[tuple[Any, ...], ...]
    spread: Mapping[int, GatheredParams]
    even: bool
    strict: bool
    options: RunOptions

    def cuts_of(self, stage: int) -> Mapping[int, Sharding]:
        """Return the sharding of a stage's sharded parameters, by leaf number."""
        return self.spread[stage].cuts if stage in self.spread else {}

    def reduce(self, stage: int, box: Mailbox | None = None) -> Reduction:
        """Begin to sum the gradients of a stage over its replicas.

        ``box`` is the mailbox of the stage's lane, if the lane waits for the sums.
        """
        reduction, params = Reduction(stage, box), self.bounds[stage].params
        if self.part.replicas > 1:
            gradients, cuts = dense(params.grads()), self.cuts_of(stage)
            reduction.wait_at_end = self.part.reduce(stage, gradients, cuts, reduction.deliver)
        elif stage in self.spread:
            self.spread[stage].reduce(params.grads(), reduction)
        else:
            reduction.deliver(params.grads)
        return reduction

    def gather_all(self) -> None:
        """Gather all parameters now, for a loop without lanes and without U."""
        for stage, params in self.spread.items():
            box, place = Mailbox(), Place(self.device(stage), alone=True)
            params.begin(box, place)
            params.wait(box, place)

    def device(self, stage: int) -> torch.device:
        """Return the device of a stage."""
        return self.where[self.plan.schedule.device_of[stage]]

    def at(self, stage: int, microbatch: int | None, word: str) -> Where:
        """Return the coordinates of something that a stage does, for errors."""
        lane, phase = self.plan.schedule.device_of[stage], self.bounds[stage].phase
        word = f"{word} ({phase})" if phase else word
        return Where(
            stage, self.plan.stages[stage].name, microbatch, word, f"{lane} ({self.where[lane]})"
        )


def prepare(
    name: str,
    plan: Plan,
    params: Sequence[Tree],
    batch: Any,
    options: RunOptions,
    *,
    part: PlanPart | None = None,
    halves: bool = False,
) -> Prepared:
    """Check all arguments, cut the batch and bind the stages. No stage runs.

    Args:
        name: the name of the caller's function, for errors.
        plan, params, batch, options: as given to `run`.
        part: the part of the plan that runs in this process, which exchanges facts with the others.
            None: the whole plan.
        halves: whether to use the program of a `vjp`.
    """
    checked_plan(name, plan)
    refuse_transforms(name)
    if RUNNING.get():
        raise FuncpipeError(
            f"{name} was called within a stage of another run; use fp.apply there, or fp.compose "
            "to nest stages"
        )
    backward = plan.schedule.has_backward
    if halves:
        refuse_halves(plan, backward)
    else:
        refuse_modes(name, plan, backward)
    refuse_options(options)
    part = part or whole(plan)
    refuse_unstepped(
        name, plan, options, alone=part.replicas == 1 and len(part.stages) == plan.num_stages
    )
    here = part.stages
    refuse_changed_models([plan.stages[stage] for stage in here], params)
    seed, feeds, trainable = checked_seed(options.seed), options.feeds, options.trainable
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
    absent = batch is None and len(here) < plan.num_stages
    inputs, target = (None, None) if absent else split_batch(plan, batch)
    given = {"inputs": inputs, "target": target}
    given |= {f"feeds[{name!r}]": tree for name, tree in (feeds or {}).items()}
    batch_trees = NamedTrees(given)
    if all(device.type != "meta" for device in devices):
        refuse_meta(batch_trees)
    if backward and not halves:
        refuse_attached(batch_trees)
    uncut = microbatch.look(plan, inputs, target, feeds, here)
    cut = uncut.cut(uncut.parts, uncut.slices)
    if (plan.outputs or halves) and plan.merge is None:
        refuse_unsaid_axes(cut)
    parts = [spread[stage].parts if stage in spread else row for stage, row in enumerate(leaves)]
    weights = weighed(cut, plan)
    marked = is_marked(leaves)
    lacks = _lacks(plan, here, inputs, target)
    seeded = {"seed": seed, "loss_scale": float(options.loss_scale), "max_norm": options.max_norm}
    seeded |= {"outputs": plan.outputs, "carry": options.carry is not None}
    tied = tied_members(plan, trees, parts, trainable, here) if len(here) < plan.num_stages else ()
    pattern = (
        str(trainable_leaves(trees, trainable, marked=marked))
        if part.replicas > 1 and backward
        else ""
    )
    copies = _copies(leaves, spread) if part.replicas > 1 else ""
    is_new = bool(part.replicas > 1 or tied) and part.compared.has_new(
        leaf for row in leaves for leaf in row
    )
    facts = (
        plan.fingerprint,
        seeded,
        uncut.rows,
        uncut.ready,
        lacks,
        uncut.merged,
        cut.rows,
        weights,
    )
    ready = uncut.of_target, uncut.rows_unclear
    is_first = len(here) < plan.num_stages and not part.compared.had_batch
    digests = digests_of_batch(given) if is_first else {}
    word = Word(*facts, marked, tied, pattern, copies, uncut.length, *ready, is_new, digests)

    # After this exchange all processes have the same words. So every process raises an error that
    # follows from them, and none waits for a process that has raised alone.
    agreed = part.agree(word, plan.num_microbatches)
    part.compared.had_batch = True
    if agreed.is_new:
        compare_numbers(part, plan, trees, states, spread)
    own = agreed.parts[part.replica]
    slices = microbatch.slice_lengths(agreed.length, plan.schedule.num_slices, plan.slices)
    # Another process may have seen leaves with rows that this process lacks: then cut again.
    if own != cut.rows or agreed.merged != cut.merged or slices != cut.slices:
        cut = uncut.cut(own, slices, agreed.merged)
    cut = replace(cut, carry=given_carry(plan, options.carry, cut.rows, here))
    by_replica = agreed.weights if agreed.weighed else _weighed_again(part, cut, plan)
    every_weight = (
        None if by_replica is None else [weight for weights in by_replica for weight in weights]
    )
    every_size = [
        size * length for sizes in agreed.parts for size in sizes for length in slices or (1,)
    ]
    first = sum(map(len, agreed.parts[: part.replica])) * len(slices or (1,))
    doubts = {"rows_unclear": agreed.rows_unclear, "rows_uneven": uncut.is_target_uneven}
    shares = shares_of(every_size, every_weight, plan, options.loss_scale, first, **doubts)
    unmarked = [[False] * len(row) for row in leaves]
    trained = (
        trainable_leaves(trees, trainable, marked=agreed.marked, leaves=leaves)
        if backward
        else unmarked
    )
    ties = resolve_ties(plan, trees, trained, here)
    if part.replicas == 1 and len(here) == plan.num_stages and ties:
        compare_tied(part.compared, trees, leaves, ties)
    if backward:
        refuse_undeclared_ties(trees, leaves, trained, ties)
    if backward and not halves:
        refuse_untrained(trees, leaves, states, trained)
        refuse_frozen(leaves, trainable, marked=agreed.marked)
    # A caller who set fewer threads than cores wants the other cores for other work.
    available = min(len(cores()), torch.get_num_threads())
    threads = options.threads_per_lane or max(1, available // part.beside)
    checks = checked_words(options.check)
    for params_of_stage in spread.values():
        params_of_stage.count(program_for(plan, min(map(len, agreed.parts))))
    bindable = [
        spread[stage].tree() if stage in spread else tree for stage, tree in enumerate(trees)
    ]
    # Guard parameters against writes, except in runs whose steps write to them.
    keys, guard = Keys(seed, plan.stages, first), options.optimizer is None
    bounds = _bind(
        plan, here, bindable, states, trained, keys, shares, checks, options.observe, guard=guard
    )
    program = program_for(plan, cut.num_microbatches, halves=halves)
    used = "used" in checks
    return Prepared(
        plan,
        part,
        program,
        cut,
        shares,
        trees,
        states,
        bounds,
        tuple(devices),
        threads,
        ties,
        agreed.layouts,
        spread,
        len({*map(len, agreed.parts)}) == 1,
        used,
        options,
    )


def _copies(leaves: Sequence[Sequence[Any]], spread: Mapping[int, GatheredParams]) -> str:
    """Describe the parameters of this process without their numbers. Equal for all replicas."""
    rows = [[leaf for leaf in row if isinstance(leaf, Tensor)] for row in leaves]
    tensors = [
        (tuple(leaf.shape), leaf.dtype, getattr(leaf, "placements", ()))
        for row in rows
        for leaf in row
    ]
    cuts = [(stage, sorted(params.cuts.items())) for stage, params in spread.items()]
    digest = hashlib.blake2b(str((tensors, cuts)).encode(), digest_size=6).hexdigest()
    return (
        f"{len(tensors)} tensors, {sum(len(cut) for _, cut in cuts)} of them in parts (hash of "
        f"shapes {digest})"
    )


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


def _lacks(plan: Plan, here: Collection[int], inputs: Tree, target: Tree) -> tuple[str, ...]:
    """Describe the batch parts that the stages of this process read but that were not given.

    In one process nothing can be missing, because the caller gives the whole batch.
    """
    if len(here) == plan.num_stages:
        return ()
    first, last = 0 in here and inputs is None, plan.num_stages - 1 in here and target is None
    lacks = ["has stage 0 and was given no inputs"] if first and not plan.stages[0].feeds else []
    # A loss may need no target: then the batch is (inputs, None), which is complete.
    return (
        *lacks,
        *(
            ["has the last stage and was given no batch"]
            if last and plan.loss and inputs is None
            else []
        ),
    )


def _weighed_again(
    part: PlanPart, cut: microbatch.Batch, plan: Plan
) -> tuple[tuple[float, ...], ...] | None:
    """Compute the weights of all microbatches again, after some process had to cut again."""
    found: list[Weighed] = part.exchange("the weights of microbatches", weighed(cut, plan))
    size = len(found) // part.replicas
    return weights_of_all([found[first : first + size] for first in range(0, len(found), size)])


def checked_seed(seed: Any) -> int | None:
    """Return a seed as an int, or None. Raises PlanError."""
    if seed is None:
        return None
    try:
        return operator.index(seed)  # numpy's integers too
    except TypeError:
        raise PlanError(f"seed is an int; got a {type(seed).__name__}") from None


def _bind(
    plan: Plan,
    here: Collection[int],
    trees: Sequence[Tree],
    states: Sequence[Tree],
    trained: list[list[bool]],
    keys: Keys,
    shares: Shares,
    checks: set[str],
    observer: ObserveFn | None,
    *,
    guard: bool,
) -> dict[int, Bound]:
    """Bind each stage of this process to its parameters and state."""
    bounds: dict[int, Bound] = {}
    lock = Lock()  # observers are called by one lane at a time
    for index in sorted(here):
        part, params, state = plan.stages[index], trees[index], states[index]
        loss = plan.loss if index == plan.num_stages - 1 else None
        options: dict[str, Any] = {"trainable": trained[index], "train": plan.train, "keys": keys}
        options |= {"backwards": plan.schedule.has_backward, "guard": guard}
        try:
            bound = _program(part)(part, index, params, state, loss=loss, shares=shares, **options)
        except PlanError as error:
            raise PlanError(f"{names_of(plan.stages)[index]}: {error}") from None
        if "finite" in checks:
            bound = FiniteBound(bound, params, index, shares)
        if observer is not None:
            bound = ObservedBound(bound, part, params, observer, lock)
        bounds[index] = bound
    return bounds


def _program(stage: Stage) -> Program:
    return stage.program or EagerBound


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
            raise PlanError(
                f"state= is missing: a batch {changes} the state of {', '.join(changing)}; pass "
                "state=fp.place(plan, split.state) to the first run, and state=result.state of the "
                "previous run to later runs"
            )
        if needing:
            raise PlanError(
                f"state= is missing: {', '.join(needing)} "
                f"{'has' if len(needing) == 1 else 'have'} state; give state=, a tuple with one "
                "tree per stage (fp.from_module returns each; the new one is in result.state)"
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
