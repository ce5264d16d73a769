"""Compiled stages: eager's bits from separate programs, whatever the stage is; what cannot be a
program says why."""

from __future__ import annotations

import copy
import functools
import gc
import math
import pickle
import random
import threading
import weakref
from itertools import groupby

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from common import EXECUTORS, assert_same_result, cpu_plan, ids, same, schedules, snapshot
from stage_zoo import ZOO, pair

import funcpipe as fp
from funcpipe._src.compiled.bound import CompiledBound
from funcpipe._src.compiled.residual import ProgramResidual


def compiled(stages, **options):
    return tuple(fp.compile_stage(stage, **options) for stage in stages)


def both(stages, params, batch, schedule, *, loss=F.mse_loss, fuse=False, plan=None, **options):
    """The same run, eager and compiled."""
    options = {"executor": "serial", "threads_per_lane": 1, **options}
    plans = [
        cpu_plan(one, schedule, loss=loss, outputs=True, **(plan or {}))
        for one in (stages, compiled(stages, fuse=fuse))
    ]
    return [fp.run(each, params, batch, **options) for each in plans]


def as_eager(*args, **options):
    """The run of programs, after a look that its result is eager's, to the bit."""
    eager, programs = both(*args, **options)
    assert_same_result(eager, programs)
    return programs


def programs_of(stage, params, x, *, recompute=False, **options):
    """The programs of a stage, or of a function."""
    stage = stage if isinstance(stage, fp.Stage) else fp.stage(stage, name="stage")
    return fp.make_programs(fp.compile_stage(stage, recompute=recompute), params, x, **options)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("kind", ZOO)
def test_bits_of_the_zoo(kind, recompute):
    """Whole, split and repeated backwards of each module are eager's, to the bit; so is what they
    draw. So too where cheap values are computed again instead of kept."""
    stages, params, state, batch = pair(kind)
    made = compiled(stages, fuse=False, recompute=recompute)
    options = {"state": state, "seed": 3, "executor": "serial", "threads_per_lane": 1}
    for schedule in (
        fp.schedules.one_f_one_b(3, 4),
        fp.schedules.zero_bubble(3, 4),
        fp.schedules.remat(fp.schedules.fill_drain(3, 4)),
    ):
        plans = [cpu_plan(one, schedule, outputs=True) for one in (stages, made)]
        assert_same_result(*[fp.run(plan, params, batch, **options) for plan in plans])
    assert all(stage.program.found for stage in made)


@functools.cache
def four():
    """Stages with skips, feeds, a side loss, trees with ints and masks, eager and compiled; traced
    once for all schedules."""

    @fp.stage(stash=["far"])
    def first(p, x):
        h = torch.tanh(x @ p["w"])
        return fp.Out(
            {"h": h, "ids": x.argmax(-1), "n": 3, "none": None}, stash={"far": (h * 2, h > 0)}
        )

    @fp.stage(feeds=["scale"])
    def second(p, x, *, feeds):
        h = F.dropout(x["h"] @ p["w"], 0.2) * feeds["scale"]
        return fp.Out((h, x["ids"], h.detach()), loss=(h.pow(2).sum(), h.numel()))

    @fp.stage(pop=["far"])
    def third(p, x, *, skips):
        far, mask = skips["far"]
        return torch.where(mask, x[0] @ p["w"], far) + F.one_hot(x[1], 6) + x[2]

    @fp.stage(pop=["far"])
    def fourth(p, x, *, skips):
        return x @ p["w"] + skips["far"][0]

    stages = (first, second, third, fourth)
    return stages, compiled(stages, fuse=False)


@pytest.mark.parametrize("schedule", schedules(4, 4), ids=ids)
def test_bits_for_every_schedule(schedule):
    """The chain `four`, an uneven batch, both executors."""
    torch.manual_seed(0)
    plans = [cpu_plan(one, schedule, outputs=True) for one in four()]
    params = tuple(
        {"w": torch.randn(6, 6, dtype=torch.float64), "unused": torch.ones(2)} for _ in four()[0]
    )
    batch = torch.randn(6, 6, dtype=torch.float64), torch.randn(6, 6, dtype=torch.float64)
    feeds = {"scale": torch.rand(6, 1, dtype=torch.float64)}
    before = snapshot((params, batch, feeds))
    for executor in EXECUTORS:
        eager, programs = [
            fp.run(plan, params, batch, feeds=feeds, seed=1, executor=executor, threads_per_lane=1)
            for plan in plans
        ]
        assert_same_result(eager, programs)
        assert ((0, "unused"), (1, "unused"), (2, "unused"), (3, "unused")) == programs.unused
    assert same(before, snapshot((params, batch, feeds)))


