"""Abstract machines that run a program over processes or threads, without values: does it come to
its end."""

from collections import Counter, defaultdict, deque
from collections.abc import Collection, Mapping, Sequence

from funcpipe._src.data.kinds import MOVES, Kind
from funcpipe._src.data.lowered import Lowered
from funcpipe._src.data.program import CALLER, FROM, Free, Instruction, Receive, Role, Run, Send


class Wrong(Exception):
    """Something is read that is not there."""


class Slots:
    """The instructions of all lanes with their numbered slots, each lane a process of its own, or
    all threads of one.

    What may make a step may still make it later, so it does not matter in which order they are
    made.
    """

    def __init__(self, program: Lowered, apart: bool) -> None:
        self.program, self.lanes, self.apart = program, program.lanes, apart
        self.at = [0] * program.num_lanes
        self.held: list[dict[int, int]] = [{} for _ in self.lanes]
        self.came: list[dict[int, int]] = [{} for _ in self.lanes]
        self.busy: set[tuple[int, int]] = set()
        """Slots that their sender must not use now."""
        self.taken: set[tuple[int, int]] = set()
        """Slots into which their end of the way takes nothing now."""
        self.ways: dict[tuple[int, int], deque[tuple[int, int]]] = defaultdict(deque)
        self.outgoing = [{*lane.outgoing} for lane in self.lanes]
        self.pooled = Counter(dict.fromkeys(range(program.num_lanes), 0))
        for pool in program.pools:
            self.pooled[pool.lane] += pool.slots

    def advance(self, lane: int) -> bool:
        """Make a step, if it can be made."""
        program, held = self.lanes[lane], self.held[lane]
        if self.at[lane] == len(program.instructions):
            return False
        instruction = program.instructions[self.at[lane]]
        match instruction:
            case Receive(value, source, slot):
                if source != CALLER and slot not in self.came[lane]:
                    return False
                if source == CALLER:
                    self.require(
                        is_given(self.program, value // self.program.num_pieces), instruction
                    )
                    self.require(slot < self.pooled[lane] and slot not in held, instruction)
                else:
                    self.require(self.came[lane].pop(slot) == value, instruction)
                self.require(program.slots[slot].source == source, instruction)
                held[slot] = value
            case Run(number, microbatch, reads, writes):
                call, base = program.calls[number], self.program.num_pieces
                wanted = [number_of(self.program, wire, microbatch) for wire, _ in call.reads]
                self.require(
                    wanted == [held.get(slot) for slot in reads] and not {*writes} & {*held},
                    instruction,
                )
                held |= {
                    slot: wire * base + microbatch
                    for wire, slot in zip(call.writes, writes, strict=True)
                }
            case Free(slots):
                for slot in slots:
                    self.require(slot in held, instruction)
                    del held[slot]
                    self.taken.discard((lane, slot))
                    if not self.apart:
                        self.busy.discard((lane, slot))
            case Send(slot, to, into):
                if (to, into) in self.busy:
                    return False
                self.require(slot in held and (to, into) in self.outgoing[lane], instruction)
                self.busy.add((to, into))
                self.ways[lane, to].append((into, held[slot]))
                if not self.apart:
                    self.come(lane, to)
        self.at[lane] += 1
        return True

    def come(self, source: int, to: int) -> bool:
        """The next value of a way comes, if its slot is free; between processes the sender may use
        that again."""
        way = self.ways[source, to]
        if not way or (to, way[0][0]) in self.taken:
            return False
        slot, value = way.popleft()
        self.taken.add((to, slot))
        self.came[to][slot] = value
        if self.apart:
            self.busy.discard((to, slot))
        return True

    def require(self, is_so: bool, instruction: Instruction) -> None:
        if not is_so:
            raise Wrong(instruction)

    def go(self) -> str:
        """What is wrong in the end."""
        going = True
        while going:
            going = False
            for lane in range(len(self.lanes)):
                while self.advance(lane):
                    going = True
            for source, to in [*self.ways]:
                while self.come(source, to):
                    going = True
        if any(at < len(lane.instructions) for at, lane in zip(self.at, self.lanes, strict=True)):
            return "hangs"
        left = [{slot: value for value, slot in lane.left} for lane in self.lanes]
        return (
            ""
            if left == self.held and not any(self.came) and not any(self.ways.values())
            else "left over"
        )


class Replica(Slots):
    """One of several replicas, whose stages are gathered: a stage computes when all have begun to
    gather it as often.

    Args:
        program: of its number of microbatches.
        counted: by stage, the numbers of the U that gather.
        begun: of each replica, by stage, how often it has begun to gather it.
        me: which it is.
    """

    def __init__(
        self,
        program: Lowered,
        counted: Mapping[int, Collection[int]],
        begun: Sequence[Counter[int]],
        me: int,
    ) -> None:
        super().__init__(program, True)
        self.counted, self.begun, self.mine = counted, begun, begun[me]

    def advance(self, lane: int) -> bool:
        program, at = self.lanes[lane], self.at[lane]
        instruction = program.instructions[at] if at < len(program.instructions) else None
        if type(instruction) is Run:
            kind, stage, number, _ = program.action(instruction)
            if kind is Kind.U and number in self.counted[stage]:
                self.mine[stage] += 1
            elif kind not in MOVES:
                self.mine[stage] = self.mine[stage] or 1
                if any(other[stage] < self.mine[stage] for other in self.begun):
                    return False
        return super().advance(lane)


def by_replicas(
    programs: Sequence[Lowered], counted: Sequence[Mapping[int, Collection[int]]]
) -> str:
    """How replicas end that gather their parameters together: "" is well."""
    begun = [Counter[int]() for _ in programs]
    replicas = [
        Replica(one, counts, begun, me)
        for me, (one, counts) in enumerate(zip(programs, counted, strict=True))
    ]
    ends, before = [""], None
    while before != (before := [[*replica.at] for replica in replicas]):
        try:
            ends = [replica.go() for replica in replicas]
        except Wrong:
            return "wrong"
    return next(filter(None, ends), "") or (
        "" if all(one == begun[0] for one in begun) else "gathered more often"
    )


def by_slots(program: Lowered, apart: bool) -> str:
    """How the instructions end: "" is well."""
    try:
        return Slots(program, apart).go()
    except Wrong:
        return "wrong"
    except (KeyError, IndexError):  # of who builds the lanes: a slot is given that nobody freed
        return "not built"


def by_counts(program: Lowered, one_way: bool = True) -> str:
    """How the calls end, each lane in its order, over pools that count and ways on which one comes
    after the other.

    It knows nothing of plan order, but for the order of each lane, and no slot has a number.
    Without ``one_way`` values of different pools come as they can.
    """
    count, pools = program.num_pieces, program.pools
    todo: list[deque[int]] = [deque() for _ in range(program.num_lanes)]
    to_read: Counter[tuple[int, int]] = Counter()
    for code in program.order:
        call = program.calls[code // count]
        todo[call.lane].append(code)
        to_read.update(
            (number_of(program, wire, code % count), call.lane)
            for wire, pool in call.reads
            if pool >= 0
        )
    there: list[dict[int, int]] = [{} for _ in todo]
    """By value, the pool where it lies."""
    to_send: list[deque[tuple[int, int, int]]] = [deque() for _ in todo]
    ways: dict[tuple[int, int, int], deque[tuple[int, int]]] = defaultdict(deque)
    under_way, lying = Counter[int](), Counter[int]()

    def advance(lane: int) -> bool:
        if to_send[lane]:
            value, to, pool = to_send[lane][0]
            if under_way[pool] >= pools[pool].slots:
                return False
            under_way[pool] += 1
            ways[lane, to, 0 if one_way else pool].append((value, pool))
            to_send[lane].popleft()
            return True
        if not todo[lane]:
            return False
        number, microbatch = divmod(todo[lane][0], count)
        call = program.calls[number]
        missing = [
            each
            for each in call.reads
            if number_of(program, each[0], microbatch) not in there[lane]
        ]
        for wire, pool in missing:
            if pool < 0 or (pools[pool].source == CALLER and not is_given(program, wire)):
                raise Wrong(call)
        if any(pools[pool].source != CALLER for _, pool in missing):
            return False
        todo[lane].popleft()
        for value in [
            number_of(program, wire, microbatch) for wire, pool in call.reads if pool >= 0
        ]:
            to_read[value, lane] -= 1
            if not to_read[value, lane] and value in there[lane]:
                lying[there[lane].pop(value)] -= 1
        there[lane].update((wire * count + microbatch, -1) for wire in call.writes)
        to_send[lane].extend((wire * count + microbatch, to, pool) for wire, to, pool in call.sends)
        return True

    def come(source: int, to: int, kind: int) -> bool:
        way = ways[source, to, kind]
        if not way or lying[way[0][1]] >= pools[way[0][1]].slots:
            return False
        value, pool = way.popleft()
        under_way[pool] -= 1
        lying[pool] += 1
        there[to][value] = pool
        return True

    going = True
    try:
        while going:
            going = False
            for lane in range(program.num_lanes):
                while advance(lane):
                    going = True
            for way in [*ways]:
                while come(*way):
                    going = True
    except Wrong:
        return "wrong"
    return "hangs" if any(todo) or any(to_send) or any(ways.values()) else ""


def number_of(program: Lowered, wire: int, piece: int) -> int:
    """The number of the value of a wire that an action of a piece reads."""
    return wire * program.num_pieces + piece + FROM.get(program.wires[wire].role, 0)


def is_given(program: Lowered, wire: int) -> bool:
    """Does the caller give it."""
    last = (Role.GRAD, program.num_stages - 1)
    return (
        program.wires[wire].role in (Role.INPUT, Role.TARGET, Role.FEED)
        or program.wires[wire][:2] == last
    )


def ends_of(program: Lowered) -> tuple[str, str, str]:
    """How the three machines end."""
    try:
        counted = by_counts(program)
    except IndexError:  # a lane that is not there
        counted = "wrong"
    return by_slots(program, True), by_slots(program, False), counted
