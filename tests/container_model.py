"""Trees as data, recipes, and a model of two stages that has trees of one recipe in the places that
a test names."""

from typing import Any, NamedTuple

import torch
from container_hiding import HIDING, READ_ONCE
from container_zoo import PAD, TREES, Kind
from hypothesis import strategies as st

import funcpipe as fp

PLACES = ("params", "inputs", "target", "feeds", "state", "y", "stash", "stats", "outputs")
OTHERS: dict[str, Any] = {"none": None, "number": 3, "float": 0.25, "flag": True, "word": "kept"}
"""Leaves that are no tensors."""


# -- recipes: a tree as data
# -------------------------------------------------------------------------------


class Leaf(NamedTuple):
    kind: str


class Node(NamedTuple):
    kind: Kind
    children: tuple

    def __repr__(self):
        return f"{self.kind.name}{list(self.children)}"


class Hiding(NamedTuple):
    kind: str
    child: Any


ROWS = Leaf("rows")
leaf = st.sampled_from(
    [ROWS, ROWS, Leaf("ints"), Leaf("flags"), Leaf("scalar"), *map(Leaf, OTHERS)]
)
tensor = st.sampled_from([ROWS, ROWS, Leaf("rows")])


def nodes(children, kinds):
    def fill(kind):
        return st.builds(
            Node,
            st.just(kind),
            st.lists(children if kind.plain else tensor, min_size=1, max_size=3).map(tuple),
        )

    return st.sampled_from(kinds).flatmap(fill)


def trees(kinds=tuple(TREES)):
    """A tree of up to three levels with a floating tensor in it."""
    low = nodes(leaf, kinds)
    high = nodes(st.one_of(leaf, low, nodes(st.one_of(leaf, low), kinds)), kinds)
    return st.one_of(low, high).filter(lambda recipe: "rows" in kinds_of(recipe))


def kinds_of(recipe):
    if isinstance(recipe, Leaf):
        return [recipe.kind]
    inner = recipe.children if isinstance(recipe, Node) else (recipe.child,)
    return [kind for child in inner for kind in kinds_of(child)]


def made(recipe, leaf_of):
    """The tree, its leaves made by ``leaf_of(kind, number)`` in order."""
    count = iter(range(1000))

    def make(one):
        if isinstance(one, Leaf):
            return OTHERS[one.kind] if one.kind in OTHERS else leaf_of(one.kind, next(count))
        if isinstance(one, Hiding):
            return {**HIDING, **READ_ONCE}[one.kind](make(one.child))
        return one.kind.make([make(child) for child in one.children])

    return make(recipe)


def found(recipe, value):
    """The leaves of a tree, found by attributes and keys alone."""
    if isinstance(recipe, Leaf):
        return [value]
    if isinstance(recipe, Hiding):
        return []
    children = recipe.kind.find(value)
    for rest in children[len(recipe.children) :]:
        assert rest in (PAD, None)
    pairs = zip(recipe.children, children, strict=False)
    return [one for child, inner in pairs for one in found(child, inner)]


def mixed(values):
    """One tensor of all leaves, in which none can take the place of another."""
    total = torch.zeros(())
    for number, value in enumerate(values):
        number = 0.3 + 0.2 * number
        if isinstance(value, str):
            value = len(value)
        total = total + (
            0.0
            if value is None
            else number * (value.float() if isinstance(value, torch.Tensor) else value)
        )
    return total


# -- a model of two stages with trees in some places
# -------------------------------------------------------------------------------


