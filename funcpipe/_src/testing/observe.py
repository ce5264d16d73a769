"""Observe the side effects of one call of a stage, and note them as faults.

`probe` decides which calls are made.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from funcpipe._src.core.gradient_graph import nodes_of
from funcpipe._src.core.plain_tensors import bytes_of
from funcpipe._src.core.tree import (
    Tree,
    flatten,
    is_differentiable,
    leaves,
    locations,
    map_leaves,
    map_tensors,
    refuse_hidden,
)
from funcpipe._src.data.stage import Bindable, Out, Stage, normalise, side_loss
from funcpipe._src.engine.switches import switches
from funcpipe._src.stages.context import autocast_now, set_autocast
from funcpipe._src.testing.around import StageCall, hooked
from funcpipe._src.testing.snapshot import Snapshot, named

Fault = tuple[str, str]
"""A name from `FAULTS`, or "raises", and a description."""


_SETTINGS: Mapping[str, tuple[Callable[[], Any], Callable[[Any], object]]] = {
    "the grad mode": (torch.is_grad_enabled, torch.set_grad_enabled),
    "the default dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "the number of threads": (torch.get_num_threads, torch.set_num_threads),
    "autocast": (autocast_now, set_autocast),
    **{
        f"{each.name} ({each.setter})": (each.read, lambda values, each=each: each.write(*values))
        for each in switches()
        if each.read is not None
        and each.name not in ("torch.set_default_dtype", "torch.set_num_threads")
    },
}
"""Settings of the process, which a stage must not change: functions that read and set each."""


class Observer:
    """A hook around the function of a stage that notes faults and lets the call continue.

    Attributes:
        faults: each fault once, in the order of discovery.
        in_place: the inputs that the stage wrote into.
        memory: the storages of all inputs and outputs.
        connected: whether any tensor of the last result required a gradient.
        parameters: ids of the autograd leaves that the outputs depend on.
    """

    def __init__(self, stage: Stage, *, finite: bool) -> None:
        self.stage, self.finite = stage, finite
        self.faults: dict[Fault, None] = {}
        self.in_place: dict[str, None] = {}
        self.memory: list[StorageWeakRef] = []
        self.connected = False
        self.parameters: set[int] = set()

    def note(self, name: str, text: str) -> None:
        self.faults[name, text] = None

    def watched(self) -> Stage:
        """The stage with this hook. Facts that runs learn about the stage must not change."""
        return hooked(self.stage, self._observe)

    def _observe(self, call: StageCall, params: Tree, x: Tree, extras: dict[str, Any]) -> Out:
        # New containers: a change of a container in one call must not be found again in the next.
        params = map_leaves(lambda leaf: leaf, params)
        if self.stage.state:
            extras["state"] = map_tensors(torch.clone, extras["state"])
        inputs = {
            f"{kind}[{name!r}]": tree
            for kind in ("skips", "feeds")
            for name, tree in extras.get(kind, {}).items()
        }
        inputs["x"] = x
        trees = {**inputs, "params": params, "state": extras.get("state", ())}
        snapshots = {name: Snapshot(named(tree, name)) for name, tree in trees.items()}
        settings, generators = {name: now() for name, (now, _) in _SETTINGS.items()}, _generators()
        returned = call(params, x, extras)
        for name, tree in trees.items():
            for where in snapshots[name].written(tree, name):
                self._note_write(name, where)
        for name, (now, put_back) in _SETTINGS.items():
            if now() != settings[name]:
                self.note("settings", f"changes {name} from {settings[name]} to {now()}")
                put_back(settings[name])
        for name, value in _generators().items():
            if value != generators.get(name, value):
                self.note(
                    "random",
                    f"draws from, or seeds, the global generator of {name}; torch's random "
                    "functions are keyed by fp.run(seed=)",
                )
        snapshots["params"].restore()
        out = self._returned(normalise(returned))
        tensors = [*leaves(inputs), *leaves((out.y, out.stash))]
        self.memory += [
            StorageWeakRef(leaf.untyped_storage())
            for leaf in tensors
            if leaf.layout is torch.strided
        ]
        return out

    def _note_write(self, root: str, where: str) -> None:
        if root == "params":
            self.note("params", f"writes into {where}; compute with a copy")
        elif root == "state":
            remedy = "return statistics in Out(stats=...) and fold them in commit="
            self.note("state", f"writes into {where}; {remedy}")
        else:
            self.in_place[where] = None
            # Modules and compositions often write into their input, so only functions are at fault.
            if not isinstance(self.stage.fn, Bindable):
                self.note(
                    "in-place",
                    f"writes into {where}: a run passes a copy, but a direct call changes your "
                    "tensor; compute out of place",
                )

    def _returned(self, out: Out) -> Out:
        """Note the faults of the result, and return it in a form that a run accepts."""
        if out.y is None:
            self.note("output", "returns None; is a return statement missing?")
        allowed = {*self.stage.stash, *self.stage.offers}
        stash: dict[str, Tree] = {}
        for name in {**dict.fromkeys(self.stage.stash), **out.stash}:
            if name not in out.stash:
                problem = f"declares stash {name!r} but does not return it in Out(stash=...)"
                self.note("output", problem)
            elif name not in allowed:
                problem = f"returns stash {name!r} without declaring it; add stash=[{name!r}]"
                self.note("output", problem)
                continue
            stash[name] = out.stash.get(name, ())
        named_trees = {"y": out.y, **{f"stash[{name!r}]": tree for name, tree in stash.items()}}
        for root, tree in named_trees.items():
            values, spec = flatten(tree)
            for fault in refuse_hidden(tree, root, values, spec):
                self.note("output", fault)
            for where, leaf in zip(locations(tree, root), values, strict=True):
                if self.finite and is_differentiable(leaf) and not leaf.isfinite().all():
                    self.note("finite", f"{where} is not finite although the inputs are finite")
        side = side_loss(out)
        loss = () if side is None else side[0]
        roots = [leaf for leaf in leaves((out.y, stash, loss)) if leaf.requires_grad]
        self.connected = bool(roots)
        self.parameters |= {
            id(node.variable) for node in nodes_of(roots) if hasattr(node, "variable")
        }
        return out._replace(stash=stash)


def _generators() -> dict[str, Any]:
    """The states of the global random generators."""
    numpy: Any = sys.modules.get("numpy.random")
    states: dict[str, Any] = {
        "torch": bytes_of(torch.get_rng_state()),
        "random": random.getstate(),
    }
    if numpy is not None:
        name, keys, *rest = numpy.get_state()
        states["numpy"] = (name, keys.tolist(), *rest)
    return states


@contextmanager
def generators_kept() -> Generator[None]:
    """Restore torch's and Python's generators at the end. Inside, torch has an unusual seed."""
    state = random.getstate()
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0x5EED)
        try:
            yield
        finally:
            random.setstate(state)
