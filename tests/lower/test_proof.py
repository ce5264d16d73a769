"""The proof against abstract machines: what is proven comes to its end, and nothing that hangs or
reads what is not there is proven."""

import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import combinations_with_replacement
from random import Random
from typing import Any

import pytest
from abstract_lanes import by_counts, by_replicas, by_slots, ends_of
from common import schedules
from hypothesis import given, settings
from hypothesis import strategies as st
from lane_proof import prove
from random_plans import plans

from funcpipe import schedules as families
from funcpipe._src.core.errors import PlanError, ScheduleError
from funcpipe._src.data.lowered import Lowered
from funcpipe._src.data.plan import Plan
from funcpipe._src.data.program import CALLER, Call, Pool, Role
from funcpipe._src.data.schedule import Kind, Schedule, serving
from funcpipe._src.data.stage import Stage
from funcpipe._src.lower.plan import make_plan, program_for


def proven(program: Lowered) -> bool:
    try:
        prove(program)
    except PlanError:
        return False
    return True


def assert_ends(program: Lowered) -> None:
    """It is proven, and all machines come to their end."""
    prove(program)
    assert ("", "", "") == (by_slots(program, True), by_slots(program, False), by_counts(program))


def nets(count: int) -> list[list[Stage]]:
    """A plain one, and one with skips over one and several stages, one of them popped twice, and a
    feed."""
    plain = [Stage(lambda p, x: x) for _ in range(count)]
    if count < 4:
        return [plain]
    stash, pop = ["ab", "c", *[""] * (count - 2)], [*[""] * (count - 2), "ac", "ab"]
    rich = [
        Stage(
            lambda p, x, **extras: x,
            stash=tuple(a),
            pop=tuple(b),
            feeds=("mask",) if stage % 2 else (),
        )
        for stage, (a, b) in enumerate(zip(stash, pop, strict=True))
    ]
    return [plain, rich]


def plan_of(stages: list[Stage], schedule: Schedule) -> Plan:
    return make_plan(stages, schedule, loss=print if schedule.has_backward else None)


@cache
def good() -> list[Lowered]:
    """Programs of all families in small sizes, plain and rich."""
    sizes = [(2, 3), (3, 2), (4, 3), (4, 5)]
    all_of = [
        one for s, m in sizes for back in (True, False) for one in schedules(s, m, backward=back)
    ]
    return [
        plan_of(stages, schedule).program
        for schedule in all_of
        for stages in nets(schedule.num_stages)
    ]


def test_every_family_is_proven() -> None:
    """With skips, feeds, remat, offload and reduce; and it ends."""
    for program in good():
        assert_ends(program)


def test_the_programs_of_smaller_batches_and_of_halves_are_proven() -> None:
    """All that a plan may run."""
    for stages in nets(4):
        plan = make_plan(stages, families.looped_bfs(4, 4, num_devices=2), outputs=True)
        assert_ends(program_for(plan, 4, halves=True))
        assert_ends(program_for(plan, 3))
        assert_ends(program_for(plan_of(stages, families.one_f_one_b(4, 4)), 1))


@settings(deadline=None, database=None, max_examples=100)
@given(plans())
def test_every_legal_schedule_of_any_net_is_proven(plan: Plan) -> None:
    """Whatever the schedule: plan order has what is waited for first."""
    assert_ends(plan.program)


@pytest.mark.slow
@pytest.mark.parametrize(
    "family", [families.one_f_one_b, families.zero_bubble, families.looped_bfs, families.zb_h2]
)
def test_large_programs_are_proven(family: Callable[[int, int], Schedule]) -> None:
    """256 stages and microbatches; and the machine that counts ends."""
    program = plan_of(nets(256)[1], family(256, 256)).program
    prove(program)
    assert "" == by_counts(program)
    assert not proven(replace(program, order=(*program.order[1000:], *program.order[:1000])))


# -- what is spoilt is refused
# -------------------------------------------------------------------------------


def moved(chance: Random, program: Lowered) -> Lowered:
    """An action somewhere else in plan order."""
    order = [*program.order]
    order.insert(chance.randrange(len(order)), order.pop(chance.randrange(len(order))))
    return replace(program, order=tuple(order))


def exchanged(chance: Random, program: Lowered) -> Lowered:
    """Two actions of one lane in each other's place."""
    lane = chance.choice(program.lane_order)
    here = [at for at, other in enumerate(program.lane_order) if other == lane]
    first = chance.randrange(len(here))
    near = here[max(0, first - 2) : first + 3] if chance.random() < 0.7 else here
    order, one, other = [*program.order], here[first], chance.choice(near)
    order[one], order[other] = order[other], order[one]
    return replace(program, order=tuple(order))