def test_fused_sums_round_once():
    """A product that is added in one operation differs by rounding alone."""
    stages, params, state, batch = pair("block")
    eager, programs = both(
        stages, params, batch, fp.schedules.zero_bubble(3, 4), state=state, fuse=True
    )
    for a, b in zip(fp.leaves(eager.grads), fp.leaves(programs.grads), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
    assert same(eager.loss, programs.loss)


def count(code, text):
    return code.text.count(text)


def test_no_operation_twice():
    """I and W together are B: the operations of a chain of linear layers, each once."""
    torch.manual_seed(0)
    model = nn.Sequential(*[layer for _ in range(4) for layer in (nn.Linear(16, 16), nn.ReLU())])
    stage, params, _ = fp.from_module(model)
    programs = programs_of(stage, params, torch.randn(8, 16, requires_grad=True))
    assert 8 == programs.forward.operations - count(programs.forward, "torch.t(")
    codes = programs.backward, programs.backward_input, programs.backward_weight
    assert [8, 4, 4] == [count(code, "torch.mm(") + count(code, "addmm_(") for code in codes]
    assert [4, 4, 0] == [count(code, "threshold_backward_default(") for code in codes]
    assert [0, 4] == [count(code, "torch.sum(") for code in codes[1:]]
    # A transpose, a product into its sum, a sum of rows, its addition.
    assert 4 * 4 == programs.backward_weight.operations


@pytest.mark.parametrize(
    ("rows", "dtype", "fuse"),
    [(4, torch.float64, True), (512, torch.float32, True), (513, torch.float32, True)]
    + [(4, torch.bfloat16, True), (4, torch.float64, False)],
)
def test_sums_of_rows(rows, dtype, fuse):
    """The gradient of a bias is torch's sum, to the bit, with fused products and without."""
    torch.manual_seed(0)
    stages = [fp.stage(lambda p, x: F.linear(x, p["w"], p["b"])) for _ in range(2)]
    params = tuple(
        {"w": torch.randn(3, 3, dtype=dtype), "b": torch.randn(3, dtype=dtype)} for _ in stages
    )
    batch = torch.randn(2 * rows, 3, dtype=dtype), torch.randn(2 * rows, 3, dtype=dtype)
    made = compiled(stages, fuse=fuse)
    eager, programs = [
        fp.run(cpu_plan(one, fp.schedules.zero_bubble(2, 2)), params, batch)
        for one in (stages, made)
    ]
    for one, other in zip(eager.grads, programs.grads, strict=True):
        assert same(one["b"], other["b"])
        rtol = 1e-2 if dtype == torch.bfloat16 else 1e-5
        assert torch.allclose(one["w"], other["w"], rtol=rtol)
        assert fuse or same(one["w"], other["w"])
    for stage in made:
        (found,) = stage.program.found.values()
        # Without fuse the bias does not wait for W, as eagerly.
        halves = found.backward_input, found.backward_weight
        for codes in ((found.backward,), halves if not fuse else halves[1:]):
            assert 1 == sum(count(code, "torch.sum(") for code in codes)


def test_torch_s_own_bindings_make_the_same_call():
    """An operation is called through torch's binding; one whose binding has other defaults gets all
    it was called with."""
    options = {"loss": F.mse_loss, "target": torch.ones(2, 3)}
    made = programs_of(lambda p, x: x * p, torch.ones(3), torch.ones(2, 3), **options)
    assert "torch.mul(x0, p0)" in made.forward.text
    assert "torch._C._nn.mse_loss(mul, x1" in made.forward.text


def test_sums_and_views():
    """A view that only drops what a sum kept goes; any other stays."""
    calls = [
        lambda p, x: x * p["w"].sum(0, keepdim=True).view(3),
        lambda p, x: x * p["w"].sum(-1, keepdim=True).view(2, 1).sum(),
        lambda p, x: x * p["w"].sum(-1, keepdim=True).view(2).sum(),
        lambda p, x: x * p["w"].sum([], keepdim=True).view(1, 1),
        lambda p, x: x * p["w"].sum((0, -1), keepdim=True).view(1, 1, 1).sum(),
        lambda p, x: x * p["w"].sum((0, -1), keepdim=True).view(()),
    ]
    batch = torch.arange(12.0).view(4, 3), torch.ones(4, 3)
    params = ({"w": torch.tensor([[1.0, -2.0, 0.5], [3.0, 0.25, -1.0]])},)
    for call in calls:
        as_eager([fp.stage(call)], params, batch, fp.schedules.one_f_one_b(1, 2))


def test_residuals_are_what_is_needed():
    """Between F and B lie the inputs of the products; between I and W these and the gradients of
    their outputs."""
    stage, params, _ = fp.from_module(
        nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16))
    )
    programs = programs_of(stage, params, torch.randn(8, 16, requires_grad=True))
    one = 8 * 16 * 4
    assert 2 * one == programs.residual_bytes  # x, tanh
    assert 4 * one == programs.weight_residual_bytes  # and dy of both


def test_residuals_are_of_the_microbatch_alone():
    """Neither the batch around a microbatch nor that input and target lie in one memory is seen by
    a trace."""
    w, one = torch.ones(3), 2 * 3 * 4
    for batch in (torch.randn(64, 3), torch.randn(2, 3)):
        row = batch[:2]
        alone = programs_of(lambda p, x: x * p, w, row)
        with_loss = programs_of(lambda p, x: x * p, w, row, loss=F.mse_loss, target=row)
        assert one == alone.residual_bytes  # x
        assert 3 * one == with_loss.residual_bytes  # x, y, target


