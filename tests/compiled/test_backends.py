"""Programs that somebody else builds: a function of graphs, or torch's compiler."""

from __future__ import annotations

import pickle
import shutil

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from common import assert_same_result, cpu_plan
from stage_zoo import pair

import funcpipe as fp


def plain(graph, examples):
    """A backend that calls the graph as it is."""
    assert all(isinstance(one, torch.Tensor) for one in examples)
    return graph.forward


def steps(stages, params, state, batch, schedule, **options):
    plan = cpu_plan(stages, schedule, outputs=True)
    return fp.run(plan, params, batch, state=state, seed=2, threads_per_lane=1, **options)


@pytest.mark.parametrize(
    "kind", ["linear", "block", "conv, batch norm", "dropout", "twice", "identity"]
)
def test_a_backend_of_ones_own(kind):
    """It gets graphs of tensors only; the numbers are eager's; what draws is not given to it."""
    stages, params, state, batch = pair(kind)
    made = [fp.compile_stage(stage, backend=plain, fuse=False) for stage in stages]
    for schedule in (
        fp.schedules.one_f_one_b(3, 4),
        fp.schedules.zero_bubble(3, 4),
        fp.schedules.remat(fp.schedules.fill_drain(3, 4)),
    ):
        assert_same_result(
            steps(stages, params, state, batch, schedule),
            steps(made, params, state, batch, schedule),
        )


def test_fused_products():
    """The products are made outside of the graph."""
    stages, params, state, batch = pair("block")
    schedule = fp.schedules.delay(fp.schedules.one_f_one_b(3, 4), group=2)
    eager = steps(stages, params, state, batch, schedule)
    made = [fp.compile_stage(stage, backend=plain) for stage in stages]
    for a, b in zip(
        fp.leaves(eager.grads),
        fp.leaves(steps(made, params, state, batch, schedule).grads),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
    text = str(made[1].program.found.popitem()[1])
    assert "mm" in text
    assert text.startswith("def C(P):")  # which nobody builds
    assert "built(" in text
    compile(text, "programs", "exec")


def test_warmup_builds_what_a_step_needs():
    """F, and B or I and W, and F without a residual where there is remat; the step builds
    nothing."""
    stages, params, state, batch = pair("block")
    # Tanh and Softplus have no parameters: Tanh's B is empty, and so are the block's I and
    # Softplus's W; see `pair`.
    for schedule, expected in (
        (fp.schedules.one_f_one_b(3, 4), 5),
        (fp.schedules.zero_bubble(3, 4), 5),
        (fp.schedules.remat(fp.schedules.one_f_one_b(3, 4), keep=fp.schedules.never), 8),
    ):
        built = []
        made = [
            fp.compile_stage(stage, backend=lambda graph, _: built.append(1) or graph.forward)
            for stage in stages
        ]
        plan = cpu_plan(made, schedule)
        fp.warmup(plan, params, batch, state=state)
        count = len(built)
        assert expected == count
        fp.run(plan, params, batch, state=state)
        assert count == len(built)


def test_no_such_backend():
    stage = fp.stage(lambda p, x: x * p)
    with pytest.raises(fp.PlanError, match="cudagraphs.*graph.*inductor.*or a function"):
        fp.compile_stage(stage, backend="nope")


def test_a_backend_that_fails_is_located():
    """Its error comes out with the stage and action that needed the program."""

    def broken(graph, examples):
        raise RuntimeError("no compiler here")

    plan = fp.make_plan(
        [fp.compile_stage(fp.stage(lambda p, x: x * p), backend=broken)],
        fp.schedules.one_f_one_b(1, 2),
        loss=F.mse_loss,
    )
    with pytest.raises(RuntimeError, match="no compiler here") as raised:
        fp.run(plan, (torch.ones(3),), (torch.ones(4, 3), torch.ones(4, 3)))
    assert "0F0" == raised.value.funcpipe.action


def test_backends_are_pickled_by_name():
    stage, _, _ = fp.from_module(nn.Linear(2, 2), name="linear")
    assert (
        "inductor"
        == pickle.loads(pickle.dumps(fp.compile_stage(stage, backend="inductor"))).program.backend
    )


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor's CPU code needs a C++ compiler")
@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", ["block", "conv, batch norm"])
def test_inductor(kind):
    """Torch's compiler: eager's numbers to rounding, and a step after a warm-up builds nothing."""
    stages, params, state, batch = pair(kind)
    made = [fp.compile_stage(stage, backend="inductor") for stage in stages]
    schedule = fp.schedules.zero_bubble(3, 4)
    plan = cpu_plan(made, schedule)
    assert 3 == fp.warmup(plan, params, batch, state=state)
    eager, fast = (
        steps(stages, params, state, batch, schedule),
        steps(made, params, state, batch, schedule),
    )
    torch.testing.assert_close(eager.loss, fast.loss, rtol=1e-6, atol=0)
    largest = max(
        float(leaf.abs().max()) for leaf in fp.leaves(eager.grads)
    )  # a bias before a norm has none but rounding
    for a, b in zip(
        fp.leaves((eager.grads, eager.state)), fp.leaves((fast.grads, fast.state)), strict=True
    ):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6 * largest)
