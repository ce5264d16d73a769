"""What the processes of a plan send each other: what arrives, in which order, who reads it, and
what ends it."""

import collections
import functools
import json
import operator
import signal
import socket
import struct
import threading
import time
import traceback
from itertools import product

import pytest
import torch
import torch.distributed as dist
from teams import Teams, meeting

import funcpipe as fp
from funcpipe._src.core.border import Border
from funcpipe._src.core.plain_tensors import memory_view
from funcpipe._src.core.tree import flatten
from funcpipe._src.devices.stream import Place
from funcpipe._src.engine.mail import Inbox, PoolLevel, Stop
from funcpipe._src.engine.worker import Worker
from funcpipe._src.processes import team as team_module
from funcpipe._src.processes.address import addresses_at, addresses_of
from funcpipe._src.processes.alarms import Alarm
from funcpipe._src.processes.peer import FrameKind, Head, LostError
from funcpipe._src.processes.remote import Arrivals, RemoteLane
from funcpipe._src.processes.rendezvous import Rendezvous, listening
from funcpipe._src.processes.wire_dtensors import Meshes
from funcpipe._src.replicas.replicas import Replicas, Sharding


@pytest.fixture
def teams(request):
    made = Teams(getattr(request, "param", 2))
    yield made
    made.close()


def until(happened, seconds=5.0):
    deadline = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def size_of(*counts):
    return pytest.mark.parametrize("teams", counts, indirect=True)


# -- the rendezvous
# -------------------------------------------------------------------------------


def test_a_stranger_who_knocks_is_not_let_in():
    """Whoever comes without the token that stands in the store, or for another rank; those who have
    it come after."""
    store, members = dist.HashStore(), {}

    def add(connected, rank):
        members[rank] = connected

    thread = threading.Thread(target=meeting(store, 0, 2).connect, args=(add,))
    thread.start()
    until(lambda: store.check(["at/0"]), 10)
    host, port, token = json.loads(store.get("at/0"))
    for said in (bytes(20), bytes.fromhex(token) + struct.pack("<I", 7)):
        with socket.create_connection((host, port)) as stranger:
            stranger.sendall(said)
            assert stranger.recv(1) == b""  # closed
    with socket.create_connection((host, port)):
        pass  # one who leaves at once
    meeting(store, 1, 2).connect(add)
    thread.join()
    members[0].sendall(b"hello")
    assert members[1].recv(5) == b"hello"
    for end in members.values():
        end.close()


def test_who_does_not_come_is_named():
    with pytest.raises(LostError, match=r"it did not come for 0\.3 s") as caught:
        meeting(dist.HashStore(), 0, 2, 0.3).connect(lambda *_: None)
    assert caught.value.rank == 1
    with pytest.raises(LostError, match="rank 0 made no fp.ranks") as caught:
        meeting(dist.HashStore(), 1, 2, 0.3).connect(lambda *_: None)
    assert caught.value.rank == 0
    with pytest.raises(LostError, match="rank 1, rank 2 made no fp.ranks") as caught:
        meeting(dist.HashStore(), 0, 3, 0.3).hear({})
    assert caught.value.rank == 1


@pytest.mark.parametrize("act", ["connect", "hear"])
def test_who_waits_no_longer_leaves_soon(act):
    began = time.monotonic()
    made = meeting(dist.HashStore(), 0, 2, 60.0, lambda: time.monotonic() - began < 0.3)
    with pytest.raises(LostError):
        made.connect(lambda *_: None) if act == "connect" else made.hear({})
    assert time.monotonic() - began < 2


def test_addresses():
    """Of an interface, by its name; of the machine where nothing is known."""
    assert "127.0.0.1" in addresses_of("lo")
    assert addresses_at({"interface": "lo"}) == addresses_of("lo")
    assert addresses_at({"hostname": "10.0.0.7"}) == ["10.0.0.7"]
    assert addresses_at({})[-1] == "localhost"
    with pytest.raises(OSError, match="no interface"):
        addresses_of("none such")
    with pytest.raises(OSError, match="assign"):
        listening(["192.0.2.1"])  # of no machine (RFC 5737)


