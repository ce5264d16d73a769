"""Stages compute with copies of modules: later changes and patches of the originals are followed,
or raise."""

import copy
import functools

import pytest
import torch
import torch.nn.functional as F
from common import cpu_plan
from torch import nn

import funcpipe as fp
from funcpipe import schedules as S


def forwards(stages):
    """A plan of forwards alone."""
    schedule = S.fill_drain(len(stages), 2, backward=False)
    return fp.make_plan(stages, schedule, devices="cpu", outputs=True)


class Settings:
    def __init__(self):
        self.scale, self.inner = 1.0, {"a": [1.0]}


class Scaled(nn.Module):
    default = 1.0

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.temperature, self.cfg, self.table, self.bias = (
            1.0,
            Settings(),
            {"p": 1.0},
            torch.zeros(4),
        )
        self.act = nn.Identity()
        self.shift = functools.partial(torch.add, other=0.0)

    def forward(self, x):
        scale = self.cfg.scale * self.cfg.inner["a"][0] * self.table["p"] * self.default
        return self.act(self.shift(self.linear(x)) * scale / self.temperature + self.bias)


def new_entry(model):
    model[0].table["p"] = 3.0


def deep_entry(model):
    model[0].cfg.inner["a"][0] = 3.0


def other_layer(model):
    model[0].act = nn.Tanh()


def other_layer_of_the_sequential(model):
    model[1] = nn.ReLU()


def tensor_in_place(model):
    model[0].bias.add_(1.0)


CHANGES = {
    "0.temperature was 1.0, is 0.1": lambda model: setattr(model[0], "temperature", 0.1),
    "0.cfg.scale was 1.0, is 3.0": lambda model: setattr(model[0].cfg, "scale", 3.0),
    "0.cfg is another Settings": lambda model: setattr(model[0], "cfg", Settings()),
    "0.table.p was 1.0, is 3.0": new_entry,
    "0.cfg.inner.a[0] was 1.0, is 3.0": deep_entry,
    "0.default was set": lambda model: setattr(model[0], "default", 3.0),
    "0.bias was written to": tensor_in_place,
    "0.act was a Identity, is a Tanh": other_layer,
    "0.shift.keywords.other was 0.0, is 1.0": lambda model: model[0].shift.keywords.update(
        other=1.0
    ),
    "1.__class__ was 'Dropout', is 'Louder'": lambda model: setattr(
        model[1], "__class__", type("Louder", (nn.Dropout,), {})
    ),
    "0.linear.forward was set": lambda model: setattr(model[0].linear, "forward", torch.relu),
    "1.p was 0.5, is 0.0": lambda model: setattr(model[1], "p", 0.0),
    "1 was a Dropout, is a ReLU": other_layer_of_the_sequential,
    "_forward_hooks": lambda model: model[0].linear.register_forward_hook(
        lambda layer, x, y: y * 2
    ),
}


def new_model():
    torch.manual_seed(0)
    return nn.Sequential(Scaled(), nn.Dropout(0.5), nn.Linear(4, 4))


def stages_of(how, model):
    if how == "from_module":
        stage, params, _ = fp.from_module(model)
        return [stage], (params,)
    split = fp.split(model, 2, example=torch.randn(8, 4)) if how == "traced" else fp.split(model, 2)
    stages = split.stages
    if how == "composed":
        return [fp.compose(*stages)], (split.params,)
    return [
        fp.compile_stage(stage, fallback=True) for stage in stages
    ] if how == "compiled" else stages, split.params


@pytest.mark.parametrize("how", ["from_module", "split", "traced", "composed", "compiled"])
@pytest.mark.parametrize("words", CHANGES)
def test_changes_an_attribute_after_stages_were_made(how, words):
    model = new_model()
    stages, params = stages_of(how, model)
    plan = cpu_plan(stages, S.one_f_one_b(len(stages), 2))
    lossless = fp.make_plan(stages, plan.schedule, outputs=True, devices="cpu")
    batch = torch.randn(8, 4), torch.randn(8, 4)
    fp.run(plan, params, batch, seed=0)
    CHANGES[words](model)
    for call in (
        lambda: fp.run(plan, params, batch, seed=0),
        lambda: fp.run_sequential(plan, params, batch, seed=0),
        lambda: fp.vjp(lossless, params, batch[0], seed=0),
        lambda: fp.apply(stages, params, batch[0], seed=0),
        lambda: stages[0](params[0], batch[0]),
    ):
        with pytest.raises(fp.PlanError, match="make the stages again") as caught:
            call()
        assert words in str(caught.value)


