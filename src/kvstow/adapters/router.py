"""A small router in front of prefill and decode instances; the only module that imports aiohttp.

    client ──▶ router ──▶ prefill   one token, answer carries tickets
                  │  ◀──── tickets
                  └─────▶ decode    the same request and the tickets; streamed back

Instances take turns. One that fails is left out for a while; its health is then checked in the
background, so no request waits for an instance that is known to be down. When no prefill instance
is left, decode computes the prompt itself. While an instance is silent its health is checked: one
that hangs is given up then, not after the whole time limit. In the middle of a stream the client
gets an error as its last event. Speaks the OpenAI completions and chat APIs. Tickets come from
prefill instances alone: a client's are never passed on.
"""

import asyncio
import json
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeVar, cast

from aiohttp import ClientError, ClientResponse, ClientSession, ClientTimeout, web
from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest

log = logging.getLogger(__name__)

T = TypeVar("T")

PATHS = ("/v1/completions", "/v1/chat/completions")
PARAMS = "kv_transfer_params"
ARGUMENTS = "vllm_xargs"
"""A field of vLLM's requests that is merged with the transfer parameters."""

DECODE_ONLY = frozenset(
    {"stream", "stream_options", "min_tokens", "max_completion_tokens", "best_of"}
)
HEADERS = ("Authorization", "X-Request-Id")

CHUNK = 1 << 16
MAX_TICKET_ANSWER = 128 << 20

FAULTS_IN_A_ROW = 3
"""So many answers of 5xx in a row leave an instance out. One that cannot be reached, or hangs, is
left out at once: 5xx may be the request's own fault."""

LONGEST_RESTS = 32

KEEPALIVE_SECONDS = 30.0
"""How long a connection may be open without a whole request head."""

SHUTDOWN_SECONDS = 5.0
"""How long requests under way may take to end after SIGTERM. They are cancelled then, which may
take as long again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterOptions:
    """Times in seconds, and bounds.

    `body` is how long a client may take to send a request; `silence` how long an instance may be
    silent before its health is checked; `health` how long that may take; `idle` how long one that
    is healthy may be silent in the middle of an answer; `rest` how long an instance is left out
    that failed.
    """

    prefill: float = 120.0
    idle: float = 120.0
    connect: float = 5.0
    silence: float = 5.0
    health: float = 2.0
    rest: float = 10.0
    body: float = 30.0
    max_body: int = 16 << 20


class NoAnswer(Exception):
    """An instance that failed before its first byte. `at_once`: it cannot be reached."""

    def __init__(self, why: str, *, at_once: bool) -> None:
        super().__init__(why)
        self.at_once = at_once


@dataclass(slots=True, eq=False)
class Instance:
    """One server. `kind` is prefill or decode."""

    kind: str
    url: str
    rest: float
    """How long it is left out when it fails next: longer each time, until it answers."""
    faults: int = 0
    probe: asyncio.Task[None] | None = None
    """Waits until it is healthy again; it gets no requests meanwhile."""


class RouterMetrics:
    """What the router counts."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"kvstow_router_{name}", text, labels, registry=registry)

        outcomes = "Requests by outcome: tickets, plain (decode computed all), failed"
        answers = "Requests that an instance has answered, by kind of instance and URL"
        left_out = "Instances that failed and get no requests"
        self.requests = counter("requests", outcomes, "outcome")
        self.faults = counter("faults", "Attempts that failed, by kind of instance", "kind")
        self.answers = counter("answers", answers, "kind", "url")
        self.left_out = Gauge("kvstow_router_left_out", left_out, registry=registry)