def test_a_rank_that_cannot_listen_is_at_fault():
    made = Rendezvous(dist.HashStore(), 0, ["rank 0", "rank 1"], 1.0, lambda: True)
    made._where = {"hostname": "192.0.2.1"}
    with pytest.raises(LostError, match="cannot be reached by others") as caught:
        made.connect(lambda *_: None)
    assert caught.value.rank == 0


# -- bytes
# -------------------------------------------------------------------------------


def test_bytes_arrive_in_order_in_pieces_of_any_number_and_size(teams):
    """More pieces than the system takes at once, and more bytes than it keeps."""
    sizes = [number % 5 for number in range(3000)] + [30_000_000, 1, 0, 7]
    data = [
        torch.full((size,), number % 251, dtype=torch.uint8) for number, size in enumerate(sizes)
    ]
    one, other = (member.channel(3) for member in teams.members)
    began = time.monotonic()
    for piece in data:
        one.post(1, piece)
    posted = time.monotonic() - began
    for piece in data:
        assert torch.equal(piece, other.take(0))
    one.drain()
    assert posted < 5  # it waits for nobody
    other.post(0, data[7])
    assert torch.equal(data[7], one.take(1))


@pytest.mark.parametrize(
    ("act", "way"),
    [*product(("take", "drain", "exchange"), ("cut here", "cut there", "closed there"))],
)
def test_whoever_waits_is_woken_when_either_end_goes(teams, act, way):
    one, other = teams.members
    heard = []

    def wait():
        try:
            if act == "drain":
                other.monitor.end()  # it reads no more
                other.reading._turn.acquire()
                one.channel(3).post(1, torch.zeros(100_000_000, dtype=torch.uint8))
                one.drain()
            else:
                one.channel(3).take(1) if act == "take" else one.exchange(b"x")
        except (Stop, Alarm) as error:
            heard.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    time.sleep(0.1)
    if way == "cut here":
        one.cut()
    elif way == "cut there":
        other.cut()
    else:
        other.close(told=False)
    thread.join(5)
    assert len(heard) == 1 or act == "drain"  # what is written to nobody is written
    until(lambda: one.failure is not None)
    assert one.failure.rank == (0 if way == "cut here" else 1)
    assert ("the connection to its process has ended" in one.failure.text) is (way != "cut here")
    if act == "drain":
        other.reading._turn.release()


def test_memory_that_was_written_from_can_still_be_shared():
    """Not so what numpy has seen: torch would copy it at once where a stage gets a copy of what
    came."""
    tensor = torch.arange(6.0).view(2, 3).T
    tensor += 1
    view = memory_view(tensor)
    assert bytes(view) == struct.pack("<6f", *range(1, 7))
    view[:4] = bytes(4)
    tensor[1, 0] = 9
    assert tensor[0, 0] == 0
    assert bytes(view[4:8]) == struct.pack("<f", 9)
    assert tensor.untyped_storage().resizable()


def test_a_program_that_is_to_end_with_its_pipe_does_not_end_with_its_peer(teams):
    before = signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    try:
        teams.members[1].peers[0].shut()
        for _ in range(3):
            teams.members[0].channel(1).post(1, torch.zeros(9))
            time.sleep(0.05)
        until(lambda: teams.members[0].failure is not None)
    finally:
        signal.signal(signal.SIGPIPE, before)


# -- values
# -------------------------------------------------------------------------------


class Ends:
    """An edge from lane 0 of rank 0 to lane 1 of rank 1, with the mailboxes of both."""

    def __init__(self, teams):
        self.teams, self.run = teams.members, 0
        self.levels = {slot: PoolLevel() for slot in range(4)}

    def start(self, *, receive=True):
        """A run begins."""
        self.run += 1
        for member in self.teams:
            member.run = self.run
        one, other = self.teams
        self.sender, self.receiver = Inbox(one.lead), Inbox(other.lead)
        place = Place(torch.device("cpu"), alone=True, lane=1)
        news, self.arrivals = (
            Arrivals(self.sender, place, {}, {}, Meshes(())),
            Arrivals(self.receiver, place, self.levels, {}, Meshes(())),
        )
        self.out = RemoteLane(one, 1, (0, 1), 0, news, None)
        self.back = RemoteLane(other, 0, (1, 0), 0, self.arrivals, None)
        one.begin((self.run, 0, 0), news)
        if receive:
            self.receive()

    def receive(self):
        """The lane that receives begins the run."""
        self.teams[1].begin((self.run, 0, 1), self.arrivals)

    def end(self):
        for member in self.teams:
            member.end_run()

    def came(self, slot):
        self.receiver.wait(slot)
        value, _ = self.receiver.came.pop(slot)
        return value.leaves

    def free(self, slot):
        self.back.put((1, slot), None)

    def freed(self, slot):
        self.sender.wait((1, slot))
        del self.sender.came[1, slot]


