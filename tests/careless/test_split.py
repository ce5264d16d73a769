"""Splits as a user would ask for them in passing: each works, or is refused with what, where and
what mends it."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from models.zoo import batch, zoo
from torch import nn

import funcpipe as fp


class Stack(nn.Module):
    """Layers one after the other; `marks` calls split_point before these numbers."""

    def __init__(self, *layers, marks=()):
        super().__init__()
        self.layers, self.marks = nn.ModuleList(layers), marks

    def forward(self, x):
        for number, layer in enumerate(self.layers):
            if number in self.marks:
                fp.models.split_point()
            x = layer(x)
        return x


def plan_of(made, count=2, **options):
    """1F1B over the stages of a split."""
    schedule = fp.schedules.one_f_one_b(len(made), count)
    options = {"loss": F.mse_loss, "ties": made.ties, "devices": "cpu", **options}
    return fp.make_plan(made.stages, schedule, **options)


def assert_gradients_of(model, made, result, wanted):
    """The loss of the result, and its gradients, are those of the plain one."""
    wanted.backward()
    torch.testing.assert_close(result.loss, wanted.detach())
    found = made.merge(result.grads)
    trained = {name: one.grad for name, one in model.named_parameters() if one.requires_grad}
    assert found.keys() == trained.keys()
    for name, grad in trained.items():
        torch.testing.assert_close(found[name], grad)


def trains_like_itself(made, model, *, train=True):
    """Loss and gradients of a split, against the model on each microbatch."""
    x, target = torch.randn(4, 8), torch.randn(4, 8)
    result = fp.run(plan_of(made, train=train), made.params, (x, target), state=made.state)
    own, parts = copy.deepcopy(model), zip(x.chunk(2), target.chunk(2), strict=True)
    assert_gradients_of(own, made, result, sum(F.mse_loss(own(a), b) / 2 for a, b in parts))


# -- cuts that split chooses itself
# -------------------------------------------------------------------------------


def activated(count, *, norm=False):
    """Linear layers, each with an in-place ReLU."""
    norms = lambda: [nn.BatchNorm1d(8)] if norm else []
    return Stack(
        *[one for _ in range(count) for one in (nn.Linear(8, 8), *norms(), nn.ReLU(inplace=True))]
    )


@pytest.mark.parametrize(
    ("stages", "norm", "train"),
    [(2, True, False), (3, False, True), (4, False, False), (4, True, True)],
)
def test_automatic_cuts_do_not_part_a_layer_from_its_in_place_relu(stages, norm, train):
    model = activated(4, norm=norm).train(train)
    made = fp.split(model, stages, example=torch.randn(4, 8))
    assert len(made) == stages
    if not (norm and train):  # whose statistics are of the whole batch, when deferred
        trains_like_itself(made, model, train=train)


class Late(nn.Module):
    """Writes in place into what it is given, before anything else."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x):
        return self.inner(x.relu_())


def test_a_cut_moves_into_a_block_that_begins_with_a_write():
    model = Stack(nn.Linear(8, 8), Late(), Late(), Late())
    made = fp.split(model, 4, example=torch.randn(4, 8))
    assert [sorted(params) for params in made.params] == [
        [f"layers.{number}{inner}.{kind}" for kind in ("bias", "weight")]
        for number, inner in enumerate(("", ".inner", ".inner", ".inner"))
    ]
    trains_like_itself(made, model)


def test_cuts_that_a_user_names_stay_refused():
    model, x = activated(2), torch.randn(4, 8)
    for wrong in ({"at": {"layers.1": "before"}}, {"balance": [1, 3]}):
        with pytest.raises(
            fp.PlanError, match="relu_ in stage 1 writes in place into linear of stage 0"
        ):
            fp.split(model, **wrong, example=x)
    with pytest.raises(fp.PlanError, match="num_stages is 3, but the model has only 2 units"):
        fp.split(model, 3, example=x)


def test_the_output_of_a_batch_norm_in_evaluation_is_not_its_input():
    model = Stack(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(inplace=True), nn.Linear(8, 8)).eval()
    made = fp.split(model, at={"layers.1": "before"}, example=torch.randn(4, 8))
    trains_like_itself(made, model, train=False)


# -- split_point
# -------------------------------------------------------------------------------


def test_split_points_are_where_a_number_of_stages_cuts():
    model = Stack(*(nn.Linear(8, 8) for _ in range(4)), marks=(1,))
    made = fp.split(model, 2, example=torch.randn(4, 8))
    assert [len(params) for params in made.params] == [2, 6]


def test_split_points_and_another_number_of_stages():
    model = Stack(*(nn.Linear(8, 8) for _ in range(4)), marks=(1,))
    for wrong in (1, 3):
        with pytest.raises(
            fp.PlanError,
            match=rf"num_stages is {wrong}, but its forward calls split_point\(\) once",
        ):
            fp.split(model, wrong, example=torch.randn(4, 8))
    assert len(fp.split(model, 3, policy=fp.models.by_parameters, example=torch.randn(4, 8))) == 3


