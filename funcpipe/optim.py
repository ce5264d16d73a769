"""``fp.optim``: optimizers of pure functions. `funcpipe.step` takes them like those of
``torch.optim``."""

from __future__ import annotations

from funcpipe._src.optimizing.functional import FunctionalOptimizer as FunctionalOptimizer
