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
from funcpipe._src.models.split import split
from funcpipe._src.stages.bound import Bound, StageArgs, StageOut
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

_PROGRESS_SECONDS = 0.1  # seconds between two updates of the progress of other threads


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
        layers = split(
            layers, policy=lambda units, _: [1] * len(units), example=example, check=False
        )
    example = unmarked(example)
    feeds = {name: unmarked(tree) for name, tree in (feeds or {}).items()}
    _check_counts(repeats, warmup, threads_per_lane, lanes)
    row = layers_of(layers, params, state, feeds)
    _check_numbers(row, example, feeds)
    flags = trainable_leaves([layer.params for layer in row], trainable if train else False)
    where = known_device(device)
    _check_lanes(lanes, row, where)
    sweep = _Sweep(row, flags, where, train=train, seed=seed)
    threads, available = threads_per_lane or torch.get_num_threads(), cores()
    context = CallerContext()
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
            held = memory(
                layers,
                example,
                params=params,
                state=state,
                feeds=feeds,
                trainable=trainable,
                train=train,
                device=device,
            )
            kept = [
                found.kept(layer.activations, layer.weight_residual)
                for found, layer in zip(times, held, strict=True)
            ]
            columns = zip(*kept, strict=True)
            residuals = dict(zip(("residual", "weight_residual"), columns, strict=True))
    forward, whole, inputs, weights, *_ = (tuple(column) for column in zip(*times, strict=True))
    return Cost(forward, inputs, weights, backward=whole, comm=comm, **residuals)


class _Times(NamedTuple):
    """The measurements of one layer."""

    # `forward`, `whole`, `inputs`, `weights`: seconds of F, B, I and W.
    forward: float
    whole: float
    inputs: float
    weights: float
    # Bytes that a compiled stage keeps between F and its backward. None: autograd keeps the
    # residual.
    program: int | None = None
    left: int | None = None  # bytes that programs keep between I and W. None: nothing waits for W

    def kept(self, activations: int, weight_residual: int) -> tuple[int, int]:
        """Bytes between F and its backward, and between I and W. The arguments are the bytes
        under autograd."""
        if self.program is not None:
            return self.program, self.left or 0
        return activations, 0 if self.left is None else weight_residual


def _medians(times: Sequence[_Times]) -> _Times:
    forward, whole, inputs, weights = (
        median(column) for column in zip(*(sweep[:4] for sweep in times), strict=True)
    )
    return times[0]._replace(forward=forward, whole=whole, inputs=inputs, weights=weights)


class _Sweep:
    """One pass over all layers, each called as a run would call it."""

    def __init__(
        self,
        layers: Sequence[Layer],
        flags: Sequence[Sequence[bool]],
        device: torch.device,
        *,
        train: bool,
        seed: int,
    ) -> None:
        self.layers, self.flags, self.device, self.train = layers, flags, device, train
        self.keys = Keys(seed, [layer.stage for layer in layers])
        # Stages are not thread-safe: no stage may run on two threads at once.
        self.turns = {id(layer.stage): threading.Lock() for layer in layers}
        self.told = Teller()
        self.done = 0  # the number of layers that all threads have measured
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
        """Return the times of a layer, and its output. Adds its stash to the skips."""
        bound = self._bound(number, args)
        forward, out = self._time(lambda: bound.forward(args, keep=self.train))
        skips |= out.stash
        whole = self._backward(bound, out)[0] if self.train else 0.0
        bound.release()
        times = _Times(forward, whole, inputs=whole, weights=0.0)
        return self._with_halves(times, number, args) if self.train else times, out.y

    def _with_halves(self, times: _Times, number: int, args: StageArgs) -> _Times:
        """Measure I and W of a layer, too. Unchanged times: I is the whole backward."""
        bound = self._bound(number, args)
        out = bound.forward(args, keep=True)
        program = None if isinstance(out.residual, EagerResidual) else out.residual.nbytes
        inputs, residual = self._backward(bound, out, split=True)
        if residual is not None:
            left = residual.nbytes  # before W, which frees it
            weights, _ = self._time(lambda: bound.backward_weight(residual))
            times = times._replace(inputs=inputs, weights=weights, program=program, left=left)
        bound.release()
        return times

    def _backward(self, bound: Bound, out: StageOut, *, split: bool = False) -> tuple[float, Any]:
        """Time B, or with ``split`` I. Returns the seconds, and the residual of W or None."""
        y, stash = _ones(out.y), {name: [_ones(border)] for name, border in out.stash.items()}
        seconds, (_, residual) = self._time(
            lambda: bound.backward(out.residual, y, stash, split=split)
        )
        return seconds, residual

    def _bound(self, number: int, args: StageArgs) -> Bound:
        """Bind the stage of a layer, and do its work that happens once per run."""
        layer = self.layers[number]
        program: Callable[..., Bound] = layer.stage.program or EagerBound
        bound = program(
            layer.stage,
            number,
            self._on_device(layer.params),
            self._on_device(layer.state),
            trainable=self.flags[number],
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

    def _time(self, call: Callable[[], Any]) -> tuple[float, Any]:
        """Return the seconds of a call until the device is done, and its result."""
        synchronize = partial(torch.get_device_module(self.device).synchronize, self.device)
        synchronize()
        began = perf_counter()
        result = call()
        synchronize()
        return perf_counter() - began, result

    def _on_device(self, tree: Tree) -> Tree:
        return map_tensors(lambda tensor: tensor.detach().to(self.device), tree)


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
