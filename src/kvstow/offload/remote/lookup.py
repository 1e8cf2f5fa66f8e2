"""Where rows are: which objects of which writers make them, asked for in batches.

A prompt that nobody has stored is the usual case, and is answered after one question about its
first blocks. What was found is remembered for some seconds, so that loading need not ask again.
"""

from collections import OrderedDict
from collections.abc import Sequence
from threading import Lock
from time import monotonic

from kvstow.blocks.prompt import Prompt
from kvstow.offload.keys import PromptKeys
from kvstow.offload.remote.calls import Calls, Tallies
from kvstow.offload.remote.client import BlobClient, StoreUnreachable
from kvstow.offload.remote.directory import Directory, WriterLayout
from kvstow.offload.remote.reading import GroupReader, ObjectPart, deployments
from kvstow.plan.identity import Identity
from kvstow.plan.layout import Layout
from kvstow.plan.retention import Full

FOUND_SECONDS = 5.0
"""How long it is remembered that a row was found."""

FIRST_LOOK = 32
"""A look-up asks for so many rows first, and then for four times as many each time."""

MOST_FOUND = 1 << 16
MOST_PROMPTS = 64

Parts = Sequence[ObjectPart]


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
        self._readers: tuple[tuple[GroupReader, ...], ...] = ((),) * len(layout.groups)
        self._writers: tuple[WriterLayout, ...] = ()
        self._found: OrderedDict[tuple[int, bytes], tuple[float, Parts]] = OrderedDict()
        self._prompts: OrderedDict[bytes, PromptKeys] = OrderedDict()
        self._lock = Lock()

    def use_directory(self) -> None:
        """Read from all writers that the directory knows now."""
        writers = self._directory.layouts
        if writers == self._writers:
            return
        ranked = deployments(writers, self._own)
        self._readers = tuple(
            tuple(GroupReader(members, self._layout, group) for members in ranked)
            for group in range(len(self._layout.groups))
        )
        self._writers = writers

    # ── prompts ───────────────────────────────────────────────────────────────────

    def expect(self, identity: Identity, prompt: Prompt) -> None:
        """Rows of this prompt will be asked for. Needed where some writer has other block sizes:
        the keys of its blocks take the tokens to make."""
        readers = [one for readers in self._readers for one in readers]
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

        Rows for which there is no time left are not looked for.
        """
        found = self._remembered(group, keys)
        left = [i for i, parts in enumerate(found) if parts is None]
        self._look(group, keys, left, found, monotonic() + seconds)
        self._remember(group, keys, left, found)
        return found

    def to_fetch(self, group: int, keys: Sequence[bytes], seconds: float) -> list[Parts | None]:
        """Per key, the objects to fetch for its row; None where there are none.

        Whoever fetches learns what is there. So where one deployment alone can have the rows, and
        has the first that nobody has looked for lately, the others are not looked for.
        """
        deadline = monotonic() + seconds
        found = self._remembered(group, keys)
        left = [i for i, parts in enumerate(found) if parts is None]
        readers = self._readers[group]
        if len(left) < 2 or len(readers) != 1:
            return self.look_up(group, keys, seconds)
        first, rest = left[0], left[1:]
        if not self._look(group, keys, [first], found, deadline):
            self._misses.add("unreachable", len(rest))
        elif found[first] is None:
            self._look(group, keys, rest, found, deadline)
        self._remember(group, keys, left, found)
        if found[first] is not None:
            for i in rest:
                found[i] = readers[0].parts(keys[i], self._prompt_of(keys[i]))
        return found

    def _look(
        self,
        group: int,
        keys: Sequence[bytes],
        left: Sequence[int],
        found: list[Parts | None],
        deadline: float,
    ) -> bool:
        """Look for the rows that are left, into `found`; whether the store answered."""
        ends_at_miss = isinstance(self._layout.groups[group].group.retention, Full)
        readers = self._readers[group]
        at, count = 0, FIRST_LOOK
        while at < len(left) and readers:
            lot = left[at : at + count]
            at, count = at + len(lot), 4 * count
            try:
                readers = self._asked(group, keys, lot, found, readers, deadline)
            except StoreUnreachable:
                self._misses.add("unreachable", len(left) - at + len(lot))
                return False
            if monotonic() > deadline and at < len(left):
                self._misses.add("budget", len(left) - at)
                break
            if not ends_at_miss:
                readers = self._readers[group]
        return True

    def _asked(
        self,
        group: int,
        keys: Sequence[bytes],
        lot: Sequence[int],
        found: list[Parts | None],
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
        names = list(dict.fromkeys(self.name(part) for _, _, parts in options for part in parts))
        if not names:
            return ()
        call = self._calls.start(lambda: self._client.exists(names))
        answers = self._calls.result(call, deadline).tolist()
        there = {name for name, known in zip(names, answers, strict=True) if known}
        successful: dict[GroupReader, None] = {}
        for i, reader, parts in options:
            if found[i] is None and all(self.name(part) in there for part in parts):
                found[i] = parts
                successful[reader] = None
        return tuple(successful)

    def name(self, part: ObjectPart) -> str:
        """The name of the object that a part is of."""
        piece = part.piece
        return self._directory.row_name(piece.writer.fingerprint, piece.objects.group, part.key)

    # ── memory ────────────────────────────────────────────────────────────────────

    def _remembered(self, group: int, keys: Sequence[bytes]) -> list[Parts | None]:
        now = monotonic()
        with self._lock:
            known = [self._found.get((group, key)) for key in keys]
        return [None if one is None or one[0] < now else one[1] for one in known]

    def _remember(
        self,
        group: int,
        keys: Sequence[bytes],
        asked: Sequence[int],
        found: Sequence[Parts | None],
    ) -> None:
        """Remember what the store has said; what was remembered before is not new."""
        until = monotonic() + FOUND_SECONDS
        with self._lock:
            for i in asked:
                parts = found[i]
                if parts is not None:
                    self._found[group, keys[i]] = until, parts
            while len(self._found) > MOST_FOUND:
                self._found.popitem(last=False)

    def forget(self, group: int, keys: Sequence[bytes]) -> None:
        """These rows were not there when they were fetched."""
        with self._lock:
            for key in keys:
                self._found.pop((group, key), None)
