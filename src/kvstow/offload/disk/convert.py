"""A store rewritten for another layout: other order, alignment, tp or more tokens per block.

Rows go through routes, a batch at a time. With the same tokens per block a row keeps its key.
With a multiple of them, as many rows in a chain become one, and it has the key of the last: keys
name everything up to the end of a block (`keys.block_keys`). Fewer tokens per block are refused:
a route could cut the rows, but the new block ends need keys, which are hashes of tokens, and a
store does not keep tokens.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from kvstow.errors import StoreError
from kvstow.memory.arena import Arena
from kvstow.memory.copy import copy
from kvstow.offload.disk.format import ChainLink
from kvstow.offload.disk.tier import DiskTier
from kvstow.offload.rows import stacked, views
from kvstow.plan.layout import Layout
from kvstow.plan.retention import State
from kvstow.route.blocks import Blocks
from kvstow.route.sources import SourceRoute, sources

STAGE_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class NewRow:
    """A row to be made: the keys of the rows it is made of, in order, and its own place."""

    keys: tuple[bytes, ...]
    link: ChainLink

    @property
    def key(self) -> bytes:
        return self.keys[-1]


@dataclass(frozen=True, slots=True)
class Converted:
    """What became of a store's rows."""

    written: int
    incomplete: int
    """Rows of the new store for which some row of the old ones was missing or damaged."""
    left_out: int
    """Rows of the first old store that are in no row of the new one, whose blocks are larger: none
    ends where they end, their neighbours are gone, or they were stored without links."""


def convert(old: Sequence[DiskTier], new: DiskTier) -> Converted:
    """Write the rows of stores of one deployment's ranks into a store of another layout."""
    written = incomplete = left_out = 0
    for group in range(len(new.layout.groups)):
        old_group = _group_of(old[0].layout, new.layout, group)
        ratio = _ratio(old[0].layout, old_group, new.layout, group)
        stage = _Stage(old, old_group, new.layout, group, ratio)
        new_rows, unused = _runs(old[0], old_group, ratio)
        left_out += unused
        for runs in stage.batches(new_rows):
            done = stage.moved(runs, new)
            written += done
            incomplete += len(runs) - done
    return Converted(written, incomplete, left_out)


class _Stage:
    """Room for a batch of rows of one group, of every old store and of the new one."""

    def __init__(
        self, old: Sequence[DiskTier], old_group: int, layout: Layout, group: int, ratio: int
    ) -> None:
        self._old, self._old_group, self._group = old, old_group, group
        self._recurrent = isinstance(layout.groups[group].group.retention, State)
        self._parts = 1 if self._recurrent else ratio
        self._tokens = layout.groups[group].group.block_tokens
        self.num_rows = max(1, STAGE_BYTES // layout.row_bytes(group))
        shapes = [stacked(tier.layout, old_group, self.num_rows * self._parts) for tier in old]
        self._target = Arena(stacked(layout, group, self.num_rows))
        self._sources: tuple[SourceRoute, ...] = sources(shapes, self._target.layout)
        self._stages = {s.index: Arena(shapes[s.index]) for s in self._sources}

    def batches(self, runs: Sequence[NewRow]) -> Iterator[Sequence[NewRow]]:
        for at in range(0, len(runs), self.num_rows):
            yield runs[at : at + self.num_rows]

    def moved(self, runs: Sequence[NewRow], new: DiskTier) -> int:
        """Read, route and write a batch; how many rows the new store has of it."""
        keys = [key for run in runs for key in run.keys]
        whole = np.ones(len(runs), bool)
        for index, stage in self._stages.items():
            rows = views(stage.bytes.numpy(), stage.layout, 0, np.arange(1, len(keys) + 1))
            present = self._old[index].load(self._old_group, keys, rows)
            whole &= present.reshape(len(runs), self._parts).all(axis=1)
        good = np.flatnonzero(whole)
        for source in self._sources:
            self._route(source, good)
        rows = views(self._target.bytes.numpy(), self._target.layout, 0, good + 1)
        ready = [runs[i] for i in good.tolist()]
        links = [run.link for run in ready]
        return int(new.store(self._group, [run.key for run in ready], rows, links).sum())

    def _route(self, source: SourceRoute, good: np.ndarray[tuple[int], np.dtype[np.intp]]) -> None:
        """Bring every good row across, each as a request of its own."""
        stage = self._stages[source.index]
        for i in good.tolist():
            first = 1 + i * self._parts
            before = {0: Blocks.first(np.arange(first, first + self._parts))}
            after = {0: Blocks.first([1 + i])}
            copy(stage, self._target, source.route.copies(before, after, self._tokens)).wait()


def _group_of(old: Layout, new: Layout, group: int) -> int:
    """The old group that has the layers of a new one."""
    names = [layer.name for layer in new.groups[group].group.layers]
    for g, rows in enumerate(old.groups):
        if [layer.name for layer in rows.group.layers] == names:
            return g
    raise StoreError(
        f"no group of the old store has the {len(names)} layers of group "
        f"{new.groups[group].group.name!r}\n\nhint: plan the new layout with the same groups"
    )


def _ratio(old: Layout, old_group: int, new: Layout, group: int) -> int:
    """How many old blocks make a new one."""
    before = old.groups[old_group].group.block_tokens
    after = new.groups[group].group.block_tokens
    if after % before:
        raise StoreError(
            f"group {new.groups[group].group.name!r}: blocks of {before} tokens do not make blocks "
            f"of {after}: a key names all tokens up to the end of its block, some of these blocks "
            "end where none did, and a store keeps keys, not the tokens to make new ones from\n\n"
            f"hint: choose a multiple of {before} tokens per block"
        )
    return after // before


def _runs(tier: DiskTier, group: int, ratio: int) -> tuple[list[NewRow], int]:
    """The rows of the new store, oldest first: every chain of `ratio` rows that ends a block. And
    how many old rows are in none of them."""
    files = [file for file in tier.row_files() if file.group == group]
    links = {key: (link.block, link.parent) for file in files for key, link in tier.links(file)}
    recurrent = isinstance(tier.layout.groups[group].group.retention, State)
    runs: list[NewRow] = []
    for key, (block, _) in links.items():
        if (block + 1) % ratio and ratio > 1:
            continue
        chain = [key]
        while len(chain) < (1 if recurrent else ratio) and chain[0] in links:
            chain.insert(0, links[chain[0]][1])
        if all(each in links for each in chain):
            parent = _ancestor(links, key, ratio)
            runs.append(NewRow(tuple(chain), ChainLink((block + 1) // ratio - 1, parent)))
    used = {key for run in runs for key in run.keys}
    return runs, len(links) - len(used)


def _ancestor(links: dict[bytes, tuple[int, bytes]], key: bytes, steps: int) -> bytes:
    """The key `steps` blocks before; nothing where the chain begins or is not known so far."""
    for _ in range(steps):
        if key not in links:
            return b""
        key = links[key][1]
    return key
