"""Copies that are made when somebody writes, and where they are made at once."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensorMode, dispatch_functionalize
from torch.fx.experimental.proxy_tensor import make_fx

from funcpipe._src.core.tree import cow_clone_unchecked


def test_a_lazy_copy_is_made_when_somebody_writes():
    tensor = torch.ones(3)
    copy = cow_clone_unchecked(tensor)
    assert torch._C._is_cow_tensor(copy)
    copy.mul_(2)
    assert tensor.tolist() == [1, 1, 1]
    assert copy.tolist() == [2, 2, 2]


class Streamed(torch.Tensor):
    """Lies on a device with streams, as far as anybody asks."""

    is_cpu = False


def test_with_streams_it_is_made_at_once():
    """The late one would be made on a stream that no lane waits for."""
    tensor = torch.ones(3).as_subclass(Streamed)
    copy = cow_clone_unchecked(tensor)
    assert not torch._C._is_cow_tensor(copy)
    assert copy.data_ptr() != tensor.data_ptr()


@pytest.mark.parametrize("zipped", [True, False])
def test_what_torch_loaded_is_copied_at_once(tmp_path, zipped):
    """Its memory has no allocator; torch would find out when somebody writes, and crash the
    process."""
    torch.save(torch.ones(3), tmp_path / "x.pt", _use_new_zipfile_serialization=zipped)
    tensor = torch.load(tmp_path / "x.pt")
    copy = cow_clone_unchecked(tensor)
    copy.mul_(2)
    assert tensor.tolist() == [1, 1, 1]
    assert copy.tolist() == [2, 2, 2]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_trace_sees_a_lazy_one_on_any_device(device):
    """It is no operation of the program: `compile` takes it out."""
    with FakeTensorMode():
        tensor = torch.empty(3, device=device)
    graph = make_fx(
        dispatch_functionalize(cow_clone_unchecked, FunctionalTensorMode()), tracing_mode="fake"
    )(tensor)
    assert "_lazy_clone" in graph.code
