"""Files: what is written is read back equal; what comes from anywhere is refused with its place,
quickly."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.pipelining import schedules as theirs

import funcpipe as fp
from funcpipe import schedules as S

V_SHAPES = (S.zbv, S.v_half, S.v_min, S.dualpipe_v)
FAMILIES = (
    S.fill_drain,
    S.one_f_one_b,
    S.eager_one_f_one_b,
    S.looped_bfs,
    S.interleaved,
    S.zero_bubble,
    S.zb_h2,
)
HEAD = {"funcpipe": "schedule", "version": 1}


def refused(text: Any) -> str:
    with pytest.raises(fp.ScheduleError) as caught:
        S.from_json(text)
    return str(caught.value)


# JSON there and back


@pytest.mark.parametrize("family", FAMILIES + V_SHAPES)
def test_a_schedule_comes_back_with_its_name(family):
    for schedule in (family(4, 5), S.remat(family(4, 5, num_devices=2))):
        found = S.from_json(S.to_json(schedule))
        assert schedule == found
        assert schedule.name == found.name
        assert all(type(action) is fp.Action for order in found.orders for action in order)


@pytest.mark.parametrize(
    "cost",
    [
        fp.Cost(),
        fp.Cost(1, 2, 3, backward=4, remat=[5, 6.5], comm=0.1, residual=(1e300, 0.0)),
        fp.Cost(forward=[0.1, 0.2, 1 / 3]),
    ],
)
def test_a_cost_comes_back(cost):
    assert cost == S.from_json(S.to_json(cost))


@given(
    st.recursive(
        st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=5),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(
                    ["funcpipe", "version", "orders", "name", "forward", "comm", "residual", "x"]
                ),
                inner,
                max_size=4,
            )
        ),
        max_leaves=12,
    ),
    st.sampled_from(["schedule", "cost"]),
)
@settings(max_examples=150, deadline=None)
def test_any_json_is_read_or_refused(data, kind):
    """Nothing but a ScheduleError comes out, and what is read can be written."""
    for one in (
        data,
        {**data, "funcpipe": kind, "version": 1} if isinstance(data, dict) else [data],
    ):
        try:
            found = S.from_json(json.dumps(one))
        except fp.ScheduleError:
            continue
        assert found == S.from_json(S.to_json(found))


def test_devices_stand_on_lines():
    """A file in a repository shows a change in one device as one line."""
    lines = S.to_json(S.one_f_one_b(2, 2)).split("\n")
    assert '  "0F0 0F1 0B0 0B1",' in lines
    assert '  "1F0 1B0 1F1 1B1"' in lines


# hostile text


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "not JSON"),
        ("{", "not JSON"),
        ("[" * 200_000, "too deep"),
        ('{"a":' * 200_000, "too deep"),
        ("NaN", "NaN is not a number"),
        ('{"funcpipe": "cost", "version": 1, "comm": -Infinity}', "-Infinity is not a number"),
        (
            '{"funcpipe": "cost", "version": 1, "comm": 1e999}',
            "comm: a number from 0, or a list of them; got inf",
        ),
        ('{"funcpipe": "cost", "version": 1, "comm": ' + "9" * 100_000 + "}", "100000 digits"),
        (
            '{"funcpipe": "schedule", "version": 1, "orders": [], "orders": []}',
            "'orders' appears twice",
        ),
        ("[]", "must be an object"),
        ('"schedule"', "must be an object"),
        ("{}", "got None"),
        ('{"funcpipe": ["schedule"], "version": 1}', "names the kind of object"),
        ('{"funcpipe": "__import__", "version": 1}', "one of schedule, cost; got '__import__'"),
        (
            '{"funcpipe": "timeline", "version": 1, "spans": []}',
            "one of schedule, cost; got 'timeline'",
        ),
        ('{"funcpipe": "schedule", "version": 2, "orders": []}', '"version" must be 1'),
        ('{"funcpipe": "schedule", "version": true, "orders": []}', "got True"),
        ('{"funcpipe": "schedule", "version": 1.0, "orders": []}', "got 1.0"),
    ],
    ids=range(18),
)
def test_text_that_is_no_file_of_ours(text, says):
    assert says in refused(text)


@pytest.mark.parametrize("thing", [None, b"{}", 1, Path("a.json")])
def test_what_is_no_text(thing):
    assert "takes text" in refused(thing)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({}, "orders: missing"),
        ({"orders": "0F0"}, "orders: a list; got '0F0'"),
        ({"orders": [["0F0"]]}, 'orders[0]: a text like "0F0 0B0"'),
        ({"orders": ["0F0", "0X0 1F0"]}, "orders[1]: '0X0' is not an action"),
        ({"orders": ["0F-1"]}, "'0F-1' is not an action"),
        ({"orders": ["٣F0"]}, "is not an action"),
        ({"orders": ["0F999999999"]}, "below 1000000"),
        ({"orders": ["9999999999F0"]}, "is not an action"),
        ({"orders": [], "stages": 3, "code": "x"}, "'code': no such field"),
        ({"orders": [], "name": 3}, "name: a text"),
        ({"orders": [], "name": "x" * 201}, "name: a text"),
        ({"orders": [], "name": "\x1b[2J"}, "letters that print"),
        ({"orders": [], "name": "\ud800"}, "letters that print"),
    ],
    ids=range(13),
)
def test_schedules_that_are_refused(fields, says):
    assert says in refused(json.dumps({**HEAD, **fields}))


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"forward": "1"}, "forward: a number from 0, or a list of them; got '1'"),
        ({"forward": None}, "forward: a number"),
        ({"forward": [1, [2]]}, "forward: a number"),
        ({"forward": True}, "got True"),
        ({"forward": -1}, "got -1"),
        ({"comm": ["1"]}, "comm: a number"),
        ({"bandwidth": [1]}, "bandwidth: a number from 0; got"),
        ({"bandwidth": 0}, "bandwidth must be more than 0"),
        ({"skips": 1}, "skips: a list"),
        ({"skips": [[0, 1]]}, "skips[0]: [stash, pop, size]"),
        (
            {"skips": [[1, 1, 2]]},
            "skips must contain (stash, pop, size), with stages 0 <= stash < pop",
        ),
        ({"forwards": 1}, "no such field"),
    ],
    ids=range(12),
)
def test_costs_that_are_refused(fields, says):
    assert says in refused(json.dumps({"funcpipe": "cost", "version": 1, **fields}))


def test_all_faults_at_once_but_not_a_book():
    message = refused(json.dumps({**HEAD, "orders": ["0X0 0Y0", "x" * 10**6], "more": 1}))
    assert 4 == message.count("  * ")
    assert len(message) < 1000
    message = refused(json.dumps({**HEAD, "orders": ["0X0 " * 1000]}))
    assert "and 980 more" in message
    assert 21 == message.count("  * ")


def test_illegal_schedules_are_read_and_refused_where_they_would_run():
    """As with the text form: `check` is what knows, with every fault and the picture of who
    waits."""
    found = S.from_json(json.dumps({**HEAD, "orders": ["0B0 0F0", "1F0 1F0 1B0", "7F3"]}))
    with pytest.raises(fp.ScheduleError, match="stage 2 is missing"):
        fp.simulate(found)
    ahead = S.from_json(json.dumps({**HEAD, "orders": ["0F999999", "999999F0"]}))
    with pytest.raises(fp.ScheduleError, match="is missing"):
        S.check(ahead)


@pytest.mark.slow
def test_a_million_actions():
    """Fault row 21: written and read in seconds."""
    schedule = S.zero_bubble(64, 5210, num_devices=64)
    assert sum(map(len, schedule.orders)) > 10**6
    assert schedule == S.from_json(S.to_json(schedule))


@pytest.mark.parametrize("thing", [3, None, "0F0", fp.Timeline((), 1)])
def test_what_cannot_be_written(thing):
    with pytest.raises(fp.ScheduleError, match="takes a Schedule or a Cost"):
        S.to_json(thing)


def test_a_plan_is_refused_with_its_schedule():
    plan = fp.make_plan(
        [fp.stage(lambda params, x: x)], S.fill_drain(1, 1, backward=False), devices="cpu"
    )
    with pytest.raises(fp.ScheduleError, match=r"fp\.schedules\.to_json\(plan\.schedule\)"):
        S.to_json(plan)


def test_what_would_not_be_read_is_not_written():
    bad = fp.Schedule(((fp.Action(fp.Kind.F, -1, 0),),))
    with pytest.raises(fp.ScheduleError, match="'-1F0' is not an action"):
        S.to_json(bad)
    with pytest.raises(fp.ScheduleError, match="has no JSON"):
        S.to_json(fp.Schedule(((fp.Action(fp.Kind.F, 0, 0),),), b"a"))  # pyright: ignore
    with pytest.raises(fp.ScheduleError, match="letters that print"):
        S.to_json(fp.Schedule(((fp.Action(fp.Kind.F, 0, 0),),), "a\nb"))


# torch's CSV, by torch's own loader


class FakeStage:
    """What torch's schedule classes ask of a stage when they are made; no process group."""

    def __init__(self, index: int, stages: int, devices: int, rank: int) -> None:
        self.stage_index, self.num_stages, self.group_size, self.group_rank = (
            index,
            stages,
            devices,
            rank,
        )
        self.is_first, self.is_last = index == 0, index == stages - 1
        self.has_backward, self.submod = True, None
        self.stage_index_to_group_rank: dict[int, int] = {}


