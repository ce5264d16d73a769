"""`step`, `global_norm` and `accumulate`: torch optimizers and gradients over explicit trees.

Steps within a run, by lanes, are in `stepping`.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
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
from funcpipe._src.optimizing.functional import FunctionalOptimizer
from funcpipe._src.optimizing.leaf_gradients import (
    LeafGradient,
    Ties,
    apart,
    by_leaf,
    distinct,
    leaf_numbers,
    misfits,
    refuse_one_rank,
    taken_by,
)
from funcpipe._src.optimizing.norms import norm_of
from funcpipe._src.optimizing.same_options import compared


def step(
    optimizer: torch.optim.Optimizer | None,
    params: Tree,
    grads: Tree | Result,
    *,
    max_norm: float | None = None,
    ties: Ties = (),
    scaler: torch.amp.GradScaler | None = None,
) -> Tensor:
    """Make one step of a torch optimizer with the gradients of a run.

    `step` reads the gradients, the ties and the loss scale from the result. As in torch, the leaves
    in ``result.unused`` keep their values and their optimizer state. After a run with
    ``loss_scale``, `step` divides the gradients by the scale. If any gradient of any stage is then
    inf or NaN, no parameter changes. Every ``.grad`` of ``params`` is None afterwards. With
    `ranks`, all ranks call `step`, each with an optimizer of its own leaves, and the norm is the
    norm over all ranks.

    >>> params = ({"w": torch.ones(2)},)
    >>> norm = fp.step(torch.optim.SGD([params[0]["w"]], lr=1.0), params, ({"w": torch.tensor([3.0, 4.0])},))
    >>> float(norm), params[0]["w"].tolist()
    (5.0, [-2.0, -3.0])

    Args:
        optimizer: a torch optimizer with some of the leaves of ``params``. Other leaves do not
            change. None on a rank of `ranks` without trained leaves.
        params: the trees that were given to the run.
        grads: a `Result` of a run with backwards, or of `accumulate`. Or a tree of gradients with
            the structure of ``params``, None for a leaf that is not stepped, of a run without loss
            scale and without `ranks`. `step` does not write to gradients.
        max_norm: the largest norm. Larger gradients are scaled down to this norm. The norm is over
            all stages, also over leaves that the optimizer does not have. None, the default: no
            clipping.
        ties: groups of tied leaves, as in the plan, for a tree of gradients. A tied gradient counts
            once in the norm. A `Result` has its own ties.
        scaler: a ``torch.amp.GradScaler``, after a run with ``loss_scale=scaler.get_scale()``. The
            scaler unscales the gradients, and skips the step for inf or NaN. Call
            ``scaler.update()`` afterwards, once per batch.

    Returns:
        The norm of the unscaled gradients before clipping, a 0-dim tensor. The norm is inf or NaN
        if the step was skipped.

    Raises:
        PlanError: the result has no gradients, or its run has already stepped; ``params`` and
            ``grads`` differ in structure; a gradient has another shape, type or device than its
            parameter; no leaf of the optimizer has a gradient; the optimizer needs a closure, such
            as LBFGS, or sparse gradients; an option has a wrong value; or `ranks` are open and
            ``params`` and ``grads`` lack the stages of other ranks.
        RanksError: the ranks give different ``max_norm``, have different options for copies of one
            parameter, or make other calls. Nothing has stepped.
    """
    exchange = grads.exchange if isinstance(grads, Result) else alone
    # Tell errors: otherwise the other ranks would go on, one step ahead of this one.
    with exchange.telling("fp.step"):
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
    """Make the step after `step` has checked its options."""
    scale, unused = 1.0, ()
    if isinstance(grads, Result):
        if grads.norm is not None:
            raise PlanError(
                "the run has already stepped (its schedule has S), so its result cannot be stepped "
                "again; leave fp.step out, or run a schedule without step_params"
            )
        unused = grads.unused
        grads, ties, scale = _of_result(grads, ties, scaler)
    else:
        refuse_one_rank("fp.step(optimizer, params, result)", grads, params)
    if structure(params) != structure(grads):
        named_leaves(params)  # raises a better message if params are not trees of tensors
        if isinstance(grads, Tensor) and not isinstance(params, Tensor):
            raise PlanError(
                "fp.step takes the result of the run, or its gradients; got one tensor (a loss?): "
                "fp.step(optimizer, params, result)"
            )
        raise PlanError(
            bullets(
                "params and grads differ in structure; give params and result of the same run:",
                apart(params, grads),
            )
        )
    entries = by_leaf(params, grads, ties, leaf_numbers(params, unused))
    try:
        options = compared(optimizer, params, entries, ties, exchange)
        return _stepped(optimizer, params, entries, scale, max_norm, scaler, exchange, options)
    except FuncpipeError:
        raise
    except Exception:  # torch refuses a ``.grad`` that does not fit, but does not name the leaf
        title = "these gradients do not fit their parameters, and nothing was stepped:"
        raise_all(title, misfits(params, grads), most=8)
        raise


def _stepped(
    optimizer: torch.optim.Optimizer | None,
    params: Tree,
    entries: list[LeafGradient],
    scale: float,
    max_norm: float | None,
    scaler: torch.amp.GradScaler | None,
    exchange: Exchange,
    options: Mapping[str, Any],
) -> Tensor:
    """Step the optimizer, and return the norm of the gradients.

    ``options`` are keywords of `norm_of` that compare the options of all ranks.
    """
    stepped = held_of(optimizer, entries) if entries or exchange == alone else []
    optimizer = optimizer if stepped else None
    for leaf in leaves(params):
        leaf.grad = None  # a gradient of an earlier ``backward()`` must not be stepped
    if scaler is not None:
        return _scaler_step(scaler, optimizer, entries, stepped, max_norm, exchange, options)
    if scale != 1.0:
        for entry in entries:
            entry.gradient = entry.gradient / scale
    norm = norm_of(
        [(entry.stage, entry.gradient) for entry in entries if entry.counts],
        exchange,
        _about("the norm of the gradients", max_norm),
        **options,
    )
    if optimizer is not None and (scale == 1.0 or bool(norm.isfinite())):
        apply_gradients(optimizer, stepped, norm, max_norm)
    return norm


def apply_gradients(
    optimizer: torch.optim.Optimizer,
    entries: Sequence[LeafGradient],
    norm: Tensor | None = None,
    max_norm: float | None = None,
) -> None:
    """Step leaves with their gradients, clipped if ``norm`` is above ``max_norm``.

    Does not write to the gradients: an optimizer that may write gets copies.
    """
    entries = taken_by(optimizer, [entry for entry in entries if entry.needs_step])
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
    options: Mapping[str, Any],
) -> Tensor:
    """Make the step with a scaler, and return the norm. Gradients are copied, because the scaler
    writes to them."""
    stepped = [entry for entry in stepped if entry.needs_step]
    optimizer = optimizer if stepped else None  # torch's scaler refuses a step without gradients
    try:
        for entry in stepped:
            entry.leaf.grad = entry.gradient = entry.gradient.clone()
        about = _about("the scaler's unscaling", max_norm)
        finite = exchange.finite(about, [entry.gradient for entry in entries])
        _unscale(scaler, optimizer, entries, stepped, finite=finite)
        norm = norm_of(
            [(entry.stage, entry.gradient) for entry in entries if entry.counts],
            exchange,
            **options,
        )
        if max_norm is not None:
            _clip(stepped, norm, max_norm)
        if optimizer is not None:
            scaler.step(optimizer)
    finally:
        for entry in stepped:
            entry.leaf.grad = None
    return norm


def _about(subject: str, max_norm: float | None) -> str:
    """Name an exchange with its ``max_norm``, so that ranks with different ones raise RanksError."""
    return f"{subject} for fp.step(max_norm={None if max_norm is None else float(max_norm)})"


def _writable(gradient: Tensor, optimizer: torch.optim.Optimizer, *, clips: bool) -> Tensor:
    """Return the gradient, or a copy if clipping or the optimizer may write to it."""
    return gradient.clone() if clips else cow_clone(gradient) if _may_write(optimizer) else gradient


def _clip(entries: Sequence[LeafGradient], norm: Tensor, max_norm: float) -> None:
    tensors = [entry.leaf for entry in entries]
    # torch's foreach kernels refuse DTensors of two meshes in one call.
    spread = any(hasattr(leaf, "device_mesh") for leaf in tensors)
    clip_grads_with_norm_(tensors, max_norm, norm, foreach=False if spread else None)


def global_norm(grads: Tree | Result, *, ties: Ties = ()) -> Tensor:
    """Compute the 2-norm of the gradients of all stages. Tied leaves count once.

    >>> float(fp.global_norm(({"w": torch.tensor([3.0])}, {"w": torch.tensor([4.0])})))
    5.0

    Args:
        grads: a `Result`, whose ties and loss scale are used. Or a tuple with one tree per stage,
            None for a leaf without gradient. With `ranks`, all ranks call this with a `Result`.
        ties: groups of (stage, path) with equal gradients, for a tuple of trees. The first of each
            group counts.

    Returns:
        A 0-dim tensor on the device of the first gradient.

    Raises:
        PlanError: a tie names a leaf that does not exist, the result has no gradients, ``grads`` is
            not a tree, or `ranks` are open and ``grads`` lacks the stages of other ranks.
    """
    if isinstance(grads, Result):
        exchange = grads.exchange
        grads, ties, scale = _of_result(grads, ties, None)
        return norm_of(distinct(grads, ties), exchange) / scale
    refuse_one_rank("fp.global_norm(result)", grads)
    return norm_of(distinct(grads, ties), alone)


def accumulate(results: Iterable[Result]) -> Result:
    """Combine the results of several runs over parts of one batch into one result.

    Loss and gradients equal those of one run over all rows, up to rounding, because each part
    counts by its weight. Losses with ``reduction="sum"`` are added. The state is the state of the
    last run, so give each run the state of the previous run. Results of evaluations give the loss
    over all batches. To keep only two sets of gradients in memory, call ``total =
    fp.accumulate([total, result])`` after each run.

    >>> layer = fp.stage(lambda w, x: x * w)
    >>> plan = fp.make_plan([layer], fp.schedules.fill_drain(1, 2), loss=nn.functional.mse_loss, devices="cpu")
    >>> x = torch.arange(6.0)
    >>> parts = [fp.run(plan, (torch.tensor(2.0),), (rows, 0 * rows)) for rows in (x[:4], x[4:])]
    >>> total = fp.accumulate(parts)
    >>> total.weight, total.loss, total.grads  # the mean of 4 x**2 over six rows
    (6.0, tensor(36.6667), (tensor(36.6667),))

    Args:
        results: results of the same plan with the same params and trained leaves. Gradients of
            other loss scales are converted to the loss scale of the last result.

    Returns:
        A `Result` without outputs and timeline. ``losses`` and ``aux`` have an entry for each
        microbatch of all runs.

    Raises:
        PlanError: there are no results; one is not a `Result`, has no loss, or is of a run that
            stepped; gradients are of other leaves, or only some results have gradients.
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
    """Return whether this is one of torch's own optimizers."""
    return type(optimizer).__module__.split(".")[:2] == ["torch", "optim"]


