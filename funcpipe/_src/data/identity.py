"""Describe functions and layers in words that are equal in all processes of one program.

Processes compare these words, so that replicas with another loss or other layers are refused. The
words have no ids, addresses, device numbers or paths of files. Functions are described by name, so
two lambdas of one place, or two closures of one function, have equal words.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Iterable
from functools import partial
from types import MethodType
from typing import Any

from torch import nn

_LISTED = 24
"""The greatest number of different layers whose words are listed. The digest has all layers."""

_LONGEST = 120  # the greatest number of letters of the words of a layer

_LOCAL = re.compile(r"\S*[/\\]\S*|\b0x[0-9a-fA-F]+|(?<=[a-z]):\d+")
"""Parts of a ``repr`` that may differ between processes: paths, addresses, device numbers."""


def words_of_function(value: Any) -> str:
    """Return the name of a function or of a module's class, with the options that have plain values.

    >>> words_of_function(partial(max, 1, key=None)), words_of_function(nn.Dropout(0.5))
    ('builtins.max(1, key=None)', 'torch.nn.modules.dropout.Dropout(p=0.5, inplace=False)')
    """
    if isinstance(value, partial):
        keywords: dict[str, Any] = value.keywords
        given = [repr(each) for each in value.args if _is_plain(each)]
        given += [
            f"{name}={keywords[name]!r}" for name in sorted(keywords) if _is_plain(keywords[name])
        ]
        return f"{words_of_function(value.func)}({', '.join(given)})"
    if isinstance(value, nn.Module):
        return f"{_name_of(type(value))}({_options_of(value)})"
    if isinstance(value, MethodType) and isinstance(value.__self__, nn.Module):
        return f"{_name_of(value.__func__)} of {words_of_function(value.__self__)}"
    return _name_of(value if hasattr(value, "__qualname__") else type(value))


def described_callable(value: Any) -> list[tuple[str, str]]:
    """Return (path, words) of the layers of a module; for a function, its name."""
    own = isinstance(value, nn.Module)
    return words_of_layers(value.named_modules()) if own else [("", words_of_function(value))]


def words_of_layers(modules: Iterable[tuple[str, nn.Module]]) -> list[tuple[str, str]]:
    """Return the path of each layer, and its class, options and mode."""
    return [
        (path, words_of_function(layer) + ("" if layer.training else " in evaluation mode"))
        for path, layer in modules
    ]


def summed_up(entries: Iterable[tuple[str, str]]) -> tuple[str, ...]:
    """Return (path, words) of layers as a digest of all, and the number of each kind of layer.

    A single layer is described in full.

    >>> summed_up([("0", "a.Linear()"), ("1", "b.GELU()"), ("2", "a.Linear()")])[1:]
    ('2 Linear()', '1 GELU()')
    """
    entries = [*entries]
    lines = "\n".join([f"{path}: {_ordered(words)}" for path, words in entries])
    digest = hashlib.blake2b(lines.encode(), digest_size=8).hexdigest()
    counts = Counter(words for _, words in entries)
    listed = [f"{count} {_short(words)}" for words, count in counts.items()]
    listed = [entries[0][1]] if len(entries) == 1 else listed
    return (digest, *listed[:_LISTED])


def _ordered(words: str) -> str:
    """Return words with sorted parts if they have braces: processes write sets in other orders."""
    return " ".join(sorted(re.split(r"[\s,{}]+", words))) if "{" in words else words


def _is_plain(value: Any) -> bool:
    return value is None or type(value) in (bool, int, float, str)


def _name_of(value: Any) -> str:
    module = getattr(value, "__module__", None) or ""
    # A process that multiprocessing spawned has the main module under another name.
    module = "__main__" if module == "__mp_main__" else module
    return f"{module}.{value.__qualname__}"


def _options_of(module: nn.Module) -> str:
    """Return the options of a module: its ``extra_repr``, or the constants that losses declare."""
    try:
        words = module.extra_repr()
    except Exception:  # the user's method may read tensors, which stages have replaced
        words = ""
    if not words:
        names = [name for name in getattr(module, "__constants__", ()) if isinstance(name, str)]
        values = {name: getattr(module, name, None) for name in names}
        words = ", ".join(f"{name}={value!r}" for name, value in values.items() if _is_plain(value))
    return _LOCAL.sub("", words).replace("__mp_main__", "__main__")


def _short(words: str) -> str:
    """Return the words of a layer without the module of its class."""
    name, bracket, options = words.partition("(")
    return f"{name.rpartition('.')[2]}{bracket}{options}"[:_LONGEST]
