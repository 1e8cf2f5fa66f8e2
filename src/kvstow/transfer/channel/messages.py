"""Side channel messages, to the byte.

    offset  bytes
    0       4      magic, "KVSW"
    4       2      version, big endian
    6       8      session: 0 before the handshake, then what the server drew
    14      8      sequence: grows with every frame of one sender in one session
    22      4      length of the body
    26      …      body: MessagePack, one array that starts with the message's name

A header reads the same in every version, so that two versions can tell each other apart.
"""

import struct
from typing import Annotated, Literal, NamedTuple

import msgspec

from kvstow.errors import FaultKind

VERSION = 2
MAGIC = b"KVSW"
MAX_FRAME = 32 << 20

_HEADER = struct.Struct(">4sHQQI")

DropReason = Literal["magic", "truncated", "oversized", "version", "body", "replayed", "session"]


class Message(msgspec.Struct, frozen=True, array_like=True, tag=True, forbid_unknown_fields=True):
    """Any message; its name goes first on the wire."""


Address = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
"""Of memory, or a length of it: what can be added to another without overflowing."""


class RegionCard(msgspec.Struct, frozen=True, array_like=True):
    """Registered memory, as peers see it."""

    address: Address
    nbytes: Address
    kind: Literal["DRAM", "VRAM"]
    device: int


