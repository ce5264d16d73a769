"""step, global_norm, accumulate, leaves, place, devices."""

from collections import OrderedDict

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from common import cpu_plan, forward_plan
from plain import Pair

import funcpipe as fp


def mean(y, target):
    return y.mean()


def sgd(params, lr=1.0):
    return torch.optim.SGD(fp.leaves(params), lr=lr)


def trees():
    return (
        {"b": torch.ones(2), "a": torch.full((3,), 2.0), "steps": torch.tensor(1)},
        [torch.zeros(2), None, "name", (torch.ones(1),)],
    )


def test_leaves_are_tensors_once_in_a_fixed_order():
    """Dict keys sorted, non-tensors left out, a tensor at two places once; names are dotted."""
    params = trees()
    params[1][0] = params[0]["b"]
    assert ["0.a", "0.b", "0.steps", "1.3.0"] == [name for name, _ in fp.named_leaves(params)]
    assert all(
        a is b
        for a, b in zip(
            fp.leaves(params),
            [params[0]["a"], params[0]["b"], params[0]["steps"], params[1][3][0]],
            strict=True,
        )
    )
    assert [] == fp.leaves(((), None, "x"))


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
        lambda p: torch.optim.AdamW(p, 0.1, foreach=True),
        # These may write into the gradients that they step by.
        lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True, foreach=True),
        lambda p: torch.optim.Adagrad(p, 0.1, foreach=True),
    ],
    ids=["sgd", "adamw", "nesterov", "adagrad"],
)
@pytest.mark.parametrize("max_norm", [None, 0.5, 100.0])
def test_steps_are_those_of_eager_training(make, max_norm):
    """Parameters and norms equal backward, clip_grad_norm_, step of the plain model; gradients of
    the result stay what they are."""
    pair = Pair()
    mine, theirs = make(fp.leaves(pair.params)), make(pair.in_order())
    assert 3 == len([*pair.train(mine, theirs, pair.batches(3), max_norm=max_norm)])
    pair.assert_equal()


def test_a_step_leaves_no_grad_behind_even_when_it_fails():
    """.grad is None again after an optimizer that raises, and what was in it before is not
    stepped."""
    params = trees()
    grads = ({"b": torch.ones(2), "a": None, "steps": None}, [torch.ones(2), None, None, (None,)])

    class Fails(torch.optim.SGD):
        def step(self, closure=None):
            raise ZeroDivisionError

    optimizer = Fails([params[0]["b"], params[1][0]], lr=1.0)
    with pytest.raises(ZeroDivisionError):
        fp.step(optimizer, params, grads)
    assert [None, None] == [params[0]["b"].grad, params[1][0].grad]


def test_stale_grads_are_not_stepped():
    """A leaf without a gradient stays, whatever some earlier backward left in its .grad."""
    params = ({"a": torch.ones(2), "b": torch.ones(2)},)
    params[0]["a"].grad = torch.full((2,), 9.0)
    optimizer = sgd(params)
    fp.step(optimizer, params, ({"a": None, "b": torch.ones(2)},))
    assert ([1, 1], [0, 0]) == (params[0]["a"].tolist(), params[0]["b"].tolist())
    assert [None, None] == [leaf.grad for leaf in fp.leaves(params)]


def test_structures_must_match():
    """params and grads of different trees are refused."""
    with pytest.raises(fp.PlanError, match="differ in structure"):
        fp.step(
            torch.optim.SGD([torch.ones(1)], lr=1.0),
            ({"a": torch.ones(1)},),
            ({"b": torch.ones(1)},),
        )


def test_the_norm_counts_tied_leaves_once():
    """sqrt(9 + 16 + 16) is without ties; with them one of the equal ones counts."""
    grads = (
        {"w": torch.tensor([3.0]), "t": torch.tensor([4.0])},
        {"t": torch.tensor([4.0]), "none": None},
    )
    ties = [[(0, "t"), (1, "t")]]
    assert 41**0.5 == pytest.approx(float(fp.global_norm(grads)))
    assert 5.0 == float(fp.global_norm(grads, ties=ties))
    assert 5.0 == float(fp.global_norm(grads, ties=[[(1, "t"), (0, ("t",))]]))
    assert 0.0 == float(fp.global_norm(({}, {"a": None})))
    assert () == fp.global_norm(grads).shape


