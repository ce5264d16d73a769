"""``fp.models``: what models are cut and measured with, and what their authors write into them.

To cut: `split_point`, policies for `funcpipe.split`, `find_layers`, `balance`. To measure: `profile`, `profile_plan`,
`memory`. To choose everything at once: `plan_for`. To write: `skippable` layers, `PipeSequential`, `batch_norm`.
"""

from __future__ import annotations

from funcpipe.cutting.plan_for import Choice as Choice
from funcpipe.cutting.plan_for import Tried as Tried
from funcpipe.cutting.plan_for import plan_for as plan_for
from funcpipe.measuring.memory import LayerMemory as LayerMemory
from funcpipe.measuring.memory import Memory as Memory
from funcpipe.measuring.memory import memory as memory
from funcpipe.measuring.profile import profile as profile
from funcpipe.measuring.profile_plan import profile_plan as profile_plan
from funcpipe.modules.balance import Balance as Balance
from funcpipe.modules.balance import balance as balance
from funcpipe.modules.batchnorm import batch_norm as batch_norm
from funcpipe.modules.export import split_point as split_point
from funcpipe.modules.layers_find import Layers as Layers
from funcpipe.modules.layers_find import find_layers as find_layers
from funcpipe.modules.policy import Units as Units
from funcpipe.modules.policy import by_memory as by_memory
from funcpipe.modules.policy import by_parameters as by_parameters
from funcpipe.modules.policy import by_time as by_time
from funcpipe.modules.sequential import PipeSequential as PipeSequential
from funcpipe.modules.skip_scope import Namespace as Namespace
from funcpipe.modules.skippable import pop as pop
from funcpipe.modules.skippable import skippable as skippable
from funcpipe.modules.skippable import stash as stash
from funcpipe.modules.traced import mean_by_rows as mean_by_rows
from funcpipe.modules.traced import sum_of_changes as sum_of_changes
