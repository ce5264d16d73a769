"""fp.graphs and backend="cudagraphs", with a stand-in for the device's graphs: what is recorded,
what is played, why not."""

from __future__ import annotations

import functools
import gc
import sys
import threading
import weakref
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from common import assert_same_result, cpu_plan, ids, one_of_each_kind, schedules

import funcpipe as fp
from funcpipe._src.devices.stream import Place

sys.path.insert(0, str(Path(__file__).parent))
from tape import Tapes

S, M = 4, 3


@pytest.fixture
def tapes(monkeypatch):
    found = Tapes()
    monkeypatch.setattr(Place, "backend", found)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # a tape plays with the caller's number, a run with its own
    yield found
    torch.set_num_threads(threads)


def stages(**options):
    """Skips, an in-place operation, a feed, batch norm with its statistics; with options:
    compiled."""
    torch.manual_seed(0)

    @fp.stage(stash=["far"])
    def first(p, x):
        h = torch.tanh(x @ p["w"])
        return fp.Out(h, stash={"far": h * 2})

    @fp.stage(pop=["far"], feeds=["scale"])
    def second(p, x, *, skips, feeds):
        return F.relu(x.mul_(1.5) @ p["w"] + skips["far"] * feeds["scale"])

    norm, norm_params, norm_state = fp.from_module(
        nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), name="norm"
    )
    last = fp.stage(lambda p, x: x @ p["w"], name="last")
    parts = first, second, norm, last
    w = [{"w": torch.randn(4, 4)} for _ in range(3)]
    params = w[0], w[1], norm_params, w[2]
    return (
        tuple(fp.compile_stage(one, **options) for one in parts) if options else parts,
        params,
        ((), (), norm_state, ()),
    )


@functools.cache
def parts_of_all_schedules(**options):
    """The stages alone: what is compiled once plays in all schedules."""
    return stages(**options)[0]


def batches(count, rows=7):
    g = torch.Generator().manual_seed(1)
    return [tuple(torch.randn(rows, 4, generator=g) for _ in range(3)) for _ in range(count)]


def linear_plan(num=2, microbatches=2, schedule=fp.schedules.one_f_one_b, **options):
    part = fp.stage(lambda p, x: torch.tanh(x @ p["w"]), name="linear")
    g = torch.Generator().manual_seed(2)
    params = tuple({"w": torch.randn(4, 4, generator=g)} for _ in range(num))
    options = {"loss": F.mse_loss, "devices": "cpu", **options}
    return fp.make_plan([part] * num, schedule(num, microbatches), **options), params


def forward_plan(function, **options):
    """A stage without a loss, in two microbatches."""
    schedule = fp.schedules.fill_drain(1, 2, backward=False)
    return fp.make_plan([fp.stage(function)], schedule, devices="cpu", outputs=True, **options)


def with_graphs(plan, **options):
    """The plan whose stages are programs, each a graph of its own."""
    parts = [fp.compile_stage(one, backend="cudagraphs", **options) for one in plan.stages]
    return cpu_plan(parts, plan.schedule)


def data(rows=6, seed=1):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(rows, 4, generator=g), torch.randn(rows, 4, generator=g)


def test_losses_of_ones_own_are_recorded(tapes):
    """Their checks read numbers, so only the first of four runs of a form makes them."""
    calls = []

    def loss(y, t):
        calls.append(len(y))
        return (y - t).square().mean()

    plan, params = linear_plan(loss=loss)
    with fp.graphs(plan) as graphs:
        for rows in (4, 6, 8):
            calls.clear()
            result = fp.run(plan, params, data(rows), executor=graphs, trainable=True)
            assert "graph" == result.stats.executor, result.stats.reason
            # Two microbatches in four runs, and at most one check with three calls for each.
            assert 8 <= len(calls) <= 8 + 6


ON_DEVICE = [one for one in schedules(S, M) if "offload" not in one.name]


