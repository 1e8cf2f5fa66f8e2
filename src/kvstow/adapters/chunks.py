"""Byte chunks of other engines' caches, kept in stores.

An engine that cuts its cache into chunks of its own calls each by a name, and gives it as bytes.
A chunk becomes a row of a store of rows of that size; its key is

    BLAKE2b-256( identity of the computation, name ), salted with size modulo 16

so that chunks of another computation are never found, whatever the engine's names leave out, nor
those of another size whose rows are as long.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np

from kvstow.errors import SpecError, StoreError
from kvstow.offload.store import Store
from kvstow.offload.tier import Bools, Bytes, Tallies, load_from_first, store_in_all
from kvstow.plan.group import grouped
from kvstow.plan.identity import TOKEN_ORDERED, Identity
from kvstow.plan.layout import Layout
from kvstow.plan.pack import packed
from kvstow.plan.retention import Full
from kvstow.plan.spec import DType, Extent, Field, LayerSpec
from kvstow.plan.view import align_up

MOST_SIZES = 16
ALIGN = 16


class ChunkStore:
    """Chunks by name in `host` memory, in a directory on `disk`, on a `remote` store.

    The places are those of `Store`. `host` and `disk_bytes` hold for each size of chunk. Used from
    several threads. A chunk that is damaged, or foreign, is a miss.
    """

    def __init__(
        self,
        *,
        identity: Identity,
        host: int | str | None = None,
        disk: str | Path | None = None,
        disk_bytes: int | str | None = None,
        remote: str | None = None,
    ) -> None:
        self._identity = identity
        self._host, self._disk_bytes, self._remote = host, disk_bytes, remote
        self._disk = None if disk is None else Path(disk)
        self._new_store(self._disk)  # names what is wrong with the places; opens nothing
        self._lock = Lock()
        self._stores: dict[int, Store] = {}
        self._misses = Tallies()
        self._counts: defaultdict[Store, Counter[str]] = defaultdict(Counter)
        """Of the reasons that a store's tiers have counted, those that stand in `misses`."""
        try:
            for size in _sizes_in(self._disk):
                self.open(size)
        except BaseException:
            self.close()
            raise

    def contains(self, names: Sequence[bytes], sizes: Sequence[int] | None = None) -> Bools:
        """Which chunks are there, of these sizes, or of whatever size is open."""
        present = np.zeros(len(names), bool)
        if sizes is None:
            for size, store in self._stores_by_size():
                present |= store.contains(0, self._keys(names, size))
            return present
        for size, places in _by_size(sizes).items():
            keys = self._keys([names[i] for i in places], size)
            present[places] = self.open(size).contains(0, keys)
        return present

    def store(self, names: Sequence[bytes], chunks: Sequence[Bytes]) -> Bools:
        """Keep chunks; which of them are kept now. StoreError where the medium fails."""
        kept = np.zeros(len(names), bool)
        for size, places in _by_size([chunk.nbytes for chunk in chunks]).items():
            store = self.open(size)
            rows = [_padded(chunks[i], store.layout.row_bytes(0)) for i in places]
            keys = self._keys([names[i] for i in places], size)
            kept[places] = store_in_all(store.tiers, 0, keys, rows)
        return kept

    def load(self, names: Sequence[bytes], chunks: Sequence[Bytes]) -> Bools:
        """Copy chunks out; which of them were there, with these sizes, and whole."""
        loaded = np.zeros(len(names), bool)
        for size, places in _by_size([chunk.nbytes for chunk in chunks]).items():
            store = self.open(size)
            rows = [_padded(chunks[i], store.layout.row_bytes(0)) for i in places]
            before = _reasons(store)
            keys = self._keys([names[i] for i in places], size)
            here = load_from_first(store.tiers, 0, keys, rows)
            self._count_misses(store, int((~here).sum()), before)
            loaded[places] = here
            for i, row in zip(places, rows, strict=True):
                if loaded[i] and row is not chunks[i]:
                    chunks[i][:] = row[:size]
        return loaded

    @property
    def misses(self) -> dict[str, int]:
        """Chunks that were to be loaded and were not, by reason."""
        return self._misses.now

    def _count_misses(self, store: Store, count: int, before: dict[str, int]) -> None:
        """So many chunks of a load were not there. Tiers count reasons for all loads together:
        one that came up meanwhile may be another load's, and is counted once."""
        with self._lock:
            counts = self._counts[store]
            for reason, number in _reasons(store).items():
                meanwhile = number - before.get(reason, 0)
                explained = min(count, meanwhile, number - counts[reason])
                counts[reason] += explained
                self._misses.add(reason, explained)
                count -= explained
        self._misses.add("absent", count)

    def evict(self, names: Sequence[bytes]) -> int:
        """Forget chunks; how many were there."""
        return sum(
            max(tier.evict(0, self._keys(names, size)) for tier in store.tiers)
            for size, store in self._stores_by_size()
        )

    def clear(self) -> int:
        """Forget all chunks of this machine; how many. A remote store is not touched."""
        count = 0
        for _, store in self._stores_by_size():
            for tier in (store.host, store.disk):
                count += 0 if tier is None else tier.evict(0, tier.keys(0))
        return count

    def flush(self, seconds: float) -> bool:
        """Whether what was stored has been written or dropped, within so many seconds each."""
        flushed = [store.flush(seconds) for _, store in self._stores_by_size()]
        return all(flushed)

    def close(self) -> None:
        """Let go of memory, files and connections."""
        with self._lock:
            for store in self._stores.values():
                store.close()
            self._stores.clear()

    def open(self, size: int) -> Store:
        """The store of chunks of a size, made when it is first asked for."""
        with self._lock:
            if size not in self._stores:
                if len(self._stores) >= MOST_SIZES:
                    raise StoreError(
                        f"chunks of {size} bytes, and of {MOST_SIZES} other sizes already\n\n"
                        "hint: give each model a directory of its own"
                    )
                folder = None if self._disk is None else self._disk / f"bytes-{size}"
                self._stores[size] = self._new_store(folder).bind(_chunk_layout(size))
            return self._stores[size]

    def _stores_by_size(self) -> tuple[tuple[int, Store], ...]:
        with self._lock:
            return tuple(self._stores.items())

    def _new_store(self, folder: Path | None) -> Store:
        return Store(
            host=self._host,
            disk=folder,
            disk_bytes=self._disk_bytes,
            remote=self._remote,
            identity=self._identity,
            journal="off",
        )

    def _keys(self, names: Sequence[bytes], size: int) -> list[bytes]:
        """What chunks of a size are known by. Rows are multiples of 16 bytes: the rest of the size
        goes into the key."""
        rest = bytes([size % ALIGN])
        state = blake2b(self._identity.digest, digest_size=32, person=b"kvstow chunk", salt=rest)
        keys: list[bytes] = []
        for name in names:
            own = state.copy()
            own.update(name)
            keys.append(own.digest())
        return keys


