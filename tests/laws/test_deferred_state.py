"""Law 5: batch norm's new state is its own update, applied once to all that the layer saw; nothing
else is counted."""

import itertools

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from common import EXECUTORS, cpu_plan, same, schedules, snapshot
from torch.utils.checkpoint import checkpoint

import funcpipe as fp


class Seen(nn.Module):
    """Batch norm layers that write down their inputs: microbatch by microbatch, in a plain loop."""

    def __init__(self, model):
        super().__init__()
        self.model, self.inputs = model, {}
        for name, layer in model.named_modules():
            if isinstance(layer, nn.modules.batchnorm._BatchNorm):
                layer.register_forward_pre_hook(
                    lambda _, args, name=name: self.inputs.setdefault(name, []).append(
                        args[0].detach()
                    )
                )


def model(seed=0):
    torch.manual_seed(seed)
    norm = nn.BatchNorm2d(4)
    with torch.no_grad():
        norm.running_mean.normal_()
        norm.running_var.uniform_(0.5, 2)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3),
        norm,
        nn.ReLU(inplace=True),
        nn.Conv2d(4, 4, 3),
        nn.BatchNorm2d(4, momentum=0.3, eps=1e-3),
        nn.Flatten(),
        nn.Linear(64, 5),
        nn.BatchNorm1d(5, affine=False),
    ).double()


def expected_state(make, parts):
    """The state of each layer after one update of torch's own for each of its calls, by all that
    these saw."""
    seen = Seen(make())
    for part in parts:
        seen.model(part)
    fresh = make()
    for name, layer in fresh.named_modules():
        calls = len(seen.inputs.get(name, ())) // len(parts)
        for call in range(calls):
            layer(torch.cat(seen.inputs[name][call::calls]))
    return dict(fresh.named_buffers())


def cut(make, bounds):
    """The model as stages under its own names."""
    whole = make()
    parts = [
        fp.from_module(whole[a:b], name=f"part{a}")
        for a, b in zip(bounds, bounds[1:], strict=False)
    ]
    return zip(*parts, strict=True)


def flat(trees):
    return {key: value for tree in trees for key, value in (tree or {}).items()}


def assert_states(expected, state, rtol=1e-12):
    assert expected.keys() == state.keys()
    for key, value in expected.items():
        torch.testing.assert_close(
            state[key], value, rtol=rtol, atol=1e-14, msg=lambda text, key=key: f"{key}: {text}"
        )


@pytest.mark.parametrize("rows", [12, 11, 8])
@pytest.mark.parametrize("bounds", [(0, 8), (0, 2, 5, 8)], ids=len)
def test_state_is_the_update_by_all_that_a_layer_saw(bounds, rows):
    """Three layers, 1d and 2d, even and uneven; every schedule, remat, executor: and the same
    bits."""
    x = torch.randn(rows, 1, 8, 8, dtype=torch.float64)
    expected = expected_state(model, x.tensor_split(4))
    stages, params, state = cut(model, bounds)
    before = snapshot(state)
    first = None
    for schedule in schedules(len(stages), 4)[::2]:
        plan = cpu_plan(stages, schedule, loss=lambda y, t: y.square().mean())
        for executor in EXECUTORS:
            new = fp.run(
                plan, params, (x, None), state=state, executor=executor, threads_per_lane=1
            ).state
            first = first or new
            assert same(first, new)
    assert_states(expected, flat(first))
    assert same(before, snapshot(state))


@pytest.mark.parametrize("count", [1, 2, 5])
def test_the_plain_average_over_several_steps(count):
    """momentum=None: the average of all batches so far, for any number of microbatches."""
    make = lambda: nn.Sequential(nn.BatchNorm1d(3, momentum=None)).double()
    part, params, state = fp.from_module(make())
    plan = cpu_plan([part], fp.schedules.fill_drain(1, count), loss=lambda y, t: y.sum() / len(y))
    plain, states = make(), (state,)
    for step in range(4):
        x = torch.randn(10, 3, dtype=torch.float64) * (step + 1) + step
        states = fp.run(plan, (params,), (x, None), state=states).state
        plain(x)
        assert step + 1 == int(states[0]["0.num_batches_tracked"])
    assert_states(dict(plain.named_buffers()), states[0])


