"""Traced cuts: what export can and cannot capture, each exact against the eager model or refused by
name."""

from __future__ import annotations

import copy
import pickle
import random
import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import funcpipe as fp
import funcpipe.testing

ROWS = 6


@pytest.fixture(autouse=True)
def double():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    yield
    torch.set_default_dtype(before)


def net(forward, **parts):
    """A module of two Linear(8) layers ``a`` and ``b``, further parts, and this forward."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
            for name, part in parts.items():
                if isinstance(part, torch.Tensor):
                    self.register_buffer(name, part)
                else:
                    setattr(self, name, part)

    Net.forward = forward
    return Net()


def inputs(rows=ROWS):
    return torch.randn(rows, 8)


def chain():
    """The plainest net."""
    return net(lambda s, x: s.b(s.a(x)))


def cut(model, **options):
    """A traced split before ``b``."""
    return fp.split(model, **{"at": ["b"], "example": inputs(), **options})


def plan_of(made, count=2, family=fp.schedules.one_f_one_b, **options):
    """A plan that trains a split with the loss ``square``."""
    options = {"loss": square, "ties": made.ties, "devices": "cpu", **options}
    return fp.make_plan(made.stages, family(len(made), count), **options)


def forwards_of(made, count=2, **options):
    schedule = fp.schedules.fill_drain(len(made), count, backward=False)
    return fp.make_plan(made.stages, schedule, devices="cpu", **options)


def reference(model, batch, count, loss):
    """Loss, gradients and outputs of a copy of the model, microbatch by microbatch."""
    own = copy.deepcopy(model)
    pieces = [one for one in torch.tensor_split(batch, count) if len(one)]
    total = 0.0
    outputs = []
    for piece in pieces:
        y = own(piece)
        part = loss(y, None) * (len(piece) / len(batch))
        part.backward()
        total += float(part.detach())
        outputs.append(y)
    return total, {name: p.grad for name, p in own.named_parameters()}, own, outputs


def square(y, target=None):
    y = y[0] if isinstance(y, tuple) else y
    return (y.float() if y.dtype is torch.bfloat16 else y).pow(2).mean()


def same_as_eager(
    model, at=("b",), *, example=None, rows=ROWS, count=3, tolerance=1e-10, **options
):
    """Split, run under 1F1B and zero-bubble, compare with the eager model."""
    before = {name: one.clone() for name, one in model.state_dict().items()}
    forward, rng = model.forward, torch.get_rng_state()
    example = inputs(4) if example is None else example
    torch.set_rng_state(rng)
    made = fp.split(model, at=list(at), example=example, **options)
    assert model.forward == forward
    assert torch.equal(rng, torch.get_rng_state())
    assert all(torch.equal(one, before[name]) for name, one in model.state_dict().items())
    batch = inputs(rows)
    loss, grads, _, _ = reference(model, batch, count, square)
    for schedule in (fp.schedules.one_f_one_b, fp.schedules.zero_bubble):
        plan = plan_of(made, count, schedule)
        result = fp.run(plan, made.params, (batch, None), state=made.state, seed=0)
        assert float(result.loss) == pytest.approx(loss, abs=tolerance)
        found = made.merge(result.grads)
        for name, grad in grads.items():
            ours = found.get(name)
            if grad is None:
                assert name in made.rest or not ours.any()
            else:
                torch.testing.assert_close(ours, grad, rtol=tolerance, atol=tolerance)
    return made


# -- captured exactly
# -------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [1, 7])
def test_other_numbers_of_rows(rows):
    """Captured with four rows, run with others, also with one and with fewer than microbatches."""
    same_as_eager(net(lambda s, x: s.b(s.a(x).relu())), rows=rows)


def no_grad_region(s, x):
    h = s.a(x)
    with torch.no_grad():
        gate = h.norm(dim=1, keepdim=True)
    return s.b(h / gate)


def boolean_indexing(s, x):
    """Numbers that depend on the data cross as numbers."""
    h = s.a(x)
    return s.b(h) + h[h > 0].sum()


def conditional_operator(s, x):
    h = torch.cond(x.sum() > 0, lambda v: v * 2.0, lambda v: v - 1.0, (s.a(x),))
    return s.b(h)


def made_tensors(s, x):
    numbers = torch.arange(8, device=x.device, dtype=x.dtype) + torch.tensor([2.0])
    return s.b(s.a(x) + s.offsets) + numbers


CAPTURED = {
    "no_grad region": no_grad_region,
    "checkpoint": lambda s, x: s.b(checkpoint(s.a, x, use_reentrant=False).relu()),
    "in place on activations": lambda s, x: s.b((s.a(x) + 1.0).mul_(2.0).relu_()),
    "boolean indexing": boolean_indexing,
    "conditional operator": conditional_operator,
    "constants and made tensors": made_tensors,
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", CAPTURED)
def test_what_a_trace_captures(kind):
    model = net(CAPTURED[kind])
    model.offsets = torch.linspace(0, 1, 8)
    same_as_eager(model)


def test_autocast_region():
    def forward(s, x):
        h = s.a(x)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            h = s.c(h.float())
        return s.b(h.double())

    same_as_eager(net(forward, c=nn.Linear(8, 8, dtype=torch.float32)), tolerance=1e-6)


def test_autocast_around_the_run():
    """It is not part of the trace: the stages run under the caller's."""
    model = net(lambda s, x: s.b(s.a(x).relu())).float()
    x = inputs().float()
    made = cut(model, example=x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = fp.run(forwards_of(made), made.params, x).outputs
        wanted = torch.cat([model(piece) for piece in x.tensor_split(2)])
    assert found.dtype is torch.bfloat16
    assert torch.equal(found, wanted)


def autocast_around_all_layers(s, x):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return s.b(s.a(x))


def in_place_across_the_cut(s, x):
    h = s.a(x)
    y = s.b(x)
    h.add_(1.0)
    return h + y


def counter(s, x):
    """A counter is a constant of the trace: right once, wrong later."""
    s.calls = getattr(s, "calls", 0) + 1
    return s.b(s.a(x) * s.calls)


def counter_beside_infinite_outputs(s, x):
    s.calls = getattr(s, "calls", 0) + 1
    y = s.b(s.a(x).detach()) * s.calls
    mask = torch.eye(8, dtype=torch.bool)[:1].expand_as(y)
    return {"loss": s.b(s.a(x)).pow(2).mean(), "scores": y.masked_fill(mask, float("-inf"))}


def buffer_of_two_stages(s, x):
    s.average.add_(1.0)
    h = s.b(s.a(x))
    s.average.mul_(2.0)
    return h


REFUSED = {
    "autocast around all layers": (
        autocast_around_all_layers,
        "inside a no_grad or autocast region",
    ),
    "in place across the cut": (
        in_place_across_the_cut,
        "writes in place into .* of stage 0",
    ),
    "in place on the inputs": (
        lambda s, x: s.b(s.a(x.mul_(2.0))),
        "writes into its input 'x'",
    ),
    "a branch on data": (
        lambda s, x: s.b(s.a(x)) if x.sum() > 0 else s.a(x),
        r"branches on the numbers in a tensor.*\(at \S+test_split_traced.py:\d+\).*without example=",
    ),
    "a loop over rows": (
        lambda s, x: s.b(torch.stack([s.a(row) for row in x])),
        "fixes the number of rows",
    ),
    "a counter": (counter, "inputs other than the example"),
    "a counter beside infinite outputs": (
        counter_beside_infinite_outputs,
        r"output\['scores'\] differs",
    ),
    "a buffer of two stages": (
        buffer_of_two_stages,
        r"'average', which the forward writes, is used in stages \[0, 1\]",
    ),
    "random": (lambda s, x: s.b(s.a(x) * (random.random() + 1)), "draws with random"),
    "a reentrant checkpoint": (
        lambda s, x: s.b(checkpoint(s.a, x, use_reentrant=True)),
        "use_reentrant=False",
    ),
    "a reentrant checkpoint with a gradient": (
        lambda s, x: s.b(checkpoint(s.a, x.requires_grad_(), use_reentrant=True)),
        "use_reentrant=False",
    ),
    "a reentrant checkpoint of a function": (
        lambda s, x: s.b(checkpoint(torch.sin, s.a(x), use_reentrant=True)),
        "use_reentrant=False",
    ),
}


@pytest.mark.filterwarnings("ignore:None of the inputs")
@pytest.mark.parametrize("kind", REFUSED)
def test_what_no_trace_can_capture_is_refused(kind):
    """The model and Python's random numbers are as before."""
    forward, message = REFUSED[kind]
    model, before = net(forward, average=torch.zeros(8)), random.getstate()
    with pytest.raises(fp.PlanError, match=message):
        cut(model)
    assert not hasattr(model, "calls")
    assert not model.average.any()
    assert random.getstate() == before


def test_labels_whose_numbers_decide_may_be_left_out_of_the_example():
    """As in the loss of DeBERTa's classifier."""

    def forward(s, x, labels=None):
        y = s.b(s.a(x))
        return y if labels is None or len(labels.nonzero()) == 0 else (y - labels).square().mean()

    model, x = net(forward), inputs()
    with pytest.raises(fp.PlanError, match=r"leave labels out of the example.*make_plan\(loss=\)"):
        cut(model, example={"x": x, "labels": torch.ones(len(x), 8)})
    same_as_eager(model)


def test_fixed_rows():
    """With any_rows=False the same loop is one microbatch's, and other sizes are refused by
    name."""
    model = net(lambda s, x: s.b(torch.stack([s.a(row) for row in x])))
    made = same_as_eager(model, example=inputs(2), rows=6, count=3, any_rows=False)
    with pytest.raises(fp.BatchError, match=r"dimension 0 is fixed"):
        fp.run(plan_of(made), made.params, (inputs(6), None))


class Round(torch.autograd.Function):
    """A straight-through estimator."""

    @staticmethod
    def forward(ctx, x):
        return x.round()

    @staticmethod
    def backward(ctx, grad):
        return grad


CUSTOM = {
    "between": (r"Round", lambda s, x: s.b(Round.apply(s.a(x)))),
    "on the input": (r"Round", lambda s, x: s.b(s.a(Round.apply(x)))),
    "written into": (r"Round", lambda s, x: s.b(Round.apply(s.a(x)).mul_(2).view(-1, 8))),
    "into a skip": (r"Round", lambda s, x: s.b(s.a(x)) + Round.apply(s.a(x))),
    "in a branch": (
        r"torch.cond",
        lambda s, x: s.b(
            torch.cond(x.sum() > 0, lambda v: Round.apply(v) * 2, lambda v: v - 1.0, (s.a(x),))
        ),
    ),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("where", CUSTOM)
def test_custom_function_is_refused(where):
    """Export would forget its backward, or, in a branch, leave no gradient at all."""
    says, forward = CUSTOM[where]
    model = net(forward)
    for mode in (torch.enable_grad(), torch.no_grad()):
        with mode, pytest.raises(fp.PlanError, match=rf"{says}.*loses its backward.*custom_op"):
            cut(model)
    assert Round.apply(torch.tensor(0.6)) == 1


def test_custom_function_whose_backward_is_never_called():
    """Under no_grad, or beside the way to the output: nothing is forgotten."""

    def forward(s, x):
        with torch.no_grad():
            scale = Round.apply(s.a(x).abs().amax()) + 1
        Round.apply(s.a(x))
        return s.b(s.a(x) / scale)

    same_as_eager(net(forward), rows=4, count=1)


def test_tracing_leaves_torch_and_the_example_alone():
    apply, example = vars(torch.autograd.Function).get("apply"), inputs()
    seen = []

    def forward(s, x):
        seen.append(vars(torch.autograd.Function).get("apply") is apply)
        return s.b(s.a(x))

    cut(net(forward), example=example)
    assert all(seen)
    assert not example.requires_grad


def test_buffers_become_state():
    """A counter and an average: one update by the whole batch; buffers that are not saved;
    constants."""

    def forward(s, x):
        s.steps.add_(1)
        s.average.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return s.b(s.a(x) + s.average) + s.table

    model = net(forward, steps=torch.zeros((), dtype=torch.long), average=torch.zeros(8))
    model.register_buffer("table", torch.ones(8), persistent=False)
    with pytest.raises(
        fp.PlanError, match=r"(?s)depend on the inputs.*mean_by_rows.*\* 'average'$"
    ):
        cut(model)
    made = cut(model, commit={"average": fp.models.mean_by_rows})
    assert sorted(made.state[0]) == ["average", "steps"]
    assert sorted(made.state[1]) == ["table"]
    assert "table" not in made.state_dict()
    batch = inputs()
    result = fp.run(plan_of(made, 3), made.params, (batch, None), state=made.state)
    assert int(result.state[0]["steps"]) == 1
    torch.testing.assert_close(result.state[0]["average"], 0.1 * batch.mean(0))
    assert not made.state[0]["average"].any()


def test_written_buffer_read_by_a_later_stage():
    """What was written travels; the stage that writes holds the buffer."""

    def forward(s, x):
        s.average.add_(x.detach().mean(0))
        return s.b(s.a(x)) + s.average

    commit = {"average": fp.models.mean_by_rows}
    made = same_as_eager(net(forward, average=torch.zeros(8)), rows=4, count=1, commit=commit)
    assert [bool(tree) for tree in made.state] == [True, False]


@pytest.mark.parametrize("momentum", [0.1, None])
def test_batch_norm_is_deferred(momentum):
    """Law 5: one update by the concatenation of what the layer saw."""
    model = net(lambda s, x: s.b(s.norm(s.a(x)).relu()), norm=nn.BatchNorm1d(8, momentum=momentum))
    made = same_as_eager(model, at=["norm"])
    batch = inputs()
    state = fp.run(plan_of(made, 3), made.params, (batch, None), state=made.state).state[1]
    layer = nn.BatchNorm1d(8, momentum=momentum)
    layer(model.a(batch))
    torch.testing.assert_close(state["norm.running_mean"], layer.running_mean)
    torch.testing.assert_close(state["norm.running_var"], layer.running_var)
    assert int(state["norm.num_batches_tracked"]) == 1


def test_frozen_batch_norm_stays_frozen():
    model = net(lambda s, x: s.b(s.norm(s.a(x))), norm=nn.BatchNorm1d(8))
    model.norm.eval()
    made = same_as_eager(model)
    assert made.stages[0].commit is None


def test_dropout_is_keyed_by_layer():
    """Two, three and four stages draw the same; so does the model as one stage of its own
    modules."""
    model = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.3)) for _ in range(4)])
    batch = (inputs(), None)
    losses = set()
    for count in (1, 2, 3, 4):
        made = fp.split(model, count, example=inputs(3))
        losses.add(float(fp.run(plan_of(made), made.params, batch, seed=3).loss))
    stage, params, _ = fp.from_module(model)
    plan = fp.make_plan([stage], fp.schedules.one_f_one_b(1, 2), loss=square, devices="cpu")
    losses.add(float(fp.run(plan, (params,), batch, seed=3).loss))
    assert len(losses) == 1


