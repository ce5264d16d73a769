"""Trees as bytes: what travels comes back the same, and what cannot is refused with what it is."""

import json
import struct
import sys
from collections import OrderedDict, deque
from dataclasses import dataclass
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from common import same
from hypothesis import given
from hypothesis import strategies as st

import funcpipe as fp
from funcpipe._src.core.tensor_layout import TensorLayout
from funcpipe._src.core.tree import flatten
from funcpipe._src.processes.columns import Columns, apart, joined
from funcpipe._src.processes.wire_dtensors import Spread
from funcpipe._src.processes.wire_format import (
    form_key,
    form_of,
    memory,
    pack,
    pack_form,
    sendable,
    unpack,
    unpack_form,
)

numbers = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(allow_nan=False),
    st.text(),
    st.binary(),
)
tensors = st.sampled_from(
    [
        torch.arange(6.0).view(2, 3),
        torch.arange(6).view(2, 3).T,
        torch.tensor(3, dtype=torch.int16),
        torch.zeros(0, 4),
        torch.tensor([True, False]),
        torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.randn(3, dtype=torch.complex64),
        torch.randn(4).bfloat16(),
        torch.arange(12.0)[::3],
    ]
)
trees = st.recursive(
    st.one_of(numbers, tensors),
    lambda children: st.one_of(
        st.lists(children, max_size=3),
        st.tuples(children, children),
        st.dictionaries(st.one_of(st.text(max_size=3), st.integers(0, 9)), children, max_size=3),
    ),
    max_leaves=8,
)


@given(trees)
def test_what_travels_comes_back(tree):
    back = unpack(pack(tree))
    leaves = [sendable(leaf) for leaf in flatten(tree)[0]]
    for one, other in zip(leaves, flatten(back)[0], strict=True):
        assert type(one) is type(other)
        if isinstance(one, torch.Tensor):
            assert (one.shape, one.stride(), one.dtype) == (
                other.shape,
                other.stride(),
                other.dtype,
            )
    assert same(tree, back)


class Point(NamedTuple):
    x: torch.Tensor
    y: int


@dataclass
class Sized:
    h: torch.Tensor
    size: torch.Size
    kind: torch.dtype = torch.float64


def test_containers_and_other_leaves():
    tree = {
        "point": Point(torch.ones(2), 3),
        "sized": Sized(torch.zeros(1), torch.Size([2, 3])),
        "ordered": OrderedDict([("b", 1j), ("a", torch.device("cpu"))]),
        "deque": deque([1, -0.0], maxlen=4),
        "loss": fp.Loss(torch.tensor(1.0), 3, aux={"n": float("nan")}),
    }
    back = unpack(pack(tree))
    assert repr(tree) == repr(back)
    assert [*tree] == [*back]
    assert ["b", "a"] == [*back["ordered"]]
    assert 4 == back["deque"].maxlen


def test_a_form_has_no_numbers():
    leaves, spec = flatten((torch.ones(2, 3), "word", None))
    form = form_of(leaves, spec, (True, False, False), [0, 2])
    assert TensorLayout((2, 3), (3, 1), torch.float32) == form.leaves[0]
    assert form == unpack_form(pack_form(form))
    assert 24 == memory(leaves[0]).numel()


def test_what_cannot_travel_is_named():
    class Local(NamedTuple):
        x: int

    for tree, words in (
        (object(), "a object cannot go to another process"),
        ({"f": print}, "builtin_function_or_method"),
        (Local(1), "Local cannot go to another process"),
        (torch.ones(2).to_sparse(), "sparse"),
        ({(1, 2): 3}, "tuple"),
    ):
        with pytest.raises(fp.PlanError, match=words):
            pack(tree)


TENSOR = {"tensor": [[4, 3], [3, 1], "torch.float32"]}
SPREAD = [[4, 5], [5, 1], [["Shard", 1]], ["tp"], [2], [0]]


def test_the_form_of_a_dtensor_comes_back():
    placements = [["Shard", 0], ["Replicate", None], ["Partial", "sum"]]
    three = [[4, 5], [5, 1], placements, ["a", "b", "c"], [2, 1, 3], [1, 0, 2]]
    for spread in (SPREAD, three):
        form = unpack_form(json.dumps([None, [1, TENSOR], [], [], [[1, spread]]]).encode())
        assert form == unpack_form(pack_form(form))
        ((number, found),) = form.spreads
        assert (1, spread[3]) == (number, [*found.names])
        keys = [form_key([torch.ones(2)], (), (), (), {0: each}) for each in (found, form)]
        assert keys[0] != keys[1]


def test_other_placements_cannot_travel():
    class Odd:
        pass

    mesh = SimpleNamespace(mesh_dim_names=("tp",))
    with pytest.raises(fp.PlanError, match=r"Odd.* redistribute it to Shard, Replicate or Partial"):
        Spread.of(SimpleNamespace(device_mesh=mesh, placements=(Odd(),)))


