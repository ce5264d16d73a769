"""Write the tables and charts of the documents from the records in ``docs/results``.

    python tests/benchmarks/report.py

A region of a page begins with ``<!-- report: NAME -->`` and ends with ``<!-- end -->``; its text is
what the function of this name returns. Charts are SVG files in ``docs/pictures``. To measure anew,
with nothing else running (install torchgpipe as bench_peers.py says):

    python tests/benchmarks/report.py --measure

The records of one GPU (``h200.json``) need that machine and are not measured by this command.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from results import FOLDER, Record, read

import funcpipe as fp

ROOT = Path(__file__).parents[2]
PICTURES = ROOT / "docs" / "pictures"
PAGES = [
    ROOT / "README.md",
    *(ROOT / "docs" / page for page in ("index.md", "benchmarks.md", "internals/size.md")),
]
WORKLOADS = {
    "mlp": ("Linear and GELU", []),
    "gpt2": ("transformer", ["--width", "128", "--batch", "32"]),
    "unet": ("U-Net", ["--width", "16", "--batch", "64"]),
    "resnet": ("residual blocks", ["--width", "32", "--batch", "64"]),
}
"""The models of bench_peers.py: what pages call each, and the options of its size."""

SYSTEMS = {
    "funcpipe": ("funcpipe", "funcpipe, compiled"),
    "torch pipelining": ("torch pipelining",),
    "torchgpipe": ("torchgpipe",),
    "microbatch loop": ("plain, 1 thread",),
}
"""The columns of the tables: the systems of bench_peers.py that count for each. A step of the whole
batch at once counts for none, because the loop goes through microbatches."""

ARMS = (
    "1 thread, microbatch loop|torch pipelining|torchgpipe.*never|"
    "^funcpipe(, compiled)?(, processes)?, (1F1B|fill-drain|zero-bubble|interleaved), .*never"
)


def peers() -> dict[tuple[str, int], Record]:
    """The records of bench_peers.py by workload and number of microbatches."""
    return {
        (record.option("work", "mlp"), int(record.option("microbatches", "8"))): record
        for record in read(FOLDER / "peers.json")
    }


def fastest(record: Record, systems: Sequence[str], remat: str = "never") -> dict[str, Any]:
    """The row with the shortest median among those of some systems."""
    rows = [row for row in record.rows if row["system"] in systems and row["remat"] == remat]
    return min([row for row in rows if row["schedule"] != "whole batch"], key=median)


def median(row: dict[str, Any]) -> float:
    """The median of the seconds of a row."""
    return row["seconds"][1]


def lean(record: Record, systems: Sequence[str]) -> dict[str, Any]:
    """The row with the least memory among those of some systems without remat."""
    rows = [row for row in record.rows if row["system"] in systems and row["remat"] == "never"]
    return min(rows, key=lambda row: row["mib"])


def table(head: Sequence[str], rows: Iterable[Sequence[str]], words: int = 1) -> str:
    """A table in Markdown; columns from number ``words`` on are numbers and flush right."""
    rule = ["---" if number < words else "---:" for number in range(len(head))]
    return "\n".join(f"| {' | '.join(row)} |" for row in [head, rule, *rows])


def measured(records: Sequence[Record]) -> str:
    """The note below a table."""
    first = records[0]
    dates = sorted({record.date for record in records})
    commits = sorted({record.commit for record in records})
    where = f"{first.machine}, torch {first.torch}, commit {', '.join(commits)}"
    return f"*How this was measured: {where}, {' to '.join(dates)}. `{first.command}`.*"


# -------------------------------------------------------------------------------------------------
# Regions


def readme() -> str:
    """The two tables of README."""
    rows = []
    for (work, count), record in sorted(peers().items()):
        if count == 8:
            cells = [_time_and_memory(fastest(record, SYSTEMS[name])) for name in SYSTEMS]
            rows.append([WORKLOADS[work][0], *cells[:3]])
    head = ["A training step of each system's fastest schedule", "funcpipe"]
    head += ["torch pipelining", "torchgpipe"]
    return f"{table(head, rows)}\n\n{families(short=True)}"


def _time_and_memory(row: dict[str, Any]) -> str:
    return f"{median(row) * 1e3:.0f} ms, {row['mib']:.0f} MiB"


def families(short: bool = False) -> str:
    """The bubble and the memory of the families, with eight devices and 32 microbatches.

    Args:
        short: only a few of them.
    """
    own, count = fp.schedules, 32
    cells = [
        ("GPipe (fill-drain)", own.fill_drain(8, count), "GPipe"),
        ("1F1B", own.one_f_one_b(8, count), "1F1B"),
        ("interleaved 1F1B", own.interleaved(16, count, num_devices=8), "Interleaved1F1B"),
        ("ZB-H1", own.zero_bubble(8, count), ""),
        ("ZB-V", own.zbv(16, count), "ZBVZeroBubble"),
        ("DualPipeV", own.dualpipe_v(16, count), "DualPipeV"),
        ("V-Half", own.v_half(16, count), ""),
        ("V-Min", own.v_min(16, count), ""),
    ]
    rows = []
    for name, schedule, theirs in cells:
        if short and name not in ("1F1B", "ZB-V", "V-Half"):
            continue
        share = 8 / schedule.num_stages
        cost = fp.Cost(*[share] * 3, residual=share, weight_residual=share / 2)
        timeline = fp.simulate(schedule, cost)
        rows.append([name, theirs or "-", f"{timeline.bubble:.1%}", f"{max(timeline.peak):g}"])
    head = ["Schedule (8 devices, 32 microbatches, simulated)", "in torch", "bubble", "memory"]
    return table(head, rows, words=2)


def speed() -> str:
    """The time of a step, by workload and number of microbatches."""
    rows = []
    for (work, count), record in sorted(peers().items()):
        best = {name: fastest(record, systems) for name, systems in SYSTEMS.items()}
        ours = median(best["funcpipe"])
        rows.append(
            [
                WORKLOADS[work][0],
                str(count),
                _schedule(best["funcpipe"]),
                f"{ours * 1e3:.0f}",
                _schedule(best["torch pipelining"]),
                *[f"{median(best[name]) / ours:.2f}" for name in [*SYSTEMS][1:]],
            ]
        )
    head = [
        "Model",
        "microbatches",
        "funcpipe's fastest",
        "ms",
        "torch's fastest",
        "torch",
        "torchgpipe",
        "loop",
    ]
    return f"{table(head, rows)}\n\n{measured([*peers().values()])}"


def _schedule(row: dict[str, Any]) -> str:
    compiled = "compiled " if "compiled" in row["system"] else ""
    return f"{compiled}{row['schedule']}"


def memory() -> str:
    """The MiB by which the processes grow in a step: the leanest schedule of each system."""
    rows = []
    for (work, count), record in sorted(peers().items()):
        found = [lean(record, SYSTEMS[name]) for name in [*SYSTEMS][:3]]
        cells = [f"{row['mib']:.0f} ({_schedule(row)})" for row in found]
        rows.append([WORKLOADS[work][0], str(count), *cells])
    return table(["Model", "microbatches", "funcpipe", "torch", "torchgpipe"], rows)


def processes() -> str:
    """Two processes: the time of funcpipe's fastest schedules over torch's fastest."""
    rows = []
    for (work, count), record in sorted(peers().items()):
        theirs = fastest(record, SYSTEMS["torch pipelining"])
        kinds = ("funcpipe, processes", "funcpipe, compiled, processes")
        ratios = [median(fastest(record, [kind])) / median(theirs) for kind in kinds]
        cells = [f"{ratio:.2f}" for ratio in ratios]
        rows.append([WORKLOADS[work][0], str(count), _schedule(theirs), *cells])
    head = ["Model", "microbatches", "torch's fastest", "eager stages", "compiled stages"]
    return table(head, rows)


def overhead() -> str:
    """The host's time for an action of a tiny stage, over that of a hand-written loop."""
    (record,) = read(FOLDER / "overhead.json")
    rows = []
    for stages, count in [(2, 8), (2, 32), (4, 32)]:
        here = {
            row["arm"]: row
            for row in record.rows
            if (row["stages"], row["microbatches"]) == (stages, count)
        }
        arms = ["serial, bound", "serial, whole run", "compiled, serial, whole run"]
        ratios = [f"{here[arm]['ratio']:.2f}" for arm in [*arms, "threads, bound"]]
        rows.append([f"{stages}, {count}", *ratios])
    head = ["Stages, microbatches", "actions", "run", "compiled run", "actions on threads"]
    return f"{table(head, rows)}\n\n{measured([record])}"


