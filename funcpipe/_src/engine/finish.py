"""Compute the result of a run: combine losses, scale and tie gradients, commit state, merge
outputs."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor

from funcpipe._src.batch.carried import returned_carry
from funcpipe._src.batch.joining import merge
from funcpipe._src.core.border import caller_copy
from funcpipe._src.core.errors import BatchError, PlanError, fail, raise_all
from funcpipe._src.core.sparse_gradients import added
from funcpipe._src.core.tree import Tree, locations, map_tensors, unflatten
from funcpipe._src.data.plan import Plan
from funcpipe._src.data.result import Loss, Result, RunStats, Timeline
from funcpipe._src.engine.agreement import END
from funcpipe._src.engine.prepare import Prepared
from funcpipe._src.engine.unused import UnusedLeaf, unused_in_all, unused_keys, unused_leaves
from funcpipe._src.optimizing.stepping import Stepping
from funcpipe._src.processes.columns import Columns, apart, joined
from funcpipe._src.replicas.replicas import Reduction
from funcpipe._src.stages.bound import Shares
from funcpipe._src.stages.rng import KeyedDraws

ByPlace = Mapping[tuple[int, int], Any]  # values by (stage, microbatch)


def finish(
    ready: Prepared,
    reports: ByPlace,
    outputs: ByPlace,
    timeline: Timeline | None,
    went: RunStats,
    *,
    backward: bool,
    stepping: Stepping | None = None,
    committed: Mapping[int, Tree] | None = None,
    reductions: Mapping[int, Reduction] | None = None,
    carries: ByPlace | None = None,
) -> Result:
    """Return the result of a run.

    Args:
        ready: the prepared run.
        reports: the reports of the forwards.
        outputs: the outputs of the last stage; empty if the plan has none.
        timeline: the measured timeline, or None.
        went: the statistics.
        backward: whether backwards have run, so that there are gradient sums.
        stepping: the optimizer steps of the lanes, or None.
        committed: the states that lanes have already committed. None: this function commits.
        reductions: the reductions over replicas that lanes have begun. Those of other stages begin
            here.
        carries: the carries of last slices, by stage and piece.
    """
    plan, count = ready.plan, ready.batch.num_pieces
    last = plan.num_stages - 1
    stepped = () if stepping is None else stepping.stepped
    refuse_writes(
        ready,
        "a stage wrote into its parameters (so does an embedding with max_norm=); a stage is pure, "
        "so compute with a copy:",
        but=stepped,
    )
    if stepping is not None and stepping.spends:
        sums, (trained, untouched) = None, stepping.reached
    else:
        sums = gradient_sums(ready, reductions or {}) if backward else {}
        untouched = unused_leaves(ready) if backward else []
        trained = sum(gradient is not None for row in sums.values() for gradient in row)
    left = committed
    if left is None:
        stats = _statistics(ready, reports)
        left = {
            stage: commit(ready, stage, ready.state[stage], each) for stage, each in stats.items()
        }
    state = tuple([left.get(stage, ready.state[stage]) for stage in range(plan.num_stages)])
    merged = (
        merge([outputs[last, m] for m in range(count)], ready.batch, plan.merge)
        if outputs
        else None
    )

    ended = ready.part.exchange(END, _ended(ready, reports, trained, untouched))
    unused = unused_keys(ready, unused_in_all(ready, [each.unused for each in ended]))
    loss, weight, losses, aux, late = _fold_losses(ready, ended)
    if loss is not None:
        loss.backward = _no_backward
    # With late weights the backwards ran with the factor 1, so divide the sums once, here.
    factor = 1.0 / weight if late and weight else 1.0
    grads = gradients(ready, sums, factor) if backward and sums is not None else None
    if backward:  # last, because any other error is more specific
        _refuse_untouched(ended)
    if stepping is not None:
        stepping.late = late
    facts = (
        unused,
        state,
        merged,
        timeline,
        went,
        ready.shares.loss_scale,
        plan.ties,
        ready.part.others,
    )
    carry = returned_carry(plan, ready.batch.rows, ready.part.stages, carries or {})
    return Result(loss, weight, losses, aux, grads, *facts, carry=carry)


class Ended(NamedTuple):
    """The facts that a process sends when its lanes are done."""

    # The loss of each microbatch, from the process of the last stage. As columns for other
    # processes, if possible.
    losses: tuple[Loss, ...] | Columns
    # Auxiliary losses, as (stage, microbatch over all replicas, sum, weight).
    sides: tuple[tuple[int, int, Any, Any], ...]
    trained: int  # the number of leaves with a gradient
    unused: tuple[UnusedLeaf, ...]  # the leaves among these that no backward reached


def _ended(ready: Prepared, reports: ByPlace, trained: int, unused: Sequence[UnusedLeaf]) -> Ended:
    count, last = ready.batch.num_pieces, ready.plan.num_stages - 1
    losses: tuple[Loss, ...] | Columns = ()
    first, part = ready.shares.first, ready.part
    if ready.plan.loss is not None and last in ready.bounds:
        losses = tuple([reports[last, m].loss for m in range(count)])
        if part.replicas > 1 or len(part.stages) < ready.plan.num_stages:
            losses = joined(losses)
    sides = [
        (stage, first + m, *report.side)
        for (stage, m), report in reports.items()
        if report.side is not None
    ]
    return Ended(losses, tuple(sides), trained, tuple(unused))


def _refuse_untouched(ended: Sequence[Ended]) -> None:
    """Raise PlanError if the loss depends on no parameter, as torch's ``backward`` does."""
    if any(each.trained for each in ended) and not any(
        each.trained > len(each.unused) for each in ended
    ):
        raise PlanError(
            "no gradient reached any parameter: the loss depends on none of them. Is the loss "
            "computed under torch.no_grad, with .detach(), .item() or numpy, or from the target "
            "alone? To run without gradients: fp.make_plan(stages, schedule.forwards())"
        )


