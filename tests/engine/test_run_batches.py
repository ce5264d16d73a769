"""Several batches at once give what one run after the other gives, bit for bit, whether lanes go on
by themselves or not; and nothing where one of them fails."""

import copy
import functools
import gc
import threading
import weakref

import pytest
import torch
import torch.nn.functional as F
from common import ids, same, schedules, snapshot
from functional_rules import MAKERS as FUNCTIONAL
from small import residual, residual_params
from torch import nn
from torch.optim import lr_scheduler

import funcpipe as fp
from funcpipe._src.engine.lanes import Lanes
from funcpipe._src.optimizing import undo
from funcpipe.testing import FaultAt

STAGES, MICROBATCHES = 3, 3
GENERATOR = torch.Generator().manual_seed(1)
BATCHES = [
    tuple(torch.randn(rows, 6, generator=GENERATOR) for _ in range(2)) for rows in (9, 9, 7, 2)
]
ADAMW = functools.partial(torch.optim.AdamW, lr=0.01)
MAKERS = {
    "sgd": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "adamw": ADAMW,
    "fused": functools.partial(torch.optim.AdamW, lr=0.01, fused=True),
    "adagrad": functools.partial(torch.optim.Adagrad, lr=0.1, foreach=True),
    "functional": FUNCTIONAL["adamw"],
}


def plan_of(schedule=None, *, stages=None, loss=F.mse_loss, steps=True, **options):
    schedule = schedule or fp.schedules.one_f_one_b(STAGES, MICROBATCHES)
    if steps:
        schedule = fp.schedules.step_params(schedule)
    stages = stages or [fp.stage(residual)] * schedule.num_stages
    return fp.make_plan(stages, schedule, loss=loss, devices="cpu", **options)


@pytest.fixture
def walks(monkeypatch):
    """How many batches the lanes did at once, each time."""
    counts, walk = [], Lanes.walk
    monkeypatch.setattr(
        Lanes,
        "walk",
        lambda self, executions: (counts.append(len(executions)), walk(self, executions))[1],
    )
    return counts


class Twins:
    """The same parameters twice, each with an optimizer: one is stepped in `run_batches`, the other
    one by a loop."""

    def __init__(self, make=ADAMW, *, plan=None, params=None, scheduler=None, **options):
        self.plan = plan or plan_of(**options)
        params = residual_params(self.plan.num_stages) if params is None else params
        self.rows = [copy.deepcopy(params), copy.deepcopy(params)]
        self.optimizers = [make([*dict.fromkeys(fp.leaves(row))]) for row in self.rows]
        self.schedulers = (
            [scheduler(each) for each in self.optimizers] if scheduler else [None, None]
        )
        self.state = None

    def run(self, batches=BATCHES, *, seed=None, feeds=None, **options):
        """All batches, twice; what both gave."""
        wanted, state, want = self.rows[1], self.state, []
        for number, batch in enumerate(batches):
            key = None if seed is None else fp.fold_in(seed, number)
            fed = None if feeds is None else feeds[number]
            given = {"seed": key, "feeds": fed, "state": state, "optimizer": self.optimizers[1]}
            given |= {key: value for key, value in options.items() if key != "executor"}
            one = fp.run(self.plan, wanted, batch, **given)
            if self.schedulers[1] is not None:
                self.schedulers[1].step()
            state = one.state if self.state is not None else None
            want.append(one)
        got = self.batches(batches, seed=seed, feeds=feeds, **options)
        assert len(got) == len(want)
        for one, other in zip(want, got, strict=True):
            assert other.grads is None
            for name in ("loss", "norm", "losses", "aux", "state", "outputs"):
                assert same(getattr(one, name), getattr(other, name)), name
            assert (one.unused, one.weight) == (other.unused, other.weight)
        self.check()
        self.state = state
        return got

    def batches(self, batches=BATCHES, **options):
        """All batches at once."""
        given = {"optimizer": self.optimizers[0], "scheduler": self.schedulers[0]}
        given |= {"state": self.state, "executor": "threads", **options}
        return fp.run_batches(self.plan, self.rows[0], batches, **given)

    def check(self):
        """Are the two alike."""
        assert same(self.rows[1], self.rows[0])
        mine, its = (each.state_dict() for each in self.optimizers)
        assert mine["param_groups"] == its["param_groups"]
        assert same(its["state"], mine["state"])
        assert [*mine["state"]] == [*its["state"]]
        assert all(leaf.grad is None for leaf in fp.leaves(self.rows[0]))
        if self.schedulers[0] is not None:
            assert self.schedulers[0].state_dict() == self.schedulers[1].state_dict()

    def now(self):
        """All that a step changes."""
        return snapshot((self.rows[0], copy.deepcopy(self.optimizers[0].state_dict()["state"])))


