"""Which prompts were stored, so that somebody can say later why one was not found.

    meta     16 random bytes of this journal, the secret
    prompts  when │ identity: its digest, and its fields by name │ tokens per block │ per block 8
             bytes of a keyed digest of all tokens up to its end │ the tokens, if the user wants

A digest of a block says whether another prompt has the same tokens so far, and nothing else
to whoever cannot guess a whole block. Tokens are kept only if the user wants them. The journal
is bounded, a prompt that goes on replaces its beginning, and no fault of it ever reaches a store.
"""

import json
import logging
import os
import secrets
import sqlite3
import stat
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Literal

import numpy as np

from kvstow.blocks.prompt import Prompt, Tokens
from kvstow.errors import StoreError
from kvstow.offload.keys import block_keys
from kvstow.plan.identity import Identity

log = logging.getLogger("kvstow.offload")

JournalKind = Literal["digests", "tokens", "off"]
"""What is noted of a prompt."""

FILE = "prompts.db"
MOST_PROMPTS = 10_000
MOST_CANDIDATES = 512
DIGEST_BYTES = 8

_NOBODY = Identity.unverified("only tokens count")
_SCHEMA = """
CREATE TABLE IF NOT EXISTS meta (secret BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS prompts (
    id INTEGER PRIMARY KEY, at REAL NOT NULL, identity BLOB NOT NULL, fields TEXT NOT NULL,
    step INTEGER NOT NULL, first BLOB NOT NULL, last BLOB NOT NULL, digests BLOB NOT NULL,
    tokens BLOB);
CREATE INDEX IF NOT EXISTS by_first ON prompts (first, identity);
"""


@dataclass(frozen=True, slots=True, eq=False)
class RecordedPrompt:
    """A prompt that was stored, and how many of its tokens another one shares, as far as known.

    `shared_tokens` counts whole blocks; `num_tokens` what was recorded. `tokens` are there only
    where they were asked for.
    """

    at: float
    identity: bytes
    fields: dict[str, str]
    step: int
    num_tokens: int
    shared_tokens: int
    tokens: Tokens | None


class Journal:
    """The journal in a directory; made when something is first noted.

    `tokens`: keep the tokens too. Several processes may use one journal.
    """

    def __init__(
        self, directory: Path, *, tokens: bool = False, most_prompts: int = MOST_PROMPTS
    ) -> None:
        self.path = directory / FILE
        self._keeps_tokens = tokens
        self._most_prompts = most_prompts
        self._lock = Lock()
        self._connection: sqlite3.Connection | None = None
        self._secret = b""
        self._has_failed = False

    # ── writing ───────────────────────────────────────────────────────────────────

    def note(self, prompt: Prompt, identity: Identity, step: int) -> None:
        """A prompt's blocks of `step` tokens are stored. Errors are logged, once."""
        if len(prompt) < step:
            return
        try:
            with self._lock:
                self._write(self._connect(), prompt, identity, step)
        except (sqlite3.Error, OSError) as error:
            if not self._has_failed:
                log.warning("%s: stored prompts are not noted: %s", self.path, error)
            self._has_failed = True

    def _write(
        self, connection: sqlite3.Connection, prompt: Prompt, identity: Identity, step: int
    ) -> None:
        """Enter a prompt in the place of those that are beginnings of it; the oldest go."""
        digests = self._digests(prompt, step)
        tokens = prompt.tokens.astype("<i4").tobytes() if self._keeps_tokens else None
        row = (time.time(), identity.digest, json.dumps(identity.fields), step, digests[0])
        row += (digests[-1], b"".join(digests), tokens)
        with connection:
            others = connection.execute(
                "SELECT id, last FROM prompts WHERE first = ? AND identity = ?",
                (digests[0], identity.digest),
            ).fetchall()
            passed = set(digests)
            connection.executemany(
                "DELETE FROM prompts WHERE id = ?",
                [(number,) for number, last in others if last in passed],
            )
            connection.execute(
                "INSERT INTO prompts (at, identity, fields, step, first, last, digests, tokens) "
                "VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                row,
            )
            connection.execute(
                "DELETE FROM prompts WHERE id <= (SELECT MAX(id) FROM prompts) - ?",
                (self._most_prompts,),
            )

    def _connect(self) -> sqlite3.Connection:
        if self._connection is None:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            connection = _open(self.path)
            self._secret = _secret(connection)
            self._connection = connection  # last: without the secret nothing may be noted
        return self._connection

    def _digests(self, prompt: Prompt, step: int) -> list[bytes]:
        """Per whole block, what its tokens and other content, and all before, come to."""
        plain = Prompt.of(prompt.tokens, salt=self._secret, extra=prompt.extra)
        return [key[:DIGEST_BYTES] for key in block_keys(_NOBODY, plain, step)]

    # ── reading ───────────────────────────────────────────────────────────────────

    def alike(self, prompt: Prompt) -> list[RecordedPrompt]:
        """Recorded prompts that begin like this one, the longest common beginning first.

        Empty where there is no journal; StoreError where it cannot be read.
        """
        if not self.path.exists():
            return []
        try:
            with self._lock:
                return self._read(self._connect(), prompt)
        except (sqlite3.Error, ValueError) as error:
            raise StoreError(f"{self.path}: cannot be read: {error}") from None

    def _read(self, connection: sqlite3.Connection, prompt: Prompt) -> list[RecordedPrompt]:
        alike: list[RecordedPrompt] = []
        for (step,) in connection.execute("SELECT DISTINCT step FROM prompts").fetchall():
            digests = self._digests(prompt, step)
            rows = connection.execute(
                "SELECT at, identity, fields, digests, tokens FROM prompts "
                "WHERE step = ? AND (first = ? OR tokens IS NOT NULL) ORDER BY id DESC LIMIT ?",
                (step, digests[0] if digests else b"", MOST_CANDIDATES),
            )
            for at, identity, fields, recorded, tokens in rows:
                alike.append(
                    RecordedPrompt(
                        at=at,
                        identity=identity,
                        fields=json.loads(fields),
                        step=step,
                        num_tokens=len(recorded) // DIGEST_BYTES * step,
                        shared_tokens=_num_shared(digests, recorded) * step,
                        tokens=None if tokens is None else np.frombuffer(tokens, "<i4"),
                    )
                )
        return sorted(alike, key=lambda each: -each.shared_tokens)

    def close(self) -> None:
        """Let go of the file."""
        with self._lock:
            if self._connection is not None:
                self._connection.close()
            self._connection = None


def _open(path: Path) -> sqlite3.Connection:
    with suppress(FileExistsError):  # SQLite gives its log the mode that it finds
        os.mknod(path, stat.S_IFREG | 0o600)
    connection = sqlite3.connect(path, timeout=1.0, check_same_thread=False)
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = OFF")
    connection.executescript(_SCHEMA)
    path.chmod(0o600)
    return connection


def _secret(connection: sqlite3.Connection) -> bytes:
    with connection:
        connection.execute("BEGIN IMMEDIATE")
        row = connection.execute("SELECT secret FROM meta").fetchone()
        if row is None:
            row = (secrets.token_bytes(16),)
            connection.execute("INSERT INTO meta VALUES (?)", row)
    return row[0]


def _num_shared(digests: Sequence[bytes], recorded: bytes) -> int:
    """How many blocks are alike."""
    for k, digest in enumerate(digests):
        if recorded[k * DIGEST_BYTES : (k + 1) * DIGEST_BYTES] != digest:
            return k
    return len(digests)
