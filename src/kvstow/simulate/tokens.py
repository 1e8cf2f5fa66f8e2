"""Token ids for the requests of a trace that only says what they share.

The same name gives the same token ids, every time.
"""

from hashlib import blake2b

import numpy as np

from kvstow.blocks.prompt import Prompt, Tokens
from kvstow.simulate.trace import Request

VOCABULARY = 100_000


def prompt(number: int, request: Request, num_tokens: int) -> Prompt:
    """The first `num_tokens` tokens of request `number`, outputs included where it is longer
    than its prompt."""
    named = [_part(name, tokens) for name, tokens in request.prefixes]
    own = request.prompt_tokens - request.shared_tokens
    parts = [*named, _part(f"own {number}", own), output(number, request)]
    return Prompt.of(np.concatenate(parts)[:num_tokens])


def output(number: int, request: Request) -> Tokens:
    """The tokens that the request answers with."""
    return _part(request.output or f"output {number}", request.output_tokens)


def _part(name: str, num_tokens: int) -> Tokens:
    seed = int.from_bytes(blake2b(name.encode(), digest_size=8).digest())
    return np.random.default_rng(seed).integers(0, VOCABULARY, num_tokens, np.int32)