@pytest.mark.parametrize("schedule", schedules(STAGES, MICROBATCHES), ids=ids)
def test_every_schedule(schedule, walks):
    Twins(plan=plan_of(schedule)).run()
    assert max(walks) == len(BATCHES)


@pytest.mark.parametrize(
    ("make", "executor"),
    [*((name, "threads") for name in MAKERS), *(("adamw", e) for e in ("serial", "lanes", None))],
)
def test_every_optimizer_and_executor(make, executor):
    twins = Twins(MAKERS[make])
    with fp.lanes(twins.plan) as lanes:
        for _ in range(2):
            twins.run(executor=lanes if executor == "lanes" else executor)


def test_a_lane_begins_the_next_batch_while_others_are_at_the_last(walks, monkeypatch):
    """The first stage's second batch begins before the last stage steps: that waits for it."""
    begun, calls = threading.Event(), []

    def first(p, x):
        calls.append(1)
        if len(calls) > MICROBATCHES:
            begun.set()
        return residual(p, x)

    schedule = fp.schedules.one_f_one_b(2, MICROBATCHES)
    plan, params = (
        plan_of(schedule, stages=[fp.stage(first), fp.stage(residual)]),
        residual_params(2),
    )
    optimizer = torch.optim.SGD(fp.leaves(params), lr=0.1)
    fp.run(plan, params, BATCHES[0], optimizer=optimizer)
    calls.clear()
    seen, own = [], torch.optim.SGD.step

    def step(self, closure=None):
        if self.param_groups[0]["params"][0] is params[1]["a"]:
            seen.append(begun.wait(10))
        return own(self)

    monkeypatch.setattr(torch.optim.SGD, "step", step)
    fp.run_batches(plan, params, BATCHES[:2], optimizer=optimizer, executor="threads")
    assert seen == [True, True]
    assert walks[-1] == 2


def test_the_first_batch_that_a_plan_ever_runs_goes_alone(walks):
    stages = [fp.stage(residual, name=f"new {number}") for number in range(STAGES)]
    Twins(stages=stages).batches()
    assert walks == [1, len(BATCHES) - 1]


@pytest.mark.parametrize("max_norm", [1e6, 0.05])
def test_what_is_clipped_is_done_again(max_norm, walks):
    twins = Twins()
    twins.run(BATCHES[:1])
    walks.clear()
    got = twins.run(max_norm=max_norm)
    assert all(float(result.norm) > 0.05 for result in got)
    assert walks[len(BATCHES) :] == (
        [len(BATCHES)] if max_norm > 1 else [len(BATCHES), *[1] * len(BATCHES)]
    )


@pytest.mark.parametrize("scale", [1.0, 64.0])
def test_what_is_not_finite(scale, walks):
    """Under a loss scale that batch is skipped; without one the step is as wrong as in a loop."""
    twins = Twins()
    twins.run(BATCHES[:1], loss_scale=scale)
    broken = [*BATCHES[:2], (BATCHES[2][0], BATCHES[2][1] * torch.inf), BATCHES[3]]
    got = twins.run(broken, loss_scale=scale)
    assert [bool(result.norm.isfinite()) for result in got[:3]] == [True, True, False]
    assert bool(got[3].norm.isfinite()) == (scale != 1.0)
    again = [1] * 4 if scale != 1.0 else []
    assert walks[-1 - len(again) :] == [4, *again]


