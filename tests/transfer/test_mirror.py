"""The mirror of a peer's counters: a read answers those who asked before it began."""

from types import SimpleNamespace

import numpy as np
import pytest

from kvstow.errors import TransferError
from kvstow.memory.arena import Arena
from kvstow.observe import Telemetry
from kvstow.route.blocks import Blocks
from kvstow.transfer.generations import Generations
from kvstow.transfer.home import Home
from kvstow.transfer.mirror import ENTRIES_EACH, MOST_ENTRIES, Mirror, MirrorFence, is_worth
from kvstow.transfer.transport.local import Fabric, LocalTransport
from transfer_node import hybrid_layout

LAYOUT = hybrid_layout()


class Pair:
    """Two homes in this process; `here` is connected to `there`."""

    def __init__(self) -> None:
        self.fabric = Fabric()
        self.here, self.there = (self.home(name) for name in ("here", "there"))
        self.here.attach(self.there.card)

    def home(self, name: str) -> Home:
        arena = Arena(LAYOUT)
        return Home(name, arena, Generations(LAYOUT), LocalTransport(self.fabric), Telemetry())

    def mirror(self) -> Mirror:
        return Mirror(self.here, self.there.card, LAYOUT)

    def cut(self) -> None:
        self.fabric.cut(self.here.transport.name, self.there.transport.name)

    def heal(self) -> None:
        self.fabric.heal(self.here.transport.name, self.there.transport.name)

    def fence(self, mirror: Mirror) -> MirrorFence:
        """For three blocks of every group, as they are now."""
        blocks = {g: Blocks.first(np.array([3, 1, 2])) for g in range(len(LAYOUT.groups))}
        generations = self.there.generations(blocks)
        return MirrorFence(mirror, SimpleNamespace(blocks=blocks, generations=generations))


@pytest.fixture
def pair():
    made = Pair()
    yield made
    made.here.close()
    made.there.close()


def test_counters_that_moved_are_found_in_every_group(pair):
    mirror = pair.mirror()
    for g in range(len(LAYOUT.groups)):
        fence = pair.fence(mirror)
        pair.there.owner.retire(g, np.array([2, 4]))
        assert fence.advance()
        assert fence.changed == {g: (2,)}
    fence = pair.fence(mirror)
    assert fence.advance()
    assert fence.changed == {}


def test_a_read_under_way_does_not_answer_who_asks_later(pair):
    mirror = pair.mirror()
    early, late = pair.fence(mirror), pair.fence(mirror)
    pair.cut()
    assert not early.advance()
    assert not early.quiet
    assert late.quiet
    first, second = mirror.ask(), mirror.ask()
    assert first == second == 2
    pair.heal()
    assert early.advance()
    pair.there.owner.retire(0, np.array([1]))
    assert late.advance()
    assert late.changed == {0: (1,)}
    assert early.changed == {}


def test_one_read_answers_all_who_asked_before_it(pair):
    mirror = pair.mirror()
    first, *others = [pair.fence(mirror) for _ in range(4)]
    pair.cut()
    assert not any(fence.advance() for fence in (first, *others))
    pair.heal()
    assert all(fence.advance() for fence in (first, *others))
    assert mirror.ask() == 3  # the first has its own, the others one together


def test_a_peer_that_leaves_is_an_error_and_the_memory_serves_the_next_mirror(pair):
    mirror = pair.mirror()
    pair.cut()
    fence, idle = pair.fence(mirror), pair.fence(mirror)
    assert not fence.advance()
    pair.here.sever(pair.there.transport.name)
    assert not fence.advance()
    assert isinstance(fence.error, TransferError)
    assert fence.quiet
    assert not idle.advance()
    assert idle.error is not None
    unread = pair.fence(mirror)
    mirror.close()
    pair.heal()
    assert not unread.advance()
    assert unread.error.kind == "peer"
    num_regions = len(pair.here.transport.regions)
    pair.here.attach(pair.there.card)
    again = pair.mirror()
    assert len(pair.here.transport.regions) == num_regions
    fence = pair.fence(again)
    assert fence.advance()


def test_tables_that_are_nowhere_are_an_error_and_take_no_memory(pair):
    pair.here.sever(pair.there.transport.name)
    for _ in range(3):
        with pytest.raises(TransferError):
            pair.mirror()
    num_regions = len(pair.here.transport.regions)
    pair.here.attach(pair.there.card)
    pair.mirror()
    assert len(pair.here.transport.regions) == num_regions


def test_a_mirror_is_for_small_tables_or_many_blocks():
    def worth(entries: int, blocks: int) -> bool:
        layout = SimpleNamespace(groups=(0, 0), num_blocks=lambda g: entries // 2)
        return is_worth(layout, SimpleNamespace(blocks={0: range(blocks)}))

    assert worth(4096, 1)
    assert not worth(4098, 1)
    assert worth(MOST_ENTRIES, MOST_ENTRIES // ENTRIES_EACH)
    assert not worth(MOST_ENTRIES, MOST_ENTRIES // ENTRIES_EACH - 1)
    assert not worth(MOST_ENTRIES + 2, 1 << 20)
