# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false
"""Rows of the tokens of a batch: where they lie, and tokens written to them and gathered."""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import torch

from kvstow.errors import BlockError
from kvstow.memory.arena import Arena
from kvstow.plan.view import ceil_div

Tensor = torch.Tensor


@dataclass(frozen=True, slots=True, eq=False)
class BatchTable:
    """Block ids of a batch in one group: `ids[i, j]` is logical block `first + j` of sequence `i`.

    All sequences of a batch have the same length, so all rows of the table are as long.
    """

    ids: Tensor
    first: int
    block_tokens: int
    _columns: dict[int, Tensor] = field(default_factory=dict[int, Tensor], repr=False)

    def has_room(self, num_tokens: int) -> bool:
        """Whether so many tokens end in a block that is listed already.

        Blocks at the beginning may have been given back meanwhile: nobody looks there.
        """
        return num_tokens <= (self.first + self.ids.shape[1]) * self.block_tokens

    def column(self, token: int) -> Tensor:
        """Block id `[batch]` of one token: every layer asks for the same, so it is kept."""
        at = token // self.block_tokens - self.first
        if at not in self._columns:
            self._columns[at] = self.ids[:, at].contiguous()
        return self._columns[at]

    def places(self, start: int, end: int) -> tuple[Tensor, Tensor]:
        """Block id `[batch, token]` and slot `[token]` of the tokens `[start, end)`."""
        tokens = torch.arange(start, end, device=self.ids.device)
        return self.ids[:, tokens // self.block_tokens - self.first], tokens % self.block_tokens


def write(pages: Tensor, table: BatchTable, states: Tensor, start: int) -> None:
    """Store `[batch, head, token, content]` as the tokens from `start` on."""
    tokens = states.shape[2]
    if tokens == 1:
        slot = pages.select(2, start % table.block_tokens)
        slot.index_copy_(0, table.column(start), states.select(2, 0))
        return
    blocks, slots = table.places(start, start + tokens)
    pages.transpose(1, 2)[blocks, slots.expand_as(blocks)] = states.transpose(1, 2)


def gathered(pages: Tensor, table: BatchTable, start: int, end: int) -> Tensor:
    """The tokens `[start, end)` of all sequences: `[batch, head, token, content]`, contiguous."""
    low = start // table.block_tokens
    high = ceil_div(end, table.block_tokens)
    ids = table.ids[:, low - table.first : high - table.first]
    batch, blocks = ids.shape
    # By the first axis: by another one, torch's CPU copies all pages first.
    listed = pages.index_select(0, ids.reshape(-1))
    _, heads, tokens, content = listed.shape
    by_head = listed.view(batch, blocks, heads, tokens, content).transpose(1, 2)
    whole = by_head.reshape(batch, heads, blocks * tokens, content)
    skipped = start - low * table.block_tokens
    return whole[:, :, skipped : skipped + end - start].contiguous()


def one_stride(ids: Tensor) -> int | None:
    """The distance between consecutive ids, where it is the same and positive."""
    if len(ids) == 1:
        return 1
    step = int(ids[1] - ids[0])
    even = bool((ids[1:] - ids[:-1] == step).all())
    return step if even and step > 0 else None


class TokenRows:
    """Rows of one batch: a table for each group, and views of the fields, made once."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._tables: dict[int, BatchTable] = {}
        self._views: dict[tuple[str, str], Tensor] = {}

    def set(self, group: int, table: BatchTable) -> None:
        """The batch has these blocks from now on."""
        self._tables[group] = table

    def have_room(self, groups: Iterable[int], num_tokens: int) -> bool:
        """Whether so many tokens end in blocks that these groups have already."""
        return all(self._tables[group].has_room(num_tokens) for group in groups)

    def write(
        self, layer: str, field: str, states: Tensor, start: int
    ) -> tuple[Tensor, BatchTable]:
        """Store `[batch, head, token, content]` of a field as the tokens from `start` on; where
        all of them lie."""
        pages = self._pages(layer, field)
        if states.dtype != pages.dtype and states.shape[2]:
            raise BlockError(f"layer {layer!r}: {field!r} holds {pages.dtype}, not {states.dtype}")
        group, spec, _ = self._arena.layout.layers[layer]
        table = self._tables[group]
        if spec.states != table.block_tokens:
            table = replace(table, block_tokens=spec.states)
        if states.shape[2]:
            write(pages, table, states, start // spec.tokens_per_state)
        return pages, table

    def gathered(self, layer: str, field: str, start: int, end: int) -> Tensor:
        """The tokens `[start, end)` of a field: `[batch, head, token, content]`, contiguous."""
        group = self._arena.layout.layers[layer][0]
        return gathered(self._pages(layer, field), self._tables[group], start, end)

    def own_heads(self, layer: str, states: Tensor) -> Tensor:
        """The heads that this process holds, where the model computes them all."""
        heads = self._arena.layout.layers[layer][1].heads
        if states.shape[1] == heads.size:
            return states
        low, high = heads.pieces[0]
        return states[:, low:high]

    def _pages(self, layer: str, field: str) -> Tensor:
        """A field of all blocks."""
        if (layer, field) not in self._views:
            self._views[layer, field] = self._arena.field(layer, field)
        return self._views[layer, field]