class Card(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What an agent tells about itself.

    `base` is the arena's address; `tables` are addresses of the generations, per group;
    `probe` is memory that anybody may write to, of the arena's kind; `stage` is host memory
    that rows go through where they have no direct path.
    """

    agent: str
    start: str
    manifest: bytes
    metadata: bytes
    base: Address
    kind: Literal["DRAM", "VRAM"]
    device: int
    tables: tuple[Address, ...]
    probe: RegionCard
    stage: RegionCard | None


class Hello(Message, frozen=True, tag="hello"):
    """First words of a client."""

    card: Card


class Welcome(Message, frozen=True, tag="welcome"):
    """The server's answer: from now on we may read and write each other's arena."""

    card: Card


class Refused(Message, frozen=True, tag="refused"):
    """No, with all reasons. `transfer` is 0 for a refused handshake."""

    transfer: int
    kind: FaultKind
    reasons: tuple[str, ...]


class Stranger(Message, frozen=True, tag="stranger"):
    """The server does not know this session (it was restarted): say hello again."""


class Ids(msgspec.Struct, frozen=True, array_like=True):
    """Blocks of one group, packed as in tickets."""

    group: int
    ids: bytes
    index: bytes


Box = tuple[tuple[int, int], ...]


class Claim(msgspec.Struct, frozen=True, array_like=True):
    """Which parts of these layers' fields a source shall bring."""

    layers: tuple[str, ...]
    fields: tuple[tuple[str, tuple[Box, ...]], ...]


class Sample(msgspec.Struct, frozen=True, array_like=True):
    """Tokens `[start_token, stop_token)` of some layers, whose digest is compared: of their
    states those whose number, divided by `every`, leaves `phase`, and of these the model's
    heads `[first, end)`, or all."""

    layers: tuple[str, ...]
    heads: tuple[int, int] | None
    start_token: int
    stop_token: int
    every: Annotated[int, msgspec.Meta(ge=1)]
    phase: Annotated[int, msgspec.Meta(ge=0)]


class Write(msgspec.Struct, frozen=True, array_like=True):
    """Where a producer shall write, and which tokens."""

    blocks: tuple[Ids, ...]
    start_token: int
    num_tokens: int


class Begin(Message, frozen=True, tag="begin"):
    """A consumer starts to read what a ticket names, or asks the producer to write it.

    Without `claims` this source brings all that the consumer holds. The producer answers
    with the digests of the samples when it has them. `slot_bytes` is not 0 where it shall
    not write but stage, in pieces of that many bytes.
    """

    transfer: int
    lease: int
    digest: bytes
    claims: tuple[Claim, ...] | None
    write: Write | None
    slot_bytes: int
    samples: tuple[Sample, ...]


class Begun(Message, frozen=True, tag="begun"):
    """The producer knows the ticket and keeps the blocks."""

    transfer: int


class Written(Message, frozen=True, tag="written"):
    """The producer's writes have all arrived."""

    transfer: int
    nbytes: int
    descriptors: int


class Staged(Message, frozen=True, tag="staged"):
    """A piece lies in the producer's slot at this offset."""

    transfer: int
    piece: int
    slot: int


class Fetched(Message, frozen=True, tag="fetched"):
    """The consumer has read a piece: its slot is free."""

    transfer: int
    piece: int


class Failed(Message, frozen=True, tag="failed"):
    """The producer could not go on. Nothing of it writes any more."""

    transfer: int
    kind: FaultKind
    reason: str


class End(Message, frozen=True, tag="end"):
    """The consumer is done with a ticket: it has the bytes, or failed, or gave up."""

    transfer: int
    lease: int
    outcome: Literal["accepted", "failed", "aborted"]


class Stop(Message, frozen=True, tag="stop"):
    """The consumer wants no more writes for this transfer."""

    transfer: int


class Stopped(Message, frozen=True, tag="stopped"):
    """Nothing of the producer writes for this transfer any more."""

    transfer: int


class Renew(Message, frozen=True, tag="renew"):
    """Still here, and still interested in these leases."""

    leases: tuple[int, ...]


class Alive(Message, frozen=True, tag="alive"):
    """Answer to a heartbeat: which of the leases have ended."""

    ended: tuple[int, ...]


class TellDigest(Message, frozen=True, tag="tell-digest"):
    """The digests of a transfer's samples, as far as this source brings them."""

    transfer: int
    values: tuple[int, ...]


class AskProbe(Message, frozen=True, tag="ask-probe"):
    """Please write `nbytes` into my probe memory and say how long it took."""

    nbytes: int


class TellProbe(Message, frozen=True, tag="tell-probe"):
    """How long that took; negative if it failed."""

    nbytes: int
    seconds: float


class Deliver(Message, frozen=True, tag="deliver"):
    """A producer asks the server to pull `source` into what it offered as `target`."""

    transfer: int
    target: int
    target_digest: bytes
    source: bytes


class Delivered(Message, frozen=True, tag="delivered"):
    """How that went; no kind means accepted."""

    transfer: int
    kind: FaultKind | None
    reason: str


class AskStatus(Message, frozen=True, tag="ask-status"):
    """How are you? Needs no handshake."""


class TellStatus(Message, frozen=True, tag="tell-status"):
    """A JSON document; see docs/reference/wire.md."""

    document: bytes


AnyMessage = (
    Hello | Welcome | Refused | Stranger | Begin | Begun | Written | Staged | Fetched | Failed
    | End | Stop | Stopped | Renew | Alive | TellDigest | AskProbe | TellProbe | Deliver
    | Delivered | AskStatus | TellStatus
)  # fmt: skip

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[AnyMessage] = msgspec.msgpack.Decoder(AnyMessage)


class Frame(NamedTuple):
    """A message with what its header says."""

    session: int
    sequence: int
    message: AnyMessage


class Unreadable(Exception):
    """A frame that is dropped; `version` is the sender's where the header could be read."""

    def __init__(self, reason: DropReason, detail: str, version: int | None = None) -> None:
        self.reason: DropReason = reason
        self.version = version
        super().__init__(f"{reason}: {detail}")


def encode(frame: Frame) -> bytes:
    """The frame as bytes."""
    body = _encoder.encode(frame.message)
    return _HEADER.pack(MAGIC, VERSION, frame.session, frame.sequence, len(body)) + body


def decode(data: bytes) -> Frame:
    """The frame in these bytes; Unreadable, and nothing else, where there is none."""
    if len(data) > MAX_FRAME:
        raise Unreadable("oversized", f"{len(data)} bytes, at most {MAX_FRAME}")
    if len(data) < _HEADER.size:
        raise Unreadable("truncated", f"{len(data)} bytes, at least {_HEADER.size}")
    magic, version, session, sequence, nbytes = _HEADER.unpack_from(data)
    if magic != MAGIC:
        raise Unreadable("magic", f"{magic!r} is not {MAGIC!r}")
    if version != VERSION:
        raise Unreadable("version", f"{version} is not {VERSION}, the version spoken here", version)
    if nbytes != len(data) - _HEADER.size:
        raise Unreadable("truncated", f"body of {len(data) - _HEADER.size} bytes, not {nbytes}")
    try:
        message = _decoder.decode(memoryview(data)[_HEADER.size :])
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise Unreadable("body", str(error)[:200], version) from None
    return Frame(session, sequence, message)
