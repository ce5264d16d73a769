"""Cuts of torchtitan and Megatron: read, written, and used by `split`."""

import random
import re

import pytest
import torch
import torch.nn as nn

import funcpipe as fp
from funcpipe.models import from_megatron, from_torchtitan, to_megatron, to_torchtitan


class Decoder(nn.Module):
    """With torchtitan's names."""

    def __init__(self, layers):
        super().__init__()
        self.tok_embeddings = nn.Embedding(11, 8)
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(layers)])
        self.norm = nn.LayerNorm(8)
        self.output = nn.Linear(8, 11)

    def forward(self, tokens):
        x = self.tok_embeddings(tokens)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.output(self.norm(x))


def expanded(layout):
    """A reading of Megatron's text, one letter after the other, with a stack of groups."""
    text, stack, last = layout.replace(",", ""), [""], ""
    for token in re.findall(r"\*\d+|.", text):
        if token == "(":
            stack.append("")
            last = ""
        elif token == ")":
            last = stack.pop()
            stack[-1] += last
        elif token[0] == "*":
            stack[-1] = stack[-1].removesuffix(last) + last * int(token[1:])
        else:
            last = token
            stack[-1] += last
    return stack[0].split("|")


def random_sizes(rng):
    """With runs of equal stages."""
    return [
        size
        for size in (rng.randint(1, 6) for _ in range(rng.randint(1, 4)))
        for _ in range(rng.choice([1, 1, 2, 5]))
    ]


@pytest.mark.parametrize("seed", range(10))
def test_what_is_written_is_read_back(seed):
    sizes = random_sizes(random.Random(seed))
    parts = [part.count("t") for part in expanded(to_megatron(sizes))]
    assert (tuple(sizes), sizes) == (from_megatron(to_megatron(sizes)), parts)
    assert tuple(sizes) == from_torchtitan(to_torchtitan(sizes))
    if len(sizes) > 1:
        written = to_megatron(sizes, ends=True)
        assert sizes == [len(part) for part in expanded(written)]
        assert tuple(sizes) == from_megatron(written, ends=True)
        assert tuple(sizes) == from_torchtitan(to_torchtitan(sizes, ends=True), ends=True)


@pytest.mark.parametrize(
    ("layout", "sizes"),
    [
        ("Ettt|tttL", (3, 3)),
        ("Et*3|(tt|)*29,tL", (3, *[2] * 29, 1)),
        ("Et,t|(t|tt|)*2,t*2L", (2, 1, 2, 1, 2, 2)),
        ("EtL", (1,)),
        ("E(t|)*3tL", (1, 1, 1, 1)),
        ("Et|ttmL", (1, 3)),
        ("Et|tt|m*2L", (1, 2, 2)),
    ],
)
def test_layouts_of_megatron(layout, sizes):
    assert sizes == from_megatron(layout)
    assert sizes == tuple(part.count("t") + part.count("m") for part in expanded(layout))


def test_layers_that_predict_further_tokens():
    """Megatron's m: layers after the others, all in one stage, with or without the loss."""
    assert (4, *[2] * 29, 1, 1) == from_megatron("Et*3|(tt|)*29,m|L", ends=True)
    assert "Ettt|(tt|)*29m|L" == to_megatron((4, *[2] * 29, 1, 1), ends=True, mtp=1)
    assert "Et|tmmL" == to_megatron((1, 3), mtp=2)
    assert "Et|m*4L" == to_megatron((1, 4), mtp=4)
    for sizes, mtp, message in (
        ((1, 1), 2, r"the last 2 layers must be in one stage; got sizes \[1, 1\]"),
        ((1, 1), 3, "mtp is a number of layers, from 0 to 2; got 3"),
        ((1, 1), -1, "mtp is a number of layers"),
    ):
        with pytest.raises(fp.PlanError, match=message):
            to_megatron(sizes, mtp=mtp)


@pytest.mark.parametrize("seed", range(10))
def test_layouts_with_mtp_layers_are_read_back(seed):
    rng = random.Random(seed)
    sizes = random_sizes(rng)
    written = to_megatron(sizes, mtp=rng.randint(0, sizes[-1]))
    assert tuple(sizes) == from_megatron(written)
    assert sizes == [len(part.strip("EL")) for part in expanded(written)]


def test_embedding_and_head_as_layers():
    """For a Sequential, as `plan_for` counts."""
    assert (1, 4, 2, 1) == from_megatron("E|tttt|tt|L", ends=True)
    parts = [["tok_embeddings"], ["layers.0", "layers.1"], ["output", "norm", "layers.2"]]
    assert (1, 2, 2) == from_torchtitan(parts, ends=True)
    assert "E|tt|tL" == to_megatron((1, 2, 2), ends=True)
    assert (3,) == from_torchtitan([["tok_embeddings", "layers.0", "norm"]], ends=True)


