"""All private names of torch that funcpipe uses, under plain names, with reason and substitute.

All names exist from torch 2.11, the oldest supported version, to 2.15. They are looked up at
import, which does not fail for missing names. If a name is missing, the substitute after *Without
it* takes its place, and one RuntimeWarning says what is lost. An entry without such words raises
`MissingName` when it is used. ``tests/core/test_torch_names.py`` tests the behaviour that funcpipe
relies on. ``tests/test_layout.py`` checks that no other file uses private names of torch.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx, nn

from funcpipe._src.core.torch_lookup import MissingName, Nothing, attribute, private

if TYPE_CHECKING:
    from torch._ops import OpOverload as OpOverload
    from torch.nn.modules.batchnorm import _BatchNorm
    from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode

# -- tensors

version: Callable[[Tensor], int] = attribute(
    Tensor, "_version", lost="writes in place would not be seen"
)
"""The number of writes to a tensor, which no public function returns; inference tensors have none."""

is_zero_tensor: Callable[[Tensor], bool] = private(
    "torch.Tensor._is_zerotensor",
    instead=lambda _: False,
    lost="zeros without memory are taken for ordinary tensors",
)
"""Whether a tensor is one of autograd's zeros, which have no memory. Without it: no tensor is."""

data_address: Callable[[Tensor], int] = private(
    "torch._C._data_address",
    instead=Tensor.data_ptr,
    lost="memory shared copy-on-write is copied at the first look",
)
"""The address of a tensor's memory. Without it: ``data_ptr``, which ends copy-on-write sharing."""

is_shared_lazily: Callable[[Tensor], bool] = private(
    "torch._C._is_cow_tensor",
    instead=lambda _: True,
    lost="what crosses streams, or moves, is copied once more",
)
"""Whether memory is shared copy-on-write: no stream can be recorded on it. Without it: True."""

lazy_clone: Callable[[Tensor], Tensor] = private(
    "torch._lazy_clone",
    instead=torch.clone,
    lost="stages get copies of what they are handed, at once",
)
"""A clone that takes memory at the first write; most copies see no write. Without it: a clone."""

lazy_clone_operation: Any = private(
    "torch.ops.aten._lazy_clone.default",
    instead=None,
    lost="the copies that it makes are not recognized",
)
"""`lazy_clone` as dispatch modes and graphs see it. Without it: None, which equals no operation."""

wrapper_tensor: Callable[..., Any] = private(
    "torch.Tensor._make_wrapper_subclass",
    lost="models cannot be cut at their blocks without a trace",
)
"""Makes a tensor of a subclass without own memory; torch's pages on extending it use this name."""

plain_function: Any = nn.Parameter.__torch_function__
"""The ``__torch_function__`` of a class that intercepts operations only, as ``nn.Parameter``."""

storage_number: Callable[[torch.UntypedStorage], int] = attribute(
    torch.UntypedStorage, "_cdata", lost="tensors that share memory would not be known"
)
"""A number that identifies a memory during its lifetime, also of fake tensors."""

storage_users: Callable[[int], int] = private(
    "torch._C._storage_Use_Count",
    instead=lambda _: 3,
    lost="the first gradient of each parameter is copied",
)
"""The number of users of the memory with a number, with the caller. Without it: 3, as if in use."""

_HOOKED = "hooks on a gradient, which a run does not call, are not refused"
_gradient_hooks: list[Callable[[Tensor], Any]] = [
    attribute(Tensor, name, instead=lambda _: None, lost=_HOOKED)
    for name in ("_backward_hooks", "_post_accumulate_grad_hooks")
]


def has_gradient_hooks(leaf: Tensor) -> bool:
    """Return whether there are hooks on a leaf's gradient; no public function says so. Without it:
    no."""
    return any(hooks(leaf) for hooks in _gradient_hooks)


copy_all: Callable[[Sequence[Tensor], Sequence[Tensor]], Any] = private(
    "torch._foreach_copy_",
    instead=lambda targets, sources: [*map(Tensor.copy_, targets, sources)],
    lost="inputs of recorded runs are copied by a kernel each",
)
"""Copy many tensors of a device with one kernel. Without it: one by one."""

# -- autograd's graphs

