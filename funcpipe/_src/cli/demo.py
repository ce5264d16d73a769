"""The demo: a U-Net-like classifier on scikit-learn's digits, trained through a pipeline.

The data are 1797 real images of 8x8 pixels. The model has skips (e1, e2), batch norm and dropout,
and up to four stages on any number of lanes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, fields, replace
from io import BytesIO
from itertools import chain
from math import isnan
from time import perf_counter
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import funcpipe as fp
from funcpipe._src.cli.words import FAMILIES, unwritable
from funcpipe._src.core.errors import bullets
from funcpipe._src.core.tree import map_tensors

ROWS = 1497  # the number of training images


def option(default: Any, help: str, **keywords: Any) -> Any:
    """Return a field of `DemoOptions` with the keywords of its `argparse` argument."""
    return field(default=default, metadata={"default": default, "help": help, **keywords})


def number(default: int, help: str, **keywords: Any) -> Any:
    """Return a field of `DemoOptions` for a whole number."""
    return option(default, f"{help}; default: %(default)s", type=int, **keywords)


@dataclass(frozen=True)
class DemoOptions:
    """The options of the demo; see ``python -m funcpipe demo --help``."""

    schedule: str = option(
        "interleaved",
        f"a family; default: %(default)s; the families are {', '.join(FAMILIES)}",
        choices=list(FAMILIES),
        metavar="FAMILY",
    )
    stages: int = number(4, "the number of stages", choices=[1, 2, 4])
    devices: int = number(2, "the number of lanes")
    microbatches: int = number(8, "microbatches per batch")
    remat: Sequence[int] | None = option(
        None,
        "the stages whose residuals are recomputed; none: --remat; default: 0 1",
        type=int,
        nargs="*",
        metavar="STAGE",
    )
    processes: int = number(1, "processes that share the lanes")
    device: str = option("cpu", "torch device of all lanes; default: %(default)s")
    seed: int = number(0, "the seed of parameters, order and dropout")
    epochs: int = number(8, "passes over the images")
    batch: int = number(128, "rows per batch")
    trace: str | None = option(None, "write the last step's timeline for Perfetto", metavar="FILE")
    report: str | None = option(
        None, "write a report of the last step as an HTML page", metavar="FILE"
    )


OPTIONS: Mapping[str, Mapping[str, Any]] = {
    **{f"--{entry.name}": entry.metadata for entry in fields(DemoOptions)},
    "--distributed": {
        "action": "store_const",
        "const": 2,
        "dest": "processes",
        "default": 1,
        "help": "the same as --processes 2",
    },
}
"""The options of the demo for `argparse`."""


def block(inputs: int, outputs: int) -> nn.Sequential:
    """Make a block of convolution, batch norm, ReLU and dropout."""
    convolution = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
    return nn.Sequential(
        convolution, nn.BatchNorm2d(outputs), nn.ReLU(inplace=True), nn.Dropout(0.1)
    )


def keep(name: str) -> fp.Stage:
    """Make a stage that stashes the features for the decoder, and halves their size."""

    def fn(params: Any, x: Tensor) -> fp.Out:
        return fp.Out(F.max_pool2d(x, 2), stash={name: x})

    return fp.stage(fn, name=f"keep {name}", stash=[name])


def join(name: str) -> fp.Stage:
    """Make a stage that doubles the size of the features, and appends the encoder's features."""

    def fn(params: Any, x: Tensor, *, skips: dict[str, Tensor]) -> Tensor:
        return torch.cat([F.interpolate(x, scale_factor=2), skips[name]], 1)

    return fp.stage(fn, name=f"join {name}", pop=[name])


