"""What comes back and what is stored, asked as vLLM's scheduler asks it; no engine is needed."""

from dataclasses import replace
from typing import Any

import pytest

from kvstow.adapters.vllm.cache.layout import CacheDeclaration, declared_groups
from kvstow.adapters.vllm.options import ConnectorOptions
from kvstow.adapters.vllm.protocol import EngineRequest, KeyLevels, KeysPresent
from kvstow.adapters.vllm.scheduler.key_index import Level, RequestKeys
from kvstow.plan.identity import Identity
from kvstow.plan.retention import Full, Window
from pretended_engine import RecallAlone
from recorded_vllm import IDENTITY, Pool, engine_state, hybrid, pages, smollm2, v4

OFFLOADS = ConnectorOptions(host_bytes=1 << 20)
WITH_DISK = ConnectorOptions(host_bytes=1 << 20, disk_path="/store", disk_bytes=1 << 20)
LONG = list(range(100, 125))
"""25 tokens: six blocks of four, and the token that is always computed."""
NAMED = Identity(model="m", weights="w", config=(("rope_theta", "10000"),), kv_dtype="fp8_e4m3")


def made(
    options: ConnectorOptions = OFFLOADS,
    declared: CacheDeclaration | None = None,
    identity: Identity = IDENTITY,
    num_blocks: int = 1000,
    ahead: int = 0,
) -> tuple[RecallAlone, Pool]:
    declared = replace(declared or hybrid(), num_blocks=num_blocks)
    return RecallAlone.of(engine_state(declared, options, identity, ahead=ahead))


def asked(id: str, tokens: list[int] = LONG, **more: Any) -> EngineRequest:
    return EngineRequest(id=id, tokens=tokens, **more)


def keys(tokens: list[int] = LONG, size: int = 4, **more: Any) -> list[bytes]:
    return RequestKeys(IDENTITY, asked("k", tokens, **more), {size}).of(size, len(tokens))


def kept(
    window: list[int], full: list[int], level: Level = Level.HOST, tokens: list[int] = LONG
) -> KeyLevels:
    """A rank's word that it keeps these blocks of the two groups."""
    every = keys(tokens)
    return {
        g: (tuple(every[k] for k in have), bytes([level] * len(have)))
        for g, have in enumerate((window, full))
    }


ALL = [0, 1, 2, 3, 4, 5]


# ── coming back ───────────────────────────────────────────────────────────────────────────


def first_due(recall: RecallAlone, id: str = "r") -> int:
    """With how many tokens a request has a block that may be stored."""
    return next(num_tokens for num_tokens in range(1000) if recall.is_due(id, num_tokens))


def test_the_engine_is_answered_at_once_from_what_workers_have_told():
    recall, _ = made()
    recall.index.update("0", kept(ALL, ALL))
    assert recall.ask(asked("d")) is None
    assert recall.matched("d", 0) == 24
    assert recall.matched("d", 8) == 16


@pytest.mark.parametrize(
    ("full", "window", "tokens"),
    [
        ([], [], 0),
        ([0, 1, 2, 3], [0, 1, 2, 3], 16),
        (ALL, [4, 5], 24),
        (ALL, [2, 3], 16),
        (ALL, [5], 0),
        ([1, 2, 3, 4, 5], ALL, 0),
        ([0, 1, 3, 4, 5], ALL, 8),
    ],
)
def test_a_hit_needs_all_blocks_of_full_groups_and_the_last_ones_of_windows(
    full: list[int], window: list[int], tokens: int
):
    recall, _ = made()
    recall.index.update("0", kept(window, full))
    recall.ask(asked("d"))
    assert recall.matched("d", 0) == tokens


def test_only_what_the_engine_lacks_is_brought_back_and_never_into_null_blocks():
    recall, _ = made()
    recall.index.update("0", kept(ALL, ALL))
    recall.ask(asked("d"))
    assert recall.matched("d", 8) == 16
    order = recall.order("d", ((0, 0, 0, 0, 7, 8), (1, 2, 3, 4, 5, 6)), 8, 24)
    every = tuple(keys())
    assert order.rows == {0: (every[4:], (7, 8)), 1: (every[2:], (3, 4, 5, 6))}


