"""Objects of registered classes in a batch: how a run cuts them and joins outputs."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from common import cpu_plan, same
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.utils.data import default_collate

import funcpipe as fp

Varlen, Samples = fp.batches.Varlen, fp.batches.Samples
LENGTHS = [3, 1, 4, 2, 2, 5]


def sequences(width=4):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(length, width, generator=generator) for length in LENGTHS]


def plan_of(stages, *, microbatches=3, loss=None, **options):
    schedule = fp.schedules.one_f_one_b(len(stages), microbatches)
    schedule = schedule if loss is not None else schedule.forwards()
    return cpu_plan(stages, schedule, loss=loss, **options)


def embed():
    """A stage of tokens, and a stage that takes the mean of each sequence."""

    @fp.stage
    def tokens(params, x):
        return Varlen(x.values @ params["w"], x.cu_seqlens)

    @fp.stage
    def pool(params, x):
        means = [part.mean(0) for part in x.values.split(x.lengths.tolist())]
        return torch.stack(means) @ params["w"]

    generator = torch.Generator().manual_seed(1)
    return (tokens, pool), tuple({"w": torch.randn(4, 4, generator=generator)} for _ in range(2))


@pytest.mark.parametrize("executor", ["serial", "threads"])
@pytest.mark.parametrize("form", ["packed", "jagged", "rows"])
def test_sequences_without_padding_train_as_in_plain_pytorch(form, executor):
    stages, params = embed()
    values = sequences()
    given = {
        "packed": Varlen.of(values),
        "jagged": torch.nested.nested_tensor(values, layout=torch.jagged),
        "rows": Samples(values),
    }[form]
    as_packed = {
        "packed": lambda x: x,
        "jagged": lambda x: Varlen(x.values(), x.offsets()),
        "rows": Varlen.of,
    }[form]
    first = fp.stage(lambda p, x: Varlen(as_packed(x).values @ p["w"], as_packed(x).cu_seqlens))
    stages = first, stages[1]
    target = torch.ones(6, 4)
    plan = plan_of(stages, loss=F.mse_loss)
    result = fp.run(plan, params, (given, target), executor=executor)
    own = [tree["w"].clone().requires_grad_() for tree in params]
    pooled = torch.stack([(row @ own[0]).mean(0) for row in values]) @ own[1]
    loss = F.mse_loss(pooled, target)
    grads = torch.autograd.grad(loss, own)
    torch.testing.assert_close(result.loss, loss.detach())
    for tree, grad in zip(result.grads, grads, strict=True):
        torch.testing.assert_close(tree["w"], grad)


def test_outputs_of_a_class_with_join_are_joined():
    double = fp.stage(lambda p, x: {"y": Varlen(x.values * 2, x.cu_seqlens), "n": x.lengths})
    packed = Varlen.of(sequences())
    outputs = fp.run(plan_of([double]), ((),), packed).outputs
    assert same(outputs["y"].values, packed.values * 2)
    assert same(outputs["y"].cu_seqlens, packed.cu_seqlens)
    assert outputs["n"].tolist() == LENGTHS
    each = fp.run(plan_of([double], merge="each"), ((),), packed).outputs["y"]
    assert [piece.lengths.tolist() for piece in each] == [[3, 1], [4, 2], [2, 5]]


def test_cu_seqlens_begin_with_zero_in_each_microbatch():
    seen = []

    def look(params, x):
        seen.append((x.cu_seqlens.tolist(), x.values[:, 0].tolist()))
        return x.lengths

    values = [torch.full((length, 1), float(number)) for number, length in enumerate(LENGTHS)]
    fp.run(plan_of([fp.stage(look)]), ((),), Varlen.of(values), executor="serial")
    assert seen == [
        ([0, 3, 4], [0.0] * 3 + [1.0]),
        ([0, 4, 6], [2.0] * 4 + [3.0] * 2),
        ([0, 2, 7], [4.0] * 2 + [5.0] * 5),
    ]


def test_packed_as_a_nested_tensor():
    packed = Varlen.of(sequences())
    nested = packed.nested()
    assert nested.layout is torch.jagged
    assert [part.tolist() for part in nested.unbind()] == [part.tolist() for part in sequences()]


def test_feeds_and_targets_too():
    @fp.stage(feeds=["extra"])
    def stage(params, x, *, feeds):
        return x.sum(1) + torch.stack([entry["a"].sum() for entry in feeds["extra"]])

    def loss(y, target):
        return sum((a - b.mean()) ** 2 for a, b in zip(y, target, strict=True)) / len(y)

    x = torch.arange(12.0).view(6, 2)
    extra = Samples([{"a": torch.ones(n)} for n in LENGTHS])
    schedule = fp.schedules.fill_drain(1, 3, backward=False)
    plan = cpu_plan([stage], schedule, loss=loss, weight=len, outputs=True)
    result = fp.run(plan, ((),), (x, Samples(sequences())), feeds={"extra": extra})
    want = x.sum(1) + torch.tensor([float(n) for n in LENGTHS])
    assert same(result.outputs, want)
    whole = loss(want, sequences())
    torch.testing.assert_close(result.loss, whole)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_block_masks_are_cut_with_their_rows():
    x = torch.randn(4, 1, 128, 16)
    documents = torch.randint(0, 3, (4, 128)).sort(-1).values

    def rule(b, h, q, k):
        return (documents[b, q] == documents[b, k]) & (q >= k)

    mask = create_block_mask(rule, 4, None, 128, 128, device="cpu")
    causal = create_block_mask(lambda b, h, q, k: q >= k, None, None, 128, 128, device="cpu")
    attend = fp.stage(lambda p, b: flex_attention(b[0], b[0], b[0], block_mask=b[1]))
    plan = plan_of([attend], microbatches=2)
    for given in (mask, causal):
        got = fp.run(plan, ((),), (x, given), executor="serial").outputs
        torch.testing.assert_close(got, flex_attention(x, x, x, block_mask=given))


def test_an_own_class():
    @dataclasses.dataclass
    class Graphs:
        nodes: torch.Tensor
        graph_of: torch.Tensor

    def cut(graphs, start, stop):
        chosen = (graphs.graph_of >= start) & (graphs.graph_of < stop)
        return Graphs(graphs.nodes[chosen], graphs.graph_of[chosen] - start)

    fp.batches.register(Graphs, rows=lambda g: int(g.graph_of.max()) + 1, cut=cut)
    nodes, graph_of = torch.randn(7, 3), torch.tensor([0, 0, 1, 2, 2, 2, 3])

    @fp.stage
    def pool(params, graphs):
        count = int(graphs.graph_of.max()) + 1
        return torch.zeros(count, 3).index_add(0, graphs.graph_of, graphs.nodes @ params)

    params = (torch.eye(3),)
    result = fp.run(
        plan_of([pool], microbatches=2, loss=F.mse_loss),
        params,
        (Graphs(nodes, graph_of), torch.ones(4, 3)),
    )
    own = torch.eye(3).requires_grad_()
    loss = F.mse_loss(torch.zeros(4, 3).index_add(0, graph_of, nodes @ own), torch.ones(4, 3))
    torch.testing.assert_close(result.loss, loss.detach())
    torch.testing.assert_close(result.grads[0], torch.autograd.grad(loss, own)[0])


def test_compiled_stages():
    stages, params = embed()
    net = fp.from_module(nn.Linear(4, 4))
    first = fp.stage(lambda p, x: torch.stack([row.sum(0) for row in x]))
    plan = plan_of([first, fp.compile_stage(net[0])], loss=F.mse_loss)
    batch = Samples(sequences()), torch.ones(6, 4)
    plain = plan_of([first, net[0]], loss=F.mse_loss)
    want = fp.run(plain, ((), net[1]), batch, executor="serial")
    got = fp.run(plan, ((), net[1]), batch, executor="serial")
    torch.testing.assert_close(got.loss, want.loss)
    compiled = plan_of([fp.compile_stage(stages[0]), stages[1]], loss=F.mse_loss)
    batch = Varlen.of(sequences()), torch.ones(6, 4)
    result = fp.run(compiled, params, batch, executor="serial")
    want = fp.run(plan_of(stages, loss=F.mse_loss), params, batch, executor="serial")
    torch.testing.assert_close(result.loss, want.loss)


def test_samples_of_a_data_loader():
    """A list of dicts of one sample each, with the collate function that keeps it a list."""
    samples = [{"x": row, "id": number} for number, row in enumerate(sequences())]
    loader = torch.utils.data.DataLoader(samples, batch_size=6, collate_fn=Samples)
    (batch,) = loader
    count = fp.stage(lambda p, rows: torch.tensor([row["id"] for row in rows]))
    assert fp.run(plan_of([count]), ((),), batch).outputs.tolist() == [*range(6)]
    assert default_collate([{"id": row["id"]} for row in samples])["id"].tolist() == [*range(6)]


WRONG = {
    "starts": (Varlen(torch.ones(3), torch.tensor([0, 2])), "end with the number of values"),
    "floats": (Varlen(torch.ones(3), torch.tensor([0.0, 3.0])), "must be whole numbers"),
    "falls": (Varlen(torch.ones(3), torch.tensor([0, 4, 3])), "must not fall"),
    "other rows": ((Samples([1, 2]), torch.ones(3)), r"leaves differ in rows: inputs\[0\] has 2"),
    "none": (Samples([]), "the batch has no rows"),
    "gaps": (
        torch.nested.narrow(
            torch.ones(2, 5, 3), 1, torch.tensor([0, 1]), torch.tensor([2, 3]), layout=torch.jagged
        ),
        "without gaps",
    ),
}


@pytest.mark.parametrize("kind", WRONG)
def test_wrong_batches(kind):
    batch, message = WRONG[kind]
    with pytest.raises(fp.BatchError, match=message):
        fp.run(plan_of([fp.stage(lambda p, x: x)], microbatches=2), ((),), batch)


def test_wrong_entries():
    class Odd:
        pass

    for kind in (torch.Tensor, dict, list, tuple, "text", nn.Parameter):
        with pytest.raises(fp.PlanError, match="takes a class that is not a tensor"):
            fp.batches.register(kind, rows=len, cut=lambda x, a, b: x)
    with pytest.raises(fp.PlanError, match="cut= must be a function; got 3"):
        fp.batches.register(Odd, rows=len, cut=3)
    plan = plan_of([fp.stage(lambda p, x: x)], microbatches=2)
    for rows, message in ((len, "failed for inputs: TypeError"), (lambda x: "3", "got '3'")):
        fp.batches.register(Odd, rows=rows, cut=lambda x, a, b: x)
        with pytest.raises(fp.BatchError, match=message):
            fp.run(plan, ((),), Odd())
    fp.batches.register(Odd, rows=lambda x: 2, cut=lambda x, a, b: 1 / 0)
    with pytest.raises(fp.BatchError, match="cut= of Odd.*for the rows 0 to 1: ZeroDivisionError"):
        fp.run(plan, ((),), Odd())


def test_slices_and_input_gradients_are_refused():
    sliced = fp.schedules.one_f_one_b(1, 2, num_slices=2).forwards()
    stage = fp.stage(lambda p, x: x)
    plan = fp.make_plan([stage], sliced, devices="cpu")
    with pytest.raises(fp.BatchError, match="inputs is a Samples, which is not cut into slices"):
        fp.run(plan, ((),), Samples([1, 2]))
    stages, params = embed()
    plan = fp.make_plan(stages, fp.schedules.fill_drain(2, 2), devices="cpu")
    with pytest.raises(fp.BatchError, match="input_grads= needs inputs that are tensors"):
        fp.vjp(plan, params, Varlen.of(sequences()), input_grads=True)
    plan = fp.make_plan(stages[:1], fp.schedules.fill_drain(1, 2), devices="cpu")
    _, pullback = fp.vjp(plan, params[:1], Varlen.of(sequences()), input_grads=False)
    with pytest.raises(fp.BatchError, match="let the last stage return tensors"):
        pullback(Varlen.of(sequences()))


@pytest.mark.parametrize("kind", ["Varlen", "Samples", "Samples of dicts"])
def test_a_mean_over_a_target_of_uneven_rows_needs_its_weight(kind):
    """Rows cannot be the weights of means over tokens; equal rows can."""

    def target_of(lengths):
        rows = [torch.randn(length, 3) for length in lengths]
        if kind == "Varlen":
            return fp.batches.Varlen.of(rows)
        return fp.batches.Samples(rows if kind == "Samples" else [{"y": row} for row in rows])

    def tokens(target):
        if kind == "Varlen":
            return target.values
        return torch.cat(target if kind == "Samples" else [entry["y"] for entry in target])

    stage = fp.stage(lambda p, x: torch.cat(x) * p)
    loss = lambda y, target: F.mse_loss(y, tokens(target))
    for lengths, weight in (
        ((3, 5, 1, 2), lambda target: len(tokens(target))),
        ((3, 3, 3, 3), None),
        ((3, 5, 1, 2), None),
    ):
        plan = cpu_plan([stage], fp.schedules.one_f_one_b(1, 2), loss=loss, weight=weight)
        inputs = [torch.randn(length, 3) for length in lengths]
        target = target_of(lengths)
        batch = fp.batches.Samples(inputs), target
        if weight is None and len(set(lengths)) > 1:
            with pytest.raises(fp.BatchError, match="rows of the target have different lengths"):
                fp.run(plan, (torch.tensor(2.0),), batch)
            continue
        found = fp.run(plan, (torch.tensor(2.0),), batch).loss
        entries = target.entries if hasattr(target, "entries") else target
        torch.testing.assert_close(found, F.mse_loss(torch.cat(inputs) * 2.0, tokens(entries)))


def test_a_loss_that_weighs_takes_microbatches_of_several_lengths():
    """Tokens are the weights, so it does not matter that rows are not."""
    xs, targets = [torch.randn(3, 4, 5), torch.randn(2, 4, 7)], [(3, 5), (2, 7)]
    labels = [torch.randint(0, 4, shape) for shape in targets]
    plan = cpu_plan(
        [fp.stage(lambda p, x: x * p)], fp.schedules.one_f_one_b(1, 2), loss=F.cross_entropy
    )
    batch = fp.Microbatches(xs), fp.Microbatches(labels)
    result = fp.run(plan, (torch.ones(()),), batch)
    sums = [F.cross_entropy(x, y, reduction="sum") for x, y in zip(xs, labels, strict=True)]
    torch.testing.assert_close(result.loss, sum(sums) / 29)
