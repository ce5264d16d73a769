"""Every private name of torch that we use, each under a plain name: why, and what becomes of a
torch without it.

All of them are there from torch 2.11, the oldest that is supported, to 2.15. They are looked up at
import, which never fails. Where one is missing, what stands after *Without it* takes its place, and
one RuntimeWarning says what is lost; an entry that has no such words raises `MissingName` when it
is used. ``tests/core/test_torch_names.py`` tries what we rely on, and ``tests/test_layout.py`` sees
that no other file has a private name of torch.
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
# -------------------------------------------------------------------------------

version: Callable[[Tensor], int] = attribute(
    Tensor, "_version", lost="writes in place would not be seen"
)
"""How often a tensor was written to; nothing public says so. Tensors of inference mode have no
count."""

is_zero_tensor: Callable[[Tensor], bool] = private(
    "torch.Tensor._is_zerotensor",
    instead=lambda _: False,
    lost="zeros without memory are taken for ordinary tensors",
)
"""Is a tensor one of autograd's zeros, which have no memory to move. Without it: none is."""

data_address: Callable[[Tensor], int] = private(
    "torch._C._data_address",
    instead=Tensor.data_ptr,
    lost="memory shared copy-on-write is copied at the first look",
)
"""Where a tensor's memory begins; ``data_ptr`` ends a sharing by copy-on-write. Without it:
``data_ptr``."""

is_shared_lazily: Callable[[Tensor], bool] = private(
    "torch._C._is_cow_tensor",
    instead=lambda _: True,
    lost="what crosses streams, or moves, is copied once more",
)
"""Is a tensor's memory shared copy-on-write: no stream can be recorded on it. Without it: as if it
always were."""

lazy_clone: Callable[[Tensor], Tensor] = private(
    "torch._lazy_clone",
    instead=torch.clone,
    lost="stages get copies of what they are handed, at once",
)
"""A clone that takes memory as soon as somebody writes: in-place layers at a border are rare.
Without it: a clone."""

lazy_clone_operation: Any = private(
    "torch.ops.aten._lazy_clone.default",
    instead=None,
    lost="the copies that it makes are not told from others",
)
"""`lazy_clone` as dispatch modes and graphs see it. Without it: None, which is no operation."""

wrapper_tensor: Callable[..., Any] = private(
    "torch.Tensor._make_wrapper_subclass",
    lost="models cannot be cut at their blocks without a trace",
)
"""A tensor of a subclass without memory of its own; torch's pages on extending it name it so."""

plain_function: Any = private(
    "torch._C._disabled_torch_function_impl", lost="models cannot be cut at their blocks"
)
"""What a subclass puts in the place of ``__torch_function__`` to see operations alone, as
``nn.Parameter`` does."""

storage_number: Callable[[torch.UntypedStorage], int] = attribute(
    torch.UntypedStorage, "_cdata", lost="tensors that share memory would not be known"
)
"""One number for all tensors that share a memory, as long as it lives; ``data_ptr`` of fake tensors
is none."""

storage_users: Callable[[int], int] = private(
    "torch._C._storage_Use_Count",
    instead=lambda _: 3,
    lost="the first gradient of each parameter is copied",
)
"""How many share the memory of a number, what was asked for that among them. Without it: as if
others always did."""

_HOOKED = "hooks on a gradient, which a run does not call, are not refused"
_gradient_hooks: list[Callable[[Tensor], Any]] = [
    attribute(Tensor, name, instead=lambda _: None, lost=_HOOKED)
    for name in ("_backward_hooks", "_post_accumulate_grad_hooks")
]


def has_gradient_hooks(leaf: Tensor) -> bool:
    """Are there hooks on a leaf's gradient; no public function says so. Without it: there are
    none."""
    return any(hooks(leaf) for hooks in _gradient_hooks)


