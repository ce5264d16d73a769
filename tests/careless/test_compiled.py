"""Compiled stages that meet ever other sizes and numbers: few programs are kept, the numbers are
eager's, and they say why, once."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
import warnings
import weakref

import pytest
import torch
import torch.nn.functional as F
from common import assert_same_result, same

import funcpipe as fp


def layer(p, x):
    return torch.tanh(x @ p["w"])


def params(count=1):
    g = torch.Generator().manual_seed(0)
    return tuple({"w": torch.randn(3, 3, generator=g)} for _ in range(count))


def batch(rows):
    g = torch.Generator().manual_seed(rows)
    return torch.randn(rows, 3, generator=g), torch.randn(rows, 3, generator=g)


def plan_of(*stages, microbatches=1, loss=F.mse_loss):
    return fp.make_plan(
        stages, fp.schedules.zero_bubble(len(stages), microbatches), loss=loss, devices="cpu"
    )


def heard(work):
    """What a piece of work warns of."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        work()
    return [str(one.message) for one in found]


# -- how many programs
# -------------------------------------------------------------------------------


def test_ever_other_sizes():
    """No more than so many are kept, every number is eager's, and one warning has the mend."""
    eager, made = fp.stage(layer), fp.compile_stage(fp.stage(layer), fuse=False, max_programs=3)

    def train():
        for rows in (1, 2, 3, 4, 5, 6, 7, 1, 2, 8, 9, 10):
            found = [
                fp.run(plan_of(one), params(), batch(rows), threads_per_lane=1)
                for one in (eager, made)
            ]
            assert_same_result(*found)
            assert len(made.program.found) <= 3

    (text,) = heard(train)
    assert "stage 'layer' (compiled) was traced 6 times" in text
    assert "drop_last=True" in text
    assert "max_programs=12" in text
    assert 12 == made.program.made


def test_a_few_sizes_are_no_news():
    """As many as are kept, however often: traced once each, and nothing is said (warnings are
    errors here)."""
    made = fp.compile_stage(fp.stage(layer), max_programs=3)
    for rows in (1, 2, 3) * 5:
        fp.run(plan_of(made), params(), batch(rows))
    assert 3 == made.program.made


def test_what_is_unused_for_longest_goes():
    made = fp.compile_stage(fp.stage(layer), max_programs=2)
    for rows in (1, 2, 1, 3, 1):  # 2 goes for 3
        fp.run(plan_of(made), params(), batch(rows))
    assert 3 == made.program.made
    heard(lambda: fp.run(plan_of(made), params(), batch(2)))
    assert 4 == made.program.made


def test_dropped_programs_are_freed():
    made = fp.compile_stage(fp.stage(layer), max_programs=1)
    fp.run(plan_of(made), params(), batch(1))
    (programs,) = made.program.found.values()
    marks = weakref.ref(programs), weakref.ref(programs.joint), weakref.ref(programs.forward)
    del programs
    heard(lambda: fp.run(plan_of(made), params(), batch(2)))
    gc.collect()
    assert [None, None, None] == [mark() for mark in marks]


@pytest.mark.parametrize(("executor", "again"), [("serial", False), ("threads", True)])
def test_a_run_of_more_sizes_than_are_kept(executor, again):
    """It keeps what it uses, its repeated forwards and split backwards included, and traces each
    size once."""
    stages = [fp.stage(layer) for _ in range(2)]
    made = [fp.compile_stage(one, fuse=False, max_programs=1) for one in stages]
    given = [batch(rows) for rows in (1, 2, 3, 1, 4, 2)]
    data = fp.Microbatches([x for x, _ in given]), fp.Microbatches([y for _, y in given])
    schedule = fp.schedules.zero_bubble(2, 6)
    schedule = fp.schedules.remat(schedule) if again else schedule
    plans = [fp.make_plan(one, schedule, loss=F.mse_loss, devices="cpu") for one in (stages, made)]
    found = []
    heard(
        lambda: found.extend(
            fp.run(p, params(2), data, executor=executor, threads_per_lane=1) for p in plans
        )
    )
    assert_same_result(*found)
    assert [4, 4] == [one.program.made for one in made]
    assert [1, 1] == [len(one.program.found) for one in made]


@pytest.mark.slow
def test_runs_that_share_a_stage():
    """Lanes of several runs drop each other's programs all the time."""
    eager, made = fp.stage(layer), fp.compile_stage(fp.stage(layer), fuse=False, max_programs=1)
    wanted = {
        rows: fp.run(
            plan_of(eager, eager, microbatches=2), params(2), batch(rows), threads_per_lane=1
        )
        for rows in (3, 4, 7)
    }
    wrong = []

    def work(rows):
        for _ in range(4):
            found = fp.run(
                plan_of(made, made, microbatches=2),
                params(2),
                batch(rows),
                executor="threads",
                threads_per_lane=1,
            )
            if not (same(found.grads, wanted[rows].grads) and same(found.loss, wanted[rows].loss)):
                wrong.append(rows)

    def together():
        threads = [threading.Thread(target=work, args=(rows,)) for rows in wanted]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    assert 1 == len(heard(together))
    assert not wrong
    assert 1 == len(made.program.found)