def _no_backward(*_: Any, **__: Any) -> None:
    """Replace ``result.loss.backward()`` by an error that says where the gradients are."""
    raise PlanError(
        "the backwards have already run: the gradients are in result.grads, and "
        "fp.step(optimizer, params, result) makes the step. For your own loss around a pipeline "
        "use fp.vjp or fp.Pipe"
    )


def release(ready: Prepared) -> None:
    """Release the tensors of all bound stages, after the results are taken."""
    for params in ready.spread.values():
        params.settle()
    for bound in ready.bounds.values():
        bound.release()


def refuse_writes(ready: Prepared, title: str, *, but: Collection[int] = ()) -> None:
    """Raise PlanError if parameters or state were written to during the run.

    ``but`` names stages whose parameters may change, because the run has stepped them.
    """
    faults = [
        locations(ready.params[stage], f"params[{stage}]")[number]
        for stage, bound in ready.bounds.items()
        if stage not in but
        for number in bound.params.written()
    ]
    raise_all(title, faults)
    faults = [
        locations(ready.state[stage], f"state[{stage}]")[number]
        for stage, bound in ready.bounds.items()
        for number in bound.params.written_state()
    ]
    title = (
        "a stage wrote into its state; a stage is pure: return statistics in Out(stats=...) and "
        "fold them in commit=:"
    )
    raise_all(title, faults)


def _fold_losses(
    ready: Prepared, ended: Sequence[Ended]
) -> tuple[Any, float | None, tuple[Any, ...], tuple[Tree, ...], bool]:
    """Return loss, weight, losses and aux of the batch, and whether the loss returned weights."""
    shares = ready.shares._replace(first=0)
    if ready.plan.loss is None:
        return None, None, (), (), False
    reported = [loss for each in ended for loss in apart(each.losses)]
    weighted = [loss.weight is not None for loss in reported]
    if any(weighted) and not all(weighted):
        raise BatchError(
            "the loss returned a mean for some microbatches and (sum, weight) for others; always "
            "return the same form"
        )
    late = weighted[0] and not shares.explicit
    weights = [float(loss.weight) for loss in reported] if late else []
    invalid = [
        f"{value} for {ready.batch.named(m)}"
        for m, value in enumerate(weights)
        if not 0 <= value < float("inf")
    ]
    raise_all(
        "the loss returned (sum, weight) with weights that are not finite numbers from 0:",
        invalid,
        BatchError,
    )
    weight = sum(weights) if late else shares.total
    if weight is not None and not weight:
        raise BatchError(
            "the weights that the loss returned are 0 for every microbatch, so the loss of this "
            "batch is not defined"
        )
    total: Any = None
    with torch.no_grad():
        for m, loss in enumerate(reported):
            factor = shares.factor(loss, m) / (weight if late and weight else 1.0)
            if factor:
                part = _scalar(loss.sum) * factor
                total = part if total is None else total + part
        total = _add_sides(ready, ended, total, late)
        losses = tuple(_mean(loss, shares, m) for m, loss in enumerate(reported))
    return total, weight, losses, tuple(loss.aux for loss in reported), late


def _scalar(total: Tensor) -> Tensor:
    """Return a tensor with one number as a 0-dim tensor."""
    return total.reshape(()) if total.dim() else total


def _mean(loss: Loss, shares: Shares, microbatch: int) -> Any:
    """Return a microbatch's loss as a mean, or as a sum for losses that nothing divides."""
    total = _scalar(loss.sum)
    if loss.weight is None and not (shares.summed and shares.explicit):
        return total
    weight = float(shares.weight(microbatch) if loss.weight is None else loss.weight)
    return total / weight if weight else torch.zeros_like(total)


def _add_sides(ready: Prepared, ended: Sequence[Ended], total: Any, late: bool) -> Any:
    """Add the auxiliary losses of all stages to the total, each mean times the microbatch's
    share."""
    by_place = {
        (stage, m): (side, weight) for each in ended for stage, m, side, weight in each.sides
    }
    for stage, m in sorted(by_place):
        if late or ready.shares.total is None:
            reason = (
                "the loss returns the weights of the microbatches, too late to weight it"
                if late
                else "an auxiliary loss is a mean, while the loss is a sum that nothing divides"
            )
            raise BatchError(
                f"stage {stage} returned an auxiliary loss, but {reason}; give make_plan(..., "
                "weight=target -> number)"
            )
        side, weight = by_place[stage, m]
        if float(weight):
            part = side * (ready.shares.parts[m] / float(weight))
            part = part.to(total.device).reshape(()) if isinstance(part, Tensor) else part
            total = total + part
    return total


