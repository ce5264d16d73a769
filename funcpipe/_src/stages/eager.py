"""`EagerBound`: run one stage with plain autograd, forward on detached leaves, backward into sums.

The stage computes with aliases of the parameters, which have their own ``.grad``. So a run never
touches the caller's ``.grad``. `gradient_sums` adds the gradients of the microbatches.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Hashable, Sequence
from contextlib import nullcontext
from operator import is_
from typing import Any, TypeVar

import torch
from torch import Tensor

from funcpipe._src.core.border import (
    LEAF,
    Border,
    close_border,
    open_border,
    refuse_shared_writes,
    sharing_memory,
)
from funcpipe._src.core.errors import BatchError, PlanError, raise_all
from funcpipe._src.core.gradient_graph import (
    has_foreign_leaf,
    has_reentrant_checkpoint,
    leaves_behind,
    walk_back,
)
from funcpipe._src.core.torch_names import lazy_clone
from funcpipe._src.core.tree import (
    Tree,
    cow_clone_unchecked,
    flatten,
    locations,
    refuse_hidden,
    unflatten,
)
from funcpipe._src.data.losses import read_loss
from funcpipe._src.data.result import Loss
from funcpipe._src.data.stage import CARRY, Out, Stage, carried, side_loss
from funcpipe._src.stages import divisors
from funcpipe._src.stages.bound import (
    Cotangents,
    ForwardReport,
    Gradients,
    Shares,
    StageArgs,
    StageOut,
)
from funcpipe._src.stages.context import LOSS_CHECKS, autocasting, no_autocast
from funcpipe._src.stages.drawing import CatchDraws
from funcpipe._src.stages.explain import explain
from funcpipe._src.stages.foreign import (
    mark_owner,
    refuse_foreign,
    refuse_in_loss,
    refuse_other_stages,
)
from funcpipe._src.stages.global_draws import Recomputations
from funcpipe._src.stages.params import StageParams, versions
from funcpipe._src.stages.reported import detached_side, is_empty, kept_statistics
from funcpipe._src.stages.residual import EagerResidual, GradientLeaves, add_root
from funcpipe._src.stages.rng import KeyedDraws, Keys
from funcpipe._src.stages.split_backward import EagerWeights, walk_to_inputs

T = TypeVar("T")

_EMPTY: Tree = ()
_NOTHING = ForwardReport(_EMPTY, None, None)
"""The report of a forward without statistics and losses, shared by all of them."""


class EagerBound:
    """A stage bound to its parameters, run with plain autograd.

    With ``guard``, the stage's writes to parameters go to copies. Raises PlanError if parameters or
    state do not fit the stage.
    """

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
        guard: bool = False,
    ) -> None:
        self.stage = stage
        self.index = index
        self.train = train
        self.backwards = backwards
        self.keys = keys
        self.loss, self.shares = loss, shares
        self.phase = ""  # the part of a forward that runs, if it is not the stage's function
        self.guessed = loss is not None and shares is not None and shares.guessed
        self.watched: divisors.WatchDivisors | None = None
        # Whether `check_mean` must run, and whether it must check the loss's numbers.
        self.unproven = self.is_due = False
        if loss is not None and shares is not None:
            rows, self.unproven = 2.0 if shares.explicit else shares.weight(0), True
            self.is_due = LOSS_CHECKS.get() and divisors.is_due(loss, rows, shares.guessed)
            if shares.unproven and self.is_due:
                self.watched = divisors.WatchDivisors(guessed=shares.guessed)
        # Whether this is the stage's first run in this mode.
        self.is_first_run = train not in stage.seen.kept
        # The second graph contains the leaves of the first one, and tensors that the stage kept
        # from microbatch 0.
        self.graphs_to_check = 2 if self.is_first_run else 1
        self.graphs_to_skip = int(
            not self.is_first_run and shares is not None and len(shares.parts) > 1
        )
        self.reentrant = train in stage.seen.reentrant  # whether it uses the reentrant checkpoint
        # With a carry, I is the whole backward. All slices must leave the same weights to W, or the
        # sums would be added in another order; the last slice has another graph.
        self.whole = stage.carry
        self.autocast = bool(autocasting())  # the caller's autocast, read on the caller's thread
        self.declares = bool(
            stage.pop or stage.feeds or stage.state or stage.takes_train or stage.carry
        )
        self.params = StageParams(params, trainable, guard=guard or self.is_first_run)
        self.recomputations = Recomputations(index)
        self._last_loss_gradient: tuple[float, Tensor] = 0.0, torch.empty(0)
        faults = refuse_hidden(params, f"params[{index}]", self.params.leaves, self.params.spec)
        raise_all("these are not trees of tensors:", faults + self._take(state))
        self._bind()

    def _take(self, state: Tree) -> list[str]:
        """Take copies of a state, and return its faults."""
        leaves, self.state_spec = flatten(state)
        self.params.take_state(leaves)
        self.state = unflatten(self.state_spec, self.params.state_leaves)
        return refuse_hidden(state, f"state[{self.index}]", leaves, self.state_spec)

    def _bind(self) -> None:
        """Bind the stage's function to the aliases and the state."""
        self.fn = self.stage.bind(self.params.tree, self.state)
        self.drawing = KeyedDraws(self.keys, self.index, self.fn.places, 0)  # for all microbatches
        if self.guessed:
            self.drawing.means = []

    def forward(self, args: StageArgs, *, keep: bool) -> StageOut:
        """Run the stage; with ``keep``, also return the residual for its backward.

        In a plan with backwards, autograd records also without ``keep``. Without autograd, torch
        selects other kernels, which round differently. Then R would not repeat F exactly.
        """
        # Entering a grad mode costs more than reading it, and the mode is usually right.
        if torch.is_grad_enabled() is not self.backwards:
            with torch.set_grad_enabled(self.backwards):
                return EagerBound.forward(self, args, keep=keep)
        drawing = self.drawing
        drawing.microbatch = args.microbatch
        will_repeat = self.backwards and not keep
        before = self.recomputations.positions() if will_repeat else ()
        with drawing:
            out = self.evaluate(args, keep=keep)
        if drawing.means:
            self._refuse_means(out)
        if will_repeat:
            self.recomputations.note(args.microbatch, before, out)
        elif self.recomputations.moved:
            self.recomputations.compare(args.microbatch, out)
        if drawing.counts:
            self.stage.seen.draws.add(self.train)
            if keep:
                out.residual.replay = drawing.replay()
            drawing.forget()
        if keep and self.graphs_to_check:
            self._check_graph(out.residual)
        return out

    def _check_graph(self, residual: EagerResidual) -> None:
        """Check that each leaf of a graph is a parameter or an input. Others get no gradient.

        The first run of a stage checks the first two graphs, and later runs check the second one.
        """
        if self.graphs_to_skip:
            self.graphs_to_skip -= 1
            return
        roots, inputs = residual.roots(), residual.inputs()
        input_ids = {id(leaf) for leaf in inputs}
        if self.is_first_run:
            # The end of the run checks this, too; here the error names the microbatch.
            self.params.refuse_rebinding()
            self.params.sums.refuse_early()
            if has_reentrant_checkpoint(roots):
                self.stage.seen.reentrant.add(self.train)
                self.reentrant = True
        mark_owner((*self.params.inputs, *inputs), self.index)
        if has_foreign_leaf(roots, self.params.input_ids, input_ids):
            self._refuse_foreign(residual, self.params.input_ids | input_ids)
        else:  # otherwise the forward made the leaves itself, so check the next graph, too
            self.graphs_to_check -= 1
        if self.is_first_run:
            self.stage.seen.inputs = [weakref.ref(leaf) for leaf in inputs]

    def _refuse_foreign(self, residual: EagerResidual, known: Collection[int]) -> None:
        """Raise PlanError for foreign leaves of the stage and of the loss. Leaves that only the
        loss reaches belong to the loss."""
        refuse_other_stages(self.index, leaves_behind(residual.roots()))
        of_stage = {
            id(leaf): leaf
            for leaf in leaves_behind(residual.roots(loss=False))
            if id(leaf) not in known
        }
        if of_stage:
            refuse_foreign(self.stage, self.fn, [*of_stage.values()])
        of_loss = [
            leaf for leaf in leaves_behind(residual.roots()) if id(leaf) not in {*known, *of_stage}
        ]
        if of_loss:
            refuse_in_loss(of_loss, self.params.leaves)

    def _refuse_means(self, out: StageOut) -> None:
        """Refuse a loss that counts by rows if it is a mean that leaves out targets. Raises
        BatchError."""
        means, self.drawing.means = self.drawing.means, []
        if out.report.loss is not None and out.report.loss.weight is None:
            divisors.refuse_left_out(means or ())

    def evaluate(self, args: StageArgs, *, keep: bool) -> StageOut:
        """Run a forward in the present grad mode, without keyed draws. `compile` traces this."""
        x, x_leaves = open_border(args.x, grad=self.backwards)
        shared = flatten(x)[0] if args.x.shared else ()
        skip_leaves: list[tuple[int, GradientLeaves]] = []
        try:
            returned = self._call(x, args, skip_leaves) if self.declares else self.fn(x)
        except Exception as error:
            names = [*(f"skips[{name!r}]" for name in self.stage.pop), "carry"]
            skips = {name: skip.tree() for name, skip in zip(names, args.skips, strict=False)}
            explain(
                error,
                {
                    "x": args.x.tree(),
                    **skips,
                    "params": unflatten(self.params.spec, self.params.leaves),
                },
            )
            raise
        if shared:
            refuse_shared_writes(args.x, shared)
        if returned is None:
            raise PlanError(
                "the stage returned None: is a `return` missing? A stage without output returns ()"
            )
        side = None
        stats: Tree = _EMPTY
        stash: dict[str, Border] = {}
        graphs: dict[str, list[Any]] = {}
        if isinstance(returned, Out) or self.stage.carry:
            returned = carried(self.stage, returned)
            side = side_loss(returned)
            returned, stashed, stats, _, carry = returned
            if stashed or self.stage.stash:
                self._check_stash(stashed)
            for name in stashed:
                stash[name], graphs[name] = close_border(stashed[name], f"stash[{name!r}]")
            if self.stage.carry:
                stash[CARRY], graphs[CARRY] = close_border(carry, "carry")
        elif self.stage.stash:
            self._check_stash({})
        y, graph = close_border(returned, "y", stays=self.loss is not None)
        if self.loss is None and len(y.leaves) > 1:
            y.shared = sharing_memory(flatten(returned)[0])
        total, loss = (None, None) if self.loss is None else self._loss(self.loss, args, y, graph)
        report = _NOTHING
        if loss is not None or side is not None or not (stats is _EMPTY or is_empty(stats)):
            kept = stats if stats is _EMPTY else kept_statistics(self.stage, stats)
            report = ForwardReport(kept, loss, side and detached_side(side))
        if not keep:
            return StageOut(y, report, None, stash)
        inputs = len(args.x.leaves), x_leaves, skip_leaves
        residual = EagerResidual(args.microbatch, graph, graphs, total, loss, side, *inputs)
        return StageOut(y, report, residual, stash)

    def _call(self, x: Tree, args: StageArgs, skip_leaves: list[tuple[int, GradientLeaves]]) -> Any:
        """Call a stage that declares skips, feeds, state or train."""
        stage = self.stage
        skips: dict[str, Tree] = {}
        names = (*stage.pop, CARRY) if len(args.skips) > len(stage.pop) else stage.pop
        for name, border in zip(names, args.skips, strict=True):
            skips[name], leaves = open_border(border, grad=self.backwards)
            skip_leaves.append((len(border.leaves), leaves))
        carry = skips.pop(CARRY, None)
        feeds = {
            name: open_border(feed, grad=False)[0]
            for name, feed in zip(stage.feeds, args.feeds, strict=True)
        }
        state_leaves = self.params.state_leaves
        looks = bool(state_leaves) and not getattr(self.fn, "guards_state", False)
        before = versions(state_leaves) if looks else []
        returned = self.fn(x, **stage.extras(skips, feeds, self.state, self.train, carry))
        if looks:
            self._refuse_state_writes(before)
        return returned

    def _loss(
        self, fn: Callable[..., Any], args: StageArgs, y: Border, graph: list[Any]
    ) -> tuple[Tensor, Loss]:
        """Return the loss of one microbatch, computed on the dense outputs, as `read_loss` does."""
        target = args.target
        assert target is not None
        self.phase = "loss"
        # The output may also be returned to the user, so a loss that works in place gets a copy.
        if y.spec is LEAF and isinstance(graph[0], Tensor):
            tree = cow_clone_unchecked(graph[0])
        else:
            leaves = [
                cow_clone_unchecked(leaf) if isinstance(leaf, Tensor) else leaf for leaf in graph
            ]
            tree = unflatten(y.spec, leaves)
        try:
            if self.watched is None:
                total, loss = read_loss(fn(tree, open_border(target, grad=False)[0]))
            else:
                with self.watched:
                    value = fn(tree, open_border(target, grad=False)[0])
                total, loss = read_loss(value)
                self.watched.check(loss)
                self.watched = None
            # A trace has no numbers: the program is checked later.
            if self.unproven and type(total) is Tensor:
                self.check_mean(y, args, loss)
        except Exception as error:
            explain(error, {"y": y.tree(), "target": target.tree()})
            raise
        # Not in a finally: after an error, the coordinates still name the loss.
        self.phase = ""
        return total, loss

    def check_mean(self, y: Border, args: StageArgs, loss: Loss) -> None:
        """Check the loss of a microbatch, if this run must check its loss. Raises BatchError."""
        self.unproven, shares, pair = False, self.shares, loss.weight is not None
        assert shares is not None
        assert self.loss is not None
        assert args.target is not None
        known, shapes = not (pair or shares.unproven), (y.shapes(), args.target.shapes())
        kind: Hashable = self.guessed
        is_due = self.is_due
        if known:  # only a loss that broadcasts can be wrong
            if shares.explicit or len(shares.parts) < 2 or shapes[0] == shapes[1]:
                return
            kind = str(shapes)
            is_due = LOSS_CHECKS.get() and divisors.is_due(self.loss, 2, kind)
        if not is_due:
            return
        rows = None if shares.explicit else shares.weight(args.microbatch)
        if self.guessed and not pair:  # first, because it knows the reason
            divisors.refuse_left_out(self.drawing.means or ())
        y_tree, target = (open_border(border, grad=False)[0] for border in (y, args.target))
        with KeyedDraws(self.keys, self.index, self.fn.places, args.microbatch) as draws:
            if known:
                reason = divisors.why_broadcast(self.loss, y_tree, target, summed=shares.summed)
            elif pair or self.stage.carry or not divisors.has_scalar(y_tree):
                form = {"pair": pair, "several": len(shares.parts) > 1}
                reason = divisors.why_not_mean(self.loss, y_tree, target, rows, **form)
            else:
                reason = self._why_no_mean(args, target, rows)
        is_refused = bool(reason) and not draws.counts  # a random loss has another number each time
        if reason is not None:
            count = 2.0 if rows is None else rows
            divisors.record_check(self.loss, count, kind, is_refused=is_refused)
        if is_refused:
            raise BatchError(reason)
        # Go on with the next microbatch: some rows may not count, and one row shows nothing.
        self.unproven = reason is None or (not known and rows != 1)

    def _why_no_mean(self, args: StageArgs, target: Tree, rows: float | None) -> str | None:
        """Return `why_not_mean` for a stage that computes the loss, or a part of it, itself.

        The stage runs in evaluation mode, because batch norm in training compares rows. Each call
        gets a newly bound function, so that an attribute which a forward keeps reaches no other
        call. The function is not released, because `release` compares such attributes with those
        of earlier runs.
        """
        stage, loss = self.stage, self.loss
        assert loss is not None

        def value(given: tuple[Tree, dict[str, Tree], dict[str, Tree]], target: Tree) -> Any:
            x, skips, feeds = given
            fn = stage.bind(self.params.tree, self.state)
            returned = fn(x, **stage.extras(skips, feeds, self.state, train=False))
            return loss(returned.y if isinstance(returned, Out) else returned, target)

        x, *others = (open_border(b, grad=False)[0] for b in (args.x, *args.skips, *args.feeds))
        skips = dict(zip(stage.pop, others, strict=False))
        feeds = dict(zip(stage.feeds, others[len(args.skips) :], strict=True))
        return divisors.why_not_mean(value, (x, skips, feeds), target, rows, in_model=True)

    def _check_stash(self, stash: Any) -> None:
        allowed = {*self.stage.stash, *self.stage.offers}
        faults = [
            f"declares stash {name!r} but did not return it in Out(stash=...)"
            for name in self.stage.stash
            if name not in stash
        ]
        faults += [
            f"returned stash {name!r} without declaring it; add stash=[{name!r}]"
            for name in stash
            if name not in allowed
        ]
        raise_all("the stage does not return what it declares: it", faults)

    def _refuse_state_writes(self, before: list[int]) -> None:
        leaves = flatten(self.state)[0]
        if (
            len(leaves) == len(before)
            and all(map(is_, leaves, self.params.state_leaves))
            and before == versions(leaves)
        ):
            return
        rows = zip(
            locations(self.state, "state"), leaves, self.params.state_leaves, before, strict=False
        )
        names = [
            name
            for name, leaf, old, version in rows
            if leaf is not old or versions([leaf]) != [version]
        ] or ["state"]
        raise PlanError(
            f"the stage writes into its state {names}; a stage is pure: return statistics in "
            "Out(stats=...) and fold them in commit="
        )

    def backward(
        self,
        residual: EagerResidual,
        y: Gradients | None,
        stash: dict[str, list[Gradients]],
        *,
        split: bool = False,
    ) -> tuple[Cotangents, EagerWeights | None]:
        """Run autograd from the outputs to the input leaves and the gradient sums.

        With ``split``, leave the weights of heavy operations to W. If the backward must repeat
        draws, do everything in I.
        """
        roots, gradients = residual.outset(y, stash)
        if residual.loss is not None:
            gradient = self.loss_gradient(residual.loss, residual.microbatch)
            add_root(residual.total, gradient, roots, gradients)
        if residual.side is not None:
            gradient = self.side_gradient(residual.side, residual.microbatch)
            add_root(residual.side[0], gradient, roots, gradients)
        inputs, parameters = residual.inputs(), self.params.inputs
        whole = self.whole or self.reentrant or (residual.replay and inputs)
        if split and parameters and not whole:
            if not roots:
                return residual.cotangents(), None
            waiting = self._walk(residual, walk_to_inputs, roots, gradients, inputs, parameters)
            weights = EagerWeights(waiting, residual.replay) if waiting else None
            return residual.cotangents(), weights
        leaves = [*parameters, *inputs]
        if roots and leaves:
            # Name the leaves, so that foreign parameters within the stage get no gradient. Not with
            # the reentrant torch.utils.checkpoint, which refuses a backward with named leaves.
            self._walk(residual, walk_back, roots, gradients, () if self.reentrant else leaves)
        return residual.cotangents(), None

    def backward_weight(self, residual: EagerWeights | None) -> None:
        """Compute the gradients of the weights that I has left."""
        if residual is not None:
            self._walk(residual, residual.walk)

    def _walk(
        self, residual: EagerResidual | EagerWeights, walk: Callable[..., T], *args: Any
    ) -> T:
        """Run a backward walk, and adopt new gradients into the sums."""
        sums = self.params.sums
        if sums.lacking:
            sums.prepare()
        # A compiled stage that falls back has no outer catcher, which refuses draws in backwards.
        catcher = residual.replay or (CatchDraws() if self.stage.program is not None else None)
        try:
            if catcher or self.autocast:
                with catcher or nullcontext(), no_autocast():
                    found = walk(*args)
            else:
                found = walk(*args)
        except RuntimeError:
            # If the stage has put a computed value into its params, an earlier backward has freed
            # the value's graph. Raise that error instead.
            self.params.refuse_rebinding()
            raise
        if sums.lacking or sums.sparse:
            sums.adopt()
        return found

    def loss_gradient(self, loss: Loss, microbatch: int) -> Tensor | None:
        """Return the gradient of the loss, from which a backward begins; None for weight 0.

        A backward from weight 0 would turn a loss of NaN into gradients of NaN. Each backward gets
        a lazy copy of one tensor. So a backward or a hook that writes to its gradient, also by
        ``.data``, does not change the gradient of the next microbatch.
        """
        if self.shares is None:
            return None
        total, factor = loss.sum, self.shares.factor(loss, microbatch) * self.shares.loss_scale
        if not factor:
            return None
        if not total.is_cpu:  # other devices have no lazy copies
            return torch.full_like(total, factor)
        before, gradient = self._last_loss_gradient
        if (
            before != factor
            or gradient.dtype is not total.dtype
            or not gradient.is_same_size(total)
        ):
            gradient = torch.full_like(total, factor)
            self._last_loss_gradient = factor, gradient
        return lazy_clone(gradient)

    def side_gradient(self, side: tuple[Any, Any], microbatch: int) -> Tensor | None:
        """Return the gradient of a stage's auxiliary loss (sum, weight); None: the microbatch has
        weight 0."""
        total, weight = side
        if self.shares is None or not isinstance(total, Tensor) or not float(weight):
            return None
        factor = self.shares.part(microbatch) / float(weight)
        return torch.full_like(total, factor * self.shares.loss_scale) if factor else None

    def rebase(self, state: Tree | None) -> None:
        """Begin the next batch with stepped parameters. The aliases share their memory."""
        self.params.rebase()
        if state is not None:
            raise_all("this is not a tree of tensors:", self._take(state))
            self.fn.release()
            self._bind()

    def release(self) -> None:
        """Release all tensors, and return the copy of a module to its stage."""
        self.fn.release()
        self.params.release()
        self.state = None
        self.stage.seen.kept.add(self.train)