def network(num_stages: int) -> tuple[tuple[fp.Stage, ...], tuple[Any, ...], tuple[Any, ...]]:
    """Return the network as 1, 2 or 4 stages, with their parameters and state."""
    nothing: tuple[Any, Any] = ((), ())
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))
    parts: list[list[Any]] = [
        [fp.from_module(block(1, 32), name="down1"), (keep("e1"), *nothing)],
        [fp.from_module(block(32, 64), name="down2"), (keep("e2"), *nothing)],
        [
            fp.from_module(block(64, 128), name="bottom"),
            (join("e2"), *nothing),
            fp.from_module(block(192, 64), name="up2"),
        ],
        [
            (join("e1"), *nothing),
            fp.from_module(block(96, 32), name="up1"),
            fp.from_module(head, name="head"),
        ],
    ]
    size = len(parts) // num_stages
    groups = [list(chain(*parts[start : start + size])) for start in range(0, len(parts), size)]
    stages = tuple(fp.compose(*(stage for stage, _, _ in group)) for group in groups)
    params = tuple(tuple(weights for _, weights, _ in group) for group in groups)
    state = tuple(tuple(buffers for _, _, buffers in group) for group in groups)
    return stages, params, state


def digits(seed: int) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Load images [N, 1, 8, 8] in bytes from 0 to 16, and labels [N]: training (1497) and test
    (300)."""
    try:
        from sklearn.datasets import load_digits  # pyright: ignore[reportMissingTypeStubs]
    except ImportError as error:
        raise SystemExit(
            "the demo needs scikit-learn, which is not installed; call pip install scikit-learn"
        ) from error
    dataset: Any = load_digits()
    images = torch.tensor(dataset.images, dtype=torch.uint8).unsqueeze(1)
    labels = torch.tensor(dataset.target, dtype=torch.long)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    test, train = order[:-ROWS], order[-ROWS:]
    return (images[train], labels[train]), (images[test], labels[test])


def refuse(options: DemoOptions) -> None:
    """Raise FuncpipeError with all faults of the options, before any work."""
    counts = {
        name: getattr(options, name)
        for name in ("devices", "processes", "microbatches", "epochs", "batch")
    }
    faults = [
        f"--{name} is a whole number from 1; got {value}"
        for name, value in counts.items()
        if value < 1
    ]
    if options.processes > 1 and (options.devices % options.processes or options.device != "cpu"):
        faults.append(
            f"--processes share --devices evenly, on the CPU; got {options.processes} for "
            f"{options.devices} lanes on {options.device}"
        )
    if options.processes > 1 and options.report:
        faults.append("--report works in one process only; leave out --processes or --report")
    if options.batch > ROWS:
        faults.append(f"--batch is at most {ROWS}, the rows to train on; got {options.batch}")
    if options.microbatches > options.batch > 0:
        faults.append(
            f"--microbatches is at most --batch; got {options.microbatches} for {options.batch} "
            "rows"
        )
    wrong = [stage for stage in options.remat or () if not 0 <= stage < options.stages]
    if wrong:
        faults.append(
            f"--remat names stages 0 to {options.stages - 1}; got {' '.join(map(str, wrong))}"
        )
    if not 0 <= options.seed < 2**63:
        faults.append(f"--seed is a whole number from 0 to 2**63 - 1; got {options.seed}")
    for name, file in (("trace", options.trace), ("report", options.report)):
        reason = None if file is None else unwritable(file)
        faults += [f"--{name} {reason}"] if reason else []
    try:
        torch.empty(0, device=options.device)
    # No such device type, or torch was built without it.
    except (RuntimeError, AssertionError) as error:
        faults.append(f"--device {options.device}: {str(error).splitlines()[0]}")
    if faults:
        raise fp.FuncpipeError(
            faults[0] if len(faults) == 1 else bullets("the demo cannot run:", faults)
        )


def main(options: DemoOptions) -> float:
    """Train, test, draw, and compare with the oracle. Return the accuracy on the test images."""
    refuse(options)
    plan, params, _ = setup(options)
    print(
        f"{ROWS} images, {sum(p.numel() for p in fp.leaves(params))} parameters, {plan.schedule!r}"
    )
    learned = learn_in_processes(options) if options.processes > 1 else learn(options)
    params, state, batch, seed = learned.before
    expected = fp.run_sequential(plan, params, batch, state=state, seed=seed)
    verdict = proof(expected, learned)
    print(
        f"test accuracy {learned.accuracy:.2%} on {learned.tested} images, trained for "
        f"{learned.seconds:.1f} s\n"
    )
    print(fp.draw(learned.timeline))
    print("\n" + verdict)
    if options.trace:
        learned.timeline.to_chrome_trace(options.trace)
        print(f"\ntrace for Perfetto written to {options.trace}")
    if options.report and learned.report:
        learned.report.save(options.report)
        print(f"\nreport of the last step written to {options.report}")
    return learned.accuracy


def setup(options: DemoOptions) -> tuple[fp.Plan, tuple[Any, ...], tuple[Any, ...]]:
    """Return the plan, and params and state of all stages; equal in all processes."""
    schedule = FAMILIES[options.schedule](
        options.stages, options.microbatches, num_devices=options.devices
    )
    remat_stages = (0, 1) if options.remat is None else options.remat
    if remat_stages:
        schedule = fp.schedules.remat(
            schedule, keep=lambda action: action.stage not in remat_stages
        )
    torch.manual_seed(options.seed)
    stages, params, state = network(options.stages)
    return (
        fp.make_plan(stages, schedule, devices=options.device, loss=F.cross_entropy),
        params,
        state,
    )


@dataclass(frozen=True)
class Learned:
    """The result of a training."""

    # Params, state, batch and seed of the last step, before the step.
    before: tuple[tuple[Any, ...], tuple[Any, ...], Any, int]
    # `loss`, `grads`: the results of the last step.
    loss: Tensor
    grads: tuple[Any, ...]
    timeline: fp.Timeline  # the timeline of the last step, with all lanes
    accuracy: float  # the accuracy on the test images; nan if another process has the outputs
    tested: int  # the number of test images
    seconds: float  # the duration of the training
    report: fp.typing.Report | None = None  # the report of the last step, if it was requested


def learn(options: DemoOptions, ranks: fp.typing.Ranks | None = None) -> Learned:
    """Train and test, in this process or in one of several."""
    plan, params, state = setup(options)
    params, state = fp.place(plan, params, ranks), fp.place(plan, state, ranks)
    optimizer = torch.optim.AdamW(fp.leaves(params), lr=4e-3, weight_decay=0.05)
    (images, labels), test = digits(options.seed)
    steps = options.epochs * (len(labels) // options.batch)
    rate = torch.optim.lr_scheduler.OneCycleLR(optimizer, 8e-3, total_steps=steps)

    def load(rows: Tensor) -> tuple[Tensor, Tensor]:
        return images[rows], labels[rows]

    # While a step trains, the next batch is prepared: images move to the first lane's device, and
    # labels to the last lane's.
    move = fp.batches.to_device((options.device, options.device))
    loader = fp.batches.overlap(batches(len(labels), options), [load, decode, move])
    lanes = (
        fp.lanes(plan)
        if ranks is None and options.device == "cpu" and options.devices > 1
        else nullcontext(ranks)
    )
    last: Any = None
    result: Any = None
    start = perf_counter()
    with loader, lanes as executor:
        for step, batch in enumerate(loader):
            seed, is_last = fp.fold_in(options.seed, step), step == steps - 1
            if is_last:  # copies, because the step changes the params in place
                last = map_tensors(_copy, params), state, batch, seed
            result = fp.run(
                plan, params, batch, state=state, seed=seed, record=is_last, executor=executor
            )
            fp.step(optimizer, params, result, max_norm=1.0)
            rate.step()
            state = result.state
            if (ranks is None or ranks.rank == 0) and (is_last or step % max(1, steps // 10) == 0):
                print(f"step {step + 1} of {steps}, loss {float(result.loss):.4f}")
        seconds = perf_counter() - start
        timeline = result.timeline if ranks is None else ranks.timeline(result)
        accuracy = evaluate(plan, params, state, test, ranks)
    report = (
        fp.report(plan, result, params=params, title="digits")
        if options.report and ranks is None
        else None
    )
    return Learned(
        last, result.loss, result.grads, timeline, accuracy, len(test[1]), seconds, report
    )


def _copy(leaf: Tensor) -> Tensor:
    return leaf.detach().clone().requires_grad_(leaf.requires_grad)


def learn_in_processes(options: DemoOptions) -> Learned:
    """Train in several processes, each with some lanes and their stages, and join the results."""
    import multiprocessing

    import torch.distributed as dist

    store: Any = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # pyright: ignore
    context = multiprocessing.get_context("spawn")
    pipes = [context.Pipe(duplex=False) for _ in range(options.processes)]
    processes = [
        context.Process(target=learn_as_rank, args=(rank, options, store.port, pipe), daemon=True)
        for rank, (_, pipe) in enumerate(pipes)
    ]
    for process, (_, pipe) in zip(processes, pipes, strict=True):
        process.start()
        # The child has its own end. With this one closed, reading ends when the child ends.
        pipe.close()
    try:
        learned: list[Learned] = [
            torch.load(BytesIO(pipe.recv()), weights_only=False) for pipe, _ in pipes
        ]
    except EOFError:
        raise SystemExit(
            "a process of the demo has ended early; its output above says why"
        ) from None
    for process in processes:
        process.join()

    def whole(trees: Iterable[tuple[Any, ...]]) -> tuple[Any, ...]:
        """Return, for each stage, the tree of the process that has it."""
        rows = zip(*trees, strict=True)
        return tuple([next((tree for tree in row if tree is not None), ()) for row in rows])

    params, state, *_ = zip(*(each.before for each in learned), strict=True)
    return replace(
        learned[-1],
        before=(whole(params), whole(state), *learned[-1].before[2:]),
        grads=whole(each.grads for each in learned),
        accuracy=next(each.accuracy for each in learned if not isnan(each.accuracy)),
    )


def learn_as_rank(rank: int, options: DemoOptions, port: int, pipe: Any) -> None:
    """Train as one of several processes, and send the result."""
    import torch.distributed as dist

    torch.set_num_threads(max(1, torch.get_num_threads() // options.processes))
    store: Any = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)  # pyright: ignore
    dist.init_process_group("gloo", store=store, rank=rank, world_size=options.processes)
    with fp.ranks(setup(options)[0]) as ranks:
        learned = learn(options, ranks)
    written = BytesIO()
    torch.save(learned, written)
    pipe.send(written.getvalue())
    dist.destroy_process_group()


def batches(count: int, options: DemoOptions) -> Iterator[Tensor]:
    """Yield the row indices of each step, shuffled in each epoch, without incomplete batches."""
    generator = torch.Generator().manual_seed(options.seed)
    for _ in range(options.epochs):
        order = torch.randperm(count, generator=generator)
        yield from order[: count - count % options.batch].split(options.batch)


def decode(batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Convert images in bytes from 0 to 16 to numbers from 0 to 1."""
    images, labels = batch
    return images.float() / 16, labels