@pytest.mark.parametrize(
    ("params", "computed", "tokens"),
    [
        ({"max_load_tokens": 9}, 0, 8),
        ({"max_load_tokens": 9}, 8, 8),
        ({"max_load_tokens": 0}, 0, 0),
        ({"max_load_tokens": 400}, 0, 24),
        ({"max_load_tokens": -1}, 0, 24),
        ({"max_load_tokens": "9"}, 0, 24),
        ({"kv_load_tiers": []}, 0, 0),
        ({"kv_load_tiers": [{"medium": "cpu"}]}, 0, 24),
        ({"kv_load_tiers": [{"locality": "local"}]}, 0, 24),
        ({"kv_load_tiers": [{"medium": "storage"}]}, 0, 0),
        ({"kv_load_tiers": [{"medium": "cpu", "locality": "remote"}]}, 0, 0),
        ({"kv_load_tiers": [{"medium": "punch cards"}]}, 0, 24),
    ],
)
def test_a_request_may_limit_what_is_loaded_in_vllms_words(
    params: dict[str, Any], computed: int, tokens: int
):
    """What is not written as vLLM writes it limits nothing."""
    recall, _ = made()
    recall.index.update("0", kept(ALL, ALL))
    recall.ask(asked("d", params=params))
    assert recall.matched("d", computed) == tokens


@pytest.mark.parametrize(
    ("medium", "is_asked", "tokens"), [("storage", False, 0), ("cpu", False, 8), (None, True, 24)]
)
def test_tiers_that_a_request_leaves_out_are_not_asked_for_it(
    medium: str | None, is_asked: bool, tokens: int
):
    recall, _ = made(WITH_DISK)
    recall.index.update("0", kept(ALL, ALL, Level.BELOW))
    recall.index.update("0", kept([0, 1], [0, 1]))
    lookup = recall.ask(asked("d", params={"kv_load_tiers": [{"medium": medium}]}))
    assert (lookup is not None) == is_asked
    if lookup is not None:
        everything = tuple((True,) * len(keys) for keys in lookup.keys)
        recall.answer(KeysPresent(request="d", present=everything))
    assert recall.matched("d", 0) == tokens


@pytest.mark.parametrize(
    ("host", "below", "options", "hits"),
    [
        (ALL, [], OFFLOADS, {"host": 24}),
        ([0, 1], [2, 3, 4, 5], WITH_DISK, {"host": 8, "disk": 16}),
        ([], ALL, WITH_DISK, {"disk": 24}),
        ([0], [], replace(OFFLOADS, remote="redis://x"), {"host": 4, "external_unspecified": 20}),
    ],
)
def test_tokens_of_a_load_are_told_by_the_tier_that_has_them(
    host: list[int], below: list[int], options: ConnectorOptions, hits: dict[str, int]
):
    """Of rows whose tier is not known, a remote store's may have been found by a look-up."""
    recall, _ = made(options)
    recall.index.update("0", kept(below, below, Level.BELOW))
    recall.index.update("0", kept(host, host))
    recall.ask(asked("d"))
    ids = ((0, 0, 0, 0, 7, 8), (1, 2, 3, 4, 5, 6))
    assert recall.load("d", ids, 0, 24) == hits


def test_a_load_is_tried_once_until_the_request_has_computed():
    recall, _ = made()
    recall.index.update("0", kept(ALL, ALL))
    recall.ask(asked("d"))
    recall.matched("d", 0)
    recall.order("d", ((0, 0, 0, 0, 7, 8), (1, 2, 3, 4, 5, 6)), 0, 24)
    assert recall.matched("d", 0) == 0
    recall.computed("d", 25, ((0, 0, 0, 0, 7, 8), (1, 2, 3, 4, 5, 6)))
    assert recall.matched("d", 0) == 24