@pytest.mark.parametrize(
    ("schedule", "options"),
    [
        *(pytest.param(one, {}, id=f"eager-{ids(one)}") for one in ON_DEVICE),
        *(
            pytest.param(one, {"fuse": False}, id=f"compiled-{ids(one)}")
            for one in one_of_each_kind(ON_DEVICE)
        ),
    ],
)
def test_played_runs_have_the_same_bits(tapes, schedule, options):
    """Parameters that move (new ones, and in place), state that goes round, other batches: all are
    the oracle's."""
    _, params, state = stages()
    parts = parts_of_all_schedules(**options)
    plan = cpu_plan(parts, schedule, outputs=True)
    expected_state = state
    with fp.graphs(plan) as graphs:
        for number, (x, target, scale) in enumerate(batches(4)):
            given = {"feeds": {"scale": scale}, "trainable": True}
            expected = fp.run_sequential(plan, params, (x, target), state=expected_state, **given)
            result = fp.run(plan, params, (x, target), state=state, executor=graphs, **given)
            assert_same_result(expected, result)
            assert (result.stats.executor, result.stats.reason) == ("graph", "asked for")
            state, expected_state = result.state, expected.state
            with torch.no_grad():
                for p, g in zip(fp.leaves(params), fp.leaves(result.grads), strict=True):
                    p.sub_(g, alpha=0.1)
            if number == 1:
                params = tuple(
                    {k: v.detach().clone().requires_grad_(v.requires_grad) for k, v in p.items()}
                    for p in params
                )
        assert graphs.count == 1
    [tape] = [one for one in tapes.made if one.plays]
    assert (tape.plays, tape.warm_runs, tape.turns) == (4, 3, 4)


def test_a_result_is_the_callers(tapes):
    """A later run writes into nothing that an earlier one gave or got."""
    plan, params = linear_plan(outputs=True)
    with fp.graphs(plan) as graphs:
        first = fp.run(plan, params, data(), executor=graphs)
        kept = [
            one.clone() for one in fp.leaves((first.grads, first.outputs, first.loss, first.losses))
        ]
        given = [one.clone() for one in fp.leaves(params)]
        second = fp.run(plan, params, data(seed=5), executor=graphs)
        assert all(
            map(
                torch.equal, kept, fp.leaves((first.grads, first.outputs, first.loss, first.losses))
            )
        )
        assert not torch.equal(first.loss, second.loss)
        first.grads[0]["w"].zero_()  # nor does the caller into theirs
        fp.run(plan, params, data(), executor=graphs)
        assert all(map(torch.equal, given, fp.leaves(params)))
        again = fp.run(plan, params, data(), executor=graphs)
    assert torch.equal(again.grads[0]["w"], kept[0])


def test_a_state_that_stays_is_the_callers_own(tapes):
    parts, params, state = stages()
    plan = fp.make_plan(
        parts,
        fp.schedules.fill_drain(S, M, backward=False),
        devices="cpu",
        train=False,
        outputs=True,
    )
    x, _, scale = batches(1)[0]
    with fp.graphs(plan) as graphs:
        for _ in range(2):
            result = fp.run(plan, params, x, state=state, feeds={"scale": scale}, executor=graphs)
            assert result.stats.executor == "graph"
            assert all(
                a is b for a, b in zip(fp.leaves(result.state), fp.leaves(state), strict=True)
            )


def test_each_form_of_input_is_recorded_once(tapes):
    """Rows, types, layouts, what is trained, the loss scale, grad mode, autocast, which leaves are
    one."""
    plan, params = linear_plan()
    frozen = ({"w": params[0]["w"].clone()}, {"w": params[1]["w"].clone().requires_grad_()})
    turned = tuple({"w": p["w"].t().contiguous().t()} for p in params)
    runs = [
        (params, data(), {}),
        (params, data(5), {}),
        (params, data(), {"loss_scale": 2.0}),
        (params, data(), {"trainable": lambda name, _: name.startswith("0")}),
        (frozen, data(), {}),
        (turned, data(), {}),
        (params, (data()[0],) * 2, {}),
    ]
    with fp.graphs(plan) as graphs:
        for _ in range(2):
            for given, batch, options in runs:
                result = fp.run(plan, given, batch, executor=graphs, **options)
                assert_same_result(fp.run_sequential(plan, given, batch, **options), result)
                assert result.stats.executor == "graph", result.stats.reason
            assert graphs.count == len(runs)
        with torch.autocast("cpu", torch.bfloat16):
            result = fp.run(plan, params, data(), executor=graphs)
            assert_same_result(fp.run_sequential(plan, params, data()), result)
        assert graphs.count == len(runs) + 1
        assert graphs.nbytes > 0


