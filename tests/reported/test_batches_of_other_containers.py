"""Batches of nested, packed and sparse tensors and of block masks: right, or an error that names
the remedy."""

import optree
import pytest
import torch
from common import cpu_plan
from torch import nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
from torch.nn.utils.rnn import pack_padded_sequence, pack_sequence

import funcpipe as fp
from funcpipe import schedules as S

LAYOUTS = [torch.strided, torch.jagged]
pytestmark = pytest.mark.filterwarnings(
    "ignore:The PyTorch API of nested", "ignore:Sparse CSR", "ignore:flex_attention called without"
)


def forward_plan(*stages, microbatches=2):
    schedule = S.fill_drain(len(stages), microbatches, backward=False)
    return fp.make_plan(stages, schedule, devices="cpu", outputs=True)


def linear():
    torch.manual_seed(0)
    layer = nn.Linear(4, 4)
    return layer, *fp.from_module(layer)[:2]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "wrap", [lambda nested: nested, fp.Replicate, lambda nested: {"x": nested}]
)
def test_gives_a_nested_tensor(layout, wrap):
    _, stage, params = linear()
    nested = torch.nested.nested_tensor([torch.randn(3, 4), torch.randn(5, 4)], layout=layout)
    if layout is torch.jagged and wrap is not fp.Replicate:  # it is cut, and given to the stage
        read = lambda x: x["x"] if isinstance(x, dict) else x
        first = fp.stage(lambda p, x: read(x).to_padded_tensor(0.0, output_size=(1, 5, 4)))
        got = fp.run(forward_plan(first, stage), ((), params), wrap(nested)).outputs
        want = linear()[0](nested.to_padded_tensor(0.0))
        torch.testing.assert_close(got, want)
        with pytest.raises(fp.FuncpipeError, match="a nested tensor .*cannot cross between stages"):
            fp.run(forward_plan(fp.stage(lambda p, x: x), stage), ((), params), wrap(nested))
    else:
        with pytest.raises(fp.BatchError, match=r"is a nested tensor .*to_padded_tensor"):
            fp.run(forward_plan(stage), (params,), wrap(nested))
    with pytest.raises(fp.BatchError, match=r"inputs\[0\] has a nested tensor .*to_padded_tensor"):
        fp.run(
            forward_plan(stage),
            (params,),
            fp.Microbatches([wrap(nested)] * 2 if wrap is not fp.Replicate else [nested] * 2),
        )
    loss = cpu_plan([stage], S.fill_drain(1, 2))
    if layout is torch.strided or wrap is fp.Replicate:
        with pytest.raises(fp.BatchError, match=r"target.* nested tensor"):
            fp.run(loss, (params,), (torch.randn(2, 4), wrap(nested)))


def test_makes_a_tensor_nested_in_the_stage():
    """The remedy in the message works."""

    @fp.stage
    def total(params, batch):
        padded, lengths = batch
        rows = [row[:length] for row, length in zip(padded, lengths.tolist(), strict=True)]
        nested = torch.nested.nested_tensor(rows, layout=torch.jagged)
        return (nested * 2).to_padded_tensor(0.0, output_size=(len(rows), *padded.shape[1:]))

    padded, lengths = torch.randn(4, 5, 4), torch.tensor([5, 3, 2, 4])
    expected = 2 * padded * (torch.arange(5) < lengths[:, None])[..., None]
    torch.testing.assert_close(
        fp.run(forward_plan(total), ((),), (padded, lengths)).outputs, expected
    )


def test_hands_on_a_nested_tensor():
    @fp.stage
    def ragged(params, x):
        return torch.nested.nested_tensor([x[0], x[1][:2]], layout=torch.jagged)

    @fp.stage
    def values(params, x):
        return x.values()

    with pytest.raises(fp.PlanError, match="hands on a nested tensor"):
        fp.run(forward_plan(ragged, values), ((), ()), torch.randn(4, 3, 4))


@pytest.mark.parametrize("lengths", [[5, 3], [1, 1], [6]])
@pytest.mark.parametrize("wrap", [lambda x: x, fp.Replicate, lambda x: {"x": (x,)}])
def test_gives_a_packed_sequence(lengths, wrap):
    """Also a sequence whose fields have equal rows by chance."""
    torch.manual_seed(0)
    stage, params, _ = fp.from_module(nn.GRU(4, 4))
    packed = pack_sequence([torch.randn(length, 4) for length in lengths])
    with pytest.raises(fp.BatchError, match="is a PackedSequence.*fp.Microbatches"):
        fp.run(forward_plan(stage), (params,), wrap(packed))


def test_packs_each_microbatch():
    torch.manual_seed(0)
    gru = nn.GRU(4, 4)
    stage, params, _ = fp.from_module(gru)
    packed = [
        pack_sequence([torch.randn(5, 4), torch.randn(3, 4)]),
        pack_sequence([torch.randn(2, 4)]),
    ]

    @fp.stage
    def data(params, x):
        return x[0].data

    plan = fp.make_plan(
        [stage, data], S.fill_drain(2, 2, backward=False), devices="cpu", outputs=True
    )
    outputs = fp.run(plan, (params, ()), fp.Microbatches(packed)).outputs
    torch.testing.assert_close(
        torch.cat(list(outputs)), torch.cat([gru(each)[0].data for each in packed]).detach()
    )


