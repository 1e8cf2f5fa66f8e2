"""The index of a disk store: SQLite in WAL mode, shared by every process that uses the store.

    rows      one per row that may be served: where it is, and what its bytes must sum to
    slots     one per slot that holds no row: free (owner 0), being written (owner > 0, a
              process), or retired after a medium error (owner -1)
    segments  one per data file
    owners    one per process that has the store open
    events    what was dropped, and why

A *place* is `segment << 24 | slot`. A row is entered only after its bytes are on the medium, so
a process may die anywhere: what it had not finished is a slot with a dead owner.
"""

import sqlite3
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from threading import RLock
from typing import Any, cast

import numpy as np

from kvstow.errors import StoreError
from kvstow.offload.disk.files import check_own, store_errors
from kvstow.offload.tier import Bools
from kvstow.plan.view import Ints

FORMAT = 2
"""Format 1 had keys of 16 bytes that did not name the computation."""
SLOT_BITS = 24
FREE = 0
RETIRED = -1
BATCH = 1024
BUSY_SECONDS = 30.0


_SCHEMA = """
CREATE TABLE meta (name TEXT PRIMARY KEY, value) WITHOUT ROWID;
CREATE TABLE segments (id INTEGER PRIMARY KEY, grp INTEGER NOT NULL, slots INTEGER NOT NULL);
CREATE TABLE slots (place INTEGER PRIMARY KEY, grp INTEGER NOT NULL, owner INTEGER NOT NULL);
CREATE INDEX slots_free ON slots (grp, place) WHERE owner = 0;
CREATE TABLE rows (
    place INTEGER PRIMARY KEY, grp INTEGER NOT NULL, key BLOB NOT NULL,
    generation INTEGER NOT NULL, checksum INTEGER NOT NULL,
    block INTEGER NOT NULL, parent BLOB NOT NULL, seq INTEGER NOT NULL);
CREATE UNIQUE INDEX rows_key ON rows (key, grp);
CREATE INDEX rows_seq ON rows (grp, seq);
CREATE TABLE owners (
    id INTEGER PRIMARY KEY AUTOINCREMENT, pid INTEGER NOT NULL, started INTEGER NOT NULL,
    host TEXT NOT NULL, beat REAL NOT NULL, counts TEXT NOT NULL DEFAULT '[]');
CREATE TABLE events (time REAL NOT NULL, what TEXT NOT NULL, rows INTEGER NOT NULL);
INSERT INTO meta VALUES ('clock', 0);
"""
_TABLES = {"meta", "segments", "slots", "rows", "owners", "events"}


def place(segment: int, slot: int) -> int:
    return segment << SLOT_BITS | slot


@dataclass(frozen=True, slots=True, eq=False)
class RowPlaces:
    """Rows that were found: `position[i]` among the keys asked for."""

    position: Ints
    place: Ints
    generation: Ints
    checksum: Ints

    def rows(self) -> Iterator[tuple[int, int, int, int]]:
        """The same as plain numbers, row by row."""
        columns = (self.position, self.place, self.generation, self.checksum)
        return zip(*(cast(list[int], column.tolist()) for column in columns), strict=True)


@dataclass(frozen=True, slots=True)
class RowEntry:
    """A row to be entered."""

    place: int
    key: bytes
    generation: int
    checksum: int
    block: int
    parent: bytes


@contextmanager
def _translated(path: Path) -> Generator[None]:
    """What SQLite raises becomes ours."""
    try:
        yield
    except sqlite3.DatabaseError as error:
        kind = IndexBroken if _broken(error) else StoreError
        raise kind(f"index {path}: {error}") from error
    except UnicodeDecodeError as error:  # SQLite quotes bytes of a damaged schema
        raise IndexBroken(f"index {path}: {error}") from error


def _broken(error: sqlite3.DatabaseError) -> bool:
    code = getattr(error, "sqlite_errorcode", 0)
    return code in _UNREADABLE or code & 0xFF in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)


_UNREADABLE = (
    sqlite3.SQLITE_IOERR_READ,
    sqlite3.SQLITE_IOERR_SHORT_READ,
    sqlite3.SQLITE_IOERR_CORRUPTFS,
)


class IndexBroken(StoreError):
    """The index file cannot be read any more; the data files may still be good."""


class OldFormat(StoreError):
    """The store was made by an older version, whose rows are not served."""