def test_the_ninth_form_is_not_recorded(tapes):
    plan, params = linear_plan()
    with fp.graphs(plan) as graphs:
        results = [fp.run(plan, params, data(rows), executor=graphs) for rows in range(2, 11)]
        assert [one.stats.executor for one in results[:-1]] == ["graph"] * 8
        assert results[-1].stats.reason.startswith("not a graph: its input has had 8 other forms")
        assert_same_result(fp.run_sequential(plan, params, data(10)), results[-1])
        assert fp.run(plan, params, data(4), executor=graphs).stats.executor == "graph"


def test_wrapped_leaves(tapes):
    """Replicate, Axis, Microbatches: tensors in them are filled anew, too."""

    @fp.stage
    def first(p, x):
        rows, table = x
        return rows @ (p["w"] + table)

    plan = cpu_plan([first], fp.schedules.one_f_one_b(1, 2), outputs=True)
    params = ({"w": torch.eye(4)},)
    with fp.graphs(plan) as graphs:
        for seed in (1, 2):
            x, y = data(seed=seed)
            for batch in [
                ((fp.Axis(x.t().contiguous().t(), 0), fp.Replicate(y[:4])), y),
                (
                    fp.Microbatches([(x[:2], y[:4]), (x[2:], y[:4])]),
                    fp.Microbatches([y[:2].clone(), y[2:].clone()]),
                ),
            ]:
                expected = fp.run_sequential(plan, params, batch)
                result = fp.run(plan, params, batch, executor=graphs)
                assert result.stats.executor == "graph", result.stats.reason
                assert_same_result(expected, result)
        assert graphs.count == 2


def summed(y, target):
    return fp.Loss((y - target).square().sum(), (target > -9).sum())


REASONS = {
    "numbers": (
        lambda: linear_plan(loss=summed),
        {},
        "StageError[RuntimeError]: operation not permitted when stream is capturing",
    ),
    "weight": (
        lambda: linear_plan(weight=lambda t: t.square().sum()),
        {},
        ": RuntimeError: operation not permitted",
    ),
    "record": (linear_plan, {"record": True}, "record=True measures"),
    "ranges": (linear_plan, {"ranges": True}, "ranges=True names its actions"),
    "timeout": (linear_plan, {"timeout": 50.0}, "timeout= watches"),
    "offload": (
        lambda: linear_plan(
            schedule=lambda *_: fp.schedules.offload(fp.schedules.one_f_one_b(2, 4))
        ),
        {},
        "the host waits for copies",
    ),
    "finite": (linear_plan, {"check": ["used", "finite"]}, "check= looks"),
}


def test_a_carry_from_run_to_run_is_no_graph(tapes):
    """A recording would read the first carry again."""
    add = fp.stage(lambda p, x, *, carry: fp.Out(x + (carry or 0) + 1, carry=x.sum()))
    schedule = fp.schedules.fill_drain(1, 2, backward=False)
    plan, carry = fp.make_plan([add], schedule, carry=True, devices="cpu"), None
    with fp.graphs(plan) as graphs:
        for total in (1.0, 3.0, 3.0):
            result = fp.run(plan, ((),), torch.ones(4), executor=graphs, carry=carry)
            carry = result.carry
            assert result.stats.reason == "not a graph: its carry has other shapes in each run"
            assert torch.equal(result.outputs, torch.full((4,), 1 + total))


@pytest.mark.parametrize("reason", REASONS)
def test_why_it_is_no_graph(tapes, reason):
    """It runs all the same, with the oracle's bits; what cannot be recorded is tried once."""
    make, options, words = REASONS[reason]
    plan, params = make()
    with fp.graphs(plan) as graphs:
        for _ in range(2):
            result = fp.run(plan, params, data(), executor=graphs, **options)
            assert_same_result(fp.run_sequential(plan, params, data()), result)
            assert result.stats.reason.startswith("not a graph: ")
            assert words in result.stats.reason
            assert result.stats.executor in ("serial", "threads")
        assert (result.timeline is not None) == ("record" in options)
        assert graphs.count == 0
    assert sum(one.warm_runs for one in tapes.made) == (3 if "not permitted" in words else 0)
    assert not any(one.plays for one in tapes.made)


