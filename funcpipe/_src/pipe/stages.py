"""The stages of a `Pipe`: made from its layers once, checked before every call, and made again
after a change."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import is_
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from funcpipe._src.core.errors import PlacementError, raise_all
from funcpipe._src.core.torch_names import buffers_of, parameters_of
from funcpipe._src.core.tree import Tree
from funcpipe._src.data.plan import Plan
from funcpipe._src.devices.devices import same_device
from funcpipe._src.lower.plan import make_plan
from funcpipe._src.models.attributes import ModuleAttributes
from funcpipe._src.models.norms.batchnorm import CommitLayers
from funcpipe._src.models.sequential import cut_sequential
from funcpipe._src.models.ties import groups
from funcpipe._src.pipe.layout import Layout
from funcpipe._src.schedules.families import fill_drain
from funcpipe._src.schedules.transforms import remat

TensorHome: TypeAlias = tuple[nn.Module, str]
"""The place of a tensor: its layer, and its name there."""

CHECKPOINTS = ("always", "except_last", "never")


class Stages:
    """Layers cut into stages, as the layers were at construction."""

    def __init__(
        self, model: nn.Sequential, layout: Layout, *, deferred: bool, merge: Any = None
    ) -> None:
        self.layout, self.merge = layout, merge
        self.train = any(module.training for layer in model for module in layer.modules())
        # origin=False: Pipe itself compares the attributes before each call.
        parts = cut_sequential(model, layout.balance, deferred=deferred, origin=False)
        # The model itself has no tensors.
        homes: dict[str, TensorHome] = {
            f"{path}.{name}": (layer, name)
            for path, layer in _layers(model).items()
            for name in (*parameters_of(layer), *buffers_of(layer))
        }
        self.stages = [stage for stage, _, _ in parts]
        # For each stage, the places of its tensors, by their names in the model.
        self.params = [{name: homes[name] for name in params} for _, params, _ in parts]
        self.buffers = [{name: homes[name] for name in state} for _, _, state in parts]
        self.ties = groups([params for _, params, _ in parts])
        first: dict[int, tuple[int, str]] = {}  # the first (stage, name) of each parameter
        for stage, (_, params, _) in enumerate(parts):
            for name, tensor in params.items():
                first.setdefault(id(tensor), (stage, name))
        self.home = list(first.values())
        self.plans: dict[tuple[int, str | None], Plan] = {}

    def draw(self) -> bool:
        """Whether any stage has drawn random numbers so far."""
        return any(self.train in stage.seen.draws for stage in self.stages)

    def plan(self, num_microbatches: int, checkpoint: str | None) -> Plan:
        """The plan for an actual number of microbatches. ``checkpoint=None``: forwards only."""
        key = (num_microbatches, checkpoint)
        plan = self.plans.get(key)
        if plan is None:
            count, last = len(self.stages), num_microbatches - 1
            schedule = fill_drain(count, num_microbatches, backward=checkpoint is not None)
            if checkpoint == "always" or (checkpoint == "except_last" and last):
                kept = last if checkpoint == "except_last" else -1
                schedule = remat(schedule, keep=lambda action: action.microbatch == kept)
            plan = self.plans[key] = make_plan(
                self.stages,
                schedule,
                outputs=True,
                devices=self.layout.devices,
                ties=self.ties,
                train=self.train,
                merge=self.merge,
            )
        return plan

    def gather(self) -> tuple[tuple[dict[str, Tensor], ...], tuple[Tree, ...]]:
        """Return the parameters and the state of each stage, as they are in the layers now."""
        faults: list[str] = []
        trees: list[tuple[dict[str, Tensor], ...]] = []
        for tables in (self.params, self.buffers):
            earlier: set[int] = set()
            by_stage: list[dict[str, Tensor]] = []
            for stage, (table, device) in enumerate(zip(tables, self.layout.devices, strict=True)):
                tensors = {name: _read(home) for name, home in table.items()}
                held = [id(tensor) for tensor in tensors.values()]
                for name, tensor in tensors.items():
                    if same_device(tensor.device, device):
                        continue
                    # On another device only a tensor that an earlier stage shares is legal. This
                    # stage gets a copy of it, and the gradients of both are summed as a tie.
                    if id(tensor) in earlier:
                        tensors[name] = (
                            tensor.detach().to(device).requires_grad_(tensor.requires_grad)
                        )
                    else:
                        faults.append(
                            f"{name} is on {tensor.device}, but stage {stage} runs on {device}"
                        )
                earlier.update(held)
                by_stage.append(tensors)
            trees.append(tuple(by_stage))
        raise_all(
            "layers of a Pipe must stay on the devices of their stages; move them back, or make a "
            "new Pipe: fp.Pipe(nn.Sequential(*pipe), ...):",
            faults,
            PlacementError,
        )
        return trees[0], tuple(state or () for state in trees[1])

    def write(self, states: Sequence[Tree]) -> None:
        """Copy the running statistics of a batch into the buffers of the layers."""
        if not self.train:
            return
        with torch.no_grad():
            for stage, homes, state in zip(self.stages, self.buffers, states, strict=True):
                if isinstance(stage.commit, CommitLayers):
                    for name in stage.commit.written():
                        if name in homes:
                            _read(homes[name]).copy_(state[name])


def _read(home: TensorHome) -> Tensor:
    layer, name = home
    params = parameters_of(layer)
    tensor = params[name] if name in params else buffers_of(layer)[name]
    assert tensor is not None
    return tensor


# -- have the layers changed
# -------------------------------------------------------------------------------


class ModuleSnapshot:
    """The structure that stages depend on: layers, their attributes and hooks, shared tensors.

    Training flags are separate: `Pipe` keeps stages for several patterns of flags.
    """

    def __init__(self, model: nn.Module) -> None:
        self.attributes = ModuleAttributes(model, all_names=True)
        self.layers = _layers(model)
        self.tensors = _pattern(self.layers.values())

    @property
    def flags(self) -> tuple[bool, ...]:
        """Return the present training flags of all modules."""
        return tuple([module.training for module in self.layers.values()])

    def is_current(self, model: nn.Module) -> bool:
        """Whether a model equals this snapshot, except for training flags."""
        layers = _layers(model)
        if [*layers] != [*self.layers] or not all(map(is_, layers.values(), self.layers.values())):
            return False
        unchanged = next(self.attributes.changes(), None) is None
        return unchanged and self.tensors == _pattern(layers.values())


def _layers(model: nn.Module) -> dict[str, nn.Module]:
    """Return all modules inside a model by path."""
    layers = dict(model.named_modules(remove_duplicate=False))
    del layers[""]
    return layers


def _pattern(modules: Iterable[nn.Module]) -> list[Any]:
    """The names and shapes of all tensors of some modules, and which tensors are the same."""
    numbers: dict[int, int] = {}
    out: list[Any] = []
    for module in modules:
        for table in (parameters_of(module), buffers_of(module)):
            for name, tensor in table.items():
                if tensor is None or is_lazy(tensor):
                    out.append((name, None))
                else:
                    out.append((name, (numbers.setdefault(id(tensor), len(numbers)), tensor.shape)))
    return out
