"""FlashMLA's sparse decode reads DeepSeek-V4's latents in rows of an arena.

vLLM's own kernels write and read: `quantize_and_insert_k_cache`, and what `_flashmla_C` of its
CUDA wheel has. They take pages as `[block, state, 1, 584]` bytes. Whole pages must be contiguous;
the stride between blocks is free below 2 GiB, on Hopper in multiples of 16 bytes (its loads), on
Blackwell of 576 (its tensor maps). Every byte that was not written is not-a-number.

Not run where vLLM or `_flashmla_C` cannot be imported.
"""

import importlib
import importlib.util
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from unittest import SkipTest

import torch

from kvstow.memory.arena import POISON, Arena
from kvstow.plan.group import grouped
from kvstow.plan.layout import NULL_SLABS, Layout
from kvstow.plan.models import model_layers
from kvstow.plan.pack import Site, packed_as

DEVICE = torch.device("cuda")
DIM, STATE_BYTES, SCALE_GROUP = 512, 584, 64
SCALE = DIM**-0.5
SLIDING = "model.layers.20.attn.sliding"
PLACES = [("slab", "BLHNC"), ("slab", "LBHNC"), ("union", "BLHNC"), ("separate", "BLHNC")]


@dataclass(frozen=True)
class Stored:
    """What is kept in one layer: `states` to a page, `blocks` to a sequence; `topk` are seen."""

    layer: str
    states: int
    blocks: int
    topk: int


WINDOW = Stored(SLIDING, states=64, blocks=3, topk=128)
C4 = Stored("model.layers.20.attn.c4", states=64, blocks=10, topk=512)
C128 = Stored("model.layers.21.attn.c128", states=2, blocks=70, topk=128)
KINDS = [(WINDOW,), (WINDOW, C4), (WINDOW, C128)]
SEEN = [(128, 1, 64, 65, 77), (512, 0, 1, 128, 333), (128, 0, 1, 64, 65)]
"""How many states each of five sequences sees, of the window, of C4 and of C128."""


# ── vLLM's kernels ────────────────────────────────────────────────────────────────────────


def flashmla() -> ModuleType:
    """vLLM's interface to FlashMLA; SkipTest where there is none for this device."""
    if not torch.cuda.is_available():
        raise SkipTest("no CUDA device")
    try:
        importlib.import_module("vllm._flashmla_C")
        importlib.import_module("vllm._flashmla_extension_C")
        module = importlib.import_module("vllm.v1.attention.ops.flashmla")
    except ImportError as error:
        raise SkipTest(f"FlashMLA cannot be imported: {error}") from error
    supported, reason = module.is_flashmla_sparse_supported()
    if not supported:
        raise SkipTest(f"FlashMLA: {reason}")
    return module


