# pyright: reportMissingImports=false, reportUnknownArgumentType=false
# pyright: reportUnknownMemberType=false, reportUnknownParameterType=false
# pyright: reportUnknownVariableType=false
"""Requests between clients and instances, the only module that imports aiohttp.

    client ──▶ router ──▶ prefill   one token, answer carries tickets
                  │  ◀──── tickets
                  └─────▶ decode    the same request and the tickets; streamed back

An instance that fails is left out for a while (`choice`). When no prefill instance is left,
decode computes the prompt itself. An instance that is silent for long is asked for its health
meanwhile: one that hangs is given up after that, not after the whole time limit. In the middle of a
stream the client then gets an error as its last event. Speaks the OpenAI completions and chat APIs.
Tickets come from prefill instances alone: a client's are never passed on.
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
from prometheus_client import CollectorRegistry, generate_latest

from kvstow.adapters.router.choice import Instance, Instances
from kvstow.adapters.router.prefixes import EventSource, Prefixes
from kvstow.adapters.router.requests import (
    PARAMS,
    PATHS,
    ClientRequest,
    is_tokens,
    prefill_request,
    without_tickets,
)
from kvstow.observe import RouterMetrics

log = logging.getLogger(__name__)

CHUNK = 1 << 16
MAX_TICKET_ANSWER = 128 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterOptions:
    """Times in seconds, and bounds.

    `silence` is how long an instance may be silent before its health is asked for; `health` how
    long that answer may take; `idle` how long one that is healthy may be silent in the middle of
    an answer; `rest` how long an instance is left out that failed.
    """

    prefill: float = 120.0
    idle: float = 120.0
    connect: float = 5.0
    silence: float = 5.0
    health: float = 2.0
    rest: float = 10.0
    tokenize: float = 2.0
    max_body: int = 16 << 20
    events: tuple[EventSource, ...] = ()
    by_prefix: bool = False


class NoAnswer(Exception):
    """An instance that failed before its first byte. `at_once`: it cannot be reached."""

    def __init__(self, why: str, *, at_once: bool) -> None:
        super().__init__(why)
        self.at_once = at_once


class Router:
    """Requests from clients to instances. Made inside a running loop."""

    def __init__(
        self,
        prefill: Sequence[str],
        decode: Sequence[str],
        session: ClientSession,
        options: RouterOptions,
    ) -> None:
        self._prefill = Instances(prefill, rest=options.rest, clock=time.monotonic)
        self._decode = Instances(decode, rest=options.rest, clock=time.monotonic)
        self._session = session
        self._options = options
        self.prefixes = Prefixes(options.events) if options.by_prefix else None
        self._probes: set[asyncio.Task[None]] = set()
        self._registry = CollectorRegistry()
        self._metrics = RouterMetrics(self._registry)
        self._metrics.left_out.set_function(
            lambda: sum(each.is_open for each in (*self._prefill.all, *self._decode.all))
        )

    async def close(self) -> None:
        """Let go of events and of questions under way."""
        for probe in self._probes:
            probe.cancel()
        if self.prefixes is not None:
            await asyncio.to_thread(self.prefixes.close)

    # ── answers ───────────────────────────────────────────────────────────────────

    async def complete(self, request: web.Request) -> web.StreamResponse:
        """A completion: prefill, then decode, streamed as it comes."""
        self._probe()
        asked = await self._with_prefix(
            ClientRequest(request.path, without_tickets(await _json(request)), _passed_on(request))
        )
        params = await self._tickets(asked)
        full = {**asked.body, PARAMS: params} if params else asked.body
        ordered = self._decode.ordered(asked.num_tokens, asked.held)
        for instance in ordered or self._decode.last_resort():
            try:
                with instance.busy_with(asked.num_tokens or 0):
                    async with self._opened(instance, asked, full) as answer:
                        self._decode.works(instance)
                        self._metrics.requests.labels("tickets" if params else "plain").inc()
                        self._metrics.answers.labels("decode", instance.url).inc()
                        self._count_tokens(asked, instance)
                        return await self._relayed(request, instance, answer)
            except NoAnswer as error:
                self._note("decode", self._decode, instance, error)
        self._metrics.requests.labels("failed").inc()
        raise _error(web.HTTPBadGateway, "no decode instance answered")

    async def models(self, request: web.Request) -> web.StreamResponse:
        """What the first decode instance that answers serves."""
        timeout = ClientTimeout(total=self._options.connect)
        for instance in self._decode.ordered() or self._decode.last_resort():
            try:
                url = instance.url + request.path
                headers = _passed_on(request)
                async with self._session.get(url, timeout=timeout, headers=headers) as answer:
                    return web.json_response(await answer.json(), status=answer.status)
            except (ClientError, TimeoutError, ValueError) as error:
                log.warning("decode at %s: %s", instance.url, _why(error))
        raise _error(web.HTTPBadGateway, "no decode instance answered")

    async def health(self, request: web.Request) -> web.StreamResponse:
        return web.Response(text="ok")

    async def metrics(self, request: web.Request) -> web.StreamResponse:
        if self.prefixes is not None:
            for url in self.prefixes.urls:
                for tier, count in self.prefixes.index.blocks_by_tier(url).items():
                    self._metrics.prefix_blocks.labels(url, tier).set(count)
        return web.Response(body=generate_latest(self._registry), content_type="text/plain")

    # ── prefixes ──────────────────────────────────────────────────────────────────

    async def _with_prefix(self, asked: ClientRequest) -> ClientRequest:
        """The request with its length and what each instance holds of it, where that is known."""
        if self.prefixes is None or self.prefixes.is_empty:
            return asked
        tokens = await self._tokenized(asked)
        if tokens is None:
            return asked
        words = {name: asked.body.get(name) for name in ("model", "cache_salt")}
        model, salt = (value if isinstance(value, str) else "" for value in words.values())
        held = self.prefixes.held(tokens, model=model, salt=salt)
        return ClientRequest(asked.path, asked.body, asked.headers, len(tokens), held)

    async def _tokenized(self, asked: ClientRequest) -> list[int] | None:
        """The prompt's token ids, from an instance where the request has text; None where it does
        not say in time. One that hangs is not asked by the next request."""
        prompt = asked.body.get("prompt")
        if is_tokens(prompt):
            return prompt
        if not isinstance(prompt, str) and "messages" not in asked.body:
            return None
        for kind, instances in (("prefill", self._prefill), ("decode", self._decode)):
            instance = instances.idlest()
            if instance is None:
                continue
            try:
                return await self._tokens_from(instance, asked)
            except (ClientError, TimeoutError, ValueError, AttributeError) as error:
                log.warning("tokens from %s: %s", instance.url, _why(error))
                if not await self._is_healthy(instance):
                    self._note(kind, instances, instance, error)
                return None
        return None

    async def _tokens_from(self, instance: Instance, asked: ClientRequest) -> list[int] | None:
        timeout = ClientTimeout(total=self._options.tokenize)
        async with self._session.post(
            instance.url + "/tokenize", json=asked.body, headers=asked.headers, timeout=timeout
        ) as answer:
            found: Any = await answer.json() if answer.status == 200 else {}
        tokens = found.get("tokens")
        return tokens if is_tokens(tokens) else None

    def _count_tokens(self, asked: ClientRequest, instance: Instance) -> None:
        if asked.num_tokens is not None and asked.held is not None:
            held = asked.held.get(instance.url, 0)
            self._metrics.tokens.labels("held").inc(held)
            self._metrics.tokens.labels("not held").inc(asked.num_tokens - held)

    # ── instances ─────────────────────────────────────────────────────────────────

    async def _tickets(self, asked: ClientRequest) -> Mapping[str, Any] | None:
        """Tickets from the first prefill instance that gives some; None where none does."""
        body = prefill_request(asked.body)
        for instance in self._prefill.ordered(asked.num_tokens, asked.held):
            try:
                with instance.busy_with(asked.num_tokens or 0):
                    async with (
                        asyncio.timeout(self._options.prefill),
                        self._opened(instance, asked, body) as answer,
                    ):
                        if answer.status >= 400:  # the request is bad: decode will say so
                            return None
                        found: Any = json.loads(await _read(answer, MAX_TICKET_ANSWER))
                self._prefill.works(instance)
                self._metrics.answers.labels("prefill", instance.url).inc()
                params = found.get(PARAMS) if isinstance(found, dict) else None
                return params if isinstance(params, dict) else None
            except (NoAnswer, TimeoutError, ClientError, ValueError) as error:
                self._note("prefill", self._prefill, instance, error)
        return None

    def _note(self, kind: str, instances: Instances, instance: Instance, error: Exception) -> None:
        """An instance failed."""
        instances.failed(instance, at_once=not isinstance(error, NoAnswer) or error.at_once)
        self._metrics.faults.labels(kind).inc()
        log.warning("%s at %s: %s", kind, instance.url, _why(error))

    @asynccontextmanager
    async def _opened(
        self, instance: Instance, asked: ClientRequest, body: Mapping[str, Any]
    ) -> AsyncGenerator[Any]:
        """An answer whose status is known; NoAnswer where the instance is at fault."""
        timeout = ClientTimeout(total=None, sock_connect=self._options.connect)
        posting = asyncio.ensure_future(
            self._session.post(
                instance.url + asked.path, json=body, headers=asked.headers, timeout=timeout
            )
        )
        try:
            answer = await self._awaited(instance, posting)
        except (ClientError, TimeoutError, OSError) as error:
            raise NoAnswer(_why(error), at_once=True) from error
        finally:
            posting.cancel()
        async with answer:
            if answer.status >= 500:
                text = (await _read(answer, CHUNK)).decode(errors="replace")[:200]
                raise NoAnswer(f"status {answer.status}: {text}", at_once=False)
            yield answer

    async def _awaited(
        self, instance: Instance, coming: "asyncio.Future[Any]", most: float = float("inf")
    ) -> Any:
        """What an instance sends; while nothing comes, its health is asked for. TimeoutError where
        it is not healthy, or silent for more than `most` seconds."""
        end = time.monotonic() + most
        while not (await asyncio.wait((coming,), timeout=min(self._options.silence, most)))[0]:
            if not await self._is_healthy(instance):
                raise TimeoutError("neither answers nor says that it is healthy")
            if time.monotonic() >= end:
                raise TimeoutError(f"healthy, and silent for {most:g} s")
        return coming.result()

    async def _chunks(self, instance: Instance, answer: Any) -> AsyncGenerator[bytes]:
        """An answer's bytes as they come; TimeoutError where the instance hangs."""
        while True:
            reading = asyncio.ensure_future(answer.content.readany())
            try:
                chunk: bytes = await self._awaited(instance, reading, self._options.idle)
            finally:
                reading.cancel()
            if not chunk:
                return
            yield chunk

    async def _relayed(
        self, request: web.Request, instance: Instance, answer: Any
    ) -> web.StreamResponse:
        """The answer of a decode instance, byte by byte as it comes. Where it breaks off, so does
        ours; a stream of one that hangs ends with an error."""
        reply = web.StreamResponse(status=answer.status)
        reply.content_type = answer.content_type
        await reply.prepare(request)
        try:
            async for chunk in self._chunks(instance, answer):
                await reply.write(chunk)
        except TimeoutError as error:
            self._note("decode", self._decode, instance, error)
            if answer.content_type != "text/event-stream":
                raise
            about = _about(web.HTTPGatewayTimeout, f"the decode instance hangs: {_why(error)}")
            await reply.write(f"\n\ndata: {json.dumps(about)}\n\ndata: [DONE]\n\n".encode())
        await reply.write_eof()
        return reply

    async def _is_healthy(self, instance: Instance) -> bool:
        timeout = ClientTimeout(total=self._options.health)
        try:
            async with self._session.get(instance.url + "/health", timeout=timeout) as answer:
                return answer.status == 200
        except (ClientError, TimeoutError, OSError):
            return False

    def _probe(self) -> None:
        """Ask those for their health, in the background, that have been left out for a while."""
        for instances in (self._prefill, self._decode):
            for instance in instances.to_probe():
                instance.is_probed = True
                task = asyncio.create_task(self._probed(instances, instance))
                self._probes.add(task)
                task.add_done_callback(self._probes.discard)

    async def _probed(self, instances: Instances, instance: Instance) -> None:
        try:
            if await self._is_healthy(instance):
                instances.healthy(instance)
            else:
                instances.failed(instance, at_once=True)
        finally:
            instance.is_probed = False


