"""Where rows are, and what they are: objects looked up, fetched, verified, and turned into rows.

A prompt that nobody has stored is the usual case, and is answered after one question about its
first blocks. What was found is remembered for some seconds, so that loading need not ask again.

Rows are fetched in lots, some lots at a time. A lot's bytes lie in memory of its own until they
are verified: an answer that comes too late, or a store that returns something else, never touches
a row.
"""

from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from threading import Lock
from time import monotonic

import numpy as np

from kvstow.blocks.prompt import Prompt
from kvstow.offload.keys import PromptKeys
from kvstow.offload.remote.calls import Calls
from kvstow.offload.remote.client import BlobClient, Range, StoreUnreachable
from kvstow.offload.remote.directory import Directory, WriterLayout
from kvstow.offload.remote.objects import BadObject, RowObjects
from kvstow.offload.remote.reading import GroupReader, ObjectPart, deployments
from kvstow.offload.tier import Bytes, Tallies
from kvstow.plan.identity import Identity
from kvstow.plan.layout import Layout
from kvstow.plan.retention import Full
from kvstow.plan.view import Ints

FOUND_SECONDS = 5.0
"""How long it is remembered that a row was found."""

FIRST_LOOK = 32
"""A look-up asks for so many rows first, and then for four times as many each time."""

MOST_FOUND = 1 << 16
MOST_PROMPTS = 64

LOT_BYTES = 17 << 20
"""Rows are fetched in lots of so many bytes, 16 rows of 1 MiB with heads, `LOTS` at a time."""
LOTS = 4

Parts = Sequence[ObjectPart]
Call = Future[dict[str, Bytes | None]]


class LookUps:
    """Finds rows of one reader's layout among the objects of all writers that are known."""

    def __init__(
        self,
        client: BlobClient,
        calls: Calls,
        directory: Directory,
        layout: Layout,
        own: str,
        misses: Tallies,
    ) -> None:
        self._client, self._calls, self._directory = client, calls, directory
        self._layout, self._own = layout, own
        self._misses = misses
        self._readers: tuple[tuple[WriterLayout, ...], tuple[tuple[GroupReader, ...], ...]]
        self._readers = (), ((),) * len(layout.groups)
        """Writers, and per group who reads what they wrote: replaced together, from any thread."""
        self._places: OrderedDict[tuple[int, bytes], tuple[float, Parts]] = OrderedDict()
        self._prompts: OrderedDict[bytes, PromptKeys] = OrderedDict()
        self._lock = Lock()

    def _of_groups(self) -> tuple[tuple[GroupReader, ...], ...]:
        """Per group, readers of all writers that the directory knows now."""
        writers = self._directory.layouts
        of_writers, readers = self._readers
        if writers != of_writers:
            ranked = deployments(writers, self._own)
            readers = tuple(
                tuple(GroupReader(members, self._layout, group) for members in ranked)
                for group in range(len(self._layout.groups))
            )
            self._readers = writers, readers
        return readers

    # ── prompts ───────────────────────────────────────────────────────────────────

    def expect(self, identity: Identity, prompt: Prompt) -> None:
        """Rows of this prompt will be asked for. Needed where some writer has other block sizes:
        the keys of its blocks take the tokens to make."""
        readers = [one for readers in self._of_groups() for one in readers]
        if not len(prompt) or not any(one.needs_prompt for one in readers):
            return
        own = {rows.group.block_tokens for rows in self._layout.groups}
        keys = PromptKeys(identity, prompt, own.union(*(one.block_sizes for one in readers)))
        name = keys.key_at(len(prompt))
        assert name is not None
        with self._lock:
            self._prompts[name] = keys
            while len(self._prompts) > MOST_PROMPTS:
                self._prompts.popitem(last=False)

    def _prompt_of(self, key: bytes) -> PromptKeys | None:
        with self._lock:
            prompts = tuple(reversed(self._prompts.values()))
        return next((one for one in prompts if one.end_of(key) is not None), None)

    # ── rows ──────────────────────────────────────────────────────────────────────

    def look_up(self, group: int, keys: Sequence[bytes], seconds: float) -> list[Parts | None]:
        """Per key, the objects that make its row, all of them there; None where one is not.

        Rows for which there is no time left are not looked for. Of a group that keeps everything,
        nothing is looked for behind a whole lot that no writer has.
        """
        now = monotonic()
        deadline = now + seconds
        with self._lock:
            remembered = [self._places.get((group, key), (now, None)) for key in keys]
        rows = [parts if until >= now else None for until, parts in remembered]
        left = [i for i, parts in enumerate(rows) if parts is None]
        ends_at_miss = isinstance(self._layout.groups[group].group.retention, Full)
        readers = self._of_groups()[group]
        at, count = 0, FIRST_LOOK
        while at < len(left) and readers:
            lot = left[at : at + count]
            try:
                successful = self._look(keys, lot, rows, readers, deadline)
            except StoreUnreachable:
                self._misses.add("unreachable", len(left) - at)
                break
            at, count = at + len(lot), 4 * count
            if monotonic() > deadline and at < len(left):
                self._misses.add("budget", len(left) - at)
                break
            readers = successful if ends_at_miss else readers
        until = monotonic() + FOUND_SECONDS
        with self._lock:
            self._places.update(
                {(group, keys[i]): (until, parts) for i in left if (parts := rows[i]) is not None}
            )
            while len(self._places) > MOST_FOUND:
                self._places.popitem(last=False)
        return rows

    def _look(
        self,
        keys: Sequence[bytes],
        lot: Sequence[int],
        rows: list[Parts | None],
        readers: Sequence[GroupReader],
        deadline: float,
    ) -> tuple[GroupReader, ...]:
        """Look for some rows in the objects of all readers at once; the readers that had any."""
        options = [
            (i, reader, parts)
            for i in lot
            for prompt in (self._prompt_of(keys[i]),)
            for reader in readers
            if (parts := reader.parts(keys[i], prompt)) is not None
        ]
        names = list(dict.fromkeys(part.name for _, _, parts in options for part in parts))
        if not names:
            return ()
        call = self._calls.start(lambda: self._client.exists(names))
        answers = self._calls.result(call, deadline).tolist()
        there = {name for name, is_there in zip(names, answers, strict=True) if is_there}
        successful: dict[GroupReader, None] = {}
        for i, reader, parts in options:
            if rows[i] is None and all(part.name in there for part in parts):
                rows[i] = parts
                successful[reader] = None
        return tuple(successful)

    def forget(self, group: int, keys: Sequence[bytes]) -> None:
        """These rows were not there when they were fetched."""
        with self._lock:
            for key in keys:
                self._places.pop((group, key), None)


