"""Law 4: a route carries every byte that both sides hold to its place exactly once.

It runs over padding of the request's own rows and slots behind its last token, touches nothing
else, and makes no more copies than there are runs in which both sides advance together.
"""

from collections.abc import Mapping
from itertools import pairwise

import numpy as np
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

import strategies
from examples import examples
from kvstow.plan.layout import Layout
from kvstow.plan.retention import Encoder, State
from kvstow.plan.view import align_up
from kvstow.route.blocks import Blocks, block_span
from kvstow.route.copies import Copies
from kvstow.route.route import Route, plan_route
from kvstow.route.sources import sources
from strategies import Bytes, Users, group_bytes, value

LARGEST_ARENA = 1 << 21

quick = settings(
    max_examples=examples(150),
    deadline=None,
    suppress_health_check=[
        HealthCheck.too_slow,
        HealthCheck.filter_too_much,
        HealthCheck.data_too_large,
    ],
)


class Side:
    """A layout, a request's blocks in it, and their bytes."""

    def __init__(self, layout: Layout, blocks: Mapping[int, Blocks]) -> None:
        self.layout, self.blocks = layout, blocks
        self.bytes = {g: group_bytes(layout, g, blocks[g]) for g in blocks}
        self.users = Users(layout)

    def filled(self) -> np.ndarray:
        """An arena of 0xA5 with the request's field bytes in their places."""
        arena = np.full(self.layout.nbytes, 0xA5, np.uint8)
        for held in self.bytes.values():
            arena[held.address] = value(held.layer, held.number)
        return arena


class Case:
    """What a route between two groups has to do, byte by byte."""

    def __init__(
        self,
        sides: tuple[Side, Side],
        groups: tuple[int, int],
        tokens: tuple[int, int],
    ) -> None:
        s, d = (side.bytes[group] for side, group in zip(sides, groups, strict=True))
        retention = sides[1].layout.groups[groups[1]].group.retention
        first, end = tokens
        if isinstance(retention, State):
            first, end = 0, min(1, end)
        if isinstance(retention, Encoder):
            first, end = 0, retention.tokens if end else 0
        spans = (block_span(x.layout.groups[g].group) for x, g in zip(sides, groups, strict=True))
        whole_end = min(align_up(end, span) for span in spans)
        self.source_at, self.destination_at = matched(s, d[brings(d, first, end)])
        self.whole = matched(s, d[brings(d, first, whole_end)] if end > first else d[:0])
        self.free = tuple(
            free(side, group, held, len(held.address) and held.first_token < end)
            for side, group, held in zip(sides, groups, (s, d), strict=True)
        )

    def most(self) -> int:
        """Runs in which both sides advance together, byte by byte."""
        source, destination = self.whole
        order = np.argsort(destination)
        together = (np.diff(source[order]) == 1) & (np.diff(destination[order]) == 1)
        return len(order) - int(together.sum())


def free(side: Side, group: int, held: Bytes, filled: object) -> np.ndarray:
    mask = side.users.own(group, side.blocks[group])
    if len(held.address):
        mask[held.address[filled]] = False
    return mask


def brings(held: Bytes, first: int, end: int) -> np.ndarray:
    return (held.first_token < end) & (held.end_token > first) & (first < end)


def matched(s: Bytes, d: Bytes) -> tuple[np.ndarray, np.ndarray]:
    """Where the same logical bytes are on either side."""
    known = {key: i for i, key in enumerate(zip(s.layer.tolist(), s.number.tolist(), strict=True))}
    pairs = [
        (known[key], j)
        for j, key in enumerate(zip(d.layer.tolist(), d.number.tolist(), strict=True))
        if key in known
    ]
    both = np.array(pairs, np.int64).reshape(-1, 2)
    return s.address[both[:, 0]], d.address[both[:, 1]]


def group_pairs(way: Route) -> list[tuple[int, int]]:
    return [pair.groups for pair in way.pairs]


def run(moves: Copies, source: np.ndarray, destination: np.ndarray) -> np.ndarray:
    """Executes the moves; returns how often each destination byte was written."""
    written = np.zeros(len(destination), np.int64)
    for s, d, n in zip(
        moves.source.tolist(), moves.destination.tolist(), moves.nbytes.tolist(), strict=True
    ):
        assert 0 <= s < s + n <= len(source)
        assert 0 <= d < d + n <= len(destination)
        destination[d : d + n] = source[s : s + n]
        written[d : d + n] += 1
    return written


def touched(moves: Copies, nbytes: int) -> np.ndarray:
    mask = np.zeros(nbytes, np.bool_)
    for s, n in zip(moves.source.tolist(), moves.nbytes.tolist(), strict=True):
        mask[s : s + n] = True
    return mask


