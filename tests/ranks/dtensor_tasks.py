"""Stages that hand on DTensors, in several processes; against plain autograd of the uncut model."""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from common import same
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)

import funcpipe as fp
from funcpipe import schedules as S

WIDTH, LENGTH, ROWS, MICROBATCHES, STAGES = 4, 5, 6, 3, 4
ALONG = {
    "sequence": [Shard(1)],  # 5 tokens over 2 processes
    "width": [Shard(-1)],
    "rows": [Shard(0)],
    "whole": [Replicate()],
    "partial": [Partial()],
}


def entire(leaf: Any) -> Any:
    return leaf.full_tensor() if isinstance(leaf, DTensor) else leaf


def cut_weights(tp: DeviceMesh, stage: int) -> dict[str, Tensor]:
    """The parameters of a stage: a matrix that is cut, and a factor that is not."""
    g = torch.Generator().manual_seed(stage)
    whole = torch.randn(WIDTH, WIDTH, generator=g, dtype=torch.float64)
    gain = torch.randn(WIDTH, generator=g, dtype=torch.float64)
    params = {
        "w": distribute_tensor(whole, tp, [Shard(0)]),
        "gain": distribute_tensor(gain, tp, [Replicate()]),
    }
    return {name: leaf.requires_grad_() for name, leaf in params.items()}


def block(params: Any, x: Any, *, over: list[Any], first: bool) -> Any:
    """A product, handed on as a DTensor with the placement ``over``."""
    if first and not isinstance(x, DTensor):
        x = DTensor.from_local(x, params["w"].device_mesh, [Replicate()], run_check=False)
    y = torch.tanh(x.redistribute(placements=[Replicate()]) @ params["w"].T) * params["gain"]
    if isinstance(over[0], Partial):  # a product over a cut axis, without its sum
        return y.redistribute(placements=[Shard(2)]) @ params["w"].redistribute(
            placements=[Shard(0)]
        )
    return y.redistribute(placements=over)


def several(params: Any, x: Any, *, over: list[Any], first: bool) -> Any:
    """Several outputs: DTensors, one of them transposed, a plain tensor, and a number."""
    h = x if first else x["h"] + x["t"].transpose(1, 2)
    y = block(params, h, over=over, first=first)
    local = y.redistribute(placements=[Replicate()]).to_local()
    return {"h": y, "t": (y * 2).transpose(1, 2), "plain": local.sum((1, 2)), "n": 3}


def merged(params: Any, x: Any, *, over: list[Any], first: bool) -> Any:
    """The last of stages with several outputs."""
    whole = params["w"].device_mesh, [Replicate()]
    h = x["h"] + x["t"].transpose(1, 2)
    h = h + DTensor.from_local(x["plain"], *whole, run_check=False)[:, None, None] * x["n"]
    return block(params, h, over=over, first=False)


def squares(y: Any, target: Any) -> Tensor:
    """A loss that is a DTensor. Torch's own mean over uneven parts is wrong, so both are whole."""
    if not isinstance(target, DTensor):
        target = distribute_tensor(target, y.device_mesh, [Replicate()])
    whole = [Replicate()]
    return F.mse_loss(y.redistribute(placements=whole), target.redistribute(placements=whole))


def stages_of(over: str, shape: str) -> list[fp.Stage]:
    last = STAGES - 1
    bodies = [several] * last + [merged] if shape == "several" else [block] * STAGES
    return [
        fp.stage(partial(body, over=ALONG[over], first=stage == 0), name=f"part {stage}")
        for stage, body in enumerate(bodies)
    ]


def uncut(stages: list[fp.Stage], params: list[Any], x: Tensor, target: Tensor) -> Any:
    """The loss and the gradients of plain autograd, without borders."""
    for piece, own in zip(x.chunk(MICROBATCHES), target.chunk(MICROBATCHES), strict=True):
        y = piece
        for stage, tree in zip(stages, params, strict=True):
            y = stage.fn(tree, y)
        (squares(y, own).full_tensor() / MICROBATCHES).backward()
    with torch.no_grad():
        y = x
        for stage, tree in zip(stages, params, strict=True):
            y = stage.fn(tree, y)
        outputs = entire(y)
    grads = [{name: entire(leaf.grad) for name, leaf in tree.items()} for tree in params]
    return float(entire(squares(y, target))), outputs, grads


