"""One stage for one run by plain autograd: forward on detached leaves, backward into sums of its own.

The parameters' aliases have their ``.grad`` from the start, so that sums grow in place and nothing of the caller's is
touched.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from operator import is_
from typing import Any, TypeAlias

import torch
from torch import Tensor

from funcpipe.core.errors import PlanError, StageError, bullets
from funcpipe.core.result import Loss
from funcpipe.core.stage import Stage, normalise
from funcpipe.core.tree import Tree, flatten, is_differentiable, locations, own, unflatten
from funcpipe.runtime.border import Border, add_gradients, close_border, dense, open_border, share
from funcpipe.runtime.program import Cotangents, Gradients, Report, Shares, StageArgs, StageOut
from funcpipe.runtime.rng import Keyed, Keys, may_draw, saw

_Held: TypeAlias = list[tuple[int, Tensor]]
"""The leaves of a border that hold its gradients, each with its number among all."""


class EagerResidual:
    """The graph of one forward: its outputs, its losses, and the leaves at its inputs."""

    __slots__ = ("draws", "loss", "microbatch", "side", "skips", "stash", "x", "x_count", "y")

    def __init__(
        self,
        microbatch: int,
        y: list[Any],
        stash: dict[str, list[Any]],
        ends: tuple[Loss | None, tuple[Any, Any] | None],
        x: tuple[int, _Held],
        skips: list[tuple[int, _Held]],
    ) -> None:
        self.microbatch, self.y, self.stash = microbatch, y, stash
        self.loss, self.side = ends
        self.x_count, self.x = x
        self.skips = skips
        self.draws: dict[str, int] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of the inputs and outputs; what autograd saved in between is not counted."""
        named = [*self.y, *(leaf for leaves in self.stash.values() for leaf in leaves), *(leaf for _, leaf in self.x)]
        named += [leaf for _, leaves in self.skips for _, leaf in leaves]
        return sum(leaf.nbytes for leaf in named if isinstance(leaf, Tensor))


