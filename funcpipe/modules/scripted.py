"""TorchScript modules: their tensors live in C++, where a stage cannot put others in their places."""

from __future__ import annotations

import torch
from torch import nn


def scripted(module: nn.Module) -> list[str]:
    """What keeps a module from being a stage: the outermost of its layers that are TorchScript."""
    outermost: dict[str, nn.Module] = {}
    for path, layer in module.named_modules():
        inside = any(not outer or path.startswith(f"{outer}.") for outer in outermost)
        if isinstance(layer, torch.jit.ScriptModule) and not inside:
            outermost[path] = layer
    return [
        f"{repr(path) if path else 'it'} is TorchScript (a {type(layer).__name__}), whose parameters and copies are "
        "not Python's; give the module that it was scripted or traced from"
        for path, layer in outermost.items()
    ]
