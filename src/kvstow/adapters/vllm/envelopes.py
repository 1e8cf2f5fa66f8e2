# pyright: reportMissingImports=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownParameterType=false, reportUntypedBaseClass=false
# pyright: reportMissingParameterType=false, reportIncompatibleMethodOverride=false
"""Our messages in vLLM's envelopes: what goes over its own wires."""

from collections import Counter
from dataclasses import dataclass
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from kvstow.adapters.connector.messages import Card, Found, Step


@dataclass
class KvstowCard(KVConnectorHandshakeMetadata):
    """A worker's agent, for the scheduler."""

    card: Card


@dataclass
class KvstowStep(KVConnectorMetadata):
    """A step's work, for the workers."""

    step: Step


@dataclass
class KvstowFound(KVConnectorWorkerMetadata):
    """Workers' answers to lookups, for the scheduler: what all ranks have."""

    found: dict[str, Found]

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "KvstowFound":
        assert isinstance(other, KvstowFound)
        return KvstowFound(
            {name: found.both(other.found[name]) for name, found in self.found.items()}
        )


class KvstowStats(KVConnectorStats):
    """Counts by name, since the last time."""

    def reset(self) -> None:
        self.data.clear()

    def aggregate(self, other: KVConnectorStats) -> "KvstowStats":
        return KvstowStats(data=dict(Counter(self.data) + Counter(other.data)))

    def reduce(self) -> dict[str, int | float]:
        return dict(self.data)

    def is_empty(self) -> bool:
        return not self.data


class KvstowMetrics(KVConnectorPromMetrics):
    """The same counts on vLLM's /metrics: `kvstow_total{what=…}`."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._counter: Any = self._counter_cls(
            name="kvstow",
            documentation="What the kvstow connector did: pulls by outcome, leases by end, bytes",
            labelnames=[*labelnames, "what"],
        )

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for what, count in transfer_stats_data.items():
            self._counter.labels(*self.per_engine_labelvalues[engine_idx], what).inc(count)
