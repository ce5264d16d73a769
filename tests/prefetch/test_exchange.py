"""The input exchange of torchrec's pipelines between two real processes, over gloo."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

EXAMPLE = Path(__file__).parent / "exchange.py"
ROOT = EXAMPLE.parent.parent.parent
WORLD = 2


@pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="needs gloo")
@pytest.mark.parametrize("kind", ["gloo", "torchrec"])
def test_the_exchange_runs_ahead(kind, tmp_path):
    """Two ranks exchange the inputs of the next batch while they train on this one: the plain loop,
    bit for bit."""
    if kind == "torchrec" and not (
        importlib.util.find_spec("torchrec") and importlib.util.find_spec("fbgemm_gpu")
    ):
        pytest.skip("needs torchrec and fbgemm-gpu-cpu of the same minor version")
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, str(EXAMPLE), kind, str(rank), str(WORLD), str(tmp_path / "store")],
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(WORLD)
    ]
    try:
        told = [rank.communicate(timeout=100)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    for rank, text in enumerate(told):
        assert f"{kind} rank {rank}: 5 losses and 2 weights equal bit for bit" in text, text


def test_the_how_to_shows_the_adapter():
    """The page's adapter is the tested one, line for line."""
    page = (ROOT / "docs" / "howto" / "exchange_inputs.md").read_text()
    text = EXAMPLE.read_text()
    adapter = text[text.index("def adapter(ebc):") : text.index("def with_torchrec")].rstrip()
    assert adapter in page
