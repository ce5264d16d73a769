"""Stages that change state of the whole process: switches of torch, and the level of forward-mode
derivatives."""

from __future__ import annotations

import threading
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from common import cpu_plan
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel

import funcpipe as fp
from funcpipe._src.engine.switches import SwitchWatch, autocast_depth, switches
from funcpipe._src.stages.context import autocast_now
from funcpipe.testing import CheckError, check_stage

X = torch.linspace(-1, 1, 32).reshape(8, 4)


def plan_of(function, *, schedule=None, loss=F.mse_loss):
    stages = [fp.stage(function, name=f"s{number}") for number in range(2)]
    return fp.make_plan(
        stages, schedule or fp.schedules.one_f_one_b(2, 4), loss=loss, devices="cpu"
    )


def params():
    generator = torch.Generator().manual_seed(0)
    return tuple({"w": torch.randn(4, 4, generator=generator)} for _ in range(2))


def settings():
    """Read all of torch's switches that have a getter, and the settings of this thread."""
    found = {(each.name, each.setter): each.read() for each in switches() if each.read is not None}
    return (
        found,
        torch.is_grad_enabled(),
        autocast_now(),
        autocast_depth(),
        forward_ad._current_level,
    )


@pytest.fixture(autouse=True)
def unchanged():
    """Check after each test that settings and torch's functions are as before."""
    functions = {each: vars(each.owner)[each.setter] for each in switches()}
    before = settings()
    yield
    assert before == settings()
    assert all(vars(each.owner)[each.setter] is function for each, function in functions.items())


def by_jvp(p, x):
    return torch.func.jvp(lambda v: torch.tanh(v @ p["w"]), (x,), (torch.ones_like(x),))[1]


def by_jacfwd(p, x):
    return x + torch.func.vmap(torch.func.jacfwd(lambda v: torch.tanh(v @ p["w"]).sum()))(x)


def by_hessian(p, x):
    return x + torch.func.vmap(torch.func.hessian(lambda v: torch.tanh(v @ p["w"]).sum()))(x).sum(1)


def by_dual_level(p, x):
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(
            torch.tanh(forward_ad.make_dual(x, torch.ones_like(x)) @ p["w"])
        ).tangent


def by_level_alone(p, x):
    level = forward_ad.enter_dual_level()
    try:
        return forward_ad.unpack_dual(
            torch.tanh(forward_ad.make_dual(x, torch.ones_like(x)) @ p["w"])
        ).tangent
    finally:
        forward_ad.exit_dual_level(level=level)


def by_old_jvp(p, x):
    function = lambda v: torch.tanh(v @ p["w"].detach()).sum(0)
    rows = torch.autograd.functional.jacobian(
        function, x.detach(), strategy="forward-mode", vectorize=True
    )
    return x @ p["w"] + rows.sum()


class JvpInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return torch.func.jvp(torch.sin, (gradient,), (gradient,))[1]


def by_backward(p, x):
    return JvpInBackward.apply(x @ p["w"])


FORWARD_MODE = [
    by_jvp,
    by_jacfwd,
    by_hessian,
    by_dual_level,
    by_level_alone,
    by_old_jvp,
    by_backward,
]


@pytest.mark.parametrize("function", FORWARD_MODE, ids=lambda function: function.__name__)
def test_forward_mode_derivatives_on_several_lanes(function):
    """On threads every run raises PlanError, and the process is as before; on one thread the
    numbers are right."""
    plan, weights = plan_of(function), params()
    for _ in range(20):
        with pytest.raises(fp.StageError, match=r"forward-mode derivatives .* executor='serial'"):
            fp.run(plan, weights, (X, X), trainable=True, timeout=60)
    ran = fp.run(plan, weights, (X, X), trainable=True, executor="serial")
    wanted = fp.run_sequential(plan, weights, (X, X), trainable=True)
    assert torch.equal(ran.loss, wanted.loss)
    assert all(torch.equal(a["w"], b["w"]) for a, b in zip(ran.grads, wanted.grads, strict=True))


def test_forward_mode_derivatives_outside_of_the_run():
    """A thread of the user computes them while lanes run."""
    plan, weights, stop, found = plan_of(lambda p, x: x @ p["w"]), params(), threading.Event(), []

    def derivatives():
        while not stop.is_set():
            found.append(torch.func.jvp(torch.sin, (X,), (torch.ones_like(X),))[1])

    thread = threading.Thread(target=derivatives)
    thread.start()
    try:
        for _ in range(20):
            fp.run(plan, weights, (X, X), trainable=True)
    finally:
        stop.set()
        thread.join()
    assert found
    assert all(torch.equal(each, X.cos()) for each in found)


