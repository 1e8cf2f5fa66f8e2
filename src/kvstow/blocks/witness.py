"""Witness: the tokens whose content some rows hold, so that a hit can be confirmed.

A prompt that continues another one keeps only what it adds to it.
"""

from dataclasses import dataclass

import numpy as np

from kvstow.blocks.prompt import Prompt, Tokens

MAX_DEPTH = 8
"""A longer line of witnesses is written out, so that confirming stays a few comparisons."""


@dataclass(frozen=True, slots=True, eq=False)
class Witness:
    """`tokens` from `start` on; what comes before is the parent's."""

    parent: "Witness | None"
    start: int
    tokens: Tokens
    salt: bytes
    inputs: tuple[tuple[int, bytes], ...]
    depth: int

    @staticmethod
    def of(prompt: Prompt, parent: "Witness | None" = None, start: int = 0) -> "Witness":
        """A witness of the prompt, the first `start` tokens of which the parent confirms."""
        if parent is None or parent.depth >= MAX_DEPTH:
            parent, start = None, 0
        depth = 0 if parent is None else parent.depth + 1
        tokens = prompt.tokens[start:].copy() if start else prompt.tokens
        return Witness(parent, start, tokens, prompt.salt, prompt.inputs, depth)

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)

    def confirms(self, prompt: Prompt, num_tokens: int) -> bool:
        """Whether the first `num_tokens` tokens of the prompt, and all else that their
        content depends on, are what it says."""
        if self.end < num_tokens or len(prompt) < num_tokens or self.salt != prompt.salt:
            return False
        if (self.inputs or prompt.inputs) and (
            [i for i in self.inputs if i[0] < num_tokens]
            != [i for i in prompt.inputs if i[0] < num_tokens]
        ):
            return False
        witness, upto = self, num_tokens
        while True:
            lo = witness.start
            if lo < upto:
                if np.count_nonzero(witness.tokens[: upto - lo] != prompt.tokens[lo:upto]):
                    return False
                upto = lo
            if witness.parent is None:
                return True
            witness = witness.parent
