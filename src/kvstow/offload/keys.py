"""Block keys: the one name of a row, wherever it is kept.

    key at t  =  BLAKE2b-256( identity, salt, then token by token 4 bytes each;
                              before a token at which other content begins: ff ff ff ff,
                              len(digest) as 8 bytes, digest )          all little endian

    identity  =  Identity.digest, 32 bytes: model, weights, configuration, cache dtype, page
                 interior, tokenizer, adapter and salt of the computation
    salt      =  len(Prompt.salt) as 8 bytes, Prompt.salt

A key names everything that a row's bytes depend on: which computation, and all of its input up to
the end of the block. It does not depend on the block size: blocks of 64 tokens have the keys of
every fourth block of 16. The pool's own hashes are 64 bits wide and confirmed token by token;
a store has no tokens to compare, so its keys are wide enough not to need them.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np

from kvstow.blocks.prompt import Prompt
from kvstow.errors import StoreError
from kvstow.offload.disk.format import ChainLink
from kvstow.plan.group import Group
from kvstow.plan.identity import Identity
from kvstow.plan.layout import Layout
from kvstow.plan.retention import Encoder, State, seen_blocks
from kvstow.plan.view import Ints

KEY_BYTES = 32
_PERSON = b"kvstow block 2"
_EXTRA = b"\xff\xff\xff\xff"


def block_keys(identity: Identity, prompt: Prompt, block_tokens: int) -> list[bytes]:
    """The key of every whole block of the prompt, 32 bytes each.

    `identity` is that of the computation. A request with an adapter or a tenant's salt of its
    own takes `identity.for_request(adapter=…, salt=…)`. Images, embeddings and other content
    that the token ids do not tell come in `Prompt.of(tokens, extra=…)`.
    """
    if block_tokens < 1:
        raise StoreError(f"no block has {block_tokens} tokens")
    return keys_at(identity, prompt, range(block_tokens, len(prompt) + 1, block_tokens))


def keys_at(identity: Identity, prompt: Prompt, ends: Iterable[int]) -> list[bytes]:
    """The keys of what the first `end` tokens have made, for ascending ends.

    For recurrent states, which may be kept at any length. `block_keys` for blocks.
    """
    if not isinstance(prompt, Prompt):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise StoreError(f"a prompt is {type(prompt).__name__}\n\nhint: kvstow.Prompt.of(tokens)")
    chain = KeyChain(identity, salt=prompt.salt, extra=prompt.extra)
    tokens = memoryview(prompt.tokens.astype("<i4").tobytes())
    keys = list[bytes]()
    for end in ends:
        at = chain.num_tokens
        if not at <= end <= len(prompt):
            raise StoreError(f"no key after {end} of {len(prompt)} tokens, behind {at}")
        keys.append(chain.grow(tokens[4 * at : 4 * end]))
    return keys


class KeyChain:
    """Keys of a prompt that grows: tokens that were hashed are not hashed again."""

    def __init__(
        self, identity: Identity, *, salt: bytes = b"", extra: Iterable[tuple[int, bytes]] = ()
    ) -> None:
        self._state = blake2b(identity.digest + _sized(salt), digest_size=KEY_BYTES, person=_PERSON)
        self._extra = sorted(extra, reverse=True)
        self.num_tokens = 0

    def grow(self, tokens: bytes | memoryview) -> bytes:
        """Append tokens, 4 bytes each, little endian; the key of all so far."""
        first = at = self.num_tokens
        end = first + len(tokens) // 4
        while self._extra and self._extra[-1][0] < end:
            position, digest = self._extra.pop()
            self._state.update(tokens[4 * (at - first) : 4 * (position - first)])
            self._state.update(_EXTRA + _sized(digest))
            at = position
        self._state.update(tokens[4 * (at - first) :])
        self.num_tokens = end
        return self._state.copy().digest()


def links(keys: Sequence[bytes]) -> list[ChainLink]:
    """Where the blocks with these keys, a request's from the first on, stand."""
    return [ChainLink(i, keys[i - 1] if i else b"") for i in range(len(keys))]


def _sized(data: bytes) -> bytes:
    return len(data).to_bytes(8, "little") + data


# ── which rows a prompt needs ─────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True, eq=False)
class Keyed:
    """Logical block `index[i]` of a request has key `keys[i]` in one group."""

    keys: tuple[bytes, ...]
    index: Ints


def wanted(identity: Identity, prompt: Prompt, layout: Layout, num_tokens: int) -> dict[int, Keyed]:
    """The blocks of each group that the token at `num_tokens` sees, with their keys.

    A block that `num_tokens` ends in the middle of has the key of just these tokens. So has a
    recurrent state, whose index is that of the block it ends in.
    """
    blocks: dict[int, Keyed] = {}
    for g, group in tokenwise_groups(layout):
        keys = block_keys(identity, prompt, group.block_tokens)
        sinks, rest = seen_blocks(group.retention, num_tokens, group.block_tokens)
        index = [*sinks, *rest]
        chosen = [keys[i] for i in index]
        if num_tokens % group.block_tokens:
            recurrent = isinstance(group.retention, State)
            end = num_tokens // group.block_tokens
            index = [end] if recurrent else [*index, end]
            last = keys_at(identity, prompt, [num_tokens])
            chosen = last if recurrent else [*chosen, *last]
        blocks[g] = Keyed(tuple(chosen), np.array(index, np.int64))
    return blocks


def tokenwise_groups(layout: Layout) -> list[tuple[int, Group]]:
    """Groups whose rows belong to tokens of the prompt; an encoding is made anew."""
    return [
        (g, rows.group)
        for g, rows in enumerate(layout.groups)
        if not isinstance(rows.group.retention, Encoder)
    ]


# ── keys at every block end ───────────────────────────────────────────────────────────


class PromptKeys:
    """The keys of one prompt by the token that they end at.

    A key is a hash, so a store cannot tell from the key of a block which blocks of another size
    have the same tokens. Whoever knows the prompt can.
    """

    def __init__(self, identity: Identity, prompt: Prompt, sizes: Iterable[int]) -> None:
        self.num_tokens = len(prompt)
        ends = {end for size in sizes for end in range(size, len(prompt) + 1, size)}
        ordered = sorted(ends | {len(prompt)}) if len(prompt) else []
        self._keys = dict(zip(ordered, keys_at(identity, prompt, ordered), strict=True))
        self._ends = {key: end for end, key in self._keys.items()}

    @property
    def keys(self) -> Iterable[bytes]:
        """All keys, by their ends."""
        return self._keys.values()

    def key_at(self, end: int) -> bytes | None:
        """The key of the first `end` tokens, if a block of one of the sizes ends there."""
        return self._keys.get(end)

    def end_of(self, key: bytes) -> int | None:
        """How many tokens a key names; None for a key of another prompt."""
        return self._ends.get(key)
