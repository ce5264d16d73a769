"""Batch norm with deferred statistics: layer by layer, and as a function."""

import pickle

import pytest
import torch
import torch.nn as nn
from common import EXECUTORS, same, snapshot

import funcpipe as fp

INPUTS = {
    "1d, rows": (nn.BatchNorm1d, (10, 3)),
    "1d, sequences": (nn.BatchNorm1d, (10, 3, 4)),
    "2d": (nn.BatchNorm2d, (10, 3, 4, 5)),
    "3d": (nn.BatchNorm3d, (10, 3, 2, 3, 4)),
}


def train(module, x, count=4, **options):
    part, params, state = fp.from_module(module)
    plan = fp.make_plan(
        [part],
        fp.schedules.fill_drain(1, count),
        loss=lambda y, t: y.float().square().mean(),
        outputs=True,
        devices="cpu",
    )
    return fp.run(plan, (params,), (x, None), state=(state,) if state else None, **options)


@pytest.mark.parametrize(
    "options", [{}, {"momentum": 0.7, "eps": 1e-2}, {"affine": False}, {"momentum": None}], ids=str
)
@pytest.mark.parametrize("kind", INPUTS)
def test_outputs_and_state_are_torchs(kind, options):
    """10 rows over 4 microbatches: outputs of each microbatch, state of all rows at once."""
    make, shape = INPUTS[kind]
    x = torch.randn(shape, dtype=torch.float64) * 3 + 2
    result = train(make(3, **options).double(), x)
    plain = make(3, **options).double()
    plain(x)
    assert {"running_mean", "running_var", "num_batches_tracked"} == result.state[0].keys()
    for name, value in plain.named_buffers():
        torch.testing.assert_close(result.state[0][name], value, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(
        result.outputs,
        torch.cat([plain(part) for part in x.tensor_split(4)]),
        rtol=1e-12,
        atol=1e-14,
    )


@pytest.mark.parametrize(
    ("first", "count", "dtype"),
    [(0, 4, torch.float32), (9, 4, torch.float64), (0, 1, torch.float32)],
    ids=str,
)
@pytest.mark.parametrize(
    "values", [["inf"], ["inf", "inf"], ["inf", "-inf"], ["-inf"], ["nan"]], ids=str
)
def test_what_is_not_finite_is_torchs(values, first, count, dtype):
    """In a column an inf, some, or a nan, in the first microbatch or the last, which have other
    sizes."""
    x = torch.randn(10, 3, dtype=dtype)
    for number, value in enumerate(values):
        x[(first + 4 * number) % 10, 1] = float(value)
    state = train(nn.BatchNorm1d(3).to(dtype), x, count).state[0]
    plain = nn.BatchNorm1d(3).to(dtype)
    plain(x)
    for name, value in plain.named_buffers():
        torch.testing.assert_close(state[name], value, equal_nan=True)


def test_a_layer_that_does_not_track_is_left_alone():
    """track_running_stats=False: batch statistics always, no state."""
    x = torch.randn(6, 3)
    result = train(nn.BatchNorm1d(3, track_running_stats=False), x, 2)
    assert ((),) == result.state
    torch.testing.assert_close(
        result.outputs, torch.cat([nn.BatchNorm1d(3)(part) for part in x.split(3)])
    )


@pytest.mark.parametrize("executor", EXECUTORS)
def test_one_value_per_channel_names_layer_and_fix(executor):
    """3 rows over 3 microbatches have no variance; the same in two is fine, and so are images."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.BatchNorm1d(2)))
    with pytest.raises(fp.BatchError, match=r"layer '1\.0'.*fewer microbatches"):
        train(model, torch.randn(3, 2), 3, executor=executor)
    with pytest.raises(fp.BatchError, match="fewer microbatches"):
        train(model, torch.randn(3, 2), 2, executor=executor)
    assert train(model, torch.randn(4, 2), 2, executor=executor).loss.isfinite()
    assert train(nn.BatchNorm2d(2), torch.randn(3, 2, 2, 2), 3, executor=executor).loss.isfinite()


def test_wrong_dimensions_are_torchs_error():
    """The layer's own check of its input still speaks."""
    with pytest.raises(ValueError, match="expected 4D input"):
        train(nn.BatchNorm2d(3), torch.randn(4, 3))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_inputs_keep_float_state(dtype):
    """Mixed dtypes, as under autocast: the state stays float32 and is torch's to the input's
    precision."""
    x = (torch.randn(32, 3) * 2 + 5).to(dtype)
    for made in (
        train(nn.BatchNorm1d(3), x),
        train(nn.Sequential(nn.Identity(), nn.BatchNorm1d(3)), x),
    ):
        state = {key.rsplit(".")[-1]: value for key, value in made.state[0].items()}
        assert dtype == made.outputs.dtype
        assert torch.float32 == state["running_mean"].dtype == state["running_var"].dtype
        plain = nn.BatchNorm1d(3)
        plain(x.float())
        torch.testing.assert_close(state["running_mean"], plain.running_mean, rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(state["running_var"], plain.running_var, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("executor", EXECUTORS)
def test_under_autocast(executor):
    """bfloat16 from a linear layer into batch norm: as the plain model under the same autocast."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    x = torch.randn(8, 4)
    with torch.autocast("cpu", torch.bfloat16):
        result = train(plain, x, 1, executor=executor)
        y = plain(x)
    assert y.dtype == result.outputs.dtype
    assert torch.equal(y, result.outputs)
    for name, value in plain.named_buffers():
        torch.testing.assert_close(result.state[0][name], value, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("momentum", [0.1, 0.25, None])
def test_the_function_and_its_commit_are_the_layer(momentum):
    """fp.models.batch_norm in a function stage gives the bits of nn.BatchNorm1d from
    from_module."""

    def norm(p, x, *, state, train):
        y, stats = fp.models.batch_norm(x, p["weight"], p["bias"], state, train=train)
        return fp.Out(y, stats=stats)

    def commit(state, stats):
        return fp.models.batch_norm.commit(state, stats, momentum=momentum)

    x, t = torch.randn(9, 3), torch.randn(9, 3)
    layer, params, state = fp.from_module(nn.BatchNorm1d(3, momentum=momentum), name="norm")
    loss = lambda y, t: (y - t).square().mean()
    found = []
    for part, given in (
        (layer, state),
        (fp.stage(norm, commit=commit), fp.models.batch_norm.init(3)),
    ):
        plan = fp.make_plan(
            [part], fp.schedules.one_f_one_b(1, 3), loss=loss, outputs=True, devices="cpu"
        )
        found.append(fp.run(plan, (params,), (x, t), state=(given,)))
        evaluate = fp.make_plan(
            [part], fp.schedules.fill_drain(1, 2, backward=False), devices="cpu"
        )
        found.append(fp.run(evaluate, (params,), x, state=found[-1].state))
    for mine, other in zip(found[:2], found[2:], strict=True):
        assert same(
            [dict(sorted(s.items())) for s in mine.state],
            [dict(sorted(s.items())) for s in other.state],
        )
        assert same(mine.outputs, other.outputs)
        assert same(mine.grads, other.grads)


def test_the_function_is_exported_with_a_number_of_rows_that_may_change():
    """How many values are many enough for a mean in float32 makes no guard."""

    class Norm(nn.Module):
        def forward(self, x):
            return fp.models.batch_norm(x, None, None, fp.models.batch_norm.init(3))[0]

    rows = torch.export.Dim("rows", min=2, max=4000)
    made = torch.export.export(
        Norm(), (torch.randn(8, 3),), dynamic_shapes=({0: rows},), strict=False
    ).module()
    for count in (4, 600):
        x = torch.randn(count, 3)
        torch.testing.assert_close(made(x), nn.BatchNorm1d(3)(x))


def test_the_function_writes_nothing():
    """State and input are as before, and no graph hangs on the statistics."""
    state = fp.models.batch_norm.init(3)
    x = torch.randn(5, 3, requires_grad=True)
    before = snapshot((state, x))
    _, stats = fp.models.batch_norm(x, None, None, state)
    new = fp.models.batch_norm.commit(state, (stats,))
    assert same(before, snapshot((state, x)))
    assert (5,) == tuple(one.size for one in stats)
    assert [False] * 3 == [value.requires_grad for value in new.values()]
    assert 1 == int(new["num_batches_tracked"])
    assert state is fp.models.batch_norm.commit(state, ((), ()))


def test_the_average_of_all_batches_needs_their_number():
    """momentum=None without num_batches_tracked has nothing to average by."""
    state = {
        key: value
        for key, value in fp.models.batch_norm.init(2).items()
        if key != "num_batches_tracked"
    }
    _, stats = fp.models.batch_norm(torch.randn(4, 2), None, None, state)
    with pytest.raises(fp.PlanError, match="num_batches_tracked"):
        fp.models.batch_norm.commit(state, (stats,), momentum=None)
    assert state.keys() == fp.models.batch_norm.commit(state, (stats,)).keys()


class Cast(nn.Module):
    """Gives its input in another precision."""

    def __init__(self, dtype):
        super().__init__()
        self.dtype = dtype

    def forward(self, x):
        return x.to(self.dtype)


class Scaled(nn.BatchNorm1d):
    """A user's subclass with torch's forward."""

    factor = 3.0

    def scale(self, x):
        return x * self.factor


class UsesScaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = Scaled(3)

    def forward(self, x):
        return self.norm.scale(self.norm(x))


def test_what_a_subclass_brings_stays():
    """Methods of a subclass, and parametrized layers, whose weight is a property of a class made at
    run time."""
    x = torch.randn(6, 3)
    result = train(UsesScaled(), x, 1)
    assert torch.equal(UsesScaled()(x), result.outputs)
    assert 1 == int(result.state[0]["norm.num_batches_tracked"])
    make = lambda: nn.utils.parametrizations.weight_norm(nn.BatchNorm1d(3), dim=None)
    result = train(make(), x, 1)
    assert torch.equal(make()(x), result.outputs)
    assert 1 == int(result.state[0]["num_batches_tracked"])
    part, params, state = fp.from_module(UsesScaled())
    again = pickle.loads(pickle.dumps(part))
    assert same(part(params, x, state=state, train=True), again(params, x, state=state, train=True))


def test_under_torch_func_and_inference_mode():
    """vmap, grad and jvp in training and evaluation; a pipeline of tensors that autograd never
    sees."""
    part, params, state = fp.from_module(nn.BatchNorm1d(3).double())
    x = torch.randn(5, 4, 3, dtype=torch.float64)
    for mode in (True, False):
        y = lambda one, mode=mode: fp.apply([part], [params], one, state=[state], train=mode).y
        torch.testing.assert_close(torch.func.vmap(y)(x), torch.stack([y(one) for one in x]))
        plain = lambda z, mode=mode: (
            (z - (z.mean(0) if mode else 0))
            / ((z.var(0, correction=0) if mode else 1) + 1e-5) ** 0.5
        )
        torch.testing.assert_close(
            torch.func.jvp(y, (x[0],), (x[1],)), torch.func.jvp(plain, (x[0],), (x[1],))
        )
        gradient = lambda fn: torch.func.grad(lambda z: fn(z).pow(3).sum())(x[0])
        torch.testing.assert_close(gradient(y), gradient(plain))
    plan = fp.make_plan([part], fp.schedules.fill_drain(1, 2, backward=False), devices="cpu")
    expected = fp.run(plan, (params,), x[0], state=(state,)).outputs
    with torch.inference_mode():
        assert torch.equal(
            expected,
            fp.run(
                plan, (params,), x[0] + 0, state=({k: v + 0 for k, v in state.items()},)
            ).outputs,
        )


@pytest.mark.parametrize("deferred", [True, False])
def test_the_commit_of_a_stage_is_that_of_each_layer(deferred):
    """Layers that count or do not, average or not, run twice, and have other types: as
    `batch_norm.commit` does for each, and no memory is shared."""
    twice, uncounted, seldom = (
        nn.BatchNorm1d(4),
        nn.BatchNorm1d(4),
        nn.BatchNorm1d(4, momentum=None),
    )
    layers = [
        nn.BatchNorm1d(4),
        nn.BatchNorm1d(4, affine=False),
        nn.BatchNorm1d(4, momentum=0.5),
        seldom,
    ]
    double = nn.BatchNorm1d(4, dtype=torch.float64)
    layers += [
        twice,
        twice,
        Cast(torch.float64),
        double,
        Cast(torch.float32),
        uncounted,
        nn.Linear(4, 300),
    ]
    layers += [nn.BatchNorm1d(300), nn.BatchNorm1d(300)]
    uncounted.num_batches_tracked = None
    stage, params, state = fp.from_module(nn.Sequential(*layers), deferred=deferred)
    rows = [(3, 5), (0, 2), (2, 600)]
    stats = tuple(
        [
            stage.fn(params, torch.randn(stop - start, 4) * 3 + 1, state=state, train=True).stats
            for start, stop in rows
        ]
    )
    new = stage.commit(state, stats)
    assert new.keys() == state.keys()
    for path in stats[0]:
        names = [name for name in state if name.startswith(f"{path}.")]
        calls = [call for each in stats for call in each[path].moments]
        alone = {name.removeprefix(f"{path}."): state[name] for name in names}
        columns = [
            [[call] for call in column]
            for column in zip(*(each[path].moments for each in stats), strict=True)
        ]
        for update in columns if deferred else [[[call]] for call in calls]:
            alone = fp.models.batch_norm.commit(alone, update, momentum=stats[0][path].momentum)
        for name in names:
            torch.testing.assert_close(
                new[name], alone[name.removeprefix(f"{path}.")], rtol=1e-7, atol=0, msg=name
            )
            assert new[name] is not state[name], name
    memory = [tensor.untyped_storage().data_ptr() for tensor in (*new.values(), *state.values())]
    assert len({*memory}) == len(
        memory
    )  # none is a view: writing into one must not count as writing into another
