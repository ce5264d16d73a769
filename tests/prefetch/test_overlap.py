"""An overlap equals the plain loop: results, order, state, errors in their place, whatever the
depth and the threads."""

from __future__ import annotations

import contextvars
import gc
import sys
import threading
import time
import weakref

import pytest
import torch
from common import cpu_plan
from hypothesis import given
from hypothesis import strategies as st
from prefetch.sources import Numbers, threads_of_overlaps

import funcpipe as fp
from funcpipe.batches import BatchStage, Fold, awaited, overlap, to_device

HOSTS = [True, False]


DEPTHS = [0, 1, 5]


def data(count=11):
    g = torch.Generator().manual_seed(1)
    return [torch.randn(4, generator=g) for _ in range(count)]


def double(x):
    return x * 2


def add_one(x):
    return x + 1


def sgd(w, x):
    loss = (w * x).sum()
    return w - 0.1 * x * loss, loss


@given(
    count=st.integers(0, 9),
    depth=st.integers(0, 9),
    leads=st.lists(st.integers(0, 4), min_size=1, max_size=4),
    hosts=st.lists(st.booleans(), min_size=5, max_size=5),
    fold=st.booleans(),
    start=st.integers(0, 3),
)
def test_any_plan_equals_the_loop(count, depth, leads, hosts, fold, start):
    """B6.1, B6.2: every result and the final state; every batch comes out; the end is the end for
    ever. Any leads that fall, any mix of threads."""
    leads = sorted((min(lead, depth) for lead in leads), reverse=True)
    stages = [
        BatchStage(
            lambda x, k=k, **words: [*x, (k, words["index"])],
            lead=lead,
            thread=hosts[k],
            indexed=True,
        )
        for k, lead in enumerate(leads)
    ]
    last = [Fold(lambda state, x: (state + 1, (state, x)), 0)] if fold else []
    run = overlap(
        [[i] for i in range(count)],
        [*stages, *last],
        depth=depth,
        start_index=start,
        thread=hosts[4],
    )
    want = [[i, *((k, start + i) for k in range(len(leads)))] for i in range(count)]
    bound = []
    got = []
    for result in run:
        got.append(result)
        bound.append(run.drawn - run.index)
    assert got == ([(i, x) for i, x in enumerate(want)] if fold else want)
    assert run.index == run.drawn == start + count
    assert next(run, "end") == next(run, "end") == "end"
    assert not fold or run.state == count
    assert run.plan.depth <= depth
    assert max(bound, default=0) <= depth + hosts[4]


@pytest.mark.parametrize("thread", HOSTS)
def test_none_and_errors_are_batches_too(thread):
    """B6.2, rule 7: what the loader gives is data."""
    batches = [None, 1, False, ValueError("data"), StopIteration, ()]
    assert list(overlap(batches, [lambda x: x], thread=thread)) == batches
    assert list(overlap(batches, [], thread=thread)) == batches


def test_a_batch_is_a_tree():
    batches = [{"x": torch.ones(2), "y": [None, "label", 3]}]
    (out,) = overlap(batches, [to_device("cpu")])
    assert out["y"] == [None, "label", 3]
    assert out["x"] is batches[0]["x"]  # it is there already


# ---- errors
# -------------------------------------------------------------------------------


class Disk(Exception):
    def __init__(self, code, where):
        super().__init__(code, where)
        self.code = code


def broken_source():
    yield from (0, 1)
    raise Disk(5, "sda")


def fails_at(at):
    def fails(x):
        if x == at:
            raise Disk(7, x)
        return x

    return fails


def fold_fails(state, x):
    return state + 1, fails_at(2)(x)


