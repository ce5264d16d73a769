"""The site of the documents: ``sphinx-build -W docs docs/_build/html`` makes it; every warning is
an error.

The pages are Markdown as they lie in ``docs/`` and its folders; ``docs/notebooks`` is a link to the
notebooks, which are run when the site is built. The reference comes from the docstrings.
"""

from __future__ import annotations

import logging
import os
import re
from typing import Any

from docutils import nodes
from sphinx.domains.python import PyObject

import funcpipe

project = "funcpipe"
author = "the funcpipe developers"
copyright = "2026, the funcpipe developers"
release = version = funcpipe.__version__

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
]
exclude_patterns = ["_build", "**/.ipynb_checkpoints"]
language = "en"

# Markdown. Headings get anchors, so pages can point at a paragraph: [what to
# do](errors.md#placement).
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3

# Notebooks are committed without outputs. They run in the build, in a folder of their own; a
# failure ends the build. Not "cache": that would not see that the library has changed.
nb_execution_mode = "force"
os.environ["PYTHONWARNINGS"] = (
    "ignore:IProgress not found"  # of the kernels: no page shows a bar of tqdm
)
logging.getLogger("traitlets").setLevel(logging.WARNING)  # no line for each notebook with -j
nb_execution_timeout = 120
nb_execution_in_temp = True
nb_execution_raise_on_error = True
nb_merge_streams = True

# Docstrings: Google style; `name` in single backquotes points at the object where there is one.
default_role = "py:obj"
napoleon_numpy_docstring = False
napoleon_use_ivar = True  # attributes as a list; as entries of their own they would stand twice
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True

html_theme = "furo"
html_title = f"funcpipe {release}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True


def setup(app: Any) -> None:
    """Hooks of the build."""
    app.connect("doctree-read", mark_columns)
    app.connect("doctree-read", mark_options)
    app.connect("doctree-read", shorten_types)
    app.connect("autodoc-process-signature", shorten_defaults)
    app.connect("html-page-context", mend_links_of_sources)
    app.connect("autodoc-skip-member", skip_tuple_field)
    app.connect(
        "autodoc-process-docstring", hide_colon, priority=400
    )  # before napoleon, which has 500
    app.connect("autodoc-process-docstring", show_colon, priority=600)
    for field in PyObject.doc_field_types:
        if field.name == "variable":
            field.label = "Attributes"  # what everyone calls them


def mark_columns(app: Any, doctree: nodes.document) -> None:
    """Give printed text with columns, as of tables, pictures and programs, a class of its own: it
    is scrolled, not wrapped."""
    for block in doctree.findall(nodes.literal_block):
        text = block.astext()
        gaps = sum(bool(re.search(r"\S {2,}\S", line)) for line in text.splitlines())
        if gaps > 1 or "│" in text or re.match(r"def \w+\(", text):
            block["classes"].append("columns")


def mark_options(app: Any, doctree: nodes.document) -> None:
    """Give options such as ``--no-progress`` a class of their own: they are not broken."""
    for code in doctree.findall(nodes.literal):
        if re.match(r"--\w", code.astext()):
            code["classes"].append("option")


def shorten_types(app: Any, doctree: nodes.document) -> None:
    """Show a type by its last name also beside a Literal, where Sphinx makes no link of it."""
    for text in list(doctree.findall(nodes.Text)):
        if text.startswith("~funcpipe."):
            text.parent.replace(text, nodes.Text(text.rpartition(".")[2]))


def shorten_defaults(
    app: Any, what: str, name: str, thing: Any, options: Any, signature: Any, returned: Any
) -> tuple[Any, Any] | None:
    """Show a default that is a class by its name, and dots for one that has no text of its own."""
    signature = re.sub(r"<class '(?:\w+\.)*(\w+)'>", r"\1", signature or "") or None
    inner = r"(?:[^()<]|\([^()]*\))*"
    unprintable = rf"=(?:\w+\({inner}<{inner}.*?\)(?=[,)])|<\w+>)"
    return (re.sub(unprintable, "=...", signature), returned) if signature else None


def mend_links_of_sources(app: Any, page: str, template: str, context: Any, doctree: Any) -> None:
    """Let each [docs] of a page with source text find its entry: viewcode assumes that all names of
    a file are public in one module, and ours are in several."""
    known = app.env.domains.python_domain.objects

    def mended(found: re.Match[str]) -> str:
        own = re.sub(r"^(?:[a-z_]+\.)+", "", found[0])  # without the module
        return next((n for n in (found[0], *known) if n in known and n.endswith(own)), found[0])

    if page.startswith("_modules/funcpipe"):
        context["body"] = re.sub(r'(?<=#)funcpipe[\w.]+(?=">\[docs\])', mended, context["body"])


def skip_tuple_field(
    app: Any, what: str, name: str, thing: Any, skip: bool, options: Any
) -> bool | None:
    """The fields of a named tuple stand in its docstring; Python's own text for them says
    nothing."""
    return True if type(thing).__name__ == "_tuplegetter" else None


_COLON = "\0"


def hide_colon(app: Any, what: str, name: str, thing: Any, options: Any, lines: list[str]) -> None:
    """Napoleon takes what stands before a colon in the text of an attribute or of Returns for its
    type; ours is prose."""
    for number, line in enumerate(lines):
        first = number == 0 and what in ("attribute", "property")
        if first or (number and lines[number - 1].strip() == "Returns:"):
            lines[number] = line.replace(":", _COLON)


def show_colon(app: Any, what: str, name: str, thing: Any, options: Any, lines: list[str]) -> None:
    """Put the colons back, and show types by their last name, as in signatures."""
    for number, line in enumerate(lines):
        if line.startswith(":vartype"):
            line = re.sub(r"\b(?:\w+\.)+\w+", r"~\g<0>", line)
        lines[number] = line.replace(_COLON, ":")
