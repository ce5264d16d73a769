"""Law 8: what the caller has switched on holds inside stages, on every thread; what cannot travel
is refused."""

import contextvars
import threading

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from common import EXECUTORS, assert_same_result, cpu_plan, forward_plan, ids, same
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import funcpipe as fp

NAME = contextvars.ContextVar("name", default="nobody")
X = torch.linspace(-2, 2, 24).reshape(6, 4)
PARAMS = tuple({"w": torch.linspace(-1, 1, 16).reshape(4, 4) * (i + 1)} for i in range(2))


def net(look=lambda: None):
    """Two stages, each a matrix product; ``look`` is called inside of each."""

    def linear(p, x):
        look()
        return torch.tanh(x @ p["w"])

    return fp.stage(linear, name="first"), fp.stage(linear, name="second")


def train(look=lambda: None, schedule=None):
    return cpu_plan(net(look), schedule or fp.schedules.one_f_one_b(2, 3))


def evaluate(look=lambda: None, **options):
    return forward_plan(net(look), 3, **options)


def seen(ask, plan_of, executor, batch):
    """What ``ask`` answers inside of stages."""
    answers = []
    fp.run(plan_of(lambda: answers.append(ask())), PARAMS, batch, executor=executor)
    return set(answers)


@pytest.mark.parametrize("executor", EXECUTORS)
def test_the_callers_context_holds_inside_stages(executor):
    """autocast with its dtype, default device, context variables; and nothing where nothing is
    on."""
    ask = lambda: (
        torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu"),
        torch.empty(1).device.type,
        NAME.get(),
    )
    assert {(False, "cpu", "nobody")} == seen(ask, train, executor, (X, X))
    token = NAME.set("somebody")
    with torch.autocast("cpu", torch.bfloat16), torch.device("meta"):
        assert {(torch.bfloat16, "meta", "somebody")} == seen(ask, train, executor, (X, X))
    with torch.autocast("cpu", torch.float16):
        assert {(torch.float16, "cpu", "somebody")} == seen(ask, train, executor, (X, X))
    NAME.reset(token)
    torch.set_default_device("meta")
    try:
        assert {(False, "meta", "nobody")} == seen(ask, train, executor, (X, X))
    finally:
        torch.set_default_device(None)


@pytest.mark.parametrize("executor", EXECUTORS)
def test_modes_are_still_on_after_a_run(executor):
    """What was entered around the run is as it was, the autocast cache too."""
    with torch.autocast("cpu", torch.bfloat16), torch.device("meta"):
        fp.run(train(lambda: torch.tensor(1)), PARAMS, (X, X), executor=executor)
        assert torch.is_autocast_enabled("cpu")
        assert torch.is_autocast_cache_enabled()
        assert "meta" == torch.empty(1).device.type
    assert not torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize("executor", EXECUTORS)
def test_grad_mode(executor):
    """Autograd is on in plans with backwards, also where no residual is kept; off in others,
    whatever the caller has."""
    assert {True} == seen(torch.is_grad_enabled, train, executor, (X, X))
    rematted = lambda look: train(look, fp.schedules.remat(fp.schedules.one_f_one_b(2, 3)))
    assert {True} == seen(torch.is_grad_enabled, rematted, executor, (X, X))
    for mode in (torch.enable_grad, torch.no_grad):
        with mode():
            assert {False} == seen(torch.is_grad_enabled, evaluate, executor, X)
            assert (mode is torch.enable_grad) == torch.is_grad_enabled()


@pytest.mark.parametrize("executor", EXECUTORS)
def test_inference_mode(executor):
    """Forward-only plans run in the caller's inference mode, with the same numbers; training goes
    on with the tensors."""
    expected = fp.run(evaluate(), PARAMS, X, executor=executor).outputs
    with torch.inference_mode():
        assert {True} == seen(torch.is_inference_mode_enabled, evaluate, executor, X)
        outputs = fp.run(evaluate(), PARAMS, X, executor=executor).outputs
    assert outputs.is_inference()
    assert torch.equal(expected, outputs)
    assert {False} == seen(torch.is_inference_mode_enabled, evaluate, executor, X)
    fp.run(train(), PARAMS, (outputs, outputs), executor=executor)


@pytest.mark.parametrize("executor", EXECUTORS)
def test_inference_mode_with_buffers(executor):
    """Modules with buffers too."""
    stage, params, state = fp.from_module(
        nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), name="m"
    )
    plan = forward_plan([stage], 3)
    expected = fp.run(plan, (params,), X, state=(state,), executor=executor).outputs
    with torch.inference_mode():
        assert torch.equal(
            expected, fp.run(plan, (params,), X, state=(state,), executor=executor).outputs
        )