CASES = {
    "source": (broken_source, [lambda x: x, lambda x: x], None),
    "first": (lambda: range(9), [fails_at(2), lambda x: x], 0),
    "second": (lambda: range(9), [lambda x: x, fails_at(2)], 1),
    "fold": (lambda: range(9), [lambda x: x, Fold(fold_fails, 0)], 1),
}


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("thread", HOSTS)
@pytest.mark.parametrize("case", CASES)
def test_an_error_comes_in_its_place(case, thread, depth):
    """B6.3: after exactly the results before it, as itself, with its coordinates; then the overlap
    has ended."""
    source, stages, stage = CASES[case]
    run = overlap(source(), stages, depth=depth, thread=thread, start_index=10)
    got = []
    with pytest.raises(Disk) as caught:
        got.extend(run)
    assert got == [0, 1]
    assert caught.value.code in (5, 7)
    where = caught.value.funcpipe
    assert (where.batch, where.stage) == (12, stage)
    assert where.name in ("source", "fails", "stage", "fold_fails")
    assert f"{where}" in caught.value.__notes__[0]
    assert "at batch 12" in caught.value.__notes__[0]
    assert next(run, "end") == "end"
    assert run.index == 12
    if case == "fold":
        assert run.state == 2  # after the last result
    assert not threads_of_overlaps()


@pytest.mark.parametrize("thread", HOSTS)
def test_what_is_written_about_a_failure(thread):
    run = overlap(range(3), [BatchStage(fails_at(1), name="decode")], thread=thread)
    next(run)
    with pytest.raises(Disk) as caught:
        next(run)
    assert caught.value.__notes__ == ["in overlap of stage 0 ('decode') at batch 1"]
    run = overlap(broken_source(), [], thread=thread)
    with pytest.raises(Disk) as caught:
        list(run)
    assert caught.value.__notes__ == ["in next(source) at batch 2"]


@pytest.mark.parametrize("thread", HOSTS)
def test_an_error_of_a_run_keeps_its_own_coordinates(thread):
    @fp.stage(name="bad")
    def bad(params, x):
        raise Disk(1, "inside")

    plan = fp.make_plan([bad], fp.schedules.fill_drain(1, 1), loss=lambda y, t: y.sum() / len(y))
    run = overlap(data(3), [Fold(lambda s, x: (s, fp.run(plan, ((),), (x, x))), 0)], thread=thread)
    with pytest.raises(fp.StageError) as caught:
        next(run)
    where = caught.value.funcpipe
    assert (where.stage, where.name, where.microbatch, where.batch) == (0, "bad", 0, 0)
    assert len(caught.value.__notes__) == 2


@pytest.mark.parametrize("thread", HOSTS)
def test_stop_iteration_of_a_stage_is_no_end(thread):
    """Rule 8."""

    def empty(x):
        return next(iter(()))

    with pytest.raises(RuntimeError, match="'empty' raised StopIteration") as caught:
        list(overlap([1, 2], [empty], thread=thread))
    assert isinstance(caught.value.__cause__, StopIteration)
    with pytest.raises(RuntimeError, match="'fold' raised StopIteration"):
        list(overlap([1, 2], [Fold(lambda s, x: empty(x), 0, name="fold")], thread=thread))


@pytest.mark.parametrize("thread", HOSTS)
@pytest.mark.parametrize("at", ["source", "stage", "fold"])
def test_what_is_no_exception_cancels_at_once(at, thread):
    """Rule 8: SystemExit and KeyboardInterrupt do not wait for their turn; they arrive as they
    are."""
    stop = SystemExit(3)

    def leave(x):
        raise stop

    def source():
        yield 0
        if at == "source":
            raise stop
        yield from range(1, 9)

    stages = {
        "source": [double],
        "stage": [double, leave],
        "fold": [double, Fold(lambda s, x: leave(x), 0)],
    }[at]
    run = overlap(source(), stages, thread=thread)
    with pytest.raises(SystemExit) as caught:
        list(run)
    assert caught.value is stop
    assert next(run, "end") == "end"


def test_no_thread_takes_what_is_for_the_loop():
    """All wait for a batch when one of them leaves: the loop is told, whoever looks first."""

    def leave(x):
        if x == 1:
            time.sleep(0.001)
            raise SystemExit(4)
        return x

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for _ in range(60):
            run = overlap(range(9), [leave, *[lambda x: x] * 6], depth=2)
            with pytest.raises(SystemExit):
                list(run)
    finally:
        sys.setswitchinterval(interval)


