"""`RunOptions`, the options of a run as one object, and `Executor`, the protocol of executors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeAlias, runtime_checkable

from funcpipe._src.core.tree import Tree
from funcpipe._src.data.plan import Plan
from funcpipe._src.data.result import Carry, Result
from funcpipe._src.stages.observed import ObserveFn
from funcpipe._src.stages.trainable import Trainable


@dataclass(frozen=True, kw_only=True, eq=False)
class RunOptions:
    """The options of a run, as given to `run`, which describes them.

    An `Executor` receives plan, params and batch separately, and these options as one object.

    Attributes:
        takes_faulthandler: whether a timeout uses the process's only timer of ``faulthandler``.
            `ranks` sets False for a timeout that the user did not give.
    """

    state: Sequence[Tree] | None = None
    feeds: Mapping[str, Tree] | None = None
    carry: Carry | None = None
    seed: int | None = None
    trainable: Trainable = None
    loss_scale: float = 1.0
    threads_per_lane: int | None = None
    check: str | Sequence[str] = ()
    record: bool = False
    ranges: bool = False
    observe: ObserveFn | None = None
    timeout: float | None = None
    optimizer: Any = None
    max_norm: float | None = None
    takes_faulthandler: bool = True


@runtime_checkable
class Executor(Protocol):
    """The protocol of objects that you can give to `run` as ``executor=``.

    `lanes`, `graphs` and `ranks` return executors. "serial" and "threads" name two more.
    """

    def run(self, plan: Plan, params: Sequence[Tree], batch: Any, options: RunOptions) -> Result:
        """Run a plan on a batch. Arguments, result and errors are as in `run`."""
        ...


ExecutorLike: TypeAlias = Literal["serial", "threads"] | Executor | None
"""The values of ``executor=``. None selects an executor for the plan."""