def replaced_parameter(model):
    model[2].weight = nn.Parameter(torch.zeros(4, 4))


def assigned_state_dict(model):
    numbers = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.load_state_dict(numbers, assign=True)


def tied_afterwards(model):
    model[2].weight = model[0].linear.weight


def deleted_bias(model):
    model[2].bias = None


REPLACED = {
    replaced_parameter: ["2.weight"],
    assigned_state_dict: ["0.linear.weight", "0.linear.bias", "2.weight", "2.bias"],
    tied_afterwards: ["2.weight"],
    deleted_bias: ["2.bias"],
}


@pytest.mark.parametrize("how", ["from_module", "split", "traced", "composed", "compiled"])
@pytest.mark.parametrize("replace", REPLACED)
def test_runs_the_old_tensors_of_replaced_parameters(how, replace):
    model = new_model()
    stages, params = stages_of(how, model)
    plan = cpu_plan(stages, S.one_f_one_b(len(stages), 2))
    batch = torch.randn(8, 4), torch.randn(8, 4)
    replace(model)
    for call in (
        lambda: fp.run(plan, params, batch, seed=0),
        lambda: fp.apply(stages, params, batch[0], seed=0),
        lambda: stages[-1](params[-1], batch[0]),
    ):
        with pytest.raises(fp.PlanError, match="would not be trained") as caught:
            call()
        assert f"{REPLACED[replace][-1]} is another tensor" in str(caught.value)
    with pytest.raises(fp.PlanError) as caught:
        fp.run(plan, params, batch, seed=0)
    lines = str(caught.value).splitlines()[1:]
    assert [f"  * {name} is another tensor" for name in REPLACED[replace]] == lines
    stages, params = stages_of(how, model)
    plan = cpu_plan(stages, plan.schedule)
    assert fp.run(plan, params, batch, seed=0).loss > 0


def test_sets_an_attribute_back():
    model = new_model()
    stages, params = stages_of("split", model)
    plan = forwards(stages)
    before = fp.run(plan, params, torch.ones(4, 4)).outputs
    model[0].temperature = 0.1
    model[0].temperature = 1
    with pytest.raises(fp.PlanError, match="temperature was 1.0, is 1"):  # of another type
        fp.run(plan, params, torch.ones(4, 4))
    model[0].temperature = 1.0
    assert torch.equal(fp.run(plan, params, torch.ones(4, 4)).outputs, before)


class Adapted(nn.Linear):
    """A layer like those of PEFT: its forward can take adapters out, and keeps what it saw."""

    def __init__(self):
        super().__init__(4, 4)
        self.merged, self.seen, self.mode, self.enabled = [], [], "train", True

    def unmerge(self):
        self.merged.clear()
        self.mode = "plain"

    def forward(self, x):
        if not self.enabled:
            self.unmerge()
        self.seen.append(x)
        return super().forward(x)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda layer: layer.merged.append("default"), "0.merged was an empty list, is a list"),
        (lambda layer: setattr(layer, "mode", "merged"), "0.mode was 'train', is 'merged'"),
    ],
)
def test_words_that_a_forward_may_write_are_compared(change, words):
    """They name what is merged. Values that the forward keeps are not compared."""
    model = nn.Sequential(Adapted(), nn.Linear(4, 4))
    split = fp.split(model, 2)
    plan = forwards(split)
    fp.run(plan, split.params, torch.ones(4, 4))
    model(torch.ones(4, 4))
    fp.run(plan, split.params, torch.ones(4, 4))
    change(model[0])
    with pytest.raises(fp.PlanError, match=words):
        fp.run(plan, split.params, torch.ones(4, 4))


