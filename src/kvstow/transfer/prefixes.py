"""Prefixes without tickets: a peer asks for a prompt by its keys, and gets a ticket or a miss.

    consumer                                producer
    ask-prefix  identity, keys  ─────────▶  which blocks have these keys, and still their bytes?
                ◀─────────  tell-prefix     a ticket for the longest beginning; empty: a miss,
                            and before it `why`

A key names the computation and all tokens up to the end of its block, so nobody learns or gets
anything of a prompt whose keys it cannot compute. Blocks that may be asked for are not kept from
being reused; of registered ones their generations tell whether they were. A ticket keeps them, as
any ticket does.
"""

from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from itertools import compress
from math import lcm
from threading import Lock
from typing import Protocol

import numpy as np

from kvstow.errors import KvstowError, TransferError
from kvstow.plan.retention import Encoder, State, can_hit, seen_blocks
from kvstow.plan.view import Ints
from kvstow.route.blocks import Blocks
from kvstow.transfer.channel.messages import (
    MAX_ASKED_KEYS,
    AskPrefix,
    MissReason,
    TellPrefix,
    Why,
)
from kvstow.transfer.loop import IDLE, Loop, Mailbox, Story
from kvstow.transfer.peers.endpoint import Endpoint
from kvstow.transfer.peers.incoming import Incoming
from kvstow.transfer.peers.outgoing import Outgoing
from kvstow.transfer.tickets.generations import OwnerQueue
from kvstow.transfer.tickets.lease import EndReason
from kvstow.transfer.tickets.offers import Offers, OnEnd
from kvstow.transfer.tickets.ticket import Ticket
from kvstow.transfer.transport.base import lost

KEY_BYTES = 32
MOST_BLOCKS = 1 << 20
"""Blocks that are remembered; those registered longest ago are forgotten first."""

MOST_GONE = 1 << 16
"""Keys that are remembered after their blocks were reused, to say so."""

NONE, GONE = -1, -2
"""In place of a block: no block holds a key's bytes; one did, and was reused."""

MOST_LEASES = 256
"""Tickets that were given to askers and still run, and questions that wait: more are misses."""


# ── the producer ──────────────────────────────────────────────────────────────────────


class BlockSource(Protocol):
    """Says which blocks hold the bytes of which keys."""

    def __len__(self) -> int:
        """Blocks that may be asked for."""
        ...

    def ids(self, group: int, keys: Sequence[bytes]) -> Ints:
        """The block of each key; `NONE` where none holds it, `GONE` where one is known to have."""
        ...

    def still(self) -> AbstractContextManager[object]:
        """Until it is left, blocks stay what `ids` says."""
        ...


class RegisteredBlocks:
    """Blocks that their owner has registered. Used in the owner's thread."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._blocks: OrderedDict[tuple[int, bytes], tuple[int, int]] = OrderedDict()
        self._gone: OrderedDict[tuple[int, bytes], None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._blocks)

    def still(self) -> AbstractContextManager[object]:
        return nullcontext()

    def register(self, blocks: Mapping[int, Blocks], keys: Mapping[int, Sequence[bytes]]) -> None:
        """Remember blocks, and the generations under which they hold these keys' bytes."""
        for g, listed in blocks.items():
            named = keys.get(g, ())
            if len(named) != len(listed):
                raise TransferError(
                    f"group {g}: {len(named)} keys for {len(listed)} blocks", kind="refused"
                )
            whole = np.isin(listed.index, listed.whole.index).tolist()
            counters = self._endpoint.owner.generations[g].take(listed.ids)
            pairs = zip(listed.ids.tolist(), counters.tolist(), strict=True)
            for key, place in compress(zip(named, pairs, strict=True), whole):
                self._blocks[g, key] = place
                self._blocks.move_to_end((g, key))
                self._gone.pop((g, key), None)
        while len(self._blocks) > MOST_BLOCKS:
            self._blocks.popitem(last=False)

    def ids(self, group: int, keys: Sequence[bytes]) -> Ints:
        found: Ints = np.full(len(keys), NONE, np.int64)
        counters = self._endpoint.owner.generations[group]
        for i, key in enumerate(keys):
            place = self._blocks.get((group, key))
            if place is not None and counters[place[0]] == place[1]:
                found[i] = place[0]
            elif place is not None or (group, key) in self._gone:
                found[i] = GONE
                self._forget(group, key)
        return found

    def _forget(self, group: int, key: bytes) -> None:
        """The key's block has changed hands."""
        self._blocks.pop((group, key), None)
        self._gone[group, key] = None
        while len(self._gone) > MOST_GONE:
            self._gone.popitem(last=False)


