"""Requests as clients send them and as instances get them; nothing here knows HTTP."""

from collections.abc import Mapping
from typing import Any, cast

PATHS = ("/v1/completions", "/v1/chat/completions")
PARAMS = "kv_transfer_params"
ARGUMENTS = "vllm_xargs"
"""A field of vLLM's requests that is merged with the transfer parameters."""


def prefill_request(body: Mapping[str, Any]) -> dict[str, Any]:
    """The request that computes the prompt, one token, and asks for tickets."""
    rest = {
        name: value
        for name, value in body.items()
        if name not in ("stream", "stream_options", "min_tokens", "max_completion_tokens")
    }
    return {**rest, "max_tokens": 1, "n": 1, PARAMS: {"do_remote_decode": True}}


def without_tickets(body: Mapping[str, Any]) -> dict[str, Any]:
    """A client's request without transfer parameters, wherever vLLM would find them."""
    rest = {name: value for name, value in body.items() if name != PARAMS}
    if isinstance(rest.get(ARGUMENTS), dict):
        arguments: dict[str, Any] = rest[ARGUMENTS]
        rest[ARGUMENTS] = {name: value for name, value in arguments.items() if name != PARAMS}
    return rest


def is_one_request(body: Mapping[str, Any]) -> bool:
    """Whether an engine makes one request of it.

    Of several samples or prompts it makes several, and gives each the same tickets: all but one
    would come in vain, and by default vLLM fails a request whose blocks do not come.
    """
    prompt = body.get("prompt")
    prompts = cast("list[object]", prompt) if isinstance(prompt, list) else []
    is_list = len(prompts) > 1 and not isinstance(prompts[0], int)
    return body.get("n") in (None, 1) and body.get("best_of") in (None, 1) and not is_list