def torch_made(cls: Any, schedule: fp.Schedule) -> Any:
    """One of torch's schedules over fake stages, as rank 0."""
    stages, devices = schedule.num_stages, schedule.num_devices
    local = [stage for stage, device in enumerate(schedule.device_of) if device == 0]
    fakes = [FakeStage(stage, stages, devices, 0) for stage in local]
    return cls(fakes, schedule.num_microbatches, loss_fn=lambda y, t: y.sum())


CASES = [
    (family, stages, microbatches, devices)
    for family in FAMILIES
    for stages, microbatches, devices in [(2, 3, 2), (4, 5, 2), (6, 6, 3), (4, 8, 4)]
] + [(S.one_f_one_b, 3, 4, 2)]
CASES += [
    (family, 2 * devices, count, devices)
    for family in V_SHAPES
    for devices, count in [(2, 5), (4, 8)]
]


@pytest.mark.parametrize(("family", "stages", "microbatches", "devices"), CASES)
def test_torch_loads_ours_and_adds_its_messages(family, stages, microbatches, devices, tmp_path):
    """The loader validates, lowers to sends and receives, and finds the order that we wrote."""
    schedule = family(stages, microbatches, num_devices=devices)
    file = tmp_path / "ours.csv"
    file.write_text(S.to_torch_csv(schedule))
    runtime = torch_made(theirs._PipelineScheduleRuntime, schedule)
    runtime._load_csv(str(file), format="compute_only")
    rows = [",".join(map(str, runtime.pipeline_order[rank])) for rank in range(devices)]
    assert S.to_torch_csv(schedule).split() == rows
    assert dict(enumerate(schedule.device_of)) == runtime.stage_index_to_group_rank
    lowered = runtime.pipeline_order_with_comms
    assert devices == 1 or any("SEND_F" in str(action) for action in lowered[0])
    runtime._dump_csv(str(file), format="compute_only")
    assert schedule == S.from_torch_csv(file.read_text())


