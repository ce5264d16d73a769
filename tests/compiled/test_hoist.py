"""What depends on parameters and state alone is computed once a run; nothing large lies in memory
for it."""

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from common import cpu_plan, forward_plan, same
from torch.utils._python_dispatch import TorchDispatchMode

import funcpipe as fp

aten = torch.ops.aten
X, T = torch.randn(8, 6), torch.randn(8, 6)


class Count(TorchDispatchMode):
    """How often each operation runs."""

    def __init__(self):
        super().__init__()
        self.seen = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen[func] = self.seen.get(func, 0) + 1
        return func(*args, **(kwargs or {}))


def made(fn, params, x, **options):
    return fp.make_programs(fp.compile_stage(fp.stage(fn)), params, x, **options)


def both(fn, params, schedule, *, amp=False, x=X, target=T, **options):
    """Results of eager and of compiled stages, which are given or are all of one function."""
    stages = fn
    if callable(fn):
        stages = [fp.stage(fn, name=f"s{number}") for number in range(schedule.num_stages)]
    out = []
    for own in (stages, [fp.compile_stage(one, fuse=False) for one in stages]):
        loss = lambda y, t: F.mse_loss(y.float(), t)
        plan = cpu_plan(own, schedule, loss=loss, outputs=True)
        with torch.autocast("cpu", torch.bfloat16, enabled=amp):
            out.append(fp.run(plan, params, (x, target), threads_per_lane=1, **options))
    return out


def normed(p, x):
    return torch.tanh(x @ (p["g"] * p["v"] / torch.linalg.vector_norm(p["v"])))


def weights(count=2):
    torch.manual_seed(1)
    return tuple({"g": torch.randn(6), "v": torch.randn(6, 6)} for _ in range(count))


@pytest.mark.parametrize(
    "schedule",
    [
        fp.schedules.one_f_one_b(2, 4),
        fp.schedules.remat(fp.schedules.fill_drain(2, 4)),
        fp.schedules.zero_bubble(2, 4),
    ],
    ids=lambda s: s.name,
)
def test_a_weight_that_is_computed(schedule):
    """Once a run and shape, though every microbatch needs it; its gradient is added by each."""
    params = weights()
    eager, programs = both(normed, params, schedule, x=X[:7], target=T[:7])
    assert same(eager.loss, programs.loss)
    assert same(eager.grads, programs.grads)
    stage = fp.compile_stage(fp.stage(normed))
    plan = cpu_plan([stage] * 2, schedule)
    fp.run(plan, params, (X, T))
    with Count() as count:
        fp.run(plan, params, (X, T), executor="serial")
    assert 2 == count.seen[aten.linalg_vector_norm.default]
    assert "linalg_vector_norm" in str(fp.make_programs(stage, params[0], X).once)
    fp.run(plan, params, (X, T), executor="threads")


