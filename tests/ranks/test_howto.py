"""The script of docs/howto/processes.md under torchrun, and the demo: as many processes as you
like, the same loss."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "howto" / "processes.md"


def test_the_script_runs_with_one_process_and_with_two(tmp_path):
    code = re.search(
        r"^```py\n(?P<code># train.py\n.*?)^```\n", PAGE.read_text(), flags=re.M | re.S
    )["code"]
    script = tmp_path / "train.py"
    script.write_text(code)
    losses = []
    for count in (1, 2):
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            str(count),
            script,
        ]
        done = subprocess.run(
            [*map(str, command)], capture_output=True, text=True, cwd=tmp_path, timeout=200
        )
        assert 0 == done.returncode, done.stderr
        losses.append(float(done.stdout.strip()))
    assert losses[0] == losses[1] < 0.4


@pytest.mark.slow
def test_the_demo_in_two_processes_proves_its_numbers(tmp_path):
    """And it has the loss of the demo in one."""
    proofs = []
    for more in ([], ["--processes", "2"]):
        command = [sys.executable, "-m", "funcpipe", "demo", "--epochs", "1", *more]
        done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=110)
        assert 0 == done.returncode, done.stderr
        proofs.append(done.stdout.strip().splitlines()[-1])
    assert proofs[0] == proofs[1]
    assert proofs[0].startswith("proven: ")


@pytest.mark.parametrize(
    ("words", "fault"),
    [
        (["--processes", "3"], "share --devices evenly"),
        (["--processes", "0"], "whole number from 1"),
        (["--processes", "2", "--report", "page.html"], "of a run in one process"),
    ],
)
def test_the_demo_refuses_other_processes(tmp_path, words, fault):
    pytest.importorskip("sklearn")
    command = [sys.executable, "-m", "funcpipe", "demo", *words]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=60)
    assert done.returncode
    assert fault in done.stderr