def test_random_tensors_and_functional_dropout():
    def forward(s, x):
        h = s.a(x) + torch.randn_like(x)
        return F.dropout(s.b(F.dropout(h, 0.5, s.training)), 0.5, s.training)

    made = cut(net(forward))
    plan, batch = plan_of(made), (inputs(), None)
    with pytest.raises(fp.DrawError, match="seed"):
        fp.run(plan, made.params, batch)
    first = fp.run(plan, made.params, batch, seed=1).loss
    assert torch.equal(first, fp.run(plan, made.params, batch, seed=1, executor="serial").loss)
    assert not torch.equal(first, fp.run(plan, made.params, batch, seed=2).loss)


def test_evaluation_with_the_same_stages():
    """Traced in training, the stages evaluate too: dropout off, running statistics."""
    model = net(
        lambda s, x: s.b(s.drop(s.norm(s.a(x)))), norm=nn.BatchNorm1d(8), drop=nn.Dropout(0.5)
    )
    made = cut(model, at=["norm"])
    x = inputs()
    found = fp.run(forwards_of(made, 3), made.params, x, state=made.state).outputs
    torch.testing.assert_close(found, copy.deepcopy(model).eval()(x), rtol=1e-12, atol=1e-12)


def test_other_mode_is_refused_where_it_differs():
    model = net(lambda s, x: s.b(s.a(x) * (2.0 if s.training else 1.0)))
    made = cut(model)
    with pytest.raises(
        fp.PlanError, match=r"traced in training mode and cannot run in evaluation mode.*model.eval"
    ):
        fp.run(forwards_of(made), made.params, inputs())