def test_rows_on_disk_count_when_the_workers_have_confirmed_them():
    recall, _ = made(WITH_DISK)
    recall.index.update("0", kept(ALL, ALL, Level.BELOW))
    lookup = recall.ask(asked("d"))
    assert lookup is not None
    assert lookup.keys == (tuple(keys()), tuple(keys()))
    assert recall.matched("d", 0) is None
    present = (True,) * 6, (True,) * 4 + (False,) * 2
    recall.answer(KeysPresent(request="d", present=present))
    assert recall.matched("d", 0) == 16


def test_a_prompt_that_the_device_holds_does_not_wait_for_a_look_up():
    recall, _ = made(WITH_DISK)
    recall.index.update("0", kept(ALL, ALL, Level.BELOW))
    assert recall.ask(asked("d")) is not None
    assert recall.matched("d", 20) is None
    assert recall.matched("d", 24) == 0


def test_workers_are_not_asked_for_what_is_all_in_host_memory_or_nowhere():
    recall, _ = made(WITH_DISK)
    assert recall.ask(asked("nowhere")) is None
    assert recall.matched("nowhere", 0) == 0
    recall.index.update("0", kept(ALL, ALL))
    assert recall.ask(asked("near")) is None
    assert recall.matched("near", 0) == 24


def test_workers_of_a_shared_tier_are_asked_for_what_other_processes_may_have():
    recall, _ = made(replace(OFFLOADS, host_shared="name"))
    assert recall.ask(asked("d")) is not None
    recall.index.update("0", kept(ALL, ALL))
    assert recall.ask(asked("e")) is None


def test_an_answer_of_long_ago_does_not_hide_what_was_stored_since():
    """A preempted request finds what it has stored itself."""
    recall, _ = made(replace(OFFLOADS, host_shared="name"))
    recall.ask(asked("d"))
    recall.answer(KeysPresent(request="d", present=((False,) * 6, (False,) * 6)))
    assert recall.matched("d", 0) == 0
    recall.computed("d", 24, ((0, 0, 0, 0, 7, 8), (1, 2, 3, 4, 5, 6)))
    recall.index.update("0", kept(ALL, ALL))
    assert recall.matched("d", 0) == 24


ONE = replace(smollm2("BLHNC", 100), groups=(pages(["a"], Full(), heads=1, tokens=4, content=8),))
BLOCKS = ((1, 2, 3, 4, 5, 6, 7),)

# ── drafts ────────────────────────────────────────────────────────────────────────────────


def test_rows_with_drafts_are_kept_and_found_under_the_token_that_comes_next():
    """A draft model's row at a token is made of the next one, too."""
    recall, _ = made(declared=ONE, ahead=1)
    recall.ask(asked("r", LONG))
    assert first_due(recall) == 5, "a block has a key when the token behind it is there"
    recall.computed("r", 4, BLOCKS)
    assert recall.stores.take() is None
    recall.computed("r", 12, BLOCKS)
    order = recall.stores.take()
    assert order is not None
    assert order.rows[0][1] == (1, 2)
    recall.computed("r", 25, BLOCKS)
    rest = recall.stores.take()
    assert rest is not None
    assert rest.rows[0][1] == (3, 4, 5, 6)
    keys = (*order.rows[0][0], *rest.rows[0][0])
    recall.index.update("0", {0: (keys, bytes([Level.HOST] * 6))})
    for tokens, found in (
        (LONG, 24),
        (LONG[:24], 20),
        ([*LONG[:24], 7], 20),
        ([*LONG[:12], 7, *LONG[13:]], 8),
    ):
        recall.ask(asked(f"{tokens}", tokens))
        assert recall.matched(f"{tokens}", 0) == found
    plain = RequestKeys(IDENTITY, asked("k", LONG), {4}).of(4, 24)
    assert not set(plain) & set(keys)


# ── going out ─────────────────────────────────────────────────────────────────────────────


