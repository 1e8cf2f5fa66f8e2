"""Hashes that came and went, turned into events that say which tokens they stand for.

A pool, a tier and a disk know rows by hash. A router knows a prompt by its tokens. The announcer
remembers, for the blocks of recent prompts, the tokens behind their hashes (`know`), so that a
block that turns up in some medium, now or later, can be announced with them. Whatever a tier
calls a block, events call it by one hash, the engine's: routers join an instance's tiers by it.
"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from kvstow.events.format import BlockRemoved, BlockStored, CacheEvent, Medium
from kvstow.plan.group import Group
from kvstow.plan.retention import Chunk, Encoder, Full, Retention, State, Window

MOST_BLOCKS = 1 << 17
"""Blocks whose tokens are remembered, about 300 bytes each; the oldest are forgotten first."""

Name = int | bytes
"""What a block is called where it is kept: a hash on the device, a key in the tiers."""


@dataclass(frozen=True, slots=True)
class BlockContent:
    """What a block holds, and what events call it and the one before: the engine's hashes."""

    hash: int
    parent: int | None
    tokens: tuple[int, ...]
    adapter: str
    extra: tuple[object, ...] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupKind:
    """How a group is called in events: its number, and what kind of attention it has."""

    index: int
    block_tokens: int
    kind: str
    window: int | None = None

    @staticmethod
    def of(group: Group, index: int) -> "GroupKind":
        kind, window = _kind(group.retention)
        return GroupKind(index=index, block_tokens=group.block_tokens, kind=kind, window=window)


def _kind(retention: Retention) -> tuple[str, int | None]:
    match retention:
        case Full():
            return "full_attention", None
        case Window(tokens):
            return "sliding_window", tokens
        case Chunk():
            return "chunked_local_attention", None
        case State():
            return "mamba", None
        case Encoder():
            return "cross_attention", None


class Announcer:
    """Events of one engine, collected until they are taken. Used from one thread."""

    def __init__(self, kinds: Sequence[GroupKind], most_blocks: int = MOST_BLOCKS) -> None:
        self._kinds = tuple(kinds)
        self._most_blocks = most_blocks
        self._contents: OrderedDict[tuple[int, Name], BlockContent] = OrderedDict()
        self._announced: dict[tuple[Medium, bool, int], dict[Name, int]] = {}
        self._events: list[CacheEvent] = []

    def know(
        self,
        hashes: Sequence[int],
        tokens: Sequence[int],
        block_tokens: int,
        *,
        keys: Sequence[bytes] = (),
        first: int = 0,
        parent: int | None = None,
        adapter: str = "",
        salt: str = "",
        content: Iterable[tuple[int, bytes]] = (),
    ) -> None:
        """Remember what the blocks of a prompt hold: all of them, or from block `first` on, where
        `parent` is the hash of the one before it.

        `hashes` are those of the blocks, and `keys` what the tiers call them; `tokens` are the
        whole prompt's. `content` are digests of images and the like, each with the token it begins
        at.
        """
        begins = tuple(content)
        for i, block_hash in enumerate(hashes):
            k = first + i
            lo, hi = k * block_tokens, (k + 1) * block_tokens
            parts = [adapter] if adapter else []
            parts += [digest.hex() for at, digest in begins if lo <= at < hi]
            parts += [salt] if salt and k == 0 else []
            block = BlockContent(
                block_hash, parent, tuple(tokens[lo:hi]), adapter, tuple(parts) or None
            )
            for name in (block_hash, *keys[i : i + 1]):
                self._contents[block_tokens, name] = block
                self._contents.move_to_end((block_tokens, name))
            parent = block_hash
        while len(self._contents) > 2 * self._most_blocks:
            self._contents.popitem(last=False)

    def stored(
        self, medium: Medium, group: int, names: Iterable[Name], *, remote: bool = False
    ) -> None:
        """These blocks are in a medium now. Not said again is what was announced already, and
        nothing is said of blocks whose tokens nobody remembers."""
        announced = self._announced.setdefault((medium, remote, group), {})
        size = self._kinds[group].block_tokens
        new = {
            name: block
            for name in names
            if name not in announced and (block := self._contents.get((size, name)))
        }
        announced.update((name, block.hash) for name, block in new.items())
        for run in _runs(new.values()):
            self._events.append(self._stored(medium, group, run, remote))

    def removed(
        self, medium: Medium, group: int, names: Iterable[Name], *, remote: bool = False
    ) -> None:
        """These blocks are gone from a medium; only what was announced is taken back."""
        announced = self._announced.get((medium, remote, group), {})
        gone = [announced.pop(name) for name in names if name in announced]
        if gone:
            index = self._kinds[group].index
            self._events.append(
                BlockRemoved(gone, medium, index, locality="REMOTE" if remote else None)
            )

    def take(self) -> list[CacheEvent]:
        """The events since the last time, in order."""
        events, self._events = self._events, []
        return events

    def _stored(
        self, medium: Medium, group: int, run: Sequence[BlockContent], remote: bool
    ) -> BlockStored:
        kind = self._kinds[group]
        extra = [None if block.extra is None else list(block.extra) for block in run]
        return BlockStored(
            block_hashes=[block.hash for block in run],
            parent_block_hash=run[0].parent,
            token_ids=[token for block in run for token in block.tokens],
            block_size=kind.block_tokens,
            lora_id=None,
            medium=medium,
            lora_name=run[0].adapter or None,
            extra_keys=extra if any(part is not None for part in extra) else None,
            group_idx=kind.index,
            kv_cache_spec_kind=kind.kind,
            kv_cache_spec_sliding_window=kind.window,
            locality="REMOTE" if remote else None,
        )


def _runs(blocks: Iterable[BlockContent]) -> Iterator[list[BlockContent]]:
    """The blocks in runs of which each continues the one before."""
    run: list[BlockContent] = []
    for block in blocks:
        if run and block.parent != run[-1].hash:
            yield run
            run = []
        run.append(block)
    if run:
        yield run
