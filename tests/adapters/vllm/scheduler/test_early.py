"""Pulls that are over before the engine plans their request: real agents over shared memory, and a
stand-in of the engine's pool. vLLM's own pool is in tests/vllm."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvstow.adapters.vllm.mail import Inbox, MailAddress
from kvstow.adapters.vllm.options import ConnectorOptions
from kvstow.adapters.vllm.protocol import EarlyAnswer, EngineRequest
from kvstow.adapters.vllm.scheduler.parts import BlockHolds
from kvstow.transfer.tickets.ticket import Ticket
from kvstow.transfer.transport.local import Fabric
from pretended_engine import NUM_BLOCKS, PROMPT, TOKENS, Engine
from waiting import wait_for

SETTINGS = ConnectorOptions(digest="always", transfer_seconds=20, early_seconds=10)
THERE = ((7, 8, 9, 10, 11),)
WHOLE = len(PROMPT) // TOKENS


class StandInPool:
    """What vLLM's pool does for us: references, and a prefix cache by hash."""

    def __init__(self, num_blocks: int = NUM_BLOCKS) -> None:
        self.blocks = [SimpleNamespace(block_id=id, ref_cnt=0) for id in range(num_blocks)]
        self.free = list(range(1, num_blocks))
        self.cache: dict[bytes, int] = {}

    def get_num_free_blocks(self) -> int:
        return len(self.free)

    def get_new_blocks(self, count: int) -> list[Any]:
        taken, self.free = self.free[:count], self.free[count:]
        self.cache = {key: id for key, id in self.cache.items() if id not in taken}
        for id in taken:
            self.blocks[id].ref_cnt = 1
        return [self.blocks[id] for id in taken]

    def get_cached_block(self, key: bytes, groups: list[int]) -> list[Any] | None:
        return [self.blocks[self.cache[key]]] if key in self.cache else None

    def cache_full_blocks(
        self, request: Any, blocks: list[Any], first: int, end: int, size: int, group: int
    ) -> None:
        keys = request.block_hashes[first:end]
        self.cache |= {key: block.block_id for key, block in zip(keys, blocks[first:], strict=True)}

    def touch(self, blocks: Sequence[Any]) -> None:
        for block in blocks:
            block.ref_cnt += 1
            if block.block_id in self.free:
                self.free.remove(block.block_id)

    def free_blocks(self, blocks: Sequence[Any]) -> None:
        for block in blocks:
            block.ref_cnt -= 1
            if not block.ref_cnt:
                self.free.append(block.block_id)


def keys_of(tokens: Sequence[int]) -> list[bytes]:
    """A hash of each whole block and all before it, as vLLM has it of its requests."""
    return [repr(tokens[:end]).encode() for end in range(TOKENS, len(tokens) + 1, TOKENS)]


@dataclass
class Decode:
    """A decode engine and its pool."""

    engine: Engine
    pool: StandInPool

    def arrives(
        self, params: object, tokens: list[int] = PROMPT, id: str = "d", **more: Any
    ) -> Any:
        """A request with tickets is queued."""
        tokens = [*tokens, 99]
        original = SimpleNamespace(
            request_id=id, all_token_ids=tokens, block_hashes=keys_of(tokens)
        )
        original.skip_reading_prefix_cache = False
        vars(original).update(more)
        request = EngineRequest(id=id, tokens=tokens, params=params)  # pyright: ignore
        self.engine.desk.arrived(request, original)
        return original

    def found(self, tokens: list[int] = PROMPT) -> list[int]:
        """Blocks of a prompt in the engine's prefix cache."""
        return BlockHolds(self.pool).cached(keys_of([*tokens, 99]), WHOLE)

    def outcomes(self) -> dict[str, int]:
        counts = self.engine.desk.counts
        return {what: n for what, n in counts.items() if what.startswith("early")}


@contextmanager
def started(settings: ConnectorOptions = SETTINGS) -> Iterator[tuple[Engine, Decode]]:
    fabric = Fabric()
    prefill, decode = (
        Engine.start(fabric, name, settings, "BLHNC", told="at once", plain=True)
        for name in ("prefill", "decode")
    )
    pool = StandInPool()
    decode.desk.bind(BlockHolds(pool))  # pyright: ignore
    yield prefill, Decode(decode, pool)
    for engine in (prefill, decode):
        engine.hands.close()
        engine.desk.close()


@pytest.fixture
def engines() -> Iterator[tuple[Engine, Decode]]:
    """Two engines that have met."""
    with started() as (prefill, decode):
        prefill.fill(1)
        decode.engine.hands.agent.connect(prefill.hands.endpoint.address)
        yield prefill, decode