NO_CONTAINERS = [
    ["named", "os:system", [0]],
    ["named", "subprocess:Popen", [0]],
    ["class", "subprocess:Popen", [0], ["leaf", None]],
    ["class", "builtins:eval", [0], ["leaf", None]],
    ["named", "not_loaded_module:Thing", [0]],
    ["set", [0]],
    ["list", [5]],
    {"list": [0]},
]
"""Structures of which nothing may be called."""
NO_LEAVES = [
    {"tensor": [[2, -1], [1, 1], "torch.float32"]},
    {"tensor": [[2, 2], [0, 0], "torch.float32"]},
    {"tensor": [[2], [1], "torch.nn"]},
    {"tensor": [[2], [1, 1], "torch.float32"]},
    {"code": "import os"},
    [1],
]
NO_FIELDS = [
    (0, [4]),
    (1, [5, -1]),
    (2, []),
    (2, [["Shard", "1"]]),
    (2, [["Shard", True]]),
    (2, [["Partial", None]]),
    (2, [["DTensor", 1]]),
    (2, [["Replicate", 0]]),
    (3, ["tp", "pp"]),
    (3, [1]),
    (4, ["2"]),
    (5, [-1]),
]
"""Wrong fields of `SPREAD`."""
NO_SPREADS = [
    *([1, [*SPREAD[:field], wrong, *SPREAD[field + 1 :]]] for field, wrong in NO_FIELDS),
    [0, SPREAD],
    [1, SPREAD[1:]],
    [True, SPREAD],
    [2, SPREAD],
]
DAMAGED = [
    *([structure, [1], [], [], []] for structure in NO_CONTAINERS),
    *([None, [1], [], shared, []] for shared in ([1], [-1], ["0"], [True], 0)),
    *([0, [leaf], [], [], []] for leaf in NO_LEAVES),
    *([None, [1, TENSOR], [], [], [spread]] for spread in NO_SPREADS),
    [0, [{"number": "q"}], []],  # at an edge, a form has its numbers
]


@pytest.mark.parametrize("form", DAMAGED, ids=str)
def test_damaged_forms_are_refused(form):
    """Structures of other objects than containers, shared leaves that are none, damaged leaves and
    damaged DTensors."""
    with pytest.raises(fp.PlanError, match="damaged"):
        unpack_form(json.dumps(form).encode())


@given(st.data())
def test_damaged_bytes_are_refused(data):
    """Cut anywhere, or with other bytes in the head: an error of ours, or another tree; no other
    error."""
    whole = pack({"a": torch.arange(5), "b": [1.5, "word"]})
    cut = whole[: data.draw(st.integers(0, len(whole) - 1))]
    with pytest.raises(fp.PlanError):
        unpack(cut)
    end = 8 + struct.unpack("<q", whole[:8])[0]
    place = data.draw(st.integers(8, end - 1))
    other = bytes([data.draw(st.integers(0, 255))])
    try:
        unpack(whole[:place] + other + whole[place + 1 :])
    except fp.PlanError:
        pass


def test_trees_that_differ_in_numbers_alone_have_one_form():
    """So the form that all said in the run before is not read again."""
    one = pack((3, 0.5, True, "word", torch.tensor([1, 2])))
    other = pack((-4, float("inf"), True, "word", torch.tensor([3, 4])))
    end = 8 + struct.unpack("<q", one[:8])[0]
    assert one[:end] == other[:end]
    assert one[end:] != other[end:]
    assert same(unpack(other), (-4, float("inf"), True, "word", torch.tensor([3, 4])))
    kinds = [pack(leaf) for leaf in (1, 1.0, True, 2**70, torch.tensor(1))]
    assert len({data[8 : 8 + struct.unpack("<q", data[:8])[0]] for data in kinds}) == len(kinds)
    assert [type(unpack(data)) for data in kinds] == [int, float, bool, int, torch.Tensor]


def test_trees_that_are_alike_travel_as_one():
    """Losses of microbatches: one tensor for each of their leaves, and what comes out shares no
    memory."""
    losses = tuple(
        [
            fp.Loss(torch.tensor(m / 3), None, {"right": torch.arange(m, m + 3), "rows": 4})
            for m in range(5)
        ]
    )
    together = joined(losses)
    assert isinstance(together, Columns)
    assert len(flatten(together)[0]) == 1 + len(flatten(losses[0])[0])
    back = apart(unpack(pack(together)))
    assert same(losses, back)
    assert [type(loss) for loss in back] == [fp.Loss] * 5
    back[0].sum.zero_()
    assert same(losses[1:], back[1:])


@given(st.lists(trees, max_size=4))
def test_trees_travel_as_one_or_as_they_are(several):
    several = (*several, *several[:1])
    back = apart(unpack(pack(joined(several))))
    assert len(back) == len(several)
    for one, other in zip(flatten(several)[0], flatten(back)[0], strict=True):
        assert type(one) is type(other)
    assert same(several, back)


@pytest.mark.parametrize(
    "pair",
    [
        (torch.tensor(1.0), torch.tensor(1)),
        (torch.ones(2), torch.ones(3)),
        (torch.ones(2), None),
        (torch.ones(2), torch.nn.Parameter(torch.ones(2))),
        (torch.ones(65), torch.ones(65)),
        (torch.ones(2, 3).T, torch.ones(2, 3).T),
        (0.0, -0.0),
        (1, True),
        ([torch.ones(2)], (torch.ones(2),)),
    ],
)
def test_trees_that_are_not_alike_stay_as_they_are(pair):
    assert joined(pair) is pair


def test_a_class_that_was_made_anew_is_the_new_one(monkeypatch):
    """As where a cell of a notebook runs again: what was read by the old one before is read by the
    new one."""
    data = pack(Point(torch.tensor(1.0), 2))
    assert type(unpack(data)) is Point

    class Other(NamedTuple):
        x: torch.Tensor
        y: int

    monkeypatch.setattr(sys.modules[__name__], "Point", Other)
    assert type(unpack(data)) is Other
