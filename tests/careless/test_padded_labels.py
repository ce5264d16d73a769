"""Models that compute their loss themselves, trained with padded labels: exact against the model in
one piece."""

import pytest
import torch
import torch.nn.functional as F
from common import assert_same_result
from torch import nn

import funcpipe as fp

transformers = pytest.importorskip("transformers")

SMALL = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_attention_heads": 2,
    "num_hidden_layers": 2,
}

NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}


def llama(**options):
    kind = options.pop("kind", "LlamaForCausalLM")
    return getattr(transformers, kind)(transformers.LlamaConfig(vocab_size=40, **SMALL, **options))


def bert(kind, **options):
    sizes = {
        "max_position_embeddings": 16,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
    }
    return getattr(transformers, kind)(
        transformers.BertConfig(vocab_size=40, **SMALL, **sizes, **options)
    )


MODELS = {
    "Llama": lambda: llama(tie_word_embeddings=True),
    "GPT2": lambda: transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=40, n_embd=16, n_layer=2, n_head=2, n_positions=16, **NO_DROPOUT
        )
    ),
    "Bert, masked": lambda: bert("BertForMaskedLM"),
    "Bert, tokens": lambda: bert("BertForTokenClassification", num_labels=5),
    "Llama, tokens": lambda: llama(
        kind="LlamaForTokenClassification", num_labels=5, classifier_dropout=0.0
    ),
    "Llama, rows": lambda: llama(
        kind="LlamaForSequenceClassification", num_labels=5, pad_token_id=0
    ),
}


def batch_of(name, rows=8, length=7):
    """Padded inputs: rows 0 and 1, the first of four microbatches, have no label that counts."""
    tokens = torch.randint(5, 40, (rows, length))
    mask = torch.ones_like(tokens)
    for row, size in enumerate([3, 7, 2, 5, 7, 7, 1, 6]):
        mask[row, size:] = 0
    labels = tokens.remainder(5) if name.endswith("tokens") else tokens.clone()
    labels[mask == 0] = -100
    labels[:2] = -100
    if name == "Bert, masked":
        labels[:, ::2] = -100
    if name.endswith("rows"):
        labels = torch.tensor([-100, -100, 1, 2, -100, 0, 4, 3])
    return {"input_ids": tokens, "attention_mask": mask, "labels": labels}


def plan_of(split, count=4, **options):
    schedule = fp.schedules.one_f_one_b(len(split), count)
    options = {"loss": split.loss, "ties": split.ties, "devices": "cpu", **options}
    return fp.make_plan(split.stages, schedule, **options)


def assert_exact(model, split, batch, count=4, **options):
    """Loss and gradients of the pipeline are those of the model in one piece."""
    model.zero_grad()
    whole = model(**batch)
    whole.loss.backward()
    plan = plan_of(split, count)
    result = fp.run(plan, split.params, (batch, None), state=split.state, **options)
    torch.testing.assert_close(result.loss, whole.loss.detach(), rtol=1e-5, atol=1e-6)
    found = split.merge(result.grads, split.state)
    for key, parameter in model.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(found[key], parameter.grad, rtol=1e-4, atol=1e-6, msg=key)
    assert_same_result(
        fp.run_sequential(plan, split.params, (batch, None), state=split.state), result
    )
    return result


@pytest.mark.parametrize("name", MODELS)
def test_labels_that_count(name):
    """Tokens that are predicted, masked or classified, rows that have a class: each model's own
    mean."""
    torch.manual_seed(0)
    model, batch = MODELS[name](), batch_of(name)
    result = assert_exact(model, fp.split(model, 2), batch, check="finite")
    counted = batch["labels"][:, 1:] if name in ("Llama", "GPT2") else batch["labels"]
    assert int((counted != -100).sum()) == result.weight
    assert result.losses[0].isnan()


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing")
def test_adapters():
    """peft hands labels on to the model inside."""
    peft = pytest.importorskip("peft")
    from funcpipe._src.models.losses import Labels

    batch = batch_of("Llama")
    adapted = peft.get_peft_model(
        MODELS["Llama"](), peft.LoraConfig(r=2, target_modules=["q_proj"])
    )
    assert int((batch["labels"][:, 1:] != -100).sum()) == int(Labels(adapted)(batch))
    prompted = peft.get_peft_model(
        MODELS["Llama"](), peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    )
    with pytest.raises(fp.BatchError, match="does not know the divisor"):
        Labels(prompted)(batch)


