"""docs/howto/model_recipes.md: each program has the losses and gradients of plain PyTorch."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import funcpipe as fp

PAGE = (Path(__file__).parents[1] / "docs" / "howto" / "model_recipes.md").read_text()


@pytest.fixture(scope="module")
def page():
    """The names that the programs of the page leave."""
    scope = {"__name__": "recipe"}
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE, flags=re.M | re.S)
    exec(compile("\n".join(blocks), "model_recipes", "exec", dont_inherit=True), scope)
    return scope


def test_adapters_on_a_base_of_8_bits(page):
    assert page["losses"] == sorted(page["losses"], reverse=True)
    own = [{name: leaf.detach().clone() for name, leaf in tree.items()} for tree in page["params"]]
    for tree in own:
        tree["a"].requires_grad_()
        tree["b"].requires_grad_()
    x = h = page["x"]
    for tree in own:
        h = page["adapted"](tree, h)
    F.mse_loss(h, x.roll(1, dims=1)).backward()
    result = fp.run(page["plan"], page["params"], (x, x.roll(1, dims=1)))
    for tree, grads in zip(own, result.grads, strict=True):
        assert grads["base"] is None
        torch.testing.assert_close(grads["a"], tree["a"].grad)
        torch.testing.assert_close(grads["b"], tree["b"].grad)


def test_several_tokens(page):
    tokens, (first, trunk, second, _) = page["tokens"], page["mtp_params"]
    table, w, mix = (
        leaf.clone().requires_grad_() for leaf in (first["table"], trunk["w"], second["mix"])
    )
    h = page["trunk"]({"w": w}, table[tokens])
    known = torch.cat([h[:, :-2], table[tokens[:, 1:-1]]], -1)
    logits = torch.tanh(known @ mix) @ table.T
    other = F.cross_entropy(logits.flatten(0, 1), tokens[:, 2:].flatten())
    loss = page["next_token"](h @ table.T, tokens) + 0.3 * other
    grads = torch.autograd.grad(loss, [table, w, mix])
    result = page["mtp_result"]
    torch.testing.assert_close(result.loss, loss.detach())
    for stage in (0, 2, 3):
        torch.testing.assert_close(result.grads[stage]["table"], grads[0])
    torch.testing.assert_close(result.grads[1]["w"], grads[1])
    torch.testing.assert_close(result.grads[2]["mix"], grads[2])


def test_a_vision_tower(page):
    model, words = page["model"], page["words"]
    assert sum(page["sizes"]) == len(model)
    model.zero_grad()
    loss = page["caption_loss"](model(page["images"], words), words)
    loss.backward()
    torch.testing.assert_close(page["vision_result"].loss, loss.detach())
    found = page["split"].merge(page["vision_result"].grads)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, rtol=1e-4, atol=1e-6)
