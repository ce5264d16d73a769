"""Careless use of what stands around a run: Pipe, split, compile, batches, schedules, costs,
pictures, testing."""

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from small import batch, equals_plain, model, parts, plan_of, refused, setup

import funcpipe as fp
from funcpipe.testing import FaultAt, assert_matches_sequential, check_stage

# -- Pipe
# -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"sequential": [nn.Linear(4, 4)]}, "must be an nn.Sequential.* got a list"),
        (
            {"chunks": [2, 1]},
            r"number of chunks must be positive integer; got \[2, 1\]; .* balance=\[2, 1\]",
        ),
        ({"balance": [1, 1, 1]}, r"too few devices .*devices=\['cpu'\] \* 3"),
    ],
)
def test_pipes_are_made_of_a_sequential(options, told):
    with pytest.raises(fp.FuncpipeError, match=told):
        fp.Pipe(**{"sequential": model(), "chunks": 2, "devices": ["cpu", "cpu"], **options})


def test_a_pipe_is_called_with_tensors_and_is_no_plan():
    pipe = fp.Pipe(model(), chunks=2, devices=["cpu", "cpu"])
    x, _ = batch()
    for strange in ("words", x.numpy()):
        with pytest.raises(fp.BatchError, match="a Pipe cuts its inputs along their rows"):
            pipe(strange)
    with refused(r"run takes a plan; got a Pipe"):
        fp.run(pipe, (), batch())


# -- split, from_module
# -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "options", "told"),
    [
        ((nn.Linear, 2), {}, "split takes an nn.Module; got a type"),
        (([nn.Linear(4, 4)], 2), {}, "split takes an nn.Module; got a list"),
        ((model(),), {}, "the number of stages is missing"),
        ((model(), 5), {}, "num_stages is 5, but the model has only 3 units"),
        ((model(), "2"), {}, "num_stages must be a positive int or None; got '2'"),
        ((model(), [2, 1]), {}, r"num_stages must be a positive int or None; got \[2, 1\]"),
        (
            (model(),),
            {"at": {"7": "before"}},
            r"the model has no layer of that name; there are 0, 1, 2",
        ),
        ((model(),), {"at": {"2": "front"}}, "must be 'before' or 'after'; got 'front'"),
        ((model(), 3), {"at": ["2"]}, "num_stages is 3, but the cuts make 2 stages"),
        ((model(), 2), {"ties": "copy"}, "ties must be 'replicate', 'transmit'"),
    ],
)
def test_cuts_that_cannot_be_made_are_refused(args, options, told):
    with refused(told):
        fp.split(*args, **options)


