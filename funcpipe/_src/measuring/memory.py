"""Compute the memory of layers, and of devices under a schedule, with FakeTensor: without a GPU and
without allocation.

`profile` measures times.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from operator import attrgetter
from typing import Any

from torch import Tensor

from funcpipe._src.core.errors import PlanError
from funcpipe._src.core.notebook import page, shown
from funcpipe._src.core.shown import guarded, line
from funcpipe._src.core.table import Table
from funcpipe._src.core.tree import Tree, flatten, leaves
from funcpipe._src.core.words import size_of
from funcpipe._src.data.plan import Plan
from funcpipe._src.data.schedule import Schedule
from funcpipe._src.measuring.join import besides, join, peaks
from funcpipe._src.measuring.measured import Measured, Pass, merged
from funcpipe._src.measuring.optimizer_state import StateSize, optimizer_state
from funcpipe._src.measuring.row import Layer, known_device, layers_of
from funcpipe._src.models.balance import checked_sizes
from funcpipe._src.models.example import unmarked
from funcpipe._src.stages.trainable import Trainable, trainable_leaves


@dataclass(frozen=True)
class LayerMemory:
    """The memory of one layer, or of one stage, in bytes.

    Attributes:
        name: the layer's name; for a stage, the names of its first and last layer.
        parameters: the layer's own. Parameters that an earlier layer has too count there.
        buffers: the layer's own.
        gradients: the gradient sums of the trained parameters.
        optimizer: the state of the optimizer.
        activations: for a layer: the bytes that it adds to the residual of a stage, for one
            microbatch. For a stage: its whole residual. A residual is what autograd keeps, and the
            inputs and outputs.
        input: the inputs of one microbatch, with skips.
        output: the outputs of one microbatch, with skips.
        forward: the peak during the forward, without the input.
        backward: the peak that the backward adds while it runs, without the memory before it and
            the gradient of the output.
        weight_residual: the part of the residual that remains between I and W.
        measured: the measurements of the layer, used by `Memory.group`.
    """

    name: str
    parameters: int
    buffers: int
    gradients: int
    optimizer: int
    activations: int
    input: int
    output: int
    forward: int
    backward: int
    weight_residual: int
    measured: Measured = field(repr=False)

    @classmethod
    def of(
        cls, name: str, sizes: Sequence[int], activations: int, measured: Measured
    ) -> LayerMemory:
        """Make the entry of a layer; ``sizes`` are parameters, buffers, gradients, optimizer."""
        return cls(
            name,
            *sizes,
            activations=activations,
            input=sum(merged((measured.inputs, *measured.pops.values())).values()),
            output=sum(merged((measured.outputs, *measured.stash.values())).values()),
            forward=measured.forward,
            backward=measured.backward,
            weight_residual=measured.weights.nbytes,
            measured=measured,
        )

    @property
    def model(self) -> int:
        """The memory that does not depend on microbatches.

        It consists of parameters, buffers, gradients and optimizer state.
        """
        return sum(_model_sizes(self))


_model_sizes = attrgetter("parameters", "buffers", "gradients", "optimizer")


@dataclass(frozen=True)
class Memory:
    """The memory of a chain of layers or stages. `memory` makes it; ``print`` shows a table.

    Attributes:
        layers: a `LayerMemory` for each layer or stage.
        optimizer: the name of the optimizer whose state was counted.
        train: whether anything is kept for backwards.
    """

    layers: tuple[LayerMemory, ...]
    optimizer: str
    train: bool = True

    def __len__(self) -> int:
        return len(self.layers)

    def __iter__(self) -> Iterator[LayerMemory]:
        return iter(self.layers)

    def __getitem__(self, index: int) -> LayerMemory:
        return self.layers[index]

    @property
    def total(self) -> LayerMemory:
        """All layers as one stage."""
        return self.group([len(self)]).layers[0]

    def group(self, sizes: Sequence[int]) -> Memory:
        """Join neighbouring layers into stages, without running them again.

        Args:
            sizes: the number of layers of each stage, as `balance` returns them.

        Returns:
            A `Memory` with one entry per stage.

        Raises:
            PlanError: sizes that are not positive, or do not sum to the number of layers.
        """
        counts = checked_sizes(sizes, len(self), "layers")
        stages: list[LayerMemory] = []
        for start, end in pairwise(accumulate(counts, initial=0)):
            popped = {name for later in self.layers[end:] for name in later.measured.pops}
            stages.append(_stage(self.layers[start:end], popped, self.train))
        return Memory(tuple(stages), self.optimizer, self.train)

    def peak(self, schedule: Schedule | Plan, *, home: bool = False) -> tuple[int, ...]:
        """Return the peak memory of each device under a schedule, in bytes.

        Each entry is one stage. The computation follows the program value by value. It counts the
        model, residuals, inputs kept for remat, skips, and gradients between stages. It also counts
        gradient sums from a stage's first backward on, and the temporary memory of forwards and
        backwards. It does not count the batch, targets, the loss, workspaces of kernels, and
        allocator overhead.

        >>> made = fp.models.memory(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), torch.zeros(4, 8), optimizer="sgd")
        >>> [made.peak(family(2, 4))[0] for family in (fp.schedules.fill_drain, fp.schedules.one_f_one_b)]
        [1760, 1504]

        Args:
            schedule: a schedule or plan with as many stages as there are entries; see `group`.
            home: whether parameters are at home in host memory (``fp.place(..., home="cpu")``).
                Then a device has the parameters of a stage from ``U`` to the last use, gradient
                sums until ``G``, and no optimizer state.

        Returns:
            Bytes for each device.

        Raises:
            PlanError: the schedule has another number of stages, or slices; or ``home=True`` and a
                stage has no ``U``.
        """
        order = schedule.schedule if isinstance(schedule, Plan) else schedule
        if order.num_slices > 1:
            raise PlanError(
                f"this memory is of whole microbatches, but the schedule {order.name!r} cuts them "
                "into slices; fp.simulate(schedule, fp.Cost(residual=...)) counts the residuals of "
                "slices"
            )
        if order.num_stages != len(self):
            raise PlanError(
                f"the schedule has {order.num_stages} stages, but this memory has {len(self)} "
                "layers; join layers into stages: memory.group(sizes)"
            )
        if home and len(order.gathered_stages) < len(self):
            raise PlanError(
                f"home=True needs U for each stage, but the schedule {order.name!r} has U for "
                f"stages {sorted(order.gathered_stages)} only; use fp.schedules.gather_params(schedule, whole=1)"
            )
        moving = peaks(
            [layer.measured for layer in self.layers],
            [layer.gradients for layer in self.layers],
            order,
            [layer.parameters for layer in self.layers] if home else (),
        )
        model = [0] * order.num_devices
        for layer, device in zip(self.layers, order.device_of, strict=True):
            model[device] += layer.buffers if home else layer.model - layer.gradients
        return tuple(fixed + peak for fixed, peak in zip(model, moving, strict=True))

    def __str__(self) -> str:
        return self._table.text()

    @guarded
    def __repr__(self) -> str:
        table = self._table
        facts = zip(table.heads[1:-1], table.rows[-1][1:-1], strict=True)
        return line(
            f"Memory of {len(self)} layers", [fact for fact in facts if fact[1] != size_of(0)]
        )

    @shown
    def _repr_html_(self) -> str:
        return page(
            "Memory",
            [("of", f"{len(self)} layers, activations of one microbatch")],
            self._table.html(),
        )

    @property
    def _table(self) -> Table:
        """A row for each layer, and for several layers a row of totals."""
        heads = "parameters", "buffers", "gradients", self.optimizer, "activations", "output"
        rows = [_row(layer.name, layer) for layer in self.layers]
        if len(self) > 1:
            rows.append(_row("all", self.total))
        return Table("Layers", ("", *heads), tuple(rows))


def memory(
    layers: Any,
    example: Tree,
    *,
    params: Sequence[Tree] | None = None,
    state: Sequence[Tree] | None = None,
    feeds: Mapping[str, Tree] | None = None,
    optimizer: Any = "adamw",
    trainable: Trainable = None,
    train: bool = True,
    device: Any = "cpu",
) -> Memory:
    """Compute the memory of each layer, and the activations of one microbatch.

    The result has parameters, gradients, optimizer state and activations in bytes. Each layer runs
    forward and backward under FakeTensor. Only shapes are computed and nothing is allocated, so the
    model may be on the meta device. The module, its gradients, mode and buffers and the random
    generators do not change. Activations are the storages that remain alive after the forward, each
    counted once, without parameters.

    >>> with torch.device("meta"):
    ...     model = nn.Sequential(nn.Linear(1024, 4096), nn.ReLU(), nn.Linear(4096, 1024))
    >>> print(fp.models.memory(model, torch.empty(32, 1024, device="meta")))
         parameters  buffers  gradients     adamw  activations     output
    0      16.0 MiB      0 B   16.0 MiB  32.0 MiB    128.0 KiB  512.0 KiB
    1           0 B      0 B        0 B       0 B    512.0 KiB  512.0 KiB
    2      16.0 MiB      0 B   16.0 MiB  32.0 MiB          0 B  128.0 KiB
    all    32.0 MiB      0 B   32.0 MiB  64.0 MiB    768.0 KiB  128.0 KiB

    Args:
        layers: an ``nn.Sequential`` (its children are the layers), a list of modules, a split, or
            stages.
        example: the input of one microbatch; only its shapes matter. Marks (`Replicate`, `Axis`)
            are removed.
        params, state: for stages: one tree per stage.
        feeds: values by name, for stages that declare feeds.
        optimizer: a name (``"sgd"``, ``"momentum"``, ``"adamw"``, ``"adafactor"``, ...), a class or
            an instance of ``torch.optim``, or the bytes of state per byte of parameters. 8-bit Adam
            has 0.5; bfloat16 parameters with float32 copies and Adam have 6.
        trainable: as in `run`. None: leaves with requires_grad, or all floating leaves if no leaf
            has it.
        train: the mode. False: no parameter is trained, and nothing is kept for backwards.
        device: the device whose kernels count, because kernels keep different tensors (dropout
            masks, attention). "cuda" needs a torch that sees a CUDA device.

    Returns:
        A `Memory` with one entry per layer.

    Raises:
        PlanError: wrong layers, numbers or optimizer.
        PlacementError: the device does not exist.
        StageError: a layer failed. The message names the layer and its input.
    """
    example = unmarked(example)
    feeds = {name: unmarked(tree) for name, tree in (feeds or {}).items()}
    row = layers_of(layers, params, state, feeds)
    name, numbers = optimizer_state(optimizer)
    flags = trainable_leaves([layer.params for layer in row], trainable if train else False)
    kernels = known_device("cpu" if str(device) == "meta" else device)
    measured = Pass(train=train, device=kernels).run(row, example, feeds, flags)
    seen: set[int] = set()
    kept: set[int] = set()
    out: list[LayerMemory] = []
    for layer, layer_flags, sizes in zip(row, flags, measured, strict=True):
        seen = set() if layer.whole else seen  # stages have separate copies; layers share tensors
        counted = _numbers(layer, layer_flags, numbers, seen)
        residual = sum(sizes.held().values()) if layer.whole else besides(sizes.kept, kept)
        activations = sizes.inner + residual
        kept |= sizes.kept.keys()
        out.append(LayerMemory.of(layer.name, counted, activations if train else 0, sizes))
    return Memory(tuple(out), name if train else "no optimizer", train)


def _numbers(
    layer: Layer, flags: Sequence[bool], state: StateSize, seen: set[int]
) -> tuple[int, int, int, int]:
    """Bytes of parameters, buffers, gradients and optimizer state, for parameters that were not
    counted before."""
    parameters = gradients = optimizer = 0
    for leaf, trains in zip(flatten(layer.params)[0], flags, strict=True):
        if isinstance(leaf, Tensor) and id(leaf) not in seen:
            seen.add(id(leaf))
            parameters += leaf.nbytes
            gradients += leaf.nbytes * trains
            optimizer += int(state(tuple(leaf.shape)) * leaf.itemsize) * trains
    return parameters, sum(leaf.nbytes for leaf in leaves(layer.state)), gradients, optimizer


def _stage(row: Sequence[LayerMemory], popped: set[str], train: bool) -> LayerMemory:
    joined = join([layer.measured for layer in row], popped)
    first, last = row[0].name, row[-1].name
    sums = [sum(column) for column in zip(*map(_model_sizes, row), strict=True)]
    activations = joined.inner + sum(joined.held().values()) if train else 0
    return LayerMemory.of(first if len(row) == 1 else f"{first}-{last}", sums, activations, joined)


def _row(name: str, layer: LayerMemory) -> tuple[str, ...]:
    sizes = *_model_sizes(layer), layer.activations, layer.output
    return (name, *map(size_of, sizes))
