"""`make_plan`: check stages, schedule and options together, and build the plan.

`program.py` lowers the schedule, `schedules/legal.py` checks the schedule alone.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Any, cast

from funcpipe._src.core.captured import attribute_reads, rebound_names
from funcpipe._src.core.errors import PlanError, raise_all
from funcpipe._src.core.remembered import Remembered
from funcpipe._src.core.tree import flatten
from funcpipe._src.data.cost_shares import are_lengths
from funcpipe._src.data.losses import BY_ROWS, counts_of
from funcpipe._src.data.lowered import Lowered
from funcpipe._src.data.plan import Plan, Ties
from funcpipe._src.data.schedule import Schedule
from funcpipe._src.data.stage import Bindable, Divided, Shared, Stage, names_of
from funcpipe._src.lower.program import lower


def make_plan(
    stages: Sequence[Stage] | Stage | Divided,
    schedule: Schedule,
    *,
    devices: Any = None,
    loss: Callable[..., Any] | None = None,
    weight: Callable[..., Any] | None = None,
    ties: Sequence[Sequence[tuple[int, Any]]] = (),
    train: bool | None = None,
    outputs: bool | None = None,
    merge: Any = None,
    spare_slots: int = 0,
    slices: Sequence[float] = (),
    carry: bool = False,
) -> Plan:
    """Make a plan: lower a schedule for stages, so that `run` can run them.

    Checks all that can be checked without running a stage, and lists every mistake in one error.

    >>> double, add = fp.stage(lambda p, x: p * x), fp.stage(lambda p, x: p + x)
    >>> schedule = fp.schedules.one_f_one_b(2, 1)
    >>> plan = fp.make_plan([double, add], schedule, loss=nn.functional.mse_loss)
    >>> print(plan.program.lane(1))
    lane 1, slots: 0 act from 0, 1 target from caller, 2 report, 3 residual, 4 grad
    receive act[0,0]@0 from 0
    receive target[1,0]@1 from caller
    1F0  reads act[0,0]@0 target[1,0]@1  writes report[1,0]@2 residual[1,0]@3
    free act[0,0]@0 target[1,0]@1
    1B0  reads residual[1,0]@3  writes grad[0,0]@4
    free residual[1,0]@3
    send grad[0,0]@4 to 0@1
    free grad[0,0]@4

    Args:
        stages: the stages in order, or the result of `split`. From a split the plan also takes the
            ties, the state, and the model's loss (if the schedule has backwards and no ``loss`` is
            given).
        schedule: a legal schedule with the same number of stages.
        devices: a ``torch.device`` or its name for each device of the schedule, or one for all.
            None: the run chooses CUDA devices if there are any, else the CPU.
        loss: ``(y, target) -> loss`` of a microbatch. For torch's own losses (modules, functions,
            or a ``functools.partial`` of these with keywords), the batch's loss equals the loss of
            the whole batch, for each ``reduction``, ``weight`` and ``ignore_index``. Your own loss
            returns a mean, and microbatches count by their rows. `run` raises BatchError for a loss
            that is not a mean over rows, such as a sum. If something else divides the mean
            (tokens, class weights), return ``(sum, weight)`` or a `Loss`, or define a method
            ``weigh(inputs, target) -> number``, or give ``weight``. If your loss is an
            ``nn.Module`` with ``reduction="sum"``, its results are added. None: no loss.
        weight: ``target -> number``, called before any forward: the weight of a microbatch, such as
            the number of rows or tokens that its mean is over. If losses are sums, the sum over all
            microbatches is divided by the sum of all weights. Takes precedence over the weight of
            the loss itself. None: the weight of the loss.
        ties: groups of ``(stage, path)`` that are one parameter. Their gradients are summed, and
            each member gets the sum. Ties of stages from `split` are known and need not be given.
        train: the value for stages that take ``train`` (dropout, batch norm). None: True if the
            schedule has backwards.
        outputs: whether a run returns the merged outputs of the last stage. None: True if the
            schedule has no backwards.
        merge: the rule to join outputs of microbatches: the axis of the rows, "mean" (weighted by
            rows), "sum", "each" (`Microbatches`, one value per microbatch), or a tree of rules
            structured as the outputs; a rule holds for all outputs below it. None: tensors along
            axis 0, single numbers as "each", and equal values that are not tensors as one value.
        spare_slots: the number of additional slots for each role of values between two lanes. Each
            slot takes the memory of one value. Over a network, a lane without a spare slot waits
            for two latencies; `simulate` shows whether spare slots save time. Default: 0.
        slices: the length of each slice of a microbatch, in any unit, if the schedule has slices.
            `balanced_slices` returns lengths that take equally long. (): equal lengths.
        carry: whether stages keep their carry from one run to the next: `run` takes ``carry=``, and
            returns ``result.carry``. Needs a schedule without backwards.

    Returns:
        The plan.

    Raises:
        ScheduleError: the schedule is not legal.
        PlanError: stages, schedule and options do not fit together. The message lists all faults.
    """
    state: tuple[Any, ...] | None = None
    if isinstance(stages, Divided):
        loss = stages.loss if loss is None and getattr(schedule, "has_backward", False) else loss
        stages, state = stages.stages, stages.state
    stages, faults = _stages(stages)
    if not isinstance(schedule, Schedule):
        faults.append(
            f"schedule is a {type(schedule).__name__}; make one with "
            "fp.schedules.one_f_one_b(...) or Schedule.parse(text)"
        )
    faults += [*_function("loss", loss, "(y, target) -> loss"), *_weight(weight)]
    for name, flag in (("train", train), ("outputs", outputs)):
        if flag is not None and not isinstance(flag, bool):
            faults.append(f"{name}= is True, False or None; got {flag!r}")
    faults += [
        f"merge= is an axis, 'mean', 'sum' or 'each', or a tree of these; got {rule!r}"
        for rule in flatten(merge)[0]
        if not _is_rule(rule)
    ]
    if type(spare_slots) is not int or spare_slots < 0:
        faults.append(
            "spare_slots= is the number of additional slots between two lanes, at least 0; got "
            f"{spare_slots!r}"
        )
    faults += _slices(slices, schedule) + _whole(stages, schedule)
    faults += _carry(carry, stages, schedule)
    counts = BY_ROWS
    if loss is not None and not faults:
        try:
            counts = counts_of(loss)
        except PlanError as error:
            faults.append(str(error))
        faults += _stale_reads(loss, stages)
    if weight is not None and loss is None:
        faults.append("weight= is the share of each microbatch in the loss, but there is no loss=")
    raise_all("no such plan:", faults)
    with_outputs = not schedule.has_backward if outputs is None else outputs
    program = lower(
        tuple(stages),
        schedule,
        loss=loss is not None,
        outputs=with_outputs,
        carry=carry,
        spare_slots=spare_slots,
    )
    return Plan(
        tuple(stages),
        schedule,
        program,
        _devices(devices, schedule.num_devices),
        loss,
        weight,
        _with_shared(_ties(ties, stages), stages),
        schedule.has_backward if train is None else train,
        with_outputs,
        merge,
        state,
        counts,
        spare_slots,
        tuple(slices),
        carry,
    )


def program_for(plan: Plan, num_microbatches: int, *, halves: bool = False) -> Lowered:
    """Return the plan's program for a number of microbatches, or (``halves``) for a `vjp`.

    Caches programs per plan, so that last batches of an epoch are lowered once.
    """
    if num_microbatches >= plan.num_microbatches and not halves:
        return plan.program
    cache = _programs(plan)
    program = cache.get((num_microbatches, halves))
    if program is None:
        if num_microbatches < plan.num_microbatches:
            program = program_for(plan, plan.num_microbatches, halves=halves).first(
                num_microbatches
            )
        else:
            given = {"loss": plan.loss is not None, "outputs": plan.outputs, "halves": halves}
            program = lower(plan.stages, plan.schedule, spare_slots=plan.spare_slots, **given)
        cache[num_microbatches, halves] = program
    return program


_programs: Remembered[Plan, dict[tuple[int, bool], Lowered]] = Remembered(lambda _: {})
"""The programs of each plan, by (number of microbatches, halves)."""


def _slices(slices: Any, schedule: Any) -> list[str]:
    """Return the faults of the lengths of slices."""
    count = schedule.num_slices if isinstance(schedule, Schedule) else 1
    if not are_lengths(slices):
        return [f"slices= must have the length of each slice, numbers above 0; got {slices!r}"]
    if slices and len(slices) != count:
        return [
            f"slices= has the lengths of {len(slices)} slices, but the schedule cuts a microbatch "
            f"into {count} (num_slices= of its family)"
        ]
    return []


def _carry(carry: Any, stages: Sequence[Any], schedule: Any) -> list[str]:
    """Return the faults of ``carry=``."""
    if not isinstance(carry, bool):
        return [f"carry= is True or False; got {carry!r}; the carry itself is for fp.run"]
    if carry and getattr(schedule, "has_backward", False):
        return [
            "carry= keeps carries between runs without gradients, but the schedule has backwards; "
            "give schedule.forwards()"
        ]
    if carry and not any(getattr(stage, "carry", False) for stage in stages):
        return [
            "carry= keeps the carry of stages, but no stage has one; give the stage function the "
            "keyword carry, or split the model with slices=True"
        ]
    return []


def _stale_reads(loss: Callable[..., Any], stages: Sequence[Stage]) -> list[str]:
    """Return a fault if the loss reads attributes that a model's forward writes.

    Stages compute with copies of the model, so the model itself keeps the old values.
    """
    origins = {id(origin): origin for part in stages for origin in part.origins()}
    names, modules = attribute_reads(loss) if origins else ((), ())
    found = [origin.written_by_forwards(names, modules) for origin in origins.values()]
    places = sorted({*chain.from_iterable(found)})
    if not places:
        return []
    return [
        f"the loss reads {', '.join(map(repr, places))} of the model, which its forward writes, but "
        "stages compute with copies of the model, so the loss would see old values. Return such a "
        "value beside the output, through all later layers, and take it from y in the loss; for a "
        "function stage: fp.Out(y, loss=(term, 1.0))"
    ]


def _whole(stages: Sequence[Any], schedule: Any) -> list[str]:
    """Return a fault for each stage that cannot run slices, if the schedule has slices."""
    if not isinstance(schedule, Schedule) or schedule.num_slices == 1:
        return []
    return [
        f"{label} attends to whole sequences, but the schedule cuts them into slices: split the "
        "model with fp.split(model, num_stages, slices=True)"
        for label, part in _parts(stages)
        if isinstance(part.fn, Bindable) and not part.fn.sliceable
    ]


def _stages(stages: Any) -> tuple[tuple[Stage, ...], list[str]]:
    """Return the stages, and their faults."""
    kind = type(stages).__name__
    if isinstance(stages, Schedule):
        return (), ["stages is a Schedule; the stages come first: make_plan(stages, schedule)"]
    if not isinstance(stages, Stage | Iterable):
        return (), [f"stages is a {kind}; give a sequence of stages, or the result of fp.split"]
    if hasattr(stages, "named_parameters"):
        return (), [
            f"stages is a {kind}, a model in one piece: fp.split(model, num_stages) cuts it; give "
            "its result to make_plan"
        ]
    stages = (stages,) if isinstance(stages, Stage) else tuple(cast("Iterable[Any]", stages))
    faults = [
        f"stage {index} is a {type(part).__name__}; make it one with fp.stage(fn) or "
        f"fp.from_module(module){_unpacked(part)}"
        for index, part in enumerate(stages)
        if not isinstance(part, Stage)
    ]
    return stages, faults or _moved(stages)


def _parts(stages: Sequence[Stage]) -> list[tuple[str, Stage]]:
    """Return the innermost stages of all stages, with the labels of the outer ones for errors."""
    rows = zip(names_of(stages), stages, strict=True)
    return [(label, part) for label, stage in rows for part in stage.simple()]


def _moved(stages: Sequence[Stage]) -> list[str]:
    """Return a fault for each stage function whose captured variable has changed since.

    Finds functions made in a loop: all of them read the loop variable's last value.
    """
    functions_of: dict[Any, set[int]] = {}
    for _, part in _parts(stages):
        functions_of.setdefault(getattr(part.fn, "__code__", None), set()).add(id(part.fn))
    # A single function may rely on a changed global. Several functions with one code object were
    # meant to differ, so a changed variable is a mistake.
    parts = [
        row for row in _parts(stages) if len(functions_of[getattr(row[1].fn, "__code__", None)]) > 1
    ]
    faults = [
        f"{label} and others are one function, made in a loop, that reads a variable when it "
        f"runs: {', '.join(names)}; bind the variable by a default, lambda params, x, k=k: ..., or "
        "by functools.partial"
        for label, part in parts
        if part.closed and not part.seen.settled
        for names in [rebound_names(part.closed, part.fn)]
        if names
    ]
    if not faults:
        for _, part in parts:
            part.seen.settled = True  # later changes are intended: stages are not checked again
    return faults


def _function(name: str, fn: Any, form: str) -> list[str]:
    """Return the faults of an option that must be a function."""
    if isinstance(fn, type):
        return [
            f"{name} is the class {fn.__name__}, not a function; make an instance: "
            f"{name}={fn.__name__}()"
        ]
    if fn is None or callable(fn):
        return []
    return [
        f"{name} is a {type(fn).__name__}, not a function {form}; give the function itself, not "
        "its name or what it returned"
    ]


def _weight(weight: Any) -> list[str]:
    """Return the faults of ``weight``."""
    form = "(target) -> number"
    faults = _function("weight", weight, form)
    if weight is None or faults:
        return faults
    try:
        inspect.signature(weight).bind("target")
    except TypeError as error:
        return [f"weight must be a function {form}, but this one cannot be called so: {error}"]
    except ValueError:  # built-ins without a signature
        pass
    return []


def _devices(devices: Any, count: int) -> tuple[Any, ...] | None:
    if devices is None:
        return None
    if isinstance(devices, str) or not isinstance(devices, Iterable):
        return (devices,) * count
    named = tuple(cast("Iterable[Any]", devices))
    if len(named) != count:
        raise PlanError(
            f"the schedule has {count} devices, but devices= names {len(named)}; give one for "
            f"each (a device may appear several times), or fp.devices({count})"
        )
    return named


def _ties(ties: Sequence[Sequence[tuple[int, Any]]], stages: Sequence[Stage]) -> Ties:
    faults: list[str] = []
    seen: dict[tuple[int, Any], int] = {}
    out: list[tuple[tuple[int, Any], ...]] = []
    for number, group in enumerate(ties):
        name = f"group {number}"
        if not isinstance(group, Sequence) or not all(
            isinstance(member, (tuple, list)) for member in group
        ):
            faults.append(
                f"{name}: {group!r} is not a group; write ties=[[(0, path), (1, path)], ...]"
            )
            continue
        members = [tuple(member) for member in group]
        for member in members:
            if not _is_place(member, len(stages)):
                faults.append(
                    f"{name}: {member!r} is not (stage, path): a stage from 0 to "
                    f"{len(stages) - 1}, a key or a tuple of keys"
                )
                continue
            place = member[0], member[1]
            if place in seen:
                faults.append(f"{name}: {member!r} is in group {seen[place]} already")
            seen[place] = number
        if len(members) < 2:
            faults.append(f"{name} has {len(members)} member; a tie has two or more")
        out.append(tuple((member[0], member[1]) for member in members if len(member) == 2))
    raise_all(f"ties do not fit the stages ({', '.join(names_of(stages))}):", faults)
    return tuple(out)


def _with_shared(ties: Ties, stages: Sequence[Stage]) -> Ties:
    """Add the ties that stages know. Raises PlanError if they contradict the given ties."""
    groups: dict[Shared, list[tuple[int, Any]]] = {}
    for index, part in enumerate(stages):
        for path, shared in part.shares:
            groups.setdefault(shared, []).append((index, path))
    named = {member: number for number, group in enumerate(ties) for member in group}
    out, faults = list(ties), list[str]()
    for shared, members in groups.items():
        numbers = {named.get(member) for member in members}
        if numbers == {None} and len(members) > 1:
            out.append(tuple(members))
        elif len(numbers) > 1:
            faults.append(
                f"{members} are one parameter ({shared.name!r}), and ties= names only some of them"
            )
    raise_all(
        "ties do not fit the stages; leave out ties of stages from split, which the plan knows:",
        faults,
    )
    return tuple(out)


def _is_rule(rule: Any) -> bool:
    if isinstance(rule, int):
        return not isinstance(rule, bool)
    return rule is None or rule in ("mean", "sum", "each")


def _unpacked(part: Any) -> str:
    """Return advice for a tuple (stage, params, state) in place of a stage; "" for others."""
    if not isinstance(part, tuple) or not any(isinstance(item, Stage) for item in part):  # pyright: ignore[reportUnknownVariableType]
        return ""
    return (
        ", which returns (stage, params, state): stages, params, state = zip(fp.from_module(a), "
        "...)"
    )


def _is_place(member: tuple[Any, ...], num_stages: int) -> bool:
    if len(member) != 2 or not isinstance(member[0], int) or not 0 <= member[0] < num_stages:
        return False
    return isinstance(member[1], (str, int, tuple))
