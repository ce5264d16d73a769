"""The one lock of all traces: export, fx and their checks change state of the whole process."""

from __future__ import annotations

import threading

tracing = threading.RLock()
"""Held while a model is exported, a stage is traced, or a program is written or built."""