@pytest.mark.parametrize("dual", ["params", "batch"])
def test_dual_tensors_of_the_caller(dual):
    """A run would drop their tangents; without dual tensors a dual level is harmless."""
    plan, given = plan_of(lambda p, x: x @ p["w"]), params()
    with forward_ad.dual_level():
        x = forward_ad.make_dual(X, X) if dual == "batch" else X
        trees = (
            tuple({"w": forward_ad.make_dual(p["w"], p["w"])} for p in given)
            if dual == "params"
            else given
        )
        with pytest.raises(fp.PlanError, match="params or batch contain dual tensors"):
            fp.run(plan, trees, (x, X))
        fp.run(plan, given, (X, X))


def attend(p, x):
    with sdpa_kernel([SDPBackend.MATH], set_priority=True):
        y = (x @ p["w"])[None, None]
        return F.scaled_dot_product_attention(y, y, y)[0, 0]


def deterministic(p, x):
    torch.use_deterministic_algorithms(True)
    y = x @ p["w"]
    torch.use_deterministic_algorithms(False)
    return y


def in_double(p, x):
    torch.set_default_dtype(torch.float64)
    y = x @ p["w"]
    torch.set_default_dtype(torch.float32)
    return y


def watching_anomalies(p, x):
    with torch.autograd.detect_anomaly():
        return x @ p["w"]


def by_mkldnn_flags(p, x):
    with torch.backends.mkldnn.flags(enabled=False):
        return x @ p["w"]


def by_attribute(p, x):
    torch.backends.mkldnn.enabled = False
    y = x @ p["w"]
    torch.backends.mkldnn.enabled = True
    return y


def by_precision(p, x):
    torch.set_float32_matmul_precision("high")
    y = x @ p["w"]
    torch.set_float32_matmul_precision("highest")
    return y


CONTEXTS = {
    attend: r"sdpa_kernel",
    deterministic: r"torch.use_deterministic_algorithms",
    in_double: r"torch.set_default_dtype",
    watching_anomalies: r"torch.autograd.set_detect_anomaly",
    by_mkldnn_flags: r"torch.backends.mkldnn",
    by_attribute: r"an attribute of torch.backends",
    by_precision: r"torch.set_float32_matmul_precision",
}


@pytest.mark.filterwarnings(
    "ignore:Anomaly Detection:UserWarning", "ignore:TF32 acceleration:UserWarning"
)
@pytest.mark.parametrize("function", CONTEXTS, ids=lambda function: function.__name__)
def test_a_switch_changed_inside_of_a_stage(function):
    """On threads PlanError comes before the change; on one thread the stage may change and
    restore."""
    plan, weights = plan_of(function), params()
    for _ in range(10):
        with pytest.raises(fp.StageError, match=rf"{CONTEXTS[function]}.* executor='serial'"):
            fp.run(plan, weights, (X, X), trainable=True)
    ran = fp.run(plan, weights, (X, X), trainable=True, executor="serial")
    wanted = fp.run_sequential(plan, weights, (X, X), trainable=True)
    assert torch.equal(ran.grads[0]["w"], wanted.grads[0]["w"])


def test_a_refusal_that_a_stage_swallows():
    """The stage would go on with the present kernels, so the run raises after its action."""

    def careless(p, x):
        try:
            return attend(p, x)
        except fp.FuncpipeError:
            return x @ p["w"]

    for _ in range(3):
        with pytest.raises(fp.StageError, match="sdpa_kernel"):
            fp.run(plan_of(careless), params(), (X, X), trainable=True)


@pytest.mark.parametrize("threads", [True, False])
def test_a_switch_set_to_what_it_is(threads):
    """torch.compile does so around every compilation."""

    def again(p, x):
        torch.use_deterministic_algorithms(False, warn_only=False)
        torch.set_default_dtype(torch.float32)
        torch.backends.mkldnn.enabled = True
        return x @ p["w"]

    fp.run(
        plan_of(again),
        params(),
        (X, X),
        trainable=True,
        executor="threads" if threads else "serial",
    )


LEFT = {
    "torch.set_default_dtype": lambda: torch.set_default_dtype(torch.float64),
    "torch.use_deterministic_algorithms": lambda: torch.use_deterministic_algorithms(
        True, warn_only=True
    ),
    "torch.autograd.set_detect_anomaly": lambda: torch.autograd.set_detect_anomaly(True),
    "torch.nn.attention.sdpa_kernel": lambda: torch.backends.cuda.enable_flash_sdp(False),
    "torch.backends.mkldnn": lambda: torch.backends.mkldnn.set_flags(False),
    "an attribute of torch.backends": lambda: setattr(torch.backends.mkldnn, "deterministic", True),
    "torch.backends.mha.set_fastpath_enabled": lambda: torch.backends.mha.set_fastpath_enabled(
        False
    ),
    "torch.set_grad_enabled": lambda: torch.set_grad_enabled(False),
    "autocast": lambda: torch.autocast("cpu").__enter__(),
}


