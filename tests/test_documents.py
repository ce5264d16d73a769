"""What is printed runs: README's quickstart, doctests, the tutorial's code, the notebooks."""

from __future__ import annotations

import doctest
import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MODULES = [
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    for path in sorted((ROOT / "funcpipe").rglob("*.py"))
    if path.name not in ("__main__.py",)
]
PAGES = sorted((ROOT / "docs").glob("*.md"))
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


def blocks(text: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", text, flags=re.M | re.S)


def test_quickstart_runs_as_printed():
    """README's first block has at most ten lines and runs."""
    code = blocks((ROOT / "README.md").read_text())[0]
    assert len([line for line in code.splitlines() if line.strip()]) <= 10
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert 0 == done.returncode, done.stderr
    assert "makespan" in done.stdout


@pytest.mark.parametrize("name", MODULES)
def test_doctests(name):
    """Every example in a docstring gives what it says."""
    assert 0 == doctest.testmod(importlib.import_module(name), optionflags=doctest.ELLIPSIS).failed


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_pages_run_as_printed(page):
    """The Python blocks of a page run, one after the other."""
    scope: dict[str, object] = {"__name__": "page"}
    for code in blocks(page.read_text()):
        exec(compile(code, str(page), "exec"), scope)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_run(path):
    """A notebook runs from top to bottom, is short, and is committed without outputs."""
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(path, as_version=4)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert len(cells) < 15
    assert all(not cell.outputs and cell.execution_count is None for cell in cells)
    NotebookClient(notebook, timeout=100, kernel_name="python3", resources={"metadata": {"path": str(ROOT)}}).execute()
