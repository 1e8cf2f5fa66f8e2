# pyright: reportMissingImports=false, reportMissingTypeStubs=false, reportUntypedBaseClass=false
# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false
# pyright: reportUnknownParameterType=false, reportUnknownVariableType=false
"""LMCache's second tier on kvstow's store; the only module that imports lmcache.

    --l2-adapter '{"type": "plugin", "module_path": "kvstow.adapters.lmcache",
        "class_name": "KvstowL2Adapter", "adapter_params": {"path": "/var/cache/kvstow",
        "capacity": "100GiB", "model_dir": "/models/llama"}}'

LMCache calls a chunk by model name, rank, group, salt and a hash of tokens. The identity of the
weights in `model_dir` is added, so that another checkpoint of the same name shares nothing; and the
types of a chunk's elements, so that engines with another `--dtype` do not. fp8 reaches LMCache as
plain bytes, as do chunks that its `serde` has rewritten: nobody but the operator knows what they
are, so they are refused until `kv_dtype` says it. What lies on disk has a checksum per chunk,
outlives the process, and may be shared by processes.
"""

import itertools
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Lock
from typing import Any

import numpy as np
from lmcache.lmcache_native import Bitmap
from lmcache.v1.distributed.internal_api import L2StoreResult
from lmcache.v1.distributed.l2_adapters.base import L2AdapterInterface

from kvstow.adapters.chunks import ChunkStore, chunk_name, stated_identity
from kvstow.errors import KvstowError, SpecError
from kvstow.offload.tier import Bools, Bytes, log

THREADS = 4

BYTES = "uint8"
"""What LMCache calls elements whose type torch, or the engine, has no name for."""


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
        super().__init__()
        said = str(params.get("kv_dtype", ""))
        self._kv_dtype = "" if said == "auto" else said
        if self._kv_dtype == "fp8":
            raise SpecError(
                "kv_dtype 'fp8' does not say which fp8\n\n"
                "hint: fp8_e4m3 or fp8_e5m2; vLLM's fp8 is fp8_e4m3 on NVIDIA GPUs"
            )
        self._chunks = ChunkStore(
            disk=params["path"],
            disk_bytes=params["capacity"],
            identity=stated_identity(params, kv_dtype=self._kv_dtype),
        )
        self._threads = ThreadPoolExecutor(THREADS, "kvstow-lmcache")
        self._lock = Lock()
        self._numbers = itertools.count(1)
        self._stored: dict[int, L2StoreResult] = {}
        self._answers: dict[int, Any] = {}
        self._elements_seen: set[str] = set()
        flags = os.EFD_NONBLOCK | os.EFD_CLOEXEC
        self._store_fd, self._lookup_fd, self._load_fd = (os.eventfd(0, flags) for _ in range(3))

    def get_store_event_fd(self) -> int:
        return self._store_fd

    def get_lookup_and_lock_event_fd(self) -> int:
        return self._lookup_fd

    def get_load_event_fd(self) -> int:
        return self._load_fd

    # ── store ─────────────────────────────────────────────────────────────────────

    def submit_store_task(self, keys: list[Any], objects: list[Any]) -> int:
        number = next(self._numbers)
        self._threads.submit(self._store, number, keys, objects)
        return number

    def _store(self, number: int, keys: list[Any], objects: list[Any]) -> None:
        sizes = [each.get_size() for each in objects]
        try:
            kept = self._chunks.store(
                self._names(keys, objects), [_bytes(each) for each in objects]
            )
        except Exception as error:
            log.warning("lmcache: %d chunks were not stored: %s", len(keys), error)
            kept = np.zeros(len(keys), bool)
        which = np.flatnonzero(kept).tolist()
        self._notify_keys_stored([keys[i] for i in which], [sizes[i] for i in which])
        with self._lock:
            nbytes = sum(sizes[i] for i in which)
            self._stored[number] = L2StoreResult(bool(kept.all()), nbytes)
        os.eventfd_write(self._store_fd, 1)

    def pop_completed_store_tasks(self) -> dict[int, L2StoreResult]:
        with self._lock:
            done, self._stored = self._stored, {}
        return done

    # ── look up ───────────────────────────────────────────────────────────────────

    def submit_lookup_and_lock_task(self, keys: list[Any], group_layout_descs: Any) -> int:
        """Nothing is locked: a chunk that goes before it is loaded is a miss then.

        Descriptions are of chunks as the engine has them. Those that a serde rewrites come as
        bytes: they are looked for, too.
        """

        def look_up() -> Bools:
            described = {group: _elements(each) for group, each in group_layout_descs.items()}
            own = [_name(key, described.get(key.object_group_id, "")) for key in keys]
            found = self._chunks.contains(own)
            if self._kv_dtype:
                found |= self._chunks.contains([_name(key, BYTES) for key in keys])
            return found

        return self._begin(self._lookup_fd, keys, look_up)

    def query_lookup_and_lock_result(self, task_id: int) -> Any:
        return self._answer(task_id)

    def submit_unlock(self, keys: list[Any]) -> None:
        """Nothing is locked."""

    # ── load ──────────────────────────────────────────────────────────────────────

    def submit_load_task(self, keys: list[Any], objects: list[Any]) -> int:
        def load() -> Bools:
            found = self._chunks.load(
                self._names(keys, objects), [_bytes(each) for each in objects]
            )
            self._notify_keys_accessed([key for key, here in zip(keys, found, strict=True) if here])
            return found

        return self._begin(self._load_fd, keys, load)

    def query_load_result(self, task_id: int) -> Any:
        return self._answer(task_id)

    def _begin(self, fd: int, keys: Sequence[Any], call: Callable[[], Bools]) -> int:
        number = next(self._numbers)
        self._threads.submit(self._run, number, fd, len(keys), call)
        return number

    def _run(self, number: int, fd: int, count: int, call: Callable[[], Bools]) -> None:
        found = Bitmap(count)
        try:
            for i in np.flatnonzero(call()).tolist():
                found.set(i)
        except Exception as error:
            log.warning("lmcache: %d chunks are misses: %s", count, error)
            found = Bitmap(count)
        with self._lock:
            self._answers[number] = found
        os.eventfd_write(fd, 1)

    def _answer(self, number: int) -> Any:
        with self._lock:
            return self._answers.pop(number, None)

    # ── names ─────────────────────────────────────────────────────────────────────

    def _names(self, keys: Sequence[Any], objects: Sequence[Any]) -> list[bytes]:
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
        with self._lock:
            self._elements_seen.update(elements)
        return [_name(key, each) for key, each in zip(keys, elements, strict=True)]

    # ── the end ───────────────────────────────────────────────────────────────────

    def delete(self, keys: list[Any]) -> None:
        """Forget chunks."""
        with self._lock:
            seen = sorted(self._elements_seen)
        for elements in seen:
            self._chunks.evict([_name(key, elements) for key in keys])

    def close(self) -> None:
        self._threads.shutdown()
        self._chunks.close()
        for fd in (self._store_fd, self._lookup_fd, self._load_fd):
            os.close(fd)


def _name(key: Any, elements: str) -> bytes:
    """What LMCache calls a chunk, and what it is made of."""
    return chunk_name(
        key.model_name,
        str(key.kv_rank),
        str(key.object_group_id),
        key.cache_salt,
        bytes(key.chunk_hash),
        elements,
    )


def _elements(about: Any) -> str:
    """The types of a chunk's elements in words, one for each tensor; empty where none is said."""
    dtypes: Sequence[Any] = about.dtypes or [getattr(about, "dtype", None)]
    return " ".join(str(each).removeprefix("torch.") for each in dtypes if each is not None)


def _bytes(memory: Any) -> Bytes:
    """A memory object's bytes, in place."""
    found: Bytes = np.frombuffer(memory.byte_array, np.uint8)
    if found.nbytes != memory.get_size():
        raise KvstowError(f"{found.nbytes} bytes, not {memory.get_size()}")
    return found
