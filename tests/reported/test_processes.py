"""Several processes: different initial numbers, torch's schedules, blame for failures, and hostile
bytes of a peer."""

import collections
import gc
import json
import resource
import socket
import sys
import threading
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import cpu_plan

import funcpipe as fp
from funcpipe._src.data.identity import summed_up, words_of_function
from funcpipe._src.processes.peer import FrameKind
from funcpipe._src.processes.wire_format import pack, unpack, unpack_form

sys.path[:0] = [str(Path(__file__).parent.parent / "ranks"), str(Path(__file__).parent)]

import process_tasks  # noqa: E402
from rank_pool import Pool  # noqa: E402
from teams import Teams, meeting  # noqa: E402


@pytest.fixture(scope="module")
def two():
    pool = Pool(2)
    yield pool
    pool.end()


@pytest.fixture(scope="module")
def four():
    pool = Pool(4)
    yield pool
    pool.end()


# -- processes that begin apart
# -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("how", "place"),
    [
        ("seeds", "params[0]['0.weight']"),
        ("frozen", "params[0]['0.bias']"),
        ("buffers", "state[0]['1.running_mean']"),
        ("loaded on one replica", "params[0]['0.weight']"),
        ("sharded", "params[0]['0.weight']"),
        ("a model later", "params[0]['0.weight']"),
    ],
)
def test_replicas_that_begin_with_other_numbers_are_refused(two, tmp_path, how, place):
    """Each run raises, until they are alike."""
    for first, second, alike in two.all("process_tasks.replicas_begin", how, str(tmp_path)):
        for kind, text in (first, second):
            assert kind == "RanksError"
            assert f"{place}: rank 1 has other numbers than rank 0" in text, text
            assert "torch.manual_seed" in text
        assert alike == "ran"


def test_ranks_with_other_batches_are_refused_until_the_first_run_with_one_batch(two):
    """The inputs come from the first rank and the target from the last, so the loss would be of
    rows that do not belong together."""
    for wrong, right, later in two.all("process_tasks.batches_differ"):
        places = ["inputs", "target", "target[0]", "inputs"]
        for (kind, text), place in zip(wrong, places, strict=True):
            assert kind == "RanksError"
            assert f"the batch: {place} of shape" in text, text
            assert "other numbers on rank 1 than on rank 0" in text
            assert "the same seed" in text
        assert right[0] == right[1] == later > 0


COMPUTE_OTHERWISE = {
    "loss": "the loss: rank 1 has torch.nn.functional.l1_loss, rank 0 has torch.nn.functional.mse_",
    "later loss": "the loss: rank 1 has torch.nn.functional.l1_loss",
    "partial": "rank 1 has torch.nn.functional.smooth_l1_loss(beta=2.0), rank 0 has",
    "module": "rank 1 has torch.nn.modules.loss.HuberLoss(reduction='mean', delta=2.0)",
    "layer": "the layers of stage 0 ('0-1'): rank 1 has 1 ReLU(inplace=False), rank 0 has 1 GELU(",
    "traced layer": "the layers of stage 0 ('0..1'): rank 1 has 1 aten::relu(), rank 0 has 1 aten:",
    "rate": "rank 1 has 1 Dropout(p=0.9, inplace=False), rank 0 has 1 Dropout(p=0.1, inplace=Fals",
    "mode": "rank 1 has 1 Linear(in_features=6, out_features=6, bias=True) in evaluation mode, 1",
    "count": "the plan's stages: rank 1 has 2: 0-1 | 2-3, rank 0 has 2: 0-1 | 2",
}


@pytest.mark.parametrize("what", COMPUTE_OTHERWISE)
def test_replicas_that_compute_otherwise_are_refused(two, what):
    for kind, text in two.all("process_tasks.replicas_compute_otherwise", what, False):
        assert kind == "RanksError"
        assert COMPUTE_OTHERWISE[what] in text
        assert "the plan: " not in text  # a hash
    assert two.all("process_tasks.replicas_compute_otherwise", what, True) == ["ran"] * 2


