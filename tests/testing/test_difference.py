"""``observe=`` and `first_difference`: every executor and the oracle show the same values."""

import math

import pytest
import torch
from common import EXECUTORS
from torch import nn

import funcpipe as fp
import funcpipe.testing
from funcpipe import schedules as S
from funcpipe.testing import first_difference, record_values


def encode(params, x):
    """A stage with a stash and an auxiliary loss."""
    y = torch.tanh(x @ params["w"])
    return fp.Out(y, stash={"x": x}, loss=(y.square().mean(1).sum(), len(y)))


def decode(params, x, *, skips, feeds):
    """A stage with a skip and a feed."""
    return {"y": (x + skips["x"]) @ params["w"] * feeds["scale"], "n": 3}


STAGES = [
    fp.stage(encode, stash=["x"]),
    fp.stage(lambda p, x: x @ p["w"]),
    fp.stage(decode, pop=["x"], feeds=["scale"]),
]
PARAMS = tuple({"w": torch.randn(4, 4)} for _ in range(3))
BATCH = torch.randn(10, 4), torch.randn(10, 4)
FEEDS = {"scale": torch.rand(10, 1)}
SCHEDULES = {
    "1F1B": S.one_f_one_b(3, 4),
    "ZB-H1": S.zero_bubble(3, 4),
    "remat": S.remat(S.fill_drain(3, 4)),
}


def plan_of(schedule, stages=STAGES) -> fp.Plan:
    """A plan on the CPU."""
    loss = lambda y, target: nn.functional.mse_loss(y["y"], target)
    return fp.make_plan(stages, schedule, loss=loss, devices="cpu")


@pytest.mark.parametrize(
    ("name", "executor", "compiled"),
    [
        *((name, executor, False) for name in SCHEDULES for executor in EXECUTORS),
        *(("remat", "serial", True), ("ZB-H1", "threads", True)),
    ],
)
def test_all_values_are_those_of_the_oracle(name, executor, compiled):
    """Bit for bit, by action and name; a run with an observer computes what a run without does."""
    stages = [fp.compile_stage(stage, fuse=False) for stage in STAGES] if compiled else STAGES
    plan = plan_of(SCHEDULES[name], stages)
    found = record_values(plan, PARAMS, BATCH, feeds=FEEDS, executor=executor)
    wanted = record_values(plan, PARAMS, BATCH, feeds=FEEDS, executor="sequential")
    assert first_difference(found, wanted) is None
    recomputed = {key for key in found.values if key[0].kind is fp.Kind.R}
    assert found.values.keys() - recomputed == wanted.values.keys()
    assert bool(recomputed) == (name == "remat")
    free = fp.run(plan, PARAMS, BATCH, feeds=FEEDS)
    assert torch.equal(found.result.loss, free.loss)
    assert all(map(torch.equal, fp.leaves(found.result.grads), fp.leaves(free.grads)))


def test_names_and_numbers_of_the_values():
    """What is shown is what the stage and plain autograd compute."""
    record = record_values(plan_of(SCHEDULES["1F1B"]), PARAMS, BATCH, feeds=FEEDS)
    shown = {}
    for (action, name), value in record.values.items():
        shown.setdefault(str(action), {})[name] = value
    assert [*shown["0F1"]] == ["input", "output", "stash x", "auxiliary loss"]
    assert [*shown["2F1"]] == [*("input", "skip x", "feed scale", "target"), *("output", "loss")]
    assert [*shown["0B1"]] == [
        *("output gradient", "stash gradient x", "input gradient", "parameter gradients")
    ]
    assert [*shown["2B1"]] == [
        *("output gradient", "input gradient", "skip gradient x", "parameter gradients")
    ]
    rows = slice(3, 6)  # ten rows are cut into 3, 3, 2 and 2
    assert torch.equal(shown["0F1"]["input"], BATCH[0][rows])
    assert torch.equal(shown["0F1"]["output"], torch.tanh(BATCH[0][rows] @ PARAMS[0]["w"]))
    assert shown["2F1"]["output"]["n"] == 3
    assert torch.equal(shown["2F1"]["feed scale"], FEEDS["scale"][rows])
    sums = shown["2B3"]["parameter gradients"]
    assert [*sums] == ["params['w']"]
    assert torch.equal(sums["params['w']"], record.result.grads[2]["w"])


def test_carries_of_slices_are_shown():
    """What a slice gets from the previous one, and hands to the next, have names of their own."""

    def total(params, x, *, carry):
        y = x * params["w"] + (0 if carry is None else carry)
        return fp.Out(y, carry=y[:, -1:])

    schedule = S.one_f_one_b(1, 2, num_slices=2)
    loss = nn.functional.mse_loss
    plan = fp.make_plan([fp.stage(total)], schedule, loss=loss, devices="cpu")
    params, x = ({"w": torch.tensor(2.0)},), torch.randn(4, 6)
    found = record_values(plan, params, (x, x))
    assert (
        first_difference(found, record_values(plan, params, (x, x), executor="sequential")) is None
    )
    names = {str(action): [] for action, _ in found.values}
    for action, name in found.values:
        names[str(action)].append(name)
    assert names["0F0.0"] == ["input", "target", "output", "carry out", "loss"]
    assert names["0F0.1"] == ["input", "carry in", "target", "output", "carry out", "loss"]
    assert names["0B0.1"] == [
        *("output gradient", "input gradient", "carry in gradient", "parameter gradients")
    ]
    assert names["0B0.0"] == [
        *("output gradient", "carry out gradient", "input gradient", "parameter gradients")
    ]
    of = {(str(action), name): value for (action, name), value in found.values.items()}
    assert torch.equal(of["0F0.0", "carry out"], of["0F0.1", "carry in"])


