"""Wording: token ids for the prompts of a trace that only says what they share."""

from hashlib import blake2b

import numpy as np

from kvstow.blocks.prompt import Prompt, Tokens
from kvstow.blocks.simulate.trace import Request

VOCABULARY = 100_000


class Wording:
    """The same name and number of tokens give the same token ids, every time."""

    def __init__(self) -> None:
        self._number = 0

    def prompt(self, request: Request, num_tokens: int) -> Prompt:
        """A prompt of `num_tokens` tokens that begins as the request says."""
        parts = [_part(name, tokens) for name, tokens in request.prefixes]
        rest = num_tokens - request.shared_tokens
        if rest:
            parts.append(_part(f"own {self._number}", rest))
            self._number += 1
        return Prompt.of(np.concatenate(parts))


def _part(name: str, num_tokens: int) -> Tokens:
    seed = int.from_bytes(blake2b(f"{name}/{num_tokens}".encode(), digest_size=8).digest())
    return np.random.default_rng(seed).integers(0, VOCABULARY, num_tokens, np.int32)
