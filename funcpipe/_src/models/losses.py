"""Take a model's own loss out of the model's output, and count the labels that it averages over.

The labels of transformers models are counted before any forward.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from funcpipe._src.core.errors import BatchError, PlanError
from funcpipe._src.core.tree import Tree, flatten, locations
from funcpipe._src.models.configs import is_of_transformers
from funcpipe._src.models.module import syntax_of
from funcpipe._src.models.traced.signature import as_call

IGNORED = -100  # the label that losses ignore, by torch's convention

Counter = Callable[[Mapping[str, Any]], Any]
"""Maps inputs by name to the number of labels that count. None: microbatches count by rows."""


class ModelLoss:
    """``(output, target) -> loss`` for a model that computes its own loss; the target is ignored."""

    def __init__(
        self, path: tuple[Any, ...] | None = None, labels: Callable[[Any], Any] | None = None
    ) -> None:
        self.path, self.labels = path, labels

    def __call__(self, y: Any, target: Any = None) -> Any:
        """Return the loss in an output. Raises PlanError if there is none."""
        loss = self.find(y)
        if loss is None:
            where, labels = f" at {'.'.join(map(str, self.path or ()))}", ""
            if self.path is None:
                where = ""
                labels = (
                    "if the model computes the loss from labels, put them among the inputs: "
                    "({..., 'labels': labels}, None); otherwise "
                )
            raise PlanError(
                f"the model's output has no loss{where}; its scalars: {scalars(y) or 'none'}; "
                f"{labels}give split(..., loss=path or function), or make_plan(loss=) your own loss"
            )
        return loss

    @property
    def is_known(self) -> bool:
        """Whether the divisor of the model's loss is known."""
        return self.labels is not None and getattr(self.labels, "counter", None) is not None

    def weigh(self, inputs: Any, target: Any) -> Any:
        """The number of labels that the model's loss averages over. None: rows count."""
        return None if self.labels is None else self.labels(inputs)

    def find(self, y: Any) -> Any:
        """Return the loss in an output, or None."""
        if self.path is not None:
            for key in self.path:
                y = _step(y, key)
            return y if _is_loss(y) else None
        return next((value for value in (y, _step(y, "loss")) if _is_loss(value)), None)

    def __repr__(self) -> str:
        return f"ModelLoss({'' if self.path is None else '.'.join(map(str, self.path))})"


def as_loss(loss: Any, model: nn.Module) -> Callable[[Any, Any], Any]:
    """Turn the argument of ``split(loss=)`` into the loss of a plan."""
    if isinstance(loss, (str, int)):
        loss = tuple(loss.split(".")) if isinstance(loss, str) else (loss,)
    if loss is None or isinstance(loss, tuple):
        return ModelLoss(loss, Labels(model))  # pyright: ignore[reportUnknownArgumentType]
    if callable(loss):
        return lambda y, target: loss(y)
    raise PlanError(
        "loss is a path into the model's output ('loss', 0, ('head', 'loss')) or a function of "
        f"it; got a {type(loss).__name__}"
    )


def scalars(y: Any) -> list[str]:
    """List the places of the floating scalars in an output."""
    return [
        name
        for name, leaf in zip(locations(y, "output"), flatten(y)[0], strict=True)
        if _is_loss(leaf)
    ]


def _is_loss(value: Any) -> bool:
    return isinstance(value, Tensor) and not value.dim() and value.is_floating_point()


def _step(y: Any, key: Any) -> Any:
    if isinstance(y, Mapping):
        return y.get(key)  # pyright: ignore[reportUnknownVariableType]
    if isinstance(y, (tuple, list)) and not hasattr(y, "_fields"):
        number = int(key) if str(key).isdigit() else -1
        return y[number] if 0 <= number < len(y) else None  # pyright: ignore[reportUnknownVariableType]
    return getattr(y, str(key), None)


# -- labels that count
# -------------------------------------------------------------------------------


class Labels:
    """The number of labels of a microbatch that a model's own loss counts."""

    def __init__(self, model: nn.Module) -> None:
        self.name = type(model).__name__
        self.names = tuple(inspect.signature(model.forward).parameters)
        self.counter = counter(model)

    def __call__(self, inputs: Tree) -> Any:
        """Return the number of labels that count in these inputs. None: microbatches count by rows.

        Raises BatchError if the inputs contain ignored labels, but the loss's divisor is unknown.
        """
        args, kwargs = as_call(inputs)
        arguments = {**dict(zip(self.names, args, strict=False)), **kwargs}
        if self.counter is not None:
            for name in ("num_items_in_batch", "ignore_index"):
                if arguments.get(name) is not None:
                    raise BatchError(
                        f"the inputs have {name!r}, but a plan counts the labels of all "
                        f"microbatches itself, which are not {IGNORED}; leave it out"
                    )
            return self.counter(arguments)
        for name, value in arguments.items():
            if ("label" in name or "target" in name) and _ignores(value):
                raise BatchError(
                    f"the inputs contain {name!r} with {IGNORED}, which losses ignore, but "
                    f"funcpipe does not know the divisor of the loss of {self.name}; give "
                    "make_plan(loss=) a loss with a method weigh(self, inputs, target) -> number "
                    "(docs/howto/padding.md)"
                )
        return None


