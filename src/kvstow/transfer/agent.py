"""The agent, one per process and arena: offers blocks, pulls blocks, keeps leases alive.

with Agent(arena, pool, transport=NixlTransport(), identity=identity) as agent:
    ticket = agent.offer(ledger, request)                       on the producer
    stats = agent.pull(ticket, into=ledger.blocks(mine)).wait()  on the consumer
"""

import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import ExitStack
from random import Random, SystemRandom
from typing import Self

from kvstow.blocks.ledger import Ledger
from kvstow.errors import SpecError, TransferError
from kvstow.memory import cuda
from kvstow.memory.arena import Arena
from kvstow.observe import Telemetry
from kvstow.plan.identity import Identity
from kvstow.route.blocks import Blocks, Tokens
from kvstow.transfer.channel.curve import Keys
from kvstow.transfer.channel.framing import Channel, Session
from kvstow.transfer.channel.messages import MAX_NAME, AnyMessage, End
from kvstow.transfer.channel.sockets import SocketChannel
from kvstow.transfer.channel.status import status_document
from kvstow.transfer.digests import warm_up
from kvstow.transfer.loop import Loop, Routine, Task
from kvstow.transfer.options import DEFAULTS, DigestPolicy, Options, Way, check_words
from kvstow.transfer.peers.endpoint import Endpoint
from kvstow.transfer.peers.outgoing import Outgoing, Peers
from kvstow.transfer.prefixes import (
    BlockSource,
    PrefixAnswers,
    ask_peer,
    not_answered,
    prefix_question,
)
from kvstow.transfer.pull import Order, written_rows
from kvstow.transfer.pulls import Pulls, Transfer
from kvstow.transfer.quarantine import Quarantine
from kvstow.transfer.server import Server
from kvstow.transfer.tickets.lease import EndReason
from kvstow.transfer.tickets.offers import Offers
from kvstow.transfer.tickets.owner import Owner, OwnerQueue
from kvstow.transfer.tickets.ticket import (
    Ticket,
    check_blocks,
    check_request,
    check_states,
)
from kvstow.transfer.transport.base import Transport
from kvstow.transfer.transport.mapped import NodeMemory

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
        node: NodeMemory | None = None,
    ) -> None:
        _check_made_of(owner, options)
        self.name = _checked_name(name) or f"agent-{secrets.token_hex(4)}"
        self.options = options
        self.telemetry = telemetry or Telemetry()
        self.endpoint = Endpoint(
            self.name,
            arena,
            owner,
            transport=transport,
            identity=identity,
            options=options,
            telemetry=self.telemetry,
            clock=clock,
            random=random or SystemRandom(),
            node=node,
        )
        self.channel = channel or SocketChannel(listen, keys, self.endpoint.drop)
        self.loop = Loop(
            self.name,
            self.channel,
            clock,
            hear=self._hear,
            progress=self._progress,
            on_error=self._failed,
            on_broken=self._let_go,
        )
        self.endpoint.wake = self.loop.wake
        self.peers = Peers(self.endpoint, self.loop)
        self.quarantine = Quarantine(
            self.endpoint,
            self.loop,
            is_moving=lambda: bool(self.endpoint.moving or self.server.servings),
            before_close=self._give_up,
        )
        self.server = Server(
            self.endpoint, self.loop, self.quarantine, lambda: status_document(self)
        )
        self._owner = OwnerQueue(owner, lambda error: self._failed("a deferred call"))
        public = keys.public if keys else ""
        self.offers = Offers(self.endpoint, self.loop, self.server, self._owner, public)
        self.prefixes = PrefixAnswers(self.endpoint, self.loop, self.offers, self._owner)
        self.server.on_question = self.prefixes.hear
        self._settles_itself = False
        self.pulls = Pulls(self.endpoint, self.loop, self.peers, self.quarantine, self._owner)
        self.loop.start("peers", self.peers.upkeep())
        self.loop.start("quarantine", self.quarantine.upkeep())
        self.loop.start("server", self.server.upkeep())

    @property
    def ticket_key(self) -> bytes:
        """Who writes tickets in this agent's name signs them with this: `Ticket.signed`."""
        return self.endpoint.ticket_key

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
        identity: Identity | None = None,
        on_end: Callable[[EndReason], None] | None = None,
    ) -> Ticket:
        """Let consumers pull a request's blocks; the request itself may end meanwhile.

        The ledger must be on the pool that the agent was given: ids of another one are other rows.
        """
        if ledger.pool is not self.endpoint.owner:
            raise TransferError(
                f"agent {self.name!r}: the ledger is on another pool than the agent\n\n"
                "hint: Agent(arena, ledger.pool, ...)",
                kind="refused",
            )
        held, blocks = ledger.num_tokens(request), ledger.blocks(request)
        tokens = held if num_tokens is None else num_tokens
        if tokens > held:
            raise TransferError(
                f"agent {self.name!r}: request {request} holds {held} tokens, {tokens} cannot be "
                "offered",
                kind="refused",
            )
        if tokens < held:  # what is partial has what the next token sees, not what this one sees
            check_states(self.endpoint.layout, blocks, tokens, held)
            blocks = {g: listed.whole for g, listed in blocks.items()}
        return self.offer_blocks(
            blocks,
            tokens,
            readers=readers,
            lease_seconds=lease_seconds,
            identity=identity,
            on_end=on_end,
        )

    def offer_blocks(
        self,
        blocks: Mapping[int, Blocks],
        num_tokens: int,
        *,
        readers: int | None = 1,
        lease_seconds: float | None = None,
        identity: Identity | None = None,
        on_end: Callable[[EndReason], None] | None = None,
    ) -> Ticket:
        """Let `readers` consumers pull these blocks, each once, while the lease runs.

        None stands for all ranks of one consumer, whose number its first rank tells.
        `identity` is the request's, where adapter or salt are its own.
        Their bytes must be there: on a device, whatever fills them has ended. The blocks are kept
        from being reused until the lease ends; then `on_end` is called with the reason, in the
        thread of the blocks' owner.
        """
        self.settle()
        return self.offers.offer(
            blocks,
            num_tokens,
            readers=readers,
            lease_seconds=lease_seconds,
            identity=identity,
            on_end=on_end,
        )

    def adopt(
        self,
        ticket: Ticket,
        *,
        readers: int | None = 1,
        on_end: Callable[[EndReason], None] | None = None,
    ) -> None:
        """Honour a ticket that somebody else has written in this agent's name.

        Its blocks must have the generations that it states: see `Owner`. Adopting a ticket again
        while it is kept changes nothing.
        """
        self.settle()
        self.offers.adopt(ticket, readers=readers, on_end=on_end)

    def withdraw(self, ticket: Ticket) -> None:
        """Take a ticket back: its readers fail, its blocks are given back."""
        self.loop.submit(lambda: self.server.leases.end(ticket.lease, "withdrawn"))

    # ── prefixes ──────────────────────────────────────────────────────────────────

    def lend(self, source: BlockSource) -> None:
        """Let peers ask for blocks that a source holds, by their keys.

        Blocks are shared and released in the agent's own thread from now on, at once: for an
        owner that any thread may call.
        """
        self.prefixes.source = source
        self._settles_itself = True

    def ask(
        self,
        address: str,
        keys: Sequence[bytes],
        *,
        step: int,
        key: str = "",
        seconds: float | None = None,
    ) -> Ticket | None:
        """A ticket for the longest prefix of a prompt that the agent at an address holds.

        `keys` are the prompt's, one after every `step` tokens. None for a miss. TransferError
        if the agent refuses or does not answer in time.
        """
        patience = seconds or self.options.contact_seconds
        answer = self.begin_ask(address, keys, step=step, key=key, seconds=patience)
        late = time.monotonic() + patience + 1
        while not answer.done():  # whoever we ask may be asking us
            self.settle()
            wait((answer,), ANSWER_SECONDS)
            if time.monotonic() > late:  # this agent was not started: nothing watches its deadlines
                raise not_answered(self.peers.at(address, key), patience)
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
        question = prefix_question(self.endpoint, keys, step)
        patience = seconds or self.options.contact_seconds
        task = Task[Ticket | None](f"ask {address}")
        return self.loop.future(
            task,
            ask_peer(self.endpoint, peer, question, task),
            seconds=patience,
            late=lambda: not_answered(peer, patience),
        )

    # ── pulling ───────────────────────────────────────────────────────────────────

    def connect(self, address: str, *, key: str = "", seconds: float | None = None) -> Outgoing:
        """Meet the agent at an address; TransferError if it refuses or does not answer."""
        peer = self.peers.at(address, key)
        patience = seconds or 2 * self.options.contact_seconds

        def late() -> TransferError:
            return TransferError(f"peer at {address} did not answer", kind="timeout", peer=address)

        task = Task[None](f"connect {address}")
        met = self.loop.future(task, peer.met(), seconds=patience, late=late)
        try:
            met.result(patience + 1)
        except TimeoutError:  # this agent was not started: nothing watches its deadlines
            raise late() from None
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
        identity: Identity | bytes | None = None,
        on_quiet: Callable[[], None] = lambda: None,
    ) -> Transfer:
        """Bring tokens `[start_token, num_tokens)` of a request into these rows.

        `tickets` are one per source rank; together they must hold all that this rank
        holds. The rows must be held by the caller, and no other pull may write to them. `deadline`
        is in seconds from now. `identity` is the request's, or its digest: the agent's own
        `for_request`, where adapter or salt are its own. When nothing writes to the rows any more,
        `on_quiet` is called in the agent's thread.
        """
        self.settle()
        listed = (tickets,) if isinstance(tickets, Ticket) else tuple(tickets)
        seconds = self.options.transfer_seconds if deadline is None else deadline
        if not seconds > 0:
            raise TransferError(f"deadline is {seconds} s, not above 0", kind="refused")
        check_words(direction, digest)
        check_blocks(self.endpoint.layout, into, whose=self.name)
        request = self.endpoint.identity if identity is None else identity
        digest_of = request.digest if isinstance(request, Identity) else request
        tokens = check_request(
            self.endpoint.layout, listed, into, start_token, num_tokens, digest_of
        )
        self.loop.check_open()
        written = written_rows(self.endpoint.layout, into, Tokens(start_token, tokens))
        self._owner.quarantine(written)
        try:
            order = Order(
                into=dict(into),
                written=written,
                generations=self.endpoint.generations(written),
                start_token=start_token,
                num_tokens=tokens,
                direction=direction or self.options.direction,
                digest=digest or self.options.digest,
            )
            transfer = Transfer(order, self.loop, self._owner, on_quiet)
            self.loop.submit(
                lambda: self.pulls.begin(transfer, listed, seconds),
                lambda error: self.pulls.refuse(transfer, error),
            )
        except BaseException:
            self._owner.unquarantine(written)
            raise
        return transfer

    def maps(self, ticket: Ticket) -> bool:
        """Whether what a ticket names is memory of ours by now, so that to pull it is to copy it
        here; from any thread."""
        peer = self.peers.at(ticket.address, ticket.key)
        if self.options.direction is not None or peer.state != "ready" or peer.card is None:
            return False
        return peer.mapped is not None and peer.card.start == ticket.start

    def keep(self, ticket: Ticket) -> None:
        """Keep a ticket's lease alive until it is pulled or dropped."""
        peer = self.peers.at(ticket.address, ticket.key)
        renewals = peer.keep(ticket.lease, ticket.lease_seconds)
        self.loop.submit(lambda: self.loop.start("keep", renewals))

    def drop(self, ticket: Ticket) -> None:
        """Tell the producer that nobody here will pull this ticket: where it was for one reader,
        its lease ends."""
        peer = self.peers.at(ticket.address, ticket.key)

        def dropped() -> Routine[None]:
            peer.kept.discard(ticket.lease)
            yield from peer.met()
            peer.send(End(0, ticket.lease, "aborted"))

        self.loop.submit(lambda: self.loop.start("drop", dropped()))

    # ── the blocks' owner ─────────────────────────────────────────────────────────

    def settle(self) -> None:
        """Give back blocks of leases and transfers that have ended; in the owner's thread.

        `offer`, `adopt` and `pull` do this first. Call it now and then where nothing else is
        called, so that blocks come free.
        """
        self._owner.settle()

    # ── the loop ──────────────────────────────────────────────────────────────────

    def _hear(self, line: Session, message: AnyMessage) -> None:
        if line.is_incoming:
            self.server.hear(line, message)
        else:
            self.peers.hear(line, message)

    def _progress(self) -> None:
        self.endpoint.transport.progress()
        if self._settles_itself:
            self.settle()

    def _failed(self, what: str) -> None:
        """A message, a command or a deferred call has raised, which is logged."""
        self.endpoint.count(self.endpoint.metrics.errors, what)

    def _give_up(self, error: TransferError) -> None:
        """End all that moves, and have every peer meet us again."""
        self.server.forget_all()
        for peer in self.peers.every():
            peer.lose(error)

    # ── its life ──────────────────────────────────────────────────────────────────

    def start(self) -> None:
        """Start the agent's thread, and compile what digests and short copies run on a device.

        Both have ended with what they do to the device when this returns: an engine that
        captures CUDA graphs next must be alone with it.
        """
        begun = threading.Event()

        def begin() -> None:
            try:
                self.endpoint.use_device()
            finally:
                begun.set()

        self.loop.run(begin)
        if self.endpoint.kind == "VRAM":
            arena, submit = self.endpoint.arena, self.endpoint.worker.submit
            submit(warm_up, arena).result()
            submit(cuda.compile_copies, arena.bytes, arena.layout).result()
            begun.wait()

    def close(self) -> None:
        """Stop, end all leases and transfers, let go of engine and sockets."""
        try:
            if self.loop.stop() and not self.loop.is_closed:  # it is where its thread has broken
                try:
                    self._end_all()
                finally:
                    self._let_go()
        finally:
            self.settle()

    def _end_all(self) -> None:
        """End what moves, and give producers some time to say that they write no more."""
        self.endpoint.alive.numbers[0] = 0  # before blocks are given back
        closed = TransferError(f"agent {self.name!r} was closed", kind="aborted")
        self.loop.step()
        self.pulls.interrupt_all(closed)
        self._give_up(closed)
        self.server.leases.close()
        for _ in range(CLOSING_TURNS):
            self.loop.step()
            if not self.pulls.unquiet:
                break
            time.sleep(1e-3)

    def _let_go(self) -> None:
        """End all leases and routines, and close engine and sockets: every step, whatever another
        one raises. Rows are quiet only if the engine was closed."""
        self.endpoint.alive.numbers[0] = 0
        with ExitStack() as steps:  # the last one first
            steps.callback(self.channel.close)
            steps.callback(self._close_engine)
            steps.callback(self.loop.close)
            steps.callback(self.server.leases.close)

    def _close_engine(self) -> None:
        self.endpoint.close()
        self.pulls.mark_quiet()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _check_made_of(owner: Owner, options: Options) -> None:
    """SpecError for what people take for a pool or for options."""
    if isinstance(owner, Ledger):
        raise SpecError("an agent needs a pool, not a ledger\n\nhint: ledger.pool")
    if not isinstance(options, Options):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise SpecError(
            f"options are {type(options).__name__}\n\n"
            "hint: from kvstow.transfer.options import Options; Options(lease_seconds=60)"
        )


def _checked_name(name: str) -> str:
    """The name, if peers can be told it: SpecError for one that no message holds."""
    try:
        name.encode()
    except (AttributeError, UnicodeEncodeError) as error:
        raise SpecError(f"agent name {name!r:.80} is not Unicode text: {error}") from None
    if len(name) > MAX_NAME:
        raise SpecError(f"agent name {name[:40]!r}… has {len(name)} characters, not {MAX_NAME}")
    return name
