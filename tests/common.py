"""What the laws need: every schedule, equality bit for bit, and nets with everything in them."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import funcpipe as fp
from funcpipe._src.core.tree import flatten

EXECUTORS = ("serial", "threads")


ON_BLOCKS_OR_LOOPS = [
    fp.schedules.fill_drain,
    fp.schedules.one_f_one_b,
    fp.schedules.looped_bfs,
    fp.schedules.interleaved,
    fp.schedules.zero_bubble,
]
"""Families that are tried at every number of devices that divides the stages, plain and with
remat."""
ON_A_LINE = [fp.schedules.zb_h2, fp.schedules.eager_one_f_one_b]
"""Families that are tried with a stage a device."""
ON_A_V = [fp.schedules.zbv, fp.schedules.v_half, fp.schedules.v_min, fp.schedules.dualpipe_v]
"""Families with two stages a device, down the devices and back up."""


def schedules(
    num_stages: int, num_microbatches: int, *, backward: bool = True
) -> list[fp.Schedule]:
    """Every family at every number of devices that divides the stages, plain, with remat, with
    residuals at the host."""
    s, m = num_stages, num_microbatches
    if not backward:
        return [
            fp.schedules.fill_drain(s, m, num_devices=d, backward=False) for d in range(1, s + 1)
        ]
    divisors = [d for d in range(1, s + 1) if s % d == 0]
    plain = [family(s, m, num_devices=d) for d in divisors for family in ON_BLOCKS_OR_LOOPS]
    line = [family(s, m) for family in ON_A_LINE]
    vee: list[fp.Schedule] = []
    if s > 1 and s % 2 == 0:
        vee = [family(s, m) for family in ON_A_V if family is not fp.schedules.dualpipe_v or m >= s]
        line.append(fp.schedules.interleaved(s, m, num_devices=s // 2, group=(s // 2 + 1) // 2))
    zbv = vee[:1]
    rematted = [fp.schedules.remat(one) for one in plain]
    rematted += [
        fp.schedules.remat(one, keep=lambda a: (a.stage + a.microbatch) % 2 == 0)
        for one in plain + zbv
    ]
    away = [
        fp.schedules.one_f_one_b(s, m),
        fp.schedules.zb_h2(s, m),
        *zbv,
        fp.schedules.interleaved(s, m),
    ]
    away = [
        fp.schedules.offload(one, move=lambda a: (a.stage + a.microbatch) % 3 != 0, ahead=m % 2)
        for one in away
    ]
    whole = [
        fp.schedules.interleaved(s, m, num_devices=s),
        fp.schedules.zero_bubble(s, m, num_devices=s),
    ]
    reduced = [fp.schedules.reduce_grads(one) for one in (*whole, *zbv, *away[:1])]
    gathered = [fp.schedules.gather_params(one) for one in (*zbv, away[0])]
    if s % 2 == 0 and m > 1:
        gathered.append(
            fp.schedules.gather_params(fp.schedules.looped_bfs(s, m, num_devices=s // 2), whole=1)
        )
    paired = [
        fp.schedules.pair(one)
        for one in (line[0], fp.schedules.remat(whole[0]), *away[2:], *line[2:])
    ]
    unique = {
        str(one): one
        for one in (*plain, *rematted, *line, *vee, *away, *reduced, *gathered, *paired)
    }
    return list(unique.values())


def one_of_each_kind(families: list[fp.Schedule]) -> list[fp.Schedule]:
    """For each set of kinds of actions, with pairs and without, the schedule on most devices: for
    tests of what does not depend on the order of actions."""
    chosen: dict[tuple[frozenset[fp.Kind], bool], fp.Schedule] = {}
    for one in families:
        key = frozenset(a.kind for order in one.orders for a in order), "(" in str(one)
        if key not in chosen or one.num_devices > chosen[key].num_devices:
            chosen[key] = one
    return list(chosen.values())


def ids(schedule: fp.Schedule) -> str:
    return (
        f"{schedule.name}-{schedule.num_stages}s{schedule.num_microbatches}m{schedule.num_devices}d"
    )


def cpu_plan(stages, schedule: fp.Schedule, *, loss=F.mse_loss, **options) -> fp.Plan:
    """A plan on the CPU, for the mean squared error unless another loss is given."""
    return fp.make_plan(stages, schedule, loss=loss, devices="cpu", **options)


def forward_plan(stages, num_microbatches: int, **options) -> fp.Plan:
    """A plan on the CPU that computes outputs alone, with a device for each stage."""
    schedule = fp.schedules.fill_drain(len(stages), num_microbatches, backward=False)
    return fp.make_plan(stages, schedule, devices="cpu", **options)


def search(cost: fp.Cost, num_devices: int, num_microbatches: int, **options):
    """A search for so many devices and microbatches."""
    return fp.search(cost, num_devices=num_devices, num_microbatches=num_microbatches, **options)


def same(a, b) -> bool:
    """Bit for bit, structure included; NaN equals NaN."""
    left, spec = flatten(a)
    right, other = flatten(b)
    if spec != other:
        return False
    for x, y in zip(left, right, strict=True):
        if isinstance(x, torch.Tensor) != isinstance(y, torch.Tensor):
            return False
        if isinstance(x, torch.Tensor):
            if (
                x.shape != y.shape
                or x.dtype != y.dtype
                or not torch.equal(torch.nan_to_num(x), torch.nan_to_num(y))
            ):
                return False
            if x.is_floating_point() and not torch.equal(x.isnan(), y.isnan()):
                return False
        elif x is not y and x != y:
            return False
    return True


def assert_same_result(expected: fp.Result, result: fp.Result) -> None:
    for name in ("loss", "weight", "losses", "aux", "grads", "unused", "state"):
        assert same(getattr(expected, name), getattr(result, name)), name
    if isinstance(expected.outputs, fp.Microbatches):
        assert same(tuple(expected.outputs), tuple(result.outputs))
    else:
        assert same(expected.outputs, result.outputs)


def snapshot(tree):
    """A copy of every tensor, to see later that nobody wrote."""
    leaves, _ = flatten(tree)
    return [leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]


class Again(nn.Sequential):
    """Layers that torch computes again in their backward."""

    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=False)


def poison(size: int) -> None:
    """Take memory of the GPU that is free now and fill it with NaN: whoever reads freed memory sees
    it."""
    blocks = [torch.full((size,), float("nan"), device="cuda:0") for _ in range(64)]
    del blocks


def device_peak(run: Callable[[], object]) -> int:
    """The most bytes of the GPU that a run takes beyond what lay there, once it has run before."""
    run()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before