@pytest.mark.parametrize("thread", HOSTS)
def test_a_source_that_has_ended_is_not_asked_again(thread):
    """B6.5, rule 6: after an error some loaders would block, and after the end some iterators begin
    anew."""
    source = Numbers(2)
    run = overlap(source, [lambda x: x], thread=thread, depth=5)
    assert [list(run), list(run)] == [[0, 1], []]
    assert source.asked == 3
    source = Numbers(1, Disk(1, "loader"))
    run = overlap(source, [lambda x: x], thread=thread)
    assert next(run) == 0
    with pytest.raises(Disk):
        next(run)
    assert next(run, "end") == "end"  # no silent end after one error: it was raised
    assert source.asked == 2


# ---- how far ahead
# -------------------------------------------------------------------------------


@pytest.mark.parametrize("thread", HOSTS)
def test_it_draws_no_more_than_it_may(thread):
    """B6.4: at every step, and after a break."""
    for depth in (0, 1, 3):
        drawn = []

        def source(drawn=drawn):
            for i in range(100):
                drawn.append(i)
                yield i

        run = overlap(source(), [lambda x: x, lambda x: x], depth=depth, thread=thread)
        assert drawn == []
        for result in run:
            time.sleep(0.002)
            assert len(drawn) - (result + 1) <= depth + (thread and depth > 0)
            assert run.in_flight <= depth + (thread and depth > 0)
            if result == 4:
                break
        run.close()
        assert len(drawn) <= 5 + depth + 1
        before = len(drawn)
        time.sleep(0.01)
        assert len(drawn) == before
        assert next(run, "end") == "end"


@pytest.mark.parametrize("thread", HOSTS)
def test_stop_drawing_drains(thread):
    """What torchrec calls set_flush: what is under way comes out."""
    run = overlap(iter(range(100)), [lambda x: x, lambda x: x], thread=thread, depth=3)
    assert [next(run), next(run)] == [0, 1]
    run.stop_drawing()
    rest = list(run)
    assert rest == list(range(2, 2 + len(rest)))
    assert len(rest) <= 4 if thread else len(rest) == 3
    assert run.drawn == run.index == 2 + len(rest)


def test_three_stages_work_at_the_same_time():
    """Each waits for the other two, which work on other batches: a loop would never get through."""
    barrier = threading.Barrier(3, timeout=20)
    count, depth = 10, 2

    def meet(stage):
        def work(batch):
            # Stage k works on batch i at tick i + k; in these ticks all three have a batch.
            if depth <= batch + stage < count:
                barrier.wait()
            return batch

        return work

    step = meet(2)
    run = overlap(range(count), [meet(0), meet(1), Fold(lambda s, x: (s, step(x)), 0)], depth=depth)
    assert list(run) == list(range(count))


def test_the_loader_runs_while_the_loop_works():
    """With a single fold, or no stage at all, the source is ahead."""
    for stages in ([], [Fold(lambda s, x: (s, x), 0)]):
        ready = threading.Event()

        def source(ready=ready):
            yield 0
            yield 1
            ready.set()
            yield 2

        run = overlap(source(), stages)
        assert next(run) == 0
        assert ready.wait(10)
        run.close()


# ---- threads
# -------------------------------------------------------------------------------

NAME = contextvars.ContextVar("name", default="nobody")


@pytest.mark.parametrize("thread", HOSTS)
def test_stages_see_what_the_caller_had_on(thread):
    """B6.7, rule 5: a new thread starts with grad on, autocast off, and nothing else that the
    caller had."""

    def look(_):
        return (
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu"),
            torch.get_default_device(),
            NAME.get(),
            torch.get_num_threads(),
        )

    token = NAME.set("caller")
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16), torch.device("meta"):
        want = look(0)
        run = overlap(range(3), [look, lambda x: (x, look(0))], thread=thread)
    NAME.reset(token)
    first = next(run) if not thread else None
    found = list(run) + ([first] if first else [])
    # Context variables are those of the first next(), where threads start.
    for x, y in found:
        assert x[:4] == y[:4] == want[:4]
        assert x[5] == y[5] == want[5]
    with torch.inference_mode():
        run = overlap(range(2), [look], thread=thread)
    assert all(one[1] for one in run)
    NAME.set("caller")
    assert {one[4] for one in overlap(range(2), [look], thread=thread)} == {"caller"}
    NAME.set("nobody")


