"""Cut an ``nn.Sequential`` between its layers.

Each stage keeps the model's own names, so checkpoints do not depend on the cuts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

from torch import nn

from funcpipe._src.core.errors import PlanError, raise_all
from funcpipe._src.core.torch_names import buffers_of, children_of, hooks_of, parameters_of
from funcpipe._src.core.tree import Tree
from funcpipe._src.data.stage import Stage
from funcpipe._src.models.attributes import ModuleAttributes
from funcpipe._src.models.balance import checked_sizes
from funcpipe._src.models.copying import copied
from funcpipe._src.models.module import Params, State, stage_of
from funcpipe._src.models.norms.norm_layers import is_deferrable
from funcpipe._src.models.skippable import Skips, skips_of
from funcpipe._src.models.unfit import refuse_unfit, shared_places


class PipeSequential(nn.Sequential):
    """An ``nn.Sequential`` whose layers can have several inputs and outputs.

    If a layer returns exactly a ``tuple``, its items become the arguments of the next layer. Lists,
    named tuples and dicts are one argument. In a plain ``nn.Sequential`` a tuple is one argument
    too. torch.distributed.pipeline.sync had a class of the same name and behaviour.

    >>> class Both(nn.Module):
    ...     def forward(self, a, b):
    ...         return a + b, a * b
    >>> fp.models.PipeSequential(Both(), Both())(torch.tensor(2), torch.tensor(3))
    (tensor(11), tensor(30))
    """

    def forward(self, *inputs: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Call the layers in order.

        Args:
            inputs: the arguments of the first layer.

        Returns:
            The output of the last layer. Without layers: the single input, or the tuple of inputs.
        """
        x: Any = inputs
        for layer in self:
            x = layer(*_arguments(x, True))
        return x if len(self) or len(inputs) != 1 else inputs[0]


def _arguments(x: Tree, spread: bool) -> tuple[Any, ...]:
    return x if spread and type(x) is tuple else (x,)


class Unit(NamedTuple):
    """One layer of a Sequential; a stage consists of one or more units."""

    path: str  # in the model, ``"1.0"``
    module: nn.Module
    spread: bool  # whether a tuple before this layer becomes its arguments, by the container around


def units_of(module: nn.Module, *, flat: bool = False) -> list[tuple[str, nn.Module]]:
    """List the layers of a Sequential that stages can consist of, with their paths.

    ``flat`` counts the layers of nested Sequentials instead of the nested Sequentials.

    >>> model = nn.Sequential(nn.Linear(1, 1), nn.Sequential(nn.ReLU(), nn.Tanh()))
    >>> [path for path, _ in units_of(model)], [path for path, _ in units_of(model, flat=True)]
    (['0', '1'], ['0', '1.0', '1.1'])
    """
    return [(path, layer) for path, layer, _ in _units(module, flat)]


def cut_sequential(
    module: nn.Module,
    sizes: Sequence[int],
    *,
    flat: bool = False,
    deferred: bool = True,
    origin: bool = True,
) -> tuple[tuple[Stage, Params, State], ...]:
    """Cut a Sequential into stages of neighbouring layers, each with params and state.

    Parameters and state keep the model's own names, and layers keep their own random numbers,
    whatever the sizes. A tuple between two layers is spread if the Sequential is a
    `PipeSequential`, also at a border between stages. So the input of the first stage is the
    argument of ``model(x)``, or a tuple for ``model(*x)`` of a PipeSequential. Only skips that
    other stages pop cross a border. If several stages contain a tensor, they contain the same
    object.

    >>> parts = cut_sequential(nn.Sequential(nn.Linear(1, 1), nn.ReLU(), nn.Linear(1, 1)), [1, 2])
    >>> [(stage.name, sorted(params)) for stage, params, _ in parts]
    [('0', ['0.bias', '0.weight']), ('1-2', ['2.bias', '2.weight'])]

    Args:
        module: a whole model, an ``nn.Sequential`` or `PipeSequential`.
        sizes: the number of `units_of` the module in each stage.
        flat: as in `units_of`.
        deferred: as in `from_module`.
        origin: True: `run` raises PlanError after the module's attributes have changed.
    """
    units = _units(module, flat)
    counts = checked_sizes(sizes, len(units), "layers")
    # Without origin, Pipe gives each run the module's own buffers.
    refuse_unfit(module, copies_buffers=origin)
    _refuse_shared_norms(units)
    skips_of(module, whole=True)
    rows = [units[start:end] for start, end in pairwise(accumulate(counts, initial=0))]
    parts = [SequentialPart(module, row) for row in rows]
    # No layer uses tensors of the Sequential itself, but the state_dict must contain them.
    parameters_of(parts[0]).update(parameters_of(module))
    buffers_of(parts[0]).update(buffers_of(module))
    declared = [skips_of(part) for part in parts]
    attributes = ModuleAttributes(module) if origin else None
    layers = {unit.path: unit.module for unit in units}
    stages: list[tuple[Stage, Params, State]] = []
    for number, (part, skips) in enumerate(zip(parts, declared, strict=True)):
        later = {name for other in declared[number + 1 :] for name in other.pop}
        stash = {
            name: key for name, key in {**skips.stash, **skips.offers}.items() if name in later
        }
        crossing = Skips(stash, skips.pop, {}, skips.inside)
        first, last = rows[number][0].path, rows[number][-1].path
        name = first if first == last else f"{first}-{last}"
        options: dict[str, Any] = {"deferred": deferred, "spread": False, "origin": attributes}
        # Each position has its own copy, so a stage's own layers count as others, too.
        shared = shared_places({unit.path: unit.module for unit in rows[number]}, layers)
        stages.append(stage_of(part, crossing, name=name, shared=shared, **options))
    return tuple(stages)


