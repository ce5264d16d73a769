"""Law 9: activations, stashes, targets, feeds, outputs are any tree; anything at any position."""

import threading
from collections import OrderedDict, UserDict, defaultdict, namedtuple
from dataclasses import dataclass, fields

import optree
import pytest
import torch
import torch.nn.functional as F
from common import EXECUTORS, assert_same_result, cpu_plan, same, schedules

import funcpipe as fp
from funcpipe._src.core.tree import flatten, map_leaves, unflatten

Pair = namedtuple("Pair", ["a", "b"])


class Output(OrderedDict):
    """As Hugging Face's ModelOutput: items are attributes too, given as keywords."""

    def __init__(self, **items):
        super().__init__(**items)

    def __getattr__(self, name):
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


class Encoding(UserDict):
    """As Hugging Face's BatchEncoding."""


@dataclass
class State:
    h: torch.Tensor
    n: int


optree.register_pytree_node(
    State,
    lambda s: ([getattr(s, f.name) for f in fields(s)], None, tuple(f.name for f in fields(s))),
    lambda _, values: State(*values),
    namespace="funcpipe",
)

CONTAINERS = {
    "dict": (lambda h, extra: {"h": h, "extra": extra}, lambda t: (t["h"], t["extra"])),
    "tuple": (lambda h, extra: (h, extra), lambda t: t),
    "1-tuple": (lambda h, extra: ((h,), [extra]), lambda t: (t[0][0], t[1][0])),
    "list": (lambda h, extra: [extra, h], lambda t: (t[1], t[0])),
    "named tuple": (lambda h, extra: Pair(h, extra), lambda t: (t.a, t.b)),
    "ordered dict": (lambda h, extra: OrderedDict(z=h, a=extra), lambda t: (t["z"], t["a"])),
    "default dict": (
        lambda h, extra: defaultdict(list, {"z": h, "a": extra}),
        lambda t: (t["z"], t["a"]),
    ),
    "dict subclass": (lambda h, extra: Output(z=h, a=extra), lambda t: (t.z, t.a)),
    "UserDict": (lambda h, extra: Encoding({"z": h, "a": extra}), lambda t: (t["z"], t["a"])),
    "registered dataclass": (
        lambda h, extra: {"s": State(h, 3), "e": extra},
        lambda t: (t["s"].h, t["e"]),
    ),
}

EXTRAS = {
    "ints": lambda h: h.argmax(-1),
    "mask": lambda h: h > 0,
    "none": lambda h: None,
    "bool": lambda h: True,
    "number": lambda h: 2.5,
    "word": lambda h: "word",
    "detached float": lambda h: h.detach() * 2,
    "constant float": lambda h: torch.ones(3, dtype=h.dtype),
    "0-dim": lambda h: h.sum(),
    "complex": lambda h: torch.complex(h, h),
    "empty": lambda h: h.new_zeros(0),
    "empty tuple": lambda h: (),
    "nested": lambda h: [({"deep": h.exp()}, None), 1],
    "bfloat16": lambda h: h.bfloat16(),
    "the same tensor": lambda h: h,
    "a view": lambda h: h[:, ::2],
    "expanded": lambda h: h[:, :1].expand(-1, 3),
}


def total(extra):
    """A real number from anything, differentiable where it can be."""
    return sum(
        (leaf.real if leaf.is_complex() else leaf).double().sum()
        for leaf in flatten(extra)[0]
        if isinstance(leaf, torch.Tensor)
    )


def net(container, extra):
    """Output and stash in a container; a second stage checks what came and a third takes the
    stash."""
    make, take = CONTAINERS[container]

    @fp.stage(stash=["s"])
    def first(p, x):
        h = torch.tanh(x * p)
        return fp.Out(make(h, EXTRAS[extra](h)), stash={"s": make(h * 2, EXTRAS[extra](h))})

    @fp.stage
    def second(p, x):
        assert flatten(make(0, EXTRAS[extra](take(x)[0])))[1] == flatten(x)[1]
        h, more = take(x)
        assert type(more) is type(EXTRAS[extra](h))
        return make(h * p, more)

    @fp.stage(pop=["s"])
    def third(p, x, *, skips):
        (h, more), (g, other) = take(x), take(skips["s"])
        return h * p + g + total(more) + total(other) / 2

    return first, second, third


def check(container, extra, which):
    """Oracle's bits in some schedules, plain autograd's numbers."""
    stages = net(container, extra)
    x, t = torch.randn(6, 3, dtype=torch.float64), torch.randn(6, 3, dtype=torch.float64)
    params = tuple(torch.rand((), dtype=torch.float64) + 0.5 for _ in stages)
    for schedule in which:
        plan = cpu_plan(stages, schedule, outputs=True)
        expected = fp.run_sequential(plan, params, (x, t))
        for executor in EXECUTORS:
            assert_same_result(expected, fp.run(plan, params, (x, t), executor=executor))
    leaves = [p.clone().requires_grad_() for p in params]
    y = torch.cat([fp.apply(stages, leaves, part).y for part in x.tensor_split(3)])
    F.mse_loss(y, t).backward()
    tolerance = 5e-2 if extra == "bfloat16" else 1e-10
    torch.testing.assert_close(
        expected.grads, tuple(leaf.grad for leaf in leaves), rtol=tolerance, atol=tolerance
    )


@pytest.mark.parametrize("container", CONTAINERS)
def test_every_container_crosses_every_border(container):
    """As output and stash, in every schedule; classes and structures arrive."""
    check(container, "nested", schedules(3, 3)[::4])