def chunk_name(*parts: str | bytes) -> bytes:
    """What a chunk is called: each part with its length, so that no two names run together."""
    data = [part.encode() if isinstance(part, str) else part for part in parts]
    return b"".join(len(part).to_bytes(4, "little") + part for part in data)


def stated_identity(
    params: Mapping[str, Any], *, name: str = "", kv_dtype: str = "", interior: str = TOKEN_ORDERED
) -> Identity:
    """The identity that an operator states: `model_dir`, or `unverified`, which says why nobody
    need look at the weights. Then the model is known by its `name` alone."""
    if bool(params.get("model_dir")) == bool(params.get("unverified")):
        raise SpecError("give model_dir, or say in unverified why the weights need not be checked")
    if params.get("model_dir"):
        return Identity.of(params["model_dir"], kv_dtype=kv_dtype, interior=interior)
    because = str(params["unverified"])
    return Identity(model=name, kv_dtype=kv_dtype, interior=interior, unverified_because=because)


def _chunk_layout(size: int) -> Layout:
    """Rows of `size` bytes that nobody but their engine can read."""
    if size < 1:
        raise StoreError(f"a chunk of {size} bytes")
    whole = align_up(size, ALIGN)
    spec = LayerSpec(
        name="chunk",
        retention=Full(),
        block_tokens=1,
        states=1,
        heads=Extent.whole("head", 1),
        fields=(Field("bytes", DType.UINT8, (Extent.whole("content", whole),)),),
    )
    return packed(grouped([spec]), num_slabs=2)


def _sizes_in(disk: Path | None) -> list[int]:
    """The sizes of chunks for which there are stores in a directory."""
    names = (
        [] if disk is None else [path.name.removeprefix("bytes-") for path in disk.glob("bytes-*")]
    )
    return sorted(int(name) for name in names if name.isdigit())


def _by_size(sizes: Sequence[int]) -> dict[int, list[int]]:
    places: defaultdict[int, list[int]] = defaultdict(list)
    for i, size in enumerate(sizes):
        places[size].append(i)
    return places


def _padded(chunk: Bytes, nbytes: int) -> Bytes:
    """The chunk itself, or a copy as long as a row."""
    if chunk.nbytes == nbytes:
        return chunk
    row: Bytes = np.zeros(nbytes, np.uint8)
    row[: chunk.nbytes] = chunk
    return row


def _reasons(store: Store) -> dict[str, int]:
    """Why rows were not given so far, as far as the tiers know more than that they have none."""
    reasons = {} if store.disk is None else {"damaged": store.disk.counts.failures}
    remote = {} if store.remote is None else store.remote.misses.now
    return reasons | {f"remote {reason}": count for reason, count in remote.items()}
