"""Bugs that are planted on purpose: each must be found, or the schedules prove nothing.

A bug is a few lines that change the library for as long as a `with` block lasts. Some checks stand
behind others, so that one of them alone may be missing and nothing goes wrong; then the bug takes
those away too that would hide it.
"""

from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from typing import Any

from kvstow.blocks.ledger import Ledger
from kvstow.blocks.pool import Pool
from kvstow.blocks.prompt import Prompt
from kvstow.errors import KvstowError
from kvstow.offload import keys
from kvstow.offload.disk import opening
from kvstow.offload.disk.segments import Segments, _Slot
from kvstow.offload.mover.mover import Mover
from kvstow.route import route as routes
from kvstow.route import sources as route_sources
from kvstow.transfer import pull, pulls, serve, source
from kvstow.transfer.channel.messages import Begun, Failed
from kvstow.transfer.fence import Fence
from kvstow.transfer.loop import IDLE
from kvstow.transfer.move import gather
from kvstow.transfer.move import rows as cut_rows
from kvstow.transfer.peers import layouts
from kvstow.transfer.server import Server
from kvstow.transfer.tickets.generations import Generations, OwnerQueue
from kvstow.transfer.tickets.lease import Leases
from kvstow.transfer.tickets.offers import Offers
from kvstow.transfer.transport import local
from schedules import schedule
from schedules.library import changed, prepared

BUGS: dict[str, Any] = {}


def bug(made: Callable[[], Generator[None]]) -> Any:
    BUGS[made.__name__] = contextmanager(made)
    return BUGS[made.__name__]


def nothing(*args: Any, **kwargs: Any) -> Any:
    return
    yield


@bug
def the_fence_is_skipped() -> Generator[None]:
    with changed(Fence, "passed", nothing):
        yield


@bug
def the_fence_comes_before_the_last_byte() -> Generator[None]:
    """Counters are read and compared once the producer keeps the rows, before they are read."""
    move, passed = pull.move, Fence.passed

    def early(endpoint: Any, order: Any, one: Any) -> Any:
        while not one.mailbox.has(Begun):
            yield IDLE
        fence = Fence(endpoint, one.card, one.layout, one.ticket)
        try:
            yield from passed(fence)
        finally:
            fence.drop()
        yield from move(endpoint, order, one)

    with changed(pull, "move", early), changed(Fence, "passed", nothing):
        yield


@bug
def digests_are_accepted_on_equal_lengths() -> Generator[None]:
    with changed(pull, "mismatches", lambda wanted, here, there: []):
        yield


@bug
def rows_are_free_before_they_are_quiet() -> Generator[None]:
    with (
        changed(Pool, "quarantine", lambda self, group, ids: None),
        changed(Pool, "unquarantine", lambda self, group, ids: None),
    ):
        yield


@bug
def quiet_at_disconnect() -> Generator[None]:
    """A failed or disconnected post counts as ended."""
    ended = property(lambda self: self.is_over or self._error is not None)
    with changed(local._LocalPost, "ended", ended):
        yield


@bug
def rows_are_cut_before_they_are_read() -> Generator[None]:
    """The first turn of a read counts as its end."""
    moved = cut_rows.moved

    def hasty(*args: Any, **kwargs: Any) -> Any:
        story = moved(*args, **kwargs)
        for _ in range(2):
            try:
                yield next(story)
            except StopIteration:
                return

    with changed(cut_rows, "moved", hasty):
        yield


