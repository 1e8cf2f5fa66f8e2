"""The agent: one per process and arena. It offers blocks, pulls blocks, and keeps its word.

with Agent(arena, pool, transport=NixlTransport(), identity=identity) as agent:
    ticket = agent.offer(ledger, request)                       on the producer
    stats = agent.pull(ticket, into=ledger.blocks(mine)).wait()  on the consumer
"""

import logging
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from functools import partial
from random import Random, SystemRandom
from typing import Self

from kvstow.blocks.ledger import Ledger
from kvstow.errors import BlockError, KvstowError, TransferError
from kvstow.memory.arena import Arena
from kvstow.observe import Telemetry
from kvstow.plan.identity import Identity
from kvstow.route.blocks import Blocks
from kvstow.route.ways import Way
from kvstow.transfer.channel.base import Channel, Line
from kvstow.transfer.channel.curve import Keys
from kvstow.transfer.channel.framing import DropReason
from kvstow.transfer.channel.messages import AnyMessage, AskPrefix, End, TellPrefix
from kvstow.transfer.channel.sockets import SocketChannel
from kvstow.transfer.channel.status import status_document
from kvstow.transfer.digests import warm_up
from kvstow.transfer.generations import Owner
from kvstow.transfer.lease import EndReason, Lease
from kvstow.transfer.loop import Loop, Story
from kvstow.transfer.options import DEFAULTS, DigestPolicy, Options
from kvstow.transfer.peers.endpoint import Endpoint, check_blocks
from kvstow.transfer.peers.incoming import Incoming
from kvstow.transfer.peers.outgoing import Outgoing, Peers
from kvstow.transfer.prefixes import (
    BlockSource,
    PrefixAnswers,
    PrefixQuestion,
    RegisteredBlocks,
    asked,
)
from kvstow.transfer.pull import Order, Transfer
from kvstow.transfer.pulls import Pulls
from kvstow.transfer.quarantine import Quarantine
from kvstow.transfer.serve import Server
from kvstow.transfer.ticket import Ticket
from kvstow.transfer.transport.base import Transport
from kvstow.transfer.transport.parallel import parallel

log = logging.getLogger(__name__)

CLOSING_TURNS = 200
"""So many milliseconds a closing agent waits for producers to say that they write no more."""


ANSWER_SECONDS = 0.005
"""How often a thread that waits for a peer's answer gives answers itself."""