def gradient_sums(
    ready: Prepared, reductions: Mapping[int, Reduction]
) -> dict[int, list[Tensor | None]]:
    """Return the gradient sums over all microbatches and replicas, by stage."""
    # Begin all reductions before waiting for the first.
    every = {stage: reductions.get(stage) or ready.reduce(stage) for stage in ready.bounds}
    return {stage: reduction.sums_at_end() for stage, reduction in every.items()}


def gradients(
    ready: Prepared, sums: dict[int, list[Tensor | None]], scale: float = 1.0
) -> tuple[Tree, ...]:
    """Return the gradient trees, times ``scale``, with tied leaves summed.

    Stages of other processes get None.
    """
    with torch.no_grad():
        if scale != 1.0:
            for stage_sums in sums.values():
                for gradient in stage_sums:
                    if gradient is not None:
                        gradient.mul_(scale)
        for number in range(len(ready.ties)):
            _tie(ready, sums, number)
    rank_of, device_of = ready.part.rank_of, ready.plan.schedule.device_of
    if any(len({rank_of[device_of[stage]] for stage, _ in group}) > 1 for group in ready.ties):
        # Wait for all ranks: none may return and step while another fails to get its sums.
        ready.part.exchange("the sums of tied leaves", None)
    given = {stage: spread.as_given(sums[stage]) for stage, spread in ready.spread.items()}
    specs = {stage: bound.params.spec for stage, bound in ready.bounds.items()}
    trees = {stage: unflatten(specs[stage], row) for stage, row in {**sums, **given}.items()}
    return tuple([trees.get(stage) for stage in range(ready.plan.num_stages)])


def _tie(ready: Prepared, sums: dict[int, list[Tensor | None]], number: int) -> None:
    """Give each leaf of a tie in this process the sum over all members."""
    group = ready.ties[number]
    here = {place: member for place, member in enumerate(group) if member[1] >= 0}
    parts = {
        place: gradient for place, (s, n) in here.items() if (gradient := sums[s][n]) is not None
    }
    if not parts:
        return
    device_of, rank_of = ready.plan.schedule.device_of, ready.part.rank_of
    if len(here) < len(group):
        holders = [rank_of[device_of[stage]] for stage, _ in group]
        parts = {
            place: value.to_dense() if value.is_sparse else value for place, value in parts.items()
        }
        values = ready.part.gather(parts, holders, ready.layouts[number])
    else:
        values = [*parts.values()]
    total = reduce(lambda first, other: added(first, other.to(first.device)), values)
    for place in parts:  # a copy per stage: clipping in place must not act twice on one tensor
        s, n = here[place]
        sums[s][n] = total.to(parts[place].device, copy=True)


def _statistics(ready: Prepared, reports: ByPlace) -> dict[int, tuple[Tree, ...]]:
    """Return the statistics of all microbatches of all replicas, by stage with a commit."""
    stats = {
        stage: statistics_of(ready, stage, reports)
        for stage in ready.bounds
        if commits(ready.plan, stage)
    }
    if ready.part.replicas == 1:
        return stats
    everyone: list[dict[int, tuple[Tree, ...]]] = ready.part.exchange(
        "the statistics of the replicas", stats
    )
    return {
        stage: tuple(
            [
                _at(ready.device(stage), tree)
                for theirs in everyone
                for tree in theirs.get(stage, ())
            ]
        )
        for stage in stats
    }


def _at(device: torch.device, tree: Tree) -> Tree:
    """Move a tree that another process has sent to a device."""
    return tree if device.type == "cpu" else map_tensors(lambda tensor: tensor.to(device), tree)


def commits(plan: Plan, stage: int) -> bool:
    """Return whether a batch changes the state of a stage."""
    return plan.stages[stage].commit is not None and plan.train


def statistics_of(ready: Prepared, stage: int, reports: ByPlace) -> tuple[Tree, ...]:
    """Return the statistics of a stage, one per microbatch of this process."""
    return tuple([reports[stage, m].stats for m in range(ready.batch.num_pieces)])


def commit(ready: Prepared, stage: int, state: Tree, stats: tuple[Tree, ...]) -> Tree:
    """Call a stage's commit, and return the new state."""
    fold = ready.plan.stages[stage].commit
    assert fold is not None
    try:
        with torch.no_grad(), KeyedDraws(ready.commit_keys, stage, {}, 0):
            # Copy first: a commit that updates in place must not change the caller's state.
            new = fold(map_tensors(caller_copy, state), stats)
        if new is None:
            raise PlanError("the commit returned None; return the new state")
        return new
    except BaseException as error:
        fail(error, ready.at(stage, None, "commit"))
