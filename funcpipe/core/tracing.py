"""The one lock of all traces: export, fx and the checks around them change state of the whole process for a while."""

from __future__ import annotations

import threading

tracing = threading.RLock()
"""Held while a model is exported, a stage is traced, or a program is written or built."""
