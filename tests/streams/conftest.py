"""A recorder in place of torch's streams."""

import sys
from itertools import count
from pathlib import Path

import pytest

from funcpipe.core.program import CALLER
from funcpipe.runtime.stream import Place
from funcpipe.runtime.transport import Local

sys.path.insert(0, str(Path(__file__).parent))
from recorder import Recorder


@pytest.fixture
def backend(monkeypatch):
    """Put a recorder in place of torch's streams; the slots of every pool are followed too."""

    def install(skip: int | None = None) -> Recorder:
        recorder = Recorder(skip, hasty=skip is not None)
        monkeypatch.setattr(Place, "backend", recorder)
        freed: dict[tuple[int, int, int], list] = {}
        filled: dict[tuple[int, int, int], int] = {}
        numbers = count()

        def place_of(transport, lane, slot):
            """Of this run: an id may come again."""
            number = vars(transport.boxes[0]).setdefault("number of the test", next(numbers))
            return number, lane, slot

        def free(self, slot, source, event):
            freed.setdefault(place_of(self, self.lane, slot), []).append(event)
            real_free(self, slot, source, event)  # last: it wakes the sender, who looks

        def follow(self, lane, slot, edge):
            """The slot that was filled just now: the stream that filled it knows that it was freed before.

            By now it may have been freed once more.
            """
            place = place_of(self, lane, slot)
            times = filled[place] = filled.get(place, 0) + 1
            event = freed[place][times - 2] if times > 1 else None
            stream = edge._streams.get(edge.target.device) or getattr(edge.source, "stream", None)
            if None not in (event, stream) and stream.clock.get(event.stream, 0) < event.clock.get(event.stream, 0):
                recorder.fault(
                    f"slot {slot} of lane {lane} is filled on {stream.name} before {event.stream} has freed it"
                )

        def send(self, instruction, value):
            real_send(self, instruction, value)
            follow(self, instruction.to, instruction.into, self.ways[instruction.to, instruction.into][0])

        def receive(self, instruction):
            ticket = real_receive(self, instruction)
            if instruction.source == CALLER:
                follow(self, self.lane, instruction.slot, self.given)
            return ticket

        monkeypatch.setattr(Local, "free", free)
        monkeypatch.setattr(Local, "send", send)
        monkeypatch.setattr(Local, "receive", receive)
        return recorder

    real_free, real_send, real_receive = Local.free, Local.send, Local.receive
    return install