class SequentialPart(nn.Module):
    """Some layers of a Sequential at their own paths, without the other layers."""

    def __init__(self, whole: nn.Module, units: Sequence[Unit]) -> None:
        super().__init__()
        self.training = False  # only the layers have modes; the container has none
        self._funcpipe_who = type(whole).__name__
        # Each position gets its own copy, also if the model has one module at several positions.
        # With a shared copy, the random numbers of a layer would depend on which positions are in
        # the same stage. The copies share their tensors.
        self._funcpipe_row = [(copied(unit.module), unit.spread) for unit in units]
        for unit, (layer, _) in zip(units, self._funcpipe_row, strict=True):
            *around, name = unit.path.split(".")
            inner: nn.Module = self
            for step in around:
                if step not in children_of(inner):
                    inner.add_module(step, nn.Module().train(False))
                inner = inner.get_submodule(step)
            inner.add_module(name, layer)

    def forward(self, x: Tree) -> Tree:
        """Call the layers in order."""
        for layer, spread in self._funcpipe_row:
            x = layer(*_arguments(x, spread))
        return x


# -- units
# -------------------------------------------------------------------------------


def _units(module: nn.Module, flat: bool) -> list[Unit]:
    """The units of a Sequential. Raises PlanError if it does more than call its layers in order."""
    if not is_row(module):
        reason = (
            "its class overrides forward or __call__ of nn.Sequential or fp.models.PipeSequential"
            if isinstance(module, nn.Sequential)
            else "it is not an nn.Sequential"
        )
        raise PlanError(
            "only an nn.Sequential can be cut by counting its layers; got "
            f"{type(module).__name__}: {reason}. To cut other models, use fp.split(model, "
            "num_stages, example=example)"
        )
    faults = [
        f"the Sequential itself has {kind}, which stages would not run; register them on a layer"
        for kind in hooks_of(module)
    ]
    units = list(_inside(module, "", isinstance(module, PipeSequential), flat))
    faults += [f"layer {path!r} is None" for path, layer, _ in units if layer is None]  # pyright: ignore[reportUnnecessaryComparison]
    faults += (
        [] if units else ["it has no layers, but a stage needs at least one; add nn.Identity()"]
    )
    raise_all(f"this {type(module).__name__} cannot be cut:", faults)
    return units


def _inside(container: nn.Module, path: str, spread: bool, flat: bool) -> Iterator[Unit]:
    for number, (name, layer) in enumerate(children_of(container).items()):
        # The Sequential around the border before a layer decides. For the first layer, that is the
        # outer one.
        spreads = spread if number == 0 else isinstance(container, PipeSequential)
        if flat and layer is not None and _is_open(layer):
            yield from _inside(layer, f"{path}{name}.", spreads, flat)
        else:
            yield Unit(f"{path}{name}", layer, spreads)  # pyright: ignore[reportArgumentType]


def is_row(module: nn.Module) -> bool:
    """Return whether a call of the module only calls its children in order."""
    forward = type(module).forward
    return (
        isinstance(module, nn.Sequential)
        and "forward" not in vars(module)
        and type(module).__call__ is nn.Module.__call__
        and forward in (nn.Sequential.forward, PipeSequential.forward)
    )


def _is_open(layer: nn.Module) -> bool:
    """Whether a layer is a row without hooks and tensors of its own, so that its layers count."""
    own = (*hooks_of(layer), *layer.parameters(recurse=False), *layer.buffers(recurse=False))
    return is_row(layer) and bool(children_of(layer)) and not own


def _refuse_shared_norms(units: Sequence[Unit]) -> None:
    """Raise PlanError if two units contain one batch norm layer: two would keep its statistics."""
    places: dict[int, dict[str, str]] = {}
    for unit in units:
        for path, layer in unit.module.named_modules(prefix=unit.path):
            if is_deferrable(layer):
                places.setdefault(id(layer), {}).setdefault(unit.path, path)
    faults = [
        f"the batch norm layer at {' and '.join(paths.values())}"
        for paths in places.values()
        if len(paths) > 1
    ]
    raise_all(
        "a Sequential cannot be cut if several of its layers contain the same batch norm layer, "
        "because its statistics would be kept in several places; give each place its own layer "
        "(the layers may share weight and bias):",
        faults,
    )