@pytest.mark.parametrize(
    ("name", "chunks"),
    [
        ("ScheduleInterleaved1F1B", 2),
        ("ScheduleLoopedBFS", 2),
        ("ScheduleInterleavedZeroBubble", 2),
        ("ScheduleZBVZeroBubble", 2),
        ("ScheduleDualPipeV", 2),
    ],
)
@pytest.mark.parametrize("devices", [2, 4])
def test_torchs_own_schedules_are_read_and_legal(name, chunks, devices, tmp_path):
    """Waits and overlapped pairs included; what is read is legal, and torch loads it once more."""
    count = 2 * devices + 4
    count -= count % devices
    v_shape = name in ("ScheduleZBVZeroBubble", "ScheduleDualPipeV")
    local = (0, 2 * devices - 1) if v_shape else (0, devices)
    fakes = [FakeStage(stage, chunks * devices, devices, 0) for stage in local]
    made = getattr(theirs, name)(fakes, count, loss_fn=lambda y, t: y.sum())
    file = tmp_path / "theirs.csv"
    theirs.PipelineScheduleMulti._dump_csv(made, str(file))
    text = file.read_text()
    schedule = S.from_torch_csv(text, name=name)
    S.check(schedule)
    assert ("OVERLAP_F_B" in text) == bool(schedule.pairs)
    assert [cell for cell in re.split("[,\n]", text) if cell] == re.split(
        "[,\n]", S.to_torch_csv(schedule)
    )[:-1]
    assert (chunks * devices, count, devices) == (
        schedule.num_stages,
        schedule.num_microbatches,
        schedule.num_devices,
    )
    assert ("OVERLAP_F_B" in text) == (name == "ScheduleDualPipeV")
    file.write_text(S.to_torch_csv(schedule))
    runtime = torch_made(theirs._PipelineScheduleRuntime, schedule)
    runtime._load_csv(str(file))
    assert dict(enumerate(schedule.device_of)) == runtime.stage_index_to_group_rank


