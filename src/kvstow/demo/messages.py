"""What the demo's processes say to each other: a JSON document at a time, about one prompt."""

import msgspec

from kvstow.plan.layout import Order


class DemoMessage(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """Tagged with its own name."""


# ── to a child ────────────────────────────────────────────────────────────────────────


class RowOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a child arranges its rows."""

    block_tokens: int
    order: Order
    memory: int


class Load(DemoMessage, frozen=True, kw_only=True):
    """Get the model ready, with `rows` or with transformers' own cache, and say these texts in
    tokens. Rows of prompts are kept in a store in the directory `store`, if it is named."""

    model: str
    texts: tuple[str, ...] = ()
    rows: RowOptions | None = None
    store: str = ""


class Prefill(DemoMessage, frozen=True, kw_only=True):
    """Compute a prompt and offer its rows."""

    tokens: tuple[int, ...]


class Finish(DemoMessage, frozen=True, kw_only=True):
    """Let go of the prompt's rows; they are on disk afterwards, where there is a store."""


class Continue(DemoMessage, frozen=True, kw_only=True):
    """Pull a prompt's rows and go on from there; compute them where that fails."""

    tokens: tuple[int, ...]
    first: int
    ticket: str
    limit: int


class Answer(DemoMessage, frozen=True, kw_only=True):
    """Generate from the beginning, or from what the store has of the prompt."""

    tokens: tuple[int, ...]
    limit: int


# ── from a child ──────────────────────────────────────────────────────────────────────


class Progress(DemoMessage, frozen=True, kw_only=True):
    """What the child is doing."""

    what: str


class Ready(DemoMessage, frozen=True, kw_only=True):
    """The model is there, as are the texts' tokens, and the rows' layout as a manifest."""

    model: str
    prompts: tuple[tuple[int, ...], ...]
    manifest: str


class Prefilled(DemoMessage, frozen=True, kw_only=True):
    """A prompt was computed: its ticket, and the token that follows it."""

    ticket: str
    first: int
    text: str


class Finished(DemoMessage, frozen=True, kw_only=True):
    """The prompt's rows are let go of."""


class Pulled(DemoMessage, frozen=True, kw_only=True):
    """Rows arrived and were accepted."""

    nbytes: int
    descriptors: int
    regions: int
    seconds: float
    rows: int
    per_layer: int
    fence: str
    digest: str
    direction: str


class Lost(DemoMessage, frozen=True, kw_only=True):
    """Rows did not arrive, or were not accepted; the prompt is computed here instead."""

    why: str
    seconds: float


class Token(DemoMessage, frozen=True, kw_only=True):
    """What one more token adds to the text."""

    text: str


class Done(DemoMessage, frozen=True, kw_only=True):
    """All tokens of an answer; `to_first` from the rows (or nothing) to the next token, with
    `found` tokens of the prompt from the store."""

    tokens: tuple[int, ...]
    to_first: float
    found: int = 0


class ChildFailed(DemoMessage, frozen=True, kw_only=True):
    """The child gives up."""

    error: str


ToChild = Load | Prefill | Finish | Continue | Answer
Reply = Ready | Prefilled | Finished | Done
FromChild = Reply | Progress | Pulled | Lost | Token | ChildFailed

encode = msgspec.json.Encoder().encode
to_child = msgspec.json.Decoder(ToChild).decode
from_child = msgspec.json.Decoder(FromChild).decode
