"""A recorder in place of torch's streams."""

import sys
from pathlib import Path

import pytest

from funcpipe._src.devices.stream import CopyEdge, Place

sys.path.insert(0, str(Path(__file__).parent))
from recorder import Recorder


@pytest.fixture
def backend(monkeypatch):
    """Put a recorder in place of torch's streams; it follows the slots of every pool, too."""

    def install(skip: int | None = None) -> Recorder:
        recorder = Recorder(skip, hasty=skip is not None)
        monkeypatch.setattr(Place, "backend", recorder)

        def send(self, value, free=None):
            """The stream that fills a slot knows that the slot was freed before."""
            ticket = real_send(self, value, free)
            stream = self._streams.get(self.target.device) or getattr(self.source, "stream", None)
            if None not in (free, stream) and stream.clock.get(free.stream, 0) < free.clock.get(
                free.stream, 0
            ):
                recorder.fault(
                    f"a slot is filled on {stream.name} before {free.stream} has freed it"
                )
            return ticket

        monkeypatch.setattr(CopyEdge, "send", send)
        return recorder

    real_send = CopyEdge.send
    return install
