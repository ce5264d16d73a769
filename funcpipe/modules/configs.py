"""The configurations that models of transformers carry, read as their code does: by attribute, through wrappers too."""

from __future__ import annotations

from typing import Any

from torch import nn


def configs(model: nn.Module) -> list[Any]:
    """The configurations of a model and of its parts, each once."""
    by_id: dict[int, Any] = {}

    def visit(config: Any) -> None:
        if id(config) in by_id or not hasattr(config, "__dict__") or not hasattr(config, "to_dict"):
            return
        by_id[id(config)] = config
        for inner in vars(config).values():
            visit(inner)

    for module in model.modules():
        visit(getattr(module, "config", None))
    return list(by_id.values())


def without_cache(copy: nn.Module, model: nn.Module) -> None:
    """Turn off the cache of keys and values of a model's copy; configurations that it shares with the model stay."""
    shared = set(map(id, configs(model)))
    for config in configs(copy):
        if id(config) not in shared and getattr(config, "use_cache", False):
            config.use_cache = False
