"""Cut a model between its blocks, without a trace.

`find` finds the blocks, `stage` runs one stage, `traced` is the way with a trace.
"""

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
from funcpipe._src.models.layers.look import asks_for_all_blocks
from funcpipe._src.models.layers.slices import SliceCaches
from funcpipe._src.models.layers.stage import INPUTS, LayersFn
from funcpipe._src.models.module import Skeleton, devices_fault, named_tensors
from funcpipe._src.models.norms.batchnorm import CommitLayers
from funcpipe._src.models.skippable import skips_of


def cut_layers(
    model: nn.Module,
    sizes: Sequence[int],
    *,
    layers: Layers | str | None = None,
    slices: bool = False,
) -> tuple[tuple[Stage, dict[str, Any], Any], ...]:
    """Cut a model between its blocks. Nothing is traced, so control flow and custom kernels remain.

    Each stage runs the model's own forward on a copy without numbers. The copy omits the
    computations of other stages: entries and earlier blocks return the values that arrived, and the
    forward ends after the stage's last block. Masks and rotary tables are computed again in each
    stage from the model's inputs, which travel as a skip. The value between stages is the output of
    the last block. The last stage returns the model's output.

    >>> net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))
    >>> [(stage.name, sorted(params)) for stage, params, _ in cut_layers(net, [1, 2])]
    [('[0:1]', ['0.bias', '0.weight']), ('[1:3]', ['1.bias', '1.weight', '2.bias', '2.weight'])]

    Args:
        model: a model on one device, or as a whole on meta, that `split` has checked.
        sizes: the number of blocks of each stage.
        layers: the result of `find_layers`, or the path of the list.
        slices: whether the stages can run slices of a sequence; see `split`.

    Returns:
        Each stage with its params and state. Tie the parameters that several stages have.
    """
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
            "it has skippable layers, whose skips cannot cross cuts between blocks; make it an "
            "nn.Sequential, or make stages with fp.from_module"
        )
    raise_all(f"{type(model).__name__} cannot be cut between its blocks:", faults)
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
    """List settings of the model's configurations that collect or draw across all blocks."""
    faults: list[str] = []
    for config in configs(model):
        for name, value in vars(config).items():
            if asks_for_all_blocks(name, value):
                faults.append(
                    f"config.{name.lstrip('_')} is {value}, which collects values of all blocks, "
                    f"but a stage has only its own blocks; set it to False, or {TRACED}"
                )
            elif "layerdrop" in name and isinstance(value, float) and value > 0 and model.training:
                faults.append(
                    f"config.{name} is {value}: the model draws which blocks to skip in its loop "
                    "over all blocks, but a stage has only its own blocks; set it to 0"
                )
    return list(dict.fromkeys(faults))
