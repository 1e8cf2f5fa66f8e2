"""Which prompts were stored, so that somebody can say later why one was not found.

    prompts.jsonl   {"secret": 16 random bytes}, then a line for each prompt: when │ identity: its
                    digest, and its fields by name │ tokens per block │ per block 8 bytes of a
                    keyed digest of all tokens up to its end │ the tokens, if the user wants
    prompts.old     the lines before, when there were too many

A digest of a block says whether another prompt has the same tokens so far, and nothing else
to whoever cannot guess a whole block. Tokens are kept only if the user wants them. Lines are
appended whole, by any number of processes. No fault of a journal ever reaches a store.
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

SECRET_BYTES = 1024
"""The line with the secret is shorter."""

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
        secret = self._secret()
        if secret is None or not self.path.exists():
            own = secret or secrets.token_bytes(16)
            self._begin(own)
            secret = self._secret() or own  # of several that begin at once, the first one's counts
        line = {
            "at": time.time(),
            "identity": identity.digest.hex(),
            "fields": identity.fields,
            "step": step,
            "digests": _digests(secret, prompt, step),
            "tokens": prompt.tokens.tolist() if self._keeps_tokens else None,
        }
        if self._append(line) > MOST_BYTES:
            with suppress(FileNotFoundError):  # another process was faster
                os.replace(self.path, self._old)
            self._begin(secret)

    def _begin(self, secret: bytes) -> None:
        """Say what digests are keyed by, in a file that is made where there is none. The line
        before may be torn."""
        make_directory(self.path.parent)
        self._append({"secret": secret.hex()}, before=b"\n")

    def _append(self, line: dict[str, Any], before: bytes = b"") -> int:
        """Append a line, at once; how long the file is then."""
        fd = open_own(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        try:
            os.write(fd, before + json.dumps(line).encode() + b"\n")
            return os.fstat(fd).st_size
        finally:
            os.close(fd)

    def _secret(self) -> bytes | None:
        """What the journal's digests are keyed by; None where there is no journal, or its first
        line is torn: whoever made it was killed."""
        for path in (self.path, self._old):
            with suppress(FileNotFoundError), os.fdopen(open_own(path, os.O_RDONLY), "rb") as file:
                lines = [file.readline(SECRET_BYTES) for _ in range(3)]
                for line in lines:
                    with suppress(ValueError, TypeError, KeyError):
                        return bytes.fromhex(json.loads(line)["secret"])
                if len(lines[0]) >= SECRET_BYTES or lines[1]:
                    raise StoreError(f"{path} is no journal of stored prompts")
        return None

    def alike(self, prompt: Prompt) -> list[RecordedPrompt]:
        """Recorded prompts that begin like this one, and all whose tokens are known; the longest
        common beginning first.

        Empty where there is no journal; StoreError where it cannot be read.
        """
        try:
            secret = self._secret()
            records = [] if secret is None else list(self._records(secret, prompt))
        except OSError as error:
            raise StoreError(f"{self.path}: cannot be read: {error}") from None
        return sorted(records, key=lambda each: (-each.shared_tokens, -each.num_tokens, -each.at))

    def _records(self, secret: bytes, prompt: Prompt) -> Iterator[RecordedPrompt]:
        by_step: dict[int, Sequence[str]] = {}
        for path in (self.path, self._old):
            with suppress(FileNotFoundError), os.fdopen(open_own(path, os.O_RDONLY), "rb") as file:
                for line in file:
                    with suppress(ValueError, TypeError, KeyError):  # the secret, or a torn line
                        record = json.loads(line)
                        step = record["step"]
                        if step not in by_step:
                            by_step[step] = _digests(secret, prompt, step)
                        pairs = zip(by_step[step], record["digests"], strict=False)
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
