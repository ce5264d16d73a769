"""Careless stages: what is no stage function, what a loop makes of closures, and what a stage
computes besides."""

import copy
import functools

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from small import batch, equals_plain, parts, plan_of, refused, squares

import funcpipe as fp

X, ZEROS = torch.ones(8, 4), torch.zeros(8, 4)
W = {"w": torch.eye(4)}


class Net:
    """No module: its method is the function."""

    def forward(self, params, x):
        return x @ params["w"]


def yields(params, x):
    yield x @ params["w"]


async def waits(params, x):
    return x @ params["w"]


def scaled(params, x, *, scale):
    return x * scale


@pytest.mark.parametrize(
    ("function", "mend"),
    [
        (
            nn.Linear,
            r"Linear is a class; make a stage from an instance: fp.from_module\(Linear\(...\)\)",
        ),
        (Net, r"Net is a class.*fp.stage\(Net\(...\)\)"),
        (nn.Linear(4, 4), "stage, params, state = fp.from_module"),
        (fp.stage(Net().forward), "'forward' is a stage already"),
        (lambda x: x, r"takes 1 arguments by position, but is called with two, fn\(params, x\)"),
        (Net.forward, r"takes self: give the method of an instance, fp.stage\(net.method\)"),
        (scaled, r"needs 'scale' besides params and x.*functools.partial\(fn, scale=...\)"),
        (lambda params, x, mask: x, "needs 'mask' besides params and x.*feeds="),
        (yields, "'yields' yields, so a call of it computes nothing; .* returns its output"),
        (waits, "'waits' is async, so a call of it computes nothing"),
        (torch.eye(4), "a stage is made of a function .* got a Tensor"),
    ],
)
def test_what_is_no_function_of_params_and_x_is_refused_where_the_stage_is_made(function, mend):
    with refused(mend):
        fp.stage(function)


@pytest.mark.parametrize(
    "function",
    [
        Net().forward,
        functools.partial(scaled, scale=1.0),
        lambda params, x, scale=1.0: x @ params["w"] * scale,
        lambda *args: args[1] @ args[0]["w"],
        lambda params, x, **extras: x @ params["w"],
        torch.compile(lambda params, x: x @ params["w"], backend="eager"),
    ],
)
def test_other_forms_of_such_functions_are_fine(function):
    x = torch.randn(8, 4)
    plan = fp.make_plan(
        [fp.stage(function)], fp.schedules.fill_drain(1, 2, backward=False), devices="cpu"
    )
    assert torch.equal(x, fp.run(plan, (W,), x).outputs)


@pytest.mark.parametrize("word", ["stash", "pop", "feeds"])
def test_one_string_is_not_a_row_of_names(word):
    with refused(rf"{word}='mask': give a sequence of names, {word}=\['mask'\]"):
        fp.stage(lambda params, x, **extras: x, **{word: "mask"})
    if word == "feeds":
        with refused(r"feeds=\['mask'\]"):
            fp.from_module(nn.Linear(4, 4), feeds="mask")


@pytest.mark.parametrize(
    ("values", "told"),
    [
        (
            [1.0, 10.0, 100.0],
            r"stage 0 and others are one function, made in a loop.*'s' was 1.0 .* is 100.0 now",
        ),
        ([torch.tanh, torch.relu], "'s' was tanh when the stage was made, and is relu now"),
        (
            [nn.ReLU(), nn.Tanh()],
            r"'s' was ReLU\(\) .* is Tanh\(\) now.*bind the variable by a default",
        ),
        ([torch.ones(4), torch.zeros(4)], r"'s' was .* when the stage was made"),
        ([{"scale": 1.0}, {"scale": 2.0}], "'s' was {'scale': 1.0}"),
    ],
)
def test_functions_made_in_a_loop_that_read_its_variable_are_refused(values, told):
    stages = []
    for s in values:
        stages.append(fp.stage(lambda params, x: (x, s)))
    with refused(told):
        fp.make_plan(stages, fp.schedules.fill_drain(len(stages), 2))
    with refused("made in a loop, that reads a variable when it runs"):
        fp.make_plan([fp.compose(*stages)], fp.schedules.fill_drain(1, 2))