def planning() -> str:
    """The seconds to build, check and lower a schedule."""
    (record,) = read(FOLDER / "planning.json")
    rows = []
    for row in record.rows[:3]:
        devices, chunks, count = row["size"]
        ratio = row["torch"] / row["funcpipe"]
        times = [f"{row[name]:.3g}" for name in ("funcpipe", "torch")]
        rows.append([f"{devices}, {chunks}, {count}", *times, f"{ratio:.0f}"])
    head = ["Devices, stages each, microbatches", "funcpipe, s", "torch, s", "torch / funcpipe"]
    return f"{table(head, rows)}\n\n{measured([record])}"


def size() -> str:
    """The size of the package by folder, before the folders were arranged anew and now."""
    head = ["Folder", "lines", "code alone", "files", "longest function", "comments"]
    parts = []
    for record in read(FOLDER / "size.json"):
        rows = []
        for row in sorted(record.rows, key=lambda row: (row["folder"] == "all", -row["lines"])):
            code = row["lines"] - row["docstrings"] - row["blank"] - row["comments"]
            comments = f"{row['comments'] / row['lines']:.1%}"
            numbers = [f"{row['lines']:,}", f"{code:,}", row["files"], row["longest"]]
            rows.append([row["folder"], *map(str, numbers), comments])
        when = f"At {record.option('at', '')}" if "--at" in record.options else "Now"
        parts.append(f"{when}:\n\n{table(head, rows)}\n\n{measured([record])}")
    return "\n\n".join(parts)


