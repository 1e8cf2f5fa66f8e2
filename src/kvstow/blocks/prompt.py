"""Prompt: the tokens of a request, and a hash of every prefix of them.

    hash at t  =  mix( root + Σ mix(token[i], i) for i < t )        modulo 2^64

So the hash at a position depends on everything before it and on nothing else: groups with
different tokens per block read the same sums at different places. `root` comes from the
salt; an input that is not a token (an image, an adapter) adds a term where it begins.
Hashes find candidates; what is in a row is then confirmed token by token (`Witness`).
"""

from dataclasses import dataclass, field
from functools import lru_cache
from hashlib import blake2b

import numpy as np
import numpy.typing as npt

from kvstow.errors import SpecError

Tokens = npt.NDArray[np.int32]
Hashes = npt.NDArray[np.uint64]

_CHUNK = 1 << 13
_TOKEN = np.uint64(0x9E3779B97F4A7C15)
_FIRST = np.uint64(0xBF58476D1CE4E5B9)
_SECOND = np.uint64(0x94D049BB133111EB)
_SHIFTS = (np.uint64(32), np.uint64(29), np.uint64(32))


@dataclass(frozen=True, slots=True, eq=False)
class Prompt:
    """Token ids, the salt they are kept apart by, and other inputs by position.

    Made by `Prompt.of`. Prompts of different salts never share rows. `inputs` are digests
    of what stands behind placeholder tokens, with the position of the first such token.
    """

    tokens: Tokens
    salt: bytes = b""
    inputs: tuple[tuple[int, bytes], ...] = ()
    sums: Hashes = field(repr=False, default_factory=lambda: np.zeros(0, np.uint64))
    _by_block: dict[int, Hashes] = field(repr=False, init=False, default_factory=dict[int, Hashes])

    @staticmethod
    def of(
        tokens: npt.ArrayLike, *, salt: bytes = b"", inputs: tuple[tuple[int, bytes], ...] = ()
    ) -> "Prompt":
        """A prompt, hashed."""
        own = _own(tokens)
        for position, _ in inputs:
            if not 0 <= position < len(own):
                raise SpecError(f"an input begins at token {position} of {len(own)}")
        sums = _sums(own, 0, np.uint64(_word(salt)))
        for position, digest in inputs:
            sums[position:] += np.uint64(_word(digest, position))
        return Prompt(own, salt, inputs, sums)

    def __len__(self) -> int:
        return len(self.tokens)

    def extended(self, tokens: npt.ArrayLike) -> "Prompt":
        """The prompt with more tokens behind it; only those are hashed."""
        own = _own(tokens)
        base = self.sums[-1] if len(self) else np.uint64(_word(self.salt))
        return Prompt(
            np.concatenate((self.tokens, own)),
            self.salt,
            self.inputs,
            np.concatenate((self.sums, _sums(own, len(self), base))),
        )

    def hashes(self, block_tokens: int) -> Hashes:
        """The hash at the end of each whole block; never 0."""
        found = self._by_block.get(block_tokens)
        if found is None:
            found = _finished(self.sums[block_tokens - 1 :: block_tokens].copy())
            self._by_block[block_tokens] = found
        return found

    def hash_after(self, num_tokens: int) -> Hashes:
        """The hash of the first tokens, as an array of one."""
        return _finished(self.sums[num_tokens - 1 : num_tokens].copy())


def _own(tokens: npt.ArrayLike) -> Tokens:
    given = np.asarray(tokens)
    if given.ndim != 1 or (given.size and given.dtype.kind not in "iu"):
        raise SpecError(f"token ids are {given.dtype} {given.shape}, not a list of whole numbers")
    if given.size and (given.min() < 0 or given.max() >= 1 << 31):
        raise SpecError(f"token ids {given.min()} … {given.max()} are not all in [0, 2^31)")
    return np.array(given, np.int32)


def _word(data: bytes, position: int = -1) -> int:
    """64 bits of a digest of the bytes and the position they stand at."""
    place = position.to_bytes(8, "little", signed=True)
    return int.from_bytes(blake2b(place + data, digest_size=8).digest(), "little")


@lru_cache(maxsize=64)
def _positions(start: int) -> Hashes:
    return (np.arange(start, start + _CHUNK, dtype=np.uint64) + np.uint64(1)) * _SECOND


def _sums(tokens: Tokens, start: int, base: np.uint64) -> Hashes:
    """Running sums of the mixed tokens, which stand at `start` and later."""
    sums = np.empty(len(tokens), np.uint64)
    space = np.empty(_CHUNK, np.uint64)
    lo = 0
    while lo < len(tokens):
        chunk, within = divmod(start + lo, _CHUNK)
        hi = min(len(tokens), lo + _CHUNK - within)
        words = sums[lo:hi]
        words[:] = tokens[lo:hi]
        words *= _TOKEN
        words += _positions(chunk * _CHUNK)[within : within + hi - lo]
        _mix(words, space[: hi - lo])
        words[:1] += base
        np.cumsum(words, out=words)
        base = words[-1]
        lo = hi
    return sums


def _finished(sums: Hashes) -> Hashes:
    _mix(sums, np.empty_like(sums))
    sums[sums == 0] = 1
    return sums


def _mix(words: Hashes, space: Hashes) -> None:
    """Mix every word in place: each bit of the input reaches every bit of the output."""
    for shift, factor in zip(_SHIFTS, (_FIRST, _SECOND, None), strict=True):
        np.right_shift(words, shift, out=space)
        np.bitwise_xor(words, space, out=words)
        if factor is not None:
            np.multiply(words, factor, out=words)
