"""Encode trees as bytes for other processes, and decode them: checked JSON, then memory. No pickle,
no imports.

A container travels as its kind and its children, a class as its module and name. Bytes make values
of a class only if this process has sent the class, has had it in its trees, or has permitted it
(`permit`). Tensors travel as size, strides and dtype, and their memory.
"""

from __future__ import annotations

import json
import struct
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from funcpipe._src.core.border import LEAF, dense, fills
from funcpipe._src.core.errors import PlanError
from funcpipe._src.core.plain_tensors import bytes_of, is_plain
from funcpipe._src.core.tensor_layout import TensorLayout
from funcpipe._src.core.tree import Spec, Tree, flatten, put_together_by, take_apart, unflatten
from funcpipe._src.processes.wire_classes import class_named, looked_up, name_of, permit
from funcpipe._src.processes.wire_dtensors import Spread


@dataclass(frozen=True)
class TreeForm:
    """The form of a value: its structure and leaves, without the numbers of tensors."""

    spec: Spec  # the structure; `LEAF` for a row of gradients, which has no structure
    leaves: tuple[Any, ...]  # the leaves, with a `TensorLayout` for each tensor
    flags: tuple[bool, ...]  # one flag per leaf, or none
    # The numbers of the leaves that shared memory in the sending process; see `Border`.
    shared: tuple[int, ...] = ()
    # The numbers and forms of the leaves that are DTensors. Their local tensors travel.
    spreads: tuple[tuple[int, Spread], ...] = ()


_NO_SPREADS: Mapping[int, Spread] = {}


def memory(tensor: Tensor) -> Tensor:
    """Return the bytes of a dense tensor, in memory order."""
    if tensor.dtype is torch.uint8 and tensor.dim() == 1:
        return tensor
    flat = tensor if tensor.is_contiguous() else tensor.as_strided((tensor.numel(),), (1,))
    return flat.view(-1).view(torch.uint8)


def sendable(leaf: Any, number: int = 0, spreads: dict[int, Spread] | None = None) -> Any:
    """Return a leaf in the form that can be sent: a plain, detached, dense tensor.

    Args:
        leaf: the leaf.
        number: the number of the leaf in its value.
        spreads: by number, gets the form of a DTensor, whose local tensor is returned. None:
            DTensors cannot be sent.

    Raises PlanError for leaves that cannot be sent.
    """
    if isinstance(leaf, Tensor):
        leaf = leaf.detach().resolve_conj().resolve_neg()
        if not is_plain(leaf):
            if spreads is not None and hasattr(leaf, "device_mesh"):
                spreads[number] = Spread.of(leaf)
                return sendable(dense(leaf.to_local()))  # pyright: ignore[reportAttributeAccessIssue]
            # Styles of tensor parallelism return results of collectives that may still run.
            if hasattr(leaf, "wait"):
                return sendable(dense(leaf.wait()))  # pyright: ignore[reportAttributeAccessIssue]
            raise PlanError(
                f"a {type(leaf).__name__} ({leaf.layout}) cannot go to another process; pass plain, "
                "dense tensors"
            )
        if leaf.storage_offset() == 0 and (leaf.is_contiguous() or fills(leaf)):
            return leaf
        return leaf.clone(memory_format=torch.contiguous_format)
    _coded(leaf)
    return leaf


def form_of(
    leaves: Sequence[Any],
    spec: Spec,
    flags: Sequence[bool],
    shared: Sequence[int] = (),
    spreads: Mapping[int, Spread] = _NO_SPREADS,
) -> TreeForm:
    """Return the form of `sendable` leaves."""
    own = tuple(map(_without_numbers, leaves))
    return TreeForm(spec, own, tuple(map(bool, flags)), tuple(shared), tuple(spreads.items()))


def form_key(
    leaves: Sequence[Any],
    spec: Spec,
    flags: Sequence[bool],
    shared: Sequence[int] = (),
    spreads: Mapping[int, Spread] = _NO_SPREADS,
) -> Any:
    """Return a lookup key, equal for equal forms only."""
    return (
        spec,
        tuple(shared),
        tuple(spreads.items()),
        *flags,
        *[
            (type(leaf), repr(leaf))
            if not isinstance(leaf, Tensor)
            else (leaf.shape, leaf.stride(), leaf.dtype)
            for leaf in leaves
        ],
    )