def gpu() -> str:
    """One GPU: the time of a step over that of an accumulation loop."""
    step, joined = read(FOLDER / "h200.json")
    rows = [
        [row["arm"], *[f"{row[size]:.2f}" for size in ("small", "large")], f"{row['mib']:,}"]
        for row in step.rows
    ]
    one = table(["One process", "small model", "large model", "MiB, large"], rows)
    rows = [[row["arm"], f"{row['ms']:.0f}", f"{row['ratio']:.2f}"] for row in joined.rows]
    two = table(["Two processes, one GPU", "ms", "of torch's 1F1B"], rows)
    return f"{one}\n\n{measured([step])}\n\n{two}\n\n{measured([joined])}"


# -------------------------------------------------------------------------------------------------
# Charts

COLORS = ("#2563a8", "#c2703d", "#7a8f3c", "#8a8a8a")


def bars(title: str, groups: Sequence[tuple[str, Sequence[float]]], series: Sequence[str]) -> str:
    """A chart of horizontal bars: a group for each pair of a name and its values.

    Args:
        title: what the length of a bar means.
        groups: names with a value for each of the series.
        series: the names of the values, in the order of their colours.
    """
    left, width, thick, gap = 130, 640, 15, 14
    scale = (width - left - 50) / max(max(values) for _, values in groups)
    lines, y = [], 62
    for number, name in enumerate(series):
        x = left + number * 125
        lines.append(f'<rect x="{x}" y="32" width="11" height="11" fill="{COLORS[number]}"/>')
        lines.append(f'<text x="{x + 16}" y="42">{escape(name)}</text>')
    for name, values in groups:
        middle = y + thick * len(values) / 2 + 4
        lines.append(f'<text x="{left - 10}" y="{middle:.0f}" text-anchor="end">{name}</text>')
        for color, value in zip(COLORS, values, strict=False):
            long = value * scale
            lines.append(
                f'<rect x="{left}" y="{y}" width="{long:.1f}" height="{thick - 2}" fill="{color}"/>'
            )
            lines.append(f'<text x="{left + long + 6:.1f}" y="{y + 11}">{value:.2f}</text>')
            y += thick
        y += gap
    body = "\n".join(lines)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {y}" width="{width}" '
        f'height="{y}" font-family="sans-serif" font-size="12" role="img">\n'
        f"<title>{escape(title)}</title>\n"
        "<style>text{fill:#1f2328}.card{fill:#fff}@media (prefers-color-scheme:dark)"
        "{text{fill:#e6edf3}.card{fill:#0d1117}}</style>\n"
        '<rect class="card" width="100%" height="100%" rx="6"/>\n'
        f'<text x="{left}" y="20" font-weight="bold">{escape(title)}</text>\n{body}\n</svg>\n'
    )


