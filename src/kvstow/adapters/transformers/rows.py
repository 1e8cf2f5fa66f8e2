"""Rows of a batch: where the tokens of its sequences lie, and their recurrent states."""

from dataclasses import dataclass, replace

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
    _columns: dict[int, Tensor]

    def has_room(self, num_tokens: int) -> bool:
        """Whether so many tokens end in a block that is listed already.

        Blocks at the beginning may have been given back meanwhile: nobody looks there.
        """
        return num_tokens <= (self.first + self.ids.shape[1]) * self.block_tokens

    def write(self, pages: Tensor, states: Tensor, start: int) -> None:
        """Store `[batch, head, token, content]` as the tokens from `start` on."""
        if states.shape[2] == 1:
            slot = pages.select(2, start % self.block_tokens)
            slot.index_copy_(0, self._column(start), states.select(2, 0))
            return
        tokens = torch.arange(start, start + states.shape[2], device=self.ids.device)
        blocks = self.ids[:, tokens // self.block_tokens - self.first]
        slots = (tokens % self.block_tokens).expand_as(blocks)
        pages.transpose(1, 2)[blocks, slots] = states.transpose(1, 2)

    def _column(self, token: int) -> Tensor:
        """Block id `[batch]` of one token: every layer asks for the same, so it is kept."""
        at = token // self.block_tokens - self.first
        if at not in self._columns:
            self._columns[at] = self.ids[:, at].contiguous()
        return self._columns[at]

    def gathered(self, pages: Tensor, start: int, end: int) -> Tensor:
        """The tokens `[start, end)` of all sequences: `[batch, head, token, content]`,
        contiguous."""
        low = start // self.block_tokens
        high = ceil_div(end, self.block_tokens)
        ids = self.ids[:, low - self.first : high - self.first]
        batch, blocks = ids.shape
        # By the first axis: by another one, torch's CPU copies all pages first.
        listed = pages.index_select(0, ids.reshape(-1))
        _, heads, tokens, content = listed.shape
        by_head = listed.view(batch, blocks, heads, tokens, content).transpose(1, 2)
        whole = by_head.reshape(batch, heads, blocks * tokens, content)
        skipped = start - low * self.block_tokens
        return whole[:, :, skipped : skipped + end - start].contiguous()


class TokenRows:
    """Rows of one batch: a table for each group, and views of the fields, made once."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._tables: dict[int, BatchTable] = {}
        self._views: dict[tuple[str, str], Tensor] = {}

    def set(self, group: int, table: BatchTable) -> None:
        """The batch has these blocks from now on."""
        self._tables[group] = table

    def have_room(self, num_tokens: int) -> bool:
        """Whether so many tokens end in blocks that all groups have already."""
        return all(table.has_room(num_tokens) for table in self._tables.values())

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
            table.write(pages, states, start // spec.tokens_per_state)
        return pages, table

    def gathered(self, layer: str, field: str, start: int, end: int) -> Tensor:
        """The tokens `[start, end)` of a field: `[batch, head, token, content]`, contiguous."""
        group = self._arena.layout.layers[layer][0]
        return self._tables[group].gathered(self._pages(layer, field), start, end)

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


class RecurrentStates:
    """The running row of each sequence in every recurrent group.

    A state is lent as a view of the rows where these lie at one stride, and otherwise as a copy
    that goes back into the rows before anybody else looks.
    """

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._ids: dict[int, Tensor] = {}
        self._lent: dict[tuple[str, str], Tensor] = {}
        self._views: dict[tuple[str, str], Tensor] = {}

    def set(self, group: int, ids: Tensor) -> None:
        """Say which rows they are; what was lent of others must have gone back."""
        before = self._ids.get(group)
        if before is not None and torch.equal(before, ids):
            return
        self._ids[group] = ids
        for layer, field in [*self._lent]:
            if self._group(layer) == group:
                del self._lent[layer, field]

    def forget(self) -> None:
        """Lend nothing any more."""
        self._lent.clear()

    def fields(self, layer: str) -> frozenset[str]:
        """The names of a layer's fields; none where it keeps no state."""
        layers = self._arena.layout.layers
        fields = layers[layer][1].fields if layer in layers else ()
        return frozenset(each.name for each in fields)

    def lend(self, layer: str, field: str) -> Tensor:
        """The states of all sequences; changes reach the rows, at once or by `settle`."""
        if (layer, field) not in self._lent:
            rows, ids = self._rows(layer, field), self._ids[self._group(layer)]
            step = one_stride(ids)
            if step is None:
                self._lent[layer, field] = rows.index_select(0, ids)
            else:
                first = int(ids[0])
                self._lent[layer, field] = rows[first : first + (len(ids) - 1) * step + 1 : step]
        return self._lent[layer, field]

    def settle(self) -> None:
        """Bring lent copies back into their rows."""
        for (layer, field), lent in self._lent.items():
            rows = self._rows(layer, field)
            if lent.untyped_storage().data_ptr() != rows.untyped_storage().data_ptr():
                rows.index_copy_(0, self._ids[self._group(layer)], lent)

    def _group(self, layer: str) -> int:
        return self._arena.layout.layers[layer][0]

    def _rows(self, layer: str, field: str) -> Tensor:
        """A field of all blocks, without its axes of size one for head and token."""
        if (layer, field) not in self._views:
            self._views[layer, field] = self._arena.field(layer, field)[:, 0, 0]
        return self._views[layer, field]


def one_stride(ids: Tensor) -> int | None:
    """The distance between consecutive ids, where it is the same and positive."""
    if len(ids) == 1:
        return 1
    step = int(ids[1] - ids[0])
    even = bool((ids[1:] - ids[:-1] == step).all())
    return step if even and step > 0 else None
