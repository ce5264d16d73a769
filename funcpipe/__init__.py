"""funcpipe: pipeline-parallel training for PyTorch as JAX people would write it.

A schedule is data; a plan is a straight-line program over named values; run, simulate and draw are small interpreters
of that one program.

The names here are what every program needs: stages, plans, runs, what to look at them with, errors. What some need is
in `funcpipe.schedules` (families of schedules, their transformations and texts), `funcpipe.batches` (batches on their
way to the step), `funcpipe.models` (models cut and measured), `funcpipe.typing` (names for annotations) and
`funcpipe.testing`. All other modules are rooms of the house, not part of the interface.

Examples in the help of these names need ``import torch``, ``from torch import nn`` and ``import funcpipe as fp``.
"""

from __future__ import annotations

from funcpipe import batches as batches
from funcpipe import models as models
from funcpipe import schedules as schedules
from funcpipe import typing as typing
from funcpipe.checkpoints.load import load as load
from funcpipe.checkpoints.save import save as save
from funcpipe.compiled.compile import compile_stage as compile_stage
from funcpipe.compiled.compile import make_programs as make_programs
from funcpipe.compiled.warmup import warmup as warmup
from funcpipe.core.compose import compose as compose
from funcpipe.core.cost import Cost as Cost
from funcpipe.core.errors import BatchError as BatchError
from funcpipe.core.errors import CheckpointError as CheckpointError
from funcpipe.core.errors import DrawError as DrawError
from funcpipe.core.errors import FuncpipeError as FuncpipeError
from funcpipe.core.errors import NotFiniteError as NotFiniteError
from funcpipe.core.errors import PeerError as PeerError
from funcpipe.core.errors import PlacementError as PlacementError
from funcpipe.core.errors import PlanError as PlanError
from funcpipe.core.errors import RanksError as RanksError
from funcpipe.core.errors import RunTimeout as RunTimeout
from funcpipe.core.errors import ScheduleError as ScheduleError
from funcpipe.core.errors import StageError as StageError
from funcpipe.core.errors import TraceError as TraceError
from funcpipe.core.plan import Plan as Plan
from funcpipe.core.result import Loss as Loss
from funcpipe.core.result import Result as Result
from funcpipe.core.result import Timeline as Timeline
from funcpipe.core.schedule import Action as Action
from funcpipe.core.schedule import Kind as Kind
from funcpipe.core.schedule import Schedule as Schedule
from funcpipe.core.stage import Out as Out
from funcpipe.core.stage import Stage as Stage
from funcpipe.core.stage import stage as stage
from funcpipe.core.tree import leaves as leaves
from funcpipe.core.tree import named_leaves as named_leaves
from funcpipe.cutting.split import split as split
from funcpipe.lab.search import search as search
from funcpipe.lower.plan import make_plan as make_plan
from funcpipe.modules.module import from_module as from_module
from funcpipe.modules.split import Split as Split
from funcpipe.pipe.pipe import Pipe as Pipe
from funcpipe.runtime.apply import apply as apply
from funcpipe.runtime.devices import devices as devices
from funcpipe.runtime.graphs import graphs as graphs
from funcpipe.runtime.lanes import lanes as lanes
from funcpipe.runtime.marks import Axis as Axis
from funcpipe.runtime.marks import Microbatches as Microbatches
from funcpipe.runtime.marks import Replicate as Replicate
from funcpipe.runtime.optim import accumulate as accumulate
from funcpipe.runtime.optim import global_norm as global_norm
from funcpipe.runtime.optim import step as step
from funcpipe.runtime.place import place as place
from funcpipe.runtime.ranks import ranks as ranks
from funcpipe.runtime.rng import fold_in as fold_in
from funcpipe.runtime.run import run as run
from funcpipe.runtime.run_batches import run_batches as run_batches
from funcpipe.runtime.sequential import run_sequential as run_sequential
from funcpipe.runtime.vjp import vjp as vjp
from funcpipe.view.draw import draw as draw
from funcpipe.view.report import report as report
from funcpipe.view.simulate import simulate as simulate

__version__ = "0.1.0"