def test_so_are_those_that_read_a_global_one():
    names: dict = {"fp": fp}
    exec(
        "stages = []\nfor k in (2.0, 3.0):\n    @fp.stage\n    def one(params, x): return x * k\n  "
        "  stages.append(one)",
        names,
    )
    with refused(r"stage 0 \('one'\) and others .* 'k' was 2.0"):
        fp.make_plan(names["stages"], fp.schedules.fill_drain(2, 2))


def test_loops_that_hold_their_variable_are_right():
    def made(s):
        return fp.stage(lambda params, x: x * s)

    held = [fp.stage(lambda params, x, s=s: x * s) for s in (1.0, 10.0, 100.0)]
    bound = [fp.stage(functools.partial(scaled, scale=s)) for s in (1.0, 10.0, 100.0)]
    for stages in (held, bound, [made(s) for s in (1.0, 10.0, 100.0)]):
        plan = fp.make_plan(stages, fp.schedules.fill_drain(3, 2, backward=False), devices="cpu")
        assert torch.equal(X * 1000, fp.run(plan, ((), (), ()), X).outputs)


def test_values_that_are_the_same_or_change_after_the_plan_was_made_are_no_fault():
    stages = []
    for act in (nn.ReLU(), nn.ReLU()):
        stages.append(fp.stage(lambda params, x: act(x)))
    fp.make_plan(stages, fp.schedules.fill_drain(2, 2))
    temperature = 1.0
    cooling = [fp.stage(lambda params, x: x * temperature) for _ in range(2)]
    fp.make_plan(cooling, fp.schedules.fill_drain(2, 2))
    temperature = 0.5
    plan = fp.make_plan(cooling, fp.schedules.fill_drain(2, 2, backward=False), devices="cpu")
    assert torch.equal(X / 4, fp.run(plan, ((), ()), X).outputs)


def shared(block):
    stage = fp.stage(
        lambda params, x: torch.func.functional_call(block, params, (x,)), name="block"
    )
    params = tuple(
        {name: torch.randn_like(one) for name, one in block.named_parameters()} for _ in range(3)
    )
    return (
        plan_of([stage] * 3, count=8, loss=F.mse_loss),
        params,
        (torch.randn(64, 4), torch.randn(64, 4)),
    )


def test_one_module_called_with_the_parameters_of_several_lanes_is_run_by_one_thread():
    """`functional_call` puts parameters into the module: two lanes would compute with each
    other's."""
    plan, params, given = shared(nn.Linear(4, 4))
    result, expected = fp.run(plan, params, given), fp.run_sequential(plan, params, given)
    assert result.stats.executor == "serial"
    assert "the module 'block', which stages of lanes [0, 1, 2] call" in result.stats.reason
    assert all(map(torch.equal, fp.leaves(result.grads), fp.leaves(expected.grads)))
    for executor in ("threads", fp.lanes(plan)):
        with refused(r"executor='serial'; or give each stage .* copy.deepcopy\(module\)"):
            fp.run(plan, params, given, executor=executor)


def test_a_copy_for_each_stage_runs_in_threads():
    block = nn.Linear(4, 4)
    blocks = [copy.deepcopy(block) for _ in range(2)]
    stages = [
        fp.stage(lambda p, x, own=own: torch.func.functional_call(own, p, (x,))) for own in blocks
    ]
    params = tuple(
        {name: torch.randn_like(one) for name, one in block.named_parameters()} for _ in range(2)
    )
    assert (
        fp.run(
            plan_of(stages, loss=F.mse_loss), params, (X, ZEROS), executor="threads"
        ).stats.executor
        == "threads"
    )


def backward_of_a_sum(params, x):
    y = x + params["w"][0]
    y.sum().backward()  # nothing is saved for it, so torch allows the second one
    return y


def backward_that_retains(params, x):
    y = x @ params["w"]
    y.sum().backward(retain_graph=True)
    return y