def test_split_points_without_a_trace():
    model = Stack(*(nn.Linear(8, 8) for _ in range(4)), marks=(1,))
    for wrong in (model, nn.Sequential(model, nn.Linear(8, 8))):
        with pytest.raises(
            fp.PlanError,
            match=r"the forward of Stack calls fp.models.split_point\(\), .* give example=",
        ):
            fp.split(wrong, 2)
    assert len(fp.split(model, balance=[1, 3])) == 2


def test_two_split_points_at_one_place():
    class Twice(Stack):
        def forward(self, x):
            fp.models.split_point()
            return super().forward(x)

    with pytest.raises(fp.PlanError, match=r"split_point\(\) is before the first operation"):
        fp.split(Twice(nn.Linear(8, 8), nn.Linear(8, 8), marks=(1,)), example=torch.randn(4, 8))


# -- what a model collects over its blocks
# -------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self, sink, *, attribute=False):
        super().__init__()
        self.inner, self.sink, self.attribute, self.aux = (
            nn.Linear(8, 8),
            sink,
            attribute,
            torch.zeros(()),
        )

    def forward(self, x):
        y = self.inner(x).tanh()
        if self.attribute:
            self.aux = y.square().mean()
        else:
            self.sink.append(y.detach().round().long() if self.sink.whole else y)
        return y


class Sink(list):
    """What blocks append to, of whole numbers or not."""

    def __init__(self, *, whole=False):
        super().__init__()
        self.whole = whole


class Collects(nn.Module):
    """Gives what its blocks handed out beside their outputs: a list, or the sum of an attribute."""

    def __init__(self, *, whole=False, attribute=False):
        super().__init__()
        self.sink, self.attribute = Sink(whole=whole), attribute
        self.blocks = nn.ModuleList(Block(self.sink, attribute=attribute) for _ in range(4))

    def forward(self, x):
        self.sink.clear()
        for block in self.blocks:
            x = block(x)
        return x, sum(block.aux for block in self.blocks) if self.attribute else tuple(self.sink)


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("kind", [{}, {"whole": True}, {"attribute": True}])
def test_what_blocks_hand_out_beside_their_outputs_is_refused_without_a_trace(kind, grad):
    model, x = Collects(**kind), torch.randn(4, 8)
    made = fp.split(model, 2)
    with (
        torch.set_grad_enabled(grad),
        pytest.raises(
            fp.PlanError,
            match="leaves an activation"  # in the list, which all blocks share
            if grad and not kind.get("attribute") and not kind.get("whole")
            else r"made of values that blocks pass on|depends on 'blocks.0'",
        ),
    ):
        fp.apply(made.stages, made.params, x, state=made.state)
    one = fp.split(model, 1)
    assert len(fp.apply(one.stages, one.params, x).y) == 2


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ({}, r"leaves an activation in 'blocks.0.sink\[0\]'"),
        ({"whole": True}, r"output\[1\]\[0\] is made of values that blocks pass on"),
        ({"attribute": True}, r"its output\[1\] depends on 'blocks.0'"),
    ],
)
def test_what_blocks_hand_out_is_refused_when_compiled(kind, message):
    made = fp.split(Collects(**kind), 2)
    stages = [fp.compile_stage(stage) for stage in made.stages]
    schedule = fp.schedules.fill_drain(2, 2)
    plan = fp.make_plan(stages, schedule, loss=lambda y, _: y[0].mean(), devices="cpu")
    with pytest.raises(fp.PlanError, match=message):
        fp.run(plan, made.params, (torch.randn(4, 8), None))


@pytest.mark.parametrize("name", ["output_attentions", "output_hidden_states"])
def test_what_all_blocks_collect_is_refused_without_a_trace(name):
    model, inputs = zoo("llama"), batch("llama")
    model.set_attn_implementation("eager")
    made = fp.split(model, 2)
    with pytest.raises(fp.PlanError, match=rf"inputs ask for \['{name}'\], .* example="):
        fp.apply(made.stages, made.params, {**inputs, name: True}, state=made.state)
    setattr(model.config, name, True)
    with pytest.raises(fp.PlanError, match=rf"config.{name} is True, which collects .* example="):
        fp.split(model, 2)


def test_attentions_of_all_blocks_are_traced():
    model, inputs = zoo("llama"), batch("llama")
    model.set_attn_implementation("eager")
    model.config.output_attentions = model.config.output_hidden_states = True
    made = fp.split(model, 2, example=inputs)
    found, expected = (
        fp.apply(made.stages, made.params, inputs, state=made.state).y,
        model(**inputs),
    )
    for name in ("attentions", "hidden_states"):
        torch.testing.assert_close(found[name], expected[name])


