# pyright: reportMissingImports=false, reportUnknownArgumentType=false
# pyright: reportUnknownMemberType=false, reportUnknownParameterType=false
# pyright: reportUnknownVariableType=false
"""A small router between prefill and decode instances, the only module that imports aiohttp.

    client ──▶ router ──▶ prefill   one token, answer carries tickets
                  │  ◀──── tickets
                  └─────▶ decode    the same request and the tickets; streamed back

A prefill instance that fails is passed over for a while, and another one is tried; when none is
left, decode computes the prompt itself. Speaks the OpenAI completions and chat APIs.
"""

import asyncio
import json
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from aiohttp import ClientError, ClientSession, ClientTimeout, web
from prometheus_client import CollectorRegistry, Counter, generate_latest

log = logging.getLogger(__name__)

PATHS = ("/v1/completions", "/v1/chat/completions")
PARAMS = "kv_transfer_params"
CHUNK = 1 << 16
MAX_BODY = 64 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterTimeouts:
    """In seconds: how long prefill may take, and how long a failed instance is passed over."""

    prefill: float = 120.0
    connect: float = 5.0
    rest: float = 10.0


class Servers:
    """Servers of one kind, in turn; those that failed lately come last."""

    def __init__(self, urls: Sequence[str], rest: float, clock: Callable[[], float]) -> None:
        self._urls = tuple(url.rstrip("/") for url in urls)
        self._rest = rest
        self._clock = clock
        self._next = 0
        self._failed_at: dict[str, float] = {}

    def in_turn(self) -> tuple[str, ...]:
        """All of them, the one whose turn it is first."""
        turn, self._next = self._next, (self._next + 1) % max(1, len(self._urls))
        ordered = self._urls[turn:] + self._urls[:turn]
        return tuple(sorted(ordered, key=self._resting))

    def failed(self, url: str) -> None:
        """Pass it over for a while."""
        self._failed_at[url] = self._clock()

    def works(self, url: str) -> None:
        self._failed_at.pop(url, None)

    def _resting(self, url: str) -> bool:
        return self._clock() - self._failed_at.get(url, -self._rest) < self._rest


def prefill_request(body: Mapping[str, Any]) -> dict[str, Any]:
    """The request that computes the prompt, one token, and asks for tickets."""
    changed = {
        name: value
        for name, value in body.items()
        if name not in ("stream", "stream_options", "min_tokens", "max_completion_tokens")
    }
    return {**changed, "max_tokens": 1, "n": 1, PARAMS: {"do_remote_decode": True}}


class NoAnswer(Exception):
    """An instance that could not be reached, or failed before its first byte."""


