"""Run an nn.Sequential as a pipeline within plain autograd: `Pipe`.

`layout` chooses stages and devices, `stages` makes the stages, `border` connects to the caller's
autograd graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from operator import attrgetter, index
from typing import Any, overload

import torch
from torch import Tensor, nn

from funcpipe._src.batch import microbatch
from funcpipe._src.batch.marks import Microbatches
from funcpipe._src.core.errors import BatchError, PlacementError, PlanError, raise_all
from funcpipe._src.core.torch_names import (
    Anchored,
    buffers_of,
    children_of,
    device_asked,
    hooks_of,
    parameters_of,
)
from funcpipe._src.core.tree import Tree, map_leaves
from funcpipe._src.data.stage import Stage
from funcpipe._src.devices.devices import same_device
from funcpipe._src.engine.run import run
from funcpipe._src.engine.vjp import vjp
from funcpipe._src.lower.plan import make_plan
from funcpipe._src.models.example import bare
from funcpipe._src.models.sequential import PipeSequential, is_row
from funcpipe._src.models.unfit import unfit
from funcpipe._src.pipe.border import (
    attach,
    count_microbatches,
    input_flags,
    input_leaves,
    tensors_of,
    without_saved_tensor_hooks,
)
from funcpipe._src.pipe.layout import lay_out
from funcpipe._src.pipe.stages import CHECKPOINTS, ModuleSnapshot, Stages
from funcpipe._src.schedules.families import fill_drain
from funcpipe._src.stages.context import RUNNING, refuse_transforms

_KEPT = 4
"""The number of patterns of training flags whose stages are kept: train, eval, and some layers
frozen."""

_DENIED = (
    "a Pipe cannot be moved, because each layer stays on the device of its stage; choose the "
    "devices when you make the Pipe: fp.Pipe(sequential, devices=[...]); dtypes may be changed: "
    ".to(dtype), .half()"
)


class MoveError(PlacementError, TypeError):
    """Raised if you move a `Pipe` to another device."""


class Pipe(Anchored):
    """A Sequential that runs as a pipeline: microbatches go through stages, one per device.

    A stage runs on its own device or CPU lane. Pipe replaces torchgpipe's ``GPipe``. The output is
    part of your autograd graph, so you call ``loss.backward()`` and ``optimizer.step()`` as usual.
    The Pipe contains the Sequential's own layers, so ``state_dict`` and ``parameters`` are the
    Sequential's. The plan inside runs all forwards, then all backwards (`fill_drain`), with
    `remat`; `vjp` runs it.

    >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> pipe = fp.Pipe(model, chunks=3, balance=[2, 1], devices=["cpu", "cpu"])
    >>> x = torch.randn(10, 4)
    >>> torch.allclose(pipe(x), model(x), atol=1e-6), list(pipe.state_dict()) == list(model.state_dict())
    (True, True)
    >>> pipe(x).square().mean().backward()
    >>> model[0].weight.grad.shape
    torch.Size([8, 4])

    Inputs. ``pipe(*inputs)`` computes ``sequential(*inputs)``. Inputs, values between layers, and
    outputs can be any trees: tensors, tuples, dicts. A `PipeSequential` takes several inputs.
    Inputs are cut along axis 0 into at most ``chunks`` microbatches; `Replicate`, `Axis` and
    `Microbatches` change the cut. In evaluation mode, or without gradients, nothing is recomputed.

    Random numbers. A model that draws takes one seed per call from torch's CPU generator. All draws
    have keys under this seed.

    Changes. Running statistics of batch norm are written into the layers after the forwards. A call
    that raises changes nothing. You can freeze, change, replace and hook layers between calls. Each
    call compares their attributes, nested ones too, and makes the stages again after a change.

    Limits. A backward runs once and has no graph: ``retain_graph=True`` does not allow a second
    backward, and ``create_graph=True`` raises FuncpipeError. Inside a stage of another run, a Pipe
    is the plain Sequential.

    Args:
        sequential: the layers. They move in place to the devices of their stages; parameters remain
            the same objects.
        chunks: the largest number of microbatches. A batch with fewer rows has fewer.
        checkpoint: which microbatches are recomputed in the backwards instead of kept: "always"
            all, "except_last" all but the last, "never" none. For pure layers, the three are
            bit-identical.
        deferred_batch_norm: True: batch norm updates its running statistics once per batch, as if
            it had seen the whole batch. False: once per microbatch, as the plain layer would.
        devices: a device for each stage; a device may appear several times. A single device is for
            all stages, and surplus devices are unused. None: the layers stay where they are if they
            are on several devices; neighbours on one device form a stage. Otherwise every CUDA
            device, or two lanes of the CPU.
        balance: the number of layers of each stage. None: balanced by bytes of parameters.
        merge: how the outputs of microbatches are joined; see `make_plan`.
        ranges: True: each action is a range in profilers; see `run`.

    Raises:
        PlanError: the argument is not a Sequential, an option has a wrong value, or the balance
            does not fit.
        PlacementError: devices are missing or too few.
    """

    def __init__(
        self,
        sequential: nn.Sequential,
        chunks: int = 1,
        checkpoint: str = "except_last",
        *,
        deferred_batch_norm: bool = False,
        devices: Any = None,
        balance: Sequence[int] | None = None,
        merge: Any = None,
        ranges: bool = False,
    ) -> None:
        super().__init__()
        faults = [*_module_faults(sequential), *_option_faults(chunks, checkpoint)]
        raise_all("no such Pipe:", faults)
        self._chunks, self._checkpoint = index(chunks), checkpoint
        self._deferred = bool(deferred_batch_norm)
        self._merge, self._ranges = merge, ranges
        self._kind = PipeSequential if isinstance(sequential, PipeSequential) else nn.Sequential
        # Not add_module: it refuses a layer named like an attribute of Pipe, such as "devices".
        children_of(self).update(children_of(sequential))
        self.training = sequential.training
        self._layout = lay_out(self._layers(), balance, devices)
        # The same view objects each time: `_call` finds hooks on them and raises.
        self._views: tuple[nn.Sequential, ...] = ()
        self._known: tuple[ModuleSnapshot, dict[tuple[bool, ...], Stages]] | None = None
        if len(self):
            self._stages()  # raise errors about the layers before they are moved
        # From the last stage to the first, so a shared tensor ends on the device of its first use.
        for part, device in reversed(list(zip(self.partitions, self.devices, strict=True))):
            part.to(device)

    # -- looking at it
    # -------------------------------------------------------------------------------

    @property
    def chunks(self) -> int:
        """The largest number of microbatches."""
        return self._chunks

    @property
    def checkpoint(self) -> str:
        """The microbatches that backwards recompute: all, all except the last, or none."""
        return self._checkpoint

    @property
    def deferred_batch_norm(self) -> bool:
        """Whether running statistics are updated once per batch."""
        return self._deferred

    @property
    def balance(self) -> tuple[int, ...]:
        """The number of layers of each stage."""
        return self._layout.balance

    @property
    def devices(self) -> tuple[torch.device, ...]:
        """The device of each stage. Outputs are on the last one."""
        return self._layout.devices

    @property
    def partitions(self) -> tuple[nn.Sequential, ...]:
        """The layers of each stage, as views.

        The layers are the Pipe's own and may have hooks. A hook on a view raises PlanError in the
        next call.
        """
        self._views = self._views or tuple(self._kind() for _ in self.balance)
        layers = iter(self._layers())
        for view, count in zip(self._views, self.balance, strict=True):
            children_of(view).clear()
            children_of(view).update(islice(layers, count))
            view.training = self.training
        return self._views

    def _layers(self) -> list[tuple[str, nn.Module]]:
        # Not named_children: it omits the second occurrence of a layer.
        return list(children_of(self).items())  # pyright: ignore[reportReturnType]

    def __len__(self) -> int:
        return len(children_of(self))

    def __iter__(self) -> Iterator[nn.Module]:
        return iter([layer for _, layer in self._layers()])

    @overload
    def __getitem__(self, key: int) -> nn.Module: ...
    @overload
    def __getitem__(self, key: slice) -> nn.Sequential: ...
    def __getitem__(self, key: int | slice) -> nn.Module | nn.Sequential:
        if not isinstance(key, slice):
            return self._layers()[index(key)][1]
        part = self._kind()
        children_of(part).update(self._layers()[key])
        part.training = self.training
        return part

    def extra_repr(self) -> str:
        """Show the options, and a line for each stage."""
        options = f"chunks={self.chunks}, checkpoint={self.checkpoint!r}"
        lines = [f"{options}, deferred_batch_norm={self.deferred_batch_norm}"]
        for stage, (part, device) in enumerate(zip(self.partitions, self.devices, strict=True)):
            lines.append(f"stage {stage} on {device}: {', '.join(children_of(part))}")
        return "\n".join(lines)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_known": None}  # the copy makes its own stages and plans

    # -- running it
    # -------------------------------------------------------------------------------

    def forward(self, *inputs: Any) -> Any:
        """Run the pipeline.

        Args:
            inputs: the arguments of the first layer: tensors or trees of tensors with the same
                number of rows, on any device.

        Returns:
            The output of the last layer, with the rows of all microbatches, on the last device.

        Raises:
            BatchError: the inputs cannot be cut.
            PlanError: the call is inside ``torch.export``; export the layers instead.
            PlacementError: layers were moved to another device.
            StageError: a layer failed. The error is also an instance of the layer's own error
                class.
        """
        if torch.compiler.is_exporting():
            raise PlanError(
                "torch.export traces one graph, but a Pipe runs on several lanes; export the "
                "layers themselves: torch.export.export(nn.Sequential(*pipe), ...); the "
                "parameters are the same"
            )
        # A pipeline runs on threads, which dynamo cannot trace, so torch.compile must leave it.
        if torch.compiler.is_compiling():
            return torch.compiler.disable(Pipe._call)(self, *inputs)
        return self._call(*inputs)

    def _call(self, *inputs: Any) -> Any:
        hooked = [stage for stage, view in enumerate(self._views) if hooks_of(view)]
        if hooked:
            raise PlanError(
                f"pipe.partitions[{hooked[0]}] has {hooks_of(self._views[hooked[0]])[0]}, which "
                "would never be called, because the partition is a view and stages consist of its "
                f"layers; register hooks on a layer, pipe.partitions[{hooked[0]}][-1], or on the "
                "Pipe"
            )
        if RUNNING.get() is not None:  # within a stage: a plan cannot run inside an action
            return self[:](*map_leaves(bare, inputs))
        refuse_transforms("a Pipe")
        tree = self._as_tree(inputs)
        count = count_microbatches(tree, self.chunks)
        if not len(self):
            # Without layers nothing needs a cut; this call only checks the inputs.
            microbatch.cut(make_plan([Stage(_identity)], fill_drain(1, count)), tree, None, None)
            return self[:](*map_leaves(bare, inputs))
        return self._run(self._stages(), tree, count)

    def _run(self, stages: Stages, inputs: Tree, count: int) -> Any:
        params, state = stages.gather()
        input_grads = input_flags(inputs)
        training = [(place, params[place[0]][place[1]]) for place in stages.home]
        training = [(place, param) for place, param in training if param.requires_grad]
        graph = torch.is_grad_enabled() and bool(training or any(input_leaves(input_grads)))
        draws = stages.draw()
        # If no stage is known to draw, take the next seed from a copy of the generator. If a stage
        # draws after all, advance the generator below. So a model without draws consumes no seed,
        # like the plain Sequential.
        seed = _draw(torch.default_generator if draws else torch.default_generator.clone_state())
        options: dict[str, Any] = {"state": state, "seed": seed, "ranges": self._ranges}
        pullback = None
        with without_saved_tensor_hooks():
            if graph:
                plan = stages.plan(count, self.checkpoint if self.training else "never")
                flags = map_leaves(attrgetter("requires_grad"), params)
                result, pullback = vjp(
                    plan, params, inputs, trainable=flags, input_grads=input_grads, **options
                )
            else:
                result = run(stages.plan(count, None), params, inputs, **options)
        outputs: Any = result.outputs
        if not tensors_of(outputs):
            raise PlanError(
                f"the last layer of a Pipe returned no tensor, but {type(outputs).__name__}; is a "
                "`return` missing?"
            )
        stages.write(result.state)
        if not draws and stages.draw():
            _draw(torch.default_generator)
        return outputs if pullback is None else attach(outputs, pullback, training, inputs)

    def _as_tree(self, inputs: tuple[Any, ...]) -> Tree:
        """Return the inputs as the first stage takes them."""
        ready = any(isinstance(value, Microbatches) for value in inputs)
        if len(inputs) == 1 and (ready or self._kind is nn.Sequential):
            return inputs[0]
        if ready:
            raise BatchError(
                "give several inputs that are already cut as one argument: "
                "fp.Microbatches([(a, b), ...])"
            )
        if not inputs or self._kind is nn.Sequential:
            raise BatchError(
                f"an nn.Sequential takes one input, a tensor or any tree; got {len(inputs)}; for "
                "layers with several inputs use an fp.models.PipeSequential, which turns tuples "
                "into arguments"
            )
        return inputs

    def _stages(self) -> Stages:
        """Return the stages of the layers as they are now, from the cache if nothing changed."""
        if len(self) != sum(self.balance):
            raise PlanError(
                f"this Pipe has {len(self)} layers, but its balance {list(self.balance)} is for "
                f"{sum(self.balance)} layers; make a new Pipe: fp.Pipe(nn.Sequential(*pipe), ...)"
            )
        model = self[:]
        if self._known is None or not self._known[0].is_current(model):
            self._known = (ModuleSnapshot(model), {})
        snapshot, by_flags = self._known
        flags = snapshot.flags
        stages = by_flags.get(flags)
        if stages is None:
            stages = Stages(model, self._layout, deferred=self._deferred, merge=self._merge)
            # Drop the oldest pattern: dicts keep the order of insertion.
            while len(by_flags) >= _KEPT:
                by_flags.pop(next(iter(by_flags)), None)
            by_flags[flags] = stages
        return stages

    # -- staying where it is
    # -------------------------------------------------------------------------------

    def to(self, *args: Any, **kwargs: Any) -> Pipe:
        """Change the dtype or the memory format, like ``nn.Module.to``.

        Raises:
            MoveError: an argument is a device.
        """
        if device_asked(*args, **kwargs) is not None:
            raise MoveError(_DENIED)
        return super().to(*args, **kwargs)

    def cuda(self, device: Any = None) -> Pipe:
        """Raise MoveError: the layers stay on the devices of their stages."""
        raise MoveError(_DENIED)

    def cpu(self) -> Pipe:
        """Raise MoveError: the layers stay on the devices of their stages."""
        raise MoveError(_DENIED)

    def before_change(self, change: Callable[[Tensor], Tensor]) -> None:
        """Raise MoveError if a change of the tensors (`Anchored`) moves them to another device."""
        for device in {tensor.device for tensor in (*self.parameters(), *self.buffers())}:
            if not same_device(change(torch.empty(0, device=device)).device, device):
                raise MoveError(_DENIED)


def _module_faults(sequential: Any) -> list[str]:
    """List the reasons why a module cannot be cut into its layers."""
    if not isinstance(sequential, nn.Sequential):
        return [
            "the module must be an nn.Sequential, whose layers are cut into stages; got a "
            f"{type(sequential).__name__} (other models: fp.split)"
        ]
    kind = type(sequential)
    faults = unfit(sequential)
    if not is_row(sequential):
        name = "forward" if kind.__call__ is nn.Module.__call__ else "__call__"
        faults.append(
            f"{kind.__name__} has a {name} of its own, which would never be called; give "
            f"nn.Sequential(*layers), and move the code of the {name} into a layer"
        )
    if names := [*parameters_of(sequential), *buffers_of(sequential)]:
        faults.append(
            f"{kind.__name__} has tensors of its own ({', '.join(names)}), which its forward does "
            "not use; put them into a layer"
        )
    if hooks_of(sequential):
        faults.append(
            f"this {kind.__name__} has hooks of its own, which would never be called; register "
            "them on the Pipe"
        )
    return faults


def _option_faults(chunks: Any, checkpoint: Any) -> list[str]:
    try:
        positive = index(chunks) > 0
    except TypeError:
        positive = False
    faults: list[str] = []
    if not positive:
        is_balance = isinstance(chunks, (list, tuple))
        named = f"; give the balance by name, balance={chunks!r}" if is_balance else ""
        faults.append(f"number of chunks must be positive integer; got {chunks!r}{named}")
    if checkpoint not in CHECKPOINTS:
        faults.append(
            f"checkpoint is not one of 'always', 'except_last', or 'never'; got {checkpoint!r}"
        )
    return faults


def _identity(params: Tree, x: Tree) -> Tree:
    return x


def _draw(generator: torch.Generator) -> int:
    return int(torch.randint(2**63 - 1, (), generator=generator, device="cpu"))
