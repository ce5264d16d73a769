"""Random trees of every kind of container, in every place: as plain autograd, or refused; never
wrong in silence."""

import copy
import re

import pytest
import torch
import torch.nn as nn
from common import EXECUTORS
from container_hiding import HIDING, READ_ONCE
from container_model import (
    PLACES,
    ROWS,
    Hiding,
    Leaf,
    Model,
    Node,
    close,
    computed,
    differentiable,
    leaf,
    mixed,
    trees,
)
from container_zoo import TREES
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

import funcpipe as fp
from funcpipe._src.core import tree
from funcpipe.testing import check_stage


def examples(count):
    """Recipes are small as they are: a failure is not made smaller by a hundred runs more."""
    return settings(max_examples=count, phases=(Phase.explicit, Phase.reuse, Phase.generate))


# -- trees
# -------------------------------------------------------------------------------

SCHEDULES = [
    fp.schedules.one_f_one_b(2, 3),
    fp.schedules.remat(fp.schedules.fill_drain(2, 3)),
    fp.schedules.zero_bubble(2, 3),
]


def compare(model, result, expected):
    loss, grads, outputs, state = expected
    close(result.loss, loss)
    came = [
        one for one in (*model.find("params", result.grads[0]), result.grads[1]) if one is not None
    ]
    assert len(came) == len(grads)
    for one, other in zip(came, grads, strict=True):
        close(one, torch.zeros_like(one) if other is None else other)
    for place, tree_came, wanted in (
        ("outputs", result.outputs, outputs),
        ("state", result.state[0], state),
    ):
        for one, other in zip(model.find(place, tree_came), model.find(place, wanted), strict=True):
            close(one, other)


def everywhere(recipe, schedule, execute, executor=None):
    """A run with such trees in every place, against plain autograd."""
    model = Model(recipe, PLACES)
    plan = fp.make_plan(
        model.stages, schedule, loss=model.loss, outputs=True, train=True, devices="cpu"
    )
    params, state, feeds, batch = model.values()
    options = {} if executor is None else {"executor": executor}
    result = execute(plan, params, batch, state=state, feeds=feeds, **options)
    assert result.weight == 7
    compare(model, result, model.plain(*model.values()))
    return model, plan, params, result


@given(trees(), st.sampled_from(SCHEDULES), st.sampled_from([*EXECUTORS, "sequential"]))
@examples(60)
def test_trees_in_every_place_are_as_plain_autograd(recipe, schedule, executor):
    """Loss, gradients, outputs and state, over microbatches of 3, 2 and 2 rows."""
    if executor == "sequential":
        everywhere(recipe, schedule, fp.run_sequential)
    else:
        everywhere(recipe, schedule, fp.run, executor)


@pytest.mark.parametrize("kind", TREES, ids=lambda kind: kind.name)
def test_every_kind_alone_and_inside_of_others(kind):
    """What random trees may miss: each kind at the root, and below a dict and a dataclass."""
    plain = [one for one in TREES if one.name in ("dict", "Plain")]
    low = Node(kind, (ROWS, ROWS))
    for recipe in (
        low,
        Node(plain[0], (ROWS, low)),
        Node(plain[1], (Node(plain[0], (low,)), Leaf("word"))),
    ):
        everywhere(recipe, SCHEDULES[0], fp.run, "threads")


@given(trees())
@examples(20)
def test_optimizers_and_sums_see_every_leaf(recipe):
    """leaves, named_leaves, place, step and accumulate; and params survive copies and pickles."""
    model, plan, params, result = everywhere(recipe, SCHEDULES[0], fp.run, "serial")
    own = [one for one in model.find("params", params[0]) if isinstance(one, torch.Tensor)]
    assert {*map(id, fp.leaves(params))} == {*map(id, [*own, params[1]])}
    names = [name for name, _ in fp.named_leaves(params)]
    assert len({*names}) == len(names) == len(fp.leaves(params))
    assert [*map(id, fp.leaves(fp.place(plan, params)))] == [*map(id, fp.leaves(params))]
    twice = fp.accumulate([result, result])
    before = [one.clone() for one in own]
    fp.step(
        torch.optim.SGD([one for one in fp.leaves(params) if differentiable(one)], lr=0.5),
        params,
        twice,
    )
    grads = [one for one in model.find("params", result.grads[0]) if one is not None]
    moved = [(one, old) for one, old in zip(own, before, strict=True) if differentiable(one)]
    for (one, old), gradient in zip(moved, grads, strict=True):
        close(one, old - 0.5 * gradient)
    again = copy.deepcopy(params)
    assert tree.structure(again) == tree.structure(params)
    assert hash(tree.structure(again)) == hash(tree.structure(params))


