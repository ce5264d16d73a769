"""Find Python ``autograd.Function``s in a trace, because export keeps their forward but loses their
backward.

Nothing is patched. While export traces, its tensors carry the autograd graph, in which such a
function is a node of its own class. Inside operations over functions (``torch.cond``) there is no
such graph; there, the stack traces of the nodes show that torch traced a custom function.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, fx
from torch.autograd.function import BackwardCFunction

from funcpipe._src.core.errors import PlanError
from funcpipe._src.core.gradient_graph import nodes_of
from funcpipe._src.core.torch_names import HOOK_FUNCTION, TRACED_FUNCTION, function_of

_ADVICE = {
    "torch.utils.checkpoint.CheckpointFunction": (
        "the backward of torch.utils.checkpoint(use_reentrant=True); use use_reentrant=False, or "
        "fp.schedules.remat"
    ),
    HOOK_FUNCTION: "hooks on the backward of modules; remove them, and use result.grads",
}
_NAMELESS = "an autograd.Function inside torch.cond or a similar operation"


def on_the_way_to(outputs: Iterable[Any]) -> set[str]:
    """The Python functions that the gradients of these values would pass through, by full names."""
    names: set[str] = set()
    for node in nodes_of(output for output in outputs if isinstance(output, Tensor)):
        if isinstance(node, BackwardCFunction):
            kind = function_of(node)
            name = f"{kind.__module__}.{kind.__qualname__}"
            if name in _ADVICE or not name.startswith("torch."):
                names.add(name)
    return names


def refuse(names: set[str], module: fx.GraphModule) -> None:
    """Raise PlanError for a trace that lost the backward of the functions before its outputs."""
    known = [advice for name, advice in _ADVICE.items() if name in names]
    if known:
        raise PlanError(f"the model cannot be traced: export loses {' and '.join(known)}")
    if any(_has_one_inside(part) for part in module.modules()):
        names = names | {_NAMELESS}
    if names:
        raise PlanError(
            f"the model uses {', '.join(sorted(names))}: export traces through a Python "
            "autograd.Function and loses its backward, so gradients would be silently wrong; "
            "wrap the function as a torch.library.custom_op with register_autograd, or cut "
            "without tracing: split(model, num_stages) without example="
        )


def _has_one_inside(part: Any) -> bool:
    """Whether a graph has operations of a custom function, inside an operation over functions."""
    if not isinstance(part, fx.GraphModule):
        return False
    traces = (node.meta.get("stack_trace") or "" for node in part.graph.nodes)
    return any(TRACED_FUNCTION in trace.replace("\\", "/") for trace in traces)
