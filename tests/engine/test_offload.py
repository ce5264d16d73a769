"""Residuals that wait in host memory: the same bits, memory that is really free, and nothing left
behind."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from common import EXECUTORS, assert_same_result, cpu_plan, ids, same
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from watch import num_tensors

import funcpipe as fp
from funcpipe._src.core.plain_tensors import address
from funcpipe._src.data.program import Role
from funcpipe._src.data.schedule import Kind, Schedule
from funcpipe._src.devices.host_link import HostLink, HostStream
from funcpipe._src.devices.stream import Place
from funcpipe._src.engine.lane import Lane
from funcpipe._src.schedules.transforms import offload
from funcpipe._src.stages.eager import EagerBound
from funcpipe._src.stages.residual import EagerResidual
from funcpipe._src.stages.saved_tensors import saved_pieces, take_out

S, M, N = 4, 4, 8


class Cube(torch.autograd.Function):
    """Saves an input, an output and None."""

    @staticmethod
    def forward(ctx, x):
        y = x * x
        ctx.save_for_backward(x, None, y)
        return y * x

    @staticmethod
    def backward(ctx, gradient):
        x, _, y = ctx.saved_tensors
        return gradient * (x * x + 2 * y)


class Block(nn.Module):
    """In-place ReLU after a batch norm, and a region that computes itself again, with dropout in
    it."""

    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(N, N), nn.Tanh(), nn.Dropout(0.2), nn.Linear(N, N))
        self.outer = nn.Sequential(nn.Linear(N, N), nn.BatchNorm1d(N), nn.ReLU(inplace=True))
        self.reentrant = reentrant

    def forward(self, x):
        return self.outer(x) + checkpoint(self.inner, x, use_reentrant=self.reentrant)


@fp.stage(stash=["far"])
def first(p, x):
    """Dropout, views of one tensor, ints among what is saved; the input and a view go on."""
    q, k, v = (x @ p["w"]).chunk(3, -1)
    h = F.dropout(torch.softmax(q * k, -1), 0.3) * v
    order = h.argsort(-1)
    return fp.Out(h.gather(-1, order) + h[:, [0]], stash={"far": v.t()})


@fp.stage(pop=["far"], feeds=["scale"])
def third(p, x, *, skips, feeds):
    """A custom function, torch.func inside, an in-place operation on a view, complex numbers, ints
    handed on."""
    h = Cube.apply(x * p["w"]) * feeds["scale"]
    h = h + torch.func.vmap(torch.func.grad(lambda row: row.sin().sum()))(x)
    z = torch.view_as_complex(torch.stack((h, skips["far"].t()), -1))
    h = (z * z.conj()).real
    h[:, :2].mul_(h[:, 2:4].detach() + 1.5)
    return {"h": h, "count": x.argmax(-1), "same": x}


@fp.stage
def last(p, x):
    return F.relu_(x["h"] @ p["w"]) + x["same"] * x["count"].unsqueeze(-1)


def net(*, reentrant: bool = False, block: bool = True):
    """Without the block, whose batch norm needs two rows, three stages."""
    torch.manual_seed(0)
    module, params, state = fp.from_module(Block(reentrant=reentrant), name="block")
    g = torch.Generator().manual_seed(1)

    def draw(*size: int) -> dict[str, Any]:
        return {"w": torch.randn(*size, generator=g) / size[0] ** 0.5}

    parts = [
        (first, draw(N, 3 * N), ()),
        (module, params, state),
        (third, draw(N), ()),
        (last, draw(N, N), ()),
    ]
    return tuple(zip(*(part for part in parts if block or part[0] is not module), strict=True))


def batch(rows: int = 12):
    g = torch.Generator().manual_seed(2)
    x, target = (torch.randn(rows, N, generator=g) for _ in range(2))
    return (x, target), {"scale": torch.rand(rows, 1, generator=g)}


def both(schedule, executor, *, reentrant=False, rows=12, **options):
    """The oracle's result and the run's."""
    stages, params, state = net(reentrant=reentrant, block=schedule.num_stages == S)
    plan = cpu_plan(stages, schedule, outputs=True)
    given, feeds = batch(rows)
    common = {"state": state, "feeds": feeds, "seed": 3, "threads_per_lane": 1, "trainable": True}
    expected = fp.run_sequential(plan, params, given, **common)
    return expected, fp.run(plan, params, given, executor=executor, **common, **options)


FAMILIES = [
    fp.schedules.one_f_one_b(S, M),
    fp.schedules.interleaved(S, M, num_devices=2),
    fp.schedules.zero_bubble(S, M),
    fp.schedules.zbv(S, M),
    fp.schedules.fill_drain(S, M),
    fp.schedules.fill_drain(S, M, num_devices=1),
]


@pytest.mark.parametrize("check", ["finite", "used"])
@pytest.mark.parametrize("rows", [3, 2])
def test_fewer_rows_and_checks(rows, check):
    """Three rows make three microbatches of the four."""
    assert_same_result(
        *both(
            offload(fp.schedules.fill_drain(S - 1, M), ahead=0), "threads", rows=rows, check=check
        )
    )


def test_the_reentrant_checkpoint():
    assert_same_result(*both(offload(fp.schedules.fill_drain(S, M)), "threads", reentrant=True))


def test_some_are_moved_and_some_computed_again():
    schedule = fp.schedules.remat(
        fp.schedules.fill_drain(S, M), keep=lambda action: action.stage % 2 == 0
    )
    assert_same_result(
        *both(offload(schedule, move=lambda action: action.stage % 2 == 0), "threads")
    )


@settings(max_examples=12)
@given(st.data())
def test_any_choice_of_residuals(data):
    schedule = data.draw(st.sampled_from(FAMILIES))
    chosen = {(s, m) for s in range(S) for m in range(M) if data.draw(st.booleans())}
    moved = offload(
        schedule,
        move=lambda a: (a.stage, a.microbatch) in chosen,
        ahead=data.draw(st.integers(0, 3)),
    )
    assert_same_result(*both(moved, data.draw(st.sampled_from(EXECUTORS))))


@pytest.mark.parametrize("executor", EXECUTORS)
def test_a_vjp_waits_with_its_residuals_at_the_host(executor):
    """Between its halves nothing is on the device."""
    stages, params, state = net()
    given, feeds = batch()
    found = []
    for schedule in (
        fp.schedules.fill_drain(S, M),
        offload(fp.schedules.fill_drain(S, M), ahead=0),
    ):
        plan = fp.make_plan(stages, schedule, devices="cpu")
        result, pullback = fp.vjp(
            plan,
            params,
            given[0],
            state=state,
            feeds=feeds,
            seed=3,
            executor=executor,
            threads_per_lane=1,
        )
        execution = pullback._execution
        roles = [kind.role for lane in execution.lanes for kind in held(lane)]
        found.append((result.outputs, result.state, pullback(given[1])))
    assert (S * M, 0) == (roles.count(Role.OFFLOADED), roles.count(Role.RESIDUAL))
    assert same(*found)


def held(lane):
    """The kinds of the slots of a lane in which something lies."""
    return [
        kind
        for kind, value in zip(lane.program.slots, lane.slots, strict=True)
        if value is not None
    ]


class Seen(TorchDispatchMode):
    """Weak references to all memory that operations make, but for that of others: of what they make
    views."""

    def __init__(self, others) -> None:
        super().__init__()
        self.refs: list[tuple[str, StorageWeakRef]] = []
        self.others = set(map(address, others))

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for one in out if isinstance(out, (tuple, list)) else (out,):
            if address(one) not in self.others and one.dim():  # the loss stays
                self.refs.append((str(func), StorageWeakRef(one.untyped_storage())))
        return out

    @property
    def alive(self) -> list[str]:
        return [name for name, ref in self.refs if not ref.expired()]


def deep(p, x):
    """Views, ints, in-place operations, a linear layer's weight, transposed; a checkpointed
    region."""
    h = torch.tanh(F.linear(x, p["w"]))
    a, b = h.view(-1, 2, N // 2).unbind(1)
    h = torch.cat((a * b, torch.exp(b)), -1)
    h = checkpoint(torch.sin, h * 2, use_reentrant=False)
    return F.relu_(F.layer_norm(h, (N,)) @ p["w"].t()).gather(1, h.argsort(-1))


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("num_stages", [1, 2])
def test_what_was_saved_is_really_gone_while_it_is_away(num_stages, executor, monkeypatch):
    """Of everything that a forward made nothing lives between O and L, and nothing of it comes
    back."""
    params = tuple({"w": torch.randn(N, N)} for _ in range(num_stages))
    given = tuple(torch.randn(6, N) for _ in range(2))
    others = [*given, *(tree["w"] for tree in params)]
    seen: dict[tuple[int, int], Seen] = {}
    alive: dict[str, list[str]] = {}
    leaves: list[int] = []
    real, forward, move = Lane.advance, EagerBound.forward, EagerResidual.move

    def watched(self, args, *, keep):
        with seen.setdefault((self.index, args.microbatch), Seen(others)):
            return forward(self, args, keep=keep)

    def advance(self):
        real(self)
        action = self.program.action(self.program.runs[self.done - 1])
        alive[str(action)] = seen[action.stage, action.microbatch].alive

    def looked(self, to, **options):
        event = move(self, to, **options)
        leaves.extend(leaf.untyped_storage().nbytes() for leaf in self.x.values())
        return event

    monkeypatch.setattr(Lane, "advance", advance)
    monkeypatch.setattr(EagerBound, "forward", watched)
    monkeypatch.setattr(EagerResidual, "move", looked)
    schedule = offload(fp.schedules.fill_drain(num_stages, 3), ahead=0)
    plan = cpu_plan([fp.stage(deep, name=f"s{i}") for i in range(num_stages)], schedule)
    result = fp.run(plan, params, given, executor=executor, threads_per_lane=1)
    assert all(len(one.refs) > 15 for one in seen.values())
    monkeypatch.undo()
    assert_same_result(fp.run_sequential(plan, params, given, threads_per_lane=1), result)
    # without elements; in torch 2.11 a checkpointed region holds two of them
    nothing = "aten.empty.memory_format"
    lost = {
        name: [one for one in found if one != nothing]
        for name, found in alive.items()
        if "O" in name or "L" in name
    }
    assert len(lost) == 2 * 3 * num_stages
    if executor == "serial":  # where nothing is copied, the output itself went on, to the next lane
        output = ["aten.gather.default", "aten.detach.default"]
        assert [output] * (3 * num_stages - 3) == [
            lost.pop(f"0O{m}") for m in range(3) if num_stages > 1
        ]
    assert {name: found for name, found in lost.items() if found} == {}
    assert all(len(alive[f"{stage}F{m}"]) > 5 for stage in range(num_stages) for m in range(3))
    assert set(leaves) <= {0}  # an input has its shape, and no memory
    assert len(leaves) == 2 * 3 * (num_stages - 1)


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("schedule", FAMILIES, ids=ids)
@pytest.mark.parametrize("ahead", [0, 1, 2])
def test_bits_and_residuals_on_the_devices(schedule, ahead, executor, monkeypatch):
    """The bits of the oracle, which knows of no moves. Devices hold as many residuals as simulate
    says, counted while it runs: an eager I leaves nothing for W, and on the CPU a move takes no
    time."""
    moved = offload(schedule, ahead=ahead)
    assert "O" in str(moved)
    most = [0] * moved.num_devices
    real = Lane.advance

    def advance(self):
        kind = self.program.action(self.program.runs[self.done]).kind
        count = [kind.role for kind in held(self)].count(Role.RESIDUAL) + (kind in (Kind.F, Kind.L))
        most[self.program.lane] = max(most[self.program.lane], count)
        real(self)

    monkeypatch.setattr(Lane, "advance", advance)
    assert_same_result(*both(moved, executor))
    peak = fp.simulate(moved, fp.Cost(offload=0, weight_residual=0)).peak
    assert most == list(peak)
    assert max(peak) <= max(fp.simulate(schedule, fp.Cost(weight_residual=0)).peak)


def test_it_is_measured_and_drawn():
    """O and L have spans, and are no work of the device."""
    moved = offload(fp.schedules.fill_drain(2, 4))
    stages = [fp.stage(lambda p, x: torch.tanh(x @ p))] * 2
    plan = cpu_plan(stages, moved)
    params = tuple(torch.randn(N, N) for _ in range(2))
    result = fp.run(plan, params, batch()[0], record=True, executor="threads")
    assert result.timeline is not None
    assert sorted(map(str, (span.action for span in result.timeline.spans))) == sorted(
        str(moved).split()
    )
    assert "O" in str(fp.draw(result.timeline))


def test_schedules_without_o_pay_nothing(monkeypatch):
    """No link is made, residuals keep their outputs, nothing is looked at."""

    def fail(*args, **kwargs):
        raise AssertionError

    for where, name in ((HostLink, "__init__"), (HostStream, "copy"), (EagerResidual, "move")):
        monkeypatch.setattr(where, name, fail)
    assert_same_result(*both(fp.schedules.one_f_one_b(S, M), "threads"))


# -- what moves
# -------------------------------------------------------------------------------


def ways() -> tuple[HostStream, HostStream]:
    place = Place(torch.device("cpu"), alone=True)
    return HostStream(place, out=True), HostStream(place, out=False)


def there_and_back(y: torch.Tensor, fixed: frozenset[int] = frozenset()):
    """The pieces of a graph, after they were at the host."""
    out, back = ways()
    slots = take_out([y], out, fixed)
    before = [slot.tensor.clone() for slot in slots]
    looks = [
        (s.tensor.dtype, s.tensor.size(), s.tensor.stride(), s.tensor.storage_offset())
        for s in slots
    ]
    found = saved_pieces(slots)
    for way in (out, back):
        copies, event = way.copy([piece.flat for piece in found])
        assert event is None
        for piece, copy in zip(found, copies, strict=True):
            piece.empty()
            piece.flat = copy
    assert all(slot.tensor is None for slot in slots)
    for piece in found:
        piece.restore()
    for slot, old, (dtype, size, stride, _) in zip(slots, before, looks, strict=True):
        new = slot.tensor
        assert (new.dtype, new.size(), new.stride()) == (dtype, size, stride)
        assert same(old, new)
    return found, slots, looks


def test_views_of_one_memory_move_once_and_stay_views():
    """Slices, transposed, expanded, strided; and the gradient is the same, bit for bit."""

    def forward(x):
        big = torch.exp(x)
        parts = [big[:, 1:4], big.t(), big[2:3].expand(5, 8), big.view(-1)[3::7]]
        return sum((part * part.sin()).sum() for part in parts)

    x = torch.randn(6, 8, requires_grad=True)
    (expected,) = torch.autograd.grad(forward(x), x)
    y = forward(x)
    found, slots, _ = there_and_back(y)
    big = max(found, key=lambda piece: len(piece.views))
    assert len(found) == 1 + 4  # the exponential, and four sines
    assert len(big.views) == 1 + 4 * 2
    assert len(slots) == 9 + 4
    assert 1 == len({address(view.slot().tensor) for view in big.views})
    assert big.flat.nbytes == 6 * 8 * 4
    del found, slots, big
    assert same(expected, torch.autograd.grad(y, x)[0])


def test_only_the_stretch_that_is_used_moves():
    """A few rows of a long tensor; kernels see them at the alignment that they had."""
    x = torch.randn(1000, 16, requires_grad=True)
    part = torch.randn(1000, 16)[501:503, 5:]
    (piece,), (slot,), _ = there_and_back((x[501:503, 5:] * part).sum(), frozenset([address(x)]))
    assert part.untyped_storage().nbytes() > 60000
    assert piece.flat.nbytes <= 2 * 16 * 4 + 512
    assert part.data_ptr() % 64 == slot.tensor.data_ptr() % 64 != 0


class Keep(torch.autograd.Function):
    """Saves what it is given beside its input."""

    @staticmethod
    def forward(ctx, x, *others):
        ctx.save_for_backward(*others)
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return (gradient * 2, *(None for _ in ctx.saved_tensors))


def test_types_of_different_sizes_in_one_memory():
    """Complex numbers seen as real ones, numbers seen as bytes."""
    base = torch.arange(10, dtype=torch.uint8)
    z = torch.randn(3, 5, dtype=torch.complex128)
    x = torch.ones(2, requires_grad=True)
    others = [
        base,
        base[:8].view(torch.int32),
        base[2:6].view(torch.int16),
        z,
        torch.view_as_real(z)[1:, :, 1],
    ]
    others += [torch.rand(7) > 0.5, torch.randn(3, 5).to(torch.bfloat16)]
    found, slots, _ = there_and_back(Keep.apply(x, *others))
    assert len(slots) == 7
    assert len(found) == 4


class Odd(torch.Tensor):
    """A subclass."""


def test_what_cannot_be_moved_exactly_stays():
    fixed = torch.randn(4)
    others = [
        torch.randn(3).as_subclass(Odd),
        torch.randn(3, 3).to_sparse(),
        torch.randn(3, dtype=torch.complex64).conj(),
        torch.randn(0, 4),
        torch.tensor(2.0),
        torch.randn(3, device="meta"),
        fixed[1:],
    ]
    y = Keep.apply(torch.ones(2, requires_grad=True), *others, torch.randn(3))
    found, slots, _ = there_and_back(y, frozenset([address(fixed)]))
    assert (1, 1) == (len(slots), len(found))
    y.sum().backward()


def test_what_another_hook_packed_is_not_looked_at():
    """In a checkpointed region nothing is kept; to look would be to compute it again."""
    calls: list[int] = []

    def region(x):
        calls.append(1)
        return x.exp().sin()

    x = torch.randn(3, requires_grad=True)
    y = checkpoint(region, x * 2, use_reentrant=False).cos()
    found, _, _ = there_and_back(y.sum())
    assert [1] == calls
    assert len(found) == 2  # the argument of the region, and that of cos
    y.sum().backward()
    assert [1, 1] == calls


def test_parameters_state_and_batch_stay():
    """Only what the forward made is copied: sizes are told by the copies."""
    copied: list[int] = []
    block, params, state = fp.from_module(
        nn.Sequential(nn.Linear(N, N), nn.BatchNorm1d(N), nn.Linear(N, 1)).eval()
    )
    plan = cpu_plan([block], Schedule.parse("0F0 0O0 0F1 0L0 0B0 0B1"), train=False)
    real = HostStream.copy

    def copy(self, tensors, after=None):
        copied.extend(one.numel() for one in tensors)
        return real(self, tensors, after)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HostStream, "copy", copy)
        fp.run(
            plan,
            (params,),
            (torch.randn(64, N), torch.randn(64, 1)),
            state=(state,),
            executor="serial",
        )
    # Each way: what goes into the norm and what comes out of it, the statistics that it saved, the
    # loss's two arguments.
    big = [size for size in copied if size >= 32]
    assert sorted(big) == sorted([32 * N, 32 * N, 32] * 2), copied


def test_the_bytes_that_a_residual_holds(monkeypatch):
    """None while it is away; what an out-of-memory error tells."""
    sizes: list[int] = []
    real = EagerResidual.move

    def move(self, to, **options):
        sizes.append(self.nbytes)
        event = real(self, to, **options)
        sizes.append(self.nbytes)
        return event

    monkeypatch.setattr(EagerResidual, "move", move)
    plan = cpu_plan(
        [fp.stage(lambda p, x: torch.tanh(x * p))], Schedule.parse("0F0 0O0 0F1 0L0 0B0 0B1")
    )
    fp.run(plan, (torch.ones(N),), (torch.randn(8, N), torch.randn(8, N)), executor="serial")
    before, away, still, after = sizes
    assert before == 4 * N * 4
    assert (0, 0) == (away, still)
    assert after >= before


# -- what goes wrong
# -------------------------------------------------------------------------------


MOVED = Schedule.parse("0F0 0O0 0F1 0O1 0L0 0B0 0L1 0B1")


@pytest.mark.parametrize("executor", EXECUTORS)
def test_a_saved_tensor_that_was_modified_is_an_error_as_without_moves(executor):
    """Autograd's own, at O instead of at B."""

    @fp.stage
    def careless(p, x):
        h = torch.exp(x * p)
        y = h * 2
        h.detach().add_(1)
        return y

    found = []
    for schedule in (MOVED, Schedule.parse("0F0 0F1 0B0 0B1")):
        plan = cpu_plan([careless], schedule)
        with pytest.raises(RuntimeError, match="modified by an inplace operation") as caught:
            fp.run(plan, (torch.ones(N),), batch()[0], executor=executor)
        found.append(caught.value.funcpipe.action)
    assert ["0O0", "0B0"] == found


