"""``fp.typing``: names for annotations and ``isinstance``, of what the functions of funcpipe hand out or take."""

from __future__ import annotations

from funcpipe.checkpoints.load import Loaded as Loaded
from funcpipe.checkpoints.save import Saving as Saving
from funcpipe.compiled.programs import Programs as Programs
from funcpipe.core.errors import Where as Where
from funcpipe.core.program import Role as Role
from funcpipe.core.program import Value as Value
from funcpipe.core.progress import CallProgress as CallProgress
from funcpipe.core.result import Span as Span
from funcpipe.lab.found import Found as Found
from funcpipe.runtime.graphs import Graphs as Graphs
from funcpipe.runtime.lanes import Lanes as Lanes
from funcpipe.runtime.options import Executor as Executor
from funcpipe.runtime.options import RunOptions as RunOptions
from funcpipe.runtime.rank_lanes import Ranks as Ranks
from funcpipe.runtime.rank_schedule import RankSchedule as RankSchedule
from funcpipe.runtime.vjp import Pullback as Pullback
from funcpipe.view.draw import Drawing as Drawing
from funcpipe.view.report import Report as Report