def same(prefill: Engine, decode: Decode, there: Sequence[int], here: Sequence[int]) -> bool:
    pairs = zip(there, here, strict=False)
    views = (prefill.views, decode.engine.views)
    return all(torch.equal(views[1][n][b], views[0][n][a]) for a, b in pairs for n in views[0])


def test_a_prompt_is_in_the_engines_cache_when_its_request_is_planned(
    engines: tuple[Engine, Decode],
):
    prefill, decode = engines
    decode.arrives(prefill.prefill(THERE))
    assert len(decode.found()) == WHOLE
    assert same(prefill, decode, THERE[0], decode.found())
    assert len(decode.pool.free) == NUM_BLOCKS - 1  # nothing is held
    assert decode.engine.desk.matched("d", WHOLE * TOKENS) == 0
    assert decode.outcomes() == {"early_pulls accepted": 1}
    assert "p" in prefill.until(lambda seen: bool(seen.sent)).sent


def test_only_what_is_missing_is_pulled(engines: tuple[Engine, Decode]):
    prefill, decode = engines
    decode.arrives(prefill.prefill(THERE, PROMPT[:8], id="p"), PROMPT[:8], id="first")
    first = decode.found()
    decode.arrives(prefill.prefill(THERE, id="q"), id="second")
    assert decode.found()[:2] == first
    assert same(prefill, decode, THERE[0], decode.found())
    assert decode.engine.hands.rank.counts["pulled_tokens"] == WHOLE * TOKENS
    decode.arrives(prefill.prefill(THERE, id="r"), id="third")  # all is here
    assert decode.outcomes() == {"early_pulls accepted": 2}
    assert decode.engine.desk.matched("third", WHOLE * TOKENS) == 0


def test_a_fence_that_fails_leaves_free_blocks_and_a_request_that_is_computed(
    engines: tuple[Engine, Decode],
):
    prefill, decode = engines
    params: Any = prefill.prefill(THERE)
    ticket = Ticket.parse(params["kvstow"]["tickets"][0])
    decode.engine.hands.agent.drop(ticket)
    prefill.until(lambda seen: "p" in seen.sent)
    decode.arrives(params)
    assert decode.found() == []
    assert len(decode.pool.free) == NUM_BLOCKS - 1
    assert decode.engine.desk.matched("d", 0) == 0
    assert decode.outcomes() == {"early_pulls failed": 1}


def test_engines_that_have_not_met_load_beside_the_steps():
    with started() as (prefill, decode):
        prefill.fill(1)
        decode.arrives(prefill.prefill(THERE))
        assert decode.outcomes() == {"early_pulls declined": 1}
        assert len(decode.pool.free) == NUM_BLOCKS - 1
        assert decode.engine.desk.matched("d", 0) == len(PROMPT)


@pytest.mark.parametrize(
    "change",
    [
        lambda decode: {"skip_reading_prefix_cache": True},
        lambda decode: {"block_hashes": []},
        lambda decode: decode.pool.free.clear() or {},
        lambda decode: decode.engine.desk.meet([]) or {},
        lambda decode: decode.engine.desk.meet([unreachable(decode)]) or {},
    ],
    ids=["not looked for", "no prefix cache", "no room", "no worker", "no mail"],
)
def test_what_cannot_be_found_early_is_loaded_beside_the_steps(
    engines: tuple[Engine, Decode], change: Callable[[Decode], dict[str, Any]]
):
    prefill, decode = engines
    decode.arrives(prefill.prefill(THERE), **change(decode))
    assert decode.engine.desk.matched("d", 0) == len(PROMPT)
    assert not decode.outcomes()


def unreachable(decode: Decode) -> Any:
    return replace(decode.engine.hands.endpoint, inbox=MailAddress())


# ── answers that are late, and several ranks ──────────────────────────────────────────────


@contextmanager
def answering(
    seconds: float, ranks: int = 1, **options: Any
) -> Iterator[tuple[Engine, Decode, Callable[..., None]]]:
    """A decode engine whose ranks are pretended: they answer when they are told to."""
    with started(replace(SETTINGS, early_seconds=seconds, **options)) as (prefill, decode):
        inboxes = [Inbox() for _ in range(ranks)]
        endpoint = decode.engine.hands.endpoint
        decode.engine.desk.meet([replace(endpoint, inbox=each.address) for each in inboxes])

        def answer(*outcomes: Any) -> None:
            for inbox, outcome in zip(inboxes, outcomes, strict=True):
                order = inbox.receive(5)
                order.answer_to.send(EarlyAnswer(order.number, outcome))

        yield prefill, decode, answer


