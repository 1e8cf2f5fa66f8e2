"""Prefixes without tickets: a peer asks for a prompt by its keys, and gets a ticket or a miss.

    consumer                                producer
    ask-prefix  identity, keys  ─────────▶  which blocks have these keys, and still their bytes?
                ◀─────────  tell-prefix     a ticket for the longest beginning, or why there is none

A key names the computation and all tokens up to the end of its block, so nobody learns or gets
anything of a prompt whose keys it cannot compute. Blocks that may be asked for are not kept from
being reused. A ticket keeps them, as any ticket does.
"""

from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import partial
from threading import BoundedSemaphore
from typing import Protocol

import numpy as np

from kvstow.errors import KvstowError, TransferError
from kvstow.plan.retention import Bools, Encoder, State, longest_prefix, seen_blocks
from kvstow.plan.view import Ints
from kvstow.route.blocks import Blocks
from kvstow.transfer.channel.messages import (
    MAX_ASKED_KEYS,
    AskPrefix,
    MissReason,
    TellPrefix,
)
from kvstow.transfer.loop import Conversation, Loop, Routine, Task
from kvstow.transfer.peers.endpoint import Endpoint
from kvstow.transfer.peers.outgoing import Outgoing
from kvstow.transfer.serve import Incoming
from kvstow.transfer.tickets.offers import Offers
from kvstow.transfer.tickets.owner import OwnerQueue
from kvstow.transfer.tickets.ticket import Ticket

KEY_BYTES = 32

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


class PrefixAnswers:
    """Answers questions from a source, in the thread of the blocks' owner.

    `answers` counts them by kind: a ticket, a miss where nothing is held, or another reason.
    """

    def __init__(self, endpoint: Endpoint, loop: Loop, offers: Offers, owner: OwnerQueue) -> None:
        self.source: BlockSource | None = None
        self.answers: Counter[str] = Counter()
        self._endpoint = endpoint
        self._loop = loop
        self._offers = offers
        self._owner = owner
        self._room = BoundedSemaphore(MOST_LEASES)

    def hear(self, peer: Incoming, question: AskPrefix) -> None:
        """Somebody asks; the owner's thread answers when it next settles."""
        if self.source is None:
            peer.send(TellPrefix(question.question, b"", "absent"))
        elif self._room.acquire(blocking=False):
            self._owner.defer(partial(self._answer, peer, question))
        else:
            self.answers["busy"] += 1
            peer.send(TellPrefix(question.question, b"", "busy"))

    def _answer(self, peer: Incoming, question: AskPrefix) -> None:
        """A ticket for the longest beginning that is held, or why there is none."""
        try:
            answer = self._refusal(question) or self._offer(question)
        except BaseException:
            self._room.release()
            raise
        if isinstance(answer, Ticket):
            self.answers["ticket"] += 1
            message = TellPrefix(question.question, answer.to_bytes())
        else:
            self._room.release()
            self.answers["miss" if answer == "absent" else answer] += 1
            message = TellPrefix(question.question, b"", answer)
        self._loop.try_submit(lambda: peer.send(message))  # closed: the lease has ended too

    def _refusal(self, question: AskPrefix) -> MissReason | None:
        """Why nothing is looked for: another computation asks, or there are recurrent states,
        which are overwritten in place while their blocks' generations stay."""
        if question.identity != self._endpoint.identity.digest:
            return "identity"
        groups = self._endpoint.layout.groups
        return "states" if any(isinstance(g.group.retention, State) for g in groups) else None

    def _offer(self, question: AskPrefix) -> Ticket | MissReason:
        assert self.source is not None
        try:
            with self.source.still():
                result = self._longest(self.source, _split(question.keys), question.step)
                if isinstance(result, str):
                    return result
                return self._offers.offer(*result, on_end=lambda reason: self._room.release())
        except KvstowError as error:
            self._endpoint.note("prefix-not-offered", {"why": str(error)})
            return "error"

    def _longest(
        self, source: BlockSource, keys: Sequence[bytes], step: int
    ) -> tuple[dict[int, Blocks], int] | MissReason:
        """The blocks of the longest beginning that every group holds, and its tokens; or why there
        is none."""
        groups = {
            g: rows.group
            for g, rows in enumerate(self._endpoint.layout.groups)
            if not isinstance(rows.group.retention, Encoder)
        }
        if any(group.block_tokens % step for group in groups.values()):
            return "step"
        ids: dict[int, Ints] = {}

        def holds(g: int, num_blocks: int) -> Bools:
            every = groups[g].block_tokens // step
            ids[g] = source.ids(g, keys[every - 1 :: every][:num_blocks])
            return ids[g] >= 0

        num_tokens = longest_prefix(groups.items(), len(keys) * step, holds)
        if not num_tokens:
            return "evicted" if any((each == GONE).any() for each in ids.values()) else "absent"
        blocks: dict[int, Blocks] = {}
        for g, group in groups.items():
            index = np.array(seen_blocks(group.retention, num_tokens, group.block_tokens), np.int64)
            blocks[g] = Blocks(ids[g][index], index)
        return blocks, num_tokens


