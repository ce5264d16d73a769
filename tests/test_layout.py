"""The house: who may import whom, how large a file may be, what the face shows."""

from __future__ import annotations

import ast
import builtins
import collections
import dataclasses
import functools
import pkgutil
import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import TypeGuard

import pytest

import funcpipe as fp

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "funcpipe"
SOURCE = PACKAGE / "_src"
FILES = sorted(PACKAGE.rglob("*.py"))

# What each folder of _src may import besides itself, from the bottom up. The four folders of a run
# (engine, optimizing, replicas, processes) import each other: they are one layer.
NUMBERS = {"core", "data", "schedules"}
RUN = {"engine", "optimizing", "replicas", "processes"}
ALLOWED = {
    "core": set(),
    "data": {"core"},
    "schedules": {"core", "data"},
    "lower": NUMBERS,
    "view": NUMBERS | {"lower"},
    "search": NUMBERS | {"view"},
    "devices": {"core", "data"},
    "stages": {"core", "data", "devices"},
    "batch": NUMBERS | {"stages"},
    **{folder: NUMBERS | {"lower", "devices", "stages", "batch"} | RUN for folder in RUN},
    "models.norms": {"core"},
    "models.traced": {"core", "data", "models", "models.norms"},
    "models.layers": {"core", "data", "models", "models.norms", "models.traced"},
    "models": {
        "core",
        "data",
        "search",
        "batch",
        "engine",
        "models.norms",
        "models.traced",
        "models.layers",
    },
    "compiled": {"core", "data", "devices", "stages", "engine"},
    "measuring": {"core", "data", "lower", "stages", "engine", "models"},
    "pipe": NUMBERS | {"lower", "devices", "stages", "batch", "engine", "models", "models.norms"},
    "prefetch": {"core", "data", "devices", "stages", "engine"},
    "testing": {"core", "data", "lower", "stages", "batch", "engine"},
    "checkpoints": {"core", "data", "models"},
    "cli": {"core", "data", "view"},
}
WITHOUT_TORCH = {"schedules", "lower", "view", "search"}
FACES_OF_FILES = {
    "__init__.py",
    "__main__.py",
    "batches.py",
    "cli.py",
    "models.py",
    "optim.py",
    "schedules.py",
    "testing.py",
    "typing.py",
}
FILES_OF_A_FOLDER = 25
STANDARD = 560


@functools.cache
def tree_of(path: Path) -> ast.Module:
    """The syntax of a file; not at import, because both workers import this file."""
    return ast.parse(path.read_text())


def imports(path: Path) -> set[str]:
    """Every module that a file imports, anywhere in it."""
    found: set[str] = set()
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert 0 == node.level, f"{path}: relative import"
            found.add(node.module or "")
    return found


def folder_of(module: str) -> str:
    """The folder of a module of ``_src``: ``models`` has folders of its own."""
    *folders, _ = module.removeprefix("funcpipe._src.").split(".")
    return ".".join(folders)


def for_each_file(check: Callable[[Path], None]) -> Callable[[], None]:
    """Make one test of a check of each file, because thousands of small tests take long."""

    def test() -> None:
        faults: dict[str, str] = {}
        for path in FILES:
            try:
                check(path)
            except AssertionError as error:
                faults[str(path.relative_to(PACKAGE))] = str(error)
        assert {} == faults

    test.__doc__ = check.__doc__
    return test


def folder(path: Path) -> str:
    return folder_of("funcpipe." + ".".join(path.relative_to(PACKAGE).with_suffix("").parts))


@for_each_file
def test_imports_go_down(path):
    """A folder imports only the folders below it, and no public module."""
    if path.parent == PACKAGE:
        assert path.name in FACES_OF_FILES
        return
    ours = {name for name in imports(path) if name.split(".")[0] == "funcpipe"}
    if folder(path) == "cli":  # a user of the public names
        ours.discard("funcpipe")
    assert all(name.startswith("funcpipe._src.") for name in ours), (
        "a folder does not import a public module"
    )
    if path.name == "__init__.py":
        assert not ours
        return
    folders = {
        name.removeprefix("funcpipe._src.") if is_folder(name) else folder_of(name) for name in ours
    }
    assert set() == folders - ALLOWED[folder(path)] - {folder(path)}


def is_folder(module: str) -> bool:
    return (ROOT / module.replace(".", "/")).is_dir()


def test_folders_are_small():
    """No folder has so many files that its listing does not fit on a screen."""
    count = collections.Counter(path.parent for path in FILES)
    assert {} == {str(where): n for where, n in count.items() if n > FILES_OF_A_FOLDER}


LINES = {
    "models": 9_010,
    "engine": 6_000,
    "data": 4_735,
    "processes": 4_465,
    "stages": 3_875,
    "core": 3_340,
    "compiled": 3_245,
    "search": 3_170,
    "schedules": 2_840,
    "view": 2_485,
    "optimizing": 2_185,
    "batch": 1_825,
    "prefetch": 1_885,
    "testing": 1_720,
    "measuring": 1_740,
    "checkpoints": 1_195,
    "pipe": 1_040,
    "replicas": 1_045,
    "devices": 1_055,
    "lower": 890,
    "cli": 800,
    "public modules": 755,
}
"""The most lines of each folder. A folder that needs more gets them from another folder."""