def turned(chance: Random, program: Lowered) -> Lowered:
    """A lane in another order, the places of its actions among all the same."""
    lane = chance.choice(program.lane_order)
    here = [at for at, other in enumerate(program.lane_order) if other == lane]
    start = chance.randrange(len(here))
    part = here[start : start + chance.randint(2, 6)]
    order = [*program.order]
    for at, code in zip(part, chance.sample([order[at] for at in part], len(part)), strict=True):
        order[at] = code
    return replace(program, order=tuple(order))


def dropped(chance: Random, program: Lowered) -> Lowered:
    """An action is missing."""
    order = [*program.order]
    if len(order) > 1:
        order.pop(chance.randrange(len(order)))
    return replace(program, order=tuple(order))


def added(chance: Random, program: Lowered) -> Lowered:
    """An action that is there or could be, beside another one or in its place."""
    order = [*program.order]
    at = chance.randrange(len(order))
    order[at : at + chance.randint(0, 1)] = [
        chance.randrange(len(program.calls) * program.num_pieces)
    ]
    return replace(program, order=tuple(order))


def resized(chance: Random, program: Lowered) -> Lowered:
    """A pool of more or fewer slots."""
    pools = [*program.pools]
    if not pools:
        return program
    at = chance.randrange(len(pools))
    pools[at] = pools[at]._replace(
        slots=chance.choice([0, *[pools[at].slots - 1] * 4, pools[at].slots + 1])
    )
    return replace(program, pools=tuple(pools))


def rerouted(chance: Random, program: Lowered) -> Lowered:
    """Two pools with each other's number, or one pool that begins or ends elsewhere."""
    pools = [*program.pools]
    if chance.random() < 0.5:
        at, lane = chance.randrange(len(pools)), chance.randrange(-1, program.num_lanes)
        pools[at] = chance.choice(
            [pools[at]._replace(source=lane), pools[at]._replace(lane=max(lane, 0))]
        )
        return replace(program, pools=tuple(pools))
    one, other = chance.choices(range(len(pools)), k=2)
    pools[one], pools[other] = pools[other], pools[one]
    return replace(program, pools=tuple(pools))


def misread(chance: Random, program: Lowered) -> Lowered:
    """A call reads less, something else, elsewhere, or twice."""
    calls = [*program.calls]
    at = chance.choice([at for at, call in enumerate(calls) if call.reads] or [0])
    reads = [*calls[at].reads] or [(0, -1)]
    one = chance.randrange(len(reads))
    wire, pool = reads[one]
    near = [number for number, each in enumerate(program.pools) if each.lane == calls[at].lane]
    other = chance.choice([-1, chance.randrange(len(program.pools)), *near])
    changes = [
        [],
        [(wire, other)],
        [(chance.randrange(len(program.wires)), pool)],
        [(wire, pool), (wire, pool)],
    ]
    reads[one : one + 1] = chance.choice(changes)
    calls[at] = calls[at]._replace(reads=tuple(reads))
    return replace(program, calls=tuple(calls))


def missent(chance: Random, program: Lowered) -> Lowered:
    """A call sends less, to another lane, into another pool, or in another order."""
    calls = [*program.calls]
    sending = [at for at, call in enumerate(calls) if call.sends]
    if not sending:
        return dropped(chance, program)
    at = chance.choice(sending)
    sends = [*calls[at].sends]
    one = chance.randrange(len(sends))
    wire, to, pool = sends[one]
    lane, other = chance.randrange(program.num_lanes), chance.randrange(len(program.pools))
    fits = [number for number, each in enumerate(program.pools) if each.source == calls[at].lane]
    away = chance.choice(fits or [pool])
    sends[one : one + 1] = chance.choice(
        [
            [],
            [(wire, lane, pool)],
            [(wire, to, other)],
            [(wire, program.pools[away].lane, away)],
            sends[one:][::-1],
        ]
    )
    calls[at] = calls[at]._replace(sends=tuple(sends))
    return replace(program, calls=tuple(calls))


def miswritten(chance: Random, program: Lowered) -> Lowered:
    """A call writes less, or what another writes (and sends), or stands on another lane."""
    calls = [*program.calls]
    at = chance.randrange(len(calls))
    mine, other = calls[at], chance.choice(calls)
    fewer = tuple(wire for wire in mine.writes if chance.random() < 0.5)
    more = tuple({*mine.writes, *other.writes})
    calls[at] = chance.choice(
        [
            mine._replace(writes=fewer),
            mine._replace(writes=more, sends=tuple({*mine.sends, *other.sends})),
            mine._replace(writes=more),
            mine._replace(lane=chance.randrange(4)),
        ]
    )
    return replace(program, calls=tuple(calls))


