"""The connector's counts inside vLLM: on their way from its workers, and on its /metrics."""

from collections.abc import Mapping
from typing import Any

from kvstow.adapters.vllm.bases import ConnectorStats, PrometheusMetrics
from kvstow.adapters.vllm.counts import VLLM_COUNTERS, VLLM_HISTOGRAMS, VLLM_INFO, vllm_counter
from kvstow.adapters.vllm.engine import EngineConfig
from kvstow.adapters.vllm.options import ConnectorOptions
from kvstow.observe import DURATIONS

DURATION_NAMES = {each.what for each in VLLM_HISTOGRAMS}


class KvstowStats(ConnectorStats):
    """Counts and durations by name, since the last time."""

    def reset(self) -> None:
        self.data.clear()

    def aggregate(self, other: ConnectorStats) -> "KvstowStats":
        """The stats of both; numbers add up, and so do lists."""
        both = {**self.data, **other.data}
        for name in self.data.keys() & other.data.keys():
            both[name] = self.data[name] + other.data[name]
        return KvstowStats(data=both)

    def reduce(self) -> dict[str, int | float]:
        """Numbers for vLLM's log: of durations their sum."""
        return {
            name: sum(value) if name in DURATION_NAMES else value
            for name, value in self.data.items()
        }

    def is_empty(self) -> bool:
        return not self.data


class KvstowMetrics(PrometheusMetrics):
    """The same on vLLM's /metrics, each under its name: `kvstow_vllm_…`."""

    def __init__(
        self,
        vllm_config: EngineConfig,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        engines = list(per_engine_labelvalues.values())
        self._counters: dict[str, Any] = {}
        for each in VLLM_COUNTERS:
            self._counters[each.name] = made = self._counter_cls(
                name=each.family,
                documentation=each.text,
                labelnames=[*labelnames, *each.labels],
            )
            for values in engines if not each.label else ():
                made.labels(*values)  # 0 from the beginning
        self._histograms: dict[str, Any] = {}
        for each in VLLM_HISTOGRAMS:
            self._histograms[each.what] = made = self._histogram_cls(
                name=each.family,
                documentation=each.text,
                labelnames=labelnames,
                buckets=DURATIONS,
            )
            for values in engines:
                made.labels(*values)
        config = _config(vllm_config)
        gauge = self._gauge_cls(
            name=VLLM_INFO.family,
            documentation=VLLM_INFO.text,
            labelnames=[*labelnames, *config],
        )
        for values in engines:
            gauge.labels(*values, *config.values()).set(1)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        engine = self.per_engine_labelvalues[engine_idx]
        for what, value in transfer_stats_data.items():
            if what in DURATION_NAMES:
                for seconds in value:
                    self._histograms[what].labels(*engine).observe(seconds)
                continue
            counter, label = vllm_counter(what)
            self._counters[counter.name].labels(*engine, *([label] if label else [])).inc(value)


def _config(vllm_config: EngineConfig) -> Mapping[str, str]:
    """What tells one deployment from another; no addresses, no paths."""
    options = ConnectorOptions.of(vllm_config.kv_transfer_config.kv_connector_extra_config)
    return {
        "layout": options.layout,
        "digest": options.digest,
        "direction": options.direction or "chosen",
        "host_bytes": str(options.host_bytes),
        "disk_bytes": str(options.disk_bytes),
        "remote": options.remote.partition("://")[0],
        "asks_peers": str(bool(options.peers)).lower(),
        "lends": str(bool(options.lend)).lower(),
    }
