"""Checkpoints remove no files of others, lose and mix up nothing, and a failed save leaves
nothing."""

import collections
import json
import os
import sys
import time
import warnings

import pytest
import torch
import torch.nn as nn
from common import cpu_plan, same

import funcpipe as fp
from funcpipe import schedules as S

pytest.importorskip("safetensors")


def split_of(*layers, stages=2, **options):
    torch.manual_seed(0)
    return fp.split(
        nn.Sequential(*(layers or (nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1)))), stages, **options
    )


def stepped(make, leaves):
    """Make an optimizer that has made a step."""
    optimizer = make(leaves)
    for leaf in leaves:
        leaf.grad = torch.ones_like(leaf)
    optimizer.step()
    return optimizer


def test_folders_of_other_programs_stay(tmp_path):
    for name in ("step-500", "step-000000000001-abcdef12"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "weights.bin").write_text("mine")
    split = split_of()
    for step in (1, 2):
        fp.save(tmp_path, split, split.params, step=step)
    assert (tmp_path / "step-500" / "weights.bin").exists()
    assert (tmp_path / "step-000000000001-abcdef12" / "weights.bin").exists()
    assert 3 == len([*tmp_path.glob("step-*")])
    assert ["funcpipe.json"] == [file.name for file in tmp_path.iterdir() if file.is_file()]


@pytest.mark.parametrize("folder", ["..", "../other", "/other", "step-1/../../other"])
def test_a_manifest_that_names_a_folder_elsewhere_removes_nothing(tmp_path, folder):
    (tmp_path / "other").mkdir()
    path = tmp_path / "path"
    split = split_of()
    fp.save(path, split, split.params)
    manifest = json.loads((path / "funcpipe.json").read_text())
    (path / "funcpipe.json").write_text(json.dumps({**manifest, "folder": folder}))
    fp.save(path, split, split.params)
    assert (tmp_path / "other").exists()
    assert path.exists()


def dotted(one, two):
    return ({"a.b": torch.tensor(one), "a": {"b": torch.tensor(two)}},)


@pytest.mark.parametrize(
    "tree",
    [
        dotted(2.0, 3.0)[0],
        {"a": {"b.c": torch.ones(1)}, "a.b": {"c": torch.zeros(1)}},
        {1: torch.ones(1), "1": {}},
    ],
)
def test_two_names_that_join_alike_are_refused(tmp_path, tree):
    plan = fp.make_plan(
        [fp.stage(lambda p, x: x)], S.fill_drain(1, 1, backward=False), devices="cpu"
    )
    if 1 in tree:
        fp.save(tmp_path, plan, (tree,))
        return
    with pytest.raises(
        fp.CheckpointError,
        match=r"one name(.|\n)*params\[0\] has .* and .*: both would be 'params\.0",
    ):
        fp.save(tmp_path / "new", plan, (tree,))
    assert not (tmp_path / "new").exists()


def test_state_at_the_path_of_a_tied_parameter_is_its_own(tmp_path):
    """The tie is of parameters. Tensors of state at the same paths are two tensors, and both are
    saved."""
    stages = [fp.stage(lambda p, x, *, state: x * p["w"] + state["w"]) for _ in range(2)]
    schedule = S.one_f_one_b(2, 2)
    plan = cpu_plan(stages, schedule, ties=[[(0, "w"), (1, ("w",))]])
    shared = torch.ones(3)
    state = ({"w": torch.full((3,), 1.0)}, {"w": torch.full((3,), 2.0)})
    fp.save(tmp_path, plan, ({"w": shared}, {"w": shared}), state=state)
    fresh = torch.zeros(3)
    loaded = fp.load(
        tmp_path,
        plan,
        params=({"w": fresh}, {"w": fresh}),
        state=({"w": torch.zeros(3)}, {"w": torch.zeros(3)}),
    )
    assert same(loaded.state, state)
    assert torch.equal(fresh, shared)


