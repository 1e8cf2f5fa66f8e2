"""Tiny models with random weights in vLLM engines of their own, with a pool of few blocks."""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))

from vllm_engines import EngineOptions, Remote, connector, made_small


@dataclass(frozen=True, kw_only=True)
class FewBlocks(EngineOptions):
    """On a CPU, with so many blocks in the pool; the null block is one of them."""

    memory_bytes: int = 1 << 20
    max_tokens: int = 1024
    cpu: bool = True
    num_blocks: int
    ranks: int = 1

    def arguments(self) -> dict[str, Any]:
        return super().arguments() | {
            "num_gpu_blocks_override": self.num_blocks,
            "tensor_parallel_size": self.ranks,
        }


def started(
    folder: Path, config: dict[str, Any], num_blocks: int, *, ranks: int = 1, **options: Any
) -> Remote:
    """An engine of a model of that shape, made small, with kvstow's connector."""
    folder.joinpath("config.json").write_text(json.dumps(made_small(config)))
    given = FewBlocks(num_blocks=num_blocks, ranks=ranks)
    engine = Remote(5900, str(folder), given, connector("kvstow", **options))
    engine.imported()
    engine.start()
    engine.ready()
    return engine
