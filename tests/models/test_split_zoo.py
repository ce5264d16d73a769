"""Models that people have, cut every way that applies, against the eager model (float64)."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch

import funcpipe as fp
from tests.models.zoo import ZOO, batch, reference, zoo

PARTS = [2, 2, 2]
TRACED_ONLY = {"t5"}
PADDED = {"llama-tied"}
TIED = {"gpt2", "llama-tied", "t5"}
SUMS_DIFFER = {"t5"}
"""The encoder's output is read four times: as one stage's sum of four, or two sums of two. Rounding
differs."""
CASES = [
    (name, way, ties)
    for name in sorted(ZOO)
    for way in ("traced", "layers")
    for ties in ("replicate", *(["transmit"] if name in TIED else []))
]


def cut(
    name: str, way: str, count: int, *, ties: str = "replicate", dropout: float = 0.0
) -> tuple[torch.nn.Module, fp.Split]:
    model = zoo(name, dropout=dropout)
    # The zoo's own loss functions are not known to the library; by rows is right where every row
    # counts alike.
    loss = own_loss if name in PADDED else None
    if way == "traced":
        return model, fp.split(model, count, example=batch(name, 3), ties=ties, loss=loss)
    return model, fp.split(model, count, ties=ties, loss=loss)


def own_loss(output: Any) -> torch.Tensor:
    return output.loss


class ByRows:
    """A loss whose microbatches count by their rows, padded or not."""

    def __init__(self, loss: Any) -> None:
        self.loss = loss

    def __call__(self, y: Any, target: Any) -> Any:
        return self.loss(y, target)

    def weigh(self, inputs: Any, target: Any) -> None:
        return None


@pytest.mark.slow
@pytest.mark.parametrize(("name", "way", "ties"), CASES)
def test_loss_and_gradients_equal_the_model(name, way, ties):
    """2 and 4 stages, 1F1B and zero-bubble: to 1e-10."""
    if way == "layers" and name in TRACED_ONLY:
        with pytest.raises(fp.PlanError, match="example="):
            cut(name, way, 2)
        return
    given = batch(name, sum(PARTS))
    loss, grads = reference(zoo(name), given, PARTS)
    for count in (2, 4):
        model, made = cut(name, way, count, ties=ties)
        assert bool(made.ties) == (name in TIED and ties == "replicate")
        for family in (fp.schedules.one_f_one_b, fp.schedules.zero_bubble):
            plan = fp.make_plan(
                made.stages,
                family(count, len(PARTS)),
                loss=ByRows(made.loss) if name in PADDED else made.loss,
                ties=made.ties,
                devices="cpu",
            )
            result = fp.run(plan, made.params, (given, None), state=made.state)
            torch.testing.assert_close(result.loss.double(), loss.double(), rtol=1e-10, atol=1e-10)
            found = made.merge(result.grads, made.state)
            for key, parameter in model.named_parameters():
                wanted = grads[key]
                ours = found[key] if key not in made.rest else torch.zeros_like(wanted)
                torch.testing.assert_close(
                    ours, wanted, rtol=1e-10, atol=1e-10, msg=lambda text: f"{key}: {text}"
                )
                assert parameter.grad is None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "way"),
    [(name, way) for name, way in product(sorted(ZOO), ("traced", "layers")) if ZOO[name].draws],
)
def test_dropout_does_not_depend_on_the_cuts(name, way):
    """2 and 4 stages agree bit for bit."""
    if way == "layers" and name in TRACED_ONLY:
        pytest.skip("cannot be cut so")
    given = batch(name, 4)
    seen = {}
    for count in (2, 4):
        _, made = cut(name, way, count, dropout=0.2)
        plan = fp.make_plan(
            made.stages,
            fp.schedules.one_f_one_b(count, 2),
            loss=ByRows(made.loss) if name in PADDED else made.loss,
            ties=made.ties,
            devices="cpu",
        )
        result = fp.run(plan, made.params, (given, None), state=made.state, seed=5)
        merged = made.merge(result.grads, made.state)
        seen[count] = (
            float(result.loss),
            {key: one for key, one in merged.items() if key not in made.rest},
        )
    assert seen[4][0] == seen[2][0]
    for key, one in seen[4][1].items():
        if name in SUMS_DIFFER:
            torch.testing.assert_close(one, seen[2][1][key], rtol=0, atol=1e-14)
        else:
            assert torch.equal(one, seen[2][1][key]), key
