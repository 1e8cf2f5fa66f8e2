"""A hit is the longest beginning of which every group still has what the next token sees."""

from math import lcm

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from block_layouts import layer, packed_layout
from kvstow.blocks.ledger import Ledger
from kvstow.blocks.pool import Pool
from kvstow.blocks.prompt import Prompt
from kvstow.plan.group import Group
from kvstow.plan.retention import Chunk, Full, Window

LAYERS = (
    layer("full", tokens=4),
    layer("window", Window(6), tokens=2, dim=48),
    layer("chunk", Chunk(8), tokens=2, dim=80),
    layer("short", tokens=1, dim=16),
)
LENGTH = 48


def sees(group: Group, position: int, earlier: int) -> bool:
    match group.retention:
        case Full():
            return True
        case Window(tokens):
            return earlier > position - tokens
        case Chunk(tokens):
            return earlier // tokens == position // tokens
        case other:
            raise AssertionError(other)


@given(
    which=st.sets(st.integers(0, len(LAYERS) - 1), min_size=1),
    forgotten=st.lists(st.tuples(st.integers(0, 3), st.integers(0, LENGTH - 1)), max_size=12),
    common=st.integers(0, LENGTH),
    more=st.integers(0, 9),
)
def test_a_hit_is_the_longest_that_every_group_can_serve(
    which: set[int], forgotten: list[tuple[int, int]], common: int, more: int
) -> None:
    ledger = Ledger(Pool(packed_layout(tuple(LAYERS[i] for i in sorted(which)), 200)))
    first = Prompt.of(np.arange(LENGTH))
    request = ledger.admit(first).request
    rows = {
        (g, int(b)): int(row)
        for g, part in ledger.blocks(request).items()
        for b, row in zip(part.index, part.ids, strict=True)
    }
    ledger.release(request)
    for g, block in forgotten:
        if (g, block) in rows:
            ledger.pool.forget(g, [rows.pop((g, block))])
    prompt = Prompt.of([*range(common), *range(1000, 1000 + more + (common == 0))])
    there = {(g, b) for g, b in rows if (b + 1) * ledger.groups[g].block_tokens <= common}

    def served(length: int) -> bool:
        return all(
            (g, earlier // group.block_tokens) in there
            for g, group in enumerate(ledger.groups)
            for earlier in range(length)
            if sees(group, length, earlier)
        )

    unit = lcm(*(group.block_tokens for group in ledger.groups))
    longest = max(n for n in range(0, max(1, len(prompt)), unit) if served(n))
    assert ledger.prefixes
    hit = ledger.prefixes.hit(prompt)
    assert hit.num_tokens == longest
    for g, shared in hit.blocks.items():
        blocks = zip(shared.index.tolist(), shared.ids.tolist(), strict=True)
        assert all(rows[g, block] == row for block, row in blocks)
        needed = {
            e // ledger.groups[g].block_tokens
            for e in range(longest)
            if sees(ledger.groups[g], longest, e)
        }
        assert set(shared.index.tolist()) == needed
    ledger.admit(prompt)
    ledger.check()
