"""Objects or ranges of them fetched, verified, and turned into rows.

Fetched bytes lie in memory of the fetch's own until they are verified: an answer that comes too
late, or a store that returns something else, never touches a row. The thread that wants the rows
verifies each object when it has come and copies it while it is in the processor's cache. A row that
two threads want at once is fetched once.
"""

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from threading import Lock
from time import monotonic

import numpy as np

from kvstow.offload.remote.calls import Calls, Tallies
from kvstow.offload.remote.client import BlobClient, Range, StoreUnreachable
from kvstow.offload.remote.lookup import LookUps, Parts
from kvstow.offload.remote.objects import BadObject, RowObjects
from kvstow.offload.tier import Bytes
from kvstow.plan.view import Ints

LOT_BYTES = 17 << 20
"""Objects are fetched in lots of so many bytes, 16 rows of 1 MiB with their heads, `LOTS` at a
time. No more than that has come and is not verified yet."""
LOTS = 4


@dataclass(slots=True, eq=False)
class _Wanted:
    """An object to be fetched: all of it, or its head and some bands."""

    name: str
    objects: RowObjects
    key: bytes
    bands: Ints | None

    @property
    def ranges(self) -> list[Range]:
        if self.bands is None:
            return [(0, self.objects.nbytes)]
        return self.objects.wanted(self.bands)

    @property
    def nbytes(self) -> int:
        return sum(end - start for start, end in self.ranges)

    def verified(self, answer: Bytes | list[Bytes]) -> Bytes | BadObject:
        """The row, or what of it is wanted, in the bytes that came."""
        if isinstance(answer, list):
            assert self.bands is not None
            return self.objects.read_parts(self.key, answer, self.bands)
        return self.objects.read(self.key, answer)


Answer = Bytes | list[Bytes] | None
"""An object or ranges of one, as they came; None for one that is not there."""

Arrivals = SimpleQueue["tuple[_Wanted, Answer] | Future[None]"]
"""Answers, and calls that have ended."""


