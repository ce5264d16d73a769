"""The house: who may import whom, how large a file may be, what the face shows."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import funcpipe as fp

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "funcpipe"
FILES = sorted(PACKAGE.rglob("*.py"))

# What each room may import besides itself: core < schedules < lower < view < lab, core < models, {core, lower} < runtime < programs.
ALLOWED = {
    "core": set(),
    "schedules": {"core"},
    "lower": {"core", "schedules"},
    "view": {"core", "schedules", "lower"},
    "lab": {"core", "schedules", "lower", "view"},
    "models": {"core"},
    "runtime": {"core", "schedules", "lower"},
    "programs": {"core", "lower", "runtime"},
    "pipe": {"core", "schedules", "lower", "lab", "models", "runtime"},
    "batches": {"core", "runtime"},
    "testing": {"core", "lower", "runtime"},
}
WITHOUT_TORCH = {"schedules", "lower", "view", "lab"}
FACE = {"__init__.py", "__main__.py", "cli.py", "cli_words.py", "demo.py"}
STANDARD = 420


def imports(path: Path) -> set[str]:
    """Every module that a file imports, anywhere in it."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert 0 == node.level, f"{path}: relative import"
            found.add(node.module or "")
    return found


def room(path: Path) -> str:
    parts = path.relative_to(PACKAGE).parts
    return parts[0] if len(parts) > 1 else ""


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_go_down(path):
    """A room imports only the rooms below it."""
    own = room(path)
    if not own:
        assert path.name in FACE
        return
    rooms = {name.split(".")[1] for name in imports(path) if name.startswith("funcpipe.")}
    assert set() == rooms - ALLOWED[own] - {own}
    assert "funcpipe" not in imports(path), "a room does not import the face"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_foreign_imports(path):
    """Only core/tree.py imports optree; schedules, lower and view never import torch; no plotting or solver."""
    tops = {name.split(".")[0] for name in imports(path)}
    assert ("optree" in tops) == (path == PACKAGE / "core" / "tree.py")
    if room(path) in WITHOUT_TORCH:
        assert "torch" not in tops
    assert not {"matplotlib", "ortools", "plotly", "pandas", "numpy"} & tops


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_files_have_one_idea(path):
    """A file is short and its first line says what it is about."""
    text = path.read_text()
    assert text.count("\n") <= STANDARD
    first = ast.get_docstring(ast.parse(text))
    assert first
    assert len(first.splitlines()[0]) <= 120


def test_public_names_are_documented():
    """Every public name has a docstring."""
    public = {name: value for name, value in vars(fp).items() if not name.startswith("_")}
    bare = [n for n, v in public.items() if callable(v) and not getattr(v, "__doc__", None)]
    assert [] == bare


def test_import_is_light():
    """Importing funcpipe loads no plotting, solver, notebook or distributed package that torch does not load."""
    import subprocess
    import sys

    code = "import torch, sys; before = set(sys.modules); import funcpipe; print(*sorted({m.split('.')[0] for m in set(sys.modules) - before}))"
    loaded = set(
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    )
    assert {"funcpipe", "optree"} <= loaded
    assert set() == loaded & {"matplotlib", "rich", "ortools", "sklearn", "numpy", "IPython", "pandas"}


def test_no_machine_is_named():
    """No committed file names a package host or a path of someone's machine."""
    for path in [*FILES, ROOT / "README.md", *ROOT.glob("docs/*.md"), ROOT / ".ci" / "run"]:
        assert not re.search(r"https?://(?!arxiv|github\.com|doi|www\.w3\.org)|/root/|/tmp/[a-z]", path.read_text()), (
            path
        )
