"""Find the module calls and ``torch.utils.checkpoint`` regions on this thread's Python stack.

Torch has no hook for the begin and end of calls of foreign modules. Functions are recognized by
their code objects, which are public, not by names of files or functions. Calls are distinguished by
the dict of their ``**kwargs``, because Python makes a new dict for each call.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from types import CodeType, FrameType
from typing import Any

import torch.utils.checkpoint
from torch import nn

MODULE_CALL: CodeType = nn.Module.__call__.__code__
"""The code object of a module's call."""


def _region_codes() -> frozenset[CodeType]:
    checkpoint: Any = inspect.unwrap(torch.utils.checkpoint.checkpoint)
    codes = [checkpoint.__code__]
    try:
        curried = checkpoint(use_reentrant=False)(_region_codes)
        codes.append(type(curried).__call__.__code__)
    except TypeError:  # this form exists from torch 2.15 on
        pass
    return frozenset(codes)


REGIONS = _region_codes()
"""The code objects of ``checkpoint(function, ...)``, and of the callable that ``checkpoint(...)``
returns."""


def frames() -> Iterator[FrameType]:
    """Yield the frames of this thread, beginning with the caller's."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def own_dict(frame: FrameType) -> dict[Any, Any]:
    """Return the dict of a call's ``**kwargs``, which identifies the call."""
    call = inspect.getargvalues(frame)
    assert call.keywords is not None
    return call.locals[call.keywords]
