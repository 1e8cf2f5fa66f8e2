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
    placeholders: Collection[int] = (),
    padding_token: int | None = None,
) -> list[Prompt]:
    """Sequences as prompts; equal tokens behind different padding are different prompts.

    Refuses tokens that stand for something else, where `extra` does not say for what, and
    padding, where no mask says whether it is seen: `generate` hides it, a forward pass does not.
    """
    given: Any = torch.as_tensor(tokens).cpu().numpy()
    if given.ndim != 2 or not given.size or len(extra) not in (0, len(given)):
        raise BlockError(
            f"no sequences: tokens are {given.shape}, with extra content of {len(extra)}\n\n"
            "hint: tokens are [sequence, token], and extra has an entry for each sequence"
        )
    stands_for = np.isin(given, list(placeholders))
    if any(map(_is_unnamed, stands_for, extra or [()] * len(given))):
        raise BlockError(
            "tokens stand for images or other content that their ids do not tell, so that another "
            "image's rows would be taken for theirs\n\n"
            "hint: Cache(..., extra=[[(position, digest), ...], ...]), or leave tokens out"
        )
    if mask is None and padding_token is not None and (given == padding_token).any():
        raise BlockError(
            f"tokens have the padding token {padding_token} among them, and no mask\n\n"
            "hint: Cache(..., attention_mask=...), the one that the model is given"
        )
    found = extra or [()] * len(given)
    return [
        Prompt.of(row, salt=b"" if pad == 0 else _PADDED + str(pad).encode(), extra=more)
        for row, pad, more in zip(given, _padding(given, mask), found, strict=True)
    ]


_PADDED = b"padded by "


def known_ids(prompts: Sequence[Prompt], start: int) -> Tensor:
    """The tokens of prompts from `start` on: `[sequence, token]`."""
    return torch.from_numpy(np.stack([each.tokens[start:] for each in prompts]).astype(np.int64))


def padding_of(prompt: Prompt) -> int:
    """How many tokens on the left of a prompt are none."""
    before, told, count = prompt.salt.partition(_PADDED)
    return int(count) if told and not before else 0


def _is_unnamed(stands_for: Any, extra: Iterable[tuple[int, bytes]]) -> bool:
    """Whether a placeholder comes before the first position that `extra` names."""
    named = min((position for position, _ in extra), default=len(stands_for))
    return bool(stands_for[:named].any())


def _padding(given: Any, mask: Tensor | None) -> list[int]:
    """How many tokens on the left of each sequence are padding."""
    if mask is None:
        return [0] * len(given)
    seen: Any = torch.as_tensor(mask).cpu().numpy()
    if seen.shape != given.shape:
        raise BlockError(f"the attention mask is {seen.shape}, tokens are {given.shape}")
    padding = (seen == 0).sum(axis=1)
    if ((seen == 0).cumprod(axis=1).sum(axis=1) != padding).any():
        raise BlockError("the attention mask hides tokens that are not padding on the left")
    return padding.tolist()