@pytest.mark.parametrize(
    "make",
    [
        lambda leaves: torch.optim.AdamW(leaves, lr=torch.tensor(1e-3)),
        lambda leaves: torch.optim.AdamW(
            leaves, lr=1e-3, betas=(torch.tensor(0.8), torch.tensor(0.9)), foreach=False
        ),
        lambda leaves: torch.optim.SGD(leaves, lr=float("inf")),
        lambda leaves: torch.optim.Adafactor(leaves),
        lambda leaves: torch.optim.NAdam(
            [(f"name {number}", leaf) for number, leaf in enumerate(leaves)]
        ),
    ],
)
def test_options_of_every_kind_come_back(tmp_path, make):
    split = split_of()
    optimizer = stepped(make, fp.leaves(split.params))
    fp.save(tmp_path, split, split.params, optimizer=optimizer)
    again = make(fp.leaves(split.params))
    for group in again.param_groups:
        group["lr"] = group["lr"] * 2
    fp.load(tmp_path, split, optimizer=again)
    for one, other in zip(optimizer.param_groups, again.param_groups, strict=True):
        for key in one.keys() - {"params"}:
            assert type(one[key]) is type(other[key]), key
            assert one[key] == other[key], key
    assert same([*optimizer.state.values()], [*again.state.values()])


def test_lbfgs_goes_on(tmp_path):
    """LBFGS keeps lists of tensors, and continues bit-identical."""

    def losses(split, optimizer, steps):
        x = torch.randn(8, 2, generator=torch.Generator().manual_seed(1))
        plan = cpu_plan(split, S.one_f_one_b(2, 2))
        out = []

        def closure():
            result = fp.run(plan, split.params, (x, x[:, :1].sin()), executor="serial")
            for leaf, gradient in zip(
                fp.leaves(split.params), fp.leaves(result.grads), strict=True
            ):
                leaf.grad = gradient
            out.append(float(result.loss))
            return result.loss

        for _ in range(steps):
            optimizer.step(closure)
        return out

    make = lambda split: torch.optim.LBFGS(fp.leaves(split.params), lr=0.1, max_iter=4)
    split, other = split_of(), split_of()
    optimizer = make(split)
    losses(split, optimizer, 2)
    fp.save(tmp_path, split, split.params, optimizer=optimizer)
    expected = losses(split, optimizer, 2)
    again = make(other)
    fp.load(tmp_path, other, optimizer=again)
    assert expected == losses(other, again, 2)


class Odd(torch.optim.SGD):
    """Keeps an object that no file format of checkpoints has."""


@pytest.mark.parametrize("what", ["option", "state", "key", "sparse", "nested", "meta", "global"])
@pytest.mark.parametrize("wait", [True, False])
def test_what_cannot_be_written_is_found_before_the_first_byte(tmp_path, what, wait):
    split = split_of()
    fp.save(tmp_path, split, split.params, step=1)
    before = sorted(str(file) for file in tmp_path.rglob("*"))
    leaves = fp.leaves(split.params)
    optimizer = Odd(leaves, lr=0.1)
    kept = optimizer.state[leaves[0]]
    if what == "option":
        optimizer.param_groups[0]["odd"] = object()
    elif what == "global":
        optimizer.state["all"]["count"] = 3
    else:
        kept["odd"] = {
            "state": {1, 2},
            "key": {(1, 2): 3},
            "sparse": torch.eye(2).to_sparse(),
            "nested": [[torch.ones(1), object()]],
            "meta": torch.ones(1, device="meta"),
        }[what]
    with pytest.raises(fp.CheckpointError, match="nothing was"):
        fp.save(tmp_path, split, split.params, optimizer=optimizer, step=2, wait=wait)
    assert before == sorted(str(file) for file in tmp_path.rglob("*"))
    assert 1 == fp.load(tmp_path, split).step


def test_a_disk_that_is_full_leaves_nothing_but_the_checkpoint_before(tmp_path, monkeypatch):
    split = split_of()
    fp.save(tmp_path, split, split.params, step=1)
    before = sorted(str(file) for file in tmp_path.rglob("*"))

    def full(*_, **__):
        raise OSError("no space left on device")

    monkeypatch.setattr("safetensors.torch.save_file", full)
    with pytest.raises(OSError, match="no space"):
        fp.save(tmp_path, split, split.params, step=2)
    saving = fp.save(tmp_path, split, split.params, step=3, wait=False)
    with pytest.raises(OSError, match="no space"):
        saving.finish()
    assert before == sorted(str(file) for file in tmp_path.rglob("*"))


