"""The script of docs/howto/processes.md, under torchrun: as many processes as you like, the same loss."""

import re
import subprocess
import sys
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "howto" / "processes.md"


def test_the_script_runs_with_one_process_and_with_two(tmp_path):
    code = re.search(r"^```py\n(?P<code># train.py\n.*?)^```\n", PAGE.read_text(), flags=re.M | re.S)["code"]
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
        done = subprocess.run([*map(str, command)], capture_output=True, text=True, cwd=tmp_path, timeout=100)
        assert 0 == done.returncode, done.stderr
        losses.append(float(done.stdout.strip()))
    assert losses[0] == losses[1] < 0.4
