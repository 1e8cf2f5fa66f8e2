"""The scheduler's side of the connector, asked as vLLM asks it; no engine is needed."""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest

from kvstow.adapters.vllm.layout import (
    CacheDeclaration,
    declared_groups,
)
from kvstow.adapters.vllm.options import ConnectorOptions
from kvstow.adapters.vllm.protocol import (
    KeysPresent,
    StepOrders,
    WorkerEndpoint,
    handover_in,
)
from kvstow.adapters.vllm.scheduler import (
    EngineRequest,
    PinnedBlocks,
    SchedulerSide,
    held,
)
from kvstow.plan.identity import Identity
from kvstow.route.blocks import Blocks
from recorded_vllm import IDENTITY, hybrid

CARD = WorkerEndpoint(
    agent="p-0-0", start="s", address="tcp://127.0.0.1:1", key="", fingerprint="f" * 64
)
PROMPT = list(range(10))


def side(
    settings: ConnectorOptions | None = None,
    declared: CacheDeclaration | None = None,
    identity: Identity = IDENTITY,
) -> SchedulerSide:
    declared = declared or hybrid()
    made = SchedulerSide(
        declared_groups(declared),
        declared.num_blocks,
        settings or ConnectorOptions(),
        identity=identity,
    )
    made.meet([CARD])
    return made


def asked(id: str, tokens: list[int] = PROMPT, **more: object) -> EngineRequest:
    return EngineRequest(id=id, tokens=tokens, **more)  # pyright: ignore


def offered(prefill: SchedulerSide) -> dict[str, object]:
    """The answer of a prefill of ten tokens in blocks 1 … 3, of which the window lost one."""
    request = asked("r", [*PROMPT, 99], params={"do_remote_decode": True})
    stays, params = prefill.finished(request, ((0, 2, 4), (1, 3, 2)), 10)
    assert stays
    assert params is not None
    return params


def test_a_request_that_does_not_ask_gets_no_tickets():
    assert side().finished(asked("r"), ((1,), (2,)), 4) == (False, None)


def test_tickets_list_the_blocks_of_every_group_and_none_that_are_null():
    prefill = side()
    handover = handover_in(asked("d", params=offered(prefill)))
    assert handover is not None
    ticket = handover.tickets[0]
    assert ticket.blocks[0].ids.tolist() == [2, 4]
    assert ticket.blocks[0].index.tolist() == [1, 2]
    assert ticket.blocks[1].ids.tolist() == [1, 3, 2]
    assert ticket.num_tokens == 10
    step = prefill.take_step(idle=True)
    assert [offer.tickets[0].digest for offer in step.offers] == [ticket.digest]
    assert prefill.take_step(idle=True) == StepOrders(idle=True)


def test_blocks_beyond_the_computed_tokens_are_not_offered():
    assert held((5, 6, 7), 0, 8, 4).ids.tolist() == [5, 6]


def test_the_generation_grows_when_the_workers_have_sent():
    prefill = side()
    first = handover_in(asked("d", params=offered(prefill)))
    prefill.sent("r")
    second = handover_in(asked("d", params=offered(prefill)))
    assert first is not None
    assert second is not None
    assert second.tickets[0].generations[1][0] == first.tickets[0].generations[1][0] + 1


def test_decode_loads_what_it_does_not_have_itself():
    decode = side()
    decode.arrived(asked("d", params=offered(side())))
    assert [decode.matched("d", computed) for computed in (0, 4, 8)] == [10, 6, 2]
    decode.allocated("d", ((1, 2, 3), (1, 2, 3)), 6)
    step = decode.take_step(idle=False)
    assert (step.pulls[0].start_token, step.pulls[0].num_tokens) == (4, 10)
    assert len(step.keeps) == 1
    assert decode.matched("d", 0) == 0, "a load is tried once, then the engine computes"


def test_a_request_that_needs_no_load_gives_its_tickets_back():
    decode = side()
    decode.arrived(asked("d", params=offered(side())))
    decode.allocated("d", ((1, 2, 3), (1, 2, 3)), 0)
    assert len(decode.take_step(idle=False).drops) == 1


