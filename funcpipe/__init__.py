"""funcpipe: pipeline-parallel training for PyTorch as JAX people would write it.

A schedule is data; a plan is a straight-line program over named values; run, simulate and draw are
small interpreters of that one program.

The names here are what every program needs: stages, plans, runs, what to look at them with, errors.
What some need is in `funcpipe.schedules` (families of schedules, their transformations and texts),
`funcpipe.batches` (batches on their way to the step), `funcpipe.models` (models cut and measured),
`funcpipe.optim` (optimizers of pure functions), `funcpipe.typing` (names for annotations) and
`funcpipe.testing`. `funcpipe._src` is not part of the interface.

Examples in the help of these names need ``import torch``, ``from torch import nn`` and ``import
funcpipe as fp``.
"""

from __future__ import annotations

from funcpipe import batches as batches
from funcpipe import models as models
from funcpipe import optim as optim
from funcpipe import schedules as schedules
from funcpipe import typing as typing
from funcpipe._src.batch.marks import Axis as Axis
from funcpipe._src.batch.marks import Microbatches as Microbatches
from funcpipe._src.batch.marks import Replicate as Replicate
from funcpipe._src.checkpoints.load import load as load
from funcpipe._src.checkpoints.save import save as save
from funcpipe._src.compiled.compile import compile_stage as compile_stage
from funcpipe._src.compiled.compile import make_programs as make_programs
from funcpipe._src.compiled.warmup import warmup as warmup
from funcpipe._src.core.errors import BatchError as BatchError
from funcpipe._src.core.errors import CheckpointError as CheckpointError
from funcpipe._src.core.errors import DrawError as DrawError
from funcpipe._src.core.errors import FuncpipeError as FuncpipeError
from funcpipe._src.core.errors import NotFiniteError as NotFiniteError
from funcpipe._src.core.errors import PeerError as PeerError
from funcpipe._src.core.errors import PlacementError as PlacementError
from funcpipe._src.core.errors import PlanError as PlanError
from funcpipe._src.core.errors import RanksError as RanksError
from funcpipe._src.core.errors import RunTimeout as RunTimeout
from funcpipe._src.core.errors import ScheduleError as ScheduleError
from funcpipe._src.core.errors import StageError as StageError
from funcpipe._src.core.errors import TraceError as TraceError
from funcpipe._src.core.tree import leaves as leaves
from funcpipe._src.core.tree import named_leaves as named_leaves
from funcpipe._src.data.compose import compose as compose
from funcpipe._src.data.cost import Cost as Cost
from funcpipe._src.data.plan import Plan as Plan
from funcpipe._src.data.result import Loss as Loss
from funcpipe._src.data.result import Result as Result
from funcpipe._src.data.result import Timeline as Timeline
from funcpipe._src.data.schedule import Action as Action
from funcpipe._src.data.schedule import Kind as Kind
from funcpipe._src.data.schedule import Schedule as Schedule
from funcpipe._src.data.stage import Out as Out
from funcpipe._src.data.stage import Stage as Stage
from funcpipe._src.data.stage import stage as stage
from funcpipe._src.devices.devices import devices as devices
from funcpipe._src.engine.apply import apply as apply
from funcpipe._src.engine.graphs import graphs as graphs
from funcpipe._src.engine.lanes import lanes as lanes
from funcpipe._src.engine.place import place as place
from funcpipe._src.engine.run import run as run
from funcpipe._src.engine.run import value_and_grad as value_and_grad
from funcpipe._src.engine.sequential import run_sequential as run_sequential
from funcpipe._src.engine.vjp import vjp as vjp
from funcpipe._src.lower.plan import make_plan as make_plan
from funcpipe._src.models.module import from_module as from_module
from funcpipe._src.models.split import split as split
from funcpipe._src.models.split_model import Split as Split
from funcpipe._src.optimizing.optim import accumulate as accumulate
from funcpipe._src.optimizing.optim import global_norm as global_norm
from funcpipe._src.optimizing.optim import step as step
from funcpipe._src.optimizing.run_batches import run_batches as run_batches
from funcpipe._src.pipe.pipe import Pipe as Pipe
from funcpipe._src.processes.ranks import ranks as ranks
from funcpipe._src.search.search import search as search
from funcpipe._src.stages.rng import fold_in as fold_in
from funcpipe._src.view.draw import draw as draw
from funcpipe._src.view.report import report as report
from funcpipe._src.view.simulate import simulate as simulate

__version__ = "0.1.0"

# Tracebacks name the module that users import errors from, not the file under _src that defines
# them.
for _value in list(globals().values()):
    if isinstance(_value, type) and issubclass(_value, FuncpipeError):
        _value.__module__ = "funcpipe"
