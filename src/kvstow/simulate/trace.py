"""Traces: requests by time of arrival, as JSON lines.

    {"arrival": 0.5, "prompt_tokens": 700, "output_tokens": 250}
    {"arrival": 0.9, "prompt_tokens": 900, "output_tokens": 20, "prefixes": [["system", 512]]}

`prefixes` are the parts that the prompt begins with, by name and number of tokens: two
prompts that begin with the same names and numbers begin with the same tokens. What
follows them is the request's own. `output`, if given, names the answer, so that a later
prompt can repeat it.

Two public formats are read as well, and known by their first line:

    Mooncake   {"timestamp": 500, "input_length": 700, "output_length": 250, "hash_ids": [7, 8]}
               milliseconds; one id for every 512 tokens of the prompt, equal ids for equal tokens
    Azure      TIMESTAMP,ContextTokens,GeneratedTokens
               2023-11-16 18:15:46.68,700,250
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import UTC, datetime
from hashlib import blake2b
from itertools import islice
from pathlib import Path
from typing import Literal, get_args

import msgspec
import numpy as np

from kvstow.blocks.prompt import Prompt, Tokens
from kvstow.errors import TraceError
from kvstow.plan.view import MAX_TOKENS

MAX_SECONDS = 1e12
MAX_REQUESTS = 10_000_000
"""Of a synthetic trace, which is held in memory."""
MAX_LINE_BYTES = 16 << 20


class TraceRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One request: seconds, tokens in, tokens out, and how its prompt begins."""

    arrival: float
    prompt_tokens: int
    output_tokens: int
    prefixes: tuple[tuple[str, int], ...] = ()
    output: str = ""

    def __post_init__(self) -> None:
        if not 0 <= self.arrival <= MAX_SECONDS:
            raise ValueError(f"arrival is {self.arrival}, not a time from 0 to {MAX_SECONDS:g} s")
        if self.prompt_tokens < 1 or self.output_tokens < 1:
            raise ValueError(
                f"{self.prompt_tokens} prompt and {self.output_tokens} output tokens: "
                "at least one of each"
            )
        if self.num_tokens > MAX_TOKENS:
            raise ValueError(f"{self.num_tokens} tokens, at most {MAX_TOKENS}")
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


MOONCAKE_TOKENS = 512
"""Tokens of a prompt that one of Mooncake's hash ids stands for."""

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
AZURE_HEADER = b"TIMESTAMP,ContextTokens,GeneratedTokens"


def read_trace(path: Path) -> list[TraceRequest]:
    """The requests of a file, by arrival: JSON lines of our own or of Mooncake, or Azure's table.

    Empty lines are skipped. Of the two public formats, the first request arrives at 0.
    """
    lines = _lines(path)
    first = next((line for line in lines if line.strip()), b"")
    decode = msgspec.json.Decoder(TraceRequest).decode
    if first.removeprefix(b"\xef\xbb\xbf").strip() == AZURE_HEADER:
        decode = _azure
    elif b'"input_length"' in first:
        decode = _mooncake
    requests = _decoded(path, lines, decode)
    if not requests:
        raise TraceError(f"{path}: no requests in it")
    if decode not in (_azure, _mooncake):
        return requests
    start = requests[0].arrival
    return [msgspec.structs.replace(each, arrival=each.arrival - start) for each in requests]


def _lines(path: Path) -> list[bytes]:
    """The lines of a file; one without line ends, a device say, is not read to its end."""
    lines: list[bytes] = []
    try:
        with path.open("rb") as file:
            while line := file.readline(MAX_LINE_BYTES + 1):
                if len(line) > MAX_LINE_BYTES:
                    raise TraceError(
                        f"{path}:{len(lines) + 1}: a line of more than {MAX_LINE_BYTES} bytes\n\n"
                        "hint: a trace has one request per line"
                    )
                lines.append(line)
    except OSError as error:
        raise TraceError(f"{path}: cannot be read: {error.strerror}") from error
    return lines


