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

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b

import numpy as np

from kvstow.blocks.prompt import Prompt
from kvstow.errors import StoreError
from kvstow.offload.disk.format import ChainLink
from kvstow.plan.group import Group
from kvstow.plan.identity import Identity
from kvstow.plan.layout import Layout
from kvstow.plan.retention import Bools, Encoder, State, longest_prefix, seen_blocks
from kvstow.plan.view import Ints
from kvstow.route.blocks import Blocks

KEY_BYTES = 32
_PERSON = b"kvstow block 2"
_EXTRA = b"\xff\xff\xff\xff"


def block_keys(identity: Identity, prompt: Prompt, block_tokens: int) -> list[bytes]:
    """The key of every whole block of the prompt, 32 bytes each.

    `identity` is that of the computation. A request with an adapter or a tenant's salt of its
    own takes `identity.for_request(adapter=…, salt=…)`. Images, embeddings and other content
    that token ids do not identify go into `Prompt.of(tokens, extra=…)`.
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
    keys, num_tokens = list[bytes](), len(prompt)
    for end in ends:
        at = chain.num_tokens
        if not at <= end <= num_tokens:
            raise StoreError(f"no key after {end} of {num_tokens} tokens, behind {at}")
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


# ── all keys of a prompt ──────────────────────────────────────────────────────────────────


class PromptKeys:
    """The keys of one prompt wherever a block of one of some sizes ends, and at its own end.

    A key is a hash, so a store cannot tell from the key of a block which blocks of another size
    have the same tokens. Whoever knows the prompt can.
    """

    def __init__(self, identity: Identity, prompt: Prompt, sizes: Iterable[int]) -> None:
        self.num_tokens = len(prompt)
        ends = {size: range(size, len(prompt) + 1, size) for size in sizes}
        ordered = sorted({len(prompt)}.union(*ends.values()) - {0})
        self._keys = dict(zip(ordered, keys_at(identity, prompt, ordered), strict=True))
        self._blocks = {size: [self._keys[end] for end in each] for size, each in ends.items()}

    def key_at(self, end: int) -> bytes | None:
        """The key of the first `end` tokens, if a block of one of the sizes ends there."""
        return self._keys.get(end)

    def of_blocks(self, size: int) -> list[bytes]:
        """The keys of all whole blocks of one of the sizes."""
        return self._blocks[size]

    @cached_property
    def _ends(self) -> dict[bytes, int]:
        return {key: end for end, key in self._keys.items()}

    def end_of(self, key: bytes) -> int | None:
        """How many tokens a key names; None for a key of another prompt."""
        return self._ends.get(key)


# ── the rows of a prompt ──────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True, eq=False)
class Keyed:
    """Logical block `index[i]` of a request has key `keys[i]` in one group."""

    keys: Sequence[bytes]
    index: Ints


class PromptRows:
    """The rows that a prompt has in the groups of a layout, and their keys, each made once."""

    def __init__(self, layout: Layout, identity: Identity, prompt: Prompt) -> None:
        self._num_tokens = len(prompt)
        self.groups = tokenwise_groups(layout)
        self.keys = PromptKeys(identity, prompt, {group.block_tokens for _, group in self.groups})

    def seen(self, num_tokens: int) -> dict[int, Keyed]:
        """The blocks of each group that the token at `num_tokens` sees, with their keys.

        A block that `num_tokens` ends in the middle of has the key of just these tokens. So has a
        recurrent state, whose index is that of the block it ends in.
        """
        blocks: dict[int, Keyed] = {}
        for g, group in self.groups:
            seen = seen_blocks(group.retention, num_tokens, group.block_tokens)
            keys, index = self.keys.of_blocks(group.block_tokens)[seen.start : seen.stop], [*seen]
            if num_tokens % group.block_tokens:
                last = self.keys.key_at(num_tokens)
                assert last is not None, f"no prefix of {num_tokens} tokens was found"
                is_state = isinstance(group.retention, State)
                keys = [*([] if is_state else keys), last]
                index = [*([] if is_state else index), num_tokens // group.block_tokens]
            blocks[g] = Keyed(keys, np.array(index, np.int64))
        return blocks

    def longest(
        self,
        most: int,
        contains: Callable[[int, Sequence[bytes]], Bools],
        into: Mapping[int, Blocks] | None = None,
    ) -> int:
        """The longest beginning, at most `most` tokens, whose rows a store `contains`, and for
        which blocks are listed where there are any: all of the prompt, or whole blocks of every
        group."""
        if most >= self._num_tokens and self._has_all(contains, into):
            return self._num_tokens
        groups = dict(self.groups)

        def holds(g: int, num_blocks: int) -> Bools:
            group = groups[g]
            there = contains(g, self.keys.of_blocks(group.block_tokens)[:num_blocks])
            if into is not None and not isinstance(group.retention, State):
                there &= np.isin(np.arange(num_blocks), into[g].index)
            return there

        return longest_prefix(self.groups, min(most, self._num_tokens), holds)

    def _has_all(
        self,
        contains: Callable[[int, Sequence[bytes]], Bools],
        into: Mapping[int, Blocks] | None,
    ) -> bool:
        """Whether a prompt that ends inside a block is kept as a whole."""
        end = self._num_tokens
        if all(end % group.block_tokens == 0 for _, group in self.groups):
            return False  # the prefix law sees it all
        for g, keyed in self.seen(end).items():
            is_state = isinstance(dict(self.groups)[g].retention, State)
            if into is not None and not is_state and not np.isin(keyed.index, into[g].index).all():
                return False
            if not contains(g, keyed.keys).all():
                return False
        return True


def tokenwise_groups(layout: Layout) -> list[tuple[int, Group]]:
    """Groups whose rows belong to tokens of the prompt; an encoding is made anew."""
    return [
        (g, rows.group)
        for g, rows in enumerate(layout.groups)
        if not isinstance(rows.group.retention, Encoder)
    ]
