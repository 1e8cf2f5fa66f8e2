"""What agents say to each other on the side channel; `framing` has the bytes around it."""

from typing import Annotated, Literal

import msgspec

from kvstow.errors import FaultKind


class Message(msgspec.Struct, frozen=True, array_like=True, tag=True, forbid_unknown_fields=True):
    """Any message; its name goes first on the wire."""


Address = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
"""Of memory, or a length of it: what can be added to another without overflowing."""


Device = Annotated[int, msgspec.Meta(ge=0, lt=1 << 16)]
MAX_NAME = 256
Name = Annotated[str, msgspec.Meta(max_length=MAX_NAME)]
MAX_GROUPS = 1 << 12
MAX_ASKED_KEYS = 1 << 16


class RegionCard(msgspec.Struct, frozen=True, array_like=True):
    """Registered memory, as peers see it."""

    address: Address
    nbytes: Address
    kind: Literal["DRAM", "VRAM"]
    device: Device


class Card(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What an agent tells about itself.

    `start` names one start of its process, `engine` the engine that it uses now.
    `base` is the arena's address; `tables` are addresses of the generations, per group;
    `probe` is memory that anybody may write to, of the arena's kind; `stage` is host memory
    that rows go through where they have no direct path.
    """

    agent: Name
    start: Name
    engine: Name
    manifest: bytes
    metadata: bytes
    base: Address
    kind: Literal["DRAM", "VRAM"]
    device: Device
    tables: Annotated[tuple[Address, ...], msgspec.Meta(max_length=MAX_GROUPS)]
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
    """The producer could not go on. Until it says `stopped`, something of it may still write."""

    transfer: int
    kind: FaultKind
    reason: str


class Moved(Message, frozen=True, tag="moved"):
    """What the consumer got of an accepted transfer, told before its end, for the producer's
    counters. An agent that does not know this message drops it."""

    transfer: int
    nbytes: Address
    descriptors: Address


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


class AskPrefix(Message, frozen=True, tag="ask-prefix"):
    """Do you hold the beginning of a prompt? Its keys of 32 bytes, one after every `step` tokens.

    An agent that does not know this message gives no answer.
    """

    question: Address
    identity: Annotated[bytes, msgspec.Meta(max_length=64)]
    step: Annotated[int, msgspec.Meta(ge=1, le=1 << 20)]
    keys: Annotated[bytes, msgspec.Meta(max_length=32 * MAX_ASKED_KEYS)]


class TellPrefix(Message, frozen=True, tag="tell-prefix"):
    """A ticket for the longest beginning that is held; empty where none is."""

    question: Address
    ticket: bytes


class Why(Message, frozen=True, tag="why"):
    """The reason for what comes next, a refused transfer or a question without a ticket, as a word
    of the sender's. It is a message of its own because fields that an agent does not know make it
    drop a message; of these it drops no more than the reason."""

    number: Address
    reason: Annotated[str, msgspec.Meta(max_length=64)]


NOT_YET = "not yet"
"""The reason for a ticket that is not known here, and may become so: the pull may come again."""

MissReason = Literal["absent", "evicted", "step", "identity", "states", "busy", "error"]
"""Why a question got no ticket: nothing of it is held, or no longer; blocks are no multiple of the
step; another computation asks; recurrent states are not lent; too many at once; a fault."""


class AskStatus(Message, frozen=True, tag="ask-status"):
    """How are you? Needs no handshake."""


class TellStatus(Message, frozen=True, tag="tell-status"):
    """A JSON document; see docs/reference/wire.md."""

    document: bytes


AnyMessage = (
    Hello
    | Welcome
    | Refused
    | Stranger
    | Begin
    | Begun
    | Written
    | Staged
    | Fetched
    | Failed
    | Moved
    | End
    | Stop
    | Stopped
    | Renew
    | Alive
    | TellDigest
    | AskProbe
    | TellProbe
    | AskPrefix
    | TellPrefix
    | Why
    | AskStatus
    | TellStatus
)