def test_targets_that_count_evenly(tapes):
    """Class indices are looked at before: a graph where microbatches count as their rows, a run
    where labels are padded."""
    for loss, summed in ((F.cross_entropy, False), (nn.CrossEntropyLoss(reduction="sum"), True)):
        plan, params = linear_plan(loss=loss)
        x, target = data()[0], torch.tensor([0, 1, 2, 3, 1, -100])
        some = torch.tensor([0, -100, 2, 3, -100, 1])  # two in each microbatch
        with fp.graphs(plan) as graphs:
            for labels, graph in (
                (target.clamp(min=0), True),
                (target, summed),
                (some, True),
                (target + 0, summed),
            ):
                result = fp.run(plan, params, (x, labels), executor=graphs)
                assert_same_result(fp.run_sequential(plan, params, (x, labels)), result)
                assert (None if summed else float((labels != -100).sum())) == result.weight
                assert ("graph" == result.stats.executor) == graph, result.stats.reason
                assert graph or "the weights of its microbatches depend on" in result.stats.reason
            assert graphs.count == 1


def test_draws_are_no_graph(tapes):
    """A graph would draw the same numbers; runs draw by their seeds, and without one they
    refuse."""
    net = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
    part, params, _ = fp.from_module(net, name="drops")
    for one in (part, fp.compile_stage(part)):
        plan = cpu_plan([one], fp.schedules.one_f_one_b(1, 2))
        with fp.graphs(plan) as graphs:
            for seed in (1, 2):
                result = fp.run(plan, (params,), data(), seed=seed, executor=graphs)
                assert_same_result(fp.run_sequential(plan, (params,), data(), seed=seed), result)
                assert "draws random numbers" in result.stats.reason
            with pytest.raises(fp.DrawError):
                fp.run(plan, (params,), data(), executor=graphs)


def test_where_there_are_none():
    plan, params = linear_plan()
    with fp.graphs(plan) as graphs:
        result = fp.run(plan, params, data(), executor=graphs)
    assert result.stats.reason == "not a graph: cpu has no graphs"
    assert_same_result(fp.run_sequential(plan, params, data()), result)


def test_lanes_on_two_devices_are_no_graph(tapes):
    plan, params = linear_plan(
        loss=None,
        schedule=partial(fp.schedules.fill_drain, backward=False),
        devices=["cpu", "meta"],
    )
    meta = (params[0], {"w": params[1]["w"].to("meta")})
    with fp.graphs(plan) as graphs:
        result = fp.run(plan, meta, data()[0], executor=graphs)
    assert "its lanes are on cpu, meta, and a graph works on one device" in result.stats.reason


class Config:
    """Equal to itself, whatever it holds."""

    factor = 1


class Unhashable:
    __hash__ = None

    def __eq__(self, other):
        return True


@pytest.mark.parametrize(
    ("odd", "words"),
    [
        (Config(), "it gets a Config, which may change"),
        (Unhashable(), "it gets a Unhashable, which cannot be hashed"),
    ],
)
def test_values_that_cannot_be_compared_are_no_graph(tapes, odd, words):
    plan = forward_plan(lambda p, x: x * p["w"] * getattr(p["odd"], "factor", 1))
    with fp.graphs(plan) as graphs:
        for factor in (1, 2):
            odd.factor = factor
            result = fp.run(plan, ({"w": torch.ones(4), "odd": odd},), data()[0], executor=graphs)
            assert words in result.stats.reason
            assert torch.equal(result.outputs, data()[0] * factor)