@pytest.mark.parametrize("count", [1, 3, 8])
def test_a_large_mean_in_float32_keeps_its_variance(count):
    """Mean 1e4, deviation 1: 1e-5 relative; sums of squares would give noise."""
    x = torch.randn(64, 3) + torch.tensor([1e4, -1e4, 0.0])
    part, params, state = fp.from_module(nn.BatchNorm1d(3, momentum=1.0))
    plan = cpu_plan([part], fp.schedules.one_f_one_b(1, count), loss=lambda y, t: y.sum() / len(y))
    new = fp.run(plan, (params,), (x, None), state=(state,)).state[0]
    torch.testing.assert_close(
        new["running_mean"].double(), x.double().mean(0), rtol=1e-5, atol=1e-5
    )
    torch.testing.assert_close(new["running_var"].double(), x.double().var(0), rtol=1e-5, atol=0)


@pytest.mark.parametrize("count", [1, 3, 8])
@pytest.mark.parametrize("form", [torch.contiguous_format, torch.channels_last], ids=str)
@pytest.mark.parametrize("size", [(2, 2), (8, 8), (48, 48)], ids=str)
def test_large_means_that_move_from_image_to_image_make_a_variance(size, form, count):
    """Mean 1e4, deviation .1 in and between images, few and many values; whole numbers too, whose
    float32 sums round."""
    g = torch.Generator().manual_seed(count)
    x = torch.randn(24, 3, *size, generator=g) * 0.1 + torch.randn(24, 1, 1, 1, generator=g) * 0.1
    x += torch.tensor([1e4, -1e4, 0.0]).reshape(3, 1, 1)
    x[:, 2] = torch.randint(0, 256, (24, *size), generator=g).float()
    x = x.to(memory_format=form)
    part, params, state = fp.from_module(nn.BatchNorm2d(3, momentum=1.0))
    plan = cpu_plan([part], fp.schedules.one_f_one_b(1, count), loss=lambda y, t: y.sum() / len(y))
    new = fp.run(plan, (params,), (x, None), state=(state,)).state[0]
    wide = x.double().transpose(0, 1).flatten(1)
    torch.testing.assert_close(new["running_mean"].double(), wide.mean(1), rtol=1e-6, atol=1e-5)
    if form is torch.contiguous_format:  # else torch's own kernel makes noise of a variance
        torch.testing.assert_close(new["running_var"].double(), wide.var(1), rtol=5e-3, atol=0)


@pytest.mark.parametrize("rows", [3, 300])
def test_half_precision_state_has_means_of_all_values(rows):
    """A bfloat16 running mean of one microbatch is no mean to merge."""
    x = (torch.randn(2 * rows, 3) + 10).bfloat16()
    part, params, state = fp.from_module(nn.BatchNorm1d(3, momentum=1.0).bfloat16())
    plan = cpu_plan(
        [part], fp.schedules.one_f_one_b(1, 2), loss=lambda y, t: y.float().sum() / len(y)
    )
    new = fp.run(plan, (params,), (x, None), state=(state,)).state[0]
    assert torch.equal(new["running_mean"], x.double().mean(0).bfloat16())


@pytest.mark.parametrize("executor", EXECUTORS)
def test_a_run_counts_once_whatever_is_computed_again(executor):
    """num_batches_tracked rises by 1 per run: 1, 4 microbatches, remat of all, planning, a second
    run."""
    part, params, state = fp.from_module(
        nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)), name="a"
    )
    other, more, rest = fp.from_module(nn.BatchNorm1d(3), name="b")
    for schedule in (
        fp.schedules.one_f_one_b(2, 1),
        fp.schedules.remat(fp.schedules.one_f_one_b(2, 4)),
        fp.schedules.remat(fp.schedules.zero_bubble(2, 4)),
    ):
        plan = cpu_plan((part, other), schedule)
        states = (state, rest)
        for step in (1, 2):
            states = fp.run(
                plan,
                (params, more),
                (torch.randn(9, 3), torch.zeros(9, 3)),
                state=states,
                executor=executor,
            ).state
            assert (
                step
                == int(states[0]["1.num_batches_tracked"])
                == int(states[1]["num_batches_tracked"])
            )


