"""Models cut between their blocks without a trace: every stage runs the model's own forward, and
numbers stay the same."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from common import same, snapshot
from models.zoo import batch, reference, zoo
from torch import Tensor, nn

import funcpipe as fp
from funcpipe._src.models.layers.cut import cut_layers
from funcpipe._src.models.layers.find import find_layers

ROWS = [2, 2, 2]
CUT = ["llama", "llama-tied", "mixtral", "gpt2", "bert", "vit", "resnet"]


def sizes(count: int, parts: int) -> list[int]:
    return [count // parts + (i < count % parts) for i in range(parts)]


def ties(params):
    """Groups of (stage, name) that are one tensor."""
    holders: dict[int, list[tuple[int, str]]] = {}
    for stage, tree in enumerate(params):
        for key, tensor in tree.items():
            holders.setdefault(id(tensor), []).append((stage, key))
    return [group for group in holders.values() if len(group) > 1]


def cut(model, parts, layers=None):
    found = layers if layers is not None else find_layers(model)
    return tuple(zip(*cut_layers(model, sizes(len(found), parts), layers=found), strict=True))


class OwnLoss:
    """The model's loss, each microbatch by its rows: padded labels are not what is tested here."""

    def __call__(self, y, target):
        return y.loss

    def weigh(self, inputs, target):
        return None


own_loss = OwnLoss()


def train(
    pieces,
    inputs,
    *,
    schedule=fp.schedules.one_f_one_b,
    loss=own_loss,
    target=None,
    microbatches=3,
    **options,
):
    stages, params, state = pieces
    made = schedule(len(stages), microbatches)
    plan = fp.make_plan(stages, made, loss=loss, ties=ties(params))
    return fp.run(plan, params, (inputs, target), state=state, **options)


def by_name(result, params):
    """Gradients by the model's names; those of one name in several stages agree."""
    out: dict[str, Tensor] = {}
    for grads, tree in zip(result.grads, params, strict=True):
        for key in tree:
            assert key not in out or torch.equal(out[key], grads[key])
            out[key] = grads[key]
    return out


def assert_trains_like(model, inputs, pieces, **options):
    loss, grads = reference(model, inputs, ROWS)
    result = train(pieces, inputs, **options)
    assert abs(result.loss - loss) <= 1e-10
    found = by_name(result, pieces[1])
    assert found.keys() == grads.keys()
    for key, grad in grads.items():
        torch.testing.assert_close(found[key], grad, rtol=0, atol=1e-10, msg=key)
    return result


# -- transformers
# -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "parts"),
    [*((name, 4) for name in CUT), ("llama-tied", 2), ("llama-tied", 3), ("resnet", 3)],
)
def test_transformers_train_like_themselves(name, parts):
    model, inputs = zoo(name), batch(name)
    before, mode = snapshot([*model.parameters(), *model.buffers()]), model.training
    pieces = cut(model, parts)
    one = assert_trains_like(model, inputs, pieces, executor="serial")
    other = train(pieces, inputs, schedule=fp.schedules.zero_bubble, executor="serial")
    assert torch.equal(one.loss, other.loss)
    assert same(one.grads, other.grads)
    assert all(
        torch.equal(a, b)
        for a, b in zip(before, [*model.parameters(), *model.buffers()], strict=True)
    )
    assert mode is model.training
    assert "forward" not in {key for layer in model.modules() for key in vars(layer)}


@pytest.mark.parametrize("name", ["gpt2", "bert"])
def test_dropout_does_not_depend_on_the_cut(name):
    """2, 3 and 4 stages draw the same masks, bit for bit, on threads as well."""
    model, inputs = zoo(name, dropout=0.4), batch(name)
    results = []
    for parts, executor in ((2, "serial"), (3, "threads"), (4, "serial")):
        pieces = cut(model, parts)
        results.append(
            (train(pieces, inputs, seed=7, executor=executor, threads_per_lane=1), pieces[1])
        )
    losses = [result.loss for result, _ in results]
    assert losses[0] == losses[1] == losses[2]
    grads = [by_name(result, params) for result, params in results]
    assert same(grads[0], grads[1])
    assert same(grads[0], grads[2])


