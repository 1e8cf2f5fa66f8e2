"""One number for what blocks hold. The oracle is the definition in docs/concepts/digest.md,
written out in Python integers over a dictionary of logical bytes."""

from dataclasses import replace
from hashlib import blake2b
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstow.errors import BlockError, SpecError
from kvstow.memory.arena import Arena
from kvstow.memory.digest import (
    DigestCount,
    DigestOf,
    _on_device,
    _parts,
    counted_states,
    digest,
    prepared,
)
from kvstow.plan.group import grouped
from kvstow.plan.layout import ORDERS, Layout
from kvstow.plan.pack import Site, packed
from kvstow.plan.retention import Chunk, Encoder, Full, State, Window
from kvstow.plan.spec import DType, Extent, Field, LayerSpec
from kvstow.route.blocks import Blocks
from kvstow.route.sources import sources
from planning import attention, section_numbers
from strategies import group_bytes, listed, models, served, value

MASK = (1 << 64) - 1


# ── the definition, once more ─────────────────────────────────────────────────────────


def mixed(x: int) -> int:
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return (x ^ (x >> 31)) | 1


def seed(*names: str) -> int:
    text = b"\0".join([b"kvstow digest 1", *(name.encode() for name in names)])
    return int.from_bytes(blake2b(text, digest_size=8).digest(), "little")


def spelled_out(
    layout: Layout,
    memory: np.ndarray,
    blocks: dict[int, Blocks],
    last: int,
    every: int = 1,
    phase: int = 0,
) -> int:
    """Byte by byte: value · 256^(place in its word) · T · P."""
    total = 0
    step = 0x9E3779B97F4A7C15
    for group, held in blocks.items():
        for spec in layout.groups[group].group.layers:
            _, _, place = layout.layers[spec.name]
            low, high = counted_states(layout.groups[group].group, spec, last, 0)
            for block, logical in zip(held.ids.tolist(), held.index.tolist(), strict=True):
                for n in range(spec.states):
                    state = logical * spec.states + n
                    if not low <= state < high:
                        continue
                    if state % every != phase:
                        continue
                    t = mixed((seed("layer", spec.name) + (state + 1) * step) & MASK)
                    for h, head in enumerate(
                        x for lo, hi in spec.heads.pieces for x in range(lo, hi)
                    ):
                        for field in spec.fields:
                            offset, head_stride, token_stride = section_numbers(
                                place, field.section
                            )
                            cell = offset + block * place[0].block_stride
                            cell += h * head_stride + n * token_stride
                            start = cell + spec.field_offsets[field.name]
                            for i, (word, shift) in enumerate(words(spec, field, head)):
                                p = mixed((seed("field", field.name) + (word + 1) * step) & MASK)
                                total += (int(memory[start + i]) << shift) * t * p
    return total & MASK


