"""Count the labels that a transformers model's own loss averages over, before any forward."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from funcpipe._src.core.errors import BatchError
from funcpipe._src.core.tree import Tree
from funcpipe._src.models.configs import is_of_transformers
from funcpipe._src.models.module import syntax_of
from funcpipe._src.models.traced.signature import as_call

IGNORED = -100
"""The label that losses ignore, by torch's convention."""

Counter = Callable[[Mapping[str, Any]], Any]
"""Maps inputs by name to the number of labels that count. None: microbatches count by rows."""


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
            if arguments.get("num_items_in_batch") is not None:
                raise BatchError(
                    "the inputs have 'num_items_in_batch', but a plan counts the labels of all "
                    "microbatches itself; leave it out"
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
