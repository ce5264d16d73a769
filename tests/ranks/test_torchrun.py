"""Under torchrun: its summary blames the rank that failed, not one that raised PeerError for it."""

import json
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rank_pool import within

LONE = Path(__file__).parent / "lone_rank.py"


@pytest.mark.slow
@pytest.mark.timeout(400)  # torchrun takes its time to begin and to end where the cores are busy
@pytest.mark.parametrize(("act", "code"), [("raise", "1"), ("leave", "3"), ("kill", "-9")])
def test_the_rank_that_failed_is_the_root_cause(tmp_path, act, code):
    """It names whose end it sees first."""
    (tmp_path / "wrong").write_text(f"2 {act} 3")
    options = json.dumps({"folder": str(tmp_path)})
    torchrun = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "4",
    ]
    done = subprocess.run(
        [*torchrun, LONE, "train", options], capture_output=True, text=True, timeout=350
    )
    ended = time.monotonic()
    assert done.returncode, done.stdout
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert ended - max(line["at"] for line in lines if line["what"] == "run") < within(15)
    cause = done.stderr.partition("Root Cause")[2]
    assert "2" == re.search(r"rank +: (\d+)", cause)[1], done.stderr
    assert code == re.search(r"exitcode +: (-?\d+)", cause)[1], done.stderr