@given(trees())
@examples(25)
def test_vjp_and_apply_are_as_plain_autograd(recipe):
    """Gradients of params and of inputs, for cotangents in a tree like the outputs."""
    model = Model(recipe, PLACES)
    plan = fp.make_plan(model.stages, fp.schedules.fill_drain(2, 3), train=True, devices="cpu")
    params, state, feeds, (inputs, _) = model.values()
    result, pullback = fp.vjp(plan, params, inputs, state=state, feeds=feeds)
    dice = torch.Generator().manual_seed(2)
    cotangents = tree.map_leaves(
        lambda one: torch.randn(one.shape, generator=dice) if differentiable(one) else None,
        result.outputs,
    )
    grads, input_grads = pullback(cotangents)
    own = [one for one in (*model.find("params", params[0]), params[1]) if differentiable(one)]
    own += [one for one in model.find("inputs", inputs) if differentiable(one)]
    for one in own:
        one.requires_grad_()
    outputs = fp.apply(model.stages, params, inputs, state=state, feeds=feeds, train=True).y
    pairs = zip(model.find("outputs", outputs), model.find("outputs", cotangents), strict=True)
    total = sum((one * cotangent).sum() for one, cotangent in pairs if differentiable(cotangent))
    expected = torch.autograd.grad(total, own, allow_unused=True)
    came = [*model.find("params", grads[0]), grads[1], *model.find("inputs", input_grads)]
    for one, other in zip([one for one in came if one is not None], expected, strict=True):
        close(one, torch.zeros_like(one) if other is None else other)


class Part(nn.Module):
    """A layer between plain tensors or trees."""

    def __init__(self, model, place, other):
        super().__init__()
        self.model, self.place, self.other = model, place, other
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, value):
        h = mixed(self.model.find(self.place, value)) * self.weight
        return self.model.make(self.other, computed(h, self.weight))


@given(trees())
@examples(12)
def test_a_pipe_takes_and_hands_on_trees(recipe):
    """Inputs that require gradients, borders, outputs."""
    model = Model(recipe, ("inputs", "y", "outputs"))
    layers = nn.Sequential(Part(model, "inputs", "y"), Part(model, "y", "outputs"))
    pipe = fp.Pipe(copy.deepcopy(layers), chunks=3, balance=[1, 1], devices="cpu")
    found_grads = []
    for call, net in ((pipe, pipe), (layers, layers)):
        inputs = model.values()[3][0]
        own = [one.requires_grad_() for one in model.find("inputs", inputs) if differentiable(one)]
        outputs = model.find("outputs", call(inputs))
        total = sum(one.square().sum() for one in outputs if differentiable(one) and one.dim())
        found_grads.append(torch.autograd.grad(total, [*own, *net.parameters()], allow_unused=True))
    for one, other in zip(*found_grads, strict=True):
        close(one, other)


def test_compiled_stages_take_trees():
    """Containers of many kinds at once, as programs."""
    whole = next(one for one in TREES if one.name == "list")
    model = Model(Node(whole, tuple(Node(kind, (ROWS,)) for kind in TREES[::3])), ("inputs", "y"))
    stages = [fp.compile_stage(model.stages[0]), model.stages[1]]
    plan = fp.make_plan(
        stages,
        fp.schedules.one_f_one_b(2, 2),
        loss=model.loss,
        outputs=True,
        train=True,
        devices="cpu",
    )
    params, state, feeds, batch = model.values(rows=6)
    compare(
        model,
        fp.run(plan, params, batch, state=state, feeds=feeds),
        model.plain(*model.values(rows=6)),
    )