def test_an_equal_list_in_place_of_a_list_is_no_change():
    """PEFT's `set_adapter` of the active adapter makes such lists. Later changes are seen."""
    model = new_model()
    model[0].scales = [1.0, 2.0]
    split = fp.split(model, 2)
    plan = cpu_plan(split, S.fill_drain(2, 2))
    x = torch.ones(4, 4)
    model[0].scales = [1.0, 2.0]
    fp.run(plan, split.params, (x, x), seed=0)
    model[0].scales.append(3.0)
    with pytest.raises(fp.PlanError, match="scales"):
        fp.run(plan, split.params, (x, x), seed=0)


def test_a_layer_is_named_by_its_path_in_the_model():
    """Not by an attribute that also leads to it, such as a bound method."""
    inner = new_model()
    model = nn.Sequential(nn.Identity(), inner)
    model[0].helper = inner[0].forward
    stages, params, _ = fp.from_module(model)
    inner[0].temperature = 0.1
    plan = forwards([stages])
    with pytest.raises(fp.PlanError, match=r"\* 1\.0\.temperature was 1.0, is 0.1$"):
        fp.run(plan, (params,), torch.ones(4, 4), seed=0)


def test_what_changes_no_stage_is_nobodys_affair():
    """Modes, numbers in parameters, removed hooks, values left by forwards and hooks, and the
    model's end."""
    model = new_model()
    stages, params = stages_of("split", model)
    plan = forwards(stages)
    x = torch.ones(4, 4)
    before = fp.run(plan, params, x).outputs
    params = [{name: leaf.detach().clone() for name, leaf in tree.items()} for tree in params]
    model.eval()
    model.load_state_dict({name: tensor + 1 for name, tensor in model.state_dict().items()})
    model[2].weight = nn.Parameter(torch.zeros(4, 4))
    handle = model[0].register_forward_hook(lambda layer, x, y: setattr(layer, "activation", y))
    model(x)
    handle.remove()
    assert torch.equal(fp.run(plan, params, x).outputs, before)
    del model
    assert torch.equal(fp.run(plan, params, x).outputs, before)


def test_a_stage_keeps_no_model_alive():
    import gc
    import weakref

    model = new_model()
    stages, _ = stages_of("split", model)
    alive = [weakref.ref(module) for module in model.modules()]
    del model
    gc.collect()
    assert stages
    assert not [module for module in alive if module() is not None]


@pytest.mark.parametrize(
    "words", [words for words in CHANGES if not words.startswith("1") and "another" not in words]
)
def test_a_pipe_follows(words):
    model = new_model()
    model[1].p = 0.0
    pipe = fp.Pipe(model, chunks=2, balance=[1, 2], devices=["cpu", "cpu"])
    x = torch.randn(4, 4)
    torch.manual_seed(1)
    before = pipe(x)
    CHANGES[words](model)
    torch.manual_seed(1)
    after = pipe(x)
    torch.testing.assert_close(after, model(x))
    assert not torch.equal(before, after)
    known = pipe._known
    pipe(x)
    assert pipe._known is known  # compared, not made again


# -- functions of the module itself, put on it
# -------------------------------------------------------------------------------


def compiled(layer):
    layer.forward = torch.compile(layer.forward, backend="eager")


def closure(layer):
    original = layer.forward
    layer.forward = lambda x: original(x) + x


def nested_closure(layer):
    @functools.wraps(layer.forward)
    def patched(x, *, inner=layer.forward, twice=lambda y: y * layer.factor):
        return twice(inner(x))

    layer.factor = 2.0
    layer.forward = patched


def of_a_partial(layer):
    layer.forward = functools.partial(lambda layer, x: F.linear(x, layer.weight), layer)


def bound_method(layer):
    layer.forward = layer.forward


def closure_compiled(layer):
    closure(layer)
    compiled(layer)


PATCHES = [compiled, closure, nested_closure, of_a_partial, bound_method, closure_compiled]


