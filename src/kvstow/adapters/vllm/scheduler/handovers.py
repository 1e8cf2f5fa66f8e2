"""Tickets that came with requests: checked, kept alive, pulled with, or given back.

What is pulled before the engine plans a request is in `early`; everything else is ordered when it
has given blocks.

Several requests carry the same tickets where a call asks for several answers (`n`), and a ticket is
read once: the first request pulls, and the others find its blocks in the engine's own cache.
"""

import logging
from collections import deque
from collections.abc import Mapping
from dataclasses import replace

from kvstow.adapters.vllm.counts import Count
from kvstow.adapters.vllm.engine import Request
from kvstow.adapters.vllm.protocol import (
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
from kvstow.adapters.vllm.scheduler.parts import EngineState, Hits, PrefixSource
from kvstow.errors import TransferError
from kvstow.plan.identity import Identity
from kvstow.transfer.tickets.ticket import Ticket

log = logging.getLogger(__name__)

MOST_USED = 256
"""Tickets that were used are remembered, for requests that carry them and come later."""


class Handovers(PrefixSource):
    """Tickets of one engine's requests. Without `takes_over` nothing is pulled: the engine gives
    blocks away that a step under way still writes to."""

    def __init__(self, engine: EngineState, early: EarlyPulls) -> None:
        self._engine = engine
        self._early = early
        self._waiting: dict[str, Handover] = {}
        """By request, tickets that nobody has pulled with."""
        self._pulling: dict[str, Handover] = {}
        self._early_ones: set[str] = set()
        """Those among them whose requests wait for it."""
        self._used: deque[frozenset[tuple[str, int]]] = deque(maxlen=MOST_USED)

    # ── tickets come ──────────────────────────────────────────────────────────────

    def take_in(self, request: EngineRequest, original: Request | None = None) -> None:
        """Tickets that came with the request, and may be used, are pulled with, or kept alive. Bad
        ones are counted here and handed back: the engine computes such a request itself, or has
        rejected it. `original` is the engine's request."""
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
        self._waiting[id] = handover
        self._engine.step.keeps += handover.tickets

    def _pull_early(self, request: Request, handover: Handover) -> bool:
        """Pull before the engine plans the request; whether that is done, or has begun."""
        if self._is_pulled_for_another(handover):
            return False
        match self._early.begin(request, handover):
            case "beside steps":
                return False
            case "needless":
                self._engine.step.drops += handover.tickets
            case "begun":
                self._pulling[request.request_id] = handover
                self._early_ones.add(request.request_id)
                self._settle(self._early.wait())
        return True

    def _settle(self, ended: Mapping[str, EarlyOutcome]) -> None:
        """Early pulls have ended: their tickets are used up, unless no rank has tried."""
        for id, outcome in ended.items():
            handover, is_awaited = self._pulling.pop(id), id in self._early_ones
            self._early_ones.discard(id)
            if outcome != "declined":
                self._use_up(handover)
            elif is_awaited:
                self.offer(id, handover)
            else:
                self._engine.step.drops += handover.tickets

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

    def has(self, id: str) -> bool:
        return id in self._waiting

    def reach(self, id: str, num_computed: int, num_held: int) -> int | None:
        if id in self._early_ones:
            self._settle(self._early.poll())
            return None  # the engine has looked into its cache before it asked
        handover = self._waiting.get(id)
        if handover is None:
            return num_held
        if self._is_pulled_for_another(handover):
            return None
        return max(num_held, handover.num_tokens)

    def load(self, id: str, ids: BlockIds, start: int, num_tokens: int) -> Hits:
        """Pull. Where there are no tickets any more, or too few, the pull fails, and the engine
        computes."""
        handover = self._waiting.pop(id, None)
        tickets: tuple[Ticket, ...] = ()
        if handover is not None:
            self._pulling[id] = handover
            tickets = self._tickets_for(handover, num_tokens)
        is_peers = handover is not None and handover.from_peer
        self._engine.step.pulls.append(
            PullBlocks(
                request=id,
                tickets=tickets,
                ids=ids,
                start_token=start,
                num_tokens=num_tokens,
                seconds=self._engine.options.peers_pull_seconds if is_peers else None,
                may_hold=self._engine.pool is not None,
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
        return any(other.leases == handover.leases for other in self._pulling.values())

    def computes(self, id: str) -> None:
        """Tickets that were pulled for it are used up, for those that waited, too; tickets that
        will not be pulled are dropped, unless another request has the same."""
        self._early.planned(id)
        if id in self._early_ones:  # it was dropped; others may wait for what comes
            self._early_ones.discard(id)
            return
        used = self._pulling.pop(id, None)
        if used is not None:
            self._use_up(used)
        handover = self._waiting.pop(id, None)
        if handover is None or self._is_pulled_for_another(handover):
            return
        if all(other.leases != handover.leases for other in self._waiting.values()):
            self._engine.step.drops += handover.tickets

    def _use_up(self, used: Handover) -> None:
        """Tickets were pulled with: those who waited for it find what it brought in the cache."""
        self._used.append(used.leases)
        for other, handover in tuple(self._waiting.items()):
            if handover.leases == used.leases:
                self._engine.step.drops += self._waiting.pop(other).tickets

    def ended(self, id: str, ids: BlockIds, num_tokens: int) -> None:
        self.computes(id)

    def apply(self, results: StepResults) -> None:
        self._settle(self._early.poll())

    def plan(self) -> None:
        self._settle(self._early.poll())

    def reset(self, identity: Identity) -> None:
        self._early.reset()
        for id in tuple(self._waiting):
            self.computes(id)

    def close(self) -> None:
        self._early.close()
