"""Turn one nn.Module into one stage.

The stage has a copy of the module without numbers. Parameters and buffers are separate flat dicts.
`sequential` and `layers` cut a module into several stages.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from contextlib import nullcontext
from typing import Any, Self, TypeAlias, cast

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
from funcpipe._src.core.tree import Tree, map_tensors
from funcpipe._src.core.words import similar
from funcpipe._src.data.identity import words_of_layers
from funcpipe._src.data.stage import Bindable, Out, Stage, checked_names, normalise
from funcpipe._src.models.attributes import ModuleAttributes
from funcpipe._src.models.copying import copied
from funcpipe._src.models.norms.batchnorm import CommitLayers, Running
from funcpipe._src.models.norms.norm_layers import (
    DeferredNorm,
    is_deferrable,
    stage_tensor,
    with_numbers,
)
from funcpipe._src.models.norms.written_buffers import (
    has_numbers,
    looked_at,
    refuse_writes,
    version,
)
from funcpipe._src.models.skippable import Skips, carrying, skips_of
from funcpipe._src.models.unfit import (
    NOTHING_SHARED,
    refuse_kept,
    refuse_left_activations,
    refuse_unfit,
)

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
    """Turn a module into a stage, with its parameters and its state.

    The stage owns a copy of the module's structure, and the module does not change. If you change
    attributes, layers or hooks of the module afterwards, `run` raises PlanError, because the copy
    does not have the change.

    - Batch norm layers become deferred batch norm (`batch_norm`).
    - The stage stashes and pops the skips that its `skippable` layers, at any depth, exchange with
      other stages.
    - A layer trains if the plan trains and the layer was in training mode when the stage was made.
      So a frozen batch norm stays frozen, and after ``module.eval()`` the stage stays in evaluation
      mode.

    >>> block, params, state = fp.from_module(nn.Sequential(nn.Linear(4, 2), nn.BatchNorm1d(2)))
    >>> sorted(params), sorted(state)[0]
    (['0.bias', '0.weight', '1.bias', '1.weight'], '1.num_batches_tracked')

    Args:
        module: any module. The module's input is the stage's input. If the input is exactly a
            ``tuple``, its items are the arguments of forward.
        name: the name of the stage in errors.
        feeds: names of values of the batch that the forward takes as keywords.
        deferred: True: batch norm layers update their running statistics once per batch. False:
            once per microbatch, as if the module were called on one microbatch after the other.
        carry: for slices of sequences: the keyword of the forward that takes the second of the two
            values that the previous slice returned. The first slice gets None. For
            ``nn.GRU(batch_first=True)`` the keyword is ``"hx"``. "", the default: no carry.

    Returns:
        The stage; the module's own parameters by the module's own names; copies of the module's
        buffers by name, or ``()`` without buffers.

    Raises:
        PlanError: the argument is not a module, has uninitialised parameters or cannot be copied;
            a buffer shares memory with a parameter; stashes and pops do not match; or the forward
            does not have the keyword ``carry``.
    """
    if not isinstance(module, nn.Module):
        raise PlanError(
            f"from_module takes an nn.Module; got a {type(module).__name__} (for a function: "
            "fp.stage(fn))"
        )
    refuse_unfit(module)
    _check_carry(module, carry, feeds)
    options: dict[str, Any] = {"name": name, "feeds": feeds, "deferred": deferred, "carry": carry}
    return stage_of(module, skips_of(module), origin=ModuleAttributes(module), **options)


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
    shared: Mapping[str, str] = NOTHING_SHARED,
) -> tuple[Stage, Params, State]:
    """Do the work of `from_module` with known skips. ``spread=False``: a tuple is one argument."""
    skeleton = Skeleton(module, origin)
    fn = ModuleFn(skeleton, skips, set(skeleton.canonical), spread=spread, carry=carry)
    fn.shared = shared
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


def devices_fault(model: nn.Module) -> list[str]:
    """Return at most one message, for a model with tensors on several devices."""
    named = {str(tensor.device): name for name, tensor in reversed(named_tensors(model).items())}
    if len(named) < 2:
        return []
    listed = ", ".join(f"{name} on {device}" for device, name in sorted(named.items()))
    empty = "either all of its tensors must have numbers, or none"
    placed = "move it to one device to cut it, then call fp.place(plan, params)"
    return [f"it is on several devices ({listed}); {empty if 'meta' in named else placed}"]


def named_tensors(module: nn.Module, *, all_names: bool = False) -> dict[str, Tensor]:
    """Parameters and buffers under their first names, or under all names of shared tensors."""
    unique = not all_names
    named = module.named_parameters(remove_duplicate=unique)
    return dict([*named, *module.named_buffers(remove_duplicate=unique)])


def syntax_of(forward: Callable[..., Any]) -> list[ast.AST]:
    """List the syntax nodes of a function's source, outermost first; empty without source."""
    try:
        source = inspect.getsource(inspect.unwrap(forward))
        return list(ast.walk(ast.parse(textwrap.dedent(source))))
    except (OSError, TypeError, SyntaxError):
        return []