def test_keywords_trees_and_dataclass_outputs():
    transformers = pytest.importorskip("transformers")

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x, *, extra=None, scale=1.0, **more):
            h = self.a(x["left"] + x["right"][0]) * scale
            return transformers.modeling_outputs.BaseModelOutput(
                last_hidden_state=self.b(h), hidden_states=(h, more["bias"])
            )

    model = Net()

    def batch(rows):
        return {
            "x": {"left": inputs(rows), "right": [inputs(rows)]},
            "bias": inputs(rows),
            "scale": 2.0,
        }

    made = cut(model, example=batch(3))
    plan = forwards_of(made)
    given = batch(5)
    found = fp.run(plan, made.params, given).outputs
    wanted = model(**given)
    assert type(found) is type(wanted)
    torch.testing.assert_close(found.last_hidden_state, wanted.last_hidden_state)
    torch.testing.assert_close(found.hidden_states[1], given["bias"])
    with pytest.raises(fp.BatchError, match=r"keywords .* got \['bias', 'x'\]"):
        fp.run(plan, made.params, {"x": given["x"], "bias": given["bias"]})
    with pytest.raises(fp.BatchError, match="scale was 2.0 in the trace"):
        fp.run(plan, made.params, {**given, "scale": 3.0})


def test_skips_to_far_stages():
    """A value with several readers crosses once to each, straight."""
    model = net(lambda s, x: _unet(s, x), c=nn.Linear(8, 8), d=nn.Linear(8, 8))
    made = same_as_eager(model, at=["b", "c", "d"])
    far = [edge for edge in made.edges if edge.skip]
    assert {edge.targets for edge in far} == {(1, 2), (3,)}
    assert all(edge.row_bytes == 64 for edge in far)