def test_packs_in_the_stage():
    torch.manual_seed(0)
    gru = nn.GRU(4, 4, batch_first=True)

    class Last(nn.Module):
        def __init__(self):
            super().__init__()
            self.gru = gru

        def forward(self, x, lengths):
            return self.gru(
                pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
            )[1][0]

    stage, params, _ = fp.from_module(Last())
    batch = torch.randn(4, 5, 4), torch.tensor([5, 3, 2, 4])
    torch.testing.assert_close(
        fp.run(forward_plan(stage), (params,), batch).outputs, Last()(*batch).detach()
    )


SPARSE = {"coo": torch.Tensor.to_sparse, "csr": torch.Tensor.to_sparse_csr}


@pytest.mark.parametrize("kind", SPARSE)
def test_gives_a_sparse_tensor(kind):
    layer, stage, params = linear()
    dense = torch.eye(4)
    sparse = SPARSE[kind](dense)
    with pytest.raises(
        fp.BatchError, match=r"inputs is a sparse tensor .*fp.Microbatches.*to_dense"
    ):
        fp.run(forward_plan(stage), (params,), sparse)
    with pytest.raises(fp.BatchError, match="inputs is a sparse tensor"):
        fp.Pipe(nn.Sequential(layer), chunks=2)(sparse)
    loss = cpu_plan([stage], S.fill_drain(1, 2))
    with pytest.raises(fp.BatchError, match="target is a sparse tensor"):
        fp.run(loss, (params,), (dense, sparse))


@pytest.mark.parametrize("kind", SPARSE)
@pytest.mark.parametrize("share", [True, False])
def test_shares_a_sparse_tensor_or_cuts_it(kind, share):
    torch.manual_seed(0)
    features, weight, adjacency = (
        torch.randn(4, 4),
        torch.randn(4, 4),
        (torch.rand(4, 4) > 0.5).float(),
    )

    @fp.stage
    def graph(params, batch):
        return torch.sparse.mm(batch["adjacency"], batch["x"] @ params["w"])

    sparse = SPARSE[kind](adjacency)
    batch = {"adjacency": sparse, "x": features}
    cut = fp.Microbatches([batch, batch])
    if share:
        cut = {"adjacency": fp.Replicate(sparse), "x": torch.cat([features, features])}
    plan = fp.make_plan(
        [graph], S.fill_drain(1, 2), loss=lambda y, t: y.square().mean(), devices="cpu"
    )
    result = fp.run(plan, ({"w": weight},), (cut, None))
    expected = weight.clone().requires_grad_()
    loss = (adjacency @ (features @ expected)).square().mean()
    loss.backward()
    torch.testing.assert_close(result.loss, loss.detach())
    torch.testing.assert_close(result.grads[0]["w"], expected.grad)


# -- block masks
# -------------------------------------------------------------------------------


def blocks(documents):
    def same(b, h, q, k):
        return (documents[b, q] == documents[b, k]) & (q >= k)

    return create_block_mask(same, len(documents), None, 128, 128, device="cpu")


def test_gives_a_block_mask():
    """The message names two ways that work: make it in the stage, or register it as torch takes it
    apart."""
    x, documents = torch.randn(4, 1, 128, 16), torch.randint(0, 3, (4, 128)).sort(-1).values

    @fp.stage
    def attend(params, batch):
        return flex_attention(batch[0], batch[0], batch[0], block_mask=batch[1])

    cut = fp.Microbatches(
        [(a, blocks(d)) for a, d in zip(x.split(1), documents.split(1), strict=True)]
    )
    plan = forward_plan(attend, microbatches=4)
    refused = r"inputs\[0\]\[1\] is a BlockMask with a function that closes over tensors.*make the BlockMask from them in"
    with pytest.raises(fp.BatchError, match=refused):
        fp.run(plan, ((),), cut)

    @fp.stage
    def attend_within(params, batch):
        return flex_attention(batch[0], batch[0], batch[0], block_mask=blocks(batch[1]))

    outputs = fp.run(forward_plan(attend_within, microbatches=4), ((),), (x, documents)).outputs
    expected = flex_attention(x, x, x, block_mask=blocks(documents))
    torch.testing.assert_close(outputs, expected)
    leaves = [leaf for leaf in BlockMask._flatten(blocks(documents))[0] if leaf is not None]
    if not any(torch.equal(documents, leaf) for leaf in leaves):
        return  # torch 2.11 does not take a mask's rule apart
    functions = BlockMask._flatten, lambda aux, kids: BlockMask._unflatten(kids, aux)
    optree.register_pytree_node(BlockMask, *functions, namespace="funcpipe")
    try:
        torch.testing.assert_close(torch.cat(list(fp.run(plan, ((),), cut).outputs)), expected)
        torch.testing.assert_close(fp.run(plan, ((),), (x, blocks(documents))).outputs, expected)
    finally:
        optree.unregister_pytree_node(BlockMask, namespace="funcpipe")


GLOBAL = torch.zeros(3)  # a tensor in the rule's module is not part of the rule


@pytest.mark.parametrize("strict", [True, False])
def test_exports_a_pipe(strict):
    pipe = fp.Pipe(
        nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), chunks=2, devices=["cpu", "cpu"]
    )
    x = torch.randn(4, 4)
    with pytest.raises(Exception, match="export the layers themselves"):
        torch.export.export(pipe, (x,), strict=strict)
    exported = torch.export.export(nn.Sequential(*pipe), (x,), strict=strict)
    torch.testing.assert_close(exported.module()(x), pipe(x))