def test_a_request_that_is_aborted_gives_its_tickets_back():
    decode = side()
    request = asked("d", params=offered(side()))
    decode.arrived(request)
    assert decode.finished(request, ((), ()), 0) == (False, None)
    assert len(decode.take_step(idle=False).drops) == 1


def test_a_request_that_vllm_has_rejected_gives_its_tickets_back():
    """vLLM then queues an empty prompt with the same parameters, and aborts it."""
    decode = side()
    params = offered(side())
    handover = handover_in(asked("d", params=params))
    assert handover is not None
    request = asked("d", [0], params=params)
    decode.arrived(request)
    assert decode.finished(request, ((), ()), 0) == (False, None)
    drops = decode.take_step(idle=False).drops
    assert [ticket.digest for ticket in drops] == [handover.tickets[0].digest]


def test_a_request_that_ends_while_it_is_loaded_hands_nothing_over():
    """vLLM counts its tokens as computed from the moment it has blocks."""
    decode = side(OFFLOADS)
    request = asked("d", params={**offered(side()), "do_remote_decode": True})
    decode.arrived(request)
    decode.allocated("d", ((1, 2, 3), (1, 2, 3)), 10)
    assert decode.finished(request, ((1, 2, 3), (1, 2, 3)), 10) == (False, None)
    step = decode.take_step(idle=True)
    assert (step.offers, step.stores) == ((), ())


def test_a_request_that_was_loaded_and_then_computed_hands_over():
    decode = side(OFFLOADS)
    request = asked("d", params={**offered(side()), "do_remote_decode": True})
    decode.arrived(request)
    decode.allocated("d", ((1, 2, 3), (1, 2, 3)), 10)
    decode.allocated("d", ((1, 2, 3), (1, 2, 3)), 0)
    stays, params = decode.finished(request, ((1, 2, 3), (1, 2, 3)), 10)
    assert stays
    assert params is not None
    step = decode.take_step(idle=True)
    assert (len(step.offers), len(step.stores)) == (1, 1)


@pytest.mark.parametrize(
    "change",
    [
        {"tokens": [*PROMPT[:-1], 77]},
        {"tokens": PROMPT[:-1]},
        {"salt": "another tenant"},
        {"adapter": "another adapter"},
        {"extra": ((3, b"an image"),)},
        {"shareable": False},
    ],
)
def test_tickets_serve_only_the_prompt_they_were_made_for(change: dict[str, object]):
    decode = side()
    decode.arrived(asked("d", params=offered(side()), **change))  # pyright: ignore
    assert decode.matched("d", 0) == 0
    assert decode.counts["refused"] == 1


@pytest.mark.parametrize(
    "params",
    [
        {"do_remote_prefill": True},
        {"do_remote_prefill": True, "kvstow": 3},
        {"do_remote_prefill": True, "kvstow": {"tickets": [], "num_tokens": 4, "prompt": ""}},
        {"do_remote_prefill": True, "kvstow": {"tickets": ["x"], "num_tokens": 4, "prompt": ""}},
    ],
)
def test_parameters_that_are_no_handover_are_counted_and_the_prompt_is_computed(
    params: dict[str, object],
):
    decode = side()
    decode.arrived(asked("d", params=params))
    assert decode.counts["refused"] == 1
    assert decode.matched("d", 0) == 0
    assert decode.take_step(idle=True) == StepOrders(idle=True)


def test_tickets_of_another_computation_are_refused_before_anything_is_pulled():
    decode = side(identity=replace(NAMED, weights="another checkpoint"))
    decode.arrived(asked("d", params=offered(side(identity=NAMED))))
    assert decode.matched("d", 0) == 0
    assert decode.counts["refused"] == 1


def test_a_request_that_finishes_before_any_worker_is_known_gets_no_tickets():
    prefill = side()
    prefill.meet([])
    request = asked("r", params={"do_remote_decode": True})
    assert prefill.finished(request, ((1, 2, 3), (1, 2, 3)), 10) == (False, None)
    assert prefill.counts["not offered"] == 1