class EagerBound:
    """A stage run by plain autograd."""

    def __init__(
        self,
        stage: Stage,
        index: int,
        params: Tree,
        state: Tree,
        *,
        trainable: Sequence[bool],
        train: bool,
        backwards: bool,
        keys: Keys,
        loss: Callable[..., Any] | None = None,
        shares: Shares | None = None,
    ) -> None:
        self.stage, self.index, self.train, self.backwards, self.keys = stage, index, train, backwards, keys
        self.loss, self.shares = loss, shares
        self.phase = ""
        self.leaves, self.spec = flatten(params)
        self.versions = _versions(self.leaves)
        self.aliases = [_alias(leaf, want) for leaf, want in zip(self.leaves, trainable, strict=True)]
        self.inputs = [alias for alias, want in zip(self.aliases, trainable, strict=True) if want]
        self.fresh = [alias.grad._version for alias in self.inputs if alias.grad is not None]
        state_leaves, state_spec = flatten(state)
        self.state_leaves = share(state_leaves)
        self.params, self.state = unflatten(self.spec, self.aliases), unflatten(state_spec, self.state_leaves)
        self.fn = stage.bind(self.params, self.state)
        self.places = getattr(self.fn, "places", {})

    # -- forward ---------------------------------------------------------------------------------------------------

    def forward(self, args: StageArgs, *, keep: bool) -> tuple[StageOut, EagerResidual | None]:
        """Run the stage; with ``keep`` the residual is what its backward needs.

        In a plan with backwards autograd records even what is not kept: without it torch picks other kernels, which
        round differently, and the computation that is repeated would not be the one that was made.
        """
        grad = self.backwards
        # Entering a grad mode costs more than asking for it, and it is the right one most of the time.
        with nullcontext() if torch.is_grad_enabled() is grad else torch.set_grad_enabled(grad):
            if may_draw(self.stage, self.train):
                mode = Keyed(self.keys, self.index, self.places, args.microbatch)
                with mode:
                    out, residual = self._forward(args)
                saw(self.stage, self.train, mode.drew)
                residual.draws = mode.replayable
            else:
                out, residual = self._forward(args)
        return out, residual if keep else None

    def _forward(self, args: StageArgs) -> tuple[StageOut, EagerResidual]:
        stage, grad = self.stage, self.backwards
        x, x_leaves = open_border(args.x, grad=grad)
        skips: dict[str, Tree] = {}
        skip_leaves: list[tuple[int, _Held]] = []
        for name, border in zip(stage.pop, args.skips, strict=True):
            skips[name], leaves = open_border(border, grad=grad)
            skip_leaves.append((len(border.leaves), leaves))
        feeds = {name: open_border(b, grad=False)[0] for name, b in zip(stage.feeds, args.feeds, strict=True)}
        before = _versions(self.state_leaves)
        returned = self.fn(x, **stage.extras(skips, feeds, self.state, self.train))
        if self.state_leaves:
            self._refuse_state_writes(before)
        out = normalise(returned)
        self._check_stash(out.stash)
        y, y_graph = close_border(out.y)
        stash: dict[str, Border] = {}
        graphs: dict[str, list[Any]] = {}
        for name in out.stash:
            stash[name], graphs[name] = close_border(out.stash[name])
        loss = None if self.loss is None else self._loss(self.loss, args.target, y, y_graph)
        entered = (len(args.x.leaves), x_leaves)
        residual = EagerResidual(args.microbatch, y_graph, graphs, (loss, out.loss), entered, skip_leaves)
        report = Report(_detached(out.stats), None if loss is None else Loss(*map(_detached, loss)), _side(out.loss))
        return StageOut(y, stash, report), residual

    def _loss(self, fn: Callable[..., Any], target: Border | None, y: Border, graph: list[Any]) -> Loss:
        """The plan's loss of one microbatch, on the dense outputs."""
        assert target is not None
        self.phase = "loss"
        # The output may be handed out as well, so an in-place loss gets its own.
        leaves = [own(leaf) if isinstance(leaf, Tensor) else leaf for leaf in graph]
        value = fn(unflatten(y.spec, leaves), open_border(target, grad=False)[0])
        loss = as_loss(value)
        self.phase = ""
        return loss

    def _check_stash(self, stash: Any) -> None:
        if not stash and not self.stage.stash:
            return
        allowed = {*self.stage.stash, *self.stage.offers}
        faults = [f"declares stash {name!r} but did not return it in Out(stash=...)" for name in self.stage.stash if name not in stash]  # fmt: skip
        faults += [f"returned stash {name!r} without declaring it; add stash=[{name!r}]" for name in stash if name not in allowed]  # fmt: skip
        if faults:
            raise PlanError(bullets("what the stage returned is not what it declares: it", faults))

    def _refuse_state_writes(self, before: list[int]) -> None:
        now = flatten(self.state)[0]
        if len(now) == len(before) and all(map(is_, now, self.state_leaves)) and before == _versions(now):
            return
        rows = zip(locations(self.state, "state"), now, self.state_leaves, before, strict=False)
        where = [name for name, leaf, old, n in rows if leaf is not old or _versions([leaf]) != [n]] or ["state"]
        raise PlanError(f"the stage writes into its state {where}; a stage is pure: return statistics in Out(stats=...) and fold them in commit=")  # fmt: skip

    # -- backward --------------------------------------------------------------------------------------------------

    def backward(self, residual: EagerResidual, y: Gradients | None, stash: dict[str, list[Gradients]]) -> Cotangents:
        """Plain autograd from the outputs into the leaves and the sums."""
        roots: list[Tensor] = []
        cotangents: list[Tensor | None] = []

        def root(tensor: Any, gradient: Tensor | None) -> None:
            if isinstance(tensor, Tensor) and tensor.requires_grad and gradient is not None:
                roots.append(tensor)
                cotangents.append(gradient)

        if y is not None:
            for tensor, gradient in zip(residual.y, y, strict=True):
                root(tensor, gradient)
        for name, parts in stash.items():
            for tensor, gradient in zip(residual.stash[name], add_gradients(None, *parts) or (), strict=True):
                root(tensor, gradient)
        self._loss_roots(residual, root)
        leaves = [leaf for _, leaf in residual.x] + [leaf for _, own_ in residual.skips for _, leaf in own_]
        inputs = self.inputs + leaves
        if roots and inputs:
            draws = residual.draws
            replay = Keyed(self.keys, self.index, self.places, residual.microbatch, draws) if draws else nullcontext()
            # The reentrant torch.utils.checkpoint refuses a backward for some leaves only. Every leaf that requires a
            # gradient is one of ours, unless the stage holds parameters of its own; inputs= leaves those alone.
            only = None if self._reentrant(roots) else inputs
            with replay, _no_autocast():
                torch.autograd.backward(roots, cotangents, inputs=only)
        skips = [_gradients(count, own_) for count, own_ in residual.skips]
        return Cotangents(_gradients(residual.x_count, residual.x), skips)

    def _reentrant(self, roots: list[Tensor]) -> bool:
        """Does the stage use the reentrant checkpoint: looked up in its first graph, remembered."""
        known: dict[bool, bool] = self.stage.__dict__.setdefault("_reentrant", {})
        if self.train not in known:
            known[self.train] = _has_node(roots, "CheckpointFunctionBackward")
        return known[self.train]

    def _loss_roots(self, residual: EagerResidual, root: Callable[[Any, Tensor], None]) -> None:
        """Where the gradients begin: the loss, and the stage's auxiliary loss, each by its factor."""
        shares, microbatch = self.shares, residual.microbatch
        if shares is None:
            return
        if residual.loss is not None:
            total = residual.loss.sum
            factor = shares.factor(residual.loss, microbatch)
            if factor:  # weight 0 adds exactly nothing, even where the loss is nan
                root(total, torch.full_like(total, factor * shares.loss_scale))
        if residual.side is not None:
            total, weight = residual.side
            factor = shares.share(microbatch)
            if isinstance(total, Tensor) and factor and float(weight):
                root(total, torch.full_like(total, factor / float(weight) * shares.loss_scale))

    def backward_input(
        self, residual: EagerResidual, y: Gradients | None, stash: dict[str, list[Gradients]]
    ) -> tuple[Cotangents, None]:
        """The whole backward: splitting an autograd graph costs more than it gains (compiled stages do split)."""
        return self.backward(residual, y, stash), None

    def backward_weight(self, residual: None) -> None:
        """Nothing is left to do."""

    # -- the end ---------------------------------------------------------------------------------------------------

    def grads(self) -> list[Tensor | None]:
        """The sum of each leaf; None where it is not trainable."""
        sums = {id(alias): alias.grad for alias in self.inputs}
        return [sums.get(id(alias)) for alias in self.aliases]

    def unused(self) -> list[int]:
        """Trainable leaves (by number) that no backward added to."""
        touched = {
            id(alias)
            for alias, fresh in zip(self.inputs, self.fresh, strict=True)
            if alias.grad is not None and alias.grad._version != fresh
        }
        trainable = {id(alias) for alias in self.inputs}
        return [i for i, a in enumerate(self.aliases) if id(a) in trainable and id(a) not in touched]

    def written(self) -> list[int]:
        """Parameter leaves (by number) that the stage wrote into, which it must not."""
        found = zip(self.versions, _versions(self.leaves), self.aliases, flatten(self.params)[0], strict=False)
        return [number for number, (old, new, alias, leaf) in enumerate(found) if old != new or alias is not leaf]

    def release(self) -> None:
        """Forget every tensor; the copy of a module goes back to its stage."""
        self.fn.release()
        for alias in self.inputs:
            alias.grad = None
        self.inputs, self.aliases, self.leaves, self.state_leaves = [], [], [], []
        self.params = self.state = None


