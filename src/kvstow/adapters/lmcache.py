"""LMCache's second tier on kvstow's store; the only module that imports lmcache.

    --l2-adapter '{"type": "plugin", "module_path": "kvstow.adapters.lmcache",
        "class_name": "KvstowL2Adapter", "adapter_params": {"path": "/var/cache/kvstow",
        "capacity": "100GiB", "model_dir": "/models/llama"}}'

LMCache calls a chunk by model name, rank, group, salt and a hash of tokens. The identity of the
weights in `model_dir` is added, so that another checkpoint of the same name shares nothing; and the
types of a chunk's elements, so that engines with another `--dtype` do not. fp8 reaches LMCache as
plain bytes, as do chunks that its `serde` has rewritten: nobody but the operator knows what they
are, so they are refused until `kv_dtype` says it. What lies on disk has a checksum per chunk,
outlives the process, and may be shared by processes. Beside the chunks lies an empty file for each
type of elements, so that they are found, and deleted, by whoever does not know the types.
"""

import itertools
import os
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from itertools import islice
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from kvstow.adapters.chunks import ChunkStore, chunk_name, stated_identity
from kvstow.errors import KvstowError, SpecError
from kvstow.offload.tier import Bools, Bytes, log
from kvstow.plan.view import parse_size

if TYPE_CHECKING:

    class L2AdapterInterface:
        """What is used of LMCache's: its account of bytes, and its listeners."""

        def __init__(self, max_capacity_bytes: int = 0) -> None: ...

        def _notify_keys_stored(self, keys: Sequence["Key"], sizes: Sequence[int]) -> None: ...

        def _notify_keys_accessed(self, keys: Sequence["Key"]) -> None: ...

        def _notify_keys_deleted(self, keys: Sequence["Key"], sizes: Sequence[int]) -> None: ...

    class Bitmap:
        """Bits, all zero at first."""

        def __init__(self, count: int) -> None: ...

        def set(self, place: int) -> None: ...

    class L2StoreResult:
        """What came of a store, and the bytes it wrote."""

        def __init__(self, success: bool, nbytes: int) -> None: ...

else:
    from lmcache.lmcache_native import Bitmap
    from lmcache.v1.distributed.internal_api import L2StoreResult
    from lmcache.v1.distributed.l2_adapters.base import L2AdapterInterface

THREADS = 4

BYTES = "uint8"
"""What LMCache calls elements whose type torch, or the engine, has no name for."""

MARK = "elements "
"""What the name of a file begins with that stands for a type of elements."""

SLICE = 1024
"""So many of the chunks that are accounted for are looked for again after a store."""


class Key(Protocol):
    """What LMCache calls a chunk."""

    model_name: str
    kv_rank: int
    object_group_id: int
    cache_salt: str
    chunk_hash: bytes


class Described(Protocol):
    """A chunk's tensors, as LMCache describes them. Some kinds have a `dtype` alone."""

    dtypes: Sequence[Any] | None


class MemoryObject(Protocol):
    """A memory object of LMCache's."""

    metadata: Described
    byte_array: memoryview

    def get_size(self) -> int: ...


class KvstowL2Adapter(L2AdapterInterface):
    """Stores, looks up and loads chunks in threads of its own.

    `adapter_params`: `path`, `capacity`, and `model_dir` or `unverified`, which says why nobody
    need look at the weights. `kv_dtype` says what the bytes of a cache are that LMCache sees as
    plain bytes: `fp8_e4m3` or `fp8_e5m2`, and the `serde` if there is one. Chunks of one are never
    found by an adapter that says the other.
    """

    def __init__(self, params: dict[str, Any], l1_memory_desc: Any = None) -> None:
        unknown = set(params) - {"path", "capacity", "model_dir", "unverified", "kv_dtype"}
        if unknown or not {"path", "capacity"} <= set(params):
            raise SpecError(
                f"adapter_params are {sorted(params)}\n\n"
                "hint: path, capacity, model_dir or unverified, and kv_dtype"
            )
        super().__init__(parse_size(str(params["capacity"])))
        said = str(params.get("kv_dtype", ""))
        self._kv_dtype = "" if said == "auto" else said
        if self._kv_dtype == "fp8":
            raise SpecError(
                "kv_dtype 'fp8' does not say which fp8\n\n"
                "hint: fp8_e4m3 or fp8_e5m2; vLLM's fp8 is fp8_e4m3 on NVIDIA GPUs"
            )
        self._path = Path(params["path"])
        self._chunks = ChunkStore(
            disk=self._path,
            disk_bytes=params["capacity"],
            identity=stated_identity(params, kv_dtype=self._kv_dtype),
        )
        self._threads = ThreadPoolExecutor(THREADS, "kvstow-lmcache")
        self._lock = Lock()
        self._numbers = itertools.count(1)
        self._stored: dict[int, L2StoreResult] = {}
        self._answers: dict[int, Bitmap] = {}
        self._accounted: OrderedDict[bytes, tuple[Key, int]] = OrderedDict()
        """Chunks by name that LMCache knows from us to be here, with their sizes."""
        flags = os.EFD_NONBLOCK | os.EFD_CLOEXEC
        self._store_fd, self._lookup_fd, self._load_fd = (os.eventfd(0, flags) for _ in range(3))

    def get_store_event_fd(self) -> int:
        return self._store_fd

    def get_lookup_and_lock_event_fd(self) -> int:
        return self._lookup_fd

    def get_load_event_fd(self) -> int:
        return self._load_fd

    # ── store ─────────────────────────────────────────────────────────────────────

    def submit_store_task(self, keys: list[Key], objects: list[MemoryObject]) -> int:
        number = next(self._numbers)
        self._threads.submit(self._store, number, keys, objects)
        return number

    def _store(self, number: int, keys: list[Key], objects: list[MemoryObject]) -> None:
        sizes = [each.get_size() for each in objects]
        kept = np.zeros(len(keys), bool)
        try:
            names = self._names(keys, objects)
            kept = self._chunks.store(names, [_bytes(each) for each in objects])
            self._account_for(
                {names[i]: (keys[i], sizes[i]) for i in np.flatnonzero(kept).tolist()}
            )
            self._notice_evictions()
        except Exception as error:
            log.warning("lmcache: %d chunks were not stored: %s", len(keys), error)
        with self._lock:
            nbytes = sum(size for size, here in zip(sizes, kept, strict=True) if here)
            self._stored[number] = L2StoreResult(bool(kept.all()), nbytes)
        os.eventfd_write(self._store_fd, 1)

    def _account_for(self, chunks: Mapping[bytes, tuple[Key, int]]) -> None:
        """Chunks are here. LMCache hears of those that it does not know of."""
        with self._lock:
            new = {name: each for name, each in chunks.items() if name not in self._accounted}
            self._accounted.update(new)
        if new:
            self._notify_keys_stored(*_columns(new.values()))

    def _notice_evictions(self) -> None:
        """Tell LMCache of chunks that the store, or another process, has evicted: a slice of those
        accounted for is looked for again, the next one next time."""
        with self._lock:
            chunks = list(islice(self._accounted.items(), SLICE))
            for name, _ in chunks:
                self._accounted.move_to_end(name)
        here = self._chunks.contains([name for name, _ in chunks])
        self._forget({chunks[i][0]: chunks[i][1][0] for i in np.flatnonzero(~here).tolist()})

    def _forget(self, keys: Mapping[bytes, Key]) -> None:
        """Chunks are no longer here. Those of other processes are not accounted for: they go with
        a size of 0."""
        with self._lock:
            gone = [self._accounted.pop(name, (key, 0)) for name, key in keys.items()]
        if gone:
            self._notify_keys_deleted(*_columns(gone))

    def pop_completed_store_tasks(self) -> dict[int, L2StoreResult]:
        with self._lock:
            done, self._stored = self._stored, {}
        return done

    # ── look up ───────────────────────────────────────────────────────────────────

    def submit_lookup_and_lock_task(
        self, keys: list[Key], group_layout_descs: Mapping[int, Described]
    ) -> int:
        """Nothing is locked: a chunk that goes before it is loaded is a miss then.

        Descriptions are of chunks as the engine has them. Those that a serde rewrites come as
        bytes, and are looked for too; where nothing is described, chunks of any type are found.
        """

        def look_up() -> Bools:
            described = {group: _elements(each) for group, each in group_layout_descs.items()}
            own = [described.get(key.object_group_id, "") for key in keys]
            also = {BYTES} if self._kv_dtype else set[str]()
            present = np.zeros(len(keys), bool)
            for kind in {*own, *also, *(() if all(own) else self._kinds())}:
                is_kind = np.array([kind in also or each in ("", kind) for each in own], bool)
                present |= is_kind & self._chunks.contains([_name(key, kind) for key in keys])
            return present

        return self._begin(self._lookup_fd, keys, look_up)

    def query_lookup_and_lock_result(self, task_id: int) -> Bitmap | None:
        return self._answer(task_id)

    def submit_unlock(self, keys: list[Key]) -> None:
        """Nothing is locked."""

    # ── load ──────────────────────────────────────────────────────────────────────

    def submit_load_task(self, keys: list[Key], objects: list[MemoryObject]) -> int:
        def load() -> Bools:
            rows = [_bytes(each) for each in objects]
            loaded = self._chunks.load(self._names(keys, objects), rows)
            self._notify_keys_accessed([keys[i] for i in np.flatnonzero(loaded).tolist()])
            return loaded

        return self._begin(self._load_fd, keys, load)

    def query_load_result(self, task_id: int) -> Bitmap | None:
        return self._answer(task_id)

    def _begin(self, fd: int, keys: Sequence[Key], call: Callable[[], Bools]) -> int:
        number = next(self._numbers)
        self._threads.submit(self._run, number, fd, len(keys), call)
        return number

    def _run(self, number: int, fd: int, count: int, call: Callable[[], Bools]) -> None:
        present = Bitmap(count)
        try:
            for i in np.flatnonzero(call()).tolist():
                present.set(i)
        except Exception as error:
            log.warning("lmcache: %d chunks are misses: %s", count, error)
        with self._lock:
            self._answers[number] = present
        os.eventfd_write(fd, 1)

    def _answer(self, number: int) -> Bitmap | None:
        with self._lock:
            return self._answers.pop(number, None)

    # ── names ─────────────────────────────────────────────────────────────────────

    def _names(self, keys: Sequence[Key], objects: Sequence[MemoryObject]) -> list[bytes]:
        """What chunks are called. SpecError where nobody says what is in them."""
        elements = [_elements(each.metadata) for each in objects]
        unclear = [each for each in elements if not each or BYTES in each.split()]
        if unclear and not self._kv_dtype:
            raise SpecError(
                f"chunks of {unclear[0] or 'an unknown type'}, and kv_dtype does not say what they "
                "are: fp8_e4m3 and fp8_e5m2 look alike\n\n"
                'hint: "kv_dtype": "fp8_e4m3" in adapter_params, as the engine has it; with a '
                "serde, its name and settings too"
            )
        for kind in set(elements):
            (self._path / f"{MARK}{kind}").touch()
        return [_name(key, each) for key, each in zip(keys, elements, strict=True)]

    def _kinds(self) -> list[str]:
        """The types of elements of which there are chunks, of this process or another."""
        return [path.name.removeprefix(MARK) for path in self._path.glob(f"{MARK}*")]

    # ── the end ───────────────────────────────────────────────────────────────────

    def delete(self, keys: list[Key]) -> None:
        """Forget chunks, whatever their elements are, and tell LMCache of those that were here."""
        for kind in self._kinds():
            names = [_name(key, kind) for key in keys]
            here = np.flatnonzero(self._chunks.contains(names)).tolist()
            self._chunks.evict([names[i] for i in here])
            self._forget({names[i]: keys[i] for i in here})

    def get_memory_tags(self) -> Any:
        """A disk of this host; LMCache asks since 0.5.7."""
        api: Any = import_module("lmcache.v1.distributed.api")
        return api.MemoryTags(api.MemorySegment.STORAGE, api.MemoryResidency.LOCAL)

    def close(self) -> None:
        self._threads.shutdown()
        self._chunks.close()
        for fd in (self._store_fd, self._lookup_fd, self._load_fd):
            os.close(fd)


def _name(key: Key, elements: str) -> bytes:
    """What LMCache calls a chunk, and what it is made of."""
    return chunk_name(
        key.model_name,
        str(key.kv_rank),
        str(key.object_group_id),
        key.cache_salt,
        bytes(key.chunk_hash),
        elements,
    )


def _elements(about: Described) -> str:
    """The types of a chunk's elements in words, one for each tensor; empty where none is said."""
    dtypes: Sequence[Any] = about.dtypes or [getattr(about, "dtype", None)]
    return " ".join(str(each).removeprefix("torch.") for each in dtypes if each is not None)


def _columns(chunks: Iterable[tuple[Key, int]]) -> tuple[list[Key], list[int]]:
    """Keys and sizes apart, as LMCache takes them."""
    listed = list(chunks)
    return [key for key, _ in listed], [size for _, size in listed]


def _bytes(memory: MemoryObject) -> Bytes:
    """A memory object's bytes, in place."""
    content: Bytes = np.frombuffer(memory.byte_array, np.uint8)
    if content.nbytes != memory.get_size():
        raise KvstowError(f"{content.nbytes} bytes, not {memory.get_size()}")
    return content
