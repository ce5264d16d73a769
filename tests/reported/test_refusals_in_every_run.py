"""Every run raises the same errors, before any number is used, and changes nothing of the
caller's."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from common import cpu_plan
from torch import nn

import funcpipe as fp
from funcpipe import schedules as S


def plan_of(stages, loss=F.mse_loss, microbatches=2, **options):
    schedule = S.one_f_one_b(len(stages), microbatches)
    return fp.make_plan(stages, schedule, loss=loss, devices="cpu", **options)


class InAList(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.blocks = nn.Linear(4, 4), [nn.Linear(4, 4)]

    def forward(self, x):
        return self.blocks[0](self.linear(x))


class InADict(InAList):
    def __init__(self):
        super().__init__()
        self.table = {"scales": [torch.ones(4, requires_grad=True)]}

    def forward(self, x):
        return self.linear(x) * self.table["scales"][0]


class AsAnAttribute(InAList):
    def __init__(self):
        super().__init__()
        self.scale = torch.ones(4, requires_grad=True)

    def forward(self, x):
        return self.linear(x) * self.scale


@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize(
    ("kind", "name"), [(InAList, "blocks"), (InADict, "table"), (AsAnAttribute, "scale")]
)
def test_trainable_tensors_that_a_module_hides_are_refused_in_every_run(kind, name, microbatches):
    x = torch.randn(8, 4)
    stage, params, _ = fp.from_module(kind(), name="hidden")
    for _ in range(3):
        with pytest.raises(
            fp.PlanError, match=rf"(?s)they would not be trained.*{name}.*: float32 \[4"
        ):
            fp.run(plan_of([stage], microbatches=microbatches), (params,), (x, x))
    split = fp.split(nn.Sequential(kind(), nn.Linear(4, 4)), 2)
    for _ in range(3):
        with pytest.raises(fp.PlanError, match="they would not be trained"):
            fp.run(plan_of(split.stages, microbatches=microbatches), split.params, (x, x))


def test_a_closure_that_is_used_from_a_later_run_on_is_refused_then():
    weight, runs = torch.ones(4, requires_grad=True), [0]
    stage = fp.stage(lambda p, x: x @ p * (weight if runs[0] > 1 else 1.0))
    params, x = (torch.eye(4),), torch.randn(8, 4)
    for runs[0] in (0, 1):
        fp.run(plan_of([stage]), params, (x, x), trainable=True)
    for runs[0] in (2, 3):
        with pytest.raises(
            fp.PlanError, match=r"(?s)they would not be trained.*weight: float32 \[4\]"
        ):
            fp.run(plan_of([stage]), params, (x, x), trainable=True)


def test_leaves_that_a_forward_makes_itself_are_fine():
    def slope(params, x):
        leaf = x.detach().requires_grad_()
        (inner,) = torch.autograd.grad((leaf @ params).square().sum(), leaf, create_graph=True)
        return inner

    for _ in range(2):
        fp.run(
            plan_of([fp.stage(slope)], microbatches=3),
            (torch.eye(4),),
            (torch.randn(9, 4),) * 2,
            trainable=True,
        )


# -- parameters of the loss
# -------------------------------------------------------------------------------


class Scaled(nn.Module):
    def __init__(self, *, inside):
        super().__init__()
        self.inside, self.k = inside, nn.Parameter(torch.ones(()))

    def forward(self, y, t):
        return F.mse_loss(y * self.k, t) if self.inside else F.mse_loss(y, t) + self.k**2


@pytest.mark.parametrize("marked", [False, True])
@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("inside", [False, True])
def test_a_loss_with_parameters_of_its_own_is_refused_in_every_run(inside, wrapped, marked):
    own = Scaled(inside=inside)
    loss = (lambda y, t: own(y, t)) if wrapped else own
    params, x = ({"w": torch.randn(4, 4, requires_grad=marked)},), torch.randn(8, 4)
    stage = fp.stage(lambda p, x: x @ p["w"])
    for _ in range(2):
        with pytest.raises(fp.PlanError, match="the loss has its own parameters"):
            fp.run(plan_of([stage], loss), params, (x, x))
    assert own.k.grad is None
    own.requires_grad_(False)
    fp.run(plan_of([stage], loss), params, (x, x))


# -- writes
# -------------------------------------------------------------------------------


WRITES = {
    "in place": lambda w: w.detach().mul_(2),
    "data": lambda w: w.data.mul_(2),
    "numpy": lambda w: w.detach().numpy().__imul__(2),
    "storage": lambda w: w.untyped_storage().fill_(0),
}


@pytest.mark.parametrize("name", WRITES)
def test_a_write_into_parameters_is_refused_in_every_run_and_changes_nothing(name):
    runs = [0]

    def writes(params, x):
        if runs[0] > 1:
            WRITES[name](params["w"])
        return x @ params["w"]

    params, x = ({"w": torch.eye(2)},), torch.ones(2, 2)
    stage = fp.stage(writes)
    for runs[0] in (0, 1):
        fp.run(plan_of([stage], microbatches=1), params, (x, x), trainable=True)
    for runs[0] in (2, 3):
        with pytest.raises(
            fp.PlanError, match=r"wrote into its parameters(.|\n)*params\[0\]\['w'\]"
        ):
            fp.run(plan_of([stage], microbatches=1), params, (x, x), trainable=True)
        assert torch.equal(params[0]["w"], torch.eye(2))


@pytest.mark.parametrize("name", WRITES)
@pytest.mark.parametrize("kind", ["function", "module"])
def test_a_write_into_a_state_is_refused_in_every_run_and_changes_nothing(kind, name):
    """The first microbatch would change what the second one computes with."""
    runs = [0]

    def writes(params, x, *, state):
        if runs[0] > 1:
            WRITES[name](state["w"])
        return x @ (params["p"] + state["w"])

    class Writes(nn.Module):
        def __init__(self):
            super().__init__()
            self.p = nn.Parameter(torch.zeros(2, 2))
            self.register_buffer("w", torch.eye(2))

        def forward(self, x):
            return writes({"p": self.p}, x, state={"w": self.w})

    x = torch.ones(4, 2)
    stage, params, state = fp.stage(writes), {"p": torch.zeros(2, 2)}, {"w": torch.eye(2)}
    if kind == "module":
        stage, params, state = fp.from_module(Writes())
    for runs[0] in (0, 1):
        fp.run(plan_of([stage]), (params,), (x, x), state=(state,), trainable=True)
    for runs[0] in (2, 3):
        with pytest.raises(
            fp.PlanError, match=r"writes into its (state|buffers)|wrote into its state(.|\n)*'w'\]"
        ):
            fp.run(plan_of([stage]), (params,), (x, x), state=(state,), trainable=True)
        assert torch.equal(state["w"], torch.eye(2))


def test_an_optimizer_steps_the_callers_parameters_after_a_run():
    """The copies that guard parameters end with the run."""
    params, x = ({"w": torch.eye(2)},), torch.ones(4, 2)
    optimizer = torch.optim.SGD(fp.leaves(params), lr=0.1)
    address = params[0]["w"].data_ptr()
    for _ in range(2):
        fp.step(
            optimizer,
            params,
            fp.run(
                plan_of([fp.stage(lambda p, x: x @ p["w"])]), params, (x, 2 * x), trainable=True
            ),
        )
    assert address == params[0]["w"].data_ptr()
    assert not torch.equal(params[0]["w"], torch.eye(2))


def test_an_input_that_is_kept_for_the_next_microbatch_is_refused():
    kept = []

    def remembers(params, x):
        y = torch.tanh(x @ params) + (kept[-1].mean() if kept else 0.0)
        kept.append(x)
        return y

    first = fp.stage(lambda p, x: torch.tanh(x @ p))
    for schedule in (S.one_f_one_b(2, 4), S.fill_drain(2, 4)):
        kept.clear()
        plan = cpu_plan([first, fp.stage(remembers)], schedule)
        params, x = (torch.eye(4), torch.eye(4)), torch.randn(12, 4)
        for _ in range(2):
            with pytest.raises(
                fp.PlanError, match="an input that it kept from an earlier microbatch"
            ):
                fp.run(plan, params, (x, x), trainable=True)


@pytest.mark.parametrize("family", [S.fill_drain, S.one_f_one_b])
def test_a_tensor_that_is_rewritten_after_it_was_handed_on_is_refused(family):
    """The stage keeps a mask; in a lane by itself the next microbatch always comes first."""
    mask = torch.zeros(3, 4)

    def first(params, x):
        return x @ params, mask.copy_(x > 0)

    stages = [fp.stage(first), fp.stage(lambda p, pair: (pair[0] * pair[1]) @ p)]
    plan = cpu_plan(stages, family(2, 4))
    params, x = (torch.eye(4), torch.eye(4)), torch.randn(12, 4)
    for _ in range(2):
        with pytest.raises(fp.PlanError, match="wrote into a tensor after it had handed it on"):
            fp.run(plan, params, (x, x), trainable=True, executor="serial")


def test_a_table_that_is_handed_on_unchanged_is_fine():
    table = torch.ones(3, 4)
    stages = [
        fp.stage(lambda p, x: (x @ p, table)),
        fp.stage(lambda p, pair: (pair[0] * pair[1].mul_(2)) @ p),
    ]
    plan = cpu_plan(stages, S.fill_drain(2, 4))
    params, x = (torch.eye(4), torch.eye(4)), torch.randn(12, 4)
    torch.testing.assert_close(
        fp.run(plan, params, (x, x), trainable=True).loss, F.mse_loss(2 * x, x)
    )


class Fork(nn.Module):
    def forward(self, x):
        return x, x


class Joins(nn.Module):
    def __init__(self, *, inplace, views=False):
        super().__init__()
        self.inplace, self.views, self.linear = inplace, views, nn.Linear(4, 4)

    def forward(self, pair):
        trunk, skip = pair
        return self.linear(F.relu(trunk, inplace=self.inplace)) + skip


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("views", [False, True])
def test_numbers_do_not_depend_on_a_cut_between_two_hands_and_an_in_place_layer(views, compiled):
    """Plain torch changes the skip as well; a cut there would not."""
    x = torch.randn(8, 4)
    for inplace in (False, True):
        model = nn.Sequential(nn.Linear(4, 4), Fork(), Joins(inplace=inplace))
        if views:
            model[1].forward = lambda x: (x, x.view(-1, 4))
        for balance in ([3], [1, 2], [2, 1]):
            split = fp.split(model, balance=balance)
            stages = (
                [fp.compile_stage(stage) for stage in split.stages] if compiled else split.stages
            )
            plan = plan_of(stages)
            if inplace and balance == [2, 1]:
                with pytest.raises(fp.PlanError, match="writes in place into a value whose memory"):
                    fp.run(plan, split.params, (x, x))
            else:
                result = fp.run(plan, split.params, (x, x))
                torch.testing.assert_close(result.loss, F.mse_loss(model(x.clone()), x).detach())


def test_a_skip_is_a_value_of_its_own():
    """An in-place layer behind the border changes its copy of the output, not the skip (law 3)."""

    def first(params, x):
        y = x @ params
        return fp.Out(y, stash={"skip": y})

    stages = [
        fp.stage(first, stash=["skip"]),
        fp.stage(lambda p, x: torch.relu_(x) @ p),
        fp.stage(lambda p, x, skips: x @ p + skips["skip"], pop=["skip"]),
    ]
    params, x = tuple(torch.eye(4) for _ in range(3)), torch.randn(8, 4)
    result = fp.run(plan_of(stages), params, (x, x), trainable=True)
    torch.testing.assert_close(result.loss, F.mse_loss(x.relu() + x, x))


def _adds(p):
    p.setdefault("z", p["w"] * 2)


def _adds_without_a_graph(p):
    p.setdefault("z", p["w"].detach() * 2)


def _replaces(p):
    p["w"] = p["w"] * 2


def _deletes(p):
    p.pop("b", None)


@pytest.mark.parametrize("change", [_adds, _adds_without_a_graph, _replaces, _deletes])
@pytest.mark.parametrize("refused_in", [1, 2, 3])
def test_a_stage_that_puts_other_values_into_its_params(change, refused_in):
    """In whichever run; the next microbatch would compute with them."""
    number = 0

    @fp.stage
    def stage(p, x):
        if number == refused_in:
            change(p)
        return x @ p.get("z", p["w"])

    params = ({"w": torch.eye(2), "b": torch.zeros(2)},)
    x = torch.ones(8, 2)
    plan = cpu_plan([stage], S.one_f_one_b(1, 4))
    for number in range(1, refused_in):  # noqa: B007
        fp.run(plan, params, (x, x), trainable=True)
    number = refused_in
    with pytest.raises(
        fp.PlanError, match="puts other values into its params|wrote into its parameters"
    ):
        fp.run(plan, params, (x, x), trainable=True)
    assert sorted(params[0]) == ["b", "w"]


class WritesIntoItsGradient(torch.autograd.Function):
    """The identity, whose backward doubles the gradient that it gets, in its memory."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        gradient.data.mul_(2)
        return gradient.clone()


@pytest.mark.parametrize("microbatches", [1, 4])
def test_a_backward_that_writes_into_the_gradient_of_the_loss(microbatches):
    """Each microbatch begins with a gradient of its own."""
    plan = plan_of(
        [fp.stage(lambda w, x: x * w)],
        loss=lambda y, target: WritesIntoItsGradient.apply(F.mse_loss(y, target)),
        microbatches=microbatches,
    )
    weight, x = torch.tensor(3.0), torch.ones(8, 2)
    for _ in range(3):
        result = fp.run(plan, (weight,), (x, torch.zeros(8, 2)), trainable=True)
        assert float(result.grads[0]) == 12.0
