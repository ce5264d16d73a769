"""Tiny transformers models in float64 with their inputs, for every way to cut a model."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import nn

Inputs = dict[str, Any]

_TEXT = {
    "vocab_size": 29,
    "hidden_size": 16,
    "num_attention_heads": 2,
    "max_position_embeddings": 16,
}
_BLOCK = {"num_hidden_layers": 4, "intermediate_size": 24}
_LLAMA = {
    **_TEXT,
    **_BLOCK,
    "num_key_value_heads": 1,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


class Case(NamedTuple):
    """One model of the zoo.

    Attributes:
        build: dropout -> the model, in training mode.
        inputs: rows -> keywords of its forward, labels among them; every row counts alike.
        draws: has it dropout.
    """

    build: Callable[[float], nn.Module]
    inputs: Callable[[int], Inputs]
    draws: bool = True


def zoo(name: str, *, dropout: float = 0.0) -> nn.Module:
    """A model by its name, the same numbers each time."""
    pytest.importorskip("transformers")
    with torch.random.fork_rng():
        torch.manual_seed(1)
        made = ZOO[name].build(dropout).to(torch.float64).train()
        if name in _CAUSAL:
            made.loss_function = _causal_loss  # theirs rounds to float32
        with torch.no_grad():  # what begins as zeros or ones has gradients that say little
            for one in made.parameters():
                one.add_(torch.randn_like(one), alpha=0.05)
    return made


def batch(name: str, rows: int = 6) -> Inputs:
    """Inputs for a model by its name, the same each time."""
    with torch.random.fork_rng():
        torch.manual_seed(2)
        return ZOO[name].inputs(rows)


def reference(
    model: nn.Module, inputs: Inputs, parts: list[int]
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Loss and gradients of a copy called on one microbatch after the other, weighted by rows; the
    model is untouched."""
    twin = copy.deepcopy(model)
    rows, start, total = sum(parts), 0, torch.zeros((), dtype=torch.float64)
    for size in parts:
        piece = {
            key: value[start : start + size] if isinstance(value, torch.Tensor) else value
            for key, value in inputs.items()
        }
        loss = twin(**piece).loss * (size / rows)
        loss.backward()
        total += loss.detach()
        start += size
    return total, {
        key: p.grad if p.grad is not None else torch.zeros_like(p)
        for key, p in twin.named_parameters()
    }


def _causal_loss(
    logits: torch.Tensor, labels: torch.Tensor, vocab_size: int, **_: Any
) -> torch.Tensor:
    return F.cross_entropy(logits[:, :-1].reshape(-1, vocab_size), labels[:, 1:].reshape(-1))


def _llama(*, tied: bool) -> Callable[[float], nn.Module]:
    def build(dropout: float) -> nn.Module:
        from transformers import LlamaConfig, LlamaForCausalLM

        return LlamaForCausalLM(
            LlamaConfig(**_LLAMA, tie_word_embeddings=tied, attention_dropout=dropout)
        )

    return build


def _mixtral(dropout: float) -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    more = {
        "num_local_experts": 3,
        "num_experts_per_tok": 2,
        "experts_implementation": "batched_mm",
    }  # takes float64, and a trace takes it
    return MixtralForCausalLM(MixtralConfig(**_LLAMA, **more, attention_dropout=dropout))


def _gpt2(dropout: float) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    rates = {"resid_pdrop": dropout, "embd_pdrop": dropout, "attn_pdrop": dropout}
    shape = {"vocab_size": 29, "n_embd": 16, "n_head": 2, "n_layer": 4, "n_positions": 16}
    return GPT2LMHeadModel(GPT2Config(**shape, **rates, bos_token_id=1, eos_token_id=2))


def _bert(dropout: float) -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    rates = {
        "hidden_dropout_prob": dropout,
        "attention_probs_dropout_prob": dropout,
        "classifier_dropout": dropout,
    }
    return BertForSequenceClassification(BertConfig(**_TEXT, **_BLOCK, **rates, num_labels=3))


def _t5(dropout: float) -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    shape = {
        "vocab_size": 29,
        "d_model": 16,
        "d_kv": 8,
        "d_ff": 24,
        "num_layers": 2,
        "num_heads": 2,
    }
    return T5ForConditionalGeneration(
        T5Config(**shape, dropout_rate=dropout, decoder_start_token_id=0)
    )


def _vit(dropout: float) -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    rates = {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
    shape = {
        "hidden_size": 16,
        "num_attention_heads": 2,
        "image_size": 8,
        "patch_size": 4,
        "num_channels": 3,
    }
    return ViTForImageClassification(ViTConfig(**shape, **_BLOCK, **rates, num_labels=3))


def _resnet(dropout: float) -> nn.Module:
    from transformers import ResNetConfig, ResNetForImageClassification

    shape = {"embedding_size": 8, "hidden_sizes": [8, 8, 16, 16], "depths": [1, 1, 1, 1]}
    return ResNetForImageClassification(ResNetConfig(**shape, layer_type="basic", num_labels=3))


def _tokens(rows: int) -> Inputs:
    ids = torch.randint(3, 29, (rows, 7))
    return {"input_ids": ids, "labels": ids.clone()}


def _padded(rows: int) -> Inputs:
    """Every row is padded, by the same number of tokens: equal counts of what the loss counts."""
    given = _tokens(rows)
    mask = torch.ones(rows, 7, dtype=torch.long)
    mask[:, 5:] = 0
    given["labels"][:, 5:] = -100
    return {**given, "attention_mask": mask}


def _sentences(rows: int) -> Inputs:
    mask = torch.ones(rows, 7, dtype=torch.long)
    mask[::2, 4:] = 0
    return {
        "input_ids": torch.randint(3, 29, (rows, 7)),
        "attention_mask": mask,
        "labels": torch.randint(0, 3, (rows,)),
    }


def _pairs(rows: int) -> Inputs:
    return {"input_ids": torch.randint(3, 29, (rows, 7)), "labels": torch.randint(3, 29, (rows, 5))}


def _images(size: int) -> Callable[[int], Inputs]:
    def make(rows: int) -> Inputs:
        return {
            "pixel_values": torch.randn(rows, 3, size, size, dtype=torch.float64),
            "labels": torch.randint(0, 3, (rows,)),
        }

    return make


_CAUSAL = {"llama", "llama-tied", "mixtral", "gpt2"}
ZOO: dict[str, Case] = {
    "llama": Case(_llama(tied=False), _tokens),
    "llama-tied": Case(_llama(tied=True), _padded),
    "mixtral": Case(_mixtral, _tokens),
    "gpt2": Case(_gpt2, _tokens),
    "bert": Case(_bert, _sentences),
    "t5": Case(_t5, _pairs),
    "vit": Case(_vit, _images(8)),
    "resnet": Case(_resnet, _images(16), draws=False),
}
