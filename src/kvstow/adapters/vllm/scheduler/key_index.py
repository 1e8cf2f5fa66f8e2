"""Which rows the tiers of all ranks keep, as far as they have told; keys of requests.

The workers own the tiers. Each tells in its step's results which rows have come and gone, and the
scheduler's side answers the engine's look-ups from that, without asking.
"""

from collections.abc import Iterable, Sequence
from enum import IntEnum
from hashlib import blake2b
from itertools import repeat
from math import gcd
from struct import pack

import numpy as np
import numpy.typing as npt

from kvstow.adapters.vllm.protocol import EngineRequest, KeyLevels
from kvstow.offload.keys import KEY_BYTES, KeyChain
from kvstow.plan.identity import Identity

Levels = npt.NDArray[np.uint8]


class Level(IntEnum):
    """Where a row is kept; the higher, the nearer."""

    GONE = 0
    BELOW = 1
    """On disk. Other processes write there, too: the workers are asked before it counts."""
    HOST = 2


class KeyIndex:
    """Levels by rank, group and key."""

    def __init__(self, num_groups: int) -> None:
        self._num_groups = num_groups
        self._ranks: dict[str, tuple[dict[bytes, int], ...]] = {}

    def expect(self, ranks: Iterable[str]) -> None:
        """These ranks have tiers: a row counts when all of them have told of it."""
        for rank in ranks:
            self._ranks.setdefault(rank, tuple({} for _ in range(self._num_groups)))

    def update(self, rank: str, levels: KeyLevels) -> None:
        """A rank has told what has changed."""
        self.expect([rank])
        for group, (keys, each) in levels.items():
            levels_of = self._ranks[rank][group]
            levels_of.update(zip(keys, each, strict=True))
            for key, level in zip(keys, each, strict=True):
                if level == Level.GONE:
                    levels_of.pop(key, None)

    def levels(self, group: int, keys: Sequence[bytes]) -> Levels:
        """The level at which every rank has the row, key by key."""
        least = np.full(len(keys), Level.HOST if self._ranks else Level.GONE, np.uint8)
        for groups in self._ranks.values():
            here = map(groups[group].get, keys, repeat(0))
            np.minimum(least, np.fromiter(here, np.uint8, len(keys)), out=least)
        return least

    def has(self, group: int, key: bytes) -> bool:
        """Whether every rank has the row somewhere."""
        return bool(self._ranks) and all(key in groups[group] for groups in self._ranks.values())


class RequestKeys:
    """The keys of a request's whole blocks, by tokens per block, as far as they were asked for.

    The request's tokens may grow meanwhile. A draft model's row at a token is made of the `ahead`
    tokens after it, too: then a block's key covers those, and it has one when they are there.
    """

    def __init__(
        self, identity: Identity, request: EngineRequest, sizes: Iterable[int], *, ahead: int = 0
    ) -> None:
        self.identity = identity
        self._ahead = ahead
        own = identity.for_request(adapter=request.adapter, salt=request.salt)
        self._chain = KeyChain(own, extra=request.extra)
        self._tokens = request.tokens
        self._by_size: dict[int, list[bytes]] = {size: [] for size in sorted(set(sizes))}
        self._step = gcd(*self._by_size)

    def of(self, block_tokens: int, num_tokens: int, first: int = 0) -> list[bytes]:
        """The keys of the whole blocks of that size among the first tokens, from block `first`
        on."""
        self._grow(num_tokens)
        return self._by_size[block_tokens][first : num_tokens // block_tokens]

    def _grow(self, num_tokens: int) -> None:
        at, step = self._chain.num_tokens, self._step
        end = num_tokens // step * step
        if end <= at:
            return
        new = memoryview(pack(f"<{end - at}i", *self._tokens[at:end]))
        for low in range(0, end - at, step):
            key = self._chain.grow(new[4 * low : 4 * (low + step)])
            if self._ahead:
                key = _with_next(key, self._tokens[at + low + step :][: self._ahead])
            for size, keys in self._by_size.items():
                if (at + low + step) % size == 0:
                    keys.append(key)


def _with_next(key: bytes, tokens: Sequence[int]) -> bytes:
    """The key of a block whose rows are also made of the tokens behind it."""
    hashed = blake2b(key, digest_size=KEY_BYTES, person=b"kvstow ahead")
    hashed.update(pack(f"<{len(tokens)}i", *tokens))
    return hashed.digest()