def test_a_pull_that_takes_longer_is_asked_for_in_later_steps_and_holds_its_blocks():
    with answering(0.01) as (prefill, decode, answer):
        decode.arrives(prefill.prefill(THERE))
        assert decode.engine.desk.matched("d", 0) is None
        assert decode.engine.desk.waits_for_step
        assert len(decode.pool.free) == NUM_BLOCKS - 1 - WHOLE
        answer("accepted")
        assert decode.engine.desk.matched("d", 0) is None  # the engine has looked before it asked
        assert len(decode.found()) == WHOLE
        assert decode.engine.desk.matched("d", WHOLE * TOKENS) == 0
        assert decode.outcomes() == {"early_pulls late": 1}


@pytest.mark.parametrize(
    ("outcomes", "result"),
    [
        (("accepted", "accepted"), "accepted"),
        (("accepted", "failed"), "failed"),
        (("failed", "accepted"), "failed"),
        (("declined", "declined"), "declined"),
        (("declined", "accepted"), "failed"),
    ],
)
def test_blocks_count_when_every_rank_has_them(outcomes: tuple[str, ...], result: str):
    with answering(0.01, ranks=2) as (prefill, decode, answer):
        decode.arrives(prefill.prefill(THERE))
        answer(*outcomes)
        decode.engine.desk.take_step(computes=False)
        assert decode.outcomes() == {f"early_pulls {'late' if result == 'accepted' else result}": 1}
        assert bool(decode.found()) == (result == "accepted")
        reach = {"accepted": 0, "failed": 0, "declined": len(PROMPT)}
        num_computed = len(decode.found()) * TOKENS
        assert decode.engine.desk.matched("d", num_computed) == reach[result]


def test_a_request_that_is_dropped_meanwhile_gives_its_blocks_back_when_all_have_answered():
    with answering(0.01) as (prefill, decode, answer):
        decode.arrives(prefill.prefill(THERE))
        decode.engine.desk.finished(EngineRequest(id="d", tokens=PROMPT), ((),), 0)
        assert len(decode.pool.free) < NUM_BLOCKS - 1
        answer("declined")
        assert decode.engine.desk.take_step(computes=False).drops
        assert len(decode.pool.free) == NUM_BLOCKS - 1


def test_what_ranks_have_not_answered_when_others_are_met_has_failed():
    with answering(0.01, ranks=2) as (prefill, decode, _):
        decode.arrives(prefill.prefill(THERE))
        assert decode.engine.desk.matched("d", 0) is None
        decode.engine.desk.meet([])
        assert decode.engine.desk.matched("d", 0) == 0
        assert decode.outcomes() == {"early_pulls failed": 1}
        assert len(decode.pool.free) == NUM_BLOCKS - 1


def test_a_request_with_tickets_asks_no_peers_though_its_early_pull_is_declined_late():
    peers = ("tcp://127.0.0.1:1",)
    with answering(0.01, peers=peers, peers_tokens=4) as (prefill, decode, answer):
        decode.arrives(prefill.prefill(THERE, PROMPT[:9]))
        answer("declined")
        assert decode.engine.desk.matched("d", 0) is None
        assert decode.engine.desk.matched("d", 0) == 9
        assert decode.engine.desk.take_step(computes=False).asks == []


def test_what_was_computed_before_a_reset_is_not_found_after_it():
    with answering(0.01) as (prefill, decode, answer):
        decode.arrives(prefill.prefill(THERE))
        assert not decode.engine.desk.reset()
        answer("accepted")
        decode.engine.desk.take_step(computes=False)
        assert decode.found() == []
        assert decode.engine.desk.reset()


def test_prompts_that_wait_are_not_pushed_out_by_those_that_come_after(
    engines: tuple[Engine, Decode],
):
    """Four prompts of four blocks fit beside what stays free; the fifth is loaded in its turn."""
    prefill, decode = engines
    prompts = [[k, *PROMPT[1:]] for k in range(6)]
    for k, prompt in enumerate(prompts):
        decode.arrives(prefill.prefill(THERE, prompt, id=f"p{k}"), prompt, id=f"d{k}")
    early = [k for k, prompt in enumerate(prompts) if len(decode.found(prompt)) == WHOLE]
    assert early == [0, 1, 2, 3, 4]
    assert decode.engine.desk.matched("d5", 0) == len(PROMPT)
    decode.engine.desk.allocated("d0", ((),), 0)  # the engine has planned one
    decode.arrives(prefill.prefill(THERE, [7, *PROMPT[1:]], id="p7"), [7, *PROMPT[1:]], id="d7")
    assert len(decode.found([7, *PROMPT[1:]])) == WHOLE


def test_sleep_ends_early_pulls_and_all_are_told(engines: tuple[Engine, Decode]):
    prefill, decode = engines
    decode.engine.hands.sleep()
    wait_for(lambda: not decode.engine.hands.endpoint.inbox.send(None))
    decode.arrives(prefill.prefill(THERE))
    assert decode.engine.desk.matched("d", 0) == len(PROMPT)
