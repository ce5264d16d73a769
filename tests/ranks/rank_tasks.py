"""What the processes of the tests do. Every task gets (rank, size, ...) and returns something
small, or raises."""

import contextlib
import copy
import ctypes
import functools
import gc
import os
import random
import signal
import threading
import time
from collections import Counter
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import causal
import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from common import cpu_plan, same, schedules, snapshot
from functional_rules import MAKERS as FUNCTIONAL
from functional_rules import PlainRule
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.multiprocessing.reductions import StorageWeakRef

import funcpipe as fp
from funcpipe import schedules as S
from funcpipe._src.compiled.programs import Programs
from funcpipe._src.engine.lanes import Lanes
from funcpipe._src.processes.team import Team
from funcpipe._src.replicas.replicas import Replicas
from funcpipe.testing import first_difference, record_values


class Pair(NamedTuple):
    h: Tensor
    ids: Tensor


@dataclass
class Record:
    h: Tensor
    flag: bool
    name: str = "record"


def unless(right, what):
    """What is wrong, as a list: nothing if it is right."""
    return [] if right else [what]


def unlike(want, got, *names):
    """The fields of two results that differ."""
    return [name for name in names if not same(getattr(want, name), getattr(got, name))]


def unlike_gradients(want, got, stages):
    """The gradients of stages that differ by more than rounding, sharded ones as a whole."""
    wrong = []
    for stage in stages:
        for key, gradient in want.grads[stage].items():
            other = entire(got.grads[stage][key])
            if gradient is None or other is None:
                wrong += unless(gradient is other, f"grads[{stage}][{key}]")
            elif not torch.allclose(gradient, other, rtol=1e-12, atol=1e-12):
                wrong.append(f"grads[{stage}][{key}] {(gradient - other).abs().max()}")
    return wrong


def joined(batches):
    """The microbatches of several replicas, for one process that has them all."""
    return [
        fp.Microbatches(part for tensor in tensors for part in parts(tensor))
        for tensors in zip(*batches, strict=True)
    ]


def unequal(one, other, stages):
    """The stages whose trees differ."""
    return [stage for stage in stages if not same(one[stage], other[stage])]


def numbers_of(results):
    """The loss, the losses, the weight and the norm of each result."""
    return [(result.loss, result.losses, result.weight, result.norm) for result in results]


@contextlib.contextmanager
def unchanged(wrong, params, optimizer):
    """Inside, something fails, and parameters and the optimizer's state must stay as they are."""
    before = everything_of(params, optimizer)
    yield
    wrong += unless(same(before, everything_of(params, optimizer)), "a failure left something")


@contextlib.contextmanager
def counted_walks(walks):
    """Inside, each walk of lanes adds how many executions it has."""
    walk = Lanes.walk

    def walked(self, executions):
        walks.append(len(executions))
        return walk(self, executions)

    with mock.patch.object(Lanes, "walk", walked):
        yield


def planted():
    """The error of a failure on purpose, here or on another rank."""
    return pytest.raises((ArithmeticError, fp.PeerError), match="planted")


def dp_and_pp(replicas, ranks):
    """A mesh of so many replicas of pipelines."""
    return init_device_mesh("cpu", (replicas, ranks), mesh_dim_names=("dp", "pp"))


def linear(i, o, g):
    return {
        "w": torch.randn(o, i, generator=g, dtype=torch.float64),
        "b": torch.randn(o, generator=g, dtype=torch.float64),
    }


def everything():
    """Four stages: a dict, a named tuple, a dataclass between them; skips (one popped twice), a
    feed, dropout, state."""
    g = torch.Generator().manual_seed(1)

    @fp.stage(stash=["far", "mixed"])
    def first(p, x):
        h = F.dropout(torch.tanh(x @ p["w"].T + p["b"]), 0.25)
        return fp.Out(
            {"h": h, "ids": x.argmax(-1), "flag": True},
            stash={"far": h * 2, "mixed": (h > 0, 3, h.detach())},
        )

    def second(p, x, *, skips, feeds, state):
        h = (
            F.relu(x["h"].mul_(1.5) @ p["w"].T + p["b"], inplace=True)
            + skips["far"] * feeds["scale"]
            + state
        )
        return fp.Out(
            Pair(h.T.contiguous().T, x["ids"]),
            stats=h.detach().mean(0),
            loss=(h.square().sum() * 0.01, h.numel()),
        )

    @fp.stage(pop=["mixed"])
    def third(p, x, *, skips):
        mask, factor, _ = skips["mixed"]
        return Record(
            torch.where(mask, x.h @ p["w"].T, factor * x.h) + F.one_hot(x.ids, 6), flag=False
        )

    @fp.stage(pop=["far"])
    def fourth(p, x, *, skips):
        assert (Record, "record", False) == (type(x), x.name, x.flag)
        return F.dropout(x.h + skips["far"], 0.1) @ p["w"].T + p["b"]

    stages = (
        first,
        fp.stage(
            second, pop=["far"], feeds=["scale"], commit=lambda state, stats: state + sum(stats)
        ),
        third,
        fourth,
    )
    params = tuple(linear(6, 6, g) for _ in stages)
    params[1]["unused"] = torch.ones(2, dtype=torch.float64)
    params[2]["steps"] = torch.tensor(3)
    return stages, params, ((), torch.zeros(6, dtype=torch.float64), (), ())


@functools.cache
def everything_compiled():
    """The stages of `everything` as programs, which a process traces once for several tests."""
    stages, _, _ = everything()
    return tuple(map(fp.compile_stage, stages))


def loss_with_aux(y, target):
    return fp.Loss(F.mse_loss(y, target), aux={"largest": y.abs().max(), "rows": len(y)})


def counted(y, target):
    """(sum, weight): what divides is known late."""
    return (y - target).square().sum(), target.numel() + float(target[0, 0] > 0)


def batch(rows):
    g = torch.Generator().manual_seed(rows)
    return [torch.randn(rows, 6, generator=g, dtype=torch.float64) for _ in range(3)]


def differences(want, got, stages, *, last):
    """The fields in which a rank's result is not what one process gives."""
    wrong = unlike(want, got, "loss", "weight", "losses", "aux")
    for name in ("grads", "state"):
        for stage, (one, other) in enumerate(
            zip(getattr(want, name) or (), getattr(got, name) or (), strict=True)
        ):
            if not (same(one, other) if stage in stages else other is None):
                wrong.append(f"{name}[{stage}]")
    if not (same(want.outputs, got.outputs) if last else got.outputs is None):
        wrong.append("outputs")
    if {entry for entry in want.unused if entry[0] in stages} != {*got.unused}:
        wrong.append("unused")
    return wrong


def owners(lanes, size):
    """The rank of each lane: as many on each, in order; or in turn, where they cannot be as
    many."""
    return None if lanes % size == 0 else [lane % size for lane in range(lanes)]


def alone(plan, params, state, count):
    """The result of one process for so many rows."""
    x, target, scale = batch(count)
    return fp.run_sequential(
        plan, params, (x, target), state=state, feeds={"scale": scale}, seed=count
    )


def bits(rank, size, numbers, rows):
    """Runs of every schedule whose number is given, against one process.

    One process has the same results over all schedules: the ranks take turns to check that.
    """
    stages, params, state = everything()
    options = {"loss": loss_with_aux, "outputs": True, "devices": "cpu"}
    wrong, all_of = [], schedules(4, 4)
    first_plan = fp.make_plan(stages, all_of[numbers[0]], **options)
    wants = {count: alone(first_plan, params, state, count) for count in rows}
    for turn, number in enumerate(numbers):
        schedule = all_of[number]
        plan = fp.make_plan(stages, schedule, **options, spare_slots=number % 3)
        with fp.ranks(plan, lanes=owners(plan.num_devices, size), timeout=30.0) as ranks:
            own = fp.place(plan, params, ranks)
            for count in rows:
                x, target, scale = batch(count)
                want = wants[count]
                if turn % size == rank:
                    wrong += [
                        f"{schedule.name} {count} rows, one process: {name}"
                        for name in differences(
                            want, alone(plan, params, state, count), range(4), last=True
                        )
                    ]
                first, last = 0 in ranks.stages, 3 in ranks.stages
                given = (x if first else None, target if last else None) if first or last else None
                feeds = {"scale": scale} if 1 in ranks.stages else None
                got = fp.run(
                    plan,
                    own,
                    given,
                    state=fp.place(plan, state, ranks),
                    feeds=feeds,
                    seed=count,
                    executor=ranks,
                )
                wrong += [
                    f"{schedule.name} {count} rows: {name}"
                    for name in differences(want, got, ranks.stages, last=last)
                ]
    return wrong


# -- training
# -------------------------------------------------------------------------------


def tied_model():
    """An embedding that the last stage uses again, four stages."""
    g = torch.Generator().manual_seed(3)
    table = torch.randn(11, 6, generator=g, dtype=torch.float64)
    stages = [
        fp.stage(lambda p, x: p["table"][x], name="embed"),
        *[
            fp.stage(lambda p, x: torch.tanh(x @ p["w"].T + p["b"]), name=f"layer {k}")
            for k in range(2)
        ],
        fp.stage(lambda p, x: (x @ p["table"].T) * p["scale"], name="head"),
    ]
    scale = torch.ones(1, dtype=torch.float64)
    params = (
        {"table": table},
        linear(6, 6, g),
        linear(6, 6, g),
        {"table": table.clone(), "scale": scale},
    )
    return stages, params, [[(0, "table"), (3, "table")]]


def fresh(params):
    """Parameters of one's own that are trained."""
    return tuple({k: v.clone().requires_grad_() for k, v in p.items()} for p in params)


def new_scaler():
    return torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)


def tokens():
    """Two batches of 7 rows of 4 tokens for the tied model."""
    g = torch.Generator().manual_seed(5)
    return tuple(torch.randint(11, (7, 4), generator=g) for _ in range(2))


def cross_entropy(out, target, **options):
    return F.cross_entropy(out.flatten(0, 1), target.flatten(), **options)


def training(rank, size, kind):
    """Steps of AdamW with clipping, a loss scale or a scaler; rank by rank against one process."""
    stages, start, ties = tied_model()
    loss = {"loss": late_cross_entropy}
    if kind != "late":
        loss["loss"] = partial(cross_entropy, ignore_index=2)
        loss["weight"] = lambda t: float((t != 2).sum())
    plan = cpu_plan(stages, S.one_f_one_b(4, 3), ties=ties, **loss)
    x, y = tokens()
    wrong = []
    with fp.ranks(plan, lanes=owners(4, size), timeout=30.0) as ranks:
        alone, ours = fresh(start), fp.place(plan, fresh(start), ranks)
        steps = []
        for params in (alone, ours):
            optimizer = torch.optim.AdamW(fp.leaves(params), lr=0.05)
            scaler = new_scaler() if kind == "scaler" else None
            steps.append((params, optimizer, scaler))
        for number in range(4):
            results = []
            for params, optimizer, scaler in steps:
                scale = scaler.get_scale() if scaler else 4.0 if kind == "scale" else 1.0
                executor = ranks if params is ours else "serial"
                result = fp.run(
                    plan, params, (x, y), loss_scale=scale, executor=executor, threads_per_lane=1
                )
                if kind == "scaler" and number == 1 and result.grads[1]:  # of one rank; none steps
                    result.grads[1]["b"].fill_(float("inf"))
                norm = fp.global_norm(result)
                step_norm = fp.step(optimizer, params, result, max_norm=0.5, scaler=scaler)
                if scaler:
                    scaler.update()
                results.append(
                    (result.loss, result.finite, norm, step_norm, scaler and scaler.get_scale())
                )
            if not same(*results):
                wrong.append((number, [str(each) for each in results]))
        wrong += unequal(alone, ours, ranks.stages)
    return wrong


def stepping(rank, size, kind):
    """A schedule that steps in several processes against steps after runs in one; a tie, clipping,
    a scale, late weights."""
    stages, start, ties = tied_model()
    schedule = S.one_f_one_b(4, 3)
    loss = late_cross_entropy if kind == "late" else cross_entropy
    plain, plan = (
        cpu_plan(stages, one, loss=loss, ties=ties) for one in (schedule, S.step_params(schedule))
    )
    x, y = tokens()
    max_norm, scale = 0.5 if kind == "clips" else 100.0, 4.0 if kind == "scale" else 1.0
    wrong = []
    with fp.ranks(plan, lanes=owners(4, size), timeout=30.0) as ranks:
        alone, ours = fresh(start), fp.place(plan, fresh(start), ranks)
        theirs, mine = (torch.optim.AdamW(fp.leaves(params), lr=0.05) for params in (alone, ours))
        for number in range(4):
            want = fp.run(
                plain, alone, (x, y), executor="serial", threads_per_lane=1, loss_scale=scale
            )
            norm = fp.step(theirs, alone, want, max_norm=max_norm)
            options = {"optimizer": mine, "executor": ranks, "threads_per_lane": 1}
            got = fp.run(plan, ours, (x, y), **options, max_norm=max_norm, loss_scale=scale)
            facts = (norm, want.loss), (got.norm, got.loss)
            wrong += unless(same(*facts), f"{number}: {facts}")
            wrong += [(number, stage) for stage in unequal(alone, ours, ranks.stages)]
        refused = pytest.raises(fp.RanksError, match="max_norm")
        with unchanged(wrong, ours, mine), refused:
            fp.run(plan, ours, (x, y), optimizer=mine, max_norm=1.0 + rank, executor=ranks)
    return wrong


