"""What tests on a GPU share."""

import pytest
import torch


@pytest.fixture
def deterministic(monkeypatch):
    """Kernels that give the same bits each time."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(before)
