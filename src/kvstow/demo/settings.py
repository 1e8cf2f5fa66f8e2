"""What a demo is asked to do."""

from dataclasses import dataclass
from pathlib import Path

from kvstow.plan.layout import Order


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """A demo: the model, both sides' ranks and layouts, what else to show."""

    model: str = "smollm2"
    prompts: tuple[str, ...]
    new_tokens: int = 24
    tp_prefill: int = 1
    tp_decode: int = 1
    block_tokens: int = 16
    block_tokens_decode: int = 16
    order: Order = "BLHNC"
    order_decode: Order = "BLHNC"
    memory: int = 256 << 20
    offload: Path | None = None
    kill_prefill: bool = False
