"""Made-up traces: chat, long documents, agents with shared beginnings. Same seed, same trace."""

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Literal, get_args

import numpy as np

from kvstow.errors import TraceError
from kvstow.simulate.trace import Request

Mix = Literal["chat", "document", "agent"]
MIXES: tuple[Mix, ...] = get_args(Mix)
Arrivals = Iterator[float]


def synthetic(mix: str, *, num_requests: int, rate: float, seed: int) -> list[Request]:
    """`num_requests` requests of a mix, arriving at `rate` per second on average; all at
    once where the rate is infinite."""
    kinds: dict[str, Callable[[np.random.Generator, Arrivals], Iterator[Request]]] = {
        "chat": _chat,
        "document": _documents,
        "agent": _agents,
    }
    if mix not in kinds:
        raise TraceError(f"no mix {mix!r}; there are {', '.join(kinds)}")
    if num_requests < 1 or not rate > 0:
        raise TraceError(f"{num_requests} requests at {rate} per second make no trace")
    rng = np.random.default_rng(seed)
    return list(islice(kinds[mix](rng, _arrivals(rng, rate)), num_requests))


def _arrivals(rng: np.random.Generator, rate: float) -> Arrivals:
    now = 0.0
    while True:
        yield now
        now += float(rng.exponential(1 / rate)) if rate < float("inf") else 0.0


def _lengths(rng: np.random.Generator, median: float, spread: float, most: int) -> int:
    length = median * float(np.exp(spread * rng.standard_normal()))
    return max(1, min(most, int(length)))


def _chat(rng: np.random.Generator, arrivals: Arrivals) -> Iterator[Request]:
    """Prompts around 700 tokens, answers around 250; nothing shared."""
    for arrival in arrivals:
        yield Request(
            arrival=arrival,
            prompt_tokens=_lengths(rng, 700, 0.8, 16_384),
            output_tokens=_lengths(rng, 250, 0.6, 4_096),
        )


def _documents(rng: np.random.Generator, arrivals: Arrivals) -> Iterator[Request]:
    """Long prompts, short answers; one in three asks again about a recent document."""
    recent: list[tuple[str, int]] = []
    for number, arrival in enumerate(arrivals):
        if recent and rng.random() < 1 / 3:
            document = recent[int(rng.integers(len(recent)))]
        else:
            document = (f"document-{number}", _lengths(rng, 16_000, 0.7, 120_000))
            recent = [*recent[-15:], document]
        yield Request(
            arrival=arrival,
            prompt_tokens=document[1] + _lengths(rng, 60, 0.6, 1_000),
            output_tokens=_lengths(rng, 200, 0.6, 2_000),
            prefixes=(document,),
        )


def _agents(rng: np.random.Generator, arrivals: Arrivals) -> Iterator[Request]:
    """Many tasks on one of few tool descriptions; every turn repeats all before it."""
    tools = [(f"tools-{i}", _lengths(rng, 3_000, 0.4, 8_000)) for i in range(4)]
    tasks: list[tuple[tuple[str, int], ...]] = []
    for number, arrival in enumerate(arrivals):
        if len(tasks) > 8 and rng.random() < 0.8:
            which = int(rng.integers(len(tasks)))
            history = tasks[which]
        else:
            which = len(tasks)
            history = (tools[int(rng.integers(len(tools)))],)
            tasks.append(history)
        turn = _lengths(rng, 300, 0.8, 4_000)
        output = _lengths(rng, 120, 0.7, 1_500)
        yield Request(
            arrival=arrival,
            prompt_tokens=sum(tokens for _, tokens in history) + turn,
            output_tokens=output,
            prefixes=(*history, (f"turn-{number}", turn)),
            output=f"answer-{number}",
        )
        tasks[which] = (*history, (f"turn-{number}", turn), (f"answer-{number}", output))
        if len(history) > 24:
            del tasks[which]
