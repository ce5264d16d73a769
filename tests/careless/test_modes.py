"""model.eval() before a stage is made: a layer trains where it was in training mode and the plan
trains, everywhere."""

import copy

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

import funcpipe as fp

ROWS = 6


def features():
    return torch.randn(ROWS, 4, generator=torch.Generator().manual_seed(0)).double()


def square(y, target):
    return y.square().mean()


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.norm, self.drop = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5)

    def forward(self, x):
        return x + self.drop(self.norm(self.linear(x)))


class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def row():
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block()).double()


def stack():
    torch.manual_seed(0)
    return Stack().double()


def whole(model):
    part, params, state = fp.from_module(model)
    return (part,), (params,), (state,)


def both(made):
    return made.stages, made.params, made.state


def composed(model):
    (a, b), params, state = both(fp.split(model, 2))
    return (fp.compose(a, b),), (tuple(params),), (tuple(state),)


def compiled(model):
    part, params, state = fp.from_module(model)
    return (fp.compile_stage(part),), (params,), (state,)


WAYS = {
    "from_module": (row, whole),
    "Sequential": (row, lambda model: both(fp.split(model, 2))),
    "layers": (stack, lambda model: both(fp.split(model, 2))),
    "traced": (stack, lambda model: both(fp.split(model, 2, example=features()))),
    "traced, unchecked": (
        stack,
        lambda model: both(fp.split(model, 2, example=features(), check=False)),
    ),
    "transmitted": (stack, lambda model: both(fp.split(model, 2, ties="transmit"))),
    "composed": (row, composed),
    "compiled": (row, compiled),
}


def plan_of(stages, count=3):
    schedule = fp.schedules.remat(fp.schedules.one_f_one_b(len(stages), count))
    return fp.make_plan(stages, schedule, loss=square, outputs=True, devices="cpu")


def forwards_of(stages):
    schedule = fp.schedules.fill_drain(len(stages), 3, backward=False)
    return fp.make_plan(stages, schedule, devices="cpu")


def names(tree):
    """State by the model's names, whatever tree it is in."""
    if isinstance(tree, dict):
        return tree
    return {name: value for part in tree or () for name, value in names(part).items()}


@pytest.mark.parametrize("way", WAYS)
def test_a_module_in_evaluation_stays_there(way):
    """A plan that trains it: running statistics, no dropout, nothing committed, gradients of the
    model in evaluation."""
    make, cut = WAYS[way]
    plain = make().eval()
    for norm in plain.modules():
        if isinstance(norm, nn.BatchNorm1d):
            norm.running_mean += 0.5
    stages, params, state = cut(plain)
    assert all(part.evaluation for part in stages)
    plan = plan_of(stages)
    for number in range(len(stages)):
        assert (
            f"  stage {number} stays in evaluation mode, as its module was: model.train() before"
            in str(plan)
        )
    result = fp.run(plan, params, (features(), None), state=state)
    expected = plain(features())
    square(expected, None).backward()
    torch.testing.assert_close(result.outputs, expected, rtol=1e-12, atol=1e-12)
    buffers = dict(plain.named_buffers())
    assert all(torch.equal(value, buffers[name]) for name, value in names(result.state).items())
    found = names(result.grads)
    for name, value in plain.named_parameters():
        torch.testing.assert_close(found[name], value.grad, rtol=1e-10, atol=1e-12)
    evaluate = forwards_of(stages)
    assert "evaluation mode" not in str(evaluate)
    assert torch.equal(fp.run(evaluate, params, features(), state=state).outputs, result.outputs)


