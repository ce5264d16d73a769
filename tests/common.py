"""What the laws need: every schedule, equality bit for bit, and nets with everything in them."""

from __future__ import annotations

import torch

import funcpipe as fp
from funcpipe.core.tree import flatten

EXECUTORS = ("serial", "threads")


def schedules(num_stages: int, num_microbatches: int, *, backward: bool = True) -> list[fp.Schedule]:
    """Every family at every number of devices that divides the stages, plain, with remat, with residuals at the host."""
    s, m = num_stages, num_microbatches
    if not backward:
        return [fp.schedules.fill_drain(s, m, num_devices=d, backward=False) for d in range(1, s + 1)]
    out: list[fp.Schedule] = []
    for d in [d for d in range(1, s + 1) if s % d == 0]:
        out += [
            fp.schedules.fill_drain(s, m, num_devices=d),
            fp.schedules.one_f_one_b(s, m, num_devices=d),
            fp.schedules.looped_bfs(s, m, num_devices=d),
            fp.schedules.interleaved(s, m, num_devices=d),
            fp.schedules.zero_bubble(s, m, num_devices=d),
        ]
    some = [fp.schedules.remat(one) for one in out]
    part = [fp.schedules.remat(one, keep=lambda a: (a.stage + a.microbatch) % 2 == 0) for one in out]
    new = [fp.schedules.zb_h2(s, m), fp.schedules.eager_one_f_one_b(s, m)]
    if s > 1 and s % 2 == 0:
        families = [
            fp.schedules.zbv,
            fp.schedules.v_half,
            fp.schedules.v_min,
            *([fp.schedules.dualpipe_v] if m >= s else []),
        ]
        new += [family(s, m, num_devices=s // 2) for family in families]
        new.append(fp.schedules.interleaved(s, m, num_devices=s // 2, group=(s // 2 + 1) // 2))
        new.append(fp.schedules.remat(new[2], keep=lambda a: (a.stage + a.microbatch) % 2 == 0))
    away = [fp.schedules.one_f_one_b(s, m), *new[:1], *new[2:3], fp.schedules.interleaved(s, m)]
    away = [fp.schedules.offload(one, move=lambda a: (a.stage + a.microbatch) % 3 != 0, ahead=m % 2) for one in away]
    reduced = [fp.schedules.reduce_grads(one) for one in (*out[-2:], *new[2:3], *away[:1])]
    unique = {str(one): one for one in (*out, *some, *part, *new, *away, *reduced)}
    return list(unique.values())


def ids(schedule: fp.Schedule) -> str:
    return f"{schedule.name}-{schedule.num_stages}s{schedule.num_microbatches}m{schedule.num_devices}d"


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
            if x.shape != y.shape or x.dtype != y.dtype or not torch.equal(torch.nan_to_num(x), torch.nan_to_num(y)):
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
