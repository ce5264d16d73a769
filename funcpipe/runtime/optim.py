"""From gradients to a step: torch.optim over explicit trees."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from funcpipe.core.errors import PlanError, bullets
from funcpipe.core.result import Result, RunStats
from funcpipe.core.tree import Tree, at, flatten, leaves, locations, map_leaves, structure

Ties = Sequence[Sequence[tuple[int, Any]]]


def step(
    optimizer: torch.optim.Optimizer,
    params: Tree,
    grads: Tree | Result,
    *,
    max_norm: float | None = None,
    ties: Ties = (),
    scaler: torch.amp.GradScaler | None = None,
) -> Tensor:
    """One step of an optimizer over ``leaves(params)``; every ``.grad`` is None again afterwards.

    ``fp.step(optimizer, params, result)`` takes what it must know from the result: the gradients, the ties, and the
    loss scale. Gradients of a run with ``loss_scale`` are divided by it, and where one of any stage is inf or NaN
    nothing is stepped.

    >>> import torch
    >>> params = ({"w": torch.ones(2)},)
    >>> norm = step(torch.optim.SGD([params[0]["w"]], lr=1.0), params, ({"w": torch.tensor([3.0, 4.0])},))
    >>> float(norm), params[0]["w"].tolist()
    (5.0, [-2.0, -3.0])

    Args:
        optimizer: any torch optimizer that holds some of the leaves of ``params``; the others stay as they are.
        params: the trees that were run.
        grads: a result of a run with backwards (or `accumulate`); or gradients alone, of the structure of params, None
            where there is none, of a run without loss scale. Not written to.
        max_norm: clip the norm over all stages to it, held by this optimizer or not.
        ties: for gradients alone, as in the plan: a tied parameter counts once in the norm.
        scaler: of a run with ``loss_scale=scaler.get_scale()``: it unscales, and skips the step. Call
            ``scaler.update()`` afterwards, once a batch.

    Returns:
        The norm before clipping, a 0-dim tensor; of the unscaled gradients, so not finite where the step is skipped.

    Raises:
        PlanError: the result has no gradients, params and grads differ in structure, no leaf that the optimizer holds
            has a gradient, it wants a closure (LBFGS), or an option is not what it should be.
    """
    _check_options(optimizer, max_norm, scaler)
    scale = 1.0
    if isinstance(grads, Result):
        grads, ties, scale = _of_result(grads, ties, scaler)
    every = leaves(params)
    if structure(params) != structure(grads):
        raise PlanError(
            bullets("params and grads differ in structure; give both of the same run:", _apart(params, grads))
        )
    found = _by_leaf(params, grads, ties)
    held = _held(optimizer, found)
    for leaf in every:
        leaf.grad = None  # what an earlier backward left there is not stepped
    try:
        for one in held:
            if max_norm is not None or scaler is not None:
                one.gradient = one.gradient.clone()  # clipping and unscaling write, and the caller's are the caller's
        if scale != 1.0:
            for one in found:
                one.gradient = one.gradient / scale
        for one in held:
            one.leaf.grad = one.gradient
        if scaler is not None:
            _unscale(scaler, optimizer, found, held)
        norm = get_total_norm([one.gradient for one in found if one.counts])
        if max_norm is not None:
            clip_grads_with_norm_(every, max_norm, norm)
        if scaler is not None:
            scaler.step(optimizer)
        elif scale == 1.0 or bool(norm.isfinite()):
            optimizer.step()
    finally:
        for leaf in every:
            leaf.grad = None
    return norm


def global_norm(grads: Tree | Result, *, ties: Ties = ()) -> Tensor:
    """The 2-norm of all gradients of all stages; tied leaves count once.

    >>> import torch
    >>> float(global_norm(({"w": torch.tensor([3.0])}, {"w": torch.tensor([4.0])})))
    5.0

    Args:
        grads: a result, whose ties and loss scale it knows; or a tuple with one tree per stage, None where there is no
            gradient.
        ties: groups of (stage, path), whose gradients are equal; one stands for all.

    Returns:
        A 0-dim tensor on the device of the first gradient.

    Raises:
        PlanError: a tie names no leaf, the result has no gradients, or this is no tree.
    """
    if isinstance(grads, Result):
        grads, ties, scale = _of_result(grads, ties, None)
        return global_norm(grads, ties=ties) / scale
    sums = _sums(grads, ties)
    found: dict[int, Tensor] = {}
    for gradient in leaves(grads):
        if isinstance(gradient, Tensor):
            found.setdefault(sums.get(id(gradient), id(gradient)), gradient)
    return get_total_norm(list(found.values()))


def accumulate(results: Iterable[Result]) -> Result:
    """Several runs over parts of one batch as one: exact, because every part counts by its weight.

    Losses and gradients are those of one run over all rows (those of sums are added); the state is that of the last run
    (give each run the state of the one before). What comes out can be accumulated further, so ``total =
    accumulate([total, result])`` after each run holds two sets of gradients at a time, however many the parts.

    Args:
        results: of the same plan and params, with the same leaves trained. Gradients of runs with other loss scales
            are brought to the scale of the last.

    Raises:
        PlanError: no results, some that are none, without gradients, or of other params.
    """
    given = _results(results)
    last = given[-1]
    weights = [one.weight for one in given if one.weight is not None]
    total = sum(weights) if weights else None

    def add(values: Sequence[Tensor], factors: Sequence[float]) -> Tensor:
        out = values[0] * factors[0]
        for value, factor in zip(values[1:], factors[1:], strict=True):
            out.add_(value, alpha=factor)
        return out

    parts = [weight / total for weight in weights] if total else [1.0] * len(given)
    scaled = [part * last.loss_scale / one.loss_scale for part, one in zip(parts, given, strict=True)]
    with torch.no_grad():
        loss = add([one.loss for one in given], parts)
        grads = map_leaves(lambda *row: None if row[0] is None else add(row, scaled), *(one.grads for one in given))
    unused = set(given[0].unused).intersection(*(one.unused for one in given[1:]))
    first = given[0].stats
    stats = RunStats(
        first.executor,
        first.reason,
        first.threads_per_lane,
        sum(one.stats.num_microbatches for one in given),
        sum(one.stats.seconds for one in given),
        tuple(max(column) for column in zip(*(one.stats.slots for one in given), strict=False)),
    )
    return replace(
        last,
        loss=loss,
        weight=total,
        losses=tuple(value for one in given for value in one.losses),
        aux=tuple(value for one in given for value in one.aux),
        grads=grads,
        unused=tuple(place for place in given[0].unused if place in unused),
        outputs=None,
        timeline=None,
        stats=stats,
    )


@dataclass
class _LeafGradient:
    """A leaf of the parameters with its gradient.

    Attributes:
        leaf: the tensor that the optimizer may hold.
        gradient: of all its places.
        stage: where it was met first.
        sums: which gradients are in it already, see `_sums`.
        counts: in the norm; not so the replicas of a tied parameter.
    """

    leaf: Tensor
    gradient: Tensor
    stage: int
    sums: set[int]
    counts: bool


def _by_leaf(params: Tree, grads: Tree, ties: Ties) -> list[_LeafGradient]:
    """Each leaf that has a gradient, once.

    One tensor at two places of a stage: its gradient is the sum. In two stages it is tied (a run refuses it otherwise),
    and every place was given the whole sum already.
    """
    sums = _sums(grads, ties)
    counted: set[int] = set()
    found: dict[int, _LeafGradient] = {}
    stages = isinstance(params, (tuple, list))
    for stage, (own, theirs) in enumerate(zip(params, grads, strict=True) if stages else [(params, grads)]):
        for leaf, gradient in zip(flatten(own)[0], flatten(theirs)[0], strict=True):
            if not isinstance(leaf, Tensor) or gradient is None:
                continue
            key = sums.get(id(gradient), id(gradient))
            one = found.get(id(leaf))
            if one is None:
                found[id(leaf)] = _LeafGradient(leaf, gradient, stage, {key}, key not in counted)
            elif one.stage == stage and key not in one.sums:
                one.gradient = one.gradient + gradient
                one.sums.add(key)
            counted.add(key)
    return list(found.values())


def _sums(grads: Tree, ties: Ties) -> dict[int, int]:
    """Gradients (by id) that are the same sum as others: one number for each tie."""
    out: dict[int, int] = {}
    for group in ties:
        members: list[Any] = []
        for stage, path in group:
            try:
                members.append(at(grads[stage], path))
            except (KeyError, IndexError, TypeError, AttributeError):
                raise PlanError(
                    f"ties name {path!r} of stage {stage}, where grads have no leaf; give the plan's: ties=plan.ties"
                ) from None
        out.update((id(member), id(members[0])) for member in members)
    return out


def _held(optimizer: torch.optim.Optimizer, found: list[_LeafGradient]) -> list[_LeafGradient]:
    """What this optimizer holds. Refuses a step that could change nothing."""
    if not found:
        raise PlanError(
            "no leaf has a gradient, so there is nothing to step; run with trainable=True, or set requires_grad on "
            "leaves"
        )
    mine = {id(leaf) for group in optimizer.param_groups for leaf in group["params"]}
    held = [one for one in found if id(one.leaf) in mine]
    if not held:
        raise PlanError(
            "the optimizer holds none of the leaves that have a gradient; make it after fp.place, over the very "
            "params that are run: torch.optim.AdamW(fp.leaves(params))"
        )
    return held


def _unscale(
    scaler: torch.amp.GradScaler,
    optimizer: torch.optim.Optimizer,
    found: list[_LeafGradient],
    held: list[_LeafGradient],
) -> None:
    """Divide all gradients by the scale; those that the optimizer holds in place, in their leaves' ``.grad``.

    A scaler looks for inf and NaN only at what the optimizer holds. It is all stages or none, so what is not finite
    elsewhere is brought before it as a NaN (a finite norm times 0 adds nothing).
    """
    mine = {id(one) for one in held}
    others = [one for one in found if id(one) not in mine]
    first = held[0].gradient
    if others and scaler.is_enabled():
        factor = 1.0 / scaler.get_scale()
        for one in others:
            one.gradient = one.gradient * factor
        first.add_(get_total_norm([one.gradient for one in others]).to(first.device) * 0)
    scaler.scale(torch.zeros((), device=first.device))  # its scale becomes a tensor with the first thing it scales
    scaler.unscale_(optimizer)


def _of_result(result: Result, ties: Ties, scaler: Any) -> tuple[tuple[Tree, ...], Ties, float]:
    """The gradients of a result, its ties, and what is left to divide by."""
    if result.grads is None:
        raise PlanError(
            "the result has no gradients: its schedule has no backwards; run a plan of a schedule that has them"
        )
    if scaler is None:
        return result.grads, ties or result.ties, result.loss_scale
    if scaler.is_enabled() and scaler.get_scale() != result.loss_scale:
        raise PlanError(
            f"the scaler's scale is {scaler.get_scale():g} and the run's was {result.loss_scale:g}; run with "
            "loss_scale=scaler.get_scale(), and call scaler.update() after the step"
        )
    return result.grads, ties or result.ties, 1.0


def _apart(params: Tree, grads: Tree) -> list[str]:
    """Where two trees differ, in words."""
    named = [dict.fromkeys(locations(tree, "")) for tree in (params, grads)]
    lines = [f"params{place} has no gradient: grads have no leaf there" for place in named[0] if place not in named[1]]
    lines += [f"grads{place} belongs to no leaf of params" for place in named[1] if place not in named[0]]
    kinds = [type(tree).__name__ for tree in (params, grads)]
    return lines[:8] or [f"params is a {kinds[0]}, grads a {kinds[1]}, with the same leaves in other containers"]


def _check_options(optimizer: torch.optim.Optimizer, max_norm: Any, scaler: Any) -> None:
    if max_norm is not None and not (isinstance(max_norm, (int, float)) and max_norm >= 0):
        raise PlanError(f"max_norm is a number from 0, or None; got {max_norm!r}")
    if scaler is not None and not isinstance(scaler, torch.amp.GradScaler):
        raise PlanError(f"scaler is a torch.amp.GradScaler, or None; got a {type(scaler).__name__}")
    if not isinstance(optimizer, type) and not (hasattr(optimizer, "param_groups") and hasattr(optimizer, "step")):
        raise PlanError(
            f"step takes the optimizer first, fp.step(optimizer, params, result); got a {type(optimizer).__name__}"
        )
    if isinstance(optimizer, type):
        raise PlanError(
            f"{optimizer.__name__} is a class; make an optimizer: torch.optim.{optimizer.__name__}(fp.leaves(params), "
            "lr=...)"
        )
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise PlanError(
            f"{type(optimizer).__name__} evaluates the loss itself, several times in a step, so there are no "
            "gradients to hand it; call its step(closure) with a closure that runs the plan, puts the gradients into "
            ".grad and returns the loss (docs/howto/optimizers.md)"
        )


def _results(results: Any) -> list[Result]:
    """Results that may be added. Raises PlanError."""
    if not isinstance(results, Iterable):
        raise PlanError(
            f"accumulate takes results one after the other, accumulate([first, second]); got a {type(results).__name__}"
        )
    given = list(cast("Iterable[Any]", results))
    strange = sorted({type(one).__name__ for one in given if not isinstance(one, Result)})
    if strange:
        raise PlanError(f"accumulate takes results of fp.run; among them came: {', '.join(strange)}")
    if not given or any(one.grads is None for one in given):
        raise PlanError("accumulate takes one or more results of runs with backwards")
    if len({one.weight is None for one in given}) > 1:
        raise PlanError("accumulate takes results of one plan; among these are means and sums (reduction='sum')")
    trained = [[leaf is not None and leaf.shape for leaf in flatten(one.grads)[0]] for one in given]
    for number, one in enumerate(given):
        if structure(one.grads) != structure(given[0].grads) or trained[number] != trained[0]:
            raise PlanError(
                f"result {number} has gradients of other leaves than result 0; accumulate runs of one plan with the "
                "same params and trainable="
            )
    return given
