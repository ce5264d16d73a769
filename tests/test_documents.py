"""What is printed runs: README's quickstart, doctests, the code of every page, the notebooks.

In a page, a ``text`` block right after a Python block is what that block prints, word for word. A
code cell is run like a Python block; what it shows is made when the site is built. To write the
``text`` blocks anew, after a deliberate change: ``FUNCPIPE_PAGES=write python -m pytest
tests/test_documents.py``, then look at the diff. The variable is the only way; nothing is ever
written without it.
"""

from __future__ import annotations

import contextlib
import doctest
import importlib
import importlib.util
import io
import os
import re
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch

import funcpipe as fp
import funcpipe.testing

FACES = [fp, fp.schedules, fp.batches, fp.models, fp.optim, fp.typing, funcpipe.testing]
ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
MODULES = [
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    for path in sorted((ROOT / "funcpipe").rglob("*.py"))
    if path.name not in ("__main__.py",)
]
# Not rglob: docs/notebooks is a link, and docs/_build may hold copies.
PAGES = [
    path
    for folder in (".", "howto", "internals", "reference")
    for path in sorted((DOCS / folder).glob("*.md"))
]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
WRITE = os.environ.get("FUNCPIPE_PAGES") == "write"
USUAL = {"torch": torch, "nn": torch.nn, "fp": fp, "funcpipe": funcpipe}
"""Names that examples may use: those of ``import torch``, ``from torch import nn``, ``import
funcpipe as fp``."""

BLOCK = re.compile(
    r"^```(?P<head>python\n|\{code-cell\}[^\n]*\n(?::[^\n]*\n)*)(?P<code>.*?)^```\n(?P<printed>\n```text\n.*?^```\n)?",
    flags=re.M | re.S,
)


def with_output(text: str, name: str) -> str:
    """The page with what its Python blocks print, where it shows that; the blocks run one after the
    other."""
    scope: dict[str, object] = {"__name__": "page"}

    def run(block: re.Match[str]) -> str:
        lines = "\n" * text[: block.start("code")].count(
            "\n"
        )  # so that a traceback names the page's own line
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(lines + block["code"], name, "exec", dont_inherit=True), scope)
        shown = f"\n```text\n{printed.getvalue()}```\n" if block["printed"] else ""
        return f"```{block['head']}{block['code']}```\n{shown}"

    return BLOCK.sub(run, text)


def test_quickstart_runs_as_printed():
    """README's program runs and draws what ran."""
    found = BLOCK.search((ROOT / "README.md").read_text())
    assert found
    command = [sys.executable, "-W", "error", "-c", found["code"]]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert 0 == done.returncode, done.stderr
    assert "measured in ms" in done.stdout


def test_readme_is_short():
    """README fits on two screens."""
    text = (ROOT / "README.md").read_text()
    assert text.count("\n") <= 80
    assert len(re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S).split()) <= 700


@pytest.mark.parametrize("name", MODULES)
def test_doctests(name):
    """Every example in a docstring gives what stands below it."""
    module = importlib.import_module(name)
    assert 0 == doctest.testmod(module, optionflags=doctest.ELLIPSIS, extraglobs=USUAL).failed


def test_examples_in_help_need_the_public_face_alone():
    """What `help()` of a public name shows can be typed by who has made the three usual imports,
    and nothing else."""
    finder, runner = doctest.DocTestFinder(), doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    lacking: set[str] = set()
    for face in FACES:
        for name in sorted(public(face)):
            thing = getattr(face, name)
            module = getattr(thing, "__module__", None)
            found = (
                finder.find(thing, name, module=sys.modules.get(module), globs=dict(USUAL))
                if module
                else []
            )
            for test in found:
                assert 0 == runner.run(test).failed, f"{face.__name__}.{test.name}"
            if isinstance(thing, types.FunctionType) and not any(test.examples for test in found):
                lacking.add(name)
    assert lacking == set()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(DOCS)))