copy_all: Callable[[Sequence[Tensor], Sequence[Tensor]], Any] = private(
    "torch._foreach_copy_",
    instead=lambda targets, sources: [*map(Tensor.copy_, targets, sources)],
    lost="inputs of recorded runs are copied by a kernel each",
)
"""Copy tensors of one device into others, many in a kernel. Without it: one by one."""

# -- autograd's graphs
# -------------------------------------------------------------------------------

run_backward: Callable[..., Any] = private(
    "torch.autograd.Variable._execution_engine.run_backward",
    instead=lambda roots, cotangents, keep_graph, _, inputs, **__: torch.autograd.backward(
        roots, cotangents, keep_graph, inputs=inputs or None
    ),
    lost="backwards of small stages take longer",
)
"""``torch.autograd.backward`` without its checks of arguments, which slow a small stage. Without
it: that function."""

backward_number: Callable[[], int] = private(
    "torch._C._current_graph_task_id",
    instead=lambda: -1,
    lost="draws in a backward are not refused, and a pop that torch.utils.checkpoint repeats is "
    "not told from others",
)
"""The number of the backward that calls this thread, or -1. Without it: -1."""


def function_of(node: Any) -> type:
    """The ``autograd.Function`` of a node of its backward: its class does not say its module.
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
"""Autograd's handle of what it saved. Without it: nothing is one."""


def saved_names(kind: type) -> tuple[tuple[str, str], ...]:
    """The attributes of a class of nodes with what it saved: of the handles, of the tensors.

    An operation has ``_raw_saved_self`` and ``_saved_self``, a Function ``_raw_saved_tensors`` and
    ``saved_tensors``. The public hooks are called in every forward; through a handle a graph can be
    changed later. Without it: none.
    """
    handles = [name for name in dir(kind) if name.startswith("_raw_saved_")]
    return tuple((name, name[4:] if hasattr(kind, name[4:]) else name[5:]) for name in handles)


def inputs_of_region(unpack_hook: Any) -> Iterator[tuple[Any, Tensor]]:
    """What a ``torch.utils.checkpoint`` region keeps of its inputs: handles and tensors.

    It is found from a hook of the region, which knows it by its closure; torch 2.11 keeps the
    inputs in a node, later ones in a list. Without these: nothing, and the inputs stay where they
    are.
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


top_saved_hooks, pop_saved_hooks, push_saved_hooks = (
    private(
        f"torch._C._autograd._{verb}_saved_tensors_default_hooks",
        instead=None,
        lost="fp.Pipe cannot be called under hooks on saved tensors, as in torch.utils.checkpoint",
    )
    for verb in ("top", "pop", "push")
)
"""The stack of hooks on what autograd saves, to set a caller's aside. Without it: None; under hooks
no pipe runs."""

# -- modes, dispatcher, operations
# -------------------------------------------------------------------------------

if not TYPE_CHECKING:
    TorchDispatchMode = private(
        "torch.utils._python_dispatch.TorchDispatchMode", lost="operations would not be seen"
    )
"""The base class of dispatch modes; torch's pages on extending it import it by this path."""


