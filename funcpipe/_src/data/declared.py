"""Check that the declaration of a stage matches the arguments of its function."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from funcpipe._src.core.errors import PlanError, raise_all

if TYPE_CHECKING:
    from funcpipe._src.data.stage import Stage


def checked_names(names: Iterable[str], option: str) -> tuple[str, ...]:
    """Return names as a tuple. Raises PlanError for a single string: its letters would be names."""
    if isinstance(names, str):
        raise PlanError(f"{option}={names!r}: give a sequence of names, {option}=[{names!r}]")
    names = tuple(names)
    if "" in names:
        raise PlanError(f"{option} has an empty name")
    return names


def check_function(fn: Any) -> None:
    """Raise PlanError if an object cannot be the function of a stage."""
    if isinstance(fn, type):
        make = "fp.from_module" if hasattr(fn, "named_parameters") else "fp.stage"
        raise PlanError(
            f"{fn.__name__} is a class; make a stage from an instance: {make}({fn.__name__}(...))"
        )
    if hasattr(fn, "named_parameters"):
        raise PlanError(
            f"{type(fn).__name__} is a module, which contains its parameters, but a stage is a "
            "function of its parameters; write stage, params, state = fp.from_module(module)"
        )
    if not callable(fn):
        raise PlanError(
            f"a stage is made of a function (params, x) -> y; got a {type(fn).__name__}"
        )
    if inspect.isgeneratorfunction(fn) or inspect.iscoroutinefunction(fn):
        verb = "yields" if inspect.isgeneratorfunction(fn) else "is async"
        raise PlanError(
            f"{fn.__name__!r} {verb}, so a call of it computes nothing; write an ordinary function "
            "that returns its output, or fp.Out(y, stash={...}) to pass values to later stages"
        )


def arguments_of(fn: Callable[..., Any]) -> list[inspect.Parameter] | None:
    """Return the parameters of a function; None for built-ins without a signature."""
    try:
        return list(inspect.signature(fn).parameters.values())
    except (TypeError, ValueError):
        return None


def keywords_of(parameters: Sequence[inspect.Parameter]) -> dict[str, inspect.Parameter]:
    """Return the parameters of a function after params and x, by name."""
    kinds = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return {p.name: p for p in parameters[2:] if p.kind in kinds}


def check_declaration(stage: Stage, parameters: Sequence[inspect.Parameter]) -> None:
    """Raise PlanError if a stage's declaration does not match its function's parameters."""
    keywords = keywords_of(parameters)
    takes_all = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)
    declared = {"skips": stage.pop, "feeds": stage.feeds, "state": stage.state}
    faults = _positional(parameters)
    for keyword, declaration in declared.items():
        option = "pop" if keyword == "skips" else keyword
        if declaration and keyword not in keywords and not takes_all:
            faults.append(f"declares {option} but its function takes no keyword {keyword!r}")
        needed = keyword in keywords and keywords[keyword].default is inspect.Parameter.empty
        if not declaration and needed:
            faults.append(
                f"takes the keyword {keyword!r} but declares no {option}; add {option}=[...]"
            )
    faults += [
        f"names {repeated!r} twice in {label}"
        for label, names in (("stash", stage.stash), ("pop", stage.pop), ("feeds", stage.feeds))
        for repeated in sorted({n for n in names if names.count(n) > 1})
    ]
    faults += [f"both stashes and pops {skip!r}" for skip in stage.stash if skip in stage.pop]
    raise_all(f"stage {stage.name!r} and its function do not fit:", faults)


def _positional(parameters: Sequence[inspect.Parameter]) -> list[str]:
    """Return the faults of the positional arguments: a stage's function takes params and x."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    positional = [p for p in parameters if p.kind in kinds]
    if any(p.kind is inspect.Parameter.VAR_POSITIONAL for p in parameters):
        return []
    if len(positional) < 2:
        return [
            f"takes {len(positional)} arguments by position, but is called with two, fn(params, "
            "x); without parameters params is ()"
        ]
    if positional[0].name == "self":
        return ["takes self: give the method of an instance, fp.stage(net.method)"]
    known = ("skips", "feeds", "state", "train", "carry")
    return [
        f"needs {p.name!r} besides params and x, but no call passes it: bind it, "
        f"functools.partial(fn, {p.name}=...), or declare it as a feed of the batch (feeds=[...])"
        for p in parameters
        if p not in positional[:2]
        and p.name not in known
        and p.default is p.empty
        and p.kind is not p.VAR_KEYWORD
    ]
