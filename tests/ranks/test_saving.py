"""Checkpoints of several processes: saved at one number of ranks, continued at another, or not at
all."""

import pytest
from rank_pool import Failed
from rank_tasks import small_model, trained

import funcpipe as fp

pytest.importorskip("safetensors")


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("stages", [4, 2])
def test_saved_by_ranks_and_continued_in_one_process(pools, tmp_path, size, stages):
    expected = trained(tmp_path, steps=6)
    for losses in pools(size).all("checkpointed", tmp_path, "save"):
        assert expected[:3] == losses
    files = sorted(file.name for file in tmp_path.glob("step-*/*.safetensors"))
    assert [
        f"{kind}-{rank:05d}.safetensors" for kind in ("model", "optimizer") for rank in range(size)
    ] == files
    assert expected[3:] == trained(tmp_path, stages=stages, load=True)


def test_saved_while_the_training_goes_on(pools, tmp_path):
    expected = trained(tmp_path, steps=6)
    pools(2).all("checkpointed", tmp_path, "meanwhile")
    assert expected[3:] == trained(tmp_path, load=True)


@pytest.mark.parametrize("size", [2, 3])
def test_saved_in_one_process_and_continued_by_ranks(pools, tmp_path, size):
    expected = trained(tmp_path / "all", steps=6)
    trained(tmp_path, stages=2, save_after=True)
    for losses in pools(size).all("checkpointed", tmp_path, "load"):
        assert expected[3:] == losses


def test_replicas_save_once(pools, tmp_path):
    pools(4).all("checkpointed", tmp_path, "replicas")
    assert 4 == len([*tmp_path.glob("step-*/*.safetensors")])
    assert 3 == fp.load(tmp_path, fp.split(small_model(), 1)).step


def test_a_rank_that_cannot_save_leaves_the_checkpoint_before(pools, tmp_path):
    pools(2).all("checkpointed", tmp_path, "save")
    before = (tmp_path / "funcpipe.json").read_text()
    first, second = pools(2).run("checkpointed", tmp_path, "wrongly")
    assert isinstance(first, Failed)
    assert first.is_a(fp.PeerError), first.trace
    assert second.is_a(fp.CheckpointError), second.trace
    assert before == (tmp_path / "funcpipe.json").read_text()


def test_ranks_that_name_folders_of_their_own_are_refused(pools, tmp_path):
    first, second = pools(2).run("saved_apart", tmp_path)
    assert first.is_a(fp.PeerError), first.trace
    assert second.is_a(fp.CheckpointError), second.trace
    for failed in (first, second):
        assert "give all ranks one path, on a file system that they share" in failed.trace
    assert not [*tmp_path.glob("*/funcpipe.json")]


def test_what_is_not_finished_is_refused_by_all(pools, tmp_path):
    for (first, second, third), *steps in pools(2).all("unfinished", tmp_path):
        assert first == second
        assert (
            f"an earlier save to {tmp_path} with wait=False (of rank 0, 1) is not finished" in first
        )
        assert "(of rank 1) is not finished" in third
        assert [1, 5] == steps


def test_what_is_damaged_is_refused_by_all(pools, tmp_path):
    pools(2).all("checkpointed", tmp_path, "save")
    (file,) = tmp_path.glob("step-*/model-00001.safetensors")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    first, second = pools(2).run("checkpointed", tmp_path, "load")
    assert second.is_a(fp.CheckpointError), second.trace
    assert first.is_a(fp.PeerError), first.trace


def test_pipelines_beside_each_other_do_not_share_a_path(pools, tmp_path):
    """One of them has the path from its first save on; the other is refused each time, and destroys
    nothing."""
    rows = pools(4).all("beside_each_other", tmp_path)
    said = [row[0] for row in rows]
    assert said[0] == said[1]
    assert said[2] == said[3]
    first, second = sorted(said[::2])
    assert [""] * 4 == first
    assert all(
        "two pipelines that save to one path destroy each other's checkpoints" in text
        for text in second
    )
    assert all("the pipeline of processes " in text for text in second)
    assert [[1, 2, 3, 4]] * 4 == [row[1] for row in rows]
    assert [["", 9]] * 4 == [row[2] for row in rows]