def test_one_stage_is_the_model():
    model, inputs = zoo("gpt2"), batch("gpt2")
    pieces = cut(model, 1)
    assert pieces[0][0].stash == () == pieces[0][0].pop
    assert_trains_like(model, inputs, pieces)


def test_threads_and_remat():
    model, inputs = zoo("llama-tied", dropout=0.2), batch("llama-tied")
    pieces = cut(model, 4)
    plain = train(pieces, inputs, seed=1, executor="serial")
    again = train(
        pieces,
        inputs,
        seed=1,
        schedule=lambda s, m: fp.schedules.remat(fp.schedules.one_f_one_b(s, m)),
        executor="threads",
    )
    assert same((plain.loss, plain.grads), (again.loss, again.grads))
    assert same(plain.grads, train(pieces, inputs, seed=1, executor="threads").grads)


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_of_the_model_itself(reentrant):
    """Blocks that recompute themselves do so in their stage, and draw the same."""
    model, inputs = zoo("gpt2", dropout=0.3), batch("gpt2")
    plain = train(cut(model, 2), inputs, seed=3, executor="serial")
    for layer in model.transformer.h:
        layer.gradient_checkpointing = True
        layer._gradient_checkpointing_func = Checkpoint(reentrant)
    kept = train(cut(model, 2), inputs, seed=3, executor="serial")
    assert same((plain.loss, plain.grads), (kept.loss, kept.grads))


class Checkpoint:
    def __init__(self, reentrant):
        self.reentrant = reentrant

    def __call__(self, fn, *args):
        return torch.utils.checkpoint.checkpoint(fn, *args, use_reentrant=self.reentrant)


def test_batch_norm_is_deferred():
    """ResNet's statistics are those of one batch norm that saw every row, in the stage that has the
    layer."""
    model, inputs = zoo("resnet"), batch("resnet")
    pieces = cut(model, 3)
    result = train(pieces, inputs)
    whole, params, state = fp.from_module(model)
    plan = fp.make_plan([whole], fp.schedules.fill_drain(1, 3), loss=own_loss)
    given = [inputs["pixel_values"], inputs["labels"]]
    expected = fp.run(plan, (params,), (tuple(given), None), state=(state,))
    found = {key: value for tree in result.state for key, value in tree.items()}
    assert found.keys() == state.keys()
    for key, value in expected.state[0].items():
        torch.testing.assert_close(found[key], value, rtol=1e-10, atol=1e-12)
    held = [key for tree in pieces[2] for key in tree]
    assert len(held) == len(set(held))


def test_evaluation_gives_the_models_own_output():
    model, inputs = zoo("bert", dropout=0.5).eval(), batch("bert")
    stages, params, state = cut(model, 3)
    plan = fp.make_plan(stages, fp.schedules.fill_drain(3, 3, backward=False))
    y = fp.run(plan, params, inputs, state=state).outputs
    with torch.no_grad():
        expected = model(**inputs)
    torch.testing.assert_close(y.logits, expected.logits, rtol=0, atol=1e-12)


def test_numbers_are_the_models_by_its_names():
    model = zoo("llama-tied")
    stages, params, state = cut(model, 2)
    own = dict(model.named_parameters())
    assert all(tree[key] is own[key] for tree in params for key in tree)
    assert {key for tree in params for key in tree} == own.keys()
    assert ties(params) == [[(0, "model.embed_tokens.weight"), (1, "model.embed_tokens.weight")]]
    assert "model.norm.weight" in params[1]
    assert "model.norm.weight" not in params[0]
    assert [sorted(tree) for tree in state] == [
        ["model.rotary_emb.inv_freq", "model.rotary_emb.original_inv_freq"]
    ] * 2
    buffers = dict(model.named_buffers())
    assert all(
        torch.equal(tree[key], buffers[key]) and tree[key] is not buffers[key]
        for tree in state
        for key in tree
    )
    assert [stage.name for stage in stages] == ["model.layers[0:2]", "model.layers[2:4]"]


def test_stages_are_data():
    """They pickle, and each is its own unit test."""
    model, inputs = zoo("llama"), batch("llama")
    stages, params, state = pickle.loads(pickle.dumps(cut(model, 2)))
    first = stages[0](params[0], inputs, state=state[0])
    y = stages[1](params[1], first.y, skips=first.stash, state=state[1])
    torch.testing.assert_close(y.logits, model(**inputs).logits, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ["llama", "gpt2", "bert", "vit"])
