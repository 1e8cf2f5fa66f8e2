"""Byte chunks of other engines' caches, kept in stores on disk.

An engine that cuts its cache into chunks of its own calls each by a name, and gives it as bytes.
A chunk becomes a row of a store of rows of that size; its key is

    BLAKE2b-256( identity of the computation, name )

so that chunks of another computation are never found, whatever the engine's names leave out.
"""

from collections import defaultdict
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path
from threading import Lock

import numpy as np

from kvstow.errors import StoreError
from kvstow.offload.disk.tier import DiskTier
from kvstow.offload.tier import Bools, Bytes
from kvstow.plan.group import grouped
from kvstow.plan.identity import Identity
from kvstow.plan.layout import Layout
from kvstow.plan.pack import packed
from kvstow.plan.retention import Full
from kvstow.plan.spec import DType, Extent, Field, LayerSpec

MOST_SIZES = 16
ALIGN = 16


class ChunkStore:
    """Chunks by name in a directory, at most `capacity` bytes for each size of chunk.

    Used from several threads. A chunk that is damaged on disk is a miss.
    """

    def __init__(self, directory: str | Path, *, capacity: int, identity: Identity) -> None:
        self._directory = Path(directory)
        self._capacity = capacity
        self._identity = identity
        self._lock = Lock()
        self._tiers: dict[int, DiskTier] = {}
        for folder in sorted(self._directory.glob("bytes-*")):
            size = folder.name.removeprefix("bytes-")
            if size.isdigit():
                self._tier(int(size))

    def contains(self, names: Sequence[bytes]) -> Bools:
        """Which chunks are there, of whatever size."""
        keys = [self._key(name) for name in names]
        found = np.zeros(len(keys), bool)
        with self._lock:
            tiers = tuple(self._tiers.values())
        for tier in tiers:
            found |= tier.contains(0, keys)
        return found

    def store(self, names: Sequence[bytes], chunks: Sequence[Bytes]) -> Bools:
        """Keep chunks; which of them are kept now. StoreError where the medium fails."""
        kept = np.zeros(len(names), bool)
        for size, places in _by_size(chunks).items():
            tier = self._tier(size)
            rows = [_padded(chunks[i], tier.layout.row_bytes(0)) for i in places]
            kept[places] = tier.store(0, [self._key(names[i]) for i in places], rows)
        return kept

    def load(self, names: Sequence[bytes], chunks: Sequence[Bytes]) -> Bools:
        """Copy chunks out; which of them were there, with these sizes, and whole."""
        found = np.zeros(len(names), bool)
        for size, places in _by_size(chunks).items():
            tier = self._tier(size)
            rows = [_padded(chunks[i], tier.layout.row_bytes(0)) for i in places]
            found[places] = tier.load(0, [self._key(names[i]) for i in places], rows)
            for i, row in zip(places, rows, strict=True):
                if found[i] and row is not chunks[i]:
                    chunks[i][:] = row[:size]
        return found

    def evict(self, names: Sequence[bytes]) -> int:
        """Forget chunks; how many were there."""
        keys = [self._key(name) for name in names]
        with self._lock:
            tiers = tuple(self._tiers.values())
        return sum(tier.evict(0, keys) for tier in tiers)

    def close(self) -> None:
        """Let go of the files."""
        with self._lock:
            for tier in self._tiers.values():
                tier.close()
            self._tiers.clear()

    def _key(self, name: bytes) -> bytes:
        return blake2b(
            self._identity.digest + name, digest_size=32, person=b"kvstow chunk"
        ).digest()

    def _tier(self, size: int) -> DiskTier:
        """The store of chunks of a size, made when it is first asked for."""
        with self._lock:
            if size not in self._tiers:
                if len(self._tiers) >= MOST_SIZES:
                    raise StoreError(
                        f"{self._directory}: chunks of {size} bytes, and of {MOST_SIZES} other "
                        "sizes already\n\nhint: give each model a directory of its own"
                    )
                layout = _chunk_layout(size).identified(self._identity)
                folder = self._directory / f"bytes-{size}"
                self._tiers[size] = DiskTier(folder, layout, capacity=self._capacity)
            return self._tiers[size]


def _chunk_layout(size: int) -> Layout:
    """Rows of `size` bytes that nobody but their engine can read."""
    if size < 1:
        raise StoreError(f"a chunk of {size} bytes")
    whole = -(-size // ALIGN) * ALIGN
    spec = LayerSpec(
        name="chunk",
        retention=Full(),
        block_tokens=1,
        states=1,
        heads=Extent.whole("head", 1),
        fields=(Field("bytes", DType.UINT8, (Extent.whole("content", whole),)),),
    )
    return packed(grouped([spec]), num_slabs=2)


def _by_size(chunks: Sequence[Bytes]) -> dict[int, list[int]]:
    places: defaultdict[int, list[int]] = defaultdict(list)
    for i, chunk in enumerate(chunks):
        places[chunk.nbytes].append(i)
    return places


def _padded(chunk: Bytes, nbytes: int) -> Bytes:
    """The chunk itself, or a copy as long as a row."""
    if chunk.nbytes == nbytes:
        return chunk
    row: Bytes = np.zeros(nbytes, np.uint8)
    row[: chunk.nbytes] = chunk
    return row
