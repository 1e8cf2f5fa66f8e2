"""The directory of a store: which file holds which row, what they take, and which go first.

    DIR/rows-3fa9c1…/0/a/ab12…ef      a row of group 0: fingerprint, group, first digit of its key
    DIR/new/4711-x7k2/12              a file that process 4711 is writing; it gets its names last

A row is there if its name is. A name appears and goes in one step, and a file stays as it is for
whoever has it open, so nobody waits for anybody: there are no locks on rows, and no index. The time
of a file is that of its last use. A clock that was set changes which rows go first, nothing else.
"""

import fcntl
import os
import tempfile
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from threading import Lock

import numpy as np

from kvstow.offload.disk.files import Files
from kvstow.offload.tier import Bools, Tallies, Usage

EVICTED_SHARE = 16
"""Who needs room evicts until a 16th of the capacity is free, so that the tree is walked seldom."""

BLOCK_NANOSECONDS = 100_000_000
"""By so much a block of a sequence counts as older than the one before it: of what was used at the
same time the ends go first, and what is left are prefixes."""

SETTLED_SECONDS = 2.0
"""A directory that changed so lately is listed again: its time may not show the next change."""

LOOK_SHARE = 50
"""Whoever asks for the usage pays for a walk only after 50 times as long as the last one took."""


@dataclass(slots=True)
class RowFile:
    """A file in the tree: what it takes, when it was last used, and the names of its rows."""

    nbytes: int
    used: int
    names: list[str] = field(default_factory=list[str])

    @property
    def group(self) -> int:
        return int(Path(self.names[0]).parts[-3])

    @property
    def keys(self) -> list[bytes]:
        return [bytes.fromhex(os.path.basename(name)) for name in self.names]