class WatchingMode(TorchDispatchMode):
    """A dispatch mode that torch's compiler ignores; else the first one entered imports the
    compiler, for seconds."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


without_modes: Callable[[], AbstractContextManager[Any]] = private(
    "torch.utils._python_dispatch._disable_current_modes",
    lost="an operation would be taken for one of a model",
)
"""Inside of it no dispatch mode sees an operation."""

_MODES = "a run is not refused under modes of its caller, which its threads do not have"
_modes: dict[str, tuple[Callable[[], int], Callable[[int], Any]]] = {
    kind: (
        private(f"torch._C._len_torch_{kind}_stack", instead=lambda: 0, lost=_MODES),
        private(f"torch._C._get_{kind}_stack_at", instead=None, lost=_MODES),
    )
    for kind in ("function", "dispatch")
}


def modes_on(kind: str) -> list[Any]:
    """The modes of this thread, which no other has: on each "function" or on each "dispatch".
    Without it: none."""
    count, mode_at = _modes[kind]
    return [mode_at(place) for place in range(count())]


DeviceContext: type[Any] = private(
    "torch.utils._device.DeviceContext",
    instead=Nothing,
    lost="runs inside of `with torch.device(...)` are refused",
)
"""The mode of a default device, which a run hands to its threads. Without it: no mode is one."""

transforms: Callable[[], Any] = private(
    "torch._C._functorch.peek_interpreter_stack",
    instead=lambda: None,
    lost="runs are not refused under torch.func, and stages may be slower there",
)
"""The innermost transform of torch.func that this call is in, or None; asked for every value.
Without it: None."""

_LOST = "stages with forward-mode derivatives are not refused on threads"
FORWARD_MODE: Sequence[tuple[Any, str]] = [
    (private("torch._functorch.predispatch", instead=None, lost=_LOST), "_enter_dual_level_impl"),
    (
        private("torch.autograd.forward_ad._set_fwd_grad_enabled", instead=None, lost=_LOST),
        "__init__",
    ),
]
"""Where torch looks for what begins forward-mode derivatives; all come by one of these. Without it:
None, no owner."""

_FUNC = "models cut at their blocks do not run under torch.func"
_is_wrapped: Callable[[Tensor], bool] = private(
    "torch._C._functorch.is_functorch_wrapped_tensor", instead=lambda _: False, lost=_FUNC
)
_unwrapped: Callable[[Tensor], Tensor] = private(
    "torch._C._functorch.get_unwrapped", instead=lambda t: t, lost=_FUNC
)


def innermost_tensor(tensor: Tensor) -> Tensor:
    """Return the tensor inside all wrappers of torch.func's transforms. Without the names: the
    tensor itself."""
    while _is_wrapped(tensor):
        tensor = _unwrapped(tensor)
    return tensor


if not TYPE_CHECKING:
    OpOverload = type(torch.ops.aten.alias.default)
"""The class of operations, ``torch._ops.OpOverload``, by a public way."""

HigherOrderOperator: type[Any] = private(
    "torch._ops.HigherOrderOperator", lost="regions in graphs would not be known"
)
"""The class of operations that call functions."""

schema: Callable[[Any], Any] = attribute(
    torch.ops.aten.alias.default,
    "_schema",
    lost="what operations take and write would not be known",
)
"""What an operation takes, returns and writes; public only as text."""

_SLOWER = "draws are caught by a mode"
dispatch_key: Callable[[str], Any] = private("torch._C._dispatch_key_parse", lost=_SLOWER)
"""A dispatch key by its name. Without it, or any of the next three: draws are caught by a mode
(stages/drawing.py)."""

include_key: Callable[[Any, bool], None] = private(
    "torch._C._dispatch_tls_set_dispatch_key_included", lost=_SLOWER
)
"""Put a dispatch key into this thread's set, or take it out: public are only the kernels under a
key."""

higher_order_operators: dict[str, Any] = private("torch._ops._higher_order_ops", lost=_SLOWER)
"""All operations that call functions: a key that they do not know stops them, so each is told that
it passes ours."""

_operation_names: Any = private("torch._C._dispatch_get_all_op_names", lost=_SLOWER)
_overload: Any = private("torch._C._get_operation_overload", lost=_SLOWER)
_has_kernel: Any = private("torch._C._dispatch_has_kernel_for_dispatch_key", lost=_SLOWER)


def operations_with(tag: torch.Tag) -> Iterator[Any]:
    """Torch's operations with a tag, without those that only call others: ``torch.ops`` lists none
    that is not used."""
    for name in _operation_names():
        space, _, rest = name.partition("::")
        base, _, overload = rest.partition(".")
        entry = _overload(f"aten::{base}", overload) if space == "aten" else None
        if entry is None or tag not in entry[2]:
            continue
        if not _has_kernel(name, "CompositeImplicitAutograd"):
            yield getattr(getattr(torch.ops.aten, base), overload or "default")


def switch_of(word: str) -> tuple[Any, str, Any]:
    """Return the owner of a switch's setter, the setter's name, and the getter. Without the name:
    no getter."""
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
"""Where torch has its own bindings of operations, as programs name it. Without the last: the
operation itself."""

# -- tensors without numbers, and torch's compiler
# -------------------------------------------------------------------------------

FakeTensor: type[Any] = private(
    "torch._subclasses.fake_tensor.FakeTensor",
    instead=Nothing,
    lost="stages cannot be compiled, nor measured",
)
"""A tensor without numbers. Without it: nothing is one."""

FunctionalTensor: type[Any] = private(
    "torch._subclasses.functional_tensor.FunctionalTensor",
    instead=Nothing,
    lost="stages cannot be compiled",
)
"""A tensor of a trace that writes nothing in place. Without it: nothing is one."""

FakeTensorMode: type[Any] = private(
    "torch._subclasses.fake_tensor.FakeTensorMode", lost="no compiling, no profile"
)
"""Where tensors have no numbers: public traces (torch.export) take modules, and no gradients."""

FunctionalTensorMode: type[Any] = private(
    "torch._subclasses.functional_tensor.FunctionalTensorMode", lost="no stage can be compiled"
)
"""Where a trace writes nothing in place; ``torch.func.functionalize`` knows no autograd inside."""

functionalized: Callable[..., Callable[..., Any]] = private(
    "torch._subclasses.functional_tensor.dispatch_functionalize", lost="no stage can be compiled"
)
"""A function with nothing written in place, in a `FunctionalTensorMode`."""

NumbersWanted: type[Exception] = private(
    "torch._subclasses.fake_tensor.DataDependentOutputException",
    instead=type("NumbersWanted", (Exception,), {}),
    lost="stages that look whether they are traced cannot be compiled",
)
"""What a fake tensor raises whose numbers are asked for. Without it: nothing raises it."""

_UNSEEN = "a compiled stage that writes into the .data of a buffer is not refused"
_sync: Callable[[Any], None] = private("torch._sync", instead=lambda _: None, lost=_UNSEEN)
_wrote: Callable[[Any], bool] = private(
    "torch._functionalize_has_data_mutation", instead=lambda _: False, lost=_UNSEEN
)


def was_written(tensor: Any) -> bool:
    """Was the memory of a `FunctionalTensor` written to; it has no count of versions for ``.data``.
    Without it: no."""
    _sync(tensor)
    return _wrote(tensor.elem)


pytree: Any = private(
    "torch.utils._pytree", lost="containers that are registered with torch would not be known"
)
"""Torch's trees: the containers that others registered there, and the lists and tuples of
operations."""

NAMELESS_LAYER = "_empty_nn_module_stack"
"""How the paths begin that torch.export makes up. Without it: such a path is taken for a layer's,
in messages."""

HOOK_FUNCTION = "torch.nn.modules._functions.BackwardHookFunction"
"""What hooks on a module's backward are in a graph. Without it: they are refused by that other
name."""

TRACED_FUNCTION = "torch/_functorch/autograd_function.py"
"""In the stack of a node of a custom function in ``torch.cond``. Without it: such a function is not
refused."""

STEPPED = "_opt_called"
"""What schedulers ask of an optimizer: was its step called before theirs. Without it: they warn,
once."""


def inductor(
    graph: fx.GraphModule, examples: list[Tensor], options: dict[str, Any]
) -> Callable[..., Any]:
    """A graph as torch's compiler makes it, with a C++ compiler or Triton; ``torch.compile`` would
    trace it again."""
    build = private(
        "torch._inductor.compile",
        lost='compile_stage(backend="inductor") cannot be had; the others can',
    )
    return build(graph, examples, options=options)


def clear_workspaces() -> None:
    """Free the memory in which cuBLAS works: a recording would keep it. Without it, as on a CPU
    build: nothing."""
    getattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: None)()


# -- modules
# -------------------------------------------------------------------------------

_module = nn.Module()
_TABLES = "tensors could not be put into modules"
parameters_of: Callable[[nn.Module], dict[str, Tensor | None]] = attribute(
    _module, "_parameters", lost=_TABLES
)
"""A layer's own parameters, to be changed: public are only ``nn.Parameter``s, and a run puts
aliases there."""

buffers_of: Callable[[nn.Module], dict[str, Tensor | None]] = attribute(
    _module, "_buffers", lost=_TABLES
)
"""A layer's own buffers, to be changed."""

