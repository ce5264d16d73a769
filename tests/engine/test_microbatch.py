"""A batch cut into microbatches and put together again: no row is lost, nothing is cut by
accident."""

from collections import OrderedDict, UserDict, namedtuple
from itertools import product

import pytest
import torch
from common import EXECUTORS, cpu_plan, forward_plan, same
from small import row_mean

import funcpipe as fp
from funcpipe._src.batch.microbatch import cut, sizes

Pair = namedtuple("Pair", ["a", "b"])


def look(num_microbatches, inputs, *, feeds=None, fn=None, names=(), executor="serial"):
    """What a stage got for each microbatch, and the merged outputs."""
    seen = []

    def fn_(p, x, *, feeds=None):
        seen.append((x, feeds))
        return x if fn is None else fn(x)

    part = fp.stage(fn_, feeds=names, name="s")
    plan = forward_plan([part], num_microbatches)
    return seen, fp.run(plan, ((),), inputs, feeds=feeds, executor=executor)


def refused(num_microbatches, inputs, **options):
    with pytest.raises(fp.BatchError) as caught:
        look(num_microbatches, inputs, **options)
    return str(caught.value)


def test_sizes_differ_by_one_at_most():
    """All rows, the larger parts first, none empty, as many as asked where rows suffice."""
    for rows, count in product(range(1, 20), range(1, 12)):
        parts = sizes(rows, count)
        assert rows == sum(parts)
        assert min(rows, count) == len(parts)
        assert sorted(parts, reverse=True) == parts
        assert parts[0] - parts[-1] in (0, 1)


@pytest.mark.parametrize(
    ("rows", "count", "expected"),
    [(10, 8, [2, 2, 1, 1, 1, 1, 1, 1]), (3, 8, [1, 1, 1]), (8, 4, [2] * 4), (1, 1, [1])],
)
def test_every_row_arrives_once(rows, count, expected):
    """10 over 8, 3 over 8: views of the batch in order; outputs joined again."""
    x = torch.arange(rows * 2.0).view(rows, 2)
    seen, result = look(count, x)
    assert expected == [len(one) for one, _ in seen]
    assert torch.equal(x, torch.cat([one for one, _ in seen]))
    assert torch.equal(x, result.outputs)
    assert len(expected) == result.stats.num_microbatches


def test_absent_microbatches_do_not_run():
    """3 rows over 8: neither forwards nor backwards of the others are in the timeline."""
    plan = cpu_plan(
        [fp.stage(lambda p, x: x * p)] * 2, fp.schedules.one_f_one_b(2, 8), loss=row_mean
    )
    result = fp.run(plan, (torch.ones(()), torch.ones(())), (torch.ones(3, 1), None), record=True)
    assert "0F0 0F1 0B0 0F2 0B1 0B2" == " ".join(
        str(s.action) for s in result.timeline.spans if s.device == 0
    )
    assert 3 == len(result.losses)


def test_trees_are_cut_leaf_by_leaf():
    """Dicts, tuples, lists, named tuples, None, numbers and strings; only tensors have rows."""
    x = torch.arange(6.0)
    tree = {"t": (x, [x * 2]), "n": None, "p": Pair(x[:, None], "word"), "k": 3, "mask": x > 2}
    seen, result = look(3, tree)
    assert same(
        {
            "t": (x[2:4], [x[2:4] * 2]),
            "n": None,
            "p": Pair(x[2:4, None], "word"),
            "k": 3,
            "mask": x[2:4] > 2,
        },
        seen[1][0],
    )
    assert Pair is type(seen[1][0]["p"])
    assert same(tree, result.outputs)


@pytest.mark.parametrize(
    "make", [UserDict, OrderedDict, type("Mine", (dict,), {})], ids=lambda kind: kind.__name__
)
def test_mappings_of_other_classes_are_cut_too(make):
    """UserDict (BatchEncoding), dict subclasses (ModelOutput): items are leaves, the class and the
    order stay."""
    x = torch.arange(4.0)
    given = make({"z": x, "a": x + 1})
    seen, result = look(2, given)
    assert make is type(seen[0][0]) is type(result.outputs)
    assert torch.equal(x[2:], seen[1][0]["z"])
    assert torch.equal(x + 1, result.outputs["a"])
    assert ["z", "a"] == list(result.outputs)