def test_what_stands_around_the_stack(name):
    """Embeddings, final norm and heads are found from the published plan, or from the source of
    forward."""
    expected = {
        "llama": ("model.layers", ("model.embed_tokens",), ("model.norm", "lm_head")),
        "gpt2": (
            "transformer.h",
            ("transformer.wte", "transformer.wpe"),
            ("transformer.ln_f", "lm_head"),
        ),
        "bert": ("bert.encoder.layer", ("bert.embeddings",), ("bert.pooler", "classifier")),
        "vit": ("vit.layers", ("vit.embeddings",), ("vit.layernorm", "classifier")),
    }
    model = zoo(name)
    assert (model.config.base_model_pp_plan is not None) == (name == "llama")
    found = find_layers(model)
    assert (found.path, found.entry, found.exit) == expected[name]
    assert found.names == tuple(f"{found.path}.{i}" for i in range(4))
    assert found == find_layers(model, found.path)


def test_what_transformers_collect_from_all_blocks_is_refused():
    model, inputs = zoo("mixtral"), batch("mixtral")
    model.config.output_router_logits = True
    with pytest.raises(fp.PlanError, match=r"config.output_router_logits is True.*example="):
        cut(model, 2)
    cut(model, 1)  # one stage sees every block
    model.config.output_router_logits = False
    with pytest.raises(fp.PlanError, match="inputs ask for .'output_router_logits'"):
        train(cut(model, 2), {**inputs, "output_router_logits": True})


def test_an_encoder_decoder_is_refused_by_name():
    with pytest.raises(
        fp.PlanError, match=r"T5ForConditionalGeneration is an encoder-decoder.*example="
    ):
        find_layers(zoo("t5"))


def test_the_users_configuration_stays():
    model = zoo("llama")
    assert model.config.use_cache
    stages, *_ = cut(model, 2)
    assert not stages[0].fn.skeleton.config.use_cache
    assert model.config.use_cache


# -- any model
# -------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self, p=0.0):
        super().__init__()
        self.linear, self.drop = nn.Linear(6, 6), nn.Dropout(p)

    def forward(self, h):
        return h + self.drop(torch.tanh(self.linear(h)))


class Net(nn.Module):
    """A stack with an entry, an exit, a helper with a table, and a parameter of its own."""

    def __init__(self, p=0.0, blocks=4):
        super().__init__()
        self.embed = nn.Embedding(9, 6)
        self.noise = nn.Dropout(p)
        self.blocks = nn.ModuleList(Block(p) for _ in range(blocks))
        self.norm, self.head = nn.LayerNorm(6), nn.Linear(6, 9)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.table = Table()
        self.p = p

    def forward(self, ids, target=None):
        h = F.dropout(self.noise(self.embed(ids)), self.p, self.training) + self.table(ids)
        h = self.run(h)
        return self.end(F.dropout(h, self.p, self.training), target)

    def run(self, h):
        for block in self.blocks:
            h = block(h)
        return h

    def end(self, h, target):
        logits = self.head(self.norm(h) * self.scale)
        return logits if target is None else F.cross_entropy(logits.transpose(1, 2), target)


