"""Gradient accumulation over windows of batches, and sources that end on all ranks together.

These functions take any gradient function. `accumulate` in `optim` combines results of `run`.
"""

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
    """Group items into windows of ``size``; the last window may be shorter.

    Items are drawn when you use them, so only one item is in memory. Windows are counted from the
    first item, without state between calls, so two epochs have the same windows.

    >>> [list(window) for window in fp.batches.windows(range(5), 2)]
    [[0, 1], [2, 3], [4]]

    Args:
        items: any iterable, such as an `overlap`.
        size: the number of items per window, at least 1.

    Returns:
        An iterator of iterators. Use each window before you ask for the next. The next window drops
        unused items of the window before.

    Raises:
        PlanError: ``size`` is not a positive int; or an item of an earlier window is asked for, as
            after ``list(windows(...))``.
    """
    if type(size) is not int or size < 1:
        raise PlanError(f"the size of a window is a positive int; got {size!r}")
    return _windows(_once(items), size)


def _once(items: Iterable[Item]) -> Iterator[Item]:
    """Return an iterator that stays at its end. Some iterators begin again if asked after it."""
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
    """One window: its items, until the next window is asked for. Keeps no item that was used."""

    def __init__(self, first: list[Any], others: Iterator[Any]) -> None:
        self.first, self.others, self.dropped = first, others, False

    def __next__(self) -> Any:
        if self.dropped:
            raise PlanError(
                "this window is over: windows draw items only as you use them, and the next "
                "window has dropped the unused items of this one; use each window before the next "
                "(for window in fp.batches.windows(...)), or keep its items: list(window)"
            )
        return self.first.pop() if self.first else next(self.others)


@dataclass(frozen=True, eq=False)
class Accumulated:
    """The gradients of a window of batches, as `accumulate_grads` returns them.

    Attributes:
        grads: the tree of gradients of the whole window, None for a leaf without gradient.
        aux: for each batch, the second value that ``grad_fn`` returned.
        count: the number of batches.
        weight: the sum of the batches' weights.
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
    """Compute the gradients of a window of batches as if the window were one batch.

    The mean divides by the weights of the batches in the window, so a shorter last window is right,
    too. For results of `run` use `accumulate`, which reads the weights from the results.

    >>> found = fp.batches.accumulate_grads(lambda x: ({"w": x}, None), [torch.tensor(1.0), torch.tensor(4.0)])
    >>> float(found.grads["w"]), found.count
    (2.5, 2)

    Args:
        grad_fn: a function ``batch -> (gradients, aux)``. The gradients are a tree, of the mean
            loss of the batch. ``aux`` is any value.
        window: an iterable of batches, such as a window of `windows`. Each batch is dropped after
            its gradients are added.
        reduce: "mean", the default: the weighted sum over batches, divided by the sum of weights.
            "sum": the weighted sum.
        weight: a function ``batch -> number`` of rows or tokens. It is called before ``grad_fn``.
            None, the default: each batch has the weight 1.

    Returns:
        An `Accumulated`. Gradients have the types that ``grad_fn`` returned. Half precision is
        summed in single precision.

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
                f"the weight of a batch is a finite number from 0; batch {number} of the window "
                f"has {factor}"
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
                f"{place} is a {kind} in batch {number} of the window, unlike in the batches before"
            )
        with torch.no_grad():
            sums = [_add(old, leaf, factor) for old, leaf in zip(sums, leaves, strict=True)]
        total += factor
        aux.append(extra)
        del batch, returned, grads, leaves, extra  # before the next one is drawn
    if spec is None or total == 0:
        raise PlanError(
            "there is nothing to accumulate: the window has no batch"
            + (" with a weight above 0" if aux else "")
        )
    scale = 1.0 / total if reduce == "mean" else 1.0
    with torch.no_grad():
        means = [
            None if old is None else (old * scale).to(kind)
            for old, kind in zip(sums, kinds, strict=True)
        ]
    return Accumulated(unflatten(spec, means), tuple(aux), len(aux), total)


def _add(old: Tensor | None, new: Any, factor: float) -> Tensor | None:
    """Return the sum with a gradient added, never the caller's own tensor."""
    if not isinstance(new, Tensor):
        return None
    wide = new.float() if new.dtype in (torch.float16, torch.bfloat16) else new
    if factor == 0:  # the gradient may be NaN, as the mean over no tokens is; 0 * NaN is NaN
        return torch.zeros_like(wide) if old is None else old
    return wide * factor if old is None else add_gradient(old, wide, factor)


def agree(
    source: Iterable[Item],
    all_have: Callable[[bool], bool],
    *,
    pad: Callable[[Any], Any] | None = None,
) -> Iterator[Item]:
    """Make a source that ends on all ranks at the same batch.

    Ranks may have different numbers of batches. Without `agree`, a rank with more batches would
    wait forever in a run. Each rank calls ``all_have`` once for each draw, so the function may be a
    collective. With ``torch.distributed`` on the CPU::

        def all_have(mine):
            flag = torch.tensor(int(mine))
            dist.all_reduce(flag, dist.ReduceOp.MIN)
            return bool(flag)

    >>> list(fp.batches.agree([1, 2, 3], lambda mine: mine))
    [1, 2, 3]

    Args:
        source: the batches of this rank, any iterable.
        all_have: a function ``bool -> bool``, the logical "and" of the argument over all ranks.
        pad: None, the default: end with the first rank that has no more batches. The other ranks
            drop the batch that they have already drawn. Else continue until no rank has a batch. A
            rank without batches calls ``pad(its last batch, or None)`` for a batch to take part
            with.

    Returns:
        An iterator of batches, for `overlap` or a loop.
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