def test_axis_and_replicate():
    """Rows along another axis; a whole leaf for everyone."""
    x, wide, table = torch.arange(8.0).view(4, 2), torch.arange(12.0).view(3, 4), torch.arange(3.0)
    seen, _ = look(
        2,
        {
            "x": x,
            "w": fp.Axis(wide, 1),
            "v": fp.Axis(wide, -1),
            "t": fp.Replicate(table),
            "o": fp.Replicate("s"),
        },
        fn=lambda x: x["x"],
    )
    for index, (one, _) in enumerate(seen):
        assert torch.equal(wide[:, 2 * index : 2 * index + 2], one["w"])
        assert torch.equal(one["w"], one["v"])
        assert torch.equal(table, one["t"])
        assert "s" == one["o"]


def test_rows_that_do_not_match_are_refused_with_their_places():
    """A (T, T) mask or a table beside the batch is never cut by accident."""
    message = refused(2, {"x": torch.ones(4, 2), "mask": torch.ones(3, 3)})
    assert "inputs['mask'] has 3" in message
    assert "inputs['x'] has 4" in message
    assert "Replicate" in message
    assert "Axis" in message
    assert "feeds['f'] has 5" in refused(2, torch.ones(4), feeds={"f": torch.ones(5)}, names=["f"])
    assert "inputs[1] is a 0-dim tensor" in refused(2, (torch.ones(4), torch.tensor(1.0)))
    assert "no rows" in refused(2, torch.ones(0, 3))
    assert "has shape (4, 2) and no axis 2" in refused(2, fp.Axis(torch.ones(4, 2), 2))
    plan = cpu_plan(
        [fp.stage(lambda p, x: x)], fp.schedules.fill_drain(1, 2, backward=False), loss=row_mean
    )
    with pytest.raises(fp.BatchError, match=r"target\['y'\] has 5"):
        fp.run(plan, ((),), (torch.ones(4), {"y": torch.ones(5)}))


def test_every_fault_of_a_batch_is_named():
    """Feeds missing and unknown, a scalar, rows: in one message."""
    message = refused(
        2,
        (torch.ones(4), torch.tensor(1.0)),
        feeds={"mine": 1, "f": torch.ones(3)},
        names=["f", "g"],
    )
    for part in (
        "feeds lacks 'g', which stage 0 ('s') declares",
        "feeds has 'mine', which no stage declares",
        "inputs[1]",
        "feeds['f'] has 3",
    ):
        assert part in message


@pytest.mark.parametrize("batch", [torch.ones(4), (torch.ones(4),), (torch.ones(4),) * 3, None])
def test_a_batch_with_a_loss_is_a_pair(batch):
    """(inputs, target), where target may be None."""
    plan = cpu_plan(
        [fp.stage(lambda p, x: x)], fp.schedules.fill_drain(1, 2, backward=False), loss=row_mean
    )
    with pytest.raises(fp.BatchError, match=r"\(inputs, target\).*target may be None"):
        fp.run(plan, ((),), batch)
    assert 4.0 == float(fp.run(plan, ((),), (torch.ones(4), None)).loss * 4)


def test_feeds_are_cut_like_the_batch():
    """Tensors by rows, others shared; each stage gets those that it declares."""
    x, f = torch.arange(5.0), torch.arange(10.0).view(5, 2)
    seen, _ = look(2, x, feeds={"f": (f, 7), "g": fp.Replicate(f)}, names=["f", "g"])
    assert same(
        [{"f": (f[:3], 7), "g": f}, {"f": (f[3:], 7), "g": f}], [feeds for _, feeds in seen]
    )


def test_ready_made_microbatches():
    """Ragged rows as given; outputs one each; another leaf is cut to fit; counts and rows must
    agree."""
    parts = fp.Microbatches([torch.ones(3, 2), torch.ones(1, 5)])
    seen, result = look(4, parts, feeds={"f": torch.arange(4.0)}, names=["f"])
    assert [(3, 2), (1, 5)] == [tuple(one.shape) for one, _ in seen]
    assert [[0, 1, 2], [3]] == [feeds["f"].tolist() for _, feeds in seen]
    assert fp.Microbatches is type(result.outputs)
    assert same(tuple(parts), tuple(result.outputs))
    assert "has 3 ready-made microbatches, but the plan has 2" in refused(
        2, fp.Microbatches([torch.ones(1)] * 3)
    )
    assert "has 0 ready-made microbatches" in refused(2, fp.Microbatches([]))
    assert "differ in number" in refused(
        3, parts, feeds={"f": fp.Microbatches([1, 2, 3])}, names=["f"]
    )
    assert "have 4 rows" in refused(3, parts, feeds={"f": torch.ones(5)}, names=["f"])