@pytest.mark.parametrize("thread", HOSTS)
def test_options_of_a_stage(thread):
    def look(x):
        return torch.is_grad_enabled(), torch.get_autocast_dtype(
            "cpu"
        ) if torch.is_autocast_enabled("cpu") else None

    stages = [BatchStage(look, grad=False, autocast=torch.bfloat16)]
    assert set(overlap(range(3), stages, thread=thread)) == {(False, torch.bfloat16)}
    stages = [lambda x: x, Fold(lambda s, x: (s, look(x)), 0, autocast=torch.bfloat16)]
    assert set(overlap(range(3), stages, thread=thread)) == {(True, torch.bfloat16)}


@pytest.mark.parametrize("thread", HOSTS)
def test_gradients_flow_through_stages(thread):
    """As in the loop: a stage with parameters of its own is not cut off in silence."""
    w = torch.ones(4, requires_grad=True)
    total = sum(out.sum() for out in overlap(data(3), [lambda x: x * w, double], thread=thread))
    total.backward()
    assert torch.allclose(w.grad, 2 * sum(data(3)))


@pytest.mark.parametrize("depth", [0, 2])
@pytest.mark.parametrize("thread", HOSTS)
def test_random_stages_are_keyed(thread, depth):
    """B6.7, rule 10: by the number of the batch, whoever draws what meanwhile."""

    def noise(x, *, index):
        g = torch.Generator().manual_seed(fp.fold_in(7, index))
        return x + torch.randn(4, generator=g)

    def augment(x):
        return torch.nn.functional.dropout(x) + torch.randn(4)

    stages = [
        BatchStage(noise, indexed=True),
        BatchStage(augment, seed=3),
        BatchStage(augment, seed=3),
    ]
    before = torch.default_generator.get_state()
    found = list(overlap(data(6), stages, thread=thread, depth=depth))
    assert torch.equal(before, torch.default_generator.get_state())
    want = list(overlap(data(6), stages, depth=0))
    torch.randn(3)
    assert all(torch.equal(a, b) for a, b in zip(found, want, strict=True))
    later = list(overlap(data(6)[4:], stages, start_index=4, thread=thread))
    assert all(torch.equal(a, b) for a, b in zip(later, want[4:], strict=True))
    assert not torch.equal(want[0] - want[1], data(6)[0] - data(6)[1])
    # Two stages of one function have two names, and draw apart.
    one, other = (
        sum(overlap([torch.ones(4)], [BatchStage(augment, name=n, seed=3)])) for n in "ab"
    )
    assert not torch.equal(one, other)


