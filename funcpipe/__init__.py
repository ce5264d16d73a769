"""funcpipe: pipeline-parallel training for PyTorch as JAX people would write it.

A schedule is data; a plan is a straight-line program over named values; run, simulate and draw are small interpreters
of that one program. The names here are the public ones; the rooms below are not part of the interface.
"""

from __future__ import annotations

from funcpipe.core.compose import compose as compose
from funcpipe.core.errors import BatchError as BatchError
from funcpipe.core.errors import DrawError as DrawError
from funcpipe.core.errors import FuncpipeError as FuncpipeError
from funcpipe.core.errors import NotFiniteError as NotFiniteError
from funcpipe.core.errors import PlacementError as PlacementError
from funcpipe.core.errors import PlanError as PlanError
from funcpipe.core.errors import RunTimeout as RunTimeout
from funcpipe.core.errors import ScheduleError as ScheduleError
from funcpipe.core.errors import StageError as StageError
from funcpipe.core.errors import Where as Where
from funcpipe.core.plan import Plan as Plan
from funcpipe.core.plan import Role as Role
from funcpipe.core.plan import Task as Task
from funcpipe.core.plan import TaskKind as TaskKind
from funcpipe.core.plan import Value as Value
from funcpipe.core.result import Cost as Cost
from funcpipe.core.result import Loss as Loss
from funcpipe.core.result import Result as Result
from funcpipe.core.result import Span as Span
from funcpipe.core.result import Timeline as Timeline
from funcpipe.core.schedule import Action as Action
from funcpipe.core.schedule import Kind as Kind
from funcpipe.core.schedule import Schedule as Schedule
from funcpipe.core.stage import Out as Out
from funcpipe.core.stage import Stage as Stage
from funcpipe.core.stage import stage as stage
from funcpipe.core.tree import leaves as leaves
from funcpipe.core.tree import named_leaves as named_leaves
from funcpipe.lower.plan import make_plan as make_plan
from funcpipe.models.balance import Balance as Balance
from funcpipe.models.balance import balance as balance
from funcpipe.models.batchnorm import batch_norm as batch_norm
from funcpipe.models.export import split_point as split_point
from funcpipe.models.layers_find import Layers as Layers
from funcpipe.models.layers_find import find_layers as find_layers
from funcpipe.models.module import from_module as from_module
from funcpipe.models.policy import Units as Units
from funcpipe.models.policy import by_memory as by_memory
from funcpipe.models.policy import by_parameters as by_parameters
from funcpipe.models.policy import by_time as by_time
from funcpipe.models.sequential import PipeSequential as PipeSequential
from funcpipe.models.skip_scope import Namespace as Namespace
from funcpipe.models.skippable import pop as pop
from funcpipe.models.skippable import skippable as skippable
from funcpipe.models.skippable import stash as stash
from funcpipe.models.split import Split as Split
from funcpipe.pipe.memory import LayerMemory as LayerMemory
from funcpipe.pipe.memory import Memory as Memory
from funcpipe.pipe.memory import memory as memory
from funcpipe.pipe.pipe import Pipe as Pipe
from funcpipe.pipe.profile import profile as profile
from funcpipe.pipe.split import split as split
from funcpipe.runtime.apply import apply as apply
from funcpipe.runtime.lanes import Lanes as Lanes
from funcpipe.runtime.lanes import lanes as lanes
from funcpipe.runtime.microbatch import Axis as Axis
from funcpipe.runtime.microbatch import Microbatches as Microbatches
from funcpipe.runtime.microbatch import Replicate as Replicate
from funcpipe.runtime.optim import accumulate as accumulate
from funcpipe.runtime.optim import global_norm as global_norm
from funcpipe.runtime.optim import step as step
from funcpipe.runtime.place import devices as devices
from funcpipe.runtime.place import place as place
from funcpipe.runtime.rng import fold_in as fold_in
from funcpipe.runtime.run import run as run
from funcpipe.runtime.sequential import run_sequential as run_sequential
from funcpipe.runtime.vjp import Pullback as Pullback
from funcpipe.runtime.vjp import vjp as vjp
from funcpipe.schedules.check import check as check
from funcpipe.schedules.families import eager_one_f_one_b as eager_one_f_one_b
from funcpipe.schedules.families import fill_drain as fill_drain
from funcpipe.schedules.families import interleaved as interleaved
from funcpipe.schedules.families import looped_bfs as looped_bfs
from funcpipe.schedules.families import one_f_one_b as one_f_one_b
from funcpipe.schedules.families import zb_h2 as zb_h2
from funcpipe.schedules.families import zero_bubble as zero_bubble
from funcpipe.schedules.formats import from_json as from_json
from funcpipe.schedules.formats import from_torch_csv as from_torch_csv
from funcpipe.schedules.formats import to_json as to_json
from funcpipe.schedules.formats import to_torch_csv as to_torch_csv
from funcpipe.schedules.remat import never as never
from funcpipe.schedules.remat import remat as remat
from funcpipe.schedules.v_shape import dualpipe_v as dualpipe_v
from funcpipe.schedules.v_shape import v_half as v_half
from funcpipe.schedules.v_shape import v_min as v_min
from funcpipe.schedules.v_shape import zbv as zbv
from funcpipe.view.draw import Drawing as Drawing
from funcpipe.view.draw import draw as draw
from funcpipe.view.report import Report as Report
from funcpipe.view.report import report as report
from funcpipe.view.simulate import simulate as simulate

__version__ = "0.1.0"
