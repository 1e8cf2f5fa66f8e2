"""Bugs that are planted on purpose: each must be found, or the schedules prove nothing.

A bug is a few lines that change the library for as long as a `with` block lasts. Some checks stand
behind others, so that one of them alone may be missing and nothing goes wrong; then the bug takes
those away too that would hide it.
"""

import os
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

from faulty import FaultyFiles
from kvstow.blocks.ledger import Ledger
from kvstow.blocks.pool import Pool
from kvstow.blocks.prompt import Prompt
from kvstow.errors import KvstowError
from kvstow.offload import keys
from kvstow.offload.copies.mover import Mover
from kvstow.offload.disk import opening
from kvstow.offload.disk import tier as disk_tier
from kvstow.offload.disk.tier import DiskTier
from kvstow.offload.disk.tree import Writers
from kvstow.offload.remote.objects import RowObjects
from kvstow.route import route as routes
from kvstow.route import sources as route_sources
from kvstow.route.blocks import Blocks, block_span
from kvstow.transfer import agent, fence, pull, pulls, serve, slots, source
from kvstow.transfer.channel.messages import Begun, Failed
from kvstow.transfer.loop import IDLE
from kvstow.transfer.peers import layouts, outgoing
from kvstow.transfer.quarantine import Quarantine
from kvstow.transfer.server import Server
from kvstow.transfer.tickets import ticket
from kvstow.transfer.tickets.lease import Leases
from kvstow.transfer.tickets.offers import Offers
from kvstow.transfer.tickets.owner import Generations, OwnerQueue
from kvstow.transfer.tickets.ticket import Ticket
from kvstow.transfer.transport import local, mapped
from schedules import schedule
from schedules.library import changed, prepared

BUGS: dict[str, Any] = {}


def bug(made: Callable[[], Generator[None]]) -> Any:
    BUGS[made.__name__] = contextmanager(made)
    return BUGS[made.__name__]


def nothing(*args: Any, **kwargs: Any) -> Any:
    return
    yield


def unchanged(*args: Any, **kwargs: Any) -> Any:
    return {}
    yield


@bug
def the_fence_is_skipped() -> Generator[None]:
    with changed(fence, "read_fence", unchanged):
        yield


@bug
def the_fence_comes_before_the_last_byte() -> Generator[None]:
    """Counters are read and compared once the producer keeps the rows, before they are read."""
    move, check = pull.move, fence.check_fence

    def early(endpoint: Any, order: Any, one: Any) -> Any:
        while not one.mailbox.has(Begun):
            yield IDLE
        with fence.ready_reads(endpoint, [one]) as (read,):
            yield from check(one, read)
        yield from move(endpoint, order, one)

    with changed(pull, "move", early), changed(pull, "check_fence", nothing):
        yield


@bug
def digests_are_accepted_on_equal_lengths() -> Generator[None]:
    with changed(pull, "mismatches", lambda wanted, here, there: []):
        yield


@bug
def rows_are_free_before_they_are_quiet() -> Generator[None]:
    with (
        changed(Pool, "quarantine", lambda self, group, ids: None),
        changed(Pool, "unquarantine", lambda self, group, ids, whole=None: None),
    ):
        yield


@bug
def quiet_at_disconnect() -> Generator[None]:
    """A failed or disconnected post counts as ended."""
    ended = property(lambda self: self.is_over or self._error is not None)
    with changed(local._LocalPost, "ended", ended):
        yield


@bug
def slots_are_cut_before_they_are_read() -> Generator[None]:
    """The first turn of a read counts as its end."""
    move_copies = slots.move_copies

    def hasty(*args: Any, **kwargs: Any) -> Any:
        story = move_copies(*args, **kwargs)
        for _ in range(2):
            try:
                yield next(story)
            except StopIteration:
                return

    with changed(slots, "move_copies", hasty):
        yield


