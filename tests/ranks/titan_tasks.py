"""A training loop in the form of torchtitan's trainer, over torch's schedules and over funcpipe's.

`train` does not know which of the two it has. `torch_parts` and `funcpipe_parts` make the schedule.
"""

import inspect
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleInterleaved1F1B,
    ScheduleZBVZeroBubble,
)
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

import funcpipe as fp

VOCABULARY, WIDTH, LAYERS, LENGTH, MICROBATCHES, ROWS = 32, 16, 4, 6, 8, 16
"""Models have four layers; eight where there are eight stages."""

IGNORED = -100
TORCH = {
    "1f1b": Schedule1F1B,
    "interleaved": ScheduleInterleaved1F1B,
    "zbv": ScheduleZBVZeroBubble,
}
OWN = {
    "1f1b": lambda stages, devices: fp.schedules.one_f_one_b(stages, MICROBATCHES),
    "interleaved": lambda stages, devices: fp.schedules.interleaved(
        stages, MICROBATCHES, num_devices=devices
    ),
    "zbv": lambda stages, devices: fp.schedules.zbv(stages, MICROBATCHES),
}


class Means(nn.Module):
    """The mean over the tokens so far, which needs the whole sequence."""

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return h.cumsum(1) / torch.arange(1, h.shape[1] + 1)[:, None]


class Block(nn.Module):
    """A residual block whose two products tensor parallelism can cut."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mix = nn.LayerNorm(WIDTH), Means()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return h + self.down(F.gelu(self.up(self.mix(self.norm(h)))))


class Decoder(nn.Module):
    """A model in torchtitan's form: a part deletes the modules that other stages have."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleDict({str(i): Block() for i in range(layers)})
        self.norm, self.output = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        h = tokens if self.tok_embeddings is None else self.tok_embeddings(tokens)
        for layer in self.layers.values():
            h = layer(h)
        h = h if self.norm is None else self.norm(h)
        return h if self.output is None else self.output(h)


def cross_entropy(pred: torch.Tensor, labels: torch.Tensor, *, valid: Any = 1.0) -> torch.Tensor:
    """torchtitan's loss: a sum, divided by the number of tokens of all replicas."""
    total = F.cross_entropy(
        pred.flatten(0, 1).float(), labels.flatten(0, 1), reduction="sum", ignore_index=IGNORED
    )
    return total / valid


class Trained(NamedTuple):
    """What `train` works with: a schedule, this rank's parameters, and its place."""

    schedule: Any
    params: list[torch.Tensor]
    has_first: bool
    has_last: bool
    sums_replicas: bool
    """Whether the schedule itself sums gradients over replicas."""


def stages_of(family: str, rank: int, size: int) -> list[int]:
    """The stages of a rank."""
    if family == "zbv":
        return [rank, 2 * size - 1 - rank]
    return [rank + size * k for k in range(2 if family == "interleaved" else 1)]


def part_of(stage: int, count: int, tp: DeviceMesh | None, sequence: bool = False) -> Decoder:
    """Cut a stage out of the model as torchtitan's pipeline_module_split does.

    With ``sequence``, tensor parallelism also cuts the sequence, and borders are DTensors.
    """
    torch.manual_seed(0)
    layers = max(LAYERS, count)
    part, share = Decoder(layers), layers // count
    for name in [*part.layers]:
        if int(name) // share != stage:
            del part.layers[name]
    if stage:
        part.tok_embeddings = None
    if stage < count - 1:
        part.norm = part.output = None
    if tp is not None:
        styles = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        if sequence:
            along = {"output_layouts": Shard(1), "use_local_output": False}
            styles |= {
                "norm": SequenceParallel(),
                "mix": PrepareModuleInput(
                    input_layouts=Shard(1), desired_input_layouts=Replicate(), use_local_output=True
                ),
                "down": RowwiseParallel(**along),
            }
            ends = {
                "tok_embeddings": RowwiseParallel(input_layouts=Replicate(), **along),
                "norm": SequenceParallel(),
                "output": ColwiseParallel(
                    input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False
                ),
            }
            here = {name: style for name, style in ends.items() if getattr(part, name) is not None}
            parallelize_module(part, tp, here)
        for layer in part.layers.values():
            parallelize_module(layer, tp, styles)
    return part


def torch_parts(family: str, mesh: DeviceMesh, sequence: bool = False) -> Trained:
    """The loop's objects with a schedule of torch."""
    pp = mesh["pp"]
    rank, size = pp.get_local_rank(), pp.size()
    mine = stages_of(family, rank, size)
    count = size * len(mine)
    tp = mesh["tp"] if "tp" in mesh.mesh_dim_names else None
    parts = [part_of(stage, count, tp, sequence) for stage in mine]
    how = {"group": pp.get_group()} | ({"get_mesh": lambda *_: tp} if sequence else {})
    stages = [
        PipelineStage(part, stage, count, torch.device("cpu"), **how)
        for part, stage in zip(parts, mine, strict=True)
    ]
    schedule = TORCH[family](
        stages[0] if family == "1f1b" else stages,
        n_microbatches=MICROBATCHES,
        loss_fn=cross_entropy,
        scale_grads=False,
    )
    params = [leaf for part in parts for leaf in part.parameters()]
    return Trained(schedule, params, 0 in mine, count - 1 in mine, False)