class Router:
    """Requests from clients to instances. Made inside a running loop."""

    def __init__(
        self,
        prefill: Sequence[str],
        decode: Sequence[str],
        session: ClientSession,
        times: RouterTimeouts,
    ) -> None:
        self._prefill = Servers(prefill, times.rest, time.monotonic)
        self._decode = Servers(decode, times.rest, time.monotonic)
        self._session = session
        self._times = times
        self._registry = CollectorRegistry()
        self._requests = Counter(
            "kvstow_router_requests",
            "Requests by what became of them: tickets, plain (decode computed all), failed",
            ["outcome"],
            registry=self._registry,
        )
        self._faults = Counter(
            "kvstow_router_faults",
            "Attempts that failed, by kind of instance",
            ["instance"],
            registry=self._registry,
        )

    # ── answers ───────────────────────────────────────────────────────────────────

    async def complete(self, request: web.Request) -> web.StreamResponse:
        """A completion: prefill, then decode, streamed as it comes."""
        body = await request.json()
        if not isinstance(body, dict):
            raise web.HTTPBadRequest(text="the body is not a JSON object")
        headers = _passed_on(request)
        params = await self._tickets(request.path, body, headers)
        full = {**body, PARAMS: params} if params else body
        for url in self._decode.in_turn():
            try:
                async with self._opened(url + request.path, full, headers) as answer:
                    self._decode.works(url)
                    self._requests.labels("tickets" if params else "plain").inc()
                    return await _relayed(request, answer)
            except NoAnswer as error:
                self._decode.failed(url)
                self._faults.labels("decode").inc()
                log.warning("decode at %s: %s", url, error)
        self._requests.labels("failed").inc()
        raise web.HTTPBadGateway(text="no decode instance answered")

    async def models(self, request: web.Request) -> web.StreamResponse:
        """What the first decode instance that answers serves."""
        for url in self._decode.in_turn():
            try:
                async with self._session.get(url + request.path) as answer:
                    return web.json_response(await answer.json(), status=answer.status)
            except (ClientError, TimeoutError) as error:
                log.warning("decode at %s: %s", url, error)
        raise web.HTTPBadGateway(text="no decode instance answered")

    async def health(self, request: web.Request) -> web.StreamResponse:
        return web.Response(text="ok")

    async def metrics(self, request: web.Request) -> web.StreamResponse:
        return web.Response(body=generate_latest(self._registry), content_type="text/plain")

    # ── instances ─────────────────────────────────────────────────────────────────

    async def _tickets(
        self, path: str, body: Mapping[str, Any], headers: Mapping[str, str]
    ) -> Mapping[str, Any] | None:
        """Tickets from the first prefill instance that gives some; None where none does."""
        asked = prefill_request(body)
        for url in self._prefill.in_turn():
            try:
                async with (
                    asyncio.timeout(self._times.prefill),
                    self._opened(url + path, asked, headers) as answer,
                ):
                    if answer.status >= 400:  # the request itself is bad: decode will say so
                        return None
                    found: Any = json.loads(await answer.read())
                self._prefill.works(url)
                return found.get(PARAMS)
            except (NoAnswer, TimeoutError, ClientError, ValueError) as error:
                self._prefill.failed(url)
                self._faults.labels("prefill").inc()
                log.warning("prefill at %s: %s", url, error or type(error).__name__)
        return None

    @asynccontextmanager
    async def _opened(
        self, url: str, body: Mapping[str, Any], headers: Mapping[str, str]
    ) -> AsyncGenerator[Any]:
        """An answer whose status is known; NoAnswer where the instance is at fault."""
        timeout = ClientTimeout(total=None, sock_connect=self._times.connect)
        try:
            answer = await self._session.post(url, json=body, headers=headers, timeout=timeout)
        except (ClientError, TimeoutError, OSError) as error:
            raise NoAnswer(str(error) or type(error).__name__) from error
        async with answer:
            if answer.status >= 500:
                raise NoAnswer(f"status {answer.status}: {(await answer.text())[:200]}")
            yield answer


def _passed_on(request: web.Request) -> dict[str, str]:
    names = ("Authorization", "X-Request-Id")
    return {name: request.headers[name] for name in names if name in request.headers}


async def _relayed(request: web.Request, answer: Any) -> web.StreamResponse:
    """The instance's answer, byte by byte as it comes."""
    reply = web.StreamResponse(status=answer.status)
    reply.content_type = answer.content_type
    await reply.prepare(request)
    async for chunk in answer.content.iter_any():
        await reply.write(chunk)
    await reply.write_eof()
    return reply


Handler = Callable[[Router, Any], Awaitable[Any]]


def application(
    prefill: Sequence[str], decode: Sequence[str], times: RouterTimeouts
) -> web.Application:
    """The router as an application; `web.run_app` serves it."""
    app = web.Application(client_max_size=MAX_BODY)
    routers: list[Router] = []

    async def lifetime(app: web.Application) -> AsyncIterator[None]:
        async with ClientSession(read_bufsize=CHUNK) as session:
            routers.append(Router(prefill, decode, session, times))
            yield

    def to(method: Handler) -> Any:
        async def handler(request: web.Request) -> web.StreamResponse:
            return await method(routers[0], request)

        return handler

    for path in PATHS:
        app.router.add_post(path, to(Router.complete))
    app.router.add_get("/v1/models", to(Router.models))
    app.router.add_get("/metrics", to(Router.metrics))
    app.router.add_get("/health", to(Router.health))
    app.cleanup_ctx.append(lifetime)
    return app


def serve(
    prefill: Sequence[str], decode: Sequence[str], *, host: str, port: int, times: RouterTimeouts
) -> None:
    """Serve until interrupted."""
    web.run_app(application(prefill, decode, times), host=host, port=port, print=None)