def _unet(s, x):
    first = s.a(x)
    second = s.b(first).relu()
    third = s.c(second + first)
    return s.d(third + first) * x


# -- where to cut
# -------------------------------------------------------------------------------


def test_split_points():
    def forward(s, x):
        h = s.a(x)
        fp.models.split_point()
        return s.b(h.relu())

    model = net(forward)
    assert model(inputs()).shape == (ROWS, 8)
    made = fp.split(model, example=inputs())
    assert [sorted(tree) for tree in made.params] == [
        ["a.bias", "a.weight"],
        ["b.bias", "b.weight"],
    ]
    assert len(fp.split(model, example=inputs())) == 2
    with pytest.raises(fp.PlanError, match="no fp.models.split_point"):
        fp.split(chain(), example=inputs())


def test_the_end_of_one_and_the_beginning_of_the_next_are_one_cut():
    assert len(cut(chain(), at={"a": "after", "b": "before"})) == 2


@pytest.mark.parametrize(
    ("at", "message"),
    [
        ({"a": "before"}, "no operation runs before it"),
        ({"b": "after"}, "no operation runs after it"),
        ({"b": "behind"}, "must be 'before' or 'after'; got 'behind'"),
        ({"bb": "before"}, "has no such module; did you mean 'b'"),
        ({"unused": "before"}, "no operation of its forward was traced"),
    ],
)
def test_wrong_cuts(at, message):
    model = net(lambda s, x: s.b(s.a(x)), unused=nn.Linear(2, 2))
    with pytest.raises(fp.PlanError, match=message):
        cut(model, at=at)


def test_second_call_of_a_module():
    model = net(lambda s, x: s.b(s.a(s.a(x).relu())))
    made = same_as_eager(model, at=["a@1"])
    assert made.ties == (((0, "a.weight"), (1, "a.weight")), ((0, "a.bias"), (1, "a.bias")))


