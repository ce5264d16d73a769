"""The calls of modules and regions of ``torch.utils.checkpoint`` that this thread is in, read from
the Python stack.

Torch does not say when a call of a module that is not ours begins or ends. Functions are known by
their code objects, which are public, and not by the names of files or functions. One call is told
from another by the dict of its ``**kwargs``, which Python makes anew for every call.
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
"""The code of a module's call."""


def _region_codes() -> frozenset[CodeType]:
    checkpoint: Any = inspect.unwrap(torch.utils.checkpoint.checkpoint)
    codes = [checkpoint.__code__]
    try:
        curried = checkpoint(use_reentrant=False)(_region_codes)
        codes.append(type(curried).__call__.__code__)
    except TypeError:  # torch 2.15 is the first that has this form
        pass
    return frozenset(codes)


REGIONS = _region_codes()
"""The codes of ``checkpoint(function, ...)``, and of the callable that ``checkpoint(...)``
returns."""


def frames() -> Iterator[FrameType]:
    """The frames of this thread, the caller's first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def own_dict(frame: FrameType) -> dict[Any, Any]:
    """The dict of a call's ``**kwargs``, which no other call has."""
    call = inspect.getargvalues(frame)
    assert call.keywords is not None
    return call.locals[call.keywords]