class Model:
    """Trees of one recipe in the places, plain tensors elsewhere."""

    def __init__(self, recipe, places):
        self.recipe, self.places = recipe, places
        self.stages = [
            fp.stage(self.first, name="first", stash=["s"], feeds=["f"], commit=self.commit),
            fp.stage(self.second, name="second", pop=["s"]),
        ]

    def make(self, place, leaf_of):
        recipe = self.recipe if place in self.places else ROWS
        if place in ("inputs", "target", "feeds"):  # a batch has rows
            recipe = with_rows(recipe)
        return made(recipe, leaf_of)

    def find(self, place, value):
        return found(self.recipe if place in self.places else ROWS, value)

    def first(self, params, x, *, state, feeds):
        own = mixed(self.find("params", params))
        h = torch.tanh(mixed(self.find("inputs", x)) + own + mixed(self.find("feeds", feeds["f"])))
        h = h * mixed(self.find("state", state)) + 0 * own
        y = self.make("y", computed(h, own))
        stash = {"s": self.make("stash", computed(h * 0.5 + 1, own))}
        return fp.Out(
            y, stash=stash, stats=self.make("stats", computed(h.detach().sum(0), own.detach()))
        )

    def second(self, params, y, *, skips):
        h = mixed(self.find("y", y)) * params + mixed(self.find("stash", skips["s"]))
        return self.make("outputs", computed(h, params.sum()))

    def loss(self, outputs, target):
        return (
            (mixed(self.find("outputs", outputs)) - mixed(self.find("target", target)))
            .square()
            .mean()
        )

    def commit(self, state, stats):
        """The old state plus half of the sum over microbatches."""
        rows = [
            [one for one in self.find("stats", tree) if differentiable(one) and one.dim()]
            for tree in stats
        ]
        total = torch.stack([mixed(one) for one in rows]).sum(0) / 2
        old = [one for one in self.find("state", state) if isinstance(one, torch.Tensor)]
        return self.make(
            "state", lambda kind, number: old[number] + total if kind == "rows" else old[number]
        )

    def values(self, rows=7):
        """Params, state, feeds and batch with fixed numbers."""
        dice = torch.Generator().manual_seed(1)

        def leaf_of(*sizes):
            def one(kind, number):
                size = () if kind == "scalar" else sizes
                value = torch.randn(size, generator=dice)
                return (
                    (value * 3).long()
                    if kind == "ints"
                    else value > 0
                    if kind == "flags"
                    else value
                )

            return one

        params = (self.make("params", leaf_of(3)), leaf_of(3)("rows", 0))
        state = (self.make("state", leaf_of(3)), ())
        feeds, inputs, target = [
            self.make(place, leaf_of(rows, 3)) for place in ("feeds", "inputs", "target")
        ]
        return params, state, {"f": feeds}, (inputs, target)

    def plain(self, params, state, feeds, batch):
        """Plain autograd over the whole batch: loss, gradients of params, outputs, new state."""
        own = [one for one in (*self.find("params", params[0]), params[1]) if differentiable(one)]
        for one in own:
            one.requires_grad_()
        y, stash, stats, *_ = self.first(params[0], batch[0], state=state[0], feeds=feeds)
        outputs = self.second(params[1], y, skips=stash)
        loss = self.loss(outputs, batch[1])
        grads = torch.autograd.grad(loss, own, allow_unused=True)
        return loss.detach(), grads, outputs, self.commit(state[0], (stats,))


def with_rows(recipe):
    """The recipe without tensors of no axis."""
    if isinstance(recipe, Leaf):
        return Leaf("float") if recipe.kind == "scalar" else recipe
    if isinstance(recipe, Hiding):
        return Hiding(recipe.kind, with_rows(recipe.child))
    return Node(recipe.kind, tuple(map(with_rows, recipe.children)))


def computed(h, scalar):
    """Leaves that a stage makes of what it has computed."""

    def one(kind, number):
        values = {
            "rows": h * (number + 1.5),
            "ints": (h * 10).long(),
            "flags": h > 0,
            "scalar": scalar.mean() + number,
        }
        return values[kind]

    return one


def differentiable(value):
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def close(came, wanted):
    if isinstance(came, fp.Microbatches):  # what has no rows to join
        for one in came:
            close(one, wanted)
    elif isinstance(wanted, torch.Tensor):
        torch.testing.assert_close(came, wanted.detach(), rtol=1e-3, atol=1e-4)
    else:
        assert came == wanted
