"""Careless places: a run inside of torch.compile, of a loader's worker, of torch.func, of a stage;
wrong options."""

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

    torch.testing.assert_close(
        torch.compile(loss, backend="eager")(params, given), call(plan, params, given).loss * 2
    )


class Loaded(torch.utils.data.Dataset):
    """Somebody calls a function for each row, in a loader's worker."""

    def __init__(self, work):
        self.work = work

    def __len__(self):
        return 2

    def __getitem__(self, index):
        return self.work(index)

    def rows(self):
        """Both, from a worker."""
        options = {
            "batch_size": 2,
            "num_workers": 1,
            "multiprocessing_context": "fork",
            "timeout": 60,
        }
        return next(iter(torch.utils.data.DataLoader(self, **options)))


def test_inside_of_a_worker_of_a_loader():
    _, plan, params = setup()

    def score(index):
        torch.manual_seed(index)
        return fp.run(plan, params, batch(), executor="threads").loss

    assert torch.equal(Loaded(score).rows(), torch.stack([score(0), score(1)]))


class Abstract(ValueError, metaclass=abc.ABCMeta):
    """An error whose class has a class of its own."""


@pytest.mark.parametrize("error", [KeyError, Abstract])
def test_what_fails_inside_of_a_worker_of_a_loader_arrives(error):
    """As an error of the same kinds, at once; not as a loader that waits for ever."""

    @fp.stage
    def fails(params, x):
        raise error("no such word")

    plan = fp.make_plan([fails], fp.schedules.fill_drain(1, 2, backward=False), devices="cpu")
    with pytest.raises(error, match="no such word") as caught:
        Loaded(lambda _: fp.run(plan, ((),), torch.ones(4, 3), executor="serial").outputs).rows()
    assert isinstance(caught.value, fp.StageError)
    assert pickle.loads(pickle.dumps(type(caught.value))) is type(caught.value)


def test_errors_that_are_not_made_at_run_time_are_pickled_by_name():
    for kind in (fp.StageError, fp.NotFiniteError):
        assert pickle.loads(pickle.dumps(kind)) is kind


def test_run_inside_of_torch_func_or_of_a_stage_is_refused():
    _, plan, params = setup()
    given = batch()
    with pytest.raises(fp.FuncpipeError, match=r"transform fp.apply\(stages, params, inputs\)"):
        torch.func.grad(lambda params: fp.run(plan, params, given).loss)(params)
    with pytest.raises(fp.FuncpipeError, match="called within a stage of another run"):
        squares(lambda _, x: fp.run(plan, params, given).loss * x, ())


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"executor": "thread"}, "executor is 'threads', 'serial', fp.lanes"),
        ({"executor": 4}, "executor is 'threads'"),
        ({"check": "nan"}, "check is any of 'finite'"),
    ],
)
def test_options_of_a_run_are_checked(options, told):
    _, plan, params = setup()
    with pytest.raises(fp.PlanError, match=told):
        fp.run(plan, params, batch(), **options)
