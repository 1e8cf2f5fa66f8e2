"""`kvstow bench serving` against a server that streams tokens, and the profile that it writes."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from kvstow.cli import app
from kvstow.errors import TraceError
from kvstow.simulate import Pace, read_profile
from kvstow.testing.measure.serving import StreamedAnswer, decode_rate


class Engine(ThreadingHTTPServer):
    """Streams as many tokens as are asked for."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.asked: list[dict] = []
        self.status = 200

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    server: Engine

    def log_message(self, *words) -> None:
        pass

    def _head(self, kind: str) -> None:
        self.send_response(self.server.status)
        self.send_header("Content-Type", kind)
        self.end_headers()

    def do_GET(self) -> None:
        self._head("application/json")
        self.wfile.write(json.dumps({"data": [{"id": "tiny"}]}).encode())

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append(body)
        self._head("text/event-stream")
        for _ in range(body["max_tokens"]):
            self.wfile.write(b'data: {"choices": [{"text": "x"}]}\n\n')
            self.wfile.flush()
        self.wfile.write(b'data: {"choices": [], "usage": {}}\n\ndata: [DONE]\n\n')


@pytest.fixture
def engine():
    server = Engine()
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def invoke(*arguments: str) -> Result:
    result = CliRunner().invoke(app, list(arguments))
    assert result.exception is None or isinstance(result.exception, SystemExit)
    return result


def test_what_is_measured_is_a_profile_that_a_simulation_reads(engine, tmp_path):
    file = tmp_path / "profile.json"
    shape = ("--prompt-tokens", "300", "--requests", "3", "--new-tokens", "5", "--repeats", "2")
    result = invoke("bench", "serving", engine.url, *shape, "--output", str(file), "--json")
    assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout) == json.loads(file.read_text())
    profile = read_profile(file)
    assert profile.model == "tiny"
    assert profile.prefill_rate > 0
    assert profile.decode_rate > 0
    assert profile.step_seconds > 0
    lengths = sorted(len(body["prompt"]) for body in engine.asked)
    assert lengths == [16] * (1 + 2 + 3) + [300] * 2
    assert all(body["ignore_eos"] and body["stream"] for body in engine.asked)
    prompts = [tuple(body["prompt"]) for body in engine.asked]
    assert len(set(prompts)) == len(prompts)  # none is found cached
    shape = ("--memory", "1GiB", "--requests", "2", "--profile", str(file), "--json")
    assert invoke("simulate", "smollm2-135m", *shape).exit_code == 0


def test_decoding_is_measured_while_all_decode():
    early = StreamedAnswer(0.0, [1.0, 2.0, 3.0, 4.0])
    late = StreamedAnswer(0.0, [2.0, 2.5, 3.0, 3.5, 5.0])
    assert decode_rate([early, late]) == (2 + 3) / 2  # between 2 and 4
    apart = StreamedAnswer(6.0, [7.0, 8.0])
    assert decode_rate([early, apart]) == 6 / 8


def test_a_server_that_refuses_is_quoted(engine):
    engine.status = 404
    result = invoke("bench", "serving", engine.url)
    assert result.exit_code == 1
    assert "404" in result.stderr


@pytest.mark.parametrize("url", ["nonsense", "ftp://a", "http://"])
def test_what_is_no_url_is_not_asked(url):
    assert invoke("bench", "serving", url).exit_code == 2


def test_options_go_before_the_profile_and_the_profile_before_the_defaults(tmp_path):
    file = tmp_path / "profile.json"
    file.write_text('{"decode_rate": 50, "step_seconds": 0.5, "machine": "a desk"}')
    pace = read_profile(file).pace(Pace())
    assert (pace.decode_rate, pace.step_seconds, pace.prefill_rate) == (50, 0.5, float("inf"))
    (tmp_path / "t.jsonl").write_text('{"arrival": 0, "prompt_tokens": 10, "output_tokens": 4}')
    shape = ("simulate", "smollm2-135m", "--memory", "1GiB", "--trace", str(tmp_path / "t.jsonl"))
    asked = (*shape, "--profile", str(file), "--json")
    figures = json.loads(invoke(*asked).stdout)["policies"]["slab"]
    assert figures["token_seconds"]["mean"] == pytest.approx(0.5)
    figures = json.loads(invoke(*asked, "--step-seconds", "0.25").stdout)["policies"]["slab"]
    assert figures["token_seconds"]["mean"] == pytest.approx(0.25)


@pytest.mark.parametrize(
    "text", ["", "[]", '{"rate": 1}', '{"decode_rate": 0}', '{"step_seconds": "x"}', "\xff"]
)
def test_a_file_that_is_no_profile_is_refused_with_its_name(tmp_path: Path, text: str):
    file = tmp_path / "profile.json"
    file.write_bytes(text.encode("latin-1"))
    with pytest.raises(TraceError, match=r"profile\.json"):
        read_profile(file)
    result = invoke("simulate", "smollm2-135m", "--memory", "1GiB", "--profile", str(file))
    assert result.exit_code == 2
    assert str(file) in result.stderr
    assert invoke("simulate", "smollm2-135m", "--profile", str(tmp_path / "no")).exit_code == 2
