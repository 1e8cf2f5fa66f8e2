# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false
"""What a cache is given of its sequences, as prompts: tokens, padding, other content."""

from collections.abc import Collection, Iterable, Sequence
from typing import Any

import numpy as np
import torch

from kvstow.blocks.prompt import Prompt
from kvstow.errors import BlockError

Tensor = torch.Tensor


def prompts_of(
    tokens: Tensor,
    mask: Tensor | None = None,
    extra: Sequence[Iterable[tuple[int, bytes]]] = (),
) -> list[Prompt]:
    """Sequences as prompts; equal tokens behind different padding are different prompts."""
    rows: Any = torch.as_tensor(tokens).cpu().numpy()
    if rows.ndim != 2 or not rows.size or len(extra) not in (0, len(rows)):
        raise BlockError(
            f"no sequences: tokens are {rows.shape}, with extra content of {len(extra)}\n\n"
            "hint: tokens are [sequence, token], and extra has an entry for each sequence"
        )
    content = extra or [()] * len(rows)
    return [
        Prompt.of(row, salt=b"" if pad == 0 else _PADDED + str(pad).encode(), extra=more)
        for row, pad, more in zip(rows, _padding(rows, mask), content, strict=True)
    ]


def naming_fault(
    prompts: Sequence[Prompt],
    placeholders: Collection[int],
    padding_token: int | None,
    *,
    has_mask: bool,
) -> str:
    """Why the prompts' tokens do not name their rows, in words; empty where they do.

    Tokens may stand for an image that nobody names. Padding without a mask is hidden by
    `generate`, and not by a forward pass.
    """
    for prompt in prompts:
        named = min((position for position, _ in prompt.extra), default=len(prompt))
        if np.isin(prompt.tokens[:named], list(placeholders)).any():
            return "tokens stand for images or other content, and Cache(..., extra=...) names none"
        if not has_mask and padding_token is not None and (prompt.tokens == padding_token).any():
            return f"tokens have the padding token {padding_token} among them, and no mask"
    return ""


_PADDED = b"padded by "


def padding_of(prompt: Prompt) -> int:
    """How many tokens on the left of a prompt are none."""
    before, marker, count = prompt.salt.partition(_PADDED)
    return int(count) if marker and not before else 0


def _padding(rows: Any, mask: Tensor | None) -> list[int]:
    """How many tokens on the left of each sequence are padding."""
    if mask is None:
        return [0] * len(rows)
    seen: Any = torch.as_tensor(mask).cpu().numpy()
    if seen.shape != rows.shape:
        raise BlockError(f"the attention mask is {seen.shape}, tokens are {rows.shape}")
    padding = (seen == 0).sum(axis=1)
    if ((seen == 0).cumprod(axis=1).sum(axis=1) != padding).any():
        raise BlockError("the attention mask hides tokens that are not padding on the left")
    return padding.tolist()
