"""Read and write the cuts of other libraries: torchtitan's module names, Megatron's layout string.

A cut is the number of layers of each stage, as `split` takes it. Orders of actions are in
`schedules/torch_csv.py`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import accumulate, groupby, pairwise
from typing import Any, cast

from funcpipe._src.core.errors import PlanError, raise_all
from funcpipe._src.models.split_model import Split

_LAYER = re.compile(r"(?:(.+)\.)?([0-9]+)")
"""The name of a layer: the path of its list, and its number."""
_OF_LAYER = re.compile(r"((?:.+?\.)?[0-9]+)\..+")
"""The name of a tensor in a layer; the group is the name of the layer."""
_LETTERS = frozenset("EtmL|")
"""Embedding, transformer layer, MTP layer, loss, and the end of a stage."""
_REPEATED = (re.compile(r"\(([^()]*)\)\*([0-9]+)"), re.compile(r"([^()*])\*([0-9]+)"))
"""``(...)*n`` and ``x*n``, in the order in which Megatron expands them."""
_MOST = 100_000  # the most letters of an expanded layout
_FEW = 3  # fewer equal stages, or equal letters, are written one by one
_MANY = re.compile(rf"([tm])\1{{{_FEW},}}")  # equal letters that are written with their number
_ENDS = "give ends=True if the embedding and the head are layers of their own"


def from_torchtitan(parts: Sequence[Sequence[str]], *, ends: bool = False) -> tuple[int, ...]:
    """Read torchtitan's ``module_fqns_per_model_part``: return the number of layers of each stage.

    >>> fp.models.from_torchtitan([["tok_embeddings", "layers.0"], ["layers.1", "norm", "output"]])
    (1, 1)

    Args:
        parts: for each stage, the names of its modules. Names that end with a number are layers.
        ends: False: other modules belong to the first and the last stage, and do not count. True:
            those of the first stage count as one layer, and those of the last stage as another,
            for an ``nn.Sequential`` of embedding, layers and head.

    Returns:
        The sizes for ``fp.split(model, balance=)``, ``fp.Cost.group`` and `to_megatron`.

    Raises:
        PlanError: `split` cannot make these stages. The message names each part.
    """
    lists = isinstance(parts, Sequence) and not isinstance(parts, str)
    rows: list[Any] = list(parts) if lists else [None]
    if not rows or any(isinstance(row, str) or not isinstance(row, Sequence) for row in rows):
        raise PlanError(
            'from_torchtitan takes a list of names per stage, [["tok_embeddings", "layers.0"], '
            f"...]; got {parts!r}"
        )
    faults: list[str] = []
    sizes: list[int] = []
    found: list[tuple[str, int]] = []
    last = len(rows) - 1
    for number, row in enumerate(cast("list[Sequence[Any]]", rows)):
        matches = [_LAYER.fullmatch(str(name)) for name in row]
        layers = [(match[1] or "", int(match[2])) for match in matches if match]
        others = [name for name, match in zip(row, matches, strict=True) if not match]
        found += sorted(layers)
        if others and number not in (0, last):
            faults.append(
                f"part {number} has {others}, which only the first and last stage can have"
            )
        if ends and number in (0, last) and not others:
            faults.append(f"part {number} has only layers; leave out ends=True")
        # A single part has both ends.
        size = len(layers) + (ends and bool(others)) * (1 + (last == 0))
        if not size:
            faults.append(f"part {number} has no layer: {[*row]}; {_ENDS}")
        sizes.append(size)
    if len({path for path, _ in found}) > 1:
        faults.append(f"layers of several lists: {sorted({path for path, _ in found})}")
    elif [number for _, number in found] != [*range(len(found))]:
        faults.append(
            f"layers must ascend from 0 without gaps; got {[number for _, number in found]}"
        )
    raise_all("fp.split cannot make these parts of torchtitan:", faults)
    return tuple(sizes)


def to_torchtitan(
    sizes: Sequence[int] | Split,
    *,
    layers: str = "layers",
    first: Sequence[str] = ("tok_embeddings",),
    last: Sequence[str] = ("norm", "output"),
    ends: bool = False,
) -> list[list[str]]:
    """Write a cut as torchtitan's ``module_fqns_per_model_part``.

    >>> fp.models.to_torchtitan([1, 2])
    [['tok_embeddings', 'layers.0'], ['layers.1', 'layers.2', 'norm', 'output']]

    Args:
        sizes: the number of layers of each stage, such as `Choice.sizes`, or a `Split`. A split
            has the names of its own modules with parameters or buffers; the other arguments are
            then ignored.
        layers: the path of the model's list of layers.
        first, last: the other modules of the first and of the last stage.
        ends: as in `from_torchtitan`.

    Raises:
        PlanError: a size is not positive, or stages of the split share a parameter.
    """
    if isinstance(sizes, Split):
        return _names_of(sizes)
    parts = _stages(sizes, ends)
    count = 0
    names: list[list[str]] = []
    for part in parts:
        number = part.count("t")
        names.append(
            [*(first if "E" in part else ())]
            + [f"{layers}.{layer}" for layer in range(count, count + number)]
            + [*(last if "L" in part else ())]
        )
        count += number
    return names


def from_megatron(layout: str, *, ends: bool = False) -> tuple[int, ...]:
    """Read Megatron's ``pipeline_model_parallel_layout``: return the number of layers of each stage.

    >>> fp.models.from_megatron("Ettt|(tt|)*2,tL"), fp.models.from_megatron("E|t*4|L", ends=True)
    ((3, 2, 2, 1), (1, 4, 1))

    Args:
        layout: the text: E is the embedding, t a transformer layer, m a layer that predicts a
            further token (MTP), L the loss, ``|`` ends a stage, ``x*n`` and ``(...)*n`` repeat, and
            commas do not count. An m counts as a layer, after the last t. With virtual stages,
            stage s is on rank ``s mod D``, as in `fp.schedules.interleaved`.
        ends: False: E and L do not count as layers. True: each counts as one layer, for an
            ``nn.Sequential`` of embedding, layers and head.

    Returns:
        The sizes for ``fp.split(model, balance=)``, ``fp.Cost.group`` and `to_torchtitan`.

    Raises:
        PlanError: the text is not a layout, `split` cannot make its stages, or MTP layers are not
            all in one stage, as Megatron requires.
    """
    if not isinstance(layout, str):
        raise PlanError(
            f"from_megatron takes text such as 'Ett|ttL'; got a {type(layout).__name__}"
        )
    text = layout.replace(",", "")
    for pattern in _REPEATED:
        if sum(len(match[1]) * int(match[2]) for match in pattern.finditer(text)) > _MOST:
            raise PlanError(f"the layout {layout[:40]!r} has more than {_MOST} letters")
        text = pattern.sub(lambda match: match[1] * int(match[2]), text)
    faults = [f"{letter!r} is not a letter of a layout" for letter in sorted({*text} - _LETTERS)]
    parts = text.split("|")
    if not faults and not re.fullmatch("Et*m*L", "".join(parts)):
        faults.append(f"it must have one E, then t, then m, then one L; got {layout!r}")
    elif sum("m" in part for part in parts) > 1:
        faults.append(f"all MTP layers (m) must be in one stage; got {layout!r}")
    sizes = [len(part) if ends else len(part.strip("EL")) for part in parts]
    faults += [
        f"stage {stage} has no layer: {part!r}" + ("" if ends else f"; {_ENDS}")
        for stage, (part, size) in enumerate(zip(parts, sizes, strict=True))
        if not size and not faults
    ]
    raise_all("fp.split cannot make the stages of this layout of Megatron:", faults)
    return tuple(sizes)


def to_megatron(sizes: Sequence[int] | Split, *, ends: bool = False, mtp: int = 0) -> str:
    """Write a cut as Megatron's ``pipeline_model_parallel_layout``.

    >>> fp.models.to_megatron([3, 2, 2, 2, 1]), fp.models.to_megatron([1, 4, 1], ends=True)
    ('Ettt|(tt|)*3tL', 'E|t*4|L')

    Args:
        sizes: the number of layers of each stage, such as `Choice.sizes`, or a `Split` of a model
            with one list of layers, each with a parameter or a buffer.
        ends: as in `from_megatron`.
        mtp: the number of the last layers that predict further tokens (m).

    Raises:
        PlanError: a size is not positive, the stages of the split are no such layout, or there are
            not ``mtp`` layers in one stage.
    """
    if isinstance(sizes, Split):
        sizes = from_torchtitan(_names_of(sizes))
    words: list[str] = []
    parts = _stages(sizes, ends, mtp)
    for (part, is_last), equal in groupby(
        enumerate(parts), lambda at: (at[1], at[0] == len(parts) - 1)
    ):
        count = len([*equal])
        word = _MANY.sub(lambda match: f"{match[1]}*{len(match[0])}", part) + "|" * (not is_last)
        words.append(f"({word})*{count}" if count >= _FEW else word * count)
    return "".join(words)


def _stages(sizes: Any, ends: bool, mtp: int = 0) -> list[str]:
    """Return the letters of each stage. Raises PlanError for other sizes and numbers."""
    counts: list[Any] = list(sizes) if isinstance(sizes, Sequence) else []
    if not counts or any(type(count) is not int or count < 1 for count in counts):
        raise PlanError(
            f"sizes must be the positive number of layers of each stage, such as [3, 2]; got {sizes!r}"
        )
    total = sum(counts)
    if ends and total < 2:
        raise PlanError("with ends=True, embedding and head are two of the layers; got 1 layer")
    inner = total - 2 * ends
    if type(mtp) is not int or not 0 <= mtp <= inner:
        raise PlanError(f"mtp is a number of layers, from 0 to {inner}; got {mtp!r}")
    letters = f"E{'t' * (inner - mtp)}{'m' * mtp}L"
    if not ends:
        counts[0] += 1
        counts[-1] += 1
    parts = [letters[begin:end] for begin, end in pairwise(accumulate(counts, initial=0))]
    if sum("m" in part for part in parts) > 1:
        raise PlanError(f"the last {mtp} layers must be in one stage; got sizes {[*sizes]}")
    return parts


def _names_of(split: Split) -> list[list[str]]:
    """Return the names of the modules of each stage that have tensors; of layers, the layers."""
    if split.ties:
        raise PlanError(
            "stages of this split share a parameter, which the layouts of torchtitan and Megatron "
            f"do not name: {[[*group] for group in split.ties]}; write the layout of its sizes"
        )

    def modules(names: Iterable[str]) -> list[str]:
        layers = [_OF_LAYER.fullmatch(name) for name in names]
        found = (
            match[1] if match else name.rpartition(".")[0]
            for name, match in zip(names, layers, strict=True)
        )
        return [name for name in dict.fromkeys(found) if name]

    return [
        modules([*params, *state]) for params, state in zip(split.params, split.state, strict=True)
    ]
