"""Prepare a run before its first action: check arguments, agree on facts, bind the stages.

`arguments` checks what one process can check alone, and `agreement` derives the facts that all
processes share.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from threading import Lock
from typing import Any

import torch
from torch import Tensor

from funcpipe._src.batch import microbatch
from funcpipe._src.batch.carried import given_carry
from funcpipe._src.batch.shares import Weighed, shares_of, weighed
from funcpipe._src.core.errors import PlanError, Where
from funcpipe._src.core.sparse_gradients import dense
from funcpipe._src.core.tree import Tree
from funcpipe._src.data.lowered import Lowered
from funcpipe._src.data.plan import Plan
from funcpipe._src.data.stage import names_of
from funcpipe._src.devices.stream import Place
from funcpipe._src.engine.agreement import Agreed, Word, functions_of, of_replicas, weights_of_all
from funcpipe._src.engine.arguments import Given, check_arguments
from funcpipe._src.engine.mail import Mailbox
from funcpipe._src.engine.options import RunOptions
from funcpipe._src.engine.part import PlanPart
from funcpipe._src.engine.refusals import checked_words, refuse_frozen, refuse_untrained
from funcpipe._src.lower.plan import program_for
from funcpipe._src.replicas.compare_numbers import compare_numbers, compare_tied
from funcpipe._src.replicas.gathered import GatheredParams
from funcpipe._src.replicas.replicas import Reduction, Sharding
from funcpipe._src.replicas.same_numbers import digests_of_batch
from funcpipe._src.stages.bound import Bound, Shares
from funcpipe._src.stages.context import cores
from funcpipe._src.stages.eager import EagerBound
from funcpipe._src.stages.observed import FiniteBound, ObservedBound
from funcpipe._src.stages.rng import Keys, fold_in
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
    """

    plan: Plan
    part: PlanPart  # the part of the plan that runs here
    program: Lowered  # the program for the microbatches that have rows
    batch: microbatch.Batch  # the cut batch, with the values that the stages here read
    shares: Shares  # the share of each microbatch in the loss
    # `params`, `state`: one tree per stage, as given. None for stages of other processes.
    params: tuple[Tree, ...]
    state: tuple[Tree, ...]
    bounds: Mapping[int, Bound]  # the stages here, bound to their parameters
    commit_keys: Keys  # the keys of random numbers in commits, which are equal in all replicas
    where: tuple[torch.device, ...]  # the `torch.device` of each lane
    threads: int  # the number of intra-op threads of a lane
    # Groups of (stage, leaf number). The number is -1 for a leaf of another process.
    ties: tuple[tuple[tuple[int, int], ...], ...]
    # The layout of each member of each tie, if some members are in other processes.
    layouts: tuple[tuple[Any, ...], ...]
    # The parameters here that are gathered before use, by stage.
    spread: Mapping[int, GatheredParams]
    even: bool  # whether all replicas have the same number of microbatches
    strict: bool  # whether a trainable leaf that no backward reached is an error
    options: RunOptions  # the options of the run, as given

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
    given = check_arguments(name, plan, params, batch, options, part, halves=halves)
    part = given.part
    # After this exchange all processes have the same words. So every process raises an error that
    # follows from them, and none waits for a process that has raised alone.
    agreed = part.agree(_word(given), plan.num_microbatches)
    part.compared.had_batch = True
    if agreed.is_new:
        compare_numbers(part, plan, given.params, given.state, given.spread)
    cut = _cut(given, agreed)
    shares = _shares(given, agreed, cut)
    trained, ties = _trained(given, agreed)
    # A caller who set fewer threads than cores wants the other cores for other work.
    available = min(len(cores()), torch.get_num_threads())
    threads = options.threads_per_lane or max(1, available // part.beside)
    checks = checked_words(options.check)
    fewest = min(map(len, agreed.parts))
    for params_of_stage in given.spread.values():
        params_of_stage.count(program_for(plan, fewest))
    return Prepared(
        plan,
        part,
        program_for(plan, cut.num_microbatches, halves=halves),
        cut,
        shares,
        given.params,
        given.state,
        _bind(given, trained, shares, checks),
        Keys(None if given.seed is None else fold_in(given.seed, "commit"), plan.stages),
        tuple(given.devices),
        threads,
        ties,
        agreed.layouts,
        given.spread,
        fewest == max(map(len, agreed.parts)),
        "used" in checks,
        options,
    )


def _word(given: Given) -> Word:
    """Return the facts of this process that the others need."""
    plan, part, uncut, leaves = given.plan, given.part, given.uncut, given.leaves
    trainable, spread = given.options.trainable, given.spread
    options: dict[str, Any] = {
        "seed": given.seed,
        "loss_scale": float(given.options.loss_scale),
        "max_norm": given.options.max_norm,
        "outputs": plan.outputs,
        "carry": given.options.carry is not None,
    }
    marked = is_marked(leaves)
    tied, trained, copies, digests = (), "", "", {}
    if not given.alone:
        parts = [spread[at].parts if at in spread else row for at, row in enumerate(leaves)]
        tied = tied_members(plan, given.params, parts, trainable, given.stages)
        digests = {} if part.compared.had_batch else digests_of_batch(given.batch)
    if part.replicas > 1:
        copies = _copies(leaves, spread)
        if given.backward:
            trained = str(trainable_leaves(given.params, trainable, marked=marked))
    compares = part.replicas > 1 or bool(tied)
    return Word(
        plan=f"{plan.schedule.name} {plan.fingerprint}",
        options=options,
        rows=uncut.rows,
        ready=uncut.ready,
        lacks=_lacks(given),
        merged=uncut.merged,
        parts=given.cut.rows,
        weighed=weighed(given.cut, plan),
        marked=marked,
        ties=tied,
        trained=trained,
        copies=copies,
        length=uncut.length,
        of_target=uncut.of_target,
        rows_unclear=uncut.rows_unclear,
        is_new=compares and part.compared.has_new(leaf for row in leaves for leaf in row),
        batch=digests,
        functions=functions_of(plan, given.stages) if part.replicas > 1 else {},
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


def _lacks(given: Given) -> tuple[str, ...]:
    """Describe the batch parts that the stages of this process read but that were not given.

    In one process nothing can be missing, because the caller gives the whole batch.
    """
    if given.alone or given.inputs is not None:
        return ()
    plan, lacks = given.plan, list[str]()
    if 0 in given.stages and not plan.stages[0].feeds:
        lacks.append("has stage 0 and was given no inputs")
    # A loss may need no target: then the batch is (inputs, None), which is complete.
    if plan.num_stages - 1 in given.stages and given.target is None and plan.loss:
        lacks.append("has the last stage and was given no batch")
    return tuple(lacks)


def _cut(given: Given, agreed: Agreed) -> microbatch.Batch:
    """Return the batch, cut as all processes have agreed."""
    plan, cut = given.plan, given.cut
    own = agreed.parts[given.part.replica]
    slices = microbatch.slice_lengths(agreed.length, plan.schedule.num_slices, plan.slices)
    # Another process may have seen leaves with rows that this process lacks: then cut again.
    if own != cut.rows or agreed.merged != cut.merged or slices != cut.slices:
        cut = given.uncut.cut(own, slices, agreed.merged)
    return replace(cut, carry=given_carry(plan, given.options.carry, cut.rows, given.stages))


def _shares(given: Given, agreed: Agreed, cut: microbatch.Batch) -> Shares:
    """Return the shares of the microbatches of all replicas in the loss."""
    by_replica = agreed.weights
    if not agreed.weighed:
        by_replica = _weighed_again(given.part, cut, given.plan)
    weights = None
    if by_replica is not None:
        weights = [weight for of_replica in by_replica for weight in of_replica]
    lengths = cut.slices or (1,)
    sizes = [size * length for rows in agreed.parts for size in rows for length in lengths]
    first = sum(map(len, agreed.parts[: given.part.replica])) * len(lengths)
    return shares_of(
        sizes,
        weights,
        given.plan,
        given.options.loss_scale,
        first,
        rows_unclear=agreed.rows_unclear,
        rows_uneven=given.uncut.is_target_uneven,
    )


def _weighed_again(
    part: PlanPart, cut: microbatch.Batch, plan: Plan
) -> tuple[tuple[float, ...], ...] | None:
    """Compute the weights of all microbatches again, after some process had to cut again."""
    found: list[Weighed] = part.exchange("the weights of microbatches", weighed(cut, plan))
    return weights_of_all(of_replicas(found, part.replicas))


def _trained(
    given: Given, agreed: Agreed
) -> tuple[list[list[bool]], tuple[tuple[tuple[int, int], ...], ...]]:
    """Return which leaves get gradients, by stage, and the ties. Raises PlanError."""
    plan, trees, leaves = given.plan, given.params, given.leaves
    trainable, marked = given.options.trainable, agreed.marked
    if given.backward:
        trained = trainable_leaves(trees, trainable, marked=marked, leaves=leaves)
    else:
        trained = [[False] * len(row) for row in leaves]
    ties = resolve_ties(plan, trees, trained, given.stages)
    if ties and given.alone and given.part.replicas == 1:
        compare_tied(given.part.compared, trees, leaves, ties)
    if given.backward:
        refuse_undeclared_ties(trees, leaves, trained, ties)
    if given.backward and not given.halves:
        refuse_untrained(trees, leaves, given.state, trained)
        refuse_frozen(leaves, trainable, marked=marked)
    return trained, ties


def _bind(
    given: Given, trained: Sequence[list[bool]], shares: Shares, checks: set[str]
) -> dict[int, Bound]:
    """Bind each stage of this process to its parameters and state."""
    plan, options, bounds = given.plan, given.options, dict[int, Bound]()
    lock = Lock()  # observers are called by one lane at a time
    keys = Keys(given.seed, plan.stages, shares.first)
    for index in sorted(given.stages):
        stage, state, spread = plan.stages[index], given.state[index], given.spread.get(index)
        params = given.params[index] if spread is None else spread.tree()
        try:
            bound = (stage.program or EagerBound)(
                stage,
                index,
                params,
                state,
                loss=plan.loss if index == plan.num_stages - 1 else None,
                shares=shares,
                trainable=trained[index],
                train=plan.train,
                keys=keys,
                backwards=plan.schedule.has_backward,
                # Not in runs whose steps write to the parameters.
                guard=options.optimizer is None,
            )
        except PlanError as error:
            raise PlanError(f"{names_of(plan.stages)[index]}: {error}") from None
        if "finite" in checks:
            bound = FiniteBound(bound, stage, params, index, shares)
        if options.observe is not None:
            bound = ObservedBound(bound, stage, params, options.observe, lock)
        bounds[index] = bound
    return bounds
