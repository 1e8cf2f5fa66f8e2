"""A KV connector for vLLM: the only package that imports it.

    --kv-transfer-config '{"kv_connector": "KvstowConnector",
        "kv_connector_module_path": "kvstow.adapters.vllm", "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute", "kv_connector_extra_config": {}}'

vLLM makes one connector in its scheduler and one in every worker. Here its objects become plain
values and ours become its own; everything else is in `kvstow.adapters.connector`.
"""

from kvstow.adapters.vllm.connector import KvstowConnector

__all__ = ["KvstowConnector"]
