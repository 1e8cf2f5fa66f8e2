"""Requests as clients send them and as instances get them; nothing here knows HTTP."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

PATHS = ("/v1/completions", "/v1/chat/completions")
PARAMS = "kv_transfer_params"
ARGUMENTS = "vllm_xargs"
"""A field of vLLM's requests that is merged with the transfer parameters."""


@dataclass(frozen=True, slots=True)
class ClientRequest:
    """A client's request: where to, its body without tickets, headers that are passed on, and
    what is known of its prompt."""

    path: str
    body: Mapping[str, Any]
    headers: Mapping[str, str]
    num_tokens: int | None = None
    held: Mapping[str, int] | None = None


def prefill_request(body: Mapping[str, Any]) -> dict[str, Any]:
    """The request that computes the prompt, one token, and asks for tickets."""
    changed = {
        name: value
        for name, value in body.items()
        if name not in ("stream", "stream_options", "min_tokens", "max_completion_tokens")
    }
    return {**changed, "max_tokens": 1, "n": 1, PARAMS: {"do_remote_decode": True}}


def without_tickets(body: Mapping[str, Any]) -> dict[str, Any]:
    """A client's request without transfer parameters, wherever vLLM would find them."""
    kept = {name: value for name, value in body.items() if name != PARAMS}
    if isinstance(kept.get(ARGUMENTS), dict):
        arguments: dict[str, Any] = kept[ARGUMENTS]
        kept[ARGUMENTS] = {name: value for name, value in arguments.items() if name != PARAMS}
    return kept


def is_tokens(value: object) -> bool:
    """Whether these are ids that an engine could have; others are left to it to refuse."""
    if not isinstance(value, list) or not value:
        return False
    ids = cast("list[object]", value)
    return all(type(each) is int and 0 <= each < 1 << 32 for each in ids)