def test_what_is_cheap_is_computed_again():
    """The least cut: of a chain of pointwise operations one value; nothing that a product or a draw
    made is made again."""

    def chain(w, x):
        h = x @ w
        return F.gelu(torch.tanh(h) * 2 + 1).sin() @ w

    params, x = torch.randn(16, 16), torch.randn(8, 16, requires_grad=True)
    one = 8 * 16 * 4
    plain, least = (programs_of(chain, params, x, recompute=again) for again in (False, True))
    # x, tanh: of all that is as little, what is nearest
    assert 2 * one == least.residual_bytes < plain.residual_bytes
    assert 2 == count(least.forward, "torch.mm(")
    assert 1 == count(least.backward, "gelu(")
    assert 0 == count(plain.backward, "gelu(")
    assert 0 == count(least.backward, "torch.tanh(")
    assert 4 == count(least.backward, "torch.mm(") + count(least.backward, "addmm_(")
    # What is large and made of what is small is not kept, and the other way round.
    wide = lambda w, x: (x.expand(64, 8, 16) * w).sin().cos().sum(0)
    assert one == programs_of(wide, torch.randn(16), x, recompute=True).residual_bytes
    narrow = lambda w, x: ((x * 2).sum(1) * w).exp().sin()
    assert 8 * 4 == programs_of(narrow, torch.randn(8), x, recompute=True).residual_bytes
    noisy = lambda w, x: F.dropout(x * w, 0.5).sin()
    found = programs_of(noisy, torch.randn(16), x, recompute=True)
    assert "R.of(" in str(found.forward)
    assert "R.of(" not in str(found.backward)


@pytest.mark.slow
def test_long_chains_are_computed_again():
    """Longer than Python's stack is deep."""

    def long(w, x):
        for _ in range(600):
            x = torch.sin(x * w)
        return x

    x = torch.randn(2, 3, requires_grad=True)
    made = programs_of(long, torch.randn(3), x, recompute=True)
    assert made.residual_bytes == 2 * 3 * 4


@pytest.mark.parametrize("recompute", [0.5, 1, "x", None])
def test_recompute_is_a_bool(recompute):
    with pytest.raises(fp.PlanError, match="recompute is True or False; got"):
        fp.compile_stage(fp.stage(lambda w, x: x @ w), recompute=recompute)


@pytest.mark.parametrize("kind", ["block", "conv, batch norm", "linear"])
def test_the_least_cut_is_no_more_than_what_is_kept_without(kind):
    stages, params, state, batch = pair(kind)
    kept = []
    for again in (False, True):
        made = compiled(stages, fuse=False, recompute=again)
        plan = cpu_plan(made, fp.schedules.one_f_one_b(3, 4))
        fp.run(plan, params, batch, state=state, seed=1, executor="serial")
        kept.append([one.residual_bytes for stage in made for one in stage.program.found.values()])
    assert all(a >= b for a, b in zip(*kept, strict=True))
    assert sum(kept[1]) < sum(kept[0]) or kind == "linear"


@functools.cache
def pair_and_programs(kind, recompute):
    """A pair, and its stages as programs; traced once for all families."""
    found = pair(kind)
    return *found, compiled(found[0], recompute=recompute)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize(
    "family", [fp.schedules.one_f_one_b, fp.schedules.zero_bubble, fp.schedules.fill_drain]
)
@pytest.mark.parametrize("kind", ["block", "conv, batch norm", "dropout"])
def test_peaks_are_as_simulated(kind, family, recompute, monkeypatch):
    """The most bytes that residuals hold on each device: what `simulate` says of the programs' own
    bytes, within 5 %."""
    _, params, state, batch, made = pair_and_programs(kind, recompute)
    schedule = family(3, 4)
    plan = cpu_plan(made, schedule)
    options = {"state": state, "seed": 1, "executor": "serial", "threads_per_lane": 1}
    fp.run(plan, params, batch, **options)
    held: dict[int, list[ProgramResidual]] = {
        device: [] for device in range(3)
    }  # programs empty what they have used
    most = dict.fromkeys(held, 0)

    def watched(name):
        real = getattr(CompiledBound, name)

        def call(self, *args, **words):
            out = real(self, *args, **words)
            new = [
                one
                for one in (out if isinstance(out, tuple) else ())
                if isinstance(one, ProgramResidual)
            ]
            device = schedule.device_of[self.eager.index]
            held[device] += new
            # Not `nbytes`: a target is a view of the caller's batch, whose storage is the whole of
            # it.
            kept = [{one.data_ptr(): one.nbytes for one in each.values} for each in held[device]]
            most[device] = max(most[device], sum(sum(one.values()) for one in kept))
            return out

        monkeypatch.setattr(CompiledBound, name, call)

    for name in ("forward", "backward", "backward_weight"):
        watched(name)
    fp.run(plan, params, batch, **options)
    kept = [next(iter(stage.program.found.values())) for stage in made]
    cost = fp.Cost(
        residual=tuple(one.residual_bytes for one in kept),
        weight_residual=tuple(one.weight_residual_bytes for one in kept),
    )
    predicted = fp.simulate(plan, cost).peak
    assert list(most.values()) == pytest.approx(list(predicted), rel=0.05)


