"""``fp.models``: what models are cut and measured with, and what their authors write into them.

To cut: `split_point`, policies for `funcpipe.split`, `find_layers`, `balance`. To measure:
`profile`, `profile_plan`, `memory`. To choose everything at once: `plan_for`. To read and write the
cuts of other libraries: `from_torchtitan`, `from_megatron`. To write: `skippable` layers,
`PipeSequential`, `batch_norm`.
"""

from __future__ import annotations

from funcpipe._src.measuring.memory import LayerMemory as LayerMemory
from funcpipe._src.measuring.memory import Memory as Memory
from funcpipe._src.measuring.memory import memory as memory
from funcpipe._src.measuring.profile import profile as profile
from funcpipe._src.measuring.profile_plan import profile_plan as profile_plan
from funcpipe._src.models.balance import Balance as Balance
from funcpipe._src.models.balance import balance as balance
from funcpipe._src.models.layers.find import Layers as Layers
from funcpipe._src.models.layers.find import find_layers as find_layers
from funcpipe._src.models.layouts import from_megatron as from_megatron
from funcpipe._src.models.layouts import from_torchtitan as from_torchtitan
from funcpipe._src.models.layouts import to_megatron as to_megatron
from funcpipe._src.models.layouts import to_torchtitan as to_torchtitan
from funcpipe._src.models.norms.batchnorm import batch_norm as batch_norm
from funcpipe._src.models.plan_for import Choice as Choice
from funcpipe._src.models.plan_for import Tried as Tried
from funcpipe._src.models.plan_for import plan_for as plan_for
from funcpipe._src.models.policy import Units as Units
from funcpipe._src.models.policy import by_memory as by_memory
from funcpipe._src.models.policy import by_parameters as by_parameters
from funcpipe._src.models.policy import by_time as by_time
from funcpipe._src.models.sequential import PipeSequential as PipeSequential
from funcpipe._src.models.skippable import Namespace as Namespace
from funcpipe._src.models.skippable import pop as pop
from funcpipe._src.models.skippable import skippable as skippable
from funcpipe._src.models.skippable import stash as stash
from funcpipe._src.models.traced.export import split_point as split_point
from funcpipe._src.models.traced.traced import mean_by_rows as mean_by_rows
from funcpipe._src.models.traced.traced import sum_of_changes as sum_of_changes
