"""What vLLM 0.32 was seen to declare for real models on CPUs, in plain values.

tests/adapters/vllm uses it without vLLM; tests/vllm compares it with what running servers declare.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from kvstow.adapters.vllm.cache.layout import CacheDeclaration, DeclaredRegion, declared_groups
from kvstow.adapters.vllm.cache.pages import DeclaredPage
from kvstow.adapters.vllm.identity import EngineWeights
from kvstow.adapters.vllm.options import ConnectorOptions
from kvstow.adapters.vllm.scheduler.parts import EngineState
from kvstow.plan.identity import Identity
from kvstow.plan.retention import Full, Retention, Window
from kvstow.plan.spec import DType, Extent

FULL = Full()

IDENTITY = Identity.unverified("made for tests", model="m")


def pages(
    names: Sequence[str], retention: Retention, heads: int, tokens: int, content: int
) -> tuple[DeclaredPage, ...]:
    return tuple(
        DeclaredPage(
            layer=name,
            retention=retention,
            block_tokens=tokens,
            heads=Extent.whole("head", heads),
            states=tokens,
            content=content,
            dtype=DType.FLOAT32,
            kernels="CPUAttentionBackendImpl",
        )
        for name in names
    )


def smollm2(order: str, num_blocks: int = 182) -> CacheDeclaration:
    """What vLLM 0.32 declares for SmolLM2-135M in float32, 128 tokens per block."""
    page = 3 * 128 * 128 * 4
    names = [f"model.layers.{i}.self_attn.attn" for i in range(30)]
    rows = order.startswith("B")
    return CacheDeclaration(
        identity=IDENTITY,
        order=order,
        num_blocks=num_blocks,
        groups=(pages(names, FULL, heads=3, tokens=128, content=128),),
        regions=(
            DeclaredRegion(
                layers=tuple(names),
                nbytes=30 * page * num_blocks,
                layer_stride=page if rows else page * num_blocks,
                block_stride=30 * page if rows else page,
                offset=0,
            ),
        ),
    )


def gemma3(order: str, num_blocks: int = 1365) -> CacheDeclaration:
    """What vLLM 0.32 declares for Gemma-3-270M in float32: six groups of three layers that
    overlay each other, five with a window of 512 tokens."""
    page = 128 * 512 * 4
    rows = order.startswith("B")
    groups = [[f"model.layers.{i}.self_attn.attn" for i in range(g, 18, 6)] for g in range(6)]
    return CacheDeclaration(
        identity=IDENTITY,
        order=order,
        num_blocks=num_blocks,
        groups=tuple(
            pages(names, FULL if g == 5 else Window(512), heads=1, tokens=128, content=512)
            for g, names in enumerate(groups)
        ),
        regions=tuple(
            DeclaredRegion(
                layers=tuple(names),
                nbytes=3 * page * num_blocks,
                layer_stride=page if rows else page * num_blocks,
                block_stride=3 * page if rows else page,
                offset=0,
            )
            for names in groups
        ),
    )


def hybrid(order: str = "LBHNC", num_blocks: int = 5) -> CacheDeclaration:
    """Two groups that overlay each other: one set of block ids, shared columns."""
    page = 2 * 4 * 6 * 4
    windows, fulls = ["layers.0", "layers.1"], ["layers.2", "layers.3"]
    rows = order.startswith("B")
    region = DeclaredRegion(
        layers=(),
        nbytes=2 * page * num_blocks,
        layer_stride=page if rows else page * num_blocks,
        block_stride=2 * page if rows else page,
        offset=0,
    )
    return CacheDeclaration(
        identity=IDENTITY,
        order=order,
        num_blocks=num_blocks,
        groups=(pages(windows, Window(8), 2, 4, 6), pages(fulls, FULL, 2, 4, 6)),
        regions=(
            replace(region, layers=tuple(windows)),
            replace(region, layers=tuple(fulls)),
        ),
    )


def one_group(num_blocks: int = 24) -> CacheDeclaration:
    """Two layers with full attention, in rows of 4 tokens."""
    page = 2 * 4 * 6 * 4
    names = ["layers.0", "layers.1"]
    return CacheDeclaration(
        identity=IDENTITY,
        order="BLHNC",
        num_blocks=num_blocks,
        groups=(pages(names, FULL, 2, 4, 6),),
        regions=(
            DeclaredRegion(
                layers=tuple(names),
                nbytes=2 * page * num_blocks,
                layer_stride=page,
                block_stride=2 * page,
                offset=0,
            ),
        ),
    )


def v4(num_blocks: int = 512) -> CacheDeclaration:
    """What vLLM 0.32 declares for a tiny DeepSeek-V4: five groups that overlay each other, blocks
    of 4 to 256 tokens, of which only the retentions and tokens per block are as recorded."""
    kinds = (Window(128), 64), (Window(128), 64), (FULL, 256), (Window(8), 4), (Window(128), 8)
    groups = tuple(
        pages([f"layers.{g}"], retention, heads=1, tokens=tokens, content=1024 // tokens)
        for g, (retention, tokens) in enumerate(kinds)
    )
    return CacheDeclaration(
        identity=IDENTITY,
        order="BLHNC",
        num_blocks=num_blocks,
        groups=groups,
        regions=tuple(
            DeclaredRegion(
                layers=(page.layer,),
                nbytes=4096 * num_blocks,
                layer_stride=4096,
                block_stride=4096,
                offset=0,
            )
            for (page,) in groups
        ),
    )


def engine_state(
    declared: CacheDeclaration,
    options: ConnectorOptions | None = None,
    identity: Identity = IDENTITY,
    **more: Any,
) -> EngineState:
    """What the parts of a scheduler's side share, of an engine that declares this."""
    facts: dict[str, Any] = {
        "groups": declared_groups(declared),
        "num_blocks": declared.num_blocks,
        "options": options or ConnectorOptions(),
        "weights": EngineWeights(identity),
    }
    return EngineState(**facts | more)


class Pool:
    """References to blocks, as an engine counts them."""

    def __init__(self) -> None:
        self.references: Counter[int] = Counter()

    def hold(self, blocks: Sequence[int]) -> None:
        self.references.update(blocks)

    def release(self, blocks: Sequence[int]) -> None:
        self.references.subtract(blocks)
        assert min(self.references.values(), default=0) >= 0

    def is_last(self, block: int) -> bool:
        return self.references[block] == 1

    @property
    def held(self) -> set[int]:
        return {block for block, count in self.references.items() if count}