def test_a_save_that_is_dropped_leaves_nothing(tmp_path):
    split = split_of()
    saving = fp.save(tmp_path, split, split.params, step=2, wait=False)
    del saving
    for _ in range(200):
        if not [*tmp_path.iterdir()]:
            return
        time.sleep(0.05)
    raise AssertionError([*tmp_path.iterdir()])


def test_files_and_their_names_are_on_disk_before_the_checkpoint_before_is_removed(
    tmp_path, monkeypatch
):
    calls = []
    for name in ("fsync", "replace"):
        real = getattr(os, name)
        monkeypatch.setattr(
            f"os.{name}", lambda *a, name=name, real=real: (calls.append(name), real(*a))[1]
        )
    monkeypatch.setattr("shutil.rmtree", lambda *a, **k: calls.append("rmtree"))
    split = split_of()
    fp.save(tmp_path, split, split.params, step=1)
    calls.clear()
    fp.save(tmp_path, split, split.params, step=2)
    assert 1 == calls.count("replace") == calls.count("rmtree")
    assert ["replace", "fsync", "rmtree"] == calls[calls.index("replace") :]
    assert (
        calls[: calls.index("replace")].count("fsync") >= 5
    )  # the file, the index, the manifest, two folders


class Slashes(nn.Module):
    def __init__(self):
        super().__init__()
        names = ("a", "a/b", "a/exp_avg", "a~1b", "~groups/0")
        self.d = nn.ParameterDict({name: nn.Parameter(torch.randn(3)) for name in names})

    def forward(self, x):
        for one in self.d.values():
            x = x * one
        return x


def test_names_with_slashes_are_no_state_of_an_optimizer(tmp_path):
    torch.manual_seed(0)
    split = split_of(Slashes(), nn.Linear(3, 1))
    optimizer = stepped(torch.optim.AdamW, fp.leaves(split.params))
    for number, leaf in enumerate(fp.leaves(split.params)):
        optimizer.state[leaf]["exp_avg"].fill_(number)
    fp.save(tmp_path, split, split.params, optimizer=optimizer)
    again = torch.optim.AdamW(fp.leaves(split.params))
    fp.load(tmp_path, split, optimizer=again)
    for leaf in fp.leaves(split.params):
        assert same(dict(optimizer.state[leaf]), dict(again.state[leaf]))