def test_values_that_can_be_compared(tapes):
    """Numbers, words, functions, types; -0.0 is no 0.0, and nan is nan."""
    plan = forward_plan(lambda p, x: p["f"](x * p["w"]) / p["c"])
    with fp.graphs(plan) as graphs:
        for c in (0.0, -0.0, float("nan"), float("nan"), 2):
            params = (
                {
                    "w": torch.ones(4),
                    "c": c,
                    "f": torch.tanh,
                    "n": None,
                    "t": torch.float32,
                    "s": "word",
                },
            )
            result = fp.run(plan, params, data()[0], executor=graphs)
            assert result.stats.executor == "graph", result.stats.reason
            expected = fp.run_sequential(plan, params, data()[0]).outputs
            torch.testing.assert_close(result.outputs, expected, rtol=0, atol=0, equal_nan=True)
        assert graphs.count == 4


def test_functions_that_choose_what_is_trained(tapes):
    """A new lambda each time that chooses the same is the same form; one that chooses otherwise is
    not."""
    plan, params = linear_plan()
    chosen = ["0"]
    with fp.graphs(plan) as graphs:
        for number in range(4):
            chosen[0] = str(number // 2)
            trainable = lambda name, _: name.startswith(chosen[0])
            result = fp.run(plan, params, data(), trainable=trainable, executor=graphs)
            assert_same_result(fp.run_sequential(plan, params, data(), trainable=trainable), result)
            assert graphs.count == 1 + number // 2


def test_a_grad_mode_is_a_form(tapes):
    plan = forward_plan(lambda p, x: x * p["w"] * (1 if torch.is_grad_enabled() else 2))
    params, x = ({"w": torch.ones(4)},), data()[0]
    with fp.graphs(plan) as graphs:
        for _ in range(2):
            for mode in (torch.no_grad, torch.enable_grad, torch.inference_mode):
                with mode():
                    result = fp.run(plan, params, x, executor=graphs)
                    assert torch.equal(result.outputs, fp.run_sequential(plan, params, x).outputs)
        assert graphs.count == 3


@pytest.mark.parametrize("lanes", [1, 2])
def test_results_that_are_what_was_given(tapes, lanes):
    """The target as aux, an output that is the input: lazy copies of memory that the next run
    fills."""
    part = fp.stage(lambda p, x: (x, x * p["w"]))
    loss = lambda y, t: fp.Loss(F.mse_loss(y[1], t), None, (t, t[:1], y[0]))
    last = fp.stage(lambda p, x: (x[0], x[1] * p["w"]))
    schedule = fp.schedules.one_f_one_b(2, 2, num_devices=lanes)
    plan = cpu_plan([part, last], schedule, loss=loss, outputs=True)
    params = ({"w": torch.ones(4)},) * 1 + ({"w": torch.ones(4)},)
    with fp.graphs(plan) as graphs:
        kept = []
        for seed in range(3):
            expected = fp.run_sequential(plan, params, data(seed=seed))
            kept.append((expected, fp.run(plan, params, data(seed=seed), executor=graphs)))
            assert kept[-1][1].stats.executor == "graph", kept[-1][1].stats.reason
        for expected, result in kept:
            assert_same_result(expected, result)


class Metrics:
    """Holds a tensor, and nobody can know."""

    def __init__(self, value):
        self.value = value


def test_results_that_hide_tensors(tapes):
    """They would be the graph's own memory."""
    part = fp.stage(lambda p, x: x * p["w"])
    loss = lambda y, t: fp.Loss(
        F.mse_loss(y, t), None, (Metrics(y.detach().sum()), 3, "word", None)
    )
    plan = cpu_plan([part], fp.schedules.one_f_one_b(1, 1), loss=loss)
    params = ({"w": torch.ones(4)},)
    with fp.graphs(plan) as graphs:
        results = [fp.run(plan, params, data(seed=seed), executor=graphs) for seed in range(3)]
        assert "a result contains a Metrics" in results[0].stats.reason
        assert graphs.count == 0
    assert len({float(one.aux[0][0].value) for one in results}) == 3


def test_memory_with_gaps(tapes):
    """A stage sees slices as it sees them elsewhere (expanded tensors are written out), and the
    numbers are the same."""
    seen = []

    def looks(p, x):
        seen.append((x[0].stride(), x[1].stride()))
        return x[0] * p["w"] + x[1]

    plan = fp.make_plan(
        [fp.stage(looks)],
        fp.schedules.fill_drain(1, 1, backward=False),
        devices="cpu",
        outputs=True,
    )
    x = (torch.randn(6, 8)[:, ::2], torch.randn(6, 1).expand(6, 4))
    params = ({"w": torch.randn(8)[::2]},)
    with fp.graphs(plan) as graphs:
        result = fp.run(plan, params, x, executor=graphs)
        assert torch.equal(result.outputs, fp.run_sequential(plan, params, x).outputs)
    assert {one[0] for one in seen} == {(8, 2)}


def test_modes_that_a_graph_does_not_see(tapes):
    from torch.utils._python_dispatch import TorchDispatchMode

    class Counts(TorchDispatchMode):
        seen = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.seen += 1
            return func(*args, **(kwargs or {}))

    plan, params = linear_plan()
    with fp.graphs(plan) as graphs, Counts() as mode:
        result = fp.run(plan, params, data(), executor=graphs)
        assert "dispatch mode Counts is on" in result.stats.reason
        assert mode.seen > 10


def test_mistakes_say_what_they_say_elsewhere(tapes):
    """Bad input after good input: the same errors, and what is recorded stays."""
    plan, params = linear_plan()
    meta = tuple({"w": p["w"].to("meta")} for p in params)
    with fp.graphs(plan) as graphs:
        fp.run(plan, params, data(), executor=graphs)
        for bad, error in [
            (lambda: fp.run(plan, params[:1], data(), executor=graphs), fp.PlanError),
            (lambda: fp.run(plan, params, data()[0], executor=graphs), fp.BatchError),
            (
                lambda: fp.run(plan, params, (torch.ones(3, 5), torch.ones(3, 4)), executor=graphs),
                fp.StageError,
            ),
            (lambda: fp.run(plan, params, data(), check="all", executor=graphs), fp.PlanError),
            (lambda: fp.run(plan, params, data(), check=None, executor=graphs), fp.PlanError),
            (lambda: fp.run(plan, params, data(), seed="one", executor=graphs), fp.PlanError),
            (lambda: fp.run(plan, params, data(), trainable="all", executor=graphs), fp.PlanError),
            (lambda: fp.run(plan, params[0], data(), executor=graphs), fp.PlanError),
            (
                lambda: fp.run(plan, params, [one.to("meta") for one in data()], executor=graphs),
                fp.BatchError,
            ),
            (lambda: fp.run(plan, meta, data(), executor=graphs), fp.PlacementError),
            (lambda: fp.run(plan, params, data(), loss_scale=0.0, executor=graphs), fp.PlanError),
        ]:
            for _ in range(2):
                with pytest.raises(error) as caught:
                    bad()
                assert "graph" not in str(caught.value)
        with torch.no_grad(), pytest.raises(fp.PlanError, match="no_grad"):
            fp.run(plan, params, data(), executor=graphs)
        assert fp.run(plan, params, data(), executor=graphs).stats.executor == "graph"
        assert graphs.count == 1


def test_a_run_inside_of_a_stage_or_a_transform_is_refused_as_ever(tapes):
    plan, params = linear_plan()
    batch = data()
    with fp.graphs(plan) as graphs:
        fp.run(plan, params, batch, executor=graphs)
        inner = fp.stage(lambda p, x: x + fp.run(plan, params, (x, x), executor=graphs).loss)
        outer = fp.make_plan([inner], fp.schedules.fill_drain(1, 1, backward=False), devices="cpu")
        with pytest.raises(fp.FuncpipeError, match="within a stage"):
            fp.run(outer, ((),), data()[0])
        with pytest.raises(fp.FuncpipeError, match="torch.func"):
            torch.func.vmap(lambda t: t * fp.run(plan, params, batch, executor=graphs).loss)(
                torch.ones(2)
            )


def test_whose_they_are(tapes):
    plan, params = linear_plan()
    other, _ = linear_plan()
    with fp.graphs(plan) as graphs, pytest.raises(fp.PlanError, match="for another plan"):
        fp.run(other, params, data(), executor=graphs)
    with pytest.raises(fp.FuncpipeError, match="closed"):
        fp.run(plan, params, data(), executor=graphs)
    with pytest.raises(fp.PlanError, match="takes a plan; got a str"):
        fp.graphs("plan")
    halves = fp.make_plan(plan.stages, fp.schedules.fill_drain(2, 2), devices="cpu")
    with (
        fp.graphs(halves) as graphs,
        pytest.raises(
            fp.PlanError, match=r"fp\.graphs\(plan\) and fp\.ranks\(plan\) work with fp\.run only"
        ),
    ):
        fp.vjp(halves, params, data()[0], executor=graphs)


def test_one_run_at_a_time(tapes):
    inside, go = threading.Event(), threading.Event()

    def waits(p, x):
        if not inside.is_set():
            inside.set()
            assert go.wait(20)
        return x @ p["w"]

    plan = cpu_plan([fp.stage(waits)], fp.schedules.one_f_one_b(1, 2))
    params = ({"w": torch.eye(4)},)
    with fp.graphs(plan) as graphs:
        found = []
        thread = threading.Thread(
            target=lambda: found.append(fp.run(plan, params, data(), executor=graphs))
        )
        thread.start()
        assert inside.wait(20)
        with pytest.raises(fp.FuncpipeError, match="busy"):
            fp.run(plan, params, data(), executor=graphs)
        go.set()
        thread.join()
        assert_same_result(found[0], fp.run(plan, params, data(), executor=graphs))


def test_closed_while_they_record(tapes):
    """By the stage itself, say: nothing is left behind."""
    held = []

    def closes(p, x):
        held[0].close()
        return x @ p["w"]

    plan = cpu_plan([fp.stage(closes)], fp.schedules.one_f_one_b(1, 2))
    graphs = fp.graphs(plan)
    held.append(graphs)
    fp.run(plan, ({"w": torch.eye(4)},), data(), executor=graphs)
    assert graphs.count == 0


def test_what_was_refused_is_gone(tapes):
    """At once, without the garbage collector: it holds copies of everything."""
    plan, params = linear_plan(loss=summed)
    gc.disable()
    try:
        with fp.graphs(plan) as graphs:
            result = fp.run(plan, params, data(), executor=graphs)
            assert "cannot be recorded" in result.stats.reason
            tape = weakref.ref(tapes.made[-1])
            tapes.made.clear()
            assert tape() is None
    finally:
        gc.enable()


def test_closed_graphs_hold_nothing(tapes):
    plan, params = linear_plan()
    with fp.graphs(plan) as graphs:
        x, y = data()
        result = fp.run(plan, params, (x, y), executor=graphs)
        alive = [weakref.ref(one) for one in (x, y, result.loss)]
        tape = weakref.ref(tapes.made[-1])
        del x, y, result
        gc.collect()
        assert [one() for one in alive] == [
            None
        ] * 3  # what was given and what came out is not kept
    tapes.made.clear()
    gc.collect()
    assert tape() is None


def test_programs_that_are_graphs_are_not_recorded_again(tapes):
    plan, params = linear_plan()
    plan = with_graphs(plan)
    with fp.graphs(plan) as graphs:
        result = fp.run(plan, params, data(), executor=graphs)
    assert result.stats.reason == "not a graph: its compiled stages are graphs themselves"


# -- backend="cudagraphs"
# -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "schedule",
    [fp.schedules.one_f_one_b(S, M), fp.schedules.remat(fp.schedules.zero_bubble(S, M))],
    ids=ids,
)
@pytest.mark.parametrize("executor", ["serial", "threads"])
def test_programs_as_graphs(tapes, schedule, executor):
    """Each program is recorded once, whatever the microbatches, and runs of other parameters are
    the oracle's."""
    parts, params, state = stages(backend="cudagraphs")
    plan = cpu_plan(parts, schedule)
    plain = cpu_plan(stages(fuse=True)[0], schedule)
    made = None
    for x, target, scale in batches(3, rows=6):
        given = {
            "state": state,
            "feeds": {"scale": scale},
            "trainable": True,
            "threads_per_lane": 1,
        }
        expected = fp.run(plain, params, (x, target), executor="serial", **given)
        result = fp.run(plan, params, (x, target), executor=executor, **given)
        torch.testing.assert_close((result.loss, result.grads), (expected.loss, expected.grads))
        assert made in (None, len(tapes.made))
        made = len(tapes.made)
        with torch.no_grad():
            for p, g in zip(fp.leaves(params), fp.leaves(result.grads), strict=True):
                p.sub_(g, alpha=0.1)
    assert made
    assert all(one.plays for one in tapes.made)


