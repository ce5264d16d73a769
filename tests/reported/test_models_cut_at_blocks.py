"""Models cut between their blocks without a trace: the model's numbers, or an error that names the
value."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from common import cpu_plan, same
from torch import nn

import funcpipe as fp
from funcpipe import schedules as S


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x, pad=None):
        h = torch.tanh(self.linear(x))
        if pad is None:
            return x + h
        mean = (
            h.masked_fill(pad[..., None], 0).sum(1, keepdim=True)
            / (~pad).sum(1).clamp(min=1)[:, None, None]
        )
        return x + mean


class Decoder(nn.Module):
    """Passes tokens through an embedding, four blocks and a head."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(20, 8, padding_idx=0)
        self.layers = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(8, 20)

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class MaskFromEmbeddings(Decoder):
    """Finds padding by rows of zeros in the embeddings."""

    def forward(self, tokens):
        x = self.embed(tokens)
        pad = x.abs().sum(-1).eq(0)
        for layer in self.layers:
            x = layer(x, pad)
        return self.head(x)


class GateFromEmbeddings(Decoder):
    def forward(self, tokens):
        x = self.embed(tokens)
        gate = x > 0
        for layer in self.layers:
            x = layer(x) * torch.where(gate, 1.0, 0.5)
        return self.head(x)


class DecisionByEmbeddings(Decoder):
    def forward(self, tokens):
        x = self.embed(tokens)
        double = bool(x.sum() > 0)
        for layer in self.layers:
            x = layer(x)
        return self.head(x) * (2 if double else 1)


class WrittenIntoAMask(Decoder):
    """Writes numbers from the embeddings into a tensor that was made from the tokens."""

    def forward(self, tokens):
        x = self.embed(tokens)
        scale = torch.ones(*tokens.shape, 1)
        scale[x[..., :1] > 0] = 0.5
        for layer in self.layers:
            x = layer(x) * scale
        return self.head(x)


class RoundedEmbeddings(Decoder):
    """Passes whole numbers, made from the embeddings, around the blocks."""

    def forward(self, tokens):
        x = self.embed(tokens)
        whole = (x * 3).round().long()
        for layer in self.layers:
            x = layer(x)
        return self.head(x + whole)


class FirstBlockAtTheEnd(Decoder):
    def forward(self, tokens):
        x = first = self.embed(tokens)
        for number, layer in enumerate(self.layers):
            x = layer(x)
            first = x if number == 0 else first
        return self.head(x + first.sign())


class WeightOfAnotherBlock(Decoder):
    def forward(self, tokens):
        return super().forward(tokens) * self.layers[0].linear.weight.argmax()


def tokens():
    found = torch.randint(1, 20, (8, 6))
    found[:, 3:] = 0
    return found


def outputs(split, batch):
    plan = fp.make_plan(
        split, S.fill_drain(len(split), 2, backward=False), devices="cpu", outputs=True
    )
    return fp.run(plan, split.params, batch, state=split.state).outputs


FOREIGN = [
    MaskFromEmbeddings,
    GateFromEmbeddings,
    DecisionByEmbeddings,
    WrittenIntoAMask,
    RoundedEmbeddings,
    FirstBlockAtTheEnd,
    WeightOfAnotherBlock,
]


@pytest.mark.parametrize("kind", FOREIGN)
def test_a_value_of_another_stage_is_refused_in_every_run(kind):
    model, batch = kind(), tokens()
    split = fp.split(model, 2)
    for _ in range(3):
        with pytest.raises(
            fp.PlanError, match=r"which another stage has.*trace it instead: fp.split"
        ):
            outputs(split, batch)


@pytest.mark.parametrize(
    "kind", [MaskFromEmbeddings, GateFromEmbeddings, WrittenIntoAMask, RoundedEmbeddings]
)
def test_an_output_of_an_entry_that_travels_gives_the_models_numbers(kind):
    model, batch = kind(), tokens()
    split = fp.split(model, 4, layers=fp.models.find_layers(model, carry=["embed"]))
    torch.testing.assert_close(outputs(split, batch), model(batch))


def test_the_refusal_names_the_value_and_the_call():
    split = fp.split(MaskFromEmbeddings(), 2)
    with pytest.raises(
        fp.PlanError, match=r"depends on 'embed'.*find_layers\(model, carry=\['embed'\]\)"
    ):
        outputs(split, tokens())


class Prefilled(Decoder):
    """Makes masks from shapes of the embeddings alone, by several functions."""

    def forward(self, tokens):
        x = self.embed(tokens)
        pad = (
            torch.zeros_like(x[..., 0]).bool()
            | torch.full_like(x[..., 0], 0.0).bool()
            | x.new_zeros(x.shape[:2]).bool()
        )
        scale = x.new_full((), 0.5) + torch.ones_like(x).mean()
        for layer in self.layers:
            x = layer(x, pad) * scale
        return self.head(x)