@pytest.mark.parametrize("how", ["one tensor", "replicas", "one tensor, step is not told"])
def test_tied_parameters_step_together(how):
    """One tensor at two places moves once, by the summed gradient; replicas move alike; all like
    eager."""
    w, x = torch.tensor([1.0, 2.0]), torch.randn(4, 2)
    times = fp.stage(lambda p, x: x * p["w"], name="times")
    ties = [[(0, "w"), (1, "w")]]
    plan = cpu_plan([times, times], fp.schedules.one_f_one_b(2, 2), loss=mean, ties=ties)
    leaf = w.clone().requires_grad_()
    (x * leaf * leaf).mean().backward()
    params = ({"w": w}, {"w": w.clone() if how == "replicas" else w})
    grads = fp.run(plan, params, (x, None)).grads
    told = () if "not told" in how else ties
    norm = fp.step(sgd(params, lr=0.5), params, grads, max_norm=0.1, ties=told)
    torch.testing.assert_close(norm, leaf.grad.norm())
    expected = leaf.detach() - 0.5 * leaf.grad * min(1.0, 0.1 / float(leaf.grad.norm()))
    for tree in params:
        torch.testing.assert_close(tree["w"], expected, rtol=1e-4, atol=1e-5)


def test_one_tensor_twice_in_a_stage_gets_both_gradients():
    """Two names of one tensor in one stage: each has a gradient of its own, and a step adds
    them."""
    w = torch.ones(2)
    part = fp.stage(lambda p, x: x * p["a"] + 2 * x * p["b"])
    plan = cpu_plan([part], fp.schedules.fill_drain(1, 2), loss=mean)
    params = ({"a": w, "b": w},)
    grads = fp.run(plan, params, (torch.ones(4, 2), None)).grads
    assert ([0.5, 0.5], [1.0, 1.0]) == (grads[0]["a"].tolist(), grads[0]["b"].tolist())
    norm = fp.step(sgd(params), params, grads, max_norm=1.0)
    assert 1.5 * 2**0.5 == pytest.approx(float(norm))  # of the sum, as plain autograd has it
    torch.testing.assert_close(w, torch.full((2,), 1 - 0.5**0.5))


@pytest.mark.parametrize("first", [0, 1, 2])
def test_every_place_of_a_tied_tensor_has_the_whole_sum(first):
    """Twice in stage 0 and once in stage 1, whichever place the tie names first: one step by the
    sum of all three."""
    w = torch.tensor([1.0, 2.0])
    twice = fp.stage(lambda p, x: x * p["a"] + x * p["b"])
    once = fp.stage(lambda p, x: x * p["w"])
    places = [(0, "a"), (0, "b"), (1, "w")]
    ties = [places[first:] + places[:first]]
    plan = cpu_plan([twice, once], fp.schedules.one_f_one_b(2, 2), loss=mean, ties=ties)
    params, leaf, x = ({"a": w, "b": w}, {"w": w}), w.clone().requires_grad_(), torch.randn(4, 2)
    (x * leaf * 2 * leaf).mean().backward()
    norm = fp.step(sgd(params), params, fp.run(plan, params, (x, None)).grads, ties=plan.ties)
    torch.testing.assert_close(norm, leaf.grad.norm())
    torch.testing.assert_close(w, leaf.detach() - leaf.grad)


def two_runs(cut, weight=None):
    """One run over 10 rows, and the accumulation of two over its parts."""
    x, t = torch.randn(10, 3, dtype=torch.float64), torch.randint(0, 3, (10,))
    t[:3] = -100
    stages = [
        fp.stage(lambda p, x: torch.tanh(x @ p["w"]) if "w" in p else x, name=f"s{i}")
        for i in range(2)
    ]
    params = (
        {"w": torch.randn(3, 3, dtype=torch.float64), "never": torch.ones(1)},
        {"w": torch.randn(3, 3, dtype=torch.float64), "n": 3},
    )
    plan = cpu_plan(
        stages,
        fp.schedules.one_f_one_b(2, 3),
        loss=F.cross_entropy if weight else lambda y, t: F.mse_loss(y, x[:1]),
        weight=weight,
    )
    parts = [fp.run(plan, params, (x[a], t[a])) for a in (slice(None, cut), slice(cut, None))]
    return fp.run(plan, params, (x, t)), fp.accumulate(parts)


@pytest.mark.parametrize("cut", [5, 4, 9])
@pytest.mark.parametrize("weight", [None, lambda t: (t != -100).sum()], ids=["rows", "tokens"])
@pytest.mark.filterwarnings("ignore:Using a target size")
def test_accumulation_is_one_run_over_all(cut, weight):
    """Loss, gradients and weight, equal parts or not, weights or rows."""
    once, twice = two_runs(cut, weight)
    torch.testing.assert_close(twice.loss, once.loss, rtol=1e-12, atol=1e-14)
    assert once.weight == twice.weight
    assert ((0, "never"),) == once.unused == twice.unused
    assert twice.grads[1]["n"] is None
    for a, b in zip(twice.grads, once.grads, strict=True):
        torch.testing.assert_close(a["w"], b["w"], rtol=1e-12, atol=1e-14)
    assert 3 + min(3, 10 - cut) == twice.stats.num_microbatches == len(twice.losses)


