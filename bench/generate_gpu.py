# ruff: noqa: E402
"""Greedy generation on a GPU: rows read in place against transformers' own static cache.

    PYTHONPATH=src python bench/generate_gpu.py --json bench/results/generate_gpu.json

Both run `model.generate` on the same random-weight Llama and the same prompts, one after the
other in one process. The static cache compiles its decode step, as transformers does by default
on CUDA (`--no-compile` turns that off). Reported, best of the repeats: tokens per second of the
whole call and of decoding alone (the call less one that stops after the first token); and the
share of tokens that agree: bfloat16 sums in another order may choose another token now and then,
and after the first difference two texts have nothing to do with each other.
"""

import os
import sys

sys.path[0] = os.path.dirname(sys.path[0])

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from bench.machine import machine
from transformers import LlamaConfig, LlamaForCausalLM

from kvstow.adapters.transformers import Cache, ModelMemory


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=4096, help="prompt and answer together")
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--block-tokens", type=int, default=16)
    parser.add_argument("--order", default="BLHNC")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def made(asked: argparse.Namespace) -> LlamaForCausalLM:
    torch.manual_seed(0)
    head_dim = asked.hidden // asked.heads
    config = LlamaConfig(
        vocab_size=32000,
        hidden_size=asked.hidden,
        intermediate_size=asked.hidden * 7 // 2,
        num_hidden_layers=asked.layers,
        num_attention_heads=asked.heads,
        num_key_value_heads=asked.kv_heads,
        head_dim=head_dim,
        max_position_embeddings=2 * asked.tokens,
        eos_token_id=None,
        pad_token_id=0,
    )
    with torch.device(asked.device):
        model = LlamaForCausalLM._from_config(
            config, dtype=getattr(torch, asked.dtype), attn_implementation="sdpa"
        )
    return model.eval()


def synchronised(asked: argparse.Namespace) -> None:
    if asked.device.startswith("cuda"):
        torch.cuda.synchronize()


def timed(
    asked: argparse.Namespace, call: Callable[[], torch.Tensor]
) -> tuple[float, torch.Tensor]:
    synchronised(asked)
    start = time.perf_counter()
    out = call()
    synchronised(asked)
    return time.perf_counter() - start, out


def budget_of(asked: argparse.Namespace, model: LlamaForCausalLM) -> int:
    per_token = 2 * asked.kv_heads * (asked.hidden // asked.heads) * model.dtype.itemsize
    tokens = asked.batch * (asked.tokens + 2 * asked.block_tokens)
    return int(asked.layers * per_token * tokens * 1.02)


def main() -> None:
    asked = parsed()
    model = made(asked)
    ids = torch.randint(
        5, 32000, (asked.batch, asked.tokens - asked.new_tokens), device=asked.device
    )
    mask = torch.ones_like(ids)
    wishes: dict[str, Any] = {"attention_mask": mask, "do_sample": False, "use_cache": True}

    def static(new_tokens: int) -> torch.Tensor:
        return model.generate(
            ids,
            max_new_tokens=new_tokens,
            min_new_tokens=new_tokens,
            cache_implementation="static",
            disable_compile=asked.no_compile,
            **wishes,
        )

    results: dict[str, Any] = {"static": runs(asked, static)}
    torch.compiler.reset()
    if asked.device.startswith("cuda"):
        torch.cuda.empty_cache()
    memory = ModelMemory.of(
        model,
        budget=budget_of(asked, model),
        block_tokens=asked.block_tokens,
        order=asked.order,
        in_place=True,
    )

    def rows(new_tokens: int) -> torch.Tensor:
        with Cache(memory) as cache:
            return model.generate(
                ids,
                max_new_tokens=new_tokens,
                min_new_tokens=new_tokens,
                past_key_values=cache,
                **wishes,
            )

    results["rows"] = runs(asked, rows)
    theirs, ours = results["static"].pop("out"), results["rows"].pop("out")
    answers = theirs[:, ids.shape[1] :] == ours[:, ids.shape[1] :]
    report = {
        "machine": machine() | {"transformers": transformers.__version__},
        "asked": {k: v for k, v in vars(asked).items() if k != "json"},
        "row_bytes": memory.layout.row_bytes(0),
        "results": results,
        "ratio": results["rows"]["tokens_per_second"] / results["static"]["tokens_per_second"],
        "decode_ratio": results["rows"]["decode_tokens_per_second"]
        / results["static"]["decode_tokens_per_second"],
        "first_tokens_equal": float(answers[:, 0].float().mean()),
        "tokens_equal": float(answers.float().mean()),
    }
    print(json.dumps(report, indent=2))
    if asked.json is not None:
        asked.json.parent.mkdir(parents=True, exist_ok=True)
        asked.json.write_text(json.dumps(report, indent=2) + "\n")


def runs(asked: argparse.Namespace, call: Callable[[int], torch.Tensor]) -> dict[str, Any]:
    """The first call of each length compiles, and is not counted."""
    call(1)
    call(asked.new_tokens)
    first, whole, out = [], [], None
    for _ in range(asked.repeats):
        first.append(timed(asked, lambda: call(1))[0])
        seconds, out = timed(asked, lambda: call(asked.new_tokens))
        whole.append(seconds)
    made_tokens = asked.batch * asked.new_tokens
    decode = min(whole) - min(first)
    return {
        "seconds": min(whole),
        "prefill_seconds": min(first),
        "tokens_per_second": made_tokens / min(whole),
        "decode_tokens_per_second": asked.batch * (asked.new_tokens - 1) / decode,
        "decode_ms_per_step": decode / (asked.new_tokens - 1) * 1e3,
        "out": out,
    }


if __name__ == "__main__":
    main()
