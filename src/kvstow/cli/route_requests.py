"""`kvstow route-requests`: a small router between prefill and decode instances."""

from typing import Annotated

import typer

from kvstow.cli import options
from kvstow.cli.output import say

Urls = list[str]

Decode = Annotated[Urls, typer.Option(metavar="URL", help="A decode instance; repeatable.")]
Prefill = Annotated[
    Urls | None, typer.Option(metavar="URL", help="A prefill instance; repeatable.")
]
Host = Annotated[str, typer.Option(help="Address to listen on.")]
Port = Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 is any.")]
LEAST, MOST = 0.001, 1e9
"""Seconds that can be waited for."""
PrefillSeconds = Annotated[
    float,
    typer.Option(
        min=LEAST, max=MOST, help="How long prefill may take before another instance is tried."
    ),
]
SilenceSeconds = Annotated[
    float,
    typer.Option(
        min=LEAST, max=MOST, help="How long an instance may be silent before its health is checked."
    ),
]
IdleSeconds = Annotated[
    float,
    typer.Option(
        min=LEAST,
        max=MOST,
        help="How long a healthy decode instance may be silent within an answer.",
    ),
]
RestSeconds = Annotated[
    float, typer.Option(min=0, max=MOST, help="How long a failed instance gets no requests.")
]
MaxBody = Annotated[
    int, options.size_option(help="Largest size of a request.", show_default="16MiB")
]


def route_requests(
    decode: Decode,
    prefill: Prefill = None,
    host: Host = "127.0.0.1",
    port: Port = 8000,
    prefill_seconds: PrefillSeconds = 120.0,
    silence_seconds: SilenceSeconds = 5.0,
    idle_seconds: IdleSeconds = 120.0,
    rest_seconds: RestSeconds = 10.0,
    max_body: MaxBody = 16 << 20,
) -> None:
    """Run an HTTP router between prefill and decode.

    Speaks the OpenAI completions and chat APIs. Runs until interrupted.
    """
    for url in (*(prefill or ()), *decode):
        options.check_url(url)
    from kvstow.adapters.router import RouterOptions, run_router

    limits = RouterOptions(
        prefill=prefill_seconds,
        silence=silence_seconds,
        idle=idle_seconds,
        rest=rest_seconds,
        max_body=max_body,
    )
    run_router(
        prefill or (),
        decode,
        host=host,
        port=port,
        options=limits,
        announce=lambda url: say(f"{url} (Ctrl-C ends it)"),
    )