SPOIL = [moved, exchanged, turned, dropped, added, resized, rerouted, misread, missent, miswritten]


def test_of_what_was_spoilt_nothing_is_proven_that_hangs_or_reads_what_is_not_there() -> None:
    """Nor what leaves something over. Of what all machines end little is refused: orders that are
    none for one thread."""
    chance = Random(0)
    refused, hanging, ending, needless = 0, 0, 0, 0
    for spoil in SPOIL * 200:
        program = chance.choice(good())
        spoilt = spoil(chance, program)
        ends = ends_of(spoilt)
        is_proven, ended = proven(spoilt), ends == ("", "", "")
        assert ended or not is_proven, (spoil, ends)
        refused += not is_proven
        hanging += "hangs" in ends
        ending += ended
        needless += ended and not is_proven
    assert refused > 1400
    assert hanging > 300
    assert needless < ending / 4, (needless, ending)


@settings(deadline=None, database=None, max_examples=100)
@given(
    plans(),
    st.randoms(use_true_random=False),
    st.lists(st.sampled_from(SPOIL), min_size=1, max_size=3),
)
def test_of_any_net_and_schedule_too(
    plan: Plan, chance: Random, spoils: list[Callable[[Random, Lowered], Lowered]]
):
    """Spoilt once or several times."""
    program = plan.program
    for spoil in spoils:
        program = spoil(chance, program)
    assert not proven(program) or ends_of(program) == ("", "", "")


def test_a_way_can_be_blocked_by_what_goes_before() -> None:
    """So the machine would see it if order over several pools were not proven: only what comes
    after it hangs."""
    chance = Random(1)
    spoilt = [spoil(chance, chance.choice(good())) for spoil in [resized, turned] * 300]
    blocked = [
        one for one in spoilt if by_counts(one) == "hangs" and by_counts(one, one_way=False) == ""
    ]
    assert blocked
    assert not any(map(proven, blocked))


# -- replicas that gather their parameters
# -------------------------------------------------------------------------------


def counting(program: Lowered) -> dict[int, set[int]]:
    """By stage, the U that gather where this is the smallest replica, as `ShardedParams.count`
    says."""
    served = serving([program.action(code) for code in program.order])
    return {
        stage: {0, *(action.microbatch for action in served if action.stage == stage)}
        for stage in range(program.num_stages)
    }


@cache
def gathering() -> list[Plan]:
    """Plans with and without U, in several families; in the last ones forwards stand in no
    ascending order."""
    made: list[Schedule] = []
    for family in (families.one_f_one_b, families.interleaved, families.zbv, families.looped_bfs):
        plain = family(4, 5, num_devices=2)
        made += [plain, families.gather_params(plain), families.gather_params(plain, ahead=4)]
        made += [
            families.gather_params(plain, whole=whole)
            for whole in (1, 2)
            if family is families.looped_bfs
        ]
    turned = "0F2 1F2 0F0 0F1 1F1 1F0 1B2 0B2 1B0 1B1 0B1 0B0"
    made += [Schedule.parse(turned), families.gather_params(Schedule.parse(turned), ahead=2)]
    made.append(
        Schedule.parse("0U0 0F2 1U0 1F2 0U1 0F0 1U1 0F1 1F1 1F0 1B2 0U2 0B2 1B0 1U2 1B1 0B1 0B0")
    )
    # Of two microbatches, stages compute nothing between their second U and their third.
    made.append(
        Schedule.parse("0U0 1U0 0F0 1F0 0U1 1U1 0F2 1F2 0U2 1U2 0F1 1F1 1B0 0B0 1B1 0B1 1B2 0B2")
    )
    made += [families.reduce_grads(schedule) for schedule in made]
    return [plan_of(nets(schedule.num_stages)[-1], schedule) for schedule in made]


def test_replicas_of_all_numbers_of_microbatches_end_together() -> None:
    """Each pair of numbers; each way has the same gathers in the same order, then the sum."""
    for plan in gathering():
        programs = {
            count: program_for(plan, count) for count in range(1, plan.num_microbatches + 1)
        }
        for fewer, more in combinations_with_replacement(programs, 2):
            counted = counting(programs[fewer])
            assert "" == by_replicas([programs[fewer], programs[more]], [counted] * 2), (
                str(plan.schedule),
                fewer,
                more,
            )
            ways = [ways_of(programs[count], counted) for count in (fewer, more)]
            assert ways[0] == ways[1]
            assert all(way.endswith("G") for way in ways[0]) or "G" not in "".join(ways[0])


