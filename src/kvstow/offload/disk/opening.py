"""Opening a store: its lock, layout, index and data files, found or made.

    layout.json    the manifest of the rows' layout, with the identity of the computation
    index.db       SQLite; made again from the data files when it is missing or broken
    index.rebuild  there while the index is to be made again
    lock           held shared by every process that has the store open
    segment-*.kv   data files

The fingerprint of the layout stands in three places: it follows from `layout.json`, it is in the
index, and in the header of every data file. All must agree before a row is served.
"""

import fcntl
import os
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from kvstow.errors import ManifestError, StoreError
from kvstow.offload.disk.files import BLOCK, Files, make_directory, open_own, store_errors
from kvstow.offload.disk.format import (
    SegmentHeader,
    decode_header,
    segment_file,
    segment_numbers,
    slot_bytes,
)
from kvstow.offload.disk.index import SLOT_BITS, IndexBroken, StoreIndex
from kvstow.offload.disk.owners import Processes, any_died
from kvstow.offload.disk.recovery import DroppedRows, recovered
from kvstow.offload.disk.segments import Segments
from kvstow.offload.rows import row_layout
from kvstow.plan.layout import Layout
from kvstow.plan.manifest import decode, encode, fingerprint
from kvstow.plan.view import align_up
from kvstow.route.compare import differences

SEGMENT_BYTES = 256 << 20
MAX_MANIFEST_BYTES = 64 << 20

ALONE_SECONDS = 2.0
"""How long to wait for others to let go of a store that has to be repaired."""

_T = TypeVar("_T")


class NotAlone(Exception):
    """Something is to be done that needs the store to be open in no other process."""


