"""What objects show of themselves at a prompt and in a notebook: short, with the numbers that
matter, never an error."""

from __future__ import annotations

import itertools
import re
import time
import xml.etree.ElementTree as ET
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import funcpipe as fp
from funcpipe._src.core.notebook import picture
from funcpipe._src.core.words import size_of
from funcpipe._src.data.result import Span, Timeline

LONGEST = 320
"""Characters: three or four lines of a terminal."""
NASTY = "<b>&\"'stem'</b>"


@cache
def gpt2() -> dict[str, Any]:
    """A GPT-2 whose tensors have more characters than anybody reads, split, planned and run."""
    transformers = pytest.importorskip("transformers")
    tokens = {"bos_token_id": 0, "eos_token_id": 0}
    config = transformers.GPT2Config(
        vocab_size=99, n_embd=32, n_head=2, n_layer=6, n_positions=64, **tokens
    )
    split = fp.split(transformers.GPT2LMHeadModel(config), 3)
    plan = fp.make_plan(split, fp.schedules.one_f_one_b(3, 4), devices="cpu")
    ids = torch.randint(0, 99, (8, 16))
    batch = {"input_ids": ids, "labels": ids}, None
    result = fp.run(plan, fp.place(plan, split.params), batch, seed=0, record=True)
    return {"split": split, "plan": plan, "result": result}


@cache
def mlp() -> dict[str, Any]:
    """Everything that a user of a small model meets at a prompt."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(64, 256), nn.BatchNorm1d(256), nn.Linear(256, 64), nn.Linear(64, 10)
    )
    rows, target = torch.randn(16, 64), torch.randint(0, 10, (16,))
    split = fp.split(model, balance=[2, 2])
    schedule = fp.schedules.one_f_one_b(2, 4)
    plan = fp.make_plan(split, schedule, loss=F.cross_entropy, devices="cpu", outputs=True)
    result = fp.run(
        plan, split.params, (rows, target), state=split.state, record=True, loss_scale=8.0
    )
    forwards = fp.make_plan(split, fp.schedules.fill_drain(2, 4), devices="cpu")
    outputs, pullback = fp.vjp(forwards, split.params, rows, state=split.state)
    _, spent = fp.vjp(forwards, split.params, rows, state=split.state)
    spent(torch.zeros(16, 10))
    cost = fp.Cost([1.0] * 48, backward=2.0)
    choice = fp.models.plan_for(
        fp.Cost([1.0] * 8), num_devices=2, num_microbatches=4, evaluations=50
    )
    compiled = fp.compile_stage(fp.stage(lambda w, x: x @ w, name="product"))
    steps = [double, fp.batches.Fold(lambda state, x: (state, x), torch.zeros(10_000))]
    grads = fp.batches.accumulate_grads(lambda x: (x, None), [torch.ones(10_000)])
    return {
        "split": split,
        "plan": plan,
        "result": result,
        "accumulated": fp.accumulate([result, result]),
        "vjp": outputs,
        "pullback": pullback,
        "spent": spent,
        "stats": result.stats,
        "timeline": result.timeline,
        "schedule": schedule,
        "program": plan.program,
        "lane": plan.program.lane(0),
        "stage": split.stages[0],
        "compiled": compiled,
        "programs": fp.make_programs(compiled, torch.ones(64, 64), torch.ones(4, 64)),
        "composed": fp.compose(*split.stages),
        "memory": fp.models.memory(model, rows),
        "layer": fp.models.memory(model, rows)[0],
        "balance": fp.models.balance(cost, 4),
        "cost": cost,
        "choice": choice,
        "found": choice.found,
        "lanes": fp.lanes(plan),
        "graphs": fp.graphs(plan),
        "out": fp.Out(rows, stash={"early": rows}),
        "overlap": fp.batches.overlap([1, 2], steps),
        "fold": steps[1],
        "grads": grads,
        "layers": fp.models.find_layers(Blocks()),
        "large": fp.simulate(fp.schedules.one_f_one_b(32, 32)),
        "loaded": fp.typing.Loaded(split.params, split.state, 7),
    }


class Blocks(nn.Module):
    """A model of 80 blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(2, 2) for _ in range(80))