# -- what is no tree
# -------------------------------------------------------------------------------

ROOTS = {
    "params": r"params\[0]",
    "inputs": "inputs",
    "target": "target",
    "feeds": r"feeds\['f']",
    "state": r"state\[0]",
    "y": "y",
    "stash": r"stash\['s']",
    "stats": "stats",
    "outputs": "outputs|y",
}


WITHIN_A_STAGE = ("y", "stash", "stats")


def hide(kind, inner):
    """Put what hides somewhere into a tree."""
    hidden = Hiding(kind, inner)
    inside = st.lists(st.one_of(leaf, st.just(hidden)), max_size=2).map(
        lambda more: (hidden, *more)
    )
    plain = [one for one in TREES if one.plain]
    low = st.builds(Node, st.sampled_from(plain), inside)
    return st.one_of(
        st.just(hidden),
        low,
        st.builds(Node, st.sampled_from(plain), low.map(lambda one: (ROWS, one))),
    )


def refused(recipe, place, match):
    model = Model(recipe, (place,))
    plan = fp.make_plan(
        model.stages, SCHEDULES[0], loss=model.loss, outputs=True, train=True, devices="cpu"
    )
    params, state, feeds, batch = model.values()
    with pytest.raises(fp.FuncpipeError) as caught:
        fp.run(plan, params, batch, state=state, feeds=feeds)
    assert match in str(caught.value)
    assert match != "hides tensors" or "register_pytree_node" in str(caught.value)
    if place != "outputs":  # some outputs are refused by the stage, others by the run
        assert isinstance(caught.value, fp.StageError) == (place in WITHIN_A_STAGE)
    if place in WITHIN_A_STAGE:
        assert caught.value.funcpipe.stage == 0
    assert re.search(rf"  \* ({ROOTS[place]})", str(caught.value))
    if place not in ("target", "outputs"):
        with pytest.raises(fp.FuncpipeError, match=match):
            check_stage(model.stages[0], params[0], batch[0], feeds=feeds, state=state[0])
    if place == "params":
        for call in (fp.leaves, fp.named_leaves, lambda trees: fp.place(plan, trees)):
            with pytest.raises(fp.FuncpipeError, match=match):
                call(params)


@given(st.data(), st.sampled_from([*HIDING]), st.sampled_from(PLACES), trees())
@examples(60)
def test_what_hides_tensors_is_refused_by_its_place(data, kind, place, inner):
    """At any depth, around any tree; and the stage's check says it too."""
    refused(
        data.draw(hide(kind, data.draw(st.one_of(st.just(ROWS), st.just(inner))))),
        place,
        "hides tensors",
    )


@pytest.mark.parametrize("kind", HIDING)
def test_everything_that_hides_is_refused_everywhere(kind):
    for place in PLACES:
        refused(Hiding(kind, ROWS), place, "hides tensors")


@pytest.mark.parametrize("kind", READ_ONCE)
def test_what_can_be_read_once_is_refused(kind):
    for place in PLACES:
        refused(Hiding(kind, Leaf("number")), place, "read only once")


@pytest.mark.parametrize(
    "kind", [one for one in HIDING if "context" not in one and one not in ("constant", "key")]
)
def test_what_hides_no_tensor_is_a_leaf(kind):
    """A namespace of numbers is a value like any other."""
    recipe = Node(
        next(one for one in TREES if one.name == "dict"), (ROWS, Hiding(kind, Leaf("number")))
    )
    everywhere(recipe, SCHEDULES[0], fp.run, "serial")


@pytest.mark.slow
@given(st.data(), trees(), st.sampled_from(SCHEDULES), st.sampled_from(EXECUTORS))
@examples(250)
def test_many_more(data, recipe, schedule, executor):
    everywhere(recipe, schedule, fp.run, executor)
    refused(
        data.draw(hide(data.draw(st.sampled_from([*HIDING])), recipe)),
        data.draw(st.sampled_from(PLACES)),
        "hides tensors",
    )
