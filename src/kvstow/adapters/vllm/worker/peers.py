"""Prefixes of other engines: asked for by key, and rows of the host tier lent.

    first rank   every peer that is well is asked at once, within a budget → tickets, or none
    every rank   its host tier has an agent of its own, which answers while the engine sleeps

What comes back is a handover like any other: pulled, fenced, compared, and computed if it fails.
"""

import logging
import random
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from threading import Event
from time import monotonic

from kvstow.adapters.vllm.counts import Count
from kvstow.adapters.vllm.options import rank_address
from kvstow.adapters.vllm.protocol import (
    AskPeers,
    PeersAnswer,
    StepOrders,
    StepResults,
)
from kvstow.adapters.vllm.worker.part import RankPart, RankState, Task, Tasks
from kvstow.errors import TransferError
from kvstow.offload.host.tier import HostTier
from kvstow.plan.view import Ints
from kvstow.threads import guarded_thread
from kvstow.transfer.agent import Agent
from kvstow.transfer.channel.address import find_agents
from kvstow.transfer.peers.outgoing import Outgoing
from kvstow.transfer.tickets.owner import Generations
from kvstow.transfer.tickets.ticket import Ticket
from kvstow.transfer.transport.base import Transport

log = logging.getLogger(__name__)

TURN_SECONDS = 5.0
"""How often the list of peers is read again, and those greeted that were not met or were lost."""

REST_SECONDS = 10.0
"""How long a peer is left alone that did not answer, or answered and did not deliver."""

SILENT_BEATS = 3
"""A peer that has left so many heartbeats unanswered is not asked."""

MOST_ASKED = 16
"""Peers that one question goes to; of more, some are chosen."""

LEASE_SECONDS = 10.0
"""How long lent rows are kept for somebody who has asked and is not heard from."""

LENT = "-lent"


def instance_of(agent: str) -> str:
    """The engine of an agent that is called ENGINE-PP-TP, or ENGINE-PP-TP-lent."""
    return agent.removesuffix(LENT).rsplit("-", 2)[0]


# ── asking ────────────────────────────────────────────────────────────────────────────

Answers = dict["Future[Ticket | None]", Outgoing]
"""Answers that are still to come, and from whom."""


class PeerClient(RankPart):
    """Asks other engines for prefixes, in the name of a rank's agent.

    Peers are met in the background, on nobody's time. One that does not answer within the budget
    is left alone for a while, and so is one of those that are `broken`: their tickets could not be
    pulled.
    """

    def __init__(self, rank: RankState, agent: Agent, *, broken: Callable[[], set[str]]) -> None:
        self._rank, self._agent, self._broken = rank, agent, broken
        options = rank.options
        self._seconds = options.peers_seconds
        self._sources = options.peers
        keys = options.keys()
        self._key = keys.public if keys else ""
        self._listed: list[str] = []
        """Addresses of peers, as of the last look."""
        self._rest_until: dict[str, float] = {}
        """By address, until when a peer is left alone."""
        self._questions = Tasks()
        self._answers: list[PeersAnswer] = []
        self._closing = Event()
        self._thread = guarded_thread(
            "kvstow-peers", self._meet_peers, on_broken=lambda error: self._listed.clear()
        )
        if self._sources:
            self._thread.start()

    # ── who there is ──────────────────────────────────────────────────────────────

    def _meet_peers(self) -> None:
        """Read the list of peers again and again; where that fails, the old one stays."""
        while not self._closing.is_set():
            try:
                addresses = {each for source in self._sources for each in find_agents(source)}
                self._listed = sorted(addresses)
            except TransferError as error:
                log.warning("peers are not known: %s", error)
            for address in self._listed:
                self._peer(address)
            self._closing.wait(TURN_SECONDS)

    def _peer(self, address: str) -> Outgoing:
        """The agent at an address; greeted, if it was not met or was lost."""
        peer = self._agent.peers.at(address, self._key)
        with suppress(TransferError):  # closed
            self._agent.loop.submit(peer.greet)
        return peer

    def _ranks_at(self, address: str) -> list[str]:
        """Addresses of an engine that a request names: its first rank's, ports of the others count
        up. One that was not met is met now, and asked for the next request."""
        head, _, port = address.rpartition(":")
        others = range(1, _num_ranks(self._peer(address)))
        return [address, *(f"{head}:{int(port) + rank}" for rank in others)]

    def _peers(self, first: str = "") -> list[Outgoing]:
        """Peers of other engines that are well, each with all ranks of its engine; the one at the
        `first` address is among them."""
        named = self._ranks_at(first) if first else []
        engines: dict[str, list[Outgoing]] = {}
        for address in dict.fromkeys((*named, *self._listed)):
            peer = self._peer(address)
            if self._is_well(peer):
                engines.setdefault(instance_of(peer.name), []).append(peer)
        engines.pop(instance_of(self._agent.name), None)
        whole = [each for each in engines.values() if len(each) == _num_ranks(each[0])]
        random.shuffle(whole)
        whole.sort(key=lambda each: each[0].address not in named)
        peers: list[Outgoing] = []
        for each in whole:
            if not peers or len(peers) + len(each) <= MOST_ASKED:
                peers += each
        return peers

    def _is_well(self, peer: Outgoing) -> bool:
        is_heard = peer.state == "ready" and peer.unanswered <= SILENT_BEATS
        return is_heard and monotonic() >= self._rest_until.get(peer.address, 0.0)

    def _rest(self, address: str) -> None:
        """Leave a peer alone for a while."""
        now = monotonic()
        self._rest_until = {who: at for who, at in self._rest_until.items() if at > now}
        self._rest_until[address] = now + REST_SECONDS

    # ── questions ─────────────────────────────────────────────────────────────────

    def load(self, step: StepOrders) -> None:
        """Ask peers; what they say comes in `report`, within the budget."""
        for order in step.asks:
            self._questions.begin(self._question(order))

    def has_news(self) -> bool:
        self._questions.resume()
        return bool(self._answers)

    def report(self, results: StepResults) -> None:
        """What peers have said since the last time."""
        for address in self._broken():
            self._rest(address)
        self._questions.resume()
        results.peers += self._answers
        for answer in self._answers:
            self._rank.counts[Count.PEER_QUESTIONS] += 1
            self._rank.counts[Count.PEER_TICKETS] += bool(answer.tickets)
        self._answers.clear()

    def _question(self, order: AskPeers) -> Task:
        """One question, until the last peer has answered it. The longest beginning is told as soon
        as it is all that was asked for, or nobody is left; other tickets are handed back."""
        peers = self._peers(order.first)
        ranks = Counter(instance_of(peer.name) for peer in peers)
        answers: Answers = {self._ask(order, peer): peer for peer in peers}
        tickets: list[Ticket] = []
        while True:
            tickets += self._tickets(answers)
            best = _longest(tickets, ranks)
            is_all = bool(best) and best[0].num_tokens == len(order.keys) * order.step
            if is_all or not answers:
                break
            yield
        self._answers.append(PeersAnswer(request=order.request, tickets=best))
        others = [ticket for ticket in tickets if all(ticket is not each for each in best)]
        while True:
            for ticket in others:
                with suppress(TransferError):  # closed
                    self._agent.drop(ticket)
            if not answers:
                return
            yield
            others = self._tickets(answers)

    def _ask(self, order: AskPeers, peer: Outgoing) -> "Future[Ticket | None]":
        try:
            answer = self._agent.begin_ask(
                peer.address, order.keys, step=order.step, key=self._key, seconds=self._seconds
            )
        except TransferError as error:
            answer = Future[Ticket | None]()
            answer.set_exception(error)
        answer.add_done_callback(lambda _: self._rank.wake())
        return answer

    def _tickets(self, answers: Answers) -> list[Ticket]:
        """Tickets of the answers that have come; those are waited for no more."""
        tickets: list[Ticket] = []
        for answer in [each for each in answers if each.done()]:
            peer, error = answers.pop(answer), answer.exception()
            if error is not None:
                self._rest(peer.address)
                log.warning("%s is not asked for a while: %s", peer.name, error)
            elif ticket := answer.result():
                tickets.append(ticket)
        return tickets

    def close(self) -> None:
        """Meet nobody any more; before the agent is closed."""
        self._closing.set()
        if self._sources:
            self._thread.join()