def by_autograd(stages, parts):
    """Loss and gradients of plain autograd, microbatch by microbatch, the backward outside of
    autocast."""
    leaves = [{"w": p["w"].clone().requires_grad_()} for p in PARAMS]
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        loss = sum(F.mse_loss(fp.apply(stages, leaves, x).y, x) for x in X.chunk(parts)) / parts
    loss.backward()
    return loss.detach(), tuple({"w": p["w"].grad} for p in leaves)


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize(
    "base", [fp.schedules.one_f_one_b(2, 3), fp.schedules.zero_bubble(2, 3)], ids=ids
)
def test_autocast_with_remat(base, executor):
    """Same bits with and without remat, those of the oracle; gradients are full, in the parameters'
    dtype, and right."""
    with torch.autocast("cpu", torch.bfloat16):
        expected = fp.run_sequential(train(schedule=base), PARAMS, (X, X), threads_per_lane=1)
        for schedule in (
            base,
            fp.schedules.remat(base),
            fp.schedules.remat(base, keep=lambda action: action.microbatch == 1),
        ):
            result = fp.run(
                train(schedule=schedule), PARAMS, (X, X), executor=executor, threads_per_lane=1
            )
            assert_same_result(expected, result)
    loss, grads = by_autograd(net(), 3)
    assert [torch.float32] * 2 == [leaf.dtype for leaf in fp.leaves(result.grads)]
    torch.testing.assert_close(loss, result.loss)
    torch.testing.assert_close(grads, result.grads)
    plain = fp.run(train(schedule=base), PARAMS, (X, X), executor=executor)
    assert not same(plain.grads, result.grads)


@pytest.mark.parametrize("executor", EXECUTORS)
def test_autocast_switched_off_inside_a_stage(executor):
    """A stage that computes in full precision on purpose gets its gradients in full precision."""

    def full(p, x):
        with torch.autocast("cpu", enabled=False):
            return torch.tanh(x.float() @ p["w"])

    stages = (fp.stage(full), fp.stage(full))
    plan = cpu_plan(stages, fp.schedules.one_f_one_b(2, 3))
    with torch.autocast("cpu", torch.bfloat16):
        result = fp.run(plan, PARAMS, (X, X), executor=executor)
    torch.testing.assert_close(by_autograd(stages, 3)[1], result.grads)


class Functions(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


class Dispatches(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


MODES = [
    (Functions, "function mode Functions"),
    (Dispatches, "dispatch mode Dispatches"),
    (
        lambda: torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t),
        "saved-tensor hooks",
    ),
]


@pytest.mark.parametrize(("mode", "word"), MODES, ids=lambda v: v if isinstance(v, str) else "")
def test_what_cannot_travel_is_refused(mode, word):
    """Threads name what and the way out; the serial executor takes it; None chooses serial and says
    why."""
    plan = train()
    expected = fp.run(plan, PARAMS, (X, X), executor="serial")
    with fp.lanes(plan) as lanes, mode():
        for executor in ("threads", lanes):
            with pytest.raises(fp.PlanError, match=rf"{word}.*executor='serial'"):
                fp.run(plan, PARAMS, (X, X), executor=executor)
        assert_same_result(expected, fp.run(plan, PARAMS, (X, X), executor="serial"))
        stats = fp.run(plan, PARAMS, (X, X)).stats
    assert "serial" == stats.executor
    assert word in stats.reason
    assert "threads" == fp.run(plan, PARAMS, (X, X), executor="threads").stats.executor


@pytest.mark.parametrize("call", [fp.run, fp.run_sequential], ids=lambda f: f.__name__)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode], ids=lambda f: f.__name__)
def test_backwards_without_autograd_are_refused(mode, call):
    """Before any stage runs; the message names the mode and the schedule to use."""
    ran = []
    plan = train(lambda: ran.append(1))
    with mode(), pytest.raises(fp.PlanError, match=rf"{mode.__name__}.*forwards\(\)"):
        call(plan, PARAMS, (X, X))
    assert [] == ran


@pytest.mark.parametrize("call", [fp.run, fp.run_sequential], ids=lambda f: f.__name__)
@pytest.mark.parametrize("executor", EXECUTORS)
def test_a_run_inside_a_stage_is_refused(executor, call):
    """The error has the coordinates of the outer stage and names what to use."""
    inner = train()
    plan = train(lambda: call(inner, PARAMS, (X, X)))
    with pytest.raises(fp.StageError, match=r"within a stage.*fp\.apply.*fp\.compose") as info:
        fp.run(plan, PARAMS, (X, X), executor=executor)
    assert isinstance(info.value, fp.FuncpipeError)
    assert "0F0" == info.value.funcpipe.action
    fp.run(inner, PARAMS, (X, X), executor=executor)


