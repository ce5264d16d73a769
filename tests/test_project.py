"""The habits of the project: what its files say of each other is so."""

from __future__ import annotations

import dataclasses
import inspect
import re
import textwrap
import tomllib
from pathlib import Path
from pkgutil import resolve_name

import funcpipe as fp
from funcpipe._src.schedules import families

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
EXTRAS = PROJECT["project"]["optional-dependencies"]


def lines(path: str) -> str:
    """A file without its comments."""
    return "\n".join(
        line.partition(" #")[0]
        for line in (ROOT / path).read_text().splitlines()
        if line[:1] != "#"
    )


def test_every_extra_that_is_named_exists():
    """README, the documents, CI and the extras themselves install only what pyproject.toml
    offers."""
    texts = [
        *ROOT.glob("*.md"),
        *ROOT.glob("docs/**/*.md"),
        ROOT / ".ci" / "run",
        ROOT / "pyproject.toml",
    ]
    found = [re.findall(r"(?:'\.|torch-funcpipe)\[([\w,]+)\]", path.read_text()) for path in texts]
    named = {extra for groups in found for group in groups for extra in group.split(",")}
    assert {"demo", "test", "docs", "dev"} <= named  # it finds them
    assert set() == named - EXTRAS.keys()


def test_the_version_stands_once_and_the_changelog_has_it():
    """pyproject.toml takes the version from the package; the newest entry of the changelog is about
    it."""
    assert "version" in PROJECT["project"]["dynamic"]
    assert {"attr": "funcpipe.__version__"} == PROJECT["tool"]["setuptools"]["dynamic"]["version"]
    entries = [
        line for line in (ROOT / "CHANGELOG.md").read_text().splitlines() if line.startswith("## ")
    ]
    found = [
        re.fullmatch(r"## \[(\d+\.\d+\.\d+)\] - (?:unreleased|\d{4}-\d\d-\d\d)", entry)
        for entry in entries
    ]
    assert all(found), entries
    assert found[0]
    assert fp.__version__ == found[0][1]


def test_the_workflow_runs_the_whole_check_and_nothing_else():
    """CI is .ci/run, on every Python from the oldest that is allowed."""
    workflow = lines(".github/workflows/ci.yml")
    assert ["bash .ci/run"] == re.findall(r"^ +- run: (.+)$", workflow, flags=re.M)
    assert 1 == workflow.count("run:")
    pythons = re.findall(r'"(3\.\d+)"', workflow)
    assert PROJECT["project"]["requires-python"] == f">={pythons[0]}"
    assert PROJECT["tool"]["basedpyright"]["pythonVersion"] == pythons[0]


def test_the_whole_check_lints_types_builds_the_site_and_tests():
    """No step of it was lost."""
    script = lines(".ci/run")
    for command in (
        "ruff check",
        "ruff format --check",
        "basedpyright",
        "sphinx-build -q -W",
        "readme_command 2",
        "python -m pytest -n 2 -m slow",
    ):
        assert f"\n{command}" in script or f' "$({command}' in script, command


def test_hooks_have_the_versions_of_the_extra_dev():
    """A commit is checked by the very linters that CI has."""
    pins = dict(pin.split("==") for pin in EXTRAS["dev"] if "==" in pin)
    hooks = re.findall(r"([\w-]+)==([\w.]+)", lines(".pre-commit-config.yaml"))
    assert {"ruff", "nbstripout"} == {name for name, _ in hooks}
    assert [] == [(name, version) for name, version in hooks if pins[name] != version]


def test_torch_is_the_same_in_all_commands():
    """README and CI name one version of torch; CONTRIBUTING this and the others that are tried,
    from the lowest allowed."""
    usual, tried = (
        set(re.findall(r"torch==([\d.]+)", lines(path)))
        for path in ("README.md", "CONTRIBUTING.md")
    )
    assert 1 == len(usual)
    assert usual <= tried
    (lowest,) = re.findall(r"torch>=([\d.]+)", " ".join(PROJECT["project"]["dependencies"]))
    versions = sorted([int(part) for part in one.split(".")] for one in tried)
    assert versions[0][:2] == [int(part) for part in lowest.split(".")]
    *older, newest = [f"{major}.{minor}" for major, minor, _ in versions]
    for path in ("README.md", "pyproject.toml"):
        assert f"torch {', '.join(older)} and {newest}" in (ROOT / path).read_text()


def test_the_licence_is_the_one_that_is_named():
    """The text is that of the three clauses, and every place that names a licence names this
    one."""
    text = (ROOT / "LICENSE").read_text()
    assert text.startswith("BSD 3-Clause License\n")
    assert re.findall(r"^(\d)\. ", text, flags=re.M) == ["1", "2", "3"]
    assert ("BSD-3-Clause", ["LICENSE"]) == (
        PROJECT["project"]["license"],
        PROJECT["project"]["license-files"],
    )
    assert all(
        "BSD-3-Clause" in (ROOT / path).read_text() for path in ("README.md", "CONTRIBUTING.md")
    )


def test_the_recipe_in_contributing_is_a_schedule():
    """The family that CONTRIBUTING writes is legal, ascending, and holds what it says."""
    found = re.search(
        r"^ +```python\n(.*?)^ +```", (ROOT / "CONTRIBUTING.md").read_text(), flags=re.M | re.S
    )
    assert found
    scope = dict(vars(families))
    exec(textwrap.dedent(found[1]), scope)
    schedule = scope["eager_one_f_one_b"](4, 8)
    fp.schedules.check(schedule)
    assert schedule.is_ascending
    assert (7, 5, 3, 1) == fp.simulate(schedule).peak


def documented_classes():
    """The classes that the reference describes."""
    for page in sorted((ROOT / "docs" / "reference").glob("*.md")):
        module = ""
        for line in page.read_text().splitlines():
            if found := re.match(r"\.\. (currentmodule|autoclass):: (\S+)", line):
                kind, name = found.groups()
                module = name if kind == "currentmodule" else module
                if kind == "autoclass":
                    yield resolve_name(f"{module}:{name}")


def test_the_reference_explains_every_field():
    """Of named tuples and dataclasses: the page shows their docstrings, not their comments."""
    missing = {}
    for kind in documented_classes():
        if dataclasses.is_dataclass(kind):
            names = [each.name for each in dataclasses.fields(kind)]
        else:
            names = getattr(kind, "_fields", ())
        text = inspect.getdoc(kind) or ""
        if "as given to `run`" in text:
            text += inspect.getdoc(fp.run) or ""
        explained = re.findall(r"^    (?:    )?([\w, ]+):", text, re.MULTILINE)
        known = {name.strip() for entry in explained for name in entry.split(",")}
        if left := [name for name in names if name not in known and not name.startswith("_")]:
            missing[kind.__name__] = left
    assert {} == missing