def test_what_torch_cannot_run_is_refused_with_the_reason():
    cases = {
        "no backwards": S.fill_drain(2, 2, backward=False),
        "torch's schedules have no remat": S.remat(S.one_f_one_b(2, 2)),
        "is missing": fp.Schedule.parse("0F0 0B0\n1F0"),
    }
    for says, schedule in cases.items():
        with pytest.raises(fp.ScheduleError, match=says):
            S.to_torch_csv(schedule)


def test_torch_refuses_what_we_say_that_it_refuses(tmp_path):
    """The reasons above are torch's, not ours."""
    evaluates = S.fill_drain(2, 2, backward=False)
    runtime = torch_made(theirs._PipelineScheduleRuntime, evaluates)
    file = tmp_path / "forwards.csv"
    file.write_text(str(evaluates).replace(" ", ","))
    with pytest.raises(AssertionError, match="Invalid backward microbatches"):
        runtime._load_csv(str(file))
    with pytest.raises(RuntimeError, match="Invalid action string"):
        theirs._Action.from_str("0R0")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("0F0,0B0\n0X0,1F0", "row 2: '0X0' is not an action"),
        ("0F0,(0F1;0B0;0B1)OVERLAP_F_B", "row 1"),
        ("0F0,((0F0;0B0)OVERLAP_F_B;0B0)OVERLAP_F_B", "row 1"),
        ("(" * 100_000, "row 1"),
        ("0F0,__import__('os')", "row 1"),
        ("0F1000000", "below 1000000"),
        (
            "0F0,0B0,0ALL_GATHER1",
            "row 1: '0ALL_GATHER1': funcpipe does not know this action of torch",
        ),
        (
            "0F0,0SEND_F0\n1RECV_F0,1F0",
            "row 2: '1RECV_F0': funcpipe does not know this action of torch; let torch write",
        ),
    ],
    ids=range(8),
)
def test_cells_that_are_no_actions(text, says):
    with pytest.raises(fp.ScheduleError) as caught:
        S.from_torch_csv(text)
    assert says in str(caught.value)
    assert len(str(caught.value)) < 400


def test_actions_of_torch_that_compute_nothing_are_refused_by_name():
    """Those of this torch; they are in "compute_comms" alone."""
    computing = {"FORWARD", "BACKWARD_INPUT", "BACKWARD_WEIGHT", "FULL_BACKWARD", "OVERLAP_F_B"}
    words = [f"0{kind.value}0" for kind in theirs._ComputationType if kind.name not in computing]
    assert "0SEND_F0" in words
    for word in words:
        with pytest.raises(
            fp.ScheduleError,
            match=f"'{word}': .*let torch write the schedule with format=\"compute_only\"",
        ):
            S.from_torch_csv(f"0F0,{word},0B0")
    for name in computing - {"OVERLAP_F_B"}:
        S.from_torch_csv(f"0{theirs._ComputationType[name].value}0")


def test_csv_of_other_systems_line_endings_and_waits():
    assert "0F0 0B0\n1F0 1B0" == str(S.from_torch_csv("0F0,,0B0\r\n,1F0, 1B0 ,\r\n\r\n"))
    with pytest.raises(fp.ScheduleError, match="takes text"):
        S.from_torch_csv(b"0F0")  # pyright: ignore
