"""Add the arguments of a stage or a loss to errors of torch and Python."""

from __future__ import annotations

import opcode
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from funcpipe._src.core.tree import Tree, flatten, locations

_MOST = 6  # how many leaves of a tree are described; the others are counted

_TORCH = str(Path(torch.__file__).parent)


def explain(error: Exception, arguments: Mapping[str, Tree]) -> None:
    """Add a note with the function's arguments to an error, unless user code raised it."""
    if not _is_raised_by_user(error):
        parts = "; ".join(f"{name}: {described(tree)}" for name, tree in arguments.items())
        error.__dict__.setdefault("__notes__", []).append("got " + parts)


def _is_raised_by_user(error: Exception) -> bool:
    """Return whether a ``raise`` statement outside torch made the error.

    Other errors come from an operation of torch or Python.
    """
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None:
        return True
    code = trace.tb_frame.f_code
    raises = opcode.opname[code.co_code[trace.tb_lasti]] == "RAISE_VARARGS"
    return raises and not code.co_filename.startswith(_TORCH)


def described(tree: Tree) -> str:
    """Return the types and shapes of a tree in one line."""
    leaves, _ = flatten(tree)
    if len(leaves) == 1 and leaves[0] is tree:
        return _word(tree)
    pairs = list(zip(locations(tree, ""), leaves, strict=True))
    words = [f"{place} {_word(leaf)}" for place, leaf in pairs[:_MOST]]
    return ", ".join(words + [f"and {len(pairs) - _MOST} more"] * (len(pairs) > _MOST)) or "()"


def _word(leaf: object) -> str:
    if not isinstance(leaf, Tensor):
        return "None" if leaf is None else f"a {type(leaf).__name__}"
    device = "" if leaf.device == torch.device("cpu") else f" on {leaf.device}"
    return f"{str(leaf.dtype).removeprefix('torch.')} {list(leaf.shape)}{device}"
