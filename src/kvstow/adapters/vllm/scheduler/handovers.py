"""Tickets that came with requests, or that peers give for their keys: checked, kept alive, pulled
with, or given back.

What is pulled before the engine plans a request is in `early`; everything else is ordered when it
has given blocks.

Several requests carry the same tickets where a call asks for several answers (`n`), and a ticket is
read once: the first request pulls, and the others find its blocks in the engine's own cache.
"""

import logging
from collections import deque
from dataclasses import dataclass, replace
from functools import partial
from math import gcd
from typing import Literal

from kvstow.adapters.vllm.counts import Count
from kvstow.adapters.vllm.engine import Request
from kvstow.adapters.vllm.protocol import (
    AskPeers,
    BlockIds,
    EarlyOutcome,
    EngineRequest,
    Handover,
    OtherPrompt,
    PullBlocks,
    StepResults,
    handover_in,
    tickets_to_drop,
)
from kvstow.adapters.vllm.scheduler.early import EarlyPulls
from kvstow.adapters.vllm.scheduler.key_index import RequestKeys
from kvstow.adapters.vllm.scheduler.parts import EngineState, Hits, PrefixSource
from kvstow.errors import TransferError
from kvstow.plan.identity import Identity
from kvstow.transfer.channel.messages import MAX_ASKED_KEYS
from kvstow.transfer.tickets.ticket import Ticket

log = logging.getLogger(__name__)

MOST_USED = 256
"""Tickets that were used are remembered, for requests that carry them and come later."""


Stage = Literal["waiting", "early", "abandoned", "loading"]
"""Nobody has pulled with the tickets; an early pull is under way, for a request that waits for it,
or one that was dropped; a pull was ordered."""


@dataclass(slots=True, eq=False)
class TakeOver:
    """A request's tickets, and what has become of them."""

    handover: Handover
    stage: Stage = "waiting"


