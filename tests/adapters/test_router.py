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

from kvstow.adapters.router import RouterOptions, application
from waiting import stop

TICKETS = {"do_remote_prefill": True, "kvstow": {"tickets": ["kvt2.x"]}}
COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"


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
        self.reply = b""
        """What it answers, whatever it is asked."""
        self.has_lost_client = False
        self.release = asyncio.Event()
        self.health_asked = 0
        app = web.Application(client_max_size=1 << 30)
        for path in (COMPLETIONS, CHAT):
            app.router.add_post(path, self._complete)
        app.router.add_get("/health", self._health)
        app.router.add_get("/v1/models", self._models)
        self.server = TestServer(app)

    @property
    def url(self) -> str:
        return str(self.server.make_url("")).rstrip("/")

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.asked.append(body)
        self.headers.append({name.lower(): value for name, value in request.headers.items()})
        if self.reply:
            return web.Response(body=self.reply, content_type="application/json")
        if self.hangs or self.is_stopped:
            try:
                await self.release.wait()
            except asyncio.CancelledError:
                self.has_lost_client = True
                raise
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

    async def _health(self, request: web.Request) -> web.StreamResponse:
        self.health_asked += 1
        if self.is_stopped:
            await self.release.wait()
        return web.Response(status=self.health_status)

    async def _models(self, request: web.Request) -> web.StreamResponse:
        return web.json_response({"data": [self.name]})


class Front:
    """The router, and a client of it."""

    def __init__(self, client: TestClient[Any, Any]) -> None:
        self.client = client

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
    quick = {"connect": 20.0, "silence": 0.1, "health": 20.0, "rest": 0.2}
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


# ── hostile instances and clients ─────────────────────────────────────────────────────


DEEP = b"[" * 100_000
NESTED = b'{"kv_transfer_params": {"x": ' + b"[" * 980 + b"]" * 980 + b"}}"


@pytest.mark.parametrize("reply", [DEEP, NESTED, b"no JSON"], ids=["deep", "nested", "text"])
def test_what_a_prefill_answers_that_is_no_json_counts_against_it_alone(reply: bytes):
    async def story() -> None:
        bad, good, decode = Engine("b"), Engine("g", tickets=True), Engine("d")
        bad.reply = reply
        async with running([bad, good], [decode], rest=3600) as front:
            assert [await front.text() for _ in range(6)] == ["d"] * 6
            assert await front.counts() == {"prefill": 1.0, "tickets": 6.0}
        assert len(bad.asked) == 1

    run(story)


@pytest.mark.parametrize(
    ("body", "prompt"),
    [
        ({"n": 3, "best_of": 4}, "Hello"),
        ({"prompt": ["one", "two"]}, "one"),
        ({"prompt": [[1, 2], [3]], "stream": True, "min_tokens": 4}, [1, 2]),
        ({"prompt": [1, 2, 3]}, [1, 2, 3]),
        ({"prompt": []}, []),
    ],
)
def test_what_becomes_several_requests_in_an_engine_carries_the_tickets_of_the_first_prompt(
    body: dict[str, Any], prompt: object
):
    async def story() -> None:
        prefill, decode = Engine("p", tickets=True), Engine("d")
        async with running([prefill], [decode]) as front:
            await front.client.post(COMPLETIONS, json={"model": "m", "prompt": "Hello", **body})
            assert await front.counts() == {"tickets": 1.0}
        one_token = {"max_tokens": 1, "n": 1, "kv_transfer_params": {"do_remote_decode": True}}
        assert prefill.asked == [{"model": "m", "prompt": prompt, **one_token}]
        sent = {"model": "m", "prompt": "Hello", **body, "kv_transfer_params": TICKETS}
        assert decode.asked == [sent]

    run(story)


def test_the_router_is_healthy_while_some_decode_instance_is():
    async def story() -> None:
        first, second = Engine("d"), Engine("e")
        async with running([Engine("p")], [first, second]) as front:
            for a, b, status in ((200, 200, 200), (503, 200, 200), (503, 503, 503)):
                first.health_status, second.health_status = a, b
                assert (await front.client.get("/health")).status == status

    run(story)


def test_the_router_is_not_healthy_before_any_decode_instance_can_be_reached():
    async def story() -> None:
        options = RouterOptions(health=5.0)
        app = application([], ["http://127.0.0.1:9"], options)
        async with TestClient(TestServer(app)) as client:
            assert (await client.get("/health")).status == 503

    run(story)


def test_a_body_that_does_not_come_is_not_waited_for():
    async def story() -> None:
        decode = Engine("d")
        async with running([], [decode], body=0.2) as front:
            host, port = front.client.server.host, front.client.server.port
            reader, writer = await asyncio.open_connection(host, port)
            writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n{")
            assert b" 408 " in await reader.readline()
            writer.close()
        assert decode.asked == []

    run(story)


def test_a_client_that_leaves_takes_its_request_along():
    async def story() -> None:
        decode = Engine("d")
        decode.hangs = True
        await decode.server.start_server()
        with served([], [decode.url]) as (port, _):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(request_head(2) + b"{}")
            await eventually(lambda: len(decode.asked) == 1)
            writer.close()
            await eventually(lambda: decode.has_lost_client)
        await decode.server.close()

    run(story)


def test_a_router_with_half_open_requests_and_a_stream_ends_when_it_is_terminated():
    async def story() -> None:
        decode = Engine("d")
        decode.hangs = True
        await decode.server.start_server()
        with served([], [decode.url]) as (port, router):
            writers: list[asyncio.StreamWriter] = []
            for sent in (b"", b"POST /v1", request_head(9), request_head(2) + b"{}") * 10:
                _, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(sent)
                writers.append(writer)
            await eventually(lambda: len(decode.asked) == 10)
            router.terminate()
            assert await asyncio.to_thread(router.wait, 40) == 0
            for writer in writers:
                writer.close()
        decode.release.set()
        await decode.server.close()

    run(story)


@pytest.mark.parametrize("sent", [b"", b"POST /v1/comple"])
def test_a_connection_without_a_whole_request_head_is_closed(sent: bytes):
    async def story() -> None:
        with served([], ["http://127.0.0.1:9"], keepalive=0.3) as (port, _):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(sent)
            assert await reader.read() == b""
            writer.close()

    run(story)


def request_head(length: int) -> bytes:
    return f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Length: {length}\r\n\r\n".encode()


@contextmanager
def served(
    prefill: list[str], decode: list[str], *, keepalive: float = 30.0, shutdown: float = 1.0
) -> Iterator[tuple[int, subprocess.Popen[str]]]:
    """A router of its own process, with its port."""
    start = "import kvstow.cli, kvstow.adapters.router as server; "
    start += f"server.KEEPALIVE_SECONDS, server.SHUTDOWN_SECONDS = {keepalive}, {shutdown}; "
    start += "kvstow.cli.main()"
    words = [sys.executable, "-c", start, "route-requests", "--port", "0"]
    words += [word for url in prefill for word in ("--prefill", url)]
    words += [word for url in decode for word in ("--decode", url)]
    router = subprocess.Popen(words, stderr=subprocess.PIPE, text=True)
    try:
        assert router.stderr is not None
        yield int(router.stderr.readline().split()[1].rsplit(":", 1)[1]), router
    finally:
        router.kill()
        router.communicate()
