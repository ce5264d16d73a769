"""Steps in several processes are those of one: norms, clipping, scalers, tied parameters,
accumulation, evaluation."""

import pytest
from common import same
from functional_rules import MAKERS
from torch import nn

import funcpipe as fp


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("kind", ["plain", "late", "scale", "scaler"])
def test_steps_are_those_of_one_process(pools, kind, size):
    for wrong in pools(size).all("training", kind):
        assert [] == wrong


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("kind", ["plain", "clips", "scale", "late"])
def test_steps_inside_of_runs_are_those_after_them(pools, kind, size):
    for wrong in pools(size).all("stepping", kind):
        assert [] == wrong


@pytest.mark.parametrize("kind", ["tied", "inside", "replicas"])
def test_copies_of_a_parameter_are_stepped_alike(pools, kind):
    """Other options on a rank raise an error on all ranks, and nothing has stepped."""
    what = "of rank 0, in the replicas" if kind == "replicas" else "'table' of stage 0 and 'table'"
    for (fine, kept), (error, is_as_before) in pools(2).all("unlike_options", kind):
        assert ("", False, True) == (fine, kept, is_as_before)
        assert what in error


@pytest.mark.parametrize(
    ("kind", "size"),
    [
        *((kind, 2) for kind in ("plain", "scheduled", "refused", "fails", "clips", "scale")),
        *(("plain", 4), ("fails", 4)),
    ],
)
def test_several_batches(pools, kind, size):
    """All at once; after what clips or is skipped one by one."""
    for wrong, walks in pools(size).all("several_batches", kind):
        assert [] == wrong
        again = [1] * 4 if kind in ("clips", "scale") else []
        assert 3 * [4, *again] == walks


@pytest.mark.parametrize("kind", ["tied", "norm", "late", "hooked", "last step", "compiled"])
def test_several_batches_of_what_lanes_cannot_step(pools, kind):
    """They go one by one on all ranks, whichever of them it is because of."""
    for wrong, walks in pools(2).all("several_batches", kind):
        assert [] == wrong
        assert max(walks) == (4 if kind in ("norm", "compiled") else 1)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["plain", "reduced", "sharded", "fails", "clips", "uneven"])
def test_several_batches_of_replicas(pools, kind):
    """Each S waits for the sums of its batch alone; with other numbers of microbatches all go one
    by one."""
    for wrong, walks in pools(4).all("several_batches_of_replicas", kind):
        assert [] == wrong
        assert 3 * {"clips": [4, 1, 1, 1, 1], "uneven": [1, 1, 1, 1]}.get(kind, [4]) == walks


@pytest.mark.parametrize("size", [2, 4])
def test_no_rank_waits_for_all_between_batches(pools, size):
    """The first lane begins the second batch while the last one still steps in the first."""
    (((begun,), _), *_, (_, (ended,))) = pools(size).all("goes_on")
    assert begun < ended


def test_accumulation(pools):
    for wrong in pools(2).all("accumulated"):
        assert [] == wrong


def test_evaluation_between_steps(pools):
    for wrong in pools(2).all("evaluated"):
        assert [] == wrong


@pytest.mark.parametrize("size", [2, 4])
def test_values_that_change_their_form(pools, size):
    """Rows differ from run to run, and a stage's output is as wide as its numbers say."""
    for wrong in pools(size).all("changing", 12):
        assert [] == wrong


@pytest.mark.parametrize("size", [2, 4])
def test_the_face_of_torchs_schedules(pools, size):
    for wrong in pools(size).all("stepped"):
        assert [] == wrong


@pytest.mark.parametrize("size", [2, 3])
def test_one_timeline_of_all(pools, size):
    """Each action once on its lane, and after those that it needs; every rank has the same, and the
    same costs."""
    (first, cost), *others = pools(size).all("timed")
    assert all(other == (first, cost) for other in others)
    assert cost.num_stages == 4
    assert min(*cost.forward, *cost.backward, cost.comm) > 0
    ends = {span.action: span.end for span in first.spans}
    assert len(ends) == len(first.spans) == 4 * 4 * 2
    assert 0 == min(span.start for span in first.spans)
    assert {(span.device, span.action.stage) for span in first.spans} == {
        (stage, stage) for stage in range(4)
    }
    for span in first.spans:
        assert all(ends[need] <= span.start for need in span.action.needs() if need in ends)
    assert "device 3" in str(fp.draw(first))


