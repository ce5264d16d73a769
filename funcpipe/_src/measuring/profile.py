"""Measure the times of layers as a `Cost`, for simulations and for `balance`.

`profile_plan` measures a whole plan instead.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from contextvars import copy_context
from functools import partial
from itertools import count
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from funcpipe._src.core.border import Border, given
from funcpipe._src.core.errors import PlanError
from funcpipe._src.core.progress import ProgressTo, Teller, telling
from funcpipe._src.core.tree import Tree, flatten, leaves, locations, map_tensors
from funcpipe._src.data.cost import Cost
from funcpipe._src.engine.switches import SwitchWatch
from funcpipe._src.measuring.memory import memory
from funcpipe._src.measuring.row import Layer, blame, known_device, layers_of, refuse_counts
from funcpipe._src.models.example import unmarked
from funcpipe._src.models.policy import Units
from funcpipe._src.models.split import split
from funcpipe._src.stages.bound import Bound, Program, StageArgs
from funcpipe._src.stages.context import (
    CallerContext,
    cores,
    intra_op_threads,
    pin,
    refuse_transforms,
)
from funcpipe._src.stages.eager import EagerBound
from funcpipe._src.stages.residual import EagerResidual
from funcpipe._src.stages.rng import Keys
from funcpipe._src.stages.trainable import Trainable, trainable_leaves

_PROGRESS_SECONDS = 0.1
"""Seconds between two updates of the progress of other threads."""


def profile(
    layers: Any,
    example: Tree,
    *,
    params: Sequence[Tree] | None = None,
    state: Sequence[Tree] | None = None,
    feeds: Mapping[str, Tree] | None = None,
    trainable: Trainable = None,
    train: bool = True,
    device: Any = "cpu",
    repeats: int = 5,
    warmup: int = 2,
    threads_per_lane: int | None = None,
    lanes: int = 1,
    seed: int = 0,
    comm: float = 0.0,
    measure_memory: bool = True,
    progress: ProgressTo = False,
) -> Cost:
    """Measure F, B, I and W of each layer, in seconds, and its residuals, in bytes.

    The layers run one after the other as in a run, each on the output of the previous layer. The
    times are medians. The measurement uses copies: the module, its gradients, mode and buffers, the
    example and the random generators do not change.

    B is the whole backward; I and W are its halves. I and W together may take longer than B. If
    nothing in an eager stage waits for W, the time of I is the time of B. For compiled stages,
    residuals are the memory that their programs keep. For eager stages, `memory` computes the
    residuals.

    >>> cost = fp.models.profile(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2)), torch.zeros(4, 8))
    >>> len(cost.forward), cost.backward_weight[1], cost.residual
    (3, 0.0, (128, 128, 0))

    Args:
        layers: an ``nn.Sequential`` (its children are the layers, as for `balance` and
            ``split(balance=)``), a list of modules, a split, or stages. Another module is traced,
            and its units are measured, as ``split(model, balance=, example=)`` counts them.
        example: the input of one microbatch; for a traced module as in `split`. Marks
            (`Replicate`, `Axis`) in ``example`` and ``feeds`` are removed.
        params, state: for stages: one tree per stage.
        feeds: values by name, for stages that declare feeds.
        trainable: as in `run`. None: leaves with requires_grad, or all floating leaves if no leaf
            has it.
        train: the mode. False: only forwards run, and the other times are 0.
        device: where to measure. Parameters on another device are copied layer by layer, so the
            model need not fit on the device.
        repeats: the number of measured sweeps over all layers.
        warmup: the number of sweeps before the measured sweeps.
        threads_per_lane: intra-op threads; give the number that a lane of the run will have. None:
            torch's number.
        lanes: the number of CPU lanes that compute at the same time; give the number of the run.
            Each lane is a thread with its share of the cores, at another layer. Lanes share caches
            and memory bandwidth, so several lanes take longer than one.
        seed: the seed of the random draws of layers.
        comm: the seconds of one hop between devices. The value goes into the cost; it is not
            measured.
        measure_memory: True: also compute residuals. For a layer, the residual is what it adds to a
            stage; for a stage, it is the whole residual. False: the residuals of ``Cost()``.
        progress: True shows on stderr how many layers of all sweeps are done. A function gets a
            `CallProgress` instead; with one lane, between two measurements.

    Returns:
        A `Cost` with one number per layer.

    Raises:
        PlanError: wrong layers, numbers or counts.
        PlacementError: the device does not exist.
        StageError: a layer failed. The message names the layer and its input.
    """
    refuse_transforms("profile")
    if isinstance(layers, Tensor):
        raise PlanError(
            "profile takes the layers first, profile(layers, example); got a tensor as layers"
        )
    if isinstance(layers, nn.Module) and not isinstance(layers, nn.Sequential):
        layers = split(layers, policy=_each_unit, example=example, check=False)
    example, feeds = (
        unmarked(example),
        {name: unmarked(tree) for name, tree in (feeds or {}).items()},
    )
    _check_counts(repeats, warmup, threads_per_lane, lanes)
    row = layers_of(layers, params, state, feeds)
    _check_numbers(row, example, feeds)
    flags = trainable_leaves([layer.params for layer in row], trainable if train else False)
    clock = _Clock(known_device(device))
    _check_lanes(lanes, row, clock.device)
    sweep = _Sweep(row, flags, clock, train=train, seed=seed)
    context, threads, available = (
        CallerContext(),
        threads_per_lane or torch.get_num_threads(),
        cores(),
    )
    total = lanes * (warmup + repeats) * len(row)

    def sweep_often(lane: int) -> list[list[_Times]]:
        if lanes > 1:
            pin([lane], lanes, available)
        with (
            context.computing(),
            intra_op_threads(threads),
            torch.inference_mode(False),
            SwitchWatch(alone=lanes == 1),
        ):
            return [sweep.run(example, feeds) for _ in range(warmup + repeats)][warmup:]

    with telling("profile", progress, unit="layers", total=total) as told:
        told.phase("times")
        if lanes == 1:
            sweep.told = told
            sweeps = sweep_often(0)
        else:
            with intra_op_threads(threads), ThreadPoolExecutor(lanes) as pool, sweep.ended():
                jobs = [pool.submit(copy_context().run, sweep_often, lane) for lane in range(lanes)]
                while told.on and wait(jobs, timeout=_PROGRESS_SECONDS).not_done:
                    told.to(sweep.done)
                sweeps = [times for job in jobs for times in job.result()]
            told.to(sweep.done)
        times = [_medians(column) for column in zip(*sweeps, strict=True)]
        residuals: dict[str, Any] = {}
        if measure_memory:
            told.phase("memory")
            args: dict[str, Any] = {
                "params": params,
                "state": state,
                "feeds": feeds,
                "trainable": trainable,
            }
            held = memory(layers, example, train=train, device=device, **args)
            kept = [
                found.kept(layer.activations, layer.weight_residual)
                for found, layer in zip(times, held, strict=True)
            ]
            residuals = {
                "residual": tuple(a for a, _ in kept),
                "weight_residual": tuple(b for _, b in kept),
            }
    forward, whole, inputs, weights, *_ = (tuple(column) for column in zip(*times, strict=True))
    return Cost(forward, inputs, weights, backward=whole, comm=comm, **residuals)


def _each_unit(units: Units, num_stages: int | None) -> Sequence[int]:
    """Make a stage of each unit, to measure it."""
    return [1] * len(units)


class _Times(NamedTuple):
    """The measurements of one layer.

    Attributes:
        forward, whole, inputs, weights: seconds of F, B, I and W.
        program: bytes that a compiled stage keeps between F and its backward. None: autograd keeps
            the residual.
        left: bytes that programs keep between I and W. None: nothing waits for W.
    """

    forward: float
    whole: float
    inputs: float
    weights: float
    program: int | None = None
    left: int | None = None

    def kept(self, activations: int, weight_residual: int) -> tuple[int, int]:
        """Bytes between F and its backward, and between I and W. The arguments are the bytes
        under autograd."""
        if self.program is not None:
            return self.program, self.left or 0
        return activations, 0 if self.left is None else weight_residual


def _medians(times: Sequence[_Times]) -> _Times:
    """The medians of several measurements of one layer."""
    forward, whole, inputs, weights = (
        median(column) for column in zip(*(sweep[:4] for sweep in times), strict=True)
    )
    return times[0]._replace(forward=forward, whole=whole, inputs=inputs, weights=weights)


class _Clock:
    """Times calls on a device, and waits until the device is done."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.wait = partial(torch.get_device_module(device).synchronize, device)

    def time(self, call: Callable[[], Any]) -> tuple[float, Any]:
        """Return the seconds of a call, and its result."""
        self.wait()
        began = perf_counter()
        result = call()
        self.wait()
        return perf_counter() - began, result