def double(x: Any) -> Any:
    """A batch stage."""
    return x


MLP = [
    "split",
    "plan",
    "result",
    "accumulated",
    "vjp",
    "pullback",
    "spent",
    "stats",
    "timeline",
    "schedule",
    "program",
    "lane",
    "stage",
    "compiled",
    "programs",
    "composed",
    "memory",
    "layer",
    "balance",
    "cost",
    "choice",
    "found",
    "lanes",
    "graphs",
    "out",
    "overlap",
    "fold",
    "grads",
    "layers",
    "large",
    "loaded",
]


def test_all_of_them_are_looked_at():
    assert sorted(MLP) == sorted(mlp())


@pytest.mark.parametrize("name", MLP)
def test_a_repr_is_short_quick_and_no_address(name):
    """No number of a tensor, no address of an object, no more than a few lines."""
    thing = mlp()[name]
    assert " object at 0x" not in repr(thing)
    assert "tensor(" not in repr(thing)
    assert len(repr(thing)) <= LONGEST
    start = time.perf_counter()
    repr(thing)
    assert time.perf_counter() - start < 0.1


@pytest.mark.parametrize("name", ["split", "plan", "result"])
def test_those_of_gpt2_are_short(name):
    assert len(repr(gpt2()[name])) <= LONGEST


def test_a_result_says_what_matters():
    """Its loss, how many gradients of how many bytes, its state, its outputs, that it was
    recorded."""
    result = mlp()["result"]
    size = size_of(sum(leaf.nbytes for leaf in fp.leaves(result.grads)))
    words = repr(result)
    for word in (
        *(
            f"loss {float(result.loss):.6g}",
            "weight 16",
            "microbatches 4 by threads",
            f"gradients 8 tensors, {size}",
        ),
        *("state 3 tensors", "outputs float32 [16, 10]", "timeline 16 actions", "loss scale 8"),
    ):
        assert word in words, word
    assert "timeline" not in repr(replace(result, timeline=None))
    assert "gradients" not in repr(replace(result, grads=None))
    assert "unused 2 leaves" in repr(replace(result, unused=((0, "a"), (1, "b"))))
    assert "loss" not in repr(mlp()["vjp"])


def test_a_loss_that_cannot_be_read_is_shown_by_its_shape():
    assert "loss float32 []" in repr(replace(mlp()["result"], loss=torch.zeros((), device="meta")))


def test_a_split_says_where_it_is_cut_and_what_is_tied():
    words = repr(gpt2()["split"])
    assert "stages 3: transformer.h[0:2] | transformer.h[2:4] | transformer.h[4:6]" in words
    assert "tied transformer.wte.weight" in words
    assert f"{len(fp.leaves(gpt2()['split'].params))} tensors" in words
    assert "loss the model's own" in words