class PrefixAnswers:
    """Answers questions from a source, in the thread of the blocks' owner, but for `has_room`."""

    def __init__(
        self,
        endpoint: Endpoint,
        loop: Loop,
        source: BlockSource,
        offers: Offers,
        owner: OwnerQueue,
    ) -> None:
        self.source = source
        self._endpoint = endpoint
        self._loop = loop
        self._offers = offers
        self._owner = owner
        self._open = 0
        self._lock = Lock()
        self.answers: Counter[str] = Counter()
        """Answers by kind: a ticket, a miss where nothing is held, or another reason."""

    def hear(self, peer: Incoming, asked: AskPrefix) -> None:
        """Somebody asks; the owner's thread answers when it next settles."""
        if self.has_room():
            self._owner.owe(partial(self._tell, peer, asked))
        else:
            peer.tell_miss(asked.question, "busy")

    def _tell(self, peer: Incoming, asked: AskPrefix) -> None:
        answer = self.answer(asked)

        def tell() -> None:
            if isinstance(answer, Ticket):
                peer.send(TellPrefix(asked.question, answer.to_bytes()))
            else:
                peer.tell_miss(asked.question, answer)

        with suppress(TransferError):  # closed meanwhile: the lease has ended with the agent
            self._loop.submit(tell)

    def has_room(self) -> bool:
        """Whether one more question may wait for its answer; it counts from now on."""
        with self._lock:
            if self._open >= MOST_LEASES:
                self.answers["busy"] += 1
                return False
            self._open += 1
            return True

    def answer(self, asked: AskPrefix) -> Ticket | MissReason:
        """A ticket for the longest beginning that is held, or why there is none."""

        def over(reason: EndReason | None = None) -> None:
            with self._lock:
                self._open -= 1

        found = self._refusal(asked) or self._offered(asked, over)
        if isinstance(found, Ticket):
            self.answers["ticket"] += 1
        else:
            self.answers["miss" if found == "absent" else found] += 1
            over()
        return found

    def _refusal(self, asked: AskPrefix) -> MissReason | None:
        """Why nothing is looked for: another computation asks, or there are recurrent states,
        which are overwritten in place while their blocks' generations stay."""
        if asked.identity != self._endpoint.identity.digest:
            return "identity"
        groups = self._endpoint.layout.groups
        return "states" if any(isinstance(g.group.retention, State) for g in groups) else None

    def _offered(self, asked: AskPrefix, on_end: OnEnd) -> Ticket | MissReason:
        try:
            with self.source.still():
                found = self.longest(_split(asked.keys), asked.step)
                if isinstance(found, str):
                    return found
                return self._offers.offer(*found, on_end=on_end)
        except KvstowError as error:
            self._endpoint.note("prefix-not-offered", {"why": str(error)})
            return "error"

    def longest(
        self, keys: Sequence[bytes], step: int
    ) -> tuple[dict[int, Blocks], int] | MissReason:
        """The blocks of the longest beginning that every group holds, and its tokens; or why there
        is none."""
        layout = self._endpoint.layout
        groups = {
            g: rows.group
            for g, rows in enumerate(layout.groups)
            if not isinstance(rows.group.retention, Encoder)
        }
        if any(group.block_tokens % step for group in groups.values()):
            return "step"
        unit = lcm(*(group.block_tokens for group in groups.values()))
        lengths: Ints = np.arange(0, len(keys) * step // unit * unit + 1, unit)
        found: dict[int, Ints] = {}
        for g, group in groups.items():
            every = group.block_tokens // step
            found[g] = self.source.ids(g, keys[every - 1 :: every])
            present = found[g] >= 0
            lengths = lengths[can_hit(group.retention, lengths, group.block_tokens, present)]
        num_tokens = int(lengths.max(initial=0))
        if not num_tokens:
            return "evicted" if any((ids == GONE).any() for ids in found.values()) else "absent"
        blocks: dict[int, Blocks] = {}
        for g, group in groups.items():
            sinks, rest = seen_blocks(group.retention, num_tokens, group.block_tokens)
            index = np.array([*sinks, *rest], np.int64)
            blocks[g] = Blocks(found[g][index], index)
        return blocks, num_tokens


def _split(keys: bytes) -> list[bytes]:
    if len(keys) % KEY_BYTES:
        raise TransferError(f"{len(keys)} bytes are not whole keys", kind="refused")
    return [keys[at : at + KEY_BYTES] for at in range(0, len(keys), KEY_BYTES)]


# ── the consumer ──────────────────────────────────────────────────────────────────────


def prefix_question(endpoint: Endpoint, keys: Sequence[bytes], step: int) -> AskPrefix:
    """A question for keys; TransferError for what cannot be asked."""
    if not 1 <= len(keys) <= MAX_ASKED_KEYS or {len(key) for key in keys} != {KEY_BYTES}:
        raise TransferError(
            f"{len(keys)} keys: one asks with 1 to {MAX_ASKED_KEYS} of {KEY_BYTES} bytes",
            kind="refused",
        )
    if not isinstance(step, int) or step < 1 or not isinstance(keys[0], bytes):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TransferError(
            f"a step of {step!r} tokens, keys of {type(keys[0]).__name__}: one asks with "
            "bytes, and steps of 1 or more",
            kind="refused",
        )
    number = endpoint.random.getrandbits(62)
    return AskPrefix(number, endpoint.identity.digest, step, b"".join(keys))


def asked(loop: Loop, peer: Outgoing, question: AskPrefix) -> Story[Ticket | None]:
    """Ask a peer and wait for its answer: a ticket, or None for a miss."""
    mailbox, number = Mailbox(loop.wake_all), question.question
    num_tokens = len(question.keys) // KEY_BYTES * question.step
    yield from peer.met()
    line = peer.line
    peer.questions[number] = mailbox
    try:
        peer.send(question)
        while not mailbox.has(TellPrefix):
            if peer.line is not line:
                raise peer.error or lost(peer.name, "before it has answered")
            yield IDLE
    finally:
        del peer.questions[number]
    told = mailbox.take(TellPrefix)
    if not told.ticket:
        peer.missed(mailbox.take(Why).reason if mailbox.has(Why) else "", num_tokens)
        return None
    ticket = Ticket.from_bytes(told.ticket)
    _check(peer, question, num_tokens, ticket)
    return ticket


def not_answered(peer: Outgoing, seconds: float) -> TransferError:
    """The error of a question that nobody has answered within this time."""
    return TransferError(
        f"agent at {peer.address} did not answer within {seconds} s\n\n"
        "hint: its owner settles too seldom, or it is of a version that knows no prefixes",
        kind="timeout",
        peer=peer.address,
    )


def _check(peer: Outgoing, question: AskPrefix, num_tokens: int, ticket: Ticket) -> None:
    """TransferError unless the ticket is the peer's own, and for what was asked."""
    card = peer.card
    assert card is not None
    mine = question.identity, card.agent, card.start
    if (ticket.identity, ticket.agent, ticket.start) != mine:
        raise TransferError(
            f"peer {peer.name!r} answered with a ticket of agent {ticket.agent!r}, start "
            f"{ticket.start!r}, or of another computation",
            kind="ticket",
            peer=peer.name,
        )
    if not 0 < ticket.num_tokens <= num_tokens:
        raise TransferError(
            f"peer {peer.name!r} answered with {ticket.num_tokens} tokens, asked for at most "
            f"{num_tokens}",
            kind="ticket",
            peer=peer.name,
        )
