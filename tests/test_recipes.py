"""docs/howto/recipes.md and libraries.md: what a recipe trains is what plain loops train, to the
tolerance that the pages say.

Each section is run by itself, from its own text. The loops here know nothing of funcpipe: they
train the same model on whole batches, with the other library's own loop where it has one, or over
the same microbatches, and then every bit counts. The packages come with the extra ``recipes``; what
is not installed is skipped.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

PAGES = [
    Path(__file__).parents[1] / "docs" / "howto" / f"{name}.md" for name in ("recipes", "libraries")
]
SECTIONS = {
    heading: section
    for page in PAGES
    for heading, section in re.findall(
        r"^## (.*?)\n(.*?)(?=^## |\Z)", page.read_text(), flags=re.M | re.S
    )
}


@pytest.fixture(autouse=True)
def surroundings(tmp_path, monkeypatch):
    """Recipes write files. Lanes and plain loops have one thread: with another number a sum may
    have other bits."""
    monkeypatch.chdir(tmp_path)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def recipe(heading: str) -> dict[str, Any]:
    """The names that a section leaves when all its blocks have run."""
    blocks = re.findall(r"^```(?:python|py)\n(.*?)^```", SECTIONS[heading], flags=re.M | re.S)
    scope: dict[str, Any] = {"__name__": "recipe"}
    exec(compile("\n".join(blocks), heading, "exec", dont_inherit=True), scope)
    return scope


def assert_rounded(found: list[float], wanted: list[float]) -> None:
    """They fell, or rose, alike."""
    assert len(set(wanted)) > 1
    torch.testing.assert_close(torch.tensor(found), torch.tensor(wanted), rtol=1e-5, atol=0)


def windows(loader: Any, size: int) -> Iterator[list[Any]]:
    """Lists of so many batches."""
    batches = iter(loader)
    while window := list(islice(batches, size)):
        yield window


def three_layers() -> tuple[nn.Sequential, TensorDataset]:
    """The model and the data of the recipes for accelerate and Lightning."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 4)
    )
    return model, TensorDataset(torch.randn(96, 16), torch.randint(0, 4, (96,)))


# -- the Hub's Trainer
# -------------------------------------------------------------------------------


def llama(scope: dict[str, Any]) -> tuple[nn.Module, DataLoader, DataLoader]:
    """The recipe's model and loaders as they were before it trained."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**scope["sizes"], num_hidden_layers=4))
    examples, collate = scope["examples"], scope["collate"]
    shuffled = torch.Generator().manual_seed(0)
    train = DataLoader(
        examples[:48], batch_size=8, shuffle=True, collate_fn=collate, generator=shuffled
    )
    return model, train, DataLoader(examples[48:], batch_size=8, collate_fn=collate)


def grouped(model: nn.Module) -> list[dict[str, Any]]:
    """Parameter groups by Trainer's rule: norms and biases do not decay."""
    decay = [
        one for name, one in model.named_parameters() if "norm" not in name and "bias" not in name
    ]
    others = [one for name, one in model.named_parameters() if "norm" in name or "bias" in name]
    assert decay
    assert others
    return [{"params": decay, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]


def test_a_loop_like_the_trainers():
    transformers = pytest.importorskip("transformers")
    scope = recipe("Train like transformers' Trainer")
    model, train, test = llama(scope)
    optimizer = torch.optim.AdamW(grouped(model), lr=1e-2)
    rates = transformers.get_cosine_schedule_with_warmup(optimizer, 2, 6)
    losses = []
    for _ in range(2):
        for window in windows(train, 2):
            count = sum((batch["labels"][:, 1:] != -100).sum() for batch in window)
            parts = [model(**batch, num_items_in_batch=count).loss for batch in window]
            sum(parts).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            rates.step()
            optimizer.zero_grad()
            losses.append(sum(parts).item())
    assert_rounded(scope["losses"], losses)
    model.eval()
    with torch.no_grad():
        counts = [(batch["labels"][:, 1:] != -100).sum() for batch in test]
        tested = [model(**batch).loss * count for batch, count in zip(test, counts, strict=True)]
    assert scope["test_loss"] == pytest.approx(float(sum(tested) / sum(counts)), rel=1e-5)
    prompt = scope["prompt"]
    said = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=4,
        do_sample=False,
        pad_token_id=0,
    )
    assert (1, 8) == said.shape
    assert torch.equal(scope["generated"], said)


