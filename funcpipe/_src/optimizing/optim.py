"""Steps of torch.optim, norms and accumulation of gradients, over explicit trees."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_

from funcpipe._src.core.errors import FuncpipeError, PlanError, bullets, raise_all
from funcpipe._src.core.sparse_gradients import add_gradient
from funcpipe._src.core.tree import (
    Tree,
    cow_clone,
    flatten,
    leaves,
    map_leaves,
    named_leaves,
    structure,
)
from funcpipe._src.data.exchange import Exchange, alone, numbers
from funcpipe._src.data.result import Result
from funcpipe._src.optimizing.leaf_gradients import (
    LeafGradient,
    Ties,
    apart,
    by_leaf,
    distinct,
    misfits,
    taken_by,
)
from funcpipe._src.optimizing.norms import norm_of


def step(
    optimizer: torch.optim.Optimizer | None,
    params: Tree,
    grads: Tree | Result,
    *,
    max_norm: float | None = None,
    ties: Ties = (),
    scaler: torch.amp.GradScaler | None = None,
) -> Tensor:
    """One step of an optimizer over ``leaves(params)``; every ``.grad`` is None again afterwards.

    ``fp.step(optimizer, params, result)`` takes what it must know from the result: the gradients,
    the ties, and the loss scale. Gradients of a run with ``loss_scale`` are divided by it, and
    where one of any stage is inf or NaN nothing is stepped. Of a result of `ranks` every rank makes
    the step, each with an optimizer of its own leaves, and the norm is that of all.

    >>> params = ({"w": torch.ones(2)},)
    >>> norm = fp.step(torch.optim.SGD([params[0]["w"]], lr=1.0), params, ({"w": torch.tensor([3.0, 4.0])},))
    >>> float(norm), params[0]["w"].tolist()
    (5.0, [-2.0, -3.0])

    Args:
        optimizer: any torch optimizer that holds some of the leaves of ``params``; the others stay
            as they are. None on a rank of `ranks` where nothing is trained.
        params: the trees that were run.
        grads: a result of a run with backwards (or `accumulate`); or gradients alone, of the
            structure of params, None where there is none, of a run without loss scale. Not written
            to.
        max_norm: clip the norm over all stages to it, held by this optimizer or not.
        ties: for gradients alone, as in the plan: a tied parameter counts once in the norm.
        scaler: of a run with ``loss_scale=scaler.get_scale()``: it unscales, and skips the step.
            Call ``scaler.update()`` afterwards, once a batch.

    Returns:
        The norm before clipping, a 0-dim tensor; of the unscaled gradients, so not finite where the
        step is skipped.

    Raises:
        PlanError: the result has no gradients, or its run has stepped; params and grads differ in
            structure; a gradient has another shape, type or device than its parameter; no leaf of
            the optimizer has a gradient; the optimizer wants a closure (LBFGS) or sparse gradients;
            or an option is wrong.
    """
    exchange = grads.exchange if isinstance(grads, Result) else alone
    with exchange.telling(
        "fp.step"
    ):  # otherwise the other ranks would go on, a step ahead of this one
        check_options(optimizer, max_norm, scaler, optional=exchange != alone)
        return _step(optimizer, params, grads, max_norm, ties, scaler, exchange)


def _step(
    optimizer: torch.optim.Optimizer | None,
    params: Tree,
    grads: Tree | Result,
    max_norm: float | None,
    ties: Ties,
    scaler: torch.amp.GradScaler | None,
    exchange: Exchange,
) -> Tensor:
    """Step after `step` has checked its options."""
    scale = 1.0
    if isinstance(grads, Result):
        if grads.norm is not None:
            raise PlanError(
                "the run has stepped (its schedule has S), and its result is not stepped again: "
                "leave fp.step out, or run a schedule without step_params"
            )
        grads, ties, scale = _of_result(grads, ties, scaler)
    if structure(params) != structure(grads):
        named_leaves(
            params
        )  # raises for params that are no trees of tensors, with a better message
        raise PlanError(
            bullets(
                "params and grads differ in structure; give both of the same run:",
                apart(params, grads),
            )
        )
    try:
        return _stepped(optimizer, params, grads, ties, scale, max_norm, scaler, exchange)
    except FuncpipeError:
        raise
    except Exception:  # torch refuses a ``.grad`` that does not fit, without a name
        title = "these gradients do not fit their parameters, and nothing was stepped:"
        raise_all(title, misfits(params, grads), most=8)
        raise


def _stepped(
    optimizer: torch.optim.Optimizer | None,
    params: Tree,
    grads: Tree,
    ties: Ties,
    scale: float,
    max_norm: float | None,
    scaler: torch.amp.GradScaler | None,
    exchange: Exchange,
) -> Tensor:
    """Step the optimizer, and return the norm of the gradients."""
    entries = by_leaf(params, grads, ties)
    stepped = held_of(optimizer, entries) if entries or exchange == alone else []
    optimizer = optimizer if stepped else None
    for leaf in leaves(params):
        leaf.grad = None  # what an earlier backward left there is not stepped
    if scaler is not None:
        return _scaler_step(scaler, optimizer, entries, stepped, max_norm, exchange)
    if scale != 1.0:
        for entry in entries:
            entry.gradient = entry.gradient / scale
    norm = norm_of([(entry.stage, entry.gradient) for entry in entries if entry.counts], exchange)
    if optimizer is not None and (scale == 1.0 or bool(norm.isfinite())):
        apply_gradients(optimizer, stepped, norm, max_norm)
    return norm


def apply_gradients(
    optimizer: torch.optim.Optimizer,
    entries: Sequence[LeafGradient],
    norm: Tensor | None = None,
    max_norm: float | None = None,
) -> None:
    """Step leaves by their gradients, which stay as they are, clipped where the norm of all is
    above ``max_norm``."""
    entries = taken_by(optimizer, entries)
    try:
        for entry in entries:
            entry.leaf.grad = _writable(entry.gradient, optimizer, clips=max_norm is not None)
        if norm is not None and max_norm is not None:
            _clip(entries, norm, max_norm)
        optimizer.step()
    finally:
        for entry in entries:
            entry.leaf.grad = None


def _scaler_step(
    scaler: torch.amp.GradScaler,
    optimizer: torch.optim.Optimizer | None,
    entries: list[LeafGradient],
    stepped: list[LeafGradient],
    max_norm: float | None,
    exchange: Exchange,
) -> Tensor:
    """Likewise, by a scaler, which writes into gradients; the norm of all."""
    try:
        for entry in stepped:
            entry.leaf.grad = entry.gradient = entry.gradient.clone()
        _unscale(scaler, optimizer, entries, stepped, exchange)
        norm = norm_of(
            [(entry.stage, entry.gradient) for entry in entries if entry.counts], exchange
        )
        if max_norm is not None:
            _clip(stepped, norm, max_norm)
        if optimizer is not None:
            scaler.step(optimizer)
    finally:
        for entry in stepped:
            entry.leaf.grad = None
    return norm


def _writable(gradient: Tensor, optimizer: torch.optim.Optimizer, *, clips: bool) -> Tensor:
    """A gradient that may be written into, if somebody does."""
    return gradient.clone() if clips else cow_clone(gradient) if _may_write(optimizer) else gradient


def _clip(entries: Sequence[LeafGradient], norm: Tensor, max_norm: float) -> None:
    tensors = [entry.leaf for entry in entries]
    spread = any(hasattr(leaf, "device_mesh") for leaf in tensors)  # one call takes no two meshes
    clip_grads_with_norm_(tensors, max_norm, norm, foreach=False if spread else None)


def global_norm(grads: Tree | Result, *, ties: Ties = ()) -> Tensor:
    """The 2-norm of all gradients of all stages; tied leaves count once.

    >>> float(fp.global_norm(({"w": torch.tensor([3.0])}, {"w": torch.tensor([4.0])})))
    5.0

    Args:
        grads: a result, whose ties and loss scale it knows; or a tuple with one tree per stage,
            None where there is no gradient.
        ties: groups of (stage, path), whose gradients are equal; one stands for all.

    Returns:
        A 0-dim tensor on the device of the first gradient.

    Raises:
        PlanError: a tie names no leaf, the result has no gradients, or this is no tree.
    """
    if isinstance(grads, Result):
        exchange = grads.exchange
        grads, ties, scale = _of_result(grads, ties, None)
        return norm_of(distinct(grads, ties), exchange) / scale
    return norm_of(distinct(grads, ties), alone)


def accumulate(results: Iterable[Result]) -> Result:
    """Several runs over parts of one batch as one: exact, because every part counts by its weight.

    Losses and gradients are those of one run over all rows (those of sums are added); the state is
    that of the last run (give each run the state of the one before). Of evaluations, which have no
    gradients, it is the loss over all batches. What comes out can be accumulated further, so
    ``total = accumulate([total, result])`` after each run holds two sets of gradients at a time,
    however many the parts.

    >>> layer = fp.stage(lambda w, x: x * w)
    >>> plan = fp.make_plan([layer], fp.schedules.fill_drain(1, 2), loss=nn.functional.mse_loss, devices="cpu")
    >>> x = torch.arange(6.0)
    >>> parts = [fp.run(plan, (torch.tensor(2.0),), (rows, 0 * rows)) for rows in (x[:4], x[4:])]
    >>> total = fp.accumulate(parts)
    >>> total.weight, total.loss, total.grads  # the mean of 4 x**2 over six rows
    (6.0, tensor(36.6667), (tensor(36.6667),))

    Args:
        results: of the same plan and params, with the same leaves trained. Gradients of runs with
            other loss scales are brought to the scale of the last.

    Raises:
        PlanError: no results, some that are none, without a loss, that stepped, or of other params;
            runs with and without backwards.
    """
    runs = _results(results)
    last = runs[-1]
    weights = [run.weight for run in runs if run.weight is not None]
    total = sum(weights) if weights else None

    def add(values: Sequence[Tensor], factors: Sequence[float]) -> Tensor:
        out = values[0] * factors[0]
        for value, factor in zip(values[1:], factors[1:], strict=True):
            out = add_gradient(out, value, factor)
        return out

    parts = [weight / total for weight in weights] if total else [1.0] * len(runs)
    scaled = [
        part * last.loss_scale / run.loss_scale for part, run in zip(parts, runs, strict=True)
    ]
    with torch.no_grad():
        loss = add([run.loss for run in runs], parts)
        grads = map_leaves(
            lambda *row: None if row[0] is None else add(row, scaled), *(run.grads for run in runs)
        )
    unused = set(runs[0].unused).intersection(*(run.unused for run in runs[1:]))
    stats = replace(
        runs[0].stats,
        num_microbatches=sum(run.stats.num_microbatches for run in runs),
        seconds=sum(run.stats.seconds for run in runs),
        slots=tuple(
            max(column) for column in zip(*(run.stats.slots for run in runs), strict=False)
        ),
    )
    return replace(
        last,
        loss=loss,
        weight=total,
        losses=tuple(value for run in runs for value in run.losses),
        aux=tuple(value for run in runs for value in run.aux),
        grads=grads,
        unused=tuple(place for place in runs[0].unused if place in unused),
        outputs=None,
        timeline=None,
        stats=stats,
    )


def is_torchs(optimizer: torch.optim.Optimizer) -> bool:
    """Is this one of torch's own optimizers."""
    return type(optimizer).__module__.split(".")[:2] == ["torch", "optim"]


