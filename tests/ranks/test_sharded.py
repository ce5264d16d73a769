"""Parameters of which each replica has a part, or the processes of a stage: the bits of whole
ones."""

import pytest
import torch
import torch.nn.functional as F
from rank_pool import Failed, within
from rank_tasks import small_model

import funcpipe as fp


@pytest.mark.parametrize(
    ("kind", "rows"),
    [
        *(("plain", (8, 8)), ("bfs", (8, 8))),  # as many microbatches on each replica
        *(
            (kind, (10, 3))
            for kind in ("plain", "gathered", "bfs", "block", "late", "tied", "scaler", "compiled")
        ),
    ],
)
def test_parts_of_parameters(pools, kind, rows):
    for wrong in pools(4).all("sharded", kind, rows):
        assert [] == wrong


def test_parts_that_come_late(pools):
    for wrong in pools(4).all("late_gathers"):
        assert [] == wrong


def test_parameters_that_are_handed_on(pools):
    for wrong in pools(2).all("handed_on"):
        assert [] == wrong


def test_replicas_that_are_placed_differently(pools):
    for result in pools(2).run("placed_differently"):
        assert isinstance(result, Failed)
        assert result.is_a(fp.RanksError), result.trace
        assert "the parameters of rank 0: rank 1 has '1 tensors, 1 of them in parts" in result.text


def test_memory_of_whole_parameters(pools):
    """Gathered once, all four layers are whole at a time; one by one, one is. At the end none has
    memory."""
    assert [[4, 1]] * 2 == pools(2).all("memory_of_parts")


@pytest.mark.parametrize("shard", [False, True])
def test_memory_of_whole_sums(pools, shard):
    """The sums of a stage go as soon as they are summed over the replicas, not at the end of the
    run."""
    assert [[(3, 0), (4, 0)]] * 2 == pools(2).all("memory_of_sums", shard)


def test_memory_of_casts_of_whole_parameters(pools):
    """They go with the parameters: in breadth-first order seven times, and no two stages have
    them."""
    assert [(7, 1, 0)] * 2 == pools(2).all("memory_of_casts")


@pytest.mark.parametrize(
    ("size", "dims", "shard"),
    [
        (4, ("pp", "tp"), False),
        (4, ("dp", "pp", "tp"), False),
        (4, ("dp", "pp", "tp"), True),
        (4, ("tp", "pp", "dp"), True),
        pytest.param(8, ("dp", "pp", "tp"), True, marks=pytest.mark.slow),
    ],
)
def test_matrices_that_two_processes_share(pools, size, dims, shard):
    for wrong in pools(size).all("tensor_parallel", dims, shard):
        assert [] == wrong


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("two axes", "is on the mesh [[0, 1], [2, 3]]"),
        ("along the pipeline", "is on the mesh ["),
        ("sums", "is P"),
    ],
)
def test_what_cannot_be_gathered_is_refused(pools, what, words):
    for rank, result in enumerate(pools(4).run("spread_wrongly", what)):
        assert isinstance(result, Failed), result
        assert result.is_a(fp.PlanError) or result.is_a(fp.PeerError), result.trace
        assert f"params[{rank % 2}]['w'] {words}" in result.text or result.is_a(fp.PeerError), (
            result.text
        )


def test_hooks_on_parts_are_refused(pools):
    """The next run begins at once, though the other was left waiting for this one's address in the
    store."""
    for loss, seconds in pools(2).all("hooked_parts"):
        assert 0.0 == loss
        assert seconds < within(3.0)


def test_parts_are_saved_whole(pools, tmp_path):
    pytest.importorskip("safetensors")
    for expected, losses in pools(4).all("resumed", tmp_path):
        assert expected == pytest.approx(losses, rel=1e-6)
    loaded = fp.load(tmp_path / "parts", fp.split(small_model(), 1))
    assert loaded.step == 6 - 3
    assert all(type(leaf) is torch.nn.Parameter for leaf in fp.leaves(loaded.params))


def test_parts_are_made_of_a_checkpoint(pools, tmp_path):
    pytest.importorskip("safetensors")
    split = fp.split(small_model(), 2)
    fp.save(tmp_path, split, split.params, state=split.state)
    for wrong in pools(4).all("loaded_from_meta", tmp_path):
        assert [] == wrong


@pytest.mark.parametrize("what", ["at once", "meanwhile"])
def test_parts_of_every_kind_are_saved(pools, tmp_path, what):
    pytest.importorskip("safetensors")
    assert [[], []] == pools(2).all("saved_parts", tmp_path, what)


def test_replicas_that_save_other_things(pools, tmp_path):
    pytest.importorskip("safetensors")
    for result in pools(2).run("saved_parts", tmp_path / "differ", "differ"):
        assert isinstance(result, Failed)
        assert result.is_a(fp.RanksError), result.trace
        assert (
            "'params.0.rows' of the model: rank 1 has None, rank 0 has (3, 4) torch.float32 S"
            in result.text
        )
    assert not (tmp_path / "differ").exists()
    first, second = pools(2).run("saved_parts", tmp_path / "fail", "fail")
    assert first.is_a(fp.PeerError), first.trace
    assert "no memory" in first.text
    assert first.seconds < within(3)
    assert second.is_a(ValueError), second.trace


@pytest.mark.parametrize("who", [0, 3])
def test_a_failure_while_others_gather(pools, who):
    for seconds in pools(4).all("failing_parts", who):
        assert seconds < within(2)


@pytest.mark.parametrize("what", ["norm", "finite", "step", "scaler"])
def test_a_failure_while_others_look_at_all_parts(pools, what):
    for seconds in pools(4).all("failing_before", what):
        assert 0 < seconds < within(3)


def test_parts_want_replicas():
    plan = fp.make_plan(
        [fp.stage(lambda p, x: x)], fp.schedules.fill_drain(1, 1), loss=F.mse_loss, devices="cpu"
    )
    with pytest.raises(fp.PlacementError, match="shard=True spreads parameters over replicas"):
        fp.place(plan, ({"w": torch.ones(2)},), shard=True)


def test_modules_that_share_their_parameters_themselves(pools):
    assert [6, 6] == pools(2).all("shared_modules")