def late(y, target):
    """A sum, and how much it counts, which nobody knew before."""
    return (y - target).square().sum(), target.numel()


def test_a_loss_that_weighs_late(walks):
    twins = Twins(loss=late)
    for _ in range(2):
        twins.run()
    assert max(walks) == 1


@pytest.mark.parametrize("executor", ["serial", "threads"])
@pytest.mark.parametrize("place", range(STAGES))
@pytest.mark.parametrize("at", ["F", "B"])
def test_a_batch_that_fails_leaves_all_as_it_was(at, place, executor):
    """The second of three, in the last microbatch."""
    calls, armed = [], threading.Event()

    def strike(tensor):
        calls.append(1)
        if armed.is_set() and len(calls) == 2:
            raise ArithmeticError("planted")

    fault = FaultAt(place, MICROBATCHES - 1, at, error=strike)
    twins = Twins(
        stages=fault([fp.stage(residual)] * STAGES),
        scheduler=lambda each: lr_scheduler.StepLR(each, 1, 0.5),
    )
    twins.run(BATCHES[:2], executor=executor)
    before, rates = twins.now(), copy.deepcopy(twins.schedulers[0].state_dict())
    groups = copy.deepcopy(twins.optimizers[0].state_dict()["param_groups"])
    calls.clear()
    armed.set()
    with pytest.raises(fp.StageError, match="planted") as caught:
        twins.batches([BATCHES[0]] * 3, executor=executor)
    assert isinstance(caught.value, ArithmeticError)
    assert same(before, twins.now())
    assert rates == twins.schedulers[0].state_dict()
    assert groups == twins.optimizers[0].state_dict()["param_groups"]
    notes = "\n".join(caught.value.__notes__)
    assert "in batch 1 of these" in notes
    assert "run_batches has undone all steps" in notes
    armed.clear()
    twins.run(executor=executor)


def test_a_bad_batch_is_named_before_anything_runs(walks):
    twins = Twins()
    twins.run(BATCHES[:1])
    walks.clear()
    before = twins.now()
    with pytest.raises(fp.BatchError) as caught:
        twins.batches([BATCHES[0], BATCHES[1], (BATCHES[2][0], BATCHES[2][1][:3])])
    assert "in batch 2 of these (the first is 0)" in caught.value.__notes__
    assert same(before, twins.now())
    assert walks == []


def test_a_loader_that_reuses_its_tensors_is_refused(walks):
    """All batches are read first, so all would have the numbers of the last one."""
    twins = Twins()
    before = twins.now()
    x, y = BATCHES[0][0].clone(), BATCHES[0][1].clone()

    def reused():
        for batch in BATCHES[:2]:
            yield x.copy_(batch[0]), y

    with pytest.raises(fp.BatchError, match=r"batches \[0\] have changed"):
        twins.batches(reused())
    assert same(before, twins.now())
    assert walks == []
    twins.batches((x.clone(), y) for x, y in BATCHES[:2])


