"""Traces: whatever file is given holds requests in order that can be replayed, or a TraceError."""

from contextlib import suppress
from random import Random

from fuzzing import Reader, damaged_bytes, damaged_json, folder, fuzzed
from kvstow.errors import TraceError
from kvstow.plan.group import grouped
from kvstow.plan.pack import packed
from kvstow.plan.retention import Window
from kvstow.simulate.replay import Pace, Replay
from kvstow.simulate.trace import prompt_of, read_trace, synthetic, write_trace
from planning import attention

FOLDER = folder()
LAYOUT = packed(
    grouped([attention("l.0", tokens=16), attention("l.1", tokens=16, retention=Window(64))]),
    num_slabs=200,
)


def read(data: bytes) -> str:
    (FOLDER / "trace").write_bytes(data)
    try:
        requests = read_trace(FOLDER / "trace")
    except TraceError as error:
        return f"refused: trace | {error}"
    arrivals = [request.arrival for request in requests]
    assert arrivals == sorted(arrivals)
    for number, request in enumerate(requests):
        assert min(request.prompt_tokens, request.output_tokens) >= 1
        assert request.shared_tokens <= request.prompt_tokens
        if request.num_tokens < 100_000:
            assert len(prompt_of(number, request, 7).tokens) == min(7, request.num_tokens)
    with suppress(TraceError):  # a request may be too long for this arena
        Replay(LAYOUT, requests, Pace()).run(max_steps=4)
    write_trace(FOLDER / "again", requests)
    assert read_trace(FOLDER / "again") == requests
    return "accepted"


def mutate(random: Random, data: bytes, other: bytes) -> bytes:
    """Damage in one line, or anywhere."""
    lines, theirs = data.split(b"\n"), other.split(b"\n")
    if not random.randrange(5):
        return damaged_bytes(random, data, other)
    at = random.randrange(len(lines))
    lines[at] = damaged_json(random, lines[at], random.choice(theirs))
    return b"\n".join(lines)


def valid() -> list[bytes]:
    made: list[bytes] = []
    for mix in ("chat", "document", "agent"):
        write_trace(FOLDER / mix, synthetic(mix, num_requests=4, rate=2.0, seed=1))
        made.append((FOLDER / mix).read_bytes())
    return made


READER = Reader(name="traces", read=read, valid=valid, mutate=mutate)


@fuzzed(READER)
def test_a_damaged_trace_is_a_trace_or_refused(data):
    READER.outcome(data)
