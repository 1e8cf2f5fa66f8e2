"""vLLM's classes that the connector extends, with the types that it relies on.

`plugin` and `engine` look vLLM's modules up by name; no other module needs it.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dataclasses import dataclass, field
    from enum import Enum

    from kvstow.adapters.vllm.engine import CacheConfig, CacheManager, EngineConfig

    class ConnectorRole(Enum):
        SCHEDULER = 0
        WORKER = 1

    class CacheHitSource(Enum):
        HOST = "host"
        P2P = "p2p"
        DISK = "disk"
        EXTERNAL_UNSPECIFIED = "external_unspecified"

    class RequestStatus(Enum):
        FINISHED_STOPPED = 0
        FINISHED_LENGTH_CAPPED = 1

    class HandshakeMetadata: ...

    class ConnectorMetadata: ...

    class WorkerMetadata:
        def aggregate(self, other: "WorkerMetadata") -> "WorkerMetadata": ...

    @dataclass
    class TransferResults:
        finished_sending: set[str]
        finished_recving: set[str]
        failed_recving: set[str]

    class SupportsHMA: ...

    class ConnectorBase:
        _kv_cache_manager: CacheManager | None

        def __init__(
            self, vllm_config: EngineConfig, role: ConnectorRole, kv_cache_config: CacheConfig
        ) -> None: ...
        def bind_connector_metadata(self, connector_metadata: ConnectorMetadata) -> None: ...
        def _get_connector_metadata(self) -> ConnectorMetadata: ...

    @dataclass
    class ConnectorStats:
        data: dict[str, Any] = field(default_factory=dict[str, Any])

        def aggregate(self, other: "ConnectorStats") -> "ConnectorStats": ...

    class PrometheusMetrics:
        _counter_cls: Any
        _gauge_cls: Any
        _histogram_cls: Any
        per_engine_labelvalues: dict[int, list[object]]

        def __init__(
            self,
            vllm_config: EngineConfig,
            metric_types: Any,
            labelnames: list[str],
            per_engine_labelvalues: dict[int, list[object]],
        ) -> None: ...

else:
    _base, _metrics, _sources, _requests = (
        import_module(f"vllm.{name}")
        for name in (
            "distributed.kv_transfer.kv_connector.v1.base",
            "distributed.kv_transfer.kv_connector.v1.metrics",
            "v1.metrics.cache_hit_source",
            "v1.request",
        )
    )
    CacheHitSource = _sources.CacheHitSource
    ConnectorBase = _base.KVConnectorBase_V1
    ConnectorMetadata = _base.KVConnectorMetadata
    ConnectorRole = _base.KVConnectorRole
    ConnectorStats = _metrics.KVConnectorStats
    HandshakeMetadata = _base.KVConnectorHandshakeMetadata
    PrometheusMetrics = _metrics.KVConnectorPromMetrics
    RequestStatus = _requests.RequestStatus
    SupportsHMA = _base.SupportsHMA
    TransferResults = _base.KVConnectorTransferResults
    WorkerMetadata = _base.KVConnectorWorkerMetadata