def test_the_worker_of_this_process_adopts_an_offer_before_its_tickets_leave():
    prefill = side()
    adopted: list[str] = []
    prefill.meet([CARD], adopt=lambda offer: adopted.append(str(offer.tickets[0])))
    assert offered(prefill)["kvstow"]["tickets"] == adopted  # pyright: ignore
    assert len(prefill.take_step(idle=True).offers) == 1


# ── coming back ───────────────────────────────────────────────────────────────────────────

OFFLOADS = ConnectorOptions(host_bytes=1 << 20)
LONG = list(range(100, 125))
NAMED = Identity(model="m", weights="w", config=(("rope_theta", "10000"),), kv_dtype="fp8_e4m3")


def answered(desk: SchedulerSide, full: list[int], window: list[int], id: str = "d") -> None:
    """Workers that have these logical blocks of 4 tokens, of the six asked for."""
    lookup = desk.take_step(idle=True).lookups[0]
    assert [len(keys) for keys in lookup.keys] == [6, 6]
    present = tuple(tuple(k in have for k in range(6)) for have in (window, full))
    desk.present([KeysPresent(request=id, present=present)])


def test_the_engine_is_told_later_until_the_workers_have_answered():
    desk = side(OFFLOADS)
    desk.arrived(asked("d", LONG))
    assert desk.matched("d", 0) is None
    answered(desk, [0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 5])
    assert desk.matched("d", 0) == 24


@pytest.mark.parametrize(
    ("full", "window", "tokens"),
    [
        ([], [], 0),
        ([0, 1, 2, 3], [0, 1, 2, 3], 16),
        ([0, 1, 2, 3, 4, 5], [4, 5], 24),
        ([0, 1, 2, 3, 4, 5], [2, 3], 16),
        ([0, 1, 2, 3, 4, 5], [5], 0),
        ([1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 5], 0),
        ([0, 1, 3, 4, 5], [0, 1, 2, 3, 4, 5], 8),
    ],
)
def test_a_hit_needs_all_blocks_of_full_groups_and_the_last_ones_of_windows(
    full: list[int], window: list[int], tokens: int
):
    desk = side(OFFLOADS)
    desk.arrived(asked("d", LONG))
    answered(desk, full, window)
    assert desk.matched("d", 0) == tokens


def test_only_what_the_engine_lacks_is_brought_back_and_never_into_null_blocks():
    desk = side(OFFLOADS)
    desk.arrived(asked("d", LONG))
    lookup = desk.take_step(idle=True).lookups[0]
    desk.present([KeysPresent(request="d", present=((True,) * 6, (True,) * 6))])
    desk.allocated("d", ((0, 0, 0, 0, 7, 8), (1, 2, 3, 4, 5, 6)), 16)
    restore = desk.take_step(idle=True).loads[0]
    assert restore.rows[0] == (lookup.keys[0][4:], (7, 8))
    assert restore.rows[1] == (lookup.keys[1][2:], (3, 4, 5, 6))
    assert desk.matched("d", 0) == 0


def test_whole_blocks_of_a_finished_request_are_stored_under_the_keys_of_a_later_lookup():
    desk = side(OFFLOADS)
    stays, params = desk.finished(
        asked("r", LONG), ((0, 0, 0, 0, 3, 4, 1), (1, 2, 3, 4, 2, 3, 1)), 24
    )
    assert (stays, params) == (True, None)
    store = desk.take_step(idle=True).stores[0]
    desk.arrived(asked("d", LONG))
    lookup = desk.take_step(idle=True).lookups[0]
    assert store.rows[0] == (lookup.keys[0][4:], (3, 4))
    assert store.rows[1][0] == lookup.keys[1]


def test_a_prompt_shorter_than_a_block_is_neither_looked_up_nor_stored():
    desk = side(OFFLOADS)
    desk.arrived(asked("d", [1, 2, 3, 4]))
    assert desk.matched("d", 0) == 0
    assert desk.finished(asked("d", [1, 2, 3]), ((1,), (2,)), 3) == (False, None)


def test_what_two_ranks_have_alike_is_found():
    one = KeysPresent(request="d", present=((True, True), (False, True)))
    other = KeysPresent(request="d", present=((True, False), (True, True)))
    assert one.both(other).present == ((True, False), (False, True))