run_backward: Callable[..., Any] = private(
    "torch.autograd.Variable._execution_engine.run_backward",
    instead=lambda roots, cotangents, keep_graph, _, inputs, **__: torch.autograd.backward(
        roots, cotangents, keep_graph, inputs=inputs or None
    ),
    lost="backwards of small stages take longer",
)
"""``torch.autograd.backward`` without its checks, which slow small stages. Without it: checked."""

backward_number: Callable[[], int] = private(
    "torch._C._current_graph_task_id",
    instead=lambda: -1,
    lost="draws in a backward are not refused, and a pop that torch.utils.checkpoint repeats is "
    "not recognized",
)
"""The number of the backward that this thread runs in, or -1. Without it: -1."""


def function_of(node: Any) -> type:
    """Return the ``autograd.Function`` of a backward node, whose class does not know its module.
    Raises MissingName."""
    try:
        return type(node)._forward_cls  # pyright: ignore[reportAttributeAccessIssue]
    except AttributeError:
        raise MissingName(
            f"torch {torch.__version__} has no _forward_cls, which names a custom function"
        ) from None


SavedTensor: type[Any] = private(
    "torch._C._autograd.SavedTensor",
    instead=Nothing,
    lost="the inputs of checkpointed regions stay on the device when a stage is offloaded",
)
"""Autograd's handle of a saved tensor. Without it: no object is a handle."""


def saved_names(kind: type) -> tuple[tuple[str, str], ...]:
    """Return the attributes of a node class for saved tensors, as (handles, tensors).

    An operation has ``_raw_saved_self`` and ``_saved_self``, a Function ``_raw_saved_tensors`` and
    ``saved_tensors``. Public hooks would run in each forward; handles can change a graph later.
    Without it: none.
    """
    handles = [name for name in dir(kind) if name.startswith("_raw_saved_")]
    return tuple((name, name[4:] if hasattr(kind, name[4:]) else name[5:]) for name in handles)


def inputs_of_region(unpack_hook: Any) -> Iterator[tuple[Any, Tensor]]:
    """Yield (handle, tensor) for the saved inputs of a ``torch.utils.checkpoint`` region.

    The closure of the region's unpack hook contains the region. Torch 2.11 keeps the inputs in a
    node, later versions in a list. Without these: nothing, and the inputs stay on the device.
    """
    for cell in getattr(unpack_hook, "__closure__", None) or ():
        region = cell.cell_contents
        for handle in getattr(region, "saved_args", ()):
            if isinstance(handle, SavedTensor) and handle.unpack_hook is None:
                yield handle, handle.unpack()
        node = getattr(getattr(region, "input_saver", None), "grad_fn", None)
        handles = getattr(node, "_raw_saved_tensors", ())
        if node is not None and all(handle.unpack_hook is None for handle in handles):
            yield from zip(handles, node.saved_tensors, strict=True)


run_again: Callable[..., Any] = private(
    "torch.utils.checkpoint._run_fn_with_dynamo_disabled",
    instead=Nothing,
    lost="torch.utils.checkpoint regions that draw random numbers are refused in backwards",
)
"""The function through which torch computes a region again. Without it: one that no frame runs."""

top_saved_hooks, pop_saved_hooks, push_saved_hooks = (
    private(
        f"torch._C._autograd._{verb}_saved_tensors_default_hooks",
        instead=None,
        lost="fp.Pipe cannot be called under hooks on saved tensors, as in torch.utils.checkpoint",
    )
    for verb in ("top", "pop", "push")
)
"""The stack of hooks on saved tensors. Without it: None, and `fp.Pipe` raises under hooks."""

# -- modes, dispatcher, operations

if not TYPE_CHECKING:
    TorchDispatchMode = private(
        "torch.utils._python_dispatch.TorchDispatchMode", lost="operations would not be seen"
    )
"""The base class of dispatch modes; torch's pages on extending it import it by this path."""