class Agent:
    """Moves rows between this arena and those of other agents.

    `owner` hands out the arena's block ids: a `Pool`, or `Generations` where an engine does
    it. It is only ever touched in its own thread, the one that calls `offer`, `pull` and
    `settle`. `identity` says which computation makes the bytes, unless the arena's layout does.
    `listen` is a ZeroMQ address; anything but loopback needs `keys`. Entering the agent starts
    its thread; without one, `loop.step` does everything, in the caller's.
    """

    def __init__(
        self,
        arena: Arena,
        owner: Owner,
        *,
        transport: Transport,
        identity: Identity | None = None,
        name: str = "",
        listen: str = "tcp://127.0.0.1:*",
        keys: Keys | None = None,
        options: Options = DEFAULTS,
        telemetry: Telemetry | None = None,
        channel: Channel | None = None,
        clock: Callable[[], float] = time.monotonic,
        random: Random | None = None,
    ) -> None:
        self.name = name or f"agent-{secrets.token_hex(4)}"
        self.options = options
        self.telemetry = telemetry or Telemetry()
        self.endpoint = Endpoint(
            self.name,
            arena,
            owner,
            transport=parallel(transport, options.engines),
            identity=identity,
            options=options,
            telemetry=self.telemetry,
            clock=clock,
            random=random or SystemRandom(),
        )
        self.channel = channel or SocketChannel(listen, keys, self._dropped)
        self.loop = Loop(self.name, self.channel, clock, hear=self._hear, progress=self._progress)
        self.endpoint.wake = self.loop.wake
        self.peers = Peers(self.endpoint, self.channel, self.loop)
        self.quarantine = Quarantine(
            self.endpoint, self.loop, is_moving=self._is_moving, before_close=self._give_up
        )
        self.server = Server(
            self.endpoint, self.channel, self.loop, self.quarantine, lambda: status_document(self)
        )
        self._registered = RegisteredBlocks(self.endpoint)
        self.prefixes = PrefixAnswers(self.endpoint, self._registered)
        self._settles_itself = False
        self._key = keys.public if keys else ""
        self._owed: deque[Callable[[], None]] = deque()
        self.pulls = Pulls(
            self.endpoint, self.loop, self.peers, self.quarantine, owe=self._owed.append
        )
        self._owners_thread = threading.get_ident()
        self.loop.start("quarantine", self.quarantine.upkeep())
        self.loop.start("server", self.server.upkeep())

    @property
    def address(self) -> str:
        """Where other agents find this one."""
        return self.channel.address

    # ── offering ──────────────────────────────────────────────────────────────────

    def offer(
        self,
        ledger: Ledger,
        request: int,
        *,
        num_tokens: int | None = None,
        readers: int | None = 1,
        lease_seconds: float | None = None,
        on_end: Callable[[EndReason], None] | None = None,
    ) -> Ticket:
        """Let consumers pull a request's blocks; the request itself may end meanwhile."""
        held, blocks = ledger.num_tokens(request), ledger.blocks(request)
        tokens = held if num_tokens is None else num_tokens
        if tokens < held:  # what is partial has what the next token sees, not what this one sees
            blocks = {g: listed.whole for g, listed in blocks.items()}
        return self.offer_blocks(
            blocks,
            tokens,
            readers=readers,
            lease_seconds=lease_seconds,
            on_end=on_end,
        )

    def offer_blocks(
        self,
        blocks: Mapping[int, Blocks],
        num_tokens: int,
        *,
        readers: int | None = 1,
        lease_seconds: float | None = None,
        on_end: Callable[[EndReason], None] | None = None,
    ) -> Ticket:
        """Let `readers` consumers pull these blocks, each once, while the lease runs.

        None stands for all ranks of one consumer, whose number its first rank tells.
        Their bytes must be there: on a device, whatever fills them has ended. The blocks are kept
        from being reused until the lease ends; then `on_end` is called with the reason, in the
        thread of the blocks' owner.
        """
        self.settle()
        return self._offered(blocks, num_tokens, readers, lease_seconds, on_end)

    def _offered(
        self,
        blocks: Mapping[int, Blocks],
        num_tokens: int,
        readers: int | None,
        lease_seconds: float | None,
        on_end: Callable[[EndReason], None] | None,
    ) -> Ticket:
        endpoint = self.endpoint
        check_blocks(endpoint.layout, blocks, whose=self.name)
        self._share(blocks)  # from here on their generations stay
        ticket = Ticket(
            agent=self.name,
            start=endpoint.start,
            address=self.address,
            key=self._key,
            lease=endpoint.random.getrandbits(63),
            lease_seconds=lease_seconds or self.options.lease_seconds,
            fingerprint=endpoint.fingerprint,
            num_tokens=num_tokens,
            blocks=dict(blocks),
            generations=endpoint.generations(blocks),
            identity=endpoint.identity.digest,
        )
        self._grant(ticket, readers, on_end)
        return ticket

    def adopt(
        self,
        ticket: Ticket,
        *,
        readers: int | None = 1,
        on_end: Callable[[EndReason], None] | None = None,
    ) -> None:
        """Keep what a ticket promises that somebody else has written in this agent's name.

        Its blocks must have the generations that it states: see `Owner`.
        """
        self.settle()
        endpoint = self.endpoint
        mine = (self.name, endpoint.start, endpoint.fingerprint)
        if (ticket.agent, ticket.start, ticket.fingerprint) != mine:
            raise TransferError(
                f"ticket is of agent {ticket.agent!r}, start {ticket.start!r}, layout "
                f"{ticket.fingerprint[:16]}, not of {mine[0]!r}, {mine[1]!r}, {mine[2][:16]}",
                kind="ticket",
            )
        check_blocks(endpoint.layout, ticket.blocks, whose=self.name)
        self._share(ticket.blocks)
        self._grant(ticket, readers, on_end)

    def _grant(
        self, ticket: Ticket, readers: int | None, on_end: Callable[[EndReason], None] | None
    ) -> None:
        """Let the lease of a ticket run whose blocks are shared already."""

        def ended(reason: EndReason) -> None:
            self.server.lease_ended(ticket, reason)
            self._owed.append(lambda: self._release(ticket.blocks))
            if on_end is not None:
                self._owed.append(partial(self._tell_end, on_end, reason))

        lease = Lease(
            id=ticket.lease,
            digest=ticket.digest,
            seconds=ticket.lease_seconds,
            readers=readers,
            deadline=self.endpoint.clock() + ticket.lease_seconds,
            on_end=ended,
        )
        self._submit(ticket.blocks, lambda: self.server.grant(lease, ticket))

    def _tell_end(self, on_end: Callable[[EndReason], None], reason: EndReason) -> None:
        """Call back; what goes wrong there ends no call of others."""
        try:
            on_end(reason)
        except Exception:
            log.exception("agent %s: on_end of a lease", self.name)

    def withdraw(self, ticket: Ticket) -> None:
        """Take a ticket back: its readers fail, its blocks are given back."""
        self.loop.submit(lambda: self.server.leases.end(ticket.lease, "withdrawn"))

    # ── prefixes ──────────────────────────────────────────────────────────────────

    def register(self, blocks: Mapping[int, Blocks], keys: Mapping[int, Sequence[bytes]]) -> None:
        """Let peers ask for these blocks by their keys, as long as the blocks stay as they are.

        `keys` are, by group, those of the listed blocks: `kvstow.block_keys` at their indices.
        Nothing is kept from being reused: whoever asks later gets a ticket or a miss.
        """
        check_blocks(self.endpoint.layout, blocks, whose=self.name)
        self._registered.register(blocks, keys)
        self.server.on_question = self._question

    def lend(self, source: BlockSource) -> None:
        """Let peers ask for whatever a source holds, instead of registered blocks.

        Blocks are shared and released in the agent's own thread from now on, at once: for an
        owner that any thread may call.
        """
        self.prefixes.source = source
        self._settles_itself = True
        self.server.on_question = self._question

    def _question(self, peer: Incoming, asked: AskPrefix) -> None:
        """Somebody asks; the owner's thread answers when it next settles."""
        if self.prefixes.has_room():
            self._owed.append(partial(self._answer, peer, asked))
        else:
            peer.send(TellPrefix(asked.question, b""))

    def _answer(self, peer: Incoming, asked: AskPrefix) -> None:
        ticket = self.prefixes.answer(asked, self._offered_prefix)
        told = TellPrefix(asked.question, ticket.to_bytes() if ticket else b"")
        with suppress(TransferError):  # closed meanwhile: the lease has ended with the agent
            self.loop.submit(lambda: peer.send(told))

    def _offered_prefix(
        self,
        blocks: Mapping[int, Blocks],
        num_tokens: int,
        on_end: Callable[[EndReason], None],
    ) -> Ticket:
        return self._offered(blocks, num_tokens, None, None, on_end)

    def ask(
        self,
        address: str,
        keys: Sequence[bytes],
        *,
        step: int,
        key: str = "",
        seconds: float | None = None,
    ) -> Ticket | None:
        """A ticket for the longest beginning of a prompt that the agent at an address holds.

        `keys` are the prompt's, one after every `step` tokens. None for a miss. TransferError
        if the agent refuses or does not answer in time; one of an older version does not.
        """
        answer = self.begin_ask(address, keys, step=step, key=key, seconds=seconds)
        while not answer.done():  # whoever we ask may be asking us
            self.settle()
            wait((answer,), ANSWER_SECONDS)
        return answer.result()

    def begin_ask(
        self,
        address: str,
        keys: Sequence[bytes],
        *,
        step: int,
        key: str = "",
        seconds: float | None = None,
    ) -> "Future[Ticket | None]":
        """As `ask`, from any thread and without waiting: what `ask` returns or raises, later."""
        peer = self.peers.at(address, key)
        question = PrefixQuestion.of(self.endpoint, keys, step)
        limit = seconds or self.options.contact_seconds
        answer: Future[Ticket | None] = Future()

        def begin() -> None:
            task = self.loop.start(f"ask {address}", asked(peer, question))
            task.deadline = self.endpoint.clock() + limit
            task.late = lambda: TransferError(
                f"agent at {address} did not answer within {limit} s\n\n"
                "hint: its owner settles too seldom, or it is of a version that knows no prefixes",
                kind="timeout",
                peer=address,
            )
            task.on_end = lambda: (
                answer.set_exception(task.error) if task.error else answer.set_result(task.result)
            )
            question.wake = task.wake

        self.loop.submit(begin)
        return answer

    # ── pulling ───────────────────────────────────────────────────────────────────

    def connect(self, address: str, *, key: str = "", seconds: float | None = None) -> Outgoing:
        """Meet the agent at an address; TransferError if it refuses or does not answer."""
        peer = self.peers.at(address, key)
        met: Future[None] = Future()

        def begin() -> None:
            task = self.loop.start(f"connect {address}", peer.met())
            task.on_end = lambda: (
                met.set_exception(task.error) if task.error else met.set_result(None)
            )

        self.loop.submit(begin)
        try:
            met.result(seconds or 2 * self.options.contact_seconds)
        except TimeoutError:
            raise TransferError(
                f"peer at {address} did not answer", kind="timeout", peer=address
            ) from None
        return peer

    def pull(
        self,
        tickets: Ticket | Sequence[Ticket],
        *,
        into: Mapping[int, Blocks],
        start_token: int = 0,
        num_tokens: int | None = None,
        deadline: float | None = None,
        direction: Way | None = None,
        digest: DigestPolicy | None = None,
        on_quiet: Callable[[], None] = lambda: None,
    ) -> Transfer:
        """Bring tokens `[start_token, num_tokens)` of a request into these rows.

        `tickets` are one per source rank; together they must hold all that this rank
        holds. The rows must be held by the caller. `deadline` is in seconds from now. When
        nothing writes to the rows any more, `on_quiet` is called in the agent's thread.
        """
        self.settle()
        listed = (tickets,) if isinstance(tickets, Ticket) else tuple(tickets)
        tokens = _checked_tokens(listed, start_token, num_tokens)
        seconds = self.options.transfer_seconds if deadline is None else deadline
        if not seconds > 0:
            raise TransferError(f"deadline is {seconds} s, not above 0", kind="refused")
        check_blocks(self.endpoint.layout, into, whose=self.name)
        self._share(into)
        order = Order(
            into=dict(into),
            generations=self.endpoint.generations(into),
            start_token=start_token,
            num_tokens=tokens,
            direction=direction or self.options.direction,
            digest=digest or self.options.digest,
        )
        now = self.endpoint.clock()
        transfer = Transfer(order, now, self._settle_if_ours, self.pulls.abort, on_quiet)
        self._submit(into, lambda: self.pulls.begin(transfer, listed, now + seconds))
        for g, blocks in into.items():
            self.endpoint.owner.distrust(g, blocks.ids)
        return transfer

    def keep(self, ticket: Ticket) -> None:
        """Keep a ticket's lease alive until it is pulled or dropped."""

        def start() -> None:
            peer = self.peers.at(ticket.address, ticket.key)
            self.loop.start("keep", peer.keep(ticket.lease, ticket.lease_seconds))

        self.loop.submit(start)

    def drop(self, ticket: Ticket) -> None:
        """Tell the producer that nobody here will pull this ticket: it ends the lease."""

        def dropped() -> Story[None]:
            peer = self.peers.at(ticket.address, ticket.key)
            peer.kept.discard(ticket.lease)
            yield from peer.met()
            peer.send(End(0, ticket.lease, "aborted"))

        def start() -> None:
            self.loop.start("drop", dropped())

        self.loop.submit(start)

    # ── the blocks' owner ─────────────────────────────────────────────────────────

    def settle(self) -> None:
        """Give back blocks of leases and transfers that have ended; in the owner's thread.

        `offer`, `adopt` and `pull` do this first. Call it now and then where nothing else is
        called, so that blocks come free.
        """
        while self._owed:
            owed = self._owed.popleft()
            try:
                owed()
            except BlockError:  # not the owner's thread: it stays owed
                self._owed.appendleft(owed)
                raise
        self._owners_thread = threading.get_ident()

    def _settle_if_ours(self) -> None:
        if threading.get_ident() == self._owners_thread:
            self.settle()

    def _share(self, blocks: Mapping[int, Blocks]) -> None:
        """All blocks, or none and the owner's error."""
        shared: list[int] = []
        try:
            for g, listed in blocks.items():
                self.endpoint.owner.share(g, listed.ids)
                shared.append(g)
        except KvstowError:
            self._release({g: blocks[g] for g in shared})
            raise

    def _submit(self, blocks: Mapping[int, Blocks], command: Callable[[], None]) -> None:
        """Have something done with blocks that are shared already, or give them back."""
        try:
            self.loop.submit(command)
        except TransferError:
            self._release(blocks)
            raise

    def _release(self, blocks: Mapping[int, Blocks]) -> None:
        for g, listed in blocks.items():
            self.endpoint.owner.release(g, listed.ids)

    # ── the loop ──────────────────────────────────────────────────────────────────

    def _hear(self, line: Line, message: AnyMessage) -> None:
        if line.is_incoming:
            self.server.hear(line, message)
        else:
            self.peers.hear(line, message)

    def _progress(self) -> None:
        self.endpoint.transport.progress()
        if self._settles_itself:
            self.settle()

    def _dropped(self, reason: DropReason, detail: str) -> None:
        self.endpoint.metrics.messages.labels(reason).inc()
        self.endpoint.note("message-dropped", {"reason": reason, "detail": detail})

    def _is_moving(self) -> bool:
        return bool(self.endpoint.moving or self.server.servings)

    def _give_up(self, error: TransferError) -> None:
        """End all that moves, and have every peer meet us again."""
        self.server.forget_all()
        for peer in self.peers.all.values():
            peer.lose(error)

    # ── its life ──────────────────────────────────────────────────────────────────

    def start(self) -> None:
        """Start the agent's thread, and compile what digests need on a device.

        Both have ended with what they do to the device when this returns: an engine that
        captures CUDA graphs next must be alone with it.
        """
        begun = threading.Event()

        def begin() -> None:
            self.endpoint.use_device()
            begun.set()

        self.loop.run(begin)
        if self.endpoint.kind == "VRAM":
            self.endpoint.worker.submit(warm_up, self.endpoint.arena).result()
            begun.wait()

    def close(self) -> None:
        """Stop, end all leases and transfers, let go of engine and sockets."""
        if self.loop.stop():
            closed = TransferError(f"agent {self.name!r} was closed", kind="aborted")
            self.loop.step()
            self.pulls.interrupt_all(closed)
            self._give_up(closed)
            self.server.leases.close()
            for _ in range(CLOSING_TURNS):
                self.loop.step()
                if self.pulls.are_quiet:
                    break
                time.sleep(1e-3)
            self.loop.close()
            self.endpoint.close()
            self.pulls.rest()
            self.channel.close()
        self.settle()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _checked_tokens(tickets: Sequence[Ticket], start_token: int, num_tokens: int | None) -> int:
    """How many tokens a pull wants; TransferError where the tickets do not have them."""
    lengths = {ticket.num_tokens for ticket in tickets}
    if len(lengths) != 1:
        raise TransferError(
            f"tickets of {sorted(lengths)} tokens are not of one request", kind="ticket"
        )
    offered = lengths.pop()
    wanted = offered if num_tokens is None else num_tokens
    if wanted > offered:
        raise TransferError(
            f"{wanted} tokens are wanted, the ticket is for {offered}", kind="ticket"
        )
    if not 0 <= start_token < wanted:
        raise TransferError(
            f"tokens [{start_token}, {wanted}) are none\n\nhint: start_token is at least 0 and "
            f"below num_tokens",
            kind="refused",
        )
    return wanted