SCHEDULERS = {
    "step": lambda each: lr_scheduler.StepLR(each, 1, 0.5),
    "one cycle": lambda each: lr_scheduler.OneCycleLR(each, 0.1, total_steps=20),
    "sequence": lambda each: lr_scheduler.SequentialLR(
        each, [lr_scheduler.LinearLR(each, 0.1), lr_scheduler.ExponentialLR(each, 0.9)], [2]
    ),
    "lambda": lambda each: lr_scheduler.LambdaLR(each, lambda epoch: 0.7**epoch),
    "restarts": lambda each: lr_scheduler.CosineAnnealingWarmRestarts(each, 3),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers_step_after_each_batch(name, walks):
    twins = Twins(scheduler=SCHEDULERS[name])
    for max_norm in (None, 0.05):
        walks.clear()
        twins.run(max_norm=max_norm)
        assert max(walks) == len(BATCHES)


class Warmup(lr_scheduler.LRScheduler):
    """The usual one of users': it holds another scheduler, and what no copy can be made of."""

    def __init__(self, optimizer):
        self.after, self.lock, self.seen = (
            lr_scheduler.StepLR(optimizer, 1, 0.5),
            threading.Lock(),
            [optimizer],
        )
        super().__init__(optimizer)

    def get_lr(self):
        if self.last_epoch < 3:
            return [base * (self.last_epoch + 1) / 3 for base in self.base_lrs]
        self.after.step()
        return self.after.get_last_lr()


def test_a_scheduler_that_holds_others_keeps_them():
    twins = Twins()
    twins.schedulers = [Warmup(each) for each in twins.optimizers]
    check, twins.check = twins.check, lambda: None
    for max_norm in (None, 0.05, None):
        twins.run(max_norm=max_norm)
        mine, its = twins.schedulers
        assert mine.seen[0] is mine.optimizer is mine.after.optimizer is twins.optimizers[0]
        assert mine.get_last_lr() == its.get_last_lr()
        assert mine.after.last_epoch == its.after.last_epoch
        twins.schedulers = [None, None]
        check()
        twins.schedulers = [mine, its]


def test_an_interrupt_while_steps_are_undone_waits_until_they_are(monkeypatch):
    """Whichever leaf it comes at, all is as it was before the first batch."""
    twins = Twins(scheduler=SCHEDULERS["step"])
    twins.run()
    restore, left = undo._Kept.restore, [0]

    def interrupted(self, optimizer):
        left[0] -= 1
        if left[0] == 0:
            raise KeyboardInterrupt
        restore(self, optimizer)

    monkeypatch.setattr(undo._Kept, "restore", interrupted)
    before, rates = twins.now(), copy.deepcopy(twins.schedulers[0].state_dict())
    for leaf in range(1, 2 * STAGES + 1):
        left[0] = leaf
        with pytest.raises(KeyboardInterrupt):
            twins.batches(max_norm=0.05)
        assert left[0] < 0
        assert same(before, twins.now())
        assert rates == twins.schedulers[0].state_dict()
    twins.run()


@pytest.mark.slow
def test_casts_of_weights_go_with_their_batch():
    """Under autocast compiled stages cast their weights once a run; of batches that are done
    nothing is left."""
    split = fp.split(nn.Sequential(nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, 48)), balance=[2, 1])
    plan = plan_of(
        fp.schedules.one_f_one_b(2, 2), stages=[fp.compile_stage(one) for one in split.stages]
    )
    batches = [(torch.randn(4, 48), torch.randn(4, 48)) for _ in range(8)]
    optimizer = torch.optim.SGD(fp.leaves(split.params), lr=0.1)
    counts, own = [], torch.optim.SGD.step

    def step(self, closure=None):
        gc.collect()
        tensors = [
            each
            for each in gc.get_objects()
            if type(each) is torch.Tensor and id(each) not in others
        ]
        counts.append(
            sum(each.dtype is torch.bfloat16 and each.shape == (48, 48) for each in tensors)
        )
        return own(self)

    with torch.autocast("cpu", torch.bfloat16), pytest.MonkeyPatch.context() as patch:
        fp.run(plan, split.params, batches[0], optimizer=optimizer)
        patch.setattr(torch.optim.SGD, "step", step)
        others = {id(each) for each in gc.get_objects() if type(each) is torch.Tensor}
        fp.run_batches(plan, split.params, batches, optimizer=optimizer, executor="threads")
    assert len(counts) == 16
    assert (
        0 < max(counts) <= 8
    )  # of two batches, and gradients before they are cast back; 16 and more of all


