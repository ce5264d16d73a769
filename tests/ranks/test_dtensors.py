"""DTensors cross the borders between stages of different processes, with their gradients."""

import re

import pytest


@pytest.mark.parametrize(
    ("over", "shape", "family"),
    [
        ("sequence", "one", "zbv"),
        ("partial", "one", "zbv"),
        pytest.param("sequence", "several", "interleaved", marks=pytest.mark.slow),
        pytest.param("rows", "one", "remat", marks=pytest.mark.slow),
        pytest.param("width", "several", "zbv", marks=pytest.mark.slow),
        pytest.param("whole", "one", "interleaved", marks=pytest.mark.slow),
        pytest.param("partial", "several", "remat", marks=pytest.mark.slow),
    ],
)
def test_values_and_gradients_are_those_of_the_uncut_model(pools, over, shape, family):
    for wrong in pools(4).all("dtensor_tasks.crossed", over, shape, family):
        assert [] == wrong


@pytest.mark.parametrize(
    ("what", "stage", "words"),
    [
        ("without names", 0, "the mesh has no names by which the other process finds its own"),
        (
            "without params",
            1,
            r"leaf 0 .* the mesh \(tp=2\).* have no DTensors.* parallelize_module",
        ),
        ("other names", 1, r"over the mesh \(tp=2\).* they have the mesh \(model=2\)"),
        ("two meshes", 1, r"over the mesh \(tp=2\).* they have 2 of them"),
        (
            "other order",
            1,
            r"It came from the process at \[[01]\] in its mesh, but this .* \[[01]\]",
        ),
    ],
)
def test_a_mesh_that_is_not_found_is_named_with_its_stage(pools, what, stage, words):
    for rank, failed in enumerate(pools(4).run("dtensor_tasks.misused", what)):
        own = rank // 2 == stage
        assert ("StageError" if own else "PeerError") in failed.kinds
        assert re.search(words, failed.text)
        assert f"F0 of stage {stage}" in (failed.notes[0] if own else failed.text)


@pytest.mark.parametrize("shape", ["local", "dtensor", "several"])
def test_a_stage_may_end_in_a_style_of_tensor_parallelism(pools, shape):
    """Outputs of collectives that may still run are waited for before they are sent."""
    for wrong in pools(4).all("dtensor_tasks.with_styles", shape):
        assert [] == wrong


def test_skips_feeds_and_losses_may_be_dtensors(pools):
    for wrong in pools(4).all("dtensor_tasks.detailed"):
        assert [] == wrong


def test_a_gradient_finds_the_mesh_of_the_value_that_was_sent(pools):
    for wrong in pools(4).all("dtensor_tasks.made_of_plain"):
        assert [] == wrong


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("twice", "whose memory the stage before, or the batch, handed on twice"),
        ("later", "after it had handed"),
    ],
)
def test_writes_into_dtensors_are_refused(pools, what, words):
    for failed in pools(4).run("dtensor_tasks.written", what):
        assert "StageError" in failed.kinds
        assert words in failed.text


def test_threads_of_one_process(pools):
    assert 1 == len({*pools(2).all("dtensor_tasks.alone_on_threads")})


def test_check_finite_counts_the_numbers_of_all_parts(pools):
    for rank, failed in enumerate(pools(4).run("dtensor_tasks.not_finite")):
        assert ("NotFiniteError" if rank < 2 else "PeerError") in failed.kinds
        assert "output has 4 NaN and 0 Inf among 60 numbers" in failed.text