def steps_by_leaf(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer updates each leaf separately, with all state in its ``state``."""
    return is_torchs(optimizer) or type(optimizer) is FunctionalOptimizer


def _may_write(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer may write to gradients.

    Of torch's own optimizers, Adagrad and SGD with Nesterov momentum (foreach) write to them.
    """
    nesterov = any(group.get("nesterov") for group in optimizer.param_groups)
    writes = isinstance(optimizer, torch.optim.Adagrad) or (
        nesterov and isinstance(optimizer, torch.optim.SGD)
    )
    return writes or not is_torchs(optimizer)


def held_of(
    optimizer: torch.optim.Optimizer | None, entries: list[LeafGradient]
) -> list[LeafGradient]:
    """Return the entries whose leaves this optimizer has. Raises PlanError if there are none."""
    if not entries:
        raise PlanError(
            "no leaf has a gradient, so there is nothing to step; run with trainable=True, or set "
            "requires_grad on leaves"
        )
    ids = {*map(id, held_by(optimizer))}
    stepped = [entry for entry in entries if id(entry.leaf) in ids]
    if not stepped:
        raise PlanError(_HOLDS_NONE)
    return stepped


def refuse_unheld(optimizer: torch.optim.Optimizer, tensors: Sequence[Any]) -> None:
    """Raise PlanError if an optimizer has none of some leaves."""
    ids = {*map(id, held_by(optimizer))}
    if not any(id(leaf) in ids for leaf in tensors):
        raise PlanError(_HOLDS_NONE)


def held_by(optimizer: torch.optim.Optimizer | None) -> list[Tensor]:
    """Return all leaves of an optimizer."""
    return [
        leaf
        for group in (optimizer.param_groups if optimizer is not None else ())
        for leaf in group["params"]
    ]


_HOLDS_NONE = (
    "the optimizer holds none of the leaves that have a gradient; make it after fp.place, with "
    "the params that you give to fp.run: torch.optim.AdamW(fp.leaves(params))"
)


def _unscale(
    scaler: torch.amp.GradScaler,
    optimizer: torch.optim.Optimizer | None,
    entries: list[LeafGradient],
    stepped: list[LeafGradient],
    *,
    finite: bool,
) -> None:
    """Divide all gradients by the scale. Gradients of the optimizer's leaves are divided in place.

    A scaler looks for inf and NaN only in gradients of the optimizer's leaves. But all stages step
    or none does. So if any gradient is not ``finite``, one gradient of the optimizer gets a NaN.
    """
    if optimizer is None:  # the scalers of all ranks must see the same steps, so use a dummy leaf
        nothing = torch.zeros(1, requires_grad=True)
        nothing.grad = torch.full((1,), 0.0 if finite else float("nan"))
        optimizer, stepped = torch.optim.SGD([nothing]), []
        scaler.scale(torch.zeros(()))
        scaler.unscale_(optimizer)
        return
    first = stepped[0].gradient
    # Fused optimizers skip a step only if the sum of found_inf over devices is exactly 1. So only
    # the device of the first gradient may report a NaN; gradients elsewhere become zeros.
    held = (
        []
        if finite
        else [each.gradient for each in stepped if each.gradient.device != first.device]
    )
    own = [(gradient, gradient.clone()) for gradient in ([] if finite else [first, *held])]
    for gradient in held:
        gradient.zero_()
    if not finite:
        numbers(first).fill_(float("nan"))  # in place: a sparse gradient is coalesced here
    if scaler.is_enabled():
        ids = {id(entry) for entry in stepped}
        for entry in entries:
            if id(entry) not in ids:
                entry.gradient = entry.gradient * (1.0 / scaler.get_scale())
    scaler.scale(torch.zeros((), device=first.device))  # a scaler makes its scale tensor lazily
    scaler.unscale_(optimizer)
    for gradient, before in own:  # the norm must be of the original gradients
        gradient.copy_(before / scaler.get_scale())


def _of_result(result: Result, ties: Ties, scaler: Any) -> tuple[tuple[Tree, ...], Ties, float]:
    """Return the gradients of a result, its ties, and the scale that `step` must divide by."""
    if result.grads is None and result.norm is not None:
        raise PlanError(
            "run_batches has already stepped with these gradients and dropped them; their norm is "
            "in result.norm"
        )
    if result.grads is None:
        raise PlanError(
            "the result has no gradients: its schedule has no backwards; run a plan whose schedule "
            "has backwards"
        )
    if scaler is None:
        return result.grads, ties or result.ties, result.loss_scale
    if scaler.is_enabled() and scaler.get_scale() != result.loss_scale:
        raise PlanError(
            f"the scaler's scale is {scaler.get_scale():g}, but the run had the loss scale "
            f"{result.loss_scale:g}; run with loss_scale=scaler.get_scale(), and call "
            "scaler.update() after the step"
        )
    return result.grads, ties or result.ties, 1.0


def check_options(
    optimizer: torch.optim.Optimizer | None, max_norm: Any, scaler: Any, *, optional: bool
) -> None:
    """Raise PlanError for options that `step` cannot use. An ``optional`` optimizer may be None."""
    if max_norm is not None and not (isinstance(max_norm, (int, float)) and max_norm >= 0):
        raise PlanError(f"max_norm is a number from 0, or None; got {max_norm!r}")
    if scaler is not None and not isinstance(scaler, torch.amp.GradScaler):
        raise PlanError(f"scaler is a torch.amp.GradScaler, or None; got a {type(scaler).__name__}")
    if optimizer is None and optional:  # this process may train nothing
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
            f"{type(optimizer).__name__} evaluates the loss several times in a step, so fp.step "
            "cannot give it gradients; call its step(closure) with a closure that runs the plan, "
            "puts the gradients into .grad and returns the loss (docs/howto/optimizers.md)"
        )


