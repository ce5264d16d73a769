"""The options of a run as one object, and the protocol of executors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeAlias, runtime_checkable

from funcpipe._src.core.tree import Tree
from funcpipe._src.data.plan import Plan
from funcpipe._src.data.result import Result
from funcpipe._src.stages.observed import Observer
from funcpipe._src.stages.trainable import Trainable


@dataclass(frozen=True, kw_only=True, eq=False)
class RunOptions:
    """The options of a run besides plan, params and batch, as the user gave them; see `run`.

    Attributes:
        takes_faulthandler: whether a timeout takes Python's one timer of ``faulthandler``. False if
            the user gave no timeout.
    """

    state: Sequence[Tree] | None = None
    feeds: Mapping[str, Tree] | None = None
    seed: int | None = None
    trainable: Trainable = None
    loss_scale: float = 1.0
    threads_per_lane: int | None = None
    check: str | Sequence[str] = ()
    record: bool = False
    ranges: bool = False
    observe: Observer | None = None
    timeout: float | None = None
    optimizer: Any = None
    max_norm: float | None = None
    takes_faulthandler: bool = True


@runtime_checkable
class Executor(Protocol):
    """Who does the actions of runs: `lanes`, `graphs`, and what the words "serial" and "threads"
    stand for."""

    def run(self, plan: Plan, params: Sequence[Tree], batch: Any, options: RunOptions) -> Result:
        """A whole run of a plan; arguments, result and errors are those of `run`."""
        ...


ExecutorLike: TypeAlias = Literal["serial", "threads"] | Executor | None
"""What users give for one; None: whichever suits the plan."""
