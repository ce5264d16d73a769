"""torch works without numpy, and README's install does not bring it."""

import os
import subprocess
import sys
from pathlib import Path

SCRIPT = """
import sys
sys.modules["numpy"] = None  # import numpy raises ImportError, also in torch

import torch, torch.distributed as dist, torch.nn as nn, torch.nn.functional as F
import funcpipe as fp, funcpipe.testing

try:
    torch.ones(1).numpy()
except RuntimeError:
    pass
else:
    raise AssertionError("numpy is there")
rank, store = int(sys.argv[1]), sys.argv[2]
torch.manual_seed(0)
split = fp.split(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(), nn.Linear(4, 2)), 2)
schedule = fp.schedules.zero_bubble(2, 2)
batch = torch.randn(8, 4), torch.randint(0, 2, (8,))
stages = [fp.compile_stage(stage) for stage in split.stages]
plan = fp.make_plan(stages, schedule, loss=F.cross_entropy, devices="cpu")
alone = fp.run(plan, split.params, batch, state=split.state, seed=0, threads_per_lane=1)
fp.testing.check_stage(fp.stage(lambda p, x: x @ p), torch.ones(2, 2), torch.ones(3, 2))
try:
    fp.save("nowhere", split, split.params, state=split.state)
except fp.CheckpointError as error:
    assert "pip install safetensors numpy" in str(error), error
else:
    raise AssertionError("saved")

dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
with fp.ranks(plan) as ranks:
    params, state = (fp.place(plan, trees, ranks) for trees in (split.params, split.state))
    result = fp.run(
        plan, params, batch, state=state, seed=0, executor=ranks, threads_per_lane=1
    )
    assert torch.equal(result.loss, alone.loss)
    assert all(map(torch.equal, fp.leaves(result.grads), fp.leaves(alone.grads[rank])))
dist.destroy_process_group()
print("done")
"""


def test_runs_stages_and_processes_without_numpy(tmp_path):
    root = str(Path(__file__).parents[2])
    started = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", SCRIPT, str(rank), str(tmp_path / "store")],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": root},
        )
        for rank in range(2)
    ]
    outputs = [process.communicate(timeout=120) for process in started]
    assert ["done\n"] * 2 == [out for out, _ in outputs], [error[-2000:] for _, error in outputs]
