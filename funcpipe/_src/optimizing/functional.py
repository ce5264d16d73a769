"""`FunctionalOptimizer`: an optimizer of torch that calls a pair of pure functions.

The functions see one parameter at a time. So stages step apart, checkpoints fit any number of
stages, and all other code sees a usual optimizer with its state in ``optimizer.state``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from funcpipe._src.core.errors import CheckpointError, PlanError, raise_all
from funcpipe._src.core.plain_tensors import memory_number
from funcpipe._src.core.tree import Spec, Tree, flatten, locations, unflatten
from funcpipe._src.stages.explain import described

LeafState: TypeAlias = dict[str, Any]
"""The state of one parameter: the leaves of its tree by their locations."""


class FunctionalOptimizer(torch.optim.Optimizer):
    """Make a torch optimizer of two pure functions, as in optax and torchopt.

    The functions are called for each parameter separately: a tensor is a tree of one leaf. So
    results do not depend on the cut into stages, and `step`, `run`, `run_batches`, `save` and
    `load` take this optimizer like those of ``torch.optim``. Parameters without gradient do not
    change, nor does their state. A rule over several parameters, such as clipping by the norm of
    all, would see only one; use ``max_norm=``.

    >>> def update(gradient, velocity, param, lr):
    ...     velocity = 0.9 * velocity + gradient
    ...     return -lr * velocity, velocity
    >>> params = ({"w": torch.ones(2)},)
    >>> optimizer = fp.optim.FunctionalOptimizer(fp.leaves(params), torch.zeros_like, update, lr=0.5)
    >>> norm = fp.step(optimizer, params, ({"w": torch.tensor([3.0, 4.0])},))
    >>> params[0]["w"].tolist()
    [-0.5, -1.0]

    Args:
        params: tensors or groups, as for an optimizer of ``torch.optim``.
        init: a function ``init(param) -> state``. The state is a tree of tensors and numbers.
        update: a function ``update(gradient, state, param, **options) -> (update, new_state)`` that
            does not write to its arguments. The update, which is added to the parameter, has the
            parameter's shape. The new state has the structure, shapes and types of the state.
        options: values that ``update`` gets as keywords, such as ``lr``. Groups may have their own,
            and schedulers of ``torch.optim.lr_scheduler`` change ``lr``.

    Raises:
        PlanError: ``init`` or ``update`` cannot be called like this, or a group has an option that
            is not in ``options``. A step raises it for an update or a new state that does not fit,
            and then no parameter and no state has changed.
    """

    def __init__(
        self,
        params: ParamsT,
        init: Callable[[Tensor], Tree],
        update: Callable[..., tuple[Tensor, Tree]],
        **options: Any,
    ) -> None:
        self._rule, self._names = (init, update), tuple(options)
        self._specs: dict[Tensor, Spec] = {}
        _refuse_other_functions(init, update, options)
        super().__init__(params, options)

    def __getstate__(self) -> dict[str, Any]:
        own = {"_rule": self._rule, "_names": self._names, "_specs": {}}
        return {**super().__getstate__(), **own}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group. Raises PlanError for an option that ``update`` does not get."""
        known = {"params", "param_names", "initial_lr", *self._names}
        if unknown := [name for name in param_group if name not in known]:
            raise PlanError(
                f"a group has the option {unknown[0]!r}, which update does not get; give its value "
                f"for the other groups: FunctionalOptimizer(..., {unknown[0]}=...)"
            )
        super().add_param_group(param_group)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Compute the updates of all parameters that have a ``.grad``. Only then add them."""
        with torch.enable_grad():
            loss = None if closure is None else closure()
        changes = [
            (leaf, *self._changed(leaf, {name: group[name] for name in self._names}))
            for group in self.param_groups
            for leaf in group["params"]
            if leaf.grad is not None
        ]
        for leaf, changed, state in changes:
            leaf.copy_(changed)
            self.state[leaf] = state
        return loss

    def _changed(self, leaf: Tensor, options: Mapping[str, Any]) -> tuple[Tensor, LeafState]:
        """Return the new numbers and the new state of a leaf, without a write."""
        param, gradient = leaf.detach(), leaf.grad
        old = self.state.get(leaf)
        if not old or leaf not in self._specs:
            first = self._first(leaf)
            old = old or first
        state = unflatten(self._specs[leaf], old.values())
        pair: Any = self._rule[1](gradient, state, param, **options)
        title = "the results of update do not fit, and nothing was stepped:"
        if not isinstance(pair, (tuple, list)) or len(pair) != 2:
            raise_all(title, [f"update returns (update, new_state); got {described(pair)}"])
        update, new = pair
        faults: list[str] = []
        if (
            not isinstance(update, Tensor)
            or (update.shape, update.device) != (leaf.shape, leaf.device)
            or not torch.can_cast(update.dtype, leaf.dtype)
        ):
            faults.append(f"the update is {described(update)}, the parameter {described(param)}")
        values, spec = flatten(new)
        if spec != self._specs[leaf] or _forms(values) != _forms(old.values()):
            faults.append(f"the new state is {described(new)}; the state was {described(state)}")
        raise_all(title, faults)
        return (param + update).to(leaf.dtype), _kept(old, values, param, gradient)

    def _first(self, leaf: Tensor) -> LeafState:
        """Return the first state of a leaf, and remember its structure."""
        param = leaf.detach()
        tree = self._rule[0](param)
        values, self._specs[leaf] = flatten(tree)
        return _kept(locations(tree, ""), values, param)

    def fitted(self, state_dict: Mapping[str, Any]) -> dict[Tensor, LeafState]:
        """Return the states of a ``state_dict`` by leaf. Raises CheckpointError for states that
        ``init`` does not return."""
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        held = [leaf for group in self.param_groups for leaf in group["params"]]
        states: dict[Tensor, LeafState] = {}
        for number, leaf in zip(numbers, held, strict=False):  # torch refuses another count
            saved, first = state_dict["state"].get(number), self._first(leaf)
            if not saved:
                continue
            if {*saved} != {*first} or _forms(saved[at] for at in first) != _forms(first.values()):
                raise CheckpointError(
                    "the saved state is not of the functions of this FunctionalOptimizer: it is "
                    f"{described(saved)}, and init returns {described(first)}"
                )
            states[leaf] = {
                at: saved[at].to(value.device) if isinstance(value, Tensor) else saved[at]
                for at, value in first.items()
            }
        return states

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore options and states. Raises CheckpointError for states of other functions."""
        states = self.fitted(state_dict)  # torch would cast each tensor to the parameter's dtype
        super().load_state_dict({**state_dict, "state": {}})
        self.state.update(states)


