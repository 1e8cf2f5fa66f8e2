"""A pull, from top to bottom: meet, plan, move, fence, digest, accept.

Digests are counted before the fence, so that it covers what those of mapped memory have read, and
compared after it.

Several sources may bring parts of one request into the same rows; they are accepted together
or not at all. Whatever goes wrong ends as a TransferError that names the rows of every group.
The rows then stay in quarantine until nothing can write to them any more.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Literal

from kvstow.errors import KvstowError, TransferError
from kvstow.memory.arena import Arena
from kvstow.memory.digest import DigestCount
from kvstow.plan.layout import Layout
from kvstow.plan.view import Ints
from kvstow.route.blocks import Blocks, Tokens, block_span
from kvstow.route.copies import Copies
from kvstow.route.lanes import Grid
from kvstow.route.route import Claims
from kvstow.route.ways import LONG_BYTES
from kvstow.transfer.channel.messages import Begun, Ids, Sample, TellDigest, Write, Written
from kvstow.transfer.digests import (
    LEAST_SHARE,
    digests,
    in_worker,
    mismatches,
    ready_digests,
    samples,
)
from kvstow.transfer.fence import CounterRead, changed, check_fence, ready_reads
from kvstow.transfer.loop import AT_ONCE, NOW_AND_THEN, Routine, bug, together
from kvstow.transfer.options import DigestPolicy, Way
from kvstow.transfer.peers.endpoint import Endpoint, EngineReplaced
from kvstow.transfer.peers.flight import chunk_bytes, move_copies
from kvstow.transfer.slots import SLOTS, fetch_pieces, pieces
from kvstow.transfer.source import Source, SourcePlan, SourcePlans
from kvstow.transfer.tickets.ticket import check_blocks, packed_ints
from kvstow.transfer.transport.mapped import MappedPeer, copy_mapped

log = logging.getLogger(__name__)


CountRoutine = Callable[[], Routine[tuple[int, ...]]]

INLINE_BYTES = LEAST_SHARE * 8 << 20
"""On a host, a sample of no more than so many bytes is counted in the agent's own thread, and made
ready while rows move: in another thread it would start too late. On a device, every sample is."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Order:
    """What a pull wants: tokens `[start_token, num_tokens)` of a request, in these rows. Those that
    are `written` get some of the tokens; they have these generations."""

    into: Mapping[int, Blocks]
    written: Mapping[int, Blocks]
    generations: Mapping[int, Ints]
    start_token: int
    num_tokens: int
    direction: Way | None
    digest: DigestPolicy

    @property
    def num_rows(self) -> int:
        """How many rows are written to."""
        return sum(map(len, self.written.values()))

    def copies(self, source: Source) -> Copies:
        """Which bytes of a source go where, as offsets in the two arenas."""
        assert source.route is not None
        offered = source.ticket.blocks_of(self.num_tokens)
        return source.route.copies(
            offered, self.into, self.num_tokens, start_token=self.start_token
        )

    def grids(self, source: Source) -> list[Grid]:
        """The same, not written out."""
        assert source.route is not None
        offered = source.ticket.blocks_of(self.num_tokens)
        return source.route.grids(offered, self.into, self.num_tokens, start_token=self.start_token)


def written_rows(layout: Layout, into: Mapping[int, Blocks], tokens: Tokens) -> dict[int, Blocks]:
    """The rows that a pull of these tokens writes to: not those of tokens before them."""
    written: dict[int, Blocks] = {}
    for g, blocks in into.items():
        group = layout.groups[g].group
        gets_some = (blocks.index + 1) * block_span(group) > tokens.of(group).first
        written[g] = Blocks(blocks.ids[gets_some], blocks.index[gets_some])
    return written


@dataclass(frozen=True, slots=True, kw_only=True)
class Stats:
    """What an accepted transfer took.

    `nbytes` and `descriptors` count what went between the producers and us. `digest` is `passed`
    when some of the bytes were compared, `off` otherwise.
    """

    nbytes: int
    descriptors: int
    seconds: float
    sources: int
    directions: tuple[Way, ...]
    fence: Literal["passed"] = "passed"
    digest: Literal["passed", "off"] = "off"


# ── the routine ─────────────────────────────────────────────────────────────────────────


def pull(
    endpoint: Endpoint, order: Order, sources: Sequence[Source], plans: SourcePlans
) -> Routine[Stats]:
    """Bring what the order wants; what that took, or a TransferError that names the rows. Where it
    has succeeded, the sources wait to be told."""
    started = endpoint.clock()
    try:
        yield from meet_all(endpoint, sources)
        layouts = (endpoint.layout, *(source.layout for source in sources))
        tokens = order.start_token, order.num_tokens
        parts = samples(layouts, *tokens, order.digest, random=endpoint.random)
        for source, plan in zip(sources, plans.plans(sources), strict=True):
            begin(endpoint, order, source, plan, parts)
        counts: list[CountRoutine] = []
        with ready_reads(endpoint, sources) as reads:
            moves = (move(endpoint, order, source) for source in sources)
            yield from together(*moves, ready_counts(endpoint, order, sources, parts, counts))
            digests = yield from together(*(count() for count in counts))
            yield from together(*map(check_fence, sources, reads))
        if parts:
            yield from compare_digests(digests[0], digests[1:], sources, parts)
        check_still_ours(endpoint, order)
    except Exception as error:
        fault = naming_rows(endpoint, order, sources, error)
        for source in sources:
            source.stop(fault)
        raise fault from error
    return Stats(
        nbytes=sum(source.nbytes for source in sources),
        descriptors=sum(source.descriptors for source in sources),
        seconds=endpoint.clock() - started,
        sources=len(sources),
        directions=tuple(source.direction for source in sources),
        digest="passed" if parts else "off",
    )


