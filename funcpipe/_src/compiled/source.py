"""Write programs as Python: one straight-line function each, which drops each value after its last
use.

`backend` builds operations by a compiler instead.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from funcpipe._src.compiled.backend import Backend, Kernel
from funcpipe._src.compiled.cut import Part, gather, is_view, nodes_in, product
from funcpipe._src.compiled.joint import NOT_GIVEN
from funcpipe._src.core.errors import TraceError
from funcpipe._src.core.torch_names import (
    BINDINGS,
    HigherOrderOperator,
    OpOverload,
    WatchingMode,
    pytree,
    schema,
)
from funcpipe._src.core.tracing import tracing
from funcpipe._src.stages.rng import twin_of

EMPTIED = frozenset("KGL")
"""The arguments that a program takes out of their list, so that each value is freed after its
last use."""


class Line(NamedTuple):
    """A line of a program, the values that it reads, and the new values that it computes."""

    text: str
    reads: list[fx.Node]
    gives: list[fx.Node]


class Code:
    """A function with its source text.

    The first call checks the layout of each value. A few operations return another layout than
    torch declares. The text then gets a copy into the layout that the rest was traced with.

    The backend builds all operations except the additions to sums. None: each operation is a line.
    """

    # For a forward, the key of its output (`border_key_or_none`) after the first call.
    gives: Hashable = None

    def __init__(self, part: Part, module: fx.GraphModule, backend: Backend | None = None) -> None:
        self.part, self.module = part, module
        self.handed = set(nodes_in(part.gives))
        self.operations = 0  # with views
        self.kernel: Kernel | None = None
        self._scope: dict[str, Any] = {"torch": torch}
        self._names: dict[fx.Node, str] = {}
        self._body: list[Line] = []
        self._head = self._open()
        # Backends do not support the keys of draws.
        if backend is None or any("draw" in node.meta for node in part.nodes):
            self._write()
        else:
            self._hand_over(backend)
        results = part.gives if isinstance(part.gives, tuple) else (part.gives,)
        self._tail = f"return {', '.join(map(self._word, results))}"
        self.text = self._source(self._lines())
        self.call: Callable[..., Any] = self._first

    def build(self) -> None:
        """Let the backend build its function now instead of at the first call."""
        if self.kernel is not None:
            self.kernel.build()

    def __str__(self) -> str:
        built = (
            ""
            if self.kernel is None
            else f"# What is built of it:\n{self.kernel.graph.code.strip()}\n"
        )
        return self.text + built

    # Some kernels return another layout than their fake tensors (`mse_loss_backward` of a
    # transposed input), and a traced view of such a result would fail.
    def _first(self, *values: Any) -> Any:
        odd: dict[fx.Node, None] = {}
        with tracing:
            function = self._function(self._lines(look=True), look=partial(_look, odd))
        results = function(*values)
        with tracing:
            lines = self._lines(odd=odd)
            self.text, self.call = self._source(lines), self._function(lines)
        return results

    def _source(self, lines: Sequence[str]) -> str:
        """The text of the function with these lines."""
        arguments = [*self.part.takes, *([] if self.part.sums is None else ["S"])]
        return f"def {self.part.name}({', '.join(arguments)}):\n" + "".join(
            f"    {line}\n" for line in lines
        )

    def _function(self, lines: Sequence[str], **names: Any) -> Callable[..., Any]:
        """Compile the function with these lines."""
        scope = {**self._scope, **names}
        exec(compile(self._source(lines), f"<{self.part.name} of a compiled stage>", "exec"), scope)
        # Popped: otherwise function and scope would form a reference cycle, which would keep the
        # backend's kernels alive until the next garbage collection.
        return scope.pop(self.part.name)

    def _lines(self, *, look: bool = False, odd: Collection[fx.Node] = ()) -> list[str]:
        """The lines, each with a ``del`` of the values that it reads last.

        With ``look``, each value is checked; ``odd`` values are copied.
        """
        last: dict[fx.Node, int] = {}
        for number, line in enumerate(self._body):
            last.update(dict.fromkeys(line.reads, number))
        kept, unread = set(self.handed), list[str]()
        for argument, values in self.part.takes.items():
            if argument in EMPTIED:
                unread += [
                    self._names[node]
                    for node in values
                    if node not in last and node not in self.handed
                ]
            else:
                kept.update(values)
        lines = [*self._head, f"del {', '.join(unread)}"] if unread else list(self._head)
        for number, (text, reads, gives) in enumerate(self._body):
            for node in gives:
                if look and isinstance(node.meta.get("val"), Tensor):
                    text += f"; {node.name} = look({self._bind('node', node)}, {node.name})"
                elif node in odd:
                    copy, stride = self._bind("laid_out", laid_out), node.meta["val"].stride()
                    text += f"; {node.name} = {copy}({node.name}, {stride})"
            dead = [
                self._names[node]
                for node in dict.fromkeys(reads)
                if last[node] == number and node not in kept
            ]
            lines.append(text + (f"; del {', '.join(dead)}" if dead else ""))
        return [*lines, self._tail]

    # -- lines
    # -------------------------------------------------------------------------------

    def _open(self) -> list[str]:
        """The lines that take the values out of the arguments."""
        lines: list[str] = []
        needed = set(self.part.reads)
        for argument, values in self.part.takes.items():
            for number, node in enumerate(values):
                self._names[node] = (
                    f"{argument.lower()}{number}" if node.op == "placeholder" else node.name
                )
            if argument not in EMPTIED:
                lines += [
                    f"{self._names[n]} = {argument}[{i}]"
                    for i, n in enumerate(values)
                    if n in needed
                ]
            elif values:
                lines += [
                    f"{', '.join(self._names[node] for node in values)}, = {argument}",
                    f"{argument}.clear()",
                ]
        return lines

    def _write(self) -> None:
        """Write a line for each operation; gradients are added to their sums immediately."""
        sums = self.part.sums or ()
        direct = {sums[number]: number for number in self.part.fused}
        for node in self.part.reads:
            self._add(node)
        for node in self.part.nodes:
            if node in direct:
                self._into(direct[node], node)
                self.operations += 1
            else:
                self._names[node] = node.name
                new = [] if is_view(node) else [node]
                self._line(f"{node.name} = {self._call(node)}", node.all_input_nodes, new)
                self._add(node)

    def _hand_over(self, backend: Backend) -> None:
        """Write one line for all operations, except products that are added to a sum."""
        sums = dict(enumerate(self.part.sums or ()))
        products = {number: sums.pop(number) for number in self.part.fused}
        factors = [list(product(node)[:2]) for node in nodes_in(list(products.values()))]
        needed = dict.fromkeys(nodes_in((self.part.gives, list(sums.values()), factors)))
        outs = [node for node in needed if node not in self._names]
        nodes, reads = gather(outs, stop=set(self._names))
        if nodes:
            self.kernel = Kernel(nodes, reads, outs, self.module, backend)
            self.operations = len(nodes)
            inputs = ", ".join(self._names[node] for node in reads)
            self._names.update((node, node.name) for node in outs)
            results = ", ".join(node.name for node in outs)
            self._line(f"{results}, = {self._bind('built', self.kernel)}({inputs})", reads, outs)
        for node in dict.fromkeys(nodes_in(list(sums.values()))):
            self._add(node)
        for number, node in products.items():
            self._into(number, node)

    def _into(self, number: int, node: Any) -> None:
        """Add a product to its sum in one operation."""
        left, right, turned = product(node)
        if turned and left in self._names and node.args[0] not in self._names:
            self._line(
                f"S[{number}].addmm_({self._names[left]}.t(), {self._word(right)})", [left, right]
            )
        else:
            self._line(
                f"S[{number}].addmm_({', '.join(map(self._word, node.args))})", node.all_input_nodes
            )

    def _add(self, node: fx.Node) -> None:
        """Add a weight gradient to its sums."""
        for number, gradient in enumerate(self.part.sums or ()):
            if gradient is node:
                self._line(f"S[{number}].add_({self._names[node]})", [node])
                self.operations += 1

    def _line(self, text: str, reads: Iterable[fx.Node], gives: Sequence[fx.Node] = ()) -> None:
        self._body.append(Line(text, list(reads), list(gives)))

    def _call(self, node: fx.Node) -> str:
        """The expression of an operation."""
        if node.op == "get_attr":
            return self._constant(node)
        if node.target is operator.getitem:
            return f"{self._word(node.args[0])}[{node.args[1]}]"
        if not isinstance(node.target, (OpOverload, HigherOrderOperator)):
            raise TraceError(f"its graph has {node.target}, which is not an operation of torch")
        self.operations += 1
        if "draw" in node.meta:
            return self._draw(node, self._arguments(node.args, node.kwargs))
        function, positional, keywords = binding(node)
        args = self._arguments(positional, keywords)
        return f"{path_of(function) or self._bind(_plain_name(node.target), function)}({', '.join(args)})"

    def _arguments(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[str]:
        return [
            *map(self._word, args),
            *(f"{key}={self._word(value)}" for key, value in kwargs.items()),
        ]

    def _draw(self, node: fx.Node, args: list[str]) -> str:
        """The expression of an operation that draws. ``R`` has the keys."""
        if self.part.name not in ("F", "A"):
            raise TraceError(f"{node.target} draws random numbers in its backward")
        val, number, func = node.meta["val"], node.meta["draw"], node.meta["drawn_by"]
        device = self._bind("device", (val[0] if isinstance(val, (tuple, list)) else val).device)
        if not schema(func).name.endswith("_"):
            func = node.target
        else:
            # The operation fills a tensor in place; the functional trace makes a new tensor
            # instead. How a draw fills memory depends on the layout, so the original operation runs
            # on a tensor of the original layout.
            first: Any = node.args[0]
            fresh = first.op == "call_function" and len(first.users) == 1 and not is_view(first)
            args[0] = args[0] if fresh else f"torch.clone({args[0]})"
        twin = twin_of(func)
        if twin is None:
            return f"R.run({', '.join([str(number), device, self._bind(_plain_name(func), func), *args])})"
        return f"{self._bind(_plain_name(func), twin)}({', '.join([*args, f'generator=R.of({number}, {device})'])})"

    def _constant(self, node: fx.Node) -> str:
        value = getattr(self.module, str(node.target))
        real = value.constant if hasattr(value, "fake_mode") else value
        if real is None:
            raise TraceError(NOT_GIVEN)
        return self._bind(node.name, real)

    def _word(self, value: Any) -> str:
        """The text of an argument. An object without a text is bound to a name."""
        match value:
            case fx.Node():
                return self._names[value]
            case list():
                return f"[{', '.join(map(self._word, value))}]"  # pyright: ignore[reportUnknownArgumentType]
            case tuple():
                return f"({''.join(f'{self._word(element)}, ' for element in value)})"  # pyright: ignore
            case None | bool() | int() | str():
                return repr(value)
            case float() if value == value and abs(value) != float("inf"):
                return repr(value)
            case torch.dtype() | torch.layout() | torch.memory_format():
                return str(value)
            case _:
                return self._bind("constant", value)

    def _bind(self, name: str, value: Any) -> str:
        """Bind an object to a name in the function's scope that no node's value has."""
        unique, number = f"k_{name}", 0
        while unique in self._scope and self._scope[unique] is not value:
            number += 1
            unique = f"k_{name}_{number}"
        self._scope[unique] = value
        return unique


def _look(odd: dict[fx.Node, None], node: fx.Node, value: Any) -> Any:
    """Return the value in the layout of its trace. Adds a node whose value has another layout to
    ``odd``."""
    traced = node.meta["val"]
    if lies_as(value, traced):
        return value
    odd[node] = None
    return laid_out(value, traced.stride())


def lies_as(value: Any, traced: Any) -> bool:
    """Whether a value has the layout of its trace; dimensions of size 1 do not matter."""
    if not isinstance(value, Tensor) or not value.numel():
        return True
    rows = zip(value.shape, value.stride(), traced.stride(), strict=True)
    return all(stride == expected for size, stride, expected in rows if size > 1)


def laid_out(value: Tensor, stride: Sequence[int]) -> Tensor:
    """A copy with these strides."""
    return torch.empty_strided(value.shape, stride, dtype=value.dtype, device=value.device).copy_(
        value
    )


def _plain_name(target: Any) -> str:
    return str(target).replace(".", "_").replace("::", "_")


class _CallLog(WatchingMode):
    """A mode that records each call that reaches the dispatcher."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Operations of prim, such as prim.device, read facts of a tensor and compute nothing.
        if getattr(func, "namespace", "") != "prim":
            self.calls.append((func, args, kwargs or {}))
        return func(*args, **(kwargs or {}))