def test_evaluation_leaves_the_very_same_state():
    """Forward-only plans use the running statistics and give back the objects that they got."""
    stages, params, state = cut(model, (0, 3, 8))
    plan = fp.make_plan(stages, fp.schedules.fill_drain(2, 3, backward=False), devices="cpu")
    x = torch.randn(7, 1, 8, 8, dtype=torch.float64)
    result = fp.run(plan, params, x, state=state)
    assert all(mine is given for mine, given in zip(result.state, state, strict=True))
    assert all(
        result.state[i][key] is value for i, tree in enumerate(state) for key, value in tree.items()
    )
    torch.testing.assert_close(result.outputs, model().eval()(x), rtol=1e-12, atol=1e-12)


def test_a_frozen_layer_stays_as_it_was():
    """bn.eval() inside of a training module: running statistics are used and kept; its neighbour
    trains."""
    make = lambda: nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 3), nn.BatchNorm1d(3)).double()
    torch.manual_seed(0)
    plain = make()
    plain[0].running_mean += 2
    plain[0].eval()
    part, params, state = fp.from_module(plain)
    plan = cpu_plan([part], fp.schedules.fill_drain(1, 1), outputs=True)
    x = torch.randn(6, 3, dtype=torch.float64)
    evaluate = fp.make_plan([part], fp.schedules.fill_drain(1, 1, backward=False), devices="cpu")
    fp.run(
        evaluate, (params,), x, state=(state,)
    )  # the copy goes into evaluation and must come back as it was
    result = fp.run(plan, (params,), (x, x), state=(state,))
    for key in ("0.running_mean", "0.running_var", "0.num_batches_tracked"):
        assert torch.equal(state[key], result.state[0][key])
    torch.testing.assert_close(result.outputs, plain(x), rtol=1e-12, atol=1e-12)
    assert_states(dict(plain.named_buffers()), result.state[0])
    assert 1 == int(result.state[0]["2.num_batches_tracked"])