@pytest.mark.parametrize("what", ["lambdas", "closures"])
def test_lambdas_and_closures_of_one_program_are_alike(two, what):
    assert two.all("process_tasks.replicas_compute_otherwise", what, False) == ["ran"] * 2


def test_ranks_need_only_the_functions_of_their_own_stages(two):
    for loss, plain in two.all("process_tasks.ranks_have_placeholders"):
        assert loss == pytest.approx(plain)


def test_words_about_functions_have_no_facts_of_one_process():
    def closed():
        pass

    class Layer(torch.nn.Module):
        def extra_repr(self):
            return f"fn={closed}, device=cuda:3, table=/tmp/x, p=2"

    class Broken(torch.nn.Module):
        def extra_repr(self):
            return self.nowhere

    words = words_of_function(Layer())
    assert not any(each in words for each in ("0x", "/tmp", ":3")), words
    assert words.endswith("device=cuda,  p=2)"), words
    first, second = (
        summed_up([("0", f"Layer({words})")]) for words in ("{'a', 'b'}, p=2", "{'b', 'a'}, p=2")
    )
    assert first[0] == second[0]
    assert words_of_function(Broken()).endswith("Broken()")
    assert words_of_function(max) == "builtins.max"
    renamed = type("Loss", (), {"__module__": "__mp_main__", "__call__": max})
    assert words_of_function(renamed()) == "__main__.Loss"


def test_tied_weights_of_two_processes_that_begin_apart_are_refused_without_place(two):
    for kind, text in two.all("process_tasks.tied_begin", False):
        assert kind == "RanksError"
        assert "rank 1 has other numbers than params[0]" in text, text
        assert "they are tied" in text
    assert two.all("process_tasks.tied_begin", True) == ["ran"] * 2


def test_numbers_are_compared_in_the_first_run_alone(two):
    assert two.all("process_tasks.comparisons", False) == [1, 1]


def test_who_makes_new_parameters_in_each_step_does_not_pay_in_each(two):
    assert two.all("process_tasks.comparisons", True) == [2, 2]


def test_a_dimension_of_the_mesh_that_is_not_named_is_warned_of(four):
    for plain, named, cut, three, none in four.all("process_tasks.unnamed_dimension"):
        (text,) = plain
        assert "the dimension 'dp'" in text
        assert "dp='dp'" in text
        assert "mesh['pp']" in text
        assert not named
        assert not cut
        assert not three
        assert not none


# -- torch's schedules
# -------------------------------------------------------------------------------


def test_an_in_place_write_into_memory_that_another_process_handed_on_twice_is_refused(two):
    (plain, same), (first, second) = (
        two.all("process_tasks.in_place_behind_a_border", way) for way in (False, True)
    )
    assert plain == same
    assert "writes in place into a value whose memory" in first[1] + second[1]
    assert "PeerError" in (first[0], second[0])


@pytest.mark.parametrize("scale_grads", [True, False])
@pytest.mark.parametrize("loss", process_tasks.LOSSES)
def test_the_schedule_of_ranks_gives_the_gradients_and_losses_of_torchs(two, loss, scale_grads):
    assert max(two.all("process_tasks.as_torch", loss, scale_grads, 1)) < 1e-5


@pytest.mark.parametrize("scale_grads", [True, False])
def test_gradients_of_several_steps_add_up(two, scale_grads):
    assert max(two.all("process_tasks.as_torch", "a function that sums", scale_grads, 2)) < 1e-5


