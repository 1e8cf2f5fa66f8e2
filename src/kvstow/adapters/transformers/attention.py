# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false
"""Attention that reads a model's rows in place, as one of transformers' attentions.

A cache layer hands the new keys to the model with a note of where all keys lie; transformers
carries them to the attention function, which reads the rows and not the keys. So nothing is
gathered. Models that do something to their keys in between cannot be served this way.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface

from kvstow.errors import ModelError

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
    high = -(-end // table.block_tokens)
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


IN_PLACE = "kvstow_rows"
"""The name under which transformers knows this attention."""

_NOTE = "kvstow_pages"


@dataclass(frozen=True, slots=True, eq=False)
class LayerPages:
    """Where all keys and values of a layer lie, and how many tokens that is."""

    keys: torch.Tensor
    values: torch.Tensor
    table: BatchTable
    num_tokens: int
    window: int | None


def noted(states: torch.Tensor, pages: LayerPages) -> torch.Tensor:
    """The same tensor, with a note of its pages."""
    setattr(states, _NOTE, pages)
    return states


def attend_in_place(model: PreTrainedModel) -> Callable[[], None]:
    """Make the model's attention read rows; until the returned call it needs a `Cache`."""
    config = model.config.get_text_config(decoder=True)
    if getattr(config, "attention_chunk_size", None) is not None:
        raise ModelError(
            f"{type(model).__name__} attends in chunks, which rows in place do not serve\n\n"
            "hint: leave in_place out"
        )
    before: Any = model.config._attn_implementation  # pyright: ignore[reportPrivateUsage]
    AttentionInterface.register(IN_PLACE, attention)
    AttentionMaskInterface.register(IN_PLACE, padding)
    model.set_attn_implementation(IN_PLACE)
    return lambda: model.set_attn_implementation(before)


def padding(
    *, q_length: int = 1, attention_mask: torch.Tensor | None = None, **_: object
) -> torch.Tensor | None:
    """Instead of a mask: how many tokens of each sequence are padding."""
    if attention_mask is None:
        return None
    padded = attention_mask.to(torch.int8).argmax(-1).to(torch.int32)
    if q_length > 1 and bool((attention_mask.shape[-1] - padded != attention_mask.sum(-1)).any()):
        raise ModelError("the attention mask hides tokens that are not padding on the left")
    return padded


def attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """What transformers calls; `key` carries the note, `attention_mask` is `padding`'s."""
    from kvstow.memory.kernels.attention import paged_attention

    pages: LayerPages | None = getattr(key, _NOTE, None)
    if pages is None or softcap is not None or dropout:
        raise ModelError(
            f"{type(module).__name__} cannot attend to rows in place: "
            + (
                "its keys do not come straight from a Cache"
                if pages is None
                else f"softcap {softcap}, dropout {dropout}"
            )
            + "\n\nhint: ModelMemory.of(model, in_place=False)"
        )
    found = paged_attention(
        query,
        pages.keys,
        pages.values,
        pages.table.ids,
        num_tokens=pages.num_tokens,
        first_block=pages.table.first,
        first_tokens=attention_mask,
        window=pages.window,
        scale=scaling,
        sinks=s_aux,
    )
    return found, None
