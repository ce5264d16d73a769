"""The end of a run: losses folded, gradients scaled and tied, statistics committed, outputs
merged."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor

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

ByPlace = Mapping[tuple[int, int], Any]
"""Values by (stage, microbatch)."""


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
) -> Result:
    """The result of a run, from the reports of its forwards and, with ``backward``, the sums of its
    backwards.

    It has the ``timeline`` that was measured, and the steps that were made on lanes. The state of
    stages that lanes have ``committed`` is that; None: they do not. It waits for the ``reductions``
    that lanes have begun, and begins the reductions of the other stages.
    """
    plan, count = ready.plan, ready.batch.num_pieces
    last = plan.num_stages - 1
    stepped = () if stepping is None else stepping.stepped
    refuse_writes(
        ready,
        "a stage wrote into its parameters; a stage is pure, so compute with a copy:",
        but=stepped,
    )
    if stepping is not None and stepping.spends:
        sums, (trained, untouched) = None, stepping.reached
    else:
        sums = gradient_sums(ready, reductions or {}) if backward else {}
        untouched = unused_leaves(ready) if backward else []
        trained = sum(gradient is not None for row in sums.values() for gradient in row)
    # A list: a generator would make another error of a StopIteration.
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
    factor = 1.0 / weight if late and weight else 1.0
    grads = gradients(ready, sums, factor) if backward and sums is not None else None
    if backward:  # last: any other error says more
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
    return Result(loss, weight, losses, aux, grads, *facts)


class Ended(NamedTuple):
    """What a process knows when its lanes are done.

    Attributes:
        losses: of each microbatch, where the last stage is here; for other processes in one piece
            where they can be.
        sides: auxiliary losses: (stage, microbatch among those of all replicas, sum, weight).
        trained: how many leaves have a gradient.
        unused: those of these that no backward reached.
    """

    losses: tuple[Loss, ...] | Columns
    sides: tuple[tuple[int, int, Any, Any], ...]
    trained: int
    unused: tuple[UnusedLeaf, ...]


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
    """Refuse a loss that hangs on no parameter, as torch's ``backward`` does. Raises PlanError."""
    if any(each.trained for each in ended) and not any(
        each.trained > len(each.unused) for each in ended
    ):
        raise PlanError(
            "no gradient reached any of the parameters: the loss hangs on none of them. Is it "
            "computed under torch.no_grad, by .detach(), .item() or numpy, or from the target "
            "alone? Without gradients: fp.make_plan(stages, schedule.forwards())"
        )


def _no_backward(*_: Any, **__: Any) -> None:
    """``result.loss.backward()``: raises PlanError, which says where the gradients are, in place of
    torch's error."""
    raise PlanError(
        "the backwards have run already: the gradients are in result.grads; fp.step(optimizer, "
        "params, result) makes the step. For a loss of your own around a pipeline there are "
        "fp.vjp and fp.Pipe"
    )


def release(ready: Prepared) -> None:
    """Let the stages forget their tensors, once the results are taken out."""
    for bound in ready.bounds.values():
        bound.release()


def refuse_writes(ready: Prepared, title: str, *, but: Collection[int] = ()) -> None:
    """Refuse parameters and states that were written into since they were bound, but for parameters
    of some stages.

    Raises:
        PlanError: it names them.
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
    """Loss, weight, losses and aux of the batch, and whether the loss function returned the
    weights."""
    shares = ready.shares._replace(first=0)
    if ready.plan.loss is None:
        return None, None, (), (), False
    reported = [loss for each in ended for loss in apart(each.losses)]
    weighted = [loss.weight is not None for loss in reported]
    if any(weighted) and not all(weighted):
        raise BatchError(
            "the loss returned a mean for some microbatches and (sum, weight) for others; return "
            "one form always"
        )
    late = weighted[0] and not shares.explicit
    weights = [float(loss.weight) for loss in reported] if late else []
    invalid = [
        f"{value} for {ready.batch.named(m)}"
        for m, value in enumerate(weights)
        if not 0 <= value < float("inf")
    ]
    raise_all(
        "the loss returned (sum, weight) with weights that are no numbers from 0:",
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
    """A sum of one number, as one without axes."""
    return total.reshape(()) if total.dim() else total


def _mean(loss: Loss, shares: Shares, microbatch: int) -> Any:
    """A microbatch's loss as a mean; as a sum where nothing divides the sums."""
    total = _scalar(loss.sum)
    if loss.weight is None and not (shares.summed and shares.explicit):
        return total
    weight = float(shares.weight(microbatch) if loss.weight is None else loss.weight)
    return total / weight if weight else torch.zeros_like(total)


