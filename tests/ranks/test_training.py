"""Steps in several processes are those of one: norms, clipping, scalers, tied parameters, accumulation, evaluation."""

import pytest


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("kind", ["plain", "late", "scale", "scaler"])
def test_steps_are_those_of_one_process(pools, kind, size):
    for wrong in pools(size).all("training", kind, False):
        assert [] == wrong


def test_steps_of_compiled_stages(pools):
    for wrong in pools(2).all("training", "plain", True):
        assert [] == wrong


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


def test_two_pipelines_in_a_mesh(pools):
    for wrong in pools(4).all("meshes"):
        assert [] == wrong


@pytest.mark.parametrize("rows", [(8, 8), (10, 3)])
@pytest.mark.parametrize("kind", ["plain", "turned", "late", "weighed", "reduced", "tied", "compiled"])
def test_replicas(pools, kind, rows):
    """2 x 2: losses and statistics are those of one process with all rows, gradients to rounding, replicas alike."""
    results = pools(4).all("replicated", kind, rows)
    by_rank = {}
    for wrong, rank, grads, norm in results:
        assert [] == wrong
        assert by_rank.setdefault(rank, (grads, norm)) == (grads, norm)
