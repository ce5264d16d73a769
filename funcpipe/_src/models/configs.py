"""Find configurations and output hooks of transformers models."""

from __future__ import annotations

import sys
from typing import Any

from torch import nn

from funcpipe._src.core.torch_names import forward_hooks_of


def is_of_transformers(model: Any) -> bool:
    """Whether a model is of the transformers library, which its user has then imported."""
    library: Any = sys.modules.get("transformers")
    return library is not None and isinstance(model, library.PreTrainedModel)


def configs(model: nn.Module) -> list[Any]:
    """Return the configurations of a model and of its parts, each once."""
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
    """Turn off the key-value cache of a model's copy, in configurations of its own."""
    shared = set(map(id, configs(model)))
    for config in configs(copy):
        if id(config) not in shared and getattr(config, "use_cache", False):
            config.use_cache = False


def without_capture_hooks(copy: nn.Module) -> None:
    """Remove the hooks by which transformers collects outputs.

    transformers adds them in the first call that needs them, so the cut of a model would depend on
    earlier calls. A forward of the copy adds them again where it needs them.
    """
    for module in copy.modules():
        if vars(module).pop("_output_capturing_hooks_installed", False):
            for layer in module.modules():
                hooks = forward_hooks_of(layer)
                for key in [key for key, hook in hooks.items() if _captures(hook)]:
                    del hooks[key]


def _captures(hook: Any) -> bool:
    return getattr(hook, "__module__", "") == "transformers.utils.output_capturing"