def first_names(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Map each name of a tensor to the first name of the same tensor."""
    first: dict[int, str] = {}
    return {name: first.setdefault(id(tensor), name) for name, tensor in tensors.items()}


class Skeleton:
    """A copy of a module without its numbers. It never runs, so several stages can share it."""

    def __init__(self, module: nn.Module, origin: ModuleAttributes | None) -> None:
        self.origin = origin
        tensors = named_tensors(module, all_names=True)
        self.canonical = first_names(tensors)  # each name -> the first name of the same tensor
        self.shapes = {name: tuple(tensors[name].shape) for name in self.canonical.values()}
        self.buffers = {name for name, _ in module.named_buffers(remove_duplicate=False)}
        self.module = copied(module, _placeholder)
        layers = dict(self.module.named_modules())
        self.norms = {  # the buffers of layers with deferred statistics
            path: Running.of(each, path) for path, each in layers.items() if is_deferrable(each)
        }
        # Layers that stay in evaluation mode, and whether all do.
        self.frozen = [path for path, layer in layers.items() if not layer.training]
        self.evaluation = len(self.frozen) == len(layers)


class PartFn(Bindable):
    """A part of a model as a function of its parameters: ``fn(params, x, skips=, feeds=, state=,
    train=)``."""

    who: str  # of the part's model, for messages
    param_shapes: Mapping[str, tuple[int, ...]]  # by the model's names, as `buffer_shapes`
    buffer_shapes: Mapping[str, tuple[int, ...]]
    evaluation: bool  # whether the part stays in evaluation mode
    origin: ModuleAttributes | None  # None: runs do not compare attributes of the model

    def origins(self) -> list[ModuleAttributes]:
        """Return the recorded attributes of the model."""
        return [] if self.origin is None else [self.origin]

    def part(
        self, tensors: Mapping[str, Tensor], name: str, **declared: Any
    ) -> tuple[Stage, Params, State]:
        """Make a stage of this function and select its tensors of the model; buffers are copied."""
        params = {key: tensors[key] for key in self.param_shapes}
        state = {key: tensors[key].detach().clone() for key in self.buffer_shapes}
        stage = Stage(
            self, name, state=bool(state), takes_train=True, evaluation=self.evaluation, **declared
        )
        return stage, params, state or ()

    def check(self, params: Any, state: Any) -> None:
        """Raise PlanError if tensors are not exactly the part's, by name, kind and shape."""
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
            for name in strange:
                hint = similar(name, expected)
                faults.append(f"{kind} has {name!r}, which the module does not{hint}")
            for name, shape in expected.items():
                tensor: Any = tree.get(name)  # pyright: ignore[reportUnknownVariableType]
                if name not in tree:
                    faults.append(f"{kind} lacks {name!r}{similar(name, strange, '; is it {!r}?')}")
                elif not isinstance(tensor, Tensor):
                    faults.append(f"{name!r} is a {type(tensor).__name__}, not a tensor")
                elif tuple(tensor.shape) != shape:
                    faults.append(
                        f"{name!r} has shape {tuple(tensor.shape)}, but the module needs {shape}"
                    )
        advice = "give params and state of the plan's own split, in its order"
        raise_all(f"these are not the tensors of {self.who}; {advice}:", faults)


class ModuleFn(PartFn):
    """A module, or a part of one, as a function of its parameters. ``names`` are all names of its
    tensors."""

    # The places of objects that layers of other stages share, with these layers.
    shared: Mapping[str, str] = NOTHING_SHARED

    def __init__(
        self, skeleton: Skeleton, skips: Skips, names: Set[str], *, spread: bool, carry: str = ""
    ) -> None:
        self.shape, self.skeleton, self.evaluation = skeleton, skeleton.module, skeleton.evaluation
        self.origin = skeleton.origin
        self.who = getattr(self.skeleton, "_funcpipe_who", type(self.skeleton).__name__)
        self.skips, self.held, self.spread, self.carry = skips, names, spread, carry
        canonical = {skeleton.canonical[alias] for alias in names}
        self.param_shapes, self.buffer_shapes = {}, {}
        for name, size in skeleton.shapes.items():
            if name in canonical:
                shapes = self.buffer_shapes if name in skeleton.buffers else self.param_shapes
                shapes[name] = size
        self.norms = {
            path: running for path, running in skeleton.norms.items() if running.mean in names
        }
        # The modes (training or not) in which a forward was checked for writes into buffers, and
        # into shared objects.
        self.looked: set[bool] = set()
        self.watched: set[bool] = set()
        self.left: dict[str, Any] = {}  # numbers that the last run left in attributes, by place
        self._idle: list[ModuleCopy] = []

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_idle": [], "left": {}}

    def copy(self) -> ModuleCopy:
        """Make a copy that can run."""
        return ModuleCopy(self)

    def __call__(self, params: Params, x: Tree, **extras: Any) -> Any:
        """Call a fresh copy: safe under torch.func and from any thread."""
        return self.copy().install(params, extras.get("state", ()))(x, **extras)

    def bind(self, params: Params, state: State) -> ModuleCopy:
        """Give these tensors to an idle copy, or to a new one."""
        try:
            # pop and append of a list are atomic under the GIL, so several lanes need no lock.
            idle = self._idle.pop()
        except IndexError:
            idle = self.copy()
        return idle.install(params, state)

    def give_back(self, idle: ModuleCopy) -> None:
        """Keep a released copy for the next run."""
        self._idle.append(idle)

    def described(self) -> Iterable[tuple[str, str]]:
        """The module and its submodules, in words."""
        return words_of_layers(self.skeleton.named_modules())

    def layers(self) -> list[str]:
        """The paths of all submodules without children."""
        return [
            path
            for path, layer in self.skeleton.named_modules()
            if path and not any(layer.children())
        ]


class ModuleCopy:
    """A private copy of the module that runs with the tensors of one bound stage."""

    guards_state = True  # calls check for writes into the state themselves, so the run does not

    def __init__(self, owner: ModuleFn) -> None:
        self.owner = owner
        # A stage may be traced under a fake tensor mode, and the skeleton's tensors are not fake.
        with without_modes():
            self.module = copied(owner.skeleton)
        self.train = not owner.evaluation  # as the layers were when the stage was made
        self.attributes = ModuleAttributes(self.module, all_names=True)
        self.places = {id(layer): path for path, layer in self.module.named_modules()}
        norms = [(self.module.get_submodule(path), path) for path in owner.norms]
        self.norms = [DeferredNorm(layer, path) for layer, path in norms if is_deferrable(layer)]
        self.recurrent = [layer for layer in self.module.modules() if isinstance(layer, nn.RNNBase)]
        # (table, attribute, canonical name) of each tensor of this stage.
        self.slots: list[tuple[dict[str, Any], str, str]] = []
        # Places of tensors that belong to other stages.
        self.absent: list[tuple[dict[str, Any], str, Tensor, str]] = []
        # If a forward removes a parametrization, tensors change tables. `release` compares the
        # names and drops such a copy.
        self.tables: list[tuple[dict[str, Any], list[str]]] = []
        for path, layer in self.module.named_modules(remove_duplicate=False):
            for table in (parameters_of(layer), buffers_of(layer)):
                self.tables.append((table, [*table]))
                for local, tensor in table.items():
                    alias = f"{path}.{local}" if path else local
                    if tensor is not None and alias in owner.held:
                        self.slots.append((table, local, owner.shape.canonical[alias]))
                    elif tensor is not None:
                        self.absent.append((table, local, tensor, alias))
        self.buffers: list[tuple[tuple[dict[str, Any], str, str], Tensor]] = []

    def install(self, params: Params, state: State) -> Self:
        """Put tensors in the places of parameters and buffers."""
        self.owner.check(params, state)
        tensors = {**params, **(state or {})}
        for table, local, key in self.slots:
            table[local] = tensors[key]
        for norm in self.norms:
            norm.install()
        for layer in self.recurrent:  # RNN layers also keep a list of their weights
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
        # ``asked``, not ``train``: also in a stage in evaluation mode, the user's norm may
        # normalise by the batch, and its statistics then count.
        collects = asked and bool(self.norms)
        for norm in self.norms:
            norm.begin(collects=collects)
        before = self.versions if self.numbers else [version(buffer) for _, buffer in self.buffers]
        shared, watched = self.owner.shared, self.owner.watched
        watches = bool(shared) and train not in watched and torch.is_grad_enabled()
        with refuse_left_activations({"": self.module}, shared) if watches else _nothing:
            if not self.buffers or (self.numbers and train in self.owner.looked):
                y, stash = self._run(x, extras)
            else:
                y, stash = self._run_checked(x, extras)
        if watches:
            watched.add(train)
        if self.norms:  # a forward may return a buffer
            y, stash = map_tensors(with_numbers, (y, stash))
        seen = {norm.path: norm.end() for norm in self.norms}
        self._refuse_writes(before)
        if not collects and not stash:
            return y
        out = normalise(y)
        return out._replace(stash={**out.stash, **stash}, stats=seen if collects else out.stats)

    def _run(self, x: Tree, extras: dict[str, Any]) -> tuple[Any, dict[str, Tree]]:
        """Return the output, and the values that the layers stashed for other stages."""
        # Exactly a tuple is spread; a named tuple is one argument.
        arguments = x if self.owner.spread and type(x) is tuple else (x,)
        carry = {self.owner.carry: extras.get("carry")} if self.owner.carry else {}
        keywords = {**extras.get("feeds", {}), **carry}
        skips = self.owner.skips
        store = {key: extras["skips"][name] for name, key in skips.pop.items()}
        with carrying(store) if skips.inside else _nothing:
            y = _carry_apart(self.module(*arguments, **keywords), self.owner.carry, self.owner.who)
        stashed = {**skips.stash, **skips.offers}
        return y, {name: store[key] for name, key in stashed.items() if key in store}

    def _run_checked(self, x: Tree, extras: dict[str, Any]) -> tuple[Any, dict[str, Tree]]:
        """Do `_run` for the first time in a mode, and compare the numbers of buffers.

        A write through ``.data`` or numpy does not change a tensor's version.
        """
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
            if stage_tensor(table.get(local)) is not buffer or version(buffer) != old
        ]
        refuse_writes(type(self.module).__name__, written)

    def release(self) -> None:
        """Drop the tensors and return the copy to the idle copies."""
        for table, local, _ in self.slots:
            table[local] = None
        for layer in self.recurrent:
            vars(layer)[FLAT_WEIGHTS] = []
        self.buffers = []
        changes = list(self.attributes.changes())
        if changes:  # a copy with values that a forward left (an attention map) is dropped
            refuse_kept(self.owner.left, changes, type(self.module).__name__)
        for norm in self.norms:
            norm.release()
        if not changes and all([*table] == names for table, names in self.tables):
            self.owner.give_back(self)


