"""Short texts about objects for ``repr`` and messages. They are cheap to make, and do not raise."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any, TypeVar

from torch import Tensor

from funcpipe._src.core.tree import Tree, flatten
from funcpipe._src.core.words import size_of

T = TypeVar("T")

Facts = list[tuple[str, str]]  # facts about an object as (name, words), the most important first


def guarded(method: Callable[[T], str]) -> Callable[[T], str]:
    """Decorate a ``__repr__`` to return the error as text instead of raising.

    Debuggers and loggers call ``__repr__`` while an object may be half-built.
    """

    @wraps(method)
    def words(self: T) -> str:
        try:
            return method(self)
        except Exception as error:
            return f"<{type(self).__name__} that cannot be shown: {type(error).__name__}: {error}>"

    return words


def line(kind: str, facts: Iterable[tuple[str, str]]) -> str:
    """Write facts about an object in one line.

    >>> line("Cake", [("layers", "3: sponge, cream, sponge"), ("candles", ""), ("slices", "8")])
    '<Cake: layers 3: sponge, cream, sponge; slices 8>'
    """
    return f"<{kind}: {'; '.join(f'{name} {words}'.strip() for name, words in facts if words)}>"


def some(words: Iterable[object], gap: str = ", ", most: int = 6) -> str:
    """Join words; of many words only the first ones and the last.

    >>> some(range(20)), some("abc", " | ")
    ('0, 1, 2, 3, 4, ..., 19', 'a | b | c')
    """
    texts = [str(word) for word in words]
    return gap.join(texts if len(texts) <= most else [*texts[: most - 1], "...", texts[-1]])


def named(count: int, word: str) -> str:
    """Join a count and its word; "" for 0.

    >>> named(1, "gradient"), named(2, "batch"), named(0, "gradient")
    ('1 gradient', '2 batches', '')
    """
    return count_text(count, word) if count else ""


def count_text(count: int, word: str) -> str:
    """Join a count and its word, singular or plural."""
    return f"{count} {word if count == 1 else plural(word)}"


def plural(word: str) -> str:
    """Return the plural of a word."""
    return word + ("es" if word.endswith("ch") else "s")


def _bytes_of(tensor: Tensor) -> int:
    rows = tensor.coalesce() if tensor.is_sparse else None
    return tensor.nbytes if rows is None else rows.indices().nbytes + rows.values().nbytes


def amount_of(tree: Tree) -> str:
    """Say the number of distinct tensors in a tree, and their bytes; "" for none."""
    tensors = {id(leaf): leaf for leaf in flatten(tree)[0] if isinstance(leaf, Tensor)}.values()
    if not tensors:
        return ""
    return f"{named(len(tensors), 'tensor')}, {size_of(sum(map(_bytes_of, tensors)))}"


def shapes_of(tree: Tree) -> str:
    """Say types and shapes of the leaves of a tree, with the names of a dict; "" for None."""
    if isinstance(tree, dict):
        return some((f"{name} {shapes_of(part)}" for name, part in tree.items()), most=4) or "{}"  # pyright: ignore[reportUnknownVariableType]
    return "" if tree is None else some(map(shape_of, flatten(tree)[0]), most=4) or "()"


def shape_of(leaf: Any) -> str:
    """Say the type and the shape of a tensor; the type of another leaf."""
    if not isinstance(leaf, Tensor):
        return "None" if leaf is None else type(leaf).__name__
    return f"{str(leaf.dtype).removeprefix('torch.')} {list(leaf.shape)}"


def number_of(tensor: Any) -> str:
    """Return the number of a one-element tensor as text, or its shape if it cannot be read.

    May wait for the tensor's device.
    """
    try:
        return f"{float(tensor):.6g}"
    except Exception:  # on the meta device, under a transform, or on a failed device
        return shapes_of(tensor)


def function_words(fn: Any) -> str:
    """Return the name of a function, or a short text about a callable object."""
    name = getattr(fn, "__qualname__", None)
    if name is not None:
        return str(name)
    own = type(fn).__repr__
    return type(fn).__name__ if own is object.__repr__ else repr(fn)[:60]


def stages_words(names: Iterable[str]) -> str:
    """Say the number of stages, and their names if they have names.

    >>> stages_words(["embed", "", "head"]), stages_words(["", ""])
    ('3: embed | 1 | head', '2')
    """
    labels = list(names)
    listed = some((label or str(number) for number, label in enumerate(labels)), " | ")
    return f"{len(labels)}: {listed}" if any(labels) else str(len(labels))


def tied_words(ties: Iterable[Iterable[tuple[int, Any]]]) -> str:
    """Return the names of tied parameters: the first name of each tie."""
    paths = [next(iter(group))[1] for group in ties]
    return some(
        ".".join(map(str, path)) if isinstance(path, tuple) else str(path) for path in paths
    )  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