def funcpipe_parts(
    family: str, mesh: DeviceMesh, stack: ExitStack, sequence: bool = False
) -> Trained:
    """The loop's objects with a schedule of funcpipe."""
    pp = mesh["pp"]
    rank, size = pp.get_local_rank(), pp.size()
    mine = stages_of(family, rank, size)
    count = size * len(mine)
    names = mesh.mesh_dim_names
    tp = mesh["tp"] if "tp" in names else None
    made = [
        fp.from_module(
            part_of(stage, count, tp if stage in mine else None, sequence), name=f"part{stage}"
        )
        for stage in range(count)
    ]
    stages, params, _ = zip(*made, strict=True)
    plan = fp.make_plan(stages, OWN[family](count, size), loss=cross_entropy, devices="cpu")
    if "dp" in names:
        ranks = fp.ranks(plan, mesh, dp="dp", timeout=30.0)
    else:
        ranks = fp.ranks(plan, pp, timeout=30.0)
    stack.enter_context(ranks)
    params = fp.place(plan, params, ranks)
    schedule = ranks.schedule(params, scale_grads=False)
    return Trained(schedule, fp.leaves(params), 0 in mine, count - 1 in mine, "dp" in names)


def train(
    made: Trained, mesh: DeviceMesh, *, presplit: bool, steps: int = 3
) -> list[tuple[float, ...]]:
    """Train as torchtitan's trainer does, and return (loss, norm) of each step."""
    schedule, params, has_first, has_last, sums_replicas = made
    optimizer = torch.optim.AdamW(params, lr=1e-2)
    dp = mesh["dp"] if "dp" in mesh.mesh_dim_names else None
    log = []
    for step in range(steps):
        inputs, labels, valid = batch_of(step, dp)
        optimizer.zero_grad()
        targets, losses = (labels, []) if has_last else (None, None)
        keywords = {"losses": losses, "loss_kwargs": {"valid": valid}, "return_outputs": False}
        if presplit:
            cut = [[(each,) for each in inputs.chunk(MICROBATCHES)], labels.chunk(MICROBATCHES)]
            schedule.step(
                arg_mbs=cut[0] if has_first else None,
                kwarg_mbs=[{} for _ in range(MICROBATCHES)],
                target_mbs=list(cut[1]) if has_last else None,
                **keywords,
            )
        elif has_first:
            schedule.step(inputs, target=targets, **keywords)
        else:
            schedule.step(target=targets, **keywords)
        if dp is not None and not sums_replicas:
            for leaf in params:
                dist.all_reduce(leaf.grad, group=dp.get_group())
        norm = clip_grad_norm(params, mesh["pp"])
        optimizer.step()
        loss = torch.stack(losses).sum() if has_last else torch.zeros(())
        loss = loss.full_tensor() if hasattr(loss, "full_tensor") else loss
        dist.all_reduce(loss, group=mesh["pp"].get_group())
        if dp is not None:
            dist.all_reduce(loss, group=dp.get_group())
        log.append((float(loss), float(norm)))
    return log