def speed_chart() -> str:
    """How many times as fast as a plain loop in one thread each system's fastest schedule is."""
    names = [*SYSTEMS][:3]
    groups = []
    for (work, count), record in sorted(peers().items()):
        if count == 8:
            loop = median(fastest(record, SYSTEMS["microbatch loop"]))
            values = [loop / median(fastest(record, SYSTEMS[name])) for name in names]
            groups.append((WORKLOADS[work][0], values))
    return bars("Speed of a training step on two CPU lanes; plain loop = 1", groups, names)


def memory_chart() -> str:
    """The memory of each system's leanest schedule without remat, over funcpipe's."""
    names = [*SYSTEMS][:3]
    groups = []
    for (work, count), record in sorted(peers().items()):
        if count == 8:
            found = [lean(record, SYSTEMS[name])["mib"] for name in names]
            groups.append((WORKLOADS[work][0], [mib / found[0] for mib in found]))
    return bars("Memory of a training step without remat; funcpipe = 1", groups, names)


REGIONS: dict[str, Callable[..., str]] = {
    made.__name__: made
    for made in (readme, families, speed, memory, processes, overhead, planning, gpu, size)
}
CHARTS = {"speed.svg": speed_chart, "memory.svg": memory_chart}


def written(text: str) -> str:
    """A page with its regions written anew."""

    def region(found: re.Match[str]) -> str:
        return f"{found[1]}\n{REGIONS[found[2]]()}\n<!-- end -->"

    return re.sub(r"(<!-- report: (\w+) -->)\n.*?<!-- end -->", region, text, flags=re.DOTALL)


def measure() -> None:
    """Run the benchmarks that write records, one after the other."""
    calls = [
        ["bench_peers.py", "--work", work, *size, "--microbatches", count, "--repeats", "7"]
        + ["--seconds", "20", "--arms", ARMS, "--json", str(FOLDER / "peers.json")]
        for work, (_, size) in WORKLOADS.items()
        for count in ("8", "32")
    ]
    calls.append(["bench_overhead.py", "--repeats", "80", "--json", str(FOLDER / "overhead.json")])
    calls.append(["bench_plan.py", "--json", str(FOLDER / "planning.json")])
    size = ["bench_size.py", "--json", str(FOLDER / "size.json")]
    calls += [[*size, "--at", "7389999"], size]
    for script, *options in calls:
        words = [sys.executable, str(Path(__file__).parent / script), *options]
        subprocess.run(words, check=True, cwd=ROOT)


def main() -> None:
    """Measure if asked to, then write pages and charts."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--measure", action="store_true", help="run the benchmarks first")
    if parser.parse_args().measure:
        measure()
    write()


def write() -> None:
    """Write pages and charts."""
    for page in PAGES:
        page.write_text(written(page.read_text()))
    for name, chart in CHARTS.items():
        (PICTURES / name).write_text(chart())


if __name__ == "__main__":
    main()