def ways_of(program: Lowered, counted: dict[int, set[int]]) -> list[str]:
    """What each stage does with its replicas, in order."""
    actions = [program.action(code) for code in program.order]
    done = [
        a
        for a in actions
        if a.kind is Kind.G or (a.kind is Kind.U and a.microbatch in counted[a.stage])
    ]
    return [
        " ".join(str(a) for a in done if a.stage == stage) for stage in range(program.num_stages)
    ]


def test_fewer_microbatches_run_the_order_of_all_with_actions_left_out() -> None:
    """The law that replicas end together by: also of any spoilt program that is proven the smaller
    ones are."""
    for plan in gathering():
        actions = [plan.program.action(code) for code in plan.program.order]
        for count in range(1, plan.num_microbatches):
            fewer = program_for(plan, count)
            assert [fewer.action(code) for code in fewer.order] == [
                a for a in actions if a.kind is Kind.U or a.microbatch < count
            ]
            assert_ends(fewer)
    chance = Random(3)
    for spoil in SPOIL * 100:
        spoilt = spoil(chance, chance.choice(good()))
        if proven(spoilt):
            assert all(proven(spoilt.first(count)) for count in range(1, spoilt.num_microbatches))


def test_replicas_in_other_orders_hang() -> None:
    """So the machine would see it if they did not all run one order: each of these is proven by
    itself."""
    chance, ends = Random(2), list[str]()
    for spoil in [turned, moved] * 150:
        program = chance.choice(gathering()).program
        spoilt = spoil(chance, program)
        if proven(spoilt):
            ends.append(by_replicas([program, spoilt], [counting(program)] * 2))
    assert {"", "hangs"} <= {*ends}


def test_replicas_that_count_for_themselves_hang() -> None:
    """So it would see it if each gathered what serves itself."""
    ends: set[str] = set()
    for plan in gathering():
        fewer = program_for(plan, 2)
        ends.add(by_replicas([fewer, plan.program], [counting(fewer), counting(plan.program)]))
    assert {"", "hangs"} <= ends


def test_stages_with_and_without_u_are_not_legal() -> None:
    """With fewer microbatches stage 1 is gathered before its U, with more after it: both wait for
    the other."""
    mixed = Schedule.parse("0U0 0F2 1F2 0U1 0F0 1F0 0F1 1F1 1B0 0B0 1B1 0B1 1B2 0B2")
    with pytest.raises(ScheduleError, match="1U0 is missing: all stages have U, or none"):
        families.check(mixed)
    whole = Schedule.parse(str(mixed).replace("0F2 1F2", "0F2 1U0 1F2"))
    program = plan_of(nets(2)[0], whole).program
    without = [code for code in program.order if str(program.action(code)) != "1U0"]
    spoilt = replace(program, order=tuple(without))
    assert "hangs" == by_replicas([spoilt, spoilt.first(2)], [counting(spoilt.first(2))] * 2)


# -- what is said
# -------------------------------------------------------------------------------


def refusal(program: Lowered) -> list[str]:
    with pytest.raises(PlanError) as caught:
        prove(program)
    return str(caught.value).split("\n  * ")[1:]


def test_what_is_waited_for_is_named_with_its_place() -> None:
    """In plan order 0F0 0F1 1F0 1B0 0B0 1F1 1B1 0B1."""
    program = plan_of(nets(2)[0], families.one_f_one_b(2, 2)).program
    order, calls, pools = program.order, program.calls, program.pools
    early = replace(program, order=(order[2], *order[:2], *order[3:]))
    assert ["1F0 on device 1 (0) waits for act[0,0], which 0F0 on device 0 (1) sends"] == refusal(
        early
    )
    own = replace(program, order=(*order[:2], order[3], order[2], *order[4:]))
    assert [
        "1B0 on device 1 (2) waits for residual[1,0], which 1F0 on device 1 (3) makes"
    ] == refusal(own)
    late = replace(program, order=(*order[:4], *order[5:], order[4]))
    assert [
        (
            "1B1 on device 1 (5) waits to send grad[0,1]: 1 slot for grad from 1 on device 0, "
            "taken until 0B1 on device 0 (6)"
        )
    ] == refusal(late)
    small = replace(program, pools=(pools[0], pools[1]._replace(slots=1), *pools[2:]))
    assert [
        (
            "0F1 on device 0 (1) waits to send act[0,1]: 1 slot for act from 0 on device 1, taken "
            "until 1F0 on device 1 (2)"
        )
    ] == refusal(small)
    silent = replace(program, calls=(calls[0]._replace(sends=()), *calls[1:]))
    assert [
        (
            f"1F{m} on device 1 ({at}) waits for act[0,{m}], which 0F{m} on device 0 ({m}) makes "
            "and does not send there"
        )
        for m, at in ((0, 2), (1, 5))
    ] == refusal(silent)
    short = replace(program, order=order[:-1])
    assert [
        "nobody on device 0 reads grad[0,1] after 1B1 on device 1 (6) made it",
        "nobody on device 0 reads residual[0,1] after 0F1 on device 0 (1) made it",
        "0B1 stands nowhere (nor I)",
    ] == refusal(short)
    assert "0B1 on device 0 (8) stands twice" in refusal(
        replace(program, order=(*order, order[-1]))
    )


