"""Check one stage alone: `check_stage` calls it as a run would, and reports each fault.

`probe` calls the stage, `observe` finds the faults.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from funcpipe._src.core.errors import FuncpipeError, PlanError, bullets, raise_all
from funcpipe._src.core.tree import Tree, flatten, refuse_hidden
from funcpipe._src.data.stage import Stage
from funcpipe._src.testing.observe import generators_kept
from funcpipe._src.testing.probe import Probe

FAULTS = {
    "output": (
        "returns None, an iterator, tensors in an unregistered container, or another stash than "
        "it declares"
    ),
    "finite": "returns NaN or Inf",
    "gradient": "gives NaN or Inf as a gradient, or none at all",
    "unused": "has trainable parameters that no gradient reaches",
    "params": "writes into its parameters",
    "state": "writes into its state",
    "commit": "has a commit that returns None, or a state of another structure, types or shapes",
    "captured": "changes values that it closes over, or closes over parameters",
    "in-place": "writes into its input",
    "kept": "keeps a tensor of a run after it",
    "random": "draws random numbers that have no key",
    "settings": "changes a setting of the process",
    "deterministic": "gives other numbers at the second call",
    "structure": "changes the structure, the types or the shapes of its result",
    "rows": "cannot be called with fewer rows, or does not treat rows one by one",
}
"""The faults that `check_stage` finds, by the names for ``allow=``."""


class CheckError(FuncpipeError, AssertionError):
    """Raised by `check_stage` for a stage with faults.

    Attributes:
        faults: all faults, as (name in `FAULTS` or "raises", description).
    """

    def __init__(self, title: str, faults: Sequence[tuple[str, str]]) -> None:
        super().__init__(bullets(title, [f"{text} [{name}]" for name, text in faults]))
        self.faults = tuple(faults)


@dataclass(frozen=True)
class StageReport:
    """The report of `check_stage` about a stage without faults.

    Attributes:
        name: the name of the stage.
        outputs: each returned leaf, as (place, type and shape).
        num_bytes: bytes of the returned tensors.
        draws: whether the stage draws random numbers.
        in_place: the inputs that the stage writes into. In a run, the stage gets its own copy.
        unused: trainable parameters that no gradient reaches.
        rows: "independent" (each row of the outputs depends only on its own row of the inputs),
            "dependent", or "not compared".
        allowed: the faults that ``allow=`` permitted.
    """

    name: str
    outputs: tuple[tuple[str, str], ...]
    num_bytes: int
    draws: bool
    in_place: tuple[str, ...]
    unused: tuple[str, ...]
    rows: str
    allowed: tuple[tuple[str, str], ...]

    def __str__(self) -> str:
        lines = [
            f"stage {self.name!r}: {self.num_bytes} bytes out; draws random numbers: "
            f"{'yes' if self.draws else 'no'}; rows: {self.rows}"
        ]
        lines += [f"  {where}: {kind}" for where, kind in self.outputs]
        lines += [f"  writes in place into {', '.join(self.in_place)}"] if self.in_place else []
        lines += [f"  allowed: {text} [{name}]" for name, text in self.allowed]
        return "\n".join(lines)


def check_stage(
    stage: Stage,
    params: Tree,
    x: Tree,
    *,
    skips: Mapping[str, Tree] | None = None,
    feeds: Mapping[str, Tree] | None = None,
    state: Tree = None,
    train: bool = True,
    seed: int = 0,
    trainable: Any = None,
    independent_rows: bool = False,
    allow: Collection[str] = (),
) -> StageReport:
    """Check that a stage is pure, deterministic, and has gradients for all parameters.

    The function calls the stage several times as a run does: microbatch 0, microbatch 1, microbatch
    0 again as remat does, in a second run, with one row less, and backward. Then it commits the
    statistics of two microbatches. The error lists all faults, each with its name in `FAULTS`. The
    stage gets copies, so your arguments do not change.

    These changes are not found, or are not faults:

    - Changes outside of Python (files), and in objects of other packages that the stage closes
      over, are not found.
    - A change in the first call of a shape only (a table filled once) is not a fault.
    - A write into the input is a fault for a function. For modules and compositions the write is
      only reported, because it is legal in a run and common in modules.

    >>> import torch, funcpipe as fp
    >>> @fp.stage
    ... def linear(params, x):
    ...     return x @ params["w"]
    >>> print(funcpipe.testing.check_stage(linear, {"w": torch.ones(3, 2)}, torch.ones(4, 3)))
    stage 'linear': 32 bytes out; draws random numbers: no; rows: independent
      y: float32 [4, 2]

    Args:
        stage, params: the stage and its parameters.
        x: an input, any tree, preferably of three rows or more.
        skips, feeds, state: the declared values of the stage, as in a direct call.
        train: the value of ``train`` for a stage that takes it.
        seed: the seed of the stage's random numbers.
        trainable: as in `run`, but for this stage only: None, a bool, a function of (name, leaf),
            or a tree of bools.
        independent_rows: True: a row of the outputs that depends on other rows of the inputs is a
            fault. Independent rows are necessary for results equal to one run on the whole batch.
            The report contains ``rows`` in any case, unless the stage draws.
        allow: names of faults to permit.

    Returns:
        A `StageReport`; ``print`` shows it.

    Raises:
        PlanError: the arguments do not fit the stage.
        CheckError: the stage has faults. CheckError is an AssertionError.
    """
    trees = {"params": params, "x": x, "skips": skips or {}, "feeds": feeds or {}, "state": state}
    _check_arguments(stage, trees, allow)
    probe = Probe(stage, trees, train=train, seed=seed, trainable=trainable)
    found = probe.watch.faults
    with torch.enable_grad(), generators_kept():
        cause = probe.run(independent_rows=independent_rows)
    faults = [fault for fault in found if fault[0] not in allow]
    if faults:
        raise CheckError(
            f"stage {stage.name!r} has {len(faults)} fault{'s' if len(faults) > 1 else ''}:", faults
        ) from cause
    allowed = tuple(fault for fault in found if fault[0] in allow)
    return StageReport(
        stage.name,
        outputs=tuple(probe.outputs.items()),
        num_bytes=probe.num_bytes,
        draws=probe.draws,
        in_place=tuple(probe.watch.in_place),
        unused=tuple(probe.unused),
        rows=probe.rows,
        allowed=allowed,
    )


def _check_arguments(stage: Any, trees: Mapping[str, Any], allow: Any) -> None:
    if not isinstance(stage, Stage):
        raise PlanError(
            f"check_stage takes a stage; got a {type(stage).__name__}; make a stage with "
            "fp.stage(fn) or fp.from_module(module)"
        )
    faults: list[str] = []
    for keyword, names in (("skips", stage.pop), ("feeds", stage.feeds)):
        values = trees[keyword]
        faults += [f"{keyword} lacks {name!r}" for name in names if name not in values]
        unknown = [name for name in values if name not in names]
        faults += [f"{keyword} has {name!r}, which the stage does not declare" for name in unknown]
    if stage.state and trees["state"] is None:
        faults.append("the stage declares state; give state=")
    if isinstance(allow, str):
        raise PlanError(f"allow={allow!r}: give a collection of names, allow=[{allow!r}]")
    faults += [
        f"allow contains {name!r}, which is not a fault; the faults are {', '.join(FAULTS)}"
        for name in allow
        if name not in FAULTS
    ]
    title = f"check_stage cannot call stage {stage.name!r}"
    raise_all(f"{title}:", faults)
    for name, tree in trees.items():
        faults += refuse_hidden(tree, name, *flatten(tree))
    raise_all(f"{title}; these are not trees of tensors:", faults)
