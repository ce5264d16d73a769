"""The configurations that models of transformers carry, read as their code does: by attribute, through wrappers too."""

from __future__ import annotations

from typing import Any

from torch import nn


def configs(model: nn.Module) -> list[Any]:
    """The configurations of a model and of its parts, each once."""
    found: dict[int, Any] = {}

    def visit(config: Any) -> None:
        if id(config) in found or not hasattr(config, "__dict__") or not hasattr(config, "to_dict"):
            return
        found[id(config)] = config
        for inner in vars(config).values():
            visit(inner)

    for module in model.modules():
        visit(getattr(module, "config", None))
    return list(found.values())


def without_cache(own: nn.Module, model: nn.Module) -> None:
    """Have a copy of a model keep no cache of keys and values; configurations that it shares with the model stay."""
    shared = set(map(id, configs(model)))
    for config in configs(own):
        if id(config) not in shared and getattr(config, "use_cache", False):
            config.use_cache = False
