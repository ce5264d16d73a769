"""The traceback of a failing stage, threads that trace at once, and models with parts that come and
go."""

from __future__ import annotations

import threading
import traceback
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from common import cpu_plan
from torch import nn

import funcpipe as fp
from funcpipe import schedules as S

PACKAGE = str(Path(fp.__file__).parent)


class Fails(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return self.helper(self.linear(x))

    def helper(self, y):
        return y @ torch.ones(5, 5)  # the line that the user looks for


@pytest.mark.parametrize("executor", ["serial", "threads"])
@pytest.mark.parametrize("run", [fp.run, fp.run_sequential])
def test_a_failure_shows_the_users_frames_and_hides_the_librarys(run, executor):
    stages, params, _ = zip(
        *(fp.from_module(module) for module in (nn.Linear(4, 4), Fails())), strict=True
    )
    plan = cpu_plan(stages, S.one_f_one_b(2, 2))
    options = {"executor": executor} if run is fp.run else {}
    x = torch.randn(8, 4)
    with pytest.raises(fp.StageError) as caught:
        run(plan, params, (x, x), **options)
    lines = "".join(traceback.format_exception(caught.value)).splitlines()
    own = [line for line in lines if f'File "{PACKAGE}' in line]
    assert len(own) <= 1, own  # the function that was called
    assert len(lines) < 45
    assert any("the line that the user looks for" in line for line in lines)
    assert lines[-1].startswith("in 1F0")


def test_every_frame_is_there_on_demand(monkeypatch):
    monkeypatch.setenv("FUNCPIPE_TRACEBACKS", "full")
    stage, params, _ = fp.from_module(Fails())
    plan = cpu_plan([stage], S.one_f_one_b(1, 1))
    with pytest.raises(fp.StageError) as caught:
        fp.run(plan, (params,), (torch.ones(2, 4),) * 2)
    assert caught.value.__cause__ is not None
    frames = traceback.extract_tb(caught.value.__cause__.__traceback__)
    assert any(frame.filename.startswith(PACKAGE) for frame in frames)


def test_a_split_in_one_thread_beside_a_trace_in_another():
    failures: list[BaseException] = []

    def split():
        model = nn.Sequential(
            nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, 2)
        )
        assert 2 == len(fp.split(model, 2, example=torch.randn(4, 4), check=False))

    def compile_one():
        stage, params, _ = fp.from_module(
            nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 2))
        )
        assert (
            fp.make_programs(fp.compile_stage(stage), params, torch.randn(4, 4)).backward
            is not None
        )

    def repeated(work):
        try:
            for _ in range(6):
                work()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=repeated, args=(work,)) for work in (split, compile_one)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


# -- models
# -------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_a_padding_mask_that_makes_nested_tensors_is_refused_by_name():
    class Encoder(nn.Module):
        def __init__(self, **options):
            super().__init__()
            layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)
            self.encoder, self.head = nn.TransformerEncoder(layer, 4, **options), nn.Linear(8, 3)

        def forward(self, x, mask):
            return self.head(self.encoder(x, src_key_padding_mask=mask))[:, 0]

    x, mask = torch.randn(6, 5, 8), torch.zeros(6, 5, dtype=torch.bool)
    mask[1, 3:] = mask[4, 1:] = True
    for options in ({}, {"enable_nested_tensor": False}):
        model = Encoder(**options)
        split = fp.split(model, 2)
        schedule = S.one_f_one_b(2, 3)
        plan = fp.make_plan(split, schedule, loss=F.cross_entropy, devices="cpu")
        fp.run(plan, split.params, ({"x": x, "mask": mask}, torch.zeros(6, dtype=torch.long)))
        model.eval()
        evaluation = fp.make_plan(split, schedule.forwards(), devices="cpu")
        if options:
            found = fp.run(evaluation, split.params, {"x": x, "mask": mask}).outputs
            torch.testing.assert_close(found, model(x, mask))
        else:
            with pytest.raises(fp.PlanError, match="a nested tensor.*enable_nested_tensor=False"):
                fp.run(evaluation, split.params, {"x": x, "mask": mask})


def test_a_module_that_runs_twice_beside_a_tie_is_traced():
    class Scale(nn.Module):
        def __init__(self):
            super().__init__()
            self.gain = nn.Parameter(torch.randn(4))

        def forward(self, x):
            return x.tanh() * self.gain

    a, b = Scale(), Scale()
    b.gain = a.gain
    model, x, y = nn.Sequential(a, b, a), torch.randn(6, 4), torch.randn(6, 4)
    F.mse_loss(model(x), y).backward()
    split = fp.split(model, 3, example=x)
    result = fp.run(cpu_plan(split, S.one_f_one_b(3, 2)), split.params, (x, y))
    torch.testing.assert_close(split.merge(result.grads)["0.gain"], a.gain.grad)


@pytest.mark.filterwarnings("ignore::FutureWarning")  # peft warns about transformers
def test_lora_on_the_weights_of_experts_trains_as_in_one_piece():
    transformers, peft = pytest.importorskip("transformers"), pytest.importorskip("peft")
    sizes = {"vocab_size": 50, "hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}
    config = transformers.MixtralConfig(
        **sizes, num_key_value_heads=2, num_hidden_layers=2, num_local_experts=2
    )
    experts = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    lora = peft.LoraConfig(
        r=2, target_modules=["q_proj"], target_parameters=experts, init_lora_weights=False
    )
    model = peft.get_peft_model(transformers.MixtralForCausalLM(config), lora).train()
    tokens = torch.randint(0, 50, (6, 8))
    batch = {"input_ids": tokens, "labels": tokens}
    split = fp.split(model, 2)
    plan = fp.make_plan(split, S.one_f_one_b(2, 3), devices="cpu")
    for _ in range(2):
        model.zero_grad()
        loss = model(**batch).loss
        loss.backward()
        result = fp.run(plan, split.params, (batch, None), state=split.state)
        torch.testing.assert_close(result.loss, loss.detach())
        for name, gradient in split.merge(result.grads).items():
            torch.testing.assert_close(
                gradient, model.get_parameter(name).grad, rtol=1e-4, atol=1e-5
            )


@pytest.mark.parametrize("traced", [False, True])
def test_packed_rows_are_those_of_the_call_without_a_cache(traced):
    """Two texts in a row, told apart by positions. With a cache transformers takes the row for one
    text."""
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 50, "hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, num_hidden_layers=2))
    tokens = torch.randint(3, 50, (6, 8))
    positions = torch.cat([torch.arange(5), torch.arange(3)]).expand(6, -1)
    batch = {"input_ids": tokens, "labels": tokens, "position_ids": positions}
    example = {name: value[:4] for name, value in batch.items()}
    split = fp.split(model, 2, **({"example": example} if traced else {}))
    plan = fp.make_plan(split, S.one_f_one_b(2, 3), devices="cpu")
    result = fp.run(plan, split.params, (batch, None), state=split.state)
    torch.testing.assert_close(result.loss, model(**batch, use_cache=False).loss.detach())