def _may_write(optimizer: torch.optim.Optimizer) -> bool:
    """May an optimizer write into gradients; of torch's own Adagrad does, and SGD with Nesterov's
    momentum (foreach)."""
    nesterov = any(group.get("nesterov") for group in optimizer.param_groups)
    writes = isinstance(optimizer, torch.optim.Adagrad) or (
        nesterov and isinstance(optimizer, torch.optim.SGD)
    )
    return writes or not is_torchs(optimizer)


def held_of(
    optimizer: torch.optim.Optimizer | None, entries: list[LeafGradient]
) -> list[LeafGradient]:
    """The entries whose leaves this optimizer holds. Raises PlanError where a step could change
    nothing."""
    if not entries:
        raise PlanError(
            "no leaf has a gradient, so there is nothing to step; run with trainable=True, or set "
            "requires_grad on leaves"
        )
    ids = _ids(optimizer)
    stepped = [entry for entry in entries if id(entry.leaf) in ids]
    if not stepped:
        raise PlanError(_HOLDS_NONE)
    return stepped


def refuse_unheld(optimizer: torch.optim.Optimizer, tensors: Sequence[Any]) -> None:
    """Raise PlanError where an optimizer holds none of some leaves."""
    ids = _ids(optimizer)
    if not any(id(leaf) in ids for leaf in tensors):
        raise PlanError(_HOLDS_NONE)