class RowTree:
    """Row files of one layout, among those of the whole directory. Call from any thread.

    What they take is known from a walk through the tree, and from what this process did since.
    """

    def __init__(
        self,
        path: Path,
        fingerprint: str,
        files: Files,
        capacity: int,
        tallies: Tallies,
        writers: "Writers",
    ) -> None:
        self.path, self.capacity, self._tallies = path, capacity, tallies
        self._root = f"{path}/rows-{fingerprint[:16]}"
        self._files, self.writers = files, writers
        self._lock = Lock()
        self._rows = self._nbytes = 0
        """In the tree, and of their files."""
        self._walk_is_due = 0.0
        self._under_way = 0
        """Bytes that were reserved and have no names yet."""
        self._allowance = 0
        """Bytes that may still be reserved before somebody has to look what is there."""
        self._num_writers = 0

    def name(self, group: int, key: bytes) -> str:
        """The name of the file that holds a row."""
        return self._names(group, [key])[0]

    def _names(self, group: int, keys: Sequence[bytes]) -> list[str]:
        folder, digits = f"{self._root}/{group}", [key.hex() for key in keys]
        return [f"{folder}/{each[0]}/{each}" for each in digits]

    def has(self, group: int, keys: Sequence[bytes]) -> Bools:
        """Which rows are there."""
        return np.array([os.access(name, os.F_OK) for name in self._names(group, keys)], bool)

    def directories(self, group: int) -> list[os.DirEntry[str]]:
        """Where the rows of a group are."""
        return list(_entries(f"{self._root}/{group}"))

    def own_files(self) -> list[RowFile]:
        """The files of this layout, those used longest ago first."""
        return sorted(walk(self._root), key=lambda file: file.used)

    # ── usage ─────────────────────────────────────────────────────────────────────

    @property
    def usage(self) -> Usage:
        """Rows and bytes, as this process knows them; others' may be a moment old."""
        with self._lock:
            if time.monotonic() >= self._walk_is_due:
                self._walked()
            return Usage(rows=self._rows, nbytes=self._nbytes, capacity=self.capacity)

    def _walked(self) -> list[RowFile]:
        """All files there are, of this layout or another one."""
        began = time.monotonic()
        files = [file for root in _entries(str(self.path), "rows-") for file in walk(root.path)]
        self._rows = sum(len(file.names) for file in files)
        self._nbytes = sum(file.nbytes for file in files)
        end = time.monotonic()
        self._walk_is_due = end + LOOK_SHARE * (end - began)
        return files

    # ── coming ────────────────────────────────────────────────────────────────────

    def reserve(self, nbytes: int) -> bool:
        """Whether so many bytes may be written; rows may have to go for them.

        End it by `publish` or `give_back`. Raises OSError.
        """
        with self._lock:
            writers = self.writers.count()
            if nbytes > self._allowance or writers != self._num_writers:
                self._num_writers = writers
                self.writers.sweep()
                self._make_room(nbytes)
            if nbytes > self._allowance:
                return False
            self._allowance -= nbytes
            self._under_way += nbytes
            return True

    def give_back(self, nbytes: int) -> None:
        """Reserved bytes were not written."""
        with self._lock:
            self._under_way -= nbytes
            self._allow(nbytes)

    @property
    def _part(self) -> int:
        """The most that may be reserved before somebody looks again. Who writes alone may use all
        that is free; several leave a 16th of the capacity alone, and none keeps more than its part
        of that: another one may have counted it as free, too."""
        if self._num_writers <= 1:
            return self.capacity
        return self.capacity // EVICTED_SHARE // self._num_writers

    def _allow(self, nbytes: int) -> None:
        """Bytes are free again."""
        self._allowance = min(self._allowance + nbytes, self._part)

    def publish(self, file: str, group: int, keys: Sequence[bytes], nbytes: int) -> None:
        """A file that is on the medium gets the names of its rows, all of them or, raising OSError,
        none: a name that stayed would keep bytes that nobody counts."""
        names = self._names(group, keys)
        links: list[str] = []
        with self._lock:
            try:
                for folder in {os.path.dirname(name) for name in names}:
                    if not os.path.isdir(folder):
                        _make_directory(folder)
                for name in names[1:]:
                    with suppress(FileExistsError):  # somebody else has stored the same row
                        self._files.link(file, name)
                        links.append(name)
                self._files.rename(file, names[0])
            except OSError:
                for name in links:
                    with suppress(OSError):
                        self._files.remove(name)
                raise
            self._under_way -= nbytes
            self._rows += len(names)
            self._nbytes += nbytes

    # ── going ─────────────────────────────────────────────────────────────────────

    def evict(self, nbytes: int) -> None:
        """Rows go, those used longest ago first, until so many bytes are free."""
        with self._lock:
            self._evict(self._walked(), nbytes)

    def prune(self, nbytes: int) -> int:
        """Rows go until the rest takes at most so many bytes; how many."""
        with self._lock:
            files = self._walked()
            return self._evict(files, self._nbytes - nbytes)

    def remove(self, name: str) -> bool:
        """Forget one row; whether it was there."""
        try:
            facts = os.lstat(name)
            self._files.remove(name)
        except (FileNotFoundError, IsADirectoryError):
            return False
        with self._lock:
            self._count_gone(1, facts.st_size if facts.st_nlink == 1 else 0)
        return True

    def _make_room(self, nbytes: int) -> None:
        """Learn what is there, and evict where it is too much."""
        files = self._walked()
        share = self.capacity // EVICTED_SHARE
        limit = self.capacity if self._num_writers <= 1 else self.capacity - share
        lacking = self._nbytes + self._under_way + nbytes - limit
        if lacking > 0:
            self._evict(files, lacking + share)
        free = limit - self._nbytes - self._under_way
        self._allowance = max(0, min(free, max(nbytes, self._part)))

    def _evict(self, files: list[RowFile], nbytes: int) -> int:
        rows = freed = 0
        for file in sorted(files, key=lambda file: file.used):
            if freed >= nbytes:
                break
            for name in file.names:
                with suppress(FileNotFoundError):  # another process was faster
                    self._files.remove(name)
                    rows += 1
            freed += file.nbytes
        self._count_gone(rows, freed)
        self._tallies.add("evicted_rows", rows)
        return rows

    def _count_gone(self, rows: int, nbytes: int) -> None:
        self._rows -= rows
        self._nbytes -= nbytes
        self._allow(nbytes)