def _add_sides(ready: Prepared, ended: Sequence[Ended], total: Any, late: bool) -> Any:
    """Add the auxiliary losses of all stages to the total: each a mean, multiplied by the
    microbatch's share."""
    by_place = {
        (stage, m): (side, weight) for each in ended for stage, m, side, weight in each.sides
    }
    for stage, m in sorted(by_place):
        if late or ready.shares.total is None:
            reason = (
                "how much its microbatch counts is not known while the loss itself brings the "
                "weights"
                if late
                else "it is a mean, and the loss is a sum, which nothing divides"
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
    """The gradients as the backwards summed them, over all replicas, by stage that is here."""
    # All sums begin before the run waits for the first.
    every = {stage: reductions.get(stage) or ready.reduce(stage) for stage in ready.bounds}
    return {stage: reduction.sums_at_end() for stage, reduction in every.items()}


def gradients(
    ready: Prepared, sums: dict[int, list[Tensor | None]], scale: float = 1.0
) -> tuple[Tree, ...]:
    """The gradient trees, multiplied by ``scale``, tied leaves summed; None for stages that are not
    here."""
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
        # Nobody steps before all have their sums.
        ready.part.exchange("the sums of tied leaves", None)
    given = {stage: spread.as_given(sums[stage]) for stage, spread in ready.spread.items()}
    specs = {stage: bound.params.spec for stage, bound in ready.bounds.items()}
    trees = {stage: unflatten(specs[stage], row) for stage, row in {**sums, **given}.items()}
    return tuple([trees.get(stage) for stage in range(ready.plan.num_stages)])


def _tie(ready: Prepared, sums: dict[int, list[Tensor | None]], number: int) -> None:
    """Give every leaf of a tie that is here the sum of all."""
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
    for place in parts:  # each stage gets a tensor of its own: clipping in place must not act twice
        s, n = here[place]
        sums[s][n] = total.to(parts[place].device, copy=True)


def _statistics(ready: Prepared, reports: ByPlace) -> dict[int, tuple[Tree, ...]]:
    """For each stage that is here and keeps any, the statistics of all microbatches, those of all
    replicas."""
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
    """What came from processes, on a device."""
    return tree if device.type == "cpu" else map_tensors(lambda tensor: tensor.to(device), tree)


def commits(plan: Plan, stage: int) -> bool:
    """Does a batch change the state of a stage."""
    return plan.stages[stage].commit is not None and plan.train


def statistics_of(ready: Prepared, stage: int, reports: ByPlace) -> tuple[Tree, ...]:
    """The statistics of a stage, of all microbatches that are here."""
    return tuple([reports[stage, m].stats for m in range(ready.batch.num_pieces)])


def commit(ready: Prepared, stage: int, state: Tree, stats: tuple[Tree, ...]) -> Tree:
    """The state of a stage after a batch."""
    fold = ready.plan.stages[stage].commit
    assert fold is not None
    try:
        with torch.no_grad():
            # A copy: a commit that updates in place must not reach the caller's state.
            return fold(map_tensors(caller_copy, state), stats)
    except BaseException as error:
        fail(error, ready.at(stage, None, "commit"))