class TwoLayers(nn.Module):
    """No Sequential, no list of blocks."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return self.b(self.a(x))


def test_a_model_without_blocks_is_traced():
    with refused(r"trace it instead: fp.split\(model, ..., example=...\)"):
        fp.split(TwoLayers(), 2)


def test_a_split_is_not_its_params_nor_a_result():
    whole = model()
    split = fp.split(whole, 2)
    plan = fp.make_plan(split, fp.schedules.one_f_one_b(2, 2), loss=F.cross_entropy, devices="cpu")
    with refused(r"params is a tuple with one tree .* got a Split"):
        fp.run(plan, split, batch())
    result = fp.run(plan, split.params, batch())
    with refused(
        r"merge takes one tree for each stage: merge\(params, result.state\); got a Result"
    ):
        split.merge(result)
    with refused("'a' is not a name of the model"):
        split.load_state_dict({"a": torch.ones(1)})
    with refused(r"the plan has no loss, .* make_plan\(..., loss=fn\)"):
        fp.run(
            fp.make_plan(split, fp.schedules.one_f_one_b(2, 2), devices="cpu"),
            split.params,
            batch(),
        )


def test_from_module_takes_a_module_that_is_there():
    for strange, told in (
        (nn.Linear, "got a type"),
        ([nn.Linear(4, 4)], "got a list"),
        (F.relu, r"fp.stage\(fn\)"),
    ):
        with refused(f"from_module takes an nn.Module; .*{told}"):
            fp.from_module(strange)
    with refused("are not initialised yet; call the module once on an example first"):
        fp.from_module(nn.LazyLinear(4))


# -- compile, lanes, graphs
# -------------------------------------------------------------------------------


def test_compile_and_programs_take_stages():
    whole, plan, params = setup()
    for strange in (whole, plan, list(plan.stages), lambda params, x: x):
        with refused("compile_stage takes a stage; got a"):
            fp.compile_stage(strange)
    for strange in (plan.stages[0], plan):
        with refused(r"programs takes a compiled stage: fp.compile_stage\(stage\)"):
            fp.make_programs(strange, params[0], batch()[0])
    with refused("backend is one of"):
        fp.compile_stage(plan.stages[0], backend="tensorrt")
    twice = plan_of([fp.compile_stage(fp.compile_stage(one)) for one in plan.stages])
    given = batch()
    equals_plain(whole, given, fp.run(twice, params, given))
    assert fp.warmup(plan, params, given) == 0  # nothing is compiled


def test_lanes_and_graphs_of_other_plans_or_after_their_end_are_refused():
    _, plan, params = setup()
    _, other, _ = setup()
    told = r"these graphs were made for another plan; make graphs for this one: fp.graphs\(plan\)"
    with fp.graphs(plan) as graphs, refused(told):
        fp.run(other, params, batch(), executor=graphs)
    with fp.lanes(plan) as lanes:
        pass
    for ended in (graphs, lanes):
        with pytest.raises(
            fp.FuncpipeError, match="are closed; call fp.run within their with block"
        ):
            fp.run(plan, params, batch(), executor=ended)


# -- batches on their way
# -------------------------------------------------------------------------------


def yields(x):
    yield x


async def waits(x):
    return x


@pytest.mark.parametrize(
    ("stages", "told"),
    [
        (
            [yields],
            "stage 0: 'yields' yields, so a call computes nothing; use a function that returns",
        ),
        ([fp.batches.BatchStage(waits)], "stage 0: 'waits' is async"),
        (
            [fp.stage(lambda params, x: x)],
            r"stage 0 is a stage of a plan; .* lambda batch: fp.run\(plan, params, batch\)",
        ),
        ([fp.batches.Fold(0, lambda s, x: (s, x))], "fn= is a function; got a int"),
        ([fp.batches.BatchStage(abs, seed="a")], "seed= is a whole number"),
    ],
)
def test_stages_of_an_overlap_are_functions_of_a_batch(stages, told):
    with refused(told):
        fp.batches.overlap(range(3), stages)


def test_a_data_set_is_no_source_and_a_tensor_no_pair():
    data = torch.utils.data.TensorDataset(*batch())
    with refused("the source of overlap is an iterable of batches"):
        list(fp.batches.overlap(data, [abs]))
    with refused(r"a fold returns \(state, result\)"):
        list(fp.batches.overlap(range(3), [fp.batches.Fold(lambda s, x: torch.zeros(2), 0)]))


def test_training_in_the_loop_or_in_the_last_stage_is_right():
    given = [batch() for _ in range(3)]
    losses = []
    for where in ("loop", "stage", "plain"):
        torch.manual_seed(1)
        _, plan, params = setup()
        optimizer = torch.optim.SGD(fp.leaves(params), lr=0.1)

        def train(one, plan=plan, params=params, optimizer=optimizer):
            result = fp.run(plan, params, one)
            fp.step(optimizer, params, result)
            return float(result.loss)

        if where == "stage":
            losses.append(list(fp.batches.overlap(given, [fp.batches.to_device("cpu"), train])))
        else:
            losses.append(
                [
                    train(one)
                    for one in (
                        fp.batches.overlap(given, [fp.batches.to_device("cpu")])
                        if where == "loop"
                        else given
                    )
                ]
            )
    assert losses[0] == losses[1] == losses[2]


def test_windows_that_are_kept_for_later_say_that_they_are_over():
    with refused(r"this window is over: .* keep its items: list\(window\)"):
        [list(window) for window in list(fp.batches.windows(range(5), 2))]
    kept = [list(window) for window in fp.batches.windows(range(5), 2)]
    assert kept == [[0, 1], [2, 3], [4]]
    used = []
    for window in fp.batches.windows(range(4), 2):
        used.append(window)
        list(window)
    assert [list(window) for window in used] == [[], []]  # they had been used
    with refused("the size of a window is a positive int"):
        fp.batches.windows(range(3), range(3))


def test_accumulating_gradients_takes_the_function_first_and_a_pair_from_it():
    with refused(r"accumulate_grads\(grad_fn, window\); got a list"):
        fp.batches.accumulate_grads([torch.ones(1)], lambda x: ({"w": x}, None))
    with refused(r"grad_fn returns \(gradients, anything else\), .* got a dict"):
        fp.batches.accumulate_grads(lambda x: {"w": x}, [torch.ones(1)])


# -- schedules, costs, pictures
# -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda: fp.Schedule.parse("schedule.txt"), "'schedule.txt' is the name of a file"),
        (
            lambda: fp.Schedule.parse(["0F0 0B0"]),
            r"parse takes text with one line per device, such as '0F0 0B0'; got a list",
        ),
        (
            lambda: fp.Schedule(["0F0 0B0"]),
            r"one tuple of Actions per device; got str; Schedule.parse reads text",
        ),  # pyright: ignore[reportArgumentType]
        (
            lambda: fp.Schedule("0F0 0B0"),
            r"one tuple of Actions per device; got str; Schedule.parse reads text",
        ),  # pyright: ignore[reportArgumentType]
        (
            lambda: fp.Schedule((fp.Action(fp.Kind.F, 0, 0),)),
            r"one tuple of Actions per device; got Action$",
        ),  # pyright: ignore[reportArgumentType]
        (lambda: fp.Schedule({0: []}), r"one tuple of Actions per device; got dict$"),  # pyright: ignore[reportArgumentType]
        (
            lambda: fp.schedules.from_torch_csv("schedule.csv"),
            "row 1: 'schedule.csv' is not an action",
        ),
        (lambda: fp.schedules.from_torch_csv(b"0F0,0B0"), "from_torch_csv takes text; got a bytes"),
        (lambda: fp.schedules.from_json("0F0 0B0"), "the text is not JSON that funcpipe reads"),
        (lambda: fp.schedules.remat(setup()[1]), r"fp.schedules.remat\(plan.schedule\)"),
        (
            lambda: fp.schedules.remat(fp.schedules.fill_drain(2, 2), keep=[1]),
            r"keep must be a function \(action\) -> bool",
        ),
        (
            lambda: fp.schedules.offload(fp.schedules.remat(fp.schedules.fill_drain(2, 2))),
            "is computed again or moved, not both",
        ),
        (lambda: fp.schedules.delay(fp.schedules.one_f_one_b(2, 4), group=0), "at least 1; got 0"),
        (lambda: fp.simulate(parts()[1]), "simulate takes a plan or a schedule; got a tuple"),
        (
            lambda: fp.simulate(fp.schedules.one_f_one_b(2, 4), 3.0),
            r"simulate takes a Cost .* fp.Cost\(forward=..., backward=...\)",
        ),
        (
            lambda: fp.Cost(forward=torch.ones(2)),
            "forward is a number from 0, or a sequence of them",
        ),
    ],
)
def test_schedules_and_costs_say_what_is_wrong(call, told):
    with pytest.raises(fp.ScheduleError, match=told):
        call()


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (
            lambda: fp.models.balance(5, 2),
            r"balance takes the time of each layer, \[1.0, 2.0, ...\], or the Cost that fp.models.profile",
        ),
        (
            lambda: fp.models.balance(model(), 2),
            "or the Cost that fp.models.profile.* got a Sequential",
        ),
        (
            lambda: fp.models.profile(nn.Linear, torch.ones(2, 4)),
            "layers are an nn.Sequential, a list of modules",
        ),
        (lambda: fp.models.profile(parts()[1], torch.ones(2, 4)), "params= is missing"),
        (
            lambda: fp.models.memory(nn.Linear(4, 4), torch.ones(2, 4)),
            "layers are an nn.Sequential, a list of modules",
        ),
        (
            lambda: fp.models.memory(model(), torch.ones(2, 4), optimizer="adamx"),
            "did you mean 'adamax'",
        ),
        (lambda: fp.report(setup()[1], _result()), r"use fp.run\(..., record=True\)"),
    ],
)
def test_measures_say_what_they_take(call, told):
    with refused(told):
        call()


def _result(**options):
    _, plan, params = setup()
    return fp.run(plan, params, batch(), **options)


def test_pictures_are_of_timelines_not_of_results():
    for strange, told in (
        (_result(record=True), r"got Result; draw its timeline \(run with record=True\)"),
        (_result().timeline, r"got NoneType; draw its timeline \(run with record=True\)"),
    ):
        with pytest.raises(TypeError, match=told):
            fp.draw(strange)


# -- testing
# -------------------------------------------------------------------------------


def test_the_helpers_for_tests_say_what_they_take():
    _, plan, params = setup()
    stage, x = plan.stages[0], batch()[0]
    for call, told in (
        (
            lambda: check_stage(stage, (params[0],), x),
            "params is a tuple, not a dict by the module's names",
        ),
        (
            lambda: check_stage(stage, params[0], x, allow="unused"),
            r"give a collection of names, allow=\['unused'\]",
        ),
        (lambda: assert_matches_sequential(stage, params[0], x), "takes a plan; got a Stage"),
        (
            lambda: FaultAt(0, 0, "F")(plan),
            "takes stages and gives stages, before the plan is made; got a Plan",
        ),
    ):
        with refused(told):
            call()


def test_arguments_in_the_wrong_place():
    layers, x = nn.Sequential(nn.Linear(2, 2)), torch.ones(3, 2)
    with refused(r"profile takes the layers first"):
        fp.models.profile(x, layers)