@pytest.mark.parametrize("sizes", [(2, 1), (1, 1, 1), (3,)])
def test_a_split_of_blocks_has_its_names(sizes):
    model = Decoder(3)
    split = fp.split(model, balance=from_torchtitan(to_torchtitan(sizes)))
    names = to_torchtitan(split)
    assert to_torchtitan(sizes) == [sorted(part, key=_place) for part in names]
    assert to_megatron(sizes) == to_megatron(split)
    # Each stage has the parameters of the modules that torchtitan would leave to it.
    for part, params in zip(names, split.params, strict=True):
        kept = {
            name
            for name, _ in model.named_parameters()
            if any(name.startswith(f"{module}.") for module in part)
        }
        assert kept == {*params}


def _place(name):
    return ["tok_embeddings", "layers", "norm", "output"].index(name.split(".")[0]), name


def test_a_split_of_a_sequential():
    layers = [nn.Embedding(11, 8), *(nn.Linear(8, 8) for _ in range(3)), nn.Linear(8, 11)]
    split = fp.split(nn.Sequential(*layers), balance=from_megatron("E|tt|tL", ends=True))
    assert [["0"], ["1", "2"], ["3", "4"]] == to_torchtitan(split)
    assert "E|tt|tL" == to_megatron(split, ends=True)


def test_a_layout_is_simulated():
    """The cost of layers, cut by a layout."""
    layers = fp.Cost([1.0] * 6, [1.0] * 6, [1.0] * 6)
    cost = layers.group(from_megatron("E|tttt|L", ends=True))
    assert (1, 4, 1) == cost.forward
    choice = fp.models.plan_for(layers, num_devices=2, num_microbatches=2, evaluations=50)
    assert choice.sizes == from_megatron(to_megatron(choice.sizes, ends=True), ends=True)


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ("Et*3|(tt|)*29,m|L", r"stage 31 has no layer: 'L'; give ends=True"),
        ("Et|tm|mL", r"all MTP layers \(m\) must be in one stage; got 'Et\|tm\|mL'"),
        ("Etmt|tL", "must have one E, then t, then m, then one L"),
        ("Ett|L", r"stage 1 has no layer: 'L'; give ends=True"),
        ("Et||tL", "stage 1 has no layer: ''"),
        ("ttL", "must have one E, then t, then m, then one L"),
        ("EtLt", "must have one E, then t, then m, then one L"),
        ("", "must have one E, then t, then m, then one L"),
        ("E(tt)|tL", r"'\(' is not a letter of a layout"),
        ("E((t)*2)*2L", r"'\*' is not a letter of a layout"),
        ("Et t|tL", "' ' is not a letter of a layout"),
        ("Et*99999999|tL", "more than 100000 letters"),
        (["E", "L"], "from_megatron takes text such as 'Ett|ttL'; got a list"),
    ],
)
def test_layouts_that_split_cannot_make(layout, message):
    with pytest.raises(fp.PlanError, match=message):
        from_megatron(layout)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        (
            [["tok_embeddings"], ["layers.0", "output"]],
            r"part 0 has no layer: \['tok_embeddings'\]; give ends=True",
        ),
        (
            [["layers.0"], ["norm", "layers.1"], ["layers.2", "output"]],
            r"part 1 has \['norm'\], which only the first and last stage can have",
        ),
        ([["layers.0"], ["layers.2"]], r"ascend from 0 without gaps; got \[0, 2\]"),
        ([["layers.1"], ["layers.0"]], r"got \[1, 0\]"),
        ([["a.layers.0"], ["b.layers.0"]], r"layers of several lists: \['a.layers', 'b.layers'\]"),
        (["layers.0", "layers.1"], "takes a list of names per stage"),
        ([], "takes a list of names per stage"),
        ("layers.0", "takes a list of names per stage"),
    ],
)
def test_parts_that_split_cannot_make(parts, message):
    with pytest.raises(fp.PlanError, match=message):
        from_torchtitan(parts)


def test_ends_need_modules_beside_the_layers():
    with pytest.raises(fp.PlanError, match="part 1 has only layers; leave out ends=True"):
        from_torchtitan([["tok_embeddings", "layers.0"], ["layers.1"]], ends=True)
    for write in (to_megatron, to_torchtitan):
        with pytest.raises(fp.PlanError, match="got 1 layer"):
            write([1], ends=True)
        for wrong in ([2, 0], [], 3, "ab"):
            with pytest.raises(fp.PlanError, match="sizes must be the positive number of layers"):
                write(wrong)


def test_a_shared_parameter_has_no_layout():
    model = Decoder(2)
    model.output = nn.Linear(8, 11, bias=False)
    model.output.weight = model.tok_embeddings.weight
    split = fp.split(model, balance=[1, 1])
    for write in (to_megatron, to_torchtitan):
        with pytest.raises(fp.PlanError, match="share a parameter"):
            write(split)