def test_a_split_without_a_trace_does_not_promise_a_loss():
    """Nothing ran, so only transformers models are known to compute one."""

    class Blocks(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

        def forward(self, x):
            for layer in self.layers:
                x = layer(x)
            return x

    assert "loss the model's own, if its output has one" in repr(fp.split(Blocks(), 2))
    assert "own, if" not in repr(gpt2()["split"])


def test_a_plan_says_what_it_is_of():
    assert repr(mlp()["plan"]) == (
        "<Plan: schedule 1F1B; stages 2: 0-1 | 2-3; microbatches 4; lanes 2 on cpu; loss "
        "cross_entropy>"
    )
    assert "instructions" in str(mlp()["plan"]), "print still writes the program"
    unbound = fp.make_plan(mlp()["split"], fp.schedules.one_f_one_b(2, 4), loss=F.cross_entropy)
    assert "devices chosen at the run" in repr(unbound)


def test_a_plan_of_many_stages_names_the_first_and_the_last():
    stages = [fp.stage(lambda w, x: x * w, name=f"stage_{number}") for number in range(64)]
    plan = fp.make_plan(stages, fp.schedules.one_f_one_b(64, 2), loss=F.mse_loss, devices="cpu")
    assert "stages 64: stage_0 | stage_1" in repr(plan)
    assert "... | stage_63" in repr(plan)
    assert len(repr(plan)) <= LONGEST


def test_others_say_what_matters():
    things = mlp()
    expected = {
        "spent": "<Pullback: spent>",
        "balance": "<Balance [12, 12, 12, 12]: bottleneck 36, lower bound 36>",
        "layers": "<Layers 'blocks': blocks 80: 0, 1, 2, ..., 79>",
        "out": "<Out: y float32 [16, 64]; stash early float32 [16, 64]>",
        "fold": "<Fold: mlp.<locals>.<lambda>; state 1 tensor, 39.1 KiB>",
        "overlap": "<Overlap source | double | stage: 0 of 2 batches handed out>",
        "stage": "<Stage '0-1': Sequential; state>",
        "compiled": "<Stage 'product': mlp.<locals>.<lambda>; compiled>",
        "cost": "Cost(forward=(1, 1, 1, 1, 1, ..., 1), backward=2)",
    }
    assert expected == {name: repr(things[name]) for name in expected}
    assert repr(things["memory"]).startswith("<Memory of 4 layers: parameters ")


class Broken:
    """A loss, a tree and a name that cannot be looked at."""

    def __getattribute__(self, name: str) -> Any:
        raise RuntimeError("the device is gone")


@pytest.mark.parametrize(
    "thing",
    [
        fp.Schedule(((1, 2),)),  # pyright: ignore[reportArgumentType]
        fp.Schedule((("0F0",),)),  # pyright: ignore[reportArgumentType]
        Timeline((Span(7, 0.0, 1.0, fp.Action(fp.Kind.F, 0, 0)),), 1),
        fp.Stage(Broken()),
    ],
    ids=["numbers", "words", "a device that is none", "a broken function"],
)
def test_never_an_error(thing):
    """What is illegal, or broken, is shown all the same: by its repr where a notebook has nothing
    better."""
    assert repr(thing)
    assert len(repr(thing)) <= LONGEST
    html = getattr(thing, "_repr_html_", lambda: None)()
    assert html is None or ET.fromstring(html) is not None


def test_an_illegal_schedule_is_shown_with_its_faults():
    schedule = fp.Schedule.parse("0F0 0B0\n1B0 1F0", name=NASTY)
    assert "2 stages" in repr(schedule)
    root = ET.fromstring(schedule._repr_html_())
    text = " ".join(root.itertext())
    assert NASTY in text
    assert "1F0" in text
    assert "1B0 on device 1 comes too early: F must come first" in text
    assert root.find(".//pre") is not None


def test_a_very_large_schedule_is_not_simulated_unasked():
    schedule = fp.schedules.one_f_one_b(64, 512)
    start = time.perf_counter()
    html = schedule._repr_html_()
    assert time.perf_counter() - start < 1.0
    assert "64 stages" in html
    assert "<svg" not in html


HTML = [
    "split",
    "plan",
    "result",
    "timeline",
    "schedule",
    "memory",
    "balance",
    "vjp",
    "accumulated",
]


@pytest.mark.parametrize("name", HTML)
def test_html_is_well_formed_and_brings_no_colour_for_text_and_background(name):
    """It inherits both, so it is right on a light page and on a dark one; and nothing is loaded
    from elsewhere."""
    html = mlp()[name]._repr_html_()
    root = ET.fromstring(html)
    assert root.tag == "div"
    style = "".join(re.findall(r"<style>(.*?)</style>", html, re.S))
    assert not re.findall(r"(?<!-)\bcolor:(?!inherit)", style)
    assert not re.findall(r"background(?:-color)?:(?!none)", style)
    assert not re.findall(r"""(?:src|href)=|url\(|@import|<script""", html)
    for selector in re.findall(r"([^{}]+)\{", style):
        assert all(part.strip().startswith(".funcpipe") for part in selector.split(",")), selector


@pytest.mark.parametrize("name", ["plan", "result", "timeline", "schedule"])
def test_pictures_scroll_before_they_are_too_small(name):
    """Each is in a box that scrolls, and keeps three quarters of its width."""
    root = ET.fromstring(mlp()[name]._repr_html_())
    boxes = [box for box in root.iter("div") if "overflow-x:auto" in box.get("style", "")]
    assert len(boxes) == 1
    (svg,) = boxes[0]
    least = float(re.search(r"min-width:([\d.]+)px", svg.get("style", ""))[1])  # pyright: ignore[reportOptionalSubscript]
    assert least == pytest.approx(0.75 * float(svg.get("width", "0")), abs=1)


def cells(html: str) -> list[list[str]]:
    """The rows of the first table."""
    rows = ET.fromstring(html).iter("tr")
    return [["".join(cell.itertext()) for cell in row] for row in rows]


def test_tables_have_the_numbers():
    heads, *rows = cells(mlp()["split"]._repr_html_())
    assert heads == ["stage", "name", "parameters", "numbers", "bytes", "buffers"]
    assert rows[1] == ["1", "2-3", "4", "17,098", "66.8 KiB", ""]
    heads, *rows = cells(mlp()["balance"]._repr_html_())
    assert heads == ["part", "layers", "which", "time", "memory"]
    assert rows[1] == ["1", "12", "12-23", "36", "12"]
    printed = [line.split("  ") for line in str(mlp()["memory"]).splitlines()]
    printed = [[cell.strip() for cell in line if cell.strip()] for line in printed]
    rows = cells(mlp()["memory"]._repr_html_())
    assert [[cell for cell in row if cell] for row in rows] == printed
    heads, *rows = cells(gpt2()["plan"]._repr_html_())
    assert rows[0] == ["0", "transformer.h[0:2]", "0", "GPT2LMHeadModel", "inputs", ""]
    assert "tied" in gpt2()["split"]._repr_html_()


def test_names_are_escaped():
    """Of stages, of schedules and of parameters."""
    model = nn.Sequential()
    model.add_module("<i>first", nn.Linear(2, 2))
    model.add_module("&last", nn.Linear(2, 2))
    split = fp.split(model, 2)
    schedule = fp.Schedule(fp.schedules.one_f_one_b(2, 2).orders, NASTY)
    plan = fp.make_plan(split, schedule, loss=F.mse_loss, devices="cpu")
    result = fp.run(plan, split.params, (torch.ones(2, 2), torch.ones(2, 2)), record=True)
    for thing in (split, schedule, plan, result):
        root = ET.fromstring(thing._repr_html_())
        assert not {"i", "b"} & {element.tag.rpartition("}")[2] for element in root.iter()}
    assert "<i>first" in "".join(ET.fromstring(split._repr_html_()).itertext())
    assert NASTY in "".join(ET.fromstring(plan._repr_html_()).itertext())


def test_what_has_no_picture_has_none():
    assert picture(object()) == ""
    assert "<svg" not in mlp()["vjp"]._repr_html_()
    assert mlp()["result"]._repr_html_().count("<svg") == 1


def test_values_of_one_page_do_not_disturb_each_other():
    """The same style in each, whatever stands beside it."""
    styles = [
        re.findall(r"<style>(.*?)</style>", mlp()[name]._repr_html_(), re.S)[0]
        for name in ("split", "memory")
    ]
    assert all(first == second for first, second in itertools.pairwise(styles))
