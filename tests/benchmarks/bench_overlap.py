"""Is the loader's time hidden? ``python tests/benchmarks/bench_overlap.py [--repeats 9] [--device
cuda:0]``.

Three stages of 20 ms of sleep, 20 batches, depth 2, against the loop and the ideal (22 times 20
ms). Then real work on digits, one intra-op thread: decoding and augmentation (rotated, scaled and
resampled to 32x32), the copy, and a step of a small convolutional network through `fp.run` on one
lane. The arms run one after the other in each repeat: the plain loop, the overlap, the overlap in
one thread, torch's DataLoader with one worker process over the same decoding, and the step alone on
batches that lie ready, which nothing can beat. Last, what the machinery costs where there is no
work.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import affine_grid, cross_entropy, grid_sample, interpolate

import funcpipe as fp

BATCHES, ROWS, SIZE = 24, 96, 32


def interleaved(arms: dict[str, Callable[[], None]], repeats: int) -> dict[str, float]:
    """The median time of each arm in seconds; in each repeat every arm runs once."""
    times: dict[str, list[float]] = {name: [] for name in arms}
    for repeat in range(repeats + 1):
        for name, arm in arms.items():
            start = time.perf_counter()
            arm()
            if repeat:
                times[name].append(time.perf_counter() - start)
    return {name: statistics.median(one) for name, one in times.items()}


def sleeps(repeats: int) -> None:
    """Three equal stages."""
    seconds, count = 0.02, 20

    def work(x: int) -> int:
        time.sleep(seconds)
        return x

    def loop() -> None:
        for x in range(count):
            work(work(work(x)))

    arms: dict[str, Callable[[], None]] = {
        "plain loop": loop,
        "overlap, three stages": lambda: (
            list(fp.batches.overlap(range(count), [work] * 3, depth=2)) and None
        ),
        "overlap, two stages and a fold": lambda: (
            list(
                fp.batches.overlap(
                    range(count),
                    [work, work, fp.batches.Fold(lambda s, x: (s, work(x)), 0)],
                    depth=2,
                )
            )
            and None
        ),
    }
    ideal = (count + 2) * seconds
    for name, found in interleaved(arms, repeats).items():
        print(f"| {name} | {found * 1e3:.0f} | {found / ideal:.2f} |")


def images() -> tuple[Tensor, Tensor]:
    """All digits, in bytes."""
    found = load_digits()
    return torch.tensor(found.images, dtype=torch.uint8).unsqueeze(1), torch.tensor(found.target)


PIXELS, LABELS = images()


def decode(index: int) -> tuple[Tensor, Tensor]:
    """A batch: bytes to numbers, a random rotation and scale for every image, resampled."""
    g = torch.Generator().manual_seed(fp.fold_in(0, index))
    rows = torch.randint(len(LABELS), (ROWS,), generator=g)
    angle = (torch.rand(ROWS, generator=g) - 0.5) * 0.6
    scale = 1 + 0.2 * (torch.rand(ROWS, generator=g) - 0.5)
    zero = torch.zeros(ROWS)
    turn = torch.stack(
        [
            torch.stack([angle.cos() * scale, -angle.sin(), zero], 1),
            torch.stack([angle.sin(), angle.cos() * scale, zero], 1),
        ],
        1,
    )
    large = interpolate(PIXELS[rows].float() / 16, size=(2 * SIZE, 2 * SIZE), mode="bicubic")
    turned = grid_sample(
        large,
        affine_grid(turn, [ROWS, 1, 2 * SIZE, 2 * SIZE], align_corners=False),
        align_corners=False,
    )
    return interpolate(turned, size=(SIZE, SIZE), mode="area"), LABELS[rows]


def network(device: str) -> tuple[fp.Plan, tuple[fp._src.core.tree.Tree, ...]]:
    """Two stages on one lane."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 24, 3, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(4),
        nn.Flatten(),
        nn.Linear(24 * 16, 10),
    )
    stages, params, _ = zip(fp.from_module(model[:3]), fp.from_module(model[3:]), strict=True)
    schedule = fp.schedules.one_f_one_b(2, 4, num_devices=1)
    plan = fp.make_plan(stages, schedule, loss=cross_entropy, devices=device)
    return plan, fp.place(plan, params)