def test_sends_wait_for_one_free_slot_each() -> None:
    """In the order in which they are sent and freed: two skips go from stage 0 to stage 3 with each
    microbatch."""
    program = plan_of(nets(4)[1], families.one_f_one_b(4, 4)).program
    small = [
        each._replace(slots=1) if each[:3] == (0, 3, Role.SKIP) else each for each in program.pools
    ]
    found = [
        re.findall(r"(\S+) on device", line)
        for line in refusal(replace(program, pools=tuple(small)))
    ]
    assert ["0F0 3F0", "0F1 3F0", "0F1 3F1", "0F2 3F1", "0F2 3F2", "0F3 3F2", "0F3 3F3"] == [
        f"{one} {other}" for one, *_, other in found
    ]


def test_a_value_is_sent_once() -> None:
    """Here the forward sends what the backward sends."""
    program = plan_of(nets(2)[0], families.one_f_one_b(2, 2)).program
    first, forward, backward, *rest = program.calls
    both = forward._replace(writes=(*forward.writes, *backward.writes), sends=backward.sends)
    assert [
        f"1B{m} on device 1 ({at}) makes grad[0,{m}] anew, which is still to be read on device 0"
        for m, at in ((0, 3), (1, 6))
    ] == refusal(replace(program, calls=(first, both, backward, *rest)))


def test_a_program_that_is_not_whole_is_refused_before_its_order_is_looked_at() -> None:
    """Each fault by its call."""
    program = plan_of(nets(2)[0], families.one_f_one_b(2, 2)).program
    (first, last, *_), pools = program.calls, program.pools
    ((wire, to, pool),) = first.sends

    def said(line: str, *changed: Call, **fields: Any) -> None:
        other = replace(program, calls=(*changed, *program.calls[len(changed) :]), **fields)
        assert line in refusal(other)

    said(
        "0F on device 0: act of stage 0 in a pool for act from 0 to 1",
        first._replace(sends=((wire, 0, pool),)),
    )
    said("0F on device 0: there are 4 pools, not 10", first._replace(sends=((wire, to, 9),)))
    said(
        "0F on device 0: it sends grad of stage 0, which it does not make",
        first._replace(sends=((7, to, 3),)),
    )
    said(
        "0F on device 0: report of stage 0 in a pool for act from 0 to 1",
        first._replace(sends=((2, to, pool),)),
    )
    said(
        "0F on device 0 reads, writes or sends something twice",
        first._replace(reads=first.reads * 2),
    )
    said("0F on device 5: there are 2 stages on 2 devices", first._replace(lane=5))
    said("0F on device 0: there are 8 wires", first._replace(reads=((8, -1),)))
    said(
        "1F on device 1: act of stage 0 comes to device 1 in two ways",
        first,
        last._replace(reads=((wire, -1),)),
    )
    given = Pool(CALLER, 1, Role.ACT, 2)
    said(
        "1F on device 1: act of stage 0 in a pool for act from caller to 1",
        first._replace(sends=()),
        pools=(pools[0], given, *pools[2:]),
    )
    said(
        "pool 1 has 0 slots, from 0 to 1", pools=(pools[0], pools[1]._replace(slots=0), *pools[2:])
    )
    said("the order holds actions from 0 to 7", order=(*program.order, 8))


def test_many_faults_are_counted() -> None:
    """20 are told."""
    program = plan_of(nets(4)[0], families.one_f_one_b(4, 8)).program
    lines = refusal(replace(program, order=program.order[::-1]))
    assert 21 == len(lines)
    assert lines[-1].startswith("and ")