@cache
def cache_utils() -> ModuleType:
    """vLLM's module that writes pages, without the models beside it and what they import."""
    folder = Path(importlib.import_module("vllm").__file__).parent
    path = folder / "models/deepseek_v4/common/ops/cache_utils.py"
    spec = importlib.util.spec_from_file_location("deepseek_v4_cache_utils", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where Triton looks for the kernels' source
    spec.loader.exec_module(module)
    return module


# ── caches ────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Cache:
    """Pages of one layer, `[block, byte]`, and which blocks each sequence has, in order."""

    stored: Stored
    pages: torch.Tensor
    table: torch.Tensor

    @property
    def states(self) -> torch.Tensor:
        """`[block, state, 1, 584]`, as FlashMLA takes it."""
        content = self.pages[:, : self.stored.states * STATE_BYTES]
        return content.unflatten(1, (self.stored.states, 1, STATE_BYTES))

    def slots(self, positions: torch.Tensor) -> torch.Tensor:
        """Where states of each sequence are, in states from the first block; -1 stays -1."""
        at = positions.clamp(min=0)
        block = self.table.gather(1, at // self.stored.states)
        slots = block * self.stored.states + at % self.stored.states
        return torch.where(positions < 0, -1, slots)

    def write(self, latents: torch.Tensor) -> None:
        """Store `latents`, `[sequence, state, 512]`, with vLLM's kernel."""
        sequences, states, _ = latents.shape
        positions = torch.arange(states, device=DEVICE).expand(sequences, -1)
        cache_utils().quantize_and_insert_k_cache(
            latents.reshape(-1, DIM),
            self.pages,
            self.slots(positions).reshape(-1),
            block_size=self.stored.states,
        )

    def rearranged(self, table: torch.Tensor, num_blocks: int) -> "Cache":
        """The same pages one behind the other, the blocks of a sequence as `table` says."""
        nbytes = self.pages.shape[1]
        pages = torch.full((num_blocks, nbytes), POISON, dtype=torch.uint8, device=DEVICE)
        return Cache(self.stored, pages, table)

    def dense(self) -> "Cache":
        """No page but those of the sequences, in their order."""
        count = self.table.numel()
        return self.rearranged(torch.arange(count, device=DEVICE).view_as(self.table), count)


def planned(packing: str, order: str, kept: tuple[Stored, ...], sequences: int) -> Layout:
    """All layers of DeepSeek-V4-Flash, with a third of the slabs to spare."""
    groups = grouped(model_layers("deepseek-v4-flash").layers)
    site = Site(order=order)
    layout = packed_as(packing, groups, num_slabs=2, site=site)
    needed = sum(num_slabs(layout, stored, sequences) for stored in kept)
    return packed_as(packing, groups, num_slabs=NULL_SLABS + needed * 4 // 3 + 1, site=site)


def num_slabs(layout: Layout, stored: Stored, sequences: int) -> int:
    return -(-sequences * stored.blocks // rows_per_slab(layout, stored))


def rows_per_slab(layout: Layout, stored: Stored) -> int:
    return layout.groups[layout.layers[stored.layer][0]].rows_per_slab


def scattered(arena: Arena, kept: tuple[Stored, ...], sequences: int) -> list[Cache]:
    """Caches in random slabs, no slab for two of them, and blocks in random order."""
    layout = arena.layout
    free = (torch.randperm(layout.num_slabs - NULL_SLABS) + NULL_SLABS).tolist()
    caches = []
    for stored in kept:
        rows = rows_per_slab(layout, stored)
        slabs = [free.pop() for _ in range(num_slabs(layout, stored, sequences))]
        blocks = torch.tensor([slab * rows + row for slab in slabs for row in range(rows)])
        chosen = blocks[torch.randperm(len(blocks))[: sequences * stored.blocks]]
        table = chosen.view(sequences, stored.blocks).to(DEVICE)
        caches.append(Cache(stored, arena.page(stored.layer), table))
    return caches


def latents_of(stored: Stored, sequences: int) -> torch.Tensor:
    shape = (sequences, stored.blocks * stored.states, DIM)
    return torch.randn(shape, dtype=torch.bfloat16, device=DEVICE)


# ── decode ────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Decode:
    """One decode step: a query per sequence, and which states of each cache it sees."""

    query: torch.Tensor
    sinks: torch.Tensor
    positions: list[torch.Tensor]
    lengths: list[torch.Tensor]

    @classmethod
    def random(cls, heads: int, kept: tuple[Stored, ...], seen: list[tuple[int, ...]]) -> "Decode":
        """Random states in random order, -1 behind the last."""
        sequences = len(seen[0])
        query = torch.randn((sequences, 1, heads, DIM), dtype=torch.bfloat16, device=DEVICE)
        positions = []
        for stored, lengths in zip(kept, seen, strict=True):
            chosen = torch.full((sequences, stored.topk), -1)
            for row, length in zip(chosen, lengths, strict=True):
                row[:length] = torch.randperm(stored.blocks * stored.states)[:length]
            positions.append(chosen.to(DEVICE))
        lengths = [torch.tensor(row, dtype=torch.int32, device=DEVICE) for row in seen]
        return cls(query, torch.randn(heads, device=DEVICE), positions, lengths)

    def prepared(self, caches: list[Cache]) -> Callable[[], tuple[torch.Tensor, torch.Tensor]]:
        """FlashMLA's sparse decode on these caches, called as vLLM's DeepSeek-V4 calls it."""
        module = flashmla()
        indices = [
            cache.slots(positions).int().unsqueeze(1)
            for cache, positions in zip(caches, self.positions, strict=True)
        ]
        pages = [cache.states for cache in caches]
        more = len(caches) > 1
        schedule = module.FlashMLASchedMeta()
        return lambda: module.flash_mla_with_kvcache(
            q=self.query,
            k_cache=pages[0],
            block_table=None,
            head_dim_v=DIM,
            tile_scheduler_metadata=schedule,
            cache_seqlens=None,
            is_fp8_kvcache=True,
            indices=indices[0],
            topk_length=self.lengths[0],
            softmax_scale=SCALE,
            attn_sink=self.sinks,
            extra_k_cache=pages[1] if more else None,
            extra_indices_in_kvcache=indices[1] if more else None,
            extra_topk_length=self.lengths[1] if more else None,
            out=torch.empty_like(self.query),
        )

    def run(self, caches: list[Cache]) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = self.prepared(caches)()
        torch.cuda.synchronize()
        return out.clone(), lse.clone()

    def expected(self, arena: Arena, caches: list[Cache]) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention in float64 over what field views of the arena say."""
        pairs = list(zip(caches, self.positions, strict=True))
        values = torch.cat([read(arena, cache, positions) for cache, positions in pairs], dim=1)
        seen = torch.cat(self.positions, dim=1) >= 0
        score = self.query[:, 0].double() @ values.transpose(1, 2) * SCALE
        score = score.masked_fill(~seen[:, None], -float("inf"))
        sinks = self.sinks.double().view(1, -1, 1).expand(len(score), -1, 1)
        weights = torch.cat([score, sinks], dim=2).softmax(2)[..., :-1]
        return (weights @ values)[:, None], score.logsumexp(2)[..., None]


def read(arena: Arena, cache: Cache, positions: torch.Tensor) -> torch.Tensor:
    """`[sequence, position, 512]` in float64, dequantised, through the arena's field views."""
    at = positions.clamp(min=0)
    block = cache.table.gather(1, at // cache.stored.states)
    slot = at % cache.stored.states

    def field(name: str) -> torch.Tensor:
        view = arena.field(cache.stored.layer, name)[:, 0]
        found = view.view(torch.uint8)[block, slot]  # not every type can be indexed
        return found.view(view.dtype).double()

    powers = torch.exp2(field("scale")[..., : (DIM - 64) // SCALE_GROUP] - 127)
    latent = field("latent") * powers.repeat_interleave(SCALE_GROUP, dim=-1)
    return torch.cat([latent, field("rope")], dim=-1)


def close(found: tuple[torch.Tensor, ...], expected: tuple[torch.Tensor, ...]) -> None:
    """Outputs agree to bfloat16's precision, log-sum-exps to that of sums in float32."""
    torch.testing.assert_close(found[0].double(), expected[0], rtol=1.6e-2, atol=4e-3)
    torch.testing.assert_close(found[1].double(), expected[1], rtol=1e-4, atol=1e-3)


# ── tests ─────────────────────────────────────────────────────────────────────────────────


def test_rows_of_an_arena_give_what_a_dense_cache_and_what_field_views_give(record_property):
    flashmla()
    outcomes = {}
    for packing, order in PLACES:
        for kept, heads in [(kept, heads) for kept in KINDS for heads in (64, 128)]:
            what = f"{packing} {order}, {' and '.join(x.layer for x in kept)}, {heads} heads"
            try:
                outcomes[what] = check(packing, order, kept, heads)
            except RuntimeError as error:  # FlashMLA's own checks
                outcomes[what] = f"refused: {error}"
    record_property("placements", outcomes)
    refused = {what: said for what, said in outcomes.items() if said.startswith("refused")}
    assert not refused, refused


def check(packing: str, order: str, kept: tuple[Stored, ...], heads: int) -> str:
    torch.manual_seed(heads)
    seen = [SEEN[(WINDOW, C4, C128).index(stored)] for stored in kept]
    sequences = len(seen[0])
    with Arena(planned(packing, order, kept, sequences), device=DEVICE) as arena:
        arena.bytes.fill_(POISON)
        caches = scattered(arena, kept, sequences)
        dense = [cache.dense() for cache in caches]
        for rows, pages in zip(caches, dense, strict=True):
            latents = latents_of(rows.stored, sequences)
            rows.write(latents)
            pages.write(latents)
            assert torch.equal(rows.pages[rows.table.flatten()], pages.pages), "written bytes"
        before = arena.bytes.clone()
        step = Decode.random(heads, kept, seen)
        found, same = step.run(caches), step.run(dense)
        assert all(map(torch.equal, found, same)), "rows of an arena and a dense cache differ"
        close(found, step.expected(arena, caches))
        assert torch.equal(arena.bytes, before), "decode changed the arena"
        return f"taken, block strides {[cache.pages.stride(0) for cache in caches]}"


def test_one_byte_of_a_scale_changes_its_sequence_and_no_other():
    flashmla()
    torch.manual_seed(0)
    kept, seen, changed = KINDS[1], SEEN[:2], 4
    with Arena(planned("slab", "BLHNC", kept, 5), device=DEVICE) as arena:
        arena.bytes.fill_(POISON)
        caches = scattered(arena, kept, 5)
        for cache in caches:
            cache.write(latents_of(cache.stored, 5))
        step = Decode.random(64, kept, seen)
        before, _ = step.run(caches)
        for cache, positions in zip(caches, step.positions, strict=True):
            add_to_scale(arena, cache, changed, unseen(cache, positions[changed]), 1)
            assert torch.equal(step.run(caches)[0], before), "a state that is not seen matters"
            position = int(positions[changed, 0])
            add_to_scale(arena, cache, changed, position, 1)
            after = step.run(caches)
            same = [torch.equal(old, new) for old, new in zip(before, after[0], strict=True)]
            assert same == [sequence != changed for sequence in range(5)], same
            close(after, step.expected(arena, caches))
            add_to_scale(arena, cache, changed, position, -1)
            assert torch.equal(step.run(caches)[0], before), "the byte was put back"


def unseen(cache: Cache, positions: torch.Tensor) -> int:
    everything = set(range(cache.stored.blocks * cache.stored.states))
    return min(everything - set(positions.tolist()))


def add_to_scale(arena: Arena, cache: Cache, sequence: int, position: int, value: int) -> None:
    block = int(cache.table[sequence, position // cache.stored.states])
    slot = position % cache.stored.states
    arena.field(cache.stored.layer, "scale")[block, 0, slot, 3] += value


def test_how_long_rows_take_beside_pages_one_behind_the_other(record_property):
    """No limit is asserted: three caches of the same bytes, microseconds per call."""
    flashmla()
    torch.manual_seed(0)
    sequences = 256
    kept = (WINDOW, Stored(C4.layer, states=64, blocks=16, topk=512))
    step = Decode.random(64, kept, [(128,) * sequences, (512,) * sequences])
    with Arena(planned("slab", "BLHNC", kept, sequences), device=DEVICE) as arena:
        rows = scattered(arena, kept, sequences)
        shuffled = [torch.randperm(cache.table.numel(), device=DEVICE) for cache in rows]
        caches = {
            "rows": rows,
            "scattered pages": [
                cache.rearranged(table.view_as(cache.table), table.numel())
                for cache, table in zip(rows, shuffled, strict=True)
            ],
            "pages in order": [cache.dense() for cache in rows],
        }
        for several in zip(*caches.values(), strict=True):
            latents = latents_of(several[0].stored, sequences)
            for cache in several:
                cache.write(latents)
        calls = {name: step.prepared(each) for name, each in caches.items()}
        outputs = [call()[0].clone() for call in calls.values()]
        assert all(torch.equal(outputs[0], output) for output in outputs)
        record_property("sparse decode", compared(calls, sequences, rows))


def compared(calls: dict[str, Callable[[], object]], sequences: int, rows: list[Cache]) -> dict:
    """Median over rounds in which every call has its turn."""
    rounds = [{name: microseconds(call) for name, call in calls.items()} for _ in range(15)]
    figures = {name: round(statistics.median(each[name] for each in rounds), 2) for name in calls}
    return {
        "sequences": sequences,
        "heads": 64,
        "states seen": [cache.stored.topk for cache in rows],
        "block strides": [cache.pages.stride(0) for cache in rows],
        "microseconds": figures,
        "rows / pages in order": round(figures["rows"] / figures["pages in order"], 4),
        "rows / scattered pages": round(figures["rows"] / figures["scattered pages"], 4),
    }


def microseconds(call: Callable[[], object], repeats: int = 20) -> float:
    """Per call, on the device: the calls wait in its queue behind a pause."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(20_000_000)
    begin.record()
    for _ in range(repeats):
        call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1e3 / repeats
