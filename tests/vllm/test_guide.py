"""The commands of docs/guides/vllm.md, word by word: two servers, the router, curl.

`DIR` stands for a model's folder, and `{…}` for what the answer before it carries. The directory
and the sizes of the tiers are those of a small machine.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from serving import START_SECONDS, Launch, environment

from kvstow.adapters.vllm.counts import vllm_counts

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "vllm.md"
PARIS = " Paris"


def blocks(heading: str) -> list[str]:
    """The shell blocks under a heading of the guide."""
    section = GUIDE.read_text().split(f"\n## {heading}\n")[1].split("\n## ")[0]
    return re.findall(r"^```bash\n(.*?)^```", section, re.MULTILINE | re.DOTALL)


def commands(block: str) -> list[str]:
    """The commands of a block: a line that is not indented begins one."""
    return [each for each in re.split(r"\n(?=\S)", block.strip()) if not each.startswith("#")]


@contextmanager
def shells(parts: list[str], model: Path, logs: Path) -> Iterator[None]:
    """Each command in a shell of its own, with the exports of the block before it."""
    exports = "\n".join(part for part in parts if part.startswith("export "))
    env = environment(Launch(model=model, name="m", rows=False)) | {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    }
    started: list[subprocess.Popen[bytes]] = []
    try:
        for part in parts:
            if part.startswith("export "):
                continue
            words = f"{exports}\n{part.replace('DIR', str(model))}"
            with (logs / f"shell-{len(started)}.log").open("wb") as out:
                started.append(
                    subprocess.Popen(
                        ["bash", "-c", words],
                        env=env,
                        stdout=out,
                        stderr=subprocess.STDOUT,
                        start_new_session=True,
                    )
                )
        yield
    finally:
        for process in started:
            os.killpg(process.pid, signal.SIGTERM)
        for process in started:
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)


def await_answer(url: str) -> None:
    until = time.monotonic() + START_SECONDS
    while time.monotonic() < until:
        try:
            urllib.request.urlopen(url, timeout=5).close()
            return
        except OSError:
            time.sleep(1)
    raise AssertionError(f"{url} does not answer")


def said(command: str) -> dict[str, object]:
    done = subprocess.run(
        ["bash", "-c", command.replace("curl ", "curl -sS ", 1)], capture_output=True, check=True
    )
    return json.loads(done.stdout)


def counted(port: int) -> dict[str, float]:
    with urllib.request.urlopen(f"http://localhost:{port}/metrics", timeout=60) as answer:
        return vllm_counts(text_string_to_metric_families(answer.read().decode()))


def test_two_servers_and_a_router_as_the_guide_starts_them(smollm2: Path, logs: Path):
    servers, curls = blocks("Two servers")
    with shells(commands(servers), smollm2, logs):
        for port in (8001, 8002, 8000):
            await_answer(f"http://localhost:{port}/health")
        first, second = commands(curls)
        tickets = said(first)["kv_transfer_params"]
        assert "{…}" in second
        answer = said(second.replace("{…}", json.dumps(tickets)))
        assert answer["choices"][0]["text"].startswith(PARIS)  # pyright: ignore
        assert counted(8002)["pulls accepted"] == 1
        routed = said(
            re.sub(r", \"kv_transfer_params\".*?\}\}'", "}'", first, flags=re.DOTALL)
            .replace("8001", "8000")
            .replace('"max_tokens": 1', '"max_tokens": 4')
        )
        assert routed["choices"][0]["text"].startswith(PARIS)  # pyright: ignore
        until = time.monotonic() + 60
        while counted(8002)["pulls accepted"] < 2 and time.monotonic() < until:
            time.sleep(0.5)
        assert counted(8002)["pulls accepted"] == 2
        (rename,) = (block for block in blocks("Identity") if "update_weight_version" in block)
        for port in ("8001", "8002"):
            for command in commands(rename.replace("NEW", str(smollm2))):
                said(command.replace("8001", port))
        tickets = said(first)["kv_transfer_params"]
        said(second.replace("{…}", json.dumps(tickets)))
        until = time.monotonic() + 60
        while counted(8002)["pulls accepted"] < 3 and time.monotonic() < until:
            time.sleep(0.5)
        assert counted(8002)["pulls accepted"] == 3


def test_offloading_as_the_guide_turns_it_on(smollm2: Path, logs: Path, tmp_path: Path):
    (block,) = blocks("Offloading")
    smaller = {
        "/var/cache": str(tmp_path),
        "8589934592": str(1 << 28),
        "107374182400": str(1 << 30),
    }
    command = block
    for given, ours in smaller.items():
        assert given in command
        command = command.replace(given, ours)
    with shells(commands(command), smollm2, logs):
        await_answer("http://localhost:8000/health")
        prompt = list(range(1000, 1300))
        body = json.dumps({"model": str(smollm2), "prompt": prompt, "max_tokens": 4})
        ask = f"curl localhost:8000/v1/completions -H 'Content-Type: application/json' -d '{body}'"
        said(ask)
        until = time.monotonic() + 60
        while counted(8000).get("stored_rows", 0) < 2 and time.monotonic() < until:
            time.sleep(0.5)
        assert counted(8000)["stored_rows"] == 2
    assert any((tmp_path / "kvstow").iterdir())
