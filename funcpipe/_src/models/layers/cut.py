"""A model cut between the blocks of its stack, without a trace: each stage gets its blocks."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

from torch import nn

from funcpipe._src.core.errors import PlanError, raise_all
from funcpipe._src.data.stage import Stage
from funcpipe._src.models.attributes import ModuleAttributes
from funcpipe._src.models.balance import checked_sizes
from funcpipe._src.models.configs import configs, without_cache, without_capture_hooks
from funcpipe._src.models.layers.find import TRACED, Layers, find_layers
from funcpipe._src.models.layers.look import asks
from funcpipe._src.models.layers.slices import SliceCaches
from funcpipe._src.models.layers.stage import INPUTS, LayersFn
from funcpipe._src.models.module import Skeleton, devices_fault, named_tensors, refuse_lazy
from funcpipe._src.models.norms.norm_commit import CommitLayers
from funcpipe._src.models.skippable import skips_of


def cut_layers(
    model: nn.Module,
    sizes: Sequence[int],
    *,
    layers: Layers | str | None = None,
    slices: bool = False,
) -> tuple[tuple[Stage, dict[str, Any], Any], ...]:
    """Cut a model between the blocks of its stack; nothing is traced, control flow and custom
    kernels stay.

    Each stage runs the model's own forward on a copy without numbers, in which what another stage
    computes is left out: entries and earlier blocks give back what arrived, and the forward is left
    after the stage's last block. Masks and rotary tables are computed again in each stage from the
    model's inputs, which travel as a skip. Between stages goes what the last block returned, the
    last stage returns the model's output.

    >>> net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))
    >>> [(stage.name, sorted(params)) for stage, params, _ in cut_layers(net, [1, 2])]
    [('[0:1]', ['0.bias', '0.weight']), ('[1:3]', ['1.bias', '1.weight', '2.bias', '2.weight'])]

    Args:
        model: on one device, or on meta as a whole.
        sizes: blocks of each stage.
        layers: from `find_layers`, or the path of the list.
        slices: can the stages run slices of a sequence; see `split`.

    Returns:
        For each stage the stage, the model's own parameters by the model's names, and copies of its
        buffers (() for none). A parameter that several stages need is in each of them: tie them.

    Raises:
        PlanError: sizes or model do not fit; everything that is wrong is listed.
    """
    refuse_lazy(model)
    skips = skips_of(model)
    stack = layers if isinstance(layers, Layers) else find_layers(model, layers)
    counts: list[int] = []
    faults: list[str] = []
    try:
        counts = checked_sizes(sizes, len(stack), f"blocks of {stack.path!r}")
    except PlanError as error:  # raised with all other faults
        faults.append(str(error))
    faults += _model_faults(model, stack, split=counts != [len(stack)])
    if skips.inside:
        faults.append(
            "it has skippable layers, whose values do not follow the stack; make an nn.Sequential "
            "of it, or stages with fp.from_module"
        )
    raise_all(f"{type(model).__name__} cannot be cut so:", faults)
    caches = SliceCaches(model, len(stack)) if slices else None
    skeleton = Skeleton(model, ModuleAttributes(model))
    without_cache(skeleton.module, model)
    without_capture_hooks(skeleton.module)
    tensors = named_tensors(model)
    out: list[tuple[Stage, dict[str, Any], Any]] = []
    for first, last in pairwise(accumulate(counts, initial=0)):
        fn = LayersFn(skeleton, skips, stack, first, last, caches)
        part = fn.part(
            tensors,
            f"{stack.path}[{first}:{last}]",
            stash=(INPUTS,) if first == 0 and last < len(stack) else (),
            pop=(INPUTS,) if first else (),
            commit=CommitLayers(fn.norms) if fn.norms else None,
            carry=slices,
        )
        out.append(part)
    return tuple(out)


def _model_faults(model: nn.Module, stack: Layers, *, split: bool) -> list[str]:
    blocks = [model.get_submodule(name) for name in stack.names]
    first = {
        id(block): name for block, name in reversed(list(zip(blocks, stack.names, strict=True)))
    }
    faults = [
        f"{name} and {first[id(block)]} are one module that runs twice; {TRACED}"
        for block, name in zip(blocks, stack.names, strict=True)
        if first[id(block)] != name
    ]
    faults += [
        f"{name} is a {type(param).__name__} of {param.dtype}, not a plain floating parameter "
        "(quantized?); convert it first"
        for name, param in model.named_parameters()
        if not (param.is_floating_point() or param.is_complex())
    ]
    faults += devices_fault(model)
    return faults + _configured(model) if split else faults


def _configured(model: nn.Module) -> list[str]:
    """Faults of the model's configurations: what they collect or draw across all blocks."""
    faults: list[str] = []
    for config in configs(model):
        for name, value in vars(config).items():
            if asks(name, value):
                faults.append(
                    f"config.{name.lstrip('_')} is {value}: it collects something of every block, "
                    f"and a stage sees its own only; set it to False, or {TRACED}"
                )
            elif "layerdrop" in name and isinstance(value, float) and value > 0 and model.training:
                faults.append(
                    f"config.{name} is {value}: which blocks are left out is drawn in the loop "
                    "over all of them; set it to 0"
                )
    return list(dict.fromkeys(faults))