@pytest.fixture(params=["read by the lane", "read by the team"])
def ends(teams, request, monkeypatch):
    if request.param == "read by the team":  # one waits for good, and reads for all
        for member in teams.members:
            box = Inbox()
            threading.Thread(target=member.lead, args=(box,), daemon=True).start()
            until(lambda member=member: member.reading._leader)
    both = Ends(teams)
    both.start()
    return both


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
    for run in range(2):
        if run:
            ends.end()
            ends.start()
        slots = [number % 2 for number in range(len(values))]

        def send(slots=slots):
            for number, (slot, value) in enumerate(zip(slots, values, strict=True)):
                if number >= 2:
                    ends.freed(slot)
                ends.out.put(slot, (border(*value), None))

        thread = threading.Thread(target=send)
        thread.start()
        for slot, value in zip(slots, values, strict=True):
            for one, other in zip(value, ends.came(slot), strict=True):
                if isinstance(one, torch.Tensor):
                    assert torch.equal(one, other)
                    assert one.stride() == other.stride()
                else:
                    assert one == other
            ends.free(slot)
        thread.join()
    assert len(ends.teams[0].peers[1]._numbers) == len(ends.teams[1].peers[0]._forms) == 3
    assert [level.sent for level in ends.levels.values()] == [12, 12, 0, 0]
    assert [member.failure for member in ends.teams] == [None, None]


def test_forms_are_numbered_anew_where_there_are_many(ends, monkeypatch):
    monkeypatch.setattr("funcpipe._src.processes.peer._FORMS", 3)
    for count in (1, 2, 3, 4, 1, 2, 3, 4):
        ends.out.put(0, (border(torch.full((count,), float(count))), None))
        assert ends.came(0)[0].tolist() == [float(count)] * count
        ends.free(0)
    assert len(ends.teams[1].peers[0]._forms) == 3


def test_a_value_whose_slot_is_taken_waits_at_the_sender(ends):
    """The lane that sends goes on. It may not send a third one into the slot before the second one
    has gone."""
    first, second = torch.zeros(8), torch.ones(8)
    ends.out.put(0, (border(first), None))
    ends.freed(0)
    ends.out.put(0, (border(second), None))
    time.sleep(0.1)
    assert (1, 0) not in ends.sender.came
    assert ends.sender.is_empty
    second.add_(1)  # whoever did so would see it arrive
    assert ends.came(0)[0].tolist() == [0.0] * 8
    assert ends.receiver.is_empty
    ends.free(0)
    assert ends.came(0)[0].tolist() == [2.0] * 8
    ends.freed(0)


def test_what_cannot_travel_is_an_error_of_the_lane_that_sends_it(ends):
    """Also where the slot is taken, so that it would go later."""
    ends.out.put(0, (border(torch.zeros(8)), None))
    for _ in range(2):
        with pytest.raises(fp.PlanError, match="cannot go to another process"):
            ends.out.put(0, (border(object()), None))
    leaves, _ = flatten({"a": torch.zeros(2)})
    odd = Border(leaves, flatten(collections.defaultdict(int, a=torch.zeros(2)))[1], ())
    with pytest.raises(fp.PlanError, match="a defaultdict cannot go"):
        ends.out.put(0, (odd, None))
    assert [member.failure for member in ends.teams] == [None, None]


