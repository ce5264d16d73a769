"""Run slices of a sequence through a transformers model: the carry of a stage is the keys and
values of its blocks.

The model's own cache transports them. For each slice, the stage's forward gets a cache with the
keys and values of earlier slices, and adds its own. Stand-ins of the right length replace the
entries of other stages' blocks.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from funcpipe._src.core.errors import PlanError
from funcpipe._src.core.tree import Tree
from funcpipe._src.models.configs import is_of_transformers
from funcpipe._src.models.norms.written_buffers import has_numbers

_NAMES = ("cache", "past_key_values")
"""The names of the forward's cache argument, in newer and older versions."""


class SliceCaches:
    """Makes the caches for a model's forwards, and reads the keys and values from them."""

    def __init__(self, model: nn.Module, blocks: int) -> None:
        self.who, self.blocks = type(model).__name__, blocks
        self.names = tuple(inspect.signature(model.forward).parameters)
        argument = next((name for name in _NAMES if name in self.names), None)
        if argument is None or not is_of_transformers(model):
            raise PlanError(
                "slices=True needs a transformers model whose forward takes a cache "
                f"({' or '.join(_NAMES)}), but {self.who} is not such a model; write its stages as "
                "functions with a carry: fp.stage(fn) with fn(params, x, *, carry)"
            )
        known = self.who.partition("For")[2]
        if known and "CausalLM" not in known:
            raise PlanError(
                f"slices=True is for causal language models, but the end of {self.who} needs whole "
                "sequences; write its last stage as a function with a carry (fp.stage)"
            )
        self.argument = argument
        if any(getattr(module, "gradient_checkpointing", False) for module in model.modules()):
            raise PlanError(
                f"slices=True needs the cache of {self.who}, which does not work with gradient "
                "checkpointing; turn gradient checkpointing off, and make plans with "
                "fp.schedules.remat(schedule)"
            )
        config: Any = model.config
        layers: Sequence[Any] = _classes().DynamicCache(config=config).layers
        odd = sorted({type(layer).__name__ for layer in layers} - {"DynamicLayer"})
        if odd or len(layers) != blocks:
            raise PlanError(
                f"slices=True keeps the keys and values of all {blocks} blocks, but the cache of "
                f"{self.who} has {', '.join(odd) or len(layers)}; only blocks that attend to all "
                "earlier tokens can run slices"
            )

    def given(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        carry: Any,
        first: int,
        blank: Callable[[Tensor], Tensor],
    ) -> dict[str, Any]:
        """Return the arguments of a forward, by name, with a cache of the carried keys and values.

        ``first`` is the stage's first block; ``blank`` makes a stand-in of the shape of a tensor.
        """
        arguments = {**dict(zip(self.names, args, strict=False)), **kwargs}
        if arguments.get(self.argument) is not None:
            raise PlanError(
                f"the inputs have {self.argument!r}, which slices set themselves; leave it out"
            )
        if arguments.get("labels") is not None and arguments.get("shift_labels") is None:
            raise PlanError(
                f"the inputs have labels, which {self.who} would shift by one within each slice; "
                "also give shifted labels: shift_labels=torch.nn.functional.pad(labels[:, 1:], "
                "(0, 1), value=-100)"
            )
        if arguments.get("shift_labels") is not None and arguments.get("labels") is None:
            raise PlanError(
                f"the inputs have shift_labels but no labels, and without labels {self.who} "
                "computes no loss; give both"
            )
        mask = arguments.get("attention_mask")
        if isinstance(mask, Tensor) and mask.dim() != 2:
            raise PlanError(
                f"attention_mask has shape {tuple(mask.shape)}; with slices the shape must be "
                "(rows, sequence), as a tokenizer returns it"
            )
        if carry is not None and (mask is None) != (carry["mask"] is None):
            raise PlanError(
                "attention_mask is given for some slices but not for others; give it for all or "
                "none"
            )
        self._refuse_packed(arguments.get("position_ids"), mask, carry)
        cache = _classes().DynamicCache()
        if carry is not None:
            if mask is not None:
                arguments["attention_mask"] = torch.cat([carry["mask"], mask], -1)
            own = dict(enumerate(zip(carry["keys"], carry["values"], strict=True), first))
            shape = blank(carry["keys"][0])
            cache.layers.extend(
                _layer(*own.get(number, (shape, shape))) for number in range(self.blocks)
            )
        arguments |= {self.argument: cache, "use_cache": False}
        return arguments

    def carry(self, arguments: dict[str, Any], first: int, last: int) -> Tree:
        """Return the carry for the next slice, from the stage's blocks."""
        layers = arguments[self.argument].layers[first:last]
        if len(layers) < last - first or not all(layer.is_initialized for layer in layers):
            raise PlanError(
                f"the blocks of {self.who} did not leave their keys and values in its cache"
            )
        keys = tuple([layer.keys for layer in layers])
        values = tuple([layer.values for layer in layers])
        mask, positions = arguments.get("attention_mask"), arguments.get("position_ids")
        place = positions[..., -1:] if isinstance(positions, Tensor) and mask is None else None
        return {"keys": keys, "values": values, "mask": mask, "place": place}

    def _refuse_packed(self, positions: Any, mask: Any, carry: Any) -> None:
        """Raise PlanError for positions that restart within a row, as with several packed texts."""
        if not isinstance(positions, Tensor) or mask is not None or not has_numbers(positions):
            return
        if carry is not None and carry["place"] is not None:
            positions = torch.cat([carry["place"], positions], -1)
        if bool((positions.diff() != 1).any()):
            raise PlanError(
                "position_ids restart within a row, as with several texts packed into one row; a "
                "model can separate packed texts only in whole sequences; give each text its own "
                "row, and attention_mask"
            )

    def without(self, y: Any) -> Any:
        """Return the model's output without the cache."""
        if isinstance(y, Mapping):
            made: Any = type(y)  # pyright: ignore[reportUnknownVariableType]
            return made(**{name: value for name, value in y.items() if name not in _NAMES})  # pyright: ignore[reportUnknownVariableType]
        if isinstance(y, tuple):
            return tuple([value for value in y if not isinstance(value, _classes().Cache)])  # pyright: ignore[reportUnknownVariableType]
        return y


def _classes() -> Any:
    """The cache classes of transformers, which a transformers model implies."""
    return import_module("transformers.cache_utils")


def _layer(keys: Tensor, values: Tensor) -> Any:
    """One block's layer of a cache, with these keys and values."""
    layer = _classes().DynamicLayer()
    layer.lazy_initialization(keys, values)
    layer.keys, layer.values = keys, values
    return layer