def test_casts_are_no_residuals():
    """Under autocast: F keeps what comes from its input alone."""
    stage, params, _ = fp.from_module(
        nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 32))
    )
    x = torch.randn(4, 32, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        programs = fp.make_programs(fp.compile_stage(stage), params, x)
    one = 4 * 32 * 2
    assert 3 * one == programs.residual_bytes  # x, the first product, gelu
    assert 2 * sum(leaf.numel() for leaf in fp.leaves(params)) == programs.once_bytes
    plain = fp.make_programs(fp.compile_stage(stage), params, x)
    assert 0 == plain.once_bytes  # views of parameters


def twice(p, x):
    return F.linear(torch.tanh(F.linear(x, p["w"], p["b"])), p["w"])


def test_bits_under_autocast():
    """Of a weight that is used twice, too: each use has a cast of its own, so its gradients are
    added in full precision."""
    params = tuple({"w": torch.randn(6, 6), "b": torch.randn(6)} for _ in range(2))
    eager, programs = both(twice, params, fp.schedules.zero_bubble(2, 4), amp=True)
    assert same(eager.grads, programs.grads)
    with torch.autocast("cpu", torch.bfloat16):  # with its cache, as outside of runs
        assert fp.make_programs(fp.compile_stage(fp.stage(twice)), params[0], X).once is not None


def test_views_of_parameters_take_no_memory():
    """Pieces, slices and transposed ones."""
    cases = [(lambda w, x: x @ w[:2].t(), 0), (lambda w, x: x * w[0].expand(8, 6), 0)]
    cases += [
        (lambda w, x: F.linear(x, w.chunk(3)[1]), 2 * 12 * 4)
    ]  # zeros: the gradients of the other pieces
    for fn, expected in cases:
        programs = made(fn, torch.ones(6, 6), X)
        assert programs.once is not None
        assert expected == programs.once_bytes


def test_small_masks_but_nothing_large():
    """Positions and masks of a few numbers are made once; what is larger than its parameters is
    made where it is used."""

    def masked(p, x):
        n = x.shape[0]
        return p["w"] * x + torch.ones(n, n).tril() @ x

    def biased(p, x):
        n = x.shape[0]
        return p["w"] * x + p["w"][torch.zeros(n, n, dtype=torch.long)] @ x

    params = {"w": torch.ones(6)}
    for fn, small, large in ((masked, 8, 600), (biased, 8, 600)):
        assert made(fn, params, torch.zeros(small, 6)).once_bytes >= small * small
        assert made(fn, params, torch.zeros(large, 6)).once_bytes < 2**20 < large * large * 4
    eager, programs = both(masked, (params, {"w": torch.ones(6)}), fp.schedules.one_f_one_b(2, 2))
    assert same(eager.grads, programs.grads)


def test_size_is_asked_of_what_stays():
    """A merged weight is no larger than the weight, though the product of its adapters is larger
    than they are."""

    def merged(p, x):
        return x @ (p["w"] + p["a"] @ p["b"])

    def apart(p, x):
        return x @ p["w"] + x @ (p["a"] @ p["b"]).t()

    def both_read(p, x):
        product = p["a"] @ p["b"]
        return x @ (p["w"] + product) + product[0]

    n = 600
    params = {
        "w": torch.randn(n, n) / n**0.5,
        "a": torch.randn(n, 4) / n**0.5,
        "b": torch.randn(4, n),
    }
    x = torch.zeros(4, n)
    whole = n * n * 4
    found = made(merged, params, x)
    assert whole == found.once_bytes
    assert 1 == str(found.once).count("torch.mm(")
    assert 1 == str(found.forward).count("torch.mm(")
    for fn, expected in ((apart, 0), (both_read, whole)):
        found = made(fn, params, x)
        assert expected == found.once_bytes
        assert "torch.mm(p" in str(found.forward).replace("torch.mm(x", "")
    small = tuple(
        {"w": torch.randn(6, 6), "a": torch.randn(6, 2), "b": torch.randn(2, 6)} for _ in range(2)
    )
    for fn in (merged, apart, both_read):
        eager, programs = both(fn, small, fp.schedules.one_f_one_b(2, 4))
        assert same(eager.loss, programs.loss)
        assert same(eager.grads, programs.grads)


@pytest.mark.slow
def test_large_on_the_way_to_what_stays():
    """A large value that both a microbatch and a kept one need is made by both; its own parts are
    still made once."""
    n = 600
    params = {
        "w": torch.randn(n, n) / n**0.5,
        "a": torch.randn(4, n) / n**0.5,
        "b": torch.randn(4, n),
    }
    forms = {
        "scaled": lambda p, x: x @ (p["w"] * (p["a"].t() @ p["b"])),
        "twice": lambda p, x: x @ (p["w"] + p["a"].t() @ p["b"]) + x @ (p["a"].t() @ p["b"]),
        "read": lambda p, x: x @ (p["w"] + (m := p["a"].t() @ p["b"])) + m[0],
        "two products": lambda p, x: x @ (p["w"] + (p["a"].t() @ p["b"]) * (p["b"].t() @ p["a"])),
        "sorted": lambda p, x: x @ p["w"].abs().sort()[0] + p["w"].abs().sort()[1][0],
        "outer": lambda p, x: (
            x @ ((o := p["b"][0][:, None] * p["b"][1][None]).tril() + p["w"]) + x @ o
        ),
    }
    x, other = torch.randn(8, n), {name: one.clone() for name, one in params.items()}
    for name, fn in forms.items():
        for amp in (False, True):
            eager, programs = both(
                fn, (params, other), fp.schedules.zero_bubble(2, 3), amp=amp, x=x[:7], target=x[:7]
            )
            assert same(eager.grads, programs.grads), (name, amp)


def test_memory_behind_small_views():
    """A few numbers of a large value would keep all of it."""
    n = 600
    params = {"a": torch.randn(n, 4), "b": torch.randn(4, n)}
    for fn in (
        lambda p, x: x + (p["a"] @ p["b"]).unfold(0, 1, n)[0, :4, 0],
        lambda p, x: x + (p["a"] @ p["b"])[0, :4],
    ):
        assert made(fn, params, torch.zeros(2, 4)).once_bytes < 2**16


def test_what_draws_is_drawn_for_every_microbatch():
    """Noise, also noise that fills a fresh tensor, and noise on weights."""

    def noisy(p, x):
        return x @ (p["v"] + torch.empty(6, 6).normal_()) + torch.rand(6)

    programs = made(noisy, {"v": torch.ones(6, 6)}, X)
    assert "R.of(" in str(programs.forward)
    assert "normal" not in str(programs.once)
    assert "rand" not in str(programs.once)
    eager, programs = both(
        noisy, tuple({"v": one["v"]} for one in weights()), fp.schedules.one_f_one_b(2, 4), seed=3
    )
    assert same(eager.grads, programs.grads)


def test_outputs_of_parameters_alone():
    """A stage that hands out what it computes of its parameters: the same value each time, and its
    gradient adds up."""

    def constant(p, x):
        return fp.Out(x + 1, stash={"c": p["v"].exp()})

    def late(p, x, *, skips):
        return x * p["g"] + skips["c"].sum()

    params = ({"v": torch.randn(6, 6)}, {"g": torch.randn(6)})
    stages = [fp.stage(constant, stash=["c"]), fp.stage(late, pop=["c"])]
    eager, programs = both(stages, params, fp.schedules.one_f_one_b(2, 4), executor="threads")
    assert same(eager.grads, programs.grads)
    assert same(eager.outputs, programs.outputs)


@pytest.mark.parametrize("what", ["constant", "of parameters", "of state", "a view"])
def test_what_is_handed_out_is_the_microbatchs_own(what):
    """A commit that adds statistics up in place adds different tensors."""

    def counting(p, x, *, state):
        made = {
            "constant": torch.full((), 2.0),
            "of parameters": p["w"].exp().sum(),
            "of state": state * 0.5,
            "a view": (p["w"] * 2)[1:2].view(()),
        }
        return fp.Out(x * p["w"] * 2 + made[what], stats=made[what])

    def commit(state, stats):
        total = stats[0]
        for more in stats[1:]:
            total += more
        return state + total

    params, state = ({"w": torch.randn(6)},), (torch.ones(()),)
    stages = [fp.stage(counting, state=True, commit=commit)]
    eager, programs = both(stages, params, fp.schedules.one_f_one_b(1, 4), state=state)
    assert same(eager.state, programs.state)
    assert same(eager.grads, programs.grads)


def test_state_that_is_only_read():
    """Statistics of an evaluation: what is computed of them, computed once, gives the same
    outputs."""
    norm, params, state = fp.from_module(
        nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(6, 6)), nn.BatchNorm1d(6))
    )
    programs = fp.make_programs(fp.compile_stage(norm), params, X, state=state, train=False)
    assert programs.once is not None
    plan = forward_plan([fp.compile_stage(norm)], 4)
    expected = fp.run(
        fp.make_plan([norm], plan.schedule, devices="cpu"), (params,), X, state=(state,)
    ).outputs
    assert same(expected, fp.run(plan, (params,), X, state=(state,)).outputs)
    assert programs.once_bytes < 2**10


def test_parameters_that_changed_between_runs():
    """What is computed once is computed once a run."""
    schedule = fp.schedules.one_f_one_b(2, 4)
    plan = cpu_plan([fp.compile_stage(fp.stage(normed), fuse=False)] * 2, schedule)
    params = weights()
    first = fp.run(plan, params, (X, T)).loss
    with torch.no_grad():
        params[0]["g"].mul_(2)
    second = fp.run(plan, params, (X, T)).loss
    assert not same(first, second)
    eager = cpu_plan([fp.stage(normed)] * 2, schedule)
    assert same(fp.run(eager, params, (X, T)).loss, second)
