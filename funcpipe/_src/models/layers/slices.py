"""Slices of a sequence through a transformers model: what a stage hands on are the keys and values
of its blocks.

The model's own cache takes them: a stage's forward of a slice gets a cache with what the slices
before it left, and leaves it with its own added. In the places of other stages' blocks lie
stand-ins of the right length.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from funcpipe._src.core.errors import PlanError
from funcpipe._src.core.tree import Tree
from funcpipe._src.models.norms.written_buffers import has_numbers

_NAMES = ("cache", "past_key_values")
"""What the argument of a forward is called that takes the cache, in newer and older versions."""


class SliceCaches:
    """Makes the caches of a model's forwards, and takes apart what they hold.

    Attributes:
        who: the model's class.
        names: the arguments of its forward.
        argument: the one that takes the cache.
    """

    def __init__(self, model: nn.Module, blocks: int) -> None:
        self.who, self.blocks = type(model).__name__, blocks
        self.names = tuple(inspect.signature(model.forward).parameters)
        argument = next((name for name in _NAMES if name in self.names), None)
        library: Any = sys.modules.get("transformers")
        if argument is None or library is None or not isinstance(model, library.PreTrainedModel):
            raise PlanError(
                "slices=True needs a model of transformers whose forward takes a cache "
                f"({' or '.join(_NAMES)}), and {self.who} is none; write its stages as functions "
                "with a carry: fp.stage(fn) of fn(params, x, *, carry)"
            )
        known = self.who.partition("For")[2]
        if known and "CausalLM" not in known:
            raise PlanError(
                f"slices=True is for causal language models, and {self.who} sees whole sequences "
                "at its end; write its last stage as a function with a carry (fp.stage)"
            )
        self.argument = argument
        if any(getattr(module, "gradient_checkpointing", False) for module in model.modules()):
            raise PlanError(
                f"slices=True needs the cache of {self.who}, which it leaves out while its "
                "gradient checkpointing is on: turn that off, and make plans with "
                "fp.schedules.remat(schedule)"
            )
        config: Any = model.config
        layers: Sequence[Any] = _classes().DynamicCache(config=config).layers
        odd = sorted({type(layer).__name__ for layer in layers} - {"DynamicLayer"})
        if odd or len(layers) != blocks:
            raise PlanError(
                f"slices=True keeps the keys and values of all {blocks} blocks, and the cache of "
                f"{self.who} has {', '.join(odd) or len(layers)}: only blocks that attend to all "
                "that came before can run slices"
            )

    def given(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        carry: Any,
        first: int,
        blank: Callable[[Tensor], Tensor],
    ) -> dict[str, Any]:
        """The arguments of a forward, by name, with a cache of what was carried. Raises PlanError.

        ``first`` is the stage's first block; ``blank`` makes a stand-in of the shape of a tensor.
        """
        arguments = {**dict(zip(self.names, args, strict=False)), **kwargs}
        if arguments.get(self.argument) is not None:
            raise PlanError(
                f"the inputs have {self.argument!r}, which slices use themselves; leave it out"
            )
        if arguments.get("labels") is not None and arguments.get("shift_labels") is None:
            raise PlanError(
                f"the inputs have labels, which {self.who} moves by one inside of each slice; "
                "give them moved as well: shift_labels=torch.nn.functional.pad(labels[:, 1:], "
                "(0, 1), value=-100)"
            )
        if arguments.get("shift_labels") is not None and arguments.get("labels") is None:
            raise PlanError(
                f"the inputs have shift_labels and no labels, without which {self.who} has no "
                "loss; give both"
            )
        mask = arguments.get("attention_mask")
        if isinstance(mask, Tensor) and mask.dim() != 2:
            raise PlanError(
                f"attention_mask has shape {tuple(mask.shape)}; with slices it is (rows, "
                "sequence), as a tokenizer gives it"
            )
        if carry is not None and (mask is None) != (carry["mask"] is None):
            raise PlanError(
                "attention_mask is given for some slices and not for others; give it for all, or "
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
        """What the next slice needs of a forward with these arguments, by the stage's blocks.
        Raises PlanError."""
        layers = arguments[self.argument].layers[first:last]
        if len(layers) < last - first or not all(layer.is_initialized for layer in layers):
            raise PlanError(
                f"the blocks of {self.who} did not leave their keys and values in its cache"
            )
        keys, values = (
            tuple([layer.keys for layer in layers]),
            tuple([layer.values for layer in layers]),
        )
        mask, positions = arguments.get("attention_mask"), arguments.get("position_ids")
        place = positions[..., -1:] if isinstance(positions, Tensor) and mask is None else None
        return {"keys": keys, "values": values, "mask": mask, "place": place}

    def _refuse_packed(self, positions: Any, mask: Any, carry: Any) -> None:
        """Refuse positions that begin anew: of several texts in one row. Raises PlanError."""
        if not isinstance(positions, Tensor) or mask is not None or not has_numbers(positions):
            return
        if carry is not None and carry["place"] is not None:
            positions = torch.cat([carry["place"], positions], -1)
        if bool((positions.diff() != 1).any()):
            raise PlanError(
                "position_ids begin anew inside of a row, as of several texts that are packed "
                "into one: a model keeps these apart only where it sees whole sequences; give "
                "each text a row of its own, and attention_mask"
            )

    def without(self, y: Any) -> Any:
        """The model's output without the cache."""
        if isinstance(y, Mapping):
            made: Any = type(y)  # pyright: ignore[reportUnknownVariableType]
            return made(**{name: value for name, value in y.items() if name not in _NAMES})  # pyright: ignore[reportUnknownVariableType]
        if isinstance(y, tuple):
            return tuple([value for value in y if not isinstance(value, _classes().Cache)])  # pyright: ignore[reportUnknownVariableType]
        return y


def _classes() -> Any:
    """The library's classes of caches; whoever has one of its models has them."""
    return import_module("transformers.cache_utils")


def _layer(keys: Tensor, values: Tensor) -> Any:
    """A block's part of a cache that holds these."""
    layer = _classes().DynamicLayer()
    layer.lazy_initialization(keys, values)
    layer.keys, layer.values = keys, values
    return layer