def test_folders_keep_to_their_lines():
    """The package does not grow unseen: who raises a limit lowers another one, with a reason in the
    commit."""
    lines: collections.Counter[str] = collections.Counter()
    for path in FILES:
        parts = [part for part in path.relative_to(PACKAGE).parts[:-1] if part != "_src"]
        lines[parts[0] if parts else "public modules"] += path.read_text().count("\n")
    assert {} == {name: n for name, n in lines.items() if n > LINES[name]}


@for_each_file
def test_lines_are_at_most_100_columns(path):
    """No line is kept from the formatter; text that it cannot wrap is wrapped by hand.

    Pragmas may stand behind a line. Lines of texts (examples in docstrings, help with columns) may
    have 125 columns, because a line break would change what they say.
    """
    lines = path.read_text().split("\n")
    assert not [line for line in lines if "fmt: " in line]
    texts = {
        number
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
        for number in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    limits = [125 if number in texts else 100 for number in range(1, len(lines) + 1)]
    bare = [re.split(r"  # (?:noqa|pyright)", line)[0] for line in lines]
    assert [] == [line for line, limit in zip(bare, limits, strict=True) if len(line) > limit]


def test_no_line_of_a_test_is_kept_from_the_formatter():
    kept = f"# {'fmt'}: "
    assert [] == [
        str(path) for path in Path(__file__).parent.rglob("*.py") if kept in path.read_text()
    ]


@for_each_file
def test_foreign_imports(path):
    """Only core/tree.py imports optree; schedules, lower and view never import torch; no plotting
    or solver."""
    tops = {name.split(".")[0] for name in imports(path)}
    assert ("optree" in tops) == (path == SOURCE / "core" / "tree.py")
    if folder(path) in WITHOUT_TORCH:
        assert "torch" not in tops
    assert not {"matplotlib", "ortools", "plotly", "pandas", "numpy"} & tops


NAMES = SOURCE / "core" / "torch_names.py"
PUBLIC = {
    "_replace",
    "_asdict",
    "_fields",
    "_getframe",
    "_current_frames",
}  # of named tuples and of sys


def is_private(name: str) -> bool:
    return len(name) > 1 and name.startswith("_") and not name.startswith("__")


def is_method(node: ast.AST) -> TypeGuard[ast.FunctionDef]:
    return isinstance(node, ast.FunctionDef) and [arg.arg for arg in node.args.args[:1]] in (
        ["self"],
        ["cls"],
    )


def own_names(tree: ast.AST) -> set[str]:
    """The private names that a file defines: functions, classes, variables, attributes of its own
    objects, slots."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif (
            isinstance(node, ast.Attribute)
            and isinstance(node.ctx, ast.Store)
            and ast.unparse(node.value) in {"self", "cls"}
        ):
            found.add(node.attr)
        elif isinstance(node, ast.Assign) and "__slots__" in {
            ast.unparse(target) for target in node.targets
        }:
            found |= set(ast.literal_eval(node.value))
    return {name for name in found if is_private(name)}


def private_names_of_torch(tree: ast.AST) -> list[str]:
    """What a file has of torch's private names, by line.

    Names that core/torch_names.py uses are torch's even in a string, for getattr.
    """
    known, ours = known_and_ours()
    found: list[tuple[int, str]] = []
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            module = node.module or "" if isinstance(node, ast.ImportFrom) else ""
            names = [f"{module}.{alias.name}".strip(".") for alias in node.names]
            found += [
                (node.lineno, n)
                for n in names
                if n.startswith("torch") and any(map(is_private, n.split(".")))
            ]
        elif isinstance(node, ast.Attribute) and is_private(node.attr):
            operation = ast.unparse(node.value).endswith(
                "aten"
            )  # their names stand in every graph, and torch keeps them
            if not operation and (node.attr in known or node.attr not in ours | PUBLIC):
                found.append((node.lineno, ast.unparse(node)))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            if node.value in known or re.fullmatch(r"torch(\.\w+)*\._\w[\w.]*", node.value):
                found.append((node.lineno, repr(node.value)))
        elif is_method(node) and node.name in known:
            found.append((node.lineno, f"def {node.name}"))
    return [f"line {line}: {name}" for line, name in found]


def names_used(tree: ast.AST) -> set[str]:
    """The private names that a file reads or overrides, in strings too."""
    found: set[str] = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and re.fullmatch(r"[\w.]+", node.value)
        ):
            found |= set(node.value.split("."))
        elif is_method(node):
            found.add(node.name)
    return {name for name in found if is_private(name)}


@functools.cache
def known_and_ours() -> tuple[set[str], set[str]]:
    """The private names in core/torch_names.py, and those that the other files define."""
    ours = (own_names(tree_of(path)) for path in FILES if path != NAMES)
    return names_used(tree_of(NAMES)), set[str]().union(*ours)


@for_each_file
def test_private_names_of_torch_stand_in_one_file(path):
    """Nobody else imports, reads, overrides or spells a private name of torch."""
    if path == NAMES:
        return
    found = private_names_of_torch(tree_of(path))
    assert not found, (
        f"{path.name} uses private names of torch; give them an entry in core/torch_names.py: "
        f"{found}"
    )


@pytest.mark.parametrize(
    "code",
    [
        "import torch._dynamo",
        "from torch.utils import _pytree as pytree",
        "from torch._subclasses.fake_tensor import FakeTensor",
        "x = torch._C._data_address(t)",
        "x = tensor._version",
        "x = getattr(tensor, '_version')",
        "x = 'torch._C._nn'",
        "x = tensor._something_new",
        "class A(Module):\n def _apply(self, fn): pass",
        "self._modules.update(x)",
    ],
)
def test_a_private_name_of_torch_is_seen(code):
    """The test above can fail."""
    assert private_names_of_torch(ast.parse(code))


@for_each_file
def test_files_have_one_idea(path):
    """A file is short and its first line says what it is about."""
    assert path.read_text().count("\n") <= STANDARD
    first = ast.get_docstring(tree_of(path))
    assert first
    assert len(first.splitlines()[0]) <= 100


def test_a_class_has_a_name_of_its_own():
    """One word for one thing: no two classes or type aliases of the package share a name, hidden or
    not."""
    where: dict[str, list[str]] = collections.defaultdict(list)
    for path in FILES:
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.ClassDef):
                where[node.name.lstrip("_")].append(path.name)
            elif isinstance(node, ast.AnnAssign) and ast.unparse(node.annotation) == "TypeAlias":
                where[ast.unparse(node.target).lstrip("_")].append(path.name)
    assert {} == {name: files for name, files in where.items() if len(files) > 1}


FACES = [fp, fp.schedules, fp.batches, fp.models, fp.optim, fp.typing]


def public(face: ModuleType) -> dict[str, object]:
    """What a face exports, but for other public modules."""
    return {n: v for n, v in vars(face).items() if not n.startswith("_") and callable(v)}


@pytest.mark.parametrize("face", FACES, ids=lambda face: face.__name__)
def test_public_names_are_documented(face):
    """Every public name has a docstring of its own: dataclasses and named tuples make one up."""
    assert [] == [name for name, value in public(face).items() if not is_documented(value)]


def test_a_public_name_has_one_place():
    """What one face exports no other does, and the flat ones are what every program needs."""
    count = collections.Counter(name for face in FACES for name in public(face))
    assert [] == [name for name, times in count.items() if times > 1]
    assert len(public(fp)) < 60


def is_documented(value: object) -> bool:
    text = getattr(value, "__doc__", None)
    return bool(text) and not text.startswith(f"{getattr(value, '__name__', '')}(")


def test_made_up_docstrings_are_seen():
    """So the test above can fail."""
    pair = dataclasses.make_dataclass("Pair", ["first", "second"])
    triple = collections.namedtuple("triple", "a b c")
    assert not any(map(is_documented, (pair, triple, lambda: None)))
    assert is_documented(fp.run)


def test_no_public_name_hides_a_module():
    """``funcpipe.models`` is that file, whatever the flat names are."""
    modules = {module.name for module in pkgutil.iter_modules(fp.__path__)} - {"testing"}
    assert [] == sorted(modules & set(public(fp)))


def test_no_public_name_hides_a_builtin():
    """So that ``from funcpipe import *`` takes nothing away."""
    assert [] == sorted(set(public(fp)) & set(vars(builtins)))


def test_names_that_never_were_are_attribute_errors():
    with pytest.raises(AttributeError, match="has no attribute 'one_f_one_c'"):
        _ = fp.one_f_one_c
    assert not hasattr(fp, "distributed")


def test_import_is_light():
    """Importing funcpipe loads no plotting, solver, notebook or distributed package that torch does
    not load."""
    import subprocess
    import sys

    code = (
        "import torch, sys; before = set(sys.modules); import funcpipe; "
        "print(*sorted({m.split('.')[0] for m in set(sys.modules) - before}))"
    )
    loaded = set(
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout.split()
    )
    assert {"funcpipe", "optree"} <= loaded
    assert set() == loaded & {
        "matplotlib",
        "rich",
        "ortools",
        "sklearn",
        "numpy",
        "IPython",
        "pandas",
    }


def test_no_machine_is_named():
    """No committed file names a package host or a path of someone's machine."""
    for path in [*FILES, ROOT / "README.md", *ROOT.glob("docs/*.md"), ROOT / ".ci" / "run"]:
        assert not re.search(
            r"https?://(?!arxiv|github\.com|doi|www\.w3\.org)|/root/|/tmp/[a-z]", path.read_text()
        ), path
