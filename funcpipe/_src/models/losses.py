"""Take a model's own loss out of the model's output."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from funcpipe._src.core.errors import PlanError
from funcpipe._src.core.tree import flatten, locations
from funcpipe._src.models.counting import Labels


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
                where, labels = (
                    "",
                    "if the model computes the loss from labels, put them among the inputs: "
                    "({..., 'labels': labels}, None); otherwise ",
                )
            raise PlanError(
                f"the model's output has no loss{where}; its scalars are {scalars(y) or 'none'}; "
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
