"""Names that were flat in 0.1: for one version they work as before, with a warning that names the new one."""

from __future__ import annotations

import importlib
import warnings

MOVED = {
    name: f"{place}.{name}"
    for place, names in {
        "schedules": (
            "always check delay dualpipe_v eager_one_f_one_b fill_drain from_json from_torch_csv interleaved "
            "looped_bfs never offload one_f_one_b remat Skip to_json to_torch_csv v_adaptive v_half v_min zb_h2 "
            "zbv zero_bubble"
        ),
        "batches": (
            "accumulate_grads Accumulated agree awaited BatchStage Fold loss_scale LossScale Overlap overlap "
            "Progress select StageStats to_device unscale update_scale windows"
        ),
        "models": (
            "Balance balance batch_norm by_memory by_parameters by_time Choice find_layers LayerMemory Layers "
            "Memory memory Namespace PipeSequential plan_for pop profile skippable split_point stash Tried Units"
        ),
        "typing": "Drawing Found Graphs Lanes Programs Pullback Report Role Span Value Where",
    }.items()
    for name in names.split()
} | {"compile": "compile_stage", "programs": "make_programs", "Ticks": "batches.TickPlan"}
"""The new name of each old one, both without ``funcpipe.``."""


def moved(name: str) -> object:
    """What ``funcpipe.name`` was in 0.1.

    Raises:
        AttributeError: there was none.
    """
    funcpipe = importlib.import_module("funcpipe")
    if name not in MOVED:
        raise AttributeError(f"module 'funcpipe' has no attribute {name!r}", name=name, obj=funcpipe)
    warnings.warn(f"fp.{name} is fp.{MOVED[name]} now; the old name goes with 0.2", DeprecationWarning, stacklevel=2)
    value: object = funcpipe
    for part in MOVED[name].split("."):
        value = getattr(value, part)
    return value