def test_a_rate_that_is_a_tensor_stays_the_tensor_that_it_is():
    def make(params):
        return torch.optim.AdamW(params, lr=torch.tensor(0.01))

    twins = Twins(make, scheduler=SCHEDULERS["step"])
    rate = twins.optimizers[0].param_groups[0]["lr"]
    for max_norm in (None, 0.05):
        twins.run(max_norm=max_norm)
    assert twins.optimizers[0].param_groups[0]["lr"] is rate


def test_groups_keep_their_own_numbers(walks):
    def make(params):
        return torch.optim.AdamW(
            [{"params": params[:2], "lr": 0.01}, {"params": params[2:], "lr": 0.03}]
        )

    twins = Twins(make, scheduler=SCHEDULERS["step"])
    for _ in range(2):
        twins.run()
    assert max(walks) == len(BATCHES)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("norm", [False, True])
def test_modules(compiled, norm, walks):
    """Dropout draws by the batch's place; each lane commits statistics for its next batch."""
    torch.manual_seed(4)
    kind = nn.BatchNorm1d if norm else nn.LayerNorm
    model = nn.Sequential(nn.Linear(6, 6), kind(6), nn.Dropout(0.2), nn.Linear(6, 6))
    split = fp.split(model, balance=[2, 2])
    stages = [fp.compile_stage(one) for one in split.stages] if compiled else split.stages
    twins = Twins(plan=plan_of(fp.schedules.zero_bubble(2, 3), stages=stages), params=split.params)
    twins.state = split.state
    batches = [BATCHES[0], BATCHES[1], BATCHES[0]]
    for seed in range(2):
        walks.clear()
        twins.run(batches, seed=seed)
        assert max(walks) == len(batches)


def counting(p, x, *, state):
    return fp.Out(residual(p, x) + sum(state), stats=x.detach().mean())


def grown(state, stats):
    """One more leaf with each batch."""
    return (*state, torch.stack(stats).mean())


@pytest.mark.parametrize("compiled", [False, True])
def test_a_state_that_grows(compiled, walks):
    counted = fp.stage(counting, state=True, commit=grown)
    stages = [
        fp.stage(residual),
        fp.compile_stage(counted) if compiled else counted,
        fp.stage(residual),
    ]
    twins = Twins(stages=stages)
    twins.state = ((), (torch.zeros(()),), ())
    for _ in range(2):
        twins.run([BATCHES[0]] * 3)
    assert len(twins.state[1]) == 7
    assert max(walks) == 3


def test_a_commit_that_fails_leaves_all_as_it_was(walks):
    commits = []

    def commit(state, stats):
        commits.append(1)
        if len(commits) == 6:
            raise ArithmeticError("planted")
        return grown(state, stats)

    counted = fp.stage(counting, state=True, commit=commit)
    twins = Twins(stages=[fp.stage(residual), counted, fp.stage(residual)])
    twins.state = ((), (torch.zeros(()),), ())
    twins.run([BATCHES[0]] * 2)
    before = twins.now()
    with pytest.raises(ArithmeticError, match="planted") as caught:
        twins.batches([BATCHES[0]] * 3)
    for word in ("stage 1", "commit"):
        assert word in str(caught.value.funcpipe)
    assert "in batch 1 of these (the first is 0)" in caught.value.__notes__
    assert same(before, twins.now())
    assert max(walks) == 3


def test_feeds_are_of_each_batch(walks):
    fed = fp.stage(lambda p, x, *, feeds: residual(p, x) * feeds["mask"], feeds=["mask"])
    twins = Twins(stages=[fp.stage(residual), fed, fp.stage(residual)])
    feeds = [{"mask": torch.rand(len(x), 1)} for x, _ in BATCHES]
    for _ in range(2):
        twins.run(feeds=feeds)
    assert max(walks) == len(BATCHES)
    with pytest.raises(fp.PlanError, match="feeds has a dict for each of 4 batches; got 3"):
        twins.batches(feeds=feeds[:3])
    for wrong, name in ((feeds[0], "dict"), (3, "int")):
        with pytest.raises(
            fp.PlanError, match=f"feeds has a dict for each of 4 batches; got a {name}"
        ):
            twins.batches(feeds=wrong)