class Spare(nn.Module):
    """A head that only inference uses, and a buffer that no stage uses."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.spare = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("table", torch.randn(3))

    def forward(self, x):
        return self.b(torch.tanh(self.a(x)))


@pytest.mark.parametrize("meta", [False, True])
def test_what_the_trace_does_not_use_is_restored(tmp_path, meta):
    torch.manual_seed(0)
    model, x = Spare(), torch.randn(8, 4)
    split = fp.split(model, 2, example=x)
    fp.save(tmp_path, split, split.params, state=split.state)
    fresh = Spare()
    again = fp.split(fresh, 1, example=x)
    if meta:
        again.rest["spare.weight"] = torch.empty(4, 4, device="meta")
    loaded = fp.load(tmp_path, again)
    assert same(again.merge(loaded.params, loaded.state), dict(model.state_dict()))
    if not meta:
        assert same(dict(fresh.state_dict()), dict(model.state_dict()))
    fp.save(tmp_path, again, loaded.params, state=loaded.state, step=2)


class Tied(nn.Module):
    def __init__(self, tied=True):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        if tied:
            self.second.weight = self.first.weight

    def forward(self, x):
        return self.second(self.first(x))


def test_tied_names_are_written_once(tmp_path):
    from safetensors.torch import load_file

    split = fp.split(nn.Sequential(*Tied().children()), 2)
    fp.save(tmp_path, split, split.params)
    (file,) = tmp_path.glob("*/model-*.safetensors")
    assert {"0.weight", "0.bias", "1.bias"} == load_file(file).keys()
    apart = fp.split(nn.Sequential(*Tied(tied=False).children()), 2)
    loaded = fp.load(
        tmp_path, apart
    )  # a tied checkpoint into an untied model: both parameters get its numbers
    assert torch.equal(loaded.params[0]["0.weight"], split.params[0]["0.weight"])
    assert torch.equal(loaded.params[1]["1.weight"], split.params[0]["0.weight"])


def test_an_untied_model_into_a_tied_one(tmp_path):
    apart = fp.split(nn.Sequential(*Tied(tied=False).children()), 2)
    fp.save(tmp_path, apart, apart.params)
    tied = fp.split(nn.Sequential(*Tied().children()), 2)
    before = [leaf.detach().clone() for leaf in fp.leaves(tied.params)]
    with pytest.raises(
        fp.CheckpointError, match=r"ties parameters(.|\n)*'0.weight' and '1.weight'"
    ):
        fp.load(tmp_path, tied)
    assert same(before, [leaf.detach() for leaf in fp.leaves(tied.params)])
    with pytest.raises(
        fp.PlanError,
        match=r"'0.weight' and '1.weight' are tied in the model, but have different numbers",
    ):
        tied.load_state_dict(apart.state_dict())
    with torch.no_grad():
        apart.params[1]["1.weight"].copy_(apart.params[0]["0.weight"])
        for leaf in (apart.params[0]["0.weight"], apart.params[1]["1.weight"]):
            leaf[0, 0] = float("nan")  # NaN counts as equal here
    fp.save(tmp_path, apart, apart.params)
    fp.load(tmp_path, tied)
    tied.load_state_dict(apart.state_dict())


@pytest.mark.parametrize("what", ["cast", "left over"])
def test_a_warning_that_is_an_error_changes_nothing(tmp_path, what):
    split = split_of()
    fp.save(
        tmp_path, split, split.params, optimizer=stepped(torch.optim.AdamW, fp.leaves(split.params))
    )
    model = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))
    other = fp.split(model.bfloat16() if what == "cast" else model, 2)
    leaves = fp.leaves(other.params)
    optimizer = torch.optim.AdamW(leaves[:2] if what == "left over" else leaves)
    before = [leaf.detach().clone() for leaf in leaves]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="load rounds" if what == "cast" else "is not loaded"):
            fp.load(tmp_path, other, optimizer=optimizer)
    assert same(before, [leaf.detach() for leaf in leaves])
    assert not optimizer.state
    with pytest.warns(UserWarning, match="load rounds|is not loaded") as told:
        fp.load(tmp_path, other, optimizer=optimizer)
    assert {__file__} == {warning.filename for warning in told}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_casts_to_a_narrower_type_are_said(tmp_path, dtype, recwarn):
    split = split_of()
    fp.save(tmp_path, split, split.params)
    torch.manual_seed(0)
    other = fp.split(nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1)).to(dtype), 2)
    if dtype == torch.float64:
        fp.load(tmp_path, other)
        assert not recwarn.list
        return
    with pytest.warns(
        UserWarning,
        match=r"has torch.float32 and the model torch.b?float16, .*'0.weight', '0.bias'",
    ):
        fp.load(tmp_path, other)


def test_the_state_of_parameters_that_an_optimizer_leaves_out_is_said(tmp_path):
    split = split_of()
    optimizer = stepped(torch.optim.AdamW, fp.leaves(split.params))
    fp.save(tmp_path, split, split.params, optimizer=optimizer)
    fewer = torch.optim.AdamW(fp.leaves(split.params)[:2])
    with pytest.warns(
        UserWarning,
        match=r"holds 2 parameters, and the checkpoint's held more: '2.bias', '2.weight'; the state of 2 parameters is",
    ):
        fp.load(tmp_path, split, optimizer=fewer)
    assert 2 == len(fewer.state)


def test_groups_that_were_apart_are_not_joined_in_silence(tmp_path):
    split = split_of()
    leaves = fp.leaves(split.params)
    groups = [{"params": leaves[:2], "lr": 0.1}, {"params": leaves[2:], "lr": 0.2}]
    fp.save(
        tmp_path, split, split.params, optimizer=stepped(torch.optim.AdamW, groups[0]["params"])
    )
    fp.save(tmp_path, split, split.params, optimizer=torch.optim.AdamW(groups))
    with pytest.raises(
        fp.CheckpointError, match="group 0 has parameters of several groups of the checkpoint"
    ):
        fp.load(tmp_path, split, optimizer=torch.optim.AdamW(leaves))


def test_trees_of_another_split_are_refused(tmp_path):
    split, other = split_of(), split_of(stages=2, balance=[1, 2])
    with pytest.raises(
        fp.CheckpointError, match=r"not the trees of this split(.|\n)*params\[1\] has no tensor"
    ):
        fp.save(tmp_path / "new", split, tuple({} for _ in split.params))
    with pytest.raises(fp.CheckpointError, match="not the trees of this split"):
        fp.save(tmp_path / "new", split, tuple(dict.fromkeys(tree) for tree in other.params))
    assert not (tmp_path / "new").exists()


@pytest.mark.slow
def test_save_and_load_take_time_by_the_parameter(tmp_path):
    """Four times as many parameters take four times as many function calls. Quadratic time would
    take sixteen."""

    def calls(count):
        split = split_of(*[nn.Linear(2, 2) for _ in range(count)])
        optimizer = stepped(torch.optim.AdamW, fp.leaves(split.params))
        found = collections.Counter()
        before = sys.getprofile()
        sys.setprofile(lambda frame, event, argument: found.update((event,)))
        try:
            fp.save(tmp_path / str(count), split, split.params, optimizer=optimizer)
            fp.load(tmp_path / str(count), split, optimizer=optimizer)
        finally:
            sys.setprofile(before)
        return found["call"] + found["c_call"]

    calls(10)
    assert calls(400) < 5 * calls(100)


@pytest.mark.parametrize("missing", [(1,), (0, 1)])
def test_a_save_of_some_stages_needs_ranks_and_leaves_the_checkpoint(tmp_path, missing):
    """As in a script for several processes that forgets ``ranks=``."""
    split = split_of(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
    plan = cpu_plan(split, S.one_f_one_b(2, 2))
    for path, model in ((tmp_path / "split", split), (tmp_path / "plan", plan)):
        fp.save(path, model, split.params, state=split.state, step=1)
        files = sorted(path.rglob("*"))
        part = tuple([None if at in missing else tree for at, tree in enumerate(split.params)])
        with pytest.raises(fp.CheckpointError, match=r"ranks=ranks") as caught:
            fp.save(path, model, part, state=split.state, step=2)
        assert all(f"params[{stage}] is None" in str(caught.value) for stage in missing)
        with pytest.raises(fp.CheckpointError, match=r"state\[1\] is None"):
            fp.save(path, model, split.params, state=((), None), step=2)
        assert sorted(path.rglob("*")) == files
        assert 1 == fp.load(path, model, params=split.params).step


def test_a_save_without_params_leaves_the_checkpoint(tmp_path):
    """None was taken as the split's own params: those from before the training."""
    split = split_of(nn.Linear(2, 3), nn.Linear(3, 1))
    plan = cpu_plan(split, S.one_f_one_b(2, 2))
    for path, model in ((tmp_path / "split", split), (tmp_path / "plan", plan)):
        fp.save(path, model, split.params, step=1)
        with pytest.raises(fp.CheckpointError, match=r"one tree for each of 2 .* give params="):
            fp.save(path, model, None, step=2)
        assert 1 == fp.load(path, model, params=split.params).step


def test_a_stage_without_tensors_may_have_none(tmp_path):
    split = split_of(nn.Linear(2, 3), nn.Tanh())
    fp.save(tmp_path, split, (split.params[0], None), state=(None, None), step=2)
    assert 2 == fp.load(tmp_path, split).step
