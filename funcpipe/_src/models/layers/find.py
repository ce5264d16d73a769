"""Find the list of blocks in a model, and the modules that run before and after it."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from torch import nn

from funcpipe._src.core.errors import PlanError, raise_all
from funcpipe._src.core.shown import guarded, line, some
from funcpipe._src.core.torch_names import children_of, uncompiled
from funcpipe._src.core.words import similar
from funcpipe._src.models.module import syntax_of
from funcpipe._src.models.norms.norm_layers import is_deferrable

TRACED = "trace it instead: fp.split(model, ..., example=...)"
"""The advice in messages about a model that cannot be cut between blocks."""

_STACKS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


@dataclass(frozen=True)
class Layers:
    """The place of a model's blocks, and the other modules with parameters around them.

    Modules without parameters and statistics (rotary tables, dropout) run in every stage and are
    not listed. `find_layers` makes a Layers; correct it if the guess is wrong.

    Attributes:
        path: the path of the list that contains the blocks; "" if the model itself is the list.
        names: the path of each block, in order.
        entry: modules that run before the first block (embeddings). The first stage has them.
        exit: modules that run after the last block (norm, pooler, head). The last stage has them. A
            module in ``entry`` and ``exit`` is in both stages.
        carry: modules of ``entry`` whose outputs later stages need too, besides the value that goes
            through the blocks. These outputs travel with the inputs.
    """

    path: str
    names: tuple[str, ...]
    entry: tuple[str, ...] = ()
    exit: tuple[str, ...] = ()
    carry: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.names)

    @guarded
    def __repr__(self) -> str:
        blocks = [name.removeprefix(f"{self.path}.") for name in self.names]
        around = [(word, some(getattr(self, word))) for word in ("entry", "exit", "carry")]
        return line(
            f"Layers {self.path!r}", [("blocks", f"{len(self)}: {some(blocks, most=4)}"), *around]
        )


def find_layers(
    model: nn.Module,
    path: str | None = None,
    *,
    entry: Iterable[str] = (),
    exit: Iterable[str] = (),
    carry: Iterable[str] = (),
) -> Layers:
    """Find the list of blocks of a model, and the modules before and after it.

    If transformers publishes a pipeline plan with the model, the plan decides. Otherwise the list
    is the one whose blocks have the same class and at least twice the parameters of any other such
    list. Lists inside blocks do not count.

    The order of the other modules comes from the plan. Without a plan, it is the order in which the
    source of a forward names the modules, or the order of registration. If the order is wrong, `run`
    raises an error.

    >>> class Decoder(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.embed = nn.Embedding(8, 4)
    ...         self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
    ...         self.head = nn.Linear(4, 8)
    >>> fp.models.find_layers(Decoder())
    <Layers 'layers': blocks 3: 0, 1, 2; entry embed; exit head>

    Args:
        model: any module whose forward runs the blocks of one list in order.
        path: the path of the list. None: find it.
        entry: paths of modules that run before the blocks, whatever their place in the model.
        exit: paths of modules that run after the blocks. A path in ``entry`` and ``exit`` runs on
            both sides.
        carry: paths of entry modules whose outputs later stages need; see `Layers`.

    Returns:
        A `Layers`, for ``fp.split(model, layers=)``.

    Raises:
        PlanError: the model has no list of blocks or several, is an encoder-decoder, or lacks a
            given path.
    """
    if not isinstance(model, nn.Module):
        raise PlanError(f"find_layers takes an nn.Module; got a {type(model).__name__}")
    named = {"entry": tuple(entry), "exit": tuple(exit), "carry": tuple(carry)}
    faults = [
        f"{side}: {_unknown(model, name)}"
        for side, names in named.items()
        for name in names
        if not _has(model, name)
    ]
    if path is not None and not _has(model, path):
        faults.append(f"path: {_unknown(model, path)}")
    raise_all(f"{type(model).__name__} has no such modules:", faults)
    plan = _published(model)
    place = _search(model, plan) if path is None else path
    stack = model.get_submodule(place)
    if not isinstance(stack, _STACKS) or not len(stack):
        raise PlanError(
            f"{place!r} is a {type(stack).__name__}, not a list of blocks (ModuleList, "
            "Sequential, ModuleDict)"
        )
    before, after = _sides(model, place, plan, named["entry"], named["exit"])
    prefix = f"{place}." if place else ""
    names = tuple(prefix + name for name in _children(stack))
    return Layers(place, names, before, after, named["carry"])


def _published(model: nn.Module) -> dict[str, tuple[set[str], set[str]]]:
    """Read the pipeline plan of a transformers model: path -> names of its inputs and outputs."""
    plan, prefix = getattr(model, "_pp_plan", None), ""
    if not plan:
        plan = getattr(getattr(model, "config", None), "base_model_pp_plan", None)
        base = str(getattr(model, "base_model_prefix", ""))
        prefix = f"{base}." if base and isinstance(getattr(model, base, None), nn.Module) else ""
    if not isinstance(plan, Mapping):
        return {}
    out: dict[str, tuple[set[str], set[str]]] = {}
    for name, ends in cast("Mapping[str, Any]", plan).items():
        if _has(model, prefix + name) and len(ends) == 2:
            out[prefix + name] = (set(ends[0]), set(ends[1]))
    return out


def _search(model: nn.Module, plan: Mapping[str, Any]) -> str:
    """Return the path of the list of blocks. Raises PlanError for none or several."""
    kind = type(model).__name__
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        raise PlanError(
            f"{kind} is an encoder-decoder: every block of the decoder needs the output of the "
            f"encoder, but stages cut between blocks pass on a single value; {TRACED}"
        )
    planned = [path for path in plan if isinstance(model.get_submodule(path), _STACKS)]
    if len(planned) == 1:
        return planned[0]
    candidates: dict[str, int] = {}
    for path, module in model.named_modules():
        inside = any(within(path, other) for other in candidates)
        stack = isinstance(module, _STACKS) and _repeats(list(_children(module).values()))
        if stack and not inside:
            candidates[path] = sum(param.numel() for param in module.parameters())
    if not candidates:
        raise PlanError(
            f"{kind} has no list (ModuleList, Sequential, ModuleDict) of two or more blocks of "
            f"one class to cut between; {_unwrapping(model)}{TRACED}, or name a list (layers=path)"
        )
    ranked = sorted(candidates, key=lambda path: -candidates[path])
    # Two lists of similar size (an encoder and a decoder) are ambiguous, so the user decides.
    if len(ranked) > 1 and candidates[ranked[0]] < 2 * candidates[ranked[1]]:
        counts = {path: len(_children(model.get_submodule(path))) for path in ranked}
        raise_all(
            f"{kind} has several lists of blocks; {TRACED}, or name one (layers=path)",
            [f"{path!r}: {counts[path]} blocks, {candidates[path]:,} numbers" for path in ranked],
        )
    return ranked[0]


def _unwrapping(model: nn.Module) -> str:
    """Return the advice for a wrapper, which hides the class of its model; "" for other models."""
    if isinstance(model, nn.DataParallel):
        return "give the model without nn.DataParallel (model.module), or "
    if uncompiled(model) is not model:
        return "give the model before torch.compile, and compile stages with fp.compile_stage, or "
    return ""


def _repeats(blocks: list[nn.Module]) -> bool:
    """Whether these are several blocks of one class that run and have parameters."""
    alike = len(blocks) > 1 and len({type(block) for block in blocks}) == 1
    run = alike and not isinstance(blocks[0], (nn.ModuleList, nn.ModuleDict))
    return run and all(any(True for _ in block.parameters()) for block in blocks)


def _sides(
    model: nn.Module,
    path: str,
    plan: Mapping[str, tuple[set[str], set[str]]],
    entry: Sequence[str],
    exit: Sequence[str],
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The modules with parameters before and after the blocks."""
    gives = plan[path][1] if path in plan else set[str]()
    before, after = list(entry), list(exit)
    outer = ""
    for step in path.split(".") if path else []:
        around = model.get_submodule(outer)
        names = list(_children(around))
        used = _uses(type(around), step, names)
        behind: list[str] = []
        for name, child in _children(around).items():
            full = f"{outer}.{name}" if outer else name
            if name == step or full in (*entry, *exit) or not _owns_numbers(child):
                continue
            late = names.index(name) > names.index(step)
            sides = used.get(name, (not late, late))
            # A module that reads an output of the blocks comes after them.
            if full in plan and gives:
                late = bool(plan[full][0] & gives)
                sides = (not late, late)
            before += [full] if sides[0] else []
            behind += [full] if sides[1] else []
        # Inner levels come first: a module of an inner level runs before those of outer levels.
        after[len(exit) : len(exit)] = behind
        outer = f"{outer}.{step}" if outer else step
    return tuple(before), tuple(after)


def _uses(kind: type[nn.Module], step: str, names: Sequence[str]) -> dict[str, tuple[bool, bool]]:
    """Find which children a forward's source uses before its use of the child with the stack, and
    which after; {} without such a source."""
    source = next(
        (node for node in syntax_of(kind.forward) if isinstance(node, ast.FunctionDef)), None
    )
    order = [] if source is None else list(_used(source))
    if step not in order:
        return {}
    stack = order.index(step)
    places = {
        name: [place for place, used in enumerate(order) if used == name]
        for name in names
        if name in order
    }
    return {name: (min(found) < stack, max(found) > stack) for name, found in places.items()}


def _used(node: ast.AST) -> Iterator[str]:
    """Yield the attributes of ``self`` in some source, in the order in which Python uses them.

    A module is called after its arguments: in ``self.head(self.body(x))`` the body comes first.
    """
    if (
        isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    ):
        yield node.attr
        return
    children = list(ast.iter_child_nodes(node))
    if isinstance(node, ast.Call):
        children = [*children[1:], node.func]
    elif isinstance(node, (ast.Assign, ast.AugAssign, ast.AnnAssign, ast.NamedExpr)):
        children.sort(key=lambda child: child is not node.value)
    elif isinstance(node, (ast.ListComp, ast.SetComp, ast.GeneratorExp, ast.DictComp)):
        children.sort(key=lambda child: not isinstance(child, ast.comprehension))
    for child in children:
        yield from _used(child)


def _owns_numbers(module: nn.Module) -> bool:
    """Whether a module has parameters, or statistics that training changes."""
    return any(True for _ in module.parameters()) or any(
        is_deferrable(part) for part in module.modules()
    )


def within(path: str, root: str) -> bool:
    """Whether a path is the same as another, or below it."""
    return not root or path == root or path.startswith(f"{root}.")


def _children(module: nn.Module) -> dict[str, nn.Module]:
    """The children by name; a child that occurs twice has both names."""
    return {name: child for name, child in children_of(module).items() if child is not None}


def _has(model: nn.Module, path: str) -> bool:
    """Return whether a module is at a path of children. Wrappers forward attributes."""
    module: nn.Module | None = model
    for step in path.split(".") if path else ():
        module = None if module is None else children_of(module).get(step)
    return module is not None


def _unknown(model: nn.Module, path: str) -> str:
    return f"no module {path!r}{similar(path, [name for name, _ in model.named_modules() if name])}"