def test_policies_and_sizes():
    model = net(lambda s, x: s.d(s.c(s.b(s.a(x)))), c=nn.Linear(8, 32), d=nn.Linear(32, 2))
    of = lambda **options: [
        sorted({key[0] for key in tree})
        for tree in fp.split(model, example=inputs(), check=False, **options).params
    ]
    assert (
        of(num_stages=2, policy=fp.models.by_parameters)
        == of(num_stages=2)
        == [["a", "b"], ["c", "d"]]
    )
    assert of(balance=[1, 3]) == [["a"], ["b", "c", "d"]]
    assert of(policy=fp.models.by_memory(288 * 8)) == [["a", "b"], ["c"], ["d"]]
    cost = fp.models.profile(fp.split(model, balance=[1] * 4, example=inputs()), inputs())
    assert len(of(num_stages=3, policy=fp.models.by_time(cost))) == 3
    slow_end = fp.models.by_time(fp.Cost([1.0, 1.0, 1.0, 9.0]))
    assert of(num_stages=2, policy=slow_end) == [["a", "b", "c"], ["d"]]
    with pytest.raises(fp.PlanError, match="each of the 4 units; the cost has 3"):
        of(num_stages=2, policy=fp.models.by_time(fp.Cost([1.0] * 3)))
    with pytest.raises(fp.PlanError, match="by_time takes the Cost .* got a list"):
        fp.models.by_time([1.0] * 4)
    with pytest.raises(fp.PlanError, match=r"call the policy with its argument: .*by_time\(cost\)"):
        of(num_stages=2, policy=fp.models.by_time)
    assert of(policy=lambda units, count: [len(units) - 1, 1]) == [["a", "b", "c"], ["d"]]
    with pytest.raises(fp.PlanError, match="positive numbers that sum to the 4 units"):
        of(balance=[1, 1])
    with pytest.raises(fp.PlanError, match="num_stages is 5, but the model has only 4 units"):
        of(num_stages=5)
    with pytest.raises(fp.PlanError, match="at and balance each determine the cuts"):
        of(balance=[1, 3], at=["b"])


