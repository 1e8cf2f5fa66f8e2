"""Tickets: what a producer hands out so that a consumer may pull a request's blocks.

    kvt3.  base64url( checksum, 8 bytes │ signature, 16 │ deflated MessagePack of the body )

The body names agent, address, lease, layout fingerprint, token count, identity, and per group
the ids, logical indices and generations of the blocks, and which of them are partial. A ticket
proves nothing to who has not met its agent: the key of its signature is told when agents meet.

Limits come first: a reader spends at most a few times `MAX_BODY_BYTES` on anything.
"""

import base64
import binascii
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import blake2b
from hmac import compare_digest
from typing import Annotated

import msgspec
import numpy as np

from kvstow.errors import BlockError, SpecError, TransferError
from kvstow.plan.layout import Layout
from kvstow.plan.retention import State
from kvstow.plan.view import Ints
from kvstow.route.blocks import Blocks, check_ids

PREFIX = "kvt3."
MAX_BLOCKS = 1 << 18
MAX_BYTES = 4 << 20
MAX_BODY_BYTES = 8 << 20
MAX_TOKENS = 1 << 40
MAX_LEASE_SECONDS = 1e7
_CHECKSUM = 8
SIGNATURE_BYTES = 16
KEY_BYTES = 32

_Short = Annotated[str, msgspec.Meta(max_length=512)]
_Id = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]


class _Group(msgspec.Struct, frozen=True, array_like=True):
    group: Annotated[int, msgspec.Meta(ge=0, lt=1 << 16)]
    ids: bytes
    index: bytes
    generations: bytes
    partial: bytes = b""


