"""Tasks for the processes of `test_processes`. Each gets (rank, size, ...), and returns something
small or raises."""

import faulthandler
import time
import warnings
from collections import Counter
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from unittest import mock

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

import funcpipe as fp
from funcpipe import schedules as S
from funcpipe._src.processes.rank_lanes import Ranks
from funcpipe._src.processes.rendezvous import listening


def net(seed, *, buffers=False):
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(6, 6), nn.BatchNorm1d(6) if buffers else nn.Tanh(), nn.Linear(6, 6)
    )


def rows(count):
    generator = torch.Generator().manual_seed(count)
    return torch.randn(count, 6, generator=generator), torch.randn(count, 6, generator=generator)


def plan_of(stages, schedule, *, loss=F.mse_loss, **options):
    return fp.make_plan(stages, schedule, loss=loss, devices="cpu", **options)


@contextmanager
def pipeline(plan, params, timeout=20.0):
    """The ranks of a plan, and their parameters."""
    with fp.ranks(plan, timeout=timeout) as ranks:
        yield ranks, fp.place(plan, params, ranks)


def told(job):
    """Return the result of a job, or the kind and message of its error."""
    try:
        return job()
    except fp.FuncpipeError as error:
        return type(error).__name__, str(error)


def two_replicas(split, schedule=None):
    plan = plan_of(split, schedule or S.one_f_one_b(1, 2))
    return plan, fp.ranks(
        plan, init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "pp")), dp="dp", timeout=20.0
    )


def replicas_begin(rank, size, how, folder):
    """Run two replicas, one of which begins differently; then two that begin alike."""
    model = net(
        rank if how in ("seeds", "sharded", "other classes") else 0, buffers=how == "buffers"
    )
    if how == "frozen":
        model[0].requires_grad_(False)
        model[0].bias.data += rank
    if how == "buffers":
        model[1].running_mean += rank
    split = fp.split(model, 1)
    schedule = S.one_f_one_b(1, 2)
    plan, made = two_replicas(split, S.gather_params(schedule) if how == "sharded" else schedule)
    with made as ranks:
        params = fp.place(plan, split.params, ranks, shard=how == "sharded")
        state = fp.place(plan, split.state, ranks)
        if how == "loaded on one replica" and rank == 0:
            fp.save(folder, fp.split(net(7), 1), fp.split(net(7), 1).params)
            params = fp.load(folder, split).params

        def run():
            fp.run(plan, params, rows(8), state=state, executor=ranks)
            return "ran"

        if how == "a model later":
            run()
            split = fp.split(net(rank), 1)
            params = fp.place(plan, split.params, ranks)
        outcomes = [told(run), told(run)]
        fresh = fp.split(net(1, buffers=how == "buffers"), 1)
        params, state = fp.place(plan, fresh.params, ranks), fp.place(plan, fresh.state, ranks)
        return [*outcomes, told(run) if how != "sharded" else "ran"]


def tied_begin(rank, size, alike):
    """Run two stages that share a weight, which each process made by itself."""
    torch.manual_seed(0 if alike else rank)
    model = nn.Sequential(nn.Linear(6, 6, bias=False), nn.Tanh(), nn.Linear(6, 6, bias=False))
    model[2].weight = model[0].weight
    split = fp.split(model, 2)
    plan = plan_of(split, S.one_f_one_b(2, 2))
    with fp.ranks(plan, timeout=20.0) as ranks:
        params = tuple(
            tree if stage in ranks.stages else None for stage, tree in enumerate(split.params)
        )  # without fp.place
        return told(lambda: bool(fp.run(plan, params, rows(8), executor=ranks)) and "ran")


def comparisons(rank, size, renews):
    """Count the comparisons of numbers in six runs."""
    split = fp.split(net(0), 1)
    plan, made = two_replicas(split)
    abouts = Counter()
    exchange = Ranks.exchange

    def counted(self, about, mine):
        abouts[about] += 1
        return exchange(self, about, mine)

    with made as ranks, mock.patch.object(Ranks, "exchange", counted):
        params = fp.place(plan, split.params, ranks)
        optimizer = torch.optim.SGD(fp.leaves(params), lr=0.1)
        for _ in range(6):
            result = fp.run(plan, params, rows(8), executor=ranks)
            if renews:
                params = tuple(
                    {
                        name: (leaf - 0.1 * row[name]).detach().requires_grad_()
                        for name, leaf in tree.items()
                    }
                    for tree, row in zip(params, result.grads, strict=True)
                )
            else:
                fp.step(optimizer, params, result)
    return abouts["the numbers of parameters and state"]