class Router:
    """Requests from clients to instances, while `run` is entered."""

    _session: ClientSession

    def __init__(
        self, prefill: Sequence[str], decode: Sequence[str], options: RouterOptions
    ) -> None:
        self._options = options
        self._prefill = self._instances("prefill", prefill)
        self._decode = self._instances("decode", decode)
        self._registry = CollectorRegistry()
        self._metrics = RouterMetrics(self._registry)
        instances = [*self._prefill, *self._decode]
        self._metrics.left_out.set_function(lambda: sum(bool(each.probe) for each in instances))

    def _instances(self, kind: str, urls: Sequence[str]) -> list[Instance]:
        unique = dict.fromkeys(url.rstrip("/") for url in urls)
        return [Instance(kind, url, self._options.rest) for url in unique]

    async def run(self, app: web.Application) -> AsyncIterator[None]:
        """As long as the application runs."""
        async with ClientSession(read_bufsize=CHUNK) as self._session:
            yield
            for instance in (*self._prefill, *self._decode):
                _give_requests(instance)

    # ── answers ───────────────────────────────────────────────────────────────────

    async def complete(self, request: web.Request) -> web.StreamResponse:
        """A completion: prefill, then decode, streamed as it comes."""
        body = await self._body(request)
        plain = _encode(body)
        full = await self._with_tickets(request, body)
        for instance in _in_turn(self._decode) or [*self._decode]:
            try:
                async with self._post(instance, request, full or plain) as answer:
                    self._note_answer(instance)
                    self._metrics.requests.labels("tickets" if full else "plain").inc()
                    return await self._relay(request, instance, answer)
            except NoAnswer as error:
                self._note_fault(instance, error)
        self._metrics.requests.labels("failed").inc()
        raise _error(web.HTTPBadGateway, "no decode instance answered")

    async def models(self, request: web.Request) -> web.StreamResponse:
        """What the first decode instance that answers serves."""
        timeout = ClientTimeout(total=self._options.connect)
        for instance in _in_turn(self._decode) or [*self._decode]:
            try:
                url = instance.url + request.path
                headers = _passed_on(request)
                async with self._session.get(url, timeout=timeout, headers=headers) as answer:
                    return web.json_response(await answer.json(), status=answer.status)
            except (ClientError, TimeoutError, ValueError, RecursionError) as error:
                log.warning("decode at %s: %s", instance.url, _why(error))
        raise _error(web.HTTPBadGateway, "no decode instance answered")

    async def health(self, request: web.Request) -> web.StreamResponse:
        """200 if some decode instance is healthy, 503 if none is: nothing can be served."""
        checks = [asyncio.ensure_future(self._is_healthy(each)) for each in self._decode]
        for check in asyncio.as_completed(checks):
            if await check:
                return web.Response(text="ok")
        return web.Response(text="no decode instance is healthy", status=503)

    async def metrics(self, request: web.Request) -> web.StreamResponse:
        return web.Response(body=generate_latest(self._registry), content_type="text/plain")

    async def _body(self, request: web.Request) -> dict[str, Any]:
        """The body, less tickets; 400 where it is no JSON object, 408 where it does not come, 413
        where it is too long."""
        try:
            async with asyncio.timeout(self._options.body):
                data = await request.read()
        except TimeoutError:
            message = f"no whole request within {self._options.body:g} s"
            raise _error(web.HTTPRequestTimeout, message) from None
        try:
            body: Any = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise _error(web.HTTPBadRequest, f"the body is not JSON: {error}") from None
        if not isinstance(body, dict):
            raise _error(web.HTTPBadRequest, "the body is not a JSON object")
        return without_tickets(cast("dict[str, Any]", body))

    # ── instances ─────────────────────────────────────────────────────────────────

    async def _with_tickets(self, request: web.Request, body: Mapping[str, Any]) -> bytes | None:
        """The request for decode, with tickets of the first prefill instance that answers; None
        where there are none."""
        sent = _encode(prefill_request(body))
        for instance in _in_turn(self._prefill):
            try:
                async with (
                    asyncio.timeout(self._options.prefill),
                    self._post(instance, request, sent) as answer,
                ):
                    if answer.status >= 400:  # the request is bad: decode will say so
                        return None
                    reply: Any = json.loads(await _read(answer, MAX_TICKET_ANSWER))
                params = (
                    cast("dict[str, Any]", reply).get(PARAMS) if isinstance(reply, dict) else None
                )
                has_tickets = isinstance(params, dict)
                full = json.dumps({**body, PARAMS: params}).encode() if has_tickets else None
            except (NoAnswer, TimeoutError, ClientError, ValueError, RecursionError) as error:
                self._note_fault(instance, error)
                continue
            self._note_answer(instance)
            return full
        return None

    def _note_answer(self, instance: Instance) -> None:
        instance.rest = self._options.rest
        _give_requests(instance)
        self._metrics.answers.labels(instance.kind, instance.url).inc()

    def _note_fault(self, instance: Instance, error: Exception) -> None:
        """It did not answer, or answered that it is at fault: then it gets some more requests."""
        self._metrics.faults.labels(instance.kind).inc()
        log.warning("%s at %s: %s", instance.kind, instance.url, _why(error))
        instance.faults += 1
        is_down = not isinstance(error, NoAnswer) or error.at_once
        if (is_down or instance.faults >= FAULTS_IN_A_ROW) and instance.probe is None:
            instance.probe = asyncio.create_task(self._probe(instance))

    async def _probe(self, instance: Instance) -> None:
        """Wait until it is healthy. If it then fails, it is left out for longer."""
        is_healthy = False
        while not is_healthy:
            await asyncio.sleep(instance.rest)
            instance.rest = min(2 * instance.rest, LONGEST_RESTS * self._options.rest)
            is_healthy = await self._is_healthy(instance)
        _give_requests(instance)

    @asynccontextmanager
    async def _post(
        self, instance: Instance, request: web.Request, body: bytes
    ) -> AsyncGenerator[ClientResponse]:
        """An answer whose status is known; NoAnswer where the instance is at fault."""
        timeout = ClientTimeout(total=None, sock_connect=self._options.connect)
        headers = {**_passed_on(request), "Content-Type": "application/json"}
        url = instance.url + request.path
        posting = asyncio.ensure_future(
            self._session.post(url, data=body, headers=headers, timeout=timeout)
        )
        try:
            answer = await self._wait(instance, posting)
        except (ClientError, TimeoutError, OSError) as error:
            raise NoAnswer(_why(error), at_once=True) from error
        finally:
            posting.cancel()
        async with answer:
            if answer.status >= 500:
                text = (await _read(answer, CHUNK)).decode(errors="replace")[:200]
                raise NoAnswer(f"status {answer.status}: {text}", at_once=False)
            yield answer

    async def _wait(
        self, instance: Instance, coming: "asyncio.Future[T]", most: float = float("inf")
    ) -> T:
        """What an instance sends; while nothing comes, its health is checked. TimeoutError where
        it is not healthy, or silent for more than `most` seconds."""
        end = time.monotonic() + most
        while not (await asyncio.wait((coming,), timeout=min(self._options.silence, most)))[0]:
            if not await self._is_healthy(instance):
                raise TimeoutError("does not answer and is not healthy")
            if time.monotonic() >= end:
                raise TimeoutError(f"healthy, but silent for {most:g} s")
        return coming.result()

    async def _relay(
        self, request: web.Request, instance: Instance, answer: ClientResponse
    ) -> web.StreamResponse:
        """The answer of a decode instance, byte by byte as it comes. Where it breaks off, so does
        ours; a stream of one that hangs ends with an error."""
        reply = web.StreamResponse(status=answer.status)
        reply.content_type = answer.content_type
        await reply.prepare(request)
        try:
            chunk = b"first"
            while chunk:
                reading = asyncio.ensure_future(answer.content.readany())
                try:
                    chunk = await self._wait(instance, reading, self._options.idle)
                finally:
                    reading.cancel()
                await reply.write(chunk)
        except TimeoutError as error:
            self._note_fault(instance, error)
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