class Writers:
    """Folders in which processes write files that have no names in the store yet: of rows, and of
    what the store states.

    Whoever writes holds a lock on its folder, which the system ends with the process; what is in
    the folders of others that hold none is left over, and goes.
    """

    def __init__(self, path: Path, files: Files) -> None:
        self._new, self._files = f"{path}/new", files
        self._lock = Lock()
        self._numbers = count()
        self._folder = ""
        self._fd = -1

    def count(self) -> int:
        """How many processes write, this one included. Raises OSError."""
        self._enter()
        return len(os.listdir(self._new))

    def next_file(self) -> str:
        """The name of a new file. Raises OSError."""
        self._enter()
        return f"{self._folder}/{next(self._numbers)}"

    def _enter(self) -> None:
        """Make the folder of this process, and lock it, unless it has one."""
        with self._lock:
            while not os.path.isdir(self._folder):
                self._make_folder()

    def _make_folder(self) -> None:
        self.close()
        with suppress(FileExistsError):
            os.mkdir(self._new, 0o700)
        folder = tempfile.mkdtemp(prefix=f"{os.getpid()}-", dir=self._new)
        with suppress(FileNotFoundError):
            fd = _open_folder(folder)
            if _is_locked_now(fd) and os.fstat(fd).st_nlink:
                self._folder, self._fd = folder, fd
            else:  # somebody took it for left over
                os.close(fd)

    def sweep(self) -> None:
        """Remove what dead processes were writing."""
        for folder in _entries(self._new):
            with suppress(OSError):
                if folder.path != self._folder:
                    with left_over(folder.path) as is_left:
                        if is_left:
                            self._remove_folder(folder.path)

    def _remove_folder(self, folder: str) -> None:
        for file in _entries(folder):
            self._files.remove(file.path)
        os.rmdir(folder)

    def close(self) -> None:
        """Nothing is written any more."""
        if self._fd >= 0:
            with suppress(OSError):
                self._remove_folder(self._folder)
            os.close(self._fd)
            self._folder, self._fd = "", -1


@contextmanager
def left_over(folder: str) -> Generator[bool]:
    """Whether nobody writes in a folder; then nobody can begin to meanwhile. Raises OSError."""
    fd = _open_folder(folder)
    try:
        yield _is_locked_now(fd)
    finally:
        os.close(fd)


def _is_locked_now(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _open_folder(folder: str) -> int:
    return os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)


def _make_directory(path: str) -> None:
    """A directory for us alone, and those above it."""
    with suppress(FileExistsError):
        try:
            os.mkdir(path, 0o700)
        except FileNotFoundError:
            _make_directory(os.path.dirname(path))
            os.mkdir(path, 0o700)


def walk(root: str) -> list[RowFile]:
    """All row files below a directory. What goes meanwhile may be missing."""
    files: dict[int, RowFile] = {}
    for group in _entries(root):
        for directory in _entries(group.path) if group.name.isdecimal() else ():
            for entry in _entries(directory.path):
                if not _is_key(entry.name):
                    continue
                file = files.get(entry.inode())
                if file is None:
                    try:
                        facts = entry.stat(follow_symlinks=False)
                    except FileNotFoundError:
                        continue
                    file = files[entry.inode()] = RowFile(facts.st_size, facts.st_mtime_ns)
                file.names.append(entry.path)
    return list(files.values())


def keys_in(directory: str) -> list[bytes]:
    """The keys of the rows in one directory of a group."""
    try:
        names = os.listdir(directory)
    except (FileNotFoundError, NotADirectoryError):
        return []
    return [bytes.fromhex(name) for name in names if _is_key(name)]


def _is_key(name: str) -> bool:
    return len(name) % 2 == 0 and not name.strip("0123456789abcdef")


def _entries(directory: str, prefix: str = "") -> Iterator[os.DirEntry[str]]:
    """What is in a directory; nothing where there is none."""
    try:
        with os.scandir(directory) as entries:
            yield from [entry for entry in entries if entry.name.startswith(prefix)]
    except (FileNotFoundError, NotADirectoryError):
        return


# ── changes ───────────────────────────────────────────────────────────────────────────────


class RowListing:
    """The keys of one group as of the last look; `look` says what has come and gone since then,
    whoever did it.

    Directories are listed when they have changed. A change in the moment of a look may be seen one
    look later; whoever relies on it asks `contains`, and loads.
    """

    def __init__(self, tree: RowTree, group: int) -> None:
        self._tree, self._group = tree, group
        self._keys: dict[str, tuple[int, frozenset[bytes]]] = {}
        """By directory, when it was changed, and what was in it."""

    def look(self) -> tuple[list[bytes], list[bytes]]:
        """The keys that have come, and those that have gone, since the last look."""
        came: list[bytes] = []
        gone: list[bytes] = []
        directories = {entry.path for entry in self._tree.directories(self._group)}
        for directory in directories | set(self._keys):
            last_change, before = self._keys.get(directory, (-1, frozenset[bytes]()))
            changed = _changed(directory)
            if changed == last_change:
                continue
            keys = frozenset(keys_in(directory))
            came += keys - before
            gone += before - keys
            is_settled = abs(time.time() - changed / 1e9) > SETTLED_SECONDS
            self._keys[directory] = changed if is_settled else -1, keys
        return came, gone


def _changed(directory: str) -> int:
    try:
        return os.stat(directory).st_mtime_ns
    except FileNotFoundError:
        return 0