@pytest.mark.parametrize(
    ("how", "wrong", "kind", "text"),
    [
        ("step", 0, "BatchError", "arg_mbs has 3 entries, but the plan has 4 microbatches"),
        ("no_grad", 0, "FuncpipeError", "call schedule.eval there"),
        ("keywords", 1, "TypeError", "'int' object is not iterable"),
    ],
)
def test_wrong_arguments_of_a_schedule_are_told_and_the_next_batches_fit(
    two, how, wrong, kind, text
):
    """A loop that goes on after the error must not give batch k + 1 to run k of the others."""
    heard = two.all("process_tasks.arguments_refused", how)
    assert (kind, text) == (heard[wrong][2][0], heard[wrong][2][2][-len(text) :])
    other = heard[1 - wrong].pop(2)
    assert ("PeerError", wrong) == other[:2]
    assert text in other[2]
    heard[wrong].pop(2)
    for loss, plain in heard[0] + heard[1]:
        assert loss == pytest.approx(plain)


def test_each_replica_gets_the_losses_of_its_own_microbatches(two):
    for number, (want, *got) in enumerate(two.all("process_tasks.losses_of_replicas")):
        assert len(want) == (3 if number else 2)
        for losses in got:
            assert losses == pytest.approx(want)


def test_a_schedule_of_slices_has_no_counterpart_in_torch():
    stages = [fp.stage(lambda p, x: x * p)] * 2
    plan = cpu_plan(stages, fp.schedules.one_f_one_b(2, 2, num_slices=2))
    with pytest.raises(fp.PlanError, match="slices"):
        fp.typing.RankSchedule(plan, "serial", (torch.tensor(1.0),) * 2, None, None)


# -- whose fault it is
# -------------------------------------------------------------------------------


def test_errors_name_the_rank_in_the_pipeline_and_the_process_of_the_job(four):
    first, also, beside, failing = four.all("process_tasks.fails_beside")
    assert (first, beside) == ("ran", "ran")
    assert failing == "failed itself"
    assert also[:2] == (1, 3)
    assert "rank 1 (process 3) failed" in also[2]


@pytest.mark.slow
@pytest.mark.parametrize("before", [0, 2])
def test_a_rank_that_never_calls_run_is_named(two, before):
    (rank, process, text), other = two.all("process_tasks.never_runs", before)
    assert (rank, process, other) == (1, 1, "slept")
    assert "rank 1 is outside of a run" in text


@pytest.mark.slow
def test_a_rank_that_never_calls_ranks_is_named(two):
    (rank, process, text), _ = two.all("process_tasks.never_makes_ranks")
    assert (rank, process) == (1, 1)
    assert "rank 1" in text
    assert "made no fp.ranks" in text


def test_a_rank_that_gives_no_plan_is_told_of_at_once(two):
    began = time.monotonic()
    (kind, text), (own, _) = two.all("process_tasks.gives_no_plan")
    assert (kind, own) == ("RanksError", "PlanError")
    assert "rank 1 refuses" in text
    assert time.monotonic() - began < 15


def test_a_failure_in_step_of_one_rank_is_told_to_all(two):
    """If a rank catches the error and goes on, its next error says that the loops are in different
    steps."""
    here, there = two.all("process_tasks.step_fails")
    assert there[0][:2] == (1, "ArithmeticError")
    step, kind, rank, text = here[0]
    assert (kind, rank) == ("PeerError", 1)
    assert step in (1, 2)  # in the step itself, or in the run after it
    assert "rank 1 failed in fp.step: ArithmeticError: planted" in text


# -- what a peer's bytes may do
# -------------------------------------------------------------------------------

MADE = []


class Evil(collections.namedtuple("Evil", "a b")):
    """Its constructor has a side effect."""

    def __new__(cls, a, b):
        MADE.append(a)
        return super().__new__(cls, a, b)


@dataclass
class Data:
    a: int


class Mapped(dict):
    """A mapping."""


def form(structure, *leaves):
    return json.dumps([structure, leaves, [], [], []]).encode()


