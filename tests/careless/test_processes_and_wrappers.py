"""What a user of several processes, of wrappers, or of a plan without a loss gets wrong: errors name
the call that helps."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import funcpipe as fp


def split_of(*layers):
    torch.manual_seed(0)
    return fp.split(nn.Sequential(*layers), 2)


def plan_of(split, schedule=None, loss=F.mse_loss):
    schedule = schedule or fp.schedules.one_f_one_b(2, 2)
    return fp.make_plan(split, schedule, loss=loss, devices="cpu")


X, Y = torch.randn(4, 3), torch.randn(4, 2)


@pytest.fixture
def split():
    return split_of(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))


@pytest.fixture
def normed():
    return split_of(nn.BatchNorm1d(3), nn.Linear(3, 2), nn.BatchNorm1d(2))


@pytest.mark.parametrize("stage", [0, 1])
def test_the_trees_of_one_rank_without_its_ranks(split, stage):
    params = tuple(tree if at == stage else None for at, tree in enumerate(split.params))
    with pytest.raises(
        fp.PlanError, match=r"None for stages \[\d\].*give executor=ranks"
    ) as caught:
        fp.run(plan_of(split), params, (X, Y))
    assert str([1 - stage]) in str(caught.value)


def test_the_state_of_one_rank_without_its_ranks(normed):
    with pytest.raises(
        fp.PlanError, match=r"state\[1\] is None; give its tree, or.*executor=ranks"
    ):
        fp.run(plan_of(normed), normed.params, (X, Y), state=(normed.state[0], None))


def test_functions_may_have_no_parameters():
    plan = fp.make_plan(
        [fp.stage(lambda params, x: x + 1), fp.stage(lambda params, x: 2 * x)],
        fp.schedules.one_f_one_b(2, 2).forwards(),
        devices="cpu",
        outputs=True,
    )
    assert torch.equal(fp.run(plan, (None, None), X).outputs, 2 * (X + 1))


def test_the_state_dict_of_one_rank(split):
    with pytest.raises(
        fp.PlanError, match=r"other ranks have some.*ranks=ranks\) on all"
    ) as caught:
        split.merge((None, split.params[1]))
    assert ["  * params[0] is None"] == str(caught.value).splitlines()[1:]


@pytest.mark.parametrize(
    ("wrap", "mend"),
    [
        (nn.DataParallel, r"without nn.DataParallel \(model.module\)"),
        (torch.compile, "before torch.compile, and compile stages with fp.compile_stage"),
    ],
)
def test_wrappers_of_a_model(wrap, mend):
    with pytest.raises(fp.PlanError, match=mend):
        fp.split(wrap(nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))), 2)


@pytest.mark.parametrize("batch", [({"x": X}, None), (X, Y), (X, None)])
def test_a_pair_for_a_plan_without_a_loss(split, batch):
    plan = plan_of(split, fp.schedules.one_f_one_b(2, 2).forwards(), loss=None)
    for executor in ("serial", "threads"):
        with pytest.raises(TypeError, match="must be Tensor") as caught:
            fp.run(plan, split.params, batch, executor=executor)
        assert any("the plan has no loss" in note for note in caught.value.__notes__)


def test_a_pair_that_is_right_and_an_error_of_another_stage_have_no_note():
    def fails(params, x):
        raise TypeError("mine")

    both = fp.stage(lambda params, x: x[0] + x[1])
    plan = fp.make_plan(
        [both, fp.stage(fails)], fp.schedules.one_f_one_b(2, 2).forwards(), devices="cpu"
    )
    with pytest.raises(TypeError, match="mine") as caught:
        fp.run(plan, ((), ()), (X, X))
    assert not any("no loss" in note for note in getattr(caught.value, "__notes__", ()))


def test_swapped_params_and_state(normed):
    with pytest.raises(fp.PlanError, match="if params and state are swapped, call run") as caught:
        fp.run(plan_of(normed), normed.state, (X, Y), state=normed.params)
    many = split_of(*[layer for _ in range(6) for layer in (nn.Linear(3, 3), nn.BatchNorm1d(3))])
    with pytest.raises(fp.PlanError, match="and 16 more") as caught:
        fp.run(plan_of(many), many.state, (X, X), state=many.params)
    assert 10 == len(str(caught.value).splitlines())
    state = ({**normed.state[0], "running_mean": nn.Parameter(torch.ones(3))}, normed.state[1])
    with pytest.raises(fp.PlanError, match="put it into params") as caught:
        fp.run(plan_of(normed), normed.params, (X, Y), state=state)
    assert "swapped" not in str(caught.value)


def test_lists_of_lists_that_are_shared_or_no_rows_are_given_whole():
    seen = []
    stage = fp.stage(lambda params, x: seen.append(x["table"]) or x["x"])
    plan = fp.make_plan([stage], fp.schedules.one_f_one_b(1, 2).forwards(), devices="cpu")
    for table in ([[1, 2], [3, 4], [5, 6]], [[X], [X], [X], [X]]):
        fp.run(plan, ((),), {"x": X, "table": table})
    assert [[1, 2], [3, 4], [5, 6]] == seen[0] == seen[1]
    assert [[2, 3]] * 4 == [[*piece.shape] for (piece,) in seen[2]]


def test_frozen_batch_norm_needs_its_state_but_does_not_change_it():
    split = split_of(nn.Linear(3, 2), nn.BatchNorm1d(2).eval())
    with pytest.raises(fp.PlanError, match="a batch needs the state of stage 1"):
        fp.run(plan_of(split), split.params, (X, Y))
    result = fp.run(plan_of(split), split.params, (X, Y), state=split.state)
    assert all(torch.equal(result.state[1][name], split.state[1][name]) for name in split.state[1])


@pytest.mark.parametrize("rows", [5, 3])
def test_one_row_of_images_is_enough_for_batch_norm(rows):
    """A microbatch of one image has many values per channel."""
    split = split_of(nn.Conv2d(3, 2, 1), nn.BatchNorm2d(2))
    x, y = torch.randn(rows, 3, 4, 4), torch.randn(rows, 2, 4, 4)
    plan = plan_of(split, fp.schedules.one_f_one_b(2, 4))
    result = fp.run(plan, split.params, (x, y), state=split.state)
    want = fp.run_sequential(plan, split.params, (x, y), state=split.state)
    assert torch.equal(result.loss, want.loss)


def test_an_int_is_the_index_of_a_device(split):
    plan = fp.make_plan(split, fp.schedules.one_f_one_b(2, 2), loss=F.mse_loss, devices=99)
    with pytest.raises(fp.PlacementError, match="99: .*an int is the index of a device|99"):
        fp.place(plan, split.params)


def test_swapped_stages_and_microbatches(split):
    with pytest.raises(fp.PlanError, match="which look swapped here"):
        plan_of(split, fp.schedules.one_f_one_b(4, 2))
    with pytest.raises(fp.PlanError, match="the schedule has 4 stages, but 2 are given") as caught:
        plan_of(split, fp.schedules.one_f_one_b(4, 3))
    assert "swapped" not in str(caught.value)


def test_a_plan_with_backwards_and_no_loss_names_the_schedule_of_the_documents(split):
    with pytest.raises(fp.PlanError, match=r"without backwards, schedule.forwards\(\)$"):
        fp.run(plan_of(split, loss=None), split.params, X)
