"""What all folders about models say alike: sizes that do not fit, faults all at once, and one kind of
bound function."""

import pytest
import torch
from torch import nn

import funcpipe as fp
from funcpipe._src.core.errors import BatchError, raise_all
from funcpipe._src.core.words import similar, size_of
from funcpipe._src.data.stage import Bindable


def test_all_faults_or_none():
    raise_all("nothing is wrong:", [])
    with pytest.raises(BatchError, match=r"wrong:\n  \* a\n  \* b"):
        raise_all("wrong:", ["a", "b"], BatchError)


def test_the_nearest_name_and_sizes():
    assert "; is it 'head'?" == similar("haed", ["head", "body"], "; is it {!r}?")
    assert "" == similar("tail", ["head"])
    assert ["17 B", "1.5 KiB", "3.0 GiB"] == [size_of(17), size_of(1536), size_of(3 * 2**30)]


@pytest.mark.parametrize("sizes", [[1, 1], [0, 3]])
def test_sizes_are_refused_alike(sizes):
    """By a split and by a memory table, with sizes that would do."""
    model = nn.Sequential(*[nn.Linear(2, 2) for _ in range(3)])
    table = fp.models.memory(model, torch.zeros(1, 2))
    for cut in (lambda: fp.split(model, balance=sizes), lambda: table.group(sizes)):
        with pytest.raises(
            fp.PlanError, match=r"positive numbers that sum to the 3 .*got .*e\.g\. \["
        ):
            cut()


def test_what_knows_its_layers_is_called_as_it_is_bound():
    """Outside of a run a module, a graph and a composition are their bound functions, called
    once."""
    model = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 2)).eval()
    x = torch.randn(4, 2)
    module, params, _ = fp.from_module(model)
    traced = fp.split(model, 1, example=x)
    for stage, given in ((module, params), (traced.stages[0], traced.params[0])):
        assert isinstance(stage.fn, Bindable)
        bound = stage.bind(given, ())
        assert torch.equal(stage(given, x), bound(x))
        assert torch.equal(stage(given, x), model(x))
        assert dict(bound.places) == {} or set(bound.places.values()) <= {
            name for name, _ in model.named_modules()
        }
        bound.release()
