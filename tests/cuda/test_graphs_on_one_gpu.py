"""CUDA graphs of runs and of programs on a real GPU. Skipped without CUDA.

What is recorded, when, and why not is tested without a GPU in tests/graphs; here torch's graphs
have their say.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from common import assert_same_result, ids, schedules

import funcpipe as fp

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.timeout(300),
    pytest.mark.usefixtures("deterministic"),
]
S, M = 4, 4


def ready(schedule, *, compiled=False, devices=None, backend="graph"):
    """Linear layers, batch norm with statistics, an in-place activation."""
    torch.manual_seed(0)
    nets = [
        nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(inplace=True))
        for _ in range(S)
    ]
    stages, params, state = zip(
        *(fp.from_module(one, name=f"part{i}") for i, one in enumerate(nets)), strict=True
    )
    if compiled:
        stages = [fp.compile_stage(one, backend=backend) for one in stages]
    devices = devices or ["cuda:0"] * schedule.num_devices
    plan = fp.make_plan(stages, schedule, loss=F.mse_loss, devices=devices, outputs=True)
    return plan, fp.place(plan, params), fp.place(plan, state)


def batch(seed=1, rows=16):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(rows, 64, generator=g), torch.randn(rows, 64, generator=g)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(
    "schedule", [one for one in schedules(S, M) if "offload" not in one.name], ids=ids
)
def test_played_runs_have_the_same_bits(schedule, compiled):
    """Batches of the host and of the device, parameters stepped in place, state that goes round."""
    plan, params, state = ready(schedule, compiled=compiled)
    expected_state = state
    with fp.graphs(plan) as graphs:
        for number in range(4):
            given = batch(number)
            given = tuple(one.cuda() for one in given) if number % 2 else given
            expected = fp.run_sequential(plan, params, given, state=expected_state)
            result = fp.run(plan, params, given, state=state, executor=graphs)
            assert result.stats.executor == "graph", result.stats.reason
            assert_same_result(expected, result)
            state, expected_state = result.state, expected.state
            with torch.no_grad():
                for p, g in zip(fp.leaves(params), fp.leaves(result.grads), strict=True):
                    p.sub_(g, alpha=0.01)


def test_while_other_work_is_queued():
    """Nobody waits for the host: long work before and after, on two streams, results used and
    dropped at once."""
    plan, params, state = ready(fp.schedules.one_f_one_b(S, M))
    given = tuple(one.cuda() for one in batch())
    expected = fp.run_sequential(plan, params, given, state=state)
    with fp.graphs(plan) as graphs:
        fp.run(plan, params, given, state=state, executor=graphs)
        streams = [torch.cuda.current_stream(), torch.cuda.Stream()]
        for number in range(20):
            stream = streams[number % 2]
            stream.wait_stream(streams[1 - number % 2])
            with torch.cuda.stream(stream):
                torch.cuda._sleep(5_000_000)
                mine = tuple(one * 1 for one in given)
                result = fp.run(plan, params, mine, state=state, executor=graphs)
                del mine
                poison = [torch.full((16 * 64,), float("nan"), device="cuda:0") for _ in range(8)]
                loss, grads = result.loss * 1, [one * 1 for one in fp.leaves(result.grads)]
                del result, poison
            stream.synchronize()
            assert torch.equal(loss, expected.loss)
            assert all(map(torch.equal, grads, fp.leaves(expected.grads)))


def weighted(y, target):
    return fp.Loss((y - target).square().sum(), (target > -9).sum())


def waits(y, target):
    torch.cuda.current_stream().synchronize()  # no operation, so no rehearsal sees it
    return F.mse_loss(y, target)


@pytest.mark.parametrize("loss", [weighted, waits])
def test_what_cannot_be_recorded_runs_all_the_same(loss):
    """Refused before it is recorded, or by the device meanwhile; that run, later ones and other
    graphs are as ever."""
    plan, params, state = ready(fp.schedules.one_f_one_b(S, M))
    odd = fp.make_plan(plan.stages, plan.schedule, loss=loss, devices=plan.devices, outputs=True)
    with fp.graphs(odd) as graphs, fp.graphs(plan) as others:
        for _ in range(3):
            result = fp.run(odd, params, batch(), state=state, executor=graphs)
            assert "cannot be recorded" in result.stats.reason
            assert torch.cuda.current_stream() == torch.cuda.default_stream()
            assert_same_result(fp.run_sequential(odd, params, batch(), state=state), result)
            result = fp.run(plan, params, batch(), state=state, executor=others)
            assert result.stats.executor == "graph", result.stats.reason
            assert_same_result(fp.run_sequential(plan, params, batch(), state=state), result)


@pytest.mark.parametrize("lanes", [1, 2])
def test_writes_at_borders_and_results_that_were_given(lanes):
    """A stage writes into its input, a loss into the output; the target comes back as aux."""
    first = fp.stage(lambda p, x: torch.tanh(x.mul_(1.5) @ p["w"]))
    second = fp.stage(lambda p, x: x.add_(1) @ p["w"])
    loss = lambda y, t: fp.Loss(y.sub_(t).square().mean(), None, t)
    schedule = fp.schedules.one_f_one_b(2, M, num_devices=lanes)
    plan = fp.make_plan(
        [first, second], schedule, loss=loss, devices=["cuda:0"] * lanes, outputs=True
    )
    params = fp.place(plan, tuple({"w": torch.eye(64)} for _ in range(2)))
    with fp.graphs(plan) as graphs:
        for seed in range(3):
            given = tuple(one.cuda() for one in batch(seed))
            kept = [one.clone() for one in given]
            torch.cuda._sleep(5_000_000)
            result = fp.run(plan, params, given, executor=graphs)
            assert result.stats.executor == "graph", result.stats.reason
            assert_same_result(fp.run_sequential(plan, params, given), result)
            assert all(map(torch.equal, kept, given))


@pytest.mark.parametrize("backend", ["graph", "cudagraphs"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_attention(dtype, backend):
    """It keeps the keys of its draws on the host; in a recording they are on the device."""
    torch.use_deterministic_algorithms(False)

    @fp.stage
    def block(p, x):
        q, k, v = (
            part.unflatten(-1, (4, -1)).transpose(1, 2) for part in (x @ p["w"]).chunk(3, -1)
        )
        return x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(
            -2
        )

    g = torch.Generator().manual_seed(0)
    stages = [fp.compile_stage(block, backend=backend)] * 2
    plain = fp.make_plan(
        [block] * 2, fp.schedules.one_f_one_b(2, 4), loss=F.mse_loss, devices=["cuda:0"] * 2
    )
    plan = fp.make_plan(stages, plain.schedule, loss=F.mse_loss, devices=plain.devices)
    params = fp.place(
        plan, tuple({"w": torch.randn(64, 192, generator=g).to(dtype) / 8} for _ in range(2))
    )
    x, target = (torch.randn(8, 32, 64, generator=g).to("cuda:0", dtype) for _ in range(2))
    expected = fp.run(plain, params, (x, target), executor="serial")
    with fp.graphs(plan) as graphs:
        for executor in (graphs, "serial") if backend == "graph" else ("serial",):
            for _ in range(3):
                result = fp.run(plan, params, (x, target), executor=executor)
                torch.testing.assert_close(result.grads, expected.grads)
            assert isinstance(executor, str) or result.stats.executor == "graph", (
                result.stats.reason
            )


def test_memory_goes_back_when_graphs_are_closed():
    plan, params, state = ready(fp.schedules.one_f_one_b(S, M))
    given = tuple(one.cuda() for one in batch())

    def once():
        with fp.graphs(plan) as graphs:
            for rows in (16, 12):
                fp.run(
                    plan, params, tuple(one[:rows] for one in given), state=state, executor=graphs
                )
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated()

    once()
    before = once()
    for _ in range(5):
        assert once() == before


@pytest.mark.parametrize("executor", ["serial", "threads"])
@pytest.mark.parametrize("devices", [["cuda:0"] * S, ["cuda:0", "cpu"] * 2], ids=str)
@pytest.mark.filterwarnings("ignore:backend .cudagraphs.")
def test_programs_as_graphs(devices, executor):
    """Where a run cannot be one graph its programs can; those of CPU lanes run as they are."""
    plan, params, state = ready(
        fp.schedules.one_f_one_b(S, M), compiled=True, backend="cudagraphs", devices=devices
    )
    plain, *_ = ready(fp.schedules.one_f_one_b(S, M), compiled=True, devices=devices)
    fp.warmup(plan, params, batch(), state=state)
    for seed in range(3):
        expected = fp.run(plain, params, batch(seed), state=state, executor="serial")
        result = fp.run(plan, params, batch(seed), state=state, executor=executor)
        torch.testing.assert_close(result.grads, expected.grads)
        torch.testing.assert_close(result.loss, expected.loss)
