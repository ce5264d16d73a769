"""Two ranks that own half of the embedding tables each: the input exchange of the next batch behind
the step of this one.

``python exchange.py KIND RANK WORLD STORE`` trains a small DLRM-like model twice, by a plain loop
and through an overlap, and says whether all losses and weights are equal bit for bit. KIND is
"gloo" (all-to-all of torch.distributed) or "torchrec" (its sharded EmbeddingBagCollection, if it is
installed).
"""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist

import funcpipe as fp

ROWS, DIM, VOCABULARY = 5, 4, 30
LEARNING_RATE = 0.1


def batches(rank, world, count, sparse):
    """Dense features, ids for every table of all ranks, labels."""
    for number in range(count):
        g = torch.Generator().manual_seed(1000 * number + rank)
        dense, label = torch.randn(ROWS, DIM, generator=g), torch.randn(ROWS, generator=g)
        yield {"dense": dense, "label": label, "ids": sparse(g, world)}


def all_have(mine):
    """Have all ranks a batch; on the CPU."""
    flag = torch.tensor(int(mine))
    dist.all_reduce(flag, dist.ReduceOp.MIN)
    return bool(flag)


def predict(weight, dense, embedded):
    return (dense @ weight).squeeze(-1) + embedded.sum((1, 2))


# ---- with torch.distributed alone
# -------------------------------------------------------------------------------


def ids(g, world):
    return torch.randint(VOCABULARY, (world, ROWS), generator=g)


def start(batch):
    """Send each rank the ids of its table; what comes is not there yet."""
    found = torch.empty_like(batch["ids"])
    return {
        **batch,
        "mine": found,
        "work": dist.all_to_all_single(found, batch["ids"], async_op=True),
    }


def step(state, batch):
    """Look up, exchange embeddings, and the same ways back for the gradients."""
    table, weight = state
    rows = table[batch["mine"]]  # [world, ROWS, DIM]: of my table, for all ranks
    embedded = torch.empty_like(rows)
    dist.all_to_all_single(embedded, rows)
    leaves = [weight.clone().requires_grad_(), embedded.clone().requires_grad_()]
    error = predict(leaves[0], batch["dense"], leaves[1].transpose(0, 1)) - batch["label"]
    loss = error.square().mean()
    to_weight, to_rows = torch.autograd.grad(loss, leaves)
    back = torch.empty_like(to_rows)
    dist.all_to_all_single(back, to_rows.contiguous())
    dist.all_reduce(to_weight)
    new = table.index_put((batch["mine"],), -LEARNING_RATE * back, accumulate=True)
    return (new, weight - LEARNING_RATE * to_weight), loss.detach()


def with_gloo(rank, world):
    g = torch.Generator().manual_seed(rank)
    first = torch.randn(VOCABULARY, DIM, generator=g), torch.zeros(DIM, 1)
    counts = [7, 5]  # one rank has fewer batches

    state, losses = first, []
    for batch in batches(rank, world, min(counts), ids):
        batch = start(batch)
        batch["work"].wait()
        state, loss = step(state, batch)
        losses.append(loss)

    # Ranks call their collectives in one order: one thread does all of it. Gloo works meanwhile.
    source = fp.batches.agree(batches(rank, world, counts[rank], ids), all_have)
    stages = [
        fp.batches.BatchStage(start, lead=1),
        fp.batches.BatchStage(fp.batches.awaited, lead=1),
        fp.batches.Fold(step, first),
    ]
    run = fp.batches.overlap(source, stages, depth=2, thread=False)
    return first, losses, state, list(run), run.state


# ---- with torchrec
# -------------------------------------------------------------------------------


def jagged(g, world):
    from torchrec import KeyedJaggedTensor

    lengths = torch.randint(0, 4, (world * ROWS,), generator=g)
    values = torch.randint(VOCABULARY, (int(lengths.sum()),), generator=g)
    return KeyedJaggedTensor([f"f{table}" for table in range(world)], values, lengths=lengths)


def sharded(world):
    """Tables dealt out to the ranks, updated by SGD inside of their backward."""
    import torchrec.distributed.sharding_plan as plans
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.types import ShardingEnv

    tables = [
        EmbeddingBagConfig(
            name=f"t{k}", embedding_dim=DIM, num_embeddings=VOCABULARY, feature_names=[f"f{k}"]
        )
        for k in range(world)
    ]
    torch.manual_seed(0)
    whole = EmbeddingBagCollection(tables=tables)
    sharder = EmbeddingBagCollectionSharder(
        {"optimizer": EmbOptimType.EXACT_SGD, "learning_rate": LEARNING_RATE}
    )
    where = {f"t{k}": plans.table_wise(rank=k, compute_kernel="fused") for k in range(world)}
    plan = plans.construct_module_sharding_plan(whole, where, sharder, world, world, "cpu")
    env = ShardingEnv.from_process_group(dist.group.WORLD)
    return sharder.shard(whole, plan, env, torch.device("cpu"))


def adapter(ebc):
    """Return the stages of torchrec's TrainPipelineSparseDist as functions of a batch."""

    def dist_start(batch):  # begin to exchange the sizes
        context = ebc.create_context()
        return {**batch, "context": context, "ids": ebc.input_dist(context, batch["ids"])}

    def dist_wait(batch):  # the sizes are known: begin to exchange the ids
        return {**batch, "ids": batch["ids"].wait()}

    def train(weight, batch):
        leaf = weight.clone().requires_grad_()
        found = ebc.compute_and_output_dist(batch["context"], batch["ids"].wait()).wait()
        embedded = found.values().view(ROWS, -1, DIM)
        loss = (predict(leaf, batch["dense"], embedded) - batch["label"]).square().mean()
        loss.backward()  # the backward updates the tables
        dist.all_reduce(leaf.grad)
        return weight - LEARNING_RATE * leaf.grad, loss.detach()

    return dist_start, dist_wait, train


def with_torchrec(rank, world):
    first, plain, losses = torch.zeros(DIM, 1), sharded(world), []
    before, state = local(plain), first
    dist_start, dist_wait, train = adapter(plain)
    for batch in batches(rank, world, 5, jagged):
        state, loss = train(state, dist_wait(dist_start(batch)))
        losses.append(loss)

    ebc = sharded(world)
    dist_start, dist_wait, train = adapter(ebc)
    stages = [
        fp.batches.to_device("cpu"),
        fp.batches.BatchStage(dist_start, lead=1),
        fp.batches.BatchStage(dist_wait, lead=1),
        fp.batches.Fold(train, first),
    ]
    run = fp.batches.overlap(batches(rank, world, 5, jagged), stages, depth=2, thread=False)
    return (first, *before), losses, (state, *local(plain)), list(run), (run.state, *local(ebc))


def local(ebc):
    """The parts of the tables that this rank owns."""
    return [
        shard.tensor.clone()
        for value in ebc.state_dict().values()
        for shard in value.local_shards()
    ]


def main(kind, rank, world, store):
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank))
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    torch.set_num_threads(1)
    first, losses, state, found, now = {"gloo": with_gloo, "torchrec": with_torchrec}[kind](
        rank, world
    )
    assert len(losses) == len(found) == 5
    assert all(torch.equal(a, b) for a, b in zip(losses, found, strict=True)), (losses, found)
    assert all(torch.equal(a, b) for a, b in zip(state, now, strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(first, now, strict=True)), (
        "every weight was trained"
    )
    print(f"{kind} rank {rank}: {len(found)} losses and {len(now)} weights equal bit for bit")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