def test_what_is_away_cannot_be_modified():
    """The gradient is that of the forward, whatever becomes of the tensor after O."""
    kept: list[torch.Tensor] = []

    def body(p, x):
        h = torch.exp(x * p)
        if kept:
            kept[0].detach().zero_()  # in 0F1, which comes after 0O0
        kept.append(h)
        return h * 2

    plan = cpu_plan([fp.stage(body)], MOVED)
    pure = cpu_plan([fp.stage(lambda p, x: torch.exp(x * p) * 2)], MOVED)
    result = fp.run(plan, (torch.ones(N),), batch()[0], executor="serial")
    assert (kept[0] == 0).all()
    assert_same_result(fp.run_sequential(pure, (torch.ones(N),), batch()[0]), result)


@pytest.mark.slow
@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("out", [True, False], ids=["O", "L"])
@pytest.mark.parametrize("late", [False, True], ids=["before", "after"])
def test_a_move_that_fails_is_located_and_leaves_nothing(out, late, executor, monkeypatch):
    stages, params, state = net()
    plan = cpu_plan(stages, offload(fp.schedules.fill_drain(S, M)))
    given, feeds = batch()
    options = {"state": state, "feeds": feeds, "seed": 3, "threads_per_lane": 1}
    expected = fp.run_sequential(plan, params, given, **options)
    fp.run(plan, params, given, executor=executor, **options)
    real = EagerResidual.move

    def move(self, to, **rest):
        planted = to.out is out and self.microbatch == 1
        if planted and not late:
            raise OSError("planted")
        event = real(self, to, **rest)
        if planted:
            raise OSError("planted")
        return event

    def attempt() -> None:
        with pytest.raises(fp.StageError) as caught:
            fp.run(plan, params, given, executor=executor, **options)
        assert isinstance(caught.value, OSError)
        assert caught.value.funcpipe.action in {
            f"{stage}{'O' if out else 'L'}1" for stage in range(S)
        }
        assert caught.value.funcpipe.microbatch == 1

    with monkeypatch.context() as patch:
        patch.setattr(EagerResidual, "move", move)
        attempt()
        gc.collect()
        before = num_tensors()
        for _ in range(3):
            attempt()
        gc.collect()
        assert before == num_tensors()
    assert_same_result(expected, fp.run(plan, params, given, executor=executor, **options))


@pytest.mark.parametrize("executor", EXECUTORS)
def test_nothing_is_left_after_a_run(executor):
    """Slots, pieces and graphs die with the run, without the garbage collector."""
    stages, params, state = net()
    plan = cpu_plan(stages, offload(fp.schedules.one_f_one_b(S, M)))
    given, feeds = batch()
    options = {"state": state, "feeds": feeds, "seed": 3, "executor": executor}
    fp.run(plan, params, given, **options)
    gc.collect()
    gc.disable()
    try:
        before = num_tensors()
        for _ in range(3):
            fp.run(plan, params, given, **options)
        assert before == num_tensors()
    finally:
        gc.enable()