class Handovers(PrefixSource):
    """Tickets of one engine's requests. Without `takes_over` nothing is pulled: the engine gives
    blocks away that a step under way still writes to."""

    def __init__(self, engine: EngineState) -> None:
        self._engine = engine
        self.early = EarlyPulls(engine)
        self._requests: dict[str, TakeOver] = {}
        self._used: deque[frozenset[tuple[str, int]]] = deque(maxlen=MOST_USED)

    # ── tickets come ──────────────────────────────────────────────────────────────

    def take_in(self, request: EngineRequest, original: Request | None = None) -> None:
        """Tickets that came with the request, and may be used, are pulled with, or kept alive. Bad
        ones are counted here and handed back: the engine computes such a request itself, or has
        rejected it. Those of another prompt are left to the requests that they are for. `original`
        is the engine's request."""
        try:
            handover = handover_in(request)
            if handover is None or handover.leases in self._used:
                return
            self._check_role()
            self._check_identity(handover)
            handover = self._short_of_last(request, handover)
            if original is None or not self._pull_early(original, handover):
                self.offer(request.id, handover)
        except TransferError as error:
            log.warning("request %s: %s", request.id, error)
            self._engine.counts[Count.REFUSED_REQUESTS] += 1
            if not isinstance(error, OtherPrompt):
                most = self._engine.num_blocks * max(g.block_tokens for g in self._engine.groups)
                self._engine.step.drops += tickets_to_drop(request, max_tokens=most)

    def offer(self, id: str, handover: Handover) -> None:
        """A request may take these tokens over."""
        self._requests[id] = TakeOver(handover)
        self._engine.step.keeps += handover.tickets

    def _pull_early(self, request: Request, handover: Handover) -> bool:
        """Pull before the engine plans the request; whether that is done, or has begun."""
        if self._is_pulled_for_another(handover):
            return False
        over = partial(self._end_early, request.request_id)
        match self.early.begin(request, handover, over):
            case "beside steps":
                return False
            case "needless":
                self._engine.step.drops += handover.tickets
            case "begun":
                self._requests[request.request_id] = TakeOver(handover, "early")
                self.early.wait()
        return True

    def _end_early(self, id: str, outcome: EarlyOutcome) -> None:
        """An early pull has ended: its tickets are used up, unless no rank has tried."""
        taken = self._requests.pop(id)
        if outcome != "declined":
            self._use_up(taken.handover)
        elif taken.stage == "early":
            self.offer(id, taken.handover)
        else:
            self._engine.step.drops += taken.handover.tickets

    def _check_role(self) -> None:
        if not self._engine.takes_over:
            raise TransferError(
                "this engine was started as kv_producer, for which vLLM does not keep blocks from "
                'being written while they are loaded\n\nhint: "kv_role": "kv_both"',
                kind="refused",
            )

    def _check_identity(self, handover: Handover) -> None:
        """Refuse tickets of another computation. Those that name none are compared when met, by
        what both engines were started with."""
        own = self._engine.weights.identity
        for ticket in handover.tickets:
            is_unnamed = ticket.identity == b"" and not self._engine.weights.have_changed
            if ticket.identity != own.digest and not is_unnamed:
                raise TransferError(
                    f"agent {ticket.agent!r} does not compute the same as {own.model!r} "
                    "here: weights, configuration, cache dtype or kernels differ\n\n"
                    "hint: compare both instances' manifest_file with `kvstow route`; weights that "
                    "were changed in place need the same weight version in both",
                    kind="ticket",
                )

    def _short_of_last(self, request: EngineRequest, handover: Handover) -> Handover:
        """The same tickets, for all tokens but the request's last, which is computed anyway.

        vLLM gives blocks for what the token after the loaded ones sees. If the last token were
        loaded and then computed, its own window or chunk could reach back into a block that was
        not given. A state that has seen the last token cannot see it again.
        """
        most = len(request.tokens) - 1
        if handover.num_tokens <= most:
            return handover
        if self._engine.has_states:
            raise TransferError(
                f"tickets are for {handover.num_tokens} tokens, all of the request's: a recurrent "
                "state that has seen the last one cannot see it again\n\n"
                "hint: send decode the same prompt as prefill, which stops one token short",
                kind="ticket",
            )
        return replace(handover, num_tokens=most)

    # ── and are used ──────────────────────────────────────────────────────────────

    def takes_over(self, id: str) -> bool:
        """Whether a request has tickets, though they may be pulled with already."""
        return id in self._requests

    def has(self, id: str) -> bool:
        return id in self._requests and self._requests[id].stage == "waiting"

    def reach(self, id: str, num_computed: int, num_held: int) -> int | None:
        taken = self._requests.get(id)
        if taken is None:
            return num_held
        if taken.stage == "early":
            self.early.poll()
            return None  # the engine has looked into its cache before it asked
        if taken.stage != "waiting":
            return num_held
        if self._is_pulled_for_another(taken.handover):
            return None
        return max(num_held, taken.handover.num_tokens)

    def load(self, id: str, ids: BlockIds, start: int, num_tokens: int) -> Hits:
        """Pull. Where there are no tickets any more, or too few, the pull fails, and the engine
        computes."""
        tickets: tuple[Ticket, ...] = ()
        seconds = None
        if self.has(id):
            taken = self._requests[id]
            taken.stage = "loading"
            tickets = self._tickets_for(taken.handover, num_tokens)
            if taken.handover.from_peer:
                seconds = self._engine.options.peers_pull_seconds
        self._engine.step.pulls.append(
            PullBlocks(
                request=id,
                tickets=tickets,
                ids=ids,
                start_token=start,
                num_tokens=num_tokens,
                seconds=seconds,
                may_hold=True,
            )
        )
        return {"p2p": num_tokens - start}

    def _tickets_for(self, handover: Handover, num_tokens: int) -> tuple[Ticket, ...]:
        """The tickets, if so many tokens can be had of them. A recurrent state is that after all
        tokens of the tickets, and none before."""
        has_them = num_tokens <= handover.num_tokens
        if has_them and not (self._engine.has_states and num_tokens < handover.num_tokens):
            return handover.tickets
        log.warning(
            "the engine wants %d tokens, the tickets are for %d: it computes them",
            num_tokens,
            handover.num_tokens,
        )
        self._engine.step.drops += handover.tickets
        return ()

    def _is_pulled_for_another(self, handover: Handover) -> bool:
        return any(
            other.stage != "waiting" and other.handover.leases == handover.leases
            for other in self._requests.values()
        )

    def computes(self, id: str) -> None:
        """Tickets that were pulled for it are used up, for those that waited, too; tickets that
        will not be pulled are dropped, unless another request has the same."""
        self.early.planned(id)
        taken = self._requests.get(id)
        if taken is None:
            return
        if taken.stage in ("early", "abandoned"):  # others may wait for what comes
            taken.stage = "abandoned"
            return
        del self._requests[id]
        others = {other.handover.leases for other in self._requests.values()}
        if taken.stage == "loading":
            self._use_up(taken.handover)
        elif taken.handover.leases not in others:
            self._engine.step.drops += taken.handover.tickets

    def _use_up(self, used: Handover) -> None:
        """Tickets were pulled with: those who waited for it find what it brought in the cache."""
        self._used.append(used.leases)
        for id, other in tuple(self._requests.items()):
            if other.stage == "waiting" and other.handover.leases == used.leases:
                self._engine.step.drops += self._requests.pop(id).handover.tickets

    def ended(self, id: str, ids: BlockIds, num_tokens: int) -> None:
        self.computes(id)

    def apply(self, results: StepResults) -> None:
        self.early.poll()

    def plan(self) -> None:
        self.early.poll()

    def reset(self, identity: Identity) -> None:
        self.early.reset()
        for id in tuple(filter(self.has, self._requests)):
            self.computes(id)

    def close(self) -> None:
        self.early.close()