def batches_differ(rank, size):
    """Run with batches that differ over two ranks, then with equal ones; say what each run gave,
    and how many tensors of batches were hashed after the first good run."""
    split = fp.split(net(0), 2)
    plan = plan_of(split, S.one_f_one_b(2, 4))
    x, y = rows(8)
    other = bool(rank)
    with pipeline(plan, split.params, 30.0) as (ranks, params):
        run = lambda *batch: told(lambda: float(fp.run(plan, params, batch, executor=ranks).loss))
        ready = lambda shift: fp.Microbatches((x + shift).split(2))
        wrong = [
            run(x + other, y),
            run(x, y + (not other)),
            run(ready(0.0), fp.Microbatches((y + other).split(2))),
            run(fp.Axis((x + other).T, 1), y),
        ]
        right = [run(None if other else x, y if other else None), run(x, y)]
        with mock.patch(
            "funcpipe._src.engine.prepare.digests_of_batch", side_effect=AssertionError
        ):
            later = run(x + other, y)  # the first rank has the inputs, so this changes nothing
    return wrong, right, later


def unnamed_dimension(rank, size):
    """Collect the warnings of ranks of a mesh with two dimensions, and of one with three."""
    plan = plan_of(fp.split(net(0), 2), S.one_f_one_b(2, 2))
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    three = init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("dp", "pp", "tp"))
    seen = []
    for make in (
        lambda: fp.ranks(plan, mesh),
        lambda: fp.ranks(plan, mesh, dp="dp"),
        lambda: fp.ranks(plan, mesh["pp"]),
        lambda: fp.ranks(plan, three, dp="dp"),
        lambda: fp.ranks(plan),
    ):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            told(make)
        seen.append([str(each.message) for each in caught if "dimension" in str(each.message)])
    return seen


def summed_loss(y, target):
    return F.mse_loss(y, target, reduction="sum")


def mean_of_labels(y, target):
    return F.cross_entropy(
        y, target.argmax(-1).masked_fill(target[:, 0] > 0.5, -100), ignore_index=-100
    )


LOSSES = {
    "a function that sums": summed_loss,
    "a module that sums": nn.MSELoss(reduction="sum"),
    "a mean": F.mse_loss,
    "a mean of counted labels": mean_of_labels,
    "a lambda": lambda y, target: (y - target).abs().mean(),
}


def as_torch(rank, size, loss, scale_grads, steps):
    """Return the greatest differences between torch's schedule and ranks.schedule, and torch's
    gradient norms."""
    x, target = rows(12)
    parts = [nn.Sequential(*net(0)[:2]), nn.Sequential(*net(0)[2:])]
    own = parts[rank]
    torchs = PipelineStage(own, rank, 2, torch.device("cpu"))
    schedule = Schedule1F1B(torchs, 3, loss_fn=LOSSES[loss], scale_grads=scale_grads)
    want = [] if rank else None
    schedule.step(*([x] if rank == 0 else []), target=target if rank else None, losses=want)
    made = [
        fp.from_module(nn.Sequential(*layers), name=str(n))
        for n, layers in enumerate((net(0)[:2], net(0)[2:]))
    ]
    stages, params, _ = zip(*made, strict=True)
    plan = plan_of(stages, S.one_f_one_b(2, 3), loss=LOSSES[loss])
    with fp.ranks(plan, timeout=20.0) as ranks:
        placed = fp.place(plan, params, ranks)
        ours, got = ranks.schedule(placed, scale_grads=scale_grads), []
        for _ in range(steps):
            ours.step(x, target=target, losses=got)
        pairs = [(leaf, placed[rank][name]) for name, leaf in own.named_parameters()]
        apart = max(
            float((p.grad * steps - q.grad).abs().max() / p.grad.abs().max()) for p, q in pairs
        )
        if rank:
            apart = max(
                apart, *(float(abs(a.detach() - b)) for a, b in zip(want, got, strict=True))
            )
    return apart


def losses_of_replicas(rank, size):
    """Return the losses that a schedule gives each of two replicas, and the losses of its rows."""
    split = fp.split(net(0), 1)
    plan, made = two_replicas(split, S.one_f_one_b(1, 3))
    x, target = rows(9 if rank else 2)  # two rows: two microbatches
    with made as ranks:
        params = fp.place(plan, split.params, ranks)
        schedule, got, seen = ranks.schedule(params), [], []
        schedule.step(x, target=target, losses=got)
        schedule.eval(x, target=target, losses=seen)
    model = net(0)
    want = [
        float(F.mse_loss(model(a), b)) for a, b in zip(x.chunk(3), target.chunk(3), strict=True)
    ]
    return want, [float(each) for each in got], [float(each) for each in seen]


