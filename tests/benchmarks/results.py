"""Records of benchmarks: what was measured, by which command, on which machine.

``docs/results/`` contains the records from which ``report.py`` writes the tables and charts of the
documents. A benchmark writes a record with ``--json FILE``.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

FOLDER = Path(__file__).parents[2] / "docs" / "results"


class Record(NamedTuple):
    """One call of a benchmark.

    Attributes:
        benchmark: the name of its script.
        options: the words of the command line, without ``--json``.
        date, commit, machine, torch: when and where it ran.
        rows: what was measured, a mapping for each row of its table.
    """

    benchmark: str
    options: list[str]
    date: str
    commit: str
    machine: str
    torch: str
    rows: list[dict[str, Any]]

    def option(self, name: str, default: str) -> str:
        """The word that follows an option of the command line."""
        words = self.options
        return words[words.index(f"--{name}") + 1] if f"--{name}" in words else default

    @property
    def command(self) -> str:
        """The command line that measures this again."""
        words = [f"'{word}'" if re.search(r"[^\w.:,=-]", word) else word for word in self.options]
        return " ".join([f"python tests/benchmarks/{self.benchmark}.py", *words])


def add_option(parser: argparse.ArgumentParser) -> None:
    """Add ``--json FILE`` to the options of a benchmark."""
    parser.add_argument(
        "--json", type=Path, help="write the rows into this file, in place of those of this command"
    )


def write(file: Path | None, rows: Sequence[dict[str, Any]]) -> None:
    """Write the record of this call into a file of records. None: write nothing."""
    if file is None:
        return
    joined = re.sub(r"(^|\0)--json[\0=][^\0]*", "", "\0".join(sys.argv[1:])).strip("\0")
    options = joined.split("\0") if joined else []
    benchmark = Path(sys.argv[0]).stem
    found = [
        record
        for record in (read(file) if file.exists() else [])
        if (record.benchmark, record.options) != (benchmark, options)
    ]
    found.append(
        Record(
            benchmark,
            options,
            datetime.datetime.now(datetime.UTC).date().isoformat(),
            _commit(),
            _machine(),
            torch.__version__,
            list(rows),
        )
    )
    lines = [json.dumps(record._asdict(), ensure_ascii=False) for record in found]
    file.write_text("[\n" + ",\n".join(lines) + "\n]\n")


def read(file: Path) -> list[Record]:
    """Return the records of a file."""
    return [Record(**fields) for fields in json.loads(file.read_text())]


def _commit() -> str:
    """The commit of this checkout, with a plus if files were changed after it."""
    words = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty=+"]
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()


def _machine() -> str:
    """How many cores this machine has, of which model."""
    text = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    model = re.search(r"model name\s*:\s*(.+)", text)
    return f"{os.cpu_count()} cores of {model[1] if model else platform.machine()}"