def _num_ranks(peer: Outgoing) -> int:
    """Ranks of a peer's engine; 0 where it was not met."""
    return peer.layout.tp[1] * peer.layout.pp[1] if peer.layout is not None else 0


def _longest(tickets: Sequence[Ticket], ranks: Counter[str]) -> tuple[Ticket, ...]:
    """The tickets of the instance with the longest beginning on all of its ranks."""
    best: tuple[Ticket, ...] = ()
    for instance, num_ranks in ranks.items():
        own = tuple(each for each in tickets if instance_of(each.agent) == instance)
        is_whole = len(own) == num_ranks and len({each.num_tokens for each in own}) == 1
        if is_whole and (not best or own[0].num_tokens > best[0].num_tokens):
            best = own
    return best


# ── lending ───────────────────────────────────────────────────────────────────────────


class LentRows(Generations):
    """Rows of a host tier as blocks of an agent: shared ones are pinned, and a row's generation
    ends with its last lease, before the tier may give the row up.

    Rows of recurrent states are like others: a copy of the state after a block's last token, which
    nobody overwrites in place.
    """

    def __init__(self, tier: HostTier) -> None:
        super().__init__(tier.layout)
        self._tier = tier

    def __len__(self) -> int:
        return self._tier.usage.rows

    def ids(self, group: int, keys: Sequence[bytes]) -> Ints:
        return self._tier.ids(group, keys)

    def still(self) -> AbstractContextManager[object]:
        return self._tier.still()

    def share(self, group: int, ids: Ints) -> None:
        self._tier.pin(group, ids)
        super().share(group, ids)

    def release(self, group: int, ids: Ints) -> None:
        super().release(group, ids)
        self._tier.unpin(group, ids)


class RowServer(RankPart):
    """An agent over a rank's host tier."""

    def __init__(self, rank: RankState, tier: HostTier, transport: Transport) -> None:
        rows = LentRows(tier)
        agent = rank.options.agent
        self.agent = Agent(
            tier.arena,
            rows,
            transport=transport,
            name=rank.name + LENT,
            listen=rank_address(rank.options.lend, tier.layout),
            keys=rank.options.keys(),
            options=replace(agent, lease_seconds=min(LEASE_SECONDS, agent.lease_seconds)),
        )
        self.agent.lend(rows)
        self.agent.start()
        log.info("kvstow: peers may ask for rows of %s at %s", rank.name, self.agent.address)

    def close(self) -> None:
        """End all leases; before the tier is closed."""
        self.agent.close()
