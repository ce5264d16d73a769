"""The lock of all traces.

torch.export, fx and their checks change state of the whole process, so two threads must not trace
at the same time.
"""

from __future__ import annotations

import threading

tracing = threading.RLock()
"""Held while a model is exported, a stage is traced, or a program is written or built."""