def test_a_lane_does_not_wait_for_a_large_value(ends):
    """What the system does not take goes in another thread, and what comes after it waits for that,
    not the lane."""
    large = torch.randn(40_000_000)  # 160 MB
    seconds = []
    for slot, value in enumerate((large, torch.ones(3), torch.zeros(3))):
        began = time.monotonic()
        ends.out.put(slot, (border(value), None))
        seconds.append(time.monotonic() - began)
    assert [
        torch.equal(ends.came(slot)[0], value) for slot, value in ((0, large), (1, torch.ones(3)))
    ] == [True] * 2
    assert max(seconds[1:]) < 0.05
    assert ends.came(2)[0].tolist() == [0.0] * 3


def test_many_values_at_random_times(ends):
    """Slots of three pools that are freed in any order: each value comes into its own."""
    generator = torch.Generator().manual_seed(0)
    slots = torch.randint(0, 4, (400,), generator=generator).tolist()

    def send():
        for number, slot in enumerate(slots):
            if slot in slots[:number]:
                ends.freed(slot)
            ends.out.put(
                slot, (border(torch.full((1 + 4096 * (number % 7),), float(number))), None)
            )

    thread = threading.Thread(target=send)
    thread.start()
    seen = []
    for slot in slots:
        seen.append(float(ends.came(slot)[0][0]))
        if slot % 2:
            time.sleep(0.0005)
        ends.free(slot)
    thread.join()
    assert seen == [*map(float, range(len(slots)))]


def test_what_comes_before_a_lane_begins_waits_for_it_and_what_comes_after_its_end_is_dropped(ends):
    ends.end()
    ends.start(receive=False)
    ends.out.put(0, (border(torch.ones(3)), None))
    until(lambda: ends.teams[1]._early)
    assert ends.receiver.is_empty
    ends.receive()
    assert ends.came(0)[0].tolist() == [1.0] * 3
    ends.teams[0].end_run()
    ends.free(0)
    time.sleep(0.1)
    assert ends.teams[0]._early == {}
    assert ends.sender.is_empty


@pytest.mark.parametrize(
    ("frame", "body", "what"),
    [
        (
            Head(FrameKind.VALUE, 1, 0, 1, 0, other=7),
            b"",
            "cannot be read: KeyError",
        ),  # a form that was never sent
        (Head(FrameKind.VALUE, 1, 0, 1, 0, other=0, length=5), b"abcde", "damaged"),
        (
            Head(FrameKind.VALUE, 1, 0, 1, 0, other=0, length=1 << 56),
            b"",
            "a frame of 72057594037927936 bytes is larger than the memory",
        ),
        (Head(99), b"", "cannot be read: ValueError"),
        (Head(FrameKind.FAILED, length=2), b"{]", "cannot be read: JSONDecodeError"),
    ],
)
def test_what_is_no_frame_is_told(ends, frame, body, what):
    peer = ends.teams[0].peers[1]
    peer._socket.send(struct.pack("<IIIIIIQ", *frame) + body)
    lane = threading.Thread(target=stopped, args=(ends,))
    lane.start()
    until(lambda: ends.teams[1].failure is not None)
    assert what in ends.teams[1].failure.text
    assert ends.teams[1].failure.rank == 0
    ends.receiver.stop()
    lane.join(5)
    assert not lane.is_alive()


def stopped(ends):
    """What a lane does whose value never comes."""
    with pytest.raises(Stop) as caught:
        ends.came(0)
    traceback.clear_frames(caught.tb)


def test_a_lane_that_waits_for_a_value_ends_when_it_is_stopped(ends):
    """And the other end hears nothing of it: it may go on to send, and nobody is said to be
    lost."""
    lane = threading.Thread(target=stopped, args=(ends,))
    lane.start()
    until(lambda: ends.receiver.waits == 0)
    time.sleep(0.05)
    began = time.monotonic()
    ends.receiver.stop()
    lane.join(5)
    assert not lane.is_alive()
    assert time.monotonic() - began < 0.3
    ends.out.put(0, (border(torch.ones(2)), None))
    time.sleep(0.1)
    assert [member.failure for member in ends.teams] == [None, None]


def test_a_lane_that_was_stopped_before_does_not_begin_to_read(ends):
    ends.receiver.stop()
    stopped(ends)
    stopped(ends)
    assert ends.receiver.wake is None


# -- who reads
# -------------------------------------------------------------------------------


