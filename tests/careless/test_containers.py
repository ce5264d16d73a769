"""Values in containers of every kind: what can be taken apart is a tree, what cannot is refused by name; never silently."""

import dataclasses
from types import MappingProxyType, SimpleNamespace
from typing import NamedTuple

import optree
import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from common import EXECUTORS

import funcpipe as fp


@dataclasses.dataclass
class Plain:
    x: torch.Tensor
    mask: torch.Tensor
    label: str = "kept"


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    x: torch.Tensor
    mask: torch.Tensor

    def __post_init__(self):
        if not isinstance(self.x, torch.Tensor):
            raise TypeError("only tensors, please")


@dataclasses.dataclass
class Exported:
    x: torch.Tensor
    mask: torch.Tensor


torch.export.register_dataclass(Exported)


class InTorch:
    def __init__(self, x, mask):
        self.x, self.mask = x, mask


torch.utils._pytree.register_pytree_node(InTorch, lambda v: ([v.x, v.mask], None), lambda c, _: InTorch(*c))


class InOptree:
    def __init__(self, x, mask):
        self.x, self.mask = x, mask


optree.register_pytree_node(InOptree, lambda v: ((v.x, v.mask), None), lambda _, c: InOptree(*c), namespace="funcpipe")


class Named(NamedTuple):
    x: torch.Tensor
    mask: torch.Tensor


def tensordict(x, mask):
    return pytest.importorskip("tensordict").TensorDict({"x": x, "mask": mask}, batch_size=[len(x)])


TREES = {
    "dataclass": Plain,
    "frozen": Frozen,
    "export": Exported,
    "torch": InTorch,
    "optree": InOptree,
    "namedtuple": Named,
    "tensordict": tensordict,
    "nested": lambda x, mask: {"a": [Plain(x, mask)], "b": None},
}
HIDDEN = {
    "namespace": lambda x, mask: SimpleNamespace(x=x, mask=mask),
    "proxy": lambda x, mask: MappingProxyType({"x": x, "mask": mask}),
    "deep": lambda x, mask: {"a": SimpleNamespace(b=[SimpleNamespace(x=x, mask=mask)])},
    "module": lambda x, mask: nn.BatchNorm1d(1),
    "set": lambda x, mask: {"a": frozenset([x, mask])},
}


def parts(value):
    """x and mask of whatever holds them."""
    if isinstance(value, dict):
        value = value["a"][0]
    if hasattr(value, "keys"):
        return value["x"], value["mask"]
    return value.x, value.mask


def run(make, *, where, executor=None, rows=7, count=3):
    """A two-stage model with the container at one place; its result and plain autograd's loss and gradients."""
    x, mask, target = torch.randn(rows, 4), (torch.rand(rows, 4) > 0.5).float(), torch.randn(rows, 4)
    w = [torch.randn(4, 4), torch.randn(4, 4)]

    def first(p, value):
        x, mask = parts(value) if where == "batch" else value
        y = torch.tanh(x @ (parts(p)[0] if where == "params" else p))
        return make(y, mask) if where == "border" else (y, mask)

    def second(p, value):
        y, mask = parts(value) if where == "border" else value
        return (y * mask) @ p

    def loss(y, target):
        return F.mse_loss(y, parts(target)[0] if where == "target" else target)

    stages = [fp.stage(first, name="first"), fp.stage(second, name="second")]
    plan = fp.make_plan(stages, fp.one_f_one_b(2, count), loss=loss, devices="cpu")
    params = (make(w[0], torch.ones(4)) if where == "params" else w[0], w[1])
    batch = (make(x, mask) if where == "batch" else (x, mask), make(target, mask) if where == "target" else target)
    result = fp.run(plan, params, batch, executor=executor)
    leaves = [one.clone().requires_grad_() for one in w]
    F.mse_loss((torch.tanh(x @ leaves[0]) * mask) @ leaves[1], target).backward()
    own = parts(result.grads[0])[0] if where == "params" else result.grads[0]
    return result, (own, result.grads[1]), [one.grad for one in leaves]


