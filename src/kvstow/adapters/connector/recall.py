"""Prefixes that come back: which blocks are kept outside the engine, under which keys.

    key of block k  =  hash( key of block k - 1 │ the block's tokens )        first: salt

so a key names a block's content and everything before it. Whether rows are still there only
the workers know: the scheduler's side asks them, and answers "later" to the engine meanwhile.
"""

from collections.abc import Mapping, Sequence
from hashlib import blake2b
from math import lcm

import numpy as np

from kvstow.adapters.connector.messages import Found, Ids, Keyed, Lookup, Restore, Store
from kvstow.blocks.prefix import blocks_seen, served
from kvstow.plan.group import Group

KEY_BYTES = 32


def block_keys(tokens: Sequence[int], block_tokens: int, salt: bytes) -> tuple[bytes, ...]:
    """The key of every whole block."""
    data = np.asarray(tokens, "<i8").tobytes()
    size = block_tokens * 8
    key = blake2b(salt, digest_size=KEY_BYTES, key=b"kvstow block").digest()
    keys: list[bytes] = []
    for start in range(0, len(data) - size + 1, size):
        key = blake2b(key + data[start : start + size], digest_size=KEY_BYTES).digest()
        keys.append(key)
    return tuple(keys)


class Recall:
    """What is asked, known and planned for requests that may find their beginning again."""

    def __init__(self, groups: Sequence[Group], root: bytes) -> None:
        self._groups = tuple(groups)
        self._root = root
        self._unit = lcm(*(group.block_tokens for group in groups))
        self._asked: dict[str, tuple[tuple[bytes, ...], ...]] = {}
        self._length: dict[str, int] = {}

    # ── coming back ───────────────────────────────────────────────────────────────

    def ask(self, request: str, tokens: Sequence[int], salt: bytes) -> Lookup | None:
        """What to ask the workers for a new request; None where it has no whole block to
        spare (the last token is always computed anew)."""
        limit = (len(tokens) - 1) // self._unit * self._unit
        if limit == 0:
            return None
        keys = self._keys(tokens[:limit], salt)
        self._asked[request] = keys
        return Lookup(request=request, keys=keys)

    def answer(self, found: Found) -> None:
        """Which rows are there: the longest beginning that every group can serve."""
        keys = self._asked.get(found.request)
        if keys is None:
            return
        lengths = np.arange(0, len(keys[0]) * self._groups[0].block_tokens + 1, self._unit)
        for group, present in zip(self._groups, found.present, strict=True):
            lengths = lengths[served(group, np.asarray(present, np.bool_), lengths)]
        self._length[found.request] = int(lengths.max(initial=0))

    def matched(self, request: str, num_computed: int) -> int | None:
        """Tokens beyond `num_computed` that can be brought back; None while it is not known."""
        if request not in self._asked:
            return 0
        if request not in self._length:
            return None
        return max(0, self._length[request] - num_computed)

    def taken(self, request: str, ids: Ids, num_external: int) -> Restore:
        """The engine has given blocks for `num_external` tokens: what to bring where."""
        keys, length = self._asked[request], self._length[request]
        self.forget(request)
        rows: dict[int, Keyed] = {}
        for g, group in enumerate(self._groups):
            wanted = blocks_seen(group, length)
            first = (length - num_external) // group.block_tokens
            places = [int(k) for k in wanted if k >= first and ids[g][k] > 0]
            rows[g] = tuple(keys[g][k] for k in places), tuple(ids[g][k] for k in places)
        return Restore(request=request, rows=rows, num_tokens=num_external)

    def forget(self, request: str) -> None:
        """Whatever was asked for this request is no longer of interest."""
        self._asked.pop(request, None)
        self._length.pop(request, None)

    # ── going out ─────────────────────────────────────────────────────────────────

    def store(self, request: str, tokens: Sequence[int], salt: bytes, ids: Ids) -> Store | None:
        """What to keep of a finished request: its whole blocks, as far as it holds them."""
        rows: dict[int, Keyed] = {}
        for g, keys in enumerate(self._keys(tokens, salt)):
            places = [k for k, id in enumerate(ids[g][: len(keys)]) if id > 0]
            rows[g] = tuple(keys[k] for k in places), tuple(ids[g][k] for k in places)
        if not any(keys for keys, _ in rows.values()):
            return None
        return Store(request=request, rows=rows)

    def _keys(self, tokens: Sequence[int], salt: bytes) -> tuple[tuple[bytes, ...], ...]:
        by_size: Mapping[int, tuple[bytes, ...]] = {
            size: block_keys(tokens, size, self._root + salt)
            for size in {group.block_tokens for group in self._groups}
        }
        return tuple(by_size[group.block_tokens] for group in self._groups)
