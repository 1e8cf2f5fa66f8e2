"""Attention that reads a model's rows in place, as one of transformers' attentions.

A cache layer hands the new keys to the model with a note of where all keys lie; transformers
carries them to the attention function, which reads the rows and not the keys. So nothing is
gathered. Models that do something to their keys in between cannot be served this way.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface

from kvstow.adapters.transformers.rows import BatchTable
from kvstow.errors import ModelError

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
    config = model.config.get_text_config(decoder=True)  # pyright: ignore[reportUnknownMemberType]
    if getattr(config, "attention_chunk_size", None) is not None:
        raise ModelError(
            f"{type(model).__name__} uses chunked attention, which in_place does not support\n\n"
            "hint: leave in_place out"
        )
    before: Any = model.config._attn_implementation  # pyright: ignore[reportPrivateUsage]
    AttentionInterface.register(IN_PLACE, attention)  # pyright: ignore[reportUnknownMemberType]
    AttentionMaskInterface.register(IN_PLACE, padding)  # pyright: ignore[reportUnknownMemberType]
    model.set_attn_implementation(IN_PLACE)  # pyright: ignore[reportUnknownMemberType]
    return lambda: model.set_attn_implementation(before)  # pyright: ignore[reportUnknownMemberType]


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
            f"{type(module).__name__} cannot read rows in place: "
            + (
                "its keys do not come straight from a Cache"
                if pages is None
                else f"softcap {softcap}, dropout {dropout}"
            )
            + "\n\nhint: ModelMemory.of(model, in_place=False)"
        )
    output = paged_attention(
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
    return output, None