def test_modes_that_threads_cannot_take_over_are_refused():
    from torch.utils._python_dispatch import TorchDispatchMode

    class Spy(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    with Spy():
        with pytest.raises(
            fp.FuncpipeError, match=r"dispatch mode Spy; overlap\(..., thread=False\)"
        ):
            overlap(data(2), [double])
        assert len(list(overlap(data(2), [double], thread=False))) == 2
    with pytest.raises(fp.FuncpipeError, match=r"torch\.func"):
        torch.func.grad(lambda x: next(overlap([x], [double])).sum())(torch.ones(2))


def test_a_handle_that_nobody_holds_ends_its_threads():
    """Rule 9: threads do not own the handle."""
    run = overlap(iter(range(10**6)), [lambda x: x, lambda x: x])
    assert next(run) == 0
    threads = threads_of_overlaps()
    assert len(threads) == 3
    gone = weakref.ref(run)
    del run
    gc.collect()
    assert gone() is None
    for one in threads:
        one.join(10)
        assert not one.is_alive()


def test_close_does_not_wait_for_ever():
    """Rule 9: a source that blocks cannot be interrupted; a warning names it."""
    release = threading.Event()

    def source():
        yield 0
        release.wait(30)
        yield 1

    run = overlap(source(), [lambda x: x])
    assert next(run) == 0
    threads = threads_of_overlaps()
    with pytest.warns(UserWarning, match=r"funcpipe source \(the source is a generator\)"):
        run.close(timeout=0.05)
    release.set()
    for one in threads:
        one.join(10)
    with overlap(range(5), [lambda x: x]) as run:
        next(run)
    assert next(run, "end") == "end"


def test_one_loop_for_one_overlap():
    run = overlap(range(5), [lambda x: x, Fold(lambda s, x: (s, next(run)), 0)])
    with pytest.raises(fp.FuncpipeError, match="two threads ask this overlap"):
        next(run)


@pytest.mark.parametrize("thread", HOSTS)
def test_two_iterators_do_not_meddle(thread):
    """B6.9: training and evaluation over one tree of parameters, interleaved."""
    w = torch.ones(4)
    train = overlap(data(6), [double, Fold(sgd, w)], thread=thread)
    evaluate = overlap(data(6), [add_one, lambda x: (w * x).sum()], thread=thread)
    for x, loss, score in zip(data(6), train, evaluate, strict=True):
        assert loss.shape == ()
        assert torch.equal(score, (w * add_one(x)).sum())
    assert torch.equal(w, torch.ones(4))
    assert not torch.equal(train.state, w)


def test_a_second_iterator_is_not_ignored():
    """A3: torchrec's pipelines bind the first iterator; a second one is ignored. Here one iterator
    is one overlap."""
    source = iter(range(6))
    assert next(overlap(source, [lambda x: x], depth=0)) == 0
    assert list(overlap(source, [lambda x: x])) == [1, 2, 3, 4, 5]
    again = range(3)
    assert list(overlap(again, [double])) == list(overlap(again, [double])) == [0, 2, 4]


def test_inputs_are_dropped_when_they_are_used():
    """Rule 4."""
    alive = []

    class Batch:
        pass

    def source():
        for _ in range(6):
            batch = Batch()
            alive.append(weakref.ref(batch))
            yield batch
            del batch

    for thread in HOSTS:
        alive.clear()
        run = overlap(source(), [lambda b: 1, lambda b: b, lambda b: b], depth=3, thread=thread)
        next(run)
        gc.collect()
        held = sum(ref() is not None for ref in alive)
        assert held <= 2  # at most what is being drawn and what the first stage has
        run.close()


# ---- staleness
# -------------------------------------------------------------------------------


@pytest.mark.parametrize("lag", [0, 1, 2])
@pytest.mark.parametrize("thread", HOSTS)
def test_lag_is_exact(thread, lag):
    """B6.8: a stage reads the state after max(0, index - lag) batches; 25 repetitions."""

    def lookup(w, x):
        time.sleep(0.0002)
        return x + w

    states, want = [torch.ones(4)], []
    for j, x in enumerate(data()):
        new, loss = sgd(states[-1], lookup(states[max(0, j - lag)], double(x)))
        states.append(new)
        want.append(loss)
    for _ in range(25):
        stages = [double, BatchStage(lookup, lag=lag), Fold(sgd, torch.ones(4))]
        run = overlap(data(), stages, thread=thread, depth=3)
        assert all(torch.equal(a, b) for a, b in zip(run, want, strict=True))
    # In the middle: the states that are read before the first of one's own travel along.
    run = overlap(data(), stages, thread=thread)
    for _ in range(5):
        next(run)
    states, state = run.states, run.state
    run.close()
    assert torch.equal(states[-1], state)
    stages[-1] = Fold(sgd, states[-1], earlier=states[:-1])
    run = overlap(data()[5:], stages, thread=thread, start_index=5)
    assert all(torch.equal(a, b) for a, b in zip(run, want[5:], strict=True))


@pytest.mark.parametrize("thread", HOSTS)
def test_lag_and_writing_in_place_do_not_go_together(thread):
    """Rule 11: it would be a race."""

    def inplace(w, x):
        w["w"].add_(1)
        return w, x

    stages = [BatchStage(lambda w, x: x, lag=1), Fold(inplace, {"w": torch.ones(4)})]
    with pytest.raises(fp.FuncpipeError, match=r"in place \(state\['w'\]\).*return new tensors"):
        list(overlap(data(), stages, thread=thread))


# ---- wrong input
# -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: overlap(3, []), "an iterable of batches; got a int"),
        (lambda: overlap([], [3]), "stage 0 is a function, a BatchStage or a Fold; got a int"),
        (lambda: overlap([], double), "stages are a sequence of functions"),
        (lambda: overlap([], [double], depth=-1), "depth is a whole number from 0; got -1"),
        (lambda: overlap([], [double], depth=True), "depth is a whole number from 0; got True"),
        (lambda: overlap([], [double], start_index=1.5), "start_index is a whole number"),
        (
            lambda: overlap([], [Fold(sgd, 0), double]),
            "stage 0 is a Fold, and only the last stage can be a Fold",
        ),
        (
            lambda: overlap([], [BatchStage(double, lag=1)]),
            "no Fold makes states: end the stages with fp.batches.Fold",
        ),
        (
            lambda: overlap([], [BatchStage(double, lag=1, lead=2), Fold(sgd, 0)]),
            "2 batches ahead .* but reads the state of 1 batches before .* lead is at most lag",
        ),
        (
            lambda: overlap([], [BatchStage(double, lead=-1)]),
            "lead= is a whole number from 0, or None; got -1",
        ),
        (
            lambda: overlap([], [BatchStage(double, lead=3)]),
            r"lead=3, more than depth=2; give overlap\(depth=3\)",
        ),
        (
            lambda: overlap([], [BatchStage(double, lead=0), BatchStage(double, lead=1)]),
            r"'double_2' \(lead 1\) would run on a batch before 'double' \(lead 0\) has made it",
        ),
        (lambda: to_device("gpu"), "to_device takes a device"),
        (lambda: to_device("cpu", pin="yes"), 'pin is True, False or "auto"'),
    ],
)
def test_wrong_input(call, words):
    with pytest.raises(fp.PlanError, match=words):
        call()