class _Sweep:
    """One pass over all layers, each called as a run would call it."""

    def __init__(
        self,
        layers: Sequence[Layer],
        flags: Sequence[Sequence[bool]],
        clock: _Clock,
        *,
        train: bool,
        seed: int,
    ) -> None:
        self.layers, self.flags, self.clock, self.train = layers, flags, clock, train
        self.keys = Keys(seed, [layer.stage for layer in layers])
        # Stages are not thread-safe: no stage may run on two threads at once.
        self.turns = {id(layer.stage): threading.Lock() for layer in layers}
        self.told = Teller()
        self.done = 0
        """The number of layers that all threads have measured."""
        self._count, self._stopped = count(1), False

    @contextmanager
    def ended(self) -> Generator[None]:
        """If an error leaves this block, the threads stop at their next layer."""
        try:
            yield
        except BaseException:
            self._stopped = True
            raise

    def run(self, example: Tree, feeds: Mapping[str, Tree]) -> list[_Times]:
        """Return the times of all layers."""
        x = given(self._on_device(example))
        fed = {name: given(self._on_device(tree)) for name, tree in feeds.items()}
        skips: dict[str, Border] = {}
        times: list[_Times] = []
        for number, layer in enumerate(self.layers):
            stage = layer.stage
            args = StageArgs(
                x, [skips[name] for name in stage.pop], [fed[name] for name in stage.feeds], None, 0
            )
            try:
                with self.turns[id(stage)]:
                    layer_times, x = self._layer(number, args, skips)
            except Exception as error:
                blame(error, number, layer, "profile", args.x.tree())
            times.append(layer_times)
            self.done = next(self._count)
            self.told.to(self.done)
            if self._stopped:
                break  # another thread failed, so the times are of no use
        return times

    def _layer(
        self, number: int, args: StageArgs, skips: dict[str, Border]
    ) -> tuple[_Times, Border]:
        flags = self.flags[number]
        forward, whole, y, stash = self._calls(number, args, flags)
        skips |= stash
        halves = self._halves(number, args, flags) if self.train else None
        return _Times(forward, whole, *(halves or (whole, 0.0, None, None))), y

    def _halves(
        self, number: int, args: StageArgs, flags: Sequence[bool]
    ) -> tuple[float, float, int | None, int] | None:
        """Return I, W and their bytes as in `_Times`. None: I is the whole backward."""
        bound = self._bound(number, args, flags)
        out = bound.forward(args, keep=True)
        stash = {name: [_ones(border)] for name, border in out.stash.items()}
        program = None if isinstance(out.residual, EagerResidual) else out.residual.nbytes
        inputs, (_, weight_residual) = self.clock.time(
            lambda: bound.backward(out.residual, _ones(out.y), stash, split=True)
        )
        left = (
            None if weight_residual is None else weight_residual.nbytes
        )  # before W, which frees it
        weights, _ = self.clock.time(lambda: bound.backward_weight(weight_residual))
        bound.release()
        return None if left is None else (inputs, weights, program, left)

    def _bound(self, number: int, args: StageArgs, flags: Sequence[bool]) -> Bound:
        """Bind the stage of a layer, and do its work that happens once per run."""
        layer = self.layers[number]
        params, state = self._on_device(layer.params), self._on_device(layer.state)
        program: Program = layer.stage.program or EagerBound
        bound = program(
            layer.stage,
            number,
            params,
            state,
            trainable=flags,
            train=self.train,
            backwards=self.train,
            keys=self.keys,
            loss=None,
            shares=None,
        )
        bound.params.grads()  # fill the gradient sums with zeros here, outside of the measured time
        if layer.stage.program is not None:  # values computed from parameters alone, once per run
            bound.forward(args, keep=self.train)
        return bound

    def _calls(
        self, number: int, args: StageArgs, flags: Sequence[bool]
    ) -> tuple[float, float, Border, dict[str, Border]]:
        """Return the times of F and B of a layer, and the output and stash of F."""
        bound = self._bound(number, args, flags)
        forward, out = self.clock.time(lambda: bound.forward(args, keep=self.train))
        whole = 0.0
        if self.train:
            stash = {name: [_ones(border)] for name, border in out.stash.items()}
            y = _ones(out.y)
            whole, _ = self.clock.time(lambda: bound.backward(out.residual, y, stash))
        bound.release()
        return forward, whole, out.y, out.stash

    def _on_device(self, tree: Tree) -> Tree:
        return map_tensors(lambda tensor: tensor.detach().to(self.clock.device), tree)


