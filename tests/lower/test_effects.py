"""What each action reads and writes, as a table for one small net: a skip with two pops, a feed, a
loss."""

import pytest

from funcpipe._src.data.compose import compose
from funcpipe._src.data.program import Role, Wire
from funcpipe._src.data.schedule import Kind, Schedule
from funcpipe._src.data.stage import Stage, stage
from funcpipe._src.lower.effects import Among, EffectContext, effects
from funcpipe._src.lower.plan import make_plan
from funcpipe._src.lower.program import lower
from funcpipe._src.lower.skips import routes


def net() -> list[Stage]:
    """Stage 0 stashes e; stage 1 pops it and takes a feed; stage 2 pops it again and ends in the
    loss."""
    return [
        stage(lambda p, x: x, stash=["e"]),
        stage(lambda p, x, *, skips, feeds: x, pop=["e"], feeds=["mask"]),
        stage(lambda p, x, *, skips: x, pop=["e"]),
    ]


def table(stages: list[Stage], *, loss: bool, outputs: bool) -> dict[str, str]:
    """``reads -> writes`` for each kind of each stage; ``F-`` is a forward that keeps nothing."""
    given = EffectContext(stages, routes(stages), loss, outputs, reduced=range(len(stages)))
    out: dict[str, str] = {}
    for s in range(len(stages)):
        rows = [("F-", Kind.F, False), *((kind.name, kind, True) for kind in Kind)]
        for word, kind, keeps in rows:
            reads, writes = effects(kind, s, keeps, given)
            out[f"{s}{word}"] = " ".join(map(show, reads)) + " -> " + " ".join(map(show, writes))
    return out


def show(wire: Wire) -> str:
    """``skip_grad0(e)<2``: role and stage, name, popper."""
    name = f"({wire.name})" if wire.name else ""
    return f"{wire.role.value}{wire.stage}{name}" + (f"<{wire.peer}" if wire.peer >= 0 else "")


def test_the_table_of_a_net_with_a_skip_two_pops_and_a_feed() -> None:
    """The only place where effects are written down, against what the paper would say."""
    assert {
        "0F": "input0 -> act0 skip0(e) report0 residual0",
        "0F-": "input0 -> act0 skip0(e) report0",
        "0R": "input0 -> residual0",
        "0B": "residual0 grad0 skip_grad0(e)<2 skip_grad0(e)<1 -> ",
        "0I": "residual0 grad0 skip_grad0(e)<2 skip_grad0(e)<1 -> weight_residual0",
        "0W": "weight_residual0 -> ",
        "0O": "residual0 -> offloaded0",
        "0L": "offloaded0 -> residual0",
        "0G": " -> sums0",
        "0S": "sums0 -> ",
        "1F": "act0 skip0(e) feed0(mask) -> act1 report1 residual1",
        "1F-": "act0 skip0(e) feed0(mask) -> act1 report1",
        "1R": "act0 skip0(e) feed0(mask) -> residual1",
        "1B": "residual1 grad1 -> grad0 skip_grad0(e)<1",
        "1I": "residual1 grad1 -> grad0 skip_grad0(e)<1 weight_residual1",
        "1W": "weight_residual1 -> ",
        "1O": "residual1 -> offloaded1",
        "1L": "offloaded1 -> residual1",
        "1G": " -> sums1",
        "1S": "sums1 -> ",
        "2F": "act1 skip0(e) target2 -> report2 residual2",
        "2F-": "act1 skip0(e) target2 -> report2",
        "2R": "act1 skip0(e) target2 -> residual2",
        "2B": "residual2 -> grad1 skip_grad0(e)<2",
        "2I": "residual2 -> grad1 skip_grad0(e)<2 weight_residual2",
        "2W": "weight_residual2 -> ",
        "2O": "residual2 -> offloaded2",
        "2L": "offloaded2 -> residual2",
        "2G": " -> sums2",
        "2S": "sums2 -> ",
        "0U": " -> ",
        "1U": " -> ",
        "2U": " -> ",
    } == table(net(), loss=True, outputs=False)


