"""Tokens in rows: written where a block table says, gathered in the order of the tokens."""

from dataclasses import dataclass

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

    def has_room(self, num_tokens: int) -> bool:
        """Whether so many tokens end in a block that is listed already.

        Blocks at the beginning may have been given back meanwhile: nobody looks there.
        """
        return num_tokens <= (self.first + self.ids.shape[1]) * self.block_tokens

    def places(self, start: int, end: int) -> tuple[Tensor, Tensor]:
        """Block id `[batch, token]` and slot `[token]` of the tokens `[start, end)`."""
        tokens = torch.arange(start, end, device=self.ids.device)
        return self.ids[:, tokens // self.block_tokens - self.first], tokens % self.block_tokens


def write(field: Tensor, table: Table, states: Tensor, start: int) -> None:
    """Store `[batch, head, token, content]` as the tokens from `start` on."""
    by_token = field.transpose(1, 2)
    tokens = states.shape[2]
    if tokens == 1:
        column = table.ids[:, start // table.block_tokens - table.first].contiguous()
        by_token.select(1, start % table.block_tokens).index_copy_(0, column, states[:, :, 0])
        return
    blocks, slots = table.places(start, start + tokens)
    by_token[blocks, slots.expand_as(blocks)] = states.transpose(1, 2)


def gathered(field: Tensor, table: Table, start: int, end: int) -> Tensor:
    """The tokens `[start, end)` of all sequences: `[batch, head, token, content]`, contiguous."""
    low = start // table.block_tokens
    high = -(-end // table.block_tokens)
    ids = table.ids[:, low - table.first : high - table.first]
    batch, blocks = ids.shape
    pages = field.transpose(0, 1).index_select(1, ids.reshape(-1))
    heads, _, tokens, content = pages.shape
    whole = pages.view(heads, batch, blocks * tokens, content).transpose(0, 1)
    skipped = start - low * table.block_tokens
    return whole[:, :, skipped : skipped + end - start].contiguous()


def one_stride(ids: Tensor) -> int | None:
    """The distance between consecutive ids, where it is the same and positive."""
    if len(ids) == 1:
        return 1
    step = int(ids[1] - ids[0])
    even = bool((ids[1:] - ids[:-1] == step).all())
    return step if even and step > 0 else None
