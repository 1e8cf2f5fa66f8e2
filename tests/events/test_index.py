"""The index against a plain list of what every instance holds."""

from hypothesis import given
from hypothesis import strategies as st

from kvstow.events.format import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    CacheEvent,
    EventBatch,
)
from kvstow.events.index import InstanceIndex, PrefixHeld

TOKENS = list(range(100, 124))


def batch(*events: CacheEvent) -> EventBatch:
    return EventBatch(0.0, list(events))


def stored(first: int, count: int, *, size: int = 4, base: int = 0, **more: object) -> BlockStored:
    """Blocks [first, first + count) of TOKENS, called base + k + 1."""
    fields: dict[str, object] = {
        "block_hashes": [base + first + k + 1 for k in range(count)],
        "parent_block_hash": base + first if first else None,
        "token_ids": TOKENS[first * size : (first + count) * size],
        "block_size": size,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        **more,
    }
    return BlockStored(**fields)  # pyright: ignore[reportArgumentType]


def test_the_longest_prefix_is_counted_by_tier():
    index = InstanceIndex()
    index.apply("a", batch(stored(0, 2), stored(0, 4, medium="STORAGE")))
    index.apply("b", batch(stored(0, 3, medium="CPU")))
    assert index.held(TOKENS) == {
        "a": PrefixHeld(device=8, disk=16, below=16),
        "b": PrefixHeld(host=12, below=12),
    }
    assert index.held(TOKENS)["a"].tokens == 16


def test_host_and_disk_together_hold_a_prefix():
    index = InstanceIndex()
    index.apply("a", batch(stored(0, 2, medium="CPU"), stored(2, 2, medium="STORAGE")))
    held = index.held(TOKENS)["a"]
    assert (held.host, held.disk, held.below, held.tokens) == (8, 0, 16, 16)


def test_another_prompt_holds_as_much_as_it_shares():
    index = InstanceIndex()
    index.apply("a", batch(stored(0, 4)))
    assert index.held([*TOKENS[:9], 7, *TOKENS[10:]])["a"].tokens == 8
    assert index.held([7, *TOKENS[1:]]) == {}
    assert index.held(TOKENS[:3]) == {}
    assert index.held([]) == {}


def test_what_is_gone_ends_the_prefix_there():
    index = InstanceIndex()
    index.apply("a", batch(stored(0, 4), stored(0, 4, base=1000, medium="CPU")))
    index.apply("a", batch(BlockRemoved([2], "GPU"), BlockRemoved([1004], "CPU")))
    assert index.held(TOKENS)["a"] == PrefixHeld(device=4, host=12, below=12)
    index.apply("a", batch(BlockRemoved([1, 3, 4], "GPU"), BlockRemoved([1001, 1002], "CPU")))
    assert index.held(TOKENS) == {}
    assert index.num_blocks("a") == 1
    index.apply("a", batch(BlockRemoved([1003], "CPU")))
    assert index.num_blocks("a") == 0


def test_clearing_the_device_leaves_the_tiers():
    index = InstanceIndex()
    index.apply("a", batch(stored(0, 4), stored(0, 2, medium="CPU"), AllBlocksCleared()))
    assert index.held(TOKENS)["a"] == PrefixHeld(host=8, below=8)


def test_adapter_and_salt_keep_prefixes_apart():
    index = InstanceIndex()
    keys = [["poems", "tenant"], ["poems"]]
    index.apply("a", batch(stored(0, 2, lora_name="poems", extra_keys=keys)))
    assert index.held(TOKENS) == {}
    assert index.held(TOKENS, adapter="poems") == {}
    assert index.held(TOKENS, salt="tenant") == {}
    assert index.held(TOKENS, adapter="poems", salt="tenant")["a"].tokens == 8


def test_windows_and_states_do_not_make_a_prefix_longer():
    index = InstanceIndex()
    window = stored(0, 6, base=50, group_idx=1, kv_cache_spec_kind="sliding_window")
    index.apply("a", batch(window, stored(0, 2, group_idx=0)))
    assert index.held(TOKENS)["a"].tokens == 8
    index.apply("a", batch(BlockRemoved([1], "GPU", 1)))
    assert index.held(TOKENS)["a"].tokens == 8


def test_what_lies_on_another_machine_is_counted_apart():
    index = InstanceIndex()
    index.apply("a", batch(stored(0, 3, medium="STORAGE", locality="REMOTE")))
    held = index.held(TOKENS)["a"]
    assert (held.tokens, held.remote) == (0, 12)


def test_what_cannot_be_placed_is_passed_over():
    index = InstanceIndex()
    orphan = stored(2, 2)
    unknown = stored(0, 1, medium="TAPE")
    cut = stored(0, 2, token_ids=TOKENS[:7])
    index.apply("a", batch(orphan, unknown, cut))
    assert index.held(TOKENS) == {}
    assert index.num_blocks("a") == 0


def test_an_instance_that_is_forgotten_holds_nothing():
    index = InstanceIndex()
    index.apply("a", batch(stored(0, 2)))
    index.forget("a")
    index.forget("b")
    assert index.held(TOKENS) == {}


def test_no_more_blocks_are_remembered_than_allowed():
    index = InstanceIndex(most_blocks=3)
    index.apply("a", batch(stored(0, 5)))
    assert index.num_blocks("a") == 3
    assert index.held(TOKENS)["a"].tokens == 12


def test_instances_may_have_blocks_of_different_sizes():
    index = InstanceIndex()
    index.apply("a", batch(stored(0, 2, size=8)))
    index.apply("b", batch(stored(0, 3, size=4)))
    held = index.held(TOKENS)
    assert (held["a"].tokens, held["b"].tokens) == (16, 12)


MEDIA = ("GPU", "CPU", "STORAGE")
Step = tuple[bool, int, str]


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 5), st.sampled_from(MEDIA)), max_size=60))
def test_any_order_of_stores_and_removals_counts_as_sets_do(steps: list[Step]):
    """Blocks are stored in order within each medium, as engines do it."""
    index = InstanceIndex()
    has: dict[str, set[int]] = {medium: set() for medium in MEDIA}
    for stores, block, medium in steps:
        base = 0 if medium == "GPU" else 1000
        if stores:
            index.apply("a", batch(stored(0, block + 1, base=base, medium=medium)))
            has[medium] |= set(range(block + 1))
        else:
            index.apply("a", batch(BlockRemoved([base + block + 1], medium)))
            has[medium].discard(block)

    def length(blocks: set[int]) -> int:
        return 4 * next(k for k in range(len(blocks) + 1) if k not in blocks)

    found = index.held(TOKENS).get("a", PrefixHeld())
    assert found == PrefixHeld(
        device=length(has["GPU"]),
        host=length(has["CPU"]),
        disk=length(has["STORAGE"]),
        below=length(has["CPU"] | has["STORAGE"]),
    )
    assert index.num_blocks("a") == len(set().union(*has.values()))
    counts = {"device": len(has["GPU"]), "host": len(has["CPU"]), "disk": len(has["STORAGE"])}
    assert index.blocks_by_tier("a") == {**counts, "remote": 0}