def _without_numbers(leaf: Any) -> Any:
    return TensorLayout.of(leaf) if isinstance(leaf, Tensor) else leaf


def pack_form(form: TreeForm) -> bytes:
    """Return a form as bytes. Raises PlanError for containers and leaves that cannot be sent."""
    row = form.spec == LEAF and len(form.leaves) != 1
    skeleton = (
        None if row else _structure(unflatten(form.spec, map(_Number, range(len(form.leaves)))))
    )
    return json.dumps(
        [skeleton, [_coded(leaf) for leaf in form.leaves], form.flags, form.shared, form.spreads]
    ).encode()


def unpack_form(data: bytes) -> TreeForm:
    """Return the form that was packed. Raises PlanError for other bytes."""
    return _unpacked_form(data, class_named, _DECODERS)


def _unpacked_form(
    data: bytes, find: Callable[[str], Any], decoders: Mapping[str, Callable[[Any], Any]]
) -> TreeForm:
    try:
        structure, leaves, flags, shared, codes = json.loads(data)
        values = [_decoded(leaf, decoders) for leaf in leaves]
        numbers, spec = (
            ([*range(len(values))], LEAF) if structure is None else flatten(_built(structure, find))
        )
        if [*map(int, numbers)] != [*range(len(values))] or not all(
            isinstance(flag, bool) for flag in flags
        ):
            raise ValueError("its leaves are out of order")
        spreads = {number: Spread.read(code) for number, code in codes}
        if any(type(n) is not int or not 0 <= n < len(values) for n in (*shared, *spreads)):
            raise ValueError("it has no such leaves")
        if not all(isinstance(values[number], TensorLayout) for number in spreads):
            raise ValueError("a DTensor has no local tensor")
    except PlanError:
        raise
    except Exception as error:
        raise PlanError(
            f"a message from another process is damaged, {type(error).__name__}: {error}"
        ) from error
    return TreeForm(spec, tuple(values), tuple(flags), tuple(shared), tuple(spreads.items()))


_KNOWN = 64
"""The number of cached forms of whole trees, per direction. Exchanges repeat the same forms."""


class NumberLayout(NamedTuple):
    """The placeholder of a number in the form of a whole tree. The number is sent with the tensors."""

    code: str  # the code of `struct`: "q" for an int, "d" for a float


_MESSAGE = struct.Struct("<QI")
"""The head of a message: the number of the run, and the length of the topic."""

_heads: dict[Any, bytes] = {}  # packed forms of whole trees, by `form_key`

_BY_CODE = {"q": NumberLayout("q"), "d": NumberLayout("d")}


def pack(tree: Tree) -> bytes:
    """Return a whole tree as bytes: the length of its form, the form, then numbers and tensors."""
    leaves, spec = flatten(tree)
    layouts, parts = list[Any](), list[bytes]()
    for leaf in map(sendable, leaves):
        code = (
            "d"
            if type(leaf) is float
            else "q"
            if type(leaf) is int and -(2**63) <= leaf < 2**63
            else ""
        )
        if code:
            parts.append(struct.pack(f"<{code}", leaf))
        elif isinstance(leaf, Tensor):
            parts.append(bytes_of(leaf.cpu()))
        layouts.append(_BY_CODE[code] if code else leaf)
    key = form_key(layouts, spec, ())
    head = _heads.get(key)
    if head is None:
        head = pack_form(form_of(layouts, spec, ()))
        if len(_heads) >= _KNOWN:
            _heads.clear()
        _heads[key] = head
    return b"".join([struct.pack("<q", len(head)), head, *parts])


def unpack(data: bytes) -> Tree:
    """Return the tree that was packed. Its tensors have their own memory.

    Raises PlanError for other bytes.
    """
    end = 8 + struct.unpack("<q", data[:8])[0] if len(data) >= 8 else -1
    if not 8 <= end <= len(data):
        raise PlanError(
            f"a message from another process is damaged: it has {len(data)} bytes, and a head of "
            f"{end - 8}"
        )
    form = _form_of(data[8:end])
    leaves: list[Any] = []
    for leaf in form.leaves:
        if isinstance(leaf, (TensorLayout, NumberLayout)):
            start, end = end, end + (leaf.nbytes if isinstance(leaf, TensorLayout) else 8)
            if end > len(data):
                raise PlanError(
                    "a message from another process is damaged: numbers are missing at its end"
                )
            leaf = _read(leaf, data[start:end])
        leaves.append(leaf)
    return unflatten(form.spec, leaves)


