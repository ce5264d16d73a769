"""Values in containers that test_containers_random does not make: odd classes and trees, classes
that are registered late or by many threads."""

import concurrent.futures
import dataclasses
from types import SimpleNamespace

import optree
import pytest
import torch
import torch.nn.functional as F

import funcpipe as fp


@dataclasses.dataclass
class Plain:
    x: torch.Tensor
    mask: torch.Tensor
    label: str = "kept"


class InTorch:
    def __init__(self, x, mask):
        self.x, self.mask = x, mask


torch.utils._pytree.register_pytree_node(
    InTorch, lambda v: ([v.x, v.mask], None), lambda c, _: InTorch(*c)
)


class InOptree:
    def __init__(self, x, mask):
        self.x, self.mask = x, mask


optree.register_pytree_node(
    InOptree, lambda v: ((v.x, v.mask), None), lambda _, c: InOptree(*c), namespace="funcpipe"
)


def tensordict(x, mask):
    return pytest.importorskip("tensordict").TensorDict({"x": x, "mask": mask}, batch_size=[len(x)])


def between(kind):
    """The gradient of a run that hands the container from stage to stage."""
    stages = [
        fp.stage(lambda p, x: kind(x * p, x)),
        fp.stage(lambda p, value: value.x * value.mask),
    ]
    plan = fp.make_plan(stages, fp.schedules.fill_drain(2, 2), loss=F.mse_loss, devices="cpu")
    batch = torch.arange(4.0), torch.ones(4)
    return fp.run(plan, (torch.tensor(2.0), ()), batch).grads[0]


def test_a_loss_may_take_any_output_but_the_plan_returns_none_of_it():
    """What only the loss sees keeps its graph: right gradients. As an output of the run it is
    refused."""
    w, x = torch.randn(4, 4), torch.randn(6, 4)
    stage = fp.stage(lambda p, x: SimpleNamespace(y=x @ p))
    options = {"loss": lambda y, t: y.y.square().mean(), "devices": "cpu"}
    result = fp.run(
        fp.make_plan([stage], fp.schedules.fill_drain(1, 2), **options), (w,), (x, None)
    )
    leaf = w.clone().requires_grad_()
    (x @ leaf).square().mean().backward()
    torch.testing.assert_close(result.grads[0], leaf.grad)
    with pytest.raises(fp.BatchError, match="outputs.*hides tensors"):
        fp.run(
            fp.make_plan([stage], fp.schedules.fill_drain(1, 2), outputs=True, **options),
            (w,),
            (x, None),
        )


def test_ready_made_microbatches_are_looked_into():
    plan = fp.make_plan(
        [fp.stage(lambda p, x: x)], fp.schedules.fill_drain(1, 2, backward=False), devices="cpu"
    )
    good = fp.Microbatches(
        [Plain(torch.ones(2), torch.zeros(2)), Plain(torch.ones(3), torch.zeros(3))]
    )
    assert [len(one.x) for one in fp.run(plan, ((),), good).outputs] == [2, 3]
    bad = fp.Microbatches([SimpleNamespace(x=torch.ones(2))] * 2)
    with pytest.raises(fp.BatchError, match=r"inputs\[0\].*hides tensors"):
        fp.run(plan, ((),), bad)


def test_leaves_of_a_dataclass_are_named_by_its_fields():
    params = (Plain(torch.ones(2, 2), torch.ones(2)),)
    assert [name for name, _ in fp.named_leaves(params)] == ["0.x", "0.mask"]


# -- what registered classes and odd trees can do wrong
# -------------------------------------------------------------------------------


class Strict:
    def __init__(self, x, count):
        if not isinstance(count, torch.Tensor):
            raise TypeError("tensors only, please")
        self.x, self.mask = x, count


torch.utils._pytree.register_pytree_node(
    Strict, lambda v: ([v.x, v.mask], None), lambda c, _: Strict(*c)
)


@dataclasses.dataclass
class Endless:
    x: torch.Tensor
    back: object = None


def one_stage(params, batch, fn=lambda p, x: x):
    plan = fp.make_plan(
        [fp.stage(fn)],
        fp.schedules.fill_drain(1, 2),
        loss=lambda y, _: torch.ones(()) * 2,
        devices="cpu",
    )
    return fp.run(plan, (params,), (batch, None))


@pytest.mark.parametrize("kind", ["strict", "tensordict"])
def test_gradients_that_a_class_cannot_hold_are_not_lost(kind):
    """Whole numbers have no gradient; a class that wants one, or a TensorDict, which becomes None,
    is named."""
    numbers = torch.ones(4, dtype=torch.int64)
    params = {
        "a": Strict(torch.ones(4), numbers)
        if kind == "strict"
        else tensordict(torch.ones(4), numbers)
    }
    plan = fp.make_plan(
        [fp.stage(lambda p, x: x * (p["a"].x if kind == "strict" else p["a"]["x"]))],
        fp.schedules.fill_drain(1, 2),
        loss=F.mse_loss,
    )
    with pytest.raises(
        fp.PlanError, match="cannot be rebuilt with other leaves.*(please|NoneType)"
    ):
        fp.run(plan, (params,), (torch.randn(4, 4), torch.randn(4, 4)))


