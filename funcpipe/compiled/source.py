"""Programs as Python: one straight-line function each, that drops every value at its last use."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor, fx

from funcpipe.core.errors import TraceError
from funcpipe.core.torch_names import HigherOrderOperator, OpOverload, schema
from funcpipe.compiled.binding import binding, path_of
from funcpipe.compiled.cut import Part, is_view
from funcpipe.compiled.joint import tracing
from funcpipe.runtime.rng import twin_of


class Box:
    """An argument that holds several values.

    Attributes:
        name: of the argument.
        values: what it holds, in order.
        emptied: does the function take them all out, so that each is dropped at its last use.
    """

    def __init__(self, name: str, values: Sequence[fx.Node] = (), *, emptied: bool = False) -> None:
        self.name, self.values, self.emptied = name, list(values), emptied


class Code:
    """A function with its text.

    Its first call looks at the layout of every value. Where an operation lays its result out in another way than torch
    says that it would (a few do), a copy in the layout that the rest was traced for is put into the text.

    Attributes:
        call: the function.
        text: as Python.
        operations: how many it runs, views included.
        gives: of a forward: what is said of its output (`signature.said`), once it has run.
    """

    gives: Hashable = None

    def __init__(
        self,
        name: str,
        boxes: Sequence[Box],
        part: Part,
        returns: str,
        results: Sequence[Sequence[fx.Node | None]],
        *,
        module: fx.GraphModule,
        sums: Sequence[fx.Node | None] | None = None,
        fused: Collection[int] = (),
    ) -> None:
        """Write the function of a part.

        Args:
            name: of the function.
            boxes: its arguments that hold values; ``S`` is added where there are sums.
            part: what it computes.
            returns: the expression that it returns, with ``{0}``, ``{1}`` for the lists in ``results``; "" for none.
            results: see above.
            module: where constants are.
            sums: weight gradients to be added into ``S[0]``, ``S[1]``, ...; None: the function has no ``S``.
            fused: the numbers of sums to which a product of two matrices, or a sum of rows, is added in one operation.
        """
        self._writer = writer = _Writer(name, boxes, part, module)
        writer.write(returns, results, sums, fused)
        self.text, self.operations = writer.source(writer.lines()), writer.operations
        self.call: Callable[..., Any] = self._first

    def _first(self, *values: Any) -> Any:
        writer, odd = self._writer, dict[fx.Node, None]()
        with tracing:
            look = writer.function(writer.lines(look=True), look=partial(_look, odd))
        found = look(*values)
        with tracing:
            lines = writer.lines(odd=odd)
            self.text, self.call = writer.source(lines), writer.function(lines)
        return found

    def __str__(self) -> str:
        return self.text


def _look(odd: dict[fx.Node, None], node: fx.Node, value: Any) -> Any:
    """A value in the layout that it was said to have; notes a node whose value has another."""
    said = node.meta["val"]
    rows = zip(value.shape, value.stride(), said.stride(), strict=True)
    if not value.numel() or all(mine == other for size, mine, other in rows if size > 1):
        return value
    odd[node] = None
    return laid_out(value, said.stride())


def laid_out(value: Tensor, stride: Sequence[int]) -> Tensor:
    """A copy with these strides."""
    return torch.empty_strided(value.shape, stride, dtype=value.dtype, device=value.device).copy_(value)


class _Writer:
    """Writes the text of one function.

    Attributes:
        scope: what the function finds by name besides its arguments.
        names: of the values.
        body: for each line its text, the values that it reads, and the one that it gives.
    """

    def __init__(self, name: str, boxes: Sequence[Box], part: Part, module: fx.GraphModule) -> None:
        self.name, self.boxes, self.part, self.module = name, boxes, part, module
        self.arguments = [box.name for box in boxes]
        self.scope: dict[str, Any] = {"torch": torch}
        self.names: dict[fx.Node, str] = {}
        self.body: list[tuple[str, list[fx.Node], fx.Node | None]] = []
        self.operations = 0

    def write(
        self,
        returns: str,
        results: Sequence[Sequence[fx.Node | None]],
        sums: Sequence[fx.Node | None] | None,
        fused: Collection[int],
    ) -> None:
        """Make the body."""
        self.head = self._open()
        self.arguments += [] if sums is None else ["S"]
        added = sums or ()
        direct = {added[number]: number for number in fused}
        for node in self.part.reads:
            self._add(node, added)
        for node in self.part.nodes:
            if node in direct:
                self._into(direct[node], node)
                self.operations += 1
            else:
                self.names[node] = node.name
                self._line(f"{node.name} = {self._call(node)}", node.all_input_nodes, node)
                self._add(node, added)
        words = [", ".join("None" if node is None else self.names[node] for node in row) for row in results]
        self.handed = {node for row in results for node in row if node is not None}
        self.tail = f"return {returns.format(*words)}" if returns else "return None"

    def source(self, lines: Sequence[str]) -> str:
        """The text of the function with these lines."""
        return f"def {self.name}({', '.join(self.arguments)}):\n" + "".join(f"    {line}\n" for line in lines)

    def function(self, lines: Sequence[str], **more: Any) -> Callable[..., Any]:
        """The function with these lines."""
        scope = {**self.scope, **more}
        exec(compile(self.source(lines), f"<{self.name} of a compiled stage>", "exec"), scope)
        return scope[self.name]

    def lines(self, *, look: bool = False, odd: Collection[fx.Node] = ()) -> list[str]:
        """The lines, each with a ``del`` of what it read last; with a look at each value, or copies of odd ones."""
        last: dict[fx.Node, int] = {}
        for at, (_, reads, _) in enumerate(self.body):
            last.update(dict.fromkeys(reads, at))
        emptied = [node for box in self.boxes if box.emptied for node in box.values]
        kept = {node for box in self.boxes if not box.emptied for node in box.values} | self.handed
        unread = [self.names[node] for node in emptied if node not in last and node not in kept]
        lines = [*self.head, f"del {', '.join(unread)}"] if unread else list(self.head)
        for at, (text, reads, gives) in enumerate(self.body):
            if look and gives is not None and isinstance(gives.meta.get("val"), Tensor) and not is_view(gives):
                text += f"; {gives.name} = look({self._bind('node', gives)}, {gives.name})"
            elif gives is not None and gives in odd:
                text += (
                    f"; {gives.name} = {self._bind('laid_out', laid_out)}({gives.name}, {gives.meta['val'].stride()})"
                )
            dead = [self.names[node] for node in dict.fromkeys(reads) if last[node] == at and node not in kept]
            lines.append(text + (f"; del {', '.join(dead)}" if dead else ""))
        return [*lines, self.tail]

    # -- lines -----------------------------------------------------------------------------------------------------

    def _open(self) -> list[str]:
        """Take the values out of their boxes."""
        lines: list[str] = []
        needed = {*self.part.reads}
        for box in self.boxes:
            for number, node in enumerate(box.values):
                self.names[node] = f"{box.name.lower()}{number}" if node.op == "placeholder" else node.name
            if box.emptied and box.values:
                lines += [f"{', '.join(self.names[node] for node in box.values)}, = {box.name}", f"{box.name}.clear()"]
            elif not box.emptied:
                lines += [f"{self.names[n]} = {box.name}[{i}]" for i, n in enumerate(box.values) if n in needed]
        return lines

    def _into(self, number: int, node: fx.Node) -> None:
        """Add a product, or a sum of rows (the product with ones), into its sum in one operation."""
        if node.target is torch.ops.aten.mm.default:
            self._line(f"S[{number}].addmm_({', '.join(map(self._word, node.args))})", node.all_input_nodes)
            return
        rows: Any = node.args[0]
        val = rows.meta["val"]
        ones = self._bind("ones", _ones(len(val), val.dtype))
        turned = next((n for n in rows.users if n.target is torch.ops.aten.t.default and n in self.names), None)
        word = f"{self.names[rows]}.t()" if turned is None else self.names[turned]
        self._line(f"S[{number}].addmv_({word}, {ones})", [turned or rows])

    def _add(self, node: fx.Node, sums: Sequence[fx.Node | None]) -> None:
        """Add a weight gradient to its sums as soon as it is there."""
        for number, one in enumerate(sums):
            if one is node:
                self._line(f"S[{number}].add_({self.names[node]})", [node])
                self.operations += 1

    def _line(self, text: str, reads: Iterable[fx.Node], gives: fx.Node | None = None) -> None:
        self.body.append((text, list(reads), gives))

    def _call(self, node: fx.Node) -> str:
        """The expression of an operation."""
        if node.op == "get_attr":
            return self._constant(node)
        if node.target is operator.getitem:
            return f"{self._word(node.args[0])}[{node.args[1]}]"
        if not isinstance(node.target, (OpOverload, HigherOrderOperator)):
            raise TraceError(f"its graph has {node.target}, which is no operation of torch")
        self.operations += 1
        if "draw" in node.meta:
            return self._draw(node, self._arguments(node.args, node.kwargs))
        function, positional, keywords = binding(node)
        args = self._arguments(positional, keywords)
        return f"{path_of(function) or self._bind(_plain_name(node.target), function)}({', '.join(args)})"

    def _arguments(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[str]:
        return [*map(self._word, args), *(f"{key}={self._word(value)}" for key, value in kwargs.items())]

    def _draw(self, node: fx.Node, args: list[str]) -> str:
        """The expression of an operation that draws; ``R`` holds the keys."""
        if self.name not in ("F", "A"):
            raise TraceError(f"{node.target} draws random numbers in its backward")
        val, number, func = node.meta["val"], node.meta["draw"], node.meta["drawn_by"]
        device = self._bind("device", (val[0] if isinstance(val, (tuple, list)) else val).device)
        if not schema(func).name.endswith("_"):
            func = node.target
        else:
            # It filled a tensor, and the trace lets it make one. How a draw fills memory depends on its layout.
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
            raise TraceError("it computes with a tensor that it was not given (closed over, or an attribute of a module that is no buffer): hand it in by params, state or feeds")  # fmt: skip
        return self._bind(node.name, real)

    def _word(self, value: Any) -> str:
        """The text of an argument; what has none is bound to a name."""
        match value:
            case fx.Node():
                return self.names[value]
            case list():
                return f"[{', '.join(map(self._word, value))}]"  # pyright: ignore[reportUnknownArgumentType]
            case tuple():
                return f"({''.join(f'{self._word(one)}, ' for one in value)})"  # pyright: ignore
            case None | bool() | int() | str():
                return repr(value)
            case float() if value == value and abs(value) != float("inf"):
                return repr(value)
            case torch.dtype() | torch.layout() | torch.memory_format():
                return str(value)
            case _:
                return self._bind("constant", value)

    def _bind(self, name: str, value: Any) -> str:
        """A name under which the function finds a thing; never the name of a value."""
        unique, number = f"k_{name}", 0
        while unique in self.scope and self.scope[unique] is not value:
            number += 1
            unique = f"k_{name}_{number}"
        self.scope[unique] = value
        return unique


@lru_cache(maxsize=64)
def _ones(count: int, dtype: torch.dtype) -> Tensor:
    return torch.ones(count, dtype=dtype, device="cpu")


def _plain_name(target: Any) -> str:
    return str(target).replace(".", "_").replace("::", "_")