def rows(recall: RecallAlone) -> dict[int, list[int]]:
    """The blocks that the next job stores, by group."""
    order = recall.stores.take()
    return {g: list(ids) for g, (_, ids) in order.rows.items()} if order else {}


def test_blocks_are_stored_while_the_request_runs_and_each_once():
    recall, _ = made(declared=ONE)
    tokens = LONG[:10]
    recall.ask(asked("r", tokens))
    assert first_due(recall) == 4
    recall.computed("r", 10, ((1, 2, 3),))
    assert rows(recall) == {0: [1, 2]}
    tokens += [7, 8]
    assert first_due(recall) == 12
    recall.computed("r", 12, ((1, 2, 3),))
    assert rows(recall) == {0: [3]}
    recall.ended("r", ((1, 2, 3),), 12)
    assert rows(recall) == {}


def test_tokens_that_are_not_known_yet_are_not_stored():
    """An engine that plans ahead counts tokens that it has not sampled."""
    recall, _ = made(declared=ONE)
    recall.ask(asked("r", LONG[:6]))
    recall.computed("r", 9, ((1, 2, 3),))
    assert rows(recall) == {0: [1]}


def test_rows_that_are_kept_or_under_way_are_not_stored_again():
    recall, _ = made(declared=ONE)
    recall.ask(asked("a", LONG))
    recall.ask(asked("b", LONG))
    recall.computed("a", 12, ((1, 2, 3),))
    recall.computed("b", 16, ((4, 5, 6, 7),))
    assert rows(recall) == {0: [1, 2, 3, 7]}
    recall.stores.stored(1, 1)
    recall.index.update("0", {0: (tuple(keys()[:4]), bytes([Level.HOST] * 4))})
    recall.ask(asked("c", LONG))
    recall.computed("c", 24, ((8, 9, 10, 11, 12, 13),))
    assert rows(recall) == {0: [12, 13]}


def test_a_preempted_request_comes_back_with_what_it_had_generated():
    recall, pool = made(declared=ONE)
    tokens = list(LONG)
    recall.ask(asked("r", tokens))
    assert recall.matched("r", 0) == 0
    recall.computed("r", 25, BLOCKS)
    tokens += range(20)
    recall.computed("r", 44, ((*range(1, 12),),))
    order = recall.stores.take()
    assert order is not None
    assert pool.held == set(range(1, 12)), "its blocks are kept though the engine takes them back"
    recall.index.update("0", {0: (order.rows[0][0], bytes([Level.HOST] * 11))})
    recall.stores.stored(order.job, 1)
    assert recall.matched("r", 0) == 44


def test_a_preempted_request_stores_what_it_had_no_room_for_before():
    recall, _ = made(declared=ONE, num_blocks=4)
    recall.ask(asked("r", LONG))
    recall.computed("r", 24, BLOCKS)
    assert rows(recall) == {0: [1, 2]}
    recall.stores.stored(1, 1)
    recall.index.update("0", {0: (tuple(keys()[:2]), bytes([Level.HOST] * 2))})
    assert recall.matched("r", 0) == 8
    recall.computed("r", 24, ((11, 12, 13, 14, 15, 16),))
    assert rows(recall) == {0: [13, 14]}


def test_blocks_that_were_cached_when_the_request_began_are_looked_at_when_it_ends():
    """They were stored when they were computed; a tier may have lost them since."""
    recall, _ = made(declared=ONE)
    recall.ask(asked("r", LONG))
    assert recall.matched("r", 16) == 0
    recall.computed("r", 25, BLOCKS)
    assert rows(recall) == {0: [5, 6]}
    recall.ended("r", BLOCKS, 24)
    assert rows(recall) == {0: [1, 2, 3, 4]}


SLOW = replace(OFFLOADS, store_bytes_per_second=1)