# ── requests and answers ──────────────────────────────────────────────────────────────


async def _json(request: web.Request) -> dict[str, Any]:
    """The body; 400 where it is no JSON object, 413 where it is too long."""
    try:
        body = json.loads(await request.read())
    except (ValueError, RecursionError) as error:
        raise _error(web.HTTPBadRequest, f"the body is not JSON: {error}") from None
    if not isinstance(body, dict):
        raise _error(web.HTTPBadRequest, "the body is not a JSON object")
    return body


def _error(kind: type[web.HTTPException], message: str) -> web.HTTPException:
    """An answer as OpenAI's clients understand it."""
    return kind(text=json.dumps(_about(kind, message)), content_type="application/json")


def _about(kind: type[web.HTTPException], message: str) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind.__name__, "code": kind.status_code}}


def _why(error: Exception) -> str:
    """What an error says, or its name where it says nothing."""
    return str(error) or type(error).__name__


def _passed_on(request: web.Request) -> dict[str, str]:
    names = ("Authorization", "X-Request-Id")
    return {name: request.headers[name] for name in names if name in request.headers}


async def _read(answer: Any, most: int) -> bytes:
    """An instance's whole answer; ValueError where it is longer than that."""
    parts: list[bytes] = []
    left = most
    async for chunk in answer.content.iter_any():
        left -= len(chunk)
        if left < 0:
            raise ValueError(f"an answer of more than {most} bytes")
        parts.append(chunk)
    return b"".join(parts)