def test_traced_splits():
    """The same where the model is traced; the example has labels."""
    model, batch = MODELS["Llama"](), batch_of("Llama")
    example = {name: value[:4] for name, value in batch.items()}
    assert_exact(model, fp.split(model, 2, example=example), batch)


def test_evaluation_and_accumulation():
    """Forwards alone; two runs as one."""
    model, batch = MODELS["Llama"](), batch_of("Llama")
    split = fp.split(model, 2)
    forwards = fp.make_plan(
        split.stages, fp.schedules.fill_drain(2, 4, backward=False), loss=split.loss, outputs=False
    )
    torch.testing.assert_close(
        fp.run(forwards, split.params, (batch, None), state=split.state).loss,
        model(**batch).loss.detach(),
    )
    plan = plan_of(split, 2)
    parts = [
        {name: value[part] for name, value in batch.items()} for part in (slice(0, 5), slice(5, 8))
    ]
    total = fp.accumulate(
        [fp.run(plan, split.params, (part, None), state=split.state) for part in parts]
    )
    torch.testing.assert_close(total.loss, model(**batch).loss.detach())


def test_labels_by_position_and_without_padding():
    """Inputs as a tuple go by the names of forward; without ignored labels all is as it was."""
    model, batch = MODELS["Llama"](), batch_of("Llama")
    split = fp.split(model, 2)
    plan = plan_of(split)
    weigh = plan.counts.weigh
    by_position = (batch["input_ids"], batch["attention_mask"], None, None, None, batch["labels"])
    assert (
        int(weigh(by_position, None))
        == int(weigh(batch, None))
        == int((batch["labels"][:, 1:] != -100).sum())
    )
    full = {"input_ids": batch["input_ids"], "labels": batch["input_ids"]}
    result = fp.run(plan, split.params, (full, None), state=split.state)
    torch.testing.assert_close(result.loss, model(**full).loss.detach())
    assert 8 * 6 == result.weight


def test_what_is_not_known_is_refused():
    """-100 among the labels of a model whose loss nobody knows; a total that the model is given."""

    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(40, 8)
            self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
            self.head = nn.Linear(8, 40)

        def forward(self, tokens, labels):
            x = self.embed(tokens)
            for layer in self.layers:
                x = layer(x)
            return {"loss": F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())}

    class Tokens:
        def __call__(self, output, target):
            return output["loss"]

        def weigh(self, inputs, target):
            return (inputs["labels"] != -100).sum()

    padded = batch_of("Llama")
    model, batch = Own(), {"tokens": padded["input_ids"], "labels": padded["labels"]}
    split = fp.split(model, 2)
    plan = plan_of(split)
    with pytest.raises(
        fp.BatchError, match=r"'labels' with -100.*loss of Own.*weigh\(self, inputs, target\)"
    ):
        fp.run(plan, split.params, (batch, None))
    told = plan_of(split, loss=Tokens())
    torch.testing.assert_close(
        fp.run(told, split.params, (batch, None)).loss, model(**batch)["loss"].detach()
    )
    whole = {"tokens": padded["input_ids"], "labels": padded["input_ids"]}
    torch.testing.assert_close(
        fp.run(plan, split.params, (whole, None)).loss, model(**whole)["loss"].detach()
    )
    model = MODELS["Llama"]()
    split = fp.split(model, 2)
    plan = plan_of(split)
    for name in ("num_items_in_batch", "ignore_index"):
        given = {**padded, name: fp.Replicate(torch.tensor(9))}
        with pytest.raises(fp.BatchError, match=name):
            fp.run(plan, split.params, (given, None), state=split.state)


@pytest.mark.parametrize(
    ("kind", "how"),
    [
        ("LlamaForCausalLM", "function"),
        ("BertForMaskedLM", "cross entropy"),
        ("T5ForConditionalGeneration", "cross entropy"),
        ("LlamaForSequenceClassification", "function"),
        ("Florence2ForConditionalGeneration", ""),
        ("ModernBertForMaskedLM", ""),
        ("ProphetNetForCausalLM", ""),
    ],
)
def test_how_a_forward_is_read(kind, how):
    """A forward that changes its labels, or compares them otherwise, is not known."""
    from funcpipe._src.models.losses import _loss_of_labels

    assert how == _loss_of_labels(getattr(transformers, kind).forward)
