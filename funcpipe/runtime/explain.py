"""Adds notes to common errors in a stage or a loss: what the function got, and what to do."""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch
from torch import Tensor

from funcpipe.core.errors import FuncpipeError
from funcpipe.core.tree import Tree, flatten, locations

_MOST = 6
"""How many leaves of a tree are described; the others are counted."""

_HINTS = (
    (
        r"(same|expected).*(dtype|scalar type)|dtype.*(mismatch|same|but got)|should be the same|not implemented for",
        "the types do not fit each other: x.to(torch.float32) on the batch, or convert the params (model.to(dtype)) "
        "before they are made stages; class indices and token ids are torch.int64 (target.long()); torch.autocast "
        "casts by itself",
    ),
    (
        r"mat1 and mat2|shapes cannot be multiplied|size of tensor a|must match the size|expected input\[|normalized_shape|"
        r"running_mean should contain|Expected input batch_size|dimension",
        "the sizes do not fit each other; what one stage hands on is what the next one gets, and inputs and targets "
        "are cut along axis 0: look at the shapes above, or call the stages one by one, fp.apply(stages, params, "
        "inputs)",
    ),
    (
        r"NoneType",
        "something is None: the target, if the batch is (inputs, None); a stage without params has () and should not "
        "look into it; a skip, feed or state that is not declared is not handed in",
    ),
    (
        r"index out of range|out of bounds|Target \d+ is out",
        "an index is larger than its table: token ids from 0 to the embedding's num_embeddings - 1, classes from 0 "
        "to the last dimension of the logits - 1 (labels that do not count are ignore_index, -100)",
    ),
    (
        r"missing \d+ required positional|takes \d+ positional argument|unexpected keyword",
        "a stage is fn(params, x), with keywords for what it declares (skips, feeds, state, train); exactly a tuple "
        "is spread over the arguments of a module's forward, and a plan without a loss takes the inputs alone, not "
        "(inputs, target)",
    ),
    (
        r"device",
        "tensors lie on different devices: constants that the stage closes over or makes itself do not move with it; "
        "make them on x.device, or hand them in as state or feeds",
    ),
)


_LOOKS_FOR_ELSE = (KeyError, IndexError, AttributeError, TypeError)
"""What is raised by code that looks for something else than what it got."""

_OTHER_TREE = (
    "if the function looks for something else than this: what one stage returns is what the next one gets, params has "
    "one tree for each stage, in their order, and a plan without a loss takes the inputs alone, not (inputs, target)"
)


def explain(error: Exception, arguments: Mapping[str, Tree]) -> None:
    """Note on a known error of torch, or of a look-up, what its function got, and a way out. Others stay."""
    hint = next((text for pattern, text in _HINTS if re.search(pattern, str(error), re.IGNORECASE)), None)
    if hint is None and type(error) in _LOOKS_FOR_ELSE:
        hint = _OTHER_TREE
    if hint is None or isinstance(error, FuncpipeError):
        return
    parts = "; ".join(f"{name}: {described(tree)}" for name, tree in arguments.items())
    error.__dict__.setdefault("__notes__", []).extend(["got " + parts, hint])


def described(tree: Tree) -> str:
    """The types and shapes of a tree, in a line."""
    leaves, _ = flatten(tree)
    if len(leaves) == 1 and leaves[0] is tree:
        return _word(tree)
    pairs = list(zip(locations(tree, ""), leaves, strict=True))
    words = [f"{place} {_word(leaf)}" for place, leaf in pairs[:_MOST]]
    return ", ".join(words + [f"and {len(pairs) - _MOST} more"] * (len(pairs) > _MOST)) or "()"


def _word(leaf: object) -> str:
    if not isinstance(leaf, Tensor):
        return "None" if leaf is None else f"a {type(leaf).__name__}"
    place = "" if leaf.device == torch.device("cpu") else f" on {leaf.device}"
    return f"{str(leaf.dtype).removeprefix('torch.')} {list(leaf.shape)}{place}"