def test_ties_go_one_by_one(walks):
    params = residual_params(STAGES)
    params[2]["a"] = params[0]["a"]
    ties = [((0, ("a",)), (2, ("a",)))]
    twins = Twins(params=params, ties=ties)
    twins.run()
    assert max(walks) == 1


def test_hooks_see_whole_steps(walks):
    seen = []

    def make(params):
        optimizer = ADAMW(params)
        optimizer.register_step_post_hook(lambda *_: seen.append(1))
        return optimizer

    twins = Twins(make)
    twins.run()
    assert len(seen) == 2 * len(BATCHES)
    assert max(walks) == 1


def test_leaves_that_are_frozen_or_held_by_nobody_stay(walks):
    twins = Twins()
    for number, row in enumerate(twins.rows):
        for leaf in fp.leaves(row):
            leaf.requires_grad_()
        row[1]["a"].requires_grad_(requires_grad=False)
        twins.optimizers[number] = ADAMW(fp.leaves(row[:2]))
    before = snapshot((twins.rows[0][1]["a"], twins.rows[0][2]))
    for _ in range(2):
        twins.run()
    assert same(before, snapshot((twins.rows[0][1]["a"], twins.rows[0][2])))
    assert max(walks) == 4


def test_leaves_that_no_backward_reaches(walks):
    def unused(p, x):
        return residual({"a": p["a"], "b": p["a"]}, x)

    twins = Twins(stages=[fp.stage(residual), fp.stage(unused), fp.stage(residual)])
    for _ in range(2):
        assert all(result.unused == ((1, "b"),) for result in twins.run())
    assert max(walks) == 4
    before = twins.now()
    with pytest.raises(fp.PlanError, match="got no gradient"):
        twins.batches(check="used")
    assert same(before, twins.now())


def test_a_stage_that_writes_into_its_parameters_is_refused():
    writes = []

    def wrong(p, x):
        if writes:
            p["a"].data.add_(0)
            p["a"].detach().mul_(1.0)
        return residual(p, x)

    twins = Twins(stages=[fp.stage(wrong), fp.stage(residual), fp.stage(residual)])
    twins.run()
    before = twins.now()
    writes.append(1)
    with pytest.raises(fp.PlanError, match="wrote into its parameters"):
        twins.batches()
    assert same(before, twins.now())


def test_a_stage_that_writes_into_numbers_of_its_parameters_is_found_in_its_first_run():
    """Torch counts no version there, so a first run has copies; it is the same where several
    batches are asked for."""

    def wrong(p, x):
        p["a"].data.add_(1)
        return residual(p, x)

    twins = Twins(stages=[fp.stage(wrong), fp.stage(residual), fp.stage(residual)])
    before = twins.now()
    with pytest.raises(fp.PlanError, match="wrote into its parameters"):
        twins.batches()
    assert same(before, twins.now())


def test_gradients_of_one_batch_are_gone_when_the_next_is_stepped(monkeypatch):
    """Else they would take the memory of all."""
    twins = Twins(torch.optim.SGD, plan=plan_of(fp.schedules.one_f_one_b(1, 2)))
    twins.run(BATCHES[:1])
    held, own = [], torch.optim.SGD.step

    def step(self, closure=None):
        gc.collect()
        assert all(reference() is None for reference in held)
        held.extend(weakref.ref(leaf.grad) for leaf in self.param_groups[0]["params"])
        return own(self)

    plan, params = twins.plan, twins.rows[0]
    optimizer = torch.optim.SGD(fp.leaves(params), lr=0.1)
    monkeypatch.setattr(torch.optim.SGD, "step", step)
    with fp.lanes(plan) as lanes:
        fp.run_batches(plan, params, BATCHES, optimizer=optimizer, executor=lanes)
    assert len(held) == 2 * len(BATCHES)


