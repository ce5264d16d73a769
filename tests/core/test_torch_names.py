"""What we rely on in each private name of torch, tried once; and a torch without them: runs are
right all the same."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import funcpipe
from funcpipe._src.core import torch_lookup
from funcpipe._src.core import torch_names as names
from funcpipe._src.core.frames import frames
from funcpipe._src.core.torch_lookup import MissingName, attribute, private

PACKAGE = Path(funcpipe.__file__).parent
PROBES: dict[str, Callable[[], None]] = {}


def probe(*entries: str) -> Callable[[Callable[[], None]], Callable[[], None]]:
    """A function that tries entries of torch_names; its docstring says what is lost where it
    fails."""

    def keep(function: Callable[[], None]) -> Callable[[], None]:
        PROBES.update(dict.fromkeys(entries, function))
        return function

    return keep


@cache
def users() -> dict[str, list[str]]:
    """The files of funcpipe that use an entry, by entry."""
    found: dict[str, list[str]] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            entries: list[str] = []
            if isinstance(node, ast.ImportFrom) and "funcpipe._src.core.torch_names" == node.module:
                entries = [alias.name for alias in node.names]
            elif (
                isinstance(node, ast.Attribute)
                and isinstance(node.value, ast.Name)
                and "torch_names" == node.value.id
            ):
                entries = [node.attr]
            for entry in entries:
                found.setdefault(entry, []).append(str(path.relative_to(PACKAGE)))
    return found


# -- tensors
# -------------------------------------------------------------------------------


@probe("version")
def writes_are_counted() -> None:
    """writes in place into parameters, buffers and gradient sums are not seen."""
    one = torch.zeros(3)
    view, before = one[1:], names.version(one)
    view.add_(1)
    assert names.version(one) == names.version(view) == before + 1


@probe("is_zero_tensor")
def zeros_without_memory() -> None:
    """zeros without memory are taken for tensors whose memory can be moved."""
    assert names.is_zero_tensor(torch._efficientzerotensor(3))
    assert not names.is_zero_tensor(torch.zeros(3))


@probe("data_address", "is_shared_lazily", "lazy_clone", "lazy_clone_operation")
def copies_on_write() -> None:
    """stages are given whole copies, or what one writes reaches another."""
    one = torch.arange(4.0)
    copied = names.lazy_clone(one)
    assert names.is_shared_lazily(copied)
    assert names.data_address(copied) == names.data_address(one)
    assert names.is_shared_lazily(copied), "to look at the address makes a copy"
    copied.add_(1)
    assert names.data_address(copied) != names.data_address(one)
    assert 0 == one[0]
    assert not names.is_shared_lazily(copied)
    assert names.lazy_clone_operation is torch.ops.aten._lazy_clone.default
    leaf = torch.ones(2, requires_grad=True)
    names.lazy_clone(leaf).sum().backward()
    assert torch.equal(leaf.grad, torch.ones(2))


@probe("wrapper_tensor", "plain_function", "innermost_tensor")
def tensors_without_numbers() -> None:
    """models cannot be cut at their blocks without a trace, or not run there under torch.func."""

    class Wrapped(torch.Tensor):
        __torch_function__ = names.plain_function

        @classmethod
        def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
            called.append(func.name())
            return torch.ones(2, 3)

    called = []

    one = names.wrapper_tensor(Wrapped, (2, 3), strides=(3, 1), dtype=torch.int64, device="cpu")
    assert (2, 3) == one.shape
    assert torch.int64 is one.dtype
    assert torch.equal(-one, torch.ones(2, 3))
    assert ["aten::neg"] == called
    seen = []
    torch.func.vmap(lambda x: seen.append(names.innermost_tensor(x)) or x)(torch.arange(3.0))
    assert [(3,)] == [tuple(tensor.shape) for tensor in seen]


@probe("forward_hooks_of")
def hooks_that_run_after_a_forward() -> None:
    """hooks by which transformers collects outputs stay on the copies of a model that was called
    before."""
    layer = nn.Linear(1, 1)
    handle = layer.register_forward_hook(lambda *_: None)
    assert [handle.id] == list(names.forward_hooks_of(layer))


@probe("storage_number")
def shared_memory() -> None:
    """memory that tensors share is counted twice, or not found."""
    with names.FakeTensorMode():
        fake = torch.empty(4)
        assert names.storage_number(fake.untyped_storage()) == names.storage_number(
            fake[1:].untyped_storage()
        )
        other = torch.empty(4)
        assert names.storage_number(fake.untyped_storage()) != names.storage_number(
            other.untyped_storage()
        )


@probe("storage_users")
def who_shares_memory() -> None:
    """a gradient is added to while something else has its memory, or the first one is copied."""

    def users(tensor):
        storage = tensor.untyped_storage()
        return names.storage_users(names.storage_number(storage)) - 1

    one = torch.zeros(4)
    assert 1 == users(one)
    other = torch.zeros(0).set_(one)
    assert 2 == users(one) == users(other)
    del one
    assert 1 == users(other)
    leaf = torch.ones(3, requires_grad=True)
    (leaf * 2).sum().backward()
    assert 1 == users(leaf.grad)


@probe("has_gradient_hooks")
def hooks_on_gradients() -> None:
    """parameters with hooks on their gradients, which a run does not call, are taken as if they had
    none."""
    for register in ("register_hook", "register_post_accumulate_grad_hook"):
        leaf = torch.ones(2, requires_grad=True)
        assert not names.has_gradient_hooks(leaf)
        handle = getattr(leaf, register)(lambda _: None)
        assert names.has_gradient_hooks(leaf), register
        handle.remove()
        assert not names.has_gradient_hooks(leaf), register


@probe("copy_all")
def many_are_copied() -> None:
    """inputs of recorded runs are not copied."""
    targets = [torch.zeros(2), torch.zeros(3)]
    names.copy_all(targets, [torch.ones(2), torch.full((3,), 2.0)])
    assert [1.0, 2.0] == [float(one[0]) for one in targets]


# -- autograd's graphs
# -------------------------------------------------------------------------------


@probe("run_backward")
def a_backward_without_checks() -> None:
    """backwards of eager stages do not run, or go into other leaves than they are told."""
    a, b = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    root = (a * b * 3).sum()
    names.run_backward(
        (root,),
        (torch.tensor(2.0),),
        False,
        False,
        (a,),
        allow_unreachable=True,
        accumulate_grad=True,
    )
    assert [6.0, 6.0] == a.grad.tolist()
    assert b.grad is None


@probe("backward_number")
def inside_of_a_backward() -> None:
    """draws in a backward are not refused."""
    seen: list[int] = []

    class Look(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            seen.append(names.backward_number())
            return grad

    Look.apply(torch.ones(2, requires_grad=True)).sum().backward()
    assert -1 == names.backward_number()
    (number,) = seen
    assert number != -1


@probe("function_of")
def whose_backward() -> None:
    """custom functions that torch.export forgets the backward of are not refused by name."""

    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

    assert names.function_of(Twice.apply(torch.ones(2, requires_grad=True)).grad_fn) is Twice
    with pytest.raises(MissingName, match="_forward_cls"):
        names.function_of(torch.ones(2, requires_grad=True).exp().grad_fn)


@probe("ORIGINAL_CALLABLE", "uncompiled")
def what_a_compiled_function_was_made_of() -> None:
    """layers whose forward was compiled by itself, and is now of their copies, are refused."""

    def double(x):
        return x * 2

    compiled, layer = torch.compile(double, backend="eager"), nn.Linear(1, 1)
    assert vars(compiled)[names.ORIGINAL_CALLABLE] is double is names.uncompiled(compiled)
    assert (
        names.uncompiled(torch.compile(layer, backend="eager")) is layer is names.uncompiled(layer)
    )


@probe("saved_names")
def what_a_node_saved() -> None:
    """nothing can be taken out of a graph: offloading moves nothing."""
    x = torch.ones(3, requires_grad=True)
    node = x.exp().grad_fn
    (pair,) = names.saved_names(type(node))
    handle, tensor = (getattr(node, name) for name in pair)
    assert isinstance(tensor, torch.Tensor)
    assert handle.unpack_hook is None
    place: list[torch.Tensor] = []
    handle.register_hooks(lambda one: place.append(one.detach()), lambda _: place[0])
    node(torch.ones(3))
    assert torch.equal(place[0], torch.ones(3).exp())


@probe("SavedTensor", "inputs_of_region")
def what_a_region_keeps() -> None:
    """the inputs of checkpointed regions stay on the device when a stage is offloaded."""
    x = torch.ones(3, requires_grad=True) * 2
    node = checkpoint(lambda one: one.exp(), x, use_reentrant=False).grad_fn
    (pair,) = names.saved_names(type(node))
    *_, (handle, tensor) = names.inputs_of_region(
        getattr(node, pair[0]).unpack_hook
    )  # torch 2.11 has an empty one too
    assert isinstance(handle, names.SavedTensor)
    assert torch.equal(tensor, x)
    assert [] == list(names.inputs_of_region(None))
    assert [] == list(names.inputs_of_region(lambda: pair))


@probe("in_forward_mode")
def levels_of_forward_mode() -> None:
    """dual tensors of the caller would lose their tangents."""
    assert not names.in_forward_mode()
    with torch.autograd.forward_ad.dual_level():
        assert names.in_forward_mode()


@probe("run_again")
def who_computes_a_region_again() -> None:
    """a torch.utils.checkpoint region that draws random numbers is refused in the backward."""
    code = inspect.unwrap(names.run_again).__code__
    around: list[bool] = []

    def look(x: torch.Tensor) -> torch.Tensor:
        around.append(any(frame.f_code is code for frame in frames()))
        return x.exp()

    checkpoint(look, torch.ones(3, requires_grad=True), use_reentrant=False).sum().backward()
    assert [False, True] == around


@probe("top_saved_hooks", "pop_saved_hooks", "push_saved_hooks")
def hooks_put_aside() -> None:
    """fp.Pipe cannot be called inside of torch.utils.checkpoint."""
    packed: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda one: packed.append(1) or one, lambda one: one
    ):
        hooks = names.top_saved_hooks(True)
        names.pop_saved_hooks()
        assert names.top_saved_hooks(True) is None
        torch.ones(2, requires_grad=True).exp()
        assert [] == packed
        names.push_saved_hooks(*hooks)
        torch.ones(2, requires_grad=True).exp()
        assert [1] == packed


# -- modes, dispatcher, operations
# -------------------------------------------------------------------------------


@probe("TorchDispatchMode", "WatchingMode", "without_modes", "OpOverload", "schema")
def operations_are_seen() -> None:
    """what a stage computes is not seen: traces, estimates of memory, check="finite" and compiled
    stages."""
    seen: list[object] = []

    class Seen(names.WatchingMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    assert issubclass(Seen, names.TorchDispatchMode)
    with Seen():
        torch.ones(2).add_(1)
        with names.without_modes():
            torch.ones(3)
    assert [torch.ops.aten.ones.default, torch.ops.aten.add_.Tensor] == seen
    assert all(isinstance(one, names.OpOverload) for one in seen)
    assert not isinstance(torch.add, names.OpOverload)
    written = names.schema(torch.ops.aten.add_.Tensor)
    assert ("aten::add_", True) == (written.name, written.is_mutable)
    assert ["self", "other", "alpha"] == [argument.name for argument in written.arguments]


@probe("modes_on", "DeviceContext")
def modes_of_the_caller() -> None:
    """a run under modes of its caller, which its threads do not have, is not refused."""

    class Mode(names.TorchDispatchMode):
        pass

    for kind in ("function", "dispatch"):
        assert [] == names.modes_on(kind)
    with torch.device("meta"), torch.overrides.BaseTorchFunctionMode(), Mode():
        device, other = names.modes_on("function")
        (mode,) = names.modes_on("dispatch")
    assert isinstance(device, names.DeviceContext)
    assert isinstance(other, torch.overrides.BaseTorchFunctionMode)
    assert isinstance(mode, Mode)


@probe("transforms")
def transforms_of_torch_func() -> None:
    """runs are not refused under torch.func, and stages may be slower there."""
    seen: list[object] = []
    look = lambda x: (seen.append(names.transforms()), x.sum())[1]
    for transform in (torch.func.grad, torch.func.vmap):
        transform(look)(torch.ones(2, 2) if transform is torch.func.vmap else torch.ones(2))
    assert names.transforms() is None
    assert [] == [one for one in seen if one is None]


@probe("HigherOrderOperator", "higher_order_operators")
def operations_that_call_functions() -> None:
    """draws and writes inside of torch.cond are not seen."""
    cond = torch.ops.higher_order.cond
    assert isinstance(cond, names.HigherOrderOperator)
    assert not isinstance(torch.ops.aten.add.Tensor, names.HigherOrderOperator)
    assert cond in names.higher_order_operators.values()
    assert callable(cond.fallthrough)


@probe("dispatch_key", "include_key", "operations_with")
def kernels_of_ours() -> None:
    """draws are caught by a dispatch mode, which costs some microseconds at every operation of a
    run."""
    from funcpipe._src.stages.drawing import CatchDraws

    seen: list[object] = []

    class Seen(CatchDraws):
        __slots__ = ()

        def caught(self, func, args, kwargs):
            seen.append(func)
            return func(*args, **kwargs)

    drawing = list(names.operations_with(torch.Tag.nondeterministic_seeded))
    assert torch.ops.aten.native_dropout.default in drawing
    assert torch.ops.aten.dropout.default not in drawing, "it only calls others"
    assert torch.ops.aten.add.Tensor not in drawing
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with Seen():
            torch.ones(2) + torch.randn(2)
    torch.randn(2)
    assert [torch.ops.aten.randn.default] == seen


@probe("BINDINGS")
def bindings_of_operations() -> None:
    """programs call some operations by a slower way."""
    for text, where in names.BINDINGS:
        assert where is eval(text)
    assert hasattr(names.BINDINGS[-1][1], "linear")


# -- tensors without numbers, and torch's compiler
# -------------------------------------------------------------------------------


@probe("FakeTensor", "FakeTensorMode", "NumbersWanted")
def fakes() -> None:
    """stages cannot be compiled, nor their memory measured."""
    with names.FakeTensorMode(allow_non_fake_inputs=True, static_shapes=True) as mode:
        one = mode.from_tensor(torch.ones(2, 3))
        assert isinstance(one @ torch.empty(3, 4), names.FakeTensor)
        with pytest.raises(names.NumbersWanted):
            one.sum().item()
    assert not isinstance(torch.ones(2), names.FakeTensor)


@probe("FunctionalTensor", "FunctionalTensorMode", "functionalized", "was_written")
def traces_without_writes() -> None:
    """stages that write in place cannot be compiled."""
    from torch.fx.experimental.proxy_tensor import make_fx

    kinds: list[bool] = []

    def write(x: torch.Tensor, buffer: torch.Tensor) -> torch.Tensor:
        kinds.append(isinstance(x, names.FunctionalTensor))
        kinds.append(names.was_written(buffer))
        buffer.data.add_(1)
        kinds.append(names.was_written(buffer))
        return x.clone().mul_(2)

    with names.FakeTensorMode() as mode:
        given = [mode.from_tensor(torch.ones(2)), mode.from_tensor(torch.ones(2))]
        graph = make_fx(
            names.functionalized(write, names.FunctionalTensorMode()), tracing_mode="fake"
        )(*given)
    assert [True, False, True] == kinds
    assert not [node for node in graph.graph.nodes if str(node.target).startswith("aten.mul_")]


@probe("pytree")
def trees_of_torch() -> None:
    """containers that others registered with torch are not taken apart."""
    from torch.utils._pytree import MappingKey, register_pytree_node

    class Box:
        def __init__(self, inside):
            self.inside = inside

    register_pytree_node(
        Box,
        lambda box: ([box.inside], None),
        lambda children, _: Box(*children),
        flatten_with_keys_fn=lambda box: ([(MappingKey("inside"), box.inside)], None),
    )
    node = names.pytree.SUPPORTED_NODES[Box]
    assert ([7], None) == node.flatten_fn(Box(7))
    assert 7 == node.unflatten_fn([7], None).inside
    leaves, spec = names.pytree.tree_flatten(((1, [2]), {"a": 3}))
    assert [1, 2, 3] == leaves == names.pytree.arg_tree_leaves(1, [2], a=3)
    assert ((1, [2]), {"a": 3}) == names.pytree.tree_unflatten(leaves, spec)
    assert isinstance(names.pytree.GetAttrKey("a"), names.pytree.GetAttrKey)


@probe("NAMELESS_LAYER")
def paths_that_export_makes_up() -> None:
    """messages name layers that are not there."""
    program = torch.export.export(nn.Sequential(nn.Linear(2, 2)), (torch.ones(1, 2),), strict=False)
    paths = {
        str(path)
        for node in program.graph.nodes
        for path, _ in node.meta.get("nn_module_stack", {}).values()
    }
    assert "0" in paths
    source = Path(torch.export.__file__).parent.parent / "_export" / "passes"
    assert any(
        names.NAMELESS_LAYER in path.read_text()
        for path in [*source.rglob("*.py"), *_export_files()]
    )


def _export_files() -> list[Path]:
    root = Path(torch.__file__).parent
    return [
        *(root / "export").rglob("*.py"),
        *(root / "fx" / "experimental").glob("*.py"),
        root / "fx" / "proxy.py",
    ]


@probe("HOOK_FUNCTION", "TRACED_FUNCTION")
def functions_in_graphs() -> None:
    """hooks on backwards, and custom functions inside of torch.cond, are not refused by their names
    in a trace."""
    layer = nn.Linear(2, 2)
    layer.register_full_backward_hook(lambda *_: None)
    y = layer(torch.ones(1, 2, requires_grad=True))
    found, todo = set(), [y.grad_fn]
    while todo:
        node = todo.pop()
        if isinstance(node, torch.autograd.function.BackwardCFunction):
            kind = names.function_of(node)
            found.add(f"{kind.__module__}.{kind.__qualname__}")
        todo += [after for after, _ in node.next_functions if after is not None]
    assert {names.HOOK_FUNCTION} == found
    assert (Path(torch.__file__).parent.parent / names.TRACED_FUNCTION).exists()


@probe("STEPPED")
def what_schedulers_ask() -> None:
    """a scheduler warns that the optimizer was not stepped."""
    optimizer = torch.optim.SGD([torch.ones(1, requires_grad=True)], lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    setattr(optimizer, names.STEPPED, True)
    scheduler.step()  # warnings are errors here


@probe("inductor")
def torchs_compiler() -> None:
    """compile(backend="inductor") cannot be had."""
    import torch._inductor

    assert callable(torch._inductor.compile)  # it is run by tests/compiled/test_backends.py


@probe("clear_workspaces")
def workspaces() -> None:
    """recorded runs keep memory that other kernels could have."""
    assert hasattr(torch._C, "_cuda_clearCublasWorkspaces") or torch.version.cuda is None
    if torch.version.cuda is None or torch.cuda.is_available():
        names.clear_workspaces()


# -- modules
# -------------------------------------------------------------------------------


@probe("switch_of")
def setters_and_getters_of_switches():
    """Stages that change a setting of the process are not refused on threads."""
    words = (
        "default_dtype",
        "deterministic_algorithms",
        "float32_matmul_precision",
        "sdp_use_math",
        "sdp_priority_order",
    )
    for word in words:
        owner, setter, getter = names.switch_of(word)
        getattr(owner, setter)(getter())
    owner, setter, getter = names.switch_of("fp32_precision_setter")
    getattr(owner, setter)("mkldnn", "matmul", getter("mkldnn", "matmul"))
    owner, setter, getter = names.switch_of("no_such_thing")
    assert not hasattr(owner, setter)
    assert getter is None


@probe("FORWARD_MODE")
def where_forward_mode_derivatives_begin():
    """Stages with torch.func.jvp or torch.autograd.forward_ad are not refused on threads, where
    they are wrong."""
    (ways, enter), (mode, begin) = names.FORWARD_MODE
    seen: list[str] = []

    def noting(owner, name):
        function = getattr(owner, name)
        setattr(
            owner, name, lambda *args, **kwargs: (seen.append(name), function(*args, **kwargs))[1]
        )
        return lambda: setattr(owner, name, function)

    ends = [noting(ways, enter), noting(mode, begin)]
    try:
        with torch.autograd.forward_ad.dual_level():
            pass
        assert [enter] == seen
        torch.func.jvp(torch.sin, (torch.ones(1),), (torch.ones(1),))
        assert [enter, begin, enter] == seen
    finally:
        for end in ends:
            end()


@probe("parameters_of", "buffers_of", "children_of", "TABLES")
def tables_of_modules() -> None:
    """tensors cannot be put into the modules of a stage."""
    layer = nn.BatchNorm1d(2, affine=False)
    names.buffers_of(layer)["running_mean"] = torch.full((2,), 5.0)
    assert 5.0 == layer.running_mean[0]
    linear = nn.Linear(2, 2)
    alias = linear.weight.detach().requires_grad_()
    names.parameters_of(linear)["weight"] = alias
    assert linear.weight is alias
    assert [("weight", alias), ("bias", linear.bias)] == list(linear.named_parameters())
    twice = nn.Sequential(linear, linear)
    twice.add_module("none", None)
    assert {"0": linear, "1": linear, "none": None} == names.children_of(twice)
    tables = [vars(linear)[name] for name in names.TABLES]
    assert sorted(tables, key=len) == [{}, {}, names.parameters_of(linear)]


@probe("hooks_of", "drop_hooks")
def hooks_of_modules() -> None:
    """hooks that would not be called are not refused."""
    registers = ["forward_hook", "forward_pre_hook", "full_backward_hook", "full_backward_pre_hook"]
    for register in registers:
        layer = nn.Linear(2, 2)
        assert [] == names.hooks_of(layer)
        getattr(layer, f"register_{register}")(lambda *_: pytest.fail("called"))
        assert ["forward hooks" if "forward" in register else "backward hooks"] == names.hooks_of(
            layer
        )
        names.drop_hooks(layer)
        assert [] == names.hooks_of(layer)
        layer(torch.ones(1, 2, requires_grad=True)).sum().backward()


@probe("BatchNorm")
def batch_norms() -> None:
    """batch norm layers are not known."""
    kinds = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm, nn.LazyBatchNorm1d)
    assert all(issubclass(kind, names.BatchNorm) for kind in kinds)
    assert not issubclass(nn.InstanceNorm1d, names.BatchNorm)
    for kind in kinds[:3]:
        assert kind.forward is names.BatchNorm.forward


@probe("FLAT_WEIGHTS", "list_weights")
def recurrent_layers() -> None:
    """recurrent layers compute with other weights than they are given."""
    layer = nn.GRU(2, 2)
    for name, held in list(names.parameters_of(layer).items()):
        names.parameters_of(layer)[name] = torch.zeros_like(held)
    names.list_weights(layer)
    listed = vars(layer)[names.FLAT_WEIGHTS]
    assert [id(one) for one in listed] == [id(one) for one in names.parameters_of(layer).values()]
    assert torch.equal(layer(torch.ones(1, 2))[0], torch.zeros(1, 2))


@probe("device_asked", "Anchored")
def moves_of_modules() -> None:
    """the layers of a Pipe can be moved away from their stages."""
    assert names.device_asked(torch.ones(1)) == names.device_asked("cpu") == torch.device("cpu")
    assert names.device_asked(torch.float64) is None
    assert torch.device("meta") == names.device_asked(dtype=torch.float64, device="meta")

    class Fixed(names.Anchored):
        def before_change(self, change):
            asked.append(change(torch.empty(0)).dtype)

    asked: list[torch.dtype] = []
    nn.Sequential(Fixed()).double().half()
    assert [torch.float64, torch.float16] == asked


@probe("rename")
def names_of_nodes() -> None:
    """inputs of a traced model do not bear the names of its parameters."""
    graph = torch.fx.symbolic_trace(lambda x, y: x + y).graph
    first, second, *_ = graph.nodes
    names.rename(first, "y_")
    names.rename(second, "y_")
    assert "y_" == first.name
    assert second.name not in ("y", "y_")


# -- all of them
# -------------------------------------------------------------------------------


def entries() -> list[str]:
    """What other files import from torch_names, or could."""
    tree = ast.parse(Path(names.__file__).read_text())
    found: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found.append(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.append(node.id)
    public = {name for name in found if not name.startswith("_") and hasattr(names, name)}
    return sorted(public)


@pytest.mark.parametrize("entry", entries())
def test_it_does_what_we_rely_on(entry):
    """A new torch: the error says what is lost, and which files use it."""
    assert entry in PROBES, f"{entry} of core/torch_names.py has no probe here"
    used = users().get(entry, [])
    assert used or entry in {"SavedTensor"}, (
        f"nobody uses {entry} of core/torch_names.py; take it out"
    )
    try:
        PROBES[entry]()
    except Exception as error:
        lost = (PROBES[entry].__doc__ or "").split("\n")[0]
        pytest.fail(
            f"torch {torch.__version__} and torch_names.{entry} ({', '.join(used)}): {lost} "
            f"{error!r}"
        )


# -- where one is missing
# -------------------------------------------------------------------------------


def test_a_name_that_is_there_says_nothing():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert private("torch._C._len_torch_dispatch_stack", instead=None, lost="nothing")() == 0
        assert attribute(torch.Tensor, "_version", lost="nothing")(torch.ones(1)) == 0


def test_one_that_is_missing_is_named_once(monkeypatch):
    monkeypatch.setattr(torch_lookup, "_told", set())
    for name in ("torch._no_such_name", "torch._C._nothing.of_the_kind", "torch._no_module.name"):
        says = rf"torch {torch.__version__[:4]}.* has no {name}, .*: speed"
        with pytest.warns(RuntimeWarning, match=says) as found:
            assert ["other"] * 2 == [private(name, instead="other", lost="speed") for _ in range(2)]
        assert len(found) == 1


@pytest.mark.parametrize(
    "use",
    [
        lambda missing: missing(1, a=2),
        lambda missing: isinstance(1, missing),
        lambda missing: missing.something,
        lambda missing: type("Sub", (missing,), {})(),
    ],
)
def test_one_that_cannot_be_done_without_says_so_when_it_is_used(use):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        missing = private("torch._no_such_name", lost="all is lost")
    for one in (missing, attribute(torch.Tensor, "_no_such_attribute", lost="all is lost")):
        with pytest.raises(MissingName, match=r"has no torch\..*_no_such_.*: all is lost"):
            use(one)


def test_the_slow_ways_give_the_same():
    """What takes the place of a name, where a run on another torch (below) does not come by."""
    assert () == names.saved_names(object)


ON_ANOTHER_TORCH = """
import pkgutil, sys, warnings, torch
from torch.utils.checkpoint import checkpoint
names, resolve = sys.argv[1:], pkgutil.resolve_name

