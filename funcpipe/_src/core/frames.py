"""Find the module calls and ``torch.utils.checkpoint`` regions on this thread's Python stack.

Torch has no hook for the begin and end of calls of foreign modules. Functions are recognized by
their code objects, which are public, not by names of files or functions. Calls are distinguished by
the dict of their ``**kwargs``, because Python makes a new dict for each call.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from types import CodeType, FrameType, GeneratorType
from typing import Any, NamedTuple

import torch.utils.checkpoint
from torch import nn

from funcpipe._src.core.torch_names import run_again

MODULE_CALL: CodeType = nn.Module.__call__.__code__  # the code object of a module's call


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
"""The code objects of ``checkpoint(function, ...)`` and of ``checkpoint(...)(function)``."""


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


class Region(NamedTuple):
    """A ``torch.utils.checkpoint`` region that a frame runs."""

    # An object that all computations of the region share, and no other region has. It lives as long
    # as the region can be computed again.
    identity: Any
    # A value that identifies this recomputation among those of the region. None: the frame runs the
    # region for the first time.
    repetition: Any


_GLOBALS: dict[str, Any] = torch.utils.checkpoint.__dict__
_REENTRANT: Any = torch.utils.checkpoint.CheckpointFunction
_FIRST: CodeType = _REENTRANT.forward.__code__
_AGAIN: CodeType = _REENTRANT.backward.__code__
_RUN_AGAIN: CodeType | None = getattr(inspect.unwrap(run_again), "__code__", None)


def region_of(frame: FrameType) -> Region | None:
    """Return the region that a frame runs. None: the frame belongs to no region."""
    if frame.f_globals is not _GLOBALS:
        return None
    if frame.f_code is _RUN_AGAIN:
        own = own_dict(frame)  # in the value, so that no later dict gets its id
        return Region(frame.f_locals[frame.f_code.co_varnames[0]], (id(own), own))
    if frame.f_code is _FIRST or frame.f_code is _AGAIN:
        # The ctx of the autograd.Function. A later frame may get the id again, but torch computes a
        # reentrant region to its end, so a finished recomputation is not taken for a new one.
        again = frame.f_code is _AGAIN
        return Region(frame.f_locals[frame.f_code.co_varnames[0]], id(frame) if again else None)
    # A frame that calls the function has a generator, which made a new recompute_fn for the region.
    for value in frame.f_locals.values():
        if isinstance(value, GeneratorType) and value.gi_frame is not None:
            function = value.gi_frame.f_locals.get("recompute_fn")
            return None if function is None else Region(function, None)
    return None
