"""What objects show in a notebook: what they say of themselves, as HTML; pictures are the room
`view`'s.

The HTML inherits text colour and background, so it fits a light page or a dark one, and scrolls
where it is too wide.
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
"""The same for every object: several of them in one page cannot disturb each other."""


@singledispatch
def picture(thing: object) -> str:
    """The picture of a thing, as HTML; "" where it has none.

    This room knows no pictures. `view/draw.py` says here what those of schedules, plans and
    timelines are.
    """
    return ""


def shown(method: Callable[[T], str]) -> Callable[[T], str | None]:
    """A ``_repr_html_`` that gives None, for which a notebook takes the words of ``repr``, instead
    of an error."""

    @wraps(method)
    def html(self: T) -> str | None:
        try:
            return method(self)
        except Exception:
            return None

    return html


def page(kind: str, facts: Facts, *parts: str) -> str:
    """What an object says of itself, and further parts below it."""
    pairs = "".join(
        f"<dt>{escape(name)}</dt><dd>{escape(words)}</dd>" for name, words in facts if words
    )
    body = "".join(f'<div class="wide">{part}</div>' for part in parts if part)
    return (
        f'<div class="funcpipe-shown"><style>{_STYLE}</style><p class="name">{escape(kind)}</p>'
        f"{f'<dl>{pairs}</dl>' if pairs else ''}{body}</div>"
    )