@pytest.mark.parametrize("stages", [2, 4])
def test_shapes_of_an_entry_are_known_in_every_stage(stages):
    model, batch = Prefilled(), tokens()
    torch.testing.assert_close(outputs(fp.split(model, stages), batch), model(batch))


# -- hooks
# -------------------------------------------------------------------------------


HOOKS = {
    "forward": lambda block, calls: block.register_forward_hook(
        lambda m, a, y: calls.append(1) or y * 3
    ),
    "pre": lambda block, calls: block.register_forward_pre_hook(
        lambda m, a: calls.append(1) or (a[0] + 1,)
    ),
    "backward": lambda block, calls: block.register_full_backward_hook(
        lambda m, given, gradients: calls.append(1) or tuple(one * 2 for one in given)
    ),
}


@pytest.mark.parametrize("kind", HOOKS)
@pytest.mark.parametrize("number", range(4))
def test_hooks_of_a_block_run_once_wherever_the_cut_is(kind, number):
    model, batch, calls = Decoder(), tokens(), []
    HOOKS[kind](model.layers[number], calls)
    F.cross_entropy(model(batch).transpose(1, 2), batch).backward()
    calls.clear()
    split = fp.split(model, 2)
    loss = lambda y, t: F.cross_entropy(y.transpose(1, 2), t)
    result = fp.run(
        fp.make_plan(split, S.one_f_one_b(2, 1), loss=loss, devices="cpu"),
        split.params,
        (batch, batch),
    )
    assert 1 == len(calls)
    for name, gradient in split.merge(result.grads).items():
        torch.testing.assert_close(gradient, model.get_parameter(name).grad)


@pytest.mark.parametrize("place", ["embed", "layers.1", "head"])
def test_hooks_of_all_modules_run_once_in_a_run(place):
    model, batch, calls = Decoder(), tokens(), []
    model.get_submodule(place).register_forward_hook(lambda m, a, y: calls.append(1))
    split = fp.split(model, 4)
    plan = fp.make_plan(split, S.fill_drain(4, 1, backward=False), devices="cpu")
    for _ in range(2):
        fp.run(plan, split.params, batch)
    assert 2 == len(calls)


# -- what a model collects over its blocks
# -------------------------------------------------------------------------------


class Collects(Decoder):
    """Collects an output of each block: in a list, as an attribute, or by a hook."""

    def __init__(self, how):
        super().__init__()
        self.how, self.seen = how, []
        for layer in self.layers:
            if how == "hook":
                layer.register_forward_hook(self.collect)
            elif how == "input hook":
                layer.register_forward_pre_hook(lambda m, args: self.seen.append(args[0]))

    def collect(self, layer, args, y):
        self.seen.append(y.detach().sign().long())

    def forward(self, tokens):
        x = self.embed(tokens)
        self.seen.clear()
        for layer in self.layers:
            x = layer(x)
        if self.how == "attribute":
            return self.head(x), sum(layer.aux for layer in self.layers)
        return self.head(x), sum(self.seen)


class KeepsAux(Block):
    def forward(self, x, pad=None):
        self.aux = x.square().mean().detach()
        return super().forward(x, pad)


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("called", [False, True])
@pytest.mark.parametrize("how", ["hook", "attribute"])
def test_features_collected_over_blocks_are_refused_whether_called_before_or_not(
    how, called, train
):
    model, batch = Collects(how), tokens()
    if how == "attribute":
        model.layers = nn.ModuleList(KeepsAux() for _ in range(4))
    if called:
        with torch.no_grad():
            model(batch)
    split = fp.split(model, 2)
    schedule = S.one_f_one_b(2, 2)
    plan = fp.make_plan(
        split,
        schedule if train else schedule.forwards(),
        devices="cpu",
        **({"loss": lambda y, t: y[0].square().mean()} if train else {}),
    )
    pattern = r"values that blocks pass on beside their output|which another stage has|has no attribute 'aux'"
    with pytest.raises(Exception, match=pattern) as caught:
        fp.run(plan, split.params, (batch, batch) if train else batch)
    assert isinstance(caught.value, (fp.StageError, fp.PlanError))