def pack_message(run: int, about: str, tree: Tree) -> bytes:
    """Return the message of one process in an exchange. None as the tree takes no bytes."""
    topic = about.encode()
    return _MESSAGE.pack(run, len(topic)) + topic + (b"" if tree is None else pack(tree))


def unpack_message(data: bytes) -> tuple[int, str, bytes]:
    """Return the number of the run, the topic, and the bytes for `unpack_tree`.

    Raises PlanError for other bytes.
    """
    try:
        run, length = _MESSAGE.unpack_from(data)
        topic, rest = data[_MESSAGE.size :][:length].decode(), data[_MESSAGE.size + length :]
    except (struct.error, UnicodeDecodeError) as error:
        raise PlanError(f"a message from another process is damaged: {error}") from None
    return run, topic, rest


def unpack_tree(data: bytes) -> Tree:
    """Return the tree of a message. Raises PlanError for other bytes.

    Only messages with one topic are decoded: for another topic, another process may send classes
    that this process does not know.
    """
    return unpack(data) if data else None


def _read(layout: TensorLayout | NumberLayout, data: bytes) -> Any:
    """Decode the bytes of a number or a tensor."""
    if isinstance(layout, NumberLayout):
        return struct.unpack(f"<{layout.code}", data)[0]
    tensor = layout.room()
    if data:
        memory(tensor).copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    return tensor


@lru_cache(_KNOWN)
def _known(data: bytes) -> tuple[TreeForm, dict[str, type]]:
    """Return the form of a whole tree, and its classes by name."""
    classes: dict[str, type] = {}

    def find(name: str) -> type:
        classes[name] = found = class_named(name)
        return found

    return _unpacked_form(data, find, {**_DECODERS, "number": _BY_CODE.__getitem__}), classes


def _form_of(data: bytes) -> TreeForm:
    """Return the form of a whole tree, from the cache if its classes are unchanged."""
    form, classes = _known(data)
    # A notebook cell may have redefined a class.
    if any(looked_up(name) is not kind for name, kind in classes.items()):
        _known.cache_clear()
        form, _ = _known(data)
    return form


# -- leaves


_DTYPES = {str(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)}
"""The dtypes of torch, by name. Not by getattr, which imports some of torch's modules."""


def _dtype(name: str) -> torch.dtype:
    if name not in _DTYPES:
        raise ValueError(f"{name} is not a dtype")
    return _DTYPES[name]


_AS_THEY_ARE = (type(None), bool, int, str)
_CODES: dict[str, tuple[type, Callable[[Any], Any], Callable[[Any], Any]]] = {
    "float": (float, float.hex, float.fromhex),
    "complex": (
        complex,
        lambda value: [value.real.hex(), value.imag.hex()],
        lambda pair: complex(*map(float.fromhex, pair)),
    ),
    "bytes": (bytes, bytes.hex, bytes.fromhex),
    "dtype": (torch.dtype, str, _dtype),
    "device": (torch.device, str, torch.device),
    "size": (torch.Size, list, torch.Size),
}
"""Leaves that JSON does not have: (type, writer, reader)."""


def _coded(leaf: Any) -> Any:
    """Return a leaf for JSON. Raises PlanError for leaves that cannot be sent."""
    if type(leaf) in _AS_THEY_ARE:
        return leaf
    if isinstance(leaf, TensorLayout):
        return {"tensor": [list(leaf.size), list(leaf.strides), str(leaf.dtype)]}
    if isinstance(leaf, NumberLayout):
        return {"number": leaf.code}
    for name, (kind, write, _) in _CODES.items():
        if type(leaf) is kind:
            return {name: write(leaf)}
    raise PlanError(
        f"a {type(leaf).__name__} cannot go to another process; stages of different processes "
        "exchange tensors, numbers, strings and None, in containers, and so do aux of losses and "
        "ties"
    )


