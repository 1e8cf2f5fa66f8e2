"""Prefixes of other engines: rows of the host tier are lent to them, theirs are asked for by key.

    scheduler    a prompt of which device and tiers hold too little → one question to the first rank
    first rank   every peer that is well is asked at once, within a budget → tickets, or none
    every rank   its host tier has an agent of its own, which answers while the engine sleeps

What comes back is a handover like any other: pulled, fenced, compared, and computed if it fails.
"""

import logging
import random
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from math import gcd, lcm
from threading import Event, Lock, Thread
from time import monotonic

from kvstow.adapters.vllm.options import ConnectorOptions
from kvstow.adapters.vllm.protocol import AskPeers, EngineRequest, Handover, PeersAnswer
from kvstow.adapters.vllm.stored import RequestKeys
from kvstow.errors import TransferError
from kvstow.offload.host.tier import HostTier
from kvstow.plan.group import Group
from kvstow.plan.identity import Identity
from kvstow.plan.layout import Layout
from kvstow.plan.retention import State
from kvstow.plan.view import Ints
from kvstow.transfer.agent import Agent
from kvstow.transfer.channel.messages import MAX_ASKED_KEYS
from kvstow.transfer.discovery import EtcdLease, found_agents
from kvstow.transfer.generations import Generations
from kvstow.transfer.peers.outgoing import Outgoing
from kvstow.transfer.ticket import Ticket
from kvstow.transfer.transport.base import Transport

log = logging.getLogger(__name__)

LEASE_SECONDS = 10.0
"""How long lent rows are kept for somebody who has asked and is not heard from."""

LOOK_SECONDS = 10.0
"""How often the list of peers is read again."""

TURN_SECONDS = 0.5
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 60.0
"""How long a peer is left alone that did not answer; twice as long every further time."""

SILENT_BEATS = 3
"""A peer that has left so many heartbeats unanswered is not asked."""

MOST_ASKED = 16
"""Peers that one question goes to; of more, some are chosen."""

LENT = "-lent"


def instance_of(agent: str) -> str:
    """The engine of an agent that is called ENGINE-PP-TP, or ENGINE-PP-TP-lent."""
    return agent.removesuffix(LENT).rsplit("-", 2)[0]


# ── in the scheduler ──────────────────────────────────────────────────────────────────


class PeerQuestions:
    """Which requests ask peers; each does so once. Holds no memory and waits for nothing."""

    def __init__(
        self, groups: Sequence[Group], identity: Identity, options: ConnectorOptions
    ) -> None:
        sizes = [group.block_tokens for group in groups]
        self._step, self._unit = gcd(*sizes), lcm(*sizes)
        self._identity = identity
        self._least = options.peers_tokens
        self._knows_states = any(isinstance(group.retention, State) for group in groups)
        if self._knows_states:
            log.warning("peers are not asked: recurrent states are not lent")
        self._requests: dict[str, EngineRequest] = {}
        self._waiting: dict[str, int] = {}
        """Tokens that were held when peers were asked."""
        self._orders: list[AskPeers] = []

    def arrived(self, request: EngineRequest) -> None:
        """A request is queued."""
        if request.shareable and not self._knows_states:
            self._requests[request.id] = request

    def waits(self, id: str, num_held: int) -> bool:
        """Whether peers are being asked for what is missing behind the first tokens."""
        if id in self._waiting:
            return True
        request = self._requests.pop(id, None)
        if request is None:
            return False
        limit = (len(request.tokens) - 1) // self._unit * self._unit
        if limit - num_held < max(self._least, 1):
            return False
        keys = RequestKeys(self._identity, request, {self._step}).of(self._step, limit)
        self._waiting[id] = num_held
        asked = tuple(keys[:MAX_ASKED_KEYS])
        self._orders.append(AskPeers(request=id, keys=asked, step=self._step))
        return True

    def handover(self, answer: PeersAnswer) -> Handover | None:
        """What an answer brings: more than is held already, for somebody who waits for it."""
        num_held = self._waiting.pop(answer.request, None)
        if num_held is None or not answer.tickets:
            return None
        num_tokens = answer.tickets[0].num_tokens
        if num_tokens <= num_held:
            return None
        return Handover(tickets=answer.tickets, num_tokens=num_tokens, prompt="", asked=True)

    def forget(self, id: str) -> None:
        """The request is over, or computes."""
        self._requests.pop(id, None)
        self._waiting.pop(id, None)

    def take(self) -> tuple[AskPeers, ...]:
        """Questions for the first rank; told once."""
        orders, self._orders = tuple(self._orders), []
        return orders


# ── lending ───────────────────────────────────────────────────────────────────────────