def _ones(border: Border) -> list[Tensor | None]:
    """Gradients of ones for the leaves that take a gradient; None for the others."""
    return [
        torch.ones_like(leaf) if flag else None
        for leaf, flag in zip(border.leaves, border.flags, strict=True)
    ]


def _check_counts(repeats: Any, warmup: Any, threads: Any, lanes: Any) -> None:
    refuse_counts(
        ("repeats", repeats, 1),
        ("warmup", warmup, 0),
        ("lanes", lanes, 1),
        ("threads_per_lane", 1 if threads is None else threads, 1),
    )
    if threads is not None and threads > len(cores()):
        raise PlanError(f"threads_per_lane is {threads}, but there are {len(cores())} cores")


def _check_lanes(lanes: int, row: Sequence[Layer], device: torch.device) -> None:
    stages = len({id(layer.stage) for layer in row})
    if lanes > stages:
        raise PlanError(
            f"lanes is {lanes}, but there are {stages} layers, and two lanes cannot run the same "
            f"layer; give lanes={stages} or fewer, or more layers"
        )
    if lanes > 1 and device.type != "cpu":
        raise PlanError(
            f"lanes={lanes} is for lanes that share the CPU; leave lanes= out on {device}"
        )


def _check_numbers(row: Sequence[Layer], example: Tree, feeds: Mapping[str, Tree]) -> None:
    """Raise PlanError where a tensor has no data to compute with."""
    trees = [("example", example), *((f"feeds[{name!r}]", tree) for name, tree in feeds.items())]
    places = [
        (place, leaf)
        for root, tree in trees
        for place, leaf in zip(locations(tree, root), flatten(tree)[0], strict=True)
    ]
    places += [
        (f"layer {layer.name!r}", leaf)
        for layer in row
        for leaf in leaves((layer.params, layer.state))
    ]
    empty = [place for place, leaf in places if isinstance(leaf, Tensor) and leaf.is_meta]
    if empty:
        raise PlanError(
            f"{empty[0]} is on the meta device, which has no numbers to measure times with; "
            "fp.models.memory(...) works on the meta device"
        )