@pytest.mark.parametrize("run", ["serial", "sequential", "one lane"])
@pytest.mark.parametrize("name", LEFT)
def test_a_switch_that_a_stage_leaves_changed(name, run):
    """The run raises with its name before the next stage runs, and restores the process."""
    later = []

    def first(p, x):
        y = x @ p["w"]
        LEFT[name]()
        return y

    def second(p, x):
        later.append(x)
        return x @ p["w"]

    stages = [fp.stage(first, name="first"), fp.stage(second, name="second")]
    schedule = (
        fp.schedules.fill_drain(2, 2, num_devices=1)
        if run == "one lane"
        else fp.schedules.fill_drain(2, 2)
    )
    plan = cpu_plan(stages, schedule)
    do = fp.run_sequential if run == "sequential" else fp.run
    options = (
        {} if run == "sequential" else {"executor": "serial" if run == "serial" else "threads"}
    )
    with pytest.raises(
        fp.StageError, match=rf"changes {name} and does not restore it.*[\s\S]*'first'"
    ):
        do(plan, params(), (X, X), trainable=True, **options)
    assert not later


def test_autocast_left_on_by_a_stage_of_a_lane():
    """Autocast is a setting of the thread, but a lane runs several stages."""

    def first(p, x):
        torch.autocast("cpu", torch.bfloat16).__enter__()
        return (x @ p["w"]).float()

    stages = [fp.stage(first), *(fp.stage(lambda p, x: x @ p["w"]) for _ in range(3))]
    schedule = fp.schedules.interleaved(4, 2, num_devices=2)
    plan = cpu_plan(stages, schedule)
    with pytest.raises(fp.StageError, match="changes autocast and does not restore it"):
        fp.run(plan, (*params(), *params()), (X, X), trainable=True, executor="threads")


def test_a_stage_that_fails_inside_of_a_switch():
    """Its changes are restored."""

    def failing(p, x):
        torch.set_default_dtype(torch.float64)
        raise ValueError("mine")

    with pytest.raises(fp.StageError, match="mine"):
        fp.run(plan_of(failing), params(), (X, X), trainable=True, executor="serial")


@pytest.mark.parametrize(
    "switch", [each for each in switches() if each.read is not None], ids=lambda each: each.setter
)
def test_every_switch_is_refused_on_threads_and_put_back(switch):
    """Each switch in the table is found where torch looks it up, read, and written."""
    now = switch.read()
    with SwitchWatch(alone=False) as watch, pytest.raises(fp.PlanError, match="executor='serial'"):
        watch.before(switch, ("another",))
    with SwitchWatch(alone=True):
        getattr(switch.owner, switch.setter)(*now[:1])
    switch.write(*now)
    assert now == switch.read()


@pytest.mark.parametrize(
    "run",
    [fp.run_sequential, partial(fp.run, executor="serial"), partial(fp.run, executor="threads")],
    ids=["sequential", "serial", "threads"],
)
def test_a_stage_that_seeds_torch(run):
    """The seed would have no effect, because each draw has a key."""

    def seeded(p, x):
        try:
            torch.manual_seed(3)
        except fp.PlanError:
            pass  # swallowed, and raised again after the action
        return x @ p["w"] + torch.randn(4)

    plan = plan_of(seeded)
    with pytest.raises(fp.PlanError, match="calls torch.manual_seed, which has no effect within"):
        run(plan, params(), (X, X), seed=0)
    torch.manual_seed(3)  # works again outside of runs


def test_check_stage_names_the_switch():
    def leaving(p, x):
        torch.use_deterministic_algorithms(True)
        return x @ p["w"]

    with pytest.raises(CheckError, match="use_deterministic_algorithms"):
        check_stage(fp.stage(leaving), params()[0], X)


def test_attention_kernels_around_the_run():
    """The caller's choice holds in all lanes, and stays."""
    attention = plan_of(
        lambda p, x: F.scaled_dot_product_attention(*[(x @ p["w"])[None, None]] * 3)[0, 0]
    )
    with sdpa_kernel(SDPBackend.MATH):
        ran = fp.run(attention, params(), (X, X), trainable=True)
        wanted = fp.run_sequential(attention, params(), (X, X), trainable=True)
    assert torch.equal(ran.grads[0]["w"], wanted.grads[0]["w"])


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.parametrize("executor", ["serial", "threads"])
def test_layers_that_are_compiled_inside_of_a_run(executor):
    """torch.compile sets switches to their present values; afterwards its tables contain torch's
    functions."""
    plan = plan_of(lambda p, x: torch.compile(torch.tanh, backend="eager")(x @ p["w"]))
    fp.run(plan, params(), (X, X), trainable=True, executor=executor)
    w = params()[0]["w"]  # outside: torch 2.11 cannot compile a generator
    assert torch.compile(lambda x: attend({"w": w}, x), backend="eager")(X).shape == X.shape