class WatchingMode(TorchDispatchMode):
    """A dispatch mode that torch's compiler ignores. Others import the compiler, for seconds."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


without_modes: Callable[[], AbstractContextManager[Any]] = private(
    "torch.utils._python_dispatch._disable_current_modes",
    lost="an operation would be taken for one of a model",
)
"""A context in which no dispatch mode sees operations."""

_MODES = "a run is not refused under modes of its caller, which its threads do not have"
_modes: dict[str, tuple[Callable[[], int], Callable[[int], Any]]] = {
    kind: (
        private(f"torch._C._len_torch_{kind}_stack", instead=lambda: 0, lost=_MODES),
        private(f"torch._C._get_{kind}_stack_at", instead=None, lost=_MODES),
    )
    for kind in ("function", "dispatch")
}


def modes_on(kind: str) -> list[Any]:
    """Return the "function" or "dispatch" modes of this thread. Without it: none."""
    count, mode_at = _modes[kind]
    return [mode_at(place) for place in range(count())]


DeviceContext: type[Any] = private(
    "torch.utils._device.DeviceContext",
    instead=Nothing,
    lost="runs inside `with torch.device(...)` are refused",
)
"""The mode of a default device, which a run passes to its threads. Without it: no mode is one."""

transforms: Callable[[], Any] = private(
    "torch._C._functorch.peek_interpreter_stack",
    instead=lambda: None,
    lost="runs are not refused under torch.func, and stages may be slower there",
)
"""The innermost transform of torch.func around this call, or None. Called for each value, so it
must be fast. Without it: None."""

_LOST = "stages with forward-mode derivatives are not refused on threads"
_dual_levels: Any = private("torch._functorch.predispatch", instead=None, lost=_LOST)
_ENTER = "_enter_dual_level_impl"
FORWARD_MODE: Sequence[tuple[Any, str]] = [
    # Torch 2.11 has the public function alone.
    (_dual_levels, _ENTER)
    if hasattr(_dual_levels, _ENTER)
    else (torch.autograd.forward_ad, "enter_dual_level"),
    (
        private("torch.autograd.forward_ad._set_fwd_grad_enabled", instead=None, lost=_LOST),
        "__init__",
    ),
]
"""(owner, attribute) of functions that begin forward-mode derivatives. Without: None as owner."""


def in_forward_mode() -> bool:
    """Return whether any thread computes forward-mode derivatives now."""
    return getattr(torch.autograd.forward_ad, "_current_level", 0) >= 0


_FUNC = "models cut at their blocks do not run under torch.func"
_is_wrapped: Callable[[Tensor], bool] = private(
    "torch._C._functorch.is_functorch_wrapped_tensor", instead=lambda _: False, lost=_FUNC
)
_unwrapped: Callable[[Tensor], Tensor] = private(
    "torch._C._functorch.get_unwrapped", instead=lambda t: t, lost=_FUNC
)


def innermost_tensor(tensor: Tensor) -> Tensor:
    """Return the tensor inside all wrappers of torch.func. Without the names: the tensor itself."""
    while _is_wrapped(tensor):
        tensor = _unwrapped(tensor)
    return tensor


if not TYPE_CHECKING:
    OpOverload = type(torch.ops.aten.alias.default)
"""The class of operations, ``torch._ops.OpOverload``, found through a public name."""

HigherOrderOperator: type[Any] = private(
    "torch._ops.HigherOrderOperator", lost="regions in graphs would not be known"
)
"""The class of operations that call functions."""

schema: Callable[[Any], Any] = attribute(
    torch.ops.aten.alias.default,
    "_schema",
    lost="what operations take and write would not be known",
)
"""The arguments, results and writes of an operation; public only as text."""

_SLOWER = "draws are caught by a mode"
dispatch_key: Callable[[str], Any] = private("torch._C._dispatch_key_parse", lost=_SLOWER)
"""A dispatch key by its name. Without it, or the next three: a mode (stages/drawing.py)."""

include_key: Callable[[Any, bool], None] = private(
    "torch._C._dispatch_tls_set_dispatch_key_included", lost=_SLOWER
)
"""Include a dispatch key in this thread's set, or exclude it. Only kernels for a key are
public."""

higher_order_operators: dict[str, Any] = private("torch._ops._higher_order_ops", lost=_SLOWER)
"""All operations that call functions. Each must be told to pass our key, else it raises."""

_operation_names: Any = private("torch._C._dispatch_get_all_op_names", lost=_SLOWER)
_overload: Any = private("torch._C._get_operation_overload", lost=_SLOWER)
_has_kernel: Any = private("torch._C._dispatch_has_kernel_for_dispatch_key", lost=_SLOWER)


def operations_with(tag: torch.Tag) -> Iterator[Any]:
    """Yield operations with a tag, without composite ones. ``torch.ops`` lists used ones only."""
    for name in _operation_names():
        space, _, rest = name.partition("::")
        base, _, overload = rest.partition(".")
        entry = _overload(f"aten::{base}", overload) if space == "aten" else None
        if entry is None or tag not in entry[2]:
            continue
        if not _has_kernel(name, "CompositeImplicitAutograd"):
            yield getattr(getattr(torch.ops.aten, base), overload or "default")


def switch_of(word: str) -> tuple[Any, str, Any]:
    """Return the owner and the name of a switch's setter, and its getter. Without it: None."""
    names = f"_get_{word}", f"get_{word}", f"_get_{word[8:]}_sdp_enabled", f"_get_{word[:-6]}getter"
    return (
        torch._C,
        f"_set_{word}",
        next((getattr(torch._C, name) for name in names if hasattr(torch._C, name)), None),
    )