def _decoded(
    path: Path, lines: list[bytes], decode: Callable[[bytes], TraceRequest]
) -> list[TraceRequest]:
    """The requests of all lines that have one, by arrival."""
    requests: list[TraceRequest] = []
    for number, line in enumerate(lines, 1):
        if not line.strip() or AZURE_HEADER in line:
            continue
        try:
            requests.append(decode(line))
        except (msgspec.DecodeError, ValueError) as error:
            raise TraceError(
                f"{path}:{number}: {error}\n\nhint: one JSON object per line with arrival, "
                "prompt_tokens, output_tokens and optionally prefixes; or Mooncake's lines; or "
                "Azure's table"
            ) from error
    return sorted(requests, key=lambda request: request.arrival)


class MooncakeRequest(msgspec.Struct, frozen=True):
    """A line of Mooncake's traces; other keys are ignored."""

    timestamp: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...] = ()


def _mooncake(line: bytes) -> TraceRequest:
    request = msgspec.json.decode(line, type=MooncakeRequest)
    starts = range(0, request.input_length, MOONCAKE_TOKENS)
    prefixes = [
        (f"mooncake-{each}", min(MOONCAKE_TOKENS, request.input_length - start))
        for each, start in zip(request.hash_ids, starts, strict=False)
    ]
    return TraceRequest(
        arrival=request.timestamp / 1000,
        prompt_tokens=max(1, request.input_length),
        output_tokens=max(1, request.output_length),
        prefixes=tuple(prefixes),
    )


def _azure(line: bytes) -> TraceRequest:
    cells = line.decode().strip().split(",")
    if len(cells) != 3:
        raise ValueError(f"{len(cells)} cells, not a time and two numbers of tokens")
    time = datetime.fromisoformat(cells[0])
    seconds = (time.replace(tzinfo=time.tzinfo or UTC) - EPOCH).total_seconds()
    prompt, output = max(1, int(cells[1])), max(1, int(cells[2]))
    return TraceRequest(arrival=seconds, prompt_tokens=prompt, output_tokens=output)


def write_trace(path: Path, requests: Iterable[TraceRequest]) -> None:
    """The requests as JSON lines."""
    encoder = msgspec.json.Encoder()
    path.write_bytes(b"".join(encoder.encode(request) + b"\n" for request in requests))


# ── synthetic traces ────────────────────────────────────────────────────────────────────

Mix = Literal["chat", "document", "agent", "single"]
MIXES: tuple[Mix, ...] = get_args(Mix)
Arrivals = Iterator[float]


MAX_TURNS = 24
PAUSE_SECONDS = 20
"""From one turn of a conversation to the next, on average."""


def synthetic(mix: str, *, num_requests: int, rate: float, seed: int) -> list[TraceRequest]:
    """`num_requests` requests of a mix, arriving at `rate` per second on average; all at
    once where the rate is infinite.

    chat        conversations of about 4 turns on one of 8 system prompts of about 800 tokens
    agent       tasks of about 12 turns on one of 4 tool descriptions of about 3,000 tokens
    document    long prompts, short answers; one in three asks again about a recent document
    single      prompts around 700 tokens, answers around 250; nothing shared
    """
    if not 1 <= num_requests <= MAX_REQUESTS or not rate > 0:
        raise TraceError(
            f"{num_requests} requests at {rate} per second make no trace\n\n"
            f"hint: 1 to {MAX_REQUESTS} requests, at more than 0 per second"
        )
    rng = np.random.default_rng(seed)
    arrivals = _arrivals(rng, rate)
    num_open = 64 if rate == float("inf") else max(8, round(PAUSE_SECONDS * rate))
    match mix:
        case "chat":
            systems = [(f"system-{i}", _length(rng, 800, 0.5, 4_000)) for i in range(8)]
            requests = _conversations(rng, arrivals, systems, num_open, (120, 250), num_turns=4)
        case "agent":
            tools = [(f"tools-{i}", _length(rng, 3_000, 0.4, 8_000)) for i in range(4)]
            requests = _conversations(rng, arrivals, tools, num_open, (300, 120), num_turns=12)
        case "document":
            requests = _documents(rng, arrivals)
        case "single":
            requests = _single(rng, arrivals)
        case _:
            raise TraceError(f"no mix {mix!r}; there are {', '.join(MIXES)}")
    return list(islice(requests, num_requests))


