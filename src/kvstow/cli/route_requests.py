"""`kvstow route-requests`: a small router between prefill and decode instances."""

from typing import Annotated
from urllib.parse import urlsplit

import typer

from kvstow.cli.output import MISUSED, refuse

Urls = list[str]


def route_requests(
    prefill: Annotated[
        Urls, typer.Option("--prefill", metavar="URL", help="A prefill instance; repeatable.")
    ],
    decode: Annotated[
        Urls, typer.Option("--decode", metavar="URL", help="A decode instance; repeatable.")
    ],
    host: Annotated[str, typer.Option(help="Where to listen.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Where to listen.")] = 8000,
    prefill_seconds: Annotated[
        float, typer.Option(help="How long prefill may take before another one is tried.")
    ] = 120.0,
    rest_seconds: Annotated[
        float, typer.Option(help="How long a failed instance is passed over.")
    ] = 10.0,
) -> None:
    """Carry requests from prefill to decode instances.

    Speaks the OpenAI completions and chat APIs. Runs until interrupted.
    """
    for url in (*prefill, *decode):
        _check_url(url)
    from kvstow.adapters.router import RouterTimeouts, serve

    times = RouterTimeouts(prefill=prefill_seconds, rest=rest_seconds)
    serve(prefill, decode, host=host, port=port, times=times)


def _check_url(url: str) -> None:
    """Ends with 2 on what is no address of an HTTP server."""
    try:
        parts = urlsplit(url)
        is_fine = parts.scheme in ("http", "https") and bool(parts.hostname)
        is_fine = is_fine and (parts.port is None or parts.port > 0)
    except ValueError:
        is_fine = False
    if not is_fine:
        refuse(f"{url!r} is no URL\n\nhint: for example http://127.0.0.1:8100", code=MISUSED)