class Table(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("rows", (torch.arange(42.0) / 41).reshape(7, 6), persistent=False)

    def forward(self, ids):
        return self.rows[: ids.shape[1]]


def net_batch(rows=6):
    ids = torch.randint(0, 9, (rows, 5))
    return {"ids": ids, "target": ids.roll(1, 1)}


def given_loss(y, target):
    return y


def eager(model, inputs, parts=3):
    """Loss and gradients of a copy, microbatch after microbatch."""
    twin = copy.deepcopy(model)
    size = len(inputs["ids"]) // parts
    losses = [
        twin(**{key: value[i * size : (i + 1) * size].clone() for key, value in inputs.items()})
        for i in range(parts)
    ]
    loss = sum(losses) / parts
    loss.backward()
    return loss.detach(), {key: one.grad for key, one in twin.named_parameters()}


def assert_net_trains(model, parts, layers=None, inputs=None):
    inputs = net_batch() if inputs is None else inputs
    loss, grads = eager(model, inputs)
    pieces = cut(model, parts, layers)
    result = train(pieces, inputs, loss=given_loss, executor="serial")
    torch.testing.assert_close(result.loss, loss, rtol=0, atol=1e-10)
    found = by_name(result, pieces[1])
    assert found.keys() == grads.keys()
    for key, grad in grads.items():
        torch.testing.assert_close(
            found[key], torch.zeros_like(found[key]) if grad is None else grad, rtol=0, atol=1e-10
        )


def assert_refused(model, match, layers=None, parts=2, **options):
    with pytest.raises(fp.PlanError, match=match):
        train(cut(model, parts, layers), net_batch(), loss=given_loss, executor="serial", **options)


@pytest.fixture(autouse=True)
def _double():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("parts", [1, 3])
def test_any_stack(parts):
    assert_net_trains(Net().train(), parts)


def test_a_parameter_of_an_ancestor_is_in_every_stage():
    _, params, state = cut(Net(), 3)
    assert ties(params) == [[(0, "scale"), (1, "scale"), (2, "scale")]]
    assert [sorted(tree) for tree in state] == [["table.rows"]] * 3


class Between(Net):
    """Draws in the loop over the blocks as well."""

    def run(self, h):
        for block in self.blocks:
            h = F.dropout(block(h), self.p, self.training)
        return h


@pytest.mark.parametrize("kind", [Net, Between])
def test_draws_of_the_modules_around_the_stack(kind):
    """Functional dropout at both ends and between blocks: each draws its own, and no later stage
    draws it again."""
    model, inputs = kind(p=0.4).train(), net_batch()
    options = {"loss": given_loss, "seed": 5, "executor": "serial", "threads_per_lane": 1}
    results = [train(cut(model, parts), inputs, **options) for parts in (1, 2, 3, 4)]
    assert len({result.loss.item() for result in results}) == 1
    assert results[0].loss != train(cut(model, 2), inputs, loss=given_loss, seed=6).loss
    spread = [
        {key: one for tree in result.grads for key, one in tree.items()} for result in results
    ]
    assert same(spread[1], spread[2])
    assert same(spread[1], spread[3])


def test_draws_that_every_stage_would_repeat_are_refused():
    class Noisy(Net):
        def run(self, h):
            torch.rand(())
            return super().run(h)

    with pytest.raises(fp.DrawError, match="draw random numbers as 'forward'"):
        train(cut(Noisy().train(), 2), net_batch(), loss=given_loss, seed=1)


def test_positional_inputs_and_a_bare_tensor():
    model = Net().eval()
    ids = torch.randint(0, 9, (4, 5))
    for given in (ids, (ids, None)):
        stages, params, state = cut(model, 3)
        plan = fp.make_plan(stages, fp.schedules.fill_drain(3, 2, backward=False))
        y = fp.run(plan, params, given, state=state).outputs
        torch.testing.assert_close(y, model(ids), rtol=0, atol=1e-12)


def test_gradients_of_inputs():
    class Float(Net):
        def __init__(self):
            super().__init__()
            self.embed = nn.Linear(3, 6)

        def forward(self, x):
            return self.head(self.norm(self.run(self.embed(x))))

    model, x = Float().train(), torch.randn(4, 5, 3)
    stages, params, state = cut(model, 3)
    plan = fp.make_plan(stages, fp.schedules.fill_drain(3, 2), ties=ties(params))
    result, pullback = fp.vjp(plan, params, x, state=state)
    ct = torch.randn_like(result.outputs)
    _, found = pullback(ct)
    leaf = x.clone().requires_grad_()
    model(leaf).backward(ct)
    torch.testing.assert_close(found, leaf.grad, rtol=0, atol=1e-12)


def test_torch_func_sees_through():
    model, inputs = Net().train(), net_batch()
    stages, params, state = cut(model, 2)

    def loss(params):
        return fp.apply(stages, params, inputs, state=state, train=True).y

    grads = torch.func.grad(loss)(params)
    _, expected = eager(model, inputs, parts=1)
    for tree in grads:
        for key, grad in tree.items():
            if key != "scale":
                torch.testing.assert_close(grad, expected[key], rtol=0, atol=1e-12)


def test_blocks_that_return_tuples():
    class Pair(Block):
        def forward(self, h):
            return super().forward(h), {"count": 3, "mask": h > 0}

    class Pairs(Net):
        def run(self, h):
            for block in self.blocks:
                h, seen = block(h)
                h = h * seen["count"] + seen["mask"]
            return h

    model = Pairs()
    model.blocks = nn.ModuleList(Pair() for _ in range(4))
    assert_net_trains(model.train(), 3)


@pytest.mark.parametrize("kind", [nn.Sequential, nn.ModuleDict])
def test_other_containers(kind):
    class Contained(Net):
        def __init__(self):
            super().__init__()
            made = [Block() for _ in range(3)]
            self.blocks = (
                kind(*made)
                if kind is nn.Sequential
                else kind({f"b{i}": one for i, one in enumerate(made)})
            )

        def run(self, h):
            if kind is nn.Sequential:
                return self.blocks(h)
            for block in self.blocks.values():
                h = block(h)
            return h

    assert_net_trains(Contained().train(), 3)


def test_a_model_that_is_its_stack():
    stages, params, _ = cut(nn.Sequential(Block(), Block(), Block()), 2)
    assert [sorted(tree) for tree in params] == [
        ["0.linear.bias", "0.linear.weight", "1.linear.bias", "1.linear.weight"],
        ["2.linear.bias", "2.linear.weight"],
    ]
    assert stages[1].pop == ("inputs",)


def test_inputs_written_in_place():
    """Each stage gets the inputs as they were."""

    class Shifting(Net):
        def forward(self, ids, target=None):
            target += 1
            target %= 9
            return super().forward(ids, target)

    model, inputs = Shifting().train(), net_batch()
    before = snapshot(inputs)
    loss, _ = eager(model, snapshot_tree(inputs))
    result = train(cut(model, 3), inputs, loss=given_loss)
    torch.testing.assert_close(result.loss, loss, rtol=0, atol=1e-10)
    assert same(before, snapshot(inputs))


def snapshot_tree(tree):
    return {key: value.clone() for key, value in tree.items()}


def test_masks_of_ints_that_entries_make_travel():
    """What an entry returns beside floating numbers is exact in every stage."""

    class Masking(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(9, 6)

        def forward(self, ids):
            return self.table(ids), ids.gt(3).unsqueeze(-1), ids.shape[1]

    class Masked(Net):
        def __init__(self):
            super().__init__()
            self.embed = Masking()

        def forward(self, ids, target=None):
            h, mask, length = self.embed(ids)
            for block in self.blocks:
                h = block(h) * mask / length
            return self.end(h, target)

    assert_net_trains(Masked().train(), 4)


class FirstAgain(Net):
    """Every block gets the embeddings again."""

    def forward(self, ids, target=None):
        first = h = self.embed(ids)
        for block in self.blocks:
            h = block(h) + 0.1 * first
        return self.end(h, target)


def test_what_later_stages_use_of_an_entry_is_refused_or_carried():
    model = FirstAgain().train()
    assert_refused(model, r"use more than the output of the previous block.*carry=")
    for parts in (2, 4):
        assert_net_trains(model, parts, find_layers(model, carry=["embed"]))


def test_outputs_of_several_blocks_are_refused():
    class Mean(Net):
        def run(self, h):
            seen = []
            for block in self.blocks:
                h = block(h)
                seen.append(h)
            return sum(seen) / len(seen)

    assert_refused(Mean().train(), "use more than the output of the previous block", parts=3)


def test_nan_of_the_models_own_is_no_fault_of_the_cut():
    model = Net().train()
    with torch.no_grad():
        model.blocks[3].linear.weight[0, 0] = float("nan")
    assert train(cut(model, 3), net_batch(), loss=given_loss).loss.isnan()


def test_a_weight_used_directly_at_the_other_end():
    """The source shows it, and both ends hold it; told otherwise, the run refuses."""

    class Direct(Net):
        def end(self, h, target):
            return F.cross_entropy((self.norm(h) @ self.embed.weight.T).transpose(1, 2), target)

    class Shown(Net):
        def forward(self, ids, target=None):
            h = self.embed(ids)
            for block in self.blocks:
                h = block(h)
            return F.cross_entropy((self.norm(h) @ self.embed.weight.T).transpose(1, 2), target)

    shown = Shown().train()
    found = find_layers(shown)
    assert (found.entry, found.exit) == (("embed",), ("embed", "norm", "head"))
    assert_net_trains(shown, 3, found)


class Unordered(nn.Module):
    """Registered in another order than it runs."""

    def __init__(self):
        super().__init__()
        self.norm, self.head = nn.LayerNorm(6), nn.Linear(6, 9)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.embed = nn.Embedding(9, 6)

    def forward(self, ids, target):
        h = self.embed(ids)
        for block in self.blocks:
            h = block(h)
        return F.cross_entropy(self.head(self.norm(h)).transpose(1, 2), target)


def test_the_source_tells_the_order():
    found = find_layers(Unordered())
    assert (found.entry, found.exit) == (("embed",), ("norm", "head"))
    assert_net_trains(Unordered().train(), 3)


def test_a_run_tells_which_module_is_on_the_wrong_side():
    model = Unordered().train()
    wrong = replace(find_layers(model), entry=("embed", "norm"), exit=("head",))
    assert_refused(
        model,
        r"depends on 'norm.weight'.*if 'norm' runs after.*find_layers.model, exit=\['head', 'norm'\]",
        wrong,
    )
    # The advice ends when all of it was followed, and does not begin again.
    tried = replace(wrong, carry=("norm",))
    assert_refused(model, r"trace it instead: fp.split\(model, ..., example=...\)\nin ", tried)
    wrong = replace(find_layers(model), entry=(), exit=("embed", "norm", "head"))
    assert_refused(
        model,
        r"depends on 'embed.weight'.*if 'embed' runs before.*find_layers.model, entry=\['embed'\]",
        wrong,
    )
    mended = find_layers(model, entry=["embed"], exit=["norm"])
    assert_net_trains(model, 2, mended)


class Twice(Net):
    def run(self, h):
        return super().run(super().run(h))


class Backwards(Net):
    def run(self, h):
        for block in reversed(self.blocks):
            h = block(h)
        return h


class Skipping(Net):
    def run(self, h):
        for number, block in enumerate(self.blocks):
            h = h if number == 1 else block(h)
        return h


@pytest.mark.parametrize("kind", [Twice, Backwards, Skipping])
def test_stacks_that_do_not_run_in_order_are_refused(kind):
    assert_refused(
        kind().train(),
        r"blocks.*does not run each block of 'blocks' once, one after the other",
        parts=2,
    )


def test_a_stack_that_does_not_run_is_refused():
    class Idle(Net):
        def forward(self, ids, target=None):
            return self.embed(ids).sum()

    assert_refused(Idle().train(), "ended without 'blocks.0'")


def test_a_checkpoint_around_blocks_is_refused():
    class Around(Net):
        def run(self, h):
            for block in self.blocks:
                h = torch.utils.checkpoint.checkpoint(block, h, use_reentrant=False)
            return h

    model = Around().train()
    assert_refused(
        model, "inside torch.utils.checkpoint, which a stage cannot leave.*fp.schedules.remat"
    )
    assert_net_trains(model, 1)


def test_hooks_of_other_stages_do_not_run():
    model, inputs = Net().train(), net_batch()
    seen: list[str] = []
    for name in ("embed", "blocks.0", "blocks.3", "head"):
        model.get_submodule(name).register_forward_hook(
            lambda m, a, y, name=name: seen.append(name)
        )
    train(cut(model, 2), inputs, loss=given_loss, executor="serial", microbatches=1)
    assert seen == ["embed", "blocks.0", "blocks.3", "head"]


def test_shared_parameters_of_blocks_are_tied():
    model = Net().train()
    for block in model.blocks[1:]:
        block.linear.bias = model.blocks[0].linear.bias
    assert_net_trains(model, 3)
    _, params, _ = cut(model, 2)
    assert [(0, "blocks.0.linear.bias"), (1, "blocks.0.linear.bias")] in ties(params)


def test_frozen_parameters_and_layers_stay_frozen():
    """Blocks in evaluation mode inside a training model draw nothing; frozen parameters have no
    gradient."""
    model = Net(p=0.5).train()
    model.p = 0.0
    for layer in (model.noise, *model.blocks):
        layer.eval()
    model.embed.weight.requires_grad_(False)
    for parts in (1, 3):
        result = train(cut(model, parts), net_batch(), loss=given_loss)
        assert result.grads[0]["embed.weight"] is None
    model.blocks[3].train()
    with pytest.raises(fp.DrawError, match="seed="):
        train(cut(model, 3), net_batch(), loss=given_loss)


def test_a_dropped_copy_is_gone_at_once():
    """No cycle keeps a run's tensors until the collector comes."""
    stages, params, state = cut(Net(), 2)
    gc.collect()
    gc.disable()
    try:
        bound = stages[0].bind(params[0], state[0])
        bound(net_batch(), state=state[0], train=True)
        seen = [weakref.ref(bound), weakref.ref(bound.module)]
        del bound
        assert [one() for one in seen] == [None, None]
    finally:
        gc.enable()


def test_a_copy_is_used_again():
    stages, params, state = cut(Net(), 2)
    bound = stages[1].bind(params[1], state[1])
    bound.release()
    assert stages[1].bind(params[1], state[1]) is bound


# -- bad input
# -------------------------------------------------------------------------------


def test_bad_sizes_and_names():
    model = Net()
    for given, text in (
        ([2, 1], r"sum to the 4 blocks of 'blocks'; got \[2, 1\], which sum to 3"),
        ([1.5, 2.5], "how many of the 4 blocks of 'blocks' each stage gets"),
    ):
        with pytest.raises(fp.PlanError, match=text):
            cut_layers(model, given)
    with pytest.raises(fp.PlanError, match=r"path: no module 'block'; did you mean 'blocks'\?"):
        cut_layers(model, [2, 2], layers="block")
    with pytest.raises(
        fp.PlanError,
        match=r"(?s)entry: no module 'embedd'; did you mean 'embed'.*exit: no module 'x'",
    ):
        find_layers(model, entry=["embedd"], exit=["x"])
    with pytest.raises(fp.PlanError, match="'head' is a Linear, not a list of blocks"):
        find_layers(model, "head")
    with pytest.raises(fp.PlanError, match="takes an nn.Module; got a list"):
        find_layers([model])


def test_no_stack_or_several():
    with pytest.raises(fp.PlanError, match=r"Linear has no list .*example="):
        find_layers(nn.Linear(2, 2))

    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.left = nn.ModuleList(Block() for _ in range(2))
            self.right = nn.ModuleList(Block() for _ in range(3))

    with pytest.raises(
        fp.PlanError,
        match=r"(?s)several lists.*'right': 3 blocks, 126 numbers\n.*'left': 2 blocks, 84",
    ):
        find_layers(Two())
    assert find_layers(Two(), "left").exit == ("right",)


def test_all_faults_of_a_model_at_once():
    model = Net()
    model.blocks[1] = model.blocks[0]
    model.head.to("meta")
    model.norm.weight = nn.Parameter(torch.ones(6, dtype=torch.int8), requires_grad=False)
    with pytest.raises(fp.PlanError) as caught:
        cut_layers(model, [1, 2])
    text = str(caught.value)
    assert "got [1, 2], which sum to 3" in text
    assert "blocks.1 and blocks.0 are one module" in text
    assert "norm.weight is a Parameter of torch.int8" in text
    assert "it is on several devices (scale on cpu, head.weight on meta)" in text


def test_a_model_on_meta_is_cut_without_numbers():
    with torch.device("meta"):
        model = Net()
    _, params, _ = cut(model, 2)
    assert all(one.is_meta for tree in params for one in tree.values())


def test_layerdrop_and_other_collections_of_a_configuration():
    class Config:
        def __init__(self):
            self.output_hidden_states, self.encoder_layerdrop = True, 0.1

        def to_dict(self):
            return vars(self)

    model = Net().train()
    model.config = Config()
    with pytest.raises(
        fp.PlanError, match=r"(?s)output_hidden_states is True.*encoder_layerdrop is 0.1"
    ):
        cut(model, 2)
    model.config.output_hidden_states = False
    cut(model.eval(), 2)