def test_programs_are_recorded_by_warmup(tapes):
    plan, params = linear_plan()
    plan = with_graphs(plan)
    fp.warmup(plan, params, data())
    made = len(tapes.made)
    assert made == 4  # F and B of two stages
    fp.run(plan, params, data(), executor="serial")
    assert len(tapes.made) == made


def test_dropped_programs_hold_no_memory_of_the_device(tapes):
    """Their graphs go when they do, and do not wait for the garbage collector."""
    plan, params = linear_plan(num=1, microbatches=1)
    plan = with_graphs(plan, max_programs=2)
    fp.run(plan, params, data(), executor="serial")
    mark = weakref.ref(tapes.made.pop(0))
    tapes.made.clear()
    gc.collect()
    gc.disable()
    try:
        assert mark() is not None
        for rows in (1, 2):
            fp.run(plan, params, tuple(one[:rows] for one in data()), executor="serial")
            tapes.made.clear()
        assert mark() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("built", ["under autocast", "in inference mode"])
def test_what_is_on_while_programs_are_built(tapes, built):
    """Is not in them."""

    def exact(p, x):
        with torch.autocast("cpu", enabled=False):
            return torch.tanh(x.float() @ p["w"])

    g = torch.Generator().manual_seed(2)
    params = tuple({"w": torch.randn(4, 4, generator=g)} for _ in range(2))
    found = []
    for backend in ("graph", "cudagraphs"):
        part = fp.compile_stage(fp.stage(exact), backend=backend)
        plan = cpu_plan([part] * 2, fp.schedules.zero_bubble(2, 2))
        amp = torch.autocast("cpu", torch.bfloat16, enabled=built == "under autocast")
        with amp:
            if built == "in inference mode":
                evaluated = fp.make_plan(
                    [part] * 2, fp.schedules.fill_drain(2, 2, backward=False), devices="cpu"
                )
                with torch.inference_mode():
                    fp.run(evaluated, params, data()[0])
                with torch.no_grad():
                    fp.run(evaluated, params, data()[0])
            fp.warmup(plan, params, data())
            found.append(fp.run(plan, params, data(), executor="serial"))
    torch.testing.assert_close(found[0].grads, found[1].grads, rtol=1e-6, atol=1e-7)