def _arrivals(rng: np.random.Generator, rate: float) -> Arrivals:
    now = 0.0
    while True:
        yield now
        now += float(rng.exponential(1 / rate)) if rate < float("inf") else 0.0


def _length(rng: np.random.Generator, median: float, spread: float, most: int) -> int:
    length = median * float(np.exp(spread * rng.standard_normal()))
    return max(1, min(most, int(length)))


def _single(rng: np.random.Generator, arrivals: Arrivals) -> Iterator[TraceRequest]:
    """Prompts around 700 tokens, answers around 250; nothing shared."""
    for arrival in arrivals:
        yield TraceRequest(
            arrival=arrival,
            prompt_tokens=_length(rng, 700, 0.8, 16_384),
            output_tokens=_length(rng, 250, 0.6, 4_096),
        )


def _documents(rng: np.random.Generator, arrivals: Arrivals) -> Iterator[TraceRequest]:
    """Long prompts, short answers; one in three asks again about a recent document."""
    recent: list[tuple[str, int]] = []
    for number, arrival in enumerate(arrivals):
        if recent and rng.random() < 1 / 3:
            document = recent[int(rng.integers(len(recent)))]
        else:
            document = (f"document-{number}", _length(rng, 16_000, 0.7, 120_000))
            recent = [*recent[-15:], document]
        yield TraceRequest(
            arrival=arrival,
            prompt_tokens=document[1] + _length(rng, 60, 0.6, 1_000),
            output_tokens=_length(rng, 200, 0.6, 2_000),
            prefixes=(document,),
        )


def _conversations(
    rng: np.random.Generator,
    arrivals: Arrivals,
    beginnings: Sequence[tuple[str, int]],
    num_open: int,
    medians: tuple[int, int],
    *,
    num_turns: int,
) -> Iterator[TraceRequest]:
    """Each request is the next turn of one of `num_open` conversations, and repeats all before it.
    After a turn, one conversation in `num_turns` is over and another begins in its place.
    `medians` are the tokens of a question and of an answer."""
    histories: dict[int, tuple[tuple[str, int], ...]] = {}
    for number, arrival in enumerate(arrivals):
        which = int(rng.integers(num_open))
        first = beginnings[int(rng.integers(len(beginnings)))]
        history = histories.get(which, (first,))
        question = (f"turn-{number}", _length(rng, medians[0], 0.8, 4_000))
        answer = (f"answer-{number}", _length(rng, medians[1], 0.6, 4_000))
        yield TraceRequest(
            arrival=arrival,
            prompt_tokens=sum(tokens for _, tokens in (*history, question)),
            output_tokens=answer[1],
            prefixes=(*history, question),
            output=answer[0],
        )
        histories[which] = (*history, question, answer)
        if rng.random() < 1 / num_turns or len(history) > 2 * MAX_TURNS:
            del histories[which]


# ── tokens ──────────────────────────────────────────────────────────────────────────────

VOCABULARY = 100_000


def prompt_of(number: int, request: TraceRequest, num_tokens: int) -> Prompt:
    """The first `num_tokens` tokens of request `number`, outputs included where it is longer
    than its prompt."""
    own = request.prompt_tokens - request.shared_tokens
    parts = [_part(*each) for each in (*request.prefixes, (f"own {number}", own))]
    return Prompt.of(np.concatenate([*parts, output_of(number, request)])[:num_tokens])


def output_of(number: int, request: TraceRequest) -> Tokens:
    """The tokens that the request answers with."""
    return _part(request.output or f"output {number}", request.output_tokens)


def _part(name: str, num_tokens: int) -> Tokens:
    seed = int.from_bytes(blake2b(name.encode(), digest_size=8).digest())
    return np.random.default_rng(seed).integers(0, VOCABULARY, num_tokens, np.int32)
