"""Slices: a sequence in pieces, each reading what those before it left, gives what it gives as a
whole."""

import functools

import pytest
import torch
import torch.nn.functional as F
from causal import KINDS, WIDTH, batch, chain, stage_of, whole
from common import EXECUTORS, assert_same_result, cpu_plan, ids, same, snapshot
from hypothesis import given, settings
from hypothesis import strategies as st
from random_plans import schedules as random_schedules

import funcpipe as fp
from funcpipe import schedules as S
from funcpipe._src.testing.match import assert_matches_sequential

CHAIN = ("attend", "recur", "point", "attend")


def sliced(num_stages, num_microbatches, num_slices):
    """Every family that has slices, some with remat, offload and delayed weights."""
    counts = {"num_slices": num_slices}
    half = num_stages // 2
    plain = [
        family(num_stages, num_microbatches, **counts)
        for family in (S.fill_drain, S.one_f_one_b, S.zb_h2)
    ]
    plain += [S.eager_one_f_one_b(num_stages, num_microbatches, num_devices=half, **counts)]
    plain += [
        family(num_stages, num_microbatches, num_devices=half, **counts)
        for family in (S.looped_bfs, S.interleaved, S.zero_bubble)
    ]
    again = [S.remat(plain[1]), S.remat(plain[5], keep=lambda action: action.slice != 0)]
    away = [S.offload(plain[0]), S.offload(plain[5], move=lambda action: action.slice == 0)]
    return [*plain, *again, *away, S.delay(plain[1], group=2), S.reduce_grads(plain[5])]


@functools.cache
def compiled_chain():
    """The chain, whose programs all schedules use: they cut a batch into the same pieces."""
    stages, _ = chain(CHAIN)
    return [fp.compile_stage(stage) for stage in stages]


