"""Why a prompt's beginning is found in a store, and not more of it."""

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, Literal

from kvstow.blocks.prompt import Prompt
from kvstow.offload.journal import Journal, RecordedPrompt
from kvstow.plan.identity import Identity, shown

Reason = Literal[
    "found", "short", "differs", "salt", "adapter", "identity", "evicted", "never stored", "unknown"
]


@dataclass(frozen=True, slots=True, kw_only=True)
class WhyEnded:
    """Where reuse of a prompt ended, and why.

    Tokens `[0, found_tokens)` of `num_tokens` can be loaded. `token` is the first that differs
    from a stored prompt; where only digests of blocks are known it lies in
    `[token, token_before)`. `differences` name a field and both values, the stored one first,
    None where it is absent. `note` says what could not be compared.
    """

    num_tokens: int
    found_tokens: int
    reason: Reason
    text: str
    token: int | None = None
    token_before: int | None = None
    stored_token: int | None = None
    asked_token: int | None = None
    differences: tuple[tuple[str, str | None, str | None], ...] = ()
    stored_at: float | None = None
    note: str = ""

    def as_json(self) -> dict[str, Any]:
        names = ("field", "stored", "asked")
        differences = [dict(zip(names, each, strict=True)) for each in self.differences]
        return asdict(self) | {"differences": differences}

    def __str__(self) -> str:
        lines = (
            f"{self.found_tokens:,} of {self.num_tokens:,} tokens are found: {self.reason}",
            self.text,
            self.note,
        )
        return "\n".join(filter(None, lines))


Said = Callable[..., WhyEnded]
"""An answer about one prompt: `reason`, `text`, and whatever else is known."""


def compared_identity(stored: Identity, checkpoint: Identity) -> tuple[Identity, str]:
    """The identity to look for in a store on behalf of a checkpoint, and what was not compared.

    What a checkpoint does not say is taken to be as in the store: how an engine runs the model
    (`run.…`), and most of what a model in memory says of itself.
    """
    ours = dict(checkpoint.config)
    if stored.is_of_files:
        run = {name: value for name, value in stored.config if name.startswith("run.")}
        return replace(checkpoint, config=tuple(sorted((ours | run).items()))), ""
    both = {name: value for name, value in stored.config if name in ours}
    unlike = {name: ours[name] for name, value in both.items() if not _equal(value, ours[name])}
    what = "a model in memory filled this store"
    if not stored.is_verified:
        what = f"nobody looked at the weights of this store ({stored.unverified_because})"
    note = (
        f"{what}: its weights, code and tokenizer cannot be compared with files, and are taken to "
        f"be the same; {len(both)} fields of the configuration were compared"
    )
    return replace(stored, config=tuple(sorted((dict(stored.config) | unlike).items()))), note


def _equal(one: str, other: str) -> bool:
    """Whether two fields say the same: a library may have made 1e4 of 10000."""
    try:
        return one == other or json.loads(one) == json.loads(other)
    except ValueError:
        return False


def why_ended(
    journal: Journal | None, prompt: Prompt, identity: Identity, found_tokens: int, unit: int
) -> WhyEnded:
    """Say why only `found_tokens` of a prompt are found, by blocks of `unit` tokens."""
    said: Said = partial(WhyEnded, num_tokens=len(prompt), found_tokens=found_tokens)
    whole = len(prompt) // unit * unit
    if found_tokens and found_tokens >= whole:
        which = "" if found_tokens == len(prompt) else " in whole blocks"
        return said(reason="found", text=f"all {found_tokens} tokens{which} are stored")
    if not whole:
        text = f"{len(prompt)} tokens fill no block of {unit}, and only whole blocks are compared"
        return said(reason="short", text=text)
    alike = journal.alike(prompt) if journal is not None else []
    own = [each for each in alike if each.identity == identity.digest]
    others = [each for each in alike if each.identity != identity.digest]
    shared = own[0].shared_tokens if own else 0
    if others and others[0].shared_tokens > max(shared, found_tokens):
        return _another(said, identity, others[0])
    if shared > found_tokens:
        text = (
            f"{shared} of these tokens were stored {_ago(own[0].at)}; behind token "
            f"{found_tokens} rows are gone: evicted, pruned, dropped as damaged, or not yet written"
        )
        return said(reason="evicted", text=text, stored_at=own[0].at)
    if own and (shared or own[0].tokens is not None):
        return _differs(said, prompt, max(own, key=lambda one: _common(one, prompt)))
    if journal is None or not journal.path.exists():
        text = (
            f"nothing behind token {found_tokens} is stored, and there is no journal that says "
            "whether it ever was; `Store(journal_path=DIR)` keeps one, --journal DIR names one"
        )
        return said(reason="unknown", text=text)
    text = f"no stored prompt begins with the first {unit} tokens"
    return said(reason="never stored", text=text)


def _another(said: Said, identity: Identity, other: RecordedPrompt) -> WhyEnded:
    """The tokens were stored, under another adapter, salt or computation."""
    ours, stored = identity.fields, other.fields
    differences = tuple(
        (name, stored.get(name), ours.get(name))
        for name in stored | ours
        if stored.get(name) != ours.get(name)
    )
    names = {name for name, _, _ in differences}
    reason: Reason = "identity"
    if names == {"salt"}:
        reason = "salt"
    elif names <= {"adapter", "salt"}:
        reason = "adapter"
    words = "; ".join(
        f"{name} is {shown(there)} there, {shown(here)} here" for name, there, here in differences
    )
    text = f"{other.shared_tokens} of these tokens were stored {_ago(other.at)}, but {words}"
    return said(reason=reason, text=text, differences=differences, stored_at=other.at)


def _differs(said: Said, prompt: Prompt, own: RecordedPrompt) -> WhyEnded:
    """The nearest stored prompt has other tokens from somewhere on, or ends."""
    at = own.shared_tokens
    if own.tokens is not None:
        _, at = _common(own, prompt)
        if at < min(len(own.tokens), len(prompt)):
            stored, token = int(own.tokens[at]), int(prompt.tokens[at])
            return said(
                reason="differs",
                text=f"token {at} is {token}, and {stored} in the prompt stored {_ago(own.at)}",
                token=at,
                token_before=at + 1,
                stored_token=stored,
                asked_token=token,
                stored_at=own.at,
            )
    if at >= own.num_tokens:
        text = f"the prompt stored {_ago(own.at)} ends after {own.num_tokens} tokens in blocks"
        return said(reason="never stored", text=text, stored_at=own.at)
    return said(
        reason="differs",
        text=f"a token in [{at}, {at + own.step}) differs from the prompt stored {_ago(own.at)}",
        token=at,
        token_before=at + own.step,
        stored_at=own.at,
    )


def _common(recorded: RecordedPrompt, prompt: Prompt) -> tuple[int, int]:
    """How many tokens two prompts begin alike with: whole blocks, and to the token where that is
    known."""
    if recorded.tokens is None:
        return recorded.shared_tokens, recorded.shared_tokens
    count = min(len(recorded.tokens), len(prompt))
    unlike = recorded.tokens[:count] != prompt.tokens[:count]
    return recorded.shared_tokens, int(unlike.argmax()) if unlike.any() else count


def _ago(at: float) -> str:
    seconds = max(0.0, time.time() - at)
    for size, word in ((86400, "days"), (3600, "hours"), (60, "minutes")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {word} ago"
    return f"{seconds:.0f} seconds ago"