def sides(data: st.DataObject, most_tokens: int, tps: st.SearchStrategy[int] = strategies.TP):
    """One model served twice, one rank of each, a request on both."""
    model = data.draw(strategies.models())
    num_tokens = data.draw(st.integers(0, 2 * most_tokens))
    found = []
    for _ in range(2):
        how = data.draw(strategies.served(model, tps=tps, most_tokens=most_tokens))
        ranks = data.draw(st.integers(0, how.tp - 1)), data.draw(st.integers(0, how.pp - 1))
        layout = how.layout(model, *ranks, num_tokens)
        assume(layout.nbytes <= LARGEST_ARENA)
        found.append((how, layout))
    return model, num_tokens, found


def lists(data: st.DataObject, layout: Layout, num_tokens: int) -> dict[int, Blocks]:
    return data.draw(strategies.listed(layout, num_tokens))


@quick
@given(st.data())
def test_every_common_byte_arrives_and_nothing_else_is_touched(data: st.DataObject) -> None:
    _, num_tokens, ((_, a), (_, b)) = sides(data, 64)
    source, destination = (Side(x, lists(data, x, num_tokens)) for x in (a, b))
    start = data.draw(st.integers(0, num_tokens))
    way = plan_route(a, b)
    moves = way.copies(source.blocks, destination.blocks, num_tokens, start_token=start)
    here = source.filled()
    there = np.random.default_rng(0).integers(0, 256, b.nbytes, np.uint8)
    before = there.copy()
    written = run(moves, here, there)
    expected, may_change = before.copy(), np.zeros(b.nbytes, np.bool_)
    may_read = np.zeros(a.nbytes, np.bool_)
    most, carried = 0, np.zeros(b.nbytes, np.bool_)
    for groups in group_pairs(way):
        case = Case((source, destination), groups, (start, num_tokens))
        expected[case.destination_at] = here[case.source_at]
        may_change |= case.free[1]
        may_change[case.destination_at] = True
        may_read |= case.free[0]
        may_read[case.source_at] = True
        assert (written[case.destination_at] == 1).all()
        most += case.most()
        carried[case.whole[1]] = True
    assert carried[moves.destination].all()
    assert written.max(initial=0) <= 1
    assert not (written > 0)[~may_change].any()
    assert not touched(moves, a.nbytes)[~may_read].any()
    strict = ~may_change
    for groups in group_pairs(way):
        strict[Case((source, destination), groups, (start, num_tokens)).destination_at] = True
    assert (there[strict] == expected[strict]).all()
    assert len(moves) <= most


@quick
@given(st.data())
def test_all_sources_together_write_every_byte_exactly_once(data: st.DataObject) -> None:
    model, num_tokens, ((how, _), (_, b)) = sides(data, 64)
    destination = Side(b, lists(data, b, num_tokens))
    peers = [how.layout(model, r, p, num_tokens) for p in range(how.pp) for r in range(how.tp)]
    assume(sum(peer.nbytes for peer in peers) <= LARGEST_ARENA)
    there = np.random.default_rng(0).integers(0, 256, b.nbytes, np.uint8)
    written = np.zeros(b.nbytes, np.int64)
    for source in sources(peers, b):
        side = Side(peers[source.index], lists(data, peers[source.index], num_tokens))
        moves = source.route.copies(side.blocks, destination.blocks, num_tokens)
        written += run(moves, side.filled(), there)
    for g, held in destination.bytes.items():
        retention = b.groups[g].group.retention
        end = (
            min(1, num_tokens)
            if isinstance(retention, State)
            else retention.tokens * (num_tokens > 0)
            if isinstance(retention, Encoder)
            else num_tokens
        )
        mine = held[held.first_token < end]
        if not hasattr(retention, "tokens") or isinstance(retention, Encoder):
            assert (written[mine.address] == 1).all()
        arrived = mine[written[mine.address] > 0]
        assert (there[arrived.address] == value(arrived.layer, arrived.number)).all()
    assert written.max(initial=0) <= 1


@quick
@given(st.data())
def test_equal_layouts_take_one_move_per_strip_and_run_of_blocks(data: st.DataObject) -> None:
    model = data.draw(strategies.models())
    num_tokens = data.draw(st.integers(1, 40))
    how = data.draw(strategies.served(model, most_tokens=8))
    layout = how.layout(model, 0, 0, num_tokens)
    assume(layout.nbytes <= LARGEST_ARENA)
    ours, theirs = (lists(data, layout, num_tokens) for _ in range(2))
    theirs = {
        g: Blocks(
            theirs[g].ids[-len(ours[g]) :] if len(theirs[g]) >= len(ours[g]) else ours[g].ids,
            ours[g].index,
        )
        for g in ours
    }
    most = 0
    for g, blocks in ours.items():
        pairs = sorted(zip(blocks.ids.tolist(), theirs[g].ids.tolist(), strict=True))
        neighbours = sum((a[0] + 1, a[1] + 1) == b for a, b in pairwise(pairs))
        most += (len(pairs) - neighbours) * len(layout.footprints[g].strips)
    assert len(plan_route(layout, layout).copies(ours, theirs, num_tokens)) <= most