@pytest.mark.filterwarnings(
    "ignore:The .grad attribute"
)  # torch's compiler warns for a layer that is called alone
@pytest.mark.parametrize("patch", PATCHES)
@pytest.mark.parametrize("way", ["split", "from_module", "pipe"])
def test_patches_a_method_of_a_layer(patch, way):
    """Stages use the weights that they get, not the weights of the patched layer."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    patch(model[1])
    other = {name: torch.randn_like(tensor) for name, tensor in model.state_dict().items()}
    x = torch.ones(2, 4)
    if way == "pipe":
        pipe = fp.Pipe(model, chunks=2, balance=[1, 1], devices=["cpu", "cpu"])
        pipe(x)
        model.load_state_dict(other)
        torch.testing.assert_close(pipe(x), model(x))
        return
    if way == "split":
        split = fp.split(model, 2)
        stages, params = split.stages, split.load_state_dict(other).params
    else:
        stage, _, _ = fp.from_module(model)
        stages, params = [stage], (other,)
    outputs = fp.run(forwards(stages), params, x).outputs
    model.load_state_dict(other)
    torch.testing.assert_close(outputs, model(x).detach())
    trains = cpu_plan(stages, S.one_f_one_b(len(stages), 2))
    grads = fp.run(trains, params, (x, x)).grads
    F.mse_loss(model(x), x).backward()
    torch.testing.assert_close(grads[-1]["1.weight"], model[1].weight.grad)


def test_compiles_the_forward_of_a_batch_norm():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    plain = copy.deepcopy(model)
    compiled(model[1])
    split = fp.split(model, 2)
    plan = cpu_plan(split, S.one_f_one_b(2, 1))
    x = torch.randn(8, 4)
    result = fp.run(plan, split.params, (x, x), state=split.state)
    plain(x)
    assert torch.equal(model[1].running_mean, torch.zeros(4))
    torch.testing.assert_close(result.state[1]["1.running_mean"], plain[1].running_mean)


def test_an_attribute_that_cannot_be_made_of_the_copy_is_refused():
    class Calls:
        def __init__(self, layer):
            self.call = lambda x: layer(x)

        def __call__(self, x):
            return self.call(x)

    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].forward = Calls(model[0])
    with pytest.raises(fp.PlanError, match="'forward' .* calls the module"):
        fp.from_module(model)


# -- what a forward keeps in attributes
# -------------------------------------------------------------------------------


class Keeps(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.kept, self.entries, self.rows, self.calls = None, {}, [], 0
        self.average, self.temperature = torch.zeros(4), 1.0


class Weights(Keeps):
    def forward(self, x):
        if self.kept is None:
            self.kept = self.linear.weight.detach().clone()
        return self.linear(x) + x @ self.kept


class WeightsInDict(Keeps):
    def forward(self, x):
        if "weight" not in self.entries:
            self.entries["weight"] = self.linear.weight.detach().clone()
        return self.linear(x) + x @ self.entries["weight"]


class WeightsByHelper(Keeps):
    def reference(self):
        if getattr(self, "frozen", None) is None:
            self.frozen = self.linear.weight.detach().clone()
        return self.frozen

    def forward(self, x):
        return self.linear(x) + x @ self.reference()


class FirstInput(Keeps):
    def forward(self, x):
        if self.kept is None:
            self.kept = x.detach().mean(0)
        return self.linear(x - self.kept)


class Anneals(Keeps):
    def forward(self, x):
        self.temperature *= 0.9
        return self.linear(x) / self.temperature


class Average(Keeps):
    def forward(self, x):
        self.average = 0.9 * self.average + 0.1 * x.detach().mean(0)
        return self.linear(x - self.average)


class AverageInPlace(Keeps):
    def forward(self, x):
        self.average.mul_(0.9).add_(x.detach().mean(0))
        return self.linear(x - self.average)


class Mask(Keeps):
    def forward(self, x):
        if self.kept is None or self.kept.shape[0] < x.shape[1]:
            self.kept = torch.ones(x.shape[1], x.shape[1]).tril()
        return self.linear(x) @ self.kept


class MaskInDict(Keeps):
    def forward(self, x):
        key = x.shape[1]
        if key not in self.entries:
            self.entries[x.shape[1]] = torch.ones(key, key).tril()
        return self.linear(x) @ self.entries[key]


class Counts(Keeps):
    def forward(self, x):
        self.calls += 1
        return self.linear(x)


class AnnealsByCalls(Keeps):
    def forward(self, x):
        self.calls += 1
        return self.linear(x) * min(1.0, self.calls / 5)


class AnnealsByHelper(Keeps):
    def factor(self):
        return 0.5**self.calls

    def forward(self, x):
        self.calls = self.calls + 1
        return self.linear(x) * self.factor()


class LengthOfTable(Keeps):
    """Remembers a length in a whole number, as rotary embeddings do."""

    def forward(self, x):
        if x.shape[1] > self.calls:
            self.calls = x.shape[1]
            self.kept = torch.ones(x.shape[1], x.shape[1]).tril()
        return self.linear(x) @ self.kept


class Shows(Keeps):
    def forward(self, x):
        self.kept = self.linear(x)
        self.attention = self.kept.softmax(-1)
        self.entries["norm"] = self.attention.norm().item()
        self.rows.append(self.attention)
        return self.kept * self.attention


def trained(kind, runs=3):
    torch.manual_seed(0)
    model = kind()
    plain = copy.deepcopy(model)
    stage, params, _ = fp.from_module(model)
    plan = cpu_plan([stage], S.one_f_one_b(1, 2))
    optimizer, reference = (
        torch.optim.SGD(fp.leaves(params), 0.5),
        torch.optim.SGD(plain.parameters(), 0.5),
    )
    for _ in range(runs):
        x = torch.randn(8, 4)
        result = fp.run(plan, (params,), (x, x))
        fp.step(optimizer, (params,), result)
        reference.zero_grad()
        loss = sum(F.mse_loss(plain(part), part) for part in x.chunk(2)) / 2
        loss.backward()
        reference.step()
        torch.testing.assert_close(result.loss, loss.detach())
        model(x)  # users read their model in between


@pytest.mark.parametrize(
    "kind", [Weights, WeightsInDict, WeightsByHelper, FirstInput, Anneals, Average, AverageInPlace]
)
def test_keeps_a_value_that_batches_change(kind):
    """Plain torch keeps it between steps, and a run begins anew: it raises before numbers
    differ."""
    with pytest.raises(
        fp.PlanError, match="in an attribute from call to call|make the stages again"
    ):
        trained(kind)


@pytest.mark.parametrize("kind", [AnnealsByCalls, AnnealsByHelper])
def test_uses_a_count_of_its_calls(kind):
    """Each run begins with the same count, so numbers would differ from those of the module."""
    with pytest.raises(fp.PlanError, match="counts its calls in .* and also reads the count"):
        trained(kind)


@pytest.mark.parametrize("kind", [Mask, MaskInDict, LengthOfTable, Counts, Shows])
def test_keeps_what_is_the_same_in_each_run(kind):
    """Masks, tables, counters, and values that a forward only shows, train as in plain torch."""
    trained(kind)


class Defaults:
    """Settings whose values are attributes of the class."""

    alpha = 1.0


class ScaledByDefault(nn.Module):
    def __init__(self):
        super().__init__()
        self.settings = Defaults()

    def forward(self, x):
        return x * self.settings.alpha


def test_a_default_of_a_class_that_gets_a_value():
    """The object had no attributes of its own when the stages were made."""
    model = nn.Sequential(nn.Linear(4, 4), ScaledByDefault())
    split = fp.split(model, 2)
    plan = cpu_plan(split, S.fill_drain(2, 2))
    x = torch.randn(4, 4)
    fp.run(plan, split.params, (x, x))
    model[1].settings.alpha = 3.0
    with pytest.raises(fp.PlanError, match=r"1\.settings\.alpha was set"):
        fp.run(plan, split.params, (x, x))