class StoreIndex:
    """One process's view of the index. Methods of `Transaction` change it, inside `write()`."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.time) -> None:
        self.path = path
        self.now = clock
        self._lock = RLock()
        with store_errors(path):
            check_own(path, create=True)  # SQLite would make it 0644
        with _translated(path):
            self._sql = sqlite3.connect(
                path,
                timeout=BUSY_SECONDS,
                isolation_level=None,
                check_same_thread=False,
                cached_statements=256,
            )
        try:
            with _translated(path):
                self._prepare()
        except BaseException:
            self._sql.close()
            raise

    def _prepare(self) -> None:
        self._sql.execute("PRAGMA journal_mode = WAL")
        self._sql.execute("PRAGMA synchronous = NORMAL")
        self._sql.execute("PRAGMA cache_size = -16384")
        self._sql.execute("PRAGMA mmap_size = 0")  # a failing medium is an error, not a signal
        with self.write() as write:
            write.create()

    def close(self) -> None:
        with self._lock:
            self._sql.close()

    @contextmanager
    def write(self, undone: Callable[[], None] | None = None) -> "Generator[Transaction]":
        """One transaction; all of it happens or none. Other processes wait meanwhile.

        `undone` is called where none of it happens, before another transaction begins.
        """
        with self._lock, _translated(self.path):
            self._sql.execute("BEGIN IMMEDIATE")
            try:
                yield Transaction(self._sql, self.now)
                self._sql.execute("COMMIT")
            except BaseException:
                if undone is not None:
                    undone()
                if self._sql.in_transaction:
                    self._sql.execute("ROLLBACK")
                raise

    @contextmanager
    def held(self, seconds: float) -> Generator[bool]:
        """Whether no other thread used the index within so many seconds; none does meanwhile."""
        is_ours = self._lock.acquire(timeout=seconds)
        try:
            yield is_ours
        finally:
            if is_ours:
                self._lock.release()

    # ── questions ─────────────────────────────────────────────────────────────────

    def ask(self, question: str, *values: Any) -> list[Any]:
        """The answer to a question in SQL; it must change nothing."""
        with self._lock, _translated(self.path):
            return self._sql.execute(question, values).fetchall()

    def sound(self) -> bool:
        """Whether SQLite finds nothing wrong with the file."""
        return self.ask("PRAGMA quick_check(1)") == [("ok",)]

    def meta(self, name: str) -> Any:
        """A value kept with the store; None where there is none."""
        rows = self.ask("SELECT value FROM meta WHERE name = ?", name)
        return rows[0][0] if rows else None

    def contains(self, group: int, keys: Sequence[bytes]) -> Bools:
        """Which keys have a row."""
        mask = np.zeros(len(keys), bool)
        for start, batch in _batches(keys):
            found = self.ask(_question("v.column1", len(batch)), *batch, group)
            mask[[start + i for (i,) in found]] = True
        return mask

    def find(self, group: int, keys: Sequence[bytes]) -> RowPlaces:
        """The rows of these keys, in the order of their places."""
        columns = "v.column1, r.place, r.generation, r.checksum"
        found: list[tuple[int, int, int, int]] = []
        for start, batch in _batches(keys):
            answer = self.ask(_question(columns, len(batch)), *batch, group)
            found += [(start + i, *rest) for i, *rest in answer]
        table = _numbers(found).reshape(-1, 4)
        table = table[np.argsort(table[:, 1], kind="stable")]
        return RowPlaces(*(np.ascontiguousarray(column) for column in table.T))

    def keys(self, group: int) -> list[bytes]:
        """The keys of a group's rows, by place."""
        rows = self.ask("SELECT key FROM rows WHERE grp = ? ORDER BY place", group)
        return [_key(key) for (key,) in rows]

    def keys_since(self, group: int, seq: int, most: int) -> tuple[list[bytes], int]:
        """Keys of the first rows entered or used after `seq`, and how far that is."""
        rows = self.ask(
            "SELECT key, seq FROM rows WHERE grp = ? AND seq > ? ORDER BY seq LIMIT ?",
            group,
            seq,
            most,
        )
        return [_key(key) for key, _ in rows], rows[-1][1] if rows else seq

    def num_rows(self) -> int:
        return self.ask("SELECT COUNT(*) FROM rows")[0][0]

    def segments(self) -> list[tuple[int, int, int]]:
        """Every data file: its number, its group, its slots."""
        return self.ask("SELECT id, grp, slots FROM segments ORDER BY id")

    def since(self, group: int, seq: int, most: int) -> tuple[Ints, Ints, list[int], int]:
        """The first rows entered or used after `seq`: places, generations, marks of keys, and
        how far that is."""
        rows = self.ask(
            "SELECT place, generation, substr(key, 1, 8), seq FROM rows "
            "WHERE grp = ? AND seq > ? ORDER BY seq LIMIT ?",
            group,
            seq,
            most,
        )
        if not rows:
            return np.empty(0, np.int64), np.empty(0, np.int64), [], seq
        places, generations, heads, seqs = zip(*rows, strict=True)
        marks: list[int] = np.frombuffer(
            b"".join([_key(head).ljust(8, b"\0") for head in heads]), "<u8"
        ).tolist()
        return _numbers(places), _numbers(generations), marks, seqs[-1]


