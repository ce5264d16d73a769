"""The socket of an edge, and the two ends of an edge on one: what arrives, in which order, and what ends it."""

import json
import signal
import socket
import struct
import threading
import time
import traceback
from datetime import timedelta
from itertools import product

import pytest
import torch
import torch.distributed as dist

from funcpipe.core.tree import flatten
from funcpipe.runtime import edge
from funcpipe.runtime.address import addresses_at, addresses_of
from funcpipe.runtime.border import Border
from funcpipe.runtime.cable import connected, memory_view
from funcpipe.runtime.connection import LostError
from funcpipe.runtime.edge import EdgeIn, EdgeOut, EdgeWay
from funcpipe.runtime.mail import Inbox, PoolLevel, Stop
from funcpipe.runtime.stream import Place
from funcpipe.runtime.worker import end_all

HOSTS = ["127.0.0.1"]


@pytest.fixture
def store():
    return dist.HashStore()


@pytest.fixture
def cables(store):
    """The two ends of one, of ranks 4 and 7."""
    ends = {}

    def connect(rank):
        ends[rank] = connected(store, rank, (4, 7), HOSTS, 20.0, lambda: True)

    threads = [threading.Thread(target=connect, args=(rank,)) for rank in (4, 7)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    yield ends[4], ends[7]
    for end in ends.values():
        end.cut()
        end.close()


def test_bytes_arrive_in_order_in_pieces_of_any_number_and_size(cables):
    """More pieces than the system takes at once, and more bytes than it keeps."""
    one, other = cables
    assert (one.rank, other.rank) == (7, 4)
    sizes = [number % 5 for number in range(3000)] + [30_000_000, 1, 0, 7]
    data = [bytes([number % 251]) * size for number, size in enumerate(sizes)]
    left = one.write(data, wait=False)
    assert left  # the system keeps less than all of it
    assert 0 < sum(map(len, left)) < sum(sizes)
    writer = threading.Thread(target=one.write, args=(left,), kwargs={"wait": True})
    writer.start()
    rooms = [bytearray(size) for size in reversed(sizes)]
    other.read(rooms)
    writer.join()
    assert b"".join(data) == b"".join(rooms)
    assert one.write([b"more"], wait=False) == []
    assert other.read_some(3, wait=True) == 3
    assert other.read_some(3, wait=True) == 1
    assert other.read_some(3, wait=False) == 0


@pytest.mark.parametrize(
    ("act", "way"),
    # Who writes is not woken when the other end is only cut; but who reads at the same end is.
    [
        pair
        for pair in product(("read", "read_some", "write"), ("cut", "cut there", "closed"))
        if pair != ("write", "cut there")
    ],
)
def test_whoever_waits_is_woken_when_either_end_goes(cables, act, way):
    one, other = cables
    heard = []

    def wait():
        try:
            if act == "write":
                one.write([bytes(100_000_000)], wait=True)
            else:
                one.read([bytearray(1)]) if act == "read" else one.read_some(1, wait=True)
        except LostError as error:
            heard.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    time.sleep(0.05)
    {"cut": one.cut, "cut there": other.cut, "closed": other.close}[way]()
    thread.join(5)
    assert [error.rank for error in heard] == [7]
    assert "the connection to its process has ended" in heard[0].text
    one.cut()
    with pytest.raises(LostError):
        one.write([b"x"], wait=True)


def test_a_stranger_who_knocks_is_not_let_in(store):
    """Whoever comes without the word that stands in the store; the one who has it comes after."""
    ends = []
    thread = threading.Thread(target=lambda: ends.append(connected(store, 0, (0, 1), HOSTS, 20.0, lambda: True)))
    thread.start()
    store.wait(["cable"], timedelta(seconds=10))
    host, port, _ = json.loads(store.get("cable"))
    with socket.create_connection((host, port)) as stranger:
        stranger.sendall(bytes(16))
        assert stranger.recv(1) == b""  # closed
    with socket.create_connection((host, port)):
        pass  # one who leaves at once
    ends.append(connected(store, 1, (0, 1), HOSTS, 20.0, lambda: True))
    thread.join()
    ends[1].write([b"hello"], wait=True)
    room = bytearray(5)
    ends[0].read([room])
    assert room == b"hello"
    for end in ends:
        end.close()


def test_who_does_not_come_is_named(store):
    with pytest.raises(LostError, match=r"could not be connected: nobody came for 0\.3 s") as caught:
        connected(store, 2, (2, 5), HOSTS, 0.3, lambda: True)
    assert caught.value.rank == 5
    with pytest.raises(LostError, match="could not be connected") as caught:
        connected(dist.HashStore(), 5, (2, 5), HOSTS, 0.3, lambda: True)
    assert caught.value.rank == 2


def test_who_waits_no_longer_leaves_soon(store):
    began = time.monotonic()
    with pytest.raises(LostError):
        connected(store, 2, (2, 5), HOSTS, 60.0, lambda: time.monotonic() - began < 0.3)
    assert time.monotonic() - began < 2


def test_addresses():
    """Of an interface, by its name; of the machine where nothing is known."""
    assert "127.0.0.1" in addresses_of("lo")
    assert addresses_at({"interface": "lo"}) == addresses_of("lo")
    assert addresses_at({"hostname": "10.0.0.7"}) == ["10.0.0.7"]
    assert addresses_at({})[-1] == "localhost"
    with pytest.raises(OSError, match="no interface"):
        addresses_of("none such")
    with pytest.raises(LostError, match="could not be connected"):
        connected(dist.HashStore(), 0, (0, 1), ["192.0.2.1"], 1.0, lambda: True)  # of no machine (RFC 5737)


def test_memory_that_was_written_from_can_still_be_shared():
    """Not so what numpy has seen: torch would copy it at once where a stage gets a copy of what came."""
    tensor = torch.arange(6.0).view(2, 3).T
    tensor += 1
    view = memory_view(tensor)
    assert bytes(view) == struct.pack("<6f", *range(1, 7))
    view[:4] = bytes(4)
    tensor[1, 0] = 9
    assert tensor[0, 0] == 0
    assert bytes(view[4:8]) == struct.pack("<f", 9)
    assert tensor.untyped_storage().resizable()


class Ends:
    """An edge from a lane of rank 4 to lane 1 of rank 7, with the mailboxes of both."""

    def __init__(self, cables):
        self.lost = []
        one, other = cables
        self.out = EdgeOut(EdgeWay(one, "out", 4, self.lost.append))
        self.into = EdgeIn(EdgeWay(other, "into", 7, self.lost.append))
        self.sender, self.receiver, self.levels = Inbox(), Inbox(), {slot: PoolLevel() for slot in range(4)}

    def begin(self, slots):
        self.out.begin(1, self.sender)
        self.into.begin(slots, self.receiver, self.levels, Place(torch.device("cpu"), alone=True, lane=1))

    def came(self, slot):
        if slot not in self.receiver.came:
            self.into.bring(slot, self.receiver)
        self.receiver.wait(slot)
        value, _ = self.receiver.came.pop(slot)
        return value.leaves

    def written(self, slot):
        self.sender.wait((1, slot))
        del self.sender.came[1, slot]


@pytest.fixture(params=["read by the lane", "read by a worker"])
def ends(cables, request, monkeypatch):
    monkeypatch.setattr(edge, "_SMALL", 1 << 40 if request.param == "read by the lane" else -1)
    both = Ends(cables)
    yield both
    for cable in cables:
        cable.cut()
    end_all([both.out.worker, both.into.worker], 5)


def border(*leaves):
    return Border(list(leaves), flatten(leaves)[1], ())


def test_values_come_whole_and_in_order_into_their_slots(ends):
    """Small ones, large ones, none at all; forms that are known and new ones; in two runs."""
    values = [
        (torch.randn(4),),
        (torch.randn(3_000_000), None, "word"),
        (torch.randn(2, 3).T, torch.empty(0, 5), 3),
        (torch.randn(4),),
    ] * 3
    for _ in range(2):
        slots = [number % 2 for number in range(len(values))]
        ends.begin(slots)

        def send(slots=slots):
            for number, (slot, value) in enumerate(zip(slots, values, strict=True)):
                if number >= 2:
                    ends.written(slot)
                ends.out.send(slot, border(*value))

        thread = threading.Thread(target=send)
        thread.start()
        for slot, value in zip(slots, values, strict=True):
            for one, other in zip(value, ends.came(slot), strict=True):
                if isinstance(one, torch.Tensor):
                    assert torch.equal(one, other)
                    assert one.stride() == other.stride()
                else:
                    assert one == other
            ends.into.free(slot, None)
        thread.join()
        for slot in (0, 1):
            ends.written(slot)
    assert len(ends.out.numbers) == len(ends.into.forms) == 3
    assert [level.sent for level in ends.levels.values()] == [12, 12, 0, 0]
    assert ends.lost == []


def test_what_is_not_asked_for_is_not_sent_and_nobody_waits_for_it(ends):
    """Two values for one slot: the second goes when the slot is free, and its tensors may not change until then."""
    first, second = torch.zeros(8), torch.ones(8)
    ends.begin([0, 0])
    ends.out.send(0, border(first))
    ends.written(0)
    ends.out.send(0, border(second))
    time.sleep(0.1)
    assert not ends.sender.quiet
    second.add_(1)  # whoever did so would see it arrive
    assert ends.came(0)[0].tolist() == [0.0] * 8
    ends.into.free(0, None)
    assert ends.came(0)[0].tolist() == [2.0] * 8
    ends.written(0)


def test_a_lane_does_not_wait_for_a_large_value(ends):
    """What the system does not take goes in a thread, and what comes after it waits for that, not the lane."""
    large = torch.randn(40_000_000)  # 160 MB
    ends.begin([0, 1, 2])
    time.sleep(0.1)  # asked for
    seconds = []
    for slot, value in enumerate((large, torch.ones(3), torch.zeros(3))):
        began = time.monotonic()
        ends.out.send(slot, border(value))
        seconds.append(time.monotonic() - began)
    assert [torch.equal(ends.came(slot)[0], value) for slot, value in ((0, large), (1, torch.ones(3)))] == [True] * 2
    for slot in range(3):
        ends.written(slot)
    assert max(seconds[1:]) < 0.05
    assert ends.came(2)[0].tolist() == [0.0] * 3


def test_many_values_at_random_times(ends):
    """Slots of three pools that are freed in any order: each value comes into its own."""
    generator = torch.Generator().manual_seed(0)
    slots = torch.randint(0, 4, (400,), generator=generator).tolist()
    ends.begin(slots)

    def send():
        for number, slot in enumerate(slots):
            if slot in slots[:number]:
                ends.written(slot)
            ends.out.send(slot, border(torch.full((1 + 4096 * (number % 7),), float(number))))

    thread = threading.Thread(target=send)
    thread.start()
    seen = []
    for slot in slots:
        seen.append(float(ends.came(slot)[0][0]))
        if slot % 2:
            time.sleep(0.0005)
        ends.into.free(slot, None)
    thread.join()
    assert seen == [*map(float, range(len(slots)))]


@pytest.mark.parametrize(
    ("data", "what"),
    [
        (b"\7" + bytes(15), "cannot be read"),  # a form that was never sent
        (bytes(8) + b"\5" + bytes(7) + b"abcde", "damaged"),
        (bytes(15) + b"\1", "it says that 72057594037927936 bytes follow"),  # a form of 2 ** 56 bytes
        (b"", "has ended"),
    ],
)
def test_what_is_no_value_is_told(ends, data, what):
    ends.begin([0])
    ends.out.cable.write([data], wait=True)
    if not data:
        ends.out.cable.cut()
    lane = threading.Thread(target=stopped, args=(ends,))
    lane.start()
    deadline = time.monotonic() + 5
    while not any(what in error.text for error in ends.lost):
        assert time.monotonic() < deadline, [error.text for error in ends.lost]
        time.sleep(0.01)
    frames = [entry.name for error in ends.lost for entry in traceback.extract_tb(error.__traceback__)]
    assert "bring" not in frames  # which is of the lane: it leads to all of its values
    ends.receiver.stop()
    lane.join(5)
    assert not lane.is_alive()


def stopped(ends):
    """What a lane does whose value never comes."""
    with pytest.raises(Stop):
        ends.came(0)


def test_a_lane_that_waits_for_a_value_ends_when_it_is_stopped(ends):
    """And the other end hears nothing of it: it may go on to send, and nobody is said to be lost."""
    ends.begin([0])
    lane = threading.Thread(target=stopped, args=(ends,))
    lane.start()
    deadline = time.monotonic() + 5
    while ends.receiver.waits != 0:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    ends.receiver.stop()
    lane.join(5)
    assert not lane.is_alive()
    ends.out.send(0, border(torch.ones(2)))
    ends.written(0)
    time.sleep(0.1)
    assert ends.lost == []


def test_a_lane_that_was_stopped_before_does_not_begin_to_read(ends):
    ends.begin([0])
    ends.receiver.stop()
    stopped(ends)
    assert ends.receiver.wake is None
    assert ends.lost == []


def test_who_reads_goes_by_the_largest_value_of_the_run_before(ends, monkeypatch):
    """A worker reads large ones beside what the lane does, the lane itself small ones; the first run knows none."""
    monkeypatch.setattr(edge, "_SMALL", 400)
    readers = []
    for counts in ((100, 99), (101, 3), (3, 100), (3, 3)):
        ends.begin([0, 1])
        for slot, count in enumerate(counts):
            ends.out.send(slot, border(torch.ones(count)))
        assert tuple(ends.came(slot)[0].numel() for slot in (0, 1)) == counts
        ends.written(0)
        ends.written(1)
        readers.append("the worker" if ends.into._take is None else "the lane")
    assert readers == ["the lane", "the lane", "the worker", "the lane"]


def test_a_program_that_is_to_end_with_its_pipe_does_not_end_with_its_peer(cables):
    one, other = cables
    before = signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    try:
        other.close()
        one.write([b"the other end answers that it is closed"], wait=True)
        time.sleep(0.1)
        with pytest.raises(LostError, match="has ended"):
            one.write([b"x"], wait=True)
    finally:
        signal.signal(signal.SIGPIPE, before)


def test_a_cable_is_given_back(cables):
    one, _ = cables
    one.close()
    with pytest.raises(LostError):
        one.write([b"x"], wait=False)