# ── meeting ───────────────────────────────────────────────────────────────────────────


def meet_all(endpoint: Endpoint, sources: Sequence[Source]) -> Routine[None]:
    """Wait until all sources are ready at once, and our engine is not about to be replaced."""
    while True:
        try:
            yield from together(*(meet(source) for source in sources))
        except EngineReplaced:
            continue
        if not endpoint.is_draining and all(source.peer.state == "ready" for source in sources):
            return
        yield NOW_AND_THEN


def meet(source: Source) -> Routine[None]:
    """Wait until the agent that wrote the ticket is ready; refuse a ticket that is not its."""
    peer, ticket = source.peer, source.ticket
    yield from peer.met()
    if peer.card is None or peer.card.start != ticket.start:
        yield from peer.ping()  # if it was started again, it does not know us
        yield from peer.met()
    if peer.card is None or peer.card.start != ticket.start:
        raise source.fault("the ticket is from an earlier start of it", "expired")
    if ticket.fingerprint != peer.fingerprint:
        raise source.fault(
            f"the ticket is for layout {ticket.fingerprint[:16]}, it has {peer.fingerprint[:16]}",
            "ticket",
        )
    if not ticket.is_signed_by(peer.ticket_key):
        raise source.fault("the ticket is not as it was written there", "ticket")
    check_blocks(source.layout, ticket.blocks, whose=f"ticket of {peer.name!r}")


def begin(
    endpoint: Endpoint, order: Order, source: Source, plan: SourcePlan, parts: tuple[Sample, ...]
) -> None:
    """Tell a source what we want of it, and which way. Raises TransferError."""
    way = way_of(endpoint, order, source, plan)
    write = None
    if way in ("write", "slots"):
        blocks = (Ids(g, packed_ints(b.ids), packed_ints(b.index)) for g, b in order.into.items())
        write = Write(tuple(blocks), order.start_token, order.num_tokens)
    source.begin(way, plan, write, slot_bytes(endpoint, source) if way == "slots" else 0, parts)


def way_of(endpoint: Endpoint, order: Order, source: Source, plan: SourcePlan) -> Way:
    """The way that is forced; or out of mapped memory; or what was measured to be the fastest for
    such pieces, whole rows of equal layouts counting as long ones."""
    path = source.peer.path
    assert path is not None
    if source.peer.mapped is not None and order.direction is None:
        return "mapped"
    if plan.route is None:
        return "read"
    is_equal = source.peer.fingerprint == endpoint.fingerprint
    return order.direction or path.way_of(LONG_BYTES if is_equal else plan.route.mean_bytes)


def slot_bytes(endpoint: Endpoint, source: Source) -> int:
    """The size of slots that both sides have."""
    assert source.peer.card is not None
    return min(stage.nbytes for stage in (endpoint.card.stage, source.peer.card.stage)) // SLOTS


# ── moving ────────────────────────────────────────────────────────────────────────────


def move(endpoint: Endpoint, order: Order, source: Source) -> Routine[None]:
    """Return when all bytes of a source have arrived, and it has said that it keeps them."""
    if source.route is not None:
        match source.direction:
            case "mapped":
                yield from copy_rows(endpoint, order, source)
            case "read":
                yield from read(endpoint, order, source)
            case "write":
                yield from written(endpoint, source)
            case "slots":
                yield from fetched(endpoint, order, source)
    if source.mapped is None:
        yield from source.mailbox.wait(Begun)


def copy_rows(endpoint: Endpoint, order: Order, source: Source) -> Routine[None]:
    """Copy what we want out of the producer's arena, which is memory of ours."""
    assert source.mapped is not None
    grids = order.grids(source)
    source.descriptors = yield from copy_mapped(endpoint, source.mapped, grids)
    source.nbytes = sum(grid.nbytes for grid in grids)


def read(endpoint: Endpoint, order: Order, source: Source) -> Routine[None]:
    """Read what we want of the rows where they lie."""
    assert source.peer.path is not None
    card, kinds = source.card, endpoint.kinds(source.card)
    copies = order.copies(source).moved(card.base, endpoint.card.base)
    chunk = chunk_bytes(source.peer.path.read.long, kinds)
    yield from move_copies(
        endpoint, "read", card.engine, kinds, copies, flights=source.flights, chunk=chunk
    )
    source.nbytes, source.descriptors = copies.total, len(copies)