def test_programs_print_as_python():
    """What is printed is what runs: functions that Python reads."""
    stage, params, _ = fp.from_module(nn.Linear(2, 2))
    text = str(programs_of(stage, params, torch.randn(3, 2, requires_grad=True)))
    assert ["C(P)", "F(P, X)", "B(P, K, G, S)", "I(P, K, G)", "W(P, L, S)"] == [
        line[4:-1] for line in text.splitlines() if line.startswith("def ")
    ]
    compile(text, "programs", "exec")
    assert "S[1].addmm_(t_2, x0)" in text.replace("k0", "x0").replace("l0", "x0")


# -- what flows
# -------------------------------------------------------------------------------


def test_an_output_without_a_gradient():
    """What no later stage uses sends no gradient back: parameters behind it alone are unused, as in
    eager."""

    def first(p, x):
        return {"used": x * p["a"], "left": torch.log(x * p["b"]) * p["c"]}

    stages = (fp.stage(first), fp.stage(lambda p, x: x["used"] * p))
    params = ({name: torch.ones(3) for name in "abc"}, torch.ones(3))
    batch = torch.zeros(4, 3), torch.ones(4, 3)  # log(0): zeros instead of nothing would give nan
    for schedule in (fp.schedules.one_f_one_b(2, 2), fp.schedules.zero_bubble(2, 2)):
        programs = as_eager(stages, params, batch, schedule)
        assert ((0, "b"), (0, "c")) == programs.unused
        assert torch.isfinite(programs.grads[0]["b"]).all()


def test_an_output_with_a_gradient_beside_one_without():
    """Where both flow into one operation only the one that is there counts."""

    def first(p, x):
        h = x * p["a"]
        return {
            "used": h + 1,
            "left": torch.sqrt(h - h) * p["b"],
            "cut": torch.stack([h, h * p["b"]]),
        }

    stages = (fp.stage(first), fp.stage(lambda p, x: x["used"] * p))
    params = ({name: torch.ones(3) for name in "ab"}, torch.ones(3))
    as_eager(stages, params, (torch.ones(4, 3), torch.ones(4, 3)), fp.schedules.zero_bubble(2, 2))


def test_a_microbatch_without_weight_adds_nothing():
    """Its loss is nan, its share 0: no gradient begins there."""

    def loss(y, target):
        keep = (target >= 0).float()
        return ((y - target).pow(2) * keep).sum() / keep.sum()

    target = torch.tensor([[1.0, 2.0], [3.0, 4.0], [-1.0, -1.0], [-1.0, -1.0]])
    programs = as_eager(
        [fp.stage(lambda p, x: x * p)] * 2,
        (torch.ones(2), torch.ones(2)),
        (torch.ones(4, 2), target),
        fp.schedules.one_f_one_b(2, 2),
        loss=loss,
        plan={"weight": lambda t: float((t >= 0).sum())},
    )
    assert all(torch.isfinite(g).all() for g in fp.leaves(programs.grads))


def test_vjp_and_forward_only():
    """Cotangents of any layout, missing ones, gradients of inputs; a plan without backwards."""
    stages = (fp.stage(lambda p, x: torch.tanh(x @ p)), fp.stage(lambda p, x: (x @ p, x * 2)))
    params = (torch.randn(3, 3), torch.randn(3, 3))
    x = torch.randn(4, 3)
    found = []
    for one in (stages, compiled(stages, fuse=False)):
        plan = fp.make_plan(one, fp.schedules.fill_drain(2, 2), devices="cpu")
        row = []
        for cotangents in (
            (torch.ones(1, 1).expand(4, 3), None),
            (torch.randn(3, 4, generator=torch.Generator().manual_seed(1)).T, torch.ones(4, 3)),
        ):
            result, pull = fp.vjp(plan, params, x, input_grads=True)
            row.append((result.outputs, pull(cotangents)))
        forward = fp.make_plan(one, fp.schedules.fill_drain(2, 2, backward=False), devices="cpu")
        with torch.inference_mode():
            row.append(fp.run(forward, params, x).outputs)
        found.append(snapshot(row))
    assert same(*found)


def test_trainable_leaves_decide_the_programs():
    """A frozen parameter has no gradient, and nothing is computed for it."""
    stages, params, state, batch = pair("linear")
    made = compiled(stages, fuse=False)
    plan = cpu_plan(made, fp.schedules.zero_bubble(3, 4))
    everything = fp.run(plan, params, batch, state=state, threads_per_lane=1)
    some = fp.run(
        plan,
        params,
        batch,
        state=state,
        threads_per_lane=1,
        trainable=lambda name, _: "bias" in name,
    )
    assert some.grads[1]["0.weight"] is None
    assert same(everything.grads[1]["0.bias"], some.grads[1]["0.bias"])
    frozen = list(made[1].program.found.values())[-1]
    assert "addmm_" not in frozen.backward_weight.text
    assert 1 == count(
        frozen.backward_weight, "torch.mm("
    )  # of the chain from one layer to the other


@pytest.mark.parametrize("kind", ["block", "conv, batch norm"])
def test_autocast(kind):
    """Casts are in the programs, and are not made again when these run."""
    stages, params, state, batch = pair(kind)
    with torch.autocast("cpu", torch.bfloat16):
        as_eager(
            stages, params, batch, fp.schedules.zero_bubble(3, 4), state=state, executor="threads"
        )


