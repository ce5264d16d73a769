"""The result of cutting a model: `Split`, its tensors by the model's own names, and its
``state_dict``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from funcpipe._src.core.errors import PlanError, raise_all
from funcpipe._src.core.notebook import page, shown
from funcpipe._src.core.shown import Facts, amount_of, guarded, line, some, stages_words, tied_words
from funcpipe._src.core.table import Table
from funcpipe._src.core.tree import Tree, same_numbers
from funcpipe._src.core.words import similar, size_of
from funcpipe._src.data.plan import Ties, forgotten_state
from funcpipe._src.data.stage import Stage
from funcpipe._src.models.losses import ModelLoss
from funcpipe._src.models.module import named_tensors
from funcpipe._src.models.ties import Home, Owner, groups, innermost, mark, transmit
from funcpipe._src.models.traced.graph import CutEdge
from funcpipe._src.models.traced.traced import GraphFn

Part = tuple[Stage, Any, Any]  # a stage with its params and state


_IN_PLACE_OF = {
    "parameters": "for an optimizer use fp.leaves(params), where params = fp.place(plan, "
    "split.params)",
    "named_parameters": "use fp.named_leaves(params)",
    "to": "fp.place(plan, split.params) returns parameters on the devices of the plan",
    "train": "call model.train() before fp.split; a plan with backwards trains",
    "eval": "to evaluate: fp.make_plan(split, schedule.forwards(), loss=...)",
}
"""The calls for what users of ``nn.Module`` type."""


@dataclass(frozen=True, eq=False)
class Split:
    """A model as stages and explicit tensors. `split` makes it; a Split does not change.

    >>> split = fp.split(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), 2)
    >>> print(split)
    2 stages
    stage 0 0-1: 2 parameters, 40 numbers, 160 B
    stage 1 2: 2 parameters, 18 numbers, 72 B

    Attributes:
        stages: the stages, in order.
        params: one dict per stage: the model's parameters that the stage uses, by the model's
            names. The tensors are the model's own.
        state: one dict per stage: copies of the buffers that the stage uses, by the model's names.
            ``()`` for a stage without buffers.
        ties: groups of (stage, name) that are one parameter. The stages carry this information, so
            you need not give it to `make_plan`.
        loss: ``(output, target) -> loss``, which takes the model's own loss out of its output. For
            transformers models it also counts labels. None: the model has no loss.
        edges: the values between stages; empty without a trace.
        homes: for each name of the model, the stages that have the tensor.
        rest: tensors of the model that no stage uses, by name.
    """

    stages: tuple[Stage, ...]
    params: tuple[Any, ...]
    state: tuple[Any, ...]
    ties: Ties = ()
    loss: Callable[[Any, Any], Any] | None = None
    edges: tuple[CutEdge, ...] = ()
    homes: Mapping[str, Home] = field(default_factory=dict, repr=False)
    rest: dict[str, Tensor] = field(default_factory=dict, repr=False)

    if not TYPE_CHECKING:  # type checkers would accept every name

        def __getattr__(self, name: str) -> Any:
            """Raise AttributeError; for a method of modules, name the call to use."""
            use = _IN_PLACE_OF.get(name)
            raise AttributeError(
                f"a Split has no attribute {name!r}" + (f"; {use}" if use else ""),
                name=name,
                obj=self,
            )

    def __iter__(self) -> Iterator[Any]:
        """Unpack: ``stages, params, state, ties, loss = fp.split(...)``."""
        return iter((self.stages, self.params, self.state, self.ties, self.loss))

    def __len__(self) -> int:
        return len(self.stages)

    def merge(
        self, params: Sequence[Tree], state: Sequence[Tree] | None = None
    ) -> dict[str, Tensor]:
        """Return the parameters of all stages as one ``state_dict`` of the model.

        The result has the model's names, order and tied names. Gradients work too. If no tensor in
        the trees is an ``nn.Parameter`` or requires grad, the trees are gradients, or parameters of
        a functional optimizer. The result then lacks parameters without a gradient and parameters
        that no stage uses. ``split.state_dict() | split.merge(params, state)`` has all names.

        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> split = fp.split(model, 2)
        >>> model.load_state_dict(split.merge(split.params))
        <All keys matched successfully>

        Args:
            params: one dict per stage, like ``self.params``, or gradients, like ``result.grads``.
            state: one dict per stage, like ``result.state``; the result then includes buffers.
                None: for parameters the state of the split, for gradients no buffers.

        Raises:
            PlanError: the trees do not fit this split, or ``state`` is missing although training
                changes it.
        """
        if not isinstance(params, (tuple, list)):
            raise PlanError(
                "merge takes one tree for each stage: merge(params, result.state); got a "
                f"{type(params).__name__}"
            )
        given = [leaf for tree in params if isinstance(tree, Mapping) for leaf in tree.values()]
        are_parameters = not given or any(
            isinstance(leaf, nn.Parameter) or getattr(leaf, "requires_grad", False)
            for leaf in given
        )
        fault = forgotten_state(self.stages, "split") if are_parameters and state is None else ""
        if fault:
            raise PlanError(fault)
        states = self.state if state is None else state
        if len(params) != len(self) or len(states) != len(self):
            raise PlanError(
                f"merge takes one tree for each of {len(self)} stages; got {len(params)} params "
                f"and {len(states)} states"
            )
        trees = {"params": params, "state": states}
        out: dict[str, Tensor] = {}
        faults: list[str] = []
        absent: dict[str, None] = {}
        for name, home in self.homes.items():
            if not home.saved:
                continue
            if not home.owners:
                out |= {name: self.rest[name]} if are_parameters else {}
                continue
            # Copies of a tied parameter are equal, so the first represents all.
            kind, stage, key = home.owners[0]
            if kind == "state" and state is None and not are_parameters:
                continue
            tree = trees[kind][stage]
            if tree is None:
                absent[f"{kind}[{stage}] is None"] = None
            elif not isinstance(tree, Mapping) or key not in tree:
                faults.append(f"{kind}[{stage}] lacks {key!r}")
            elif tree[key] is not None:  # gradients have none where nothing is trained
                out[name] = tree[key].detach()
        title = (
            "merge needs the trees of all stages, but other ranks have some of them; call "
            "fp.save(path, split, params, state=state, ranks=ranks) on all ranks, then loaded = "
            "fp.load(path, split) and split.merge(loaded.params, loaded.state) in one process:"
        )
        raise_all(title, absent)
        title = "these are not the trees of this split; give merge(params, state):"
        raise_all(title, faults, most=8)
        return out

    def state_dict(self) -> dict[str, Tensor]:
        """Return the model's ``state_dict`` with the numbers of this split."""
        return self.merge(self.params, self.state)

    def load_state_dict(self, state_dict: Mapping[str, Tensor], *, strict: bool = True) -> Split:
        """Return a new split with the numbers of a ``state_dict``.

        The number of stages may differ from the split that made the ``state_dict``. This split and
        the model do not change. Types, devices and requires_grad stay the same.

        Args:
            state_dict: tensors by the model's names.
            strict: True: raise PlanError for missing and unknown names.

        Returns:
            A new split.

        Raises:
            PlanError: names or shapes do not fit, or tied names have different numbers. The message
                lists all faults.
        """
        faults = self._faults(state_dict, strict)
        raise_all("this state_dict does not fit the split:", faults)
        trees = {
            "params": [dict(tree) for tree in self.params],
            "state": [dict(tree) if tree else () for tree in self.state],
        }
        rest = dict(self.rest)
        loaded: dict[int, Tensor] = {}
        with torch.no_grad():
            for name, home in self.homes.items():
                tensor = state_dict.get(name)
                if tensor is None:
                    continue
                if not home.owners and name in rest:
                    rest[name] = _like(rest[name], tensor, loaded)
                for kind, stage, key in home.owners:
                    tree: Any = trees[kind][stage]
                    before = self.params if kind == "params" else self.state
                    tree[key] = _like(before[stage][key], tensor, loaded)
        return replace(self, params=tuple(trees["params"]), state=tuple(trees["state"]), rest=rest)

    def _faults(self, state_dict: Mapping[str, Tensor], strict: bool) -> list[str]:
        faults: list[str] = []
        saved = [name for name, home in self.homes.items() if home.saved]
        if strict:
            strange = [name for name in state_dict if name not in self.homes]
            faults += [
                f"{name!r} is not a name of the model{similar(name, saved)}" for name in strange
            ]
            faults += [f"{name!r} is missing" for name in saved if name not in state_dict]
        for name, home in self.homes.items():
            if name in state_dict and tuple(state_dict[name].shape) != home.shape:
                faults.append(
                    f"{name!r} has shape {tuple(state_dict[name].shape)}, but the model needs "
                    f"{home.shape}"
                )
        first: dict[Any, str] = {}
        for name, home in self.homes.items():
            if name in state_dict and home.owners:
                other = first.setdefault(home.owners, name)
                if not same_numbers(state_dict[other], state_dict[name]):
                    faults.append(
                        f"{other!r} and {name!r} are tied in the model, but have different numbers "
                        "here"
                    )
        return faults

    def code(self, stage: int) -> str:
        """Return the source of one stage.

        Args:
            stage: index of the stage.

        Returns:
            The graph as Python for a traced stage; the structure of the modules for other stages.
        """
        inner = innermost(self.stages[stage])
        if isinstance(inner, GraphFn):
            return inner.module.code
        return str(getattr(inner, "skeleton", inner))

    @property
    def facts(self) -> Facts:
        """The split in words, as (name, value) pairs."""
        return [
            ("stages", stages_words(stage.name for stage in self.stages)),
            ("parameters", amount_of(self.params)),
            ("buffers", amount_of(self.state)),
            ("tied", tied_words(self.ties)),
            ("in no stage", some(self.rest)),
            ("loss", self._loss_words()),
        ]

    @guarded
    def __repr__(self) -> str:
        return line("Split", self.facts)

    @shown
    def _repr_html_(self) -> str:
        heads = ("stage", "name", "parameters", "numbers", "bytes", "buffers", "passes on, takes")
        rows: list[tuple[str, ...]] = []
        parts = zip(range(len(self)), self.stages, self.params, self.state, strict=True)
        for index, stage, params, state in parts:
            numel = sum(tensor.numel() for tensor in params.values())
            sizes = (f"{len(params)}", f"{numel:,}", _size(params), _size(state) if state else "")
            rows.append((str(index), stage.name, *sizes, "; ".join(self._borders(index))))
        return page("Split", self.facts, Table("Stages", heads, tuple(rows), (0, 1, 6)).html())

    def _loss_words(self) -> str:
        if self.loss is None:
            return ""
        path = getattr(self.loss, "path", None)
        if path is not None:
            return f"the model's own at {'.'.join(map(str, path))}"
        # Without a trace nothing ran, so nobody knows yet whether the model's output has a loss.
        traced = isinstance(innermost(self.stages[0]), GraphFn)
        known = not isinstance(self.loss, ModelLoss) or self.loss.is_known or traced
        return "the model's own" + ("" if known else ", if its output has one")

    def __str__(self) -> str:
        lines = [f"{len(self)} stages"]
        parts = zip(range(len(self)), self.stages, self.params, self.state, strict=True)
        for index, stage, params, state in parts:
            numel = sum(tensor.numel() for tensor in params.values())
            lines.append(
                f"stage {index} {stage.name}: {len(params)} parameters, {numel:,} numbers, "
                f"{_size(params)}" + (f"; {len(state)} buffers, {_size(state)}" if state else "")
            )
            lines += [f"  {line}" for line in self._borders(index)]
        lines += [
            "tied: " + ", ".join(f"{key} of stage {stage}" for stage, key in group)
            for group in self.ties
        ]
        lines += [f"in no stage: {name}" for name in self.rest]
        lines += [f"loss: {words}"] if (words := self._loss_words()) else []
        return "\n".join(lines)

    def _borders(self, index: int) -> list[str]:
        stage = self.stages[index]
        if not self.edges:
            words = (("stash", stage.stash), ("pop", stage.pop))
            return [f"{word} {', '.join(names)}" for word, names in words if names]
        lines: list[str] = []
        for edge in self.edges:
            if edge.source == index:
                shape = f" [{', '.join(map(str, edge.shape))}]" if edge.shape else ""
                way = "skip to " if edge.skip else "to "
                lines.append(
                    f"{edge.name}: {edge.dtype}{shape}, {size_of(edge.row_bytes)} a row -> "
                    f"{way}{', '.join(map(str, edge.targets))}"
                )
        return lines


