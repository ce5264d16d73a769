"""What is decided is logged under the name ``funcpipe``; nothing is shown unless the program asks
`logging` for it.

INFO is what was decided anew (who runs a plan, what was compiled or recorded, or why not), DEBUG
the same again, for each run. Nothing is logged for each action.
"""

from __future__ import annotations

import logging
from typing import Any

from funcpipe._src.core.remembered import Remembered

log = logging.getLogger("funcpipe")
"""The logger of the package."""

log.addHandler(logging.NullHandler())


def _nothing_yet(subject: object) -> set[Any]:
    return set()


_said = Remembered(_nothing_yet)


def decided(subject: object, message: str, *arguments: object) -> None:
    """Log a decision about an object: at INFO when it is new, at DEBUG when it is as it was before.

    Args:
        subject: what it is about; told by identity, and held weakly.
        message: with a ``%s`` for each argument, put together only if somebody reads it.
        arguments: hashable.
    """
    if log.isEnabledFor(logging.INFO):
        said = _said(subject)
        log.log(
            logging.DEBUG if (message, arguments) in said else logging.INFO,
            message,
            *arguments,
            stacklevel=2,
        )
        said.add((message, arguments))
