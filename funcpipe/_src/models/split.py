"""split: any model into stages, parameter trees with the model's own names, and a good division of
the work."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import accumulate, pairwise
from statistics import median
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, fx, nn

from funcpipe._src.core.errors import PlanError, raise_all
from funcpipe._src.core.log import log
from funcpipe._src.core.progress import ProgressTo, Teller, telling
from funcpipe._src.core.torch_names import has_gradient_hooks, hooks_of
from funcpipe._src.core.tracing import tracing
from funcpipe._src.core.tree import flatten
from funcpipe._src.core.words import similar
from funcpipe._src.models.balance import checked_sizes
from funcpipe._src.models.example import row_axes, unmarked
from funcpipe._src.models.layers.cut import cut_layers
from funcpipe._src.models.layers.find import Layers, find_layers
from funcpipe._src.models.losses import ModelLoss, as_loss
from funcpipe._src.models.module import clones, devices_fault, named_tensors, refuse_lazy
from funcpipe._src.models.policy import Policy, Units, by_parameters
from funcpipe._src.models.sequential import cut_sequential, units_of
from funcpipe._src.models.split_model import Split, assemble
from funcpipe._src.models.traced import graph as traced_graph
from funcpipe._src.models.traced.export import Captured, callers, capture
from funcpipe._src.models.traced.signature import as_call
from funcpipe._src.models.traced.traced import CommitBuffer
from funcpipe._src.models.traced.units import units_of_graph
from funcpipe._src.models.verify import seeded, try_once, verify, verify_evaluation


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
    """Cut a model into pure stages. The model is untouched; the stages get its parameters, by its
    names.

    Stages compute with copies of the model's modules. If you change attributes, layers or hooks of
    the model afterwards, `run` raises PlanError.

    Three ways, by what is given. An ``nn.Sequential`` is cut between its layers (those of nested
    ones too). Any model with ``example=`` is traced by ``torch.export`` and cut anywhere: values
    that far stages need become skips, and the stages are compared with the model on two inputs. Any
    other is cut without tracing at the entries of its list of blocks (transformers' decoders,
    encoders): each stage runs the model's own forward with the other layers left out. If such a
    stage needs another value of an earlier stage than the last block's output, `run` raises
    PlanError.

    >>> made = fp.split(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), 2)
    >>> [list(params) for params in made.params]
    [['0.weight', '0.bias'], ['2.weight', '2.bias']]

    Args:
        model: each of its layers in the mode in which it will run where the plan trains: after
            ``model.eval()`` the stages stay in evaluation mode.
        num_stages: how many; may be left out where ``at``, ``balance``, `split_point` or the policy
            tells.
        at: where to cut: ``{"layers.2": "before"}``, "before" or "after" a module, ``"layers.2@1"``
            for its second call; a list of names cuts before each.
        balance: units of each stage: layers of a Sequential (its own, or with those of the
            Sequentials inside: whichever the sum fits), blocks of a list, or what a trace counts.
        policy: chooses the cuts: `by_parameters` (default), `by_time`, ``by_memory(limit)``, or a
            function ``(Units, num_stages) -> sizes``.
        example: an input for a trace. With ``layers=`` nothing is traced: the example only compares
            the stages with the model. A tensor or a tuple goes to forward by position, a mapping by
            keyword. The inputs of the stages follow the same rule.
        any_rows: trace for any number of rows (the first dimension of every tensor that has as many
            as the first one; `Axis` marks those of another dimension, `Replicate` what has none, as
            in the batch of a run); False: the stages run with just the rows of the example, which
            is then one microbatch.
        layers: for the way without a trace: the path of the list of blocks ("encoder.layer"), or
            what `find_layers` returned, mended; None: find it.
        ties: parameters that several stages use: "replicate" (each holds it, gradients are summed)
            or "transmit" (the first owns it, its value travels), or one of them by name.
        loss: where in the output the model's own loss is: a path ("loss", 0, ("aux", "loss")) or a
            function of the output; None: the output itself, ``.loss`` or ``["loss"]``, if that is a
            scalar. Of a transformers model it is known how many labels of a microbatch it counts
            (-100 is not counted), and the batch's loss is that of the model in one piece; of other
            models it is not, and microbatches count by their rows: for padded labels give
            ``make_plan(loss=)`` a loss with a method ``weigh(inputs, target)``.
        check: with an example, compare the stages with the model (two forwards and backwards of
            each on the example).
        slices: let the stages run slices of a sequence, for schedules with ``num_slices``: each
            hands the keys and values of its blocks on, through the cache that the model has for
            generating. For models of transformers without a trace whose blocks attend to all that
            came before (Llama, GPT-2); stages of functions have a ``carry`` of their own. Labels go
            in moved by one, as ``labels`` and ``shift_labels``.
        commit: for a trace: how to update buffers into which the forward writes values that depend
            on the inputs. ``{name: fn}`` with ``fn(old, written, rows) -> new``, where each
            microbatch wrote its value from the same ``old``. For counters `sum_of_changes`, for
            averages `mean_by_rows`. Batch norm needs no entry.
        progress: True shows on stderr what a traced split does: model, trace, cut, check; or a
            function that is told a `CallProgress`.

    Returns:
        `Split`: stages, params, state, ties, loss; it prints itself.

    Raises:
        PlanError: the model, the cuts or the example do not fit; the model is untouched.
    """
    _check_model(model)
    cuts = _Wanted(num_stages, _names(at), balance, policy)
    cuts.check()
    if slices and (example is not None or (isinstance(model, nn.Sequential) and layers is None)):
        raise PlanError(
            "slices=True cuts models of transformers between their blocks, without a trace: leave "
            "out example=; of a Sequential, or a model of your own, write the stages as functions "
            "with a carry (fp.stage)"
        )
    if example is not None and layers is None:
        with tracing, telling("split", progress, unit="steps", total=4) as told:
            made = _traced(model, cuts, example, ties, loss, any_rows, check, commit, told)
            return _told(model, "traced", made)
    if commit is not None:
        raise PlanError(
            "commit= is for traces; give example=, or fold the statistics of a function stage by "
            "its commit="
        )
    if cuts.open and policy is None and (marked := callers(model)):
        raise PlanError(
            f"the forward of {' and '.join(marked)} calls fp.models.split_point(), which only a "
            "trace sees; give example= to cut there, or say where to cut: at=, balance=, policy="
        )
    if isinstance(model, nn.Sequential) and layers is None:
        return _told(model, "between its layers", _sequential(model, cuts, ties, loss))
    made = _layered(model, cuts, layers, ties, loss, slices)
    if example is not None and check:
        verify(model, made, unmarked(example), train=True)
    return _told(model, "at its blocks, not traced", made)


def _told(model: nn.Module, way: str, made: Split) -> Split:
    log.info("cut %s %s: %r", type(model).__name__, way, made)
    return made


# -- where to cut
# -------------------------------------------------------------------------------


class _Wanted(NamedTuple):
    """The arguments of `split` that say where to cut."""

    num_stages: int | None
    at: dict[str, str]
    balance: Any
    policy: Policy | None

    @property
    def open(self) -> bool:
        """Do neither names nor sizes say where to cut."""
        return not self.at and self.balance is None

    def check(self) -> None:
        """Raises PlanError where an argument is wrong, or several say where to cut."""
        count = self.num_stages
        faults: list[str] = []
        if count is not None and (
            not isinstance(count, int) or isinstance(count, bool) or count < 1
        ):
            faults.append(f"num_stages is a positive int or None; got {count!r}")
        arguments = (
            ("at", self.at),
            ("balance", self.balance is not None),
            ("policy", self.policy),
        )
        chosen = [name for name, value in arguments if value]
        if len(chosen) > 1:
            faults.append(f"{' and '.join(chosen)} each say where to cut; give one of them")
        if self.policy is not None and not callable(self.policy):
            kind = type(self.policy).__name__
            faults.append(
                "policy is a function (units, num_stages) -> sizes, like "
                f"fp.models.by_parameters; got a {kind}"
            )
        raise_all("split cannot tell where to cut:", faults)

    def sizes(self, units: Units) -> list[int]:
        """Units of each stage, by names, by sizes or by a policy. Raises PlanError."""
        count = self.num_stages
        if self.at:
            return _by_names(units, self.at, count)
        sizes: Any = self.balance
        if sizes is None:
            if count is not None and count > len(units):
                names = ", ".join(units.names[:8]) + (", ..." if len(units) > 8 else "")
                raise PlanError(
                    f"{count} stages are more than the {len(units)} units that the model has "
                    f"({names})"
                )
            if count is None and self.policy is None:
                raise PlanError(
                    "into how many stages? Give num_stages, at={module: 'before'}, balance=, or a "
                    "policy that knows (by_memory)"
                )
            sizes = (self.policy or by_parameters)(units, count)
        return checked_sizes(sizes, len(units), "units of the model", count)


def _by_names(units: Units, cuts: dict[str, str], num_stages: int | None) -> list[int]:
    places: set[int] = set()
    faults: list[str] = []
    for name, side in cuts.items():
        hits = [
            i for i, unit in enumerate(units.names) if unit == name or unit.startswith(f"{name}.")
        ]
        if side not in ("before", "after"):
            faults.append(f"at[{name!r}] is 'before' or 'after'; got {side!r}")
        elif not hits:
            hint = similar(name, units.names) or f"; there are {', '.join(units.names[:8])}"
            faults.append(f"at[{name!r}]: no layer of that name to cut at{hint}")
        else:
            place = hits[0] if side == "before" else hits[-1] + 1
            if place in (0, len(units)):
                faults.append(
                    f"at[{name!r}] {side}: nothing is computed {side} it, so a stage would be empty"
                )
            places.add(place)
    if not faults and num_stages is not None and len(places) + 1 != num_stages:
        faults.append(
            f"num_stages is {num_stages}, but the cuts make {len(places) + 1} stages; leave one "
            "of them out"
        )
    raise_all("the model cannot be cut there:", faults)
    bounds = [0, *sorted(places), len(units)]
    return [b - a for a, b in pairwise(bounds)]


# -- the three ways
# -------------------------------------------------------------------------------


def _sequential(model: nn.Sequential, cuts: _Wanted, ties: Any, loss: Any) -> Split:
    sizes = cuts.balance
    total = (
        sum(size for size in sizes if isinstance(size, int))
        if isinstance(sizes, Sequence)
        else None
    )
    flat = total != len(model)
    units = _module_units(units_of(model, flat=flat))
    parts = cut_sequential(model, cuts.sizes(units), flat=flat)
    return assemble(model, parts, ties=ties, loss=None if loss is None else as_loss(loss, model))


def _layered(
    model: nn.Module, cuts: _Wanted, layers: Any, ties: Any, loss: Any, slices: bool
) -> Split:
    stack = layers if isinstance(layers, Layers) else find_layers(model, layers)
    named = [(name, model.get_submodule(name)) for name in stack.names]
    sides = ([model.get_submodule(name) for name in side] for side in (stack.entry, stack.exit))
    sizes = cuts.sizes(_module_units(named, *sides))
    parts = cut_layers(model, sizes, layers=stack, slices=slices)
    return assemble(model, parts, ties=ties, loss=as_loss(loss, model))


def _traced(
    model: nn.Module,
    cuts: _Wanted,
    example: Any,
    ties: Any,
    loss: Any,
    any_rows: bool,
    check: bool,
    commit: Mapping[str, CommitBuffer] | None,
    told: Teller,
) -> Split:
    axes = row_axes(example) if any_rows else None
    example = unmarked(example)
    args, kwargs = as_call(example)
    leaves = [leaf for leaf in flatten(example)[0] if isinstance(leaf, Tensor)]
    empty = any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers(), *leaves))
    if not empty:
        if "forward hooks" in hooks_of(model):
            raise PlanError(
                "the model itself has forward hooks, which a trace of its forward does not see; "
                "put them on a module inside, or take them off"
            )
        told.phase("model", 0)
        try_once(model, example)
    told.phase("trace", 1)
    captured = capture(model, args, kwargs, axes=axes, commit=commit)
    told.phase("cut", 2)
    parts, edges = traced_graph.cut(captured, _places(captured, model, cuts, example), model)
    model_loss = as_loss(loss, model)
    if loss is None and ModelLoss().find(captured.sample_output()) is None:
        model_loss = None
    result = assemble(model, parts, ties=ties, loss=model_loss, edges=edges)
    if check and not empty:
        told.phase("check", 3)
        verify(model, result, example, train=True)
        if not captured.evaluation:
            verify_evaluation(model, result, example)
    told.to(4)
    return result


def _places(captured: Captured, model: nn.Module, cuts: _Wanted, example: Any) -> list[int]:
    """The positions of the operations that begin each stage but the first."""
    count = cuts.num_stages
    places: list[int] = []
    if cuts.at:
        places = traced_graph.positions(captured, cuts.at, model)
    elif cuts.open and cuts.policy is None:
        places = traced_graph.marked(captured)
        if not places and count is None:
            raise PlanError(
                "the forward has no fp.models.split_point(); give num_stages, or at={module: "
                "'before'}, or call fp.models.split_point() in its forward"
            )
    if places:
        if count not in (None, len(places) + 1):
            times = "once" if len(places) == 1 else f"{len(places)} times"
            origin = (
                "the cuts of at= make"
                if cuts.at
                else f"its forward calls split_point() {times}, which makes"
            )
            raise PlanError(
                f"num_stages is {count}, but {origin} {len(places) + 1} stages; leave one of them "
                "out"
            )
        return places
    measure = partial(_time, captured, model, example)
    units, starts = units_of_graph(captured, model, count, measure, movable=cuts.balance is None)
    sizes = cuts.sizes(units)
    return [starts[end] for end in accumulate(sizes[:-1])]


def _module_units(
    named: Sequence[tuple[str, nn.Module]],
    before: Sequence[nn.Module] = (),
    after: Sequence[nn.Module] = (),
) -> Units:
    """Modules as units; what runs before the first counts as part of it, what runs after the last
    as part of that."""
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

    def measure() -> Sequence[float]:
        raise PlanError("by_time measures the model on an example; give example=")

    return Units(tuple(name for name, _ in named), tuple(sizes), (0,) * len(sizes), measure)


def _time(captured: Captured, model: nn.Module, example: Any, bounds: list[int]) -> list[float]:
    """Seconds of the forward of each unit: the graph run node by node, medians of five sweeps after
    one."""
    tensors = clones(model)
    inputs = captured.signature.values(example)
    numbers = {node: number for number, node in enumerate(captured.body)}
    sweeps: list[list[float]] = []

    class TimedInterpreter(fx.Interpreter):
        def run_node(self, n: fx.Node) -> Any:
            start = time.perf_counter()
            output = super().run_node(n)
            if n in numbers:
                sweeps[-1][numbers[n]] += time.perf_counter() - start
            return output

    values: list[Any] = []
    for node in captured.module.graph.find_nodes(op="placeholder"):
        kind, key = captured.sources.get(node.name, ("input", node.name))
        values.append({"input": inputs, "const": captured.consts}.get(kind, tensors)[key])
    with torch.no_grad(), seeded(tensors):
        for _ in range(6):
            sweeps.append([0.0] * len(numbers))
            TimedInterpreter(captured.module).run(*values)
    columns = [median(column) for column in zip(*sweeps[1:], strict=True)]
    return [sum(columns[a:b]) for a, b in pairwise(bounds)]


# -- arguments
# -------------------------------------------------------------------------------


def _names(at: Any) -> dict[str, str]:
    if at is None:
        return {}
    if isinstance(at, str):
        return {at: "before"}
    if isinstance(at, Mapping):
        return {
            str(name): cast("str", side) for name, side in cast("Mapping[Any, Any]", at).items()
        }
    return dict.fromkeys(map(str, at), "before")


def _check_model(model: Any) -> None:
    """Raises PlanError for a model that cannot be cut in any way."""
    if not isinstance(model, nn.Module):
        raise PlanError(
            f"split takes an nn.Module; got a {type(model).__name__} (stages of functions: "
            "fp.stage)"
        )
    refuse_lazy(model)
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
    faults += _loose(model, set(map(id, named.values())))
    raise_all("this model cannot be split:", faults + devices_fault(model))


def _loose(model: nn.Module, known: set[int]) -> list[str]:
    """The faults of parameters that lie in plain lists: no step would train them."""
    faults: list[str] = []
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if name.startswith("_") or not isinstance(value, (list, tuple, dict)):
                continue
            if any(
                isinstance(leaf, nn.Parameter) and id(leaf) not in known
                for leaf in flatten(value)[0]
            ):
                place = f"{path}.{name}" if path else name
                faults.append(
                    f"{place} holds parameters that the model does not know, so nobody would "
                    "train them; use nn.ParameterList or nn.ModuleList"
                )
    return faults
