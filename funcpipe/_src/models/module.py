"""One nn.Module as one stage: a parameter-free copy of it, and its parameters and buffers as flat
dicts."""

from __future__ import annotations

import ast
import inspect
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any, Self, TypeAlias

import torch
from torch import Tensor, nn

from funcpipe._src.core.errors import PlanError, raise_all
from funcpipe._src.core.torch_names import (
    FLAT_WEIGHTS,
    buffers_of,
    list_weights,
    parameters_of,
    without_modes,
)
from funcpipe._src.core.tree import Tree
from funcpipe._src.core.words import similar
from funcpipe._src.data.stage import Bindable, Stage, checked_names, normalise
from funcpipe._src.models.attributes import ModuleAttributes
from funcpipe._src.models.copying import copied, copied_around
from funcpipe._src.models.kept_values import refuse_kept
from funcpipe._src.models.module_carry import carry_apart, check_carry
from funcpipe._src.models.norms.norm_commit import CommitLayers, Running
from funcpipe._src.models.norms.norm_layers import DeferredBatchNorm
from funcpipe._src.models.norms.written_buffers import (
    has_numbers,
    looked_at,
    refuse_writes,
    version,
)
from funcpipe._src.models.skip_scope import carrying
from funcpipe._src.models.skippable import Skips, skips_of

Params: TypeAlias = dict[str, Tensor]
State: TypeAlias = Any


def from_module(
    module: nn.Module,
    *,
    name: str = "",
    feeds: Sequence[str] = (),
    deferred: bool = True,
    carry: str = "",
) -> tuple[Stage, Params, State]:
    """A module as a stage, with its parameters and state.

    The stage owns a copy of the module without its numbers; the module itself is never touched. If
    you change attributes, layers or hooks of the module afterwards, `run` raises PlanError, because
    the copy does not see the change. Batch norm layers become deferred ones (`batch_norm`). The
    stage stashes and pops the skips that its `skippable` layers, at any depth, exchange with other
    stages. A layer of the copy trains where the plan trains, if the layer was in training mode when
    the stage was made. So a frozen batch norm stays frozen, and after ``module.eval()`` the whole
    stage stays in evaluation mode.

    >>> block, params, state = fp.from_module(nn.Sequential(nn.Linear(4, 2), nn.BatchNorm1d(2)))
    >>> sorted(params), sorted(state)[0]
    (['0.bias', '0.weight', '1.bias', '1.weight'], '1.num_batches_tracked')

    Args:
        module: any module. Its input is the stage's input; exactly a ``tuple`` is spread over its
            arguments.
        name: what errors call the stage.
        feeds: names of values of the batch that its forward takes as keywords.
        deferred: batch norm layers update their running statistics once per batch (True), or once
            per microbatch, as the module itself would if it were called on one microbatch after the
            other.
        carry: for slices of sequences, the keyword of its forward that takes what the slice before
            returned as the second of two values (the first one gets None): ``"hx"`` of
            ``nn.GRU(batch_first=True)``.

    Returns:
        The stage; the module's own parameters by the module's own names; copies of its buffers by
        name, or ``()``.

    Raises:
        PlanError: not a module, not initialised, one that cannot be copied, one whose layers stash
            and pop what does not match, or whose forward has no such keyword.
    """
    if not isinstance(module, nn.Module):
        raise PlanError(
            f"from_module takes an nn.Module; got a {type(module).__name__} (for a function: "
            "fp.stage(fn))"
        )
    refuse_lazy(module)
    check_carry(module, carry, feeds)
    options: dict[str, Any] = {
        "deferred": deferred,
        "carry": carry,
        "origin": ModuleAttributes(module),
    }
    return stage_of(module, skips_of(module), name=name, feeds=feeds, **options)