def unlike_options(rank, size, kind):
    """Ranks whose optimizers have other options for copies of one parameter: the error of each
    step, and whether the parameters are as before. Equal options are accepted."""
    found = []
    if kind == "replicas":
        stages = [fp.stage(lambda p, x: x @ p["w"].T + p["b"])]
        start, ties = (linear(6, 6, torch.Generator().manual_seed(3)),), []
        schedule = S.fill_drain(1, 2)
        x = y = torch.ones(4, 6, dtype=torch.float64)
        loss, options = F.mse_loss, {"lanes": None}
    else:
        stages, start, ties = tied_model()
        schedule, loss = S.one_f_one_b(4, 3), cross_entropy
        x, y = tokens()
        options = {"lanes": owners(4, size)}
    if kind == "inside":
        schedule = S.step_params(schedule)
    plan = cpu_plan(stages, schedule, loss=loss, ties=ties)
    mesh = dp_and_pp(size, 1)
    where = (mesh,) if kind == "replicas" else ()
    options |= {"dp": "dp"} if kind == "replicas" else {}
    with fp.ranks(plan, *where, **options, timeout=30.0) as ranks:
        params = fp.place(plan, fresh(start), ranks)
        for rate in (0.1, 0.1 * (1 + rank)):
            optimizer = torch.optim.SGD(fp.leaves(params), lr=rate)
            before = snapshot(params)
            try:
                if kind == "inside":
                    fp.run(plan, params, (x, y), optimizer=optimizer, executor=ranks)
                else:
                    fp.step(optimizer, params, fp.run(plan, params, (x, y), executor=ranks))
                text = ""
            except fp.RanksError as error:
                text = str(error)
            found.append((text, same(before, snapshot(params))))
    return found


def several_batches(rank, size, kind):
    """Several batches at once in several processes, against one run after the other in one."""
    torch.manual_seed(1)
    stages = [fp.stage(dropping, name=f"dropping {number}") for number in range(4)]
    if kind == "norm":
        stages[1] = fp.stage(normed, state=True, commit=committed)
    if kind == "compiled":
        stages = [fp.compile_stage(stage) for stage in stages]
    start = tuple({name: torch.randn(6, 6) * 0.3 for name in "ab"} for _ in range(4))
    ties = [[(0, "a"), (3, "a")]] if kind == "tied" else []
    if kind == "tied":
        start[3]["a"] = start[0]["a"].clone()
    schedule = S.step_params(S.zero_bubble(4, 3))
    loss = counted_squares if kind == "late" else F.mse_loss
    plan = cpu_plan(stages, schedule, loss=loss, ties=ties)
    batches = [(torch.randn(rows, 6), torch.randn(rows, 6)) for rows in (7, 6, 6, 9)]
    if kind == "scale":
        batches[2] = batches[2][0], torch.full_like(batches[2][1], torch.inf)
    state = ((), torch.zeros(6), (), ()) if kind == "norm" else None
    options = {
        "max_norm": 0.01 if kind == "clips" else 1e6,
        "loss_scale": 4.0 if kind == "scale" else 1.0,
    }
    options |= {"threads_per_lane": 1, "seed": 5}
    wrong, walks = [], []
    with fp.ranks(plan, lanes=owners(4, size), timeout=20.0) as ranks:
        alone, ours = fresh(start), fp.place(plan, fresh(start), ranks)
        if kind == "tied":
            alone[3]["a"] = alone[0]["a"]
            if {0, 3} <= {*ranks.stages}:
                ours[3]["a"] = ours[0]["a"]
        theirs, mine = (
            torch.optim.AdamW([*dict.fromkeys(fp.leaves(own))], lr=0.05) for own in (alone, ours)
        )
        if kind in ("hooked", "last step") and rank == 0:
            mine.register_step_post_hook(lambda *_: None)
        rates = [None, None]
        if kind == "scheduled":
            rates = [torch.optim.lr_scheduler.StepLR(each, 1, 0.7) for each in (theirs, mine)]
        held = [state, None if state is None else fp.place(plan, state, ranks)]
        given = [batch if rank in (0, size - 1) else None for batch in batches]

        for number in range(3):
            serial = {"optimizer": theirs, "scheduler": rates[0], "executor": "serial"}
            want = fp.run_batches(plan, alone, batches, **options, **serial, state=held[0])
            more = {**options, "optimizer": mine, "scheduler": rates[1], "executor": ranks}
            more["state"] = held[1]
            if kind == "refused" and number == 1:
                counts = "same number of batches on every rank: rank 0 got 4; rank 1 got 3"
                with unchanged(wrong, ours, mine):
                    with pytest.raises(fp.RanksError, match=counts):
                        fp.run_batches(plan, ours, given[: 4 - rank], **more)
                    with pytest.raises(fp.RanksError, match="max_norm"):
                        fp.run_batches(plan, ours, given, **{**more, "max_norm": 1.0 + rank})
            if kind == "fails" and number == 1:
                failing = FAILS_IN_SECOND.on(rank == size - 1, 3 * len(ranks.stages))
                with unchanged(wrong, ours, mine), failing, planted():
                    fp.run_batches(plan, ours, given, **more)
            if kind == "last step" and number == 1:
                steps, own_step = iter(range(8)), torch.optim.AdamW.step

                # A step is of two stages here, and of both stages at once at rank 0.
                def step(optimizer, steps=steps, own_step=own_step):
                    if next(steps) == 7:
                        raise ArithmeticError("planted")
                    return own_step(optimizer)

                failing = mock.patch.object(torch.optim.AdamW, "step", step)
                with unchanged(wrong, ours, mine), failing, planted():
                    fp.run_batches(plan, ours, given, **more)
            with counted_walks(walks):
                got = fp.run_batches(plan, ours, given, **more)
            if state is not None:
                held = [want[-1].state, got[-1].state]
                wrong += unequal(*held, ranks.stages)
            facts = numbers_of(want), numbers_of(got)
            wrong += unless(same(*facts), f"{number}: {facts}")
            wrong += [(number, stage) for stage in unequal(alone, ours, ranks.stages)]
    return wrong, walks


def dropping(p, x):
    FAILS_IN_SECOND.look()
    return x + torch.tanh(F.dropout(x, 0.1) @ p["a"]) @ p["b"]


def normed(p, x, *, state):
    return fp.Out(dropping(p, x) - state, stats=x.mean(0))


def committed(state, stats):
    return 0.5 * state + 0.5 * torch.stack(stats).mean(0)


def counted_squares(y, target):
    """A sum, and how much it counts, which nobody knew before."""
    return (y - target).square().sum(), target.numel()


class _FailsInSecond:
    """Raises in the second batch, at the process where it is on."""

    def __init__(self):
        self.left = None

    @contextlib.contextmanager
    def on(self, here, forwards):
        """Inside, it raises, if it is here, after so many forwards: those of the first batch."""
        self.left = forwards + 1 if here else None
        try:
            yield
        finally:
            self.left = None

    def look(self):
        if self.left is not None:
            self.left -= 1
            if self.left == 0:
                raise ArithmeticError("planted")


FAILS_IN_SECOND = _FailsInSecond()


def several_batches_of_replicas(rank, size, kind):
    """Several batches at once of replicas, against runs one after the other: what differs, and how
    the lanes walked."""
    torch.manual_seed(1)
    stages = [fp.stage(dropping, name=f"{kind} {number}") for number in range(4)]
    start = tuple({name: torch.randn(6, 6) * 0.3 for name in "ab"} for _ in range(4))
    schedule = S.interleaved(4, 4, num_devices=2)
    if kind == "sharded":
        schedule = S.gather_params(S.looped_bfs(4, 4, num_devices=2), whole=1)
    if kind != "plain":
        schedule = S.reduce_grads(schedule)
    plan = cpu_plan(stages, S.step_params(schedule))
    wrong, walks = [], []
    with fp.ranks(plan, dp_and_pp(2, 2), dp="dp", timeout=20.0) as ranks:
        torch.manual_seed(2 + ranks.replica)
        rows = [8, 9, 8, 2 if kind == "uneven" and ranks.replica else 8]
        batches = [(torch.randn(count, 6), torch.randn(count, 6)) for count in rows]
        alone, ours = (
            fp.place(plan, fresh(start), ranks, shard=kind == "sharded") for _ in range(2)
        )
        theirs, mine = (torch.optim.AdamW(fp.leaves(own), lr=0.05) for own in (alone, ours))
        options = {"executor": ranks, "max_norm": 0.01 if kind == "clips" else 1e6}
        for number in range(3):
            seeds = [fp.fold_in(number, place) for place in range(len(batches))]
            want = [
                fp.run(plan, alone, one, optimizer=theirs, **{**options, "seed": seed})
                for one, seed in zip(batches, seeds, strict=True)
            ]
            options["seed"] = number
            if kind == "fails" and number == 1:
                failing = FAILS_IN_SECOND.on(rank == 2, 4 * len(ranks.stages))
                with unchanged(wrong, ours, mine), failing, planted():
                    fp.run_batches(plan, ours, batches, optimizer=mine, **options)
            with counted_walks(walks):
                got = fp.run_batches(plan, ours, batches, optimizer=mine, **options)
            facts = numbers_of(want), numbers_of(got)
            wrong += unless(same(*facts), f"{number}: {facts}")
            leaves = everything_of(alone, theirs), everything_of(ours, mine)
            wrong += unless(same(*leaves), f"{number} a leaf")
    return wrong, walks


def chosen(params, x):
    """A stage that uses one leaf only for positive inputs, and one leaf never."""
    y = x @ params["both"]
    return torch.tanh(y @ params["one"] if x[0, 0] > 0 else y).abs() * x[:, :1].sign()


def unused_leaves_of_replicas(rank, size, kind):
    """Steps after runs, in schedules and over several batches, where replicas use other leaves.

    Returns what is wrong, and the parameters of this rank.
    """
    torch.manual_seed(1)
    start = tuple({name: torch.randn(6, 6) for name in ("both", "one", "never")} for _ in range(2))
    schedule = S.one_f_one_b(2, 2)
    steps = S.step_params(S.reduce_grads(schedule) if kind == "reduced" else schedule)
    plan, stepping = (cpu_plan([fp.stage(chosen)] * 2, one) for one in (schedule, steps))
    mesh = dp_and_pp(2, 2)
    with fp.ranks(plan, mesh, dp="dp", timeout=20.0) as ranks:
        rows, want = [], []
        for _ in range(3):
            params = fp.place(plan, fresh(start), ranks, shard=kind == "sharded")
            rows.append((params, torch.optim.AdamW(fp.leaves(params), lr=0.05, weight_decay=0.5)))
        x = torch.rand(4, 6) + 0.1
        signs = [1.0 if ranks.replica else -1.0, -1.0, 1.0, -1.0]
        batches = [(sign * x, x) for sign in signs]
        for number, batch in enumerate(batches):
            params, optimizer = rows[0]
            result = fp.run(plan, params, batch, executor=ranks)
            names = {"never"} if number % 2 == 0 else {"one", "never"}
            want += unless(names == {name for _, name in result.unused}, result.unused)
            fp.step(optimizer, params, result)
            fp.run(stepping, rows[1][0], batch, optimizer=rows[1][1], executor=ranks)
        for pair in (batches[:2], batches[2:]):
            fp.run_batches(stepping, rows[2][0], pair, optimizer=rows[2][1], executor=ranks)
        first = everything_of(*rows[0])
        wrong = [way for way in (1, 2) if not same(first, everything_of(*rows[way]))]
        (stage,) = ranks.stages
        mine, before = rows[0][0][stage], start[stage]
        whole = {
            name: leaf.full_tensor() if kind == "sharded" else leaf for name, leaf in mine.items()
        }
        wrong += unless(torch.equal(before["never"], whole["never"]), "never")
        wrong += unless(not torch.equal(before["one"], whole["one"]), "one")
        face = ranks.schedule(rows[0][0])
        face.step(*batches[1][:1] if 0 in ranks.stages else (), target=x)
        grads = {name for name, leaf in mine.items() if leaf.grad is not None}
        wrong += unless(grads == {"both"}, grads)
    return want + wrong, {name: leaf.detach().clone() for name, leaf in whole.items()}