# -- ties
# -------------------------------------------------------------------------------


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(11, 8)
        self.mid = nn.Linear(8, 8)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.table.weight

    def forward(self, tokens, labels=None):
        logits = self.head(self.mid(self.table(tokens)).relu())
        return {"logits": logits, "loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten())}


def tokens():
    return {"tokens": torch.randint(0, 11, (6, 3)), "labels": torch.randint(0, 11, (6, 3))}


@pytest.mark.parametrize("ties", ["replicate", "transmit", {"table.weight": "transmit"}])
def test_tied_parameters(ties):
    model, batch = Tied(), tokens()
    made = fp.split(model, at=["mid", "head"], example=batch, ties=ties)
    model(**batch)["loss"].backward()
    rematted = lambda *sizes: fp.schedules.remat(fp.schedules.zero_bubble(*sizes))
    for family in (fp.schedules.one_f_one_b, rematted):
        plan = plan_of(made, 3, family, loss=made.loss)
        result = fp.run(plan, made.params, (batch, None))
        torch.testing.assert_close(made.merge(result.grads)["head.weight"], model.table.weight.grad)
        fp.testing.assert_matches_sequential(plan, made.params, (batch, None))
    assert list(made.state_dict()) == list(model.state_dict())
    assert bool(made.ties) == (ties == "replicate")


def test_replicas_never_drift():
    """After steps on copies the holders of a tie are equal, bit for bit."""
    batch = tokens()
    made = fp.split(Tied(), at=["mid", "head"], example=batch)
    params = tuple(
        {k: v.detach().clone().requires_grad_() for k, v in tree.items()} for tree in made.params
    )
    plan = plan_of(made, loss=made.loss)
    optimizer = torch.optim.Adam(fp.leaves(params), lr=0.1)
    for _ in range(3):
        fp.step(optimizer, params, fp.run(plan, params, (batch, None)).grads, ties=made.ties)
    assert torch.equal(params[0]["table.weight"], params[2]["table.weight"])


def test_wrong_ties():
    for ties, message in (
        ("copy", "'replicate', 'transmit'"),
        ({"tabel.weight": "transmit"}, "did you mean 'table.weight'"),
    ):
        with pytest.raises(fp.PlanError, match=message):
            fp.split(Tied(), at=["mid"], example=tokens(), ties=ties)


# -- numbers in and out
# -------------------------------------------------------------------------------


def test_state_dict_round_trip():
    """A plain state_dict loads whatever the number of stages, and comes back."""
    model, other, batch = Tied(), Tied(), tokens()
    for at in (["mid"], ["mid", "head"]):
        made = fp.split(model, at=at, example=batch, check=False)
        loaded = made.load_state_dict(other.state_dict())
        assert all(
            torch.equal(one, other.state_dict()[name]) for name, one in loaded.state_dict().items()
        )
        assert all(
            torch.equal(one, model.state_dict()[name]) for name, one in made.state_dict().items()
        )
        assert loaded.params[0]["table.weight"].requires_grad
        assert loaded.params[0]["table.weight"] is loaded.params[-1]["table.weight"]
    wrong = {**other.state_dict(), "heat.weight": torch.zeros(1)}
    del wrong["mid.bias"]
    with pytest.raises(
        fp.PlanError,
        match=r"'heat.weight' is not a name of the model; did you mean 'head.weight'\?\n.*'mid.bias' is missing",
    ):
        made.load_state_dict(wrong)
    assert len(made.load_state_dict(wrong, strict=False)) == 3


def test_loss_of_the_model():
    batch = tokens()
    y = Tied()(**batch)
    made = lambda loss: fp.split(Tied(), at=["mid"], example=batch, loss=loss, check=False)
    loss_of = lambda loss: made(loss).loss(y, None)
    assert loss_of("loss") is y["loss"]
    assert loss_of(lambda out: out["logits"].sum()) == y["logits"].sum()
    assert cut(chain()).loss is None
    with pytest.raises(fp.PlanError, match=r"output has no loss at nope; its scalars: \[.*loss"):
        loss_of("nope")


def test_meta_capture_runs_on_the_cpu():
    """A model without numbers is split, and numbers are loaded later; tensors that it makes
    follow."""

    def forward(s, x):
        return s.b(s.a(x) + torch.arange(8, device=x.device, dtype=x.dtype))

    model = net(forward)
    empty = copy.deepcopy(model).to("meta")
    made = cut(empty, example=torch.empty(4, 8, device="meta"))
    params = tuple({name: model.get_parameter(name) for name in tree} for tree in made.params)
    x = inputs()
    found = fp.run(forwards_of(made, train=True), params, x).outputs
    torch.testing.assert_close(found, model(x))


def test_split_prints_itself():
    made = fp.split(Tied(), at=["mid", "head"], example=tokens(), check=False)
    text = str(made)
    for part in (
        "3 stages",
        "stage 1 mid",
        "72 numbers, 576 B",
        "labels: int64 [rows, 3], 24 B a row -> skip to 2",
        "tied: table.weight of stage 0, table.weight of stage 2",
    ):
        assert part in text
    assert "torch.ops.aten.embedding" in made.code(0)


def test_bytes_of_edges_are_those_of_the_run():
    x, skips = tokens(), {}
    made = fp.split(Tied(), at=["mid", "head"], example=x, check=False)
    for index, stage in enumerate(made.stages):
        out = stage(
            made.params[index], x, skips={name: skips[name] for name in stage.pop}, train=True
        )
        stash = out.stash if isinstance(out, fp.Out) else {}
        x = out.y if isinstance(out, fp.Out) else out
        for edge in made.edges:
            if edge.source == index:
                value = (
                    stash[edge.name] if edge.skip else x[edge.name] if isinstance(x, dict) else x
                )
                assert value.nbytes == 6 * edge.row_bytes
        skips.update(stash)


# -- what is refused
# -------------------------------------------------------------------------------


def test_models_that_no_way_takes():
    with pytest.raises(fp.PlanError, match="takes an nn.Module; got a function"):
        fp.split(lambda x: x, 2)
    with pytest.raises(fp.PlanError, match="not initialised yet"):
        fp.split(nn.Sequential(nn.LazyLinear(3), nn.ReLU()), 2)
    sparse = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    sparse[0].weight = nn.Parameter(torch.eye(2).to_sparse())
    with pytest.raises(fp.PlanError, match=r"0.weight is torch.sparse_coo"):
        fp.split(sparse, 2)
    spread = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))
    with pytest.raises(
        fp.PlanError, match=r"several devices \(0.weight on cpu, 1.weight on meta\)"
    ):
        fp.split(spread, 2)