def test_a_timeout_tells_what_each_lane_is_at():
    stops, calls = threading.Event(), [-1000]

    def waits(p, x):
        calls[0] += 1
        if calls[0] == 2 * MICROBATCHES:
            stops.wait(20)
        return residual(p, x)

    twins = Twins(stages=[fp.stage(residual), fp.stage(waits), fp.stage(residual)])
    twins.run(BATCHES[:1], executor="serial")
    calls[0] = 0
    before, alive = twins.now(), set(threading.enumerate())
    with pytest.raises(fp.RunTimeout) as caught:
        twins.batches([BATCHES[0]] * 3, timeout=1.0)
    stops.set()
    for lane in (
        set(threading.enumerate()) - alive
    ):  # what waits in C is left behind, and ends by itself
        lane.join(30)
    text = str(caught.value)
    assert "device 1 (cpu) did" in text
    assert "of 63 actions are done" in text
    assert same(before, twins.now())


def test_each_batch_is_recorded():
    twins = Twins()
    twins.run(BATCHES[:1])
    results = twins.batches([BATCHES[0]] * 3, record=True)
    assert [len(result.timeline.spans) for result in results] == [7 * STAGES] * 3
    assert all(result.stats.num_microbatches == MICROBATCHES for result in results)


def test_gradients_that_are_spent_are_not_asked_for():
    twins = Twins()
    result = twins.batches()[-1]
    with pytest.raises(fp.PlanError, match=r"run_batches has already stepped.*result\.norm"):
        fp.global_norm(result)
    with pytest.raises(fp.PlanError, match="the run has already stepped"):
        fp.step(twins.optimizers[0], twins.rows[0], result)


def test_no_batches_and_a_generator_of_some():
    twins = Twins()
    assert twins.batches([]) == ()
    assert len(twins.batches(iter(BATCHES))) == 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"optimizer": None}, "the run got no optimizer"),
        ({"optimizer": torch.optim.SGD}, "SGD is a class"),
        ({"max_norm": -1.0}, "max_norm is a number from 0"),
        (
            {"batches": BATCHES[0][0]},
            "batches is a list of batches as fp.run takes them; got a Tensor",
        ),
        ({"batches": b"ab"}, "batches is a list of batches as fp.run takes them; got a bytes"),
        ({"timeout": "x"}, "timeout is a number of seconds"),
        ({"batches": 3}, "batches is a list of batches as fp.run takes them; got a int"),
        ({"seed": "x"}, "seed is an int"),
        ({"scheduler": 3}, "a int is not one"),
        ({"executor": "fast"}, "executor is"),
    ],
)
def test_what_cannot_run_is_refused_before_anything_runs(options, message):
    twins = Twins()
    before = twins.now()
    with pytest.raises(fp.PlanError, match=message):
        twins.batches(**options)
    assert same(before, twins.now())


def test_schedulers_that_do_not_fit():
    twins = Twins()
    plateau = lr_scheduler.ReduceLROnPlateau(twins.optimizers[0])
    with pytest.raises(fp.PlanError, match="ReduceLROnPlateau needs the loss of each batch"):
        twins.batches(scheduler=plateau)
    with pytest.raises(fp.PlanError, match="scheduler has another optimizer"):
        twins.batches(scheduler=lr_scheduler.StepLR(twins.optimizers[1], 1))


class Own(torch.optim.SGD):
    """An optimizer of a user's."""


def test_optimizers_of_others_and_schedules_without_steps():
    twins = Twins(functools.partial(Own, lr=0.1))
    with pytest.raises(fp.PlanError, match="Own is not one of torch's own"):
        twins.batches()
    with pytest.raises(fp.PlanError, match=r"has no S.*step_params\(schedule\)"):
        fp.run_batches(plan_of(steps=False), residual_params(STAGES), BATCHES)
