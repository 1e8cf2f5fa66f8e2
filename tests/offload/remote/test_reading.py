"""What one layout has written, any other reads: tp, pp, order, tokens per block."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from kvstow.blocks.prompt import Prompt
from kvstow.memory.arena import Arena
from kvstow.offload.keys import PromptKeys, block_keys
from kvstow.offload.remote.directory import WriterLayout
from kvstow.offload.remote.reading import GroupReader
from kvstow.offload.store import Store
from kvstow.plan.group import grouped
from kvstow.plan.pack import Site, packed
from kvstow.plan.retention import Full, Window
from kvstow.route.blocks import Blocks
from offloading import IDENTITY, layer
from remote_stores import PROMPT, TOKENS, WINDOW, blocks_of, check, filled, layout_of, value


def saved(url, layout, num_tokens=TOKENS):
    """A prompt computed by one rank and stored; the process that did it is gone."""
    arena, blocks = filled(layout, num_tokens)
    with Store(remote=url) as store:
        store.save(arena, blocks, _first(num_tokens))
        assert store.flush(20)
        assert store.remote.writes.dropped.now == {}


def _first(num_tokens):
    return Prompt.of(PROMPT.tokens[:num_tokens], salt=PROMPT.salt)


def loaded(url, layout, num_tokens=TOKENS):
    """The prompt in a fresh arena of another layout, compared value by value."""
    arena, blocks = Arena(layout), blocks_of(layout, num_tokens)
    arena.bytes.fill_(0xAB)
    with Store(remote=url) as store:
        store.bind(layout)
        assert store.stored_tokens(_first(num_tokens)) == num_tokens
        assert store.load(arena, _first(num_tokens), into=blocks) == num_tokens
        check(arena, blocks, num_tokens)
        assert store.remote.misses.now == {}


@pytest.mark.parametrize("order", ["LBHNC", "BLNHC", "BHLNC"])
def test_another_order_reads(url, order):
    saved(url, layout_of())
    loaded(url, layout_of(order=order))
    loaded(url, layout_of())


@pytest.mark.parametrize(("theirs", "ours"), [(4, 2), (4, 8), (4, 12), (12, 8), (1, 24), (24, 1)])
def test_other_block_sizes_read(valkey_url, theirs, ours):
    saved(valkey_url, layout_of(block_tokens=theirs))
    loaded(valkey_url, layout_of(block_tokens=ours))


@pytest.mark.parametrize("num_tokens", [1, 3, 4, 13, 23])
def test_a_last_block_that_is_partly_filled_is_read_by_other_block_sizes(valkey_url, num_tokens):
    saved(valkey_url, layout_of(windows=False), num_tokens)
    for ours in (2, 3, 4, 8):
        loaded(valkey_url, layout_of(block_tokens=ours, windows=False), num_tokens)


def test_tokens_that_a_window_has_forgotten_are_a_miss_where_a_larger_block_needs_them(valkey_url):
    saved(valkey_url, layout_of(), 13)  # the window's blocks from token 4 on were held
    with Store(remote=valkey_url) as store:
        store.bind(layout_of(block_tokens=8))  # the block of tokens 0 to 7 would need them all
        assert store.stored_tokens(_first(13)) == 0
    loaded(valkey_url, layout_of(block_tokens=2), 13)


def test_one_rank_reads_what_two_have_written_and_the_other_way_round(url):
    for rank in range(2):
        saved(url, layout_of(tp=(rank, 2)))
    loaded(url, layout_of())
    loaded(url, layout_of(block_tokens=8, order="BHLNC"))
    for rank in range(4):
        loaded(url, layout_of(tp=(rank, 4), order="BLNHC"))


def test_pipeline_stages_read_the_whole_and_the_whole_reads_pipeline_stages(url):
    for stage in range(2):
        saved(url, layout_of(pp=(stage, 2)))
    loaded(url, layout_of())
    loaded(url, layout_of(order="BLNHC", block_tokens=8))
    for stage in range(3):
        loaded(url, layout_of(pp=(stage, 3)))


def test_one_rank_of_two_alone_is_a_miss_for_the_whole(valkey_url):
    saved(valkey_url, layout_of(tp=(0, 2)))
    with Store(remote=valkey_url) as store:
        assert store.bind(layout_of()).stored_tokens(PROMPT) == 0
    loaded(valkey_url, layout_of(tp=(0, 2)))


def test_rows_of_two_deployments_are_both_found(valkey_url):
    saved(valkey_url, layout_of(order="BHLNC"), 8)
    for rank in range(2):
        saved(valkey_url, layout_of(tp=(rank, 2)))
    loaded(valkey_url, layout_of())
    loaded(valkey_url, layout_of(order="BHLNC", block_tokens=8))


def test_another_identity_adapter_or_salt_finds_nothing(url):
    saved(url, layout_of())
    other = replace(IDENTITY, weights="02" * 16)
    rope = replace(IDENTITY, config=(("rope_theta", "500000"),))
    for identity in (other, rope, replace(IDENTITY, salt="acme")):
        with Store(remote=url) as store:
            assert store.bind(layout_of(identity=identity)).stored_tokens(PROMPT) == 0
    with Store(remote=url) as store:
        store.bind(layout_of())
        assert store.stored_tokens(PROMPT) == TOKENS
        assert store.stored_tokens(PROMPT, identity=IDENTITY.for_request(adapter="lora")) == 0
        assert store.stored_tokens(PROMPT, identity=IDENTITY.for_request(salt="bob")) == 0
        assert store.stored_tokens(Prompt.of(PROMPT.tokens, salt=b"other")) == 0


def test_tenants_share_nothing(valkey_url):
    saved(f"{valkey_url}&tenant=acme", layout_of())
    with Store(remote=f"{valkey_url}&tenant=other") as store:
        assert store.bind(layout_of()).stored_tokens(PROMPT) == 0
    loaded(f"{valkey_url}&tenant=acme", layout_of(order="BHLNC"))


# ── how much is read ──────────────────────────────────────────────────────────────────


def parts_of(writer, reader, group=0, block=0):
    mine = GroupReader([WriterLayout.of(writer)], reader, group)
    sizes = {writer.groups[0].group.block_tokens, reader.groups[0].group.block_tokens}
    key = block_keys(IDENTITY, PROMPT, reader.groups[group].group.block_tokens)[block]
    return mine.parts(key, PromptKeys(IDENTITY, PROMPT, sizes))


@pytest.mark.parametrize(("order", "ranges"), [("BHLNC", 1), ("BLHNC", 3), ("BLNHC", 12)])
def test_a_tp_rank_reads_as_few_ranges_of_a_row_as_the_order_allows(order, ranges):
    for rank in range(2):
        (part,) = parts_of(layout_of(order=order), layout_of(tp=(rank, 2), order=order))
        found = part.piece.objects.ranges(part.piece.bands)
        assert len(found) == ranges
        assert sum(end - start for start, end in found) == layout_of(tp=(rank, 2)).row_bytes(0)


def test_a_row_of_the_same_layout_is_one_whole_object():
    (part,) = parts_of(layout_of(num_slabs=8), layout_of(num_slabs=32))
    assert part.piece.bands is None


def test_a_large_block_takes_the_objects_of_small_ones_by_their_own_keys():
    parts = parts_of(layout_of(block_tokens=2), layout_of(block_tokens=8), block=1)
    assert [part.key for part in parts] == block_keys(IDENTITY, PROMPT, 2)[4:8]


def test_without_the_prompt_only_blocks_of_the_same_size_are_read():
    writers = [WriterLayout.of(layout_of(block_tokens=2))]
    key = block_keys(IDENTITY, PROMPT, 8)[0]
    assert GroupReader(writers, layout_of(block_tokens=8), 0).parts(key, None) is None
    assert GroupReader(writers, layout_of(tp=(0, 2), block_tokens=2), 0).parts(key, None)


def test_the_keys_of_a_prompt_are_those_of_its_blocks():
    keys = PromptKeys(IDENTITY, PROMPT, [4, 6])
    assert [keys.key_at(end) for end in (4, 8)] == block_keys(IDENTITY, PROMPT, 4)[:2]
    assert keys.key_at(6) == block_keys(IDENTITY, PROMPT, 6)[0]
    assert keys.key_at(5) is None
    assert keys.end_of(block_keys(IDENTITY, PROMPT, 6)[1]) == 12
    assert keys.end_of(b"another") is None
    assert PromptKeys(IDENTITY, Prompt.of(np.arange(0)), [4]).of_blocks(4) == []


# ── what a block need not hold ────────────────────────────────────────────────────────


def without_states(block_tokens):
    """Full and window layers, so that a prefix of any length can be found."""
    layers = [
        layer("l.0", Full(), block_tokens=block_tokens),
        layer("l.1", Window(WINDOW), block_tokens=block_tokens),
    ]
    layout = packed(grouped(layers), num_slabs=32, site=Site(model="m"))
    return layout.identified(IDENTITY)


def test_tokens_that_a_window_never_brought_are_not_read_by_smaller_blocks(valkey_url):
    """The row of a large block holds what its last token's window sees, and no more."""
    large, small = without_states(24), without_states(4)
    saved(valkey_url, small)
    arena, blocks = Arena(large), blocks_of(large, TOKENS)
    with Store(remote=valkey_url) as store:
        assert store.load(arena, PROMPT, into=blocks) == TOKENS
        store.save(arena, blocks, PROMPT)
        assert store.flush(20)
    found = []
    for most in range(1, TOKENS + 1):
        arena = Arena(without_states(2))
        arena.bytes.fill_(0xAB)
        into = {g: Blocks.first(np.arange(TOKENS // 2) + 1 + 16 * g) for g in range(2)}
        with Store(remote=valkey_url) as store:
            found.append(store.load(arena, PROMPT, into=into, most=most))
        compare_seen(arena, into, found[-1])
    assert found[-1] == TOKENS  # at the end, the window is there


def compare_seen(arena, into, num_tokens):
    """Every value that the token after so many sees, token by token."""
    for name, first in (("l.0", 0), ("l.1", max(0, num_tokens - WINDOW + 1))):
        ids = into[arena.layout.layers[name][0]].ids
        for token, field in product(range(first, num_tokens), ("k", "v")):
            got = arena.field(name, field).numpy()[ids[token // 2], :, token % 2]
            want = [[value(name, field, h, token, c) for c in range(8)] for h in range(2)]
            assert (got == np.array(want)).all(), (name, field, token, num_tokens)