def test_attentions_asked_for_by_position():
    class Asks(Stack):
        def forward(self, x, output_attentions=False):
            return super().forward(x)

    made = fp.split(Asks(*(nn.Linear(8, 8) for _ in range(4))), 2)
    with pytest.raises(fp.PlanError, match=r"inputs ask for \['output_attentions'\]"):
        fp.apply(made.stages, made.params, (torch.randn(4, 8), True))


# -- marks in an example
# -------------------------------------------------------------------------------


class Marked(nn.Module):
    """Rows of ``x`` along axis 0, of ``mask`` along axis 1; a table that happens to have as many
    rows as the example."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x, mask, table):
        return self.b(self.a(x).tanh() * mask.sum(0)[:, None] @ table.T @ table)


def marked(rows, *, table):
    return torch.randn(rows, 8), fp.Axis(torch.randn(3, rows), 1), fp.Replicate(table)


def test_marks_in_an_example_say_where_its_rows_are():
    model, table = Marked(), torch.randn(4, 8)
    made = fp.split(model, at=["b"], example=marked(4, table=table))
    x, mask, _ = marked(7, table=table)
    plan, target = plan_of(made, 3), torch.randn(7, 8)
    result = fp.run(plan, made.params, ((x, mask, fp.Replicate(table)), target))
    assert_gradients_of(model, made, result, F.mse_loss(model(x, mask.value, table), target))
    with pytest.raises(fp.StageError, match=r"mask was float32 \[3, rows\].* dimension 0 is fixed"):
        fp.run(plan, made.params, ((x, torch.randn(7, 3), fp.Replicate(table)), target))


def test_marks_that_do_not_fit_the_example():
    model, table = Marked(), torch.randn(4, 8)
    x = torch.randn(4, 8)
    with pytest.raises(
        fp.BatchError,
        match=r"example\[1\] has 3 rows along axis 1, but the tensors before it have 4",
    ):
        fp.split(model, 2, example=(x, fp.Axis(torch.randn(4, 3), 1), table))
    with pytest.raises(fp.BatchError, match=r"example\[1\] is a Tensor without an axis 2"):
        fp.split(model, 2, example=(x, fp.Axis(torch.randn(3, 4), 2), table))
    with pytest.raises(fp.PlanError, match=r"give one of them: example=microbatches\[0\]"):
        fp.split(model, 2, example=fp.Microbatches([x, x]))


def test_marks_in_the_example_of_a_measurement():
    class Scale(nn.Module):
        def forward(self, x, table):
            return x @ table

    stage, params, _ = fp.from_module(Scale())
    given = {"params": [params], "device": "cpu"}
    example = (torch.randn(4, 8), fp.Replicate(torch.randn(8, 8)))
    cost = fp.models.profile([stage], example, repeats=1, warmup=0, **given)
    assert len(cost.forward) == 1
    assert fp.models.memory([stage], example, **given).total.output == 4 * 8 * 4
    with pytest.raises(fp.PlanError, match=r"an example is the input of one microbatch"):
        fp.models.memory([stage], fp.Microbatches([example]), **given)


# -- wrapped models
# -------------------------------------------------------------------------------


class Plain(Stack):
    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


class Config:
    def __init__(self):
        self.use_cache = True

    def to_dict(self):
        return vars(self)


class Adapter(nn.Module):
    """A layer and a small one beside it, under a name, as PEFT wraps it."""

    def __init__(self, base):
        super().__init__()
        self.base_layer = base.requires_grad_(requires_grad=False)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(8, 2, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(2, 8, bias=False)})

    def forward(self, x):
        return self.base_layer(x) + self.lora_B["default"](self.lora_A["default"](x))


class Wrapper(nn.Module):
    """Whatever it lacks its model has, as PEFT's wrappers do it."""

    def __init__(self, model):
        super().__init__()
        self.base_model = model

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "base_model":
                raise
            return getattr(self.base_model, name)

    def forward(self, *args, **kwargs):
        return self.base_model(*args, **kwargs)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("traced", [False, True])
def test_attributes_beyond_a_wrapper(traced, shared):
    inner = Plain(*(Adapter(nn.Linear(8, 8)) for _ in range(4)))
    config = Config()
    if shared:
        type(inner).config = config
    else:
        inner.config = config
    try:
        model = Wrapper(Wrapper(inner))
        made = fp.split(model, 2, **({"example": torch.randn(4, 8)} if traced else {}))
    finally:
        if shared:
            del type(inner).config
    assert config.use_cache  # the user's own stays
    x, target = torch.randn(4, 8), torch.randn(4, 8)
    result = fp.run(plan_of(made), made.params, (x, target), state=made.state)
    assert_gradients_of(model, made, result, F.mse_loss(model(x), target))