class Fetcher:
    """Rows of one reader's layout, out of the objects that make them."""

    def __init__(
        self, client: BlobClient, calls: Calls, look_ups: LookUps, misses: Tallies
    ) -> None:
        self._client, self._calls, self._look_ups = client, calls, look_ups
        self._misses = misses
        self._flights: dict[tuple[int, bytes], Future[Bytes | None]] = {}
        self._lock = Lock()
        self._bad: list[str] = []

    def rows(
        self,
        group: int,
        row_bytes: int,
        keys: Sequence[bytes],
        parts: Sequence[Parts],
        seconds: float,
    ) -> Iterator[tuple[int, Bytes]]:
        """The number of each key whose row came, and the row, verified, as soon as it is there.

        A row's memory is reused when the caller lets go of it.
        """
        deadline = monotonic() + seconds
        mine, others = self._take_off(group, keys)
        left = set(mine)
        try:
            for at, row in self._made(row_bytes, [parts[i] for i in mine], deadline):
                left.discard(mine[at])
                self._land(group, keys[mine[at]], row)
                if row is not None:
                    yield mine[at], row
        except StoreUnreachable:
            self._misses.add("unreachable", len(left))
        finally:
            for i in left:
                self._land(group, keys[i], None)
        for i, flight in others:
            row = self._arrived(flight, deadline)
            if row is not None:
                yield i, row

    def take_bad(self) -> list[str]:
        """Names of objects that were not what they should be, each once, for the remover."""
        with self._lock:
            bad, self._bad = self._bad, []
        return bad

    # ── single flight ─────────────────────────────────────────────────────────────

    def _take_off(
        self, group: int, keys: Sequence[bytes]
    ) -> tuple[list[int], list[tuple[int, "Future[Bytes | None]"]]]:
        """Which keys are to be fetched here, and what the others will be."""
        mine: list[int] = []
        others: list[tuple[int, Future[Bytes | None]]] = []
        with self._lock:
            for i, key in enumerate(keys):
                if (group, key) in self._flights:
                    others.append((i, self._flights[group, key]))
                else:
                    self._flights[group, key] = Future()
                    mine.append(i)
        return mine, others

    def _land(self, group: int, key: bytes, row: Bytes | None) -> None:
        with self._lock:
            flight = self._flights.pop((group, key))
        flight.set_result(row)

    @staticmethod
    def _arrived(flight: "Future[Bytes | None]", deadline: float) -> Bytes | None:
        try:
            return flight.result(max(0.0, deadline - monotonic()))
        except TimeoutError:
            return None

    # ── objects ───────────────────────────────────────────────────────────────────

    def _made(
        self, row_bytes: int, parts: Sequence[Parts], deadline: float
    ) -> Iterator[tuple[int, Bytes | None]]:
        """Each row when all objects that make it have come; objects are kept as long as needed."""
        names = [[self._look_ups.name(part) for part in each] for each in parts]
        missing = [set(each) for each in names]
        users: defaultdict[str, list[int]] = defaultdict(list)
        for i, name in ((i, name) for i, each in enumerate(missing) for name in each):
            users[name].append(i)
        uses = {name: len(each) for name, each in users.items()}
        came: dict[str, Bytes | None] = {}
        for wanted, row in self._fetched(list(self._wanted(parts).values()), deadline):
            came[wanted.name] = row
            for i in users[wanted.name]:
                missing[i].discard(wanted.name)
                if missing[i]:
                    continue
                yield i, _assembled(parts[i], [came[name] for name in names[i]], row_bytes)
                for name in set(names[i]):
                    uses[name] -= 1
                    if not uses[name]:
                        del came[name]

    def _wanted(self, parts: Sequence[Parts]) -> dict[str, _Wanted]:
        """Every object once, with all bands that some row takes from it."""
        wanted: dict[str, _Wanted] = {}
        for part in (part for each in parts for part in each):
            name, bands = self._look_ups.name(part), part.piece.bands
            known = wanted.get(name)
            if known is None:
                wanted[name] = _Wanted(name, part.piece.objects, part.key, bands)
            elif bands is None or known.bands is None:
                known.bands = None
            elif known.bands is not bands:
                known.bands = np.union1d(known.bands, bands)
        for each in wanted.values():
            if each.bands is not None and len(each.bands) == each.objects.num_bands:
                each.bands = None
        return wanted

    def _fetched(
        self, wanted: Sequence[_Wanted], deadline: float
    ) -> Iterator[tuple[_Wanted, Bytes | None]]:
        """The rows of all objects, in any order; None for one that is not there or not whole.

        Each is verified when it has come, here, while the others are on their way.
        """
        lots = deque(_lots(wanted))
        under_way: set[Future[None]] = set()
        arrivals: Arrivals = SimpleQueue()
        while lots or under_way:
            while lots and len(under_way) < LOTS:
                under_way.add(self._start(lots.popleft(), arrivals))
            arrival = self._next(arrivals, under_way, deadline)
            if isinstance(arrival, Future):
                self._calls.result(arrival, deadline)
                under_way.discard(arrival)
            else:
                yield arrival[0], self._judged(*arrival)

    def _next(
        self, arrivals: "Arrivals", under_way: Iterable["Future[None]"], deadline: float
    ) -> "tuple[_Wanted, Answer] | Future[None]":
        """The next object that has come, or the next call that has ended.

        Raises StoreUnreachable if there is none before the deadline.
        """
        while True:
            try:
                return arrivals.get(timeout=max(0.0, deadline - monotonic()))
            except Empty:
                for call in under_way:
                    self._calls.result(call, deadline)

    def _judged(self, wanted: _Wanted, answer: Answer) -> Bytes | None:
        """The row, unless it is none; then it is counted why."""
        if answer is None:
            self._misses.add("absent", 1)
            return None
        row = wanted.verified(answer)
        if isinstance(row, BadObject):
            self._misses.add(row.value, 1)
            if row is not BadObject.VERSION:
                with self._lock:
                    self._bad.append(wanted.name)
            return None
        return row

    def _start(self, lot: Sequence[_Wanted], arrivals: Arrivals) -> "Future[None]":
        """Fetch a lot; every answer goes to `arrivals`, and the call itself when it has ended."""
        call = self._calls.start(lambda: self._fetch(lot, arrivals))
        call.add_done_callback(arrivals.put)
        return call

    def _fetch(self, lot: Sequence[_Wanted], arrivals: Arrivals) -> None:
        """Fetch a lot, which wants either whole objects or ranges."""

        def arrived(number: int, answer: Answer) -> None:
            arrivals.put((lot[number], answer))

        if lot[0].bands is None:
            most = max(each.objects.nbytes for each in lot)
            self._client.get([each.name for each in lot], most, arrived)
        else:
            self._client.get_ranges([(each.name, each.ranges) for each in lot], arrived)


def _lots(wanted: Sequence[_Wanted]) -> list[list[_Wanted]]:
    """The objects in lots of at most `LOT_BYTES` or one object, whole ones and ranges apart."""
    lots: list[list[_Wanted]] = []
    for whole in (True, False):
        nbytes = LOT_BYTES
        for each in (each for each in wanted if (each.bands is None) == whole):
            nbytes += each.nbytes
            if nbytes > LOT_BYTES:
                lots.append([])
                nbytes = each.nbytes
            lots[-1].append(each)
    return lots


def _assembled(parts: Parts, sources: Sequence[Bytes | None], row_bytes: int) -> Bytes | None:
    """A row out of the rows of its parts; None where one of them is missing."""
    present = [source for source in sources if source is not None]
    if len(present) < len(sources):
        return None
    if len(parts) == 1 and parts[0].piece.bands is None:
        return present[0]
    row = np.zeros(row_bytes, np.uint8)
    for part, source in zip(parts, present, strict=True):
        part.piece.bring(source, row)
    return row
