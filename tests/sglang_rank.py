"""One rank of SGLang's tensor parallelism: stores pages, starts again, and fetches them.

python sglang_rank.py RANK KIND FOLDER < options
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch

import sglang_engine as sgl

TOKENS = list(range(100, 124))


def pages(host: Any, indices: torch.Tensor) -> torch.Tensor:
    starts = indices.tolist()[:: host.page_size]
    return torch.cat([host.get_data_page(start) for start in starts])


def contents(rank: int, kind: str, host: Any) -> torch.Tensor:
    """What a rank has computed: shards of their own, or copies of one latent cache."""
    seed = torch.Generator().manual_seed(0 if kind == "mla" else 1 + rank)
    return torch.randn(host.kv_buffer.shape, generator=seed).to(host.dtype)


def main() -> None:
    rank, kind, folder = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
    options = json.load(sys.stdin)
    sgl.meet(folder, rank, 2)
    with sgl.engine(tp=(rank, 2)):
        device, host = getattr(sgl, kind)("page_first")
        first = sgl.controller(device, host, options, folder)
        host.kv_buffer.copy_(contents(rank, kind, host))
        given = torch.arange(8, 32)
        wanted = pages(host, given).clone()
        first.write_storage(given, TOKENS, hash_value=first.get_hash_str(TOKENS, None, 4))
        stored = first.ack_backup_queue.get(timeout=60).completed_tokens
        is_writer = first.storage_config.is_storage_writer
        torch.distributed.barrier()
        first.detach_storage_backend()

        device, host = getattr(sgl, kind)("page_first")
        second = sgl.controller(device, host, options, folder)
        operation = second.prefetch("request", TOKENS)
        hit = second.prefetch_hit_queue.get(timeout=60).storage_hit_count
        operation.host_indices = second.alloc_prefetch_host_buffers(operation, hit)
        second.prefetch_buffer.put(operation)
        fetched = second.ack_prefetch_queue.get(timeout=60).completed_tokens
        same = torch.equal(wanted, pages(host, operation.host_indices))
        torch.distributed.barrier()
        second.detach_storage_backend()
    stored = stored if is_writer else len(TOKENS)
    print(f"stored {stored} tokens, fetched {fetched}, {'equal' if same else 'other'}")


if __name__ == "__main__":
    main()