@pytest.mark.parametrize("way", WAYS)
def test_a_module_in_training_follows_the_plan(way):
    """Trains where the plan trains, evaluates where it does not; what the model becomes later
    changes nothing."""
    make, cut = WAYS[way]
    plain = make()
    stages, params, state = cut(plain)
    plain.eval()
    assert not any(part.evaluation for part in stages)
    plan = plan_of(stages)
    assert "evaluation mode" not in str(plan)
    with pytest.raises(fp.DrawError, match="seed"):
        fp.run(plan, params, (features(), None), state=state)
    result = fp.run(plan, params, (features(), None), state=state, seed=1)
    assert 1 == int(next(value for name, value in names(result.state).items() if "tracked" in name))
    if "unchecked" in way:
        return  # nobody looked whether the trace is right in evaluation mode, so it is refused
    found = fp.run(forwards_of(stages), params, features(), state=state).outputs
    torch.testing.assert_close(found, plain(features()), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("way", "root"),
    [
        *((way, True) for way in WAYS if way != "transmitted"),
        ("from_module", False),
        ("layers", False),
        ("traced", False),
    ],
)
def test_layers_keep_their_own_modes(way, root):
    """Frozen norms in a training model, and a training norm in a model whose root says
    evaluation."""
    make, cut = WAYS[way]
    plain = make()
    frozen, training = (one for one in plain.modules() if isinstance(one, Block))
    frozen.eval()
    training.drop.eval()
    plain.training = root
    stages, params, state = cut(plain)
    result = fp.run(plan_of(stages, 1), params, (features(), None), state=state)
    torch.testing.assert_close(result.outputs, plain(features()), rtol=1e-12, atol=1e-12)
    buffers = dict(plain.named_buffers())
    for name, value in names(result.state).items():
        torch.testing.assert_close(value, buffers[name], rtol=1e-10, atol=1e-12)
    assert way != "Sequential" or [True, False] == [part.evaluation for part in stages]


def test_a_pipe_follows_its_layers_at_every_call():
    """Wrapped in either mode, put into the other and back: what the Sequential would do, in each
    call."""
    for begin in (True, False):
        plain = (
            nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).double().train(begin)
        )
        pipe = fp.Pipe(copy.deepcopy(plain), chunks=1, balance=[2, 1], devices="cpu")
        assert begin is pipe.training
        for mode in (begin, False, True, False, True, True):
            assert plain.train(mode) is plain
            pipe.train(mode)
            torch.testing.assert_close(pipe(features()), plain(features()), rtol=1e-12, atol=1e-12)
            for name, value in plain.named_buffers():
                torch.testing.assert_close(
                    dict(pipe.named_buffers())[name], value, rtol=1e-12, atol=1e-12
                )
        plain[1].eval()
        pipe[1].eval()
        torch.testing.assert_close(pipe(features()), plain(features()), rtol=1e-12, atol=1e-12)


def test_a_pipe_of_layers_in_evaluation_can_be_trained_later():
    """Dropout off, then on, then off: pipe.train() is all that it takes."""
    pipe = fp.Pipe(
        nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)).double().eval(), chunks=2, devices="cpu"
    )
    zeros = [int((pipe.train(mode)(features()) == 0).sum()) for mode in (False, True, False)]
    assert 0 == zeros[0] == zeros[2] < zeros[1]


def test_a_stage_called_alone_follows_the_same_rule():
    for mode in (True, False):
        part, params, _ = fp.from_module(nn.Dropout(0.5).train(mode))
        torch.manual_seed(0)
        assert mode == bool((part(params, torch.ones(99), train=True) == 0).any())
        assert not (part(params, torch.ones(99)) == 0).any()


class Recurrent(nn.Module):
    """A layer of torch whose input has time on axis 0 by default."""

    def __init__(self, **options):
        super().__init__()
        self.lstm = nn.LSTM(6, 8, **options)

    def forward(self, x):
        return self.lstm(x)[0]


@pytest.mark.parametrize(
    ("layer", "path"),
    [
        (Recurrent(), "0.lstm"),
        (nn.TransformerEncoderLayer(6, 2, 8), "0.self_attn"),
        (Recurrent(batch_first=True), None),
        (nn.TransformerEncoderLayer(6, 2, 8, batch_first=True), None),
    ],
)
def test_layers_with_time_on_axis_0_have_a_hint(layer, path):
    split = fp.split(nn.Sequential(layer, nn.Dropout(0.1)).train(), 2)
    plan = fp.make_plan(split, fp.schedules.fill_drain(2, 2), loss=F.mse_loss, devices="cpu")
    hints = [hint for hint in plan.hints if "batch_first=True, or pass fp.Axis(x, 1)" in hint]
    assert bool(path) == bool(hints)
    assert all(hint.startswith(f"layer {path!r} of stage 0") for hint in hints)