def _ignores(value: Any) -> bool:
    known = isinstance(value, Tensor) and value.dtype == torch.long and not value.is_meta
    return known and bool((value == IGNORED).any())


def counter(model: Any) -> Counter | None:
    """Find the function that counts the labels of a model's own loss. None: the divisor is unknown.

    The loss of a transformers model is ``model.loss_function`` of the labels, or a cross entropy in
    its forward. The source of the forward tells which.
    """
    base: Any = getattr(model, "get_base_model", None)
    if callable(base) and not getattr(
        getattr(model, "active_peft_config", None), "is_prompt_learning", True
    ):
        model = base()  # a peft model passes its labels to its base model
    if not is_of_transformers(model):
        return None
    match _loss_of_labels(type(model).forward):
        case "function":
            from transformers.loss import loss_utils as known  # pyright: ignore  # nothing is known of its types

            function: Any = getattr(model, "loss_function", None)
            table: dict[Any, Counter] = {
                known.ForCausalLMLoss: _next_tokens,
                known.ForMaskedLMLoss: _tokens,
                known.ForTokenClassification: _tokens,
                known.ForSequenceClassificationLoss: partial(_classes, model.config),
            }
            return table.get(function)
        case "cross entropy":
            return _tokens
        case _:
            return None


def _tokens(inputs: Mapping[str, Any]) -> Any:
    labels = inputs.get("labels")
    return (labels != IGNORED).sum() if isinstance(labels, Tensor) else None


def _next_tokens(inputs: Mapping[str, Any]) -> Any:
    """Count the labels without the first of each row, because no token predicts it."""
    shifted, labels = inputs.get("shift_labels"), inputs.get("labels")
    if isinstance(shifted, Tensor):
        return (shifted != IGNORED).sum()
    return (labels[..., 1:] != IGNORED).sum() if isinstance(labels, Tensor) else None


def _classes(config: Any, inputs: Mapping[str, Any]) -> Any:
    """Count labels that are one class per row. None for other labels."""
    labels, problem = inputs.get("labels"), config.problem_type
    if problem is None and config.num_labels > 1:
        problem = "single_label_classification"
    classes = isinstance(labels, Tensor) and labels.dtype in (torch.long, torch.int)
    return _tokens(inputs) if classes and problem == "single_label_classification" else None


def _loss_of_labels(forward: Callable[..., Any]) -> str:
    """How a forward computes its loss of ``labels``: "function", "cross entropy", or ""."""
    nodes = syntax_of(forward)
    names = [node for node in nodes if isinstance(node, ast.Name) and node.id == "labels"]
    written = [name for name in names if isinstance(name.ctx, ast.Store)]
    assigned = [ast.unparse(node) for node in nodes if isinstance(node, ast.Assign)]
    moved = [line for line in assigned if line.startswith("labels = labels.to(")]
    if len(written) > len(moved):
        return ""
    calls = [node for node in nodes if isinstance(node, ast.Call)]
    functions = [call for call in calls if ast.unparse(call.func) == "self.loss_function"]
    entropies = [
        call for call in calls if ast.unparse(call.func).split(".")[-1] == "CrossEntropyLoss"
    ]
    if len(functions) == 1 and not entropies:
        keywords = {
            str(keyword.arg): ast.unparse(keyword.value) for keyword in functions[0].keywords
        }
        arguments = [*map(ast.unparse, functions[0].args), keywords.get("labels", "")]
        return (
            "function" if arguments.count("labels") == 1 and "shift_labels" not in keywords else ""
        )
    if len(entropies) == 1 and not functions:
        options = [ast.unparse(option) for option in (*entropies[0].args, *entropies[0].keywords)]
        last = [
            ast.unparse(call.args[-1])
            for call in calls
            if "loss" in ast.unparse(call.func) and call.args
        ]
        flat = last in (["labels.view(-1)"], ["labels.reshape(-1)"])
        return "cross entropy" if flat and options in ([], [f"ignore_index={IGNORED}"]) else ""
    return ""
