"""``fp.batches``: batches on their way to the step, a software pipeline over a stream of batches.

`overlap` takes them through batch stages that work at the same time; `pack` groups samples into
microbatches; windows and loss scales are for the step itself.
"""

from __future__ import annotations

from funcpipe._src.batch.packing import Packing as Packing
from funcpipe._src.batch.packing import pack as pack
from funcpipe._src.batch.registry import Samples as Samples
from funcpipe._src.batch.registry import Varlen as Varlen
from funcpipe._src.batch.registry import register as register
from funcpipe._src.prefetch.accumulation import Accumulated as Accumulated
from funcpipe._src.prefetch.accumulation import accumulate_grads as accumulate_grads
from funcpipe._src.prefetch.accumulation import agree as agree
from funcpipe._src.prefetch.accumulation import windows as windows
from funcpipe._src.prefetch.device import awaited as awaited
from funcpipe._src.prefetch.device import to_device as to_device
from funcpipe._src.prefetch.prefetch import Overlap as Overlap
from funcpipe._src.prefetch.prefetch import overlap as overlap
from funcpipe._src.prefetch.scaling import LossScale as LossScale
from funcpipe._src.prefetch.scaling import loss_scale as loss_scale
from funcpipe._src.prefetch.scaling import select as select
from funcpipe._src.prefetch.scaling import unscale as unscale
from funcpipe._src.prefetch.scaling import update_scale as update_scale
from funcpipe._src.prefetch.stage import BatchStage as BatchStage
from funcpipe._src.prefetch.stage import Fold as Fold
from funcpipe._src.prefetch.stage import TickPlan as TickPlan
from funcpipe._src.prefetch.stats import Progress as Progress
from funcpipe._src.prefetch.stats import StageStats as StageStats