def test_without_a_loss_the_last_stage_needs_the_gradient_of_its_output() -> None:
    """vjp: the caller gives it; no target is read."""
    rows = table(net(), loss=False, outputs=True)
    assert "act1 skip0(e) -> output2 report2 residual2" == rows["2F"]
    assert "residual2 grad2 -> grad1 skip_grad0(e)<2" == rows["2B"]


def test_outputs_come_only_from_the_last_stage() -> None:
    """With a loss too, where the plan returns outputs."""
    rows = table(net(), loss=True, outputs=True)
    assert ["2F-", "2F"] == [word for word, row in rows.items() if "output" in row]
    assert "act1 skip0(e) target2 -> output2 report2 residual2" == rows["2F"]


@pytest.mark.parametrize("kind", [Kind.R, Kind.W, Kind.O, Kind.L, Kind.G])
def test_remat_the_weights_and_moves_write_nothing_that_others_see(kind: Kind) -> None:
    """R and L write the residual only, so statistics cannot count twice; W ends in the
    parameters."""
    given = EffectContext(net(), routes(net()), True, False)
    expected = {
        Kind.R: [Role.RESIDUAL],
        Kind.W: [],
        Kind.O: [Role.OFFLOADED],
        Kind.L: [Role.RESIDUAL],
        Kind.G: [Role.SUMS],
    }[kind]
    assert [expected] * 3 == [
        [wire.role for wire in effects(kind, s, True, given)[1]] for s in range(3)
    ]


def test_a_step_without_a_reduction_before_it_begins_the_sums_itself() -> None:
    """And leaves them to the caller, as the reduction does."""
    given = EffectContext(net(), routes(net()), True, False, reduced={0})
    rows = [effects(Kind.S, s, True, given) for s in range(3)]
    assert [("sums0", ""), ("", "sums1"), ("", "sums2")] == [
        (" ".join(map(show, reads)), " ".join(map(show, writes))) for reads, writes in rows
    ]


def test_one_stage_reads_the_input_and_writes_only_its_report() -> None:
    """First and last at once."""
    rows = table([stage(lambda p, x: x)], loss=True, outputs=False)
    assert ["input0 target0 -> report0 residual0", "residual0 -> "] == [rows["0F"], rows["0B"]]


@pytest.mark.parametrize("carry", [False, True])
def test_first_and_last_slices_read_and_write_the_callers_carry(carry: bool) -> None:
    """Only if the plan keeps the carry between runs; a slice in between never does."""
    given = EffectContext([stage(_carrying)], {}, loss=False, outputs=False, carry=carry)
    came, went = (" carry_in0", " carry_out0") if carry else ("", "")
    places = [(True, False), (False, False), (False, True), (True, True)]
    assert [
        ("input0" + came, "carry0 report0"),
        ("input0 carry0", "carry0 report0"),
        ("input0 carry0", (went + " report0").strip()),
        ("input0" + came, (went + " report0").strip()),
    ] == [
        tuple(" ".join(map(show, wires)) for wires in effects(Kind.F, 0, False, given, Among(*at)))
        for at in places
    ]


def _carrying(p: object, x: object, *, carry: object) -> None:
    raise AssertionError


def test_a_skip_that_nobody_pops_is_not_written() -> None:
    """What a composition already popped inside is offered, and dropped where no one takes it."""
    inner = compose(stage(lambda p, x: x, stash=["e"]), stage(lambda p, x, *, skips: x, pop=["e"]))
    assert ("e",) == inner.offers
    last = stage(lambda p, x: x)
    taker = stage(lambda p, x, *, skips: x, pop=["e"])
    assert (
        "input0 -> act0 report0 residual0" == table([inner, last], loss=True, outputs=False)["0F"]
    )
    assert (
        "input0 -> act0 skip0(e) report0 residual0"
        == table([inner, taker], loss=True, outputs=False)["0F"]
    )