@pytest.mark.parametrize("where", ["border", "batch", "target", "params"])
@pytest.mark.parametrize("kind", TREES)
@pytest.mark.parametrize("executor", EXECUTORS)
def test_a_container_that_can_be_taken_apart_is_a_tree(kind, where, executor):
    """Gradients of plain autograd, over uneven microbatches."""
    result, found, expected = run(TREES[kind], where=where, executor=executor)
    assert result.weight == 7
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("where", ["border", "batch", "target", "params"])
@pytest.mark.parametrize("kind", HIDDEN)
def test_what_hides_tensors_is_refused(kind, where):
    """With the place, and how to make a tree of it; at a border with the stage too."""
    with pytest.raises(fp.FuncpipeError, match=r"hides tensors.*register_pytree_node") as caught:
        run(HIDDEN[kind], where=where)
    names = {"border": "  \\* y", "batch": "inputs", "target": "target", "params": r"params\[0\]"}
    caught.match(names[where])
    if where == "border":
        assert caught.value.funcpipe.stage == 0
    else:
        assert not isinstance(caught.value, fp.StageError)


@pytest.mark.parametrize("kind", HIDDEN)
def test_hidden_tensors_are_refused_in_stashes_stats_state_feeds_and_outputs(kind):
    make = HIDDEN[kind]
    x, mask = torch.randn(4, 4), torch.ones(4, 4)

    def refused(first, match, **options):
        stages = [first, fp.stage(lambda p, x, *, skips: x, pop=["s"])] if first.stash else [first]
        plan = fp.make_plan(stages, fp.fill_drain(len(stages), 2, backward=False), train=True, devices="cpu")
        with pytest.raises(fp.FuncpipeError, match=match):
            fp.run(plan, ((),) * len(stages), x, **options)

    refused(fp.stage(lambda p, x: fp.Out(x, stash={"s": make(x, mask)}), stash=["s"]), r"stash\['s'\].*hides tensors")
    commit = fp.stage(lambda p, x, *, state: fp.Out(x, stats=make(x, mask)), commit=lambda s, stats: s)
    refused(commit, "stats.*hides tensors", state=({"a": x},))
    refused(fp.stage(lambda p, x, *, state: x), r"state\[0\].*hides tensors", state=(make(x, mask),))
    feeds = fp.stage(lambda p, x, *, feeds: x, feeds=["f"])
    refused(feeds, r"feeds\['f'\].*hides tensors", feeds={"f": make(x, mask)})
    refused(fp.stage(lambda p, x: make(x, mask)), "y.*hides tensors")


def test_a_loss_may_take_any_output_but_the_plan_returns_none_of_it():
    """What only the loss sees keeps its graph: right gradients. As an output of the run it is refused."""
    w, x = torch.randn(4, 4), torch.randn(6, 4)
    stage = fp.stage(lambda p, x: SimpleNamespace(y=x @ p))
    options = {"loss": lambda y, t: y.y.square().mean(), "devices": "cpu"}
    result = fp.run(fp.make_plan([stage], fp.fill_drain(1, 2), **options), (w,), (x, None))
    leaf = w.clone().requires_grad_()
    (x @ leaf).square().mean().backward()
    torch.testing.assert_close(result.grads[0], leaf.grad)
    with pytest.raises(fp.BatchError, match="outputs.*hides tensors"):
        fp.run(fp.make_plan([stage], fp.fill_drain(1, 2), outputs=True, **options), (w,), (x, None))


def test_ready_made_microbatches_are_looked_into():
    plan = fp.make_plan([fp.stage(lambda p, x: x)], fp.fill_drain(1, 2, backward=False), devices="cpu")
    good = fp.Microbatches([Plain(torch.ones(2), torch.zeros(2)), Plain(torch.ones(3), torch.zeros(3))])
    assert [len(one.x) for one in fp.run(plan, ((),), good).outputs] == [2, 3]
    bad = fp.Microbatches([SimpleNamespace(x=torch.ones(2))] * 2)
    with pytest.raises(fp.BatchError, match=r"inputs\[0\].*hides tensors"):
        fp.run(plan, ((),), bad)


def test_an_optimizer_steps_the_leaves_of_a_dataclass():
    params = (Plain(torch.ones(2, 2), torch.ones(2)),)
    plan = fp.make_plan([fp.stage(lambda p, x: x @ p.x * p.mask)], fp.fill_drain(1, 2), loss=F.mse_loss, devices="cpu")
    result = fp.run(plan, params, (torch.randn(4, 2), torch.randn(4, 2)))
    fp.step(torch.optim.SGD(fp.leaves(params), lr=1.0), params, result.grads)
    assert torch.equal(params[0].x, 1 - result.grads[0].x)
    assert [name for name, _ in fp.named_leaves(params)] == ["0.x", "0.mask"]