def test_a_tree_that_contains_itself_is_refused_by_its_place():
    endless = Endless(torch.ones(4))
    endless.back = {"again": [endless]}
    match = r"not a tree: tree\['a'\]\.back\['again'\]\[0\] is the Endless that contains it"
    for params, batch in (({"a": endless}, torch.ones(4)), ((), {"a": endless})):
        with pytest.raises(fp.PlanError, match=match):
            one_stage(params, batch)
    with pytest.raises(fp.PlanError, match=match):
        fp.leaves({"a": endless})
    with pytest.raises(fp.StageError, match="is the Endless that contains it"):
        one_stage((), torch.ones(4), fn=lambda p, x: endless)
    deep = torch.ones(4)
    for _ in range(3000):
        deep = [deep]
    with pytest.raises(fp.PlanError, match="nested too deep"):
        one_stage((), deep)


def test_a_class_that_is_registered_later_stays_what_it_was():
    """As a dataclass it is known at once; whoever registers it with torch afterwards changes
    nothing."""

    @dataclasses.dataclass
    class Later:
        x: torch.Tensor
        mask: torch.Tensor

    class Unknown:
        def __init__(self, x, mask):
            self.x, self.mask = x, mask

    before = between(Later)
    torch.export.register_dataclass(Later)
    assert torch.equal(before, between(Later))
    assert len(fp.leaves(Later(torch.ones(1), torch.ones(1)))) == 2
    with pytest.raises(fp.FuncpipeError, match="hides tensors"):
        fp.leaves(Unknown(torch.ones(1), torch.ones(1)))
    torch.utils._pytree.register_pytree_node(
        Unknown, lambda v: ([v.x, v.mask], None), lambda c, _: Unknown(*c)
    )
    assert len(fp.leaves(Unknown(torch.ones(1), torch.ones(1)))) == 2


def test_heirs_of_registered_classes_are_not_taken_for_them():
    """What torch or optree knows is the class itself; the more that an heir holds would be lost."""
    for kind in (InTorch, InOptree):
        heir = type("Heir", (kind,), {})(torch.ones(1), torch.ones(1))
        with pytest.raises(fp.PlanError, match="tree is a Heir, which hides tensors"):
            fp.leaves(heir)


def test_classes_are_registered_from_many_threads_at_once():
    for _ in range(20):
        kinds = [dataclasses.make_dataclass(f"Kind{n}", ["x", "mask"]) for n in range(4)]
        trees = [kind(torch.ones(1), [kinds[0](torch.ones(1), None)]) for kind in kinds]
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            assert [2] * 32 == list(pool.map(lambda tree: len(fp.leaves(tree)), trees * 8))


def test_ties_find_their_leaves_in_containers_of_every_kind():
    """By attribute and by number, though the class has a field called keys and cannot be
    indexed."""

    @dataclasses.dataclass
    class Odd:
        keys: object
        x: torch.Tensor

    w = torch.randn(4)
    params = (Odd(3, w), {"a": InTorch(w, None)})
    ties = [((0, "x"), (1, ("a", 0)))]
    stages = [fp.stage(lambda p, x: x * p.x), fp.stage(lambda p, x: x * p["a"].x)]
    plan = fp.make_plan(
        stages, fp.schedules.fill_drain(2, 2), loss=F.mse_loss, ties=ties, devices="cpu"
    )
    x, target = torch.randn(4, 4), torch.randn(4, 4)
    result = fp.run(plan, params, (x, target))
    leaf = w.clone().requires_grad_()
    F.mse_loss(x * leaf * leaf, target).backward()
    for gradient in (result.grads[0].x, result.grads[1]["a"].x):
        torch.testing.assert_close(gradient, leaf.grad)
    norm = fp.step(torch.optim.SGD([w], lr=1.0), params, result)
    torch.testing.assert_close(norm, leaf.grad.norm())


def test_a_batch_encoding_forgets_what_is_said_of_all_rows():
    """Tokens of other rows would be found by number in a microbatch; and the structure would change
    with every batch."""
    transformers = pytest.importorskip("transformers")
    batch = transformers.BatchEncoding({"ids": torch.arange(8)})
    batch._encodings = [object()] * 8
    plan = fp.make_plan(
        [fp.stage(lambda p, x: x["ids"] * (x.encodings is None))],
        fp.schedules.fill_drain(1, 2, backward=False),
    )
    assert fp.run(plan, ((),), batch).outputs.tolist() == [*range(8)]