@pytest.mark.parametrize("called", [False, True])
@pytest.mark.parametrize("stages", [2, 4])
def test_transformers_that_collect_features_are_refused_alike(stages, called):
    transformers = pytest.importorskip("transformers")
    config = transformers.SegformerConfig(
        num_labels=4,
        hidden_sizes=[8] * 4,
        depths=[1] * 4,
        num_attention_heads=[1] * 4,
        decoder_hidden_size=8,
    )
    model = transformers.SegformerForSemanticSegmentation(config).eval()
    batch = {"pixel_values": torch.randn(6, 3, 32, 32), "labels": torch.randint(0, 4, (6, 32, 32))}
    if called:
        with torch.no_grad():
            model(**batch)
    split = fp.split(model, stages)
    plan = fp.make_plan(split, S.one_f_one_b(stages, 3), devices="cpu")
    with pytest.raises(fp.PlanError, match=r"pass on beside their output|which another stage has"):
        fp.run(plan, split.params, (batch, None), state=split.state)


# -- where modules run
# -------------------------------------------------------------------------------


class Body(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


class OneExpression(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.body, self.norm, self.head = (
            nn.Linear(4, 4),
            Body(),
            nn.LayerNorm(4),
            nn.Linear(4, 2),
        )

    def forward(self, x):
        return self.head(self.norm(self.body(self.embed(x))))


class ByComprehension(OneExpression):
    def forward(self, x):
        outs = [self.head(self.norm(y)) for y in [self.body(self.embed(x))]]
        return outs[0]


class Assigned(OneExpression):
    def forward(self, x):
        x = x * 0 + self.embed(x)
        if (y := self.norm(self.body(x))) is not None:
            y = self.head(y)
        return y


@pytest.mark.parametrize("kind", [OneExpression, ByComprehension, Assigned])
def test_modules_called_in_one_expression(kind):
    model, x, y = kind(), torch.randn(6, 4), torch.randn(6, 2)
    found = fp.models.find_layers(model)
    assert (("embed",), {"norm", "head"}) == (found.entry, set(found.exit))
    split = fp.split(model, 2)
    plan = cpu_plan(split, S.one_f_one_b(2, 2))
    torch.testing.assert_close(
        fp.run(plan, split.params, (x, y)).loss, F.mse_loss(model(x.clone()), y).detach()
    )


def test_a_wrapper_that_forwards_attributes_is_cut():
    class Wrapper(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner, self.prompt = inner, nn.Parameter(torch.randn(3, 8))

        def __getattr__(self, name):
            try:
                return super().__getattr__(name)
            except AttributeError:
                return getattr(super().__getattr__("inner"), name)

        def forward(self, tokens):
            return self.inner(tokens) + self.prompt.sum()

    model, batch = Wrapper(Decoder()), tokens()
    torch.testing.assert_close(outputs(fp.split(model, 2), batch), model(batch))


@pytest.mark.filterwarnings(
    "ignore:The .grad attribute:UserWarning"
)  # the compiler's warning, at the model's call
def test_a_sequential_with_a_compiled_block_is_cut():
    compiled = torch.compile(nn.Linear(4, 4), backend="eager")
    model = nn.Sequential(nn.Linear(4, 4), compiled, nn.Sequential(nn.ReLU(), nn.Linear(4, 4)))
    x = torch.randn(6, 4)
    torch.testing.assert_close(outputs(fp.split(model, 2), x), model(x))


# -- compared with the model
# -------------------------------------------------------------------------------


class Counts(Decoder):
    """Adds up a Python number over its blocks, which no stage can see."""

    def forward(self, tokens):
        x, total = self.embed(tokens), 0.0
        for layer in self.layers:
            x = layer(x)
            total += layer.number
        return self.head(x) * total


class Numbered(Block):
    number = 0.0

    def forward(self, x, pad=None):
        self.number = float(x.detach().square().mean())
        return super().forward(x, pad)


def test_an_example_compares_the_cut_with_the_model():
    model = Counts()
    model.layers = nn.ModuleList(Numbered() for _ in range(4))
    with pytest.raises(
        fp.PlanError, match="the stages do not compute what the model computes, on the example"
    ):
        fp.split(model, 2, layers="layers", example=tokens())
    plain = fp.split(Decoder(), 2, layers="layers", example=tokens())
    assert ["layers[0:2]", "layers[2:4]"] == [stage.name for stage in plain.stages]


def test_cut_models_compile_and_keep_their_bits():
    model, batch = Decoder(), tokens()
    split = fp.split(model, 2)
    loss = lambda y, t: F.cross_entropy(y.transpose(1, 2), t)
    results = []
    for stages in (split.stages, [fp.compile_stage(stage, fuse=False) for stage in split.stages]):
        plan = fp.make_plan(stages, S.zero_bubble(2, 2), loss=loss, devices="cpu")
        results.append(fp.run(plan, split.params, (batch, batch)))
    assert same((results[0].loss, results[0].grads), (results[1].loss, results[1].grads))