def test_autocast_that_a_stage_switches_off():
    """What a stage computes in full precision stays so."""

    def mixed(p, x):
        with torch.autocast("cpu", enabled=False):
            h = x.float() @ p
        return (h @ p).float()

    stages, params = (fp.stage(mixed), fp.stage(mixed)), (torch.randn(8, 8), torch.randn(8, 8))
    with torch.autocast("cpu", torch.bfloat16):
        as_eager(
            stages, params, (torch.randn(4, 8), torch.randn(4, 8)), fp.schedules.one_f_one_b(2, 2)
        )


def test_residuals_on_the_host():
    """Offload moves a program's residuals, too."""
    stages, params, state, batch = pair("block")
    as_eager(
        stages,
        params,
        batch,
        fp.schedules.offload(fp.schedules.one_f_one_b(3, 4)),
        state=state,
        executor="threads",
    )


def test_all_of_it_together():
    """Zero-bubble, remat, dropout, batch norm, skips, an uneven batch, loss scale, finite checks,
    several steps."""
    torch.manual_seed(0)
    net = [
        nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(0.2), nn.Tanh())
        for _ in range(4)
    ]
    made = [fp.from_module(one, name=f"s{i}") for i, one in enumerate(net)]
    stages, params, state = zip(*made, strict=True)
    batch = torch.randn(14, 6), torch.randn(14, 6)
    schedule = fp.schedules.remat(fp.schedules.zero_bubble(4, 4, num_devices=2))
    found = []
    for one in (stages, compiled(stages, fuse=False)):
        plan = cpu_plan(one, schedule)
        own, row = state, []
        for step in range(3):
            result = fp.run(
                plan, params, batch, state=own, seed=step, loss_scale=8.0, check=["finite", "used"]
            )
            own = result.state
            row.append((result.loss, result.grads, result.state))
        found.append(snapshot(row))
    assert same(*found)


def test_tied_parameters():
    """One weight in two stages has one gradient."""
    w, x = torch.randn(5, 5), torch.ones(4, 5)
    stages = (fp.stage(lambda p, x: torch.tanh(x @ p["w"])), fp.stage(lambda p, x: x @ p["w"].T))
    ties = {"ties": [[(0, "w"), (1, "w")]]}
    as_eager(stages, ({"w": w}, {"w": w}), (x, x), fp.schedules.zero_bubble(2, 2), plan=ties)


def test_compositions():
    """A composition is compiled as a whole and draws as its parts would."""
    (a, pa, _), (b, pb, _) = (
        fp.from_module(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)), name=name) for name in "ab"
    )
    batch = torch.randn(4, 4), torch.randn(4, 4)
    apart = fp.run(cpu_plan((a, b), fp.schedules.one_f_one_b(2, 2)), (pa, pb), batch, seed=1)
    whole = fp.compile_stage(fp.compose(a, b), fuse=False)
    one = fp.run(cpu_plan((whole,), fp.schedules.one_f_one_b(1, 2)), ((pa, pb),), batch, seed=1)
    assert same(apart.loss, one.loss)
    assert same([*apart.grads], [*one.grads[0]])


# -- what is refused
# -------------------------------------------------------------------------------

CAPTURED = torch.ones(3)
calls = 0


def branch(p, x):
    return x * p if x.sum() > 0 else x


def closed(p, x):
    return x * p * CAPTURED


def shape_by_numbers(p, x):
    return (x * p)[x > 0].sum() + x


def numbers(p, x):
    return x * p * float(x.detach().numpy().mean())


def item(p, x):
    return x * p * x.detach().mean().item()


def counter(p, x):
    global calls
    calls += 1
    return x * p * calls


def chance(p, x):
    return x * p * random.random()


def writes(p, x):
    with torch.no_grad():
        p.mul_(2.0)
    return x * p


def in_the_backward(p, x):
    return torch.utils.checkpoint.checkpoint(
        lambda y: F.dropout(y * p, 0.5), x, use_reentrant=False
    )


REFUSED = [
    (branch, "depends on numbers in tensors"),
    (closed, "a tensor that is not an argument"),
    (shape_by_numbers, "depends on numbers in tensors"),
    (numbers, "numbers of a tensor outside of torch"),
    (item, "depends on numbers in tensors"),
    (counter, "does something else in its second call"),
    (chance, "does something else in its second call"),
    (in_the_backward, "draws random numbers in its backward"),
]


@pytest.mark.parametrize(
    ("function", "reason"), REFUSED, ids=lambda one: getattr(one, "__name__", "")
)
def test_what_cannot_be_traced_says_why(function, reason):
    """By name and reason; with fallback=True it runs eagerly, with eager's numbers."""
    stage = fp.stage(function, name="odd")
    batch = torch.rand(4, 3) + 0.5, torch.ones(4, 3)
    plan = cpu_plan([fp.compile_stage(stage)], fp.schedules.one_f_one_b(1, 2))
    with pytest.raises(fp.PlanError, match=reason) as raised:
        fp.run(plan, (torch.ones(3),), batch, seed=0)
    assert "'odd'" in str(raised.value)
    assert "fallback=True" in str(raised.value)
    if function in (counter, chance):
        return
    found = []
    for one in (stage, fp.compile_stage(stage, fallback=True)):
        plan = cpu_plan([one], fp.schedules.zero_bubble(1, 2))
        found.append(fp.run(plan, (torch.ones(3),), batch, seed=0))
    assert_same_result(*found)


