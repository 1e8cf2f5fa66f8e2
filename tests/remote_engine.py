"""One engine of one rank, as a process: prefills or answers a prompt with a remote store.

python remote_engine.py MODEL_DIR URL PROMPT [--rank 0 --ranks 2 --port P] [--block-tokens 16]

With several ranks the model is split by torch.distributed: each computes and keeps its own heads.
Prints one line of JSON: how many tokens came from the store, and the tokens that it answers with.
"""

import argparse
import json

import torch
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from transformers import AutoModelForCausalLM

from kvstow.adapters.transformers import ModelMemory, model_identity
from kvstow.adapters.transformers.cache import Cache
from kvstow.offload.store import Store

NEW_TOKENS = 12
STYLES = {"colwise": ColwiseParallel, "rowwise": RowwiseParallel}


def split(model, *, rank, ranks, port):
    """Leave this rank its part of the model's matrices; ranks meet at a loopback port."""
    meeting = f"tcp://127.0.0.1:{port}"
    distributed.init_process_group("gloo", init_method=meeting, rank=rank, world_size=ranks)
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("tp",))
    plan = {where: STYLES[style]() for where, style in model.config.base_model_tp_plan.items()}
    parallelize_module(model.base_model, mesh, plan)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("url")
    parser.add_argument("prompt", type=json.loads)
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--block-tokens", type=int, default=16)
    parser.add_argument("--order", default="BLHNC")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(asked.model).eval()
    identity = model_identity(model)  # before the weights are split
    if asked.ranks > 1:
        split(model, rank=asked.rank, ranks=asked.ranks, port=asked.port)
    memory = ModelMemory.of(
        model,
        budget="8MiB",
        block_tokens=asked.block_tokens,
        order=asked.order,
        tp=(asked.rank, asked.ranks),
        identity=identity,
    )
    tokens = torch.tensor([asked.prompt])
    with torch.no_grad(), Store(host="4MiB", remote=asked.url) as store:
        cache = Cache(memory, store=store, tokens=tokens)
        found = cache.found_tokens
        answer = model.generate(
            tokens, past_key_values=cache, max_new_tokens=NEW_TOKENS, do_sample=False
        )
        cache.batch.release()
        assert store.flush(60)
        said = {"found": found, "answer": answer[0, tokens.shape[1] :].tolist()}
        said |= {"misses": store.remote.misses.now, "dropped": store.remote.writes.dropped.now}
        said |= {
            "layouts": len(store.remote._directory.layouts),
            "stored": store.remote.counts.stored_rows,
        }
        print(json.dumps(said), flush=True)
    if asked.ranks > 1:
        distributed.destroy_process_group()


main()
