"""kvstow's stores below vLLM's own offloading, as one of its secondary tiers:

    --kv-transfer-config '{"kv_connector": "OffloadingConnector", "kv_role": "kv_both",
        "kv_connector_extra_config": {"spec_name": "TieringOffloadingSpec",
            "cpu_bytes_to_use": 8589934592, "secondary_tiers": [{
                "type": "KvstowTier", "module_path": "kvstow.adapters.vllm.secondary",
                "model_dir": "DIR", "disk": "/var/cache/kvstow", "disk_bytes": "100GiB"}]}}'

vLLM's chunks are bytes that only vLLM can read: they are found again by engines with the same model
and shape of chunks. Where vLLM makes its chunks alike for all tensor parallel sizes
(`canonical_layout`), engines of any size find them.
"""

import json
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from importlib import import_module
from time import monotonic
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from kvstow.adapters.chunks import ChunkStore, chunk_name, stated_identity
from kvstow.offload.tier import Bools, Bytes

NUM_THREADS = 4


class TransferJob(Protocol):
    job_id: int
    keys: Iterable[bytes]
    chunk_ids: Iterable[int]


if TYPE_CHECKING:

    class SecondaryTier:
        def __init__(self, spec: Any, view: memoryview, tier_type: str, detector: Any) -> None: ...
else:
    SecondaryTier = import_module("vllm.v1.kv_offload.tiering.base").SecondaryTierManager

_base: Any = import_module("vllm.v1.kv_offload.base")
_tiering: Any = import_module("vllm.v1.kv_offload.tiering.base")
_files: Any = import_module("vllm.v1.kv_offload.file_mapper")


class KvstowTier(SecondaryTier):
    """Chunks by vLLM's keys. `host`, `disk`, `disk_bytes` and `remote` are the places of a
    `kvstow.Store`; `model_dir`, or `unverified`, says which model it is."""

    medium = _base.Medium.STORAGE

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,
        *,
        locality: str | None = None,
        host: int | str | None = None,
        disk: str | None = None,
        disk_bytes: int | str | None = None,
        remote: str | None = None,
        **identity: str,
    ) -> None:
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        self.locality = _base.Locality(locality) if locality else None
        shape = _files.FileMapper.from_offloading_spec(
            root_dir="",
            offloading_spec=offloading_spec,
            blocks_per_file=offloading_spec.blocks_per_chunk,
            parallel_agnostic=True,
        )
        self._about = json.dumps([shape.get_run_config(), shape.rank], sort_keys=True)
        self._chunks = ChunkStore(
            identity=stated_identity(identity, name=str(shape.fields["model_name"])),
            host=host,
            disk=disk,
            disk_bytes=disk_bytes,
            remote=remote,
        )
        self._memory: Bytes = np.asarray(primary_kv_view).view(np.uint8)
        self._threads = ThreadPoolExecutor(NUM_THREADS, "kvstow-secondary")
        self._jobs: list[Future[Any]] = []
        self._lookups: dict[bytes, Future[Bools]] = {}

    def on_new_request(self, req_context: Any) -> Any:
        return _base.RequestOffloadingContext()

    def lookup(self, key: bytes, req_context: Any) -> Any:
        """RETRY until a thread has looked: a remote store takes its time."""
        if key not in self._lookups:
            self._lookups[key] = self._threads.submit(
                self._chunks.contains, self._names([key]), [self._memory.shape[1]]
            )
        answer = self._lookups[key]
        if not answer.done():
            return _base.LookupResult.RETRY
        del self._lookups[key]
        is_here = answer.exception() is None and bool(answer.result()[0])
        return _base.LookupResult.HIT if is_here else _base.LookupResult.MISS

    def submit_store(self, job_metadata: TransferJob) -> None:
        self._jobs.append(self._threads.submit(self._run, job_metadata, self._chunks.store))

    def submit_load(self, job_metadata: TransferJob) -> None:
        self._jobs.append(self._threads.submit(self._run, job_metadata, self._chunks.load))

    def _run(
        self, job: TransferJob, move: Callable[[Sequence[bytes], Sequence[Bytes]], Bools]
    ) -> Any:
        """Store or load a job's chunks; what failed is said, and nothing raised."""
        begun, keys = monotonic(), list(job.keys)
        chunks = [self._memory[chunk] for chunk in job.chunk_ids]
        try:
            moved = move(self._names(keys), chunks)
        except Exception:  # vLLM computes what did not come
            moved = np.zeros(len(keys), bool)
        return _tiering.JobResult(
            job_id=job.job_id,
            success=bool(moved.all()),
            successful_keys=[key for key, is_moved in zip(keys, moved, strict=True) if is_moved],
            transfer_time=monotonic() - begun,
            transfer_bytes=int(moved.sum()) * self._memory.shape[1],
        )

    def _names(self, keys: Sequence[bytes]) -> list[bytes]:
        return [chunk_name(self._about, bytes(key)) for key in keys]

    def get_finished_jobs(self) -> list[Any]:
        over = [job for job in self._jobs if job.done()]
        self._jobs = [job for job in self._jobs if job not in over]
        return [job.result() for job in over]

    def has_pending_work(self) -> bool:
        return bool(self._jobs)

    def drain_jobs(self) -> None:
        """Wait for what was submitted: nothing of it touches vLLM's memory any more."""
        wait(self._jobs)

    def shutdown(self) -> None:
        self._threads.shutdown()
        self._chunks.close()
