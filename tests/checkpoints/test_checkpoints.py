"""Checkpoints: whole or not at all, by the model's names, for any number of stages; damaged ones
are refused."""

import json
import multiprocessing
import os
import random
import signal
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from common import same

import funcpipe as fp

pytest.importorskip("safetensors")


def model():
    torch.manual_seed(1)
    return nn.Sequential(
        *[layer for _ in range(4) for layer in (nn.Linear(6, 6), nn.BatchNorm1d(6), nn.GELU())]
    )


class Training:
    """A model in some stages with an optimizer."""

    def __init__(self, stages, whole=None):
        self.split = fp.split(whole or model(), stages)
        self.plan = fp.make_plan(
            self.split, fp.schedules.one_f_one_b(stages, 4), loss=F.mse_loss, devices="cpu"
        )
        self.params, self.state = self.split.params, self.split.state
        self.optimizer = torch.optim.AdamW(fp.leaves(self.params), lr=0.01, betas=(0.8, 0.9))
        self.step = 0

    def train(self, steps):
        losses = []
        for _ in range(steps):
            g = torch.Generator().manual_seed(self.step)
            x = torch.randn(16, 6, generator=g)
            result = fp.run(
                self.plan, self.params, (x, x.sin()), state=self.state, executor="serial"
            )
            fp.step(self.optimizer, self.params, result)
            self.state, self.step = result.state, self.step + 1
            losses.append(float(result.loss))
        return losses

    def save(self, path):
        fp.save(
            path,
            self.split,
            self.params,
            state=self.state,
            optimizer=self.optimizer,
            step=self.step,
        )

    def load(self, path):
        loaded = fp.load(path, self.split, optimizer=self.optimizer)
        assert all(
            one is other
            for one, other in zip(fp.leaves(loaded.params), fp.leaves(self.params), strict=True)
        )
        self.state, self.step = loaded.state, loaded.step


@pytest.mark.parametrize("stages", [2, 1])
def test_saved_at_four_stages_and_continued_at_others(tmp_path, stages):
    """The same losses as if nothing had happened, from parameters, batch norm's state and the
    optimizer's.

    In one stage they differ by rounding from those of several, without any checkpoint too.
    """
    first = Training(4)
    first.train(3)
    first.save(tmp_path)
    expected = first.train(3)
    other = Training(stages)
    other.train(1)
    other.load(tmp_path)
    assert 3 == other.step
    assert expected == (other.train(3) if stages > 1 else pytest.approx(other.train(3), rel=1e-6))
    assert (0.8, 0.9) == other.optimizer.param_groups[0]["betas"]


def test_the_models_own_names_and_the_index_of_transformers(tmp_path):
    training = Training(2)
    training.train(1)
    training.save(tmp_path)
    (folder,) = tmp_path.glob("step-*")
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    whole = training.split.merge(training.params, training.state)
    assert whole.keys() == index["weight_map"].keys()
    from safetensors.torch import load_file

    tensors = load_file(folder / "model-00000.safetensors")
    assert all(torch.equal(tensors[name], tensor) for name, tensor in whole.items())


def test_transformers_reads_a_folder_with_a_configuration(tmp_path):
    """As the how-to says; without the configuration it is on its own, and may make a model of the
    default size."""
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 8, "hidden_size": 4, "intermediate_size": 4, "num_attention_heads": 1}
    llama = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, num_hidden_layers=2))
    split = fp.split(llama, 2)
    fp.save(tmp_path, split, split.params, state=split.state)
    folder = tmp_path / json.loads((tmp_path / "funcpipe.json").read_text())["folder"]
    llama.config.save_pretrained(folder)
    again = transformers.LlamaForCausalLM.from_pretrained(folder)
    assert same(again.state_dict(), llama.state_dict())


@pytest.mark.parametrize("library", ["safetensors", "numpy"])
def test_without_a_library_the_error_names_a_command_that_works_everywhere(
    library, tmp_path, monkeypatch
):
    monkeypatch.setitem(sys.modules, library, None)
    split = fp.split(model(), 2)
    with pytest.raises(
        fp.CheckpointError, match=rf"call pip install safetensors numpy .*{library}"
    ):
        fp.save(tmp_path / "new", split, split.params, state=split.state)
    assert not (tmp_path / "new" / "funcpipe.json").exists()


