"""Models of transformers over slices of their sequences: what they give for the whole, to
rounding."""

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from common import EXECUTORS, assert_same_result, ids
from models.zoo import ZOO

import funcpipe as fp
from funcpipe import schedules as S

pytest.importorskip("transformers")


def llama():
    torch.manual_seed(0)
    return ZOO["llama"].build(0.0).double()


def gpt2(dropout=0.0):
    torch.manual_seed(0)
    return ZOO["gpt2"].build(dropout).double()


def inputs_of(model, rows=5, length=13, *, padded=False):
    """Tokens, labels as they are and moved by one, and with ``padded`` a mask that leaves some
    out."""
    tokens = torch.randint(
        0, model.config.vocab_size, (rows, length), generator=torch.Generator().manual_seed(1)
    )
    mask = torch.ones_like(tokens)
    if padded:
        mask[0, 9:] = mask[3, 5:] = 0
    labels = torch.where(mask.bool(), tokens, -100)
    moved = F.pad(labels[:, 1:], (0, 1), value=-100)
    return {"input_ids": tokens, "labels": labels, "shift_labels": moved} | (
        {"attention_mask": mask} if padded else {}
    )


def in_one_piece(model, inputs):
    """Loss and gradients by plain autograd, by name."""
    model.zero_grad()
    loss = model(**{name: value for name, value in inputs.items() if name != "shift_labels"}).loss
    loss.backward()
    return loss.detach(), {name: param.grad.clone() for name, param in model.named_parameters()}


@pytest.mark.parametrize(
    ("make", "schedule", "padded"),
    [
        (llama, S.one_f_one_b(2, 3, num_slices=3), True),
        (llama, S.interleaved(4, 2, num_devices=2, num_slices=4), False),
        (llama, S.remat(S.zero_bubble(2, 2, num_slices=2)), True),
        (llama, S.one_f_one_b(2, 2), False),
        (gpt2, S.one_f_one_b(2, 3, num_slices=3), False),
        (gpt2, S.remat(S.zero_bubble(2, 2, num_slices=2)), True),
    ],
    ids=lambda value: ids(value) if isinstance(value, fp.Schedule) else None,
)
def test_loss_and_gradients_are_those_of_the_model_in_one_piece(make, schedule, padded):
    """Also where whole slices are padding; every executor gives the bits of the plain loop."""
    model = make().train()
    inputs = inputs_of(model, padded=padded)
    loss, gradients = in_one_piece(model, inputs)
    split = fp.split(model, schedule.num_stages, slices=True)
    plan = fp.make_plan(split, schedule, devices="cpu")
    expected = fp.run_sequential(plan, split.params, (inputs, None), threads_per_lane=1)
    for executor in EXECUTORS:
        assert_same_result(
            expected,
            fp.run(plan, split.params, (inputs, None), executor=executor, threads_per_lane=1),
        )
    torch.testing.assert_close(expected.loss, loss, rtol=1e-5, atol=1e-6)
    found = split.merge(expected.grads)
    for name, gradient in gradients.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-6, msg=name)


def test_a_loss_of_ones_own_and_uneven_slices():
    """Logits come joined along the sequence."""
    model = llama().train()
    inputs = inputs_of(model)
    split = fp.split(model, 2, slices=True)
    loss = lambda y, target: F.cross_entropy(
        y["logits"].flatten(0, 1), target.flatten(), ignore_index=-100
    )
    schedule = S.one_f_one_b(2, 2, num_slices=3)
    lengths = S.balanced_slices(13, 3, attention=0.3)
    plan = fp.make_plan(
        split,
        schedule,
        loss=loss,
        weight=lambda target: (target != -100).sum(),
        slices=lengths,
        devices="cpu",
    )
    result = fp.run(
        plan, split.params, ({"input_ids": inputs["input_ids"]}, inputs["shift_labels"])
    )
    torch.testing.assert_close(
        result.loss.float(), in_one_piece(model, inputs)[0], rtol=1e-5, atol=1e-6
    )
    forward = fp.make_plan(split, S.fill_drain(2, 2, num_slices=3, backward=False), devices="cpu")
    outputs = fp.run(forward, split.params, {"input_ids": inputs["input_ids"]}).outputs
    model.eval()
    torch.testing.assert_close(
        outputs["logits"], model(input_ids=inputs["input_ids"]).logits, rtol=1e-4, atol=1e-5
    )
    assert set(outputs) == {"logits"}


def test_dropout_is_drawn_slice_by_slice():
    """The same masks under another schedule and executor."""
    model = gpt2(dropout=0.3).train()
    inputs = inputs_of(model)
    split = fp.split(model, 2, slices=True)
    results = [
        fp.run(
            fp.make_plan(split, schedule, devices="cpu"),
            split.params,
            (inputs, None),
            seed=5,
            executor=executor,
        )
        for schedule in (
            S.one_f_one_b(2, 2, num_slices=3),
            S.remat(S.fill_drain(2, 2, num_slices=3)),
        )
        for executor in EXECUTORS
    ]
    for result in results[1:]:
        assert torch.equal(results[0].loss, result.loss)


def refused(call):
    with pytest.raises(fp.FuncpipeError) as error:
        call()
    return str(error.value)