class _Body(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    agent: _Short
    start: _Short
    address: _Short
    key: _Short
    lease: _Id
    lease_seconds: Annotated[float, msgspec.Meta(gt=0, le=MAX_LEASE_SECONDS)]
    fingerprint: _Short
    num_tokens: Annotated[int, msgspec.Meta(ge=0, le=MAX_TOKENS)]
    groups: Annotated[tuple[_Group, ...], msgspec.Meta(max_length=1 << 12)]
    identity: Annotated[bytes, msgspec.Meta(max_length=64)]


_PLAIN = tuple(name for name in _Body.__struct_fields__ if name != "groups")
"""Fields that are the same in the body and in a ticket."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Ticket:
    """One request's blocks at one producer rank, under one lease.

    `start` names one start of the agent's process: a restarted agent refuses old tickets.
    `key` is the agent's public key, empty on loopback. `identity` is the digest of the
    computation that has made this request's bytes, adapter and salt included.
    `signature` is made with a key of the agent's own.
    """

    agent: str
    start: str
    address: str
    key: str
    lease: int
    lease_seconds: float
    fingerprint: str
    num_tokens: int
    blocks: Mapping[int, Blocks]
    generations: Mapping[int, Ints]
    identity: bytes = b""
    signature: bytes = bytes(SIGNATURE_BYTES)

    def signed(self, key: bytes) -> "Ticket":
        """The same ticket, signed with its agent's key."""
        made = replace(self, signature=_signature(self.body, key))
        made.__dict__["body"] = self.body
        return made

    def is_signed_by(self, key: bytes) -> bool:
        """Whether the agent with this key has signed it as it is."""
        return compare_digest(self.signature, _signature(self.body, key))

    @cached_property
    def body(self) -> bytes:
        """The body, encoded; equal tickets have equal bodies."""
        return msgspec.msgpack.encode(
            _Body(
                **{name: getattr(self, name) for name in _PLAIN},
                groups=tuple(self._packed(g) for g in sorted(self.blocks)),
            )
        )

    def _packed(self, group: int) -> _Group:
        listed = self.blocks[group]
        columns = [listed.ids, listed.index, self.generations[group]]
        if listed.partial is not None:
            columns.append(listed.partial)
        return _Group(group, *(packed_ints(column) for column in columns))

    def to_bytes(self) -> bytes:
        """The ticket for a message."""
        checksum = _checksum(self.signature + self.body)
        return checksum + self.signature + zlib.compress(self.body, 1)

    def __str__(self) -> str:
        """The ticket as one printable word, for a header or a JSON field."""
        return PREFIX + base64.urlsafe_b64encode(self.to_bytes()).decode().rstrip("=")

    @staticmethod
    def from_bytes(data: bytes, *, max_body_bytes: int = MAX_BODY_BYTES) -> "Ticket":
        """The ticket in a message; TransferError for anything else."""
        if len(data) > MAX_BYTES:
            raise _bad(f"{len(data)} bytes, at most {MAX_BYTES}")
        start = _CHECKSUM + SIGNATURE_BYTES
        signature = data[_CHECKSUM:start]
        try:
            inflate = zlib.decompressobj()
            body = inflate.decompress(data[start:], max_body_bytes)
            whole = inflate.eof and not inflate.unused_data
        except zlib.error as error:
            raise _bad(str(error)) from None
        if not whole and len(body) >= max_body_bytes:
            raise _bad(f"it inflates to more than {max_body_bytes} bytes")
        if not whole or _checksum(signature + body) != data[:_CHECKSUM]:
            raise _bad("the checksum does not match: it was cut or changed on the way")
        try:
            ticket = _ticket(msgspec.msgpack.decode(body, type=_Body), signature)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, SpecError) as error:
            raise _bad(str(error)[:300]) from None
        ticket.__dict__["body"] = body  # it is there already, and need not be encoded again
        return ticket

    @staticmethod
    def parse(text: str, *, max_body_bytes: int = MAX_BODY_BYTES) -> "Ticket":
        """The ticket in the text that `str(ticket)` makes; TransferError for anything else."""
        if not isinstance(text, str):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise _bad(f"it is {type(text).__name__}, not text\n\nhint: str(ticket) is its text")
        if len(text) > 2 * MAX_BYTES:
            raise _bad(f"{len(text)} characters, at most {2 * MAX_BYTES}")
        if not text.startswith(PREFIX):
            raise _bad(f"it starts with {text[:8]!r}, not with {PREFIX!r}")
        word = text[len(PREFIX) :]
        padding = "=" * (-len(word) % 4)
        try:
            data = base64.b64decode(word + padding, altchars=b"-_", validate=True)
        except (binascii.Error, ValueError) as error:
            raise _bad(str(error)) from None
        return Ticket.from_bytes(data, max_body_bytes=max_body_bytes)

    def blocks_of(self, num_tokens: int) -> Mapping[int, Blocks]:
        """The blocks from which the first `num_tokens` tokens can be pulled: a block that is
        partial has what the token behind the last one sees, not what earlier ones see."""
        if num_tokens == self.num_tokens:
            return self.blocks
        return {g: listed.whole for g, listed in self.blocks.items()}

    @property
    def num_blocks(self) -> int:
        return sum(len(blocks) for blocks in self.blocks.values())


def packed_ints(values: Ints) -> bytes:
    """Differences of neighbours, little endian: ascending ids then deflate to little."""
    differences = np.array(values, "<i8")
    differences[1:] -= values[:-1]
    return differences.tobytes()


def unpacked_ints(data: bytes) -> Ints:
    """What `packed_ints` packed."""
    if len(data) % 8:
        raise SpecError(f"{len(data)} bytes are not whole 64-bit numbers")
    return np.cumsum(np.frombuffer(data, "<i8"), dtype=np.int64)