def test_some_microbatches_are_programs_and_some_are_not():
    """With fallback=True each signature goes its own way, into the same sums."""

    def odd(p, x):
        return x * p if len(x) > 1 else x * p * (1.0 if x.sum().item() > 0 else 2.0)

    stage, batch = fp.stage(odd), (torch.rand(5, 3), torch.ones(5, 3))
    for schedule in (
        fp.schedules.one_f_one_b(1, 3),
        fp.schedules.zero_bubble(1, 3),
        fp.Schedule.parse("0F2 0B2 0F0 0B0 0F1 0B1"),
    ):
        stages = stage, fp.compile_stage(stage, fallback=True, fuse=False)
        plans = [cpu_plan([one], schedule) for one in stages]
        eager, mixed = [fp.run(plan, (torch.ones(3),), batch, executor="serial") for plan in plans]
        assert_same_result(eager, mixed)
        assert 1 == len(plans[1].stages[0].program.reasons())


def test_a_stage_that_writes_into_its_parameters():
    plan = cpu_plan(
        [fp.compile_stage(fp.stage(writes, name="odd"))], fp.schedules.one_f_one_b(1, 2)
    )
    w = torch.ones(3)
    with pytest.raises(fp.PlanError):
        fp.run(plan, (w,), (torch.ones(4, 3), torch.ones(4, 3)))
    assert same(w, torch.ones(3))


def test_mistakes_in_a_stage_are_its_own():
    """What fails in eager as well fails with the same error, at the same place, the loss
    included."""
    shapes = fp.compile_stage(fp.stage(lambda p, x: x @ p, name="shapes"))
    plan = cpu_plan([shapes], fp.schedules.one_f_one_b(1, 2))
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied") as raised:
        fp.run(plan, (torch.ones(5, 5),), (torch.ones(4, 3), torch.ones(4, 3)))
    assert "0F0" == raised.value.funcpipe.action
    fine = fp.compile_stage(fp.stage(lambda p, x: x @ p))
    plan = cpu_plan([fine], fp.schedules.one_f_one_b(1, 2), loss=lambda y, t: y)
    with pytest.raises(fp.StageError, match="the loss is a floating number") as raised:
        fp.run(plan, (torch.ones(3, 3),), (torch.ones(4, 3), torch.ones(4, 3)))
    assert "0F0 (loss)" == raised.value.funcpipe.action


def test_profile_measures_programs():
    """I and W are run, and the bytes that wait for them are those of the programs."""
    stage, params, _ = fp.from_module(
        nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16))
    )
    stages = [fp.compile_stage(stage), fp.compile_stage(stage), stage]
    x = torch.randn(8, 16)
    cost = fp.models.profile(stages, x, params=[params] * 3, repeats=2)
    found = fp.make_programs(stages[1], params, x)
    eager = fp.models.profile([stage] * 3, x, params=[params] * 3, repeats=1)
    assert (found.residual_bytes, found.weight_residual_bytes) == (
        cost.residual[1],
        cost.weight_residual[1],
    )
    assert eager.residual[2] == cost.residual[2]
    assert min(cost.backward_weight[:2]) > 0
    schedule = fp.schedules.zero_bubble(3, 4)
    timeline = fp.simulate(schedule, cost)
    assert max(timeline.peak) <= 4 * max(*cost.residual, *cost.weight_residual)