def _split(keys: bytes) -> list[bytes]:
    if len(keys) % KEY_BYTES:
        raise TransferError(f"{len(keys)} bytes are not whole keys", kind="refused")
    return [keys[at : at + KEY_BYTES] for at in range(0, len(keys), KEY_BYTES)]


# ── the consumer ──────────────────────────────────────────────────────────────────────


def prefix_question(endpoint: Endpoint, keys: Sequence[bytes], step: int) -> AskPrefix:
    """A question for keys; TransferError for what cannot be asked."""
    is_bytes = all(isinstance(key, bytes) for key in keys)  # pyright: ignore[reportUnnecessaryIsInstance]
    sizes = {len(key) for key in keys}
    if not (is_bytes and sizes == {KEY_BYTES} and len(keys) <= MAX_ASKED_KEYS):
        raise TransferError(
            f"{len(keys)} keys: one asks with 1 to {MAX_ASKED_KEYS}, each of {KEY_BYTES} bytes",
            kind="refused",
        )
    if not isinstance(step, int) or step < 1:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TransferError(f"a step of {step!r} tokens, not of 1 or more", kind="refused")
    number = endpoint.random.getrandbits(62)
    return AskPrefix(number, endpoint.identity.digest, step, b"".join(keys))


def ask_peer(
    endpoint: Endpoint, peer: Outgoing, question: AskPrefix, task: Task[Ticket | None]
) -> Routine[Ticket | None]:
    """Ask a peer and wait for its answer: a ticket, or None for a miss."""
    answers, num_tokens = Conversation(task), len(question.keys) // KEY_BYTES * question.step
    yield from peer.met()
    peer.readers[question.question] = answers
    try:
        peer.send(question)
        answer = yield from answers.mailbox.wait(TellPrefix)
    finally:
        del peer.readers[question.question]
    if answer.miss is not None:
        peer.misses[answer.miss] += 1
        facts = {"peer": peer.name, "tokens": num_tokens, "reason": answer.miss}
        endpoint.note("prefix-missed", facts)
        return None
    ticket = Ticket.from_bytes(answer.ticket)
    if not (ticket.is_signed_by(peer.ticket_key) and 0 < ticket.num_tokens <= num_tokens):
        raise TransferError(
            f"peer {peer.name!r} answered with {ticket.num_tokens} tokens of agent "
            f"{ticket.agent!r}, asked for at most {num_tokens} of its own",
            kind="ticket",
            peer=peer.name,
        )
    return ticket


def not_answered(peer: Outgoing, seconds: float) -> TransferError:
    """The error of a question that nobody has answered within this time."""
    return TransferError(
        f"agent at {peer.address} did not answer within {seconds} s\n\n"
        "hint: its owner must call settle() more often",
        kind="timeout",
        peer=peer.address,
    )