def path_of(value: Any) -> str:
    """``torch.mm`` for a binding of torch, "" for an overload."""
    for prefix, holder in BINDINGS:
        name = getattr(value, "__name__", "")
        if not isinstance(value, OpOverload) and getattr(holder, name, None) is value:
            return f"{prefix}.{name}"
    return ""


def binding(node: fx.Node) -> tuple[Callable[..., Any], Sequence[Any], Mapping[str, Any]]:
    """The fastest function that makes the call of a node, and its arguments.

    An overload called from Python finds its kernel through a slower path than torch's own binding.
    The function tries on the trace's fake tensors whether a binding of the same name makes the same
    call. Some bindings have other defaults than the operation, so they are also tried with all
    arguments.
    """
    target: Any = node.target
    unchanged = target, node.args, node.kwargs
    if not isinstance(target, OpOverload) or target.namespace != "aten":
        return unchanged
    name = schema(target).name.removeprefix("aten::")
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda arg: arg.meta["val"])  # pyright: ignore
    mode: Any = next(
        (
            leaf.fake_mode
            for leaf in pytree.tree_leaves((args, kwargs))
            if hasattr(leaf, "fake_mode")
        ),
        None,
    )
    if mode is None:
        return unchanged
    left_out = tuple(
        argument.default_value
        for argument in schema(target).arguments[len(args) :]
        if not argument.kwarg_only
    )
    for candidate in [getattr(holder, name) for _, holder in BINDINGS if hasattr(holder, name)]:
        for defaults in ((), left_out) if left_out else ((),):
            if _makes(candidate, target, (*args, *defaults), kwargs, mode):
                return candidate, (*node.args, *defaults), node.kwargs
    return unchanged


def _makes(candidate: Any, target: Any, args: Any, kwargs: Mapping[str, Any], mode: Any) -> bool:
    """Whether a call of the candidate runs the target, with the same arguments and no other
    operation."""
    log = _CallLog()
    try:
        with torch.no_grad(), mode, log:
            candidate(*args, **kwargs)
    except Exception:
        return False
    if len(log.calls) != 1 or log.calls[0][0] is not target:
        return False
    return _complete(target, *log.calls[0][1:]) == _complete(target, args, kwargs)


def _complete(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """All arguments by name, with defaults for omitted ones. Tensors are compared by identity."""
    arguments = schema(target).arguments
    values = {
        argument.name: argument.default_value
        for argument in arguments
        if argument.has_default_value()
    }
    values |= dict(zip((argument.name for argument in arguments), args, strict=False)) | dict(
        kwargs
    )
    return {
        name: [id(leaf) if isinstance(leaf, Tensor) else leaf for leaf in pytree.tree_leaves(value)]
        for name, value in values.items()
    }