def fails_beside(rank, size):
    """Run two pipelines side by side. The second stage of the second one fails: return its first
    rank's error."""

    def second(p, x):
        if rank == 3:
            raise ArithmeticError("planted")
        return x * p

    stages = [fp.stage(lambda p, x: x * p), fp.stage(second)]
    plan = plan_of(stages, S.one_f_one_b(2, 2))
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
    with fp.ranks(plan, mesh["pp"], timeout=20.0) as ranks:
        params = fp.place(plan, (torch.tensor(2.0), torch.tensor(3.0)), ranks)
        try:
            fp.run(plan, params, rows(4), executor=ranks)
        except fp.PeerError as error:
            return error.rank, error.process, str(error)
        except ArithmeticError:
            return "failed itself"
        return "ran"


def multiplied(size=2):
    stages = [fp.stage(lambda p, x: x * p)] * size
    return plan_of(stages, S.one_f_one_b(size, 2))


def two_numbers():
    return torch.tensor(2.0, requires_grad=True), torch.tensor(3.0, requires_grad=True)


def never_runs(rank, size, before):
    """Run nothing (more) on rank 1, which has entered its ranks."""
    plan = multiplied()
    with pipeline(plan, two_numbers(), 3.0) as (ranks, params):
        for _ in range(before):
            result = fp.run(plan, params, rows(4), executor=ranks)
            fp.step(torch.optim.SGD(fp.leaves(params), lr=0.1), params, result)
        if rank == 1:
            time.sleep(6.0)
            return "slept"
        try:
            fp.run(plan, params, rows(4), executor=ranks)
        except fp.PeerError as error:
            return error.rank, error.process, str(error)


def never_makes_ranks(rank, size):
    plan = multiplied()
    if rank == 1:
        time.sleep(14.0)
        fp._src.processes.ranks._made[0, 1] += 1  # as if it had made ranks
        return "slept"
    try:
        with fp.ranks(plan, timeout=1.0):
            pass
    except fp.PeerError as error:
        return error.rank, error.process, str(error)


def gives_no_plan(rank, size):
    def make():
        with fp.ranks(None if rank == 1 else multiplied(), timeout=20.0):
            return "made"

    return told(make)


class Breaks(torch.optim.SGD):
    """An optimizer whose second step fails."""

    count = 0

    def step(self, closure=None):
        self.count += 1
        if self.count == 2:
            raise ArithmeticError("planted")
        return super().step(closure)


def step_fails(rank, size):
    """Fail in the second step of rank 1's optimizer, and go on: return each rank's error in each
    step."""
    plan, heard = multiplied(), []
    with pipeline(plan, two_numbers()) as (ranks, params):
        optimizer = (Breaks if rank == 1 else torch.optim.SGD)(fp.leaves(params), lr=0.01)
        for step in range(4):
            try:
                fp.step(optimizer, params, fp.run(plan, params, rows(4), executor=ranks))
            except (ArithmeticError, fp.PeerError, fp.RanksError) as error:
                heard.append((step, type(error).__name__, getattr(error, "rank", None), str(error)))
    return heard


def listens_at(rank, size):
    """Return the addresses at which this process listened."""
    at = []

    def listens(hosts):
        listener = listening(hosts)
        at.append(listener.getsockname()[0])
        return listener

    with (
        mock.patch("funcpipe._src.processes.rendezvous.listening", listens),
        fp.ranks(multiplied(), timeout=20.0),
    ):
        return at


def uses_of_faulthandler(rank, size):
    """Count how often runs set and cancel Python's one timer, without a limit of the caller and
    with one."""
    plan, counts = multiplied(), []
    for made, run in (({}, {}), ({"timeout": 20.0}, {}), ({}, {"timeout": 20.0})):
        with fp.ranks(plan, **made) as ranks:
            params = fp.place(plan, (torch.tensor(2.0), torch.tensor(3.0)), ranks)
            with (
                mock.patch.object(faulthandler, "dump_traceback_later") as later,
                mock.patch.object(faulthandler, "cancel_dump_traceback_later") as cancel,
            ):
                fp.run(plan, params, rows(4), executor=ranks, **run)
                counts.append(later.call_count + cancel.call_count)
    return counts


class Boxed(dict):
    """A mapping that only the first stage makes."""