class OpenStore:
    """The directory of a store, held open. `close` lets go of it.

    `attach` and `detach` are for an index that broke while the store was open.
    """

    def __init__(
        self,
        path: Path,
        layout: Layout | None,
        *,
        capacity: int | None,
        files: Files,
        threads: int,
        clock: Callable[[], float],
        processes: Processes,
    ) -> None:
        self.path = path
        self._files, self._threads = files, threads
        self._clock, self._processes = clock, processes
        self._wanted_capacity = capacity
        self.dropped: tuple[DroppedRows, ...] = ()
        self._segments: Segments | None = None
        with store_errors(path):
            if layout is not None:
                make_directory(path)
            elif not os.path.lexists(path / "layout.json"):
                raise StoreError(f"{path}: no store there (layout.json is missing)")
            self._lock = open_own(path / "lock", os.O_RDWR, create=True)
        try:
            self.layout: Layout = self._locked(lambda alone: self._settled(layout, alone=alone))
            self._fingerprint = fingerprint(self.layout)
            self.attach()
        except BaseException:
            if self._segments is not None:
                self._segments.close()
            os.close(self._lock)
            raise

    @property
    def segments(self) -> Segments:
        assert self._segments is not None
        return self._segments

    @property
    def max_segments(self) -> int:
        """One more than the highest number that a data file has or may get: whatever the capacity,
        no more than the file system has room for."""
        numbers = [segment + 1 for segment, _, _ in self.index.segments()]
        with store_errors(self.path):
            room = self._files.total(self.path) // self._size + 1
        return max([min(self.capacity // self._size, room), *numbers])

    def close(self) -> None:
        self.segments.close()
        self.index.close()
        os.close(self._lock)

    # ── locks ─────────────────────────────────────────────────────────────────────

    def _locked(self, work: Callable[[bool], _T], seconds: float = ALONE_SECONDS) -> _T:
        """Do `work(False)` under the shared lock; where it raises NotAlone, `work(True)` under
        the exclusive one, which is held until it is over. The shared lock is kept."""
        end = time.monotonic() + seconds
        while True:
            with store_errors(self.path):
                fcntl.flock(self._lock, fcntl.LOCK_SH)
                try:
                    return work(False)
                except NotAlone as error:
                    reason = str(error)
                with suppress(BlockingIOError):
                    fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    try:
                        return work(True)
                    finally:
                        fcntl.flock(self._lock, fcntl.LOCK_SH)
            if time.monotonic() >= end:
                raise StoreError(
                    f"{self.path}: {reason}, and other processes have the store open\n\n"
                    "hint: stop them; the next to open the store puts it right"
                )
            time.sleep(0.02)

    # ── layout ────────────────────────────────────────────────────────────────────

    def _settled(self, wanted: Layout | None, *, alone: bool) -> Layout:
        """The layout of the store's rows: that in the directory, else the wanted one's rows."""
        stored = layout_in(self.path)
        rows = None if wanted is None else row_layout(wanted)
        if stored is not None and rows is not None:
            _check_same(self.path, stored, rows)
        if stored is not None and stored.identity is not None:
            return stored
        if rows is None:
            raise StoreError(
                f"{self.path}: made by an older version of kvstow, its rows are not served\n\n"
                "hint: remove the directory; whoever opens it with a layout begins anew"
            )
        if not alone:
            raise NotAlone("the store is to be made" if stored is None else "its version is old")
        if stored is not None:
            self._discard_old_version()
        _check_headers(self.path, fingerprint(rows))
        with tempfile.NamedTemporaryFile(dir=self.path, prefix="layout-", delete=False) as new:
            new.write(encode(rows))
            new.flush()
            os.fsync(new.fileno())
        os.replace(new.name, self.path / "layout.json")
        self._files.sync_directory(self.path)
        return rows

    def _discard_old_version(self) -> None:
        """Rows of an older version have keys that nobody asks for any more: they go."""
        numbers = list(segment_numbers(self.path))
        for number in numbers:
            self._files.remove(segment_file(self.path, number))
        for suffix in ("", "-wal", "-shm"):
            self._files.remove(self.path / f"index.db{suffix}")
        what = f"{len(numbers)} data files of an older version of kvstow are not served, and gone"
        self.dropped = (DroppedRows(what, 0),)

    # ── index ─────────────────────────────────────────────────────────────────────

    @property
    def _mark(self) -> Path:
        return self.path / "index.rebuild"

    @property
    def is_marked(self) -> bool:
        """Whether somebody found the index broken, so that everybody has to let go of it."""
        return self._mark.exists()

    def detach(self, *, mark: bool) -> None:
        """Let go of a broken index, so that somebody can make it again, and mark it for the
        others; nothing may be under way. `attach` comes back."""
        with store_errors(self.path):
            if mark:
                os.close(open_own(self._mark, os.O_RDWR, create=True))
            self.index.close()
            self.dropped = ()
            fcntl.flock(self._lock, fcntl.LOCK_UN)

    def attach(self, seconds: float = ALONE_SECONDS) -> None:
        """Open the index, and put right what a crash left; a broken one is made again.

        StoreError where that needs other processes to let go, and they do not.
        """
        try:
            self._locked(lambda alone: self._open_index(alone=alone), seconds)
        except BaseException:
            fcntl.flock(self._lock, fcntl.LOCK_UN)
            raise

    def _open_index(self, *, alone: bool) -> None:
        try:
            if self.is_marked:
                raise IndexBroken("somebody found it so")
            self._use(StoreIndex(self.path / "index.db", self._clock), broken=False)
            return
        except IndexBroken as error:
            if not alone:
                os.close(open_own(self._mark, os.O_RDWR, create=True))
                raise NotAlone(f"the index is broken ({error})") from error
        for suffix in ("", "-wal", "-shm"):
            with suppress(FileNotFoundError):
                os.replace(self.path / f"index.db{suffix}", self.path / f"index.db.broken{suffix}")
        self._use(StoreIndex(self.path / "index.db", self._clock), broken=True)
        self._mark.unlink(missing_ok=True)

    def _use(self, index: StoreIndex, *, broken: bool) -> None:
        """Check an index against the data files, repair both, and use them from now on."""
        try:
            self._check_fingerprint(index)
            if not broken and any_died(index, self._processes) and not index.sound():
                raise IndexBroken("SQLite finds it damaged")
            self._size, self.capacity = self._sizes(index)
            if self._segments is None or self._segments.segment_bytes != self._size:
                self._segments = self._data_files()
            self.owner, self.dropped = recovered(
                index,
                self.segments,
                self._processes,
                broken=broken,
                dropped_before=self.dropped,
            )
        except BaseException:
            index.close()
            raise
        self.index = index

    def _data_files(self) -> Segments:
        if self._segments is not None:
            self._segments.close()
        return Segments(
            self.path,
            self.layout,
            self._size,
            self._fingerprint,
            files=self._files,
            threads=self._threads,
        )

    def _check_fingerprint(self, index: StoreIndex) -> None:
        """The index is of the layout in layout.json. Where they differ, the data files say which
        of the two belongs to another store."""
        known = index.meta("fingerprint")
        if known in (None, self._fingerprint):
            return
        if all(h.fingerprint.hex() == self._fingerprint for _, h in _headers(self.path)):
            raise IndexBroken(f"it is of another store, {str(known)[:12]}")
        raise StoreError(
            f"{self.path}: layout.json is {self._fingerprint[:12]}, the index is of "
            f"{str(known)[:12]}: one of them belongs to another store, no row is served\n\n"
            "hint: put the store's own layout.json back, or remove the directory"
        )

    def _sizes(self, index: StoreIndex) -> tuple[int, int]:
        """Bytes of a data file, and of all of them together at most."""
        with index.write() as write:
            known = dict(write.ask("SELECT name, value FROM meta"))
            files = [file.lstat().st_size for file in _files(self.path)]
            size = known.get("segment_bytes") or _common_size(self.path, files)
            whole = (size or 0) * len(files)
            wanted = self._wanted_capacity
            most = (known.get("capacity") or whole) if wanted is None else wanted
            if not most and wanted is None:
                raise StoreError(
                    f"{self.path}: no store there yet, and no capacity given for a new one\n\n"
                    'hint: Store(disk=..., disk_bytes="100GiB"), DiskTier(..., capacity=...)'
                )
            if size is None:
                size = segment_bytes(self.layout, most)
            _check_size(self.layout, size)
            if most < size:
                raise StoreError(
                    f"{self.path}: a capacity of {most} bytes is below one data file, {size}\n\n"
                    f"hint: give at least {size} bytes, or none to keep that of the store"
                )
            write.set_meta("fingerprint", self._fingerprint)
            write.set_meta("segment_bytes", size)
            write.set_meta("capacity", most)
        return size, most


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


def layout_in(path: Path) -> Layout | None:
    """The layout that a directory states; None where there is none. Raises OSError."""
    try:
        fd = open_own(path / "layout.json", os.O_RDONLY)
    except FileNotFoundError:
        return None
    with os.fdopen(fd, "rb") as file:
        data = file.read(MAX_MANIFEST_BYTES + 1)
    if len(data) > MAX_MANIFEST_BYTES:
        raise StoreError(f"{path}: layout.json is longer than {MAX_MANIFEST_BYTES} bytes")
    try:
        return decode(data)
    except ManifestError as error:
        raise StoreError(f"{path}: layout.json cannot be read: {error}") from error


def _check_same(path: Path, stored: Layout, wanted: Layout) -> None:
    """Refuses a layout of another model, element type or computation, with every difference."""
    if stored.identity is None:  # an older version: its rows go, unless they are of another model
        wanted = replace(wanted, identity=None)
    unlike = differences(stored, wanted)
    if unlike:
        raise StoreError(
            f"{path}: the store holds rows of another model or element type:\n"
            + "\n".join(unlike)
            + "\n\nhint: give this layout a directory of its own"
        )


def _files(path: Path) -> list[Path]:
    return [segment_file(path, number) for number in segment_numbers(path)]


def _headers(path: Path) -> list[tuple[Path, SegmentHeader]]:
    """The data files that have a valid header."""
    found: list[tuple[Path, SegmentHeader]] = []
    for file in _files(path):
        with os.fdopen(open_own(file, os.O_RDONLY), "rb") as data:
            header = decode_header(data.read(BLOCK))
        if header is not None:
            found.append((file, header))
    return found


def _check_headers(path: Path, wanted: str) -> None:
    """Refuses a layout that some data file of the directory was not made for."""
    for file, header in _headers(path):
        if header.fingerprint.hex() != wanted:
            raise StoreError(
                f"{file}: rows of another layout, {header.fingerprint.hex()[:12]}, not "
                f"{wanted[:12]}; layout.json is missing\n\n"
                "hint: give the layout that the store was made for"
            )


def _common_size(path: Path, sizes: list[int]) -> int | None:
    """Bytes of the data files that are there without an index: what most of them say."""
    stated = [header.segment_bytes for _, header in _headers(path)] or sizes
    return max(stated, key=stated.count) if stated else None


def _check_size(layout: Layout, size: object) -> None:
    """IndexBroken unless data files can be so long."""
    longest = max(slot_bytes(layout.row_bytes(g)) for g in range(len(layout.groups)))
    most = BLOCK << SLOT_BITS
    if not isinstance(size, int) or size % BLOCK or not BLOCK + longest <= size <= most:
        raise IndexBroken(f"{size} is not a valid data file size")