children_of: Callable[[nn.Module], dict[str, nn.Module | None]] = attribute(
    _module, "_modules", lost=_TABLES
)
"""A module's children by name; ``named_children`` leaves out one that stands twice, and those that
are None."""

TABLES = frozenset({"_parameters", "_buffers", "_modules"})
"""The attributes of a module with its tensors and children."""

_HOOKS = {
    "forward hooks": ("_forward_hooks", "_forward_pre_hooks"),
    "backward hooks": ("_backward_hooks", "_backward_pre_hooks"),
}


def hooks_of(module: nn.Module) -> list[str]:
    """The kinds of hooks that a module has; they can be put on and taken off, not asked for.
    Without it: none."""
    return [kind for kind, names in _HOOKS.items() if any(vars(module).get(name) for name in names)]


def forward_hooks_of(module: nn.Module) -> dict[int, Any]:
    """Return a module's forward hooks, to remove some: public handles are with their creators only.
    Without it: {}."""
    return vars(module).get("_forward_hooks", {})


def drop_hooks(module: nn.Module) -> None:
    """Take all hooks from a module; who put them on has the handles."""
    vars(module).update((name, OrderedDict()) for names in _HOOKS.values() for name in names)


if TYPE_CHECKING:
    BatchNorm = _BatchNorm