def test_two_who_wait_both_get_theirs(teams):
    """One reads for both; when it has its own, the other one goes on."""
    one, other = teams.members
    got = []

    def wait(number):
        got.append((number, float(one.channel(number).take(1).view(torch.float32)[0])))

    for first, second in ((1, 2), (2, 1)) * 20:
        threads = [threading.Thread(target=wait, args=(number,)) for number in (1, 2)]
        for thread in threads:
            thread.start()
        for number in (first, second):
            other.channel(number).post(0, torch.tensor([float(number)]))
        for thread in threads:
            thread.join(5)
            assert not thread.is_alive()
    assert sorted(got) == [(1, 1.0)] * 40 + [(2, 2.0)] * 40


def test_what_nobody_waits_for_is_read_soon(teams):
    one, other = teams.members
    other.channel(1).post(0, torch.zeros(8_000_000))
    until(lambda: not one.channel(1).box.is_empty)
    other.drain()


def test_what_another_thread_puts_into_the_box_of_one_who_reads_wakes_it(teams):
    one = teams.members[0]
    box, seconds = Inbox(one.lead), []

    def wait():
        began = time.monotonic()
        box.wait("key")
        seconds.append(time.monotonic() - began)

    thread = threading.Thread(target=wait)
    thread.start()
    until(lambda: one.reading._leader == thread.ident)
    box.put("key", 1)
    thread.join(5)
    assert seconds[0] < 0.4  # it looks by itself every .5 s


# -- exchanges
# -------------------------------------------------------------------------------


@size_of(1, 2, 3, 4, 5, 8)
def test_everyone_has_what_everyone_gives(teams):
    """Of any length, more than the system keeps included; one exchange after the other, some ranks
    late."""
    for number in range(4):
        given = [bytes([rank, number]) * (1 + number * rank * 1000) for rank in range(teams.size)]
        if number == 3:
            given = [bytes([rank]) * 6_000_000 for rank in range(teams.size)]

        def exchange(rank, given=given):
            time.sleep(0.01 * (rank % 3))
            return teams.members[rank].exchange(given[rank])

        assert teams.all(exchange) == [given] * teams.size


@size_of(4)
def test_tensors_that_several_hold(teams):
    """Some hold several, one holds none and does not take part; more than the system keeps;
    twice."""
    tensors = [torch.randn(2_000_000), torch.arange(3), torch.empty(0, 2), torch.randn(3, 2)]
    like = [team_module.TensorLayout.of(tensor) for tensor in tensors]
    holders = [3, 0, 3, 1]

    def gather(rank):
        mine = {place: tensors[place] for place, holder in enumerate(holders) if holder == rank}
        return teams.members[rank].gather(mine, holders, like)

    for _ in range(2):
        for values in teams.all(gather, ranks=[0, 1, 3]):
            assert all(torch.equal(value, tensors[place]) for place, value in enumerate(values))


@size_of(3)
def test_nobody_minds_a_rank_that_leaves_until_it_is_needed(teams):
    for member in teams.members:
        member.run = 2
    teams.members[1].close(told=True)
    time.sleep(0.1)
    assert [teams.members[rank].failure for rank in (0, 2)] == [None, None]
    teams.members[2].run = 3
    teams.members[2].refuse_gone()
    assert teams.members[2].failure.rank == 1
    assert (
        "has left its `with fp.ranks(...)` after 2 runs, and this is run 3. All ranks must make the "
        "same calls" in teams.members[2].failure.text
    )
    with pytest.raises(Alarm):
        teams.members[0].exchange(b"is anybody there")  # it waits for the next rank first
    assert teams.members[0].failure.rank == 1
    assert (
        "has left its `with fp.ranks(...)` after 2 runs, and others wait for it"
        in teams.members[0].failure.text
    )
    with pytest.raises(Stop):
        teams.members[0].channel(5).take(1)


def test_who_is_lost_is_named(teams):
    teams.members[0].peers[1]._socket.shutdown(socket.SHUT_RDWR)
    until(lambda: teams.members[1].failure is not None)
    assert teams.members[1].failure.rank == 0