def stage_of(
    module: nn.Module,
    skips: Skips,
    *,
    name: str = "",
    feeds: Sequence[str] = (),
    deferred: bool = True,
    spread: bool = True,
    carry: str = "",
    origin: ModuleAttributes | None = None,
) -> tuple[Stage, Params, State]:
    """`from_module` with known skips; without ``spread`` a tuple is one argument."""
    skeleton = Skeleton(module, origin)
    fn = ModuleFn(skeleton, skips, set(skeleton.canonical), spread=spread, carry=carry)
    return fn.part(
        named_tensors(module),
        name,
        stash=tuple(skips.stash),
        pop=tuple(skips.pop),
        feeds=checked_names(feeds, "feeds"),
        commit=CommitLayers(fn.norms, deferred=deferred) if fn.norms else None,
        offers=tuple(skips.offers),
        carry=bool(carry),
    )


def unfit(module: nn.Module) -> list[str]:
    """What keeps a module from being a stage: layers that share it with other processes, or whose
    tensors are C++'s."""
    library = sys.modules.get("torch.distributed.fsdp")
    names = ("FSDPModule", "FullyShardedDataParallel")
    kinds = (
        nn.parallel.DistributedDataParallel,
        *(getattr(library, name) for name in names if library is not None),
    )
    shared = [path for path, layer in module.named_modules() if isinstance(layer, kinds)]
    if shared:
        return [
            f"{repr(shared[0]) if shared[0] else 'it'} shares its parameters with other processes "
            "(fully_shard, "
            "DistributedDataParallel), around its own forward; a plan does it in its own order: "
            "give the module as it "
            'was before, fp.ranks(plan, mesh, dp="dp") and fp.place(plan, params, ranks, '
            "shard=True)"
        ]
    outermost: dict[str, nn.Module] = {}
    for path, layer in module.named_modules():
        inside = any(not outer or path.startswith(f"{outer}.") for outer in outermost)
        if isinstance(layer, torch.jit.ScriptModule) and not inside:
            outermost[path] = layer
    return [
        f"{repr(path) if path else 'it'} is TorchScript (a {type(layer).__name__}), whose "
        "parameters and copies are not Python's; give the module that it was scripted or traced "
        "from"
        for path, layer in outermost.items()
    ]


def refuse_lazy(module: nn.Module) -> None:
    """Raises PlanError where parameters or buffers have no shape yet, or are TorchScript's."""
    raise_all(f"this {type(module).__name__} cannot be a stage:", unfit(module))
    lazy = [name for name, tensor in all_tensors(module).items() if nn.parameter.is_lazy(tensor)]
    if lazy:
        raise PlanError(
            f"parameters {lazy} are not initialised yet; call the module once on an example first"
        )


def devices_fault(model: nn.Module) -> list[str]:
    """The fault of a model on several devices."""
    named = {str(tensor.device): name for name, tensor in reversed(named_tensors(model).items())}
    if len(named) < 2:
        return []
    listed = ", ".join(f"{name} on {device}" for device, name in sorted(named.items()))
    empty, placed = (
        "give numbers to all of it first, or to none",
        "cut it on one, then fp.place(plan, params)",
    )
    return [f"it lies on several devices ({listed}); {empty if 'meta' in named else placed}"]


def named_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers under their first names."""
    return dict([*module.named_parameters(), *module.named_buffers()])


def clones(module: nn.Module) -> dict[str, Tensor]:
    """Copies of parameters and buffers, without gradients, by their first names."""
    return {name: tensor.detach().clone() for name, tensor in named_tensors(module).items()}


def all_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers under every name that they have."""
    named = [
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    ]
    return dict(named)


def syntax_of(forward: Callable[..., Any]) -> list[ast.AST]:
    """The nodes of a function's source, outermost first; none where it has no source."""
    try:
        return list(
            ast.walk(ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(forward)))))
        )
    except (OSError, TypeError, SyntaxError):
        return []


