"""Tiny models with random weights in vLLM engines of their own, with a pool of few blocks."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_engines import EngineOptions, Remote, connector, made_small


@dataclass(frozen=True, kw_only=True)
class FewBlocks(EngineOptions):
    """On a CPU, with so many blocks in the pool; the null block is one of them."""

    memory_bytes: int = 1 << 20
    max_tokens: int = 1024
    cpu: bool = True
    num_blocks: int
    ranks: int = 1
    draft: str = ""
    """A model that drafts two tokens by EAGLE."""

    def arguments(self) -> dict[str, Any]:
        drafts = {"method": "eagle", "model": self.draft, "num_speculative_tokens": 2}
        return (
            super().arguments()
            | {
                "load_format": "auto",
                "num_gpu_blocks_override": self.num_blocks,
                "tensor_parallel_size": self.ranks,
            }
            | ({"speculative_config": drafts} if self.draft else {})
        )


def checkpoint(folder: Path, config: dict[str, Any], seed: int = 1) -> Path:
    """A model of that shape, made small, on disk, whose text depends on all of its prompt.

    On CPUs vLLM packs the weights of layers when it loads them: none can be drawn afterwards, and
    with vLLM's own dummies attention says nothing.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    shape = json.dumps(made_small(config))
    folder.joinpath("config.json").write_text(shape)
    if not folder.joinpath("model.safetensors").exists():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                draw(name, parameter, tied=config["tie_word_embeddings"])
        model.save_pretrained(folder)
        folder.joinpath("config.json").write_text(shape)
    return folder


def draw(name: str, parameter: Any, *, tied: bool) -> None:
    """Random weights of a layer. Attention is made sharp where queries and keys are normed, and
    embeddings small where they are the output, too: large ones repeat the last token for ever."""
    if parameter.dim() > 1:
        scale = 2.0 / parameter.shape[-1] ** 0.5
        if "embed" in name:
            scale = scale / 40 if tied else 1.0
        parameter.normal_(0.0, scale)
    elif "q_norm" in name or "k_norm" in name:
        parameter.fill_(1.0)


def started(
    folder: Path,
    config: dict[str, Any],
    num_blocks: int,
    *,
    ranks: int = 1,
    transfer: dict[str, Any] | None = None,
    **options: Any,
) -> Remote:
    """An engine of a model of that shape, made small, with kvstow's connector, or another one."""
    checkpoint(folder, config)
    given = FewBlocks(num_blocks=num_blocks, ranks=ranks)
    # port 0: each takes a free one
    engine = Remote(0, str(folder), given, transfer or connector("kvstow", **options))
    engine.imported()
    engine.start()
    engine.ready()
    return engine