else:
    BatchNorm = private(
        "torch.nn.modules.batchnorm._BatchNorm", lost="batch norm layers would not be known"
    )
"""What all batch norm layers inherit from, those of users and lazy ones too."""


def check_dimensions(layer: BatchNorm, input: Tensor) -> None:
    """Refuse an input of a wrong number of dimensions in the layer's words. Without it: torch's
    function does later."""
    getattr(layer, "_check_input_dim", lambda _: None)(input)


ORIGINAL_CALLABLE = "_torchdynamo_orig_callable"
"""The attribute of a compiled function with the function itself. Without it: its copies are
refused."""

FLAT_WEIGHTS = "_flat_weights"
"""Where recurrent layers keep a second list of their weights."""


def list_weights(layer: nn.RNNBase) -> None:
    """Have a recurrent layer's second list name its present weights; it is renewed for
    ``nn.Parameter``s only."""
    names: Sequence[str] = layer._flat_weights_names  # pyright: ignore[reportAttributeAccessIssue, reportAssignmentType]
    layer._flat_weights = [getattr(layer, name, None) for name in names]


def device_asked(*args: Any, **kwargs: Any) -> Any:
    """The device in the arguments of ``nn.Module.to``, or None: it has four forms, and only this
    reads them all."""
    parse = private("torch._C._nn._parse_to", lost="Pipe.to cannot tell a device from a dtype")
    return parse(*args, **kwargs)[0]


class Anchored(nn.Module):
    """A module that may refuse `to`, `cuda`, `half`; there is no hook for this. Without ``_apply``:
    it cannot."""

    def before_change(self, change: Callable[[Tensor], Tensor]) -> None:
        """Refuse a change by raising."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        self.before_change(fn)
        return super()._apply(fn, recurse)


def rename(node: fx.Node, name: str) -> None:
    """Give a node of a graph another name, and see that no two have one: ``node.name = ...`` does
    not look."""
    node._rename(name)