def check_blocks(layout: Layout, blocks: Mapping[int, Blocks], *, whose: str) -> None:
    """TransferError unless every block exists in the layout and is listed once."""
    if not isinstance(blocks, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TransferError(
            f"{whose}: blocks are {type(blocks).__name__}, not by group\n\n"
            "hint: ledger.blocks(request), or {0: Blocks.first(ids)}",
            kind="refused",
        )
    for g, listed in blocks.items():
        if not 0 <= g < len(layout.groups):
            raise TransferError(
                f"{whose}: group {g} is not one of {len(layout.groups)}", kind="ticket"
            )
        try:
            check_ids(layout, g, listed, f"{whose}:")
        except BlockError as error:
            raise TransferError(str(error), kind="ticket") from None


def check_request(
    layout: Layout,
    tickets: Sequence[Ticket],
    groups: Iterable[int],
    start_token: int,
    num_tokens: int | None,
    identity: bytes,
) -> int:
    """How many tokens a pull into these groups brings; TransferError unless the tickets are of one
    request of this computation and have them."""
    if not all(isinstance(ticket, Ticket) for ticket in tickets):  # pyright: ignore[reportUnnecessaryIsInstance]
        kinds = sorted({type(ticket).__name__ for ticket in tickets})
        raise TransferError(
            f"tickets are {', '.join(kinds)}\n\nhint: kvstow.Ticket.parse(text)", kind="ticket"
        )
    lengths = {ticket.num_tokens for ticket in tickets}
    if not tickets:
        raise TransferError("a pull needs at least one ticket", kind="ticket")
    if len(lengths) != 1:
        raise TransferError(
            f"tickets of {sorted(lengths)} tokens are not of one request", kind="ticket"
        )
    offered = lengths.pop()
    end = offered if num_tokens is None else num_tokens
    if end > offered:
        raise TransferError(
            f"{end} tokens were requested, the ticket is for {offered}", kind="ticket"
        )
    if not 0 <= start_token < end:
        raise TransferError(
            f"tokens [{start_token}, {end}) are none\n\nhint: start_token is at least 0 and "
            f"below num_tokens",
            kind="refused",
        )
    for ticket in tickets:
        if ticket.identity != identity:
            raise TransferError(
                f"ticket of agent {ticket.agent!r}: it is of computation "
                f"{ticket.identity.hex()[:16]}, the request of {identity.hex()[:16]}: weights, "
                "configuration, adapter or salt differ\n\n"
                "hint: offer and pull with identity=Identity.for_request(adapter=, salt=)",
                kind="ticket",
                peer=ticket.agent,
            )
    check_states(layout, groups, end, offered)
    return end


def check_states(layout: Layout, groups: Iterable[int], num_tokens: int, held: int) -> None:
    """TransferError where fewer tokens than are `held` are wanted of recurrent states: a state is
    that after all of them."""
    for rows in (layout.groups[g] for g in groups):
        if num_tokens < held and isinstance(rows.group.retention, State):
            raise TransferError(
                f"group {rows.group.name!r}: the recurrent state is that after {held} tokens, not "
                f"after {num_tokens}\n\nhint: all {held} tokens, or leave this group out",
                kind="refused",
            )


def _checksum(data: bytes) -> bytes:
    return blake2b(data, digest_size=_CHECKSUM).digest()


def _signature(body: bytes, key: bytes) -> bytes:
    return blake2b(body, digest_size=SIGNATURE_BYTES, key=key).digest()


def _ticket(body: _Body, signature: bytes) -> Ticket:
    groups = {part.group: part for part in body.groups}
    if len(groups) < len(body.groups):
        raise SpecError(f"{len(body.groups)} groups, some of them twice")
    count = sum(len(part.ids) for part in body.groups) // 8
    if count > MAX_BLOCKS:
        raise SpecError(f"{count} blocks, at most {MAX_BLOCKS}")
    blocks: dict[int, Blocks] = {}
    generations: dict[int, Ints] = {}
    for g, part in groups.items():
        partial = unpacked_ints(part.partial) if part.partial else None
        blocks[g] = Blocks(unpacked_ints(part.ids), unpacked_ints(part.index), partial)
        generations[g] = unpacked_ints(part.generations)
        if len(generations[g]) != len(blocks[g]):
            raise SpecError(
                f"group {g}: {len(generations[g])} generations for {len(blocks[g])} blocks"
            )
        if (blocks[g].ids < 0).any():
            raise SpecError(f"group {g}: some of {len(blocks[g])} ids are negative")
    plain = {name: getattr(body, name) for name in _PLAIN}
    return Ticket(**plain, blocks=blocks, generations=generations, signature=signature)


def _bad(why: str) -> TransferError:
    return TransferError(f"not a ticket: {why}", kind="ticket")