def assert_plain(result, plain):
    """Those of plain autograd, to rounding."""
    loss, grads, _ = plain
    torch.testing.assert_close(result.loss, loss, rtol=1e-10, atol=1e-10)
    for mine, tree in zip(result.grads, grads, strict=True):
        for key, gradient in tree.items():
            torch.testing.assert_close(mine[key], gradient, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("schedule", sliced(4, 3, 3), ids=ids)
def test_same_bits_as_the_oracle_and_as_autograd(schedule, compiled):
    """7 rows over 3 microbatches, a sequence of 11 over 3 slices; nothing of the caller's is
    written."""
    stages, params = chain(CHAIN)
    plain = whole(stages, params, *batch(7, 11))
    made = compiled_chain() if compiled else stages
    plan = cpu_plan(made, schedule, outputs=True)
    given_batch = batch(7, 11)
    before = snapshot((params, given_batch))
    expected = fp.run_sequential(plan, params, given_batch, threads_per_lane=1)
    for executor in EXECUTORS:
        result = fp.run(
            plan, params, given_batch, executor=executor, threads_per_lane=1, record=True
        )
        assert_same_result(expected, result)
        assert {span.action for span in result.timeline.spans} == {
            a for order in schedule.orders for a in order
        }
    assert same(before, snapshot((params, given_batch)))
    assert_plain(expected, plain)
    torch.testing.assert_close(expected.outputs, plain[2], rtol=1e-10, atol=1e-10)
    assert len(expected.losses) == 9
    assert expected.stats.num_microbatches == 3


def test_all_families_agree_bit_for_bit():
    """They add the gradients of slices in one order: microbatches up, slices down."""
    stages, params = chain(CHAIN)
    results = []
    for schedule in sliced(4, 3, 3):
        assert schedule.is_ascending
        plan = cpu_plan(stages, schedule)
        results.append(fp.run(plan, params, batch(7, 11), executor="serial", threads_per_lane=1))
    for result in results[1:]:
        assert same((results[0].loss, results[0].grads), (result.loss, result.grads))


@settings(max_examples=30)
@given(random_schedules(), st.data())
def test_any_legal_schedule_of_any_causal_stages(schedule, data):
    """Random orders, placements, slices, remat; uneven slices; rows that may not suffice for all
    microbatches."""
    kinds = [data.draw(st.sampled_from((*KINDS, "pile"))) for _ in range(schedule.num_stages)]
    stages, params = chain(kinds, data.draw(st.integers(0, 9)))
    if data.draw(st.integers(0, 4)) == 4:  # tracing takes long
        stages = [fp.compile_stage(stage) for stage in stages]
    count = schedule.num_slices if data.draw(st.booleans()) else 0
    slices = data.draw(st.lists(st.sampled_from([1.0, 2.0, 5.0]), min_size=count, max_size=count))
    options = {"slices": slices, "outputs": True, "devices": "cpu"}
    plan = fp.make_plan(
        stages, schedule, loss=F.mse_loss if schedule.has_backward else None, **options
    )
    x, target = batch(data.draw(st.integers(1, 5)), data.draw(st.integers(3, 8)))
    given_batch = (x, target) if schedule.has_backward else x
    expected = fp.run_sequential(plan, params, given_batch, threads_per_lane=1)
    for executor in EXECUTORS:
        assert_same_result(
            expected, fp.run(plan, params, given_batch, executor=executor, threads_per_lane=1)
        )
    if schedule.has_backward and "pile" not in kinds:
        assert_plain(expected, whole(stages, params, x, target))


def test_a_composition_hands_on_the_carries_of_its_parts():
    """Two stages as one, and one of them without a carry."""
    stages, params = chain(CHAIN)
    joined, trees = [fp.compose(*stages[:2]), fp.compose(*stages[2:])], (params[:2], params[2:])
    apart = cpu_plan(stages, S.one_f_one_b(4, 2, num_slices=3))
    plan = cpu_plan(joined, S.one_f_one_b(2, 2, num_slices=3))
    expected = fp.run(apart, params, batch(4, 9), executor="serial", threads_per_lane=1)
    result = fp.run(plan, trees, batch(4, 9), executor="serial", threads_per_lane=1)
    assert same(expected.loss, result.loss)
    assert same(expected.grads, (*result.grads[0], *result.grads[1]))
    out = joined[0](trees[0], batch(4, 9)[0])
    assert [type(tree) for tree in out.carry] == [dict, tuple]


def test_whole_microbatches_run_the_same_stages():
    """A stage with a carry in a schedule without slices: it gets None, and what it returns is
    dropped."""
    stages, params = chain(CHAIN)
    plan = cpu_plan(stages, S.interleaved(4, 3, num_devices=2))
    assert_plain(
        fp.run(plan, params, batch(7, 11), executor="threads"), whole(stages, params, *batch(7, 11))
    )
    assert not any(wire.role.value.startswith("carry") for wire in plan.program.wires)


def test_dropout_is_drawn_for_each_slice_whatever_the_schedule():
    """Keyed by the slice: two schedules, two executors, remat, the same masks; two slices, other
    masks."""

    @fp.stage(name="drop")
    def drop(params, x, *, carry, train):
        kept = F.dropout(x * params["scale"], 0.5, training=train)
        return fp.Out(kept + (0 if carry is None else carry), carry=kept.sum(1, keepdim=True))

    params = ({"scale": torch.ones(WIDTH, dtype=torch.float64)},)
    x = torch.ones(4, 8, WIDTH, dtype=torch.float64)
    results = []
    for schedule in (S.one_f_one_b(1, 2, num_slices=4), S.remat(S.fill_drain(1, 2, num_slices=4))):
        plan = cpu_plan([drop], schedule, outputs=True)
        results += [
            fp.run(plan, params, (x, x), seed=3, executor=executor) for executor in EXECUTORS
        ]
    for result in results[1:]:
        assert same(
            (results[0].loss, results[0].outputs, results[0].grads),
            (result.loss, result.outputs, result.grads),
        )
    masks = [piece > 0 for piece in results[0].outputs[:2].split(2, 1)]
    assert not torch.equal(masks[0], masks[1])


def mean(y, target):
    return ((y - target) ** 2).mean()


def summed(y, target):
    return fp.Loss(((y - target) ** 2).sum(), torch.tensor(float(y.numel())))


@pytest.mark.parametrize("loss", [F.mse_loss, mean, summed, torch.nn.MSELoss(reduction="sum")])
def test_the_loss_is_that_of_the_batch(loss):
    """A mean counts by rows times length, sums by what they return, torch's own as they are."""
    stages, params = chain(("attend", "point"))
    plan = cpu_plan(
        stages, S.one_f_one_b(2, 3, num_slices=3), loss=loss, slices=(4, 1, 2), outputs=True
    )
    result = fp.run(plan, params, batch(7, 12))
    exact = (lambda y, t: loss(y, t).sum / y.numel()) if loss is summed else loss
    assert_plain(result, whole(stages, params, *batch(7, 12), exact))


def test_labels_that_are_ignored_do_not_count():
    """Padding at the end of the sequences: a last slice of some microbatch has none that counts."""
    torch.manual_seed(0)
    stages, params = chain(("attend",))
    loss = lambda y, target: F.cross_entropy(y.flatten(0, 1), target.flatten(), ignore_index=-100)

    class Counted:
        def __call__(self, y, target):
            return loss(y, target) if (target != -100).any() else (y * 0).sum()

        def weigh(self, inputs, target):
            return (target != -100).sum()

    x, _ = batch(4, 10)
    target = torch.randint(0, WIDTH, (4, 10))
    target[2:, 5:] = -100
    plan = cpu_plan(stages, S.one_f_one_b(1, 2, num_slices=2), loss=Counted())
    assert_plain(fp.run(plan, params, (x, target)), whole(stages, params, x, target, loss))


def test_side_losses_are_weighed_by_their_slices():
    """A mean of each slice, each with its share."""

    @fp.stage(name="side")
    def side(params, x, *, carry):
        y = x * params["scale"]
        return fp.Out(y, loss=((y**2).mean(), 1.0), carry=())

    params = ({"scale": torch.full((WIDTH,), 2.0, dtype=torch.float64)},)
    x, target = batch(5, 7)
    plan = cpu_plan([side], S.one_f_one_b(1, 2, num_slices=3))
    scale = params[0]["scale"].clone().requires_grad_()
    expected = F.mse_loss(x * scale, target) + ((x * scale) ** 2).mean()
    expected.backward()
    result = fp.run(plan, params, (x, target))
    torch.testing.assert_close(result.loss, expected.detach())
    torch.testing.assert_close(result.grads[0]["scale"], scale.grad)


def test_statistics_are_those_of_all_slices():
    """A commit gets one tree for each, microbatch by microbatch."""

    def commit(state, stats):
        return {"sum": state["sum"] + sum(stats)}

    @fp.stage(name="count", commit=commit)
    def count(params, x, *, carry, state):
        return fp.Out(x * params["scale"], stats=x.sum(), carry=None)

    params = ({"scale": torch.ones(WIDTH, dtype=torch.float64)},)
    state = ({"sum": torch.zeros((), dtype=torch.float64)},)
    x, target = batch(5, 7)
    plan = cpu_plan([count], S.one_f_one_b(1, 2, num_slices=3))
    torch.testing.assert_close(
        fp.run(plan, params, (x, target), state=state).state[0]["sum"], x.sum()
    )


# -- the batch
# -------------------------------------------------------------------------------


@fp.stage(feeds=["mask", "table", "row"])
def fed(params, x, *, carry, feeds):
    before = 0 if carry is None else carry
    y = x * params["scale"] * feeds["mask"].transpose(0, 1)[..., None]
    y = y + feeds["table"].sum() + feeds["row"][:, None, None]
    return fp.Out(y + before, carry=before + y.sum(1, keepdim=True))


def test_every_leaf_is_cut_along_its_own_axis():
    """Time before rows, rows alone (whole in every slice), tables that all share."""
    x, _ = batch(5, 6)
    mask = torch.rand(6, 5, dtype=torch.float64)
    table = torch.ones(3, dtype=torch.float64)
    feeds = {"mask": fp.Axis(mask, 1), "table": fp.Replicate(table), "row": x[:, 0, 0].clone()}
    params = ({"scale": torch.ones(WIDTH, dtype=torch.float64)},)
    plan = fp.make_plan(
        [fed], S.fill_drain(1, 2, num_slices=3, backward=False), devices="cpu", outputs=True
    )
    outputs = fp.run(plan, params, x, feeds=feeds).outputs
    carry, expected = None, []
    for piece, own in zip(x.split(2, 1), mask.split(2), strict=True):
        shared = {"mask": own, "table": feeds["table"].value, "row": feeds["row"]}
        y, *_, carry = fed(params[0], piece, carry=carry, feeds=shared)
        expected.append(y)
    torch.testing.assert_close(outputs, torch.cat(expected, 1))


def test_an_axis_can_be_named_or_taken_away():
    """sequence=: another one, or none."""
    x, target = batch(4, 6)
    stages, params = chain(("attend",))
    plan = cpu_plan(stages, S.one_f_one_b(1, 2, num_slices=3))
    expected = fp.run(plan, params, (x, target))

    @fp.stage(name="attend0")
    def turned(params, x, *, carry):
        return stages[0].fn(params, x.transpose(1, 2), carry=carry)

    other = cpu_plan([turned], S.one_f_one_b(1, 2, num_slices=3))
    result = fp.run(
        other, params, (fp.Axis(x.transpose(1, 2).contiguous(), 0, sequence=-1), target)
    )
    torch.testing.assert_close(expected.grads, result.grads)


def test_outputs_are_joined_along_the_sequence_or_as_they_are_told():
    """Rows and sequence by themselves; means by size; each slice on its own."""

    @fp.stage(name="many")
    def many(params, x, *, carry):
        return fp.Out({"y": x, "mean": x.mean(), "last": x[:, -1]}, carry=())

    x, _ = batch(5, 7)
    schedule = S.fill_drain(1, 2, num_slices=3, backward=False)
    plan = fp.make_plan(
        [many], schedule, merge={"y": 0, "mean": "mean", "last": "each"}, devices="cpu"
    )
    y = fp.run(plan, ((),), x).outputs
    assert same(y["y"], x)
    torch.testing.assert_close(y["mean"], x.mean())
    assert isinstance(y["last"], fp.Microbatches)
    assert [tuple(piece.shape) for piece in y["last"]] == [(3, WIDTH)] * 3 + [(2, WIDTH)] * 3
    with pytest.raises(fp.BatchError, match=r"outputs\['last'\] has shapes .* no axis besides 0"):
        fp.run(
            fp.make_plan(
                [many], schedule, devices="cpu", merge={"y": 0, "mean": "mean", "last": 0}
            ),
            ((),),
            x,
        )


def test_fewer_rows_than_microbatches():
    """Microbatches without rows do not exist, nor do their slices."""
    stages, params = chain(CHAIN)
    plan = cpu_plan(stages, S.interleaved(4, 4, num_devices=2, num_slices=2))
    result = fp.run(plan, params, batch(2, 5), executor="threads", record=True)
    assert result.stats.num_microbatches == 2
    assert {span.action.microbatch for span in result.timeline.spans} == {0, 1}
    assert_plain(result, whole(stages, params, *batch(2, 5)))


# -- what is refused
# -------------------------------------------------------------------------------


def refused(plan, given_batch, **options):
    with pytest.raises(fp.FuncpipeError) as error:
        fp.run(plan, tuple(() for _ in plan.stages), given_batch, **options)
    return str(error.value)


def evaluation(num_slices=3, **options):
    stage = fp.Stage(
        lambda params, x, **extras: fp.Out(x, carry=()), "plain", carry=True, **options
    )
    return fp.make_plan(
        [stage], S.fill_drain(1, 2, num_slices=num_slices, backward=False), devices="cpu"
    )


def test_batches_that_cannot_be_cut_into_slices():
    """What, where, and the call that mends it."""
    x = torch.ones(4, 6, 2)
    assert (
        "a sequence of length 2 cannot be cut into 3 slices; give sequences of length 3 or more"
        in refused(evaluation(), x[:, :2])
    )
    assert "no leaf of the batch has a sequence" in refused(evaluation(), torch.ones(4))
    text = refused(evaluation(feeds=("mask",)), x, feeds={"mask": torch.ones(4, 1, 6)})
    assert (
        "leaves differ in the length of their sequences: inputs has 6, feeds['mask'] has 1" in text
    )
    assert "fp.Axis(leaf, 0, sequence=None)" in text
    text = refused(evaluation(), fp.Microbatches([x[:2], x[2:]]))
    assert (
        "inputs came as fp.Microbatches, which are already cut, but the plan cuts each microbatch into 3 "
        "slices" in text
    )
    text = refused(evaluation(), fp.Axis(x, 0, sequence=0))
    assert (
        "inputs has shape (4, 6, 2), its rows along axis 0, and no other axis 0 for slices" in text
    )
    assert "no other axis 'time'" in refused(evaluation(), fp.Axis(x, 0, sequence="time"))


def test_carries_that_are_not_declared_or_not_returned():
    """Named with the stage."""
    silent = fp.stage(lambda params, x, carry: x, name="silent")
    plan = fp.make_plan([silent], S.fill_drain(1, 1, num_slices=2, backward=False), devices="cpu")
    assert "takes a carry and returned none" in refused(plan, torch.ones(2, 4, 1))
    loud = fp.stage(lambda params, x: fp.Out(x, carry=(x,)), name="loud")
    plan = fp.make_plan([loud], S.fill_drain(1, 1, num_slices=2, backward=False), devices="cpu")
    assert "returned a carry but its function does not take one" in refused(
        plan, torch.ones(2, 4, 1)
    )


def test_lengths_of_slices_that_do_not_fit_the_schedule():
    """Before anything runs."""
    with pytest.raises(
        fp.PlanError, match="has the lengths of 2 slices, but the schedule cuts a microbatch into 3"
    ):
        fp.make_plan(
            [stage_of("point")], S.one_f_one_b(1, 1, num_slices=3), loss=F.mse_loss, slices=(1, 2)
        )
    with pytest.raises(fp.PlanError, match="numbers above 0"):
        fp.make_plan(
            [stage_of("point")], S.one_f_one_b(1, 1, num_slices=2), loss=F.mse_loss, slices=(1, 0)
        )


def test_a_vjp_takes_whole_microbatches():
    """It says so, before anything runs."""
    plan = fp.make_plan([stage_of("point")], S.fill_drain(1, 2, num_slices=2), devices="cpu")
    with pytest.raises(fp.PlanError, match="vjp takes whole microbatches"):
        fp.vjp(plan, ({"scale": torch.ones(WIDTH)},), torch.ones(2, 4, WIDTH))


def test_an_error_says_which_slice():
    """In a forward, by its action."""

    def fails(params, x, *, carry):
        if carry is not None:
            raise ValueError("no more")
        return fp.Out(x, carry=(1,))

    plan = fp.make_plan(
        [fp.stage(fails)], S.fill_drain(1, 2, num_slices=2, backward=False), devices="cpu"
    )
    for executor in EXECUTORS:
        with pytest.raises(ValueError, match="no more") as error:
            fp.run(plan, ((),), torch.ones(2, 4, 1), executor=executor)
        assert error.value.funcpipe.action == "0F0.1"
    with pytest.raises(ValueError, match="no more") as error:
        fp.run_sequential(plan, ((),), torch.ones(2, 4, 1))
    assert error.value.funcpipe.action == "0F0.1"


# -- modules
# -------------------------------------------------------------------------------


def recurrent(kind, count=3):
    """Stages of torch's recurrent layers, and their parameters."""
    torch.manual_seed(0)
    made = [
        fp.from_module(kind(WIDTH, WIDTH, batch_first=True).double(), carry="hx")
        for _ in range(count)
    ]
    return zip(*made, strict=True)


@pytest.mark.parametrize("kind", [torch.nn.GRU, torch.nn.LSTM, torch.nn.RNN])
def test_recurrent_layers_are_stages(kind):
    """Their hidden state is the carry."""
    stages, params, _ = recurrent(kind)
    plan = cpu_plan(stages, S.one_f_one_b(3, 2, num_slices=4))
    expected = fp.run_sequential(plan, params, batch(5, 9), threads_per_lane=1)
    for executor in EXECUTORS:
        assert_same_result(
            expected, fp.run(plan, params, batch(5, 9), executor=executor, threads_per_lane=1)
        )
    assert_plain(expected, whole(stages, params, *batch(5, 9)))


def test_a_module_that_hands_nothing_on():
    """No such keyword, or one value."""
    with pytest.raises(
        fp.PlanError,
        match="carry='state': the forward of GRU has no such keyword; it takes input, hx",
    ):
        fp.from_module(torch.nn.GRU(2, 2), carry="state")

    class One(torch.nn.Module):
        def forward(self, x, *, before=None):
            return x

    stage, params, _ = fp.from_module(One(), carry="before")
    plan = fp.make_plan([stage], S.fill_drain(1, 1, num_slices=2, backward=False), devices="cpu")
    with pytest.raises(
        fp.PlanError,
        match="two values, its output and the carry for the next slice; it returned a Tensor",
    ):
        fp.run(plan, (params,), torch.ones(2, 4, 1))


def test_faults_of_slices_are_named_by_slice():
    """Weights that are none, losses whose weights are none, outputs of another structure."""
    stage = fp.Stage(lambda params, x, **extras: fp.Out(x * params, carry=()), "plain", carry=True)
    params, (x, target) = (torch.ones(WIDTH, dtype=torch.float64),), batch(4, 6)
    schedule = S.one_f_one_b(1, 2, num_slices=3)

    def run(**options):
        plan = fp.make_plan([stage], schedule, **{"loss": F.mse_loss, **options}, devices="cpu")
        with pytest.raises(fp.FuncpipeError) as error:
            fp.run(plan, params, (x, target))
        return str(error.value)

    last = target[2:, 4:]
    text = run(weight=lambda target: -1 if torch.equal(target, last) else 1)
    assert "for microbatch 1, slice 2 it returned -1" in text
    bad = lambda y, target: ((y - target).sum(), float("nan") if torch.equal(target, last) else 1.0)
    assert "nan for microbatch 1, slice 2" in run(loss=bad)

    def fails(target):
        raise ValueError("no weight")

    plan = cpu_plan([stage], schedule, weight=fails)
    with pytest.raises(ValueError, match="no weight") as error:
        fp.run(plan, params, (x, target))
    assert error.value.funcpipe.action == "weight of slice 0"

    @fp.stage
    def odd(params, x, *, carry):
        return fp.Out(x if carry is None else (x,), carry=1)

    plan = fp.make_plan([odd], S.fill_drain(1, 1, num_slices=2, backward=False), devices="cpu")
    with pytest.raises(
        fp.BatchError, match="outputs of microbatch 0, slice 1 have another structure"
    ):
        fp.run(plan, ((),), x)


# -- what careless users and reviewers found
# -------------------------------------------------------------------------------


def test_slices_can_be_viewed_as_whole_microbatches_can():
    """They have memory of their own."""
    stage = fp.Stage(
        lambda params, x, **extras: fp.Out(x.view(-1, WIDTH) * params, carry=()), "flat", carry=True
    )
    params = (torch.ones(WIDTH, dtype=torch.float64),)
    loss = lambda y, target: F.mse_loss(y, target.view(-1, WIDTH))
    plan = cpu_plan([stage], S.one_f_one_b(1, 2, num_slices=3), loss=loss)
    x, target = batch(4, 7)
    torch.testing.assert_close(fp.run(plan, params, (x, target)).loss, F.mse_loss(x, target))


def test_a_composition_sees_carries_that_do_not_fit():
    """As each of its stages would alone."""
    stages, params = chain(("attend",))
    silent, loud = (
        fp.stage(lambda params, x, *, carry: x),
        fp.stage(lambda params, x: fp.Out(x, carry=x)),
    )
    for part, text in (
        (silent, "takes a carry and returned none"),
        (loud, "returned a carry but its function"),
    ):
        plan = fp.make_plan(
            [fp.compose(part, stages[0])], S.one_f_one_b(1, 2, num_slices=2), loss=F.mse_loss
        )
        with pytest.raises(fp.PlanError, match=text):
            fp.run(plan, (((), params[0]),), batch(4, 6))


def test_a_missing_carry_shows_against_the_whole_batch():
    """The check of users compares with sequences in one piece."""
    stages, params = chain(("attend", "recur"))
    plan = cpu_plan(stages, S.one_f_one_b(2, 2, num_slices=3))
    assert_matches_sequential(plan, params, batch(4, 9), whole_batch=1e-9)
    mixes = fp.stage(lambda params, x: x * params + x.cumsum(1))
    plan = cpu_plan([mixes], S.one_f_one_b(1, 2, num_slices=3))
    with pytest.raises(AssertionError, match="differs"):
        assert_matches_sequential(plan, (torch.ones(WIDTH),), batch(4, 9), whole_batch=1e-9)


def test_numbers_that_are_not_finite_are_named_as_the_carry():
    """Not by an internal name."""
    stage = fp.stage(
        lambda params, x, *, carry: fp.Out(x * params, carry=x * float("nan")), name="bad"
    )
    plan = cpu_plan([stage], S.one_f_one_b(1, 1, num_slices=2))
    with pytest.raises(fp.NotFiniteError, match="carry out has"):
        fp.run(plan, (torch.ones(WIDTH, dtype=torch.float64),), batch(2, 4), check="finite")


def test_a_carry_that_nobody_reads_is_not_kept():
    """In plans of whole microbatches, and of last slices."""
    from funcpipe._src.stages.eager import EagerBound

    stages, params = chain(("attend",))
    kept = []

    def watched(self, residual, y, stash, **options):
        kept.append(sorted(residual.stash))
        return real(self, residual, y, stash, **options)

    real, EagerBound.backward = EagerBound.backward, watched
    try:
        for count in (1, 2):
            plan = cpu_plan(stages, S.one_f_one_b(1, 1, num_slices=count))
            fp.run(plan, params, batch(2, 4))
    finally:
        EagerBound.backward = real
    assert kept == [[], [], [""]]


def test_modules_that_cannot_run_slices():
    """What reaches back, and a keyword that is taken."""
    with pytest.raises(fp.PlanError, match="bidirectional"):
        fp.from_module(torch.nn.GRU(2, 2, bidirectional=True), carry="hx")
    with pytest.raises(fp.PlanError, match="is also a feed"):
        fp.from_module(torch.nn.GRU(2, 2), carry="hx", feeds=["hx"])
    with pytest.raises(fp.PlanError, match="is also the input"):
        fp.from_module(torch.nn.GRU(2, 2), carry="input")


def test_outputs_whose_slices_differ():
    """In other axes than the sequence, or in type."""
    stage = fp.Stage(
        lambda params, x, **extras: fp.Out(x @ x.transpose(1, 2), carry=()), "maps", carry=True
    )
    plan = fp.make_plan([stage], S.fill_drain(1, 1, num_slices=2, backward=False), devices="cpu")
    with pytest.raises(fp.BatchError, match="cannot be joined over slices of shapes"):
        fp.run(plan, ((),), batch(2, 5)[0])


def test_leaves_without_rows_are_refused():
    """An axis is a number."""
    with pytest.raises(fp.BatchError, match="has shape .* and no axis None"):
        fp.run(evaluation(), ((),), fp.Axis(torch.ones(4, 6, 2), None, sequence=1))


@pytest.mark.parametrize("rows", [1, 4])
def test_stages_may_write_into_their_slices(rows):
    """Remat finds them as they were, and so does the caller: with one row they lie in his
    memory."""

    @fp.stage(name="writes")
    def writes(params, x, *, carry):
        x.mul_(2.0).add_(0.0 if carry is None else carry)
        return fp.Out(x * params["scale"], carry=x.sum(1, keepdim=True))

    params = ({"scale": torch.ones(WIDTH, dtype=torch.float64)},)
    x, target = batch(rows, 8)
    before = snapshot((x, target))
    results = []
    for schedule in (
        S.one_f_one_b(1, rows, num_slices=4),
        S.remat(S.fill_drain(1, rows, num_slices=4)),
    ):
        plan = cpu_plan([writes], schedule)
        results += [fp.run(plan, params, (x, target), executor=executor) for executor in EXECUTORS]
    assert same(before, snapshot((x, target)))
    for result in results[1:]:
        assert same((results[0].loss, results[0].grads), (result.loss, result.grads))
    carry, pieces = 0.0, []
    for piece in x.split(2, 1):
        pieces.append(piece * 2 + carry)
        carry = pieces[-1].sum(1, keepdim=True)
    torch.testing.assert_close(results[0].loss, F.mse_loss(torch.cat(pieces, 1), target))
