"""``fp.batches``: batches on their way to the step, a software pipeline over a stream of batches.

`overlap` takes them through batch stages that work at the same time; windows and loss scales are for the step itself.
"""

from __future__ import annotations

from funcpipe.batches.accumulation import Accumulated as Accumulated
from funcpipe.batches.accumulation import accumulate_grads as accumulate_grads
from funcpipe.batches.accumulation import agree as agree
from funcpipe.batches.accumulation import windows as windows
from funcpipe.batches.device import awaited as awaited
from funcpipe.batches.device import to_device as to_device
from funcpipe.batches.prefetch import Overlap as Overlap
from funcpipe.batches.prefetch import overlap as overlap
from funcpipe.batches.scaling import LossScale as LossScale
from funcpipe.batches.scaling import loss_scale as loss_scale
from funcpipe.batches.scaling import select as select
from funcpipe.batches.scaling import unscale as unscale
from funcpipe.batches.scaling import update_scale as update_scale
from funcpipe.batches.stage import BatchStage as BatchStage
from funcpipe.batches.stage import Fold as Fold
from funcpipe.batches.stage import TickPlan as TickPlan
from funcpipe.batches.stats import Progress as Progress
from funcpipe.batches.stats import StageStats as StageStats
