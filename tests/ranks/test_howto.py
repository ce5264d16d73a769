"""The scripts of docs/howto/processes.md and machines.md under torchrun, and the demo: as many
processes as you like, the same loss."""

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

PAGES = Path(__file__).parents[2] / "docs" / "howto"


def script_of(page):
    """The script of a page."""
    text = (PAGES / page).read_text()
    return re.search(r"^```py\n(?P<code># train.py\n.*?)^```\n", text, flags=re.M | re.S)["code"]


def final_loss(script, count):
    """What a script prints under torchrun with so many processes."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(count), str(script)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=script.parent, timeout=200)
    assert 0 == done.returncode, done.stderr
    return float(done.stdout.strip())


@pytest.mark.slow
def test_the_script_runs_with_one_process_and_with_two(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(script_of("processes.md"))
    losses = [final_loss(script, count) for count in (1, 2)]
    assert losses[0] == losses[1] < 0.4


@pytest.mark.slow
def test_the_script_with_replicas_runs_with_whole_and_with_sharded_parameters(tmp_path):
    """Both train as the script for one pipeline does, up to rounding."""
    script = tmp_path / "train.py"
    script.write_text(script_of("processes.md"))
    wanted = pytest.approx(final_loss(script, 1), rel=1e-5)
    code = script_of("replicas.md")
    script.write_text(code)
    assert final_loss(script, 4) == wanted
    page = (PAGES / "replicas.md").read_text()
    changes = re.search(
        r"^```py\n(split = .*?)^\.\.\.\n( +params = .*?)^```\n", page, flags=re.M | re.S
    )
    code = re.sub(r"^split = .*?(?=^plan = )", changes[1], code, flags=re.M | re.S)
    code = re.sub(r"^ +params = .*?\n", changes[2], code, flags=re.M)
    assert "shard=True" in code
    script.write_text(code)
    assert final_loss(script, 4) == wanted


DIES = """
            if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and epoch == 3 and number == 1:
                if dist.get_rank() == 1:
                    os.kill(os.getpid(), 9)
"""


def losses_of_two_machines(folder, code, restarts):
    """What the script prints under two agents of torchrun, which have two processes each."""
    folder.mkdir()
    (folder / "train.py").write_text(code)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2"]
    command += ["--nproc-per-node", "2", "--max-restarts", str(restarts)]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}"]
    command += ["--rdzv-id", folder.name, "train.py", "checkpoints"]
    environment = {**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    files = [(folder / f"agent{number}.txt").open("w+") for number in range(2)]
    agents = [
        subprocess.Popen(command, stdout=file, stderr=file, cwd=folder, env=environment)
        for file in files
    ]
    try:
        codes = [agent.wait(200) for agent in agents]
    finally:
        for agent in agents:
            agent.kill()
            agent.wait()
    printed = ""
    for file in files:
        file.seek(0)
        printed += file.read()
        file.close()
    assert [0, 0] == codes, printed
    return re.findall(r"^epoch .*: loss .*$", printed, flags=re.M)


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_the_script_for_two_machines_survives_a_killed_process(tmp_path):
    """Two agents on this machine; a restart continues at the last checkpoint with the same
    losses."""
    code = script_of("machines.md")
    step = "            fp.step(optimizer, params, result, max_norm=1.0)\n"
    assert step in code
    losses = losses_of_two_machines(tmp_path / "whole", code, 0)
    assert 6 == len(losses)
    dying = code.replace(step, step + DIES.removeprefix("\n"))
    assert losses == losses_of_two_machines(tmp_path / "restarted", dying, 1)


@pytest.mark.slow
def test_the_demo_in_two_processes_checks_its_numbers(tmp_path):
    """And it has the loss of the demo in one."""
    proofs = []
    for more in ([], ["--processes", "2"]):
        command = [sys.executable, "-m", "funcpipe", "demo", "--epochs", "1", *more]
        done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=110)
        assert 0 == done.returncode, done.stderr
        proofs.append(done.stdout.strip().splitlines()[-1])
    assert proofs[0] == proofs[1]
    assert proofs[0].startswith("checked: ")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "fault"),
    [
        (["--processes", "3"], "share --devices evenly"),
        (["--processes", "0"], "whole number from 1"),
        (["--processes", "2", "--report", "page.html"], "works in one process only"),
    ],
)
def test_the_demo_refuses_other_processes(tmp_path, words, fault):
    pytest.importorskip("sklearn")
    command = [sys.executable, "-m", "funcpipe", "demo", *words]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=60)
    assert done.returncode
    assert fault in done.stderr