SCHEDULES = {
    "interleaved": lambda: S.interleaved(STAGES, MICROBATCHES, num_devices=2),
    "zbv": lambda: S.zbv(STAGES, MICROBATCHES),
    "remat": lambda: S.remat(S.looped_bfs(STAGES, MICROBATCHES, num_devices=2)),
}


def crossed(rank: int, size: int, over: str, shape: str, family: str) -> list[str]:
    """Losses, outputs and gradients of ranks, of one process, and of plain autograd."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
    tp, wrong = mesh["tp"], []
    stages = stages_of(over, shape)
    params = [cut_weights(tp, stage) for stage in range(STAGES)]
    g = torch.Generator().manual_seed(9)
    x = torch.randn(ROWS, LENGTH, WIDTH, generator=g, dtype=torch.float64)
    target = torch.randn(ROWS, LENGTH, WIDTH, generator=g, dtype=torch.float64)
    loss, outputs, grads = uncut(stages, params, x, target)
    plan = fp.make_plan(stages, SCHEDULES[family](), loss=squares, outputs=True, devices="cpu")
    placements: dict[str, dict[Any, Any]] = {}

    def compare(name: str, result: fp.Result, here: Any) -> None:
        near = partial(torch.testing.assert_close, rtol=1e-9, atol=1e-12)
        near(float(result.loss), loss)
        if type(result.loss) is not Tensor or type(result.losses[0]) is not Tensor:
            wrong.append(f"{name}: {type(result.loss)} {type(result.losses[0])}")
        if STAGES - 1 in here:
            near(entire(result.outputs), outputs)
        for stage in here:
            for leaf, gradient in result.grads[stage].items():
                near(entire(gradient), grads[stage][leaf])

    def look(name: str, action: Any, what: str, value: Any) -> None:
        for number, leaf in enumerate(fp.leaves(value)):
            if isinstance(leaf, Tensor):
                place = getattr(leaf, "placements", ()), leaf.shape, leaf.stride()
                placements.setdefault(name, {})[str(action), what, number] = place

    how = {"check": ("finite",), "record": True}
    alone = fp.run(
        plan, params, (x, target), executor="serial", observe=partial(look, "alone"), **how
    )
    compare("alone", alone, range(STAGES))
    with fp.ranks(plan, mesh["pp"], timeout=30.0) as ranks:
        own = [tree if stage in ranks.stages else None for stage, tree in enumerate(params)]
        how |= {"observe": partial(look, "ranks")}
        result = fp.run(plan, own, (x, target), executor=ranks, **how)
        compare("ranks", result, ranks.stages)
        seen, expected = placements["ranks"], placements["alone"]
        differ = [key for key, place in seen.items() if expected[key] != place]
        wrong += [f"{key}: {seen[key]}, alone {expected[key]}" for key in differ]
        borders = [place for (_, what, _), (place, *_) in seen.items() if what == "input" and place]
        if not any(type(place[0]) is type(ALONG[over][0]) for place in borders):
            wrong.append(f"no border with {over}")
        for batch in (
            (distribute_tensor(x, tp, [Shard(0)]), distribute_tensor(target, tp, [Shard(1)])),
            (distribute_tensor(x, tp, [Shard(1)]), distribute_tensor(target, tp, [Shard(0)])),
        ):
            compare("batch", fp.run(plan, own, batch, executor=ranks), ranks.stages)
    return wrong


def two(
    rank: int, stages: list[fp.Stage], params: list[Any], loss: Any, batch: Any, **run: Any
) -> list[fp.Result]:
    """Run two stages on the four processes, and in each process alone."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
    plan = fp.make_plan(stages, S.one_f_one_b(2, 2), loss=loss, devices="cpu")
    own = [tree if stage == rank // 2 else None for stage, tree in enumerate(params)]
    with fp.ranks(plan, mesh["pp"], timeout=20.0) as ranks:
        result = fp.run(plan, own, batch, executor=ranks, **run)
    return [result, fp.run(plan, params, batch, executor="serial", **run)]


def misused(rank: int, size: int, what: str) -> None:
    """A DTensor for which the other process finds no mesh, or another one."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
    first = second = mesh["tp"]
    if what == "without names":
        first = DeviceMesh.from_group(mesh["tp"].get_group(), "cpu")
    elif what == "other names":
        second = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "model"))["model"]
    elif what in ("two meshes", "other order"):
        second = DeviceMesh("cpu", [[1, 0], [3, 2]], mesh_dim_names=("pp", "tp"))["tp"]
    scale = torch.ones(WIDTH)

    def weights(*over: DeviceMesh) -> dict[str, Tensor]:
        return {
            f"w{n}": distribute_tensor(scale, tp, [Replicate()]).requires_grad_()
            for n, tp in enumerate(over)
        }

    def start(params: Any, x: Tensor) -> Any:
        return distribute_tensor(x, first, [Shard(1)]) * params["w0"]

    def end(params: Any, h: Any) -> Any:
        return h * params["w0"]

    own = {
        "without params": {"w0": scale.clone().requires_grad_()},
        "two meshes": weights(second, first),
    }
    params = [weights(first), own.get(what, weights(second))]
    two(rank, [fp.stage(start), fp.stage(end)], params, squares, (torch.ones(4, WIDTH),) * 2)


def detailed(rank: int, size: int) -> list[str]:
    """Skips, feeds, losses, auxiliary losses and aux that are DTensors; against plain losses."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
    params = [cut_weights(mesh["tp"], stage) for stage in range(2)]

    def stages(read: Any) -> list[fp.Stage]:
        def start(params: Any, x: Any) -> fp.Out:
            y = block(params, x, over=[Shard(1)], first=True)
            side = read((y * y).sum()), read((y.detach() ** 2).sum())
            return fp.Out(y, stash={"early": y * 2}, loss=side)

        def end(params: Any, h: Any, *, skips: Any, feeds: Any) -> Any:
            h = h + skips["early"] * feeds["mask"]
            return block(params, h, over=[Shard(-1)], first=False)

        return [fp.stage(start, stash=["early"]), fp.stage(end, pop=["early"], feeds=["mask"])]

    def loss(read: Any, y: Any, target: Tensor) -> fp.Loss:
        mean = F.cross_entropy(y.flatten(0, 1), target.flatten())
        return fp.Loss(read(mean), aux={"largest": read(y.detach().max())})

    g = torch.Generator().manual_seed(9)
    x = torch.randn(ROWS, LENGTH, WIDTH, generator=g, dtype=torch.float64)
    target = torch.randint(0, WIDTH, (ROWS, LENGTH), generator=g)
    mask = torch.rand(ROWS, LENGTH, 1, generator=g, dtype=torch.float64)
    feeds = {"mask": distribute_tensor(mask, mesh["tp"], [Shard(1)])}
    results, reads = [], (lambda leaf: leaf, entire)
    with loss_parallel():
        for read in reads:
            losses = partial(loss, read)
            results += two(rank, stages(read), params, losses, (x, target), feeds=feeds)
    *_, expected = results
    wrong = []
    for number, result in enumerate(results):
        for name in ("loss", "losses", "aux"):
            got, want = getattr(result, name), getattr(expected, name)
            if not same(got, want) or any(isinstance(leaf, DTensor) for leaf in fp.leaves(got)):
                wrong.append(f"{number} {name}: {got} {want}")
        for stage in range(2) if number % 2 else [rank // 2]:
            for name, gradient in result.grads[stage].items():
                if not same(entire(gradient), entire(expected.grads[stage][name])):
                    wrong.append(f"{number} {stage} {name}")
    return wrong


def made_of_plain(rank: int, size: int) -> list[str]:
    """A stage that makes a DTensor without parameters of its mesh; its gradient comes back."""
    tp = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))["tp"]
    params = [{"scale": torch.full((WIDTH,), 0.5).double().requires_grad_()}, cut_weights(tp, 1)]

    def start(params: Any, x: Tensor) -> Any:
        whole = DTensor.from_local(x * params["scale"], tp, [Replicate()], run_check=False)
        return whole.redistribute(placements=[Shard(1)])

    end = fp.stage(partial(block, over=[Replicate()], first=False))
    x = torch.ones(ROWS, LENGTH, WIDTH, dtype=torch.float64)
    got, want = two(rank, [fp.stage(start), end], params, squares, (x, x))
    return [
        f"{stage} {name}"
        for stage in [rank // 2]
        for name, gradient in got.grads[stage].items()
        if not same(entire(gradient), entire(want.grads[stage][name]))
    ]


def written(rank: int, size: int, what: str) -> None:
    """A stage that writes into a DTensor which it got twice, or which it has handed on."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
    params, kept = [cut_weights(mesh["tp"], stage) for stage in range(2)], []

    def start(params: Any, x: Any) -> Any:
        y = block(params, x, over=[Shard(1)], first=True) * 2  # dense in each process
        if what == "twice":
            return y, y.to_local()
        for old in kept:
            old.add_(1.0)
        kept.append(y.detach().clone())
        return kept[-1]

    def end(params: Any, h: Any) -> Any:
        if what == "twice":
            h[0].mul_(2)
            h = h[0] + h[1].sum()
        return block(params, h, over=[Replicate()], first=False)

    x = torch.randn(ROWS, LENGTH, WIDTH, dtype=torch.float64)
    stages = [fp.stage(start), fp.stage(end)]
    plan = fp.make_plan(stages, S.fill_drain(2, 2), loss=squares, devices="cpu")
    fp.run(plan, params, (x, x), executor="serial")


def alone_on_threads(rank: int, size: int) -> float:
    """A pipeline on the threads of one process, with meshes of one process each."""
    tp = init_device_mesh("cpu", (size, 1), mesh_dim_names=("pp", "tp"))["tp"]
    stages = stages_of("sequence", "several")
    params = [cut_weights(tp, stage) for stage in range(STAGES)]
    g = torch.Generator().manual_seed(9)
    x = torch.randn(ROWS, LENGTH, WIDTH, generator=g, dtype=torch.float64)
    loss, outputs, grads = uncut(stages, params, x, x)
    for executor in ("serial", "threads"):
        plan = fp.make_plan(stages, SCHEDULES["zbv"](), loss=squares, outputs=True, devices="cpu")
        result = fp.run(plan, params, (x, x), executor=executor, check="finite", record=True)
        expected = loss, outputs, grads
        got = (
            float(result.loss),
            entire(result.outputs),
            [{name: entire(leaf) for name, leaf in tree.items()} for tree in result.grads],
        )
        torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-12)
    return loss


def not_finite(rank: int, size: int) -> None:
    """A number that is not finite in the part of one process."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
    params = [cut_weights(mesh["tp"], stage) for stage in range(2)]
    x = torch.ones(ROWS, LENGTH, WIDTH, dtype=torch.float64)
    x[1, -1] = float("nan")
    fp_stages = [fp.stage(partial(block, over=[Shard(1)], first=stage == 0)) for stage in range(2)]
    two(rank, fp_stages, params, squares, (x, x), check="finite")


class Pair(torch.nn.Module):
    """Two layers for torch's tensor parallelism; what the second returns is handed on as it is."""

    def __init__(self, shape: str) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(8, 16), torch.nn.Linear(16, 8)
        self.shape = shape

    def forward(self, *x: Tensor) -> Any:
        h = torch.tanh(self.up(sum(x)))
        return (self.down(h), self.down(h)) if self.shape == "several" else self.down(h)


def with_styles(rank: int, size: int, shape: str) -> list[str]:
    """Stages that end in `RowwiseParallel`: their outputs come from a collective that may still
    run."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))

    def loss(y: Any, target: Any) -> Tensor:
        return F.mse_loss(sum(map(entire, y)) if isinstance(y, tuple) else entire(y), target)

    def parts() -> list[Pair]:
        torch.manual_seed(0)
        return [Pair(shape).double() for _ in range(2)]

    torch.manual_seed(1)
    x, target = (torch.randn(8, 8, dtype=torch.float64) for _ in range(2))
    whole, y = parts(), (x,)
    for part in whole:
        y = part(*y)
        y = y if isinstance(y, tuple) else (y,)
    expected = F.mse_loss(sum(y), target)
    expected.backward()
    cut = parts()
    for part in cut:
        last = RowwiseParallel(use_local_output=shape != "dtensor")
        parallelize_module(part, mesh["tp"], {"up": ColwiseParallel(), "down": last})
    stages, params, _ = zip(*[fp.from_module(part) for part in cut], strict=True)
    plan = fp.make_plan(stages, S.one_f_one_b(2, 4), loss=loss, devices="cpu")
    wrong: list[str] = []
    with fp.ranks(plan, mesh["pp"], timeout=30.0) as ranks:
        for how in ("serial", ranks):
            own = [
                tree if how == "serial" or s in ranks.stages else None
                for s, tree in enumerate(params)
            ]
            result = fp.run(plan, own, (x, target), executor=how)
            torch.testing.assert_close(result.loss, expected.detach())
            for stage, tree in enumerate(result.grads):
                for name, gradient in (tree or {}).items():
                    known = whole[stage].get_parameter(name).grad
                    if not torch.allclose(entire(gradient), known):
                        wrong.append(f"{how}: {stage} {name}")
    return wrong