@pytest.mark.parametrize("call", [fp.run, fp.run_sequential], ids=lambda f: f.__name__)
@pytest.mark.parametrize("transform", ["grad", "vmap", "jvp"])
def test_transforms_are_refused(transform, call):
    """torch.func cannot look into a run; the message names what it can."""
    plan = train()
    loss = lambda x: call(plan, PARAMS, (x, x)).loss
    calls = {
        "grad": lambda: torch.func.grad(loss)(X),
        "vmap": lambda: torch.func.vmap(loss)(X[None]),
        "jvp": lambda: torch.func.jvp(loss, (X,), (X,)),
    }
    with pytest.raises(fp.FuncpipeError, match=r"fp\.apply.*fp\.vjp.*fp\.Pipe"):
        calls[transform]()


@pytest.mark.parametrize("executor", EXECUTORS)
def test_two_runs_at_the_same_time(executor):
    """From two threads of the user's, same plan, same stages (modules with state and dropout), same
    parameters."""
    layers = lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.3))
    stages, params, state = zip(*(fp.from_module(layers(), name=n) for n in "ab"), strict=True)
    plan = cpu_plan(stages, fp.schedules.one_f_one_b(2, 3))
    batches = [X, X * 2 + 1]
    options = {"state": state, "threads_per_lane": 1}
    expected = [
        fp.run_sequential(plan, params, (x, x), seed=i, **options) for i, x in enumerate(batches)
    ]
    results, start = [[], []], threading.Barrier(2)

    def user(index):
        x = batches[index]
        start.wait(5)
        for _ in range(40):
            results[index].append(
                fp.run(plan, params, (x, x), seed=index, executor=executor, **options)
            )

    threads = [threading.Thread(target=user, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for index in range(2):
        assert 40 == len(results[index])
        for result in results[index]:
            assert_same_result(expected[index], result)


@pytest.mark.parametrize("executor", EXECUTORS)
def test_nobody_changes_the_number_of_threads_of_a_lane(executor):
    """What another thread sets while a run is on does not reach its lanes: bits depend on the
    number."""

    def look():
        other = threading.Thread(target=torch.set_num_threads, args=(3,))
        other.start()
        other.join()
        counts.append(torch.get_num_threads())

    for threads in (1, 2):
        counts = []
        fp.run(train(look), PARAMS, (X, X), executor=executor, threads_per_lane=threads)
        assert {threads} == set(counts)


def test_busy_lanes_are_refused():
    """One run at a time on the same lanes; another set of lanes, or none, works meanwhile."""
    inside, leave = threading.Event(), threading.Event()

    def wait():
        inside.set()
        leave.wait(5)

    plan, other = train(wait), train()
    with fp.lanes(plan) as lanes:
        user = threading.Thread(target=lambda: fp.run(plan, PARAMS, (X, X), executor=lanes))
        user.start()
        inside.wait(5)
        try:
            with pytest.raises(fp.FuncpipeError, match=r"busy with another run.*fp\.lanes\(plan\)"):
                fp.run(other, PARAMS, (X, X), executor=lanes)
            fp.run(other, PARAMS, (X, X), executor="threads")
        finally:
            leave.set()
            user.join()
        fp.run(other, PARAMS, (X, X), executor=lanes)


def test_lanes_serve_many_runs():
    """50 runs, among them one that fails, give the oracle's bits; the threads stay, and end with
    the block."""
    fail = []
    plan = train(lambda: fail and fail.pop()())
    expected = fp.run_sequential(plan, PARAMS, (X, X), threads_per_lane=1)
    names = lambda: {t.ident for t in threading.enumerate() if t.name.startswith("funcpipe lane")}
    with fp.lanes(plan) as lanes:
        first = names()
        assert plan.num_devices == len(first)
        for index in range(50):
            if index == 25:
                assert first == names()
                fail.append(lambda: 1 / 0)
                with pytest.raises(ZeroDivisionError):
                    fp.run(plan, PARAMS, (X, X), executor=lanes)
            assert_same_result(
                expected, fp.run(plan, PARAMS, (X, X), executor=lanes, threads_per_lane=1)
            )
        assert plan.num_devices == len(names())
    assert set() == names()
    wrong = cpu_plan(net(), fp.schedules.one_f_one_b(2, 2, num_devices=1))
    with (
        fp.lanes(plan) as lanes,
        pytest.raises(fp.PlanError, match=r"these are 2 lanes, but the plan has 1"),
    ):
        fp.run(wrong, PARAMS, (X, X), executor=lanes)
