"""Requests between clients and instances, the only module that imports aiohttp.

    client ──▶ router ──▶ prefill   one token, answer carries tickets
                  │  ◀──── tickets
                  └─────▶ decode    the same request and the tickets; streamed back

An instance that fails is left out for a while (`instances`). When no prefill instance is left,
decode computes the prompt itself. The health of an instance that is silent for long is checked
meanwhile: one that hangs is given up after that, not after the whole time limit. In the middle of a
stream the client then gets an error as its last event. Speaks the OpenAI completions and chat APIs.
Tickets come from prefill instances alone: a client's are never passed on.
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

from kvstow.adapters.router.instances import Instance, Instances

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


class RouterMetrics:
    """What the router counts."""

    def __init__(self, registry: CollectorRegistry) -> None:
        outcomes = "Requests by what became of them: tickets, plain (decode computed all), failed"
        answers = "Requests that an instance has answered, by kind of instance and URL"
        left_out = "Instances that failed and get no requests"
        self.requests = Counter("kvstow_router_requests", outcomes, ["outcome"], registry=registry)
        self.faults = Counter(
            "kvstow_router_faults",
            "Attempts that failed, by kind of instance",
            ["kind"],
            registry=registry,
        )
        self.answers = Counter("kvstow_router_answers", answers, ["kind", "url"], registry=registry)
        self.left_out = Gauge("kvstow_router_left_out", left_out, registry=registry)


class Router:
    """Requests from clients to instances, while `run` is entered."""

    _session: ClientSession

    def __init__(
        self, prefill: Sequence[str], decode: Sequence[str], options: RouterOptions
    ) -> None:
        self._prefill = Instances(prefill, rest=options.rest, clock=time.monotonic)
        self._decode = Instances(decode, rest=options.rest, clock=time.monotonic)
        self._options = options
        self._probes: set[asyncio.Task[None]] = set()
        self._registry = CollectorRegistry()
        self._metrics = RouterMetrics(self._registry)
        self._metrics.left_out.set_function(
            lambda: sum(
                each.open_until is not None for each in (*self._prefill.all, *self._decode.all)
            )
        )

    async def run(self, app: web.Application) -> AsyncIterator[None]:
        """As long as the application runs."""
        async with ClientSession(read_bufsize=CHUNK) as self._session:
            yield
            for probe in self._probes:
                probe.cancel()

    # ── answers ───────────────────────────────────────────────────────────────────

    async def complete(self, request: web.Request) -> web.StreamResponse:
        """A completion: prefill, then decode, streamed as it comes."""
        self._start_probes()
        body = await self._body(request)
        plain = _encode(body)
        full = await self._with_tickets(request, body)
        for instance in self._decode.in_turn() or self._decode.last_resort():
            try:
                async with self._post(instance, request, full or plain) as answer:
                    self._decode.succeed(instance)
                    self._metrics.requests.labels("tickets" if full else "plain").inc()
                    self._metrics.answers.labels("decode", instance.url).inc()
                    return await self._relay(request, instance, answer)
            except NoAnswer as error:
                self._count_fault("decode", self._decode, instance, error)
        self._metrics.requests.labels("failed").inc()
        raise _error(web.HTTPBadGateway, "no decode instance answered")

    async def models(self, request: web.Request) -> web.StreamResponse:
        """What the first decode instance that answers serves."""
        timeout = ClientTimeout(total=self._options.connect)
        for instance in self._decode.in_turn() or self._decode.last_resort():
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
        checks = [asyncio.ensure_future(self._is_healthy(each)) for each in self._decode.all]
        try:
            for check in asyncio.as_completed(checks):
                if await check:
                    return web.Response(text="ok")
        finally:
            for check in checks:
                check.cancel()
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
        for instance in self._prefill.in_turn():
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
                self._count_fault("prefill", self._prefill, instance, error)
                continue
            self._prefill.succeed(instance)
            self._metrics.answers.labels("prefill", instance.url).inc()
            return full
        return None

    def _count_fault(
        self, kind: str, instances: Instances, instance: Instance, error: Exception
    ) -> None:
        instances.fail(instance, at_once=not isinstance(error, NoAnswer) or error.at_once)
        self._metrics.faults.labels(kind).inc()
        log.warning("%s at %s: %s", kind, instance.url, _why(error))

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
                raise TimeoutError("neither answers nor is healthy")
            if time.monotonic() >= end:
                raise TimeoutError(f"healthy, and silent for {most:g} s")
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
            self._count_fault("decode", self._decode, instance, error)
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

    def _start_probes(self) -> None:
        """Check the health of those that have been left out for a while, in the background."""
        for instances in (self._prefill, self._decode):
            for instance in instances.to_probe():
                instance.is_probed = True
                task = asyncio.create_task(self._probe(instances, instance))
                self._probes.add(task)
                task.add_done_callback(self._probes.discard)

    async def _probe(self, instances: Instances, instance: Instance) -> None:
        """One that is healthy gets requests again. If it then fails, it is left out for longer."""
        try:
            if await self._is_healthy(instance):
                instance.open_until = None
            else:
                instances.fail(instance, at_once=True)
        finally:
            instance.is_probed = False


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


def serve(
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
