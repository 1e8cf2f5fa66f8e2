"""Tickets: what a producer hands out so that a consumer may pull a request's blocks.

    kvt1.  base64url( checksum, 8 bytes │ deflated MessagePack of the body )

The body names agent, address, lease, layout fingerprint, token count, and per group the
ids, logical indices and generations of the blocks. A ticket proves nothing by itself:
its digest must be the one that the producer remembers for the lease.
"""

import base64
import binascii
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b

import msgspec
import numpy as np

from kvstow.errors import SpecError, TransferError
from kvstow.plan.view import Ints
from kvstow.route.blocks import Blocks

PREFIX = "kvt1."
MAX_BYTES = 16 << 20
MAX_BODY_BYTES = 64 << 20
_CHECKSUM = 8


class _Group(msgspec.Struct, frozen=True, array_like=True):
    group: int
    ids: bytes
    index: bytes
    generations: bytes


class _Body(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    agent: str
    start: str
    address: str
    key: str
    lease: int
    lease_seconds: float
    fingerprint: str
    num_tokens: int
    groups: tuple[_Group, ...]


@dataclass(frozen=True, kw_only=True, eq=False)
class Ticket:
    """One request's blocks at one producer rank, under one lease.

    `start` names one start of the agent's process: a restarted agent refuses old tickets.
    `key` is the agent's public key, empty on loopback.
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

    @cached_property
    def body(self) -> bytes:
        """The body, encoded; equal tickets have equal bodies."""
        return msgspec.msgpack.encode(
            _Body(
                agent=self.agent,
                start=self.start,
                address=self.address,
                key=self.key,
                lease=self.lease,
                lease_seconds=float(self.lease_seconds),
                fingerprint=self.fingerprint,
                num_tokens=self.num_tokens,
                groups=tuple(
                    _Group(g, packed_ints(blocks.ids), packed_ints(blocks.index),
                           packed_ints(self.generations[g]))
                    for g, blocks in sorted(self.blocks.items())
                ),
            )
        )  # fmt: skip

    @cached_property
    def digest(self) -> bytes:
        """What the producer compares with what it remembers: 16 bytes over the body."""
        return blake2b(self.body, digest_size=16).digest()

    def to_bytes(self) -> bytes:
        """The ticket for a message."""
        return blake2b(self.body, digest_size=_CHECKSUM).digest() + zlib.compress(self.body, 1)

    def __str__(self) -> str:
        """The ticket as one printable word, for a header or a JSON field."""
        return PREFIX + base64.urlsafe_b64encode(self.to_bytes()).decode().rstrip("=")

    @staticmethod
    def from_bytes(data: bytes, *, max_body_bytes: int = MAX_BODY_BYTES) -> "Ticket":
        """The ticket in a message; TransferError for anything else."""
        if len(data) > MAX_BYTES:
            raise _bad(f"{len(data)} bytes, at most {MAX_BYTES}")
        try:
            inflate = zlib.decompressobj()
            body = inflate.decompress(data[_CHECKSUM:], max_body_bytes)
            whole = inflate.eof and not inflate.unused_data
        except zlib.error as error:
            raise _bad(str(error)) from None
        if not whole and len(body) >= max_body_bytes:
            raise _bad(f"it inflates to more than {max_body_bytes} bytes")
        if not whole or blake2b(body, digest_size=_CHECKSUM).digest() != data[:_CHECKSUM]:
            raise _bad("the checksum does not match: it was cut or changed on the way")
        try:
            ticket = _ticket(msgspec.msgpack.decode(body, type=_Body))
        except (msgspec.MsgspecError, UnicodeDecodeError, SpecError) as error:
            raise _bad(str(error)) from None
        ticket.__dict__["body"] = body  # it is there already: `digest` need not encode it again
        return ticket

    @staticmethod
    def parse(text: str, *, max_body_bytes: int = MAX_BODY_BYTES) -> "Ticket":
        """The ticket that `str` has printed; TransferError for anything else."""
        if not text.startswith(PREFIX):
            raise _bad(f"it starts with {text[:8]!r}, not with {PREFIX!r}")
        word = text[len(PREFIX) :]
        try:
            data = base64.b64decode(
                word + "=" * (-len(word) % 4), altchars=b"-_", validate=True
            )  # fmt: skip
        except (binascii.Error, ValueError) as error:
            raise _bad(str(error)) from None
        return Ticket.from_bytes(data, max_body_bytes=max_body_bytes)

    @property
    def num_blocks(self) -> int:
        return sum(len(blocks) for blocks in self.blocks.values())


def packed_ints(values: Ints) -> bytes:
    """Differences of neighbours, little endian: ascending ids then deflate to little."""
    return np.diff(values, prepend=0).astype("<i8").tobytes()


def unpacked_ints(data: bytes) -> Ints:
    """What `packed_ints` packed."""
    if len(data) % 8:
        raise SpecError(f"{len(data)} bytes are not whole 64-bit numbers")
    return np.cumsum(np.frombuffer(data, "<i8"), dtype=np.int64)


def _ticket(body: _Body) -> Ticket:
    groups = {part.group: part for part in body.groups}
    if len(groups) < len(body.groups) or body.num_tokens < 0 or body.lease_seconds <= 0:
        raise SpecError(f"{len(body.groups)} groups, {body.num_tokens} tokens, a lease of "
                        f"{body.lease_seconds} s")  # fmt: skip
    blocks = {g: Blocks(unpacked_ints(p.ids), unpacked_ints(p.index)) for g, p in groups.items()}
    generations = {g: unpacked_ints(part.generations) for g, part in groups.items()}
    for g, found in generations.items():
        if len(found) != len(blocks[g]):
            raise SpecError(f"group {g}: {len(found)} generations for {len(blocks[g])} blocks")
    return Ticket(
        agent=body.agent,
        start=body.start,
        address=body.address,
        key=body.key,
        lease=body.lease,
        lease_seconds=body.lease_seconds,
        fingerprint=body.fingerprint,
        num_tokens=body.num_tokens,
        blocks=blocks,
        generations=generations,
    )


def _bad(why: str) -> TransferError:
    return TransferError(f"not a ticket: {why}", kind="ticket")