def scaled(params, **options):
    """A run of one stage that multiplies by its parameters."""
    part = fp.stage(lambda p, x: x * sum(p.values()))
    plan = cpu_plan([part], fp.schedules.fill_drain(1, 2), loss=mean)
    return fp.run(plan, (params,), (torch.ones(4, 2), None), **options)


def test_accumulation_takes_results_with_a_loss():
    """Nothing, runs without a loss, one bare result and what is no result are refused; a generator
    is welcome."""
    plan = forward_plan([fp.stage(lambda p, x: x)], 1)
    evaluation = fp.run(plan, ((),), torch.ones(2))
    result = scaled({"w": torch.ones(2)})
    for results in (
        [],
        iter(()),
        [evaluation],
        result,
        None,
        3,
        [result, None],
        [result.grads],
        (2 for _ in "ab"),
    ):
        with pytest.raises(fp.PlanError, match="accumulate"):
            fp.accumulate(results)
    total = fp.accumulate(one for one in (result, result))
    assert ([0.5, 0.5], 8.0, 2.0) == (
        total.grads[0]["w"].tolist(),
        total.weight,
        float(total.loss) * 2,
    )


def test_accumulated_evaluations_are_one():
    """The loss over all batches, by weight, without gradients; mixed with trained ones they are
    refused."""
    net, x = fp.stage(lambda p, x: x * p["w"]), torch.arange(10.0)
    params, t = ({"w": torch.tensor(2.0)},), torch.ones(10)
    schedule = fp.schedules.fill_drain(1, 2)
    trains, plan = (cpu_plan([net], one) for one in (schedule, schedule.forwards()))
    parts = [fp.run(plan, params, (x[rows], t[rows])) for rows in (slice(0, 7), slice(7, 10))]
    total = fp.accumulate(parts)
    assert total.grads is None
    assert 10.0 == total.weight
    torch.testing.assert_close(total.loss, F.mse_loss(2.0 * x, t))
    with pytest.raises(fp.PlanError, match="result 1 has gradients of other leaves than result 0"):
        fp.accumulate([parts[0], fp.run(trains, params, (x, t))])


def test_a_leaf_is_unused_if_no_part_used_it():
    """A branch that the data choose: unused in one run is not unused in the sum."""
    part = fp.stage(lambda p, x: x * p["a" if x.sum() > 0 else "b"] + 0 * p["a"])
    plan = cpu_plan([part], fp.schedules.fill_drain(1, 1), loss=mean)
    params = ({"a": torch.ones(1), "b": torch.ones(1), "c": torch.ones(1)},)
    results = [fp.run(plan, params, (x, None)) for x in (torch.ones(2, 1), -torch.ones(2, 1))]
    assert ((0, "b"), (0, "c")) == results[0].unused
    assert ((0, "c"),) == results[1].unused == fp.accumulate(results).unused


def test_accumulation_takes_results_of_one_kind():
    """Other keys or other frozen leaves: which result it is, not an error of some tree."""
    ones = {"a": torch.ones(2), "b": torch.ones(2)}
    both = scaled(ones)
    for other in (
        scaled({"a": torch.ones(2)}),
        scaled(ones, trainable=lambda name, leaf: name == "0.a"),
    ):
        with pytest.raises(
            fp.PlanError, match="result 2 has gradients of other leaves than result 0"
        ):
            fp.accumulate([both, both, other])


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"max_norm": "a"}, "max_norm is a number from 0, or None; got 'a'"),
        ({"max_norm": -1.0}, "max_norm is a number from 0"),
        ({"max_norm": float("nan")}, "max_norm is a number from 0"),
        ({"scaler": 2.0}, "scaler is a torch.amp.GradScaler, or None; got a float"),
        ({"ties": [[(0, "w"), (0, "x")]]}, r"ties name 'x' of stage 0.*ties=plan\.ties"),
        ({"ties": [[(0, "w"), (3, "w")]]}, "ties name 'w' of stage 3"),
    ],
    ids=str,
)
def test_a_step_refuses_odd_options(options, text):
    """In words, before anything is touched."""
    params = ({"w": torch.ones(2)},)
    params[0]["w"].grad = torch.ones(2)
    with pytest.raises(fp.PlanError, match=text):
        fp.step(sgd(params), params, ({"w": torch.ones(2)},), **options)
    assert [1.0, 1.0] == params[0]["w"].tolist() == params[0]["w"].grad.tolist()


