"""A process of its own that is one rank, or keeps the store: ``python lone_rank.py train|keep
OPTIONS``, these as JSON.

It prints a line of JSON for each thing that happens, with the time by the clock that all processes
of a machine share.
"""

import atexit
import json
import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path


def boom():
    raise ValueError("boom")


ACTS = {
    "raise": boom,
    "leave": lambda: os._exit(3),
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
}


def say(what, **more):
    sys.stdout.write(
        json.dumps({"what": what, "at": time.monotonic(), **more}) + "\n"
    )  # at once: others write too
    sys.stdout.flush()


def keep(host):
    """Keep a store until the end."""
    import torch.distributed as dist

    store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False)
    say("store", port=store.port)
    while True:
        time.sleep(60)


def train(
    folder, rank=None, size=None, store=None, making=20.0, hold=False, again=False, unnamed=False
):
    """Run after run, until something raises or the file ``enough`` has the number of the last one.

    Args:
        folder: a file ``wrong`` in it has a rank, what it does in its forwards (`ACTS`), and from
            which run on.
        rank, size, store: who it is; without them torchrun says so, and what is raised ends the
            process.
        making: seconds for the ranks to find each other: torch's store lets some connections wait
            for 5 s. Runs have 5 s.
        hold: make no ranks before there is a file ``go``.
        again: after an error run once more.
        unnamed: forget which network interface torch's own group was to take.
    """
    import torch
    import torch.distributed as dist
    import torch.nn.functional as F

    import funcpipe as fp

    torch.set_num_threads(1)
    if store is None:
        dist.init_process_group("gloo")
        rank, size = dist.get_rank(), dist.get_world_size()
    else:
        limit = timedelta(seconds=60)
        client = dist.TCPStore(*store, is_master=False, timeout=limit)
        dist.init_process_group("gloo", store=client, rank=rank, world_size=size, timeout=limit)
    if unnamed:
        os.environ.pop("GLOO_SOCKET_IFNAME", None)
    wrong, enough, go = (Path(folder) / name for name in ("wrong", "enough", "go"))
    say("ready")
    while hold and not go.exists():
        time.sleep(0.01)
    number, last = 0, None

    def body(p, x):
        time.sleep(0.02)
        if wrong.exists():
            who, act, run = wrong.read_text().split()
            if rank == int(who) and number >= int(run):
                ACTS[act]()
        return torch.tanh(x @ p["w"].T)

    g = torch.Generator().manual_seed(4)
    params = tuple({"w": torch.randn(6, 6, generator=g)} for _ in range(size))
    x = torch.randn(8, 6, generator=g)
    schedule = fp.schedules.one_f_one_b(size, 4)
    plan = fp.make_plan(
        [fp.stage(body) for _ in range(size)], schedule, loss=F.mse_loss, devices="cpu"
    )
    ranks = fp.ranks(plan, timeout=making)

    def run():
        nonlocal number
        fp.run(plan, fp.place(plan, params, ranks), (x, x), executor=ranks, timeout=5.0)
        number += 1
        say("run", number=number, beside=ranks.beside)

    def raised(error):
        nonlocal last
        if error is not last:
            text = str(error.__cause__ or error)
            say("raised", kind=type(error).__name__, rank=getattr(error, "rank", None), text=text)
        last = error

    try:
        with ranks:
            try:
                while not (enough.exists() and number >= int(enough.read_text())):
                    run()
            except BaseException as error:
                raised(error)
                if not again:
                    raise
                run()
            say("closing")
    except BaseException as error:
        raised(error)
        if store is None:
            raise
    say("closed")


if __name__ == "__main__":
    atexit.register(say, "left")  # called last, after what funcpipe has to end
    {"keep": keep, "train": train}[sys.argv[1]](**json.loads(sys.argv[2]))
