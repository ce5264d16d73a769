"""How large the package is, by folder: lines, files, the longest function, comments.

    python tests/benchmarks/bench_size.py [--at COMMIT]

Lines are those that ``ruff format --line-length 100`` makes, so an older commit is formatted first.
A comment is a line that begins with ``#``; docstrings and blank lines are counted apart.
"""

from __future__ import annotations

import argparse
import ast
import subprocess
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

from results import add_option, write

ROOT = Path(__file__).parents[2]


def docstring_lines(tree: ast.AST) -> int:
    """The lines of strings that stand as statements."""
    return sum(
        (node.end_lineno or node.lineno) - node.lineno + 1
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


def longest_function(tree: ast.AST) -> int:
    """The lines of the longest function, 0 if there is none."""
    kinds = ast.FunctionDef, ast.AsyncFunctionDef
    spans = (
        (node.end_lineno or node.lineno) - node.lineno + 1
        for node in ast.walk(tree)
        if isinstance(node, kinds)
    )
    return max(spans, default=0)


def rows_of(package: Path) -> list[dict[str, Any]]:
    """One row per folder of a package, and one of all."""
    folders: dict[str, list[Path]] = defaultdict(list)
    for path in sorted(package.rglob("*.py")):
        parts = [part for part in path.relative_to(package).parts[:-1] if part != "_src"]
        folders[parts[0] if parts else "public modules"].append(path)
    folders["all"] = [path for paths in folders.values() for path in paths]
    rows: list[dict[str, Any]] = []
    for name, paths in folders.items():
        texts = [path.read_text() for path in paths]
        trees = [ast.parse(text) for text in texts]
        lines = [line.strip() for text in texts for line in text.splitlines()]
        rows.append(
            {
                "folder": name,
                "files": len(paths),
                "lines": len(lines),
                "docstrings": sum(map(docstring_lines, trees)),
                "blank": lines.count(""),
                "comments": sum(line.startswith("#") for line in lines),
                "longest": max(map(longest_function, trees)),
            }
        )
    return rows


def main() -> None:
    """Count, print, record."""
    assert __doc__
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--at", default="", help="a commit, in place of the files here")
    add_option(parser)
    given = parser.parse_args()
    if not given.at:
        rows = rows_of(ROOT / "funcpipe")
    else:
        with tempfile.TemporaryDirectory() as folder:
            archive = ["git", "-C", str(ROOT), "archive", given.at, "funcpipe"]
            files = subprocess.run(archive, capture_output=True, check=True).stdout
            subprocess.run(["tar", "-x", "-C", folder], input=files, check=True)
            ruff = ["ruff", "format", "-q", "--isolated", "--line-length", "100", folder]
            subprocess.run(ruff, check=True)
            rows = rows_of(Path(folder) / "funcpipe")
    for row in rows:
        print(", ".join(f"{key} {value}" for key, value in row.items()))
    write(given.json, rows)


if __name__ == "__main__":
    main()