def test_ready_made_microbatches_have_rows():
    """One without rows does not exist for a loss; it is refused, not counted as a row."""
    assert "no rows" in refused(2, fp.Microbatches([torch.ones(0, 2), torch.ones(4, 2)]))


def test_ready_made_microbatches_weigh_by_their_rows():
    """Means of 3 rows and of 1: the loss of all 4."""
    x, t = torch.randn(4, 2, dtype=torch.float64), torch.randn(4, 2, dtype=torch.float64)
    loss = lambda y, t: (y - t).square().mean()
    plan = cpu_plan([fp.stage(lambda p, x: x * p)], fp.schedules.fill_drain(1, 2), loss=loss)
    whole = fp.run(plan, (torch.ones((), dtype=torch.float64),), (x, t))
    ragged = fp.run(
        plan, (torch.ones((), dtype=torch.float64),), (fp.Microbatches([x[:3], x[3:]]), t)
    )
    torch.testing.assert_close(ragged.loss, loss(x, t), rtol=1e-12, atol=0)
    torch.testing.assert_close(ragged.grads[0], whole.grads[0], rtol=1e-12, atol=0)


def test_nothing_with_rows_runs_every_microbatch():
    """Inputs of numbers only: M microbatches, each the same."""
    seen, result = look(3, {"n": 2}, fn=lambda x: torch.full((1, 2), x["n"]))
    assert 3 == len(seen)
    assert (3, 2) == result.outputs.shape


def test_outputs_without_rows_come_one_by_one():
    """Single numbers as Microbatches, equal non-tensors once, others one each; dtypes stay."""
    count = iter(range(9))
    fn = lambda x: {
        "mean": x.mean(),
        "kind": "sum",
        "n": next(count),
        "ids": x.long(),
        "none": None,
    }
    _, result = look(2, torch.arange(4.0)[:, None], fn=fn)
    assert [0.5, 2.5] == [float(one) for one in result.outputs["mean"]]
    assert ("sum", None) == (result.outputs["kind"], result.outputs["none"])
    assert [0, 1] == list(result.outputs["n"])
    assert torch.int64 == result.outputs["ids"].dtype


def test_outputs_that_differ_are_refused():
    """Another structure, or rows of another shape, in some microbatch."""
    x = torch.arange(4.0)[:, None]
    with pytest.raises(fp.BatchError, match="microbatch 1 have another structure"):
        look(2, x, fn=lambda x: x if x[0, 0] < 1 else (x,))
    with pytest.raises(
        fp.BatchError, match=r"outputs\['a'\] cannot be joined over microbatches of shapes.*'each'"
    ):
        look(2, x, fn=lambda x: {"a": x.expand(-1, 1 + int(x[0, 0]))})


@pytest.mark.parametrize("executor", EXECUTORS)
def test_outputs_are_not_the_callers_memory(executor):
    """Writing into what came out does not change what went in."""
    x = torch.zeros(4, 2)
    for count in (1, 2):
        _, result = look(count, x, executor=executor)
        result.outputs.add_(1)
        assert 0.0 == float(x.sum())


def test_memory_that_cannot_be_shared_lazily_is_not_copied_as_a_whole():
    """Of a DataLoader's workers, say: each microbatch is copied as a stage gets it, so a handle
    would only cost a copy."""
    schedule = fp.schedules.fill_drain(1, 4, backward=False)
    plan = fp.make_plan([fp.stage(lambda p, x: p * x)], schedule, devices="cpu")
    own, foreign = torch.ones(8, 3), torch.frombuffer(bytearray(96), dtype=torch.float32).view(8, 3)
    shared = torch.ones(8, 3).share_memory_()
    assert len(cut(plan, {"own": own}, None, None).handles) == 1
    assert cut(plan, {"foreign": foreign, "shared": shared}, None, None).handles == []
