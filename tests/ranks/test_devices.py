"""Lanes on devices in several processes: the same bits, and every read after its write on the
streams of each."""

import pytest
from common import schedules
from rank_pool import within

ALL = schedules(4, 4)
FOUR = [number for number, schedule in enumerate(ALL) if schedule.num_devices == 4]
"""Schedules of four lanes."""


@pytest.mark.slow
@pytest.mark.parametrize("way", ["joined", "host", "one device", "mixed"])
def test_the_bits_and_the_order(pools, way):
    """Straight from device to device, over hosts, on a device that both have, and where every other
    is a host."""
    everything = set()
    numbers = FOUR[::2] if way in ("joined", "host") else FOUR[1::4]
    for wrong, faults, seen in pools(2).all("on_devices", numbers, [8, 3], way, seconds=110):
        assert [] == wrong
        assert [] == faults
        everything |= {*seen}
    assert everything == ({"freed", "joined"} if way == "joined" else {"freed"})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "reduced"), [("joined", False), ("joined", True), ("host", True), ("mixed", False)]
)
def test_replicas(pools, way, reduced):
    """Gradients are summed on a stream of their own."""
    results = pools(4).all("replicas_on_devices", way, reduced)
    for wrong, faults, _ in results:
        assert [] == wrong
        assert [] == faults
    assert any(joined for _, _, joined in results) is (way != "host")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "kind"),
    [
        ("joined", "plain"),
        ("joined", "sharded"),
        ("host", "reduced"),
        ("host", "sharded"),
        ("one device", "plain"),
    ],
)
@pytest.mark.parametrize("together", [False, True])
def test_replicas_that_step_on_devices(pools, way, kind, together):
    for wrong, faults in pools(4).all("steps_on_devices", way, kind, together):
        assert [] == wrong
        assert [] == faults


@pytest.mark.slow
def test_every_wait_is_needed(pools):
    """Without the wait for a value, for a slot, or the word to the allocator, the order is
    broken."""
    points = pools(2).all("without_a_wait", None)[1][0]
    sites = ("after:", "used:", "_given:")
    for site in sites:
        numbers = [
            number
            for number, (_, where, news) in enumerate(points)
            if where.startswith(site) and news
        ]
        assert any(pools(2).all("without_a_wait", number)[1][1] for number in numbers[2:12]), site


@pytest.mark.slow
@pytest.mark.parametrize("way", ["joined", "host"])
@pytest.mark.parametrize("rows", [(8, 10), (8, 3)])
def test_parts_of_parameters(pools, way, rows):
    """They are gathered on the stream on which gradients are summed, also where one replica has
    fewer microbatches."""
    for wrong, faults in pools(4).all("parts_on_devices", way, rows):
        assert [] == wrong
        assert [] == faults


def test_devices_that_cannot_be_joined(pools):
    """Whose cannot, with whose, and what NCCL said; then the next run joins them."""
    (one, first), (other, second) = pools(2).all("not_joined")
    for text in (one, other):
        assert "rank 1" in text
        assert "cannot connect its device with the device of rank 0" in text
        assert "unhandled system error" in text
    assert first == second


@pytest.mark.parametrize("way", ["send", "recv"])
def test_devices_that_are_no_longer_joined(pools, way):
    """A lane sees it when it sends, a thread beside it when it receives: it is the other process
    that is lost."""
    (one, rank, first), (other, _, second) = pools(2).all("lost", way)
    assert 1 == rank
    for text in (one, other):
        assert (
            "the NCCL connection of its device with this one has ended: remote process exited"
            in text
        )
        assert ".cpp" not in text
    assert first == second


@pytest.mark.parametrize("what", ["fails", "waits", "stands"])
def test_a_device_that_does_not_come_to_its_end(pools, what):
    """It is given up as other processes are: when one fails, or none gets on; and the next run is
    right."""
    (one, early, right), (other, late, too) = pools(2).all("stuck", what)
    assert (one, other) == (
        ("PeerError", "RunTimeout") if what == "waits" else ("StageError[ValueError]", "PeerError")
    )
    limit = within(6.0 if what == "waits" else 2.0)
    assert max(early, late) < limit
    assert [] == right == too