def test_gradients_are_those_of_batch_norm_microbatch_by_microbatch():
    """Sums of torch's own gradients in a plain loop, weighted by rows."""
    x, t = torch.randn(10, 1, 8, 8, dtype=torch.float64), torch.randn(10, 5, dtype=torch.float64)
    plain = model()
    for a, b in zip(x.tensor_split(4), t.tensor_split(4), strict=True):
        (F.mse_loss(plain(a), b) * len(a) / 10).backward()
    stages, params, state = cut(model, (0, 2, 5, 8))
    plan = cpu_plan(stages, fp.schedules.remat(fp.schedules.one_f_one_b(3, 4)))
    grads = flat(fp.run(plan, params, (x, t), state=state).grads)
    for key, parameter in plain.named_parameters():
        torch.testing.assert_close(grads[key], parameter.grad, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_recomputation_inside_of_a_stage_does_not_count(use_reentrant):
    """Batch norm in an inner checkpoint: the state without it, for one update."""

    class Block(nn.Module):
        def __init__(self, wrap):
            super().__init__()
            torch.manual_seed(0)
            self.a, self.n, self.wrap = nn.Linear(3, 3), nn.BatchNorm1d(3), wrap

        def forward(self, x):
            body = lambda h: torch.tanh(self.n(self.a(h)))
            return checkpoint(body, x, use_reentrant=use_reentrant) if self.wrap else body(x)

    found = []
    for wrap in (False, True):
        (a, b), params, state = zip(
            fp.from_module(Block(False)), fp.from_module(Block(wrap)), strict=True
        )
        plan = cpu_plan([a, b], fp.schedules.one_f_one_b(2, 3))
        batch = torch.linspace(-1, 1, 24).view(8, 3), torch.zeros(8, 3)
        found.append(fp.run(plan, params, batch, state=state))
    assert same(found[0].state, found[1].state)
    assert same(found[0].grads, found[1].grads)
    assert 1 == int(found[1].state[1]["n.num_batches_tracked"])


def test_a_layer_used_twice_sees_both_inputs():
    """Two updates, as of the layer alone: by the first inputs of all microbatches, then by the
    second ones."""

    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.n = nn.BatchNorm1d(3).double()

        def forward(self, x):
            return self.n(self.n(x) + x)

    x = torch.randn(7, 3, dtype=torch.float64)
    part, params, state = fp.from_module(Twice())
    plan = cpu_plan([part], fp.schedules.fill_drain(1, 3), loss=lambda y, t: y.sum() / len(y))
    new = fp.run(plan, (params,), (x, None), state=(state,)).state[0]
    assert_states(expected_state(Twice, x.tensor_split(3)), new)


def test_other_written_buffers_are_refused_by_name():
    """A module that counts its calls, an instance norm that tracks, an own statistic in a function
    stage."""

    class Counts(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))
            self.register_buffer("table", torch.ones(3))

        def forward(self, x):
            self.calls += 1
            return x * self.table

    class Rebinds(Counts):
        def forward(self, x):
            self.calls = self.calls + 1
            return x * self.table

    inputs = torch.randn(4, 3)
    for module, name in (
        (Counts(), "calls"),
        (Rebinds(), "calls"),
        (nn.InstanceNorm1d(3, track_running_stats=True), "running_mean"),
    ):
        part, params, state = fp.from_module(module)
        plan = fp.make_plan(
            [part], fp.schedules.fill_drain(1, 2, backward=False), train=True, devices="cpu"
        )
        with pytest.raises(fp.PlanError, match=name) as caught:
            fp.run(
                plan,
                (params,),
                inputs if name == "calls" else inputs[..., None].expand(4, 3, 5),
                state=(state,),
            )
        assert "table" not in str(caught.value)

    @fp.stage
    def own(p, x, *, state):
        state["seen"] += 1
        return x

    plan = fp.make_plan([own], fp.schedules.fill_drain(1, 2, backward=False), devices="cpu")
    state = ({"seen": torch.zeros(()), "fixed": torch.ones(3)},)
    with pytest.raises(fp.PlanError, match="seen"):
        fp.run(plan, ((),), inputs, state=state)
    assert 0 == float(state[0]["seen"])


@fp.stage(
    commit=lambda state, stats: {
        "count": state["count"] + sum(n for n, _ in stats),
        "first": stats[0][1],
    }
)
def counting(p, x, *, state, train):
    return fp.Out(x * p + state["count"] * 0, stats=(len(x), x.sum().detach()))


def test_a_function_stage_commits_once_in_microbatch_order():
    """commit gets the statistics of all microbatches by their number, in every schedule; not in
    evaluation."""
    x = torch.arange(6.0)[:, None]
    for schedule in (
        fp.schedules.fill_drain(1, 3),
        fp.schedules.remat(fp.schedules.fill_drain(1, 3)),
        fp.Schedule.parse("0F2 0F0 0F1 0B1 0B2 0B0"),
    ):
        plan = cpu_plan([counting], schedule, loss=lambda y, t: y.sum() / len(y))
        state = fp.run(
            plan, (torch.ones(()),), (x, None), state=({"count": torch.tensor(5.0), "first": None},)
        ).state
        assert {"count": 11.0, "first": 1.0} == {
            key: float(value) for key, value in state[0].items()
        }
    given = ({"count": torch.tensor(5.0), "first": None},)
    plan = fp.make_plan([counting], fp.schedules.fill_drain(1, 3, backward=False), devices="cpu")
    assert fp.run(plan, (torch.ones(()),), x, state=given).state[0] is given[0]


