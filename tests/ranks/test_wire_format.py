"""Trees as bytes: what travels comes back the same, and what cannot is refused with what it is."""

import json
import struct
from collections import OrderedDict, deque
from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch
from common import same
from hypothesis import given
from hypothesis import strategies as st

import funcpipe as fp
from funcpipe.core.tree import flatten
from funcpipe.runtime.wire_format import TensorLayout, form_of, memory, pack, pack_form, sendable, unpack, unpack_form

numbers = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**70), 2**70), st.floats(allow_nan=False), st.text(), st.binary()
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
            assert (one.shape, one.stride(), one.dtype) == (other.shape, other.stride(), other.dtype)
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
    form = form_of(leaves, spec, (True, False, False))
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


@pytest.mark.parametrize(
    "code",
    [
        ["named", "os:system", [0]],
        ["named", "subprocess:Popen", [0]],
        ["class", "subprocess:Popen", [0], ["leaf", None]],
        ["class", "builtins:eval", [0], ["leaf", None]],
        ["named", "not_loaded_module:Thing", [0]],
        ["set", [0]],
        ["list", [5]],
        {"list": [0]},
    ],
)
def test_nothing_is_called_that_is_no_container(code):
    data = json.dumps([code, [1], []]).encode()
    with pytest.raises(fp.PlanError, match="damaged"):
        unpack_form(data)


@pytest.mark.parametrize(
    "leaf",
    [
        {"tensor": [[2, -1], [1, 1], "torch.float32"]},
        {"tensor": [[2, 2], [0, 0], "torch.float32"]},
        {"tensor": [[2], [1], "torch.nn"]},
        {"tensor": [[2], [1, 1], "torch.float32"]},
        {"code": "import os"},
        [1],
    ],
)
def test_damaged_leaves_are_refused(leaf):
    with pytest.raises(fp.PlanError, match="damaged"):
        unpack_form(json.dumps([0, [leaf], []]).encode())


@given(st.data())
def test_damaged_bytes_are_refused(data):
    """Cut anywhere, or with other bytes in the head: an error of ours, or another tree; no other error."""
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
