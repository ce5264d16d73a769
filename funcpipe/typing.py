"""``fp.typing``: names for annotations and ``isinstance``, of what the functions of funcpipe hand
out or take."""

from __future__ import annotations

from funcpipe._src.checkpoints.load import Loaded as Loaded
from funcpipe._src.checkpoints.save import Saving as Saving
from funcpipe._src.compiled.programs import Programs as Programs
from funcpipe._src.core.errors import Where as Where
from funcpipe._src.core.progress import CallProgress as CallProgress
from funcpipe._src.data.program import Role as Role
from funcpipe._src.data.program import Value as Value
from funcpipe._src.data.result import Carry as Carry
from funcpipe._src.data.result import Span as Span
from funcpipe._src.engine.graphs import Graphs as Graphs
from funcpipe._src.engine.lanes import Lanes as Lanes
from funcpipe._src.engine.options import Executor as Executor
from funcpipe._src.engine.options import RunOptions as RunOptions
from funcpipe._src.engine.vjp import Pullback as Pullback
from funcpipe._src.processes.rank_lanes import Ranks as Ranks
from funcpipe._src.processes.rank_schedule import RankSchedule as RankSchedule
from funcpipe._src.search.found import Found as Found
from funcpipe._src.view.draw import Drawing as Drawing
from funcpipe._src.view.report import Report as Report