# ── fetching ──────────────────────────────────────────────────────────────────────────


@dataclass(slots=True, eq=False)
class _Fetch:
    """An object to be fetched: its key, and all of it, or its head and some bands."""

    objects: RowObjects
    key: bytes
    bands: Ints | None

    def add(self, bands: Ints | None) -> None:
        """Another row takes these bands of it."""
        if bands is None or self.bands is None:
            self.bands = None
        elif bands is not self.bands:
            self.bands = np.union1d(self.bands, bands)

    @property
    def ranges(self) -> list[Range]:
        """What to ask for: of a whole object one byte more, so that a longer one shows."""
        if self.bands is None:
            return [(0, self.objects.nbytes + 1)]
        return self.objects.ranges_with_head(self.bands)

    def verified(self, parts: list[Bytes]) -> Bytes | BadObject:
        """The row, or what of it is to be fetched, in the bytes that came."""
        if self.bands is None:
            return self.objects.read(self.key, parts[0])
        return self.objects.read_parts(self.key, parts, self.bands)


class Fetcher:
    """Rows of one reader's layout, out of the objects that make them.

    `on_bad` is told the names of objects that are not what they should be.
    """

    def __init__(
        self, client: BlobClient, calls: Calls, misses: Tallies, on_bad: Callable[[str], None]
    ) -> None:
        self._client, self._calls, self._misses, self._on_bad = client, calls, misses, on_bad

    def rows(
        self, row_bytes: int, parts: Sequence[Parts], seconds: float
    ) -> Iterator[tuple[int, Bytes]]:
        """The number of each row that came whole, and the row, as soon as its lot is there."""
        deadline = monotonic() + seconds
        lots, under_way = deque(self._lots(parts)), deque[tuple[Sequence[int], Call]]()
        left = len(parts)
        try:
            while lots or under_way:
                while lots and len(under_way) < LOTS:
                    lot = lots.popleft()
                    call = self._calls.start(partial(self._fetched, [parts[i] for i in lot]))
                    under_way.append((lot, call))
                lot, call = under_way.popleft()
                sources = self._calls.result(call, deadline)
                for i in lot:
                    row = self._assembled(parts[i], sources, row_bytes)
                    if row is not None:
                        yield i, row
                left -= len(lot)
        except StoreUnreachable:
            self._misses.add("unreachable", left)

    def _lots(self, parts: Sequence[Parts]) -> Iterator[list[int]]:
        """Neighbouring rows, by number, whose objects take about `LOT_BYTES`."""
        lot, names, total = list[int](), set[str](), 0
        for i, each in enumerate(parts):
            new = {part.name: part.piece.objects.nbytes for part in each}
            nbytes = sum(nbytes for name, nbytes in new.items() if name not in names)
            if lot and total + nbytes > LOT_BYTES:
                yield lot
                lot, names, total, nbytes = [], set[str](), 0, sum(new.values())
            lot.append(i)
            names |= new.keys()
            total += nbytes
        if lot:
            yield lot

    def _fetched(self, parts: Sequence[Parts]) -> dict[str, Bytes | None]:
        """The objects that rows are made of by name, each fetched once; None for one that is not
        there or not whole."""
        fetches: dict[str, _Fetch] = {}
        for part in (part for each in parts for part in each):
            fetch = _Fetch(part.piece.objects, part.key, part.piece.bands)
            fetches.setdefault(part.name, fetch).add(part.piece.bands)
        for fetch in fetches.values():
            if fetch.bands is not None and len(fetch.bands) == fetch.objects.num_bands:
                fetch.bands = None
        answers = self._client.get([(name, fetch.ranges) for name, fetch in fetches.items()])
        both = zip(fetches.items(), answers, strict=True)
        return {name: self._verified(name, fetch, answer) for (name, fetch), answer in both}

    def _verified(self, name: str, fetch: _Fetch, answer: list[Bytes] | None) -> Bytes | None:
        """The row, unless it is none; then it is counted why."""
        if answer is None:
            self._misses.add("absent", 1)
            return None
        row = fetch.verified(answer)
        if isinstance(row, BadObject):
            self._misses.add(row.value, 1)
            if row is not BadObject.VERSION:
                self._on_bad(name)
            return None
        return row

    def _assembled(
        self, parts: Parts, sources: Mapping[str, Bytes | None], row_bytes: int
    ) -> Bytes | None:
        """A row out of the rows of its parts; None where one of them is missing."""
        present = [sources[part.name] for part in parts]
        if len(parts) == 1 and parts[0].piece.bands is None:
            return present[0]
        row = np.zeros(row_bytes, np.uint8)
        for part, source in zip(parts, present, strict=True):
            if source is None:
                return None
            part.piece.bring(source, row)
        return row
