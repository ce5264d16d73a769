"""docs/howto/coming_from.md: the programs for other libraries print what ours print, where the
library is installed.

The peers that are no part of torch are no test dependencies: ``pip install --no-deps
torchgpipe==0.0.7``; DeepSpeed and torchrec as their documents say. What is not installed is
skipped. Ours run with the other pages.
"""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = (Path(__file__).parents[1] / "docs" / "howto" / "coming_from.md").read_text()
PROGRAMS = {
    head.split(":")[0]: (head, code)
    for head, code in re.findall(r"^```py\n# ([^\n]*)\n(.*?)^```", PAGE, flags=re.M | re.S)
    if "not run" not in head
}
LOSSES = set(re.findall(r"^```text\n(\d\.\d{6})\n```", PAGE, flags=re.M))


def test_every_peer_that_the_table_calls_run_has_a_program():
    run = re.findall(r"^\| \[([\w.]+)\]\S+ ?[\d.]* \| run \|", PAGE, flags=re.M)
    assert sorted(name.lower() for name in run) == sorted(PROGRAMS)
    assert {"torch.distributed.pipelining", "torchgpipe"} < set(PROGRAMS)


@pytest.mark.slow
@pytest.mark.parametrize("peer", PROGRAMS)
def test_their_program_prints_the_loss_of_ours(peer, tmp_path):
    if importlib.util.find_spec(peer.split(".")[0]) is None:
        pytest.skip(f"{peer} is not installed")
    head, code = PROGRAMS[peer]
    script = tmp_path / "theirs.py"
    script.write_text(code)
    launcher = (
        ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        if "torchrun" in head
        else []
    )
    done = subprocess.run(
        [sys.executable, *launcher, str(script)],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=110,
        env={**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"},
    )
    assert 0 == done.returncode, done.stderr
    printed = re.findall(r"^\d\.\d{6}$", done.stdout, flags=re.M)
    assert 1 == len(printed), done.stdout
    assert printed[0] in LOSSES


def test_ours_are_two_losses():
    """One for all pipelines, one for torchrec's three batches."""
    assert 2 == len(LOSSES)