@pytest.mark.parametrize(
    "structure",
    [
        ["named", f"{__name__}:Evil", [0]],
        ["class", f"{__name__}:Data", [0], ["tuple", [["leaf", "a"]]]],
        ["class", f"{__name__}:Mapped", [0], ["tuple", []]],
        ["class", "subprocess:Popen", [0], ["leaf", None]],
        ["class", "torch:nn.Linear", [0], ["leaf", None]],
        ["named", f"{__name__}:pytest.Item", [0]],
        ["named", "inspect:Traceback", [0]],
    ],
)
def test_bytes_make_no_value_of_a_class_that_was_never_sent(structure):
    before = {*sys.modules}
    with pytest.raises(fp.PlanError, match="damaged"):
        unpack_form(form(structure, 1))
    assert not MADE
    assert before == {*sys.modules}


@pytest.mark.parametrize("name", ["torch.onnx", "torch._inductor", "torch.nn", "float32"])
def test_bytes_import_nothing_for_a_dtype(name):
    before = {*sys.modules}
    with pytest.raises(fp.PlanError, match="damaged"):
        unpack_form(form(0, {"dtype": name}))
    assert before == {*sys.modules}


def test_a_class_that_this_process_has_sent_comes_back():
    @dataclass
    class Local:
        a: int

    Local.__qualname__ = "Sent"
    Local.__module__ = __name__
    globals()["Sent"] = Local
    data = pack(Local(3))
    assert unpack(data) == Local(3)


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("values", [(0.1, None), (0.1, 0.5)])
def test_ranks_with_another_max_norm_are_refused_before_any_steps(two, values, scaled):
    """Each rank would clip by another factor."""
    for error, kept, apart in two.all("process_tasks.clipped_otherwise", values, scaled):
        assert error[0] == "RanksError", error
        assert all(f"fp.step(max_norm={value})" in error[1] for value in values), error
        assert kept
        assert apart < 1e-6


def test_ranks_may_write_one_max_norm_as_an_int_and_a_float(two):
    for error, kept, _ in two.all("process_tasks.clipped_otherwise", (1, 1.0), False):
        assert error is None
        assert not kept


def test_gradients_of_one_rank_without_their_result_are_refused(two):
    """Each rank would clip by the norm of its own stages."""
    model = process_tasks.net(0)
    x, target = process_tasks.rows(8)
    F.mse_loss(model(x), target).backward()
    want = float(torch.nn.utils.get_total_norm([leaf.grad for leaf in model.parameters()]))
    for number, (refused, kept, norms, alone) in enumerate(
        two.all("process_tasks.steps_of_bare_gradients")
    ):
        for kind, text in refused:
            assert kind == "PlanError"
            assert f"grads has None for stages [{1 - number}], which other ranks have" in text
            assert "give the result" in text
        assert kept
        assert norms == pytest.approx([want, want])
        assert alone == [4.0] * 4


def test_a_save_on_one_rank_is_refused_on_all(tmp_path):
    """Rank 1 has never saved, so it does not know the class of what rank 0 sends."""
    pool = Pool(2)
    try:
        found = pool.all("process_tasks.saves_on_one_rank", str(tmp_path))
    finally:
        pool.end()
    for (kind, text), losses, plain in found:
        assert kind == "RanksError"
        assert (
            "the ranks make different calls: rank 0 is at fp.save: the contents of a checkpoint"
            in text
        )
        assert "rank 1 is at the start of a run" in text
        assert losses == pytest.approx([plain] * 2)
    assert not [*tmp_path.iterdir()]


def test_a_class_that_only_one_process_makes_travels_where_the_plans_code_names_it(two):
    assert two.all("process_tasks.boxes") == [True, True]


def test_a_tensor_of_more_bytes_than_the_machine_has_is_refused_before_there_is_memory_for_it():
    layout = unpack_form(form(0, {"tensor": [[1 << 50], [1], "torch.float32"]})).leaves[0]
    with pytest.raises(fp.PlanError, match="damaged"):
        layout.room()


