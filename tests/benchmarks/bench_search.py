"""Searched schedules against published ones and torch's, all timed by the same clock.

    python tests/benchmarks/bench_search.py [--seconds 30] [--rows 0 1 ...] python
    tests/benchmarks/bench_search.py --random 60 [--cpu] [--seconds 20] [--proof-seconds 60]
    [--known FILE]

First the rows of zero bubble's tables 9 and 5 (arXiv 2401.10241): bubble of the span under the
memory of ZB-2p. Then the static orders of torch.distributed.pipelining under unequal costs, p = 8,
m = 32, two stages a device, against what a search finds with no more memory: idle share of the
makespan. torch's orders are taken from torch itself.

With ``--random``: so many random instances against CP-SAT, whose model (search_reference.py) shares
nothing with the search and begins with what the search found. ``--known`` keeps what CP-SAT found
and proved in a file, so that only the search runs again; ``--cpu`` is for a machine that others use
too.
"""

import argparse
import json
import sys
from math import inf
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parents[1] / "search"))

from search_reference import Instance, Reference, instance, reference
from test_tables import LINE, cost_of
from torch.distributed.pipelining import schedules as theirs

import funcpipe as fp
from funcpipe._src.search import problem

TIMES = [(1, 1, 1), (1, 1.4, 0.6), (1, 2, 1), (1, 0.8, 1.2)]
CLASSES = (
    "ScheduleInterleaved1F1B",
    "ScheduleInterleavedZeroBubble",
    "ScheduleZBVZeroBubble",
    "ScheduleDualPipeV",
)


