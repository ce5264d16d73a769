"""Cut a model into stages, and choose the way: by layers, by blocks, or by a trace.

The three ways themselves are in `sequential`, `layers` and `traced`. `split_model` has the result.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from funcpipe._src.core.errors import PlanError, raise_all
from funcpipe._src.core.log import log
from funcpipe._src.core.progress import ProgressTo, Teller, telling
from funcpipe._src.core.shown import some
from funcpipe._src.core.torch_names import has_gradient_hooks, hooks_of
from funcpipe._src.core.tracing import tracing
from funcpipe._src.core.tree import flatten
from funcpipe._src.core.words import similar
from funcpipe._src.models.balance import checked_sizes
from funcpipe._src.models.example import row_axes, unmarked
from funcpipe._src.models.layers.cut import cut_layers
from funcpipe._src.models.layers.find import Layers, find_layers
from funcpipe._src.models.losses import ModelLoss, as_loss
from funcpipe._src.models.module import devices_fault, named_tensors
from funcpipe._src.models.policy import Policy, Units, by_memory, by_parameters, by_time
from funcpipe._src.models.sequential import cut_sequential, units_of
from funcpipe._src.models.split_model import Split, assemble
from funcpipe._src.models.traced import graph as traced_graph
from funcpipe._src.models.traced.export import Captured, callers, capture
from funcpipe._src.models.traced.signature import as_call
from funcpipe._src.models.traced.traced import CommitBuffer
from funcpipe._src.models.traced.units import joining_buffers, units_of_graph
from funcpipe._src.models.unfit import refuse_unfit
from funcpipe._src.models.verify import try_once, verify, verify_evaluation


def split(
    model: nn.Module,
    num_stages: int | None = None,
    *,
    at: Mapping[str, str] | Sequence[str] | None = None,
    balance: Sequence[int] | None = None,
    policy: Policy | None = None,
    example: Any = None,
    layers: str | Layers | None = None,
    ties: str | Mapping[str, str] = "replicate",
    loss: Any = None,
    any_rows: bool = True,
    check: bool = True,
    slices: bool = False,
    commit: Mapping[str, CommitBuffer] | None = None,
    progress: ProgressTo = False,
) -> Split:
    """Cut a model into stages, each a pure function of its parameters, its state and its input.

    The model does not change. The stages compute with copies of the model's modules, and
    `split.params` contains the model's own parameters by the model's own names. If you change
    attributes, layers or hooks of the model afterwards, `run` raises PlanError.

    The arguments select one of three ways:

    - An ``nn.Sequential`` is cut between its layers. The layers of nested Sequentials count
      separately.
    - Any model with ``example=`` is traced by ``torch.export`` and can be cut between any two
      operations. Values that later stages need become skips. The stages are compared with the model
      on two inputs.
    - Any other model, for example a decoder or an encoder of transformers, is cut between the blocks
      of its list of blocks, without a trace. Each stage runs the model's own forward without the
      other blocks. If a stage needs another value of an earlier stage than the output of the last
      block, `run` raises PlanError.

    >>> result = fp.split(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), 2)
    >>> [list(params) for params in result.params]
    [['0.weight', '0.bias'], ['2.weight', '2.bias']]

    Args:
        model: the module to cut. Set the mode of each layer before the call: a layer in evaluation
            mode stays in evaluation mode when the plan trains.
        num_stages: the number of stages. None: ``at``, ``balance``, `split_point` or the policy
            determines the number.
        at: where to cut. A dict maps the path of a module to "before" or "after": ``{"layers.2":
            "before"}``. ``"layers.2@1"`` is the second call of the module. A list of paths cuts
            before each module.
        balance: the number of units of each stage, for example ``[3, 3, 2]``. Units are the layers
            of a Sequential, the blocks of a list, or the units of the trace, which a policy gets,
            too. For nested lists, the sum decides whether only the outer entries count or the inner
            entries too. ``balance(profile(model, example), num_stages)`` of `fp.models` measures
            the units. Sizes may also count the layers of a trace as the model lists them; then some
            cuts are illegal.
        policy: a function that chooses the cuts: `by_parameters` (the default),
            ``by_time(cost)``, ``by_memory(limit)``, or your own ``(Units, num_stages) -> sizes``.
        example: an input of the model, for the trace. A tensor or a tuple goes to forward by
            position, a mapping by keyword. The input of the first stage follows the same rule. With
            ``layers=`` there is no trace, and the example only serves to compare the stages with
            the model.
        any_rows: True: trace for any number of rows. Rows are the first dimension of each tensor
            that has as many as the first tensor. As in the batch of a run, `Axis` marks rows in
            another dimension, and `Replicate` marks a value without rows. False: each microbatch
            must have exactly the rows of the example.
        layers: for the way without a trace: the path of the list of blocks ("encoder.layer"), or a
            corrected result of `find_layers`. None: `find_layers` finds the list.
        ties: how to treat parameters that several stages use. "replicate": each stage has a copy,
            and the gradients are summed. "transmit": the first stage owns the parameter and its
            value travels. A dict selects one of the two by the parameter's name.
        loss: where in the model's output the model's own loss is: a path ("loss", 0, ("aux",
            "loss")) or a function of the output. None: the output itself, ``.loss`` or
            ``["loss"]``, if that is a scalar. For a transformers model, funcpipe counts the labels
            of each microbatch without -100, so the loss of the batch equals the model's loss on the
            whole batch. For other models, microbatches count by their rows. If your labels are
            padded, give ``make_plan(loss=)`` a loss with a method ``weigh(inputs, target)``.
        check: True: compare the stages with the model on the example. The comparison takes two
            forwards and backwards of each.
        slices: True: the stages can run slices of a sequence, for schedules with ``num_slices``.
            Each slice hands the keys and values of its blocks to the next slice, in the cache that
            the model uses to generate text. Only for transformers models without a trace whose
            blocks attend to all earlier tokens (Llama, GPT-2). Stages of functions have their own
            ``carry``. Give labels shifted by one, as ``labels`` and ``shift_labels``.
        commit: for a trace: how to update buffers into which the forward writes values that depend
            on the inputs. ``{name: fn}`` with ``fn(old, written, rows) -> new``; each microbatch
            computed its value in ``written`` from the same ``old``. Use `sum_of_changes` for
            counters and `mean_by_rows` for averages. Batch norm needs no entry.
        progress: True shows on stderr the steps of a traced split: model, trace, cut, check. A
            function gets a `CallProgress` instead.

    Returns:
        A `Split` with stages, params, state, ties and loss. ``print`` shows the cuts.

    Raises:
        PlanError: the model, the cuts or the example do not fit together, or the stages do not
            compute what the model computes. The model is unchanged.
    """
    _check_model(model)
    cuts = _CutArguments(num_stages, _cuts_by_module(at), balance, policy)
    cuts.check()
    if slices and (example is not None or (isinstance(model, nn.Sequential) and layers is None)):
        raise PlanError(
            "slices=True works only for transformers models that are cut between their blocks, "
            "without example=; for a Sequential or your own model, write the stages as functions "
            "with a carry (fp.stage)"
        )
    if example is not None and layers is None:
        way = "traced"
        with tracing, telling("split", progress, unit="steps", total=4) as teller:
            result = _traced(model, cuts, example, ties, loss, any_rows, check, commit, teller)
    elif commit is not None:
        raise PlanError(
            "commit= works only with a trace; give example=, or write a function stage, which has "
            "its own commit= (fp.stage)"
        )
    elif cuts.open and policy is None and (marked := callers(model)):
        raise PlanError(
            f"the forward of {' and '.join(marked)} calls fp.models.split_point(), which works "
            "only with a trace; give example= to cut there, or choose the cuts with at=, balance= "
            "or policy="
        )
    elif isinstance(model, nn.Sequential) and layers is None:
        way, result = "between its layers", _sequential(model, cuts, ties, loss)
    else:
        way, result = "at its blocks, not traced", _layered(model, cuts, layers, ties, loss, slices)
        if example is not None and check:
            verify(model, result, unmarked(example))
    log.info("cut %s %s: %r", type(model).__name__, way, result)
    return result


# -- where to cut
# -------------------------------------------------------------------------------


class _CutArguments(NamedTuple):
    """The arguments of `split` that determine where to cut."""

    num_stages: int | None
    at: dict[str, str]
    balance: Any
    policy: Policy | None

    @property
    def open(self) -> bool:
        """Whether neither names nor sizes determine the cuts."""
        return not self.at and self.balance is None

    @property
    def total(self) -> int | None:
        """The number of units that the sizes in ``balance`` have together."""
        given = isinstance(self.balance, Sequence)
        return sum(size for size in self.balance if isinstance(size, int)) if given else None

    def check(self) -> None:
        """Raise PlanError for a wrong argument, or for several that determine the cuts."""
        count = self.num_stages
        faults: list[str] = []
        if count is not None and (
            not isinstance(count, int) or isinstance(count, bool) or count < 1
        ):
            faults.append(f"num_stages must be a positive int or None; got {count!r}")
        arguments = (
            ("at", self.at),
            ("balance", self.balance is not None),
            ("policy", self.policy),
        )
        chosen = [name for name, value in arguments if value]
        if len(chosen) > 1:
            faults.append(f"{' and '.join(chosen)} each determine the cuts; give one of them")
        if self.policy is not None and not callable(self.policy):
            kind = type(self.policy).__name__
            faults.append(
                "policy must be a function (units, num_stages) -> sizes, like "
                f"fp.models.by_parameters; got a {kind}"
            )
        if self.policy in (by_memory, by_time):
            faults.append("call the policy with its argument: by_memory(limit), by_time(cost)")
        raise_all("split cannot determine the cuts:", faults)

    def sizes(self, units: Units, joining: Sequence[str] = ()) -> list[int]:
        """Return the number of units of each stage. ``joining``: buffers that leave few units."""
        count = self.num_stages
        if self.at:
            return _sizes_by_names(units, self.at, count)
        sizes: Any = self.balance
        if sizes is None:
            if count is not None and count > len(units):
                reason = (
                    f"; all operations from the first to the last use of {', '.join(joining)} are "
                    "one unit, because the forward writes this buffer; write it next to its use"
                    if joining
                    else ""
                )
                raise PlanError(
                    f"num_stages is {count}, but the model has only {len(units)} units "
                    f"({_names_of(units)}){reason}"
                )
            if count is None and self.policy is None:
                raise PlanError(
                    "the number of stages is missing; give num_stages, at={module: 'before'}, "
                    "balance=, or a policy that determines the number (by_memory)"
                )
            sizes = (self.policy or by_parameters)(units, count)
        noun = f"units of the model ({_names_of(units)})"
        return checked_sizes(sizes, len(units), noun, count)


def _names_of(units: Units) -> str:
    """List the names of the first units, for messages."""
    return some(units.names, most=20)


def _sizes_by_names(units: Units, cuts: dict[str, str], num_stages: int | None) -> list[int]:
    positions: set[int] = set()
    faults: list[str] = []
    for name, side in cuts.items():
        hits = [
            i for i, unit in enumerate(units.names) if unit == name or unit.startswith(f"{name}.")
        ]
        if side not in ("before", "after"):
            faults.append(f"at[{name!r}] must be 'before' or 'after'; got {side!r}")
        elif not hits:
            hint = similar(name, units.names) or f"; there are {', '.join(units.names[:8])}"
            faults.append(f"at[{name!r}]: the model has no layer of that name{hint}")
        else:
            position = hits[0] if side == "before" else hits[-1] + 1
            if position in (0, len(units)):
                faults.append(
                    f"at[{name!r}] {side}: no layer runs {side} it, so a stage would be empty"
                )
            positions.add(position)
    if not faults and num_stages is not None and len(positions) + 1 != num_stages:
        faults.append(
            f"num_stages is {num_stages}, but the cuts make {len(positions) + 1} stages; leave one "
            "of them out"
        )
    raise_all("the model cannot be cut there:", faults)
    bounds = [0, *sorted(positions), len(units)]
    return [b - a for a, b in pairwise(bounds)]


# -- the three ways
# -------------------------------------------------------------------------------


def _sequential(model: nn.Sequential, cuts: _CutArguments, ties: Any, loss: Any) -> Split:
    # Sizes that sum to the outer layers count outer layers, so nested Sequentials remain whole.
    # Otherwise all inner layers count.
    flat = cuts.total != len(model)
    units = _module_units(units_of(model, flat=flat))
    parts = cut_sequential(model, cuts.sizes(units), flat=flat)
    return assemble(model, parts, ties=ties, loss=None if loss is None else as_loss(loss, model))


def _layered(
    model: nn.Module, cuts: _CutArguments, layers: Any, ties: Any, loss: Any, slices: bool
) -> Split:
    stack = layers if isinstance(layers, Layers) else find_layers(model, layers)
    named = [(name, model.get_submodule(name)) for name in stack.names]
    sides = ([model.get_submodule(name) for name in side] for side in (stack.entry, stack.exit))
    sizes = cuts.sizes(_module_units(named, *sides))
    parts = cut_layers(model, sizes, layers=stack, slices=slices)
    return assemble(model, parts, ties=ties, loss=as_loss(loss, model))


def _traced(
    model: nn.Module,
    cuts: _CutArguments,
    example: Any,
    ties: Any,
    loss: Any,
    any_rows: bool,
    check: bool,
    commit: Mapping[str, CommitBuffer] | None,
    teller: Teller,
) -> Split:
    axes = row_axes(example) if any_rows else None
    example = unmarked(example)
    args, kwargs = as_call(example)
    leaves = [leaf for leaf in flatten(example)[0] if isinstance(leaf, Tensor)]
    empty = any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers(), *leaves))
    if not empty:
        if "forward hooks" in hooks_of(model):
            raise PlanError(
                "the model itself has forward hooks, which a trace of its forward does not run; "
                "register them on a module inside, or remove them"
            )
        teller.phase("model", 0)
        try_once(model, example)
    teller.phase("trace", 1)
    captured = capture(model, args, kwargs, axes=axes, commit=commit)
    teller.phase("cut", 2)
    parts, edges = traced_graph.cut(captured, _stage_starts(captured, model, cuts), model)
    model_loss = as_loss(loss, model)
    if loss is None and ModelLoss().find(captured.sample_output()) is None:
        model_loss = None
    result = assemble(model, parts, ties=ties, loss=model_loss, edges=edges)
    if check and not empty:
        teller.phase("check", 3)
        verify(model, result, example)
        if not captured.evaluation:
            verify_evaluation(model, result, example)
    teller.to(4)
    return result


def _stage_starts(captured: Captured, model: nn.Module, cuts: _CutArguments) -> list[int]:
    """Return the positions of the operations that begin a stage, except the first stage."""
    count = cuts.num_stages
    positions: list[int] = []
    if cuts.at:
        positions = traced_graph.positions(captured, cuts.at, model)
    elif cuts.open and cuts.policy is None:
        positions = traced_graph.marked(captured)
        if not positions and count is None:
            raise PlanError(
                "the forward has no fp.models.split_point(); give num_stages, or at={module: "
                "'before'}, or call fp.models.split_point() in its forward"
            )
    if positions:
        if count not in (None, len(positions) + 1):
            times = "once" if len(positions) == 1 else f"{len(positions)} times"
            origin = (
                "the cuts of at= make"
                if cuts.at
                else f"its forward calls split_point() {times}, which makes"
            )
            raise PlanError(
                f"num_stages is {count}, but {origin} {len(positions) + 1} stages; leave one of "
                "them out"
            )
        return positions
    if count is None and isinstance(cuts.balance, Sequence):
        count = len(cuts.balance)
    units, starts = units_of_graph(captured, model, count, total=cuts.total)
    sizes = cuts.sizes(units, joining_buffers(captured))
    return [starts[end] for end in accumulate(sizes[:-1])]


def _module_units(
    named: Sequence[tuple[str, nn.Module]],
    before: Sequence[nn.Module] = (),
    after: Sequence[nn.Module] = (),
) -> Units:
    """Describe modules as units for a policy. The first and the last unit include the modules
    before and after."""
    counted: set[int] = set()
    rows: list[list[nn.Module]] = [[module] for _, module in named]
    rows[0][:0] = before
    rows[-1].extend(after)
    sizes: list[int] = []
    for row in rows:
        params = {
            id(param): param
            for module in row
            for param in module.parameters()
            if id(param) not in counted
        }
        counted |= set(params)
        sizes.append(sum(param.nbytes for param in params.values()))
    return Units(tuple(name for name, _ in named), tuple(sizes), (0,) * len(sizes))


# -- arguments
# -------------------------------------------------------------------------------


def _cuts_by_module(at: Any) -> dict[str, str]:
    if isinstance(at, Mapping):
        return {str(name): side for name, side in cast("Mapping[Any, Any]", at).items()}
    names = (at,) if isinstance(at, str) else at or ()
    return dict.fromkeys(map(str, names), "before")


def _check_model(model: Any) -> None:
    """Raise PlanError for a model that cannot be cut in any way."""
    if not isinstance(model, nn.Module):
        raise PlanError(
            f"split takes an nn.Module; got a {type(model).__name__} (stages of functions: "
            "fp.stage)"
        )
    refuse_unfit(model)
    named = named_tensors(model)
    faults = [
        (
            f"{name} is {'quantized' if tensor.is_quantized else tensor.layout}, not a plain "
            "dense tensor; convert it first"
        )
        for name, tensor in named.items()
        if tensor.is_quantized or tensor.layout is not torch.strided
    ]
    faults += [
        f"{name} has hooks on its gradient, which a run does not call; apply them to result.grads"
        for name, tensor in named.items()
        if has_gradient_hooks(tensor)
    ]
    faults += _unregistered_parameters(model, set(map(id, named.values())))
    raise_all("this model cannot be split:", faults + devices_fault(model))


def _unregistered_parameters(model: nn.Module, known: set[int]) -> list[str]:
    """List parameters in plain lists and dicts, which no optimizer would train."""
    faults: list[str] = []
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if name.startswith("_") or not isinstance(value, (list, tuple, dict)):
                continue
            if any(
                isinstance(leaf, nn.Parameter) and id(leaf) not in known
                for leaf in flatten(value)[0]
            ):
                position = f"{path}.{name}" if path else name
                faults.append(
                    f"{position} contains parameters that are not registered in the model, so no "
                    "optimizer would train them; use nn.ParameterList or nn.ModuleList"
                )
    return faults