class Transaction:
    """The commands of one transaction."""

    def __init__(self, sql: sqlite3.Connection, clock: Callable[[], float]) -> None:
        self._sql = sql
        self.now = clock

    def ask(self, question: str, *values: Any) -> list[Any]:
        return self._sql.execute(question, values).fetchall()

    def tell(self, command: str, *values: Any) -> int:
        """Run one statement; how many rows it changed."""
        return self._sql.execute(command, values).rowcount

    def create(self) -> None:
        """The tables, where there are none; refuses another format."""
        if not self.ask("SELECT name FROM sqlite_master"):
            for statement in _SCHEMA.split(";\n"):
                self._sql.execute(statement)
            self.set_meta("format", FORMAT)
        tables = {name for (name,) in self.ask("SELECT name FROM sqlite_master")}
        if not tables >= _TABLES:
            raise IndexBroken(f"the index lacks the tables {sorted(_TABLES - tables)}")
        formats = self.ask("SELECT value FROM meta WHERE name = 'format'")
        if formats == [(1,)]:
            raise OldFormat("the index has format 1, made by an older version of kvstow")
        if formats != [(FORMAT,)]:
            raise StoreError(
                f"the index has format {formats}, not {FORMAT}\n\n"
                "hint: open the store with the version of kvstow that made it"
            )

    def set_meta(self, name: str, value: Any) -> None:
        self.tell("INSERT OR REPLACE INTO meta VALUES (?, ?)", name, value)

    def tick(self, count: int) -> int:
        """Advance the store's clock; the first of `count` numbers that nobody else has."""
        end = self.ask(
            "UPDATE meta SET value = value + ? WHERE name = 'clock' RETURNING value", count
        )
        return end[0][0] - count + 1

    def free(self, group: int, count: int) -> list[int]:
        """The first free places of a group, ascending."""
        rows = self.ask(
            "SELECT place FROM slots WHERE grp = ? AND owner = 0 ORDER BY place LIMIT ?",
            group,
            count,
        )
        return [row[0] for row in rows]

    def take(self, group: int, places: Sequence[int], owner: int) -> None:
        """These places, free until now and ascending, are being written by `owner`."""
        for first, last in _stretches(places):
            self.tell(
                "UPDATE slots SET owner = ? WHERE grp = ? AND place BETWEEN ? AND ?",
                owner,
                group,
                first,
                last,
            )

    def lease(self, group: int, places: Iterable[int], owner: int) -> None:
        """These places, free until now or freed by `drop`, are being written by `owner`."""
        self._sql.executemany(
            "INSERT OR REPLACE INTO slots VALUES (?, ?, ?)",
            ((place, group, owner) for place in places),
        )

    def release(self, places: Iterable[int], owner: int) -> None:
        """Give up leases; those that somebody has taken away stay as they are."""
        self._sql.executemany(
            "UPDATE slots SET owner = 0 WHERE place = ? AND owner = ?",
            ((place, owner) for place in places),
        )

    def enter(self, group: int, entries: Sequence[RowEntry], owner: int) -> list[bool]:
        """Turn leases into rows; which of them are rows now.

        A lease that was taken away stays lost. The slot of a row that somebody else has
        entered meanwhile is free again.
        """
        if not entries:
            return []
        seq = self.tick(len(entries))
        ours = self._leased([e.place for e in entries], owner)
        self._sql.executemany("DELETE FROM slots WHERE place = ?", ((at,) for at in ours))
        done = self._sql.executemany(
            "INSERT OR IGNORE INTO rows VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
            (
                (e.place, group, e.key, e.generation, e.checksum, e.block, e.parent, seq + i)
                for i, e in enumerate(entries)
                if e.place in ours
            ),
        ).rowcount
        if done < len(ours):
            rows = {at for at in ours if self.ask("SELECT 1 FROM rows WHERE place = ?", at)}
            self.lease(group, ours - rows, FREE)
        return [e.place in ours for e in entries]

    def _leased(self, places: Sequence[int], owner: int) -> set[int]:
        """Those places that `owner` is writing."""
        found = self.ask(
            "SELECT place FROM slots WHERE place BETWEEN ? AND ? AND owner = ?",
            min(places),
            max(places),
            owner,
        )
        return {at for (at,) in found}.intersection(places)

    def drop(self, group: int, places: Iterable[int], *, to: int = FREE) -> int:
        """Forget the group's rows at these places, which become free (or retired); how many.

        A place that has passed to another group meanwhile stays as it is.
        """
        count = 0
        for at in places:
            if self.tell("DELETE FROM rows WHERE place = ? AND grp = ?", at, group):
                self.lease(group, [at], to)
                count += 1
        return count

    def add_segment(self, segment: int, group: int, slots: int) -> None:
        """A data file whose slots are all free."""
        self.tell("INSERT INTO segments VALUES (?, ?, ?)", segment, group, slots)
        first = place(segment, 0)
        self.tell(
            "WITH RECURSIVE places(place) AS (SELECT ? UNION ALL SELECT place + 1 FROM places "
            "WHERE place < ?) INSERT OR REPLACE INTO slots SELECT place, ?, ? FROM places",
            first,
            first + slots - 1,
            group,
            FREE,
        )

    def remove_segment(self, segment: int) -> int:
        """Forget a data file and everything in it; how many rows that were."""
        first, end = place(segment, 0), place(segment + 1, 0)
        self.tell("DELETE FROM segments WHERE id = ?", segment)
        self.tell("DELETE FROM slots WHERE place >= ? AND place < ?", first, end)
        return self.tell("DELETE FROM rows WHERE place >= ? AND place < ?", first, end)

    def use(self, places: Iterable[int]) -> None:
        """These rows were used, in this order."""
        ordered = list(places)
        seq = self.tick(len(ordered))
        self._sql.executemany(
            "UPDATE rows SET seq = ? WHERE place = ?",
            ((seq + i, place) for i, place in enumerate(ordered)),
        )

    def note(self, what: str, rows: int) -> None:
        """Write down that rows were dropped; the last thousand notes are kept."""
        self.tell("INSERT INTO events VALUES (?, ?, ?)", self.now(), what, rows)
        self.tell("DELETE FROM events WHERE rowid <= (SELECT MAX(rowid) FROM events) - 1000")


