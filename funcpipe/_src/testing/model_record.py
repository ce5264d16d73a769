"""record_model: the values of a model that is not split, to compare with runs of a plan."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from funcpipe._src.core.errors import PlanError, raise_all
from funcpipe._src.core.tree import Tree, flatten, is_differentiable, map_tensors
from funcpipe._src.data.losses import read_loss
from funcpipe._src.data.plan import Plan
from funcpipe._src.data.schedule import Action, Kind
from funcpipe._src.engine.finish import release
from funcpipe._src.engine.options import RunOptions
from funcpipe._src.engine.prepare import Prepared, prepare
from funcpipe._src.stages.context import checked_plan
from funcpipe._src.testing.difference import ValueRecord, cpu_copy


def record_model(
    model: nn.Module,
    ends: Sequence[str],
    plan: Plan,
    params: Sequence[Tree],
    batch: Any,
    *,
    call: Callable[[nn.Module, Any], Any] | None = None,
    **options: Any,
) -> ValueRecord:
    """Run a model that is not split over the microbatches of a plan, and record its values.

    The record has the output of each stage, the loss of each microbatch, and with backwards the
    gradients of the outputs. So `first_difference` names the first stage of a run that differs from
    the model. The model is copied, so its gradients and buffers do not change. Dropout in the model
    draws from torch's generator, so turn dropout off.

    >>> model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    >>> split = fp.split(model, balance=[2, 1])
    >>> plan = fp.make_plan(split, fp.schedules.one_f_one_b(2, 2), loss=nn.functional.mse_loss, devices="cpu")
    >>> batch = torch.ones(4, 4), torch.zeros(4, 2)
    >>> wanted = funcpipe.testing.record_model(model, ["1"], plan, split.params, batch)
    >>> found = funcpipe.testing.record_values(plan, split.params, batch, threads_per_lane=1)
    >>> difference = funcpipe.testing.first_difference(wanted, found)
    >>> difference is None or difference.ulp < 100
    True

    Args:
        model: the model that was split, with the numbers of ``params``.
        ends: for each stage but the last, the path of the module whose output is the output of the
            stage. The last stage returns the output of the model.
        plan, params, batch: as for `funcpipe.run`.
        call: ``(model, inputs) -> output`` for the inputs of a microbatch. None: a mapping is passed
            by keyword, a tuple by position (to an ``nn.Sequential`` as one argument), all else as
            one argument.
        options: further options of `funcpipe.run`, such as ``state``.

    Returns:
        A record for `first_difference`.

    Raises:
        PlanError: ``ends`` does not fit the plan or the model; a module of ``ends`` is not called
            once per microbatch; or the plan has feeds or slices.
    """
    checked_plan("record_model", plan)
    copy = _copied(model, ends, plan)
    ready = prepare("record_model", plan, params, batch, RunOptions(**options))
    order = tuple(plan.program.action(code) for code in plan.program.order)
    values: dict[tuple[Action, str], Tree] = {}
    try:
        for microbatch in range(ready.batch.num_microbatches):
            with torch.set_grad_enabled(plan.schedule.has_backward):
                _record(copy, ends, ready, microbatch, call or _call, values)
    finally:
        release(ready)
    return ValueRecord(values, order, None)


def _copied(model: Any, ends: Sequence[str], plan: Plan) -> nn.Module:
    """Return a copy of the model. Raises PlanError for wrong arguments."""
    if not isinstance(model, nn.Module):
        raise PlanError(
            f"record_model takes the model as an nn.Module; got a {type(model).__name__}"
        )
    names = dict(model.named_modules(remove_duplicate=False))
    faults = [f"the model has no module {end!r}" for end in ends if end not in names]
    if len(ends) != plan.num_stages - 1:
        faults.append(
            f"ends must name one module for each of {plan.num_stages - 1} stages, all but the last; "
            f"got {len(ends)}"
        )
    if any(stage.feeds for stage in plan.stages) or plan.schedule.num_slices > 1:
        faults.append("the plan has feeds or slices, which a model without stages does not get")
    raise_all("record_model cannot run this model:", faults)
    return deepcopy(model)


def _record(
    model: nn.Module,
    ends: Sequence[str],
    ready: Prepared,
    microbatch: int,
    call: Callable[[nn.Module, Any], Any],
    values: dict[tuple[Action, str], Tree],
) -> None:
    plan, last, calls = ready.plan, ready.plan.num_stages - 1, Counter[int]()
    backwards = {
        action.stage: action
        for action in map(plan.program.action, plan.program.order)
        if action.microbatch == microbatch and action.kind in (Kind.B, Kind.I)
    }

    def keep(stage: int, output: Tree) -> None:
        calls[stage] += 1
        # Copies and hooks now, because a later layer may write into the output.
        values[Action(Kind.F, stage, microbatch), "output"] = map_tensors(cpu_copy, output)
        if stage not in backwards or stage == last:
            return
        leaves = flatten(output)[0]
        gradients: list[Any] = [None] * len(leaves)

        def take(number: int, gradient: Tensor) -> None:
            gradients[number] = cpu_copy(gradient)
            values[backwards[stage], "output gradient"] = tuple(gradients)

        for number, leaf in enumerate(leaves):
            if is_differentiable(leaf) and leaf.requires_grad:
                leaf.register_hook(partial(take, number))

    hooks = [
        model.get_submodule(end).register_forward_hook(
            lambda module, args, output, stage=stage: keep(stage, output)
        )
        for stage, end in enumerate(ends)
    ]
    try:
        output = call(model, ready.batch.inputs[microbatch].tree())
    finally:
        for hook in hooks:
            hook.remove()
    raise_all(
        "the modules of ends must be called once for each microbatch:",
        [
            f"{end!r} was called {calls[stage]} times"
            for stage, end in enumerate(ends)
            if calls[stage] != 1
        ],
    )
    keep(last, output)
    if plan.loss is None or ready.batch.target is None:
        return
    total, loss = read_loss(plan.loss(output, ready.batch.target[microbatch].tree()))
    values[Action(Kind.F, last, microbatch), "loss"] = cpu_copy(loss.sum)
    if backwards:
        (total * ready.shares.factor(loss, microbatch)).backward()


def _call(model: nn.Module, inputs: Any) -> Any:
    if isinstance(inputs, Mapping):
        return model(**inputs)
    if isinstance(inputs, tuple) and not isinstance(model, nn.Sequential):
        return model(*inputs)
    return model(inputs)