def test_two_pipelines_in_a_mesh(pools):
    for wrong in pools(4).all("meshes"):
        assert [] == wrong


@pytest.mark.parametrize(
    ("kind", "rows"),
    [
        ("plain", (8, 8)),  # as many microbatches on each replica
        *(
            (kind, (10, 3))
            for kind in ("plain", "turned", "late", "weighed", "reduced", "tied", "compiled")
        ),
    ],
)
def test_replicas(pools, kind, rows):
    """2 x 2: losses and statistics are those of one process with all rows, gradients to rounding,
    replicas alike."""
    results = pools(4).all("replicated", kind, rows)
    by_rank = {}
    for wrong, rank, grads, norm in results:
        assert [] == wrong
        assert by_rank.setdefault(rank, (grads, norm)) == (grads, norm)


@pytest.mark.parametrize(
    "kind",
    [
        "plain",
        "reduced",
        "clips",
        "scale",
        "late",
        "tied",
        "compiled",
        "sharded",
        "fails",
        "hooked",
    ],
)
def test_replicas_that_step_inside_of_runs(pools, kind):
    """The bits of steps after them; each rank has stepped its two stages on its lane, but for those
    that are tied."""
    for rank, (wrong, by_lanes) in enumerate(pools(4).all("stepping_replicas", kind, (8, 9))):
        assert [] == wrong
        hooked = kind == "hooked" and rank == 0
        assert by_lanes >= (0 if hooked else 4 if kind == "tied" else 2 if kind == "late" else 8)


def test_optimizers_that_ask_other_replicas_step_at_the_end(pools):
    """On lanes of one process each would ask in an order of its own."""
    for wrong in pools(2).all("stepping_whole_matrices"):
        assert [] == wrong


def test_a_functional_optimizer_on_replicas(pools, tmp_path):
    """Whole and sharded; one process continues in two stages from both checkpoints."""
    for wrong in pools(4).all("functional", tmp_path):
        assert [] == wrong
    states = []
    for shard in (False, True):
        split = fp.split(nn.Sequential(*[nn.Linear(6, 6) for _ in range(4)]), 2)
        optimizer = MAKERS["adamw"](fp.leaves(split.params))
        fp.load(tmp_path / str(shard), split, optimizer=optimizer)
        states.append([split.params, [*optimizer.state.values()]])
    assert same(*states)
    assert len(optimizer.state) == 8
    assert all(int(state[".count"]) == 4 for state in optimizer.state.values())


def test_a_step_takes_no_longer_than_it_takes(pools):
    """What it waits for, half a second of another replica for each microbatch, is no time of its
    own."""
    assert max(pools(2).all("late_sums")) < 0.3


def test_replicas_of_other_lengths_step_at_the_end(pools):
    for wrong, by_lanes in pools(4).all("stepping_replicas", "reduced", (10, 3)):
        assert [] == wrong
        assert not by_lanes


def test_a_rank_with_nothing_to_train(pools):
    first, second = pools(2).all("scaled_without_leaves")
    assert first == second
    assert [8.0, 4.0, 4.0, 8.0] == first


@pytest.mark.parametrize(
    ("what", "given"),
    [("inputs", "apart"), ("target", "apart"), ("inputs and target", "both"), ("target", "both")],
)
def test_weights_by_what_some_ranks_have(pools, what, given):
    for wrong in pools(2).all("weighed", what, given):
        assert [] == wrong


def test_a_replica_whose_targets_are_all_ignored(pools):
    """It counts nothing, like its rows in one process; only what is unused, or ignored, everywhere
    is so."""
    for wrong in pools(2).all("ignored"):
        assert [] == wrong


@pytest.mark.parametrize("kind", ["plain", "reduced", "sharded"])
def test_leaves_that_only_some_replicas_use(pools, kind):
    """A leaf is stepped on all replicas if any uses it, and on none otherwise, as by DDP."""
    found = pools(4).all("unused_leaves_of_replicas", kind)
    assert 4 * [[]] == [wrong for wrong, _ in found]
    for one, other in zip(found[:2], found[2:], strict=True):
        assert same(one[1], other[1])