def words(spec: LayerSpec, field: Field, head: int) -> list[tuple[int, int]]:
    """Of each byte of a field in memory: its word's number, and its place in the word in bits."""
    *leading, last = field.axes
    lines = [head]
    for axis in leading:
        lines = [
            line * axis.total + x for line in lines for lo, hi in axis.pieces for x in range(lo, hi)
        ]
    bits = field.dtype.bits
    per_line = -(-last.total * bits // 32)
    places = [b for lo, hi in last.pieces for b in range(lo * bits // 8, hi * bits // 8)]
    return [(line * per_line + b // 4, b % 4 * 8) for line in lines for b in places]


KINDS = {
    "bf16": attention("l.0", heads=2, dim=4, tokens=2),
    "odd": attention("l.0", heads=3, dim=3, tokens=2),
    "fp8": attention("l.0", heads=1, dim=5, tokens=3, dtype=DType.FLOAT8_E4M3),
    "int4": attention("l.0", heads=2, dim=6, tokens=1, dtype=DType.INT4),
    "long": attention("l.0", heads=2, dim=2, tokens=37),
    "wide": attention("l.0", heads=2, dim=130, tokens=17),
    "sections": attention("l.0", heads=2, dim=6, tokens=3, value_section=1),
    "f64": attention("l.0", heads=2, dim=2, tokens=2, dtype=DType.FLOAT64),
    "pieces": LayerSpec(
        name="l.0",
        retention=State(),
        block_tokens=8,
        states=1,
        heads=Extent.whole("head", 1),
        fields=(
            Field(
                "conv",
                DType.BFLOAT16,
                (Extent.whole("tap", 2), Extent("channel", 11, ((1, 4), (5, 6), (8, 11)))),
            ),
            Field("ssm", DType.FLOAT32, (Extent("row", 4, ((2, 4),)), Extent.whole("state", 3))),
        ),
    ),
}


@pytest.mark.parametrize("kind", sorted(KINDS))
@pytest.mark.parametrize("order", ["BLHNC", "LBNHC"])
def test_the_digest_is_its_definition_spelled_out(kind, order):
    layout = packed(grouped([KINDS[kind]]), num_slabs=5, site=Site(order=order))
    blocks = {0: Blocks.first([3] if kind == "pieces" else [3, 1])}
    with Arena(layout) as arena:
        arena.bytes.random_(0, 256)
        wanted = spelled_out(
            layout, arena.bytes.numpy(), blocks, layout.groups[0].group.block_tokens
        )
        assert digest(arena, blocks, layout.groups[0].group.block_tokens) == wanted
        assert kernel_digest(arena, blocks, layout.groups[0].group.block_tokens) == wanted


GOLDEN = {
    "bf16": 0xE61A61BC86E39835,
    "f64": 0x3928336610135F9F,
    "fp8": 0x4DD025A190D5C40F,
    "int4": 0x5BF960E0AC7D10C9,
    "long": 0x8853F992285080F0,
    "odd": 0xDEE53926E81D0899,
    "pieces": 0x10DC8C1E1E9985D9,
    "wide": 0x767D184CEF6133EF,
}
"""Digests are compared between processes that may have different versions: these never change."""


@pytest.mark.parametrize("kind", sorted(GOLDEN))
@pytest.mark.parametrize("order", ORDERS)
def test_the_digest_of_known_content_is_the_number_it_has_always_been(kind, order):
    layout = packed(grouped([KINDS[kind]]), num_slabs=5, site=Site(order=order))
    ids = [3] if kind == "pieces" else [3, 1]
    with Arena(layout) as arena:
        arena.bytes.random_(0, 256)
        raw = arena.tensor("l.0").view(torch.uint8)
        for logical, block in enumerate(ids):
            page = torch.arange(raw[block].numel()) * 37 + 101 * logical + 11
            raw[block] = page.remainder(251).to(torch.uint8).reshape(raw[block].shape)
        num_tokens = layout.groups[0].group.block_tokens * len(ids)
        assert digest(arena, {0: Blocks.first(ids)}, num_tokens) == GOLDEN[kind]


@pytest.mark.parametrize("order", ORDERS)
def test_content_in_sections_has_the_number_that_it_has_in_cells(order):
    specs = [attention("l.0", heads=2, dim=6, tokens=3, value_section=n) for n in (0, 1)]
    layouts = [packed(grouped([spec]), num_slabs=5, site=Site(order=order)) for spec in specs]
    with Arena(layouts[0]) as cells, Arena(layouts[1]) as sections:
        cells.bytes.random_(0, 256)
        sections.bytes.random_(0, 256)
        for name in ("k", "v"):
            sections.field("l.0", name)[:] = cells.field("l.0", name)
        assert digest(sections, [3, 1], 5) == digest(cells, [3, 1], 5)


def part_of(arena: Arena, blocks: dict[int, Blocks], num_tokens: int, **which: Any) -> int:
    """The digest of part of what the blocks hold."""
    return prepared(arena, [DigestOf(blocks, num_tokens, **which)])()[0]


def kernel_digest(arena: Arena, blocks: dict[int, Blocks], num_tokens: int, **which: Any) -> int:
    """What the Triton kernel makes of host memory, in its interpreter."""
    parts = _parts(arena, DigestOf(blocks, num_tokens, **which))
    return DigestCount(_on_device(arena, [parts]))()[0]


@settings(max_examples=15)
@given(st.data())
def test_the_kernel_and_the_host_find_the_same_number(data):
    model = data.draw(models(most_layers=2))
    num_tokens = data.draw(st.integers(1, 6))
    side = data.draw(served(model, tps=st.just(1), most_tokens=4))
    layout = side.layout(model, 0, 0, num_tokens)
    blocks = data.draw(listed(layout, num_tokens))
    with Arena(layout) as arena:
        arena.bytes.random_(0, 256)
        assert kernel_digest(arena, blocks, num_tokens) == digest(arena, blocks, num_tokens)


@settings(max_examples=25)
@given(st.data())
def test_some_heads_are_the_same_on_host_and_kernel_and_all_heads_add_up(data):
    model = data.draw(models(most_layers=2))
    num_tokens = data.draw(st.integers(1, 6))
    layout = data.draw(served(model, most_tokens=4)).layout(model, 0, 0, num_tokens)
    blocks = data.draw(listed(layout, num_tokens))
    most = max(spec.heads.total for _, spec, _ in layout.layers.values())
    cuts = sorted(data.draw(st.sets(st.integers(1, most), max_size=3)) | {0, most})
    with Arena(layout) as arena:
        arena.bytes.random_(0, 256)
        parts = [part_of(arena, blocks, num_tokens, heads=heads) for heads in pairwise(cuts)]
        assert sum(parts) & MASK == digest(arena, blocks, num_tokens)
        for heads, part in zip(pairwise(cuts), parts, strict=True):
            assert kernel_digest(arena, blocks, num_tokens, heads=heads) == part


@settings(max_examples=25)
@given(st.data())
def test_a_pick_of_states_is_its_definition_on_host_and_kernel_and_all_picks_add_up(data):
    model = data.draw(models(most_layers=2))
    num_tokens = data.draw(st.integers(1, 9))
    side = data.draw(served(model, tps=st.just(1), most_tokens=4))
    layout = side.layout(model, 0, 0, num_tokens)
    blocks = data.draw(listed(layout, num_tokens))
    every = data.draw(st.integers(1, 5))
    with Arena(layout) as arena:
        arena.bytes.random_(0, 256)
        memory = arena.bytes.numpy()
        parts = [part_of(arena, blocks, num_tokens, every=every, phase=p) for p in range(every)]
        for phase, part in enumerate(parts):
            assert part == spelled_out(layout, memory, blocks, num_tokens, every, phase)
            assert part == kernel_digest(arena, blocks, num_tokens, every=every, phase=phase)
        assert sum(parts) & MASK == digest(arena, blocks, num_tokens)


# ── the same content is the same number ───────────────────────────────────────────────


@settings(max_examples=40)
@given(st.data())
def test_order_ranks_block_size_and_packing_do_not_change_the_sum_over_ranks(data):
    model = data.draw(models())
    num_tokens = data.draw(st.integers(1, 20))
    sums = []
    for _ in range(2):
        side = data.draw(served(model, most_tokens=8))
        layouts = [
            side.layout(model, t, p, num_tokens) for t in range(side.tp) for p in range(side.pp)
        ]
        whole = replace(side, tp=1, pp=1).layout(model, 0, 0, num_tokens)
        total = 0
        for part in sources(layouts, whole):
            layout, claims = layouts[part.index], part.claims
            blocks = data.draw(listed(layout, num_tokens))
            with Arena(layout) as arena:
                arena.bytes.random_(0, 256)
                write(arena, blocks)
                total += part_of(arena, blocks, num_tokens, claims=claims)
        with Arena(whole) as arena:
            blocks = data.draw(listed(whole, num_tokens))
            write(arena, blocks)
            sums += [total & MASK, digest(arena, blocks, num_tokens)]
    assert len(set(sums)) == 1


def write(arena: Arena, blocks: dict[int, Blocks]) -> None:
    """Give every logical byte the value that belongs to it."""
    memory = arena.bytes.numpy()
    for group, held in blocks.items():
        found = group_bytes(arena.layout, group, held)
        memory[found.address] = value(found.layer, found.number)


def test_tokens_can_be_digested_apart_and_add_up():
    layout = packed(grouped([attention("l", tokens=4)]), num_slabs=5)
    blocks = {0: Blocks.first([1, 3, 2])}
    with Arena(layout) as arena:
        arena.bytes.random_(0, 256)
        whole = digest(arena, blocks, 11)
        for cut in range(12):
            first = digest(arena, blocks, cut)
            assert (first + part_of(arena, blocks, 11, start_token=cut)) & MASK == whole


# ── different content is a different number ───────────────────────────────────────────


@pytest.mark.parametrize("kind", ["bf16", "odd", "int4", "pieces"])
def test_every_single_flipped_bit_that_counts_is_seen_and_no_other_matters(kind):
    layout = packed(grouped([KINDS[kind]]), num_slabs=3)
    spec = KINDS[kind]
    blocks = {0: Blocks.first([2] if kind == "pieces" else [2, 1])}
    num_tokens = spec.block_tokens + 1 if kind == "bf16" else spec.block_tokens
    counted = {
        int(address)
        for group, held in blocks.items()
        for address, first in zip(
            *(getattr(group_bytes(layout, group, held), n) for n in ("address", "first_token")),
            strict=True,
        )
        if first < num_tokens
    }
    with Arena(layout) as arena:
        arena.bytes.random_(0, 256)
        before = digest(arena, blocks, num_tokens)
        memory = arena.bytes.numpy()
        for address in range(layout.nbytes):
            for bit in (0, 3, 7):
                memory[address] ^= 1 << bit
                assert (digest(arena, blocks, num_tokens) != before) == (address in counted)
                memory[address] ^= 1 << bit


def test_the_same_bit_flipped_in_two_words_is_seen():
    """A sum of 64-bit words times odd keys would miss the top bits of any two words."""
    layout = packed(grouped([attention("l", heads=2, dim=8, tokens=4)]), num_slabs=3)
    blocks = {0: Blocks.first([2])}
    with Arena(layout) as arena:
        arena.bytes.random_(0, 256)
        before = digest(arena, blocks, 4)
        row = layout.runs(0, 2)[0]
        memory = arena.bytes.numpy()
        tops = range(row.offset + 7, row.end, 8)
        for a in tops:
            for b in tops:
                if a < b:
                    memory[a] ^= 0x80
                    memory[b] ^= 0x80
                    assert digest(arena, blocks, 4) != before
                    memory[a] ^= 0x80
                    memory[b] ^= 0x80


# ── which tokens count ────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("retention", "tokens", "counted"),
    [
        (Full(), 7, set(range(7))),
        (Window(3), 7, {5, 6}),
        (Window(1), 7, set()),
        (Window(9), 7, set(range(7))),
        (Chunk(4), 7, {4, 5, 6}),
        (Chunk(4), 8, set()),
        (Encoder(5), 7, set(range(5))),
    ],
)
def test_what_the_next_token_looks_at_counts_and_nothing_else(retention, tokens, counted):
    layout = packed(grouped([attention("l", tokens=2, retention=retention)]), num_slabs=8)
    blocks = {0: Blocks.first([3, 1, 5, 2])}
    with Arena(layout) as arena:
        arena.bytes.random_(0, 256)
        before = digest(arena, blocks, tokens)
        seen = set()
        for token in range(8):
            page = arena.tensor("l").view(torch.uint8)[blocks[0].ids[token // 2], :, token % 2]
            page += 1
            if digest(arena, blocks, tokens) != before:
                seen.add(token)
            page -= 1
        assert seen == counted


def test_a_list_that_lacks_a_block_is_refused():
    layout = packed(grouped([attention("l", tokens=2)]), num_slabs=8)
    with Arena(layout) as arena:
        held = {0: Blocks(np.array([4, 5]), np.array([0, 2]))}
        with pytest.raises(BlockError, match=r"needs logical blocks \[1\]"):
            digest(arena, held, 6)
        with pytest.raises(BlockError, match="are not in"):
            digest(arena, {0: Blocks.first([99])}, 2)


def test_blocks_are_listed_by_group_number_by_name_or_as_the_ids_of_the_only_group():
    one = packed(grouped([attention("l", tokens=2)]), num_slabs=8)
    with Arena(one) as arena:
        arena.bytes.random_(0, 256)
        wanted = digest(arena, {0: Blocks.first([4, 5])}, 3)
        for listed in ([4, 5], np.array([4, 5]), Blocks.first([4, 5]), {"full": [4, 5]}):
            assert digest(arena, listed, 3) == wanted
    layers = [attention("l", tokens=2), attention("w", tokens=2, retention=Window(3))]
    with Arena(packed(grouped(layers), num_slabs=8)) as arena:
        with pytest.raises(BlockError, match=r"2 groups.*'full', 'window3'"):
            digest(arena, [4, 5], 3)
        with pytest.raises(SpecError, match="no group 'sink'"):
            digest(arena, {"sink": [4, 5]}, 3)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"every": 0}, "every 0, phase 0"),
        ({"every": 2, "phase": 2}, "every 2, phase 2"),
        ({"phase": 1}, "every 1, phase 1"),
        ({"start_token": -1}, r"tokens \[-1, 3\)"),
        ({"num_tokens": -2}, r"tokens \[0, -2\)"),
    ],
)
def test_what_would_count_nothing_by_mistake_is_refused(wrong, message):
    with pytest.raises(SpecError, match=message):
        DigestOf(**({"blocks": {}, "num_tokens": 3} | wrong))


def test_a_window_group_may_list_only_what_it_still_holds():
    layout = packed(grouped([attention("l", tokens=2, retention=Window(3))]), num_slabs=8)
    with Arena(layout) as arena:
        arena.bytes.random_(0, 256)
        few = {0: Blocks(np.array([6, 4]), np.array([3, 4]))}
        many = {0: Blocks(np.array([1, 2, 6, 4]), np.array([0, 2, 3, 4]))}
        assert digest(arena, few, 9) == digest(arena, many, 9)