@size_of(3)
def test_a_failure_is_passed_on_so_that_nobody_blames_who_was_told(teams):
    one = teams.members[1]
    one.lost(LostError(1, "boom"))
    teams.members[0].fail(one.failure)  # it was told first, and leaves
    teams.members[0].close(told=False)
    until(lambda: teams.members[2].failure is not None)
    assert teams.members[2].failure.text == "boom"
    assert teams.members[2].failure.rank == 1


def test_what_was_said_last_arrives_when_the_rank_is_gone(teams):
    said = b"x" * 100_000
    one = teams.pool.submit(teams.members[0].exchange, said)
    teams.members[1].send(0, Head(FrameKind.DATA), said)  # and it hears nothing
    teams.members[1].close(told=True)
    assert one.result(5) == [said, said]


def test_a_long_word_to_who_goes_in_the_middle(teams):
    """Nobody hangs: the one who writes is told."""
    one = teams.pool.submit(teams.members[0].exchange, bytes(50_000_000))
    time.sleep(0.2)
    teams.members[1].cut()
    with pytest.raises(Alarm):
        one.result(5)
    assert teams.members[0].failure.rank == 1


def test_a_wait_ends_after_the_timeout_without_progress_and_all_say_what_they_do():
    teams = Teams(2, timeout=0.6)
    try:
        over = threading.Event()

        def get_on():
            while not over.wait(0.05):
                teams.members[0].monitor.beats += 1  # a beat of the other one has come

        thread = threading.Thread(target=get_on)
        thread.start()
        began = time.monotonic()
        waits = teams.pool.submit(teams.members[0].exchange, b"x")
        time.sleep(1.2)
        assert not waits.done()
        over.set()
        thread.join()
        with pytest.raises(Alarm):
            waits.result(5)
        assert 1.7 < time.monotonic() - began < 4
        assert teams.members[0].failure.timed
        teams.members[0].tell()
        assert teams.members[0].all_states() == {0: (False, "rests 0"), 1: (False, "rests 1")}
    finally:
        teams.close()


def test_a_process_that_gets_on_says_so(teams):
    """More often from when on its waits are shorter."""
    for member in teams.members:
        member.monitor.limit(0.4)
    before = teams.members[1].monitor.beats
    teams.marks[0] = 1
    until(lambda: teams.members[1].monitor.beats > before)


# -- replicas
# -------------------------------------------------------------------------------


@size_of(2, 3, 4)
@pytest.mark.parametrize("window", [1 << 26, 100])
def test_sums_are_the_ordered_sums_and_take_twice_a_gradients_size_at_most(
    teams, window, monkeypatch
):
    """Of gradients that no number of replicas divides, of fewer numbers than replicas, none, and
    parts of a cut one."""
    monkeypatch.setattr("funcpipe._src.replicas.replicas._WINDOW", window)
    shapes = [(7, 5), (), (1,), (3, 1000), (5, 4), (0,)]
    generator = torch.Generator().manual_seed(1)
    given = [
        [torch.randn(shape, generator=generator) for shape in shapes] for _ in range(teams.size)
    ]
    wanted = [functools.reduce(operator.add, column) for column in zip(*given, strict=True)]
    cut, sent = Sharding(0), [0] * teams.size

    def total(rank):
        member, worker = teams.members[rank], Worker("funcpipe replicas", patience=1.0)
        worker.start()
        send = member.send

        def counted(to, frame, body=b"", tensors=()):
            sent[rank] += sum(tensor.nbytes for tensor in tensors)
            send(to, frame, body, tensors)

        member.send = counted
        told = []
        key = Replicas(member, 0, range(teams.size), worker, None).begin(
            [*given[rank][:3], None, *given[rank][3:]], {5: cut}, told.append
        )
        found = member.answer(key)()
        assert told
        worker.end(5)
        assert all(gradient.untyped_storage().size() == 0 for gradient in given[rank])
        return found

    whole = sum(sum.nbytes for sum in wanted)
    for rank, sums in enumerate(teams.all(total)):
        assert sums.pop(3) is None
        for number, (each, right) in enumerate(zip(sums, wanted, strict=True)):
            assert torch.equal(each, cut.part(right, rank, teams.size) if number == 4 else right), (
                number
            )
    assert max(sent) <= 2 * whole