@bug
def a_slot_is_reused_before_it_was_fetched() -> Generator[None]:
    """A producer gives a slot back when it has filled it, and it is the next one to be taken."""

    def early(endpoint: Any, parts: Any, serving: Any) -> Any:
        for number, piece in enumerate(parts):
            slot = yield from endpoint.stage.take()
            endpoint.stage._free.appendleft(slot // endpoint.stage.slot_bytes)
            yield from slots.copied(endpoint.arena, endpoint.stage.arena, piece.into_slot(slot))
            serving.peer.send(slots.Staged(serving.begin.transfer, number, slot))
        for _ in parts:
            yield from serving.mailbox.wait(slots.Fetched)

    with changed(serve, "stage_pieces", early):
        yield


@bug
def a_dead_writer_s_rows_are_free_without_a_fresh_engine() -> Generator[None]:
    with changed(Quarantine, "_engine_replaced", nothing):
        yield


@bug
def the_row_in_which_a_pull_begins_is_not_quarantined() -> Generator[None]:
    """It counts as one that nobody writes to."""

    def later(layout: Any, into: Any, tokens: Any) -> Any:
        written: dict[int, Blocks] = {}
        for g, blocks in into.items():
            group = layout.groups[g].group
            gets_all = blocks.index * block_span(group) >= tokens.of(group).first
            written[g] = Blocks(blocks.ids[gets_all], blocks.index[gets_all])
        return written

    with changed(agent, "written_rows", later):
        yield


@bug
def a_writer_says_stopped_at_once() -> Generator[None]:
    with changed(serve.Serving, "is_quiet", property(lambda self: True)):
        yield


@bug
def an_order_is_served_after_its_stop_was_answered() -> Generator[None]:
    with changed(Server, "_end_earlier", nothing):
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

    def any_lease(self: Any, *args: Any, **kwargs: Any) -> Any:
        return next(iter(self._running.values()))

    with changed(pull, "meet", any_start), changed(Leases, "open", any_lease):
        yield


@bug
def identity_is_not_compared() -> Generator[None]:
    """Nor anywhere on the way: routes look at it once more, and pulls compare the ticket's."""
    check = agent.check_request

    def any_identity(layout: Any, tickets: Any, *request: Any) -> int:
        return check(layout, tickets, *request[:-1], tickets[0].identity)

    with ExitStack() as stack:
        stack.enter_context(changed(agent, "check_request", any_identity))
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

    def endless(self: Any, transfer: Any, tickets: Any, seconds: float) -> None:
        begin(self, transfer, tickets, seconds + 1e6)

    with changed(pulls.Pulls, "begin", endless):
        yield


@bug
def written_is_believed_before_it_is_true() -> Generator[None]:
    """The producer says that all is written when it has only begun."""
    written = serve.written

    def early(endpoint: Any, serving: Any, copies: Any) -> Any:
        serving.peer.send(serve.Written(serving.begin.transfer, 0, 0))
        yield from written(endpoint, serving, copies)

    with changed(serve, "written", early):
        yield


@bug
def the_consumer_s_own_generations_are_not_compared() -> Generator[None]:
    """Rows that an owner gives to others while they are pulled into are accepted all the same."""
    with changed(pull, "check_still_ours", lambda endpoint, order: None):
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
def a_fork_s_copy_of_an_unknown_row_is_trusted() -> Generator[None]:
    with changed(Pool, "inherit", lambda self, group, source, row: None):
        yield


@bug
def a_state_after_more_tokens_is_pulled() -> Generator[None]:
    with changed(ticket, "check_states", lambda *args: None):
        yield


@bug
def what_a_load_left_out_can_be_found() -> Generator[None]:
    with changed(Ledger, "received", nothing):
        yield


# ── mapped ────────────────────────────────────────────────────────────────────────────


@bug
def generations_of_mapped_rows_are_not_compared() -> Generator[None]:
    with changed(fence, "mapped_fence", unchanged):
        yield


@bug
def generations_of_mapped_rows_are_compared_before_the_copy_has_ended() -> Generator[None]:
    copy_rows, check = pull.copy_rows, fence.check_fence

    def early(endpoint: Any, order: Any, one: Any) -> Any:
        yield from check(one, None)
        yield from copy_rows(endpoint, order, one)

    with changed(pull, "copy_rows", early), changed(pull, "check_fence", nothing):
        yield


@bug
def a_ticket_s_signature_is_not_compared() -> Generator[None]:
    with changed(Ticket, "is_signed_by", lambda self, key: True):
        yield


@bug
def the_mapping_of_a_dead_start_is_used_again() -> Generator[None]:
    """What was mapped once at an address stays for whoever answers there."""
    mapped = outgoing.Outgoing._map

    def kept(self: Any, welcome: Any) -> bool:
        before = vars(self).get("_first")
        if before is not None:
            self.mapped = before
            return True
        mapped(self, welcome)
        self._first = self.mapped
        return self.mapped is not None

    def unmap(self: Any) -> None:
        self.mapped = None

    with changed(outgoing.Outgoing, "_map", kept), changed(outgoing.Outgoing, "_unmap", unmap):
        yield


@bug
def memory_is_unmapped_while_a_copy_runs() -> Generator[None]:
    with changed(mapped.MappedPeer, "hold", lambda self: None):
        yield


@bug
def the_route_of_another_pair_of_layouts_is_taken() -> Generator[None]:
    """Routes are remembered by how many sources there are."""
    plans = source.SourcePlans.plans

    def any_layouts(self: Any, sources: Any) -> Any:
        known = vars(self).setdefault("_by_count", {})
        if len(sources) not in known:
            known[len(sources)] = plans(self, sources)
        return known[len(sources)]

    with changed(source.SourcePlans, "plans", any_layouts):
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
def a_sync_is_forgotten() -> Generator[None]:
    with changed(FaultyFiles, "sync", lambda self, paths: None):
        yield


@bug
def rows_get_their_names_before_they_are_synced() -> Generator[None]:
    write = DiskTier._write_batch

    def early(self: Any, files: Any) -> None:
        sync, self._files.sync = self._files.sync, lambda paths: None
        try:
            write(self, files)
        finally:
            del self._files.sync
        names = [self.tree.name(file.group, file.rows[0][0]) for file in files]
        names = [name for name in names if os.path.exists(name)]
        if names:
            sync(names)

    with changed(DiskTier, "_write_batch", early):
        yield


@bug
def a_failed_sync_is_ignored() -> Generator[None]:
    """A row gets its name although its bytes may not be on the medium."""
    sync = FaultyFiles.sync

    def ignored(self: Any, paths: Any) -> None:
        with suppress(OSError):
            sync(self, paths)

    with changed(FaultyFiles, "sync", ignored):
        yield


class Anything(int):
    """Equal to all."""

    __hash__ = int.__hash__

    def __eq__(self, other: object) -> bool:
        return True


@bug
def a_row_s_checksum_is_not_compared() -> Generator[None]:
    with changed(disk_tier, "checksum", lambda row: Anything()):
        yield


@bug
def an_evicted_file_is_cut_short_while_it_is_read() -> Generator[None]:
    remove = FaultyFiles.remove

    def cut(self: Any, path: str) -> None:
        os.truncate(path, 0)
        remove(self, path)

    with changed(FaultyFiles, "remove", cut):
        yield


@bug
def two_writers_write_one_file() -> Generator[None]:
    create = FaultyFiles.create

    def shared(self: Any, path: str) -> int:
        with suppress(FileNotFoundError):
            os.unlink(path)
        return create(self, path)

    with (
        changed(Writers, "next_file", lambda self: f"{self._new}/0"),
        changed(FaultyFiles, "create", shared),
    ):
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


@bug
def a_remote_row_s_checksums_are_not_compared() -> Generator[None]:
    with changed(RowObjects, "_agree", lambda self, row, checksums, bands: True):
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