def backward_that_frees(params, x):
    y = x @ params["w"]
    y.square().sum().backward()
    return y


@pytest.mark.parametrize(
    "function", [backward_of_a_sum, backward_that_retains, backward_that_frees]
)
def test_a_stage_that_calls_backward_itself_is_refused(function):
    with refused(r"calls backward itself, but the run calls backward"):
        squares(function, {"w": torch.eye(4)})
    plan = plan_of([fp.stage(function)], loss=F.mse_loss)
    with refused("calls backward itself"):
        fp.run_sequential(plan, ({"w": torch.eye(4)},), (X, ZEROS))


def through_numpy(params, x):
    return torch.as_tensor((x @ params["w"]).detach().numpy())


@torch.no_grad()
def under_no_grad(params, x):
    return x @ params["w"]


@pytest.mark.parametrize(
    "function", [through_numpy, under_no_grad, lambda p, x: x @ p["w"].detach()]
)
def test_where_no_parameter_gets_a_gradient_the_run_says_so(function):
    with refused(r"no gradient reached any parameter.*schedule.forwards\(\)"):
        squares(function, {"w": torch.eye(4)})


def test_where_some_get_none_the_result_lists_them():
    stages = [fp.stage(through_numpy), fp.stage(lambda params, x: x @ params["w"])]
    params = ({"w": torch.eye(4)}, {"w": torch.eye(4)})
    plan = plan_of(stages, loss=F.mse_loss)
    assert fp.run(plan, params, (X, ZEROS)).unused == ((0, "w"),)
    with refused("'w' of stage 0"):
        fp.run(plan, params, (X, ZEROS), check="used")


def test_python_state_is_found_by_check_stage():
    from funcpipe.testing import CheckError, check_stage

    calls = []

    @fp.stage
    def counts(params, x):
        calls.append(1)
        return x @ params["w"] * len(calls)

    with pytest.raises(CheckError, match=r"changes len\(calls\), which it closes over"):
        check_stage(counts, W, X)


def test_compose_and_apply_take_stages():
    whole, stages, params = parts()
    x, _ = batch()
    with refused(r"compose takes stages, compose\(first, second\); got other objects: list"):
        fp.compose(list(stages))
    with refused("got other objects: function; make stages with fp.stage"):
        fp.compose(lambda params, x: x)
    plan = plan_of(stages)
    for given, came in (
        (plan, "Plan"),
        (whole, "Linear, Tanh, Linear"),
        (lambda params, x: x, "function"),
    ):
        with refused(rf"apply takes stages, apply\(\[first, second\].*got other objects: {came}"):
            fp.apply(given, params, x)
    one, own, _ = fp.from_module(nn.Linear(4, 4))
    assert fp.apply(one, [own], x).y.shape == (8, 4)
    with refused("params has 2 trees for 1 stages"):
        fp.apply(one, own, x)


def test_params_of_a_composition_are_one_tuple():
    both = fp.compose(fp.stage(Net().forward, name="a"), fp.stage(Net().forward, name="b"))
    plan = plan_of([both], loss=F.mse_loss)
    with refused(
        r"composition of 2 stages \(a, b\) must be a tuple with one tree per stage; got a dict"
    ):
        fp.run(plan, (W,), (X, ZEROS))
    with refused(r"got 2; for one stage that is \(params,\)"):
        fp.run(plan, (W, W), (X, ZEROS))


def test_modules_in_wrappers_are_modules():
    whole = parts()[0]
    given = batch()
    for wrapped in (torch.compile(whole, backend="eager"), nn.DataParallel(whole)):
        stage, params, _ = fp.from_module(wrapped)
        result = fp.run(plan_of([stage]), (params,), given)
        inner = next(iter(params)).split(".")[0]
        found = ({name.removeprefix(f"{inner}."): one for name, one in result.grads[0].items()},)
        equals_plain(
            whole,
            given,
            fp.run(plan_of([stage]), (params,), given).__class__(
                **{**vars(result), "grads": found}
            ),
        )