def static(name: str, devices: int, chunks: int, microbatches: int) -> fp.Schedule:
    """The order that torch's class gives all ranks, as a schedule."""
    made: Any = object.__new__(getattr(theirs, name))
    made.pp_group_size, made.n_local_stages, made._n_microbatches = devices, chunks, microbatches
    made._num_stages = made.num_stages = devices * chunks
    made.number_of_rounds = max(1, microbatches // devices)
    made.microbatches_per_round = microbatches // made.number_of_rounds
    rows = {rank: made._calculate_single_rank_operations(rank) for rank in range(devices)}
    text = "\n".join(
        ",".join("" if cell is None else str(cell) for cell in rows[rank])
        for rank in range(devices)
    )
    return fp.schedules.from_torch_csv(text, name=name)


def tables(rows: list[int], seconds: float) -> None:
    """The first table."""
    print("p, m | ZB-1p | ZB-2p | found | bound | gap | ended by | s")
    for at in rows:
        row = LINE[at]
        cost = cost_of(row)
        start = perf_counter()
        found = fp.search(
            cost,
            num_devices=row[0],
            num_microbatches=row[1],
            memory_limit=2 * row[0] * cost.residual,
            objective="span",
            seconds=seconds,
        )
        took = perf_counter() - start
        work = row[1] * sum(row[2:5])
        bound = (found.lower_bound - work) / found.lower_bound
        print(
            f"{row[0]}, {row[1]} | {row[8]:.4f} | {row[9]:.4f} | {found.timeline.span_bubble:.4f} "
            f"| {bound:.4f} | {found.gap:.5f} | {found.ended} | {took:.1f}",
            flush=True,
        )


def against_torch(seconds: float) -> None:
    """The second table."""
    print("\nF, I, W | torch's class | its bubble, peak | found: bubble, peak | bound | source")
    for times in TIMES:
        cost = fp.Cost(*times, weight_residual=1.0)
        for name in CLASSES:
            order = static(name, 8, 2, 32)
            timeline = fp.simulate(order, cost)
            found = fp.search(
                cost,
                num_devices=8,
                num_microbatches=32,
                num_stages=16,
                memory_limit=max(timeline.peak),
                seconds=seconds,
                evaluations=2_000,
            )
            bound = 1 - max(found.timeline.busy) / found.lower_bound
            print(
                f"{times} | {name[8:]} | {timeline.bubble:.1%}, {max(timeline.peak):g} | "
                f"{found.timeline.bubble:.1%}, {max(found.peak):g} | {bound:.1%} | {found.source}",
                flush=True,
            )


def against_proofs(
    numbers: list[int], seconds: float, proof_seconds: float, known: Path | None, *, exact: bool
) -> None:
    """The third table."""
    references = json.loads(known.read_text()) if known is not None and known.exists() else {}
    rows: list[tuple[int, float, float | None]] = []
    print(
        "# | p, m | placement | limit | with | found | its bound | CP-SAT | its bound | found / "
        "best | bound / optimum | s"
    )
    for number in numbers:
        one = instance(number)
        start = problem.perf_counter()
        found = searched(one, seconds, exact=exact)
        took = problem.perf_counter() - start
        makespan, bound = (found.makespan, found.lower_bound) if found is not None else (inf, 0.0)
        if str(number) not in references:
            references[str(number)] = reference(
                one, found and found.schedule, seconds=proof_seconds
            )
            if known is not None:
                known.write_text(json.dumps(references))
        theirs = Reference(*references[str(number)])
        best = min(makespan, theirs.makespan)
        proven = best if max(theirs.bound, bound) >= best * (1 - 1e-9) else None
        assert theirs.bound <= makespan, "CP-SAT proves what the search disproves"
        assert bound <= theirs.makespan * (1 + 1e-9), "the search proves what CP-SAT disproves"
        rows.append((number, makespan / best, proven and bound / proven))
        share = f"{bound / proven:.4f}" if proven else ""
        print(
            f"{one} | {makespan:g} | {bound:.6g} | {theirs.makespan:g} | {theirs.bound:g} | "
            f"{makespan / best:.4f} | {share} | {took:.1f}",
            flush=True,
        )
    ratios = [ratio for _, ratio, _ in rows]
    shares = [share for _, _, share in rows if share is not None]
    print(
        f"\nfound within 1 % of the best known: {sum(ratio <= 1.01 for ratio in ratios)} of "
        f"{len(rows)}; ",
        end="",
    )
    print(f"the best known: {sum(ratio == 1 for ratio in ratios)}; worst {max(ratios):.4f}")
    print(
        f"bound within 2 % of the optimum: {sum(share >= 0.98 for share in shares)} of "
        f"{len(shares)} proven; ",
        end="",
    )
    print(
        f"the optimum: {sum(share >= 1 - 1e-9 for share in shares)}; worst "
        f"{min(shares, default=1.0):.4f}"
    )


def searched(one: Instance, seconds: float, *, exact: bool) -> fp.typing.Found | None:
    """What the search finds for an instance; None: nothing."""
    try:
        return fp.search(
            one.cost,
            num_devices=one.devices,
            num_microbatches=one.microbatches,
            num_stages=len(one.placement),
            placement=one.placement,
            memory_limit=one.limit,
            remat=one.remat,
            offload=one.offload,
            exact=exact,
            evaluations=10**6,
            seconds=seconds,
        )
    except fp.ScheduleError:
        return None


def main() -> None:
    """The first two tables, or the third."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--rows", type=int, nargs="*", default=list(range(len(LINE))))
    parser.add_argument("--random", type=int, metavar="COUNT")
    parser.add_argument("--only", type=int, nargs="*", help="of the random instances")
    parser.add_argument("--proof-seconds", type=float, default=60.0)
    parser.add_argument("--known", type=Path)
    parser.add_argument(
        "--exact",
        action="store_true",
        help="the search may ask the solver too, for what is left of its time",
    )
    parser.add_argument(
        "--cpu",
        action="store_true",
        help="seconds of a search are those of the processor, not of the wall",
    )
    options = parser.parse_args()
    if options.cpu:
        problem.perf_counter = process_time
    if options.random:
        numbers = options.only or list(range(options.random))
        against_proofs(
            numbers, options.seconds, options.proof_seconds, options.known, exact=options.exact
        )
        return
    tables(options.rows, options.seconds)
    against_torch(options.seconds)


if __name__ == "__main__":
    main()