def test_an_error_of_the_observer_has_coordinates():
    """It fails the run like an error of the stage."""

    def observe(action, name, value):
        if (str(action), name) == ("1F2", "output"):
            raise KeyError("mine")

    for executor in ("serial", "threads"):
        with pytest.raises(KeyError, match="mine") as caught:
            fp.run(
                plan_of(SCHEDULES["1F1B"]),
                PARAMS,
                BATCH,
                feeds=FEEDS,
                observe=observe,
                executor=executor,
            )
        assert caught.value.funcpipe.action == "1F2"


@pytest.mark.parametrize("name", ["input", "output", "output gradient", "parameter gradients"])
def test_an_observer_must_not_write(name):
    """Where it does, the run is refused, and says which value."""

    def observe(action, shown, value):
        if shown == name and action.stage == 1:
            fp.leaves(value)[0].zero_()

    with pytest.raises(fp.PlanError, match=f"observe= wrote to '{name}'"):
        fp.run(plan_of(SCHEDULES["1F1B"]), PARAMS, BATCH, feeds=FEEDS, observe=observe)


def test_observers_that_are_none_are_refused():
    """Before anything runs."""
    with pytest.raises(fp.PlanError, match=r"observe is a function \(action, name, value\)"):
        fp.run(plan_of(SCHEDULES["1F1B"]), PARAMS, BATCH, feeds=FEEDS, observe="input")


def test_the_first_difference_is_named():
    """By action, value and leaf; the cause, not what follows from it."""
    wrong = [*STAGES]
    wrong[1] = fp.stage(lambda p, x: x @ p["w"] + (1e-3 if len(x) == 2 else 0))
    found = first_difference(
        record_values(plan_of(SCHEDULES["1F1B"]), PARAMS, BATCH, feeds=FEEDS),
        record_values(plan_of(SCHEDULES["ZB-H1"], wrong), PARAMS, BATCH, feeds=FEEDS),
    )
    assert found is not None
    assert (str(found.action), found.name, found.stage, found.microbatch) == ("1F2", "output", 1, 2)
    assert found.elements == 8
    assert 10 < found.ulp < math.inf
    assert "stage 1, microbatch 2" in str(found)


@pytest.mark.parametrize(
    ("first", "second", "ulp"),
    [
        (torch.tensor([1.0]), torch.tensor([1.0 + 2**-23]), 1),
        (torch.tensor([0.0]), torch.tensor([-0.0]), 0),
        (torch.tensor([1e-45]), torch.tensor([-1e-45]), 2),
        (torch.ones(1).double(), torch.ones(1).double() + 3 * 2**-52, 3),
        (torch.ones(1).double(), -torch.ones(1).double(), 2 * 0x3FF0000000000000),
        (torch.tensor([1.0]).bfloat16(), torch.tensor([1.0078125]).bfloat16(), 1),
        (torch.tensor([1.0]).half(), torch.tensor([-1.0]).half(), 2 * 0x3C00),
        (torch.tensor([math.nan]), torch.tensor([math.nan]), 0),
        (torch.tensor([math.nan]), torch.tensor([1.0]), math.inf),
        (torch.tensor([math.inf]), torch.tensor([math.inf]), 0),
        (torch.tensor([1]), torch.tensor([2]), math.inf),
        (torch.tensor([1 + 1j]), torch.tensor([1 + (1 + 2**-23) * 1j]), 1),
        (torch.ones(2), torch.ones(3), math.inf),
        (torch.ones(2), torch.ones(2).double(), math.inf),
        ("a", "a", 0),
        ("a", "b", math.inf),
        ({"x": 1}, {"y": 1}, math.inf),
    ],
)
def test_distances_in_units_of_the_last_place(first, second, ulp):
    """Of all kinds of leaves."""
    order = (fp.Action.parse("0F0"),)
    records = [
        fp.testing.ValueRecord({(order[0], "output"): value}, order, None)
        for value in (first, second)
    ]
    found = first_difference(*records)
    assert (found is None) if ulp == 0 else (found.ulp == ulp)


def test_records_without_a_common_value_are_refused():
    """And what is no record."""
    record = record_values(plan_of(SCHEDULES["1F1B"]), PARAMS, BATCH, feeds=FEEDS)
    others = {(action, "other"): value for (action, _), value in record.values.items()}
    with pytest.raises(fp.PlanError, match="share no value"):
        first_difference(record, fp.testing.ValueRecord(others, record.order, record.result))
    more = record_values(plan_of(S.one_f_one_b(3, 5)), PARAMS, BATCH, feeds=FEEDS)
    with pytest.raises(fp.PlanError, match="4 and 5 microbatches"):
        first_difference(record, more)
    fewer = fp.testing.ValueRecord(record.values, record.order[:1], record.result)
    with pytest.raises(fp.PlanError, match="3 and 1 stages"):
        first_difference(record, fewer)
    with pytest.raises(fp.PlanError, match="got a Result"):
        first_difference(record, record.result)