def keys_of(request: EngineRequest, identity: Identity = IDENTITY) -> tuple[bytes, ...]:
    """The keys that a request's blocks of the full group are looked up by."""
    desk = SchedulerSide(declared_groups(hybrid()), 5, OFFLOADS, identity=identity)
    desk.arrived(request)
    return desk.take_step(idle=True).lookups[0].keys[1]


def test_a_block_key_names_everything_before_the_block():
    first, second = keys_of(asked("d", LONG)), keys_of(asked("d", [9, *LONG[1:]]))
    assert len(first) == len(second) == 6
    assert not set(first) & set(second)
    assert keys_of(asked("d", LONG[:9])) == first[:2]


@pytest.mark.parametrize(
    "change", [{"salt": "t"}, {"adapter": "t"}, {"extra": ((0, b"image"),)}], ids=str
)
def test_requests_that_differ_in_more_than_tokens_share_no_keys(change: dict[str, object]):
    assert not set(keys_of(asked("d", LONG))) & set(keys_of(asked("d", LONG, **change)))


def test_blocks_before_an_image_are_shared_and_those_from_it_on_are_not():
    plain, image = keys_of(asked("d", LONG)), keys_of(asked("d", LONG, extra=((10, b"image"),)))
    assert plain[:2] == image[:2]
    assert not set(plain[2:]) & set(image[2:])


@pytest.mark.parametrize(
    "other",
    [
        replace(NAMED, weights="another checkpoint"),
        replace(NAMED, config=(("rope_theta", "5000"),)),
        replace(NAMED, kv_dtype="fp8_e5m2"),
        replace(NAMED, interior="cpu-transposed"),
        replace(NAMED, tokenizer="another"),
    ],
    ids=["weights", "rope", "dtype", "interior", "tokenizer"],
)
def test_models_of_one_name_that_compute_otherwise_share_no_keys(other: Identity):
    ours, theirs = keys_of(asked("d", LONG), NAMED), keys_of(asked("d", LONG), other)
    assert not set(ours) & set(theirs)


def test_a_request_with_embeddings_is_neither_looked_up_nor_stored_nor_offered():
    """Its token ids say nothing about its cache."""
    desk = side(OFFLOADS)
    request = asked("e", LONG, shareable=False, params={"do_remote_decode": True})
    desk.arrived(request)
    assert desk.matched("e", 0) == 0
    assert desk.finished(request, ((0, 0, 0, 0, 3, 4), (1, 2, 3, 4, 2, 3)), 24) == (False, None)
    assert desk.take_step(idle=True) == StepOrders(idle=True)


# ── generations ───────────────────────────────────────────────────────────────────────────


def listed(*ids: int) -> Mapping[int, Blocks]:
    return {0: Blocks.first(list(ids))}


def test_a_generation_ends_with_the_last_lease_on_a_block():
    pins = PinnedBlocks(1, 8)
    first = pins.pin(listed(1, 2))
    second = pins.pin(listed(2, 3))
    assert first[0][1] == second[0][0]
    pins.unpin(listed(1, 2))
    assert pins.pin(listed(2))[0][0] == second[0][0]
    pins.unpin(listed(2, 3))
    pins.unpin(listed(2))
    assert pins.pin(listed(1, 2, 3))[0].tolist() == [first[0][0] + 1] * 3


def test_no_generation_of_a_block_ever_comes_again():
    pins = PinnedBlocks(1, 4)
    rng = np.random.default_rng(1)
    held_now: list[Mapping[int, Blocks]] = []
    seen: dict[int, int] = {}
    for _ in range(300):
        if held_now and rng.random() < 0.5:
            pins.unpin(held_now.pop(rng.integers(len(held_now))))
            continue
        blocks = listed(int(rng.integers(1, 4)))
        block, generation = int(blocks[0].ids[0]), int(pins.pin(blocks)[0][0])
        unbroken = any(int(b[0].ids[0]) == block for b in held_now)
        assert generation == seen[block] if unbroken else generation > seen.get(block, 0)
        seen[block] = generation
        held_now.append(blocks)
