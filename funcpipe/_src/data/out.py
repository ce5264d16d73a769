"""`Out`: the return value of a stage function that returns more than its output."""

from __future__ import annotations

from collections.abc import Mapping
from functools import wraps
from typing import Any, NamedTuple

from funcpipe._src.core.shown import guarded, line, shapes_of
from funcpipe._src.core.tree import Tree


class Out(NamedTuple):
    """The return value of a stage function that returns more than its output.

    >>> halve = fp.stage(stash=["whole"])(lambda params, x: fp.Out(x / 2, stash={"whole": x}))
    >>> halve((), 8.0).y, halve((), 8.0).stash
    (4.0, {'whole': 8.0})

    Attributes:
        y: the output, any tree: the input of the next stage or of the loss.
        stash: a tree for each declared name. Later stages receive it by ``pop``. Default: none.
        stats: statistics of this microbatch for the stage's ``commit``, any tree.
        loss: an auxiliary loss ``(sum, weight)``. Each microbatch adds ``sum / weight`` to the
            plan's loss, with the microbatch's own weight. Default: (), no auxiliary loss.
        carry: any tree for the next slice of the microbatch, such as the keys and values of all
            slices so far.
    """

    # The defaults are () and {}, not None: every leaf of an Out is then a tensor, as torch.func's
    # vmap and jvp require.

    y: Tree
    stash: Mapping[str, Tree] = {}
    stats: Tree = ()
    loss: tuple[Any, Any] | tuple[()] | None = ()
    carry: Tree = ()

    @guarded
    def __repr__(self) -> str:
        empty = [
            name
            for name, tree in self._asdict().items()
            if isinstance(tree, (tuple, dict)) and not tree
        ]
        return line(
            "Out",
            [(name, shapes_of(tree)) for name, tree in self._asdict().items() if name not in empty],
        )


_new_out = Out.__new__


@wraps(_new_out)
def _with_own_stash(
    cls: type[Out], y: Tree, stash: Mapping[str, Tree] | None = None, *rest: Any, **named: Any
) -> Out:
    return _new_out(cls, y, {} if stash is None else stash, *rest, **named)


# All calls would share one default dict: a stage that writes ``out.stash["e"] = x`` would change
# every later Out.
Out.__new__ = _with_own_stash