def hiding(name):  # from us alone: torch uses some of them itself
    if name in names or "everything" in names:
        raise AttributeError(name)
    return resolve(name)

pkgutil.resolve_name = hiding
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    import torch.nn as nn, torch.nn.functional as F, funcpipe as fp
    assert "torch._dynamo" not in sys.modules
    if "everything" in names:  # the import goes well
        from funcpipe._src.core.torch_lookup import MissingName
        try:
            fp.split(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), 2)
            print("split")
        except MissingName as error:
            print(error)
        sys.exit()
    stages = [fp.stage(lambda w, x: F.dropout(torch.tanh(x @ w), 0.2), name=str(i)) for i in range(3)]
    params, batch = tuple(torch.randn(4, 4) for _ in stages), (torch.randn(8, 4), torch.randn(8, 4))
    for schedule in (fp.schedules.one_f_one_b(3, 4), fp.schedules.zero_bubble(3, 4), fp.schedules.remat(fp.schedules.one_f_one_b(3, 4))):
        plan = fp.make_plan(stages, schedule, loss=F.mse_loss, devices="cpu")
        expected = fp.run_sequential(plan, params, batch, seed=1)
        for executor in ("serial", "threads"):
            found = fp.run(plan, params, batch, executor=executor, seed=1)
            assert all(map(torch.equal, expected.grads, found.grads))
            assert torch.equal(expected.loss, found.loss)
    from funcpipe._src.core.torch_names import copy_all
    copied = [torch.zeros(2), torch.zeros(3)]
    copy_all(copied, [torch.ones(2), torch.ones(3)])
    assert all(bool(one.all()) for one in copied)
    layers = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    pipe = fp.Pipe(layers, balance=[2, 1], chunks=2, devices="cpu")
    pipe(batch[0]).sum().backward()
    try:
        checkpoint(pipe, batch[0].clone().requires_grad_(), use_reentrant=False).sum().backward()
        print("checkpointed")
    except fp.FuncpipeError as error:
        print("refused" if "call the pipe outside of the hooks" in str(error) else error)
