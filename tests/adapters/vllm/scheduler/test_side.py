"""The scheduler's side of the connector, asked as vLLM asks it; no engine is needed."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kvstow.adapters.vllm.cache.layout import CacheDeclaration
from kvstow.adapters.vllm.cache.pages import AFTER_LAST_TOKEN
from kvstow.adapters.vllm.mail import Inbox
from kvstow.adapters.vllm.options import ConnectorOptions
from kvstow.adapters.vllm.protocol import (
    EngineRequest,
    StepOrders,
    StepResults,
    WorkerEndpoint,
    blocks_with_tokens,
    handover_in,
)
from kvstow.adapters.vllm.scheduler.offers import PinnedBlocks
from kvstow.adapters.vllm.scheduler.side import SchedulerSide
from kvstow.plan.identity import Identity
from kvstow.route.blocks import Blocks
from recorded_vllm import IDENTITY, engine_state, hybrid

CARD = WorkerEndpoint(
    agent="p-0-0", start="s", address="tcp://127.0.0.1:1", key="", fingerprint="f" * 64
)
PROMPT = list(range(10))
NAMED = Identity(model="m", weights="w", config=(("rope_theta", "10000"),), kv_dtype="fp8_e4m3")


def side(
    settings: ConnectorOptions | None = None,
    declared: CacheDeclaration | None = None,
    identity: Identity = IDENTITY,
) -> SchedulerSide:
    declared = declared or hybrid()
    made = SchedulerSide(engine_state(declared, settings, identity))
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
    step = prefill.take_step(computes=False)
    assert [offer.tickets[0].body for offer in step.offers] == [ticket.body]
    assert prefill.take_step(computes=False) == StepOrders(idle=True)


def test_a_step_is_idle_when_it_and_the_one_before_compute_nothing():
    one = side()
    computes = (False, True, False, False)
    assert [one.take_step(computes=each).idle for each in computes] == [True, False, False, True]


def test_blocks_beyond_the_computed_tokens_are_not_offered():
    assert blocks_with_tokens((5, 6, 7), 0, 8, 4).ids.tolist() == [5, 6]


def test_the_generation_grows_when_the_workers_have_sent():
    prefill = side()
    first = handover_in(asked("d", params=offered(prefill)))
    prefill.apply(StepResults(), ["r"])
    second = handover_in(asked("d", params=offered(prefill)))
    assert first is not None
    assert second is not None
    assert second.tickets[0].generations[1][0] == first.tickets[0].generations[1][0] + 1


def test_decode_loads_what_it_does_not_have_itself():
    decode = side()
    decode.arrived(asked("d", params=offered(side())))
    assert [decode.matched("d", computed) for computed in (0, 8, 4)] == [9, 1, 5]
    decode.allocated("d", ((1, 2, 3), (1, 2, 3)), 5)
    step = decode.take_step(computes=True)
    assert (step.pulls[0].start_token, step.pulls[0].num_tokens) == (4, 9)
    assert len(step.keeps) == 1
    assert decode.matched("d", 0) == 0, "a load is tried once, then the engine computes"


def test_an_engine_that_takes_fewer_tokens_than_it_was_told_of_gets_the_first_of_them():
    """vLLM rounds them down to whole blocks for some models."""
    decode = side()
    decode.arrived(asked("d", params=offered(side())))
    assert decode.matched("d", 0) == 9
    decode.allocated("d", ((1, 2), (1, 2)), 8)
    (pull,) = decode.take_step(computes=True).pulls
    assert (pull.start_token, pull.num_tokens) == (0, 8)


def test_a_state_is_not_taken_for_that_of_fewer_tokens():
    pages = [replace(page, retention=AFTER_LAST_TOKEN) for page in hybrid().groups[0]]
    recurrent = replace(hybrid(), groups=(tuple(pages), hybrid().groups[1]))
    decode = side(declared=recurrent)
    decode.arrived(asked("d", [*PROMPT, 99], params=offered(side(declared=recurrent))))
    assert decode.matched("d", 0) == 10
    decode.allocated("d", ((1, 2), (1, 2)), 8)
    step = decode.take_step(computes=False)
    assert step.pulls[0].tickets == ()  # which fails, and the engine computes the request
    assert len(step.drops) == 1


@pytest.mark.parametrize(("tokens", "loaded"), [(10, 9), (11, 10), (12, 10)])
def test_the_last_token_of_a_request_is_never_loaded(tokens: int, loaded: int):
    """vLLM computes it anyway, and gives no block that it alone sees."""
    decode = side()
    prompt = [*PROMPT, 98, 99][:tokens]
    decode.arrived(asked("d", prompt, params=offered(side())))
    assert decode.matched("d", 0) == loaded


def test_a_state_that_has_seen_the_last_token_is_refused():
    pages = [replace(page, retention=AFTER_LAST_TOKEN) for page in hybrid().groups[0]]
    recurrent = replace(hybrid(), groups=(tuple(pages), hybrid().groups[1]))
    decode = side(declared=recurrent)
    decode.arrived(asked("d", params=offered(side(declared=recurrent))))
    assert decode.matched("d", 0) == 0
    assert decode.counts["refused_requests"] == 1
    decode.arrived(asked("e", [*PROMPT, 99], params=offered(side(declared=recurrent))))
    assert decode.matched("e", 0) == 10


def test_a_request_that_needs_no_load_gives_its_tickets_back():
    decode = side()
    decode.arrived(asked("d", params=offered(side())))
    decode.allocated("d", ((1, 2, 3), (1, 2, 3)), 0)
    assert len(decode.take_step(computes=True).drops) == 1


def test_tiers_are_not_looked_at_for_a_request_that_carries_tickets():
    decode = side(ConnectorOptions(host_bytes=1 << 20, host_shared="name"))
    decode.arrived(asked("d", params=offered(side())))
    assert decode.take_step(computes=False).lookups == []
    decode.arrived(asked("e"))
    assert len(decode.take_step(computes=False).lookups) == 1


def test_a_request_that_is_aborted_gives_its_tickets_back():
    decode = side()
    request = asked("d", params=offered(side()))
    decode.arrived(request)
    assert decode.finished(request, ((), ()), 0) == (False, None)
    assert len(decode.take_step(computes=True).drops) == 1


def test_a_request_that_vllm_has_rejected_gives_its_tickets_back():
    """vLLM then queues an empty prompt with the same parameters, and aborts it."""
    decode = side()
    params = offered(side())
    handover = handover_in(asked("d", params=params))
    assert handover is not None
    request = asked("d", [0], params=params)
    decode.arrived(request)
    assert decode.finished(request, ((), ()), 0) == (False, None)
    drops = decode.take_step(computes=True).drops
    assert [ticket.body for ticket in drops] == [handover.tickets[0].body]


def test_a_request_that_ends_while_it_is_loaded_hands_nothing_over():
    """vLLM counts its tokens as computed from the moment it has blocks."""
    decode = side()
    request = asked("d", params={**offered(side()), "do_remote_decode": True})
    decode.arrived(request)
    decode.allocated("d", ((1, 2, 3), (1, 2, 3)), 9)
    assert decode.finished(request, ((1, 2, 3), (1, 2, 3)), 10) == (False, None)
    assert decode.take_step(computes=False).offers == []


def test_a_request_that_was_loaded_and_then_computed_hands_over():
    decode = side()
    request = asked("d", params={**offered(side()), "do_remote_decode": True})
    decode.arrived(request)
    decode.allocated("d", ((1, 2, 3), (1, 2, 3)), 9)
    decode.allocated("d", ((1, 2, 3), (1, 2, 3)), 0)
    stays, params = decode.finished(request, ((1, 2, 3), (1, 2, 3)), 10)
    assert stays
    assert params is not None
    assert len(decode.take_step(computes=False).offers) == 1


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
    assert decode.counts["refused_requests"] == 1


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
    assert decode.counts["refused_requests"] == 1
    assert decode.matched("d", 0) == 0
    assert decode.take_step(computes=False) == StepOrders(idle=True)


def test_tickets_of_another_computation_are_refused_before_anything_is_pulled():
    decode = side(identity=replace(NAMED, weights="another checkpoint"))
    decode.arrived(asked("d", params=offered(side(identity=NAMED))))
    assert decode.matched("d", 0) == 0
    assert decode.counts["refused_requests"] == 1


def test_a_request_that_finishes_before_any_worker_is_known_gets_no_tickets():
    prefill = side()
    prefill.meet([])
    request = asked("r", params={"do_remote_decode": True})
    assert prefill.finished(request, ((1, 2, 3), (1, 2, 3)), 10) == (False, None)
    assert prefill.counts["not_offered_requests"] == 1


def test_workers_are_told_of_an_offer_at_once_and_in_the_next_step():
    prefill, inbox = side(), Inbox()
    prefill.meet([replace(CARD, inbox=inbox.address)])
    given: Any = offered(prefill)
    told = inbox.receive(0)
    assert [str(ticket) for ticket in told.tickets] == given["kvstow"]["tickets"]
    assert len(prefill.take_step(computes=False).offers) == 1


# ── generations ───────────────────────────────────────────────────────────────────────────


def listed(*ids: int) -> Mapping[int, Blocks]:
    return {0: Blocks.first(list(ids))}


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


def siblings(decode: SchedulerSide, params: dict[str, object]) -> None:
    """A call that asks for two answers: two requests with the same tickets."""
    for id in ("d", "e"):
        decode.arrived(asked(id, params=params))
    assert decode.matched("d", 0) == 9
    decode.allocated("d", ((1, 2, 3), (1, 2, 3)), 9)


def test_a_request_with_the_same_tickets_waits_for_the_first_and_pulls_nothing():
    """A ticket is read once. What the first has loaded is in the engine's own cache then."""
    decode = side()
    siblings(decode, offered(side()))
    assert decode.matched("e", 0) is None
    decode.allocated("d", ((1, 2, 3), (1, 2, 3)), 0)
    assert decode.matched("e", 8) == 0
    decode.allocated("e", ((1, 2, 4), (1, 2, 4)), 0)
    assert [pull.request for pull in decode.take_step(computes=True).pulls] == ["d"]


