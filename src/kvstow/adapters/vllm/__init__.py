"""A KV connector for vLLM.

    --kv-transfer-config '{"kv_connector": "KvstowConnector",
        "kv_connector_module_path": "kvstow.adapters.vllm", "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute", "kv_connector_extra_config": {}}'

connector   vLLM's questions and orders, handed to our two sides
options     what an operator may set in `kv_connector_extra_config`
protocol    what scheduler, workers and other instances tell each other
mail        datagrams between scheduler and workers, for what cannot wait for a step
identity    which computation fills the cache: checkpoint, settings, names of weights, adapters
cache/      vLLM's own cache: its layout, its pages, which computation fills it
scheduler/  one per engine: which request hands over, takes over, is stored or comes back
worker/     one per rank: pulls, leases, rows stored and loaded
engine      what vLLM must offer, checked at start
counts      what is counted, and its names on vLLM's /metrics
metrics     the same in vLLM's classes
bases       vLLM's classes that the connector extends
secondary   our stores below vLLM's own offloading, without the connector
plugin      what is changed in vLLM: the connector's name, weight versions, an option for its steps

What a request goes through; each line of the scheduler's, then of every rank's:

    store       computed    blocks that a step fills are held and queued          `recall`, `holds`
                save        rows are copied to host memory, and on to other tiers  `tiers`
                apply       all ranks have them: blocks are the engine's again
    recall      arrived     where tiers below may have more, ranks are asked       `recall`
                reach       the longest beginning that all ranks keep
                load        rows come back into blocks that the engine has given   `tiers`
    offer       finished    blocks are pinned, tickets go with the answer          `offers`
                hear        by mail at once, by the next step again: a lease       `offers`
                sent        the lease is over: blocks are the engine's again
    early pull  arrived     free blocks are taken, ranks are told by mail          `early`
                hear        a copy out of mapped memory, compared, answered        `pulls`
                all agree   the blocks enter the engine's prefix cache
    pull        reach       all tokens of the tickets but the last                 `handovers`
                load        a pull, compared; one retry; over when nothing writes  `pulls`
                held        it failed and is not quiet: its blocks are nobody's    `holds`

`KvstowConnector` is loaded when it is first asked for: all but `bases` and `secondary` import
without vLLM.
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
