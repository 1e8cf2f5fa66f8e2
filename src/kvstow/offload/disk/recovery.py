"""What happens when a store is opened: find it or make it, and put right what a crash left.

layout.json   the manifest of the rows' layout
index.db      SQLite; made again from the data files when it is missing or broken
lock          held shared by every process that has the store open
segment-*.kv  data files
"""

import fcntl
import os
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from kvstow.errors import StoreError
from kvstow.offload.disk import owners
from kvstow.offload.disk.files import BLOCK, Files
from kvstow.offload.disk.index import FREE, IndexBroken, RowEntry, StoreIndex, Transaction, place
from kvstow.offload.disk.segments import Segments, SlotRecord, decode_header, slot_bytes
from kvstow.offload.rows import row_layout
from kvstow.plan.layout import Layout
from kvstow.plan.manifest import decode, encode, fingerprint
from kvstow.plan.view import align_up

SEGMENT_BYTES = 256 << 20
REBUILDER = -2
"""Owner of every slot while an index is made again."""


@dataclass(frozen=True, slots=True)
class DroppedRows:
    """Rows that the store no longer has, and why."""

    what: str
    rows: int

    def __str__(self) -> str:
        return f"{self.what}: {self.rows} rows dropped"


def segment_bytes(layout: Layout, capacity: int) -> int:
    """Bytes of each data file: large, but at least four per group fit the capacity."""
    groups = range(len(layout.groups))
    longest = max(slot_bytes(layout.row_bytes(g)) for g in groups)
    wanted = min(SEGMENT_BYTES, capacity // (4 * len(groups)) // BLOCK * BLOCK)
    size = max(wanted, BLOCK + longest)
    if capacity < size:
        raise StoreError(
            f"a capacity of {capacity} bytes does not hold one row of {longest}\n\n"
            f"hint: give at least {len(groups) * size} bytes"
        )
    return align_up(size, BLOCK)


class OpenStore:
    """The directory of a store, held open: its lock, layout, index and data files."""

    def __init__(
        self,
        path: Path,
        layout: Layout | None,
        *,
        capacity: int | None,
        files: Files,
        threads: int,
    ) -> None:
        if layout is None and not (path / "layout.json").exists():
            raise StoreError(f"{path}: no store there (layout.json is missing)")
        path.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._lock = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_SH)
            self.layout = _stored_layout(path, layout)
            self.index, broken = self._sound_index()
        except BaseException:
            os.close(self._lock)
            raise
        size, self.capacity = self._sizes(capacity)
        self.segments = Segments(
            path, self.layout, size, fingerprint(self.layout), files=files, threads=threads
        )
        try:
            self.owner, self.dropped = _recovered(self.index, self.segments, broken=broken)
        except BaseException:
            self.close()
            raise

    @property
    def max_segments(self) -> int:
        """One more than the highest number that a data file has or may get."""
        numbers = [segment + 1 for segment, _, _ in self.index.segments()]
        return max([self.capacity // self.segments.segment_bytes, *numbers])

    def close(self) -> None:
        self.segments.close()
        self.index.close()
        os.close(self._lock)

    def _sound_index(self) -> tuple[StoreIndex, bool]:
        """The index; and whether it took the place of a broken one."""
        file = self.path / "index.db"
        try:
            index = StoreIndex(file)
            if not self._crashed(index) or index.sound():
                return index, False
            index.close()
        except IndexBroken:
            pass
        self._alone()
        for suffix in ("", "-wal", "-shm"):
            with suppress(FileNotFoundError):
                os.replace(f"{file}{suffix}", f"{file}.broken{suffix}")
        return StoreIndex(file), True

    def _crashed(self, index: StoreIndex) -> bool:
        return len(owners.living(index)) < index.ask("SELECT COUNT(*) FROM owners")[0][0]

    def _alone(self) -> None:
        """Refuses unless no other process has the store open."""
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise StoreError(
                f"{self.path}: the index is broken, and other processes have the store open\n\n"
                "hint: stop them; the next to open the store makes the index again"
            ) from None
        fcntl.flock(self._lock, fcntl.LOCK_SH)

    def _sizes(self, capacity: int | None) -> tuple[int, int]:
        """Bytes of a data file, and of all of them together at most."""
        with self.index.write() as write:
            known = dict(write.ask("SELECT name, value FROM meta"))
            write.set_meta("fingerprint", fingerprint(self.layout))
            most = capacity or known.get("capacity") or 0
            size = known.get("segment_bytes") or _found_size(self.path)
            if size is None:
                size = segment_bytes(self.layout, most)
            write.set_meta("segment_bytes", size)
            write.set_meta("capacity", most)
        if most < size:
            raise StoreError(
                f"{self.path}: a capacity of {most} bytes is below one data file, {size}"
            )
        return size, most


def _stored_layout(path: Path, wanted: Layout | None) -> Layout:
    """The layout of the store's rows: that in the directory, else the wanted one's images."""
    file = path / "layout.json"
    if not file.exists():
        assert wanted is not None
        _check_headers(path, fingerprint(row_layout(wanted)))
        with tempfile.NamedTemporaryFile(dir=path, prefix="layout-", suffix=".tmp") as new:
            new.write(encode(row_layout(wanted)))
            new.flush()
            os.fsync(new.fileno())
            with suppress(FileExistsError):  # another process was faster
                os.link(new.name, file)
    return decode(file.read_bytes())


def _check_headers(path: Path, wanted: str) -> None:
    """Refuses a layout that some data file of the directory was not made for."""
    for file in sorted(path.glob("segment-*.kv")):
        with open(file, "rb") as data:
            header = decode_header(data.read(BLOCK))
        if header is not None and header.fingerprint.hex() != wanted:
            raise StoreError(
                f"{file}: rows of another layout, {header.fingerprint.hex()[:12]}, not "
                f"{wanted[:12]}; layout.json is missing\n\n"
                "hint: give the layout that the store was made for"
            )


def _found_size(path: Path) -> int | None:
    """Bytes of the data files that are there without an index: what most of them say."""
    sizes = [file.stat().st_size for file in path.glob("segment-*.kv")]
    return max(sizes, key=sizes.count) if sizes else None


# ── putting right ─────────────────────────────────────────────────────────────────────


def _recovered(
    index: StoreIndex, segments: Segments, *, broken: bool
) -> tuple[int, tuple[DroppedRows, ...]]:
    """Put right what a crash left; this process's owner number, and what was dropped."""
    with index.write() as write:
        dropped: list[DroppedRows] = []
        files = segments.numbers()
        if files and not write.ask("SELECT id FROM segments LIMIT 1"):
            dropped += _rebuilt(write, segments, files, broken=broken)
        owners.bury(write)
        for segment, group, slots in write.ask("SELECT id, grp, slots FROM segments"):
            dropped += _checked_file(write, segments, segment, group, slots)
        known = {segment for (segment,) in write.ask("SELECT id FROM segments")}
        for leftover in segments.numbers() - known:
            segments.remove(leftover)
        _account(write)
        for drop in dropped:
            write.note(drop.what, drop.rows)
        return owners.enlist(write), tuple(dropped)


def _checked_file(
    write: Transaction, segments: Segments, segment: int, group: int, slots: int
) -> list[DroppedRows]:
    """Forget what a data file that is missing or cut short can no longer hold."""
    nbytes = segments.nbytes(segment)
    name = segments.file(segment).name
    if nbytes is not None and nbytes >= segments.segment_bytes:
        return []
    if nbytes is None:
        return [DroppedRows(f"{name} is missing", write.remove_segment(segment))]
    whole = max(0, (nbytes - BLOCK) // segments.slot_bytes[group])
    lost = [place(segment, slot) for slot in range(whole, slots)]
    rows = write.drop(group, lost)
    what = f"{name} has {nbytes} of {segments.segment_bytes} bytes"
    try:
        segments.restore(segment)
    except OSError as error:
        rows += write.remove_segment(segment)
        segments.remove(segment)
        what += f" and cannot be made longer ({error.strerror})"
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
    dropped = [DroppedRows("the index was broken, and made again", 0)] if broken else []
    for segment in sorted(files):
        header = segments.header(segment)
        if header is None or not segments.owns(header):
            dropped.append(DroppedRows(f"{segments.file(segment).name} has no valid header", 0))
            continue
        write.add_segment(segment, header.group, header.slots)
        for slot, record in enumerate(segments.records(segment, header.group)):
            if record is None or record.group != header.group:
                continue
            name = record.group, record.key
            if name not in newest or newest[name][1].generation < record.generation:
                newest[name] = place(segment, slot), record
    _enter(write, newest)
    return dropped


def _enter(write: Transaction, newest: dict[tuple[int, bytes], tuple[int, SlotRecord]]) -> None:
    found = sorted(newest.values(), key=lambda item: item[1].generation)
    if found:
        write.tick(found[-1][1].generation)
    for at, record in found:
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