def test_a_request_that_ends_does_not_drop_tickets_that_another_pulls():
    decode = side()
    siblings(decode, offered(side()))
    decode.finished(asked("e"), ((), ()), 0)
    assert decode.take_step(computes=True).drops == []


def test_tickets_are_dropped_with_the_last_request_that_carries_them():
    decode, params = side(), offered(side())
    for id in ("d", "e"):
        decode.arrived(asked(id, params=params))
    decode.finished(asked("e"), ((), ()), 0)
    assert decode.take_step(computes=True).drops == []
    decode.finished(asked("d"), ((), ()), 0)
    assert len(decode.take_step(computes=True).drops) == 1


@pytest.mark.parametrize("prompt", [[7, *PROMPT], [7, 7, 7], PROMPT[:4], [5]])
@pytest.mark.parametrize("order", [("other", "d"), ("d", "other")])
def test_another_prompt_of_the_same_call_leaves_the_tickets_to_whom_they_are_for(
    order: tuple[str, str], prompt: list[int]
):
    decode, params = side(), offered(side())
    for id in order:
        decode.arrived(asked(id, PROMPT if id == "d" else prompt, params=params))
        assert decode.take_step(computes=True).drops == []
    assert decode.matched("other", 0) == 0
    assert decode.matched("d", 0) == 9


def test_a_load_whose_blocks_come_after_a_reset_fails():
    """vLLM 0.33 may give blocks for a load steps after it has asked how much can be loaded."""
    decode = side()
    decode.arrived(asked("d", params=offered(side())))
    assert decode.matched("d", 0) == 9
    decode.reset()
    decode.allocated("d", ((1, 2, 3), (1, 2, 3)), 9)
    (pull,) = decode.take_step(computes=True).pulls
    assert pull.tickets == ()
    assert (pull.request, pull.num_tokens) == ("d", 9)


def test_rows_whose_blocks_come_after_a_reset_fail_to_load():
    decode = side(ConnectorOptions(host_bytes=1 << 20))
    decode.arrived(asked("d"))
    decode.matched("d", 0)
    decode.reset()
    decode.allocated("d", ((1, 2, 3), (1, 2, 3)), 4)
    step = decode.take_step(computes=True)
    assert step.loads == []
    assert step.pulls[0].tickets == ()