def goes_on(rank, size):
    """When the first lane begins its second batch, and when the last one ends its step of the
    first."""
    begun, ended = [], []
    own_step = torch.optim.SGD.step

    def first(p, x):
        begun.append(time.monotonic())
        return x * p

    def step(optimizer):
        if rank == size - 1 and not ended:
            time.sleep(0.5)
        own_step(optimizer)
        ended.append(time.monotonic())

    stages = [
        fp.stage(first),
        *[fp.stage(lambda p, x: x * p, name=str(number)) for number in range(1, size)],
    ]
    plan = cpu_plan(stages, S.step_params(S.one_f_one_b(size, 2)))
    with fp.ranks(plan, timeout=20.0) as ranks:
        params = fp.place(
            plan, tuple(torch.tensor(1.5, requires_grad=True) for _ in range(size)), ranks
        )
        optimizer = torch.optim.SGD(fp.leaves(params), lr=0.1)
        given = (torch.ones(4), torch.zeros(4))
        fp.run(plan, params, given, optimizer=optimizer, executor=ranks)
        begun.clear()
        with mock.patch.object(torch.optim.SGD, "step", step):
            fp.run_batches(plan, params, [given] * 3, optimizer=optimizer, executor=ranks)
    return begun[2:3], ended[:1]


def stepping_replicas(rank, size, kind, rows):
    """Replicas that step inside of runs, against steps after them: what differs, and how many steps
    lanes made."""
    stages, params, state = everything()
    params[3]["w"] = params[0]["w"].clone()
    schedule, failing = S.interleaved(4, 4, num_devices=2), FailsLate(rank == 2)
    if kind == "fails":
        stages = (replace(stages[0], fn=failing.inside(stages[0].fn)), *stages[1:])
    if kind == "late":  # it knows no weights for side losses
        stages = (*stages[:1], without_side(stages[1]), *stages[2:])
    if kind == "compiled":
        stages, schedule = (everything_compiled(), S.zero_bubble(4, 4, num_devices=2))
    if kind == "sharded":
        schedule = S.gather_params(S.looped_bfs(4, 4, num_devices=2), whole=1)
    if kind not in ("plain", "hooked"):
        schedule = S.reduce_grads(schedule)
    options = {"loss": counted if kind == "late" else loss_with_aux}
    options["ties"] = [[(0, "w"), (3, "w")]] if kind == "tied" else []
    plain, stepping = (
        cpu_plan(stages, one, **options) for one in (schedule, S.step_params(schedule))
    )
    max_norm, scale = 0.01 if kind == "clips" else 1e6, 4.0 if kind == "scale" else 1.0
    wrong, by_lanes = [], []
    own_step = torch.optim.AdamW.step

    def step(optimizer):
        by_lanes.append(threading.current_thread() is not threading.main_thread())
        return own_step(optimizer)

    mesh = dp_and_pp(2, 2)
    with fp.ranks(plain, mesh, dp="dp", timeout=20.0) as ranks:
        x, target, feed = batch(rows[ranks.replica])
        alone, ours = (
            fp.place(plain, fresh_floats(params), ranks, shard=kind == "sharded") for _ in range(2)
        )
        trained = ([leaf for leaf in fp.leaves(own) if leaf.requires_grad] for own in (alone, ours))
        theirs, mine = (torch.optim.AdamW(leaves, lr=0.05) for leaves in trained)
        if kind == "hooked" and rank == 0:  # it waits for nobody's sums, and others wait for its
            mine.register_step_post_hook(lambda *_: None)
        given = {
            "state": fp.place(plain, state, ranks),
            "feeds": {"scale": feed},
            "executor": ranks,
        }
        for number in range(4):
            broken = (kind, number, rank) == ("scale", 1, 3)  # of one replica; none steps
            to = torch.full_like(target, torch.inf) if broken else target
            given |= {"seed": number, "loss_scale": scale}
            want = fp.run(plain, alone, (x, to), **given)
            norm = fp.step(theirs, alone, want, max_norm=max_norm)
            with mock.patch.object(torch.optim.AdamW, "step", step):
                within = {**given, "optimizer": mine, "max_norm": max_norm}
                if kind == "fails" and number == 2:
                    with unchanged(wrong, ours, mine), failing.armed(), planted():
                        fp.run(stepping, ours, (x, to), **within)
                got = fp.run(stepping, ours, (x, to), **within)
            facts = (norm, want.loss), (got.norm, got.loss)
            wrong += unless(same(*facts), f"{number} norm {facts}")
            clips = bool(norm > max_norm)
            wrong += unless(clips == (kind == "clips") or broken, f"{number} the norm is {norm}")
            leaves = everything_of(alone, theirs), everything_of(ours, mine)
            wrong += unless(same(*leaves), f"{number} a leaf")
    return wrong, sum(by_lanes)


def stepping_whole_matrices(rank, size):
    """Two replicas of two lanes, with parts of matrices, and an optimizer that asks the other one
    for what it lacks."""
    mesh = dp_and_pp(2, 1)
    stages = [fp.stage(lambda p, x: x + torch.tanh(x @ p))] * 4
    summed = S.reduce_grads(S.looped_bfs(4, 4, num_devices=2))
    schedule = S.gather_params(summed, whole=1)
    plain, stepping = (cpu_plan(stages, one) for one in (schedule, S.step_params(schedule)))
    generator = torch.Generator().manual_seed(4)
    start = [torch.randn(6, 6, generator=generator) * 0.3 for _ in stages]
    x, target = torch.randn(2, 8, 6, generator=torch.Generator().manual_seed(rank))
    wrong = []
    with fp.ranks(plain, mesh, dp="dp", lanes=[0, 0], timeout=20.0) as ranks:
        fresh = [tuple(leaf.clone().requires_grad_() for leaf in start) for _ in range(2)]
        alone, ours = (fp.place(plain, params, ranks, shard=True) for params in fresh)
        theirs, mine = (torch.optim.Muon(fp.leaves(params), lr=0.05) for params in (alone, ours))
        for number in range(3):
            norm = fp.step(theirs, alone, fp.run(plain, alone, (x, target), executor=ranks))
            got = fp.run(stepping, ours, (x, target), optimizer=mine, executor=ranks)
            same_leaves = same(everything_of(alone, theirs), everything_of(ours, mine))
            wrong += unless(same(norm, got.norm) and same_leaves, number)
    return wrong


def functional(rank, size, path):
    """Two replicas of two lanes with the functional AdamW: as the functions by themselves with the
    gradients of a run, also with parts of parameters, and saved for other numbers of stages."""
    mesh = dp_and_pp(2, 2)
    summed = S.reduce_grads(S.looped_bfs(4, 4, num_devices=2))
    schedule = S.gather_params(summed, whole=1)
    wrong = []
    for shard in (False, True):
        torch.manual_seed(4)
        split = fp.split(nn.Sequential(*[nn.Linear(6, 6) for _ in range(4)]), 4)
        plain, stepping = (cpu_plan(split, one) for one in (schedule, S.step_params(schedule)))
        with fp.ranks(plain, mesh, dp="dp", timeout=20.0) as ranks:
            alone = fp.place(plain, copy.deepcopy(split.params), ranks)
            ours = fp.place(plain, split.params, ranks, shard=shard)
            mine = FUNCTIONAL["adamw"](fp.leaves(ours))
            rule = PlainRule("adamw", [leaf.detach() for leaf in fp.leaves(alone)])
            for number in range(4):
                x, target = torch.randn(
                    2, 8, 6, generator=torch.Generator().manual_seed(9 * number + ranks.replica)
                )
                want = fp.run(plain, alone, (x, target), executor=ranks)
                rule.step(fp.leaves(want.grads))
                for leaf, tensor in zip(fp.leaves(alone), rule.tensors, strict=True):
                    leaf.data.copy_(tensor)
                if number == 1:
                    result = fp.run(plain, ours, (x, target), executor=ranks)
                    norm = fp.step(mine, ours, result)
                elif number == 2:
                    options = {"optimizer": mine, "executor": ranks}
                    norm = fp.run_batches(stepping, ours, [(x, target)], **options)[0].norm
                else:
                    options = {"optimizer": mine, "executor": ranks, "max_norm": 1e6}
                    norm = fp.run(stepping, ours, (x, target), **options).norm
                leaves = [ranks.whole(leaf).detach() for leaf in fp.leaves(ours)]
                close = torch.allclose(norm, fp.global_norm(want))  # of parts, it rounds otherwise
                wrong += unless(close and same(rule.tensors, leaves), (shard, number))
            fp.save(path / str(shard), split, ours, optimizer=mine, ranks=ranks)
            before = everything_of(ours, mine)
            fp.run(stepping, ours, (x, target), optimizer=mine, executor=ranks)
            fp.load(path / str(shard), split, params=ours, optimizer=mine, ranks=ranks)
            wrong += unless(same(before, everything_of(ours, mine)), "load")
    return wrong


def late_sums(rank, size):
    """How long the steps of a replica take whose sums wait for another replica, where a stage
    sleeps."""
    mesh = dp_and_pp(2, 1)

    def stage(p, x):
        time.sleep(0.5 * rank)
        return x @ p

    schedule = S.step_params(S.reduce_grads(S.one_f_one_b(1, 2)))
    plan = cpu_plan([fp.stage(stage)], schedule)
    with fp.ranks(plan, mesh, dp="dp", timeout=20.0) as ranks:
        params = fp.place(plan, (torch.eye(4, requires_grad=True),), ranks)
        optimizer = torch.optim.SGD(fp.leaves(params), lr=0.1)
        given = {"optimizer": optimizer, "executor": ranks, "record": True}
        return (
            fp.run(plan, params, (torch.ones(4, 4), torch.ones(4, 4)), **given)
            .timeline.cost()
            .step[0]
        )


def everything_of(params, optimizer):
    """Copies of what is here of parameters, and of the optimizer's state of each."""
    kept = [value for leaf in fp.leaves(params) for value in optimizer.state.get(leaf, {}).values()]
    return [local(value).detach().clone() for value in (*fp.leaves(params), *kept)]


class FailsLate:
    """A stage whose fourth backward raises where it is armed, in one process, half a second later
    than it would come."""

    def __init__(self, here):
        self.here, self.left = here, 0

    def inside(self, fn):
        """The stage."""

        def stage(p, x):
            p["w"].register_hook(self._gone)
            return fn(p, x)

        return stage

    @contextlib.contextmanager
    def armed(self):
        """Inside, it raises."""
        self.left = 4 if self.here else 0
        yield

    def _gone(self, gradient):
        if self.left:
            self.left -= 1
            if not self.left:
                time.sleep(0.5)
                raise ArithmeticError("planted")


def late_cross_entropy(out, target):
    kept = target != 2
    return F.cross_entropy(out[kept], target[kept], reduction="sum"), kept.sum()


def accumulated(rank, size):
    """Two runs as one."""
    stages, params, state = everything()
    plan = cpu_plan(stages, S.one_f_one_b(4, 4), loss=counted_mean)
    with fp.ranks(plan, lanes=owners(4, size), timeout=30.0) as ranks:
        totals = []
        for executor, own, at in (
            ("serial", params, state),
            (ranks, fp.place(plan, params, ranks), fp.place(plan, state, ranks)),
        ):
            runs = []
            for rows in (8, 5):
                x, target, scale = batch(rows)
                options = {"feeds": {"scale": scale}, "seed": rows, "executor": executor}
                runs.append(fp.run(plan, own, (x, target), state=at, **options))
            totals.append(fp.accumulate(runs))
        one, other = totals
        assert other.finite
        assert same(one.loss, other.loss)
        return unequal(one.grads, other.grads, ranks.stages)


def counted_mean(y, target):
    return F.mse_loss(y, target)


def evaluated(rank, size):
    """A plan of forwards alone, on the ranks of the training plan, between its runs; with
    ready-made microbatches too."""
    stages, params, state = everything()
    plan = cpu_plan(stages, S.interleaved(4, 4, num_devices=2))
    look = cpu_plan(stages, plan.schedule.forwards(), loss=None)
    wrong = []
    with fp.ranks(plan, timeout=30.0) as ranks:
        own, at = fp.place(plan, params, ranks), fp.place(plan, state, ranks)
        for rows in (8, 5, 8):
            x, target, scale = batch(rows)
            options = {"feeds": {"scale": scale}, "seed": 1}
            want = fp.run(look, params, x, state=state, executor="serial", **options)
            got = fp.run(
                look, own, x if 0 in ranks.stages else None, state=at, executor=ranks, **options
            )
            wrong += differences(want, got, ranks.stages, last=3 in ranks.stages)
            want = fp.run(plan, params, (x, target), state=state, executor="serial", **options)
            got = fp.run(plan, own, (x, target), state=at, executor=ranks, **options)
            wrong += differences(want, got, ranks.stages, last=3 in ranks.stages)
        elsewhere = cpu_plan(stages, S.fill_drain(4, 4, num_devices=2, backward=False), loss=None)
        with pytest.raises((fp.PlanError, fp.PeerError), match="stages on lanes"):
            fp.run(elsewhere, own, x, state=at, executor=ranks, **options)
        cut = fp.Microbatches(x[a:b] for a, b in ((0, 3), (3, 4), (4, 8)))
        want = fp.run(
            look, params, cut, state=state, executor="serial", feeds={"scale": scale}, seed=3
        )
        given = cut if 0 in ranks.stages else None
        got = fp.run(look, own, given, state=at, executor=ranks, feeds={"scale": scale}, seed=3)
        if 3 in ranks.stages and not same(tuple(want.outputs), tuple(got.outputs)):
            wrong.append("ready-made microbatches")
    return wrong