def _in_turn(instances: list[Instance]) -> list[Instance]:
    """Those that get requests. The first of them is the last one next time."""
    ready = [each for each in instances if each.probe is None]
    instances[:] = [*instances[1:], *instances[:1]]
    return ready


def _give_requests(instance: Instance) -> None:
    """End its probe."""
    instance.faults = 0
    if instance.probe is not None:
        instance.probe.cancel()
        instance.probe = None


# ── requests and answers ──────────────────────────────────────────────────────────────


def prefill_request(body: Mapping[str, Any]) -> dict[str, Any]:
    """The request that computes the prompt, one token, and asks for tickets.

    Of several prompts it has the first: vLLM answers with the tickets of that one. Several samples
    share tickets, and so do equal prompts; decode computes the other prompts.
    """
    sent = {name: value for name, value in body.items() if name not in DECODE_ONLY}
    prompt = sent.get("prompt")
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        sent["prompt"] = prompt[0]
    return {**sent, "max_tokens": 1, "n": 1, PARAMS: {"do_remote_decode": True}}


def without_tickets(body: Mapping[str, Any]) -> dict[str, Any]:
    """A client's request without transfer parameters, wherever vLLM would find them."""
    sent = {name: value for name, value in body.items() if name != PARAMS}
    if isinstance(sent.get(ARGUMENTS), dict):
        sent[ARGUMENTS] = {key: each for key, each in sent[ARGUMENTS].items() if key != PARAMS}
    return sent