def test_tied_parameters_are_saved_once_and_loaded_everywhere(tmp_path):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.middle, self.head = (
                nn.Embedding(7, 4),
                nn.Linear(4, 4),
                nn.Linear(4, 7, bias=False),
            )
            self.head.weight = self.embed.weight

        def forward(self, x):
            return self.head(self.middle(self.embed(x)))

    split = fp.split(Tied(), 2, example=torch.arange(4).view(4, 1) % 7)
    with torch.no_grad():
        kept = {name: tensor.clone() for name, tensor in split.merge(split.params).items()}
        fp.save(tmp_path, split, split.params, step=1)
        for leaf in fp.leaves(split.params):
            leaf.zero_()
    fp.load(tmp_path, split)
    again = split.merge(split.params)
    assert same(kept, again)
    assert again["head.weight"].abs().sum() > 0


def test_stages_of_ones_own(tmp_path):
    """Dicts, tuples and nested trees, tied or not, with state, by the plan."""
    stages = [
        fp.stage(
            lambda p, x, *, state: fp.Out(x * p["a"][0] + state["n"]), commit=lambda s, stats: s
        ),
        fp.stage(lambda p, x: x * p["b"]),
    ]
    make = lambda: (
        ({"a": (torch.randn(3), torch.randn(2)), "n": 3}, {"b": torch.randn(3)}),
        ({"n": torch.randn(3)}, ()),
    )
    params, state = make()
    plan = fp.make_plan(stages, fp.schedules.one_f_one_b(2, 2), loss=F.mse_loss, devices="cpu")
    fp.save(tmp_path, plan, params, state=state, step=9)
    others, there = make()
    loaded = fp.load(tmp_path, plan, params=others, state=there)
    assert 9 == loaded.step
    assert same(params, loaded.params)
    assert same(state, loaded.state)
    assert not same(state, there)


def test_meta_parameters_get_numbers(tmp_path):
    training = Training(2)
    training.save(tmp_path)
    with torch.device("meta"):
        empty = model()
    split = fp.split(empty, 2)
    loaded = fp.load(tmp_path, split)
    assert same(dict(training.params[0]), dict(loaded.params[0]))
    assert all(
        isinstance(leaf, nn.Parameter) and leaf.requires_grad for leaf in fp.leaves(loaded.params)
    )


def test_a_thread_writes_what_was_there(tmp_path):
    """What is saved are the numbers of the call; until it is finished the checkpoint before is the
    newest."""
    split = fp.split(nn.Sequential(*[nn.Linear(4, 4) for _ in range(4)]), 2)
    optimizer = torch.optim.AdamW(fp.leaves(split.params), lr=0.1)
    for leaf in fp.leaves(split.params):
        leaf.grad = torch.ones_like(leaf)
    optimizer.step()
    fp.save(tmp_path, split, split.params, optimizer=optimizer, step=1)
    before = [leaf.detach().clone() for leaf in fp.leaves(split.params)]
    saving = fp.save(tmp_path, split, split.params, optimizer=optimizer, step=2, wait=False)
    moments = [optimizer.state[leaf]["exp_avg"].clone() for leaf in fp.leaves(split.params)]
    optimizer.step()  # in place
    assert 1 == json.loads((tmp_path / "funcpipe.json").read_text())["step"]
    saving.finish()
    saving.finish()  # once is enough
    assert saving.written
    assert 2 == fp.load(tmp_path, split, optimizer=optimizer).step
    assert same(before, [leaf.detach() for leaf in fp.leaves(split.params)])
    assert same(moments, [optimizer.state[leaf]["exp_avg"] for leaf in fp.leaves(split.params)])
    assert not [
        thread for thread in threading.enumerate() if thread.name.startswith("funcpipe save")
    ]