def _refuse_other_functions(init: Any, update: Any, options: Mapping[str, Any]) -> None:
    """Raise PlanError unless the functions can be called as `FunctionalOptimizer` calls them."""
    calls = {"init(param)": (init, 1, {}), "update(gradient, state, param)": (update, 3, options)}
    for call, (function, count, keywords) in calls.items():
        try:
            inspect.signature(function).bind(*[None] * count, **keywords)
        except TypeError as error:
            words = f" and the keywords {', '.join(keywords)}" if keywords else ""
            raise PlanError(
                f"FunctionalOptimizer calls {call}{words}, but {error}; for a rule of torchopt, "
                "give rule.init, lambda g, s, p: rule.update(g, s, params=p, inplace=False)"
            ) from None
        except ValueError:  # a builtin function, without a signature
            continue


def _forms(values: Iterable[Any]) -> list[Any]:
    return [(v.shape, v.dtype) if isinstance(v, Tensor) else type(v) for v in values]


def _kept(places: Iterable[str], values: Iterable[Any], *others: Any) -> LeafState:
    """Return a state by places. Values that share memory with a tensor that changes are copied."""
    numbers = {memory_number(each) for each in others}
    return {
        place: value.clone()
        if isinstance(value, Tensor) and memory_number(value) in numbers
        else value
        for place, value in zip(places, values, strict=True)
    }
