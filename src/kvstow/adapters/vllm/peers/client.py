"""Other engines, asked for prefixes in the name of the first rank's agent."""

import logging
import random
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from threading import Event, Lock, Thread
from time import monotonic

from kvstow.adapters.vllm.counts import EngineCounts
from kvstow.adapters.vllm.options import ConnectorOptions
from kvstow.adapters.vllm.peers.server import instance_of
from kvstow.adapters.vllm.protocol import (
    AskPeers,
    PeersAnswer,
    RanksReport,
    StepOrders,
    StepResults,
)
from kvstow.adapters.vllm.worker.part import RankPart
from kvstow.errors import TransferError
from kvstow.transfer.agent import Agent
from kvstow.transfer.discovery import find_agents
from kvstow.transfer.peers.outgoing import Outgoing
from kvstow.transfer.tickets.ticket import Ticket

log = logging.getLogger(__name__)

LOOK_SECONDS = 10.0
"""How often the list of peers is read again."""

TURN_SECONDS = 0.5
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 60.0
"""How long a peer is left alone that did not answer; twice as long every further time."""

SILENT_BEATS = 3
"""A peer that has left so many heartbeats unanswered is not asked."""

MOST_NAMED = 64
"""Peers that requests have named and that are remembered."""

MOST_ASKED = 16
"""Peers that one question goes to; of more, some are chosen."""


@dataclass(slots=True, eq=False)
class LendingPeer:
    """A rank of another engine that lends rows, and until when it is left alone."""

    outgoing: Outgoing
    rest_until: float = 0.0
    pause: float = FIRST_PAUSE
    greet_at: float = 0.0
    greet_pause: float = FIRST_PAUSE

    @property
    def instance(self) -> str:
        return instance_of(self.outgoing.name)

    def rest(self) -> None:
        """It did not answer, or answered and did not deliver."""
        self.rest_until = monotonic() + self.pause
        self.pause = min(2 * self.pause, LONGEST_PAUSE)

    @property
    def is_well(self) -> bool:
        """Whether it may be asked."""
        met = self.outgoing
        is_heard = met.state == "ready" and met.unanswered <= SILENT_BEATS
        return is_heard and monotonic() >= self.rest_until

    def greet(self) -> None:
        """Meet it, if it was not met or was lost, and not too often; in the agent's thread."""
        if self.outgoing.state == "ready":
            self.greet_at, self.greet_pause = 0.0, FIRST_PAUSE
        elif monotonic() >= self.greet_at:
            self.greet_at = monotonic() + self.greet_pause
            self.greet_pause = min(2 * self.greet_pause, LONGEST_PAUSE)
            self.outgoing.greet()


@dataclass(slots=True, eq=False)
class OpenQuestion:
    """A question to several peers, and the tickets that have come."""

    order: AskPeers
    ranks: dict[str, int]
    """How many ranks of each instance were asked."""
    left: int
    tickets: list[Ticket] = field(default_factory=list[Ticket])
    is_over: bool = False

    def best(self) -> tuple[Ticket, ...]:
        """The tickets of the instance with the longest beginning on all of its ranks."""
        whole: list[tuple[Ticket, ...]] = [()]
        for instance, ranks in self.ranks.items():
            own = tuple(each for each in self.tickets if instance_of(each.agent) == instance)
            if len(own) == ranks and len({each.num_tokens for each in own}) == 1:
                whole.append(own)
        return max(whole, key=lambda own: own[0].num_tokens if own else 0)

    @property
    def num_tokens(self) -> int:
        return len(self.order.keys) * self.order.step