def test_a_step_needs_a_gradient():
    """All frozen, or an optimizer over other tensors: a step that could do nothing is refused."""
    params = ({"w": torch.ones(2), "v": torch.ones(2)},)
    with pytest.raises(fp.PlanError, match="no leaf has a gradient"):
        fp.step(sgd(params), params, ({"w": None, "v": None},))
    with pytest.raises(fp.PlanError, match=r"holds none of the leaves.*fp\.place"):
        fp.step(
            torch.optim.SGD([params[0]["v"]], lr=1.0), params, ({"w": torch.ones(2), "v": None},)
        )


def test_norms_of_mixed_precisions():
    """Leaves of several dtypes, complex ones too: one norm, every leaf clipped by it."""
    params = (
        {"h": torch.zeros(1).half(), "d": torch.zeros(1).double()},
        {"c": torch.zeros(1, dtype=torch.complex64)},
    )
    grads = (
        {"h": torch.tensor([2.0]).half(), "d": torch.tensor([1.0]).double()},
        {"c": torch.tensor([2.0j])},
    )
    assert 3.0 == float(fp.global_norm(grads))
    norm = fp.step(sgd(params), params, grads, max_norm=1.5)
    assert 3.0 == float(norm)
    assert [-1.0, -0.5, -1.0j] == pytest.approx(
        [params[0]["h"].item(), params[0]["d"].item(), params[1]["c"].item()], rel=1e-3
    )


def test_place_keeps_what_is_there():
    """The very same tensors on their device; moved ones keep flags, class, and being one tensor."""
    w = nn.Parameter(torch.ones(2), requires_grad=False)
    params = (OrderedDict(w=w, again=w, n=3), [nn.Parameter(torch.ones(1))])
    stages = [fp.stage(lambda p, x: x)] * 2
    plan = fp.make_plan(stages, fp.schedules.fill_drain(2, 1), devices="cpu")
    placed = fp.place(plan, params)
    assert placed[0]["w"] is w is placed[0]["again"]
    assert placed[1][0] is params[1][0]
    plan = fp.make_plan(stages, fp.schedules.fill_drain(2, 1), devices=["cpu", "meta"])
    placed = fp.place(plan, params)
    assert placed[0]["w"] is w
    assert "meta" == placed[1][0].device.type
    assert nn.Parameter is type(placed[1][0])
    assert placed[1][0].requires_grad
    plan = fp.make_plan(stages, fp.schedules.fill_drain(2, 1), devices="meta")
    placed = fp.place(plan, params)
    assert placed[0]["w"] is placed[0]["again"]
    assert (nn.Parameter, False, OrderedDict, 3) == (
        type(placed[0]["w"]),
        placed[0]["w"].requires_grad,
        type(placed[0]),
        placed[0]["n"],
    )
    with pytest.raises(fp.PlacementError, match="one tree for each of 2 stages; got a tuple of 1"):
        fp.place(plan, params[:1])


def test_misplaced_tensors_are_all_named():
    """Parameters and state on another device than their stage's: every one, with the call that
    moves them."""
    stages = [fp.stage(lambda p, x: x)] * 2
    plan = fp.make_plan(
        stages, fp.schedules.fill_drain(2, 1, backward=False), devices=["cpu", "meta"]
    )
    with pytest.raises(fp.PlacementError, match=r"fp\.place") as caught:
        fp.run(
            plan,
            (
                {"a": torch.ones(1, device="meta")},
                {"b": torch.ones(1), "c": torch.ones(1, device="meta")},
            ),
            torch.ones(2),
        )
    assert "params[0]['a'] is on meta, but stage 0 runs on cpu" in str(caught.value)
    assert "params[1]['b'] is on cpu, but stage 1 runs on meta" in str(caught.value)
    assert "'c'" not in str(caught.value)


def test_devices():
    """As many as asked; names that torch does not know are refused when the plan runs, all at
    once."""
    assert 3 == len(fp.devices(3))
    assert {"cuda" if torch.cuda.is_available() else "cpu"} == {
        device.type for device in fp.devices(3)
    }
    plan = fp.make_plan(
        [fp.stage(lambda p, x: x)] * 2,
        fp.schedules.fill_drain(2, 1, backward=False),
        devices=["nonsense", "cuda:77"],
    )
    with pytest.raises(fp.PlacementError, match="device 0 is 'nonsense'") as caught:
        fp.run(plan, ((), ()), torch.ones(2))
    assert "device 1 is cuda:77" in str(caught.value)