def test_a_buffer_that_is_no_buffer():
    """A tensor that is an attribute of a module is not among the stage's inputs."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = torch.ones(3)
            self.linear = nn.Linear(3, 3)

        def forward(self, x):
            return self.linear(x) * self.scale

    stage, params, _ = fp.from_module(Net(), name="net")
    with pytest.raises(fp.PlanError, match="an attribute of a module that is not a buffer"):
        programs_of(stage, params, torch.ones(2, 3))


def test_draws_need_a_seed():
    stages, params, state, batch = pair("dropout")
    plan = cpu_plan(compiled(stages), fp.schedules.one_f_one_b(3, 4))
    before = torch.get_rng_state()
    with pytest.raises(fp.DrawError, match="seed="):
        fp.run(plan, params, batch, state=state)
    fp.run(plan, params, batch, state=state, seed=1)
    assert torch.equal(before, torch.get_rng_state())


def test_compile_takes_stages():
    with pytest.raises(fp.PlanError, match="compile_stage takes a stage"):
        fp.compile_stage(nn.Linear(2, 2))
    with pytest.raises(fp.PlanError, match="fp.compile_stage"):
        fp.make_programs(fp.stage(lambda p, x: x), (), torch.ones(2))


# -- the cache
# -------------------------------------------------------------------------------


def test_a_signature_is_traced_once():
    """Runs, microbatches and threads share programs; another shape, mode or type is another
    signature."""
    stages, params, state, batch = pair("linear")
    made = compiled(stages)
    plan = cpu_plan(made, fp.schedules.one_f_one_b(3, 4))

    def work():
        fp.run(plan, params, batch, state=state)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [1, 1, 1] == [len(stage.program.found) for stage in made]
    fp.run(plan, params, (batch[0][:6], batch[1][:6]), state=state)
    assert [2, 2, 2] == [len(stage.program.found) for stage in made]
    forward = fp.make_plan(made, fp.schedules.fill_drain(3, 4, backward=False), devices="cpu")
    fp.run(forward, params, batch[0], state=state)
    assert [3, 3, 3] == [len(stage.program.found) for stage in made]


def test_tracing_leaves_everything_as_it_was():
    """No numbers, gradients, generators or modes of the caller's change; no copy of a module keeps
    fake tensors."""
    stages, params, state, batch = pair("conv, batch norm")
    before = snapshot((params, state, batch)), torch.get_rng_state(), torch.is_grad_enabled()
    made = compiled(stages)
    fp.make_programs(made[1], params[1], batch[0].tanh(), state=state[1])
    assert same(
        before, (snapshot((params, state, batch)), torch.get_rng_state(), torch.is_grad_enabled())
    )
    assert all(leaf.grad is None for leaf in fp.leaves(params))
    y = made[1](params[1], batch[0], state=state[1])
    assert type(y) is torch.Tensor


def test_memory_is_free_after_a_run():
    """Residuals, sums and inputs are freed without a garbage collector."""
    stages, params, state, batch = pair("block")
    plan = cpu_plan(compiled(stages), fp.schedules.zero_bubble(3, 4))
    fp.run(plan, params, batch, state=state)
    gc.collect()
    gc.disable()
    try:
        x = batch[0].clone()
        result = fp.run(plan, params, (x, batch[1]), state=state)
        marks = [weakref.ref(x), weakref.ref(result.grads[1]["up.weight"])]
        del x, result
        assert [None, None] == [mark() for mark in marks]
    finally:
        gc.enable()


def test_compiled_stages_are_copied_and_pickled_without_programs():
    stage, params, _ = fp.from_module(nn.Linear(2, 2), name="linear")
    made = fp.compile_stage(stage, fuse=False)
    fp.make_programs(made, params, torch.ones(1, 2))
    for other in (pickle.loads(pickle.dumps(made)), copy.deepcopy(made)):
        assert not other.program.found
        assert not other.program.fuse
        assert same(made(params, torch.ones(1, 2)), other(params, torch.ones(1, 2)))


def test_torch_func_goes_through():
    """Called directly, a compiled stage is the function that it was."""
    made = fp.compile_stage(fp.stage(lambda w, x: torch.sin(w * x).sum()))
    x = torch.ones(3)
    torch.testing.assert_close(
        torch.func.grad(made)(torch.ones(3), x), torch.full((3,), math.cos(1.0))
    )


# -- numbers that depend on nothing
# -------------------------------------------------------------------------------


def test_branches_on_constants_are_taken_as_in_eager():
    """Positions and masks that no input goes into have numbers while tracing."""

    def masked(p, x):
        positions = torch.arange(x.shape[-1])
        if (positions.diff() == 1).all() and positions[-1].item() == 5:
            x = x * p
        mask = torch.ones(6)
        mask[2:].fill_(0.5)
        if bool(mask.sum() == 4):
            x = x + 1
        return x * mask

    stages = (fp.stage(masked),)
    as_eager(
        stages,
        (torch.ones(6),),
        (torch.randn(4, 6), torch.randn(4, 6)),
        fp.schedules.one_f_one_b(1, 2),
    )


def test_constants_that_inputs_are_written_into_are_none():
    def mixed(p, x):
        room = torch.zeros(6)
        view = room[:3]
        view.copy_(x[0, :3])
        return x * p if room.sum() > 0 else x

    with pytest.raises(fp.TraceError, match="depends on numbers in tensors"):
        programs_of(mixed, torch.ones(6), torch.ones(2, 6))


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_models_of_transformers(kind):
    """Their stages are programs with eager's bits, dropout included."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    if kind == "gpt2":
        config = transformers.GPT2Config(
            vocab_size=50,
            n_positions=16,
            n_embd=16,
            n_layer=2,
            n_head=2,
            use_cache=False,
            bos_token_id=0,
            eos_token_id=0,
        )
        model = transformers.GPT2LMHeadModel(config)
    else:
        config = transformers.LlamaConfig(
            vocab_size=50,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=16,
            use_cache=False,
        )
        model = transformers.LlamaForCausalLM(config)
    model.train()
    split = fp.split(model, 2)
    ids = torch.randint(0, 50, (4, 8))

    def loss(y, target):
        return F.cross_entropy(y["logits"].flatten(0, 1), target.flatten())

    found = []
    for stages in (split.stages, compiled(split.stages, fuse=False)):
        plan = cpu_plan(stages, fp.schedules.zero_bubble(2, 2), loss=loss, ties=split.ties)
        found.append(
            fp.run(plan, split.params, (ids, ids), state=split.state, seed=1, threads_per_lane=1)
        )
    assert_same_result(*found)


# -- warming up
# -------------------------------------------------------------------------------


