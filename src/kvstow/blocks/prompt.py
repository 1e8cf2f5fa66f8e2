"""Prompt: the tokens of a request, and a hash of every prefix of them.

    hash at t  =  mix( root + Σ mix(token[i], i) for i < t )        modulo 2^64

So the hash at a position depends on everything before it and on nothing else: groups with
different tokens per block read the same sums at different places. `root` comes from the
salt. Content that the token ids do not tell (an image, an embedding) adds a term at the
position where it begins. Hashes find candidates; what is in a row is then confirmed token
by token (`Prompt.agrees`).
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from hashlib import blake2b
from operator import index

import numpy as np
import numpy.typing as npt

from kvstow.errors import SpecError

Tokens = npt.NDArray[np.int32]
Hashes = npt.NDArray[np.uint64]

Extra = tuple[tuple[int, bytes], ...]
"""Digests of content, each with the position of the first token that depends on it."""

_CHUNK = 1 << 13
_TOKEN = np.uint64(0x9E3779B97F4A7C15)
_FIRST = np.uint64(0xBF58476D1CE4E5B9)
_SECOND = np.uint64(0x94D049BB133111EB)
_SHIFTS = (np.uint64(32), np.uint64(29), np.uint64(32))


@dataclass(frozen=True, slots=True, eq=False)
class Prompt:
    """Token ids, a salt that keeps tenants apart, and digests of other content.

    Made by `Prompt.of`. Two prompts share rows only as far as their tokens and their extra
    content agree, and only if their salts do.
    """

    tokens: Tokens
    salt: bytes = b""
    extra: Extra = ()
    sums: Hashes = field(repr=False, default_factory=lambda: np.zeros(0, np.uint64))
    _by_block: dict[int, Hashes] = field(repr=False, init=False, default_factory=dict[int, Hashes])

    def __post_init__(self) -> None:
        if len(self.sums) != len(self.tokens):
            raise SpecError(
                f"a prompt of {len(self.tokens)} tokens with {len(self.sums)} hashes\n\n"
                "hint: Prompt.of(tokens) makes both"
            )

    @staticmethod
    def of(
        tokens: npt.ArrayLike, *, salt: bytes = b"", extra: Iterable[tuple[int, bytes]] = ()
    ) -> "Prompt":
        """A prompt, hashed.

        `extra` is for what the token ids do not tell: `(position, digest)` for each image,
        clip or embedding, with the first token that stands for it. A prompt that is given as
        embeddings has ids of 0 and `extra=[(0, digest of the embeddings)]`.
        """
        own = _own(tokens)
        if not isinstance(salt, bytes):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise SpecError(f"salt {salt!r} is {type(salt).__name__}\n\nhint: salt.encode()")
        content = _checked(extra, len(own))
        sums = _sums(own, 0, np.uint64(_word(salt)))
        for position, digest in content:
            sums[position:] += np.uint64(_word(digest, position))
        return Prompt(own, salt, content, sums)

    def __len__(self) -> int:
        return len(self.tokens)

    def extended(self, tokens: npt.ArrayLike) -> "Prompt":
        """The prompt with more tokens behind it; only those are hashed."""
        own = _own(tokens)
        base = self.sums[-1] if len(self) else np.uint64(_word(self.salt))
        return Prompt(
            np.concatenate((self.tokens, own)),
            self.salt,
            self.extra,
            np.concatenate((self.sums, _sums(own, len(self), base))),
        )

    def hashes(self, block_tokens: int) -> Hashes:
        """The hash at the end of each whole block; never 0."""
        hashes = self._by_block.get(block_tokens)
        if hashes is None:
            hashes = _finished(self.sums[block_tokens - 1 :: block_tokens].copy())
            self._by_block[block_tokens] = hashes
        return hashes

    def agrees(self, other: "Prompt", num_tokens: int) -> bool:
        """Whether the first `num_tokens` tokens of the other one are this one's too, and all else
        that their content depends on."""
        return (
            len(self.tokens) >= num_tokens
            and self.salt == other.salt
            and _before(self.extra, num_tokens) == _before(other.extra, num_tokens)
            and np.array_equal(self.tokens[:num_tokens], other.tokens[:num_tokens])
        )

    def hash_after(self, num_tokens: int) -> Hashes:
        """The hash of the first tokens, as an array of one."""
        return _finished(self.sums[num_tokens - 1 : num_tokens].copy())


def _before(extra: Extra, num_tokens: int) -> list[tuple[int, bytes]]:
    return [part for part in extra if part[0] < num_tokens]


def _own(tokens: npt.ArrayLike) -> Tokens:
    try:
        array = np.asarray(tokens)
    except ValueError as error:
        raise SpecError(f"token ids are not a list of whole numbers: {error}") from None
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        hint = "\n\nhint: a prompt is one sequence: tokens[0]" if array.ndim == 2 else ""
        raise SpecError(
            f"token ids are {array.dtype} {array.shape}, not a list of whole numbers{hint}"
        )
    if array.size and (array.min() < 0 or array.max() >= 1 << 31):
        raise SpecError(f"token ids {array.min()} … {array.max()} are not all in [0, 2^31)")
    return np.array(array, np.int32)


def _checked(extra: Iterable[tuple[int, bytes]], num_tokens: int) -> Extra:
    """Extra content, by position."""
    try:
        content = tuple((int(index(position)), digest) for position, digest in extra)
    except (TypeError, ValueError) as error:
        raise SpecError(f"extra content is not pairs of a position and a digest: {error}") from None
    for position, digest in content:
        if not 0 <= position < num_tokens:
            raise SpecError(
                f"extra content begins at token {position} of {num_tokens}\n\n"
                "hint: name the first of the tokens that stand for it"
            )
        if not isinstance(digest, bytes) or not digest:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise SpecError(
                f"extra content at token {position} has the digest {digest!r}\n\n"
                "hint: give the bytes of a digest, such as hashlib.blake2b(content).digest()"
            )
    return tuple(sorted(content))


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