def batch_of(step: int, dp: DeviceMesh | None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The inputs and labels of this replica, and the number of tokens of all replicas that count."""
    count, replica = (1, 0) if dp is None else (dp.size(), dp.get_local_rank())
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, VOCABULARY, (count * ROWS, LENGTH + 1), generator=generator)
    inputs, labels = tokens[:, :-1], tokens[:, 1:].clone()
    labels[::3, 4:] = IGNORED
    valid = (labels != IGNORED).sum()
    return inputs.chunk(count)[replica], labels.chunk(count)[replica], valid


def clip_grad_norm(params: list[torch.Tensor], pp: DeviceMesh) -> torch.Tensor:
    """torchtitan's clip_grad_norm_ with a pipeline, for DTensors beside tensors."""
    norms = [torch.linalg.vector_norm(leaf.grad) for leaf in params]
    norms = [norm.full_tensor() if hasattr(norm, "full_tensor") else norm for norm in norms]
    norm = torch.stack(norms).square().sum()
    dist.all_reduce(norm, group=pp.get_group())
    norm **= 0.5
    for leaf in params:
        leaf.grad.mul_(float((1.0 / (norm + 1e-6)).clamp(max=1.0)))
    return norm


def trained(rank: int, size: int, family: str, shape: dict[str, int]) -> list[Any]:
    """Train with torch's schedule, then with funcpipe's: whole batches, then microbatches."""
    mesh = init_device_mesh("cpu", tuple(shape.values()), mesh_dim_names=tuple(shape))
    if "loss_kwargs" not in inspect.signature(Schedule1F1B.step).parameters:
        return []  # torch 2.11
    logs = [train(torch_parts(family, mesh), mesh, presplit=False)]
    for presplit in (False, True):
        with ExitStack() as stack:
            logs.append(train(funcpipe_parts(family, mesh, stack), mesh, presplit=presplit))
    return logs


def alone() -> list[tuple[float, ...]]:
    """Train the uncut model in this process alone, and return (loss, norm) of each step."""
    model = part_of(0, 1, None)
    optimizer, log = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    for step in range(3):
        inputs, labels, valid = batch_of(step, None)
        optimizer.zero_grad()
        loss = cross_entropy(model(inputs), labels, valid=valid)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        log.append((float(loss), float(norm)))
    return log


def sequence_parallel(rank: int, size: int, family: str) -> list[Any]:
    """Train with DTensors at the borders: alone, with funcpipe's schedule, then with torch's."""
    mesh = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("pp", "tp"))
    logs = [alone()]
    with loss_parallel():
        with ExitStack() as stack:
            logs.append(train(funcpipe_parts(family, mesh, stack, True), mesh, presplit=True))
        if "get_mesh" in inspect.signature(PipelineStage).parameters:
            logs.append(train(torch_parts(family, mesh, True), mesh, presplit=False))
    return logs


def evaluated(rank: int, size: int) -> list[str]:
    """Outputs, evaluation with and without a loss, and the attributes that trainers read."""
    mesh, wrong = init_device_mesh("cpu", (size,), mesh_dim_names=("pp",)), []
    inputs, labels, valid = batch_of(0, None)
    parts = [part_of(stage, size, None) for stage in range(size)]
    with torch.no_grad():
        want = inputs
        for part in parts:
            want = part(want)
        want_losses = [
            cross_entropy(y, target, valid=valid)
            for y, target in zip(want.chunk(MICROBATCHES), labels.chunk(MICROBATCHES), strict=True)
        ]
    with ExitStack() as stack:
        schedule, *_, has_first, has_last, _ = funcpipe_parts("1f1b", mesh, stack)
        args, target = (inputs,) if has_first else (), labels if has_last else None
        losses: list[Any] = ["old"]
        outputs = [
            schedule.eval(*args, target=target, losses=losses, loss_kwargs={"valid": valid}),
            schedule.eval(*args, compute_loss=False, losses=(unset := ["old"])),
            schedule.step(*args, target=target, loss_kwargs={"valid": valid}),
        ]
        wrong += [] if unset == [] else ["losses without a loss"]
        torch.testing.assert_close(losses, want_losses)
        for number, y in enumerate(outputs):
            if has_last:
                torch.testing.assert_close(y, want)
            elif y is not None:
                wrong.append(f"outputs {number} on rank {rank}")
        read = (schedule.n_microbatches, schedule._n_microbatches, schedule._num_stages)
        wrong += [] if read == (MICROBATCHES, MICROBATCHES, size) else [f"{read}"]
        wrong += [] if [stage.name for stage in schedule._stages] == [f"part{rank}"] else ["stages"]
        wrong += [] if schedule.loss_fn is cross_entropy and schedule._has_backward else ["loss_fn"]
    return wrong


def misused(rank: int, size: int) -> list[str]:
    """The messages of wrong calls, one per call. All ranks make the same wrong calls."""
    mesh, texts = init_device_mesh("cpu", (size,), mesh_dim_names=("pp",)), []
    inputs, labels, _ = batch_of(0, None)
    cut = [(each,) for each in inputs.chunk(MICROBATCHES)]
    calls = [
        lambda schedule: schedule.step(inputs, arg_mbs=cut, target=labels),
        lambda schedule: schedule.step(arg_mbs=cut[1:], target_mbs=[*labels.chunk(MICROBATCHES)]),
        lambda schedule: schedule.step(arg_mbs=inputs),
        lambda schedule: schedule.step(
            arg_mbs=cut, kwarg_mbs=[{"mask": 1}, *[{}] * (MICROBATCHES - 1)]
        ),
        lambda schedule: schedule.step(inputs, target=labels, return_outputs=rank == 0),
    ]
    for call in calls:
        with ExitStack() as stack:
            schedule = funcpipe_parts("1f1b", mesh, stack).schedule
            try:
                call(schedule)
                texts.append("no error")
            except fp.FuncpipeError as error:
                texts.append(str(error))
    with ExitStack() as stack, torch.no_grad():
        try:
            funcpipe_parts("1f1b", mesh, stack).schedule.step(inputs, target=labels)
        except fp.FuncpipeError as error:
            texts.append(str(error))
    return texts
