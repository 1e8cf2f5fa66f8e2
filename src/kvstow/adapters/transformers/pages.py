"""Tokens in rows: written where a block table says, gathered in the order of the tokens."""

from dataclasses import dataclass, field

import torch

Tensor = torch.Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Table:
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


def write(pages: Tensor, table: Table, states: Tensor, start: int) -> None:
    """Store `[batch, head, token, content]` as the tokens from `start` on."""
    tokens = states.shape[2]
    if tokens == 1:
        slot = pages.select(2, start % table.block_tokens)
        slot.index_copy_(0, table.column(start), states.select(2, 0))
        return
    blocks, slots = table.places(start, start + tokens)
    pages.transpose(1, 2)[blocks, slots.expand_as(blocks)] = states.transpose(1, 2)


def gathered(pages: Tensor, table: Table, start: int, end: int) -> Tensor:
    """The tokens `[start, end)` of all sequences: `[batch, head, token, content]`, contiguous."""
    low = start // table.block_tokens
    high = -(-end // table.block_tokens)
    ids = table.ids[:, low - table.first : high - table.first]
    batch, blocks = ids.shape
    listed = pages.transpose(0, 1).index_select(1, ids.reshape(-1))
    heads, _, tokens, content = listed.shape
    whole = listed.view(heads, batch, blocks * tokens, content).transpose(0, 1)
    skipped = start - low * table.block_tokens
    return whole[:, :, skipped : skipped + end - start].contiguous()


def one_stride(ids: Tensor) -> int | None:
    """The distance between consecutive ids, where it is the same and positive."""
    if len(ids) == 1:
        return 1
    step = int(ids[1] - ids[0])
    even = bool((ids[1:] - ids[:-1] == step).all())
    return step if even and step > 0 else None
