"""What is put right when a store is opened: after a crash, a power cut, a damaged file.

Rows that were being written are slots of a dead owner, and free again. What a data file can no
longer hold is forgotten. Without a usable index, the records of the data files make a new one. A
data file of another layout is refused: its rows would have the right size and the wrong meaning.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from kvstow.errors import StoreError
from kvstow.offload.disk import owners
from kvstow.offload.disk.files import BLOCK, LOST, store_errors
from kvstow.offload.disk.format import SegmentHeader, SlotRecord
from kvstow.offload.disk.index import (
    FREE,
    SLOT_BITS,
    IndexBroken,
    RowEntry,
    StoreIndex,
    Transaction,
    place,
)
from kvstow.offload.disk.owners import Processes
from kvstow.offload.disk.segments import Segments

REBUILDER = -2
"""Owner of every slot while an index is made again."""

MAX_SEGMENTS = 1 << (62 - SLOT_BITS)

CLOCK_LEAP = 1 << 32
"""The clock of an index that is made again begins so far beyond what the records state. That of the
lost one was ahead of them: uses and unfinished writes leave no record, and whoever has seen its
numbers waits for higher ones."""


@dataclass(frozen=True, slots=True)
class DroppedRows:
    """Rows that the store no longer has, and why."""

    what: str
    rows: int

    def __str__(self) -> str:
        return f"{self.what}: {self.rows} rows dropped"


def recovered(
    index: StoreIndex,
    segments: Segments,
    processes: Processes,
    *,
    broken: bool,
    dropped_before: Sequence[DroppedRows] = (),
) -> tuple[int, tuple[DroppedRows, ...]]:
    """Put right what a crash left; this process's owner number, and what was dropped.

    IndexBroken where the index says what cannot be. StoreError for a data file of another
    layout, or one that cannot be read now but may be later.
    """
    with store_errors(segments.path), index.write() as write:
        dropped = list(dropped_before)
        files = segments.numbers()
        if broken:
            write.tick(CLOCK_LEAP)
        if files and not write.ask("SELECT id FROM segments LIMIT 1"):
            dropped += _rebuilt(write, segments, files, broken=broken)
        owners.remove_dead(write, processes)
        _check_possible(write, segments)
        for segment, group in write.ask("SELECT id, grp FROM segments"):
            dropped += _checked_file(write, segments, segment, group)
        known = {segment for (segment,) in write.ask("SELECT id FROM segments")}
        for leftover in segments.numbers() - known:
            _header(segments, leftover)
            segments.remove(leftover)
        _account(write)
        for drop in dropped:
            write.note(drop.what, drop.rows)
        return owners.register(write, processes), tuple(dropped)


def _check_possible(write: Transaction, segments: Segments) -> None:
    """IndexBroken where the index lists data files as this store never makes them."""
    for segment, group, slots in write.ask("SELECT id, grp, slots FROM segments"):
        known = type(segment) is type(group) is int and 0 <= segment < MAX_SEGMENTS
        if not known or not 0 <= group < len(segments.slots) or slots != segments.slots[group]:
            raise IndexBroken(f"it lists data file {segment} of group {group} with {slots} slots")


def _header(segments: Segments, segment: int) -> SegmentHeader | None:
    """The header of a data file, None where it is lost; StoreError if it is another layout's."""
    try:
        header = segments.header(segment)
    except OSError as error:
        if error.errno not in LOST:
            raise
        return None
    if header is not None and header.fingerprint != segments.fingerprint:
        raise StoreError(
            f"{segments.file(segment)}: rows of another layout, {header.fingerprint.hex()[:12]}, "
            f"not {segments.fingerprint.hex()[:12]}: no row is served\n\n"
            "hint: put the store's own layout.json back, or move this file away"
        )
    return header