def test_a_forward_that_computes_gradients_is_said_to_be_no_program():
    """The model runs; torch.export cannot trace it, and the message says what to do."""

    class Force(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.energy = nn.Linear(4, 4), nn.Linear(4, 1)

        def forward(self, x):
            x = self.first(x).detach().requires_grad_()
            return x + torch.autograd.grad(self.energy(x).sum(), x, create_graph=True)[0]

    with pytest.raises(fp.PlanError, match=r"(?s)cannot be traced.*split\(model, num_stages\)"):
        fp.split(Force(), 2, example=torch.randn(4, 4))


def test_example_that_does_not_fit():
    for example, message in (
        (torch.zeros(3, 5), "3x5 and 8x8"),
        ({"nothing": torch.zeros(3, 8)}, "TypeError.*unexpected keyword argument 'nothing'"),
    ):
        with pytest.raises(
            fp.PlanError, match=f"the model itself fails on the example: .*{message}"
        ):
            cut(chain(), example=example)


def test_inputs_unlike_the_example():
    """What export's guards would have caught; the bare graph computes something else in silence."""
    made = cut(chain())
    for x, message in (
        (inputs().float(), r"x was float64 \[rows, 8\]; got torch.float32"),
        (torch.zeros(4, 9), "dimension 1 is fixed"),
        (
            (inputs(), inputs()),
            r"was traced with the inputs \(\*\); got \(\*, \*\); \* is a tensor",
        ),
    ):
        with pytest.raises(fp.BatchError, match=message):
            fp.run(forwards_of(made, 1), made.params, x)


def test_params_of_another_stage():
    made = cut(chain())
    with pytest.raises(fp.PlanError, match=r"(?s)params has 'b.weight'.*lacks 'a.weight'"):
        made.stages[0](made.params[1], inputs())


def test_traced_stages_pickle_and_copy():
    """With their draws, regions and ties: the copy computes the same bits."""

    def forward(s, x):
        with torch.no_grad():
            gate = s.a(x).sigmoid()
        return s.b(s.drop(s.norm(x * gate)))

    model = net(forward, drop=nn.Dropout(0.3), norm=nn.BatchNorm1d(8))
    made = cut(model, at=["drop"])
    batch = (inputs(), None)
    losses = set()
    rematted = lambda *sizes: fp.schedules.remat(fp.schedules.one_f_one_b(*sizes))
    for one in (made, pickle.loads(pickle.dumps(made)), copy.deepcopy(made)):
        plan = plan_of(one, family=rematted)
        losses.add(float(fp.run(plan, one.params, batch, state=one.state, seed=1).loss))
        fp.testing.assert_matches_sequential(plan, one.params, batch, state=one.state, seed=1)
    assert len(losses) == 1


def test_traced_stages_under_transforms():
    """apply over them is a function that torch.func differentiates."""
    model = net(lambda s, x: s.b(s.a(x).tanh()))
    made, x = cut(model), inputs()
    grads = torch.func.grad(lambda params: square(fp.apply(made.stages, params, x, train=True).y))(
        made.params
    )
    square(model(x)).backward()
    torch.testing.assert_close(grads[0]["a.weight"], model.a.weight.grad)


# -- what a check must not pass
# -------------------------------------------------------------------------------


def test_batch_norm_by_hand_is_a_written_buffer():
    """Its update is one by the mean of what the microbatches wrote; the split's own state stays."""

    def forward(s, x):
        return s.b(F.batch_norm(s.a(x), s.mean, s.var, None, None, s.training, 0.1))

    model = net(forward, mean=torch.zeros(8), var=torch.ones(8))
    made = cut(model)
    assert torch.equal(made.state[0]["mean"], model.mean)
    batch = inputs()
    state = fp.run(plan_of(made), made.params, (batch, None), state=made.state).state
    torch.testing.assert_close(state[0]["mean"], 0.1 * model.a(batch).mean(0))
    assert not made.state[0]["mean"].any()


@pytest.mark.parametrize("kind", ["spectral", "instance"])
def test_buffers_written_by_operations_that_do_not_say_so(kind):
    """Power iteration writes by out=, instance norm does not declare its writes."""
    if kind == "spectral":
        model = net(lambda s, x: s.b(s.a(x).relu()))
        nn.utils.parametrizations.spectral_norm(model.a)
    else:
        model = net(
            lambda s, x: s.b(s.n(s.a(x)[:, None]).flatten(1)),
            n=nn.InstanceNorm1d(1, track_running_stats=True),
        )
    made = cut(model)
    result = fp.run(plan_of(made), made.params, (inputs(), None), state=made.state)
    assert any(
        not torch.equal(result.state[0][name], old)
        for name, old in made.state[0].items()
        if old.dim()
    )


def test_a_branch_on_one_row_is_refused_at_run_time():
    """Export takes one row for no number of rows."""
    made = cut(net(lambda s, x: s.b(s.a(x) * (2.0 if x.shape[0] == 1 else 1.0))))
    plan = plan_of(made, 3)
    fp.run(plan, made.params, (inputs(6), None))
    with pytest.raises(fp.BatchError, match="the trace is valid for 2 to"):
        fp.run(plan, made.params, (inputs(3), None))


def test_buffers_that_share_memory():
    table = torch.zeros(8)
    model = net(lambda s, x: (s.u.add_(1.0), s.b(s.a(x) + s.v))[1], u=table, v=table.view(8))
    with pytest.raises(fp.PlanError, match=r"buffers \['u', 'v'\] share memory"):
        cut(model)


def test_the_other_mode_is_compared_with_gradients_and_buffers():
    def counts(s, x):
        if s.training:
            s.average.mul_(0.9).add_(x.detach().mean(0))
        return s.b(s.a(x))

    def detaches(s, x):
        h = s.a(x)
        return s.b(h if s.training else h.detach())

    average = {"average": fp.models.mean_by_rows}
    for model, same in ((net(counts, average=torch.zeros(8)), True), (net(detaches), False)):
        made = cut(model, commit=average if same else None)
        evaluate = plan_of(made, train=False)
        if same:  # nothing is committed in evaluation, so the average stays, as the model's does
            result = fp.run(evaluate, made.params, (inputs(), None), state=made.state)
            assert not result.state[0]["average"].any()
        else:
            with pytest.raises(fp.PlanError, match="cannot run in evaluation mode"):
                fp.run(evaluate, made.params, (inputs(), None), state=made.state)
        still = cut(model.eval(), commit=average if same else None)
        x = inputs()
        result = fp.run(plan_of(still), still.params, (x, None), state=still.state)
        grads = torch.autograd.grad(
            square(model(x), None), list(model.parameters()), allow_unused=True
        )
        for (name, _), wanted in zip(model.named_parameters(), grads, strict=True):
            found = next((tree[name] for tree in result.grads if name in tree), None)
            torch.testing.assert_close(found, torch.zeros_like(found) if wanted is None else wanted)


def test_small_and_complex_gradients_are_compared():
    def hooked(s, x):
        h = s.a(x)
        if h.requires_grad:
            h.register_hook(lambda grad: grad * 0)
        return h

    small = net(lambda s, x: {"loss": 1e-6 * s.b(hooked(s, x)).pow(2).mean()}).float()
    spectrum = net(lambda s, x: torch.fft.fft(s.b(hooked(s, x))))
    for model, example in ((small, inputs().float()), (spectrum, inputs())):
        with pytest.raises(fp.PlanError, match="gradient of a.weight"):
            cut(model, example=example)


def test_outputs_that_are_words():
    made = cut(net(lambda s, x: {"y": s.b(s.a(x)), "kind": "linear"}), check=False)
    plan = forwards_of(made, train=True)
    assert fp.run(plan, made.params, inputs()).outputs["kind"] == "linear"


@pytest.mark.parametrize(
    ("register", "message"),
    [
        (
            lambda model: model.a.weight.register_hook(lambda grad: grad * 0),
            "a.weight has hooks on its gradient",
        ),
        (
            lambda model: model.register_forward_hook(lambda module, args, y: y * 2),
            "the model itself has forward hooks",
        ),
        (
            lambda model: model.a.register_full_backward_hook(lambda *_: None),
            "hooks on the backward of modules",
        ),
    ],
    ids=["gradient", "forward", "backward"],
)
def test_hooks_that_a_run_does_not_call(register, message):
    model = chain()
    register(model)
    with pytest.raises(fp.PlanError, match=message):
        cut(model)


def test_loose_parameters_are_named():
    model = net(lambda s, x: s.b(s.a(x) * s.loose[0]))
    model.loose = [nn.Parameter(torch.ones(8))]
    with pytest.raises(
        fp.PlanError, match="loose contains parameters that are not registered in the model"
    ):
        cut(model)


def test_caches_of_the_model_keep_numbers():
    """A table that is made once is made before the trace, not by it."""
    tables = {}

    def forward(s, x):
        table = tables.setdefault("mask", torch.ones(8, 8).tril())
        return s.b(s.a(x) @ table)

    model = net(forward)
    same_as_eager(model)
    assert type(model(inputs())) is torch.Tensor
    assert type(tables["mask"]) is torch.Tensor


def test_from_several_threads():
    failures = []

    def go():
        try:
            assert len(cut(net(lambda s, x: s.b(s.a(x).relu())))) == 2
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=go) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_batch_norm_that_runs_twice():
    """One update by all that it saw; in two stages it has none."""
    model = net(lambda s, x: s.b(s.n(s.a(s.n(s.a(x))))), n=nn.BatchNorm1d(8))
    made = same_as_eager(model, at=["b"])
    assert made.stages[0].commit is not None
    with pytest.raises(fp.PlanError, match=r"buffer 'n.running_mean', which .* stages \[0, 1\]"):
        cut(model, at={"a@1": "before"})