@pytest.mark.filterwarnings(
    "ignore:.*is_gradient_checkpointing:FutureWarning"
)  # peft asks transformers for it
@pytest.mark.parametrize("traced", [False, True])
def test_peft(traced):
    peft = pytest.importorskip("peft")
    inputs = batch("llama")
    config = peft.LoraConfig(
        r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", init_lora_weights=False
    )
    model = peft.get_peft_model(zoo("llama"), config)
    made = fp.split(model, 2, **({"example": inputs} if traced else {}))
    plan = plan_of(made, loss=made.loss)
    result = fp.run(plan, made.params, (inputs, None), state=made.state)
    assert_gradients_of(model, made, result, model(**inputs).loss)


# -- stages of a cut without a trace, compiled
# -------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(("name", "dropout"), [("llama", 0.0), ("bert", 0.2)])
def test_blocks_with_an_attention_mask_compile(name, dropout):
    model, inputs = zoo(name, dropout=dropout), batch(name)
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    inputs["attention_mask"][:2, -2:] = 0
    found = []
    for compiled in (True, False):
        made = fp.split(model, 2)
        stages = (
            [fp.compile_stage(stage, fuse=False) for stage in made.stages]
            if compiled
            else made.stages
        )
        plan = fp.make_plan(
            stages, fp.schedules.zero_bubble(2, 3), loss=made.loss, ties=made.ties, devices="cpu"
        )
        found.append(fp.run(plan, made.params, (inputs, None), state=made.state, seed=3))
    torch.testing.assert_close(found[0].loss, found[1].loss, rtol=0, atol=1e-12)
    for mine, theirs in zip(found[0].grads, found[1].grads, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-12)


# -- hooks on what a Pipe shows of its stages
# -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "register",
    ["register_forward_hook", "register_forward_pre_hook", "register_full_backward_hook"],
)
def test_hooks_on_partitions_are_refused_and_on_their_layers_called(register):
    pipe = fp.Pipe(
        nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)),
        chunks=2,
        balance=[2, 1],
        devices="cpu",
    )
    called: list[str] = []
    x = torch.randn(4, 4, requires_grad=True)
    handle = getattr(pipe.partitions[1][-1], register)(lambda *_: called.append("layer"))
    pipe(x).sum().backward()
    handle.remove()
    assert called
    handle = getattr(pipe.partitions[1], register)(lambda *_: called.append("view"))
    with pytest.raises(
        fp.PlanError, match=r"pipe.partitions\[1\] has \w+ hooks, which would never be called"
    ):
        pipe(x)
    with pytest.raises(fp.PlanError, match="never be called"):
        copy.deepcopy(pipe)(x)
    handle.remove()
    pipe(x)
    assert "view" not in called
    assert [list(view._modules) for view in pipe.partitions] == [["0", "1"], ["2"]]


# -- TorchScript
# -------------------------------------------------------------------------------


class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x):
        return self.inner(x).tanh()


@pytest.mark.filterwarnings("ignore:.*torch.jit")
@pytest.mark.parametrize(
    "make", [torch.jit.script, lambda module: torch.jit.trace(module, torch.zeros(2, 8))]
)
def test_torchscript_layers_are_refused_by_name(make):
    x = torch.randn(4, 8)
    ways = [
        lambda: fp.split(Plain(Inner(), make(Inner())), 2, example=x),
        lambda: fp.split(Plain(Inner(), make(Inner())), 2),
    ]
    for way in ways:
        with pytest.raises(
            fp.PlanError, match=r"'layers.1' is TorchScript .* give the module before torch"
        ):
            way()
    row = nn.Sequential(Inner(), make(Inner()))
    for way in (
        lambda: fp.split(row, 2),
        lambda: fp.Pipe(row, devices="cpu"),
        lambda: fp.from_module(row),
        lambda: fp.models.memory(row, x),
        lambda: fp.models.profile(row, x, repeats=1),
    ):
        with pytest.raises(fp.PlanError, match="'?1?'? is TorchScript"):
            way()
    with pytest.raises(fp.PlanError, match="it is TorchScript"):
        fp.from_module(make(Inner()))


@pytest.mark.parametrize(
    ("name", "use"),
    [
        ("parameters", r"fp\.leaves\(params\)"),
        ("named_parameters", r"fp\.named_leaves"),
        ("to", r"fp\.place\(plan"),
        ("train", r"model\.train\(\) before fp\.split"),
        ("eval", r"schedule\.forwards\(\)"),
        ("unknown", "no attribute 'unknown'$"),
    ],
)
def test_methods_of_modules_name_the_call(name, use):
    split = fp.split(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), 2)
    with pytest.raises(AttributeError, match=use):
        getattr(split, name)
    assert not hasattr(copy.deepcopy(split), name)