def test_how_many_is_an_option():
    """It is checked, and goes with copies."""
    made = fp.compile_stage(fp.stage(layer, name="layer"), max_programs=5)
    assert 5 == copy.deepcopy(made).program.max_programs
    linear = fp.compile_stage(fp.from_module(torch.nn.Linear(2, 2))[0], max_programs=7)
    assert 7 == pickle.loads(pickle.dumps(linear)).program.max_programs
    assert 16 == fp.compile_stage(fp.stage(layer)).program.max_programs
    for most in (0, -1, True, 2.0, None):
        with pytest.raises(fp.PlanError, match="max_programs is a positive int"):
            fp.compile_stage(fp.stage(layer), max_programs=most)


def test_warmup_counts_what_it_made():
    """Dropped or not; of a stage that stands twice, once."""
    made = fp.compile_stage(fp.stage(layer), max_programs=1)
    plan, counts = plan_of(made, made, microbatches=2), []
    heard(lambda: counts.extend(fp.warmup(plan, params(2), batch(rows)) for rows in (2, 2, 5)))
    assert 2 == counts[0]  # the first stage, and the last with the loss
    assert 4 == counts[2]
    assert sum(counts) == made.program.made
    assert 1 == len(made.program.found)


# -- Python numbers
# -------------------------------------------------------------------------------


@fp.stage(feeds=["temperature"])
def soften(p, x, *, feeds):
    return torch.softmax(x @ p["w"] / feeds["temperature"], -1)


def weighted(y, target):
    return F.mse_loss(y, target["y"]) * target["weight"]


def twice(p, x):
    y, n = x
    return y @ p["w"] * n


def scaled(p, x):
    return x @ p["w"] * p["scale"]


def in_feeds(stage, value):
    return fp.run(
        plan_of(stage), params(), batch(4), feeds={"temperature": value}, threads_per_lane=1
    )


def in_target(stage, value):
    x, y = batch(4)
    return fp.run(
        plan_of(stage, loss=weighted), params(), (x, {"y": y, "weight": value}), threads_per_lane=1
    )


def in_batch(stage, value):
    x, y = batch(4)
    return fp.run(plan_of(stage), params(), ((x, value), y), threads_per_lane=1)


def in_params(stage, value):
    return fp.run(plan_of(stage), ({**params()[0], "scale": value},), batch(4), threads_per_lane=1)


def between(stage, value):
    first = fp.stage(lambda p, x: (x @ p["w"], value))
    return fp.run(plan_of(first, stage), params(2), batch(4), threads_per_lane=1)


PLACES = {
    "x[1] between": (fp.stage(twice), between),
    "feeds['temperature']": (soften, in_feeds),
    "target['weight']": (fp.stage(layer), in_target),
    "x[1]": (fp.stage(twice), in_batch),
    "params['scale']": (fp.stage(scaled), in_params),
}


@pytest.mark.parametrize(("place", "kind"), [*((place, float) for place in PLACES), ("x[1]", int)])
def test_a_number_that_changes(place, kind):
    """Eager's bits for each value, and one warning at the fourth that says which it is and what it
    was."""
    stage, go = PLACES[place]
    made = fp.compile_stage(stage, fuse=False)
    values = [kind(1 + 2 * n) for n in range(6)]
    texts = []
    for value in values:
        expected = go(stage, value)
        texts.append(heard(lambda: assert_same_result(expected, go(made, value))))
    assert [0, 0, 0, 1, 0, 0] == list(map(len, texts))
    (text,) = texts[3]
    listed = ", ".join(map(str, values[:4]))
    assert f"{place.split()[0]} was {listed}. " in text
    assert f"fp.Replicate(torch.tensor({values[3]}))" in text


def test_the_mend():
    """A tensor: traced once, nothing is said, and the numbers are those of the Python number."""
    made = fp.compile_stage(soften, fuse=False)
    for value in (1.0, 0.7, 0.3, 0.1, 1e-3):
        number, tensor = in_feeds(soften, value), in_feeds(made, fp.Replicate(torch.tensor(value)))
        assert_same_result(number, tensor)
    assert 1 == made.program.made


def test_only_what_changes_is_named():
    """Beside numbers that stay, and sizes that are others."""

    @fp.stage(feeds=["a", "b"])
    def stage(p, x, *, feeds):
        return x @ p["w"] * feeds["a"] + feeds["b"]["n"]

    made = fp.compile_stage(stage, max_programs=99)

    def train():
        for step in range(8):
            for rows in (2, 3):
                fp.run(
                    plan_of(made), params(), batch(rows), feeds={"a": 0.5, "b": {"n": step // 2}}
                )

    (text,) = heard(train)
    assert "feeds['b']['n'] was 0, 1, 2, 3. " in text
    assert "feeds['a']" not in text


def test_two_values_are_no_news():
    """Training and evaluation have their own; sizes and numbers that do not change have nothing to
    do with each other."""
    made = fp.compile_stage(soften)
    for rows in (1, 2, 3, 4):
        for value in (1.0, 0.7):
            plan = plan_of(made)
            fp.run(plan, params(), batch(rows), feeds={"temperature": value})
    assert 8 == made.program.made


def test_a_stage_that_branches_on_a_number():
    """Why a number is traced by its value: eager's branch is taken for each."""

    @fp.stage(feeds=["t"])
    def stage(p, x, *, feeds):
        t = feeds["t"]
        return (
            x @ p["w"]
            if type(t) is float and t > 0.5
            else torch.exp(x @ p["w"]) * {0.25: 2.0}.get(t, 3.0)
        )

    made = fp.compile_stage(stage, fuse=False)
    for value in (0.75, 0.25, 0.5):
        run = lambda one: fp.run(
            plan_of(one), params(), batch(4), feeds={"t": value}, threads_per_lane=1
        )
        assert_same_result(run(stage), run(made))