def test_what_cannot_run_slices():
    """No model of transformers, one that forgets, one that is traced, a Sequential."""

    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(3))

        def forward(self, x):
            for layer in self.layers:
                x = layer(x)
            return x

    assert "fp.stage(fn) with fn(params, x, *, carry)" in refused(
        lambda: fp.split(Own(), 2, slices=True)
    )
    sequential = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    assert "write the stages as functions with a carry" in refused(
        lambda: fp.split(sequential, 2, slices=True)
    )
    text = refused(
        lambda: fp.split(llama(), 2, example=torch.zeros(1, 4, dtype=torch.long), slices=True)
    )
    assert "without example=" in text
    checkpointed = llama().train()
    checkpointed.model.gradient_checkpointing = True
    assert "turn gradient checkpointing off" in refused(
        lambda: fp.split(checkpointed, 2, slices=True)
    )


def test_a_sliding_window_cannot_run_slices():
    """Its cache forgets what a backward needs."""
    from transformers import MistralConfig, MistralForCausalLM

    sizes = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = MistralConfig(
        vocab_size=20, hidden_size=8, intermediate_size=16, sliding_window=4, **sizes
    )
    text = refused(lambda: fp.split(MistralForCausalLM(config), 2, slices=True))
    assert "only blocks that attend to all earlier tokens can run slices" in text


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (
            {"shift_labels": None},
            "shift_labels=torch.nn.functional.pad(labels[:, 1:], (0, 1), value=-100)",
        ),
        (
            {"attention_mask": torch.ones(5, 1, 13, 13)},
            "with slices the shape must be (rows, sequence), as a tokenizer returns it",
        ),
    ],
)
def test_inputs_that_do_not_fit(change, text):
    """Named with the call that mends them."""
    model = llama().train()
    split = fp.split(model, 2, slices=True)
    plan = fp.make_plan(split, S.one_f_one_b(2, 2, num_slices=2), devices="cpu")
    inputs = {
        name: value for name, value in {**inputs_of(model), **change}.items() if value is not None
    }
    if "attention_mask" in change:
        inputs["attention_mask"] = fp.Axis(inputs["attention_mask"], 0, sequence=2)
    assert text in refused(lambda: fp.run(plan, split.params, (inputs, None)))


def test_a_model_in_one_stage():
    """Its loss views what it gets."""
    model = llama().train()
    inputs = inputs_of(model)
    split = fp.split(model, 1, slices=True)
    plan = fp.make_plan(split, S.one_f_one_b(1, 2, num_slices=3), devices="cpu")
    result = fp.run(plan, split.params, (inputs, None))
    torch.testing.assert_close(result.loss, in_one_piece(model, inputs)[0], rtol=1e-5, atol=1e-6)


def test_slices_that_were_forgotten():
    """A model that was split without them is no model for a schedule with them."""
    split = fp.split(llama(), 2)
    text = refused(lambda: fp.make_plan(split, S.one_f_one_b(2, 2, num_slices=3)))
    assert "fp.split(model, num_stages, slices=True)" in text


def test_texts_that_are_packed_into_one_row():
    """Within a slice, and where a slice begins."""
    model = llama().train()
    split = fp.split(model, 2, slices=True)
    plan = fp.make_plan(split, S.one_f_one_b(2, 1, num_slices=2), devices="cpu")
    inputs = inputs_of(model, rows=1, length=12)
    for begins in (4, 6):
        positions = torch.cat([torch.arange(begins), torch.arange(12 - begins)])[None]
        text = refused(
            lambda positions=positions: fp.run(
                plan, split.params, ({**inputs, "position_ids": positions}, None)
            )
        )
        assert "position_ids restart" in text
    whole = {**inputs, "position_ids": torch.arange(12)[None]}
    torch.testing.assert_close(
        fp.run(plan, split.params, (whole, None)).loss,
        fp.run(plan, split.params, (inputs, None)).loss,
    )


def test_no_causal_language_model_and_no_labels():
    """Both named."""
    from transformers import LlamaConfig, LlamaForSequenceClassification

    sizes = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = LlamaConfig(vocab_size=20, hidden_size=8, intermediate_size=16, **sizes)
    text = refused(lambda: fp.split(LlamaForSequenceClassification(config), 2, slices=True))
    assert "slices=True is for causal language models" in text
    model = llama().train()
    split = fp.split(model, 2, slices=True)
    plan = fp.make_plan(split, S.one_f_one_b(2, 2, num_slices=2), devices="cpu")
    inputs = {name: value for name, value in inputs_of(model).items() if name != "labels"}
    assert "shift_labels but no labels" in refused(
        lambda: fp.run(plan, split.params, (inputs, None))
    )


@pytest.mark.parametrize(("make", "padded"), [(llama, True), (gpt2, False)])
def test_a_prompt_in_chunks_and_then_token_by_token(make, padded):
    """The carry of each run is the cache for the next one; logits are those of one forward."""
    model = make().eval()
    inputs = inputs_of(model, length=12, padded=padded)
    inputs = {name: inputs[name] for name in ("input_ids", "attention_mask") if name in inputs}
    with torch.no_grad():
        wanted = model(**inputs).logits
    split = fp.split(model, 2, slices=True)
    prefill, decode = (
        fp.make_plan(split, schedule.forwards(), carry=True, devices="cpu")
        for schedule in (S.one_f_one_b(2, 3, num_slices=2), S.one_f_one_b(2, 3))
    )
    carry, logits = None, []
    for plan, (first, last) in zip(
        (prefill, prefill, decode, decode), ((0, 6), (6, 10), (10, 11), (11, 12)), strict=True
    ):
        part = {name: value[:, first:last] for name, value in inputs.items()}
        result = fp.run(plan, split.params, part, carry=carry)
        logits.append(result.outputs["logits"])
        carry = result.carry
    seen = inputs["attention_mask"].bool() if padded else torch.ones(5, 12, dtype=torch.bool)
    torch.testing.assert_close(torch.cat(logits, 1)[seen], wanted[seen], rtol=1e-6, atol=1e-8)