def _layout(value: Any) -> TensorLayout:
    size, strides = (tuple(map(int, numbers)) for numbers in value[:2])
    if len(size) != len(strides) or min((*size, *strides), default=0) < 0:
        raise ValueError(f"no tensor has size {size} and strides {strides}")
    layout = TensorLayout(size, strides, _dtype(value[2]))
    if not fills(torch.empty_strided(size, strides, dtype=layout.dtype, device="meta")):
        raise ValueError(f"a tensor of size {size} and strides {strides} has gaps")
    return layout


_DECODERS: dict[str, Callable[[Any], Any]] = {
    "tensor": _layout,
    **{name: read for name, (_, _, read) in _CODES.items()},
}


def _decoded(leaf: Any, decoders: Mapping[str, Callable[[Any], Any]] = _DECODERS) -> Any:
    """Return the leaf that `_coded` has coded."""
    if type(leaf) in _AS_THEY_ARE:
        return leaf
    ((name, value),) = leaf.items()
    return decoders[name](value)


# -- containers


class _Number(int):
    """The number of a leaf, in the leaf's place in a tree."""


def _structure(node: Any) -> Any:
    """Return a container for JSON, with numbers in place of leaves."""
    kind = type(node)
    if kind is _Number:
        return int(node)
    if kind in (list, tuple):
        return [kind.__name__, [_structure(child) for child in node]]
    if kind is deque:
        return ["deque", [_structure(child) for child in node], node.maxlen]
    if kind in (dict, OrderedDict):
        return [kind.__name__, [[_coded(key), _structure(child)] for key, child in node.items()]]
    if kind is defaultdict:
        raise PlanError(
            "a defaultdict cannot go to another process, because its factory cannot; pass a dict"
        )
    if isinstance(node, tuple) and hasattr(kind, "_fields"):
        return ["named", name_of(kind), [_structure(child) for child in node]]
    children, kept = take_apart(node)
    return ["class", name_of(kind), [_structure(child) for child in children], _plain(kept)]


def _built(code: Any, find: Callable[[str], Any]) -> Any:
    """Return the container that `_structure` has coded."""
    if isinstance(code, int):
        return _Number(code)
    kind, *rest = code
    match kind:
        case "list":
            return [_built(child, find) for child in rest[0]]
        case "tuple":
            return tuple([_built(child, find) for child in rest[0]])
        case "deque":
            return deque([_built(child, find) for child in rest[0]], rest[1])
        case "dict" | "OrderedDict":
            pairs = [(_decoded(key), _built(child, find)) for key, child in rest[0]]
            return dict(pairs) if kind == "dict" else OrderedDict(pairs)
        case "named":
            made = find(rest[0])
            if not (issubclass(made, tuple) and hasattr(made, "_fields")):
                raise ValueError(f"{rest[0]} is no named tuple here")
            return made(*[_built(child, find) for child in rest[1]])
        case "class":
            put_together = put_together_by(find(rest[0]))
            if put_together is None:
                raise ValueError(f"{rest[0]} is not a container here")
            return put_together(_unplain(rest[2], find), [_built(child, find) for child in rest[1]])
        case _:
            raise ValueError(f"{kind!r} is not a container")


def _plain(kept: Any) -> Any:
    """Return a container's metadata for JSON."""
    if type(kept) in (list, tuple):
        return [type(kept).__name__, [_plain(part) for part in kept]]
    if type(kept) is dict:
        return ["dict", [[_plain(key), _plain(part)] for key, part in kept.items()]]
    if isinstance(kept, type):
        return ["type", name_of(kept)]
    return ["leaf", _coded(str(kept) if isinstance(kept, str) else kept)]


def _unplain(code: Any, find: Callable[[str], Any]) -> Any:
    kind, value = code
    match kind:
        case "list":
            return [_unplain(part, find) for part in value]
        case "tuple":
            return tuple([_unplain(part, find) for part in value])
        case "dict":
            return {_unplain(key, find): _unplain(part, find) for key, part in value}
        case "type":
            return find(value)
        case "leaf":
            return _decoded(value)
        case _:
            raise ValueError(f"{kind!r} is not metadata of a container")


permit(TensorLayout)