def changing(rank, size, runs):
    """Shapes that hang on the numbers, other rows in each run: the forms of values change under
    way."""
    stages = [
        fp.stage(lambda p, x: torch.relu(x * p["w"]), name="a"),
        fp.stage(
            lambda p, x: (x[:, : 1 + int(x.sum().abs()) % 5] * p["w"], "word" * int(x.sum() > 0)),
            name="b",
        ),
        fp.stage(lambda p, x: x[0].sum(1) * p["w"][0] + len(x[1]), name="c"),
        fp.stage(lambda p, x: x * p["w"][0], name="d"),
    ]
    params = tuple({"w": torch.ones(1, dtype=torch.float64) * (k + 1)} for k in range(4))
    plan = cpu_plan(stages, S.one_f_one_b(4, 4), loss=lambda y, t: (y - t[:, 0]).square().mean())
    wrong = []
    with fp.ranks(plan, lanes=owners(4, size), timeout=30.0) as ranks:
        own = fp.place(plan, params, ranks)
        for number in range(runs):
            g = torch.Generator().manual_seed(number)
            x = torch.randn(3 + number * 7 % 11, 6, generator=g, dtype=torch.float64)
            want = fp.run(plan, params, (x, x), executor="serial")
            got = fp.run(plan, own, (x, x), executor=ranks)
            wrong += [
                f"{number} {name}" for name in differences(want, got, ranks.stages, last=size == 1)
            ]
    return wrong


def stepped(rank, size):
    """Torch's loop: schedule.step and schedule.eval, an optimizer by itself."""
    stages, params, state = everything()
    plan = cpu_plan(stages, S.one_f_one_b(4, 4), loss=loss_with_aux, outputs=True)
    wrong = []
    with fp.ranks(plan, lanes=owners(4, size), timeout=30.0) as ranks:
        alone = tuple({k: v.clone() for k, v in tree.items()} for tree in params)
        own, at = fp.place(plan, params, ranks), fp.place(plan, state, ranks)
        schedule = ranks.schedule(own, state=at, seed=5)
        optimizer = torch.optim.SGD(
            [leaf for leaf in fp.leaves(own) if leaf.is_floating_point()], lr=0.1
        )
        for step in range(3):
            x, target, scale = batch(8)
            losses = ["old"]
            given = (x,) if 0 in ranks.stages else ()
            y = schedule.step(*given, target=target, losses=losses, scale=scale)
            if step == 0:  # gradients add up
                again = schedule.step(*given, target=target, scale=scale)
                assert again is None or 3 in ranks.stages
            seeds = [fp.fold_in(5, k) for k in ([0, 1] if step == 0 else [step + 1])]
            wants = []
            for seed in seeds:
                options = {"state": state, "feeds": {"scale": scale}, "seed": seed}
                wants.append(fp.run_sequential(plan, alone, (x, target), **options))
                state = wants[-1].state
            wrong += unless(same(tuple(losses), wants[0].losses), f"{step} losses")
            outputs = wants[0].outputs if 3 in ranks.stages else None
            wrong += unless(same(y, outputs), f"{step} outputs")
            for stage in range(4):
                for key, leaf in alone[stage].items():
                    total = None
                    for want in wants:
                        if (stage, key) not in want.unused:  # else ``.grad`` stays None, as torch's
                            gradient = want.grads[stage][key]
                            total = gradient if total is None else total + gradient
                    if stage in ranks.stages and not same(own[stage][key].grad, total):
                        wrong.append(f"{step} {stage} {key}")
                    if total is not None:
                        leaf.sub_(total, alpha=0.1)
            optimizer.step()
            schedule.zero_grad()
        stages, params, ties = tied_model()
        plan = cpu_plan(stages, S.one_f_one_b(4, 4), ties=ties)
        schedule = fp.typing.RankSchedule(plan, ranks, fp.place(plan, params, ranks), None, None)
        x, target = torch.arange(8) % 11, torch.ones(8, 11, dtype=torch.float64)
        seen = schedule.eval(x, target=target, losses=losses)
        look = cpu_plan(stages, plan.schedule.forwards(), outputs=True)
        want = fp.run_sequential(look, params, (x, target))
        wrong += unless(same(seen, want.outputs if 3 in ranks.stages else None), "eval")
        wrong += unless(same(tuple(losses), want.losses), "losses of eval")
        with pytest.raises(fp.PlanError, match="a loss and backwards"):
            fp.typing.RankSchedule(look, ranks, params, None, None)
    return wrong


def timed(rank, size):
    """The timeline of all ranks: every action once, each after what it needs."""
    stages, params, state = everything()
    plan = cpu_plan(stages, S.one_f_one_b(4, 4))
    x, target, scale = batch(8)
    with fp.ranks(plan, lanes=owners(4, size), timeout=30.0) as ranks:
        own, at = fp.place(plan, params, ranks), fp.place(plan, state, ranks)
        options = {"state": at, "feeds": {"scale": scale}, "seed": 1, "executor": ranks}
        result = fp.run(plan, own, (x, target), record=True, **options)
        timeline = ranks.timeline(result)
        assert {span.device for span in result.timeline.spans} == {*ranks.lanes}
        assert f"{len(ranks.lanes)} device" in str(result.timeline)
        for misread in (
            fp.draw,
            lambda timeline: timeline.bubble,
            lambda timeline: timeline.span_bubble,
            lambda timeline: timeline.idle,
            lambda timeline: timeline.imbalance,
        ):
            with pytest.raises(fp.PlanError, match=r"ranks\.timeline\(result\) on all ranks"):
                misread(result.timeline)
        assert 0 < timeline.bubble <= timeline.idle < 1
        assert fp.draw(timeline).timeline == timeline
        with pytest.raises(fp.PlanError, match="record=True"):
            ranks.timeline(fp.run(plan, own, (x, target), **options))
        # All ranks have the same cost. On a busy machine, the host's time may hide the hops.
        for _ in range(10):
            cost = fp.models.profile_plan(plan, own, (x, target), repeats=2, **options)
            if cost.comm > 0:
                break
    return timeline, cost


def slow(rank, size, seconds, count):
    """Actions that take a while, one rank after the other: each waits for longer than its timeout
    for the first."""

    def rest(p, x):
        time.sleep(seconds)
        return x

    plan = cpu_plan(
        [fp.stage(rest, name=f"rest {k}") for k in range(size)],
        S.fill_drain(size, count, backward=False),
        loss=None,
    )
    with fp.ranks(plan, timeout=30.0) as ranks:
        began = time.monotonic()
        x = torch.ones(count, 1)
        result = fp.run(
            plan, fp.place(plan, ((),) * size, ranks), x, executor=ranks, timeout=2.5 * seconds
        )
        assert time.monotonic() - began > (size + count - 2) * seconds
        return result.outputs is None or bool((result.outputs == x).all())


def refused_here(rank, size, who):
    """One rank's own arguments are refused; the others would wait for it. The next ranks fit
    again."""
    plan, *_ = one_f_one_b()
    lanes = [0, 7] if rank == who else None
    if rank == who:
        with pytest.raises(fp.RanksError, match="it has 2 entries"):
            fp.ranks(plan, lanes=lanes, timeout=20.0)
    else:
        with (
            pytest.raises(fp.RanksError, match=f"rank {who} refuses: .*it has 2 entries"),
            fp.ranks(plan, timeout=20.0),
        ):
            pass
    with fp.ranks(plan, timeout=20.0) as ranks:
        return len(ranks.stages) > 0


class CountsInputs:
    """A loss that counts by the inputs, the target, or both."""

    def __init__(self, what):
        self.what = what

    def __call__(self, y, target):
        return (y - target).square().mean()

    def weigh(self, inputs, target):
        by_input = (inputs > 0).sum() if "inputs" in self.what else 1
        by_target = (target > 0).sum() if "target" in self.what else 1
        return by_input * by_target


def weighed(rank, size, what, given):
    """Weights that hang on what only one rank has, or on what several have."""
    stages, params, state = everything()
    plan = cpu_plan(stages, S.one_f_one_b(4, 4), loss=CountsInputs(what), outputs=True)
    x, target, scale = batch(10)
    options = {"feeds": {"scale": scale}, "seed": 1}
    with fp.ranks(plan, lanes=owners(4, size), timeout=30.0) as ranks:
        own, at = fp.place(plan, params, ranks), fp.place(plan, state, ranks)
        first, last = 0 in ranks.stages, 3 in ranks.stages
        mine = (
            x if first or (last and given == "both") else None,
            target if last or given == "both" else None,
        )
        got = fp.run(plan, own, mine, state=at, executor=ranks, **options)
        want = fp.run_sequential(plan, params, (x, target), state=state, **options)
        return differences(want, got, ranks.stages, last=last)


def ignored(rank, size):
    """A replica whose targets are all ignored, and a leaf that only one replica's rows reach."""
    mesh = dp_and_pp(2, 1)

    def body(p, x):
        h = x * p["often"]
        return (h + p["seldom"] if x.sum() < 0 else h) + p["same"]

    plan = cpu_plan([fp.stage(body)], S.fill_drain(1, 2), loss=nn.CrossEntropyLoss(ignore_index=0))
    names = ("often", "seldom", "same", "never")
    params = ({name: torch.ones(3, dtype=torch.float64) for name in names},)
    x = torch.cat(
        [torch.rand(4, 3, generator=torch.Generator().manual_seed(1)), -torch.ones(4, 3)]
    ).double()
    target = torch.tensor([1, 2, 1, 0, 2, 1, 0, 1])
    half = slice(4 * rank, 4 * rank + 4)
    wrong = []
    with fp.ranks(plan, mesh, dp="dp", timeout=20.0) as ranks:
        whole = cpu_plan(plan.stages, S.fill_drain(1, 4), loss=plan.loss)
        for aim in (target, target * (torch.arange(8) > 3)):
            want = fp.run_sequential(whole, params, (x, aim))
            got = fp.run(plan, params, (x[half], aim[half]), executor=ranks)
            wrong += unlike(want, got, "loss", "weight", "unused")
            wrong += [
                name
                for name in names
                if not torch.allclose(want.grads[0][name], got.grads[0][name], atol=1e-12)
            ]
        before = {*threading.enumerate()}
        # On both ranks; neither ends the connections.
        with pytest.raises(fp.BatchError, match="0 for every microbatch"):
            fp.run(plan, params, (x[half], 0 * target[half]), executor=ranks)
        wrong += [thread.name for thread in {*threading.enumerate()} ^ before]
        with pytest.raises(fp.PlanError, match="'never' of"):
            fp.run(plan, params, (x[half], target[half]), executor=ranks, check="used")
        params[0].pop("never")
        got = fp.run(plan, params, (x[half], target[half]), executor=ranks, check="used")
        wrong += [*got.unused]
    return wrong


def other_leaves(rank, size):
    """Replicas that train other leaves."""
    mesh = dp_and_pp(2, 1)
    plan = cpu_plan([fp.stage(lambda p, x: x * p["a"] * p["b"])], S.fill_drain(1, 2))
    with fp.ranks(plan, mesh, dp="dp", timeout=20.0) as ranks:
        params = (
            {
                "a": torch.ones(1, requires_grad=rank == 0),
                "b": torch.ones(1, requires_grad=rank == 1),
            },
        )
        fp.run(plan, params, (torch.ones(4, 1), torch.zeros(4, 1)), executor=ranks)


def scaled_without_leaves(rank, size):
    """A rank with nothing to train keeps its scaler in step with the others'."""
    stages, params, _ = tied_model()
    params = fresh(params)
    for leaf in (*params[0].values(), *params[1].values()):
        leaf.requires_grad_(False)
    plan = cpu_plan(stages[:3], S.one_f_one_b(3, 3))
    scales = []
    with fp.ranks(plan, lanes=[0, 0, 1], timeout=20.0) as ranks:
        own = fp.place(plan, params[:3], ranks)
        optimizer = torch.optim.SGD(fp.leaves(own), lr=0.1) if rank else None
        scaler = new_scaler()
        for step in range(4):
            target = torch.zeros(6, 6, dtype=torch.float64)
            given = (torch.arange(6), target)
            result = fp.run(plan, own, given, loss_scale=scaler.get_scale(), executor=ranks)
            if step == 1 and rank:
                result.grads[2]["b"].fill_(float("inf"))
            fp.step(optimizer, own, result, scaler=scaler)
            scaler.update()
            scales.append(scaler.get_scale())
    return scales