@pytest.mark.parametrize("wait", [True, False])
def test_what_is_not_finished_is_not_destroyed(tmp_path, wait):
    """A save to the same path is refused until finish is called, or nobody has the first one any
    more."""
    split = fp.split(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), 2)
    saving = fp.save(tmp_path / "a", split, split.params, step=1, wait=False)
    with pytest.raises(
        fp.CheckpointError,
        match=r"a with wait=False is not finished, (.|\n)* saving.finish\(\) first",
    ):
        fp.save(tmp_path / "b" / ".." / "a", split, split.params, step=2, wait=wait)
    fp.save(tmp_path / "b", split, split.params, step=3)
    saving.finish()
    assert 1 == fp.load(tmp_path / "a", split).step
    dropped = fp.save(tmp_path / "a", split, split.params, step=4, wait=False)
    del dropped
    last = fp.save(tmp_path / "a", split, split.params, step=5, wait=wait)
    if last is not None:
        last.finish()
    assert 5 == fp.load(tmp_path / "a", split).step
    for thread in threading.enumerate():  # nobody has waited for that of what was dropped
        if thread.name.startswith("funcpipe save"):
            thread.join(10)


def test_a_thread_that_cannot_write_leaves_the_checkpoint_before(tmp_path, monkeypatch):
    split = fp.split(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), 2)
    fp.save(tmp_path, split, split.params, step=1)

    def full(*_, **__):
        raise OSError("no space left on device")

    monkeypatch.setattr("safetensors.torch.save_file", full)
    saving = fp.save(tmp_path, split, split.params, step=2, wait=False)
    with pytest.raises(OSError, match="no space"):
        saving.finish()
    assert 1 == fp.load(tmp_path, split).step
    monkeypatch.undo()
    fp.save(tmp_path, split, split.params, step=3)  # what failed is in nobody's way
    with pytest.raises(OSError, match="no space"):
        saving.finish()
    assert 3 == fp.load(tmp_path, split).step


def test_the_newest_whole_one_is_kept(tmp_path):
    training = Training(1)
    for _ in range(3):
        training.train(1)
        training.save(tmp_path)
    assert 1 == len([*tmp_path.glob("step-*")])
    assert 3 == fp.load(tmp_path, Training(2).split).step


def flip(file, place):
    data = bytearray(file.read_bytes())
    data[place] ^= 1
    file.write_bytes(data)


@pytest.mark.parametrize("what", ["model", "optimizer"])
@pytest.mark.parametrize("damage", ["flip", "cut", "gone"])
def test_a_damaged_file_is_refused_and_nothing_changes(tmp_path, what, damage):
    training = Training(2)
    training.train(2)
    training.save(tmp_path)
    (file,) = tmp_path.glob(f"step-*/{what}-00000.safetensors")
    if damage == "flip":
        flip(file, random.randrange(file.stat().st_size))
    elif damage == "cut":
        os.truncate(file, file.stat().st_size - 1)
    else:
        file.unlink()
    other = Training(2)
    before = [leaf.detach().clone() for leaf in fp.leaves(other.params)]
    with pytest.raises(
        fp.CheckpointError, match=f"damaged, .* load a copy(.|\n)*{what}-00000.safetensors"
    ):
        other.load(tmp_path)
    assert same(before, [leaf.detach() for leaf in fp.leaves(other.params)])
    assert not other.optimizer.state


def test_what_is_no_checkpoint_is_refused(tmp_path):
    split = Training(1).split
    with pytest.raises(fp.CheckpointError, match="no such folder"):
        fp.load(tmp_path / "nowhere", split)
    with pytest.raises(fp.CheckpointError, match="no save into it was finished"):
        fp.load(tmp_path, split)
    (tmp_path / "funcpipe.json").write_text("{")
    with pytest.raises(fp.CheckpointError, match="cannot be read"):
        fp.load(tmp_path, split)
    (tmp_path / "funcpipe.json").write_text('{"format": "another"}')
    with pytest.raises(fp.CheckpointError, match="another program or version"):
        fp.load(tmp_path, split)
    (tmp_path / "funcpipe.json").write_text('{"format": "funcpipe checkpoint 1", "files": {}}')
    with pytest.raises(fp.CheckpointError, match="lacks something"):
        fp.load(tmp_path, split)


