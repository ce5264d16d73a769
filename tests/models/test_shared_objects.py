"""Layers that share a Python object: activations in it are refused, settings and tables work."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import funcpipe as fp


class Box:
    """An object with attributes, without meaning for torch."""

    def __init__(self):
        self.value = torch.zeros(1)


class Slotted:
    __slots__ = ("value",)

    def __init__(self):
        self.value = torch.zeros(1)


class Holder(nn.Module):
    """A module that only holds a value for others."""

    def __init__(self):
        super().__init__()
        self.value = torch.zeros(1)


KINDS = {
    "object": (Box, lambda box, y: setattr(box, "value", y), lambda box: box.value),
    "slots": (Slotted, lambda box, y: setattr(box, "value", y), lambda box: box.value),
    "module": (Holder, lambda box, y: setattr(box, "value", y), lambda box: box.value),
    "dict": (
        lambda: {"value": torch.zeros(1)},
        lambda box, y: box.update(value=y),
        lambda box: box["value"],
    ),
    "list": (lambda: [torch.zeros(1)], lambda box, y: box.append(y), lambda box: box[-1]),
    "nested": (
        lambda: {"deep": [Box()]},
        lambda box, y: setattr(box["deep"][0], "value", {"of": (y, 1)}),
        lambda box: (
            box["deep"][0].value["of"][0]
            if isinstance(box["deep"][0].value, dict)
            else box["deep"][0].value
        ),
    ),
}


class Layer(nn.Module):
    """A layer that may write its activation into an object, or read it."""

    def __init__(self, kind, box, role=""):
        super().__init__()
        self.linear, self.box, self.role = nn.Linear(4, 4), box, role
        self.write, self.read = KINDS[kind][1:]

    def forward(self, x):
        y = self.linear(x).tanh()
        if self.role == "writes":
            self.write(self.box, y)
        return y + self.read(self.box).mean() if self.role == "reads" else y


class Stack(nn.Module):
    """The same layers as blocks of a model."""

    def __init__(self, layers):
        super().__init__()
        self.blocks = nn.ModuleList(layers)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def layers_of(kind, roles=("writes", "", "", "reads")):
    torch.manual_seed(0)
    box = KINDS[kind][0]()
    return [Layer(kind, box, role) for role in roles]


def batch():
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(8, 4, generator=generator) for _ in range(2)]


def loss_of(model, **options):
    split = fp.split(model, 2, **options)
    plan = fp.make_plan(split, fp.schedules.one_f_one_b(2, 2), loss=F.mse_loss, devices="cpu")
    params = fp.place(plan, split.params)
    x, t = batch()
    return [fp.run(plan, params, (x, t)).loss for _ in range(2)]


def plain(model):
    x, t = batch()
    model = copy.deepcopy(model)
    return sum(
        F.mse_loss(model(rows), target) / 2
        for rows, target in zip(x.chunk(2), t.chunk(2), strict=True)
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("make", [lambda layers: nn.Sequential(*layers), Stack])
def test_an_activation_for_another_stage_is_refused(kind, make):
    model = make(layers_of(kind))
    with pytest.raises(fp.PlanError, match=r"leaves an activation in '.*0\.box.*' shares") as info:
        loss_of(model)
    assert ("example=" in str(info.value)) == (make is Stack)  # a trace has one forward
    if make is Stack and kind != "list":  # a trace of a list that grows is another matter
        for loss in loss_of(make(layers_of(kind)), example=batch()[0]):
            torch.testing.assert_close(loss, plain(model))


def test_an_activation_for_the_same_stage():
    """Blocks of one stage share one copy of the object; layers of a Sequential do not."""
    roles = ("writes", "reads", "", "")
    model = Stack(layers_of("object", roles))
    model.blocks[2].box = model.blocks[3].box = Box()
    for loss in loss_of(model):
        torch.testing.assert_close(loss, plain(model))
    with pytest.raises(fp.PlanError, match=r"leaves an activation in '0\.box\.value'"):
        loss_of(nn.Sequential(*layers_of("object", roles)))


def test_a_refused_activation_is_refused_again():
    split = fp.split(nn.Sequential(*layers_of("object")), 2)
    plan = fp.make_plan(split, fp.schedules.one_f_one_b(2, 2), loss=F.mse_loss, devices="cpu")
    params = fp.place(plan, split.params)
    for _ in range(3):
        with pytest.raises(fp.PlanError, match="leaves an activation"):
            fp.run(plan, params, tuple(batch()))


class Masked(nn.Module):
    """A layer that keeps masks by length in a table that all layers share, and its last map in an
    attribute of its own."""

    def __init__(self, masks, config):
        super().__init__()
        self.linear, self.masks, self.config = nn.Linear(4, 4), masks, config
        self.map = None

    def forward(self, x):
        if len(x) not in self.masks:
            self.masks[len(x)] = torch.ones(len(x), 1).tril()
        self.map = self.linear(x) * self.config["scale"]
        return self.map * self.masks[len(x)]


@pytest.mark.parametrize("make", [lambda layers: nn.Sequential(*layers), Stack])
@pytest.mark.parametrize("repeated", [False, True])
def test_settings_tables_and_own_attributes_work(make, repeated):
    torch.manual_seed(0)
    masks, config = {}, {"scale": 2.0}
    layers = [Masked(masks, config) for _ in range(4)]
    if repeated and make is not Stack:  # one module at several positions
        layers = [layers[0]] * 4
    model = make(layers)
    for loss in loss_of(model):
        torch.testing.assert_close(loss, plain(model))