def test_an_engine_without_free_blocks_gets_those_back_that_wait_to_be_stored():
    recall, pool = made(SLOW, ONE, num_blocks=80)
    assert not recall.make_room()
    recall.ask(asked("r", LONG))
    recall.computed("r", 24, BLOCKS)
    recall.ended("r", BLOCKS, 24)
    assert recall.make_room()
    assert pool.held == set()
    assert recall.counts == {"not_stored_rows": 6}
    assert not recall.make_room()


def test_blocks_that_are_being_stored_are_worth_waiting_for_once_their_request_has_let_go():
    recall, pool = made(declared=ONE)
    recall.ask(asked("r", LONG))
    pool.hold(BLOCKS[0])
    recall.computed("r", 24, BLOCKS)
    assert recall.stores.take() is not None
    assert not recall.make_room(), "their request runs: the end of a store frees nothing"
    pool.release(BLOCKS[0])
    assert recall.make_room()
    assert pool.held == {1, 2, 3, 4, 5, 6}


def test_rows_that_wait_stay_while_a_running_request_has_their_blocks():
    """vLLM would wait for blocks that do not come, instead of preempting somebody."""
    recall, pool = made(SLOW, ONE, num_blocks=80)
    recall.ask(asked("r", LONG))
    pool.hold(BLOCKS[0][2:])
    recall.computed("r", 24, BLOCKS)
    assert recall.make_room(), "two blocks are in no request any more"
    assert pool.held == {3, 4, 5, 6, 7}
    assert not recall.make_room()
    assert len(recall.stores) == 4


def test_rows_that_found_no_room_before_their_request_ended_are_counted():
    recall, _ = made(declared=ONE, num_blocks=4)
    recall.ask(asked("r", LONG))
    recall.computed("r", 24, BLOCKS)
    recall.ended("r", BLOCKS, 24)
    assert recall.counts == {"not_stored_rows": 4}


def test_window_blocks_are_stored_where_a_return_is_possible_while_the_request_passes_them():
    """The cache of a V4-like model: windows of 128 and 8 tokens, blocks of 4 to 256 tokens."""
    declared = v4()
    recall, _ = made(declared=declared)
    prompt = list(range(506))
    recall.ask(asked("r", prompt))
    sizes = [group.block_tokens for group in declared_groups(declared)]
    tables = tuple(tuple(range(1, -(-506 // size) + 1)) for size in sizes)
    recall.computed("r", 506, tables)
    order = recall.stores.take()
    assert order is not None
    for g, group in enumerate(declared_groups(declared)):
        size, stored = group.block_tokens, [id - 1 for id in order.rows[g][1]]
        match group.retention:
            case Full():
                assert stored == [0]
            case Window(tokens):
                ends = [256, 512]
                seen = {
                    k
                    for k in range(506 // size)
                    for end in ends
                    if (k + 1) * size <= end and (k + 1) * size > end - tokens + 1
                }
                assert stored == sorted(seen)
            case _:
                raise AssertionError(group.retention)
    told = {g: (k, bytes([Level.HOST] * len(k))) for g, (k, _) in order.rows.items()}
    recall.index.update("0", told)
    recall.ended("r", tables, 506)
    recall.ask(asked("again", prompt))
    assert recall.matched("again", 0) == 256


# ── what a key names ──────────────────────────────────────────────────────────────────────


def stored_keys(request: EngineRequest, identity: Identity = IDENTITY) -> tuple[bytes, ...]:
    recall, _ = made(identity=identity)
    recall.ask(request)
    recall.computed(request.id, len(request.tokens), ((0,) * 6, tuple(range(1, 8))))
    order = recall.stores.take()
    return order.rows[1][0] if order else ()


def test_a_request_with_embeddings_is_neither_looked_up_nor_stored():
    """Its token ids say nothing about its cache."""
    recall, _ = made(WITH_DISK)
    request = asked("e", shareable=False)
    assert recall.ask(request) is None
    assert recall.matched("e", 0) == 0
    assert not recall.is_due("e", 1000)
    recall.ended("e", ((1, 2, 3, 4, 5, 6), (1, 2, 3, 4, 2, 3)), 24)
    assert len(recall.stores) == 0
