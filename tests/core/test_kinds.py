"""The table of kinds: a row for each, and every other place knows each kind."""

import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import funcpipe as fp
from funcpipe._src.data.kinds import KINDS, Flow, Kind, Resource, Scope, flowing
from funcpipe._src.data.schedule import Action
from funcpipe._src.data.stage import Stage
from funcpipe._src.lower.effects import EffectContext, effects
from funcpipe._src.schedules.clock import CODE, CODED
from funcpipe._src.schedules.memory import residual_table


def test_every_kind_has_a_row():
    assert [*KINDS] == [*Kind] == [*CODED]
    assert all(CODED[CODE[kind]] is kind for kind in Kind)


@pytest.mark.parametrize("kind", Kind)
def test_a_row_fits_the_others(kind):
    """Pairs and exclusions are mutual, rules do not go round, what is taken is freed by
    somebody."""
    row = KINDS[kind]
    assert row.pair is None or KINDS[row.pair].pair is kind
    assert row.excludes is None or KINDS[row.excludes].excludes is kind
    before, seen = row.after, [kind]
    while before is not None:
        assert before not in seen
        seen.append(before)
        before = KINDS[before].after
    assert seen[-1] is Kind.F or row.scope is not Scope.MICROBATCH
    assert all(hasattr(fp.Cost(), name) for names in row.times for name in names)


@pytest.mark.parametrize("kind", Kind)
def test_every_place_knows_every_kind(kind):
    """Letters, costs, memory and effects: no kind falls through."""
    action = Action(kind, 12, 0 if KINDS[kind].scope is Scope.STAGE else 3)
    assert Action.parse(str(action)) == action
    assert isinstance(fp.Cost(forward=2.0).of(kind, 0), float)
    assert kind in residual_table(fp.Cost(), 1)
    stages = (Stage(lambda p, x: x), Stage(lambda p, x: x))
    reads, writes = effects(kind, 0, True, EffectContext(stages, {}, loss=True, outputs=False))
    # U works on the parameters, which are the stage's own.
    assert bool(reads or writes) != (KINDS[kind].scope is Scope.RUN)


def test_a_schedule_with_every_kind_runs_as_the_loop_does():
    """So no step is missing either."""
    text = "0U0 0F0 0F1 0R0 0B0 0O1 0L1 0I1 0W1 0G 0S"
    schedule = fp.Schedule.parse(text)
    assert {*re.findall("[A-Z]", text)} == {kind.value for kind in Kind}
    plan = fp.make_plan(
        [fp.stage(lambda p, x: p * x)], schedule, loss=torch.nn.functional.mse_loss, devices="cpu"
    )
    x, params = torch.ones(2, 3), (torch.tensor(2.0),)
    assert {call.kind for lane in plan.program.lanes for call in lane.calls} == {*Kind}
    want = fp.run_sequential(plan, params, (x, x)).grads[0]
    optimizer = torch.optim.SGD(params, lr=0.5)
    assert torch.equal(fp.run(plan, params, (x, x), optimizer=optimizer).grads[0], want)
    assert torch.equal(params[0], 2.0 - 0.5 * want)


def test_what_flows_flows_both_ways():
    assert [flowing(Flow.FORWARD), flowing(Flow.BACKWARD)] == [(Kind.F,), (Kind.B, Kind.I)]
    assert {row.resource for row in KINDS.values()} == {*Resource}


@given(st.sampled_from([*Kind]), st.integers(1, 9), st.integers(0, 9))
def test_what_an_action_needs_is_what_the_table_of_effects_says(kind, stage, microbatch):
    """The kinds that write what it reads of activations, gradients and residuals are among what it
    needs."""
    needs = Action(kind, stage, microbatch).needs()
    assert all(need.microbatch == microbatch for need in needs)
    stages = tuple(Stage(lambda p, x: x) for _ in range(stage + 2))
    given = EffectContext(stages, {}, loss=False, outputs=False)
    reads = set(effects(kind, stage, True, given)[0])
    crossing = {wire for wire in reads if wire.role in (fp.typing.Role.ACT, fp.typing.Role.GRAD)}
    if kind is Kind.R:
        assert crossing  # what F before it has waited for
        return
    written = {
        wire
        for need in needs
        if need.stage != stage
        for wire in effects(need.kind, need.stage, True, given)[1]
    }
    assert crossing == crossing & written
    assert bool(crossing) == (KINDS[kind].flow is not None)
