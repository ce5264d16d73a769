"""What one call of a stage does besides returning its output, noted while the stage runs."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from funcpipe.core.stage import BoundFn, Out, Stage, bindable, normalise, side_loss
from funcpipe.core.torch_names import version
from funcpipe.core.tree import Tree, flatten, is_differentiable, leaves, locations, map_leaves, refuse_hidden
from funcpipe.runtime.foreign import nodes_of
from funcpipe.testing.around import Around
from funcpipe.testing.match import differences

Fault = tuple[str, str]
"""A name from `FAULTS`, or "raises", and what is wrong."""


class Observer(Around):
    """The function of a stage that is watched: faults are noted and the call goes on.

    Attributes:
        faults: as they were found; some more than once.
        in_place: what of its input the stage wrote into.
        memory: of all inputs and outputs.
        connected: did anything that the last call returned require a gradient.
        parameters: ids of the leaves of autograd that its outputs come from.
    """

    def __init__(self, stage: Stage, *, finite: bool) -> None:
        super().__init__(stage, lambda call, x, extras: call())
        self.finite = finite
        self.faults: list[Fault] = []
        self.in_place: dict[str, None] = {}
        self.memory: list[StorageWeakRef] = []
        self.connected = False
        self.parameters: set[int] = set()

    def note(self, name: str, text: str) -> None:
        """A fault."""
        self.faults.append((name, text))

    def bind(self, params: Tree, state: Tree) -> BoundFn:
        """The function with parameters and state put in, watched."""
        return _Watched(self, params, state)

    def observe(self, call: Callable[[], Any], x: Tree, extras: dict[str, Any], params: Tree) -> Out:
        """Make a call; note what else it does."""
        given = {"x": x, **{f"{kind}[{name!r}]": extras[kind][name] for kind in ("skips", "feeds") for name in extras.get(kind, ())}}  # fmt: skip
        before = {name: _frozen(tree) for name, tree in given.items()}
        state = extras.get("state", ())
        own, old, settings, draws = _frozen(params), _frozen(state), _settings(), _generators()
        returned = call()
        for name, tree in given.items():
            self._wrote(_written(tree, before[name], name))
        for where in _written(params, own, "params"):
            self.note("params", f"writes into {where}; compute with a copy")
        for where in _written(state, old, "state"):
            self.note("state", f"writes into {where}; return statistics in Out(stats=...) and fold them in commit=")
        for name, value in _settings().items():
            if value != settings[name]:
                self.note("settings", f"changes {name} from {settings[name]} to {value}")
        _restore(settings)
        for name, value in _generators().items():
            if value != draws.get(name, value):
                self.note("random", f"draws from, or seeds, the global generator of {name}; torch's random functions are keyed by fp.run(seed=)")  # fmt: skip
        _put_back(own)
        out = self._returned(normalise(returned))
        kept = [*leaves(given), *leaves((out.y, out.stash))]
        self.memory += [StorageWeakRef(one.untyped_storage()) for one in kept if one.layout is torch.strided]
        return out

    def _wrote(self, found: list[str]) -> None:
        self.in_place.update(dict.fromkeys(found))
        if not bindable(self.stage.fn):  # a module or a composition: layers like that are common
            for where in found:
                self.note("in-place", f"writes into {where}: a run gives it a copy, but a direct call writes into yours; compute out of place")  # fmt: skip

    def _returned(self, out: Out) -> Out:
        """What is wrong with what the stage returned; and the same in a form that a run accepts."""
        if out.y is None:
            self.note("output", "returns None; is a return statement missing?")
        allowed = {*self.stage.stash, *self.stage.offers}
        for name in self.stage.stash:
            if name not in out.stash:
                self.note("output", f"declares stash {name!r} but does not return it in Out(stash=...)")
        for name in out.stash:
            if name not in allowed:
                self.note("output", f"returns stash {name!r} without declaring it; add stash=[{name!r}]")
        stash = {name: out.stash.get(name, ()) for name in self.stage.stash}
        stash |= {name: tree for name, tree in out.stash.items() if name in allowed}
        for root, tree in (("y", out.y), *((f"stash[{name!r}]", tree) for name, tree in stash.items())):
            values, spec = flatten(tree)
            for fault in refuse_hidden(tree, root, values, spec):
                self.note("output", fault)
            for where, leaf in zip(locations(tree, root), values, strict=True):
                if self.finite and is_differentiable(leaf) and not leaf.isfinite().all():
                    self.note("finite", f"{where} is not finite, for finite inputs")
        side = side_loss(out)
        loss = () if side is None else side[0]
        roots = [leaf for leaf in leaves((out.y, stash, loss)) if leaf.requires_grad]
        self.connected = bool(roots)
        self.parameters |= {id(node.variable) for node in nodes_of(roots) if hasattr(node, "variable")}
        return out._replace(stash=stash)


class _Watched:
    """A bound stage that is watched. A function gets new containers in every call, so one fault is not many."""

    def __init__(self, observer: Observer, params: Tree, state: Tree) -> None:
        self.observer, self.params, self.state = observer, params, state
        self.fn = observer.stage.bind(params, _copy(state)) if bindable(observer.stage.fn) else None
        self.places = {} if self.fn is None else self.fn.places

    def __call__(self, x: Tree, **extras: Any) -> Any:
        stage, fn, params = self.observer.stage, self.fn, self.params
        if stage.state:
            extras["state"] = _copy(self.state)
        if fn is not None:
            return self.observer.observe(lambda: fn(x, **extras), x, extras, params)
        params = map_leaves(lambda leaf: leaf, params)
        return self.observer.observe(lambda: stage.fn(params, x, **extras), x, extras, params)

    def release(self) -> None:
        if self.fn is not None:
            self.fn.release()
        self.params = self.state = None


def _copy(tree: Tree) -> Tree:
    return map_leaves(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, tree)


def _frozen(tree: Tree) -> list[Any]:
    """The leaves as they are now: bits, and how often they were written to."""
    return [
        (leaf, version(leaf), leaf.detach().clone()) if isinstance(leaf, Tensor) else leaf for leaf in flatten(tree)[0]
    ]


def _written(tree: Tree, before: list[Any], root: str) -> list[str]:
    """The leaves that were written to, or put in the place of others, since they were frozen."""
    now = flatten(tree)[0]
    if len(now) != len(before):
        return [root]
    found: list[int] = []
    for number, (leaf, old) in enumerate(zip(now, before, strict=True)):
        if isinstance(leaf, Tensor) and isinstance(old, tuple):
            same = leaf is old[0] and version(leaf) == old[1] and not differences(leaf, old[2], "")[0]
        else:
            same = leaf is old
        found += [] if same else [number]
    return [locations(tree, root)[number] for number in found]


def _put_back(before: list[Any]) -> None:
    """Give tensors the numbers that they had."""
    for old in before:
        if isinstance(old, tuple) and differences(old[0], old[2], "")[0]:
            old[0].data.copy_(old[2])


def _settings() -> dict[str, Any]:
    """Settings of the process that a stage has no business with."""
    return {
        "the grad mode": torch.is_grad_enabled(),
        "the default dtype": torch.get_default_dtype(),
        "the number of threads": torch.get_num_threads(),
    }


def _restore(settings: dict[str, Any]) -> None:
    grad, dtype, threads = settings.values()
    torch.set_grad_enabled(grad)
    torch.set_default_dtype(dtype)
    if threads != torch.get_num_threads():
        torch.set_num_threads(threads)


def _generators() -> dict[str, Any]:
    """The states of the random generators that everybody shares."""
    numpy: Any = sys.modules.get("numpy.random")
    states: dict[str, Any] = {"torch": torch.get_rng_state().numpy().tobytes(), "random": random.getstate()}
    if numpy is not None:
        name, keys, *rest = numpy.get_state()
        states["numpy"] = (name, keys.tolist(), *rest)
    return states


@contextmanager
def generators_kept() -> Generator[None]:
    """Give torch and random their states back at the end; inside, torch has one that no stage would choose."""
    before = torch.get_rng_state(), random.getstate()
    torch.manual_seed(0x5EED)
    try:
        yield
    finally:
        torch.set_rng_state(before[0])
        random.setstate(before[1])
