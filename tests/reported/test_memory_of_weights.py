"""`memory`, `profile`, the peak of a schedule and a running stage agree on the memory between I and
W."""

import pytest
import torch
from torch import nn
from torch.autograd.graph import GradientEdge

import funcpipe as fp
from funcpipe._src.core.border import LEAF, Border
from funcpipe._src.core.gradient_graph import nodes_of
from funcpipe._src.stages.bound import StageArgs
from funcpipe._src.stages.eager import EagerBound
from funcpipe._src.stages.rng import Keys


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(64), nn.Linear(64, 128), nn.Linear(128, 64)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


def chain(*layers):
    return [make() for _ in range(4) for make in layers]


MODELS = {
    "linear, gelu": lambda: chain(lambda: nn.Linear(64, 64), nn.GELU),
    "linear, tanh": lambda: chain(lambda: nn.Linear(64, 64), nn.Tanh),
    "blocks": lambda: chain(Residual),
    "linear alone": lambda: chain(lambda: nn.Linear(64, 64)),
    "nothing waits": lambda: chain(lambda: nn.LayerNorm(64), nn.GELU),
    "dropout": lambda: chain(lambda: nn.Linear(64, 64), lambda: nn.Dropout(0.5)),
}


def held(split, stage, x):
    """Measure the bytes that autograd keeps between I and W of one stage, and the gradients that
    wait."""
    params = split.params[stage]
    options = {
        "trainable": [True] * len(params),
        "train": True,
        "backwards": True,
        "loss": None,
        "shares": None,
    }
    bound = EagerBound(
        split.stages[stage], stage, params, (), keys=Keys(0, list(split.stages)), **options
    )
    out = bound.forward(StageArgs(Border([x], LEAF, [stage > 0]), [], [], None, 0), keep=True)
    _, weights = bound.backward(out.residual, [torch.ones(32, 64)], {}, split=True)
    if weights is None:
        return 0
    parameters = {leaf.data_ptr() for leaf in params.values()}
    edges = [
        root.node if isinstance(root, GradientEdge) else root.grad_fn
        for walk in weights.waiting
        for root in walk.roots
    ]
    kept = [
        getattr(node, name)
        for node in nodes_of(edges)
        for name in dir(node)
        if name.startswith("_saved_")
    ]
    kept += [gradient for walk in weights.waiting for gradient in walk.gradients]
    tensors = [tensor for tensor in kept if isinstance(tensor, torch.Tensor)]
    sizes = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors
    }
    return sum(size for address, size in sizes.items() if address not in parameters)


@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize("name", MODELS)
def test_memory_and_profile_tell_what_a_stage_holds(name, stage):
    torch.manual_seed(0)
    layers = MODELS[name]()
    model = nn.Sequential(*layers, *MODELS[name]())
    split, x = fp.split(model, balance=[len(layers)] * 2), torch.randn(32, 64)
    told = fp.models.memory(split, x)[stage].weight_residual
    cost = fp.models.profile(split, x, repeats=1, warmup=0, threads_per_lane=1)
    assert cost.weight_residual[stage] == told
    assert told == held(split, stage, x)
    grouped = fp.models.memory(model, x).group([len(layers)] * 2)[stage].weight_residual
    assert grouped == told


def test_the_peak_of_zero_bubble_has_what_weights_wait_for():
    """Each microbatch more whose W a schedule puts off adds its residual to the peak."""
    torch.manual_seed(0)
    model = nn.Sequential(*MODELS["linear, gelu"](), *MODELS["linear, gelu"]())
    split, x = fp.split(model, 2), torch.randn(32, 64)
    sizes = fp.models.memory(split, x, optimizer="sgd")

    def peak(microbatches):
        order = (
            [f"0F{m} 0I{m}" for m in range(microbatches)],
            [f"1F{m} 1I{m}" for m in range(microbatches)],
        )
        late = [" ".join(f"{stage}W{m}" for m in range(microbatches)) for stage in range(2)]
        text = "\n".join(" ".join([*row, last]) for row, last in zip(order, late, strict=True))
        return sizes.peak(fp.Schedule.parse(text))[1]

    assert peak(4) - peak(3) == sizes[1].weight_residual
