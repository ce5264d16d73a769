"""`run`: run a plan on a batch. `value_and_grad`: `run` with the signature of JAX."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from inspect import signature
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from funcpipe._src.core.errors import PlanError, StageError
from funcpipe._src.core.tree import Tree
from funcpipe._src.data.plan import Plan
from funcpipe._src.data.result import Carry, Result
from funcpipe._src.engine.executors import executor_for
from funcpipe._src.engine.options import ExecutorLike, RunOptions
from funcpipe._src.stages.context import outside_of_graphs
from funcpipe._src.stages.observed import ObserveFn
from funcpipe._src.stages.trainable import Trainable


def run(
    plan: Plan,
    params: Sequence[Tree],
    batch: Any,
    *,
    state: Sequence[Tree] | None = None,
    feeds: Mapping[str, Tree] | None = None,
    carry: Carry | None = None,
    seed: int | None = None,
    trainable: Trainable = None,
    loss_scale: float = 1.0,
    record: bool = False,
    ranges: bool = False,
    observe: ObserveFn | None = None,
    executor: ExecutorLike = None,
    threads_per_lane: int | None = None,
    check: str | Sequence[str] = (),
    timeout: float | None = None,
    optimizer: Optimizer | None = None,
    max_norm: float | None = None,
) -> Result:
    """Run a plan on one batch, and return losses, gradients, new state and outputs.

    Results are bit-identical to `run_sequential`, for all schedules, devices and executors, and
    with remat, if ``threads_per_lane`` is the same. A run without ``optimizer`` does not write to
    your tensors. On the CPU, `run` raises PlanError if a stage writes to its params.

    >>> double = fp.stage(lambda w, x: x * w)
    >>> schedule = fp.schedules.one_f_one_b(2, 2)
    >>> plan = fp.make_plan([double, double], schedule, loss=nn.functional.mse_loss, devices="cpu")
    >>> weights, x = (torch.tensor(2.0), torch.tensor(3.0)), torch.ones(4)
    >>> result = fp.run(plan, weights, (x, 0 * x))
    >>> result.loss, result.grads
    (tensor(36.), (tensor(36.), tensor(24.)))

    Args:
        plan: a plan of `make_plan`.
        params: a tuple with one tree per stage. Each tree is on the device of its stage, see
            `place`.
        batch: ``(inputs, target)`` if the plan has a loss, else the inputs. Inputs and target are
            trees on any devices. Their tensors ``[B, ...]`` are cut along axis 0 into at most M
            microbatches, whose sizes differ by at most one row. Each microbatch gets all leaves
            that are not tensors. `Replicate`, `Axis` and `Microbatches` change the cut.
        state: a tuple with one tree per stage, () for a stage without state. None, the default: no
            stage has state, or training does not change the state that `split` put into the plan.
        feeds: a tree for each name that stages declare as a feed. Cut like the batch.
        carry: ``result.carry`` of the run before, for a plan of ``make_plan(carry=True)`` that reads
            a sequence in several runs. The batch has the next part of each row. None, the default:
            the sequences begin.
        seed: an int, the key of all random numbers. Give another seed in each step. None, the
            default: a stage that draws raises `DrawError`.
        trainable: the leaves that get gradients. None, the default: the leaves with
            ``requires_grad``, or all floating-point leaves if no leaf has it. True or False: all or
            none. A function ``(name, leaf) -> bool``, with the names of `named_leaves`. Or a tuple
            with a bool or a tree of bools per stage.
        loss_scale: a factor of the gradients, for mixed precision. The loss is not multiplied.
        record: measure the start and end of each action, for ``result.timeline``. Python's garbage
            collector is off meanwhile, as in ``timeit``.
        ranges: make each action a range of torch.profiler, named like ``action 2F3``. On CUDA devices also
            a range of NVTX. A profiler sees the lanes' threads with ``profile_all_threads``.
        observe: a function ``(action, name, value)``, called for each value of each action. The names
            of a forward are "input", "skip NAME", "feed NAME" and "target", then "output", "stash
            NAME", "loss" and "auxiliary loss". The names of a backward are "output gradient" and
            "stash gradient NAME", then "input gradient", "skip gradient NAME" and "parameter
            gradients": the sums so far, by name. With slices there are "carry in", "carry out" and
            their gradients. Tensors are detached, and `run` raises `PlanError` if the function
            writes to them. Lanes call the function one at a time. None, the default: no cost.
        executor: one of these; all executors give bit-identical results.

            - "threads": one thread per lane.
            - "serial": the calling thread, in plan order. Debuggers, profilers and hooks work. This
              executor is faster if actions take less than 100 us.
            - a `lanes` object: threads that are kept between runs.
            - a `graphs` object: one CUDA graph for a run.
            - a `ranks` object: several processes.
            - an object with ``run(plan, params, batch, options)``.
            - None, the default: "threads" if at least two lanes are on the CPU, else "serial". Also
              "serial" if threads cannot inherit a mode of the caller.
        threads_per_lane: the number of intra-op threads of each lane. None, the default: the number
            of cores, or ``torch.get_num_threads()`` if smaller, divided by the number of lanes.
            Another number of threads may change the rounding, because some kernels divide sums
            among threads.
        check: "finite", "used", or a sequence of both; the default is none. "finite" raises
            `NotFiniteError` for NaN or Inf in a value that a stage returns, and reads each value.
            "used" raises `PlanError` if no backward reached a trainable leaf. `Result.finite` is a
            check after the run, without cost during the run.
        timeout: seconds. If no lane begins an action for this time, `run` raises `RunTimeout`. The
            message has the last action of each lane, its present wait and its Python stack. Code
            that cannot be interrupted stays behind in its thread. The run uses the process's only
            timer of ``faulthandler.dump_traceback_later``. None, the default: no limit.
        optimizer: the optimizer of a schedule with steps (`schedules.step_params`). The run writes
            to the parameters and to the optimizer's state. The result is bit-identical to `step`
            after the run. Each lane steps its own stages, while other lanes still compute. If the
            run fails, or finds inf or NaN under a loss scale, the old values are restored. An
            optimizer with hooks, or not of torch, steps once after all lanes. With `ranks`, each
            process has its own optimizer of its own leaves.
        max_norm: the ``max_norm`` of `step`, for a schedule with steps.

    Returns:
        A `Result`.

    Raises:
        PlanError, PlacementError, BatchError: arguments do not fit together. No stage has run.
        StageError: user code failed. The error is also an instance of the original error's class.
        NotFiniteError: ``check="finite"`` found NaN or Inf.
        RunTimeout: no lane began an action for ``timeout`` seconds.
    """
    options = RunOptions(
        state=state,
        feeds=feeds,
        carry=carry,
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
    except StageError as error:  # the cause has the user's frames, so drop the frames of the run
        raise error.with_traceback(None) from error.__cause__


def _run(
    plan: Plan, params: Sequence[Tree], batch: Any, executor: ExecutorLike, options: RunOptions
) -> Result:
    return executor_for(executor, plan).run(plan, params, batch, options)


def value_and_grad(
    plan: Plan, **options: Any
) -> Callable[..., tuple[tuple[Tensor, Result], tuple[Tree, ...]]]:
    """Return a function that computes the loss and the gradients of a batch, as in JAX.

    ``fp.value_and_grad(plan)(params, batch)`` calls `run` and returns ``(loss, result), grads``.
    ``result`` is the `Result`, with new state and outputs, in the place of JAX's auxiliary output.

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
        TypeError: `run` has no option of this name. The returned function raises it for more than
            two positional arguments.
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
        params: Sequence[Tree], batch: Any, *others: Any, **more: Any
    ) -> tuple[tuple[Tensor, Result], tuple[Tree, ...]]:
        if others:
            raise TypeError(
                "the function of value_and_grad takes (params, batch), where batch is (inputs, "
                f"target); got {2 + len(others)} positional arguments"
            )
        result = run(plan, params, batch, **(options | more))
        assert result.loss is not None
        assert result.grads is not None
        return (result.loss, result), result.grads

    return computed
