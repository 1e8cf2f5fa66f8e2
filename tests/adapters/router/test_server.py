"""The router between real HTTP servers on loopback."""

import asyncio
import json
import socket
import subprocess
import sys
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import pytest
from aiohttp import ClientError, web
from aiohttp.test_utils import TestClient, TestServer

from kvstow.adapters.router.prefixes import EventSource, Prefixes
from kvstow.adapters.router.server import ROUTER, RouterOptions, application
from kvstow.events.announce import Announcer, GroupKind
from kvstow.events.publisher import EventPublisher
from waiting import stop

TICKETS = {"do_remote_prefill": True, "kvstow": {"tickets": ["kvt2.x"]}}
COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
SIZE = 4


class Engine:
    """A server that answers as vLLM does, and remembers what it was asked."""

    def __init__(self, name: str, *, tickets: bool = False) -> None:
        self.name = name
        self.tickets = tickets
        self.asked: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.status = 200
        self.health_status = 200
        self.hangs = False
        self.is_stopped = False
        """It accepts connections and answers nothing, as a process that was stopped."""
        self.breaks_off = False
        self.falls_silent = False
        """It streams a piece and then nothing, and is healthy."""
        self.release = asyncio.Event()
        self.tokenized = 0
        self.health_asked = 0
        app = web.Application(client_max_size=1 << 30)
        for path in (COMPLETIONS, CHAT):
            app.router.add_post(path, self._complete)
        app.router.add_post("/tokenize", self._tokenize)
        app.router.add_get("/health", self._health)
        app.router.add_get("/v1/models", self._models)
        self.server = TestServer(app)
        self.publisher: EventPublisher | None = None

    @property
    def url(self) -> str:
        return str(self.server.make_url("")).rstrip("/")

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.asked.append(body)
        self.headers.append({name.lower(): value for name, value in request.headers.items()})
        if self.hangs or self.is_stopped:
            await self.release.wait()
        if self.status != 200:
            return web.json_response({"error": self.name}, status=self.status)
        if self.tickets:
            return web.json_response({"choices": [], "kv_transfer_params": TICKETS})
        if not body.get("stream") and not self.breaks_off and not self.falls_silent:
            return web.json_response({"choices": [{"text": self.name}]})
        reply = web.StreamResponse()
        reply.content_type = "text/event-stream" if body.get("stream") else "application/json"
        await reply.prepare(request)
        for piece in ("one", "two", "three"):
            await reply.write(f"data: {piece}\n\n".encode())
            if self.falls_silent:
                await self.release.wait()
        if self.breaks_off:
            assert request.transport is not None
            request.transport.abort()
        await reply.write_eof()
        return reply

    async def _tokenize(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.tokenized += 1
        if self.hangs or self.is_stopped:
            await self.release.wait()
        text = body.get("prompt") or "".join(m["content"] for m in body["messages"])
        return web.json_response({"tokens": [ord(letter) for letter in text]})

    async def _health(self, request: web.Request) -> web.StreamResponse:
        self.health_asked += 1
        if self.is_stopped:
            await self.release.wait()
        return web.Response(status=self.health_status)

    async def _models(self, request: web.Request) -> web.StreamResponse:
        return web.json_response({"data": [self.name]})

    def holds(self, text: str, medium: Any = "GPU", **about: str) -> None:
        """Publish that this engine holds the whole blocks of a text."""
        if self.publisher is None:
            self.publisher = EventPublisher("tcp://127.0.0.1:*", replay="tcp://127.0.0.1:*")
        tokens = [ord(letter) for letter in text]
        kind = GroupKind(index=0, block_tokens=SIZE, kind="full_attention")
        announcer = Announcer([kind])
        ends = range(SIZE, len(tokens) + 1, SIZE)
        hashes = [hash((text[:end], *about.items())) & 0xFFFFFFFF for end in ends]
        announcer.know(hashes, tokens, SIZE, **about)
        announcer.stored(medium, 0, hashes)
        self.publisher.publish(announcer.take())

    def source(self) -> EventSource:
        if self.publisher is None:
            self.publisher = EventPublisher("tcp://127.0.0.1:*", replay="tcp://127.0.0.1:*")
        return EventSource(self.url, self.publisher.address, self.publisher.replay_address)


class Front:
    """The router, and a client of it."""

    def __init__(self, client: TestClient[Any, Any]) -> None:
        self.client = client

    @property
    def prefixes(self) -> Prefixes:
        app = self.client.app
        assert app is not None
        found = app[ROUTER].prefixes
        assert found is not None
        return found

    async def ask(self, path: str = COMPLETIONS, **body: Any) -> Any:
        answer = await self.client.post(path, json={"model": "m", "prompt": "Hello", **body})
        return await answer.json()

    async def text(self, **body: Any) -> str:
        return (await self.ask(**body))["choices"][0]["text"]

    async def counts(self) -> dict[str, float]:
        lines = (await (await self.client.get("/metrics")).text()).splitlines()
        wanted = ("kvstow_router_requests_total", "kvstow_router_faults_total")
        return {
            line.split('"')[1]: float(line.rsplit(" ", 1)[1])
            for line in lines
            if line.startswith(wanted)
        }


@asynccontextmanager
async def running(
    prefill: list[Engine], decode: list[Engine], /, **options: Any
) -> AsyncIterator[Front]:
    engines = [*prefill, *decode]
    for engine in engines:
        await engine.server.start_server()
    if options.get("by_prefix"):
        options["events"] = tuple(engine.source() for engine in engines)
    quick = {"connect": 20.0, "silence": 0.1, "health": 20.0, "rest": 0.2, "tokenize": 20.0}
    app = application(
        [engine.url for engine in prefill],
        [engine.url for engine in decode],
        RouterOptions(**quick | options),
    )
    try:
        async with TestClient(TestServer(app)) as client:
            yield Front(client)
    finally:
        for engine in engines:
            engine.release.set()
            await engine.server.close()
            if engine.publisher is not None:
                engine.publisher.close()


def run(story: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(story(), 60))  # pyright: ignore[reportArgumentType]


async def eventually(true: Callable[[], bool]) -> None:
    for _ in range(1000):
        if true():
            return
        await asyncio.sleep(0.02)
    raise AssertionError("it never became true")


# ── prefill and decode ────────────────────────────────────────────────────────────────


def test_tickets_of_prefill_go_to_decode_and_the_answer_to_the_client():
    async def story() -> None:
        prefill, decode = Engine("p", tickets=True), Engine("d")
        async with running([prefill], [decode]) as front:
            assert await front.text(max_tokens=12, stream_options={}) == "d"
            assert await front.counts() == {"tickets": 1.0}
        assert prefill.asked == [
            {
                "model": "m",
                "prompt": "Hello",
                "max_tokens": 1,
                "n": 1,
                "kv_transfer_params": {"do_remote_decode": True},
            }
        ]
        (asked,) = decode.asked
        assert (asked["kv_transfer_params"], asked["max_tokens"]) == (TICKETS, 12)

    run(story)


def test_a_stream_is_passed_on_as_it_is():
    async def story() -> None:
        async with running([Engine("p", tickets=True)], [Engine("d")]) as front:
            answer = await front.client.post(CHAT, json={"messages": [], "stream": True})
            assert answer.content_type == "text/event-stream"
            assert await answer.text() == "data: one\n\ndata: two\n\ndata: three\n\n"

    run(story)


def test_an_answer_that_breaks_off_breaks_off_for_the_client_too():
    async def story() -> None:
        decode = Engine("d")
        decode.breaks_off = True
        async with running([], [decode]) as front:
            answer = await front.client.post(COMPLETIONS, json={"prompt": "x", "stream": True})
            with pytest.raises(ClientError):
                await answer.read()
            assert len(decode.asked) == 1

    run(story)


def test_without_prefill_instances_decode_computes_everything():
    async def story() -> None:
        decode = Engine("d")
        async with running([], [decode]) as front:
            assert await front.text() == "d"
            assert await front.counts() == {"plain": 1.0}
        assert "kv_transfer_params" not in decode.asked[0]

    run(story)


def test_headers_that_matter_reach_the_instances_and_no_others():
    async def story() -> None:
        decode = Engine("d")
        async with running([], [decode]) as front:
            headers = {"Authorization": "Bearer k", "X-Request-Id": "7", "Cookie": "secret"}
            await front.client.post(COMPLETIONS, json={"prompt": "x"}, headers=headers)
        (seen,) = decode.headers
        assert (seen["authorization"], seen["x-request-id"]) == ("Bearer k", "7")
        assert "cookie" not in seen

    run(story)


# ── what clients may send ─────────────────────────────────────────────────────────────


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("stream", [False, True])
def test_a_clients_transfer_parameters_reach_nobody(path: str, stream: bool):
    forged = {"do_remote_prefill": True, "kvstow": {"tickets": ["forged"]}}

    async def story() -> None:
        silent, decode = Engine("p"), Engine("d")  # its prefill gives no tickets
        async with running([silent], [decode]) as front:
            await front.client.post(
                path,
                json={
                    "model": "m",
                    "prompt": "Hello",
                    "stream": stream,
                    "kv_transfer_params": forged,
                    "vllm_xargs": {"kv_transfer_params": forged, "other": 1},
                },
            )
        for engine in (silent, decode):
            assert "forged" not in json.dumps(engine.asked)
            assert engine.asked[0]["vllm_xargs"] == {"other": 1}
        assert silent.asked[0]["kv_transfer_params"] == {"do_remote_decode": True}
        assert "kv_transfer_params" not in decode.asked[0]

    run(story)


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[1]", b'"x"', b"null", b"\xff\xfe", b"[" * 100_000, b"{} x"]
)
def test_a_body_that_is_no_json_object_is_a_bad_request(body: bytes):
    async def story() -> None:
        prefill, decode = Engine("p", tickets=True), Engine("d")
        async with running([prefill], [decode]) as front:
            answer = await front.client.post(COMPLETIONS, data=body)
            assert answer.status == 400
            assert "JSON" in (await answer.json())["error"]["message"]
        assert prefill.asked == decode.asked == []

    run(story)


def test_a_body_of_any_depth_is_carried_or_is_a_bad_request():
    async def story() -> None:
        prefill, decode = Engine("p", tickets=True), Engine("d")
        async with running([prefill], [decode]) as front:
            found: list[int] = []
            for depth in range(800, 1010, 3):
                body = b'{"prompt": "x", "deep": ' + b"[" * depth + b"]" * depth + b"}"
                found.append((await front.client.post(COMPLETIONS, data=body)).status)
            assert found == sorted(found)
            assert set(found) <= {200, 400}

    run(story)


def test_a_body_that_is_too_long_is_refused():
    async def story() -> None:
        decode = Engine("d")
        async with running([], [decode], max_body=1000) as front:
            answer = await front.client.post(COMPLETIONS, json={"prompt": "x" * 1000})
            assert answer.status == 413
            assert await front.text(prompt="x" * 900) == "d"
        assert len(decode.asked) == 1

    run(story)


@pytest.mark.parametrize("how", ["in chunks", "compressed"])
def test_a_body_that_does_not_say_its_length_is_refused_where_it_exceeds_the_limit(how: str):
    async def pieces(body: bytes) -> AsyncIterator[bytes]:
        yield body[:500]
        yield body[500:]

    async def story() -> None:
        decode = Engine("d")
        async with running([], [decode], max_body=1000) as front:
            for length, status in ((900, 200), (100_000, 413)):
                body = json.dumps({"prompt": "x" * length}).encode()
                packed = zlib.compress(body)
                sent = pieces(body) if how == "in chunks" else packed
                headers = {} if how == "in chunks" else {"Content-Encoding": "deflate"}
                assert len(packed) < 1000
                answer = await front.client.post(COMPLETIONS, data=sent, headers=headers)
                assert answer.status == status
        assert len(decode.asked) == 1

    run(story)


def test_a_request_that_the_engine_refuses_is_refused_with_its_words():
    async def story() -> None:
        prefill, decode = Engine("p"), Engine("d")
        prefill.status = decode.status = 422
        async with running([prefill], [decode]) as front:
            answer = await front.client.post(COMPLETIONS, json={"prompt": 3})
            assert answer.status == 422
            assert await answer.json() == {"error": "d"}
            assert await front.counts() == {"plain": 1.0}

    run(story)


# ── instances that fail ───────────────────────────────────────────────────────────────


def test_a_hung_prefill_costs_one_request_a_moment_and_the_next_ones_nothing():
    async def story() -> None:
        prefill, decode = Engine("p", tickets=True), Engine("d")
        prefill.hangs, prefill.health_status = True, 503
        async with running([prefill], [decode], prefill=3600, rest=3600) as front:
            assert await front.text() == "d"
            for _ in range(5):
                assert await front.text() == "d"
            assert await front.counts() == {"prefill": 1.0, "plain": 6.0}
        assert len(prefill.asked) == 1

    run(story)


def test_a_stopped_prefill_costs_the_requests_under_way_a_moment_and_the_next_ones_nothing():
    async def story() -> None:
        prefill, decode = Engine("p", tickets=True), Engine("d")
        prefill.is_stopped = True
        limits = {"prefill": 3600, "rest": 3600, "health": 0.3}
        async with running([prefill], [decode], **limits) as front:
            assert await asyncio.gather(*(front.text() for _ in range(3))) == ["d"] * 3
            asked, health_asked = len(prefill.asked), prefill.health_asked
            assert asked == 3
            assert [await front.text() for _ in range(5)] == ["d"] * 5
            assert await front.counts() == {"prefill": 3.0, "plain": 8.0}
            assert (len(prefill.asked), prefill.health_asked) == (asked, health_asked)

    run(story)


def test_a_slow_prefill_that_says_it_is_healthy_is_waited_for():
    async def story() -> None:
        prefill, decode = Engine("p", tickets=True), Engine("d")
        prefill.hangs = True
        async with running([prefill], [decode]) as front:
            asking = asyncio.create_task(front.text())
            await eventually(lambda: prefill.health_asked >= 2)
            prefill.release.set()
            assert await asking == "d"
            assert await front.counts() == {"tickets": 1.0}

    run(story)


def test_a_prefill_beyond_its_time_limit_is_given_up_and_another_one_asked():
    async def story() -> None:
        slow, other, decode = Engine("s", tickets=True), Engine("o", tickets=True), Engine("d")
        slow.hangs = True
        async with running([slow, other], [decode], prefill=1.0, rest=3600) as front:
            assert await front.text() == "d"
            assert await front.counts() == {"prefill": 1.0, "tickets": 1.0}
            assert await front.text() == "d"
        assert (len(slow.asked), len(other.asked)) == (1, 2)

    run(story)


def test_a_sole_prefill_that_is_healthy_and_never_answers_costs_one_request_the_time_limit():
    """An engine that is stuck behind a server that is well; the next ones do not wait for it."""

    async def story() -> None:
        prefill, decode = Engine("p", tickets=True), Engine("d")
        prefill.hangs = True
        async with running([prefill], [decode], prefill=0.5, rest=3600) as front:
            assert [await front.text() for _ in range(6)] == ["d"] * 6
            assert await front.counts() == {"prefill": 1.0, "plain": 6.0}
        assert len(prefill.asked) == 1
        assert prefill.health_asked >= 1

    run(story)


def test_an_instance_that_nobody_listens_at_is_passed_over():
    async def story() -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            dead = f"http://127.0.0.1:{probe.getsockname()[1]}"
        decode = Engine("d")
        await decode.server.start_server()
        app = application([dead], [dead, decode.url], RouterOptions(rest=3600))
        async with TestClient(TestServer(app)) as client:
            front = Front(client)
            for _ in range(4):
                assert await front.text() == "d"
            assert await front.counts() == {"prefill": 1.0, "decode": 1.0, "plain": 4.0}
            assert "kvstow_router_left_out 2.0" in await (await client.get("/metrics")).text()
        await decode.server.close()

    run(story)


def test_a_hung_decode_is_given_up_for_another_one():
    async def story() -> None:
        hung, other = Engine("h"), Engine("o")
        hung.hangs, hung.health_status = True, 500
        async with running([], [hung, other], rest=3600) as front:
            assert await front.text() == "o"
            assert await front.text() == "o"
            assert await front.text() == "o"
        assert len(hung.asked) == 1

    run(story)


STREAMING = """
import asyncio, sys
from aiohttp import web

async def complete(request):
    reply = web.StreamResponse()
    reply.content_type = "text/event-stream"
    await reply.prepare(request)
    while True:
        await reply.write(b"data: more\\n\\n")
        await asyncio.sleep(0.01)

async def health(request):
    return web.Response()

async def main():
    app = web.Application()
    app.router.add_post("/v1/completions", complete)
    app.router.add_get("/health", health)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    print(site._server.sockets[0].getsockname()[1], flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


@contextmanager
def streaming_process() -> Iterator[tuple[int, str]]:
    """The process of an engine that streams without end, and its URL."""
    command = [sys.executable, "-c", STREAMING]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process.pid, f"http://127.0.0.1:{int(process.stdout.readline())}"
        finally:
            process.kill()


def events(stream: bytes) -> list[str]:
    """What a client of server-sent events sees."""
    lines = (block.strip() for block in stream.decode().split("\n\n"))
    return [line.removeprefix("data: ") for line in lines if line]


def test_a_stream_of_a_decode_that_was_stopped_ends_with_an_error_and_it_is_left_out():
    async def story() -> None:
        other = Engine("o")
        await other.server.start_server()
        limits = RouterOptions(silence=0.2, health=0.5, rest=3600)
        with streaming_process() as (pid, url):
            app = application([], [url, other.url], limits)
            async with TestClient(TestServer(app)) as client:
                answer = await client.post(COMPLETIONS, json={"prompt": "x", "stream": True})
                first = await answer.content.readany()
                await asyncio.to_thread(stop, pid)
                *before, error, done = events(first + await answer.content.read())
                assert (set(before), done) == ({"more"}, "[DONE]")
                assert json.loads(error)["error"]["code"] == 504
                assert "decode instance hangs" in json.loads(error)["error"]["message"]
                front = Front(client)
                assert await front.counts() == {"decode": 1.0, "plain": 1.0}
                assert [await front.text() for _ in range(3)] == ["o"] * 3
        await other.server.close()

    run(story)


def test_a_healthy_decode_that_falls_silent_is_given_up_after_the_idle_limit():
    """An engine that is stuck behind a server that is well."""

    async def story() -> None:
        silent, other = Engine("s"), Engine("o")
        silent.falls_silent = True
        async with running([], [silent, other], idle=0.5, rest=3600) as front:
            answer = await front.client.post(COMPLETIONS, json={"prompt": "x", "stream": True})
            first, error, done = events(await answer.read())
            assert (first, done) == ("one", "[DONE]")
            assert "silent for 0.5 s" in json.loads(error)["error"]["message"]
            assert [await front.text() for _ in range(3)] == ["o"] * 3
            assert await front.counts() == {"decode": 1.0, "plain": 4.0}
        assert silent.health_asked >= 1

    run(story)


def test_an_answer_that_is_no_stream_breaks_off_where_the_decode_falls_silent():
    async def story() -> None:
        silent = Engine("s")
        silent.falls_silent = True
        async with running([], [silent], idle=0.3, rest=3600) as front:
            answer = await front.client.post(COMPLETIONS, json={"prompt": "x"})
            with pytest.raises(ClientError):
                await answer.read()
            assert (await front.counts())["decode"] == 1.0

    run(story)


def test_a_stream_may_pause_for_longer_than_the_silence_that_asks_for_health():
    async def story() -> None:
        decode = Engine("d")
        decode.falls_silent = True
        async with running([], [decode]) as front:
            answer = await front.client.post(COMPLETIONS, json={"prompt": "x", "stream": True})
            await eventually(lambda: decode.health_asked >= 2)
            decode.release.set()
            assert events(await answer.read()) == ["one", "two", "three"]
            assert await front.counts() == {"plain": 1.0}

    run(story)


def test_an_instance_that_is_healthy_again_is_asked_again():
    async def story() -> None:
        prefill, decode = Engine("p", tickets=True), Engine("d")
        prefill.hangs, prefill.health_status = True, 503
        async with running([prefill], [decode], rest=0.05) as front:
            await front.text()
            assert (await front.counts())["plain"] == 1.0
            prefill.hangs, prefill.health_status = False, 200
            for _ in range(200):
                await front.text()
                if "tickets" in await front.counts():
                    break
                await asyncio.sleep(0.02)
            assert (await front.counts())["prefill"] == 1.0
            assert (await front.counts())["tickets"] >= 1.0

    run(story)


def test_some_answers_of_5xx_do_not_leave_an_instance_out():
    async def story() -> None:
        prefill, decode = Engine("p", tickets=True), Engine("d")
        prefill.status = 500
        async with running([prefill], [decode], rest=3600) as front:
            await front.text()
            await front.text()
            prefill.status = 200
            await front.text()
            assert await front.counts() == {"prefill": 2.0, "plain": 2.0, "tickets": 1.0}

    run(story)


def test_when_every_decode_fails_the_client_hears_so_and_the_next_one_is_tried_all_the_same():
    async def story() -> None:
        decode = Engine("d")
        decode.status = 500
        async with running([], [decode], rest=3600) as front:
            for _ in range(4):
                answer = await front.client.post(COMPLETIONS, json={"prompt": "x"})
                assert answer.status == 502
                assert "no decode instance" in (await answer.json())["error"]["message"]
            decode.status = 200
            assert await front.text() == "d"
        assert len(decode.asked) == 5

    run(story)


def test_models_are_those_of_a_decode_instance():
    async def story() -> None:
        async with running([Engine("p")], [Engine("d")]) as front:
            assert await (await front.client.get("/v1/models")).json() == {"data": ["d"]}
            assert await (await front.client.get("/health")).text() == "ok"

    run(story)


# ── prefixes ──────────────────────────────────────────────────────────────────────────

PROMPT = "The capital of France is"


async def heard(front: Front, *engines: Engine) -> None:
    """Wait until the router knows of blocks of these engines."""
    index = front.prefixes.index
    await eventually(lambda: all(index.num_blocks(engine.url) for engine in engines))


def test_the_instance_with_the_longest_prefix_prefills_and_decodes():
    async def story() -> None:
        prefill = [Engine(f"p{i}", tickets=True) for i in range(3)]
        decode = [Engine(f"d{i}") for i in range(3)]
        async with running(prefill, decode, by_prefix=True) as front:
            prefill[1].holds(PROMPT[:8])
            prefill[2].holds(PROMPT[:16], "STORAGE")
            decode[1].holds(PROMPT[:12], "CPU")
            await heard(front, prefill[1], prefill[2], decode[1])
            for _ in range(4):
                assert await front.text(prompt=PROMPT) == "d1"
            assert [len(each.asked) for each in prefill] == [0, 0, 4]
            metrics = await (await front.client.get("/metrics")).text()
            for kind, who, count in (("prefill", prefill[2], 4), ("decode", decode[1], 4)):
                answers = f'kvstow_router_answers_total{{kind="{kind}",url="{who.url}"}}'
                assert f"{answers} {count}.0" in metrics
            assert metrics.count("kvstow_router_answers_total{") == 2
            for who, tier, count in ((prefill[2], "disk", 4), (decode[1], "host", 3)):
                blocks = f'kvstow_router_prefix_blocks{{tier="{tier}",url="{who.url}"}}'
                assert f"{blocks} {count}.0" in metrics
        assert 'kvstow_router_prompt_tokens_total{where="held"} 48.0' in metrics
        assert 'kvstow_router_prompt_tokens_total{where="not held"} 48.0' in metrics

    run(story)


def test_token_ids_and_chats_are_found_too_and_adapters_and_salts_kept_apart():
    async def story() -> None:
        decode = [Engine(f"d{i}") for i in range(3)]
        async with running([], decode, by_prefix=True) as front:
            decode[1].holds(PROMPT)
            decode[2].holds(PROMPT, adapter="poems", salt="tenant")
            await heard(front, decode[1], decode[2])
            ids = [ord(letter) for letter in PROMPT]
            assert await front.text(prompt=ids) == "d1"
            messages = [{"role": "user", "content": PROMPT}]
            chat = await front.ask(CHAT, prompt=None, messages=messages)
            assert chat["choices"][0]["text"] == "d1"
            mine = {"prompt": ids, "model": "poems", "cache_salt": "tenant"}
            assert await front.text(**mine) == "d2"
            others = [await front.text(**mine | {"cache_salt": "x"}) for _ in range(3)]
            assert sorted(others) == ["d0", "d1", "d2"]

    run(story)


@pytest.mark.parametrize("token", [-1, 1 << 32, 1 << 70, True, 1.0, "x", None])
def test_what_is_no_token_is_left_to_the_engine_to_refuse(token: object):
    async def story() -> None:
        decode = Engine("d")
        async with running([], [decode], by_prefix=True) as front:
            decode.holds(PROMPT)
            await heard(front, decode)
            ids = [ord(letter) for letter in PROMPT]
            assert await front.text(prompt=[*ids, token]) == "d"
        assert decode.asked[0]["prompt"] == [*ids, token]

    run(story)


def test_load_outweighs_a_prefix():
    async def story() -> None:
        decode = [Engine("d0"), Engine("d1")]
        async with running([], decode, by_prefix=True) as front:
            decode[1].holds(PROMPT)
            await heard(front, decode[1])
            decode[1].hangs = True
            waiting = asyncio.create_task(front.text(prompt=PROMPT))
            await eventually(lambda: len(decode[1].asked) == 1)
            assert await front.text(prompt=PROMPT[:16] + "another country") == "d0"
            decode[1].release.set()
            assert await waiting == "d1"

    run(story)


def test_a_failed_instance_is_left_out_whatever_it_holds():
    async def story() -> None:
        decode = [Engine("d0"), Engine("d1")]
        async with running([], decode, by_prefix=True, rest=3600) as front:
            decode[1].holds(PROMPT)
            await heard(front, decode[1])
            decode[1].hangs, decode[1].health_status = True, 503
            assert await front.text(prompt=PROMPT) == "d0"
            assert await front.text(prompt=PROMPT) == "d0"
        assert len(decode[1].asked) == 1

    run(story)


def test_an_instance_that_was_stopped_is_asked_for_tokens_once():
    async def story() -> None:
        stopped, decode = Engine("s"), Engine("d")
        limits = {"tokenize": 0.3, "health": 0.3, "rest": 3600}
        async with running([], [stopped, decode], by_prefix=True, **limits) as front:
            decode.holds(PROMPT)
            await heard(front, decode)
            stopped.is_stopped = True
            assert [await front.text(prompt=PROMPT) for _ in range(4)] == ["d"] * 4
            assert (await front.counts())["decode"] == 1.0
        assert (stopped.tokenized, len(stopped.asked)) == (1, 0)

    run(story)


def test_an_instance_that_is_slow_with_tokens_and_healthy_is_not_left_out():
    async def story() -> None:
        slow = Engine("s")
        async with running([], [slow], by_prefix=True, tokenize=0.1) as front:
            slow.holds(PROMPT)
            await heard(front, slow)
            slow.hangs = True
            asking = asyncio.create_task(front.text(prompt=PROMPT))
            await eventually(lambda: len(slow.asked) == 1)
            slow.release.set()
            assert await asking == "s"
            assert await front.counts() == {"plain": 1.0}

    run(story)


def test_turns_are_taken_where_nobody_says_the_tokens():
    async def story() -> None:
        decode = [Engine("d0"), Engine("d1")]
        async with running([], decode, by_prefix=True) as front:
            texts = [await front.text(prompt=PROMPT) for _ in range(4)]
            assert sorted(texts) == ["d0", "d0", "d1", "d1"]
            assert decode[0].tokenized + decode[1].tokenized == 0  # nobody holds anything
            decode[1].holds(PROMPT)
            await heard(front, decode[1])
            texts = [await front.text(prompt=[PROMPT, PROMPT]) for _ in range(4)]
            assert sorted(texts) == ["d0", "d0", "d1", "d1"]

    run(story)


def test_turns_are_taken_where_nobody_holds_a_text():
    async def story() -> None:
        decode = [Engine("d0"), Engine("d1")]
        async with running([], decode, by_prefix=True) as front:
            decode[1].holds(PROMPT)
            await heard(front, decode[1])
            texts = [await front.text(prompt=f"{k} bottles of beer") for k in range(4)]
            assert sorted(texts) == ["d0", "d0", "d1", "d1"]
            assert decode[0].tokenized + decode[1].tokenized == 4

    run(story)


def test_what_an_instance_held_is_forgotten_when_its_events_end():
    async def story() -> None:
        decode = [Engine("d0"), Engine("d1")]
        async with running([], decode, by_prefix=True) as front:
            decode[1].holds(PROMPT)
            await heard(front, decode[1])
            assert await front.text(prompt=PROMPT) == "d1"
            assert decode[1].publisher is not None
            decode[1].publisher.close()
            await eventually(lambda: not front.prefixes.index.num_blocks(decode[1].url))
            texts = {await front.text(prompt=PROMPT) for _ in range(4)}
            assert texts == {"d0", "d1"}

    run(story)
