"""A cable that is pulled, a store that dies or stops: whoever can know raises soon, and nothing
waits for ever."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch.distributed as dist
from rank_pool import within

from funcpipe._src.core.errors import PeerError
from funcpipe._src.processes.address import connect_at, host_of, machine, own_address
from funcpipe._src.processes.rendezvous import STALL, answered, refuse_to_join

SIZE = 4
LONE = Path(__file__).parent / "lone_rank.py"
RAISES = 7.0
"""Seconds within which all have raised: a timeout of 5 s, and what it takes to notice and to
tell."""

LEAVES = 3.0
"""Seconds from there until a process has ended all that is ours; then it is Python's and torch's to
end."""


class Processes:
    """Processes of `lone_rank`, by name, and what they printed."""

    def __init__(self, folder):
        self.folder, self.made = folder, {}

    def start(self, name, what, before=(), environment=(), **options):
        command = [*before, sys.executable, LONE, what, json.dumps(options)]
        with (
            open(self.folder / f"{name}.out", "w") as out,
            open(self.folder / f"{name}.err", "w") as err,
        ):
            environment = {**os.environ, **dict(environment)}
            self.made[name] = subprocess.Popen(
                [*map(str, command)], stdout=out, stderr=err, env=environment
            )

    def keep(self, host, before=()):
        """Start a process that keeps a store; its port."""
        self.start("store", "keep", before, host=host)
        self.until(lambda: self.said("store", "store"))
        return self.said("store", "store")[0]["port"]

    def train(self, rank, store, before=(), environment=(), **options):
        options = {
            "folder": str(self.folder),
            "rank": rank,
            "size": SIZE,
            "store": store,
            **options,
        }
        self.start(rank, "train", before, environment, **options)

    def said(self, name, what):
        """What a process printed of a kind."""
        lines = [
            json.loads(line) for line in (self.folder / f"{name}.out").read_text().split("\n")[:-1]
        ]
        return [line for line in lines if line["what"] == what]

    def until(self, happened, seconds=60.0):
        deadline = time.monotonic() + seconds
        while not happened():
            assert time.monotonic() < deadline, self.everything()
            time.sleep(0.01)

    def run(self, count=3):
        """Wait until all have made so many runs."""
        self.until(lambda: all(len(self.said(rank, "run")) >= count for rank in range(SIZE)))

    def write(self, name, text):
        """Make a file at once, as the processes see it."""
        (self.folder / "unfinished").write_text(text)
        (self.folder / "unfinished").rename(self.folder / name)

    def wrong(self, rank, act):
        self.write("wrong", f"{rank} {act} 0")
        return time.monotonic()

    def stop(self, name):
        """Stop all threads of a process."""
        self.made[name].send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self.made[name].pid, os.WSTOPPED)

    def raised(self, rank, since, limit=RAISES, count=1):
        """What a rank raised; it did so in time."""
        self.until(lambda: len(self.said(rank, "raised")) >= count, 30)
        error = self.said(rank, "raised")[count - 1]
        assert error["at"] - since < within(limit), (rank, error["at"] - since, self.everything())
        return error

    def end(self, rank, code=0):
        """A process ends soon after it has raised or closed."""
        began = max(line["at"] for what in ("raised", "closed") for line in self.said(rank, what))
        assert code == self.made[rank].wait(30), self.everything()
        assert self.said(rank, "left")[0]["at"] - began < within(LEAVES), self.everything()

    def everything(self):
        return "\n".join(
            f"{path.name}:\n{path.read_text()[-3000:]}" for path in sorted(self.folder.iterdir())
        )

    def over(self):
        for process in self.made.values():
            if process.poll() is None:
                process.kill()
            process.wait()


@pytest.fixture
def processes(tmp_path):
    made = Processes(tmp_path)
    yield made
    made.over()


# -- the store
# -------------------------------------------------------------------------------


@pytest.fixture
def again():
    """Do ranks run once more after an error."""
    return False


@pytest.fixture
def training(processes, again):
    """Four ranks in the middle of their runs, and a process that keeps their store."""
    port = processes.keep("127.0.0.1")
    for rank in range(SIZE):
        processes.train(rank, ["127.0.0.1", port], again=again)
    processes.run()
    return processes


@pytest.mark.slow
@pytest.mark.parametrize("again", [True])
def test_a_store_that_dies_is_needed_by_the_next_connections_only(training):
    """Runs go on; after a failure of one rank the ranks cannot find each other again."""
    training.made["store"].kill()
    last = 20 + max(len(training.said(rank, "run")) for rank in range(SIZE))
    training.until(lambda: all(len(training.said(rank, "run")) >= last for rank in range(SIZE)))
    since = training.wrong(2, "raise")
    for rank in range(SIZE):
        error = training.raised(rank, since, limit=2.5)
        assert error["kind"] == ("StageError[ValueError]" if rank == 2 else "PeerError")
        second = training.raised(rank, error["at"], count=2, limit=3)
        assert "PeerError" == second["kind"]
        assert "the store of torch.distributed is gone" in second["text"]
        training.end(rank)


@pytest.mark.slow
@pytest.mark.parametrize("act", ["stop", "kill"])
def test_runs_that_go_well_need_no_store(training, act):
    training.stop("store") if act == "stop" else training.made["store"].kill()
    last = 20 + max(len(training.said(rank, "run")) for rank in range(SIZE))
    training.write("enough", str(last))
    for rank in range(SIZE):
        training.until(lambda rank=rank: training.said(rank, "closed"))
        assert [] == training.said(rank, "raised")
        assert last == len(training.said(rank, "run"))
        began, ended = (training.said(rank, what)[0]["at"] for what in ("closing", "closed"))
        assert ended - began < within(2.5)
        training.end(rank)


@pytest.mark.slow
@pytest.mark.parametrize(("act", "code"), [("raise", 0), ("kill", -signal.SIGKILL)])
def test_a_failure_needs_no_store_to_be_told(training, act, code):
    training.stop("store")
    since = training.wrong(2, act)
    if act == "raise":
        assert "boom" == training.raised(2, since, limit=2.5)["text"]
    else:
        assert code == training.made[2].wait(10)
    for rank in (0, 1, 3):
        error = training.raised(rank, since, limit=2.5)
        assert "PeerError" == error["kind"]
        assert error["rank"] == 2
        assert ("boom" in error["text"]) is (act == "raise")
        training.end(rank)
    if act == "raise":
        training.end(2)


@pytest.mark.slow
def test_ranks_are_not_made_by_a_store_that_has_stopped(processes):
    """Three wait for the fourth to come, when it stops; the fourth comes then."""
    port = processes.keep("127.0.0.1")
    for rank in range(SIZE):
        processes.train(rank, ["127.0.0.1", port], making=5.0, hold=rank == 3)
    processes.until(lambda: all(processes.said(rank, "ready") for rank in range(SIZE)))
    time.sleep(1.5)
    processes.stop("store")
    since = time.monotonic()
    processes.write("go", "")
    for rank in range(SIZE):
        error = processes.raised(rank, since, limit=RAISES + STALL)
        assert "PeerError" == error["kind"]
        assert "the store of torch.distributed" in error["text"]
        processes.end(rank)


def test_a_store_that_has_stopped_is_waited_for_so_long_and_no_longer(processes):
    port = processes.keep("127.0.0.1")
    client = dist.TCPStore("127.0.0.1", port, is_master=False)
    assert 1 == answered(lambda: client.add("number", 1), 5.0)
    processes.stop("store")
    began = time.monotonic()
    with pytest.raises(PeerError, match=r"has not answered for 0\.5 s"):
        answered(lambda: client.add("number", 1), 0.5)
    assert 0.5 <= time.monotonic() - began < within(0.9)
    began = time.monotonic()
    refuse_to_join(
        client, 0, ValueError("another plan")
    )  # this client is still busy with the question above
    assert time.monotonic() - began < within(1.4)
    processes.made["store"].kill()
    for thread in threading.enumerate():
        if thread.name == "funcpipe store":
            thread.join(5)
    with pytest.raises(PeerError, match="the store of torch.distributed is gone"):
        answered(lambda: client.check(["number"]), 5.0)


def test_an_error_of_what_is_asked_is_the_callers():
    with pytest.raises(ValueError, match="mine"):
        answered(lambda: int("mine"), 5.0)


# -- the network
# -------------------------------------------------------------------------------


@pytest.fixture
def cable():
    """Two network namespaces joined by a cable: their names, the two ends of the cable, and two
    addresses."""
    names = [f"fp{os.getpid()}{end}" for end in "ab"]
    hosts, ends = ("10.93.0.1", "10.93.0.2"), ("cable-a", "cable-b")
    if shutil.which("ip") is None:
        pytest.skip("there is no `ip` (iproute2) to make network namespaces with")
    commands = [f"ip netns add {name}" for name in names]
    commands += [
        f"ip link add {ends[0]} netns {names[0]} type veth peer name {ends[1]} netns {names[1]}"
    ]
    for name, end, host in zip(names, ends, hosts, strict=True):
        commands += [
            f"ip -n {name} addr add {host}/24 dev {end}",
            f"ip -n {name} link set {end} up",
        ]
        commands += [f"ip -n {name} link set lo up"]
    try:
        for command in commands:
            done = subprocess.run(command.split(), capture_output=True, text=True)
            if done.returncode:
                pytest.skip(f"{command}: {done.stderr.strip()}")
        yield names, ends, hosts
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


@pytest.mark.slow
@pytest.mark.parametrize("interface", ["named", "found"])
def test_a_cable_that_is_pulled(processes, cable, interface):
    """Two ranks at each end, the store at one; there the store has this machine's name for
    itself."""
    names, ends, hosts = cable
    inside = [["ip", "netns", "exec", name] for name in names]
    port = processes.keep(hosts[0], inside[0])
    for rank in range(SIZE):
        end = rank // 2
        store = [hosts[0] if end or interface == "named" else "127.0.0.1", port]
        named = {"GLOO_SOCKET_IFNAME": ends[end]}  # which torch's own group needs
        processes.train(rank, store, inside[end], named, unnamed=interface == "found")
    processes.run()
    subprocess.run(["ip", "-n", names[0], "link", "set", ends[0], "down"], check=True)
    since = time.monotonic()
    for rank in range(SIZE):
        error = processes.raised(rank, since)
        silent = {2, 3} if rank < 2 else {0, 1}
        assert "PeerError" == error["kind"]
        assert error["rank"] == min(silent)
        for other in range(SIZE):
            assert (f"rank {other}: does not answer" in error["text"]) == (other in silent), error[
                "text"
            ]
            assert f"rank {other}: " in error["text"]
        assert (
            SIZE == processes.said(rank, "run")[0]["beside"]
        )  # one machine after all, whatever its networks are
        processes.end(rank)


def test_the_way_to_another_machine_says_our_address(monkeypatch):
    assert "" == own_address(["", "127.0.0.1", "localhost", "no host of this name"])
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    assert "localhost" == host_of(dist.PrefixStore("below", dist.PrefixStore("above", store)))
    assert "" == host_of(dist.HashStore())
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    assert {} == connect_at(["localhost"])
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7,eth8")
    assert {"interface": "eth7"} == connect_at(["localhost"])


def test_a_machine_is_the_same_for_processes_without_a_network():
    """Without one a process would draw the number of a network card by itself."""
    code = "from funcpipe._src.processes.address import machine; print(machine())"
    done = subprocess.run(
        ["unshare", "-rn", sys.executable, "-c", code], capture_output=True, text=True
    )
    if done.returncode and "unshare" in done.stderr:
        pytest.skip(done.stderr.strip())
    assert machine() == done.stdout.strip(), done.stderr
