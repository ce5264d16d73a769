"""Find the buffers that a module's forward writes, also by operations that do not change a
tensor's version."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from funcpipe._src.core.errors import PlanError
from funcpipe._src.core.torch_names import FakeTensor, FunctionalTensor, was_written
from funcpipe._src.core.torch_names import version as writes_into
from funcpipe._src.core.tree import under_transform

T = TypeVar("T")


class NormCall(NamedTuple):
    """The arguments of a torch norm that writes running statistics, by torch's names."""

    input: Tensor
    running_mean: Tensor | None = None
    running_var: Tensor | None = None
    weight: Tensor | None = None
    bias: Tensor | None = None
    training: bool = False
    momentum: float = 0.1
    eps: float = 1e-5


_HIGH = ["input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps"]
_LOW = ["input", "weight", "bias", "running_mean", "running_var", "training", "momentum", "eps"]
BATCH_NORMS: Mapping[Any, Sequence[str]] = {F.batch_norm: _HIGH, torch.batch_norm: _LOW}
"""Functions that write running statistics of a batch, with their arguments. These writes do not
change versions."""

NORMS: Mapping[Any, Sequence[str]] = {
    **BATCH_NORMS,
    F.instance_norm: _HIGH,
    torch.instance_norm: _LOW,
}
_DEFAULTS = {F.instance_norm: {"training": True}}


def norm_call(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> NormCall:
    """The arguments of a call of one of the `NORMS` by name."""
    named: dict[str, Any] = {
        **_DEFAULTS.get(func, {}),
        **dict(zip(NORMS[func], args, strict=False)),
        **kwargs,
    }
    named["training"] = named.pop("use_input_stats", named.get("training", False))
    return NormCall(**{name: named[name] for name in NormCall._fields if name in named})


class _RefuseNorms(TorchFunctionMode):
    """A mode that raises PlanError for norms that would write ``buffers``, before they write."""

    def __init__(self, buffers: Mapping[str, Tensor], who: str) -> None:
        super().__init__()
        self.buffers, self.who = buffers, who

    def __torch_function__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func in NORMS:
            call = norm_call(func, args, kwargs or {})
            written = {id(call.running_mean), id(call.running_var)} if call.training else ()
            names = [name for name, buffer in self.buffers.items() if id(buffer) in written]
            refuse_writes(self.who, names)
        return func(*args, **(kwargs or {}))


def looked_at(forward: Callable[[], T], buffers: Mapping[str, Tensor], who: str) -> tuple[T, bool]:
    """Run a forward that must not write its buffers. Returns its result, and whether their bits
    could be compared.

    Versions are not enough, because torch's norms and writes into ``.data`` do not change them. A
    norm raises PlanError before it writes, other writes raise afterwards.
    """
    before = _snapshot(buffers)
    with _RefuseNorms(buffers, who):
        result = forward()
    if before is None:
        return result, False
    after = _snapshot(buffers) or {}
    refuse_writes(who, [name for name, old in before.items() if not _same(old, after.get(name))])
    return result, True


def refuse_writes(who: str, names: Sequence[str]) -> None:
    """Raise PlanError if there are any names of buffers that a forward writes."""
    if names:
        raise PlanError(
            f"the forward of {who} writes into its buffers {list(names)}, but results must not "
            "depend on the order of microbatches; only batch norm layers (nn.BatchNorm and its "
            "subclasses) are deferred automatically. Trace the model with fp.split(model, ..., "
            "example=...), which accepts writes that do not depend on the inputs, and other "
            "writes with commit=; or write a function stage that returns statistics in "
            "Out(stats=...) and folds them in commit=... (see fp.models.batch_norm); or put the "
            "layer in evaluation mode"
        )


def version(tensor: Tensor | None) -> int:
    """The number of writes into a tensor; 0 under inference mode, where torch does not count."""
    return 0 if tensor is None or tensor.is_inference() else writes_into(tensor)


def has_numbers(tensor: Tensor) -> bool:
    """Whether a tensor has numbers: it belongs to no trace and is not on meta."""
    return not (isinstance(tensor, (FakeTensor, FunctionalTensor)) or tensor.is_meta)


def _snapshot(buffers: Mapping[str, Tensor]) -> dict[str, Any] | None:
    """Record the contents of buffers, to detect writes. None: no comparison is possible."""
    capturing = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
    if under_transform() or capturing:
        return None
    if all(map(has_numbers, buffers.values())):
        plain = {name: buffer for name, buffer in buffers.items() if _is_plain(buffer)}
        return {name: _bits(buffer).clone() for name, buffer in plain.items()}
    if all(isinstance(buffer, FunctionalTensor) for buffer in buffers.values()):
        # A stage is being compiled.
        return {name: was_written(buffer) for name, buffer in buffers.items()}
    return None


def _same(old: Any, new: Any) -> bool:
    if isinstance(old, Tensor) and isinstance(new, Tensor):
        return torch.equal(old, new)
    return bool(old == new)


def _bits(buffer: Tensor) -> Tensor:
    """The numbers of a buffer as integers, because NaN differs from itself."""
    flat = buffer.detach().resolve_conj().resolve_neg().reshape(-1)
    dtype = {1: torch.int8, 2: torch.int16, 4: torch.int32}.get(flat.element_size(), torch.int64)
    return flat.view(dtype)


def _is_plain(buffer: Tensor) -> bool:
    return (
        type(buffer) in (Tensor, nn.Parameter)
        and buffer.layout is torch.strided
        and not buffer.is_quantized
    )