def meshes(rank, size):
    """Two columns of a mesh, each a pipeline of its own, at once."""
    stages, params, state = everything()
    plan = cpu_plan(stages, S.interleaved(4, 4, num_devices=2), outputs=True)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    rows = 8 if rank % 2 else 10
    x, target, scale = batch(rows)
    with fp.ranks(plan, mesh, timeout=30.0) as ranks:
        assert rank // 2 == ranks.rank
        want = fp.run_sequential(
            plan, params, (x, target), state=state, feeds={"scale": scale}, seed=1
        )
        own, at = fp.place(plan, params, ranks), fp.place(plan, state, ranks)
        got = fp.run(
            plan, own, (x, target), state=at, feeds={"scale": scale}, seed=1, executor=ranks
        )
        return differences(want, got, ranks.stages, last=3 in ranks.stages)


def replicated(rank, size, kind, rows):
    """Replicas with rows of their own, against one process with the rows of all."""
    stages, params, state = everything()
    across = [("dp", "pp"), ("pp", "dp")][kind == "turned"]
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=across)
    mine = rank // 2 if across[0] == "dp" else rank % 2
    loss = {"late": counted, "weighed": weighing}.get(kind, loss_with_aux)
    schedule = S.interleaved(4, 4, num_devices=2)
    weight = rows_that_count if kind == "weighed" else None
    if kind == "late":  # it knows no weights for side losses
        stages = (*stages[:1], without_side(stages[1]), *stages[2:])
    if kind == "compiled":
        stages = everything_compiled()
        schedule = S.zero_bubble(4, 4, num_devices=2)
    if kind == "reduced":
        schedule = S.reduce_grads(schedule)
    ties = [[(0, "w"), (3, "w")]] if kind == "tied" else []
    plan = cpu_plan(stages, schedule, loss=loss, weight=weight, ties=ties)
    whole = cpu_plan(stages, S.fill_drain(4, 8), loss=loss, weight=weight, ties=ties)
    params = (params[0], params[1], params[2], {**params[3], "w": params[0]["w"].clone()})
    batches = [batch(count) for count in rows]
    *given, feed = joined(batches)
    wrong = []
    with fp.ranks(plan, mesh, dp="dp", timeout=30.0) as ranks:
        assert (mine, 2) == (ranks.replica, ranks.replicas)
        own, at = fp.place(plan, params, ranks), fp.place(plan, state, ranks)
        for seed in range(2):
            x, target, scale = batches[ranks.replica]
            options = {"seed": seed, "loss_scale": 2.0}
            want = fp.run_sequential(
                whole, params, given, state=state, feeds={"scale": feed}, **options
            )
            options |= {"feeds": {"scale": scale}, "executor": ranks}
            got = fp.run(plan, own, (x, target), state=at, **options)
            wrong += unlike(want, got, "loss", "weight", "losses", "aux")
            wrong += [f"state[{stage}]" for stage in unequal(want.state, got.state, ranks.stages)]
            wrong += unlike_gradients(want, got, ranks.stages)
            norm = fp.global_norm(got)
            wrong += unless(torch.allclose(fp.global_norm(want), norm, rtol=1e-12), f"norm {norm}")
    grads = [got.grads[stage] for stage in sorted(ranks.stages)]
    return (
        wrong,
        ranks.rank,
        [leaf.tolist() for tree in grads for leaf in tree.values() if leaf is not None],
        float(norm),
    )


