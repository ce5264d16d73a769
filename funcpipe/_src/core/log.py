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

    Objects are compared by identity. The message is formatted only if a handler needs it.
    """
    if log.isEnabledFor(logging.INFO):
        said = _said(subject)
        level = logging.DEBUG if (message, arguments) in said else logging.INFO
        log.log(level, message, *arguments, stacklevel=2)
        said.add((message, arguments))
