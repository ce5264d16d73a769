"""Where to cut: what a policy sees of a model, and the shipped ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from funcpipe._src.core.errors import PlanError
from funcpipe._src.core.shown import guarded, line, some
from funcpipe._src.core.words import size_of
from funcpipe._src.models.balance import evenly


@dataclass(frozen=True)
class Units:
    """A model as a row of units that a cut may part.

    Attributes:
        names: of the modules that they are.
        parameters: bytes of each one's parameters; one that several use counts for the first.
        borders: bytes of a row of the values alive after each unit; zeros where no trace told them.
        measure: the time of each unit in seconds, measured when it is called.
    """

    names: tuple[str, ...]
    parameters: tuple[int, ...]
    borders: tuple[int, ...]
    measure: Callable[[], Sequence[float]]

    def __len__(self) -> int:
        return len(self.names)

    @guarded
    def __repr__(self) -> str:
        return line(
            f"{len(self)} Units",
            [("", some(self.names)), ("parameters", size_of(sum(self.parameters)))],
        )


Policy: TypeAlias = Callable[[Units, "int | None"], Sequence[int]]
"""``(units, num_stages) -> units of each stage``."""


def by_parameters(units: Units, num_stages: int | None) -> Sequence[int]:
    """As equal parameter bytes as contiguous stages can have: the default. See `split`.

    >>> units = fp.models.Units(("a", "b", "c"), (6, 5, 3), (0, 0, 0), lambda: (1.0, 1.0, 4.0))
    >>> fp.models.by_parameters(units, 2)
    [1, 2]
    """
    return evenly(units.parameters, _count(num_stages, "by_parameters"))


def by_time(units: Units, num_stages: int | None) -> Sequence[int]:
    """As equal measured times as contiguous stages can have; needs ``example=``. See `split`.

    >>> units = fp.models.Units(("a", "b", "c"), (6, 5, 3), (0, 0, 0), lambda: (1.0, 1.0, 4.0))
    >>> fp.models.by_time(units, 2)
    [2, 1]
    """
    return evenly(units.measure(), _count(num_stages, "by_time"))


def by_memory(limit: float) -> Policy:
    """Stages of at most ``limit`` bytes of parameters each; ``num_stages=None``: as few as that
    takes.

    >>> units = fp.models.Units(("a", "b", "c"), (6, 5, 3), (0, 0, 0), lambda: (1.0, 1.0, 1.0))
    >>> fp.models.by_memory(8)(units, None)
    [1, 2]
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