def parts(tensor, count=4):
    """A tensor's rows as a plan cuts them."""
    rows = len(tensor)
    count = min(rows, count)
    return tensor.split([rows // count + (k < rows % count) for k in range(count)])


def without_side(stage):
    def second(p, x, *, skips, feeds, state):
        return stage.fn(p, x, skips=skips, feeds=feeds, state=state)._replace(loss=())

    return fp.stage(second, pop=["far"], feeds=["scale"], commit=stage.commit)


def rows_that_count(target):
    """The weight of a microbatch under `weighing`."""
    return float((target[:, 0] > 0).sum())


def weighing(y, target):
    """The mean over rows that count."""
    kept = target[:, 0] > 0
    return (y - target).square().mean(1)[kept].sum() / kept.sum().clamp(min=1)


# -- faults
# -------------------------------------------------------------------------------


class Fault:
    """Something that a stage does once, in its forward, its backward, the loss or the commit."""

    def __init__(self):
        self.place, self.act = "", None

    def at(self, place):
        if self.act is not None and place == self.place:
            act, self.act = self.act, None
            act()

    def hook(self, place, tensor):
        if tensor.requires_grad:
            tensor.register_hook(lambda gradient: self.at(place))
        return tensor


def boom():
    raise ValueError("boom")


def interrupt():
    os.kill(os.getpid(), signal.SIGINT)
    for _ in range(50):
        time.sleep(0.1)


def forever():
    deadline = time.monotonic() + 25
    while time.monotonic() < deadline:
        time.sleep(0.01)


def orphan():
    """A killed process whose child lives on, as a loader's worker does for a while."""
    if os.fork() == 0:
        time.sleep(20)
        os._exit(0)
    os.kill(os.getpid(), signal.SIGKILL)


ACTS = {
    "raise": boom,
    "interrupt": interrupt,
    "forever": forever,
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "orphan": orphan,
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "crash": lambda: ctypes.string_at(0),
    "leave": lambda: os._exit(3),
}

KEPT = {}
"""What a process keeps from one task to the next."""


def faulty(rank, size):
    """A pipeline with a stage for each rank, each with a commit, that goes wrong where its `Fault`
    says."""
    fault = Fault()

    def body(k):
        def stage(p, x, *, state):
            fault.at("F")
            y = fault.hook("B", torch.tanh(x @ p["w"].T))
            return fp.Out(y, stats=y.detach().sum())

        def commit(state, stats):
            fault.at("commit")
            return state + sum(stats)

        return fp.stage(stage, name=f"stage {k}", commit=commit)

    def loss(y, target):
        fault.at("loss")
        return F.mse_loss(y, target)

    g = torch.Generator().manual_seed(4)
    params = tuple({"w": torch.randn(6, 6, generator=g, dtype=torch.float64)} for _ in range(size))
    plan = cpu_plan([body(k) for k in range(size)], S.one_f_one_b(size, 4), loss=loss)
    state = tuple(torch.zeros((), dtype=torch.float64) for _ in range(size))
    return plan, params, state, fault


def start(rank, size, timeout):
    """Make ranks that later tasks use, and run once."""
    plan, params, state, fault = faulty(rank, size)
    ranks = fp.ranks(plan, timeout=timeout)
    ranks.__enter__()
    KEPT.update(plan=plan, params=params, state=state, fault=fault, ranks=ranks)
    return once(rank, size)


def once(rank, size):
    """A run that must be right; the names of threads that are there besides those of the ranks."""
    plan, params, state, ranks = (KEPT[name] for name in ("plan", "params", "state", "ranks"))
    x, target, _ = batch(8)
    want = fp.run_sequential(plan, params, (x, target), state=state)
    own, at = fp.place(plan, params, ranks), fp.place(plan, state, ranks)
    got = fp.run(plan, own, (x, target), state=at, executor=ranks)
    return differences(want, got, ranks.stages, last=False)


def fails(rank, size, who, place, act):
    """A run in which a rank goes wrong; raises what it raises."""
    plan, params, state, ranks, fault = (
        KEPT[name] for name in ("plan", "params", "state", "ranks", "fault")
    )
    x, target, _ = batch(8)
    if rank == who:
        fault.place, fault.act = place, ACTS[act]
    own, at = fp.place(plan, params, ranks), fp.place(plan, state, ranks)
    try:
        fp.run(plan, own, (x, target), state=at, executor=ranks)
    finally:
        fault.act = None


def dies_in_between(rank, size, who, number, path):
    """Runs with values of 160 MB, in one of which a process ends while the first goes from rank 0
    to rank 1."""

    def die():
        while not Path(path).exists():
            time.sleep(0.001)
        time.sleep(0.02)  # of the 100 ms that it takes
        ACTS["kill"]()

    def widen(p, x):
        y = (x @ p["w"]).expand(-1, 40_000_000).contiguous()
        if runs == number:
            Path(path).touch()
        return y

    def narrow(p, x):
        return x.mean(1, keepdim=True) @ p["w"]

    params = tuple({"w": torch.ones(1, 1)} for _ in range(size))
    plan = cpu_plan([fp.stage(widen), fp.stage(narrow)], S.one_f_one_b(size, 2))
    with fp.ranks(plan, timeout=20.0) as ranks:
        own = fp.place(plan, params, ranks)
        for runs in range(1, number + 1):
            if rank == who and runs == number:
                threading.Thread(target=die, daemon=True).start()
            fp.run(plan, own, (torch.ones(2, 1), torch.ones(2, 1)), executor=ranks)


def late_at_the_end(rank, size):
    """A run of which rank 0 hears the end later than the others, who leave meanwhile; the loss."""
    plan, params, state, _ = faulty(rank, size)
    x, target, _ = batch(8)
    with fp.ranks(plan, timeout=10.0) as ranks:
        own, at = fp.place(plan, params, ranks), fp.place(plan, state, ranks)
        fp.run(plan, own, (x, target), state=at, executor=ranks)
        with pytest.MonkeyPatch.context() as patch:
            if rank == 0:
                exchange = Team.exchange
                patch.setattr(Team, "exchange", lambda *args: (exchange(*args), time.sleep(0.1))[0])
            return float(fp.run(plan, own, (x, target), state=at, executor=ranks).loss)


def stop(rank, size):
    """Leave the ranks; the names of funcpipe's threads that are left."""
    KEPT.pop("ranks").close()
    KEPT.clear()
    deadline = time.monotonic() + 2
    while time.monotonic() < deadline and (
        left := [t.name for t in threading.enumerate() if "funcpipe" in t.name]
    ):
        time.sleep(0.01)
    return left


def wrong_input(rank, size, who):
    """A run for which a rank is given what it refuses."""
    plan, params, state, ranks = (KEPT[name] for name in ("plan", "params", "state", "ranks"))
    x, target, _ = batch(8)
    own, at = fp.place(plan, params, ranks), fp.place(plan, state, ranks)
    options = {"loss_scale": "much"} if rank == who else {}
    fp.run(plan, own, (x, target), state=at, executor=ranks, **options)


def without(rank, size, who):
    """A run that a rank leaves out, since it has left its ranks."""
    if rank == who:
        KEPT["ranks"].close()
        return "left"
    return once(rank, size)


def other_calls(rank, size):
    """One rank wants a norm where the others run."""
    plan, params, state, ranks = (KEPT[name] for name in ("plan", "params", "state", "ranks"))
    x, target, _ = batch(8)
    own, at = fp.place(plan, params, ranks), fp.place(plan, state, ranks)
    result = fp.run(plan, own, (x, target), state=at, executor=ranks)
    if rank == 0:
        return result.finite
    return fp.run(plan, own, (x, target), state=at, executor=ranks).finite


# -- what is refused
# -------------------------------------------------------------------------------


def one_f_one_b(**options):
    stages, params, state = everything()
    return (cpu_plan(stages, S.one_f_one_b(4, 4), **options), params, state)


def made_differently(rank, size, what):
    plan, *_ = one_f_one_b(outputs=what == "plan" and rank == 1)
    lanes = [0, 1, 1, 1] if what == "lanes" and rank == 1 else None
    fp.ranks(plan, lanes=lanes, timeout=20.0).__enter__()


def run_differently(rank, size, what):
    plan, params, state = one_f_one_b()
    other = rank == 1
    x, target, scale = batch(7 if what == "rows" and other else 8)
    with fp.ranks(plan, timeout=20.0) as ranks:
        own, at = fp.place(plan, params, ranks), fp.place(plan, state, ranks)
        seed, loss_scale = 1 + (what == "seed" and other), 1.0 + (what == "scale" and other)
        given = None if what == "no inputs" and rank == 0 else (x, target)
        if other and what == "batch":
            given = x + 1, target
        plan = one_f_one_b(outputs=True)[0] if what == "plan" and other else plan
        fp.run(
            plan,
            own,
            given,
            state=at,
            feeds={"scale": scale},
            seed=seed,
            loss_scale=loss_scale,
            executor=ranks,
        )


def given_wrongly(rank, size, what):
    plan, params, state = one_f_one_b()
    if what == "object between stages":
        stages = [
            fp.stage(lambda p, x: x * p["w"][0]),
            fp.stage(lambda p, x: (x * p["w"][0], print)),
        ]
        stages += [fp.stage(lambda p, x: x[0] * p["w"][0]), fp.stage(lambda p, x: x * p["w"][0])]
        plan, state = cpu_plan(stages, plan.schedule), ((),) * 4
    x, target, scale = batch(8)
    with fp.ranks(
        plan, lanes=[1, 1, 0, 0] if what == "object between stages" else None, timeout=20.0
    ) as ranks:
        own, at = fp.place(plan, params, ranks), fp.place(plan, state, ranks)
        feeds = {"scale": scale} if plan.stages[1].feeds else {}
        if rank == 1:
            if what == "params of others":
                own = params
            elif what == "no params":
                own = (None,) * 4
            elif what == "other feeds":
                feeds = {"bias": scale}
            elif what == "vjp":
                fp.vjp(cpu_plan(plan.stages, plan.schedule, loss=None), params, x, executor=ranks)
            elif what == "lanes":
                plan = cpu_plan(plan.stages, S.one_f_one_b(4, 4, num_devices=2))
        fp.run(plan, own, (x, target), state=at, feeds=feeds, seed=1, executor=ranks)


def after_the_end(rank, size):
    plan, params, state = one_f_one_b()
    x, target, scale = batch(8)
    with fp.ranks(plan, timeout=20.0) as ranks:
        own, at = fp.place(plan, params, ranks), fp.place(plan, state, ranks)
    fp.run(plan, own, (x, target), state=at, feeds={"scale": scale}, seed=1, executor=ranks)


def arguments(rank, size, what):
    plan, *_ = one_f_one_b()
    options = {
        "three": {},
        "more ranks": {},
        "idle": {"lanes": [0, 0, 2, 2]},
        "unknown": {"lanes": [0, 1, 2, 7]},
        "few": {"lanes": [0, 1]},
        "mesh": {"mesh": init_device_mesh("cpu", (3,), mesh_dim_names=("dp",))},
        "no mesh": {"mesh": [0, 1, 2]},
        "timeout": {"timeout": 0},
        "meta": {"lanes": [0, 1, 2, 2]},
    }[what]
    if what == "more ranks":
        schedule = S.one_f_one_b(4, 4, num_devices=2)
        plan = cpu_plan(plan.stages, schedule)
    if what == "meta":
        plan = fp.make_plan(plan.stages, plan.schedule, loss=F.mse_loss, devices="meta")
    fp.ranks(plan, **options)


# -- for long
# -------------------------------------------------------------------------------


def soak(rank, size, steps):
    """Steps with ever other rows; how memory (MiB), descriptors and threads grew since the first
    fifth."""
    stages, params, state = everything()
    plan = cpu_plan(stages, S.one_f_one_b(4, 4), loss=loss_with_aux, outputs=True)
    with fp.ranks(plan, lanes=owners(4, size), timeout=30.0) as ranks:
        own, at = fp.place(plan, params, ranks), fp.place(plan, state, ranks)
        before = []
        for step in range(steps):
            x, target, scale = batch(1 + step * 7 % 30)
            result = fp.run(
                plan, own, (x, target), state=at, feeds={"scale": scale}, seed=step, executor=ranks
            )
            assert all(
                most <= pool.slots
                for most, pool in zip(result.stats.slots, plan.program.pools, strict=True)
            )
            del result
            if step + 1 in (steps // 5, steps):
                gc.collect()
                before.append(
                    (resident(), len(os.listdir("/proc/self/fd")), threading.active_count())
                )
    return [after - first for first, after in zip(*before, strict=True)]


def resident():
    """MiB of this process."""
    ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def luck(rank, size, faults, seed):
    """Runs in which, each time, some rank goes wrong somewhere; after each failure one that must be
    right."""
    plan, params, state, ranks, fault = (
        KEPT[name] for name in ("plan", "params", "state", "ranks", "fault")
    )
    x, target, _ = batch(8)
    own, at = fp.place(plan, params, ranks), fp.place(plan, state, ranks)
    chance = random.Random(seed)
    wrong, before = [], threads_of_process()
    gc.disable()  # what a broken link had ends with it, not when the collector comes
    for number in range(faults):
        who, place = chance.randrange(size), chance.choice(["F", "B", "commit", "loss"])
        who = size - 1 if place == "loss" else who
        act, after = chance.choice(["raise", "interrupt"]), chance.random() * 0.01
        if rank == who:
            fault.place, fault.act = (
                place,
                lambda act=act, after=after: (time.sleep(after), ACTS[act]()),
            )
        began = time.monotonic()
        try:
            fp.run(plan, own, (x, target), state=at, executor=ranks)
            wrong.append(f"{number}: nothing was raised")
        except (fp.FuncpipeError, KeyboardInterrupt) as error:
            own_error = "ValueError" if act == "raise" else "KeyboardInterrupt"
            right = (
                own_error in repr(error) or own_error in str(error)
                if rank == who
                else who == getattr(error, "rank", None)
            )
            wrong += unless(right, f"{number}: {who} {place} {act}: {error!r}")
        wrong += unless(time.monotonic() - began <= 2, f"{number}: took long")
        fault.act = None
        wrong += once(rank, size)
    gc.enable()
    deadline = time.monotonic() + 5
    while (more := threads_of_process() - before) and time.monotonic() < deadline:
        time.sleep(0.01)  # the threads of the last link end beside it
    return wrong + ([f"threads more: {dict(more)}"] if more.total() else [])


def threads_of_process():
    """How many threads of each name the system knows."""
    names = Counter()
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended
            names[(task / "comm").read_text().strip()] += 1
    return names


# -- checkpoints
# -------------------------------------------------------------------------------


def small_model():
    torch.manual_seed(1)
    return nn.Sequential(
        *[layer for _ in range(4) for layer in (nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Tanh())]
    )


def trained(path, *, ranks_of=None, stages=4, save_after=None, load=False, steps=3, shard=False):
    """Train in this process, or on ranks; the losses of the steps, after loading and before
    saving."""
    split = fp.split(small_model(), stages)
    plan = cpu_plan(split, S.one_f_one_b(stages, 4))
    with contextlib.ExitStack() as opened:
        ranks = opened.enter_context(fp.ranks(plan, **ranks_of)) if ranks_of is not None else None
        params, state = (
            fp.place(plan, split.params, ranks, shard=shard),
            fp.place(plan, split.state, ranks),
        )
        optimizer, step, losses = torch.optim.AdamW(fp.leaves(params), lr=0.01), 0, []
        if load:
            loaded = fp.load(path, split, params=params, optimizer=optimizer, ranks=ranks)
            state, step = loaded.state, loaded.step
        for number in range(step, step + steps):
            g = torch.Generator().manual_seed(number)
            x = torch.randn(16, 6, generator=g)
            if ranks is not None and ranks.replicas > 1:
                x = x.chunk(ranks.replicas)[ranks.replica]
            result = fp.run(plan, params, (x, x.sin()), state=state, executor=ranks or "serial")
            fp.step(optimizer, params, result)
            state = result.state
            losses.append(float(result.loss))
        if save_after is not None:
            if save_after == "wrongly" and ranks.rank == 1:
                params = params[:1]
            options = {"state": state, "optimizer": optimizer, "step": step + steps, "ranks": ranks}
            if save_after == "meanwhile":  # a step more is run, and stepped, before it is finished
                saving = fp.save(path, split, params, wait=False, **options)
                fp.step(
                    optimizer,
                    params,
                    fp.run(plan, params, (x, x.sin()), state=state, executor=ranks or "serial"),
                )
                saving.finish()
            else:
                fp.save(path, split, params, **options)
    return losses


def checkpointed(rank, size, path, what):
    """Save or load on ranks."""
    ranks_of = {"timeout": 30.0, "lanes": owners(4, size)}
    if what == "replicas":
        ranks_of = {"timeout": 30.0, "mesh": dp_and_pp(2, 2), "dp": "dp"}
        return trained(path, ranks_of=ranks_of, save_after=True)
    return trained(
        path,
        ranks_of=ranks_of,
        load=what == "load",
        save_after={"save": True, "load": None}.get(what, what),
    )


def saved_apart(rank, size, path):
    """Each rank names a folder of its own."""
    split = fp.split(small_model(), 2)
    plan = cpu_plan(split, S.one_f_one_b(2, 2))
    with fp.ranks(plan, timeout=20.0) as ranks:
        params = fp.place(plan, split.params, ranks)
        fp.save(path / str(rank), split, params, state=split.state, ranks=ranks)


def forgotten_arguments(rank, size, what):
    """A step of torch's face to which the seed or the state was not given."""
    layer = {"seed": nn.Dropout(), "state": nn.BatchNorm1d(4)}[what]
    split = fp.split(nn.Sequential(layer, nn.Linear(4, 4)), 2)
    plan = cpu_plan(split, S.one_f_one_b(2, 2))
    with fp.ranks(plan, timeout=20.0) as ranks:
        schedule = ranks.schedule(fp.place(plan, split.params, ranks))
        x = torch.ones(4, 4)
        schedule.step(*[x] * (rank == 0), target=x if rank else None)


def unfinished(rank, size, path):
    """A second save while one rank, or all, have not finished the first; what each raises, and what
    is there at the end."""
    split = fp.split(small_model(), 2)
    plan = cpu_plan(split, S.one_f_one_b(2, 2))
    said = []
    with fp.ranks(plan, timeout=20.0) as ranks:
        params = fp.place(plan, split.params, ranks)
        saving = fp.save(path, split, params, state=split.state, step=1, ranks=ranks, wait=False)
        for wait in (False, True):
            with pytest.raises(fp.CheckpointError) as error:
                fp.save(path, split, params, state=split.state, step=2, ranks=ranks, wait=wait)
            said.append(str(error.value))
        saving.finish()
        if rank == 0:
            fp.save(path / "other", split, split.params, state=split.state, step=9)
        ranks.exchange("the end of it", None)
        step = fp.load(path, split, params=params, ranks=ranks).step
        saving = fp.save(path, split, params, state=split.state, step=3, ranks=ranks, wait=False)
        if rank == 0:
            del saving
        with pytest.raises(fp.CheckpointError) as error:
            fp.save(path, split, params, state=split.state, step=4, ranks=ranks)
        said.append(str(error.value))
        saving = None
        fp.save(path, split, params, state=split.state, step=5, ranks=ranks)
        return said, step, fp.load(path, split, params=params, ranks=ranks).step


def beside_each_other(rank, size, path):
    """Two pipelines of one mesh save to one path; what each save said, what can be loaded after
    each, and own paths."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("tp", "pp"))
    split = fp.split(nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6)), 2)
    plan = cpu_plan(split, S.one_f_one_b(2, 2))
    fresh = fp.split(nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6)), 2)
    said, steps = [], []
    with fp.ranks(plan, mesh, timeout=20.0) as ranks:
        params = fp.place(plan, split.params, ranks)
        for step in range(1, 5):
            said.append("")
            try:
                fp.save(path, split, params, step=step, ranks=ranks)
            except fp.CheckpointError as error:
                said[-1] = str(error)
            torch.distributed.barrier()
            steps.append(fp.load(path, fresh).step)
            torch.distributed.barrier()
        own = path / f"tp-{mesh['tp'].get_local_rank()}"
        fp.save(own, split, params, step=9, ranks=ranks)
        return said, steps, ["", fp.load(own, split, params=params, ranks=ranks).step]


# -- parameters of which each replica has a part
# -------------------------------------------------------------------------------


def local(leaf):
    return leaf.to_local() if isinstance(leaf, DTensor) else leaf


def entire(leaf):
    return leaf.full_tensor() if isinstance(leaf, DTensor) else leaf


def near(one, other):
    """Equal to rounding."""
    if isinstance(one, Tensor):
        return torch.allclose(one.double(), other.double(), atol=1e-10, equal_nan=True)
    return all(map(near, one, other))


def fresh_floats(params):
    return tuple(
        {k: v.clone().requires_grad_(v.is_floating_point()) for k, v in tree.items()}
        for tree in params
    )


def sharded(rank, size, kind, rows):
    """Replicas with parts of the parameters, against replicas with all of them: the same bits, and
    the same steps."""
    stages, params, state = everything()
    params[0]["odd"] = torch.ones(3, 2, dtype=torch.float64)  # cut in parts of 2 and 1
    params[1]["lone"] = torch.ones(1, dtype=torch.float64)  # the second has none of it
    mesh = dp_and_pp(2, 2)
    schedule = S.interleaved(4, 4, num_devices=2)
    if kind == "compiled":
        stages = [fp.compile_stage(stage) for stage in stages]
        schedule = S.zero_bubble(4, 4, num_devices=2)
    if kind == "bfs":
        schedule = S.looped_bfs(4, 4, num_devices=2)
    if kind == "block":  # neighbours on a lane: stage and slot numbers meet
        schedule = S.one_f_one_b(4, 4, num_devices=2)
    elif kind != "plain":
        schedule = S.gather_params(schedule, whole=1 if kind == "bfs" else None)
        schedule = S.reduce_grads(schedule)
    ties = [[(0, "w"), (3, "w")], [(0, "odd"), (3, "odd")]] if kind == "tied" else []
    params[3]["w"], params[3]["odd"] = params[0]["w"].clone(), params[0]["odd"].clone()
    loss, weight = (weighing, rows_that_count) if kind == "late" else (loss_with_aux, None)
    spare = int(kind == "block")
    plan = cpu_plan(stages, schedule, loss=loss, weight=weight, ties=ties, spare_slots=spare)
    params[2]["single"] = torch.tensor(1.0, dtype=torch.float64)  # has no axis to be cut along
    x, target, scale = batch(sum(rows))
    part = slice(rows[0] * (rank // 2), rows[0] + rows[1] * (rank // 2))
    given = (x[part], target[part])
    wrong, runs = [], []
    for shard in (False, True):
        with fp.ranks(plan, mesh, dp="dp", timeout=20.0) as ranks:
            own, at = (
                fp.place(plan, fresh_floats(params), ranks, shard=shard),
                fp.place(plan, state, ranks),
            )
            trained = [leaf for leaf in fp.leaves(own) if leaf.requires_grad]
            optimizer = torch.optim.AdamW(trained, lr=0.05)
            scaler = new_scaler() if kind == "scaler" else None
            seen = []
            for step in range(3):
                before = [local(leaf).clone() for leaf in fp.leaves(own)]
                options = {"state": at, "feeds": {"scale": scale[part]}, "executor": ranks}
                options["loss_scale"] = scaler.get_scale() if scaler else 1.0
                result = fp.run(plan, own, given, seed=step, **options)
                now = [local(leaf) for leaf in fp.leaves(own)]
                wrong += unless(same(before, now), "params were written to")
                grads = fp.leaves(result.grads)
                for leaf, gradient in zip(trained, grads, strict=True):
                    kind_of = DTensor if shard and leaf.dim() else Tensor
                    right = (leaf.shape, kind_of) == (gradient.shape, type(gradient))
                    wrong += unless(right, f"gradient {gradient.shape} {type(gradient)}")
                whole = [entire(gradient).clone() for gradient in grads]
                if scaler and step == 1:
                    for gradient in grads:  # of one part of one rank; none steps
                        if rank == 3 or (rank == 1 and not shard):
                            local(gradient).fill_(float("nan"))
                norm = fp.step(optimizer, own, result, max_norm=0.5, scaler=scaler)
                if scaler:
                    scaler.update()
                kept = [value for entry in optimizer.state.values() for value in entry.values()]
                assert not shard or any(isinstance(value, DTensor) for value in kept)
                now = [entire(leaf).detach().clone() for leaf in fp.leaves(own)]
                facts = (result.loss, result.losses, whole, result.unused, result.state)
                seen.append((facts, now, norm, result.finite, scaler and scaler.get_scale()))
                at = result.state
            runs.append(seen)
    for number, (one, other) in enumerate(zip(*runs, strict=True)):
        wrong += unless(number or same(one[0], other[0]), "bits")
        wrong += [
            f"{number} {k}"
            for k, (a, b) in enumerate(zip(one[1:3], other[1:3], strict=True))
            if not near(a, b)
        ]
        wrong += unless(one[3:] == other[3:], f"{number} {one[3:]} {other[3:]}")
    return wrong


def resumed(rank, size, path):
    """Save parts of parameters, load them into parts again: the losses go on as if nothing had
    been."""
    mesh = dp_and_pp(2, 2)
    ranks_of = {"timeout": 30.0, "mesh": mesh, "dp": "dp"}
    expected = trained(path / "all", ranks_of=ranks_of, steps=6)
    first = trained(path / "parts", ranks_of=ranks_of, save_after=True, shard=True)
    second = trained(path / "parts", ranks_of=ranks_of, load=True, shard=True)
    return expected, [*first, *second]


def saved_parts(rank, size, path, what):
    """Tensors in parts of every kind are saved, by replicas that agree about it or do not; the
    numbers are the whole ones."""
    mesh = dp_and_pp(2, 1)
    g = torch.Generator().manual_seed(1)
    whole = {"rows": (3, 4), "lone": (1, 2), "columns": (2, 5), "copied": (2, 2), "plain": (3,)}
    whole = {name: torch.randn(shape, generator=g) for name, shape in whole.items()}
    plan = cpu_plan([fp.stage(lambda p, x: x * p["plain"])], S.fill_drain(1, 1))
    with fp.ranks(plan, mesh, dp="dp", timeout=5.0) as ranks:
        over = {"rows": Shard(0), "lone": Shard(0), "columns": Shard(1), "copied": Replicate()}
        copies = {name: tensor.clone() for name, tensor in whole.items()}
        tree = {
            name: distribute_tensor(tensor, mesh["dp"], [over[name]], src_data_rank=None)
            if name in over
            else tensor
            for name, tensor in copies.items()
        }
        if what == "differ" and rank == 1:
            del tree["rows"]
        if what == "fail" and rank == 1:

            def fails(tensor):
                raise ValueError("no memory")

            ranks.whole = fails
        if what == "meanwhile":
            saving = fp.save(path, plan, (tree,), ranks=ranks, wait=False)
            for tensor in tree.values():
                local(tensor).zero_()  # after it was copied
            saving.finish()
        else:
            fp.save(path, plan, (tree,), ranks=ranks)
        empty = ({name: torch.zeros_like(tensor) for name, tensor in whole.items()},)
        return [
            name
            for name, leaf in fp.load(path, plan, params=empty).params[0].items()
            if not same(leaf, whole[name])
        ]


def loaded_from_meta(rank, size, path):
    """Parameters without memory are placed in parts and loaded: each rank makes its parts alone."""
    mesh = dp_and_pp(2, 2)
    with torch.device("meta"):
        model = small_model()
    split = fp.split(model, 4)
    plan = cpu_plan(split, S.one_f_one_b(4, 4))
    whole = fp.load(path, fp.split(small_model(), 4)).params
    with fp.ranks(plan, mesh, dp="dp", lanes=[0, 0, 1, 1], timeout=20.0) as ranks:
        own = fp.place(plan, split.params, ranks, shard=True)
        params = fp.load(path, split, params=own, ranks=ranks).params
        wrong = [stage for stage in range(4) if (params[stage] is None) == (stage in ranks.stages)]
        for stage in ranks.stages:
            for name, leaf in params[stage].items():
                assert type(leaf) is nn.Parameter or isinstance(leaf, DTensor)
                assert isinstance(leaf, DTensor)
                wrong += unless(
                    same(whole[stage][name].detach(), entire(leaf).detach()), (stage, name)
                )
    return wrong


def failing_parts(rank, size, who):
    """One rank fails before its first U: the copy of its stage waits for parts that do not come."""
    mesh = dp_and_pp(2, 2)
    fault = {"on": True}

    def body(p, x):
        if rank == who and fault["on"]:
            raise ValueError("before the second stage gathers")
        return x @ p["w"]

    schedule = S.gather_params(S.looped_bfs(4, 2, num_devices=2), whole=1, ahead=0)
    plan = cpu_plan([fp.stage(body, name=f"{k}") for k in range(4)], schedule)
    params = tuple({"w": torch.eye(4, dtype=torch.float64)} for _ in range(4))
    x = torch.rand(4, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    with fp.ranks(plan, mesh, dp="dp", timeout=5.0) as ranks:
        own = fp.place(plan, params, ranks, shard=True)
        began = time.monotonic()
        with pytest.raises(
            ValueError if rank == who else fp.PeerError, match="before the second stage gathers"
        ):
            fp.run(plan, own, (x, x), executor=ranks)
        took = time.monotonic() - began
        fault["on"] = False
        result = fp.run(plan, own, (x, x), executor=ranks)
        assert float(result.loss) == 0.0
        return took


def failing_before(rank, size, what):
    """One rank fails between runs, while the others look at all parts of the gradients: they hear
    of it at once."""
    mesh = dp_and_pp(2, 2)
    stages = [fp.stage(lambda p, x: x @ p["w"], name=f"{k}") for k in range(2)]
    plan = cpu_plan(stages, S.one_f_one_b(2, 2))
    params = tuple({"w": torch.eye(4).requires_grad_()} for _ in range(2))
    x = torch.rand(4, 4, generator=torch.Generator().manual_seed(1))
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0) if what == "scaler" else None
    began = 0.0

    def looks():
        nonlocal began
        with fp.ranks(plan, mesh, dp="dp", timeout=20.0) as ranks:
            own = fp.place(plan, params, ranks, shard=True)
            result = fp.run(
                plan, own, (x, x.sin()), executor=ranks, loss_scale=8.0 if scaler else 1.0
            )
            began = time.monotonic()
            if rank == 3:
                time.sleep(0.2)
                raise ValueError("between runs")
            if what == "norm":
                fp.global_norm(result)
            elif what == "finite":
                assert result.finite
            else:
                fp.step(torch.optim.SGD(fp.leaves(own), lr=1.0), own, result, scaler=scaler)

    with pytest.raises(ValueError if rank == 3 else fp.PeerError, match="between runs"):
        looks()
    return time.monotonic() - began


def late_gathers(rank, size):
    """Parts that come late: no stage begins without them, whatever else has come to its lane."""
    gather = Replicas.gather

    def late(self, parts, done):
        def slowly(event):
            time.sleep(0.15)
            done(event)

        gather(self, parts, slowly)

    Replicas.gather = late
    try:
        return sharded(rank, size, "block", (8, 8))
    finally:
        Replicas.gather = gather


def handed_on(rank, size):
    """A stage hands its parameters on, and gives them back as outputs, after their memory has
    gone."""
    mesh = dp_and_pp(2, 1)

    def first(p, x, *, state):
        return fp.Out(x @ p["w"], stash={"table": p["w"]}, stats=p["w"][0].detach())

    stages = [
        fp.stage(first, stash=["table"], commit=lambda state, stats: stats[0]),
        fp.stage(lambda p, x, *, skips: x @ skips["table"].T + p["b"], pop=["table"]),
        fp.stage(lambda p, x: fp.Out(p["c"][: len(x)] + 0 * x.sum())),
    ]
    g = torch.Generator().manual_seed(1)
    params = (
        {"w": torch.randn(4, 4, generator=g, dtype=torch.float64)},
        {"b": torch.randn(4, generator=g, dtype=torch.float64)},
        {"c": torch.randn(6, 4, generator=g, dtype=torch.float64)},
    )
    schedule = S.looped_bfs(3, 2, num_devices=1)
    schedules_ = (S.gather_params(schedule, whole=1), S.gather_params(schedule.forwards(), whole=1))
    x = torch.randn(4, 4, generator=g, dtype=torch.float64)
    wrong = []
    for each, loss in zip(schedules_, (F.mse_loss, None), strict=True):
        plan = cpu_plan(stages, each, loss=loss, outputs=True, train=True)
        given = (x, x) if loss else x
        results = []
        with fp.ranks(plan, mesh, dp="dp", timeout=20.0) as ranks:
            for shard in (False, True):
                own = fp.place(plan, params, ranks, shard=shard)
                results.append(
                    fp.run(plan, own, given, state=(torch.zeros(4), (), ()), executor=ranks)
                )
        one, other = results
        wrong += unlike(one, other, "loss", "outputs", "state")
        if loss:
            wrong += unless(
                near(fp.leaves(one.grads), list(map(entire, fp.leaves(other.grads)))), "grads"
            )
    return wrong


def placed_differently(rank, size):
    """One replica has parts, the other all."""
    mesh = dp_and_pp(2, 1)
    plan = cpu_plan([fp.stage(lambda p, x: x * p["w"])], S.fill_drain(1, 2))
    with fp.ranks(plan, mesh, dp="dp", timeout=20.0) as ranks:
        placed = [
            fp.place(plan, ({"w": torch.ones(4)},), ranks, shard=shard) for shard in (False, True)
        ]
        fp.run(plan, placed[rank], (torch.ones(4, 4), torch.ones(4, 4)), executor=ranks)


def memory_of_parts(rank, size):
    """How many bytes of parameters a rank has whole, at most, as its stages compute."""
    mesh = dp_and_pp(2, 1)
    most, seen = [], []

    def layer(p, x):
        seen.append(p["w"])
        if len(seen) > 16:
            del seen[0]
        most.append(len({w.data_ptr() for w in seen if w.untyped_storage().nbytes()}))
        return torch.relu(x @ p["w"])

    params = tuple({"w": torch.eye(4, dtype=torch.float64)} for _ in range(4))
    x = torch.rand(8, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    out = []
    for whole in (None, 1):
        schedule = S.looped_bfs(4, 4, num_devices=1)
        schedule = S.gather_params(schedule, whole=whole, ahead=0)
        plan = cpu_plan([fp.stage(layer, name=f"layer {k}") for k in range(4)], schedule)
        with fp.ranks(plan, mesh, dp="dp", timeout=20.0) as ranks:
            own = fp.place(plan, params, ranks, shard=True)
            for _ in range(2):
                most.clear()
                result = fp.run(plan, own, (x, x), executor=ranks)
            out.append(max(most))
            left = [w.untyped_storage().nbytes() for w in seen]
            assert [0] * len(left) == left, left
            seen.clear()
    assert all(isinstance(gradient, DTensor) for gradient in fp.leaves(result.grads))
    return out


def memory_of_sums(rank, size, shard):
    """How many stages have made a sum of gradients, and how many of these sums are whole: when the
    first of four is about to end its backwards, last of all, and after the run."""
    mesh = dp_and_pp(2, 1)
    made, seen = {}, []

    def whole():
        return sum(total.untyped_storage().nbytes() > 0 for total in made.values())

    def look(gradient):
        end = time.monotonic() + 10
        while whole() and time.monotonic() < end:  # they are summed beside what the device does
            time.sleep(0.001)
        seen.append((len(made), whole()))

    def layer(p, x, stage):
        p["w"].register_post_accumulate_grad_hook(lambda leaf: made.update({stage: leaf.grad}))
        y = torch.relu(x @ p["w"])
        if stage == 0:
            y.register_hook(look)
        return y

    schedule = S.reduce_grads(S.looped_bfs(4, 1, num_devices=1))
    stages = [fp.stage(partial(layer, stage=k), name=f"layer {k}") for k in range(4)]
    plan = cpu_plan(stages, schedule)
    x = torch.rand(8, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    with fp.ranks(plan, mesh, dp="dp", timeout=30.0) as ranks:
        params = tuple({"w": torch.eye(4, dtype=torch.float64)} for _ in range(4))
        fp.run(plan, fp.place(plan, params, ranks, shard=shard), (x, x), executor=ranks)
    return [*seen, (len(made), whole())]


def memory_of_casts(rank, size):
    """How often casts of whole weights are made, how many stages have some at most, and after the
    run."""
    mesh = dp_and_pp(2, 1)
    made, there, complete = [], [], Programs.complete

    def whole():
        return len({each.cdata for each in made if not each.expired()})  # some are views of others

    def noted(self, bare):
        out = complete(self, bare)
        made.extend(StorageWeakRef(value.untyped_storage()) for value in out[len(bare) :])
        there.append(whole())
        return out

    stages = [
        fp.compile_stage(fp.stage(lambda p, x: torch.relu(F.linear(x, p["w"])))) for _ in range(4)
    ]
    schedule = S.gather_params(S.looped_bfs(4, 4, num_devices=1), whole=1, ahead=0)
    plan = cpu_plan(stages, schedule)
    x = torch.rand(8, 4, generator=torch.Generator().manual_seed(1))
    with (
        pytest.MonkeyPatch.context() as patch,
        fp.ranks(plan, mesh, dp="dp", timeout=30.0) as ranks,
    ):
        patch.setattr(Programs, "complete", noted)
        losses, grads = [], []
        for shard in (False, True):
            made.clear()
            there.clear()
            own = fp.place(
                plan, tuple({"w": torch.eye(4) + k} for k in range(4)), ranks, shard=shard
            )
            with torch.autocast("cpu", torch.bfloat16):
                result = fp.run(plan, own, (x, x), executor=ranks)
            losses.append(result.loss)
            grads.append(list(map(entire, fp.leaves(result.grads))))
    assert same(*losses)
    assert same(*grads)
    return len(there), max(there), whole()


def tensor_parallel(rank, size, dims, shard):
    """Pipelines side by side: the two processes of a stage share its matrices, with replicas beside
    them or without."""
    sizes = {"dp": 2, "pp": size // 2 ** (len(dims) - 1), "tp": 2}
    mesh = init_device_mesh("cpu", tuple(sizes[name] for name in dims), mesh_dim_names=dims)
    across, dp = mesh["tp"], "dp" if "dp" in dims else None
    over = {"up": Shard(0), "down": Shard(1), "gain": Replicate()}
    g = torch.Generator().manual_seed(1)
    shapes = {"up": (12, 6), "down": (6, 12), "gain": (1,), "shift": (6,)}
    whole = tuple(
        {
            name: torch.randn(shape, generator=g, dtype=torch.float64)
            for name, shape in shapes.items()
        }
        for _ in range(2)
    )

    def block(p, x):
        """Megatron's: rows of the first matrix, columns of the second; one sum at the end. That of
        the gain is partial."""
        if isinstance(p["up"], DTensor):
            x = DTensor.from_local(x, across, [Replicate()], run_check=False)
        h = (torch.relu(x @ p["up"].T) * p["gain"]) @ p["down"].T
        if isinstance(h, DTensor):
            h = h.redistribute(placements=[Replicate()]).to_local()
        return h + p["shift"]

    schedule = S.looped_bfs(2, 4, num_devices=sizes["pp"])
    if dp:
        schedule = S.reduce_grads(schedule)
    stages = [fp.stage(block, name=f"block {k}") for k in range(2)]
    plan = cpu_plan(stages, schedule)
    x = torch.randn(8, 6, generator=g, dtype=torch.float64)
    wrong = []
    with fp.ranks(plan, mesh, dp=dp, timeout=20.0) as ranks:
        alone = fresh_floats(whole)
        own = tuple(
            {
                name: distribute_tensor(leaf, across, [over[name]])
                if name in over
                else leaf.clone()
                for name, leaf in tree.items()
            }
            for tree in whole
        )
        own = fp.place(plan, own, ranks, shard=shard)
        for leaf in fp.leaves(own):
            leaf.requires_grad_()
        optimizers = [torch.optim.AdamW(fp.leaves(params), lr=0.05) for params in (alone, own)]
        scalers = [
            torch.amp.GradScaler("cpu", init_scale=8.0) if shard else None for _ in optimizers
        ]
        scale = 8.0 if shard else 1.0
        rows = x.split([5, 3])[ranks.replica] if dp else x
        for step in range(3):
            want = fp.run(plan, alone, (x, x.sin()), executor="serial", loss_scale=scale)
            got = fp.run(plan, own, (rows, rows.sin()), executor=ranks, loss_scale=scale)
            if not near(want.loss, got.loss):
                wrong.append(f"{step} loss {want.loss} {got.loss}")
            for stage in ranks.stages:
                for name in shapes:
                    gradient, leaf = got.grads[stage][name], own[stage][name]
                    same_kind = getattr(gradient, "placements", ()) == getattr(
                        leaf, "placements", ()
                    )
                    if not (same_kind and near(want.grads[stage][name], entire(gradient))):
                        wrong.append(f"{step} {name}")
            assert got.finite
            norms = [
                fp.step(optimizer, params, result, max_norm=0.5, scaler=scaler)
                for optimizer, params, result, scaler in zip(
                    optimizers, (alone, own), (want, got), scalers, strict=True
                )
            ]
            for scaler in filter(None, scalers):
                scaler.update()
            wrong += unless(near(*norms), f"{step} norm {norms}")
        for stage in ranks.stages:
            wrong += [
                name for name in shapes if not near(alone[stage][name], entire(own[stage][name]))
            ]
    return wrong


def hooked_parts(rank, size):
    """A hook on the gradient of one part, at one rank; without it the run goes well."""
    mesh = dp_and_pp(2, 1)
    plan = cpu_plan([fp.stage(lambda p, x: x * p["w"])], S.fill_drain(1, 2))
    x = torch.ones(4, 4)
    with fp.ranks(plan, mesh, dp="dp", timeout=20.0) as ranks:
        own = fp.place(plan, ({"w": torch.ones(4).requires_grad_()},), ranks, shard=True)
        if rank == 1:
            handle = own[0]["w"].register_hook(lambda gradient: gradient * 2)
        words = r"params\[0\]\['w'\] has hooks on its gradient"
        with pytest.raises(fp.PlanError if rank == 1 else fp.PeerError, match=words):
            fp.run(plan, own, (x, x), executor=ranks)
        if rank == 1:
            handle.remove()
        began = time.monotonic()
        loss = float(fp.run(plan, own, (x, x), executor=ranks).loss)
        return loss, time.monotonic() - began


def spread_wrongly(rank, size, what):
    """DTensors that no plan gathers."""
    mesh = dp_and_pp(2, 2)
    plan = cpu_plan(
        [fp.stage(lambda p, x: x * p["w"], name=f"{k}") for k in range(2)], S.one_f_one_b(2, 2)
    )
    weights = torch.ones(4, 4)
    with fp.ranks(plan, mesh, dp="dp", timeout=20.0) as ranks:
        if what == "two axes":
            leaf = distribute_tensor(weights, mesh, [Shard(0), Shard(1)])
        elif what == "along the pipeline":
            leaf = distribute_tensor(weights, mesh["pp"], [Shard(0)])
        else:
            leaf = DTensor.from_local(weights, mesh["dp"], [Partial()])
        params = tuple({"w": leaf} if stage in ranks.stages else None for stage in range(2))
        fp.run(plan, params, (torch.ones(4, 4), torch.ones(4, 4)), executor=ranks)


def shared_modules(rank, size):
    """Modules that other libraries have spread over processes."""
    layers = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    fully_shard(layers[2], mesh=init_device_mesh("cpu", (size,)))
    wrapped = nn.Sequential(nn.parallel.DistributedDataParallel(nn.Linear(4, 4)), nn.ReLU())
    said = []
    for model, name in ((layers, "'2' shares"), (wrapped, "'0' shares")):
        for make in (
            lambda: fp.from_module(model),
            lambda: fp.split(model, 2),
            lambda: fp.Pipe(model, 2, devices=["cpu"] * 2),
        ):
            with pytest.raises(fp.PlanError, match=f"{name} its parameters with other processes"):
                make()
            said.append(name)
    return len(said)


def sliced(rank, size, compiled):
    """Microbatches in slices, of lengths that ranks without a batch hear of; against one
    process."""
    stages, params = causal.chain(("attend", "recur", "point", "attend"))
    stages = [fp.compile_stage(stage) for stage in stages] if compiled else stages
    wrong = []
    for schedule in (
        S.one_f_one_b(4, 3, num_slices=3),
        S.remat(S.interleaved(4, 3, num_devices=2, num_slices=2)),
        S.zero_bubble(4, 2, num_slices=4),
    ):
        if schedule.num_devices < size:
            continue
        plan = cpu_plan(stages, schedule, outputs=True)
        with fp.ranks(plan, lanes=owners(plan.num_devices, size), timeout=30.0) as ranks:
            own = fp.place(plan, params, ranks)
            for rows, length in ((7, 11), (2, 5), (3, 8)):
                x, target = causal.batch(rows, length)
                want = fp.run_sequential(plan, params, (x, target))
                first, last = 0 in ranks.stages, 3 in ranks.stages
                given = (x if first else None, target if last else None) if first or last else None
                got = fp.run(plan, own, given, executor=ranks)
                wrong += [
                    f"{schedule.name} {rows} rows: {name}"
                    for name in differences(want, got, ranks.stages, last=last)
                ]
    return wrong


def carried(rank, size):
    """Sequences in three runs with slices and one without, each rank with the carry of its own
    stages; against one process."""
    stages, params = causal.chain(("attend", "recur", "point", "attend"))
    prefill, decode = (
        cpu_plan(stages, schedule.forwards(), carry=True, loss=None)
        for schedule in (S.one_f_one_b(4, 3, num_slices=2), S.one_f_one_b(4, 3))
    )
    plans, parts = [prefill] * 3 + [decode], causal.batch(7, 12)[0].split([4, 4, 3, 1], 1)
    wrong, outputs, carry = [], [], None
    for plan, part in zip(plans, parts, strict=True):
        result = fp.run_sequential(plan, params, part, carry=carry)
        outputs.append(result.outputs)
        carry = result.carry
    own = None
    for number, (plan, part) in enumerate(zip(plans, parts, strict=True)):
        with fp.ranks(plan, lanes=owners(4, size), timeout=30.0) as ranks:
            ours = fp.place(plan, params, ranks)
            given = part if 0 in ranks.stages else None
            if number == 1:
                told = own if rank == 0 else None
                with pytest.raises(fp.RanksError, match="carry: rank 1 has False, rank 0 has True"):
                    fp.run(plan, ours, given, executor=ranks, carry=told)
            result = fp.run(plan, ours, given, executor=ranks, carry=own)
            last = 3 not in ranks.stages or same(result.outputs, outputs[number])
            own = result.carry
            here = {stage for stage, row in enumerate(own.trees) if row is not None}
            wrong += unless(last and here == {*ranks.stages} - {2}, (number, here))
            wrong += [
                (number, at)
                for at in here
                if number == 3 and not same(own.trees[at], carry.trees[at])
            ]
    return wrong


def other_lengths(rank, size):
    """The ranks of the first and the last stage have sequences of different lengths: all of them
    say so."""
    stages, params = causal.chain(("attend", "point"))
    plan = cpu_plan(stages, S.one_f_one_b(2, 2, num_slices=2))
    x, target = causal.batch(4, 6)
    with fp.ranks(plan, timeout=30.0) as ranks:
        given = (x, None) if rank == 0 else (None, target[:, :5])
        with pytest.raises(
            fp.RanksError, match="the length of the sequences: rank 1 has 5, rank 0 has 6"
        ):
            fp.run(plan, fp.place(plan, params, ranks), given, executor=ranks)
    return []


def observed(rank, size):
    """An observer sees the values of the stages that are here, and they are those of the oracle."""
    stages, params = causal.chain(("point", "point"))
    schedule = S.one_f_one_b(2, 4)
    plan = cpu_plan(stages, schedule)
    x, target = causal.batch(8, 6)
    wanted = record_values(plan, params, (x, target), executor="sequential")
    with fp.ranks(plan, timeout=30.0) as ranks:
        placed = fp.place(plan, params, ranks)
        found = record_values(plan, placed, (x, target), executor=ranks)
    wrong = [] if first_difference(found, wanted) is None else ["a value"]
    here = {key for key in wanted.values if key[0].stage % size == rank}
    return [*wrong, *(here ^ found.values.keys())]
