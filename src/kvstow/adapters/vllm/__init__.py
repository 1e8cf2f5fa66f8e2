"""A KV connector for vLLM.

    --kv-transfer-config '{"kv_connector": "KvstowConnector",
        "kv_connector_module_path": "kvstow.adapters.vllm", "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute", "kv_connector_extra_config": {}}'

connector   vLLM's questions and orders, handed to our two sides
options     what an operator may set in `kv_connector_extra_config`
layout      what vLLM declares of its cache → a layout; its memory, adopted
identity    which computation fills its cache
pages       what one layer's page holds: its fields, where they are in several sections
protocol    what scheduler, workers and other instances tell each other
scheduler   one per engine: which request hands over or takes over
recall      one per engine: which beginnings of requests come back, which blocks are stored
loras       what a LoRA adapter is known by
stored      which rows the tiers of all ranks keep; keys of requests
stores      rows on their way to the tiers: held, in turn, within a bandwidth
offers      workers of other processes, told of an offer before the engine's next step
generations one per rank: leases of its blocks, and which of them a pull has filled
worker      one per rank: an agent over the engine's memory, pulls and leases
underway    pulls and leases of one rank that are under way
tiers       one per rank: rows stored and loaded
peers/      prefixes of other engines: rows lent to them, theirs asked for by key
journal     which prompts were stored, for `kvstow why`
events      what the tiers hold, in vLLM's stream of KV events
weights     what the engine computes with, while its weights are changed in place
plugin      what is changed in vLLM: rows for its CPU attention, weight versions for connectors

`KvstowConnector` is loaded when it is first asked for: everything else imports without vLLM,
which only `connector` and `plugin` import.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvstow.adapters.vllm.connector import KvstowConnector

__all__ = ["KvstowConnector"]


def __getattr__(name: str) -> Any:
    if name == "KvstowConnector":
        from kvstow.adapters.vllm.connector import KvstowConnector

        return KvstowConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
