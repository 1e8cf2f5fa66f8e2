"""Which prompts were stored, so that somebody can say later why one was not found.

    prompts.jsonl   a line for each prompt: when │ identity: its digest, and its fields by name │
                    tokens per block │ a secret, 16 random bytes that the writer has made │ per
                    block 8 bytes of a digest, keyed by the secret, of all tokens up to its end │
                    the tokens, if the user wants
    prompts.old     the lines before, when there were too many

A digest of a block says whether another prompt has the same tokens so far, and nothing else
to whoever cannot guess a whole block. Tokens are kept only if the user wants them. Lines are
appended whole, by any number of processes; each can be read without the others, and one that is
torn is passed over. No fault of a journal ever reaches a store.
"""

import json
import logging
import os
import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any, Literal

import numpy as np

from kvstow.blocks.prompt import Prompt, Tokens
from kvstow.errors import StoreError
from kvstow.offload.disk.files import make_directory, open_own
from kvstow.offload.keys import block_keys
from kvstow.plan.identity import Identity

log = logging.getLogger("kvstow.offload")

JournalKind = Literal["digests", "tokens", "off"]
"""What is noted of a prompt."""

FILE, OLD_FILE = "prompts.jsonl", "prompts.old"
MOST_BYTES = 32 << 20
"""A file that is longer becomes the old one."""

DIGITS = 16
"""Of a digest, in hexadecimal."""

_NOBODY = Identity.unverified("only tokens count")


@dataclass(frozen=True, slots=True, eq=False)
class RecordedPrompt:
    """A prompt that was stored, and how many of its tokens another one shares, as far as known.

    `shared_tokens` counts whole blocks; `num_tokens` what was recorded. `tokens` are there only
    where they were kept.
    """

    at: float
    identity: bytes
    fields: dict[str, str]
    step: int
    num_tokens: int
    shared_tokens: int
    tokens: Tokens | None


class Journal:
    """The journal in a directory; made when something is first noted. `tokens`: keep them too."""

    def __init__(self, directory: Path, *, tokens: bool = False) -> None:
        self.path = directory / FILE
        self._old = directory / OLD_FILE
        self._keeps_tokens = tokens
        self._secret = secrets.token_bytes(16)
        self._has_failed = False

    def note(self, prompt: Prompt, identity: Identity, step: int) -> None:
        """A prompt's blocks of `step` tokens are stored. Errors are logged, once."""
        if len(prompt) < step:
            return
        try:
            self._note(prompt, identity, step)
        except (StoreError, OSError) as error:
            if not self._has_failed:
                log.warning("%s: stored prompts are not recorded: %s", self.path, error)
            self._has_failed = True

    def _note(self, prompt: Prompt, identity: Identity, step: int) -> None:
        line = {
            "at": time.time(),
            "identity": identity.digest.hex(),
            "fields": identity.fields,
            "step": step,
            "secret": self._secret.hex(),
            "digests": _digests(self._secret, prompt, step),
            "tokens": prompt.tokens.tolist() if self._keeps_tokens else None,
        }
        make_directory(self.path.parent)
        fd = open_own(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        try:
            os.write(fd, b"\n" + json.dumps(line).encode() + b"\n")  # the one before may be torn
            is_full = os.fstat(fd).st_size > MOST_BYTES
        finally:
            os.close(fd)
        if is_full:
            with suppress(FileNotFoundError):  # another process was faster
                os.replace(self.path, self._old)

    def alike(self, prompt: Prompt) -> list[RecordedPrompt]:
        """Recorded prompts that begin like this one, and all whose tokens are known; the longest
        common beginning first.

        Empty where there is no journal; StoreError where it cannot be read.
        """
        try:
            records = list(self._records(prompt))
        except OSError as error:
            raise StoreError(f"{self.path}: cannot be read: {error}") from None
        return sorted(records, key=lambda each: (-each.shared_tokens, -each.num_tokens, -each.at))

    def _records(self, prompt: Prompt) -> Iterator[RecordedPrompt]:
        own: dict[tuple[str, int], Sequence[str]] = {}
        """The prompt's digests, as they were made in a line."""
        for path in (self.path, self._old):
            with suppress(FileNotFoundError), os.fdopen(open_own(path, os.O_RDONLY), "rb") as file:
                for line in file:
                    with suppress(ValueError, TypeError, KeyError):  # it is torn
                        record = json.loads(line)
                        how = record["secret"], record["step"]
                        if how not in own:
                            own[how] = _digests(bytes.fromhex(how[0]), prompt, how[1])
                        pairs = zip(own[how], record["digests"], strict=False)
                        shared = sum(takewhile(bool, (ours == other for ours, other in pairs)))
                        if shared or record["tokens"] is not None:
                            yield _recorded(record, shared)


def _recorded(record: dict[str, Any], shared: int) -> RecordedPrompt:
    tokens = record["tokens"]
    return RecordedPrompt(
        at=record["at"],
        identity=bytes.fromhex(record["identity"]),
        fields=record["fields"],
        step=record["step"],
        num_tokens=len(record["digests"]) * record["step"],
        shared_tokens=shared * record["step"],
        tokens=None if tokens is None else np.array(tokens, np.int32),
    )


def _digests(secret: bytes, prompt: Prompt, step: int) -> Sequence[str]:
    """Per whole block, what its tokens and other content, and all before, come to."""
    plain = Prompt.of(prompt.tokens, salt=secret, extra=prompt.extra)
    return [key.hex()[:DIGITS] for key in block_keys(_NOBODY, plain, step)]