def test_warmup_makes_all_that_a_step_needs():
    """For both shapes of an uneven batch, beside eager stages; the step traces nothing more;
    nothing else changes."""
    stages, params, state, batch = pair("dropout")
    stages = (stages[0], *compiled(stages[1:]))
    batch = (batch[0][:7], batch[1][:7])
    plan = cpu_plan(stages, fp.schedules.zero_bubble(3, 4))
    before, told = (snapshot((params, state, batch)), torch.get_rng_state()), []
    assert 4 == fp.warmup(plan, params, batch, state=state, progress=told.append)
    assert 0 == fp.warmup(plan, params, batch, state=state)
    assert same(before, (snapshot((params, state, batch)), torch.get_rng_state()))
    assert {6} == {one.total for one in told}
    # A slow machine is told the same again.
    assert [0, 1, 2, 3, 4, 5, 6] == [done for done, _ in groupby(one.done for one in told)]
    phases = [phase for phase, _ in groupby(one.phase for one in told)]
    assert [*["stage 0 ('s0')", "stage 1 ('s1')", "stage 2 ('s2')"] * 2, "done"] == phases
    fp.run(plan, params, batch, state=state, seed=0)
    assert [2, 2] == [len(stage.program.found) for stage in stages[1:]]


def test_warmup_says_what_cannot_be_compiled():
    plan = fp.make_plan(
        [fp.compile_stage(fp.stage(branch, name="odd"))],
        fp.schedules.one_f_one_b(1, 2),
        loss=F.mse_loss,
    )
    with pytest.raises(fp.TraceError, match="'odd' cannot be compiled"):
        fp.warmup(plan, (torch.ones(3),), (torch.ones(4, 3), torch.ones(4, 3)))
    with pytest.raises(fp.PlanError, match="warmup takes a plan"):
        fp.warmup(None, (), ())


@pytest.mark.parametrize("kind", ["linear", "conv, batch norm"])
def test_a_stage_is_copied_while_it_is_traced(kind):
    """Other threads may have taken every copy of its module that lay ready."""

    class Taken(list):
        def pop(self, *_):
            raise IndexError

    stages, params, state, batch = pair(kind)
    stages[1].fn._idle = Taken()
    assert_same_result(*both(stages, params, batch, fp.schedules.one_f_one_b(3, 4), state=state))


@pytest.mark.parametrize("first", ["run", "vjp"])
def test_gradients_of_inputs_are_asked_for_by_some(first):
    """One compiled stage, in a run that wants no gradients of the inputs and in a vjp that does:
    programs for each."""
    part = fp.compile_stage(fp.stage(lambda p, x: torch.tanh(x @ p["w"])))
    params, x = ({"w": torch.eye(4)},), torch.randn(6, 4)
    ran = cpu_plan([part], fp.schedules.fill_drain(1, 2))
    halves = fp.make_plan([part], fp.schedules.fill_drain(1, 2), devices="cpu")

    def pulled(inputs):
        result, pullback = fp.vjp(halves, params, x, input_grads=inputs)
        return pullback(torch.ones_like(result.outputs))[1]

    for turn in (first, "run", "vjp", "none", "vjp"):
        if turn == "run":
            fp.run(ran, params, (x, x))
        elif turn == "none":
            assert pulled(False) is None
        else:
            torch.testing.assert_close(pulled(True), 1 - torch.tanh(x) ** 2)
    kinds = {one.joint.wanted[0][0] is None for one in part.program.found.values()}
    assert kinds == {True, False}


@pytest.mark.parametrize("rows", [8, 7])
@pytest.mark.parametrize(
    "fn",
    [lambda p, x: x, lambda p, x: F.relu(x, inplace=True) * p["w"]],
    ids=["as it is", "in place"],
)
def test_where_a_microbatch_begins_is_seen_by_no_trace(fn, rows):
    """The first of its size lies in the middle of the batch where the rows do not divide."""
    params, x = ({"w": torch.ones(4)}, {"w": torch.ones(4)}), torch.randn(rows, 4)
    results = []
    for make in (lambda one: one, lambda one: fp.compile_stage(one, fuse=False)):
        parts = [
            make(fp.stage(one, name=f"s{i}")) for i, one in enumerate([fn, lambda p, x: x * p["w"]])
        ]
        plan = cpu_plan(parts, fp.schedules.one_f_one_b(2, 4))
        results.append(fp.run(plan, params, (x, x * 2), threads_per_lane=1))
    assert same(results[0].grads, results[1].grads)
    assert torch.equal(results[0].loss, results[1].loss)


def test_the_default_device_is_in_the_signature():
    """A stage that makes tensors on it makes them where it would."""
    seen = fp.compile_stage(fp.stage(lambda p, x: x + (2 if torch.ones(1).is_meta else 0)))
    plan = fp.make_plan(
        [seen], fp.schedules.fill_drain(1, 1, backward=False), devices="cpu", outputs=True
    )
    x = torch.zeros(1, 2)
    for device, wanted in (("cpu", 0), ("meta", 2), ("cpu", 0)):
        with torch.device(device):
            assert fp.run(plan, ((),), x).outputs.tolist() == [[wanted] * 2]