BINDINGS: Sequence[tuple[str, Any]] = [
    ("torch", torch),
    ("torch.Tensor", Tensor),
    (
        "torch._C._nn",
        private("torch._C._nn", instead=Nothing, lost="programs call a few operations more slowly"),
    ),
]
"""The modules with torch's bindings, as programs name them. Without the last: the operation."""

# -- tensors without numbers, and torch's compiler

FakeTensor: type[Any] = private(
    "torch._subclasses.fake_tensor.FakeTensor",
    instead=Nothing,
    lost="stages cannot be compiled, nor measured",
)
"""A tensor without numbers. Without it: no tensor is one."""

FunctionalTensor: type[Any] = private(
    "torch._subclasses.functional_tensor.FunctionalTensor",
    instead=Nothing,
    lost="stages cannot be compiled",
)
"""A tensor of a trace without in-place writes. Without it: no tensor is one."""

FakeTensorMode: type[Any] = private(
    "torch._subclasses.fake_tensor.FakeTensorMode", lost="no compiling, no profile"
)
"""The mode for tensors without numbers. Public traces (torch.export) have no gradients."""

FunctionalTensorMode: type[Any] = private(
    "torch._subclasses.functional_tensor.FunctionalTensorMode", lost="no stage can be compiled"
)
"""The mode for traces without in-place writes; ``torch.func.functionalize`` lacks autograd."""

functionalized: Callable[..., Callable[..., Any]] = private(
    "torch._subclasses.functional_tensor.dispatch_functionalize", lost="no stage can be compiled"
)
"""Converts a function to one without in-place writes, in a `FunctionalTensorMode`."""

NumbersWanted: type[Exception] = private(
    "torch._subclasses.fake_tensor.DataDependentOutputException",
    instead=type("NumbersWanted", (Exception,), {}),
    lost="stages that look whether they are traced cannot be compiled",
)
"""The error of a fake tensor if its numbers are needed. Without it: no code raises it."""

_UNSEEN = "a compiled stage that writes into the .data of a buffer is not refused"
_sync: Callable[[Any], None] = private("torch._sync", instead=lambda _: None, lost=_UNSEEN)
_wrote: Callable[[Any], bool] = private(
    "torch._functionalize_has_data_mutation", instead=lambda _: False, lost=_UNSEEN
)


def was_written(tensor: Any) -> bool:
    """Return whether a `FunctionalTensor` was written to, also by ``.data``. Without it: no."""
    _sync(tensor)
    return _wrote(tensor.elem)


pytree: Any = private(
    "torch.utils._pytree", lost="containers that are registered with torch would not be known"
)
"""Torch's trees: containers that other packages registered, and arguments of operations."""

NAMELESS_LAYER = "_empty_nn_module_stack"
"""The prefix of paths that torch.export invents. Without it: messages show it as a layer."""

HOOK_FUNCTION = "torch.nn.modules._functions.BackwardHookFunction"
"""The function of backward hooks in a graph. Without it: the error has another name."""

TRACED_FUNCTION = "torch/_functorch/autograd_function.py"
"""A file in the stack of custom functions inside ``torch.cond``. Without it: they do not raise."""

STEPPED = "_opt_called"
"""By this attribute schedulers see that the optimizer stepped. Without it: they warn once."""