@pytest.mark.slow
def test_the_trainer_itself_makes_the_same_model():
    """transformers' Trainer, with its own groups, windows, clipping and count of tokens, ends at
    the recipe's parameters."""
    pytest.importorskip("accelerate")
    transformers = pytest.importorskip("transformers")
    scope = recipe("Train like transformers' Trainer")
    model, train, _ = llama(scope)
    batches = [
        batch for _ in range(2) for batch in train
    ]  # Trainer shuffles in an order of its own

    class Ours(transformers.Trainer):
        def get_train_dataloader(self):
            return DataLoader(batches, batch_size=None)

    arguments = transformers.TrainingArguments(
        output_dir="trainer",
        per_device_train_batch_size=8,
        gradient_accumulation_steps=2,
        num_train_epochs=1,
        learning_rate=1e-2,
        weight_decay=0.1,
        lr_scheduler_type="cosine",
        warmup_steps=2,
        max_grad_norm=1.0,
        use_cpu=True,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        logging_steps=1,
    )
    trainer = Ours(model, arguments, train_dataset=batches)
    trainer.train()
    logged = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert scope["losses"] == pytest.approx(logged, rel=1e-5)
    trained = dict(scope["model"].named_parameters())
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(trained[name], parameter, rtol=1e-4, atol=1e-5)


# -- accelerate and Lightning
# -------------------------------------------------------------------------------


def test_accelerate():
    """accelerate's own loop, once through both loops of the recipe."""
    accelerate = pytest.importorskip("accelerate")
    scope = recipe("accelerate")
    model, data = three_layers()
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)

    def train(epochs: int, scheduled: bool) -> list[float]:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        rates = torch.optim.lr_scheduler.LinearLR(
            optimizer, 1 / 3 if scheduled else 1.0, total_iters=6
        )
        net, loader, optimizer, rates = accelerator.prepare(
            model, DataLoader(data, batch_size=16), optimizer, rates
        )
        losses = []
        for _ in range(epochs):
            for x, y in loader:
                with accelerator.accumulate(net):
                    loss = F.cross_entropy(net(x), y)
                    accelerator.backward(loss)
                    if accelerator.sync_gradients:
                        accelerator.clip_grad_norm_(net.parameters(), 1.0)
                    optimizer.step()
                    rates.step()
                    optimizer.zero_grad()
                losses.append(loss.item())
        return losses

    losses = train(2, scheduled=True)
    assert_rounded(
        scope["losses"], [(a + b) / 2 for a, b in zip(losses[::2], losses[1::2], strict=True)]
    )
    assert_rounded(scope["piped"], train(1, scheduled=False))


@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")  # lightning asks torch in an old way
@pytest.mark.filterwarnings("ignore::UserWarning:lightning.*")  # advice about workers and folders
def test_lightning():
    """A plain loop; and an epoch, a checkpoint and a second epoch in a fresh module have the bits
    of two epochs."""
    lightning = pytest.importorskip("lightning")
    scope = recipe("Lightning")
    model, data = three_layers()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    rates = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=6)
    losses = []
    for x, y in [*DataLoader(data, batch_size=16)] * 2:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        rates.step()
        losses.append(loss.item())
    assert_rounded(scope["losses"], losses)
    assert 12 == scope["trainer"].global_step
    x, y = data.tensors
    assert scope["test_loss"] == pytest.approx(F.cross_entropy(model(x), y).item(), rel=1e-5)

    def go_on(epochs: int, path: Path | None) -> list[float]:
        module = scope["Pipelined"](three_layers()[0])
        trainer = lightning.Trainer(
            accelerator="cpu", max_epochs=epochs, default_root_dir="again", **scope["silent"]
        )
        trainer.fit(module, *scope["loaders"], ckpt_path=path)
        return module.losses

    first = go_on(1, None)
    (path,) = Path("again").rglob("*.ckpt")
    assert scope["losses"] == first + go_on(2, path)


