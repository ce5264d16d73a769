"""Careless places: a run inside of torch.compile, of a loader's worker, of torch.func, of a stage; wrong options."""

import abc
import pickle

import pytest
import torch
from small import batch, setup, squares

import funcpipe as fp


@pytest.mark.parametrize("call", [fp.run, fp.run_sequential])
def test_inside_of_torch_compile_a_run_is_what_it_is(call):
    _, plan, params = setup()
    given = batch()

    def loss(params, given):
        return call(plan, params, given).loss * 2

    torch.testing.assert_close(torch.compile(loss, backend="eager")(params, given), call(plan, params, given).loss * 2)


class Runs(torch.utils.data.Dataset):
    """Somebody runs a model in a loader's worker."""

    def __init__(self, plan, params):
        self.plan, self.params = plan, params

    def __len__(self):
        return 1

    def __getitem__(self, index):
        return fp.run(self.plan, self.params, torch.ones(4, 3), executor="serial").outputs


class Losses(torch.utils.data.Dataset):
    """Somebody scores rows in a loader's worker."""

    def __init__(self, plan, params):
        self.plan, self.params = plan, params

    def __len__(self):
        return 2

    def __getitem__(self, index):
        torch.manual_seed(index)
        return fp.run(self.plan, self.params, batch(), executor="threads").loss


def test_inside_of_a_worker_of_a_loader():
    _, plan, params = setup()
    data = Losses(plan, params)
    expected = torch.stack([data[0], data[1]])
    loader = torch.utils.data.DataLoader(data, batch_size=2, num_workers=1, multiprocessing_context="fork", timeout=60)
    assert torch.equal(next(iter(loader)), expected)


class Scores(torch.nn.Module):
    def forward(self, x):
        raise KeyError("no such word")


def test_what_fails_inside_of_a_worker_of_a_loader_arrives():
    """As an error of the same kinds, at once; not as a loader that waits for ever."""
    stage, params, _ = fp.from_module(Scores())
    plan = fp.make_plan([stage], fp.fill_drain(1, 2, backward=False), devices="cpu")
    data = Runs(plan, (params,))
    loader = torch.utils.data.DataLoader(data, num_workers=1, multiprocessing_context="fork", timeout=60)
    with pytest.raises(KeyError, match="no such word") as caught:
        next(iter(loader))
    assert isinstance(caught.value, fp.StageError)
    assert pickle.loads(pickle.dumps(type(caught.value))) is type(caught.value)
    assert pickle.loads(pickle.dumps(fp.NotFiniteError)) is fp.NotFiniteError


class Abstract(ValueError, metaclass=abc.ABCMeta):
    pass


def test_an_error_whose_class_has_a_class_of_its_own_keeps_its_kind():
    @fp.stage
    def fails(params, x):
        raise Abstract("no")

    plan = fp.make_plan([fails], fp.fill_drain(1, 2, backward=False), devices="cpu")
    with pytest.raises(Abstract, match="no") as caught:
        fp.run(plan, ((),), torch.ones(4, 3), executor="serial")
    assert isinstance(caught.value, fp.StageError)


def test_run_inside_of_torch_func_or_of_a_stage_is_refused():
    _, plan, params = setup()
    given = batch()
    with pytest.raises(fp.FuncpipeError, match=r"transform fp.apply\(stages, params, inputs\)"):
        torch.func.grad(lambda params: fp.run(plan, params, given).loss)(params)
    with pytest.raises(fp.FuncpipeError, match="called inside of a stage of another run"):
        squares(lambda _, x: fp.run(plan, params, given).loss * x, ())


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"executor": "thread"}, "executor is 'threads', 'serial', fp.lanes"),
        ({"executor": 4}, "executor is 'threads'"),
        ({"check": "nan"}, "check is any of 'finite'"),
        ({"timeout": 0}, "timeout is a number of seconds above 0"),
        ({"threads_per_lane": 0}, "threads_per_lane is a positive int"),
    ],
)
def test_options_of_a_run_are_checked(options, told):
    _, plan, params = setup()
    with pytest.raises(fp.PlanError, match=told):
        fp.run(plan, params, batch(), **options)