def boxes(rank, size):
    """Send a class that the receiving process never made: the code of its stage can name it."""
    stages = [
        fp.stage(lambda p, x: Boxed(h=x * p)),
        fp.stage(lambda p, x: x["h"] * p * (type(x) is Boxed)),
    ]
    plan = plan_of(stages, S.one_f_one_b(2, 2))
    with pipeline(plan, (torch.tensor(2.0), torch.tensor(3.0))) as (ranks, params):
        x, target = rows(4)
        loss = float(fp.run(plan, params, (x, target), executor=ranks).loss)
    return abs(loss / float(F.mse_loss(x * 6, target)) - 1) < 1e-5


def in_place_behind_a_border(rank, size, inplace):
    """Hand one tensor on twice to another process, which may write into one of the two in place."""
    stages = [
        fp.stage(lambda p, x: (x @ p,) * 2),
        fp.stage(lambda p, pair: F.relu(pair[0], inplace=inplace) @ p + pair[1]),
    ]
    plan = plan_of(stages, S.one_f_one_b(2, 2))
    params = tuple(torch.eye(6) if stage == rank else None for stage in range(2))
    with fp.ranks(plan, timeout=20.0) as ranks:
        return told(
            lambda: fp.run(plan, params, rows(4), executor=ranks, trainable=True).loss.item()
        )


def arguments_refused(rank, size, how):
    """Give the schedule of one rank wrong arguments in the third of five batches, catch the error
    and go on: return each batch's loss or error, and the loss of the plain model."""
    model, heard = net(0), []
    split = fp.split(model, 2)
    plan = plan_of(split, S.one_f_one_b(2, 4))
    with fp.ranks(plan, timeout=20.0) as ranks:
        schedule = ranks.schedule(fp.place(plan, split.params, ranks))
        for number in range(5):
            x, target = rows(8 + 4 * number)
            wrong, own = number == 2, {}
            if rank == 0:
                own["arg_mbs"] = [(part,) for part in x.chunk(3 if wrong and how == "step" else 4)]
            else:
                own["target_mbs"] = target.chunk(4)
                own["loss_kwargs"] = 7 if wrong and how == "keywords" else None
            call = schedule.eval if how == "keywords" else schedule.step
            try:
                with torch.set_grad_enabled(not (wrong and how == "no_grad" and rank == 0)):
                    call(**own)
                heard.append((float(schedule.result.loss), float(F.mse_loss(model(x), target))))
            except Exception as error:
                heard.append((type(error).__name__, getattr(error, "rank", None), str(error)))
    return heard


def clipped_otherwise(rank, size, values, scaled):
    """Step with a max_norm of this rank, then with one max_norm: return the first error, whether
    the parameters stayed until then, and the greatest difference from the plain step."""
    model, error = net(0), None
    split = fp.split(net(0), 2)
    plan = plan_of(split, S.one_f_one_b(2, 2))
    x, target = rows(8)
    with pipeline(plan, split.params) as (ranks, params):
        before = [leaf.clone() for leaf in fp.leaves(params)]
        optimizer = torch.optim.SGD(fp.leaves(params), lr=1.0)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0) if scaled else None
        result = fp.run(
            plan, params, (x, target), executor=ranks, loss_scale=4.0 if scaled else 1.0
        )
        try:
            fp.step(optimizer, params, result, max_norm=values[rank], scaler=scaler)
        except fp.FuncpipeError as raised:
            error = type(raised).__name__, str(raised)
        kept = all(map(torch.equal, before, fp.leaves(params)))
        fp.step(optimizer, params, result, max_norm=0.1, scaler=scaler)
    F.mse_loss(model(x), target).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    want = {
        name: (leaf - leaf.grad).detach() if kept else None
        for name, leaf in model.named_parameters()
    }
    pairs = [
        (leaf, want[name]) for tree in params if tree is not None for name, leaf in tree.items()
    ]
    return error, kept, max(float((a - b).abs().max()) for a, b in pairs) if kept else None