def assemble(
    model: nn.Module,
    parts: Sequence[Part],
    *,
    ties: Any = "replicate",
    loss: Any = None,
    edges: Sequence[CutEdge] = (),
) -> Split:
    """Make the `Split` of stages that were cut from a model."""
    stages, params, state = (tuple(column) for column in zip(*parts, strict=True))
    tied = groups(params)
    stages, params, tied = transmit(stages, params, tied, ties)
    stages = mark(stages, tied)
    homes = _homes(model, params, state)
    tensors = named_tensors(model, all_names=True)
    rest = {name: tensors[name].detach() for name, home in homes.items() if not home.owners}
    return Split(stages, params, state, tied, loss, tuple(edges), homes, rest)


def _homes(model: nn.Module, params: Sequence[Any], state: Sequence[Any]) -> dict[str, Home]:
    """Map each name in the model to the stages that have the tensor."""
    owners: dict[int, list[Owner]] = {}
    buffers = dict(model.named_buffers(remove_duplicate=False))
    for kind, trees in (("params", params), ("state", state)):
        for stage, tree in enumerate(trees):
            for key, tensor in dict(tree).items():
                # Parameters are the model's own tensors, but state has copies of the buffers.
                own = tensor if kind == "params" else buffers[key]
                owners.setdefault(id(own), []).append(Owner(kind, stage, key))
    order = {name: number for number, name in enumerate(model.state_dict())}
    homes = {
        name: Home(tuple(owners.get(id(tensor), ())), tuple(tensor.shape), name in order)
        for name, tensor in named_tensors(model, all_names=True).items()
    }
    return dict(sorted(homes.items(), key=lambda item: order.get(item[0], len(order))))


def _like(old: Tensor, values: Tensor, loaded: dict[int, Tensor]) -> Tensor:
    """A new tensor like ``old`` with these values, one for all places of ``old``."""
    new = loaded.get(id(old))
    if new is None:
        new = torch.empty_like(old.detach())
        new.copy_(values)
        if isinstance(old, nn.Parameter):
            new = nn.Parameter(new, old.requires_grad)
        loaded[id(old)] = new
    return new


def _size(tree: Mapping[str, Tensor]) -> str:
    return size_of(sum(tensor.nbytes for tensor in tree.values()))