def train(
    plan: fp.Plan, params: tuple[dict[str, Tensor], ...], batch: tuple[Tensor, Tensor]
) -> tuple[tuple[dict[str, Tensor], ...], Tensor]:
    """A step of SGD as a function."""
    result = fp.run(plan, params, batch, threads_per_lane=1)
    assert result.grads is not None
    pairs = zip(params, result.grads, strict=True)
    return tuple(
        {name: one[name].detach() - 0.05 * grads[name] for name in one} for one, grads in pairs
    ), result.loss


class Decoded(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    """The same batches for torch's loader."""

    def __len__(self) -> int:
        return BATCHES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return decode(index)


def digits(repeats: int, device: str) -> None:
    """Decoding, copy, step."""
    plan, params = network(device)
    step = partial(train, plan)
    ready = [decode(index) for index in range(BATCHES)]
    last: dict[str, Tensor] = {}

    def loop(name: str, batches: object) -> None:
        state = params
        for batch in batches:  # pyright: ignore
            state, last[name] = step(state, batch)
        float(last[name])

    def overlapped(name: str, **options: object) -> None:
        run = fp.batches.overlap(
            range(BATCHES),
            [decode, fp.batches.to_device(device), fp.batches.Fold(step, params)],
            **options,
        )  # pyright: ignore
        for loss in run:
            last[name] = loss
        float(last[name])

    loader = torch.utils.data.DataLoader(
        Decoded(), batch_size=None, num_workers=1, persistent_workers=True
    )
    arms: dict[str, Callable[[], None]] = {
        "the step alone, batches ready": lambda: loop("alone", ready),
        "plain loop": lambda: loop("plain", map(decode, range(BATCHES))),
        "overlap": lambda: overlapped("overlap"),
        "overlap in one thread": lambda: overlapped("inline", thread=False),
        "DataLoader, one worker process": lambda: loop("loader", loader),
    }
    found = interleaved(arms, repeats)
    losses = [
        float(one) for one in last.values()
    ]  # the same bits everywhere; a GPU's sums are in no fixed order
    assert max(losses) - min(losses) <= (0 if device == "cpu" else 1e-2), last
    alone, plain = found["the step alone, batches ready"], found["plain loop"]
    for name, one in found.items():
        hidden = (plain - one) / (plain - alone)
        print(f"| {name} | {one / BATCHES * 1e3:.1f} | {one / plain:.2f} | {hidden:.0%} |")


def overhead(repeats: int) -> None:
    """Batches without work: microseconds each."""
    count = 5000

    def same(x: int) -> int:
        return x

    arms: dict[str, Callable[[], None]] = {
        f"{stages} stages, {'threads' if thread else 'one thread'}": lambda stages=stages, thread=thread: (
            list(fp.batches.overlap(range(count), [same] * stages, thread=thread)) and None
        )
        for stages in (1, 3)
        for thread in (True, False)
    }
    for name, one in interleaved(arms, repeats).items():
        print(f"| {name} | {one / count * 1e6:.0f} |")


def main() -> None:
    """Three tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--device", default="cpu")
    given = parser.parse_args()
    torch.set_num_threads(1)
    print("| three stages of 20 ms, 20 batches | ms | of the ideal |\n|---|---:|---:|")
    sleeps(given.repeats)
    print(
        "\n| digits, 24 batches of 96 | ms a batch | of the plain loop | of the loader's time "
        "hidden |"
    )
    print("|---|---:|---:|---:|")
    digits(given.repeats, given.device)
    print("\n| no work | us a batch |\n|---|---:|")
    overhead(min(3, given.repeats))


if __name__ == "__main__":
    main()
