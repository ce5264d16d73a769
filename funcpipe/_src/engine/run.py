"""run: run a plan on a batch. value_and_grad: the same with the signature of JAX."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from inspect import signature
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from funcpipe._src.core.errors import PlanError, StageError
from funcpipe._src.core.tree import Tree
from funcpipe._src.data.plan import Plan
from funcpipe._src.data.result import Result
from funcpipe._src.engine.executors import executor_for
from funcpipe._src.engine.options import ExecutorLike, RunOptions
from funcpipe._src.stages.context import outside_of_graphs
from funcpipe._src.stages.observed import Observer
from funcpipe._src.stages.trainable import Trainable


def run(
    plan: Plan,
    params: Sequence[Tree],
    batch: Any,
    *,
    state: Sequence[Tree] | None = None,
    feeds: Mapping[str, Tree] | None = None,
    seed: int | None = None,
    trainable: Trainable = None,
    loss_scale: float = 1.0,
    record: bool = False,
    ranges: bool = False,
    observe: Observer | None = None,
    executor: ExecutorLike = None,
    threads_per_lane: int | None = None,
    check: str | Sequence[str] = (),
    timeout: float | None = None,
    optimizer: Optimizer | None = None,
    max_norm: float | None = None,
) -> Result:
    """Run a plan on one batch. Returns losses, gradients, new state and outputs.

    The numbers are those of `run_sequential`, bit for bit, whatever the schedule, the devices, the
    executor, remat. A run without ``optimizer`` does not write to your tensors. On the CPU it
    raises PlanError if a stage writes to its params.

    >>> double = fp.stage(lambda w, x: x * w)
    >>> schedule = fp.schedules.one_f_one_b(2, 2)
    >>> plan = fp.make_plan([double, double], schedule, loss=nn.functional.mse_loss, devices="cpu")
    >>> weights, x = (torch.tensor(2.0), torch.tensor(3.0)), torch.ones(4)
    >>> result = fp.run(plan, weights, (x, 0 * x))
    >>> result.loss, result.grads
    (tensor(36.), (tensor(36.), tensor(24.)))

    Args:
        plan: made by `make_plan`.
        params: a tuple with one tree per stage, each on its stage's device (`place`).
        batch: ``(inputs, target)`` if the plan has a loss, else inputs: trees whose tensors are cut
            along axis 0 into at most M microbatches that differ by one row at most. Non-tensors are
            shared; see `Replicate`, `Axis`, `Microbatches`. Any device.
        state: a tuple with one tree per stage, () for stages without; None if no stage has state,
            or if the plan has a split's state that training does not change.
        feeds: by name, what stages declare as feeds; cut like the batch.
        seed: keys every random number; give another for each step. None: drawing raises.
        trainable: which leaves get gradients. None: those with ``requires_grad``, or every floating
            leaf if none has it. Else True or False, a function ``(name, leaf) -> bool`` (names as
            in `named_leaves`), or a tuple with a bool or a tree of bools per stage.
        loss_scale: gradients are multiplied by it (mixed precision); the loss is not.
        record: measure a timeline.
        ranges: every action is a range of torch.profiler, named as it is printed (``2F3``), and of
            NVTX on CUDA devices. (Other threads are seen by a profiler with
            ``profile_all_threads``; the how-to on profilers has it.)
        observe: a function ``(action, name, value)`` that is called for each value of each action:
            ``"input"``, ``"skip NAME"``, ``"feed NAME"`` and ``"target"`` before a forward,
            ``"output"``, ``"stash NAME"``, ``"loss"`` and ``"auxiliary loss"`` after it;
            ``"output gradient"`` and ``"stash gradient NAME"`` before a backward, ``"input
            gradient"``, ``"skip gradient NAME"`` and ``"parameter gradients"`` (the sums so far, by
            name) after it. Tensors are detached and read-only. Calls are made on the threads of
            lanes, one at a time. None costs nothing.
        executor: "threads" (a thread per lane), "serial" (this thread, plan order: debuggers,
            profilers and hooks work), `lanes` (threads kept between runs), `graphs` (one CUDA
            graph), anything else with ``run(plan, params, batch, options)``, or None: threads where
            at least two lanes are on the CPU ("serial" is quicker where actions take less than 100
            us). Same bits.
        threads_per_lane: intra-op threads; None: cores, or ``torch.get_num_threads()`` where that
            is less, divided by lanes. Some of torch's kernels divide sums among them, so that other
            numbers of threads give other bits.
        check: any of "finite" (NaN or Inf in what a stage hands on is an error that names stage and
            microbatch; costs a look at every value), "used" (a trainable leaf that no backward
            reached is an error). See also `Result.finite`, which costs nothing during the run.
        timeout: seconds. When no lane begins an action for so long, RunTimeout says what each did
            last and waits for, with its Python stack. Code that cannot be interrupted is left
            behind in its thread. Python's one ``faulthandler.dump_traceback_later`` is taken for
            the length of the run.
        optimizer: of a schedule that steps (`schedules.step_params`) what steps: parameters and its
            state are written to, as by `step` after the run, with the same bits; each stage's on
            its lane, beside what others do. Where the run fails, or `step` would not have stepped
            (inf or NaN under a loss scale), they are what they were. One that is not torch's own,
            or has hooks, is stepped as a whole when all is done. With `ranks` each has one of its
            own leaves.
        max_norm: of `step`, for such a schedule.

    Raises:
        PlanError, PlacementError, BatchError: something does not fit; nothing has run.
        StageError: user code failed; also an instance of what it raised, see there.
        NotFiniteError, RunTimeout: see ``check`` and ``timeout``.
    """
    options = RunOptions(
        state=state,
        feeds=feeds,
        seed=seed,
        trainable=trainable,
        loss_scale=loss_scale,
        threads_per_lane=threads_per_lane,
        check=check,
        record=record,
        ranges=ranges,
        observe=observe,
        timeout=timeout,
        optimizer=optimizer,
        max_norm=max_norm,
    )
    try:
        return outside_of_graphs(_run)(plan, params, batch, executor, options)
    except StageError as error:  # its cause has the user's frames, so frames of the run are dropped
        raise error.with_traceback(None) from error.__cause__


def _run(
    plan: Plan, params: Sequence[Tree], batch: Any, executor: ExecutorLike, options: RunOptions
) -> Result:
    return executor_for(executor, plan).run(plan, params, batch, options)


def value_and_grad(
    plan: Plan, **options: Any
) -> Callable[..., tuple[tuple[Tensor, Result], tuple[Tree, ...]]]:
    """Return a function that computes the loss and the gradients of a batch, as in JAX.

    ``fp.value_and_grad(plan)(params, batch)`` returns ``(loss, result), grads``. It calls `run`
    and reads ``loss`` and ``grads`` from the `Result`. New state and outputs are in ``result``,
    which takes the place of JAX's auxiliary output.

    >>> double = fp.stage(lambda w, x: x * w)
    >>> schedule = fp.schedules.one_f_one_b(2, 2)
    >>> plan = fp.make_plan([double, double], schedule, loss=nn.functional.mse_loss, devices="cpu")
    >>> weights, x = (torch.tensor(2.0), torch.tensor(3.0)), torch.ones(4)
    >>> (loss, result), grads = fp.value_and_grad(plan)(weights, (x, 0 * x))
    >>> loss, grads
    (tensor(36.), (tensor(36.), tensor(24.)))

    Args:
        plan: a plan whose schedule has backwards.
        options: keyword arguments of every `run`, such as ``executor`` or ``trainable``.

    Returns:
        A function ``(params, batch, **options)``. Its options, such as ``state`` and ``seed``, go
        to `run` and replace options of the same name.

    Raises:
        PlanError: the plan has no loss, or its schedule has no backwards.
        TypeError: `run` has no option of this name.
    """
    if not isinstance(plan, Plan) or plan.loss is None or not plan.schedule.has_backward:
        raise PlanError(
            "value_and_grad takes a plan with a loss and backwards: make_plan(stages, schedule, "
            f"loss=fn) with a schedule such as fp.schedules.one_f_one_b; got {plan!r}"
        )
    unknown = sorted(set(options) - set(signature(run).parameters))
    if unknown:
        raise TypeError(f"value_and_grad got an option that fp.run does not have: {unknown[0]!r}")

    def computed(
        params: Sequence[Tree], batch: Any, **more: Any
    ) -> tuple[tuple[Tensor, Result], tuple[Tree, ...]]:
        result = run(plan, params, batch, **(options | more))
        assert result.loss is not None
        assert result.grads is not None
        return (result.loss, result), result.grads

    return computed