def inductor(
    graph: fx.GraphModule, examples: list[Tensor], options: dict[str, Any]
) -> Callable[..., Any]:
    """Compile a graph by C++ or Triton. The public ``torch.compile`` would trace it again."""
    build = private(
        "torch._inductor.compile",
        lost='compile_stage(backend="inductor") cannot be had; the others can',
    )
    return build(graph, examples, options=options)


def clear_workspaces() -> None:
    """Free the workspaces of cuBLAS, which a recording would keep. Without it: do nothing."""
    getattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: None)()


# -- modules

_module = nn.Module()
_TABLES = "tensors could not be put into modules"
parameters_of: Callable[[nn.Module], dict[str, Tensor | None]] = attribute(
    _module, "_parameters", lost=_TABLES
)
"""A layer's own parameters, as a dict into which a run puts aliases that are no parameters."""

buffers_of: Callable[[nn.Module], dict[str, Tensor | None]] = attribute(
    _module, "_buffers", lost=_TABLES
)
"""A layer's own buffers, as a writable dict."""

children_of: Callable[[nn.Module], dict[str, nn.Module | None]] = attribute(
    _module, "_modules", lost=_TABLES
)
"""A module's children by name. ``named_children`` omits repeated children and None."""

TABLES = frozenset({"_parameters", "_buffers", "_modules"})
"""The attributes of a module with its tensors and children."""

_HOOKS = {
    "forward hooks": ("_forward_hooks", "_forward_pre_hooks"),
    "backward hooks": ("_backward_hooks", "_backward_pre_hooks"),
}


def hooks_of(module: nn.Module) -> list[str]:
    """Return the kinds of hooks of a module; no public function lists hooks. Without it: none."""
    return [kind for kind, names in _HOOKS.items() if any(vars(module).get(name) for name in names)]


def forward_hooks_of(module: nn.Module) -> dict[int, Any]:
    """Return a module's forward hooks, to remove some. Only the creator of a hook has its public
    handle. Without it: {}."""
    return vars(module).get("_forward_hooks", {})


def drop_hooks(module: nn.Module) -> None:
    """Remove all hooks from a module. Only their creators have public handles."""
    vars(module).update((name, OrderedDict()) for names in _HOOKS.values() for name in names)


if TYPE_CHECKING:
    BatchNorm = _BatchNorm
else:
    BatchNorm = private(
        "torch.nn.modules.batchnorm._BatchNorm", lost="batch norm layers would not be known"
    )
"""The base class of all batch norm layers, including lazy ones and subclasses of users."""


ORIGINAL_CALLABLE = "_torchdynamo_orig_callable"
"""The attribute of a compiled function with the original. Without it: copies of it raise."""

_ORIGINAL_MODULE = "_orig_mod"


def uncompiled(value: Any) -> Any:
    """Return the original of a compiled function or module. Without the names: the compiled."""
    # The module first: a compiled module also has the other attribute, with its forward alone.
    return getattr(value, _ORIGINAL_MODULE, getattr(value, ORIGINAL_CALLABLE, value))


FLAT_WEIGHTS = "_flat_weights"
"""The attribute where recurrent layers keep a second list of their weights."""


def list_weights(layer: nn.RNNBase) -> None:
    """Update a recurrent layer's second list to its present weights, also to aliases."""
    names: Sequence[str] = layer._flat_weights_names  # pyright: ignore[reportAttributeAccessIssue, reportAssignmentType]
    layer._flat_weights = [getattr(layer, name, None) for name in names]


def device_asked(*args: Any, **kwargs: Any) -> Any:
    """Return the device in the arguments of ``nn.Module.to`` (of four forms), or None."""
    parse = private("torch._C._nn._parse_to", lost="Pipe.to cannot tell a device from a dtype")
    return parse(*args, **kwargs)[0]


class Anchored(nn.Module):
    """A module that can reject `to`, `cuda` and `half`; torch has no hook for this. Without
    ``_apply``: it cannot."""

    def before_change(self, change: Callable[[Tensor], Tensor]) -> None:
        """Raise to reject a change."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        self.before_change(fn)
        return super()._apply(fn, recurse)


def rename(node: fx.Node, name: str) -> None:
    """Rename a node of a graph, and keep names unique; ``node.name = ...`` would not."""
    node._rename(name)