def evaluate(
    plan: fp.Plan,
    params: tuple[Any, ...],
    state: tuple[Any, ...],
    test: tuple[Tensor, Tensor],
    ranks: fp.typing.Ranks | None = None,
) -> float:
    """Return the share of correctly classified test images; nan in processes without outputs.

    Runs the forwards of the plan's schedule.
    """
    images, labels = decode(test)
    forwards = fp.make_plan(plan.stages, plan.schedule.forwards(), devices=plan.devices)
    result = fp.run(forwards, params, images, state=state, executor=ranks)
    if result.outputs is None:
        return float("nan")
    return float((result.outputs.argmax(-1).cpu() == labels).float().mean())


def proof(expected: fp.Result, result: Learned) -> str:
    """Check that loss and gradients are bit-identical to a plain loop over the same stages."""
    pairs = list(zip(fp.leaves(expected.grads), fp.leaves(result.grads), strict=True))
    same = [torch.equal(a, b) for a, b in pairs]
    if not (all(same) and torch.equal(expected.loss, result.loss)):
        raise SystemExit(
            f"DIFFERENT: {same.count(False)} of {len(same)} gradients differ from the sequential "
            "oracle"
        )
    return (
        f"checked: loss {float(result.loss):.6f} and all {len(pairs)} gradients of the last batch "
        "are bit-identical to the sequential oracle"
    )