def test_a_commit_without_a_return_is_refused():
    """In the run that called it, not in the next one."""

    @fp.stage(commit=lambda state, stats: None)
    def forgetting(p, x, *, state, train):
        return fp.Out(x * p, stats=x.sum().detach())

    plan = cpu_plan([forgetting], fp.schedules.fill_drain(1, 2))
    x, state = torch.ones(4, 1), ({"seen": torch.zeros(())},)
    with pytest.raises(fp.PlanError, match="the commit returned None; return the new state"):
        fp.run(plan, (torch.ones(()),), (x, x), state=state)


@pytest.mark.parametrize("executor", EXECUTORS)
def test_a_commit_draws_keyed_numbers(executor):
    """They depend on the seed, not on torch's generator; alone and within a composition, and no
    draw of the forward equals them."""

    def commit(state, stats):
        return {"noise": state["noise"] + torch.rand(2), "forward": stats[0]}

    def forward(p, x, *, state, train):
        drawn = torch.rand(2)
        return fp.Out(x * p + drawn, stats=drawn)

    noisy = fp.stage(forward, name="noisy", commit=commit)
    plain = fp.stage(lambda p, x: x * p, name="plain")
    others = itertools.count()
    zero = {"noise": torch.zeros(2), "forward": torch.zeros(2)}
    x, one, two = torch.ones(4, 2), torch.ones(()), torch.tensor(2.0)

    def state_after(stages, params, state, seed, pick):
        schedule = fp.schedules.one_f_one_b(len(stages), 2)
        plan = cpu_plan(stages, schedule)
        torch.manual_seed(next(others))  # has no effect
        result = fp.run(plan, params, (x, x), state=state, seed=seed, executor=executor)
        return pick(result.state)

    def cut(seed):
        return state_after([noisy, plain], (one, two), (zero, ()), seed, lambda s: s[0])

    def joined(seed):
        composed = fp.compose(noisy, plain)
        return state_after([composed], ((one, two),), ((zero, ()),), seed, lambda s: s[0][0])

    first = cut(1)
    assert same(first, cut(1))
    assert same(first, joined(1))
    assert not torch.equal(first["noise"], cut(2)["noise"])
    assert not torch.equal(first["noise"], first["forward"])
    with pytest.raises(fp.DrawError, match="no seed was given"):
        state_after(
            [
                fp.stage(
                    lambda p, x, *, state, train: fp.Out(x * p, stats=x.sum()),
                    name="late",
                    commit=commit,
                )
            ],
            (one,),
            (zero,),
            None,
            None,
        )


def test_statistics_without_a_commit_are_refused():
    """They would be lost. `apply` returns them, so there they are right."""

    def counting(p, x):
        return fp.Out(x * p, stats={"rows": x.sum()})

    single = fp.stage(counting, name="counting")
    composed = fp.compose(single, fp.stage(lambda p, x: x + p))
    x, one = torch.ones(4, 2), torch.ones(())
    for stage, params in (
        (single, one),
        (composed, (one, 2 * one)),
        (fp.compile_stage(single), one),
    ):
        plan = cpu_plan([stage], fp.schedules.fill_drain(1, 2))
        with pytest.raises(fp.PlanError, match=r"returned statistics .*has no commit"):
            fp.run(plan, (params,), (x, x))
    assert float(fp.apply([single], (one,), x).stats[0]["rows"]) == 8.0


def test_a_state_that_is_rebound_is_refused():
    """state["seen"] = ... is a write like state["seen"] += ...: the next microbatch would see
    it."""

    @fp.stage
    def own(p, x, *, state):
        state["seen"] = state["seen"] + 1
        return x * state["seen"]

    plan = fp.make_plan([own], fp.schedules.fill_drain(1, 2, backward=False), devices="cpu")
    with pytest.raises(fp.PlanError, match="seen"):
        fp.run(plan, ((),), torch.ones(4, 3), state=({"seen": torch.zeros(())},))