def _ids(optimizer: torch.optim.Optimizer | None) -> set[int]:
    """What an optimizer holds, by identity."""
    groups = [] if optimizer is None else optimizer.param_groups
    return {id(leaf) for group in groups for leaf in group["params"]}


_HOLDS_NONE = (
    "the optimizer holds none of the leaves that have a gradient; make it after fp.place, over "
    "the very params that are run: torch.optim.AdamW(fp.leaves(params))"
)


def _unscale(
    scaler: torch.amp.GradScaler,
    optimizer: torch.optim.Optimizer | None,
    entries: list[LeafGradient],
    stepped: list[LeafGradient],
    exchange: Exchange,
) -> None:
    """Divide all gradients by the scale; those that the optimizer holds in place, in their leaves'
    ``.grad``.

    A scaler looks for inf and NaN only at what the optimizer holds. It is all stages or none, so
    what is not finite elsewhere is brought before it as a NaN.
    """
    finite = exchange.finite("the scaler's unscaling", [entry.gradient for entry in entries])
    if optimizer is None:  # its scaler goes on with the others' all the same
        nothing = torch.zeros(1, requires_grad=True)
        nothing.grad = torch.full((1,), 0.0 if finite else float("nan"))
        optimizer, stepped = torch.optim.SGD([nothing]), []
        scaler.scale(torch.zeros(()))
        scaler.unscale_(optimizer)
        return
    first = stepped[0].gradient
    # Fused optimizers skip a step where exactly one device has found something (torch adds up what
    # all have found).
    held = (
        []
        if finite
        else [each.gradient for each in stepped if each.gradient.device != first.device]
    )
    own = [(gradient, gradient.clone()) for gradient in ([] if finite else [first, *held])]
    for gradient in held:
        gradient.zero_()
    if not finite:
        numbers(first).fill_(float("nan"))  # the memory of the gradient, which is coalesced
    if scaler.is_enabled():
        ids = {id(entry) for entry in stepped}
        for entry in entries:
            if id(entry) not in ids:
                entry.gradient = entry.gradient * (1.0 / scaler.get_scale())
    scaler.scale(
        torch.zeros((), device=first.device)
    )  # its scale becomes a tensor when it first scales one
    scaler.unscale_(optimizer)
    for gradient, before in own:  # the norm is of what they were
        gradient.copy_(before / scaler.get_scale())


