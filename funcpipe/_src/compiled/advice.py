"""Write the warning about repeated traces of a stage: the Python number that changes, or the
many sizes."""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING, Any

from funcpipe._src.compiled.python_values import ValuesKey
from funcpipe._src.core.tree import flatten, locations, unflatten
from funcpipe._src.stages.bound import StageArgs
from funcpipe._src.stages.eager import EagerBound

if TYPE_CHECKING:
    from funcpipe._src.compiled.compile import Compiled

_VALUES = 4
"""From this number of values on, a changing number is not an accident. Two may be training and
evaluation."""

_NUMBERS = (float, int)


def advice(
    compiled: Compiled, bound: EagerBound, args: StageArgs, signature: tuple[ValuesKey, Hashable]
) -> str:
    """Return the text of a warning after the trace of a signature; "" for no warning yet."""
    count, limit = compiled.made, compiled.max_programs
    name = f"stage {bound.stage.name!r} (compiled)"
    form, numbers = _separate_numbers(signature)
    alike = [
        values
        for other, values in map(_separate_numbers, compiled.found)
        if other == form and values != numbers
    ]
    # Enough earlier signatures differ from this one only in Python numbers.
    if len(alike) >= max(1, min(_VALUES, limit) - 1):
        rows = zip([*_read_names(signature[0]), *_names(bound, args)], numbers, *alike, strict=True)
        changing = {
            path: list(dict.fromkeys([*past, new])) for path, new, *past in rows if {*past} != {new}
        }
        listed = "; ".join(
            f"{path} was {', '.join(map(str, values))}" for path, values in changing.items()
        )
        last = next(iter(changing.values()))[-1]
        return (
            f"{name} is traced again for each value of a Python number: {listed}. Numbers in "
            f"tensors need no new trace: give torch.tensor({last}), in a batch or in feeds "
            f"fp.Replicate(torch.tensor({last}))"
        )
    if count < 2 * limit:
        return ""
    return (
        f"{name} was traced {count} times, each time for another signature (shapes, types, values "
        f"that are not tensors), but keeps programs for {limit}. Cut or pad batches to a few sizes "
        "(DataLoader(drop_last=True) omits a last, smaller batch), or keep more programs: "
        f"fp.compile_stage(stage, max_programs={4 * limit})"
    )


def _separate_numbers(words: Any) -> tuple[Any, list[Hashable]]:
    """Separate a signature into its form without Python numbers (`leaf_key`), and these numbers,
    in order."""
    if isinstance(words, ValuesKey):
        words = words.values
    if type(words) is not tuple:
        return words, []
    if len(words) == 2 and any(words[0] is kind for kind in _NUMBERS):
        return words[0], [words[1]]
    parts = [_separate_numbers(word) for word in words]
    return tuple(form for form, _ in parts), [value for _, values in parts for value in values]


def _read_names(values: ValuesKey) -> list[str]:
    """The paths of the Python numbers that the stage and the loss read."""
    return [path for path, token in values.values if type(token) is tuple and token[0] in _NUMBERS]


def _names(bound: EagerBound, args: StageArgs) -> list[str]:
    """The paths of the Python numbers in a signature, in its order."""
    trees = [
        ("params", unflatten(bound.params.spec, bound.params.leaves)),
        ("state", bound.state),
        ("x", args.x.tree()),
    ]
    for kind, names, borders in (
        ("skips", bound.stage.pop, args.skips),
        ("feeds", bound.stage.feeds, args.feeds),
    ):
        trees += [
            (f"{kind}[{name!r}]", border.tree())
            for name, border in zip(names, borders, strict=True)
        ]
    trees += [] if args.target is None else [("target", args.target.tree())]
    pairs = [
        pair
        for root, tree in trees
        for pair in zip(locations(tree, root), flatten(tree)[0], strict=True)
    ]
    return [name for name, leaf in pairs if type(leaf) in _NUMBERS]