# -- LoRA, rules over trees, modules as trees
# -------------------------------------------------------------------------------


@pytest.mark.filterwarnings(
    "ignore:.*is_gradient_checkpointing:FutureWarning"
)  # peft asks transformers for it
def test_lora():
    """The adapted model; the base keeps its bits; the saved adapter and the merged model are what
    was trained."""
    peft = pytest.importorskip("peft")
    from transformers import LlamaConfig, LlamaForCausalLM

    scope = recipe("LoRA with PEFT")
    torch.manual_seed(0)
    base = LlamaForCausalLM(LlamaConfig(**scope["sizes"], num_hidden_layers=4))
    start = {name: value.clone() for name, value in base.state_dict().items()}
    model = peft.get_peft_model(base, scope["lora"])
    optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=1e-2)
    losses = []
    for _ in range(5):
        optimizer.zero_grad()
        loss = model(**scope["batch"]).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    assert_rounded(scope["losses"], losses)
    assert 16 == len(scope["trained"])  # two matrices at two places in four layers

    fresh = LlamaForCausalLM(LlamaConfig(**scope["sizes"], num_hidden_layers=4))
    fresh.load_state_dict(start)
    loaded = peft.PeftModel.from_pretrained(fresh, "adapter")
    wanted = model(**scope["batch"]).loss.item()
    assert wanted < losses[-1]
    for trained in (loaded, scope["merged"]):
        assert trained(**scope["batch"]).loss.item() == pytest.approx(wanted, rel=1e-5)


def over_microbatches(net: Any, loss: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """The loss of a batch in four microbatches, one after the other; gradients are added to
    ``.grad``."""
    total = torch.zeros(())
    for rows, target in zip(x.tensor_split(4), y.tensor_split(4), strict=True):
        share = len(rows) / len(x)
        part = loss(net(rows), target)
        (part * share).backward()
        total += part.detach() * share
    return total


def test_torchopt():
    """The same rule, over a plain loop's gradients: every bit. Nothing was written, and no graph is
    kept."""
    torchopt = pytest.importorskip("torchopt")
    scope = recipe("torchopt")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 4))
    assert all(map(torch.equal, model.parameters(), scope["model"].parameters()))
    rule, params, losses = scope["rule"], dict(model.named_parameters()), []
    state = rule.init(params)
    for _ in range(5):
        model.zero_grad()
        losses.append(over_microbatches(model, F.cross_entropy, scope["x"], scope["y"]).item())
        grads = {name: parameter.grad for name, parameter in params.items()}
        with torch.no_grad():
            updates, state = rule.update(grads, state, params=params, inplace=False)
            for name, value in torchopt.apply_updates(params, updates, inplace=False).items():
                params[name].copy_(value)
    assert scope["losses"] == losses
    trained = scope["split"].merge(scope["params"])
    assert all(torch.equal(trained[name], parameter) for name, parameter in params.items())
    assert all(value.grad_fn is None for value in trained.values())


def test_modules_of_your_own():
    """The modules called one after the other: every bit of five steps."""
    scope = recipe("Use dataclasses as parameters")
    torch.manual_seed(0)
    first, second = (
        scope["Perceptron"]([scope["linear"](32, 8), scope["linear"](32, 32)]),
        scope["linear"](4, 32),
    )
    x, y = torch.randn(30, 8), torch.randint(0, 4, (30,))
    weights = [one for layer in (*first.layers, second) for one in (layer.weight, layer.bias)]
    losses = []
    for _ in range(5):
        for weight in weights:
            weight.grad = None
            weight.requires_grad_()
        losses.append(
            over_microbatches(lambda rows: second(first(rows)), F.cross_entropy, x, y).item()
        )
        with torch.no_grad():
            for weight in weights:
                weight -= 0.1 * weight.grad
    assert scope["losses"] == losses
    assert isinstance(scope["params"][0], scope["Perceptron"])
    assert scope["params"][0].activation is torch.tanh