def _of_result(result: Result, ties: Ties, scaler: Any) -> tuple[tuple[Tree, ...], Ties, float]:
    """The gradients of a result, its ties, and what is left to divide by."""
    if result.grads is None and result.norm is not None:
        raise PlanError(
            "the gradients were spent as run_batches stepped with them; their norm is in "
            "result.norm"
        )
    if result.grads is None:
        raise PlanError(
            "the result has no gradients: its schedule has no backwards; run a plan of a schedule "
            "that has them"
        )
    if scaler is None:
        return result.grads, ties or result.ties, result.loss_scale
    if scaler.is_enabled() and scaler.get_scale() != result.loss_scale:
        raise PlanError(
            f"the scaler's scale is {scaler.get_scale():g} and the run's was "
            f"{result.loss_scale:g}; run with loss_scale=scaler.get_scale(), and call "
            "scaler.update() after the step"
        )
    return result.grads, ties or result.ties, 1.0


def check_options(
    optimizer: torch.optim.Optimizer | None, max_norm: Any, scaler: Any, *, optional: bool
) -> None:
    """Raise PlanError for what `step` cannot step by; an ``optional`` optimizer may be None."""
    if max_norm is not None and not (isinstance(max_norm, (int, float)) and max_norm >= 0):
        raise PlanError(f"max_norm is a number from 0, or None; got {max_norm!r}")
    if scaler is not None and not isinstance(scaler, torch.amp.GradScaler):
        raise PlanError(f"scaler is a torch.amp.GradScaler, or None; got a {type(scaler).__name__}")
    if optimizer is None and optional:  # nothing may be trained at this process
        return
    if isinstance(optimizer, type):
        raise PlanError(
            f"{optimizer.__name__} is a class; make an optimizer: "
            f"torch.optim.{optimizer.__name__}(fp.leaves(params), lr=...)"
        )
    if optimizer is None or not (hasattr(optimizer, "param_groups") and hasattr(optimizer, "step")):
        raise PlanError(
            "step takes the optimizer first, fp.step(optimizer, params, result); got a "
            f"{type(optimizer).__name__}"
        )
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise PlanError(
            f"{type(optimizer).__name__} evaluates the loss itself, several times in a step, so "
            "there are no gradients to hand it; call its step(closure) with a closure that runs "
            "the plan, puts the gradients into .grad and returns the loss "
            "(docs/howto/optimizers.md)"
        )


def _results(results: Any) -> list[Result]:
    """The results as a list. Raises PlanError where they cannot be added."""
    if not isinstance(results, Iterable):
        raise PlanError(
            "accumulate takes results one after the other, accumulate([first, second]); got a "
            f"{type(results).__name__}"
        )
    runs = list(cast("Iterable[Any]", results))
    kinds = sorted({type(run).__name__ for run in runs if not isinstance(run, Result)})
    if kinds:
        raise PlanError(f"accumulate takes results of fp.run; among them came: {', '.join(kinds)}")
    if not runs or any(run.loss is None for run in runs):
        raise PlanError(
            "accumulate takes one or more results of plans with a loss; make_plan(loss=...)"
        )
    if any(run.norm is not None for run in runs):
        raise PlanError(
            "these runs stepped (their schedule has S), so their gradients are of other "
            "parameters each; accumulate runs of a schedule without step_params"
        )
    if len({run.weight is None for run in runs}) > 1:
        raise PlanError(
            "accumulate takes results of one plan; among these are means and sums (reduction='sum')"
        )
    trained = [[leaf is not None and leaf.shape for leaf in flatten(run.grads)[0]] for run in runs]
    for number, run in enumerate(runs):
        if structure(run.grads) != structure(runs[0].grads) or trained[number] != trained[0]:
            raise PlanError(
                f"result {number} has gradients of other leaves than result 0; accumulate runs of "
                "one plan with the same params and trainable="
            )
    return runs
