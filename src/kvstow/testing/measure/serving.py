"""The rates of an engine that serves the OpenAI completions API: a profile for simulations.

step_seconds   from one token to the next, one request alone: the median
prefill_rate   tokens of one long prompt over the time to its first token, less one step
decode_rate    tokens per second while all of several requests decode

Prompts are random token ids, so that none is found cached. Needs a server that takes a prompt as
ids and `ignore_eos`: vLLM and SGLang do.
"""

import json
import random
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from itertools import repeat
from typing import Any
from urllib.parse import urlsplit

from kvstow.errors import TransferError

TIMEOUT_SECONDS = 600.0
IDS = range(100, 1000)
"""Token ids of prompts: every vocabulary has them."""


@dataclass(slots=True)
class StreamedAnswer:
    """When a request was sent, and when each of its tokens arrived."""

    asked: float
    arrived: list[float] = field(default_factory=list[float])

    @property
    def first_token_seconds(self) -> float:
        return self.arrived[0] - self.asked


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionsEngine:
    """A server, by the URL in front of `/v1`."""

    url: str
    model: str

    def complete(self, prompt: Sequence[int], tokens: int) -> StreamedAnswer:
        """Ask for so many tokens, and note when each arrives. Raises TransferError."""
        body = {
            "model": self.model,
            "prompt": list(prompt),
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }
        connection = _connection(self.url)
        try:
            answer = StreamedAnswer(time.perf_counter())
            response = _asked(connection, self.url, "/v1/completions", body)
            for line in response:
                if line.startswith(b"data: {") and json.loads(line[6:]).get("choices"):
                    answer.arrived.append(time.perf_counter())
        except (OSError, HTTPException, ValueError) as error:
            raise TransferError(
                f"{self.url}: {error or type(error).__name__}", kind="peer"
            ) from error
        finally:
            connection.close()
        if len(answer.arrived) < 2:
            raise TransferError(
                f"{self.url}: {len(answer.arrived)} tokens arrived of {tokens}, one by one\n\n"
                "hint: the server has to stream, and to honour ignore_eos",
                kind="peer",
            )
        return answer


def served_model(url: str) -> str:
    """The first model that the server says it has. Raises TransferError."""
    connection = _connection(url)
    try:
        response = _asked(connection, url, "/v1/models", None)
        return str(json.loads(response.read())["data"][0]["id"])
    except (OSError, HTTPException, ValueError, LookupError, TypeError) as error:
        raise TransferError(
            f"{url}: no list of models: {error}\n\n"
            "hint: is a server with the OpenAI API there? Its address is given without /v1",
            kind="peer",
        ) from error
    finally:
        connection.close()


def measured(
    engine: CompletionsEngine, *, prompt_tokens: int, requests: int, tokens: int, repeats: int
) -> dict[str, Any]:
    """The profile of an engine that has nothing else to do."""
    dice = random.Random(0)

    def prompt(length: int) -> list[int]:
        return dice.choices(IDS, k=length)

    engine.complete(prompt(16), 4)  # whatever a first request has to wait for
    alone = [engine.complete(prompt(16), tokens) for _ in range(repeats)]
    gaps = [b - a for each in alone for a, b in zip(each.arrived, each.arrived[1:], strict=False)]
    step = statistics.median(gaps)
    long = [engine.complete(prompt(prompt_tokens), 2) for _ in range(repeats)]
    first = statistics.median(each.first_token_seconds for each in long)
    prompts = [prompt(16) for _ in range(requests)]
    with ThreadPoolExecutor(requests) as pool:
        together = list(pool.map(engine.complete, prompts, repeat(tokens)))
    return {
        "prefill_rate": prompt_tokens / max(first - step, 1e-6),
        "decode_rate": decode_rate(together),
        "step_seconds": step,
        "model": engine.model,
        "measured": {
            "prompt_tokens": prompt_tokens,
            "first_token_seconds": first,
            "requests_at_once": requests,
            "output_tokens": tokens,
        },
    }


def decode_rate(answers: Sequence[StreamedAnswer]) -> float:
    """Tokens per second while all of the answers were arriving; of all the time, if never all."""
    start = max(answer.arrived[0] for answer in answers)
    end = min(answer.arrived[-1] for answer in answers)
    if end <= start:
        start = min(answer.asked for answer in answers)
        end = max(answer.arrived[-1] for answer in answers)
    count = sum(start < when <= end for answer in answers for when in answer.arrived)
    return count / max(end - start, 1e-6)


def _connection(url: str) -> HTTPConnection:
    parts = urlsplit(url)
    kind = HTTPSConnection if parts.scheme == "https" else HTTPConnection
    return kind(parts.hostname or "", parts.port, timeout=TIMEOUT_SECONDS)


def _asked(
    connection: HTTPConnection, url: str, path: str, body: dict[str, Any] | None
) -> HTTPResponse:
    """The response to a request; OSError with the server's words where it refuses."""
    where = urlsplit(url).path.rstrip("/") + path
    data = None if body is None else json.dumps(body)
    connection.request("POST" if data else "GET", where, data, {"Content-Type": "application/json"})
    response = connection.getresponse()
    if response.status != 200:
        words = response.read(300).decode(errors="replace")
        response.close()
        raise OSError(f"{where} answers {response.status} {response.reason}: {words}")
    return response
