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


def check_continues(
    tokens: torch.Tensor, prompts: Sequence[Prompt], known: int, num_tokens: int
) -> None:
    """Refuses tokens that cannot be those of the sequences: fewer than the `num_tokens` that they
    hold, or not beginning with the `known` tokens of their prompts."""
    if tokens.ndim != 2 or len(tokens) != len(prompts):
        raise BlockError(f"{len(prompts)} sequences, tokens are {tuple(tokens.shape)}")
    if tokens.shape[1] < num_tokens:
        raise BlockError(
            f"{tokens.shape[1]} tokens are told of sequences that hold {num_tokens}\n\n"
            "hint: give the prompt and the answer, as generate returns them"
        )
    begun = tokens[:, :known].cpu().numpy()
    if any((row != p.tokens[: len(row)]).any() for row, p in zip(begun, prompts, strict=True)):
        raise BlockError(
            "the tokens do not begin like those that the cache was made for\n\n"
            "hint: give the prompt and the answer, as generate returns them"
        )


class HeardTokens:
    """The tokens that a model was given, pass by pass; None where it was given embeddings."""

    def __init__(self) -> None:
        self._passes: list[tuple[int, Tensor | None]] = []

    def hear(self, start: int, ids: Tensor | None) -> None:
        """A pass computes these tokens from `start` on."""
        self._passes.append((start, ids))

    def rearrange(self, origins: Sequence[int]) -> None:
        """Sequence `i` becomes what sequence `origins[i]` was."""
        rows = list(origins)
        self._passes = [(at, None if ids is None else ids[rows]) for at, ids in self._passes]

    def check(self, tokens: Tensor, known: int, num_tokens: int) -> None:
        """Refuses tokens that are not those that the model was given behind the known ones.

        Of what was given for one place several times, as after `crop`, the last counts.
        """
        if not self._passes:
            return
        given = torch.full((len(tokens), max(0, num_tokens - known)), -1)
        for start, ids in self._passes:
            first, skipped = max(0, start - known), max(0, known - start)
            part = given[:, first:] * 0 - 1 if ids is None else ids[:, skipped:].cpu()
            room = given[:, first:][:, : part.shape[1]]
            room.copy_(part[:, : room.shape[1]])
        if not torch.equal(given, tokens[:, known:num_tokens].cpu().to(given.dtype)):
            raise BlockError(
                f"tokens from {known} on are not those that the model was given\n\n"
                "hint: give the prompt and the answer, as generate returns them"
            )