@bug
def a_slot_is_reused_before_its_writes_are_quiet() -> Generator[None]:
    """A slot is given back when its writes begin, and is the next one to be taken."""
    moved = gather.moved

    def early(endpoint: Any, *how: Any, **rest: Any) -> Any:
        scratch = endpoint._scratch
        if scratch is not None:
            place = int(how[-1].source[0]) - scratch.arena.address
            if 0 <= place < scratch.arena.nbytes:  # and not in a row
                scratch._free.appendleft(place // scratch.slot_bytes)
        yield from moved(endpoint, *how, **rest)

    with (
        changed(gather, "moved", early),
        changed(gather, "when_quiet", lambda flights, then: None),
    ):
        yield


@bug
def a_writer_says_stopped_at_once() -> Generator[None]:
    with changed(serve.Serving, "is_quiet", property(lambda self: True)):
        yield


@bug
def an_order_is_served_after_its_stop_was_answered() -> Generator[None]:
    with changed(Server, "_bar", nothing):
        yield


@bug
def a_producer_s_failure_counts_as_quiet() -> Generator[None]:
    quiet = source.Source.writer_is_quiet.fget
    assert quiet is not None
    value = property(lambda self: quiet(self) or self.mailbox.has(Failed))
    with changed(source.Source, "writer_is_quiet", value):
        yield


@bug
def generations_stay_when_rows_are_reused() -> Generator[None]:
    """Rows are handed out again under the same generation."""

    def same(method: Any) -> Any:
        def kept(self: Any, *args: Any) -> Any:
            before = [table.copy() for table in self.generations]
            result = method(self, *args)
            for table, values in zip(self.generations, before, strict=True):
                table[:] = values
            return result

        return kept

    with ExitStack() as stack:
        for owner, name in ((Pool, "hold_all"), (Pool, "release"), (Generations, "retire")):
            stack.enter_context(changed(owner, name, same(vars(owner)[name])))
        yield


@bug
def a_lease_does_not_keep_its_rows() -> Generator[None]:
    """Blocks are offered without being shared."""
    with changed(OwnerQueue, "share", lambda self, blocks: None):
        yield


@bug
def the_ticket_s_start_is_not_compared() -> Generator[None]:
    """A ticket of an earlier start is read from the process that came after it."""

    def any_start(one: Any) -> Any:
        yield from one.peer.met()

    def any_ticket(self: Any, serving: Any) -> Any:
        return next(iter(self._tickets.values()))

    with changed(pull, "meet", any_start), changed(Server, "opened", any_ticket):
        yield


@bug
def identity_is_not_compared() -> Generator[None]:
    """Nor anywhere on the way: routes look at it once more."""
    with ExitStack() as stack:
        for module in (layouts, routes, route_sources):
            stack.enter_context(changed(module, "differences", lambda ours, theirs: ()))
        yield


@bug
def leases_never_run_out() -> Generator[None]:
    with changed(Leases, "expire", lambda self, *, now: ()):
        yield


@bug
def a_deadline_is_never_looked_at() -> Generator[None]:
    begin = pulls.Pulls.begin

    def endless(self: Any, transfer: Any, tickets: Any, until: float) -> None:
        begin(self, transfer, tickets, until + 1e6)

    with changed(pulls.Pulls, "begin", endless):
        yield


@bug
def written_is_believed_before_it_is_true() -> Generator[None]:
    """The producer says that all is written when it has only begun."""
    written = serve.written

    def early(endpoint: Any, serving: Any, ticket: Any, order: Any) -> Any:
        story = written(endpoint, serving, ticket, order)

        def told() -> Any:
            serving.send(serve.Written(serving.transfer, 0, 0))
            yield from story

        return told()

    with changed(serve, "written", early):
        yield


@bug
def the_consumer_s_own_generations_are_not_compared() -> Generator[None]:
    """Rows that an owner gives to others while they are pulled into are accepted all the same."""
    with changed(pull, "check_still_ours", lambda endpoint, order: None):
        yield


@bug
def the_ticket_s_fingerprint_is_not_compared() -> Generator[None]:
    """Nor the digest of the ticket, which names it too."""

    def any_layout(one: Any) -> Any:
        yield from one.peer.met()
        one.ticket.__dict__["fingerprint"] = one.peer.fingerprint
        yield from meet(one)

    def any_digest(self: Any, id: int, digest: bytes, reader: Any, **how: Any) -> Any:
        return opened(self, id, self.find(id).digest, reader, **how)

    meet, opened = pull.meet, Leases.open
    with changed(pull, "meet", any_layout), changed(Leases, "open", any_digest):
        yield


@bug
def rows_that_are_not_filled_can_be_found() -> Generator[None]:
    """What a pull did not bring, since a window had left it behind, counts as brought."""
    trust = Pool.trust

    def whole(self: Any, group: int, ids: Any, which: Any = None) -> None:
        trust(self, group, ids)

    with changed(Pool, "trust", whole):
        yield


@bug
def rows_that_nobody_has_filled_are_offered() -> Generator[None]:
    with changed(Offers, "_check_known", nothing):
        yield


@bug
def what_a_load_left_out_can_be_found() -> Generator[None]:
    with changed(Ledger, "received", nothing):
        yield


# ── tiers ─────────────────────────────────────────────────────────────────────────────


@bug
def a_key_does_not_name_the_computation() -> Generator[None]:
    class Nameless:
        digest = bytes(32)

    def nameless(identity: Any, prompt: Any, ends: Any) -> Any:
        return keys_at(Nameless, Prompt.of(prompt.tokens), ends)

    keys_at = keys.keys_at
    with changed(keys, "keys_at", nameless):
        yield


@bug
def new_names_are_not_synced() -> Generator[None]:
    create = Segments.create

    def unsynced(self: Any, segment: int, group: int) -> None:
        self._files.sync_directory = nothing
        try:
            create(self, segment, group)
        finally:
            del self._files.sync_directory

    with changed(Segments, "create", unsynced):
        yield


@bug
def rows_are_entered_before_they_are_synced() -> Generator[None]:
    with changed(Segments, "_synced", lambda self, segments: {}):
        yield


@bug
def a_failed_sync_is_ignored() -> Generator[None]:
    """A row is entered although its bytes may not be on the medium."""
    synced = Segments._synced

    def ignored(self: Any, segments: Any) -> Any:
        synced(self, segments)
        return {}

    with changed(Segments, "_synced", ignored):
        yield


@bug
def a_row_s_checksum_is_not_compared() -> Generator[None]:
    """Nor what its record says: a slot is taken for the row that the index lists there."""

    def taken(self: Any, slotted: Any) -> bool:
        slotted.row[:] = self.row
        return True

    with changed(_Slot, "take", taken):
        yield


@bug
def a_store_of_another_model_is_opened() -> Generator[None]:
    with changed(opening, "differences", lambda ours, theirs: ()):
        yield


@bug
def a_job_does_not_keep_its_blocks() -> Generator[None]:
    """Blocks that the mover copies are given to others meanwhile."""
    made = Mover.__init__

    def without(self: Any, *args: Any, pool: Any = None, **kwargs: Any) -> None:
        made(self, *args, **kwargs)

    with changed(Mover, "__init__", without):
        yield


# ── looking for them ──────────────────────────────────────────────────────────────────


def first_found(name: str, seeds: range, folder: str = "") -> tuple[int, str] | None:
    """The first seed that finds a bug, and what it says; None if none does."""
    with prepared(), BUGS[name]():
        for seed in seeds:
            try:
                schedule.run(seed, folder)
            except (schedule.Broken, KvstowError) as error:
                return seed, str(error)
    return None
