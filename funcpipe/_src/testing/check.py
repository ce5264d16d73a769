"""check_stage: calls one stage alone as a run would, and reports every fault that a run would
meet."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from funcpipe._src.core.errors import FuncpipeError, PlanError, bullets, raise_all
from funcpipe._src.core.tree import Tree, flatten, refuse_hidden
from funcpipe._src.data.stage import Stage
from funcpipe._src.testing.observe import generators_kept
from funcpipe._src.testing.probe import Arguments, Probe

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
    "captured": "changes what it closes over, or closes over parameters",
    "in-place": "writes into its input",
    "kept": "keeps a tensor of a run after it",
    "random": "draws random numbers that have no key",
    "settings": "changes a setting of the process",
    "deterministic": "gives other numbers at the second call",
    "structure": "changes the structure, the types or the shapes of what it returns",
    "rows": "cannot be called with fewer rows, or does not treat rows one by one",
}
"""The faults that `check_stage` knows, by the names that ``allow=`` takes."""


class CheckError(FuncpipeError, AssertionError):
    """A stage has faults.

    Attributes:
        faults: all of them, as (name in `FAULTS` or "raises", what is wrong).
    """

    def __init__(self, title: str, faults: Sequence[tuple[str, str]]) -> None:
        super().__init__(bullets(title, [f"{text} [{name}]" for name, text in faults]))
        self.faults = tuple(faults)


@dataclass(frozen=True)
class StageReport:
    """What `check_stage` found out about a stage that has no faults.

    Attributes:
        name: of the stage.
        outputs: each leaf that it returns, as (where, type and shape).
        num_bytes: of the tensors among them.
        draws: does it draw random numbers.
        in_place: what of its input it writes into; a run gives it a copy of its own.
        unused: trainable parameters that no gradient reaches.
        rows: "independent" (each row of the outputs follows from its own row of the inputs),
            "dependent", or "not compared".
        allowed: the faults that ``allow=`` let pass.
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
    """Is this a stage that a run can rely on: pure, deterministic, with gradients for all of its
    parameters.

    It is called a few times as a run calls it (microbatch 0, microbatch 1, microbatch 0 again as
    remat does, in a second run, with one row less) and backward. Every fault is reported, each with
    its name in brackets; `FAULTS` lists them. The stage gets copies, so what you give is not
    written to.

    Not seen is what a stage changes outside of Python (files) or in objects of other packages that
    it closes over. What only the first call of a shape changes (a table filled once) is no fault. A
    write into the input is legal in a run and common at the front of modules, so for modules and
    compositions it is only reported; for a function it is a fault.

    >>> import torch, funcpipe as fp
    >>> @fp.stage
    ... def linear(params, x):
    ...     return x @ params["w"]
    >>> print(funcpipe.testing.check_stage(linear, {"w": torch.ones(3, 2)}, torch.ones(4, 3)))
    stage 'linear': 32 bytes out; draws random numbers: no; rows: independent
      y: float32 [4, 2]

    Args:
        stage, params: the stage and its parameters.
        x: an input, best of three rows or more: any tree.
        skips, feeds, state: what the stage declares, as for a direct call.
        train: what it gets if it takes ``train``.
        seed: keys its random numbers.
        trainable: as for ``fp.run``, but of this one stage: None, a bool, a function of (name,
            leaf), or a tree of bools.
        independent_rows: a row of the outputs must depend on its own row of the inputs only, as law
            2 (same as no pipeline) wants. The report says it anyway, unless the stage draws.
        allow: names of faults to let pass.

    Returns:
        A report that prints well.

    Raises:
        PlanError: the arguments do not fit the stage.
        CheckError: the stage has faults. It is an AssertionError too.
    """
    _check_arguments(stage, skips, feeds, state, allow)
    _check_trees(stage, {"params": params, "x": x, "skips": skips, "feeds": feeds, "state": state})
    given = params, x, skips or {}, feeds or {}, state
    probe = Probe(stage, Arguments(*given), train=train, seed=seed, trainable=trainable)
    found = probe.watch.faults
    with torch.enable_grad(), generators_kept():
        cause = probe.run(independent_rows=independent_rows)
    faults = [fault for fault in found if fault[0] not in allow]
    if faults:
        raise CheckError(
            f"stage {stage.name!r} has {len(faults)} fault{'s' if len(faults) > 1 else ''}:", faults
        ) from cause
    allowed = tuple(fault for fault in found if fault[0] in allow)
    outputs, num_bytes, rows = tuple(probe.outputs.items()), probe.num_bytes, probe.rows
    return StageReport(
        stage.name,
        outputs,
        num_bytes,
        probe.draws,
        tuple(probe.watch.in_place),
        tuple(probe.unused),
        rows,
        allowed,
    )


def _check_arguments(stage: Any, skips: Any, feeds: Any, state: Any, allow: Any) -> None:
    if not isinstance(stage, Stage):
        raise PlanError(
            f"check_stage takes a stage; got a {type(stage).__name__}; make it one with "
            "fp.stage(fn) or fp.from_module(module)"
        )
    faults: list[str] = []
    for keyword, names, values in (("skips", stage.pop, skips), ("feeds", stage.feeds, feeds)):
        faults += [f"{keyword} lacks {name!r}" for name in names if name not in (values or {})]
        faults += [
            f"{keyword} has {name!r}, which the stage does not declare"
            for name in values or {}
            if name not in names
        ]
    faults += ["the stage declares state; give state="] if stage.state and state is None else []
    if isinstance(allow, str):
        raise PlanError(f"allow={allow!r}: give a collection of names, allow=[{allow!r}]")
    faults += [
        f"allow names {name!r}; the faults are {', '.join(FAULTS)}"
        for name in allow
        if name not in FAULTS
    ]
    raise_all(f"check_stage cannot call stage {stage.name!r}:", faults)


def _check_trees(stage: Stage, trees: Mapping[str, Tree]) -> None:
    """Refuse trees that a run would refuse. Raises PlanError."""
    faults = [
        fault for name, tree in trees.items() for fault in refuse_hidden(tree, name, *flatten(tree))
    ]
    raise_all(
        f"check_stage cannot call stage {stage.name!r}; these are no trees of tensors:", faults
    )
