"""A torch without the private names that we use: runs are right all the same, and one warning names each."""

from __future__ import annotations

import subprocess
import sys
import warnings

import pytest
import torch

from funcpipe.core import torch_names
from funcpipe.core.torch_names import private


def test_a_name_that_is_there_says_nothing():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert private("_C._len_torch_dispatch_stack", instead=None, lost="nothing")() == 0


def test_one_that_is_missing_is_named_once(monkeypatch):
    monkeypatch.setattr(torch_names, "_told", set())
    for name in ("_no_such_name", "_C._nothing.of_the_kind"):
        says = rf"torch {torch.__version__[:4]}.* has no torch\.{name}, .*: speed"
        with pytest.warns(RuntimeWarning, match=says) as found:
            assert ["other"] * 2 == [private(name, instead="other", lost="speed") for _ in range(2)]
        assert len(found) == 1


ON_ANOTHER_TORCH = """
import sys, warnings, torch
from torch.utils.checkpoint import checkpoint
names, hidden = sys.argv[1:], []
for name in names:  # hidden from us alone: torch uses some of them itself
    *path, last = name.split(".")
    place = torch
    for part in path:
        place = getattr(place, part)
    if "engine" in name:
        last, place = path[-1], torch.autograd.Variable
        hidden.append((place, last, getattr(place, last)))
        setattr(place, last, None)
    else:
        hidden.append((place, last, getattr(place, last)))
        delattr(place, last)
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    import torch.nn as nn, torch.nn.functional as F, funcpipe as fp
    from funcpipe.models import skippable
    from funcpipe.pipe import module_border
    from funcpipe.runtime import plain, slots
    for one in hidden:
        setattr(*one)
    assert "torch._dynamo" not in sys.modules
    stages = [fp.stage(lambda w, x: torch.tanh(x @ w), name=str(i)) for i in range(3)]
    params, batch = tuple(torch.randn(4, 4) for _ in stages), (torch.randn(8, 4), torch.randn(8, 4))
    for schedule in (fp.one_f_one_b(3, 4), fp.zero_bubble(3, 4), fp.remat(fp.one_f_one_b(3, 4))):
        plan = fp.make_plan(stages, schedule, loss=F.mse_loss, devices="cpu")
        expected = fp.run_sequential(plan, params, batch)
        for executor in ("serial", "threads"):
            found = fp.run(plan, params, batch, executor=executor)
            assert all(map(torch.equal, expected.grads, found.grads))
            assert torch.equal(expected.loss, found.loss)
    layers = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    pipe = fp.Pipe(layers, balance=[2, 1], chunks=2, devices="cpu")
    pipe(batch[0]).sum().backward()
    try:
        checkpoint(pipe, batch[0].clone().requires_grad_(), use_reentrant=False).sum().backward()
        print("checkpointed")
    except fp.FuncpipeError as error:
        print("refused" if "call it outside of them" in str(error) else error)
found = [str(one.message) for one in said if "which funcpipe would use" in str(one.message)]
missing = {text.split(" has no torch.")[1].split(",")[0] for text in found}
assert missing == set(names) and len(found) == len(names), (found, missing ^ set(names))
assert all(issubclass(one.category, RuntimeWarning) for one in said if str(one.message) in found)
"""

SURVIVED = [
    "_lazy_clone",
    "_C._data_address",
    "_C._is_cow_tensor",
    "_C._autograd.SavedTensor",
    "_C._current_graph_task_id",
    "autograd.Variable._execution_engine.run_backward",
]
HOOKS = [f"_C._autograd._{what}_saved_tensors_default_hooks" for what in ("top", "pop", "push")]


CASES = {"none missing": ([], "checkpointed"), "most": (SURVIVED, "checkpointed"), "hooks": (HOOKS, "refused")}


@pytest.mark.parametrize(("names", "says"), CASES.values(), ids=CASES)
def test_runs_are_right_on_a_torch_without_them(names, says):
    """Without hooks' names a pipe in a checkpointed region is refused; everything else goes on."""
    done = subprocess.run([sys.executable, "-c", ON_ANOTHER_TORCH, *names], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert says == done.stdout.strip()