def _key(value: Any) -> bytes:
    """A value of the index that must be a key; IndexBroken where it is not."""
    if not isinstance(value, bytes) or not value:
        raise IndexBroken(f"not a key: {value!r:.80}")
    return value


def _numbers(values: Sequence[Any]) -> Ints:
    """Values of the index that must be whole numbers; IndexBroken where they are not."""
    try:
        return np.array(values, np.int64)
    except (TypeError, ValueError, OverflowError) as error:
        raise IndexBroken(f"not whole numbers: {error}") from None


def _stretches(places: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Ascending numbers as stretches without a gap: the first and the last of each."""
    if not places:
        return
    array = np.asarray(places, np.int64)
    cuts = np.flatnonzero(np.diff(array) > 1)
    firsts, lasts = array[np.r_[0, cuts + 1]], array[np.r_[cuts, len(array) - 1]]
    yield from zip(firsts.tolist(), lasts.tolist(), strict=True)


@cache
def _question(columns: str, count: int) -> str:
    values = ",".join(f"({i},?)" for i in range(count))
    return (
        f"SELECT {columns} FROM (VALUES {values}) v CROSS JOIN rows r "
        "ON r.key = v.column2 AND r.grp = ?"
    )


def _batches(keys: Sequence[bytes]) -> Iterator[tuple[int, list[bytes | None]]]:
    """Keys in batches as long as a power of two, the last one filled up with nothing: so
    there are few different statements, and SQLite compiles each of them once."""
    for start in range(0, len(keys), BATCH):
        batch: list[bytes | None] = list(keys[start : start + BATCH])
        batch += [None] * ((1 << (len(batch) - 1).bit_length()) - len(batch))
        yield start, batch