@pytest.mark.parametrize("rows", [0, 1])
def test_examples_of_one_row(rows):
    with pytest.raises(fp.PlanError, match="at least two rows"):
        cut(chain(), example=inputs(rows))


def test_frozen_parameters_have_no_gradient_to_merge():
    model = chain()
    model.a.requires_grad_(False)
    made = cut(model)
    grads = made.merge(fp.run(plan_of(made), made.params, (inputs(), None)).grads)
    assert sorted(grads) == ["b.bias", "b.weight"]


def test_autocast_regions_follow_the_device():
    from funcpipe._src.models.traced.traced import retarget

    def forward(s, x):
        with torch.autocast(x.device.type, dtype=torch.bfloat16):
            h = s.a(x)
        return s.b(h.to(x.dtype))

    made = cut(net(forward).float(), example=inputs().float())
    graph = retarget(made.stages[0].fn.module, torch.device("cpu"), torch.device("meta")).graph
    region = next(node for node in graph.nodes if "autocast" in str(node.target))
    assert region.args[0] == "meta"


def test_a_sliced_example_with_rows_along_axis_1():
    """The slice has gaps; the trace must not fix its number of rows."""
    model = nn.Sequential(nn.LSTM(4, 4), Outputs(), nn.Linear(4, 2))
    x = torch.randn(5, 7, 4)
    split = fp.split(model, 2, example=fp.Axis(x[:, :3], 1))
    result = fp.run(plan_of(split, 3), split.params, (fp.Axis(x, 1), None))
    torch.testing.assert_close(result.loss, model(x).square().mean().detach())


class Outputs(nn.Module):
    def forward(self, pair):
        return pair[0]


def test_sparse_gradients_are_compared():
    model = nn.Sequential(nn.Embedding(9, 4, sparse=True), nn.Flatten(), nn.Linear(12, 2))
    ids, target = torch.randint(0, 9, (6, 3)), torch.randn(6, 2)
    split = fp.split(model, 2, example=ids[:4])
    plan = plan_of(split, 3, loss=F.mse_loss)
    result = fp.run(plan, split.params, (ids, target))
    F.mse_loss(model(ids), target).backward()
    found = split.merge(result.grads)
    torch.testing.assert_close(found["0.weight"].to_dense(), model[0].weight.grad.to_dense())
