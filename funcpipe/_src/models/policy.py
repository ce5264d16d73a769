"""Choose where to cut: `Units` describe a model to a policy, and three policies divide them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from funcpipe._src.core.errors import PlanError
from funcpipe._src.core.shown import guarded, line, some
from funcpipe._src.core.words import size_of
from funcpipe._src.data.cost import Cost
from funcpipe._src.models.balance import balance, evenly


@dataclass(frozen=True)
class Units:
    """A model as a sequence of units; a cut can lie between two units.

    Attributes:
        names: the path of each unit's module in the model.
        parameters: bytes of parameters of each unit. A parameter that several units use counts for
            the first of them.
        borders: bytes of the values that are alive after each unit, for one row. Zeros without a
            trace.
    """

    names: tuple[str, ...]
    parameters: tuple[int, ...]
    borders: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.names)

    @guarded
    def __repr__(self) -> str:
        return line(
            f"{len(self)} Units",
            [("", some(self.names)), ("parameters", size_of(sum(self.parameters)))],
        )


Policy: TypeAlias = Callable[[Units, "int | None"], Sequence[int]]
"""The type of a policy: ``(units, num_stages) -> number of units of each stage``."""


def by_parameters(units: Units, num_stages: int | None) -> Sequence[int]:
    """Divide the units so that the largest stage has as few bytes of parameters as possible.

    This is the default policy of `split`.

    >>> units = fp.models.Units(("a", "b", "c"), (6, 5, 3), (0, 0, 0))
    >>> fp.models.by_parameters(units, 2)
    [1, 2]

    Args:
        units: the units of the model.
        num_stages: the number of stages.

    Returns:
        The number of units of each stage.

    Raises:
        PlanError: ``num_stages`` is None.
    """
    return evenly(units.parameters, _count(num_stages, "by_parameters"))


def by_time(cost: Cost) -> Policy:
    """Make a policy whose slowest stage has as short a forward and backward as possible.

    >>> units = fp.models.Units(("a", "b", "c"), (6, 5, 3), (0, 0, 0))
    >>> fp.models.by_time(fp.Cost([1.0, 1.0, 4.0]))(units, 2)
    [2, 1]

    Args:
        cost: the times of each unit. ``fp.models.profile(model, example)`` measures the layers of an
            ``nn.Sequential`` or the units of a trace. For blocks, measure a split with one block
            per stage.

    Returns:
        A policy. It raises PlanError if ``num_stages`` is None, or if the cost does not have one
        number per unit.

    Raises:
        PlanError: the argument is not a `Cost`.
    """
    if not isinstance(cost, Cost):
        raise PlanError(
            f"by_time takes the Cost that fp.models.profile measures; got a {type(cost).__name__}"
        )

    def policy(units: Units, num_stages: int | None) -> Sequence[int]:
        if cost.num_stages != len(units):
            raise PlanError(
                f"by_time(cost) needs one number for each of the {len(units)} units; the cost has "
                f"{cost.num_stages}; measure the units: fp.models.profile(model, example)"
            )
        return list(balance(cost, _count(num_stages, "by_time")))

    return policy


def by_memory(limit: float) -> Policy:
    """Make a policy whose stages have at most ``limit`` bytes of parameters each.

    >>> units = fp.models.Units(("a", "b", "c"), (6, 5, 3), (0, 0, 0))
    >>> fp.models.by_memory(8)(units, None)
    [1, 2]

    Args:
        limit: bytes of parameters of a stage, at most.

    Returns:
        A policy. With ``num_stages=None`` it makes as few stages as possible. With a number it
        divides the parameters as evenly as `by_parameters`. The policy raises PlanError if the
        units do not fit.
    """

    def policy(units: Units, num_stages: int | None) -> Sequence[int]:
        sizes: list[int] = []
        used = float("inf")
        for name, size in zip(units.names, units.parameters, strict=True):
            if size > limit:
                raise PlanError(
                    f"{name!r} alone has {size} bytes of parameters, more than "
                    f"by_memory({limit:g}) allows"
                )
            if used + size > limit:
                sizes.append(0)
                used = 0.0
            sizes[-1] += 1
            used += size
        if num_stages is None:
            return sizes
        if len(sizes) > num_stages:
            raise PlanError(
                f"{num_stages} stages of at most {limit:g} bytes cannot hold the model; "
                f"{len(sizes)} can, or a limit of "
                f"{max(sum(units.parameters) // num_stages, *units.parameters)} and more"
            )
        return evenly(units.parameters, num_stages)

    return policy


def _count(num_stages: int | None, name: str) -> int:
    if num_stages is None:
        raise PlanError(
            f"the policy {name} divides a model into a number of stages; give num_stages"
        )
    return num_stages
