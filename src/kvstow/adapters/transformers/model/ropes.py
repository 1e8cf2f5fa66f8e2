# pyright: reportMissingTypeArgument=false, reportUnknownArgumentType=false
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
"""Ropes that follow a sequence's length: which rows of such a model serve which prompts.

LongRoPE turns the keys of a pass by one angle where the pass ends at most at the length that the
model was first trained for, and by another one where it ends behind that. Dynamic NTK turns
them by one angle up to that length, and behind it by one that depends on the longest sequence so
far. So the rows of a prompt are of the *short* kind if every pass over it ends within that
length, of the *long* kind if every pass ends behind it, and otherwise of no kind. A prompt's
length says which kind it needs, since a prompt is computed in one pass unless somebody wants
chunks. Long rows have names of their own; those of dynamic NTK are not kept.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from kvstow.blocks.prompt import Prompt

LONG = b"long rope"


@dataclass(frozen=True, slots=True)
class LengthRope:
    """The rope of passes that end after at most `short_tokens` tokens, and another one behind."""

    short_tokens: int
    has_one_long: bool
    """Whether all longer passes have the same rope."""

    def is_long(self, num_tokens: int) -> bool:
        return num_tokens > self.short_tokens

    def named(self, prompt: Prompt) -> Prompt | None:
        """The prompt, in the name of the kind of rows that it needs; None where none serve it."""
        if not self.is_long(len(prompt)):
            return prompt
        if not self.has_one_long:
            return None
        return Prompt.of(prompt.tokens, salt=prompt.salt + LONG, extra=prompt.extra)


def length_ropes(model: PreTrainedModel) -> set[LengthRope | None]:
    """The ropes of the model that follow the length; None among them where their rule is not
    known: only transformers' own modules are known."""
    return {rope for module in model.modules() for rope in _ropes(module)}


def _ropes(module: torch.nn.Module) -> Iterator[LengthRope | None]:
    kinds: Any = getattr(module, "rope_type", None)
    config: Any = getattr(module, "config", None)
    settings: Any = getattr(config, "rope_parameters", None)
    if not isinstance(settings, Mapping):
        return
    by_layer = kinds.items() if isinstance(kinds, Mapping) else [(None, kinds)]
    for layer, kind in by_layer:
        own = type(module).__module__.startswith("transformers.models.")
        rope: Any = settings if layer is None else settings.get(layer, {})
        if kind == "longrope":
            most = rope.get("original_max_position_embeddings")
            yield LengthRope(int(most), True) if own and most else None
        elif "dynamic" in str(kind):
            most = getattr(module, "original_max_seq_len", None)
            yield LengthRope(int(most) - 1, False) if own and most else None


class RopeKind:
    """Whether the rows of one batch are of the kind that its prompts are named by."""

    def __init__(self, rope: LengthRope | None) -> None:
        self._rope = rope
        self.begin(0)

    def begin(self, num_tokens: int) -> None:
        """Prompts of so many tokens begin."""
        self._is_long = self._rope is not None and self._rope.is_long(num_tokens)
        self._other_from: int | None = None

    def has(self, end: int) -> bool:
        """Whether a pass that ends after so many tokens makes rows of this kind."""
        return self._rope is None or self._rope.is_long(end) == self._is_long

    def leave(self, start: int) -> None:
        """Tokens from `start` on have rows of another kind."""
        self._other_from = start if self._other_from is None else min(start, self._other_from)

    def crop(self, num_tokens: int) -> None:
        """Tokens from `num_tokens` on were taken back."""
        if self._other_from is not None and num_tokens <= self._other_from:
            self._other_from = None

    def of(self, num_tokens: int) -> int:
        """How many of the first tokens have rows of this kind."""
        return num_tokens if self._other_from is None else min(num_tokens, self._other_from)
