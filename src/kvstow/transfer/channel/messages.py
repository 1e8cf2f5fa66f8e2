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
    `probe` is memory that anybody may write to, of the arena's kind; `stage` is host memory,
    the slots that rows go through.
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
    stage: RegionCard


class Hello(Message, frozen=True, tag="hello"):
    """First words of a client. `line` is the same number whenever it dials this address again: its
    earlier session has ended then."""

    card: Card
    line: int


class Welcome(Message, frozen=True, tag="welcome"):
    """The server's answer: from now on we may read and write each other's arena.

    `memory` is what a consumer needs to map the server's arena, or nothing, and `unmappable` why
    not. `ticket_key` signs the server's tickets.
    """

    card: Card
    memory: Annotated[bytes, msgspec.Meta(max_length=4096)]
    unmappable: Annotated[str, msgspec.Meta(max_length=64)]
    ticket_key: Annotated[bytes, msgspec.Meta(min_length=16, max_length=64)]


class Refused(Message, frozen=True, tag="refused"):
    """No handshake, with all reasons."""

    kind: FaultKind
    reasons: tuple[str, ...]


class UnknownSession(Message, frozen=True, tag="unknown-session"):
    """The server does not know this client (it was restarted): say hello again."""


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


Way = Literal["mapped", "read", "write", "slots"]
"""The consumer copies out of the producer's memory, which it has mapped; or reads every piece into
its place; the producer writes it there; or both copy pieces through slots, which the consumer reads
whole."""


class Write(msgspec.Struct, frozen=True, array_like=True):
    """Where a producer shall write, and which tokens."""

    blocks: tuple[Ids, ...]
    start_token: int
    num_tokens: int


class Begin(Message, frozen=True, tag="begin"):
    """A consumer starts to read what a ticket names, or has the producer `write` it, in slots of
    `slot_bytes` or into its rows.

    Without `claims` this source brings all that the consumer holds. The producer answers with the
    digests of the samples when it has them. A consumer that has mapped its memory waits for no
    answer.
    """

    transfer: int
    lease: int
    signature: bytes
    way: Way
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
    """The producer does not go on. Until it says `stopped`, something of it may still write."""

    transfer: int
    kind: FaultKind
    reason: str


class End(Message, frozen=True, tag="end"):
    """The consumer is done with a ticket: it has the bytes, so many, or failed, or gave up. Unless
    it has them, it wants to hear `stopped`."""

    transfer: int
    lease: int
    outcome: Literal["accepted", "failed", "aborted"]
    nbytes: Address = 0


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
    """Please write `nbytes` into my probe memory and say how long it takes."""

    nbytes: int


class TellProbe(Message, frozen=True, tag="tell-probe"):
    """How long that took in one piece, and in many short ones; negative if it failed."""

    seconds: tuple[float, float]


class AskPrefix(Message, frozen=True, tag="ask-prefix"):
    """Do you hold the beginning of a prompt? Keys of 32 bytes, one after every `step` tokens."""

    question: Address
    identity: Annotated[bytes, msgspec.Meta(max_length=64)]
    step: Annotated[int, msgspec.Meta(ge=1, le=1 << 20)]
    keys: Annotated[bytes, msgspec.Meta(max_length=32 * MAX_ASKED_KEYS)]


MissReason = Literal["absent", "evicted", "step", "identity", "states", "busy", "error"]
"""Why a question got no ticket: nothing of it is held, or no longer; blocks are no multiple of the
step; another computation asks; recurrent states are not lent; too many at once; a fault."""


class TellPrefix(Message, frozen=True, tag="tell-prefix"):
    """A ticket for the longest beginning that is held, or why there is none."""

    question: Address
    ticket: bytes
    miss: MissReason | None = None


class AskStatus(Message, frozen=True, tag="ask-status"):
    """How are you? Needs no handshake."""


class TellStatus(Message, frozen=True, tag="tell-status"):
    """A JSON document; see docs/reference/wire.md."""

    document: bytes


AnyMessage = (
    Hello
    | Welcome
    | Refused
    | UnknownSession
    | Begin
    | Begun
    | Written
    | Staged
    | Fetched
    | Failed
    | End
    | Stopped
    | Renew
    | Alive
    | TellDigest
    | AskProbe
    | TellProbe
    | AskPrefix
    | TellPrefix
    | AskStatus
    | TellStatus
)
