"""A loop in the form of torchtitan's trainer has the same losses and norms over torch's schedules
and over funcpipe's."""

import pytest
import torch

PP_DP, PP_TP = {"dp": 2, "pp": 2}, {"pp": 2, "tp": 2}


@pytest.mark.parametrize(
    ("size", "family", "shape"),
    [
        (2, "1f1b", {"pp": 2}),
        (2, "zbv", {"pp": 2}),
        (4, "1f1b", PP_DP),
        (4, "1f1b", PP_TP),
        pytest.param(2, "interleaved", {"pp": 2}, marks=pytest.mark.slow),
        pytest.param(4, "1f1b", {"pp": 4}, marks=pytest.mark.slow),
        pytest.param(4, "interleaved", {"pp": 4}, marks=pytest.mark.slow),
        pytest.param(4, "zbv", {"pp": 4}, marks=pytest.mark.slow),
        pytest.param(4, "interleaved", PP_DP, marks=pytest.mark.slow),
        pytest.param(4, "zbv", PP_DP, marks=pytest.mark.slow),
        pytest.param(4, "interleaved", PP_TP, marks=pytest.mark.slow),
        pytest.param(4, "zbv", PP_TP, marks=pytest.mark.slow),
    ],
)
def test_the_loop_trains_as_over_torchs_schedule(pools, size, family, shape):
    results = pools(size).all("titan_tasks.trained", family, shape, seconds=120.0)
    for logs in results:
        if not logs:
            pytest.skip("torch's schedules have no loss_kwargs here")
        torch_log, *own = logs
        assert torch_log[0][0] > 0.0
        assert torch_log[0] != torch_log[-1]
        for log in own:
            torch.testing.assert_close(log, torch_log, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["1f1b", "interleaved", "zbv"])
def test_dtensors_cross_the_borders_of_sequence_parallel_stages(pools, family):
    for logs in pools(4).all("titan_tasks.sequence_parallel", family, seconds=120.0):
        uncut, *others = logs
        assert uncut[0][0] > 0.0
        assert uncut[0] != uncut[-1]
        assert others
        for log in others:
            torch.testing.assert_close(log, uncut, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("size", [2, 4])
def test_outputs_evaluation_and_attributes(pools, size):
    for wrong in pools(size).all("titan_tasks.evaluated"):
        assert [] == wrong


def test_wrong_calls_say_what_to_change(pools):
    for texts in pools(2).all("titan_tasks.misused", seconds=120.0):
        both, short, kind, keys, outputs, no_grad = texts
        assert "inputs, target= and arg_mbs are given; give a whole batch or microbatches" in both
        assert "arg_mbs has 7 entries, but the plan has 8 microbatches" in short
        assert "arg_mbs is a list with one entry per microbatch; got a Tensor" in kind
        assert "kwarg_mbs[1] has no 'mask', which other entries have" in keys
        assert "outputs: rank 1 has False, rank 0 has True" in outputs
        assert "call schedule.eval there" in no_grad