def as_loss(value: Any) -> Loss:
    """What a loss function returned, as a Loss whose ``weight`` is None for a mean. Raises StageError."""
    if isinstance(value, Loss):
        loss = value
    elif isinstance(value, tuple) and len(value) == 2:  # pyright: ignore[reportUnknownArgumentType]
        loss = Loss(*value)
    else:
        loss = Loss(value)
    total = loss.sum
    if not isinstance(total, Tensor) or total.numel() != 1 or not is_differentiable(total):
        found = f"a tensor of shape {tuple(total.shape)}, {total.dtype}" if isinstance(total, Tensor) else f"a {type(total).__name__}"  # fmt: skip
        raise StageError(f"the loss is a floating number in a tensor: the mean over the microbatch, (sum, weight), or fp.Loss(sum, weight, aux); got {found}")  # fmt: skip
    return loss


def _side(side: Any) -> tuple[Any, Any] | None:
    if side is None:
        return None
    if not isinstance(side, tuple) or len(side) != 2:  # pyright: ignore[reportUnknownArgumentType]
        raise StageError(f"Out.loss is (sum, weight); got {type(side).__name__}")
    total, weight = side  # pyright: ignore[reportUnknownVariableType]
    return (_detached(total), _detached(weight))


def _has_node(roots: list[Tensor], name: str) -> bool:
    """Is a node of this name in the graph behind some tensors."""
    todo: list[Any] = [root.grad_fn for root in roots]
    seen: set[Any] = set()
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        if node.name() == name:
            return True
        seen.add(node)
        todo += [after for after, _ in node.next_functions]
    return False


def _no_autocast() -> AbstractContextManager[Any]:
    """Backwards run in the types that their forwards chose; what a stage did with autocast off must stay exact."""
    kinds = [kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
    if not kinds:
        return nullcontext()
    stack = ExitStack()
    for kind in kinds:
        stack.enter_context(torch.autocast(kind, enabled=False))
    return stack


def _alias(leaf: Any, trainable: bool) -> Any:
    """What a stage computes with instead of a parameter: shares its memory, has a gradient sum of its own."""
    if not isinstance(leaf, Tensor):
        return leaf
    alias = leaf.clone() if leaf.is_inference() and not torch.is_inference_mode_enabled() else leaf.detach()
    if trainable:
        alias.requires_grad_()
        # There from the start: autograd would make the first gradient itself the sum, and that may be a view of a
        # value already handed on, into which the next microbatch would then be added.
        alias.grad = torch.zeros_like(alias)
    return alias


def _versions(leaves: Sequence[Any]) -> list[int]:
    """How often each leaf was written to; under inference mode torch does not count."""
    return [leaf._version if isinstance(leaf, Tensor) and not leaf.is_inference() else 0 for leaf in leaves]


def _detached(tree: Tree) -> Tree:
    if tree is None or (isinstance(tree, tuple) and not tree):
        return tree  # pyright: ignore[reportUnknownVariableType]
    leaves, spec = flatten(tree)
    return unflatten(spec, [leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in leaves])


def _gradients(count: int, leaves: list[tuple[int, Tensor]]) -> Gradients:
    out: Gradients = [None] * count
    for index, leaf in leaves:
        if leaf.grad is not None:
            out[index] = dense(leaf.grad)
    return out
