"""`kvstow route-requests`: a small router between prefill and decode instances."""

from enum import StrEnum
from typing import Annotated

import typer

from kvstow.cli import options
from kvstow.cli.output import MISUSED, note, refuse
from kvstow.errors import SpecError

Urls = list[str]


class ChooseBy(StrEnum):
    """How an instance is chosen."""

    turns = "turns"
    prefix = "prefix"


Decode = Annotated[
    Urls, typer.Option("--decode", metavar="URL", help="A decode instance; repeatable.")
]
Prefill = Annotated[
    Urls | None, typer.Option("--prefill", metavar="URL", help="A prefill instance; repeatable.")
]
By = Annotated[
    ChooseBy,
    typer.Option(
        help="turns: one after the other; prefix: by the longest prefix and the least load."
    ),
]
Events = Annotated[
    Urls | None,
    typer.Option(
        "--events",
        metavar="URL=ADDRESS[,REPLAY]",
        help="Where an instance publishes KV events; repeatable, for --by prefix.",
    ),
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
    int,
    typer.Option(
        parser=options.size, metavar="SIZE", help="Largest size of a request.", show_default="16MiB"
    ),
]


def route_requests(
    decode: Decode,
    prefill: Prefill = None,
    by: By = ChooseBy.turns,
    events: Events = None,
    host: Host = "127.0.0.1",
    port: Port = 8000,
    prefill_seconds: PrefillSeconds = 120.0,
    silence_seconds: SilenceSeconds = 5.0,
    idle_seconds: IdleSeconds = 120.0,
    rest_seconds: RestSeconds = 10.0,
    max_body: MaxBody = 16 << 20,
) -> None:
    """An HTTP router: sends requests to prefill, then to decode.

    Speaks the OpenAI completions and chat APIs. Runs until interrupted.
    """
    urls = [*(prefill or ()), *decode]
    for url in urls:
        options.check_url(url)
    from kvstow.adapters.router.prefixes import EventSource
    from kvstow.adapters.router.server import RouterOptions, serve

    try:
        sources = tuple(EventSource.parse(text) for text in events or ())
    except SpecError as error:
        refuse(str(error), code=MISUSED)
    _check_sources(by, [source.url for source in sources], urls)
    chosen = RouterOptions(
        prefill=prefill_seconds,
        silence=silence_seconds,
        idle=idle_seconds,
        rest=rest_seconds,
        max_body=max_body,
        events=sources,
        by_prefix=by is ChooseBy.prefix,
    )
    serve(
        prefill or (),
        decode,
        host=host,
        port=port,
        options=chosen,
        announce=lambda url: note(f"{url} (Ctrl-C ends it)"),
    )


def _check_sources(by: ChooseBy, sources: list[str], urls: list[str]) -> None:
    """Ends with 2 where events are of an instance that is not listed, or are missing."""
    known = {url.rstrip("/") for url in urls}
    for url in sources:
        if url not in known:
            refuse(
                f"events of {url}, which is no instance here\n\nhint: --prefill or --decode {url}",
                code=MISUSED,
            )
    if by is ChooseBy.prefix and not sources:
        refuse(
            "--by prefix, and no instance says what it holds\n\n"
            f"hint: --events {urls[0]}=tcp://127.0.0.1:5557,tcp://127.0.0.1:5558",
            code=MISUSED,
        )