class LentRows(Generations):
    """Rows of a host tier as blocks of an agent: shared ones are pinned, and a row's generation
    ends with its last lease, before the tier may give the row up."""

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


class RowLender:
    """An agent over a rank's host tier. It is entered in etcd where peers are found there."""

    def __init__(
        self, tier: HostTier, options: ConnectorOptions, *, transport: Transport, name: str
    ) -> None:
        rows = LentRows(tier)
        agent = options.agent
        self.agent = Agent(
            tier.arena,
            rows,
            transport=transport,
            name=name + LENT,
            listen=_of_rank(options.lend, tier.layout),
            keys=options.keys(),
            options=replace(agent, lease_seconds=min(LEASE_SECONDS, agent.lease_seconds)),
        )
        self.agent.lend(rows)
        self.agent.start()
        log.info("kvstow: peers may ask for rows of %s at %s", name, self.agent.address)
        self._closing = Event()
        self._entries: list[EtcdLease] = []
        self._threads = [
            Thread(target=self._enter, args=(source,), name="kvstow-enter", daemon=True)
            for source in options.peers
            if source.startswith("etcd://")
        ]
        for thread in self._threads:
            thread.start()

    def _enter(self, source: str) -> None:
        """Enter the agent's address, as soon as etcd can be reached."""
        pause = FIRST_PAUSE
        while not self._closing.is_set():
            try:
                self._entries.append(EtcdLease(source, self.agent.name, self.agent.address))
                return
            except TransferError as error:
                log.warning("not entered: %s", error)
                self._closing.wait(pause)
                pause = min(2 * pause, LONGEST_PAUSE)

    def close(self) -> None:
        """End all leases; before the tier is closed."""
        self._closing.set()
        for thread in self._threads:
            thread.join()
        for entry in self._entries:
            entry.close()
        self.agent.close()


def _of_rank(listen: str, layout: Layout) -> str:
    """The address of a rank: ports count up from the first rank's."""
    head, _, port = listen.rpartition(":")
    if not port.isdecimal() or port == "0":
        return listen
    return f"{head}:{int(port) + layout.pp[0] * layout.tp[1] + layout.tp[0]}"


# ── asking ────────────────────────────────────────────────────────────────────────────


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


class PeerAsker:
    """Asks other engines for prefixes, in the name of a rank's agent.

    Peers are met in the background, on nobody's time. One that does not answer within the budget
    is left alone for a while. `wake` is called when there is an answer, in the agent's thread.
    """

    def __init__(self, agent: Agent, options: ConnectorOptions, wake: Callable[[], None]) -> None:
        self._agent = agent
        self._sources = options.peers
        self._seconds = options.peers_seconds
        keys = options.keys()
        self._key = keys.public if keys else ""
        self._wake = wake
        self._known: dict[str, LendingPeer] = {}
        self._answers: deque[PeersAnswer] = deque()
        self._lock = Lock()
        self._looked_at = float("-inf")
        self._closing = Event()
        self._thread = Thread(target=self._work, name="kvstow-peers", daemon=True)
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
                found.update(found_agents(source))
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

    def _well(self) -> list[LendingPeer]:
        """Peers of other engines that answer, each with all ranks of its engine."""
        engines: dict[str, list[LendingPeer]] = {}
        for peer in self._known.values():
            if peer.is_well:
                engines.setdefault(peer.instance, []).append(peer)
        engines.pop(instance_of(self._agent.name), None)
        whole = [each for each in engines.values() if len(each) == _num_ranks(each)]
        random.shuffle(whole)
        chosen: list[LendingPeer] = []
        for each in whole:
            if not chosen or len(chosen) + len(each) <= MOST_ASKED:
                chosen += each
        return chosen

    # ── questions ─────────────────────────────────────────────────────────────────

    def ask(self, order: AskPeers) -> None:
        """Ask peers; what they say comes in `answers`, within the budget."""
        peers = self._well()
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

    @property
    def has_answers(self) -> bool:
        return bool(self._answers)

    def answers(self) -> list[PeersAnswer]:
        """Questions that are over since the last time."""
        return [self._answers.popleft() for _ in range(len(self._answers))]

    def failed(self, tickets: Iterable[Ticket]) -> None:
        """A pull with these tickets has failed: their peers are left alone for a while."""
        for ticket in tickets:
            if ticket.address in self._known:
                self._known[ticket.address].rest()

    def close(self) -> None:
        """Meet nobody any more; before the agent is closed."""
        self._closing.set()
        self._thread.join()


def _num_ranks(peers: Sequence[LendingPeer]) -> int:
    layout = peers[0].outgoing.layout
    return layout.tp[1] * layout.pp[1] if layout is not None else 0