def test_pages_run_as_printed(page, tmp_path, monkeypatch):
    """The Python blocks of a page run, and print what the page shows."""
    monkeypatch.chdir(tmp_path)  # pages may write files
    text = with_output(page.read_text(), str(page))
    if WRITE:
        page.write_text(text)
    assert page.read_text() == text


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_are_short_and_without_outputs(path):
    """The build of the site runs each of them, and a cell that raises ends it."""
    import nbformat

    notebook = nbformat.read(path, as_version=4)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert len(cells) < 15
    assert all(not cell.outputs and cell.execution_count is None for cell in cells)
    configuration = (DOCS / "conf.py").read_text()
    assert 'nb_execution_mode = "force"' in configuration
    assert "nb_execution_raise_on_error = True" in configuration


def public(module: object) -> set[str]:
    """The names that a module exports: those imported as themselves."""
    tree = Path(module.__file__).read_text()  # pyright: ignore
    names = re.findall(r" import (\w+) as \1$", tree, flags=re.M)
    return {name for name in names if not isinstance(getattr(module, name), types.ModuleType)}


@pytest.mark.parametrize("module", FACES, ids=lambda module: module.__name__)
def test_reference_has_every_public_name_once(module):
    """A new public name gets its place in docs/reference, a removed one leaves it."""
    text = "\n".join(page.read_text() for page in sorted((DOCS / "reference").glob("*.md")))
    current, listed = "", []
    for directive, name in re.findall(
        r"^\.\. (currentmodule|auto\w+|py:data):: ([\w.]+)$", text, flags=re.M
    ):
        if directive == "currentmodule":
            current = name
        elif current == module.__name__:
            listed.append(name)
    assert sorted(public(module)) == sorted(listed)


def test_tables_and_charts_are_written_by_the_report():
    """No figure is typed by hand: report.py makes them from records (``FUNCPIPE_PAGES=write``)."""
    path = ROOT / "tests" / "benchmarks" / "report.py"
    spec = importlib.util.spec_from_file_location("benchmarks_report", path)
    assert spec
    assert spec.loader
    report = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(report)
    if WRITE:
        report.write()
    for page in report.PAGES:
        assert page.read_text() == report.written(page.read_text())
    for name, chart in report.CHARTS.items():
        assert (report.PICTURES / name).read_text() == chart()


def test_every_folder_has_a_page():
    """One page of docs/internals begins with each folder of funcpipe/_src."""
    source = ROOT / "funcpipe" / "_src"
    folders = {path.parent.name for path in source.glob("*/__init__.py")}
    starts = [
        path.read_text().split("\n\n")[1] for path in sorted((DOCS / "internals").glob("*.md"))
    ]
    named = re.findall(r"`funcpipe/_src/(\w+)`", "\n".join(starts))
    assert sorted(folders) == sorted(named)


def test_every_error_is_explained():
    """docs/errors.md has a heading or a row for each class that users can catch."""
    text = (DOCS / "errors.md").read_text()
    classes = [
        name
        for name in public(fp)
        if isinstance(found := getattr(fp, name), type) and issubclass(found, Exception)
    ]
    assert len(classes) >= 6
    assert [] == [name for name in classes if f"`fp.{name}`" not in text]


@pytest.mark.parametrize(
    "page", [*PAGES, *sorted(ROOT.glob("*.md"))], ids=lambda page: str(page.relative_to(ROOT))
)
def test_files_that_pages_name_exist(page):
    """A path of ours in a page is one that is there; so is every relative link."""
    text = page.read_text()
    named = set(re.findall(r"`((?:funcpipe|tests|docs|notebooks)/[\w/.-]*\w)`", text))
    folders = "|".join(
        path.name for path in (ROOT / "funcpipe" / "_src").iterdir() if path.is_dir()
    )
    named |= {f"funcpipe/_src/{path}" for path in re.findall(rf"`((?:{folders})/\w+\.py)`", text)}
    assert [] == sorted(path for path in named if not (ROOT / path).exists())
    links = set(re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text))
    assert [] == sorted(link for link in links if not (page.parent / link).exists())