# ── tickets of peers ──────────────────────────────────────────────────────────────────


class PeerQuestions(PrefixSource):
    """Which requests ask peers; each does so once. Holds no memory and waits for nothing."""

    def __init__(self, engine: EngineState, handovers: Handovers) -> None:
        self._engine, self._handovers = engine, handovers
        self.step = gcd(*(group.block_tokens for group in engine.groups))
        """Tokens from one key of a question to the next."""
        self._requests: dict[str, tuple[EngineRequest, RequestKeys]] = {}
        self._waiting: dict[str, int] = {}
        """Tokens that were held when peers were asked."""

    def arrived(self, request: EngineRequest, keys: RequestKeys, *, has_tickets: bool) -> None:
        if request.shareable and not has_tickets:
            self._requests[request.id] = request, keys

    def reach(self, id: str, num_computed: int, num_held: int) -> int | None:
        """What the other sources have, or None while peers are asked for what is missing."""
        return None if self._waits(id, num_held) else num_held

    def _waits(self, id: str, num_held: int) -> bool:
        if id in self._waiting:
            return True
        if id not in self._requests:
            return False
        request, keys = self._requests.pop(id)
        limits = request.load_limits
        most = limits.up_to(len(request.tokens) - max(1, self._engine.ahead), num_held)
        limit = most // self._engine.unit * self._engine.unit
        has_peer = limits.allows("cpu", "remote") and (self._engine.options.peers or limits.peer)
        if not has_peer or limit - num_held < max(self._engine.options.peers_tokens, 1):
            return False
        self._waiting[id] = num_held
        first = tuple(keys.of(self.step, limit)[:MAX_ASKED_KEYS])
        self._engine.step.asks.append(
            AskPeers(request=id, keys=first, step=self.step, first=limits.peer)
        )
        return True

    def apply(self, results: StepResults) -> None:
        """Peers have been asked: their tickets are kept alive where they have more than is held
        already, for somebody who waits for it, or handed back."""
        for answer in results.peers:
            num_held = self._waiting.pop(answer.request, None)
            num_tokens = answer.tickets[0].num_tokens if answer.tickets else 0
            if num_held is None or num_tokens <= num_held:
                self._engine.step.drops += answer.tickets
            else:
                handover = Handover(
                    tickets=answer.tickets, num_tokens=num_tokens, prompt="", from_peer=True
                )
                self._handovers.offer(answer.request, handover)

    def computes(self, id: str) -> None:
        self._requests.pop(id, None)
        if self._waiting.pop(id, None) is not None:
            step = self._engine.step
            step.asks = [order for order in step.asks if order.request != id]

    def ended(self, id: str, ids: BlockIds, num_tokens: int) -> None:
        self.computes(id)

    def reset(self, identity: Identity) -> None:
        """Requests to come have keys of another identity: peers are not asked for older ones."""
        self._requests.clear()
        self._waiting.clear()
        self._engine.step.asks = []
