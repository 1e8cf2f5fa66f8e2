"""Traces: requests by time of arrival, as JSON lines.

    {"arrival": 0.5, "prompt_tokens": 700, "output_tokens": 250}
    {"arrival": 0.9, "prompt_tokens": 900, "output_tokens": 20, "prefixes": [["system", 512]]}

`prefixes` are the parts that the prompt begins with, by name and number of tokens: two
prompts that begin with the same names and numbers begin with the same tokens. What
follows them is the request's own. `output`, if given, names the answer, so that a later
prompt can repeat it.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

from kvstow.errors import TraceError


class Request(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One request: seconds, tokens in, tokens out, and how its prompt begins."""

    arrival: float
    prompt_tokens: int
    output_tokens: int
    prefixes: tuple[tuple[str, int], ...] = ()
    output: str = ""

    def __post_init__(self) -> None:
        if not 0 <= self.arrival < float("inf"):
            raise ValueError(f"arrival is {self.arrival}, not a time from 0 on")
        if self.prompt_tokens < 1 or self.output_tokens < 1:
            raise ValueError(
                f"{self.prompt_tokens} prompt and {self.output_tokens} output tokens: "
                "at least one of each"
            )
        if any(tokens < 1 for _, tokens in self.prefixes):
            raise ValueError(f"prefixes {self.prefixes} must have tokens")
        if self.shared_tokens > self.prompt_tokens:
            raise ValueError(
                f"prefixes have {self.shared_tokens} tokens, the prompt {self.prompt_tokens}"
            )

    @property
    def shared_tokens(self) -> int:
        return sum(tokens for _, tokens in self.prefixes)

    @property
    def num_tokens(self) -> int:
        return self.prompt_tokens + self.output_tokens


def read_trace(path: Path) -> list[Request]:
    """The requests of a file of JSON lines; empty lines are skipped."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise TraceError(f"{path}: cannot be read: {error.strerror}") from error
    requests = list(_decoded(path, lines))
    if not requests:
        raise TraceError(f"{path}: no requests in it")
    return requests


def _decoded(path: Path, lines: list[bytes]) -> Iterator[Request]:
    decoder = msgspec.json.Decoder(Request)
    before = 0.0
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            request = decoder.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise TraceError(
                f"{path}:{number}: {error}\n\nhint: one JSON object per line with arrival, "
                "prompt_tokens, output_tokens and, if you like, prefixes"
            ) from error
        if request.arrival < before:
            raise TraceError(
                f"{path}:{number}: arrives at {request.arrival} s, the one before at {before} s"
                "\n\nhint: sort the lines by arrival"
            )
        before = request.arrival
        yield request


def write_trace(path: Path, requests: Iterable[Request]) -> None:
    """The requests as JSON lines."""
    encoder = msgspec.json.Encoder()
    path.write_bytes(b"".join(encoder.encode(request) + b"\n" for request in requests))