def first_names(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Every name of a tensor -> the first name of the same tensor."""
    first: dict[int, str] = {}
    return {name: first.setdefault(id(tensor), name) for name, tensor in tensors.items()}


class Skeleton:
    """A copy of a module without its numbers, with deferred norms; it is never run, so stages share
    it.

    Attributes:
        module: the copy.
        canonical: every name of a parameter or buffer -> the first name of the same tensor.
        shapes: of the tensors, by these first names.
        buffers: the first names of buffers.
        norms: for the path of each layer whose statistics are deferred, its buffers.
        frozen: the paths of layers that stay in evaluation mode.
        evaluation: do all layers.
        origin: the attributes of the copied model; None: runs do not compare them.
    """

    def __init__(self, module: nn.Module, origin: ModuleAttributes | None) -> None:
        self.origin = origin
        tensors = all_tensors(module)
        self.canonical = first_names(tensors)
        self.shapes = {name: tuple(tensors[name].shape) for name in self.canonical.values()}
        self.buffers = {name for name, _ in module.named_buffers(remove_duplicate=False)}
        self.module = copied(module, _placeholder)
        self.norms: dict[str, Running] = {}
        for path, layer in self.module.named_modules():
            if DeferredBatchNorm.converts(layer):
                self.norms[path] = DeferredBatchNorm.convert(layer, path)
        self.frozen = [path for path, layer in self.module.named_modules() if not layer.training]
        self.evaluation = all(not layer.training for layer in self.module.modules())


class PartFn(Bindable):
    """A part of a model as a function of its parameters: ``fn(params, x, skips=, feeds=, state=,
    train=)``.

    Attributes:
        who: whose tensors these are, for messages.
        param_shapes, buffer_shapes: of the part's tensors, by the model's names.
        evaluation: does it stay in evaluation mode.
        origin: the recorded attributes of the model; None: runs do not compare them.
    """

    who: str
    param_shapes: Mapping[str, tuple[int, ...]]
    buffer_shapes: Mapping[str, tuple[int, ...]]
    evaluation: bool
    origin: ModuleAttributes | None

    def origins(self) -> list[ModuleAttributes]:
        """Return the recorded attributes of the model."""
        return [] if self.origin is None else [self.origin]

    def part(
        self, tensors: Mapping[str, Tensor], name: str, **declared: Any
    ) -> tuple[Stage, Params, State]:
        """The stage of this function, with its share of a model's tensors; buffers are copied."""
        params = {key: tensors[key] for key in self.param_shapes}
        state = {key: tensors[key].detach().clone() for key in self.buffer_shapes}
        stage = Stage(
            self, name, state=bool(state), takes_train=True, evaluation=self.evaluation, **declared
        )
        return stage, params, state or ()

    def check(self, params: Any, state: Any) -> None:
        """Refuse parameters and buffers that are not exactly those of the part. Raises
        PlanError."""
        faults: list[str] = []
        for kind, tree, expected in (
            ("params", params, self.param_shapes),
            ("state", state or {}, self.buffer_shapes),
        ):
            if not isinstance(tree, Mapping):
                faults.append(
                    f"{kind} is a {type(tree).__name__}, not a dict by the module's names"
                )
                continue
            strange = [str(name) for name in tree if name not in expected]  # pyright: ignore[reportUnknownVariableType]
            faults += [
                f"{kind} has {name!r}, which the module does not{similar(name, expected)}"
                for name in strange
            ]
            for name, shape in expected.items():
                tensor: Any = tree.get(name)  # pyright: ignore[reportUnknownVariableType]
                if name not in tree:
                    faults.append(f"{kind} lacks {name!r}{similar(name, strange, '; is it {!r}?')}")
                elif not isinstance(tensor, Tensor):
                    faults.append(f"{name!r} is a {type(tensor).__name__}, not a tensor")
                elif tuple(tensor.shape) != shape:
                    faults.append(
                        f"{name!r} has shape {tuple(tensor.shape)}, the module wants {shape}"
                    )
        raise_all(f"these are not the tensors of {self.who}:", faults)


class ModuleFn(PartFn):
    """A module as a function of its parameters.

    Attributes:
        held: the names (all of them, of tied ones too) of the tensors that the stage has.
        norms: for the path of each layer whose statistics are deferred, its buffers.
        carry: as in `from_module`.
        looked: the modes (training or not) in which a forward was looked at for writes into
            buffers.
        left: numbers that the last run left in attributes of its copy, by their places.
    """

    def __init__(
        self, skeleton: Skeleton, skips: Skips, names: Set[str], *, spread: bool, carry: str = ""
    ) -> None:
        self.shape, self.skeleton, self.evaluation = skeleton, skeleton.module, skeleton.evaluation
        self.origin = skeleton.origin
        self.who = type(self.skeleton).__name__
        self.skips, self.held, self.spread, self.carry = skips, names, spread, carry
        canonical = {skeleton.canonical[alias] for alias in names}
        shapes = {name: size for name, size in skeleton.shapes.items() if name in canonical}
        self.param_shapes = {
            name: size for name, size in shapes.items() if name not in skeleton.buffers
        }
        self.buffer_shapes = {
            name: size for name, size in shapes.items() if name in skeleton.buffers
        }
        self.norms = {
            path: running for path, running in skeleton.norms.items() if running.mean in names
        }
        self.looked: set[bool] = set()
        self.left: dict[str, Any] = {}
        self._idle: list[ModuleCopy] = []

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_idle": [], "left": {}}

    def copy(self) -> ModuleCopy:
        """A copy to run."""
        return ModuleCopy(self)

    def __call__(self, params: Params, x: Tree, **extras: Any) -> Any:
        """Call on a copy of its own: safe under torch.func and from any thread."""
        return self.copy().install(params, extras.get("state", ()))(x, **extras)

    def bind(self, params: Params, state: State) -> ModuleCopy:
        """A copy with these tensors as its parameters, kept for the next run when released."""
        try:
            idle = self._idle.pop()
        except IndexError:
            idle = self.copy()
        return idle.install(params, state)

    def give_back(self, idle: ModuleCopy) -> None:
        """Keep a released copy for the next run."""
        self._idle.append(idle)

    def layers(self) -> list[str]:
        """The paths of all submodules without children."""
        return [
            path
            for path, layer in self.skeleton.named_modules()
            if path and not any(layer.children())
        ]


class ModuleCopy:
    """A private copy of the module with tensors in the places of its parameters."""

    guards_state = True
    """A run need not look for writes into the state: calls refuse them."""

    def __init__(self, owner: ModuleFn) -> None:
        self.owner = owner
        with without_modes():  # a stage may be traced on fake tensors; its skeleton has none
            self.module = copied_around(owner.skeleton, {})
        self.train = not owner.evaluation  # as the layers were when the stage was made
        self.attributes = ModuleAttributes(self.module, all_names=True)
        self.places = {id(layer): path for path, layer in self.module.named_modules()}
        norms = [layer for layer in self.module.modules() if isinstance(layer, DeferredBatchNorm)]
        self.norms = [layer for layer in norms if layer.deferral.path in owner.norms]
        self.recurrent = [layer for layer in self.module.modules() if isinstance(layer, nn.RNNBase)]
        self.slots: list[
            tuple[dict[str, Any], str, str]
        ] = []  # where tensors go, and by which name
        self.absent: list[
            tuple[dict[str, Any], str, Tensor, str]
        ] = []  # places of tensors of other stages
        for path, layer in self.module.named_modules(remove_duplicate=False):
            for table in (parameters_of(layer), buffers_of(layer)):
                for local, tensor in table.items():
                    alias = f"{path}.{local}" if path else local
                    if tensor is not None and alias in owner.held:
                        self.slots.append((table, local, owner.shape.canonical[alias]))
                    elif tensor is not None:
                        self.absent.append((table, local, tensor, alias))
        self.buffers: list[tuple[tuple[dict[str, Any], str, str], Tensor]] = []
        layers = list(self.module.modules())
        tables = [table for layer in layers for table in (parameters_of(layer), buffers_of(layer))]
        self.tables = [
            (table, [*table]) for table in tables
        ]  # a removed parametrization moves tensors

    def install(self, params: Params, state: State) -> Self:
        """Put tensors in the places of parameters and buffers."""
        self.owner.check(params, state)
        tensors = {**params, **(state or {})}
        for table, local, key in self.slots:
            table[local] = tensors[key]
        for layer in self.recurrent:  # they keep a second list of their weights
            list_weights(layer)
        self.buffers = [
            (slot, tensors[slot[2]]) for slot in self.slots if slot[2] in self.owner.buffer_shapes
        ]
        self.numbers = all(has_numbers(buffer) for _, buffer in self.buffers)
        self.versions = [version(buffer) for _, buffer in self.buffers]
        return self

    def __call__(self, x: Tree, **extras: Any) -> Any:
        """Run on one microbatch."""
        asked = bool(extras.get("train", False))
        train = asked and not self.owner.evaluation
        if train is not self.train:
            self._set_train(train)
        collects = asked and bool(
            self.norms
        )  # a norm in evaluation mode may insist on statistics of the batch
        for layer in self.norms:
            layer.deferral.collected = [] if collects else None
        before = self.versions if self.numbers else [version(buffer) for _, buffer in self.buffers]
        if not self.buffers or (self.numbers and train in self.owner.looked):
            y, stash = self._run(x, extras)
        else:
            y, stash = self._look(x, extras)
        self._refuse_writes(before)
        if not collects and not stash:
            return y
        stats = (
            {layer.deferral.path: layer.deferral.take() for layer in self.norms} if collects else {}
        )
        out = normalise(y)
        return out._replace(stash={**out.stash, **stash}, stats=stats or out.stats)

    def _run(self, x: Tree, extras: dict[str, Any]) -> tuple[Any, dict[str, Tree]]:
        """The output, and what the layers stashed for other stages."""
        # Exactly a tuple is spread; a named tuple is one argument.
        arguments = x if self.owner.spread and type(x) is tuple else (x,)
        carry = {self.owner.carry: extras.get("carry")} if self.owner.carry else {}
        keywords = {**extras.get("feeds", {}), **carry}
        skips = self.owner.skips
        if not skips.inside:
            return carry_apart(
                self.module(*arguments, **keywords), self.owner.carry, self.owner.who
            ), {}
        store = {key: extras["skips"][name] for name, key in skips.pop.items()}
        with carrying(store):
            y = carry_apart(self.module(*arguments, **keywords), self.owner.carry, self.owner.who)
        stashed = {**skips.stash, **skips.offers}
        return y, {name: store[key] for name, key in stashed.items() if key in store}

    def _look(self, x: Tree, extras: dict[str, Any]) -> tuple[Any, dict[str, Tree]]:
        """`_run`, the first time in a mode: it may not write buffers, not even where no version
        counts it."""
        buffers = {key: buffer for (_, _, key), buffer in self.buffers}
        result, comparable = looked_at(
            lambda: self._run(x, extras), buffers, type(self.module).__name__
        )
        if comparable:
            self.owner.looked.add(self.train)
        return result

    def _set_train(self, train: bool) -> None:
        self.module.train(train)
        for path in self.owner.shape.frozen:
            self.module.get_submodule(path).training = False
        self.train = train

    def _refuse_writes(self, before: list[int]) -> None:
        written = [
            key
            for ((table, local, key), buffer), old in zip(self.buffers, before, strict=True)
            if table.get(local) is not buffer or version(buffer) != old
        ]
        refuse_writes(type(self.module).__name__, written)

    def release(self) -> None:
        """Forget the tensors and be ready for another run."""
        for table, local, _ in self.slots:
            table[local] = None
        for layer in self.recurrent:
            vars(layer)[FLAT_WEIGHTS] = []
        self.buffers = []
        changes = self.attributes.changes()
        if changes:  # a copy with values that a forward left (an attention map) is dropped
            refuse_kept(self.owner.left, changes, type(self.module).__name__)
        elif all([*table] == names for table, names in self.tables):
            self.owner.give_back(self)


def _placeholder(tensor: Tensor) -> Tensor:
    """A tensor on meta of the same shape and type, that stands for one in a copy without
    numbers."""
    empty = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    return nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty
