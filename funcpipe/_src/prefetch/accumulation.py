"""Gradient accumulation as a fold over windows of batches, and ranks that stop together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any, Literal, TypeVar, cast

import torch
from torch import Tensor

from funcpipe._src.core.errors import PlanError
from funcpipe._src.core.shown import amount_of, guarded, line
from funcpipe._src.core.sparse_gradients import add_gradient
from funcpipe._src.core.tree import Tree, flatten, locations, unflatten

Item = TypeVar("Item")


def windows(items: Iterable[Item], size: int) -> Iterator[Iterator[Item]]:
    """Groups of ``size`` items, drawn as they are used; the last may be shorter.

    Windows are cut by counting items, never by state that lives on between epochs: two epochs have
    the same windows.

    >>> [list(window) for window in fp.batches.windows(range(5), 2)]
    [[0, 1], [2, 3], [4]]

    Args:
        items: any iterable, such as an `overlap`.
        size: of a window, from 1.

    Returns:
        An iterator of iterators. What a window's user leaves over is drawn and dropped when the
        next one is asked for.

    Raises:
        PlanError: the size is no whole number from 1; or a window is asked for what was dropped
            (``list(windows(...))``).
    """
    if type(size) is not int or size < 1:
        raise PlanError(f"a window has a whole number of items from 1; got {size!r}")
    return _windows(_once(items), size)


def _once(items: Iterable[Item]) -> Iterator[Item]:
    """An iterator of the items that is not asked again after its end: some begin anew then."""
    return chain(iter(items))


def _windows(items: Iterator[Item], size: int) -> Iterator[Iterator[Item]]:
    while first := list(islice(items, 1)):
        window = _Window(first, islice(items, size - 1))
        yield window
        left_over = False
        while next(window, window) is not window:
            left_over = True
        window.dropped = left_over


class _Window(Iterator[Any]):
    """One window: its items, until the next window is asked for. It keeps none that was drawn."""

    def __init__(self, first: list[Any], others: Iterator[Any]) -> None:
        self.first, self.others, self.dropped = first, others, False

    def __next__(self) -> Any:
        if self.dropped:
            raise PlanError(
                "this window is over: its items are drawn as they are used, and the rest was "
                "dropped when the next window was asked for; use each in its turn (for window in "
                "fp.batches.windows(...)), or keep it: list(window)"
            )
        return self.first.pop() if self.first else next(self.others)


@dataclass(frozen=True, eq=False)
class Accumulated:
    """Gradients of a window.

    Attributes:
        grads: of all its batches together; None where there is none.
        aux: what the gradient function gave besides, one for each batch.
        count: how many batches the window had.
        weight: the sum of their weights.
    """

    grads: Tree
    aux: tuple[Any, ...]
    count: int
    weight: float

    @guarded
    def __repr__(self) -> str:
        facts = [
            ("batches", str(self.count)),
            ("weight", f"{self.weight:g}"),
            ("gradients", amount_of(self.grads)),
        ]
        return line("Accumulated", facts)


def accumulate_grads(
    grad_fn: Callable[[Any], tuple[Tree, Any]],
    window: Iterable[Any],
    *,
    reduce: Literal["mean", "sum"] = "mean",
    weight: Callable[[Any], float] | None = None,
) -> Accumulated:
    """The gradients of a window of batches as if they were one batch; exact for the last, shorter
    window, too.

    (Results of `fp.run` know their weights: ``fp.accumulate(fp.run(plan, params, batch) for batch
    in window)``.)

    >>> found = fp.batches.accumulate_grads(lambda x: ({"w": x}, None), [torch.tensor(1.0), torch.tensor(4.0)])
    >>> float(found.grads["w"]), found.count
    (2.5, 2)

    Args:
        grad_fn: batch -> (gradients, anything else). Gradients are those of the batch's mean loss.
        window: batches, such as one of `windows`; each is dropped when its gradients are added.
        reduce: "mean": the sum over batches, each times its weight, over the sum of weights; "sum":
            the sum alone.
        weight: batch -> how much it counts (rows, tokens), asked for before ``grad_fn`` runs; None:
            all count 1.

    Returns:
        Gradients in the types that ``grad_fn`` gave; half precision is summed in single.

    Raises:
        PlanError: the window is empty, weights are negative or all zero, or gradients differ in
            structure.
    """
    if not callable(grad_fn):
        raise PlanError(
            "accumulate_grads takes the function first: accumulate_grads(grad_fn, window); got a "
            f"{type(grad_fn).__name__}"
        )
    if reduce not in ("mean", "sum"):
        raise PlanError(f'reduce is "mean" or "sum"; got {reduce!r}')
    total, spec = 0.0, None
    sums: list[Tensor | None] = []
    kinds: list[torch.dtype | None] = []
    aux: list[Any] = []
    for batch in window:
        number = len(aux)
        factor = 1.0 if weight is None else float(weight(batch))
        if not 0 <= factor < float("inf"):
            raise PlanError(
                f"the weight of a batch is a number from 0; batch {number} of the window has "
                f"{factor}"
            )
        returned: Any = grad_fn(batch)
        if not isinstance(returned, tuple) or len(returned) != 2:  # pyright: ignore[reportUnknownArgumentType]
            raise PlanError(
                "grad_fn returns (gradients, anything else), such as (grads, None); got a "
                f"{type(returned).__name__}"
            )
        grads, extra = cast("tuple[Any, Any]", returned)
        leaves, layout = flatten(grads)
        if spec is None:
            spec = layout
            sums += [None for _ in leaves]
            kinds = [leaf.dtype if isinstance(leaf, Tensor) else None for leaf in leaves]
        if layout != spec:
            raise PlanError(
                f"batch {number} of the window has gradients of another structure: {layout}, "
                f"after {spec}"
            )
        changed = [
            at
            for at, leaf in enumerate(leaves)
            if isinstance(leaf, Tensor) != (kinds[at] is not None)
        ]
        if changed:
            place, kind = locations(grads, "grads")[changed[0]], type(leaves[changed[0]]).__name__
            raise PlanError(
                f"{place} is a {kind} in batch {number} of the window, and was none before"
            )
        with torch.no_grad():
            sums = [_add(old, leaf, factor) for old, leaf in zip(sums, leaves, strict=True)]
        total += factor
        aux.append(extra)
        del batch, returned, grads, leaves, extra  # before the next one is drawn
    if spec is None or total == 0:
        raise PlanError(
            "there is nothing to accumulate: the window has no batch"
            + (" with a weight" if aux else "")
        )
    scale = 1.0 / total if reduce == "mean" else 1.0
    with torch.no_grad():
        means = [
            None if old is None else (old * scale).to(kind)
            for old, kind in zip(sums, kinds, strict=True)
        ]
    return Accumulated(unflatten(spec, means), tuple(aux), len(aux), total)


def _add(old: Tensor | None, new: Any, factor: float) -> Tensor | None:
    """The sum with a gradient added; never the caller's tensor."""
    if not isinstance(new, Tensor):
        return None
    wide = new.float() if new.dtype in (torch.float16, torch.bfloat16) else new
    if factor == 0:  # what does not count may be NaN: a mean over no tokens
        return torch.zeros_like(wide) if old is None else old
    return wide * factor if old is None else add_gradient(old, wide, factor)


def agree(
    source: Iterable[Item],
    all_have: Callable[[bool], bool],
    *,
    pad: Callable[[Any], Any] | None = None,
) -> Iterator[Item]:
    """A source that ends on all ranks at once, however many batches each has: else those that have
    more wait for ever.

    Every rank calls ``all_have`` once for each draw, so it may be a collective. With
    ``torch.distributed``, on the CPU::

        def all_have(mine):
            flag = torch.tensor(int(mine))
            dist.all_reduce(flag, dist.ReduceOp.MIN)
            return bool(flag)

    >>> list(fp.batches.agree([1, 2, 3], lambda mine: mine))
    [1, 2, 3]

    Args:
        source: of this rank.
        all_have: (has this rank a batch) -> have all ranks one.
        pad: None: stop with the first rank that has no more; a batch that others drew for nothing
            is dropped. Else go on until no rank has any: ``pad(last batch of this rank, or None)``
            is a batch to take part with.

    Returns:
        The iterator to give to `overlap`.
    """
    items, last = _once(source), None
    while True:
        drawn = list(islice(items, 1))
        ended = not drawn
        if not (all_have(not ended) if pad is None else not all_have(ended)):
            return
        if drawn:
            last = drawn[0] if pad is not None else None
            yield drawn.pop()
        else:
            assert pad is not None, "all_have(False) is False: some rank, this one, has none"
            yield pad(last)
