"""Edge cases of schedules and plans: numbers that are too large, U, stashes, fingerprints, losses
without a hash."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from itertools import accumulate, chain

import pytest
import torch
import torch.nn.functional as F
from common import cpu_plan
from torch import nn

import funcpipe as fp
from funcpipe._src.data.program import Free, Send
from funcpipe._src.view.findings import findings
from funcpipe._src.view.memory_levels import spans_by_device
from funcpipe._src.view.play import Play

S = fp.schedules
SCALE = fp.stage(lambda p, x: x * p, name="scale")


def params(count):
    return tuple(torch.ones((), requires_grad=True) for _ in range(count))


def batch(rows):
    return torch.ones(rows, 2), torch.zeros(rows, 2)


# -- stashes
# -------------------------------------------------------------------------------


def test_a_stage_writes_into_the_stash_of_what_it_returns():
    """No other Out of the process has that stash."""

    def early(p, x):
        out = fp.Out(x * p)
        out.stash["e"] = x
        return out

    late = fp.stage(lambda p, x, *, skips: x + skips["e"] * p, pop=["e"])
    stages = [fp.stage(early, stash=["e"]), late]
    plan = cpu_plan(stages, S.one_f_one_b(2, 2))
    assert 4 == fp.run(plan, params(2), batch(4)).loss
    assert {} == fp.Out(1).stash == fp.Out(1, None).stash
    plain = cpu_plan([fp.stage(lambda p, x: fp.Out(x * p))], S.one_f_one_b(1, 1))
    assert 1 == fp.run(plain, params(1), batch(4)).loss


def test_an_out_is_still_a_named_tuple():
    """It can be replaced and taken apart by torch.func, and has the documented arguments."""
    out = fp.Out(1, stash={"a": 2}, stats=3)
    assert (1, {"a": 2}, 3, (), ()) == out == fp.Out._make(out) == fp.Out(*out)
    assert {"b": 1} == out._replace(stash={"b": 1}).stash
    y = torch.func.vmap(lambda x: fp.Out(2 * x))(torch.arange(3.0))
    assert [0, 2, 4] == y.y.tolist()
    assert {} == y.stash


# -- numbers that are too large
# -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text", ["200000F0", "999999999F0", "999999999F999999999", "0F0.999999999 0F0.0"]
)
def test_mistyped_numbers_are_refused_at_once(text):
    """Everywhere; a notebook shows the fault."""
    schedule = fp.Schedule.parse(text)
    began = time.perf_counter()
    plan = lambda one: fp.make_plan([SCALE], one)
    for look in (
        S.check,
        fp.simulate,
        fp.draw,
        plan,
        S.remat,
        S.delay,
        S.offload,
        S.pair,
        S.to_torch_csv,
    ):
        with pytest.raises(fp.ScheduleError):
            look(schedule)
    assert "not legal" in schedule._repr_html_()
    assert time.perf_counter() - began < 2


# -- U
# -------------------------------------------------------------------------------


def test_a_stage_gathers_more_often_than_there_are_microbatches():
    """The number of a U is no microbatch: the schedule is legal, is simulated, and runs a batch of
    one microbatch."""
    schedule = fp.Schedule.parse("0U0 0F0 0U1 0B0")
    S.check(schedule)
    assert 1 == schedule.num_microbatches
    assert 5 == fp.simulate(schedule, fp.Cost(gather=1)).makespan
    plan = cpu_plan([SCALE], schedule)
    result = fp.run(plan, params(1), batch(3), record=True)
    assert ["0U0", "0F0", "0U1", "0B0"] == [str(span.action) for span in result.timeline.spans]
    assert 1 == result.stats.num_microbatches
    assert fp.report(plan, result).measured.makespan > 0


@pytest.mark.parametrize("family", [S.one_f_one_b, S.looped_bfs, S.zero_bubble])
@pytest.mark.parametrize("count", [1, 2, 3, 4])
@pytest.mark.parametrize("executor", ["serial", "threads"])
def test_stages_that_take_turns_are_gathered_each_time(family, count, executor):
    """One whole stage of a device at a time; with fewer microbatches too, and the same
    gradients."""
    plain = family(4, 4, num_devices=2)
    schedule = S.gather_params(plain, whole=1)
    stages = [fp.stage(lambda p, x: torch.tanh(x @ p), name=f"part{number}") for number in range(4)]
    torch.manual_seed(0)
    weights = tuple(torch.randn(3, 3, requires_grad=True) for _ in stages)
    data = torch.randn(count, 3), torch.randn(count, 3)
    grads = []
    for one in (plain, schedule):
        plan = cpu_plan(stages, one)
        result = fp.run(plan, weights, data, record=True, executor=executor)
        fp.report(plan, result)
        grads.append(fp.leaves(result.grads))
    assert all(map(torch.equal, *grads))
    fewer = schedule.first(count)
    S.check(fewer)
    fp.simulate(fewer)


def test_a_report_of_a_short_batch_leaves_out_what_serves_nothing():
    plan = fp.make_plan([SCALE], fp.Schedule.parse("0U0 0F0 0F1 0U1 0F2 0F3"), devices="cpu")
    result = fp.run(plan, params(1), torch.ones(2, 3), record=True)
    assert "0U0 0F0 0F1" == str(plan.schedule.first(2))
    assert fp.report(plan, result).measured.makespan > 0


@pytest.mark.parametrize("count", [0, -1, 1.0, True, None])
def test_first_takes_a_number_from_1(count):
    with pytest.raises(
        fp.ScheduleError, match="first takes the number of microbatches to keep, at least 1; got"
    ):
        S.one_f_one_b(2, 2).first(count)


# -- plans
# -------------------------------------------------------------------------------


@dataclass
class Squares:
    """A loss that compares by value, so it has no hash."""

    factor: float = 1.0

    def __call__(self, y, target):
        return (y - target).square().mean() * self.factor


@dataclass(frozen=True)
class Weighted:
    """A loss that seems to have a hash, and has none."""

    factors: list[float]

    def __call__(self, y, target):
        return (y - target).square().mean() * self.factors[0]


@pytest.mark.parametrize("loss", [Squares(2.0), Weighted([2.0])], ids=repr)
@pytest.mark.parametrize("compiled", [False, True])
def test_a_loss_without_a_hash(loss, compiled):
    """It counts by rows, as any unknown loss; eager and compiled."""
    stage = fp.compile_stage(SCALE, backend="graph") if compiled else SCALE
    plan = fp.make_plan([stage], S.one_f_one_b(1, 2), loss=loss, devices="cpu")
    expected = fp.run_sequential(plan, params(1), batch(4))
    assert 2 == expected.loss == fp.run(plan, params(1), batch(4)).loss
    assert repr(plan)


@pytest.mark.parametrize("placement", [(0, None), (0, "1"), (0, [1]), (True, 0), (0, 0.5)])
def test_a_placement_that_is_no_row_of_devices(placement):
    with pytest.raises(fp.ScheduleError, match="placement= names the device of each of 2 stages"):
        fp.search(fp.Cost(), num_devices=2, num_microbatches=2, placement=placement)


def test_fingerprints_tell_how_outputs_join_and_losses_count():
    def made(**options):
        options = {"loss": nn.CrossEntropyLoss(), "outputs": True} | options
        return fp.make_plan([SCALE], S.one_f_one_b(1, 2), **options).fingerprint

    others = [
        {"merge": "mean"},
        {"merge": "sum"},
        {"merge": {"a": 0}},
        {"loss": nn.CrossEntropyLoss(reduction="sum")},
        {"loss": nn.MSELoss()},
        {"weight": len},
        {"outputs": False},
    ]
    prints = [made(), *(made(**options) for options in others)]
    assert len(prints) == len({*prints})
    assert made() == made()


@pytest.mark.parametrize("flag", [1, 0, "yes"])
def test_train_is_true_or_false(flag):
    with pytest.raises(fp.PlanError, match="train= is True, False or None"):
        fp.make_plan([SCALE], S.one_f_one_b(1, 1), loss=F.mse_loss, train=flag)


def test_a_stage_of_a_loop_that_was_planned_alone_is_looked_at_in_the_next_plan():
    """A plan of one stage settles nothing for a plan of all stages."""
    stages = []
    for factor in (1.0, 2.0):
        stages.append(fp.stage(lambda p, x: x * p * factor, name="part"))
        fp.make_plan(stages[-1:], S.one_f_one_b(1, 1), loss=F.mse_loss)
    with pytest.raises(
        fp.PlanError, match="'factor' was 1.0 when the stage was made, and is 2.0 now"
    ):
        fp.make_plan(stages, S.one_f_one_b(2, 1), loss=F.mse_loss)


def test_what_changes_after_a_plan_is_meant():
    """Functions of one code that a plan has checked may read new values."""
    values = {"factor": 1.0}
    factor = 1.0

    def make():
        return fp.stage(lambda p, x: x * p * factor, name="part")

    stages = [make(), make()]
    for factor in (1.0, 2.0):
        values["factor"] = factor
        fp.make_plan(stages, S.one_f_one_b(2, 1), loss=F.mse_loss)
    assert stages[0].closed  # a frozen stage keeps its values


# -- programs
# -------------------------------------------------------------------------------


def test_lanes_of_many_stages_are_written_in_linear_time():
    """Four times the stages take about four times as long, not sixteen."""

    def seconds(count):
        plan = cpu_plan([SCALE] * count, S.fill_drain(count, 1, num_devices=1))
        began = time.process_time()
        _ = plan.program.lanes
        return time.process_time() - began

    few = min(seconds(250) for _ in range(3))
    assert min(seconds(1000) for _ in range(3)) < 9 * few


def test_a_program_that_cannot_end_is_not_simulated_in_part():
    plan = cpu_plan([SCALE] * 2, S.one_f_one_b(2, 2))
    first, second = plan.program.lanes
    for lost, waits in (
        (Send, r"act\[0,0\], which is not sent"),
        (Free, r"slot \d of lane 0, which is not freed"),
    ):
        spoilt = replace(plan.program)
        kept = [tuple(one for one in part if not isinstance(one, lost)) for part in first.parts]
        ends = tuple(accumulate(map(len, kept)))
        changed = replace(first, instructions=tuple(chain.from_iterable(kept)), ends=ends)
        vars(spoilt)["lanes"] = (changed, second)
        with pytest.raises(
            fp.FuncpipeError, match=f"cannot come to its end: lane 1 waits for {waits}"
        ):
            Play(spoilt, fp.Cost(), bounded=True).run()


def test_the_second_of_a_pair_may_begin_first():
    """On a GPU each runs on its own stream, so the second may begin first: the run is the
    plan's."""
    schedule = S.pair(S.one_f_one_b(2, 4))
    plan = cpu_plan([SCALE] * 2, schedule)
    result = fp.run(plan, params(2), batch(4), record=True)
    first, second = next(iter(schedule.pairs))
    spans = {span.action: span for span in result.timeline.spans}
    begun = spans[first].start
    moved = spans[first]._replace(start=(spans[first].start + spans[first].end) / 2)
    early = spans[second]._replace(start=begun)
    others = [span for span in result.timeline.spans if span.action not in (first, second)]
    timeline = replace(result.timeline, spans=(*others, moved, early))
    shown = spans_by_device(timeline, schedule)
    assert [tuple(span.action for span in lane) for lane in shown] == [*schedule.orders]
    assert findings(plan, replace(result, timeline=timeline), None, "").measured is timeline


# -- names that went
# -------------------------------------------------------------------------------


def test_what_was_deleted_says_so():
    """A word with a level is not an action; several costs are no cost."""
    with pytest.raises(fp.ScheduleError, match="'0F0@1' is not an action"):
        fp.Schedule.parse("0F0@1 0B0")
    for call in (
        lambda cost: fp.search(cost, num_devices=1, num_microbatches=1),
        lambda cost: fp.simulate(S.zb_h2(2, 2), cost),
    ):
        with pytest.raises(fp.ScheduleError, match="takes a Cost"):
            call([fp.Cost(), fp.Cost()])