@pytest.mark.parametrize("thread", HOSTS)
def test_a_fold_that_gives_no_pair(thread):
    with pytest.raises(
        fp.PlanError, match=r"a fold returns \(state, result\); 'stage' returned a int"
    ):
        next(overlap([1], [Fold(lambda s, x: 3, 0)], thread=thread))


def test_devices_for_other_branches():
    with pytest.raises(fp.BatchError, match="have another structure than this batch.*key mismatch"):
        next(overlap([{"x": 1, "y": 2}], [to_device({"x": "cpu"})]))


def test_awaitables_are_handed_on():
    """D3: a stage returns what is not there yet; another waits for it."""

    class Later:
        def __init__(self, value):
            self.value, self.waited = value, 0

        def wait(self):
            self.waited += 1
            return self.value

    class Handle:
        def wait(self):
            return True

    handles = [Later(torch.full((2,), float(i))) for i in range(4)]
    start = BatchStage(lambda i: {"i": i, "x": handles[i], "work": Handle()}, name="start")
    for thread in HOSTS:
        out = list(overlap(range(4), [start, awaited], thread=thread))
        assert [float(b["x"][0]) for b in out] == [0.0, 1.0, 2.0, 3.0]
        assert all(b["work"] is None for b in out)
    assert [one.waited for one in handles] == [2] * 4


def test_overlaps_nest():
    """A source may be an overlap: here a loader in a thread, under stages that one thread
    queues."""
    loader = overlap(data(5), [], thread=True)
    run = overlap(loader, [double, add_one], thread=False)
    assert all(torch.equal(a, add_one(double(b))) for a, b in zip(run, data(5), strict=True))
    broken = overlap(broken_source(), [], thread=True)
    with pytest.raises(Disk) as caught:
        list(overlap(broken, [double]))
    assert len(caught.value.__notes__) == 2


def test_a_pipeline_is_just_the_last_stage():
    """It nests over fp.run, and equals the loop of runs bit for bit."""
    stages, params, _ = zip(
        *[fp.from_module(torch.nn.Linear(4, 4), name=f"l{i}") for i in range(2)], strict=True
    )
    plan = cpu_plan(stages, fp.schedules.one_f_one_b(2, 2))
    batches = [(torch.randn(4, 4), torch.randn(4, 4)) for _ in range(5)]

    def train(params, batch):
        result = fp.run(plan, params, batch, threads_per_lane=1)
        new = fp._src.core.tree.map_leaves(lambda p, g: p.detach() - 0.1 * g, params, result.grads)
        return new, result.loss

    run = overlap(batches, [to_device("cpu"), Fold(train, params)])
    losses = list(run)
    want = params
    for batch, loss in zip(batches, losses, strict=True):
        want, expected = train(want, batch)
        assert torch.equal(loss, expected)
    for a, b in zip(fp.leaves(want), fp.leaves(run.state), strict=True):
        assert torch.equal(a, b)
