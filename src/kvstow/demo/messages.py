"""What the demo's processes say to each other: one JSON document per line."""

import msgspec

from kvstow.plan.layout import Order


class DemoMessage(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """Tagged with its own name."""


# ── to a child ────────────────────────────────────────────────────────────────────────


class Load(DemoMessage, frozen=True, kw_only=True):
    """Get the model ready. Ranks of one role meet at `meeting`, a loopback port."""

    model: str
    role: str
    rank: int = 0
    ranks: int = 1
    meeting: int = 0
    block_tokens: int = 16
    order: Order = "BLHNC"
    memory: int = 256 << 20
    store: str = ""


class Encode(DemoMessage, frozen=True, kw_only=True):
    """Turn texts into tokens."""

    texts: tuple[str, ...]


class Prefill(DemoMessage, frozen=True, kw_only=True):
    """Compute a prompt and offer its rows, to so many."""

    prompt: int
    tokens: tuple[int, ...]
    readers: int = 1


class Finish(DemoMessage, frozen=True, kw_only=True):
    """Let go of a prompt's rows."""

    prompt: int


class Continue(DemoMessage, frozen=True, kw_only=True):
    """Pull a prompt's rows and go on from there; compute them where that fails."""

    prompt: int
    tokens: tuple[int, ...]
    first: int
    tickets: tuple[str, ...]
    limit: int


class Reload(DemoMessage, frozen=True, kw_only=True):
    """Take a prompt's rows from the store and go on from there."""

    prompt: int
    tokens: tuple[int, ...]
    first: int
    limit: int


class Judge(DemoMessage, frozen=True, kw_only=True):
    """Generate with the model's own cache."""

    prompt: int
    tokens: tuple[int, ...]
    limit: int


# ── from a child ──────────────────────────────────────────────────────────────────────


class Progress(DemoMessage, frozen=True, kw_only=True):
    """What the child is doing."""

    what: str


class GroupFacts(DemoMessage, frozen=True, kw_only=True):
    """One group of the plan."""

    name: str
    layers: int
    block_tokens: int
    row_bytes: int
    rows_per_slab: int
    tensors: int


class PlanFacts(DemoMessage, frozen=True, kw_only=True):
    """The layout that a child works with."""

    order: str
    groups: tuple[GroupFacts, ...]
    slab_bytes: int
    arena_bytes: int


class Ready(DemoMessage, frozen=True, kw_only=True):
    """The model is there; `plan` is missing where no rows are kept."""

    model: str
    plan: PlanFacts | None = None
    how: str = ""


class Encoded(DemoMessage, frozen=True, kw_only=True):
    """Texts as tokens, and the token that ends a text."""

    tokens: tuple[tuple[int, ...], ...]


class Prefilled(DemoMessage, frozen=True, kw_only=True):
    """A prompt was computed: its ticket, and the token that follows it."""

    prompt: int
    ticket: str
    first: int
    text: str


class Pulled(DemoMessage, frozen=True, kw_only=True):
    """Rows arrived and were accepted."""

    prompt: int
    nbytes: int
    descriptors: int
    regions: int
    seconds: float
    rows: int
    per_layer: int
    fence: str
    digest: str
    direction: str = ""


class Lost(DemoMessage, frozen=True, kw_only=True):
    """Rows did not arrive, or were not accepted; the prompt is computed here instead."""

    prompt: int
    why: str
    seconds: float


class Stored(DemoMessage, frozen=True, kw_only=True):
    """Rows were written to the store."""

    prompt: int


class Token(DemoMessage, frozen=True, kw_only=True):
    """One more token, and what it adds to the text."""

    prompt: int
    token: int
    text: str


class Done(DemoMessage, frozen=True, kw_only=True):
    """All tokens of an answer; `to_first` from the rows (or nothing) to the next token."""

    prompt: int
    tokens: tuple[int, ...]
    to_first: float


class ChildFailed(DemoMessage, frozen=True, kw_only=True):
    """The child gives up."""

    error: str
    trace: str = ""


ToChild = Load | Encode | Prefill | Finish | Continue | Reload | Judge
FromChild = (
    Progress | Ready | Encoded | Prefilled | Pulled | Lost | Stored | Token | Done | ChildFailed
)

_encoder = msgspec.json.Encoder()
_to_child = msgspec.json.Decoder(ToChild)
_from_child = msgspec.json.Decoder(FromChild)


def line(message: ToChild | FromChild) -> bytes:
    """The message as one line."""
    return _encoder.encode(message) + b"\n"


def to_child(data: bytes) -> ToChild:
    """What the parent said."""
    return _to_child.decode(data)


def from_child(data: bytes) -> FromChild:
    """What a child said."""
    return _from_child.decode(data)