@pytest.mark.parametrize("length", [1 << 60, 1 << 30])
def test_a_length_that_no_value_has_takes_no_memory(length):
    teams = Teams(2)
    try:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        teams.members[1].peers[0]._socket.send(
            FrameKind.DATA.to_bytes(4, "little") + bytes(20) + length.to_bytes(8, "little")
        )
        time.sleep(0.2)
        teams.members[1].peers[0].shut()
        deadline = time.monotonic() + 5
        while teams.members[0].failure is None:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert ("larger than the memory" in teams.members[0].failure.text) is (length > 1 << 40)
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1 << 18  # KiB
    finally:
        teams.close()


@pytest.mark.parametrize("kind", ["holds", "drips", "floods"])
def test_a_stranger_who_holds_a_connection_delays_nobody(kind):
    store, ends, over = dist.HashStore(), [], threading.Event()

    def connect(rank):
        meeting(store, rank, 2).connect(lambda connected, _: ends.append(connected))

    answering = threading.Thread(target=connect, args=(0,))
    answering.start()
    store.wait(["at/0"], timedelta(seconds=10))
    host, port, _ = json.loads(store.get("at/0"))
    strangers = [
        socket.create_connection((host, port)) for _ in range(100 if kind == "floods" else 5)
    ]

    def drip():
        while not over.wait(0.2):
            for stranger in strangers:
                try:
                    stranger.send(b"x")
                except OSError:
                    return

    dripping = threading.Thread(target=drip)
    if kind == "drips":
        dripping.start()
    time.sleep(0.3)
    began = time.monotonic()
    connect(1)
    answering.join(10)
    assert len(ends) == 2
    assert time.monotonic() - began < 1.5
    over.set()
    if kind == "drips":
        dripping.join()
    for end in [*ends, *strangers]:
        end.close()


def test_a_rendezvous_on_loopback_listens_on_loopback(two):
    for addresses in two.all("process_tasks.listens_at"):
        assert {*addresses} <= {"127.0.0.1"}


# -- what is left behind
# -------------------------------------------------------------------------------


def test_ranks_without_a_timeout_leave_faulthandler_alone(two):
    for without, of_ranks, of_run in two.all("process_tasks.uses_of_faulthandler"):
        assert without == 0
        assert of_ranks > 0
        assert of_run > 0


def test_a_run_that_steps_keeps_no_copies_of_the_parameters():
    """A run copies parameters and the optimizer's state, to undo its steps, and releases the
    copies."""
    params = tuple({"w": torch.randn(200, 200)} for _ in range(2))
    schedule = fp.schedules.step_params(fp.schedules.one_f_one_b(2, 2))
    plan = cpu_plan([fp.stage(lambda p, x: x @ p["w"])] * 2, schedule)
    optimizer = torch.optim.AdamW(fp.leaves(params))
    x = torch.randn(4, 200)
    for _ in range(3):
        fp.run(plan, params, (x, x), optimizer=optimizer)
    gc.collect()
    size = (200, 200)
    kept = {
        each.data_ptr()
        for each in gc.get_objects()
        if type(each) is torch.Tensor and tuple(each.shape) == size
    }
    assert len(kept) == 3 * len(params)  # parameters, and two averages of each


def test_tied_weights_of_one_process_that_begin_apart_are_refused_too():
    """Each run raises, until they are alike. Tied leaves that are one tensor are never compared."""
    stages = [fp.stage(lambda p, x: x * p["w"])] * 2
    plan = cpu_plan(stages, fp.schedules.one_f_one_b(2, 2), ties=[((0, "w"), (1, "w"))])
    params = ({"w": torch.ones(6)}, {"w": torch.full((6,), 2.0)})
    x = torch.randn(4, 6)
    for _ in range(2):
        with pytest.raises(
            fp.PlanError, match=r"params\[1\]\['w'\] has other numbers than params\[0\]\['w'\]"
        ):
            fp.run(plan, params, (x, x))
    params[1]["w"].fill_(1.0)
    grads = fp.run(plan, params, (x, x)).grads
    one = torch.ones(6)
    assert torch.equal(grads[0]["w"], fp.run(plan, ({"w": one}, {"w": one}), (x, x)).grads[0]["w"])