def _encode(body: Mapping[str, Any]) -> bytes:
    try:
        return json.dumps(body).encode()
    except RecursionError as error:
        raise _error(web.HTTPBadRequest, f"the body is not JSON: {error}") from None


def _error(kind: type[web.HTTPException], message: str) -> web.HTTPException:
    """An answer as OpenAI's clients understand it."""
    return kind(text=json.dumps(_about(kind, message)), content_type="application/json")


def _about(kind: type[web.HTTPException], message: str) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind.__name__, "code": kind.status_code}}


def _why(error: Exception) -> str:
    """What an error says, or its name where it says nothing."""
    return str(error) or type(error).__name__


def _passed_on(request: web.Request) -> dict[str, str]:
    return {name: request.headers[name] for name in HEADERS if name in request.headers}


async def _read(answer: ClientResponse, most: int) -> bytes:
    """An instance's whole answer; ValueError where it is longer than that."""
    whole = bytearray()
    async for chunk in answer.content.iter_any():
        whole += chunk
        if len(whole) > most:
            raise ValueError(f"an answer of more than {most} bytes")
    return bytes(whole)


def application(
    prefill: Sequence[str], decode: Sequence[str], options: RouterOptions
) -> web.Application:
    """The router as an application; `web.run_app` serves it."""
    app = web.Application(client_max_size=options.max_body)
    router = Router(prefill, decode, options)
    app.add_routes([web.post(path, router.complete) for path in PATHS])
    pages = {"/v1/models": router.models, "/metrics": router.metrics, "/health": router.health}
    app.add_routes([web.get(path, page) for path, page in pages.items()])
    app.cleanup_ctx.append(router.run)
    return app


def run_router(
    prefill: Sequence[str],
    decode: Sequence[str],
    *,
    host: str,
    port: int,
    options: RouterOptions,
    announce: Callable[[str], None],
) -> None:
    """Serve until interrupted or terminated; `announce` gets the address once it is served.

    A request whose client leaves is cancelled, and so are its requests to instances.
    """

    def started(text: str) -> None:
        announce(next(word for word in text.split() if word.startswith("http")))

    web.run_app(
        application(prefill, decode, options),
        host=host,
        port=port,
        print=started,
        keepalive_timeout=KEEPALIVE_SECONDS,
        shutdown_timeout=SHUTDOWN_SECONDS,
        handler_cancellation=True,
    )
