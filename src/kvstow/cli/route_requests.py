"""`kvstow route-requests`: a small router between prefill and decode instances."""

from typing import Annotated

import typer

from kvstow.cli.options import check_url

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
        check_url(url)
    from kvstow.adapters.router import RouterTimeouts, serve

    times = RouterTimeouts(prefill=prefill_seconds, rest=rest_seconds)
    serve(prefill, decode, host=host, port=port, times=times)