def _results(results: Any) -> list[Result]:
    """Return the results as a list. Raises PlanError if they cannot be combined."""
    if not isinstance(results, Iterable):
        raise PlanError(
            "accumulate takes an iterable of results, accumulate([first, second]); got a "
            f"{type(results).__name__}"
        )
    runs = list(cast("Iterable[Any]", results))
    kinds = sorted({type(run).__name__ for run in runs if not isinstance(run, Result)})
    if kinds:
        raise PlanError(
            f"accumulate takes results of fp.run; some are not results: {', '.join(kinds)}"
        )
    if not runs or any(run.loss is None for run in runs):
        raise PlanError(
            "accumulate takes one or more results of plans with a loss; make_plan(loss=...)"
        )
    if any(run.norm is not None for run in runs):
        raise PlanError(
            "these runs have already stepped (their schedule has S), so each has gradients at "
            "other parameters; accumulate runs of a schedule without step_params"
        )
    if len({run.weight is None for run in runs}) > 1:
        raise PlanError(
            "accumulate takes results of one plan; some of these losses are means and some are "
            "sums (reduction='sum')"
        )
    trained = [[leaf is not None and leaf.shape for leaf in flatten(run.grads)[0]] for run in runs]
    for number, run in enumerate(runs):
        if structure(run.grads) != structure(runs[0].grads) or trained[number] != trained[0]:
            raise PlanError(
                f"result {number} has gradients of other leaves than result 0; accumulate runs of "
                "one plan with the same params and trainable="
            )
    return runs