class PeerClient(RankPart):
    """Asks other engines for prefixes, in the name of a rank's agent.

    Peers are met in the background, on nobody's time. One that does not answer within the budget
    is left alone for a while, and so is one of those that are `broken`: their tickets could not be
    pulled. `wake` is called when there is an answer, in the agent's thread.
    """

    def __init__(
        self,
        agent: Agent,
        options: ConnectorOptions,
        counts: EngineCounts,
        *,
        broken: Callable[[], set[str]],
        wake: Callable[[], None],
    ) -> None:
        self._agent, self._counts, self._broken = agent, counts, broken
        self._sources = options.peers
        self._seconds = options.peers_seconds
        keys = options.keys()
        self._key = keys.public if keys else ""
        self._wake = wake
        self._known: dict[str, LendingPeer] = {}
        self._met: dict[str, LendingPeer] = {}
        """Peers that requests have named, by address."""
        self._answers: deque[PeersAnswer] = deque()
        self._lock = Lock()
        self._looked_at = float("-inf")
        self._closing = Event()
        self._thread = Thread(target=self._work, name="kvstow-peers", daemon=True)
        if self._sources:
            self._thread.start()

    # ── who there is ──────────────────────────────────────────────────────────────

    def _work(self) -> None:
        while not self._closing.is_set():
            if monotonic() - self._looked_at > LOOK_SECONDS:
                self._look()
            self._meet()
            self._closing.wait(TURN_SECONDS)

    def _look(self) -> None:
        """Read the list of peers again; where that fails, the old one stays."""
        self._looked_at = monotonic()
        found: set[str] = set()
        for source in self._sources:
            try:
                found.update(find_agents(source))
            except TransferError as error:
                log.warning("peers are not known: %s", error)
                found.update(self._known)
        known = {each: self._known.get(each) or self._peer(each) for each in sorted(found)}
        self._known = known

    def _peer(self, address: str) -> LendingPeer:
        return LendingPeer(self._agent.peers.at(address, self._key))

    def _meet(self) -> None:
        """Greet those that were not met yet, or were lost."""
        for peer in self._known.values():
            with suppress(TransferError):  # closed
                self._agent.loop.submit(peer.greet)

    def _named(self, address: str) -> list[LendingPeer]:
        """The ranks of an engine that a request names: the first is at this address, ports of the
        others count up. One that was not met is met now, and asked for the next request."""
        head, _, port = address.rpartition(":")
        first = self._at(address)
        num_ranks = _num_ranks([first])
        return [first, *(self._at(f"{head}:{int(port) + rank}") for rank in range(1, num_ranks))]

    def _at(self, address: str) -> LendingPeer:
        peer = self._known.get(address) or self._met.pop(address, None) or self._peer(address)
        self._met[address] = peer
        if len(self._met) > MOST_NAMED:
            del self._met[next(iter(self._met))]
        with suppress(TransferError):  # closed
            self._agent.loop.submit(peer.greet)
        return peer

    def _well(self, first: str = "") -> list[LendingPeer]:
        """Peers of other engines that answer, each with all ranks of its engine; the one at the
        `first` address is among them."""
        engines: dict[str, list[LendingPeer]] = {}
        named = self._named(first) if first else []
        for peer in {id(each): each for each in (*named, *self._known.values())}.values():
            if peer.is_well:
                engines.setdefault(peer.instance, []).append(peer)
        engines.pop(instance_of(self._agent.name), None)
        whole = [each for each in engines.values() if len(each) == _num_ranks(each)]
        random.shuffle(whole)
        whole.sort(key=lambda each: not any(peer is rank for peer in each for rank in named))
        chosen: list[LendingPeer] = []
        for each in whole:
            if not chosen or len(chosen) + len(each) <= MOST_ASKED:
                chosen += each
        return chosen

    # ── questions ─────────────────────────────────────────────────────────────────

    def load(self, step: StepOrders) -> None:
        for order in step.asks:
            self.ask(order)

    def has_news(self) -> bool:
        return bool(self._answers)

    def report(self) -> StepResults:
        """What peers have said since the last time."""
        for address in self._broken():
            peer = self._known.get(address) or self._met.get(address)
            if peer is not None:
                peer.rest()
        answers = tuple(self._answers.popleft() for _ in range(len(self._answers)))
        for answer in answers:
            self._counts["peers asked"] += 1
            self._counts["peers had it"] += bool(answer.tickets)
        return StepResults(report=RanksReport(peers=answers))

    def ask(self, order: AskPeers) -> None:
        """Ask peers; what they say comes in `report`, within the budget."""
        peers = self._well(order.first)
        ranks: dict[str, int] = {}
        for peer in peers:
            ranks[peer.instance] = ranks.get(peer.instance, 0) + 1
        question = OpenQuestion(order, ranks, len(peers))
        if not peers:
            self._end(question)
        for peer in peers:
            self._begin(order, peer).add_done_callback(partial(self._heard, question, peer))

    def _begin(self, order: AskPeers, peer: LendingPeer) -> "Future[Ticket | None]":
        try:
            return self._agent.begin_ask(
                peer.outgoing.address,
                order.keys,
                step=order.step,
                key=self._key,
                seconds=self._seconds,
            )
        except TransferError as error:
            failed: Future[Ticket | None] = Future()
            failed.set_exception(error)
            return failed

    def _heard(
        self, question: OpenQuestion, peer: LendingPeer, answer: "Future[Ticket | None]"
    ) -> None:
        ticket = None
        if answer.exception() is None:
            ticket, peer.pause = answer.result(), FIRST_PAUSE
        else:
            peer.rest()
            log.warning("%s is not asked for a while: %s", peer.outgoing.name, answer.exception())
        with self._lock:
            question.left -= 1
            if ticket is not None and question.is_over:
                self._drop(ticket)
            elif ticket is not None:
                question.tickets.append(ticket)
            best = question.best()
            all_there = bool(best) and best[0].num_tokens == question.num_tokens
            if not question.is_over and (all_there or not question.left):
                self._end(question, best)

    def _end(self, question: OpenQuestion, best: tuple[Ticket, ...] = ()) -> None:
        question.is_over = True
        for ticket in question.tickets:
            if all(ticket is not each for each in best):
                self._drop(ticket)
        self._answers.append(PeersAnswer(request=question.order.request, tickets=best))
        self._wake()

    def _drop(self, ticket: Ticket) -> None:
        with suppress(TransferError):  # closed
            self._agent.drop(ticket)

    def close(self) -> None:
        """Meet nobody any more; before the agent is closed."""
        self._closing.set()
        if self._sources:
            self._thread.join()


def _num_ranks(peers: Sequence[LendingPeer]) -> int:
    layout = peers[0].outgoing.layout
    return layout.tp[1] * layout.pp[1] if layout is not None else 0
