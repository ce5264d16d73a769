"""Log decisions with the logger ``funcpipe``. Nothing is shown unless the program configures it.

INFO: a new decision, such as the executor of a plan, or why a stage was not compiled. DEBUG: the
same decision again, for each run. Single actions are not logged.
"""

from __future__ import annotations

import logging
from typing import Any

from funcpipe._src.core.remembered import Remembered

log = logging.getLogger("funcpipe")  # the logger of the package

log.addHandler(logging.NullHandler())


_said: Remembered[object, set[Any]] = Remembered(lambda _: set())


def decided(subject: object, message: str, *arguments: object) -> None:
    """Log a decision about an object: at INFO if it is new, at DEBUG if it is repeated.

    Args:
        subject: the object. Compared by identity, and referenced weakly.
        message: the message, with ``%s`` for each argument. Formatted only if a handler needs it.
        arguments: the arguments; hashable.
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