# -- a tracker, class imbalance
# -------------------------------------------------------------------------------


def test_a_tracker():
    """Watching changes no bit; every step is told once, a timeline every tenth."""
    scope = recipe("Log metrics")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 4))
    batches = [(torch.randn(30, 16), torch.randint(0, 4, (30,))) for _ in range(12)]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses, norms = [], []
    for x, y in batches:
        optimizer.zero_grad()
        losses.append(over_microbatches(model, F.cross_entropy, x, y).item())
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
        optimizer.step()
    tracked = scope["logged"]
    assert [numbers["loss"] for numbers in tracked] == losses
    assert_rounded([numbers["norm"] for numbers in tracked], norms)
    assert [0, 10] == [step for step, numbers in enumerate(tracked) if "bubble" in numbers]
    for numbers in (tracked[0], tracked[10]):
        assert 0 < numbers["bubble"] < 1
        assert numbers["residuals"] == 2  # 1F1B: as many as stages
        assert numbers["memory"] > 2**20
    assert all(numbers["rows a second"] > 0 and numbers["rate"] == 0.1 for numbers in tracked)


def test_class_imbalance():
    """The losses of the whole batches; the means of microbatches' means are others."""
    scope = recipe("Handle class imbalance")
    x, y, importance = scope["x"], scope["y"], scope["row_weights"]
    counts = torch.tensor([int((y == label).sum()) for label in range(4)])
    assert counts.max() > 3 * counts.min() > 0

    def focal(logits, label):
        kept = logits.softmax(1).gather(1, label[:, None])[:, 0]
        return ((1 - kept) ** 2 * -kept.log()).mean()

    cases = {
        "by class": (lambda z, t: F.cross_entropy(z, t, weight=30 / counts), y),
        "by row": (
            lambda z, t: F.cross_entropy(z, t[0], reduction="none") @ t[1] / t[1].sum(),
            (y, importance),
        ),
        "many labels": (
            lambda z, t: F.binary_cross_entropy_with_logits(z, t, pos_weight=120 / counts - 1),
            F.one_hot(y, 4).float(),
        ),
        "focal": (focal, y),
    }
    assert cases.keys() == scope["losses"].keys()
    for name, (loss, target) in cases.items():
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 4))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses = []
        for start in range(0, 120, 30):
            rows = slice(start, start + 30)
            part = tuple(one[rows] for one in target) if isinstance(target, tuple) else target[rows]
            optimizer.zero_grad()
            value = loss(model(x[rows]), part)
            value.backward()
            optimizer.step()
            losses.append(value.item())
        assert_rounded(scope["losses"][name], losses)
        if name in ("by class", "by row"):
            whole = model(x[:30]).detach()
            chunks = [slice(0, 8), slice(8, 16), slice(16, 23), slice(23, 30)]
            means = [
                loss(
                    whole[one],
                    tuple(t[one] for t in target) if isinstance(target, tuple) else target[one],
                )
                for one in chunks
            ]
            first = tuple(t[:30] for t in target) if isinstance(target, tuple) else target[:30]
            assert abs(sum(means) / 4 / loss(whole, first) - 1) > 1e-3
    assert (torch.bincount(scope["drawn"], minlength=4) > 15).all()


def test_every_recipe_is_tested():
    """A section of the pages without a test would be text."""
    tested = set(re.findall(r'recipe\("(.*?)"\)', Path(__file__).read_text()))
    assert tested == set(SECTIONS)