def test_another_model_or_optimizer_is_refused(tmp_path):
    training = Training(2)
    training.train(1)
    training.save(tmp_path)
    wide = fp.split(
        nn.Sequential(
            *[nn.Linear(7, 7) if k % 3 == 0 else layer for k, layer in enumerate(model())]
        ),
        2,
    )
    with pytest.raises(
        fp.CheckpointError,
        match=r"'0.weight' has shape \(6, 6\) in the checkpoint, and \(7, 7\) in the model",
    ):
        fp.load(tmp_path, wide)
    with pytest.raises(fp.CheckpointError, match="it has no '12.weight'"):
        fp.load(tmp_path, fp.split(model().append(nn.Linear(6, 6)), 2))
    with pytest.raises(fp.CheckpointError, match="the model has no '9.weight'"):
        fp.load(tmp_path, fp.split(model()[:9], 2))
    with pytest.raises(fp.CheckpointError, match="of AdamW, not of SGD"):
        fp.load(
            tmp_path, training.split, optimizer=torch.optim.SGD(fp.leaves(training.params), lr=1.0)
        )
    with pytest.raises(fp.CheckpointError, match="that are not in params"):
        fp.load(
            tmp_path,
            training.split,
            optimizer=torch.optim.AdamW([torch.zeros(2, requires_grad=True)]),
        )
    fp.save(tmp_path, training.split, training.params, state=training.state)
    with pytest.raises(fp.CheckpointError, match="saved without optimizer="):
        fp.load(tmp_path, training.split, optimizer=training.optimizer)


def test_bad_arguments_are_refused_before_anything_is_written(tmp_path):
    training = Training(2)
    with pytest.raises(fp.CheckpointError, match="one tree for each of 2 stages"):
        fp.save(tmp_path / "a", training.split, training.params[:1])
    with pytest.raises(fp.CheckpointError, match="step is a whole number"):
        fp.save(tmp_path / "a", training.split, training.params, step=-1)
    with pytest.raises(fp.CheckpointError, match="the result of fp.split, or a plan"):
        fp.save(tmp_path / "a", model(), training.params)
    with pytest.raises(fp.CheckpointError, match="the result of fp.split, or a plan; got a tuple"):
        fp.save(training.split, training.params, tmp_path / "a")
    other = torch.optim.SGD([torch.zeros(2, requires_grad=True)], lr=1.0)
    with pytest.raises(fp.CheckpointError, match="that are not in params"):
        fp.save(
            tmp_path / "a", training.split, training.params, state=training.state, optimizer=other
        )
    with pytest.raises(fp.CheckpointError, match="the optimizer itself, not its state_dict"):
        fp.save(
            tmp_path / "a",
            training.split,
            training.params,
            state=training.state,
            optimizer=training.optimizer.state_dict(),
        )
    assert not (tmp_path / "a").exists()


def save_for_ever(path):
    torch.set_num_threads(1)
    training = Training(2)
    while True:
        training.train(1)
        training.save(path)


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_a_hundred_kills(tmp_path):
    """Whenever a process is killed, a whole checkpoint can be loaded, and it is no older than the
    one before."""
    context = multiprocessing.get_context("fork")
    Training(2).save(tmp_path)
    step = 0
    for _ in range(100):
        process = context.Process(target=save_for_ever, args=(tmp_path,), daemon=True)
        process.start()
        time.sleep(0.05 + random.random() * 0.15)
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        split = Training(1).split
        loaded = fp.load(Path(tmp_path), split)
        assert loaded.step >= 0
        step = max(step, loaded.step)
    assert step > 0


def test_all_files_have_the_permissions_of_the_umask(tmp_path):
    """As files that Python writes, so that a group or a colleague can read a checkpoint."""
    split = fp.split(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), 2)
    optimizer = torch.optim.AdamW(fp.leaves(split.params))
    fp.save(tmp_path / "here", split, split.params, optimizer=optimizer)
    (tmp_path / "plain").write_text("")
    modes = {file.stat().st_mode for file in (tmp_path / "here").rglob("*") if file.is_file()}
    assert {(tmp_path / "plain").stat().st_mode} == modes