def test_a_small_plan_word_for_word() -> None:
    """What print(plan) shows: the slots of each lane, then every instruction in plan order."""
    plan = make_plan(
        [stage(lambda p, x: x)] * 2, Schedule.parse("0F0 0B0\n1F0 1I0 1W0", name="two"), loss=print
    )
    assert [
        "plan: <Schedule two: 2 stages, 1 microbatch, 2 devices> on unbound; 18 instructions",
        "  lane 0, slots: 0 input from caller, 1 grad from 1, 2 act, 3 report, 4 residual",
        (
            "  lane 1, slots: 0 act from 0, 1 target from caller, 2 report, 3 residual, 4 grad, 5 "
            "weight_residual"
        ),
        "0: receive input[0,0]@0 from caller",
        "0: 0F0  reads input[0,0]@0  writes act[0,0]@2 report[0,0]@3 residual[0,0]@4",
        "0: free input[0,0]@0",
        "0: send act[0,0]@2 to 1@0",
        "0: free act[0,0]@2",
        "1: receive act[0,0]@0 from 0",
        "1: receive target[1,0]@1 from caller",
        "1: 1F0  reads act[0,0]@0 target[1,0]@1  writes report[1,0]@2 residual[1,0]@3",
        "1: free act[0,0]@0 target[1,0]@1",
        "1: 1I0  reads residual[1,0]@3  writes grad[0,0]@4 weight_residual[1,0]@5",
        "1: free residual[1,0]@3",
        "1: send grad[0,0]@4 to 0@1",
        "1: free grad[0,0]@4",
        "0: receive grad[0,0]@1 from 1",
        "0: 0B0  reads residual[0,0]@4 grad[0,0]@1",
        "0: free residual[0,0]@4 grad[0,0]@1",
        "1: 1W0  reads weight_residual[1,0]@5",
        "1: free weight_residual[1,0]@5",
    ] == str(plan).splitlines()


def test_a_plan_that_offloads() -> None:
    """A residual is in one place at a time: O frees it, L writes it again; nothing crosses
    lanes."""
    schedule = Schedule.parse("0F0 0O0 0F1 0L0 0B0 0B1", name="moved")
    lane = make_plan([stage(lambda p, x: x)], schedule, loss=print).program.lane(0)
    assert [
        "0F0  reads input[0,0]@0 target[0,0]@1  writes report[0,0]@2 residual[0,0]@3",
        "0O0  reads residual[0,0]@3  writes offloaded[0,0]@4",
        "0F1  reads input[0,1]@0 target[0,1]@1  writes report[0,1]@5 residual[0,1]@3",
        "0L0  reads offloaded[0,0]@4  writes residual[0,0]@6",
        "0B0  reads residual[0,0]@6",
        "0B1  reads residual[0,1]@3",
    ] == [line for line in lane.lines() if line[0].isdigit()]


def test_in_a_vjp_what_was_moved_waits_at_the_host_for_the_cotangents() -> None:
    """O straight after a last forward belongs to the first half; no lane's own order changes."""
    schedule = Schedule.parse("0F0 0O0 0F1 0O1 0L0 0B0 0L1 0B1\n1F0 1F1 1O1 1B0 1L1 1B1")
    program = lower([stage(lambda p, x: x)] * 2, schedule, loss=False, outputs=True, halves=True)
    order = [str(program.action(code)) for code in program.order]
    for lane, actions in enumerate(schedule.orders):
        assert [str(action) for action in actions] == [one for one in order if one[0] == str(lane)]
    assert {"0F0", "0O0", "0F1", "0O1", "1F0", "1F1", "1O1"} == set(order[:7])


def test_skips_go_straight_to_who_pops_them() -> None:
    """One copy for each lane that pops, none through the stages between."""
    stages = [
        stage(lambda p, x: x, stash=["e"]),
        stage(lambda p, x: x),
        stage(lambda p, x, *, skips: x, pop=["e"]),
        stage(lambda p, x, *, skips: x, pop=["e"]),
    ]
    program = make_plan(stages, Schedule.parse("0F0\n1F0\n2F0 3F0")).program
    sends = [
        line for lane in program.lanes for line in lane.lines() if line.startswith("send skip")
    ]
    assert ["send skip[0,0,e]@2 to 2@0"] == sends
    assert "free act[2,0]@2 skip[0,0,e]@0" == [*program.lane(2).lines()][-1]