Endpoint = Callable[[Router, Any], Awaitable[Any]]
ROUTER = web.AppKey("router", Router)


def application(
    prefill: Sequence[str], decode: Sequence[str], options: RouterOptions
) -> web.Application:
    """The router as an application; `web.run_app` serves it."""
    app = web.Application(client_max_size=options.max_body)

    async def lifetime(app: web.Application) -> AsyncIterator[None]:
        async with ClientSession(read_bufsize=CHUNK) as session:
            router = app[ROUTER] = Router(prefill, decode, session, options)
            yield
            await router.close()

    def to(method: Endpoint) -> Any:
        async def handler(request: web.Request) -> web.StreamResponse:
            return await method(app[ROUTER], request)

        return handler

    for path in PATHS:
        app.router.add_post(path, to(Router.complete))
    app.router.add_get("/v1/models", to(Router.models))
    app.router.add_get("/metrics", to(Router.metrics))
    app.router.add_get("/health", to(Router.health))
    app.cleanup_ctx.append(lifetime)
    return app


def serve(
    prefill: Sequence[str],
    decode: Sequence[str],
    *,
    host: str,
    port: int,
    options: RouterOptions,
    announce: Callable[[str], None],
) -> None:
    """Serve until interrupted; `announce` is told the address once it can be asked."""
    made = application(prefill, decode, options)

    def started(text: str) -> None:
        announce(next(word for word in text.split() if word.startswith("http")))

    web.run_app(made, host=host, port=port, print=started)