@pytest.mark.parametrize("extra", EXTRAS)
def test_anything_may_stand_beside_an_activation(extra):
    """Non-differentiable values in any position neither crash nor change a gradient."""
    check(
        "list",
        extra,
        [
            fp.schedules.one_f_one_b(3, 3),
            fp.schedules.remat(fp.schedules.zero_bubble(3, 3)),
            fp.schedules.interleaved(3, 3, num_devices=1),
        ],
    )


def test_two_threads_may_meet_a_mapping_at_the_same_time():
    """Containers are registered when first met, once, whoever comes first."""
    for round_ in range(20):
        kind = type(f"Mapping{round_}", (dict,), {})
        start, wrong = threading.Barrier(4), []

        def work(kind=kind, start=start, wrong=wrong):
            start.wait(5)
            try:
                for _ in range(20):
                    leaves, spec = flatten([kind(a=1, b=kind(c=2))])
                    assert [1, 2] == leaves
                    assert kind is type(unflatten(spec, leaves)[0])
            except BaseException as error:
                wrong.append(error)

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [] == wrong


def test_parameters_are_any_tree():
    """Nested parameters with numbers, None and classes; gradients have the structure."""
    params = (
        {
            "layers": [Pair(torch.ones(3), None), Output(w=torch.ones(3), n=2)],
            "name": "x",
            "empty": {},
        },
        State(torch.ones(3), 4),
    )
    one = fp.stage(lambda p, x: x * p["layers"][0].a * p["layers"][1].w, name="one")
    two = fp.stage(lambda p, x: x * p.h * p.n, name="two")
    plan = cpu_plan([one, two], fp.schedules.one_f_one_b(2, 2), loss=lambda y, t: y.sum() / len(y))
    grads = fp.run(plan, params, (torch.ones(2, 3), None)).grads
    assert same(
        map_leaves(
            lambda leaf: torch.full((3,), 4.0) if isinstance(leaf, torch.Tensor) else None, params
        ),
        grads,
    )
    assert (Output, State) == (type(grads[0]["layers"][1]), type(grads[1]))


def test_targets_feeds_and_outputs_are_trees():
    """A dict target, nested feeds, several outputs; merged where they have rows."""

    @fp.stage(feeds=["extra"])
    def part(p, x, *, feeds):
        return Output(
            logits=x["ids"] * p + feeds["extra"]["bias"][0],
            note=feeds["extra"]["note"],
            each=x["ids"].sum(),
        )

    def loss(y, t):
        assert t["name"] == "task"
        return F.mse_loss(y.logits, t["goal"][0])

    plan = cpu_plan([part], fp.schedules.fill_drain(1, 2), loss=loss, outputs=True)
    x, bias, goal = torch.randn(3, 2), torch.randn(3, 2), torch.randn(3, 2)
    result = fp.run(
        plan,
        (torch.ones(()),),
        (Encoding(ids=x), {"goal": (goal,), "name": "task"}),
        feeds={"extra": {"bias": [bias], "note": "n"}},
    )
    torch.testing.assert_close(result.outputs.logits, x + bias)
    torch.testing.assert_close(result.loss, F.mse_loss(x + bias, goal))
    assert (Output, "n", fp.Microbatches) == (
        type(result.outputs),
        result.outputs.note,
        type(result.outputs.each),
    )


def test_a_skip_that_is_popped_but_not_used():
    """Its gradient is none, its stash's other users are right; a skip without tensors as well."""
    stages = (
        fp.stage(
            lambda p, x: fp.Out(x * p, stash={"a": x * p * 2, "b": None, "c": (3, x > 0)}),
            stash=["a", "b", "c"],
            name="0",
        ),
        fp.stage(lambda p, x, *, skips: x * p, pop=["a", "b"], name="1"),
        fp.stage(
            lambda p, x, *, skips: torch.where(skips["c"][1], x * p, x * skips["c"][0]),
            pop=["a", "b", "c"],
            name="2",
        ),
    )
    x = torch.randn(5, 2, dtype=torch.float64)
    leaves = [torch.full((), 1.5, dtype=torch.float64, requires_grad=True) for _ in stages]
    fp.apply(stages, leaves, x).y.square().mean().backward()
    for schedule in schedules(3, 2)[::3]:
        plan = cpu_plan(stages, schedule, loss=lambda y, t: y.square().mean())
        for executor in EXECUTORS:
            grads = fp.run(
                plan, [leaf.detach() for leaf in leaves], (x, None), executor=executor
            ).grads
            torch.testing.assert_close(
                grads, tuple(leaf.grad for leaf in leaves), rtol=1e-10, atol=1e-10
            )


def test_a_stage_that_stops_gradients():
    """Integers only between two stages: what comes before gets zeros and is called unused."""
    stages = (
        fp.stage(lambda p, x: (x * p).long(), name="0"),
        fp.stage(lambda p, x: x.double() * p, name="1"),
    )
    x = torch.randn(4, 2, dtype=torch.float64) * 5
    for schedule in (
        fp.schedules.one_f_one_b(2, 2),
        fp.schedules.remat(fp.schedules.zero_bubble(2, 2)),
    ):
        plan = cpu_plan(stages, schedule, loss=lambda y, t: y.sum() / len(y))
        for executor in EXECUTORS:
            result = fp.run(
                plan,
                (torch.ones((), dtype=torch.float64),) * 1
                + (torch.full((), 2.0, dtype=torch.float64),),
                (x, None),
                executor=executor,
            )
            assert 0.0 == float(result.grads[0])
            assert ((0, ()),) == result.unused
            torch.testing.assert_close(result.grads[1], x.long().sum() / 4.0, check_dtype=False)