def written(endpoint: Endpoint, source: Source) -> Routine[None]:
    """Wait for the producer to say that its writes have arrived; look, once per heartbeat,
    whether it lives."""
    look_at = endpoint.clock() + endpoint.options.heartbeat_seconds
    while not source.mailbox.has(Written):
        if endpoint.clock() >= look_at:
            yield from CounterRead(endpoint, source.card, source.ticket.blocks).generations()
            look_at = endpoint.clock() + endpoint.options.heartbeat_seconds
        else:
            yield NOW_AND_THEN
    result = source.mailbox.first(Written)
    source.nbytes, source.descriptors = result.nbytes, result.descriptors


def fetched(endpoint: Endpoint, order: Order, source: Source) -> Routine[None]:
    """Read slots that the producer has filled, and cut them."""
    parts = pieces(order.copies(source), slot_bytes(endpoint, source))
    yield from fetch_pieces(endpoint, source, parts)
    source.nbytes, source.descriptors = sum(part.copies.total for part in parts), len(parts)


# ── accepting ─────────────────────────────────────────────────────────────────────────


def ready_counts(
    endpoint: Endpoint,
    order: Order,
    sources: Sequence[Source],
    parts: tuple[Sample, ...],
    counts: list[CountRoutine],
) -> Routine[None]:
    """How to count digests: of our own rows first; then of those of every source that is mapped.

    A sample that is small, or on a device, is made ready while rows move, after other pulls have
    begun, and counted at once; anything else is counted in another thread.
    """
    rows: list[tuple[MappedPeer | None, Arena, Mapping[int, Blocks], Claims | None]]
    rows = [(None, endpoint.arena, order.into, None)]
    for source in sources:
        peer = source.mapped
        if peer is not None and source.route is not None:
            rows.append((peer, peer.arena, source.ticket.blocks, source.claims))
    nbytes = sum(len(b) * endpoint.layout.row_bytes(g) for g, b in order.into.items())
    for peer, arena, blocks, claims in rows if parts else ():
        what = arena, blocks, parts, claims
        if order.digest == "sample" and (endpoint.kind == "VRAM" or nbytes <= INLINE_BYTES):
            yield AT_ONCE
            counts.append(partial(at_once, ready_digests(*what)))
        else:
            counts.append(partial(in_worker, endpoint, partial(digests, *what), peer))


def at_once(count: DigestCount) -> Routine[tuple[int, ...]]:
    """Count here, side by side with others on a device. Nothing is read any more when this has
    ended, however it does: a peer's memory may be let go of then."""
    count.start()
    try:
        yield AT_ONCE
    except BaseException:
        with suppress(Exception):  # why it ends is what counts
            count.values()
        raise
    return count.values()


def compare_digests(
    here: tuple[int, ...],
    there: Sequence[tuple[int, ...]],
    sources: Sequence[Source],
    parts: Sequence[Sample],
) -> Routine[None]:
    """Raise a TransferError unless what lies here is what the sources have, of which some have been
    counted already and the others tell."""
    values = list(there)
    for source in sources:
        if source.route is not None and source.mapped is None:
            answer = yield from source.mailbox.wait(TellDigest)
            if len(answer.values) != len(parts):
                raise source.fault(f"{len(answer.values)} digests, not {len(parts)}", "digest")
            values.append(answer.values)
    wrong = mismatches(parts, here, values)
    if wrong:
        text = "; ".join(
            f"layers {list(sample.layers[:4])}, tokens [{sample.start_token}, "
            f"{sample.stop_token}): {ours:016x} here, {its:016x} there"
            for sample, ours, its in wrong
        )
        raise TransferError(f"bytes differ from what was offered: {text}", kind="digest")


def check_still_ours(endpoint: Endpoint, order: Order) -> None:
    """The consumer's own fence: our rows must still be the ones that were given."""
    wrong = changed(endpoint.generations(order.written), order.written, order.generations)
    if wrong:
        raise TransferError(
            "destination rows were given to other requests in the meantime", kind="fence"
        )


def naming_rows(
    endpoint: Endpoint, order: Order, sources: Sequence[Source], error: Exception
) -> TransferError:
    """The error that the caller sees: which rows hold nothing that may be used."""
    if not isinstance(error, KvstowError):
        log.exception("agent %s: a pull ended by a bug", endpoint.name)
        error = bug("pull", error)
    groups = endpoint.layout.groups
    rows = {groups[g].group.name: tuple(b.ids.tolist()) for g, b in order.into.items()}
    listing = "; ".join(f"group {name!r}: {_few(ids)}" for name, ids in rows.items())
    peers = [source.peer.name for source in sources]
    kind, peer = "ticket", ""
    if isinstance(error, TransferError):
        kind, peer = error.kind, error.peer
    text = str(error) if peer else f"peers {peers}: {error}"
    agents = {source.engine: source.peer.name for source in sources}
    return TransferError(
        f"{text}\n\nhint: nothing in these blocks may be used: {listing}",
        kind=kind,
        peer=agents.get(peer, peer) or peers[0],
        blocks=rows,
    )


def _few(ids: Sequence[int]) -> str:
    shown = ", ".join(str(i) for i in ids[:8])
    return f"{shown}, … ({len(ids)})" if len(ids) > 8 else shown