def test_weights_are_copied_once_a_run(tapes, monkeypatch):
    """Three microbatches read them; only what was written to or is new is copied."""
    from funcpipe._src.devices import device_graph

    w, x = torch.ones(2, 2), torch.ones(2, 2)
    found = device_graph.Recorded(
        tapes.graph(w.device), w.device, [w, x], lambda own: [own[0] @ own[1]], steady=True
    )
    copied, own = [], {*map(id, found._own)}
    real = device_graph.copy_all

    def counting(into, given):
        if id(into[0]) in own:
            copied.append(len(into))
        return real(into, given)

    monkeypatch.setattr(device_graph, "copy_all", counting)
    assert float(found([w, x])[0].sum()) == 8
    assert float(found([w, torch.ones(2, 2) * 2])[0].sum()) == 16
    w.mul_(2)
    assert float(found([w, torch.ones(2, 2)])[0].sum()) == 16
    with torch.inference_mode():  # torch counts no writes there
        inference = torch.ones(2, 2)
        for factor in (2, 4):
            inference.mul_(2)
            assert float(found([w, inference])[0].sum()) == 16 * factor
    assert copied == [2, 1, 2, 1, 1]


def test_programs_that_are_no_graphs_say_so():
    plan, params = linear_plan()
    graphs = with_graphs(plan)
    with pytest.warns(
        UserWarning, match=r"cannot be a CUDA graph \(cpu has none\) and runs without one"
    ):
        result = fp.run(graphs, params, data(), executor="serial")
    torch.testing.assert_close(result.grads, fp.run_sequential(plan, params, data()).grads)
