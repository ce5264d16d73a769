"""``fp.schedules``: families of schedules, schedules made from schedules, the check, schedules as
text.

A family is a function from counts to a `funcpipe.Schedule`; remat, delayed weight backwards,
offload and pairs that overlap are functions from a schedule to another one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from funcpipe._src.data.cost import Skip as Skip
from funcpipe._src.schedules.families import eager_one_f_one_b as eager_one_f_one_b
from funcpipe._src.schedules.families import fill_drain as fill_drain
from funcpipe._src.schedules.families import interleaved as interleaved
from funcpipe._src.schedules.families import looped_bfs as looped_bfs
from funcpipe._src.schedules.families import one_f_one_b as one_f_one_b
from funcpipe._src.schedules.families import zb_h2 as zb_h2
from funcpipe._src.schedules.families import zero_bubble as zero_bubble
from funcpipe._src.schedules.formats import from_json as from_json
from funcpipe._src.schedules.formats import to_json as to_json
from funcpipe._src.schedules.legal import check as check
from funcpipe._src.schedules.slices import balanced_slices as balanced_slices
from funcpipe._src.schedules.torch_csv import from_torch_csv as from_torch_csv
from funcpipe._src.schedules.torch_csv import to_torch_csv as to_torch_csv
from funcpipe._src.schedules.transforms import always as always
from funcpipe._src.schedules.transforms import delay as delay
from funcpipe._src.schedules.transforms import gather_params as gather_params
from funcpipe._src.schedules.transforms import never as never
from funcpipe._src.schedules.transforms import offload as offload
from funcpipe._src.schedules.transforms import pair as pair
from funcpipe._src.schedules.transforms import reduce_grads as reduce_grads
from funcpipe._src.schedules.transforms import remat as remat
from funcpipe._src.schedules.transforms import step_params as step_params
from funcpipe._src.schedules.transforms import unpair as unpair
from funcpipe._src.schedules.v_shape import dualpipe_v as dualpipe_v
from funcpipe._src.schedules.v_shape import v_adaptive as v_adaptive
from funcpipe._src.schedules.v_shape import v_half as v_half
from funcpipe._src.schedules.v_shape import v_min as v_min
from funcpipe._src.schedules.v_shape import zbv as zbv

_OTHER_NAMES = {
    "gpipe": "fill_drain",
    "afab": "fill_drain",
    "f_then_b": "fill_drain",
    "onef1b": "one_f_one_b",
    "pipedream_flush": "one_f_one_b",
    "dapple": "one_f_one_b",
    "interleaved_1f1b": "interleaved",
    "bfs": "looped_bfs",
    "breadth_first": "looped_bfs",
    "zb_h1": "zero_bubble",
    "zb_v": "zbv",
    "dualpipe": "dualpipe_v",
    "checkpoint": "remat",
    "forward_only": "fill_drain(..., backward=False)",
}
"""Names in papers and other libraries, in lower case, and the functions or calls here."""

if not TYPE_CHECKING:  # type checkers would accept every name of a module with __getattr__

    def __getattr__(name: str) -> object:
        """Raise AttributeError with the name that funcpipe uses for a name of another library."""
        here = _OTHER_NAMES.get(name.lower().removeprefix("schedule"))
        hint = f"; funcpipe's name is fp.schedules.{here}" if here else ""
        message = f"module 'funcpipe.schedules' has no attribute {name!r}{hint}"
        raise AttributeError(message, name=name)