def steps_of_bare_gradients(rank, size):
    """Give the gradients of one rank without their result, then with it. Then step a plan of this
    process alone, in which functions have None as parameters, while ranks are open."""
    split = fp.split(net(0), 2)
    plan = plan_of(split, S.one_f_one_b(2, 2))
    with pipeline(plan, split.params) as (ranks, params):
        optimizer = torch.optim.SGD(fp.leaves(params), lr=0.1)
        result = fp.run(plan, params, rows(8), executor=ranks)
        before = [leaf.clone() for leaf in fp.leaves(params)]
        refused = [
            told(lambda: fp.step(optimizer, params, result.grads)),
            told(lambda: fp.step(optimizer, params, result.grads, max_norm=0.1)),
            told(lambda: fp.global_norm(result.grads)),
        ]
        kept = all(map(torch.equal, before, fp.leaves(params)))
        halves = [tree and {name: leaf / 2 for name, leaf in tree.items()} for tree in result.grads]
        halved = replace(result, grads=tuple(halves))
        norms = [float(fp.global_norm(result)), 2 * float(fp.step(optimizer, params, halved))]
        stages = [fp.stage(lambda p, x: x * p), fp.stage(lambda p, x: x.relu())]
        small = plan_of(stages, S.one_f_one_b(2, 2))
        alone = []
        for without in (None, ()):
            own = (torch.tensor(2.0, requires_grad=True), without)
            found = fp.run(small, own, (torch.ones(4), torch.zeros(4)))
            alone.append(float(fp.step(torch.optim.SGD(fp.leaves(own[0]), lr=0.1), own, found)))
        alone.append(float(fp.global_norm(found.grads)))
    alone.append(float(fp.global_norm((torch.tensor(4.0), None))))
    return refused, kept, norms, alone


def saves_on_one_rank(rank, size, folder):
    """Save on rank 0 only, and go on: return the error of this rank, and the losses of the runs
    after it on all ranks and of the plain model."""
    split = fp.split(net(0), 2)
    plan = plan_of(split, S.one_f_one_b(2, 2))
    x, target = rows(8)
    with pipeline(plan, split.params) as (ranks, params):

        def run():
            return float(fp.run(plan, params, (x, target), executor=ranks).loss)

        losses = [run()]
        error = told(
            run if rank else lambda: fp.save(folder, split, params, step=1, ranks=ranks) and "saved"
        )
        losses.append(run())
    return error, losses, float(F.mse_loss(net(0)(x), target))


def closed_over(factor):
    def loss(y, target):
        return F.mse_loss(factor * y, factor * target)

    return loss


def replica_of(what, other):
    """Return the model, the loss and the options of a split on a replica, ``other`` or the
    first."""
    middle = {
        "layer": nn.ReLU() if other else nn.GELU(),
        "traced layer": nn.ReLU() if other else nn.GELU(),
        "rate": nn.Dropout(0.9 if other else 0.1),
    }.get(what, nn.Tanh())
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), middle, nn.Linear(6, 6))
    if what == "count" and other:
        model.append(nn.Identity())
    if what == "mode" and other:
        model.eval()
    loss = {
        "loss": F.l1_loss if other else F.mse_loss,
        "later loss": F.l1_loss if other else F.mse_loss,
        "partial": partial(F.smooth_l1_loss, beta=2.0 if other else 1.0),
        "module": nn.HuberLoss(delta=2.0 if other else 1.0),
        "lambdas": lambda y, target: F.mse_loss(y, target),
        "closures": closed_over(1.0),
    }.get(what, F.mse_loss)
    return model, loss, {"example": torch.ones(2, 6)} if what == "traced layer" else {}


def replicas_compute_otherwise(rank, size, what, alike):
    """Run two replicas, whose functions differ unless ``alike``: return the error or "ran"."""
    model, loss, options = replica_of(what, rank == 1 and not alike)
    split = fp.split(model, 2, **options)
    plan = plan_of(split, S.one_f_one_b(2, 2))
    given = plan_of(split, plan.schedule, loss=loss)
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "pp"))

    def job():
        first = plan if what == "later loss" else given
        with fp.ranks(first, mesh, dp="dp", timeout=20.0) as ranks:
            params = fp.place(plan, split.params, ranks)
            fp.run(given, params, rows(4), executor=ranks, seed=0)
        return "ran"

    return told(job)


def elsewhere(p, x):
    raise ArithmeticError("this stage is on another rank")


def ranks_have_placeholders(rank, size):
    """Run a pipeline whose ranks know only the functions of their own stages."""
    own, other = fp.stage(lambda p, x: x * p, name="part"), fp.stage(elsewhere, name="part")
    stages = [own if stage == rank else other for stage in range(2)]
    loss = F.mse_loss if rank else F.l1_loss
    plan = plan_of(stages, S.one_f_one_b(2, 2), loss=loss)
    with pipeline(plan, (torch.tensor(2.0), torch.tensor(3.0))) as (ranks, params):
        x, target = rows(4)
        return float(fp.run(plan, params, (x, target), executor=ranks).loss), float(
            F.mse_loss(6 * x, target)
        )
