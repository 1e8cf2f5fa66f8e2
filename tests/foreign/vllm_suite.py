"""vLLM's own tests of connectors, with ours: `tests/v1/kv_connector/unit` of its distribution.

They make schedulers and requests with functions of their `utils`. Here these take our connector; a
request that has been prefilled elsewhere brings the tickets of another scheduler, which prefilled
it. What the tests leave out, a model on disk and where layers lie in memory, is made up.
"""

import json
import sys
from functools import cache
from importlib import import_module
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

CONFIG = {
    "model_type": "opt",
    "architectures": ["OPTForCausalLM"],
    "hidden_size": 32,
    "word_embed_proj_dim": 32,
    "ffn_dim": 48,
    "num_attention_heads": 4,
    "num_hidden_layers": 1,
    "vocab_size": 512,
    "max_position_embeddings": 12_000,
    "torch_dtype": "float16",
}


def replace_vllm() -> None:
    """Our connector in the functions of vLLM's tests that make configurations, schedulers and
    requests. Called before the tests are imported, in the directory that has them."""
    sys.path.insert(0, str(Path.cwd()))
    utils: Any = import_module("tests.v1.kv_connector.unit.utils")
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheTensor

    from kvstow.adapters.vllm.protocol import WorkerEndpoint

    model = Path(mkdtemp(prefix="kvstow-foreign-"))
    (model / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    worker = WorkerEndpoint(
        agent="p-0-0", start="s", address="tcp://127.0.0.1:1", key="", fingerprint="f" * 64
    )
    make_scheduler, make_request = utils.create_scheduler, utils.create_request

    def cache_config(num_blocks: int, kv_cache_tensors: object, kv_cache_groups: list[Any]) -> Any:
        """With a place for every layer: groups overlay each other, layer by layer."""
        pages = [
            (group.layer_names, group.kv_cache_spec.page_size_bytes) for group in kv_cache_groups
        ]
        size = max(len(names) * page for names, page in pages) * num_blocks
        tensors = [
            KVCacheTensor(size, list(names), layer_stride=page * num_blocks, block_stride=page)
            for names, page in pages
        ]
        return KVCacheConfig(num_blocks, tensors, kv_cache_groups, kv_cache_layout="LBNHC")

    def create_scheduler(*args: Any, **wishes: Any) -> Any:
        """A scheduler whose connector has met its worker."""
        scheduler = make_scheduler(*args, **wishes)
        scheduler.connector._scheduler_side.meet([worker])
        return scheduler

    @cache
    def prefill() -> Any:
        return create_scheduler(utils.create_vllm_config())

    def create_request(request_id: int | None = None, **wishes: Any) -> Any:
        request = make_request(request_id, **wishes)
        if wishes.get("do_remote_prefill"):
            request.kv_transfer_params = tickets(request)
        return request

    def tickets(request: Any) -> Any:
        """What the other scheduler answers that has computed the prompt."""
        asks = make_request(1_000_000 + next(utils._request_count), do_remote_decode=True)
        asks = utils.Request(
            request_id=asks.request_id,
            prompt_token_ids=list(request.prompt_token_ids),
            sampling_params=asks.sampling_params,
            pooling_params=None,
            mm_features=None,
            block_hasher=request._block_hasher,
        )
        asks.kv_transfer_params = {"do_remote_decode": True}
        prefill().add_request(asks)
        while not asks.is_finished():
            result = utils.create_model_runner_output([asks])
            answer = prefill().update_from_output(prefill().schedule(), result)
        sent = utils.create_model_runner_output([], finished_sending={asks.request_id})
        prefill().update_from_output(prefill().schedule(), sent)
        return answer[0].outputs[0].kv_transfer_params

    config: Any = utils.create_vllm_config
    names = config.__code__.co_varnames[: config.__code__.co_argcount]
    ours = {
        "model": str(model),
        "kv_role": "kv_both",
        "kv_connector": "KvstowConnector",
        "kv_connector_module_path": "kvstow.adapters.vllm",
        "kv_connector_extra_config": {"unverified": "a test"},
    }
    usual = dict(zip(names, config.__defaults__, strict=True)) | ours
    config.__defaults__ = tuple(usual[name] for name in names)
    utils.KVCacheConfig = cache_config
    utils.create_scheduler, utils.create_request = create_scheduler, create_request