found = [str(one.message) for one in said if " has no torch." in str(one.message).split("(")[0]]
missing = {text.split(" has no ")[1].split(",")[0] for text in found}
assert missing == set(names) - {"torch._C._dispatch_key_parse"} and len(found) == len(missing), (found, missing ^ set(names))
assert all(issubclass(one.category, RuntimeWarning) for one in said if str(one.message) in found)
"""

SURVIVED = [
    "torch.Tensor._is_zerotensor",
    "torch._C._data_address",
    "torch._C._is_cow_tensor",
    "torch._lazy_clone",
    "torch.ops.aten._lazy_clone.default",
    "torch._foreach_copy_",
    "torch._C._storage_Use_Count",
    "torch.autograd.Variable._execution_engine.run_backward",
    "torch._C._current_graph_task_id",
    "torch._C._autograd.SavedTensor",
    "torch._C._len_torch_function_stack",
    "torch._C._len_torch_dispatch_stack",
    "torch.utils._device.DeviceContext",
    "torch._C._functorch.peek_interpreter_stack",
    "torch._C._dispatch_key_parse",
    "torch._C._nn",
    "torch._subclasses.fake_tensor.FakeTensor",
    "torch._subclasses.functional_tensor.FunctionalTensor",
    "torch._sync",
    "torch._functionalize_has_data_mutation",
]
HOOKS = [
    f"torch._C._autograd._{what}_saved_tensors_default_hooks" for what in ("top", "pop", "push")
]
CASES = {
    "none missing": ([], "checkpointed"),
    "most": (SURVIVED, "checkpointed"),
    "hooks": (HOOKS, "refused"),
    "everything": (["everything"], "has no torch"),
}


@pytest.mark.slow
@pytest.mark.parametrize(("hidden", "says"), CASES.values(), ids=CASES)
def test_runs_are_right_on_a_torch_without_them(hidden, says):
    """Without hooks' names a pipe in a checkpointed region is refused; everything else goes on."""
    done = subprocess.run(
        [sys.executable, "-c", ON_ANOTHER_TORCH, *hidden],
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    assert says in done.stdout.strip()