def _check_carry(module: nn.Module, carry: str, feeds: Sequence[str]) -> None:
    """Raise PlanError if the forward cannot take this keyword as its carry; "" for none."""
    if not carry:
        return
    who, known = type(module).__name__, inspect.signature(module.forward).parameters
    if carry not in known and not any(each.kind is each.VAR_KEYWORD for each in known.values()):
        raise PlanError(
            f"carry={carry!r}: the forward of {who} has no such keyword; it takes "
            f"{', '.join(known)}"
        )
    if carry in feeds or carry == next(iter(known)):
        raise PlanError(
            f"carry={carry!r} is also {'a feed' if carry in feeds else 'the input'}; name "
            "another keyword"
        )
    if any(isinstance(layer, nn.RNNBase) and layer.bidirectional for layer in module.modules()):
        raise PlanError(
            f"{who} is bidirectional: later slices change earlier outputs, so slices cannot run "
            "one after the other"
        )


def _carry_apart(returned: Any, carry: str, who: str) -> Any:
    """Separate the carry from a forward's output."""
    if not carry:
        return returned
    if not isinstance(returned, tuple) or len(cast("tuple[Any, ...]", returned)) != 2:
        raise PlanError(
            f"carry={carry!r}: the forward of {who} must return two values, its output and the "
            f"carry for the next slice; it returned a {type(cast('object', returned)).__name__}"
        )
    y, handed = cast("tuple[Any, Any]", returned)
    return Out(y, carry=handed)


_nothing = nullcontext()


def _placeholder(tensor: Tensor) -> Tensor:
    """A meta tensor of the same shape and type, for a copy without numbers."""
    empty = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    return nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty
