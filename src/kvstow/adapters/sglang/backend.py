"""SGLang's HiCache on kvstow's store; the only module that imports sglang.

SGLang calls a page by a hash of its tokens and all before them, with a request's salt and adapter.
Here a page's name also has the pool, its geometry, the rank and what the adapters are, and its key
the identity of the computation, so that no page of other weights, another dtype or another shard
is ever found.

SGLang asks, reads and writes in threads of its own. What fails is a miss, or a page that is not
kept, with a line in the log: the engine computes on.
"""

import time
from collections.abc import Callable, Sequence
from threading import Lock
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

from kvstow.adapters.chunks import ChunkStore
from kvstow.adapters.sglang.hits import leading, restorable_pages, trailing
from kvstow.adapters.sglang.options import SETTINGS, HiCacheOptions, adapters_name, rank_name
from kvstow.adapters.sglang.pages import HostPages, HostPool
from kvstow.errors import KvstowError, SpecError
from kvstow.offload.tier import Bools, Tallies, log
from kvstow.plan.identity import Identity
from kvstow.plan.retention import Full, Retention

if TYPE_CHECKING:
    from enum import Enum

    from kvstow.adapters.sglang.options import RankConfig

    class HiCacheStorage:
        """What is used of SGLang's: it remembers its host pools."""

        def register_mem_pool_host(self, mem_pool_host: Any) -> None: ...

        def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None: ...

    class HiCacheStorageConfig(RankConfig, Protocol):
        enable_storage_metrics: bool

    class PoolName(Enum):
        KV = "kv"
        MAMBA = "mamba"

    class PoolHitPolicy(Enum):
        TRAILING_PAGES = "trailing_pages"
        BLOCK_GROUPS = "block_groups"

    class PoolTransfer(Protocol):
        """Pages of one pool that are looked up, read or written."""

        name: Any
        keys: list[str] | None
        host_indices: torch.Tensor | None
        hit_policy: PoolHitPolicy

    class PoolTransferResult:
        def __init__(self, pages: int, by_pool: dict[PoolName, int], lengths: list[int]): ...

    class StorageMetrics:
        prefetch_pgs: list[int]
        backup_pgs: list[int]
        prefetch_bandwidth: list[float]
        backup_bandwidth: list[float]

    def get_lora() -> Any: ...

    def get_model() -> Any: ...

else:
    from sglang.srt.mem_cache.hicache_storage import (
        HiCacheStorage,
        HiCacheStorageConfig,
        PoolHitPolicy,
        PoolName,
        PoolTransfer,
        PoolTransferResult,
    )
    from sglang.srt.observability.metrics_collector import StorageMetrics
    from sglang.srt.runtime_context import get_lora, get_model

KV = PoolName.KV.value
FLUSH_SECONDS = 10.0


class KvstowHiCache(HiCacheStorage):
    """Pages of one rank's host pools in a store.

    Options, in `--hicache-storage-backend-extra-config`: the places `host`, `disk` with
    `disk_bytes`, `remote`; and `model_dir` or `unverified`, which says why nobody need look at
    the weights. The store is opened when SGLang registers its first pool.
    """

    def __init__(self, storage_config: HiCacheStorageConfig, kwargs: Any = None) -> None:
        self._config = storage_config
        self._options = HiCacheOptions.of(storage_config)
        if not self._options.uses_host_indices:
            log.warning("sglang: every page is copied once more\n\nhint: add interface_v1: 1")
        self._chunks: ChunkStore | None = None
        self._pages: dict[str, HostPages] = {}
        self._failures = Tallies()
        self._lock = Lock()
        self._metrics = StorageMetrics()

    # ── pools ─────────────────────────────────────────────────────────────────────

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        super().register_mem_pool_host(mem_pool_host)
        self._register(KV, mem_pool_host)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        self._register(str(host_pool_name), host_pool)

    def _register(self, name: str, pool: HostPool) -> None:
        """Open the stores for pages of a pool. Raises for a store of another computation."""
        if self._chunks is None:
            self._chunks = ChunkStore(identity=self._identity(pool), **self._options.places)
        # Pools of heads and recurrent states are sharded, also beside a latent cache.
        is_sharded = name == PoolName.MAMBA.value or hasattr(pool, "head_num")
        is_replicated = self._config.is_mla_model and not is_sharded
        rank = rank_name(self._config, is_replicated=is_replicated)
        adapters = adapters_name(str(each.lora_path) for each in get_lora().lora_paths or ())
        in_place = self._options.uses_host_indices
        pages = HostPages(name, pool, rank=f"{rank} {adapters}", in_place=in_place)
        for size in set(pages.sizes):
            self._chunks.open(size)
        self._pages[name] = pages
        how = "in place" if pages.is_in_place else "gathered"
        log.info("sglang: pool %s: pages of %s bytes, %s, %s", name, pages.sizes, how, rank)

    def _identity(self, pool: Any) -> Identity:
        model = get_model()
        return self._options.computation(
            self._config,
            {name: str(getattr(model, name, None)) for name in SETTINGS},
            kv_dtype=f"{pool.dtype} {model.kv_cache_dtype}",
            interior=f"sglang {pool.layout}",
        )

    @property
    def chunks(self) -> ChunkStore:
        if self._chunks is None:
            raise SpecError("SGLang has registered no host pool")
        return self._chunks

    def _pool(self, name: Any) -> HostPages:
        pages = self._pages.get(str(name))
        if pages is None:
            raise SpecError(f"no host pool {str(name)!r}, only {', '.join(self._pages)}")
        return pages

    # ── which pages are there ─────────────────────────────────────────────────────

    def exists(self, key: str) -> bool:
        return bool(self._present(KV, [key]).all())

    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        return leading(self._present(KV, keys))

    def batch_exists_v2(
        self,
        keys: list[str],
        pool_transfers: list[PoolTransfer] | None = None,
        extra_info: Any = None,
    ) -> PoolTransferResult:
        """Pools of which SGLang wants block groups get no verdict, as it allows."""
        kv = self._present(KV, keys)
        near = keys[: leading(kv)]
        others: dict[str, tuple[Retention, Bools]] = {}
        for transfer in pool_transfers or ():
            if transfer.hit_policy == PoolHitPolicy.BLOCK_GROUPS:
                continue
            is_trailing = transfer.hit_policy == PoolHitPolicy.TRAILING_PAGES
            needs = trailing(len(transfer.keys or ())) if is_trailing else Full()
            others[str(transfer.name)] = needs, self._present(transfer.name, near)
        hits = restorable_pages(kv, others)
        by_pool = {PoolName(name): pages for name, pages in hits.by_pool.items()}
        return PoolTransferResult(hits.longest, by_pool, hits.lengths)

    def _present(self, name: Any, keys: Sequence[str]) -> Bools:
        def look_up() -> Bools:
            pages = self._pool(name)
            sizes = pages.sizes * len(keys)
            return pages.whole(self.chunks.contains(pages.names(keys), sizes))

        return self._guarded("looked up", len(keys), look_up)

    # ── pages into host memory ────────────────────────────────────────────────────

    def batch_get_v1(
        self,
        keys: list[str],
        host_indices: torch.Tensor,
        extra_info: Any = None,
    ) -> list[bool]:
        return self._get(KV, keys, host_indices)

    def batch_get_v2(
        self, transfers: list[PoolTransfer], extra_info: Any = None
    ) -> dict[str, list[bool]]:
        return {each.name: self._get(each.name, each.keys, each.host_indices) for each in transfers}

    def _get(
        self, name: Any, keys: list[str] | None, host_indices: torch.Tensor | None
    ) -> list[bool]:
        names = keys or []

        def load() -> Bools:
            pages = self._pool(name)
            starts = pages.starts(len(names), host_indices)
            whole = np.zeros(len(names), bool)
            for lot in pages.lots(len(names)):
                room = pages.room(starts[lot])
                whole[lot] = pages.whole(self.chunks.load(pages.names(names[lot]), room))
                pages.deliver(starts[lot], room, whole[lot])
            return whole

        return self._timed("loaded", name, len(names), load).tolist()

    def get(
        self, key: str, target_location: Any = None, target_sizes: Any = None
    ) -> torch.Tensor | None:
        return self.batch_get([key], [target_location])[0]

    def batch_get(
        self, keys: list[str], target_locations: Any = None, target_sizes: Any = None
    ) -> list[torch.Tensor | None]:
        """Pages into flat tensors of SGLang's, which it copies to their places."""

        def load() -> Bools:
            pages = self._pool(KV)
            room = [pages.flat(target) for target in targets]
            return pages.whole(self.chunks.load(pages.names(keys), room))

        targets = target_locations or [None] * len(keys)
        whole = self._timed("loaded", KV, len(keys), load)
        return [each if here else None for each, here in zip(targets, whole, strict=True)]

    # ── pages out of host memory ──────────────────────────────────────────────────

    def batch_set_v1(
        self,
        keys: list[str],
        host_indices: torch.Tensor,
        extra_info: Any = None,
    ) -> list[bool]:
        return self._set(KV, keys, host_indices)

    def batch_set_v2(
        self, transfers: list[PoolTransfer], extra_info: Any = None
    ) -> dict[str, list[bool]]:
        return {each.name: self._set(each.name, each.keys, each.host_indices) for each in transfers}

    def _set(
        self, name: Any, keys: list[str] | None, host_indices: torch.Tensor | None
    ) -> list[bool]:
        names = keys or []

        def store() -> Bools:
            pages = self._pool(name)
            starts = pages.starts(len(names), host_indices)
            kept = np.zeros(len(names), bool)
            for lot in pages.lots(len(names)):
                rows = pages.read(starts[lot])
                kept[lot] = pages.whole(self.chunks.store(pages.names(names[lot]), rows))
            return kept

        return self._timed("stored", name, len(names), store).tolist()

    def set(
        self,
        key: str,
        value: Any = None,
        target_location: Any = None,
        target_sizes: Any = None,
    ) -> bool:
        return self.batch_set([key], [value])

    def batch_set(
        self,
        keys: list[str],
        values: Any = None,
        target_locations: Any = None,
        target_sizes: Any = None,
    ) -> bool:
        """Flat pages that SGLang has copied out; whether all of them are kept."""

        def store() -> Bools:
            pages = self._pool(KV)
            rows = [pages.flat(value) for value in values]
            return pages.whole(self.chunks.store(pages.names(keys), rows))

        return bool(self._timed("stored", KV, len(keys), store).all())

    # ── what happened ─────────────────────────────────────────────────────────────

    @property
    def misses(self) -> dict[str, int]:
        """Pieces of pages that were to be loaded and were not, and pages of calls that failed, by
        reason."""
        reasons = {} if self._chunks is None else self._chunks.misses
        return reasons | self._failures.now

    def get_stats(self) -> StorageMetrics:
        """Pages and gigabytes per second of every call since the last time."""
        with self._lock:
            metrics, self._metrics = self._metrics, StorageMetrics()
        return metrics

    def _timed(self, what: str, name: Any, count: int, call: Callable[[], Bools]) -> Bools:
        began = time.perf_counter()
        done = self._guarded(what, count, call)
        pages = int(done.sum())
        if not self._config.enable_storage_metrics or not pages:
            return done
        rate = pages * sum(self._pool(name).sizes) / (time.perf_counter() - began) / 1e9
        with self._lock:
            now = self._metrics
            is_load = what == "loaded"
            (now.prefetch_pgs if is_load else now.backup_pgs).append(pages)
            (now.prefetch_bandwidth if is_load else now.backup_bandwidth).append(rate)
        return done

    def _guarded(self, what: str, count: int, call: Callable[[], Bools]) -> Bools:
        """What a call says of each of its pages; nothing where it fails."""
        try:
            return call()
        except (KvstowError, OSError) as error:
            self._failures.add(f"not {what}", count)
            log.warning("sglang: %d pages were not %s: %s", count, what, error)
            return np.zeros(count, bool)

    # ── the end ───────────────────────────────────────────────────────────────────

    def clear(self) -> bool:
        """Forget the pages of this machine. Pages on a remote store are other engines' too:
        `kvstow store prune URL`."""
        log.info("sglang: %d pieces of pages are forgotten", self.chunks.clear())
        return True

    def close(self) -> None:
        """Write what waits, and let go of memory, files and connections."""
        if self._chunks is not None:
            self._chunks.flush(FLUSH_SECONDS)
            self._chunks.close()
            log.info("sglang: misses by reason: %s", self.misses or "none")
