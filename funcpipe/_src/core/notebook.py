"""The HTML that objects show in a notebook: facts, tables and a place for pictures.

`view/draw.py` makes the pictures. The HTML inherits text colour and background, so it fits light
and dark pages. It scrolls if it is too wide.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import singledispatch, wraps
from html import escape
from typing import TypeVar

from funcpipe._src.core.shown import Facts

T = TypeVar("T")

_STYLE = (
    ".funcpipe-shown{font:13px/1.45 system-ui,-apple-system,'Segoe UI',Roboto,'Helvetica "
    "Neue',Arial,sans-serif;"
    "font-variant-numeric:tabular-nums}"
    ".funcpipe-shown .name{font-size:15px;font-weight:600;margin:0 0 6px}"
    ".funcpipe-shown .soft,.funcpipe-shown dt{opacity:.75}"
    ".funcpipe-shown dl{display:grid;grid-template-columns:max-content minmax(0,1fr);gap:2px "
    "16px;margin:0 0 8px}"
    ".funcpipe-shown dt{font-weight:400}"
    ".funcpipe-shown dd{margin:0;overflow-wrap:anywhere;white-space:pre-line}"
    ".funcpipe-shown .wide{overflow-x:auto}"
    ".funcpipe-shown "
    "table{border-collapse:collapse;background:none;color:inherit;font-size:13px;margin:0}"
    ".funcpipe-shown tr{background:none}"
    ".funcpipe-shown th,.funcpipe-shown td{padding:3px 14px 3px "
    "0;text-align:right;white-space:nowrap;"
    "border:0;border-bottom:1px solid rgba(128,128,128,.35)}"
    ".funcpipe-shown th{font-weight:400;opacity:.75;vertical-align:bottom}"
    ".funcpipe-shown .word{text-align:left}"
)
"""The style sheet. It is equal for all objects, so several objects on a page do not conflict."""


@singledispatch
def picture(thing: object) -> str:
    """Return the picture of an object as HTML; "" if it has none.

    `view/draw.py` registers the functions for schedules, plans and timelines, because `core` must
    not import `view`.
    """
    return ""


def shown(method: Callable[[T], str]) -> Callable[[T], str | None]:
    """Decorate a ``_repr_html_`` to return None, for a ``repr``, instead of raising."""

    @wraps(method)
    def html(self: T) -> str | None:
        try:
            return method(self)
        except Exception:
            return None

    return html


def page(kind: str, facts: Facts, *parts: str) -> str:
    """Return HTML with the facts about an object, and further parts below."""
    pairs = "".join(
        f"<dt>{escape(name)}</dt><dd>{escape(words)}</dd>" for name, words in facts if words
    )
    body = "".join(f'<div class="wide">{part}</div>' for part in parts if part)
    return (
        f'<div class="funcpipe-shown"><style>{_STYLE}</style><p class="name">{escape(kind)}</p>'
        f"{f'<dl>{pairs}</dl>' if pairs else ''}{body}</div>"
    )