def _checked_file(
    write: Transaction, segments: Segments, segment: int, group: int
) -> list[DroppedRows]:
    """Forget what a data file that is missing, damaged or cut short can no longer hold."""
    nbytes = segments.nbytes(segment)
    name = segments.file(segment).name
    if nbytes is None:
        return [DroppedRows(f"{name} is missing", write.remove_segment(segment))]
    header = _header(segments, segment)
    if header is not None and segments.owns(header):
        if header.group != group:  # a process died while the file changed hands
            segments.restore(segment, group)
        whole = max(0, (nbytes - BLOCK) // segments.slot_bytes[group])
        lost = write.ask(
            "SELECT place FROM rows WHERE place >= ? AND place < ?",
            place(segment, whole),
            place(segment + 1, 0),
        )
        rows = write.drop(group, (at for (at,) in lost))
        return [DroppedRows(f"{name} ends after {nbytes} bytes", rows)] if rows else []
    rows = write.remove_segment(segment)
    write.add_segment(segment, group, segments.slots[group])
    what = f"{name} has no valid header"
    try:
        segments.restore(segment, group)
    except OSError as error:
        rows += write.remove_segment(segment)
        segments.remove(segment)
        what += f" and cannot be made whole ({error.strerror})"
    return [DroppedRows(what, rows)]


def _account(write: Transaction) -> None:
    """Every slot is a row or is listed: those that are neither become free."""
    listed = write.ask("SELECT (SELECT COUNT(*) FROM rows) + (SELECT COUNT(*) FROM slots)")
    if listed == write.ask("SELECT COALESCE(SUM(slots), 0) FROM segments"):
        return
    for segment, group, slots in write.ask("SELECT id, grp, slots FROM segments"):
        first = place(segment, 0)
        taken = write.ask(
            "SELECT place FROM rows WHERE place >= ?1 AND place < ?2 "
            "UNION SELECT place FROM slots WHERE place >= ?1 AND place < ?2",
            first,
            first + slots,
        )
        free = set(range(first, first + slots)) - {at for (at,) in taken}
        write.lease(group, sorted(free), FREE)


# ── without an index ──────────────────────────────────────────────────────────────────


def _rebuilt(
    write: Transaction, segments: Segments, files: set[int], *, broken: bool
) -> list[DroppedRows]:
    """Enter what the data files say of themselves. Checksums are verified on load, as ever."""
    newest: dict[tuple[int, bytes], tuple[int, SlotRecord]] = {}
    entered: list[int] = []
    dropped = [DroppedRows("the index was broken, and made again", 0)] if broken else []
    for segment in sorted(files):
        header = _header(segments, segment)
        if header is None or not segments.owns(header):
            dropped.append(DroppedRows(f"{segments.file(segment).name} has no valid header", 0))
            continue
        write.add_segment(segment, header.group, header.slots)
        entered.append(segment)
        for slot, record in enumerate(_records(segments, segment, header.group, dropped)):
            if record is None or record.group != header.group or not record.key:
                continue
            name = record.group, record.key
            if name not in newest or newest[name][1].generation < record.generation:
                newest[name] = place(segment, slot), record
    segments.make_durable(entered)
    _enter(write, newest)
    return dropped


def _records(
    segments: Segments, segment: int, group: int, dropped: list[DroppedRows]
) -> list[SlotRecord | None]:
    try:
        return segments.records(segment, group)
    except OSError as error:
        if error.errno not in LOST:
            raise
        name = segments.file(segment).name
        dropped.append(DroppedRows(f"{name} cannot be read ({error.strerror})", 0))
        return []


def _enter(write: Transaction, newest: dict[tuple[int, bytes], tuple[int, SlotRecord]]) -> None:
    ordered = sorted(newest.values(), key=lambda item: item[1].generation)
    if ordered:
        write.tick(ordered[-1][1].generation)
    for at, record in ordered:
        write.lease(record.group, [at], REBUILDER)
        entry = RowEntry(
            at,
            record.key,
            record.generation,
            record.checksum,
            record.link.block,
            record.link.parent,
        )
        write.enter(record.group, [entry], REBUILDER)
