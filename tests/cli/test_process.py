"""The command line as a process of its own: torch absent, pipes broken, disks full."""

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request

import pytest

from kvstow import plan_model

KVSTOW = (sys.executable, "-m", "kvstow")

# Runs the command line while optional packages cannot be found.
WITHOUT = """
import importlib.abc, sys


class Absent(importlib.abc.MetaPathFinder):
    def find_spec(self, fullname, path=None, target=None):
        if fullname.partition(".")[0] in ("torch", "nixl", "transformers", "triton", "vllm"):
            raise ModuleNotFoundError(f"{fullname} is absent", name=fullname)
        return None


sys.meta_path.insert(0, Absent())
from kvstow.cli import main

main()
"""

ENVIRONMENT = {**os.environ, "COLUMNS": "80"}


def run(*command: str, **options) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, text=True, check=False, env=ENVIRONMENT, capture_output=True, **options
    )


def test_planning_needs_no_torch():
    finished = run(
        sys.executable, "-c", WITHOUT, "plan", "llama-3.1-8b", "--memory", "20GiB", "--json"
    )
    assert finished.returncode == 0, finished.stderr
    assert json.loads(finished.stdout)["num_slabs"] == 10240
    assert finished.stderr == ""


@pytest.mark.parametrize(
    "arguments",
    [
        ["demo"],
        ["bench", "transfer"],
        ["store", "convert", "STORE", "--to", "new", "--layout", "STORE/layout.json"],
    ],
)
def test_what_needs_torch_names_the_extra_where_there_is_none(tmp_path, arguments):
    from kvstow.plan.manifest import encode

    layout = plan_model("gemma-3-1b", num_slabs=2).layout
    (tmp_path / "layout.json").write_bytes(encode(layout))
    words = [word.replace("STORE", str(tmp_path)) for word in arguments]
    finished = run(sys.executable, "-c", WITHOUT, *words, cwd=tmp_path)
    assert finished.returncode == 1
    assert finished.stdout == ""
    assert "torch is not installed" in finished.stderr
    assert "hint: pip install 'kvstow[" in finished.stderr
    assert "Traceback" not in finished.stderr
    assert [file.name for file in tmp_path.iterdir()] == ["layout.json"]


def test_ctrl_c_ends_a_bench_and_its_processes():
    pytest.importorskip("nixl")
    process = subprocess.Popen(
        [*KVSTOW, "bench", "transfer", "--rows", "8", "--layers", "2"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    assert process.stderr is not None
    assert "moving" in process.stderr.readline()
    time.sleep(1)
    os.killpg(process.pid, signal.SIGINT)
    shown, talk = process.communicate(timeout=60)  # ends when no child holds the pipe any more
    assert process.returncode == 130
    assert shown == ""
    assert talk.endswith("interrupted\n")
    assert "Traceback" not in talk


@pytest.mark.parametrize("arguments", [["plan", "gpt-oss-20b", "--json"], ["compare", "qwen3-8b"]])
def test_the_heavy_packages_are_not_even_looked_for(arguments):
    program = (
        "import sys; from kvstow.cli import app; app(standalone_mode=False);"
        "heavy = {'torch', 'nixl', 'transformers', 'zmq', 'prometheus_client', 'rich.table'};"
        "print(sorted(heavy & set(sys.modules)), file=sys.stderr)"
    )
    finished = run(sys.executable, "-c", program, *arguments)
    assert finished.stderr.splitlines()[-1] == "[]"


def test_a_reader_that_leaves_ends_the_command_quietly():
    process = subprocess.Popen(
        [*KVSTOW, "plan", "deepseek-v4-pro", "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=ENVIRONMENT,
    )
    assert process.stdout is not None
    process.stdout.close()
    assert process.stderr is not None
    talk = process.stderr.read()
    process.stderr.close()
    assert process.wait() == 1
    assert "Traceback" not in talk
    assert "Exception" not in talk


def test_a_full_disk_is_an_error_and_no_traceback():
    with open("/dev/full", "w") as full:
        finished = subprocess.run(
            [*KVSTOW, "plan", "qwen3-8b", "--memory", "1GiB"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
            env=ENVIRONMENT,
        )
    assert finished.returncode == 1
    assert finished.stderr == "error: No space left on device\n"


def test_a_manifest_that_cannot_be_written_names_the_file(tmp_path):
    for target, reason in ((tmp_path, "Is a directory"), (tmp_path / "a" / "b", "No such file")):
        finished = run(*KVSTOW, "plan", "qwen3-8b", "--manifest", str(target), "--memory", "1GiB")
        assert finished.returncode == 2
        assert finished.stdout == ""
        assert finished.stderr.startswith(f"error: {target}: cannot be written: {reason}")


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_a_terminal_without_unicode_gets_an_answer(encoding):
    environment = {**ENVIRONMENT, "PYTHONIOENCODING": encoding, "PYTHONUTF8": "0"}
    finished = subprocess.run(
        [*KVSTOW, "plan", "qwen3-8b", "--memory", "1GiB"],
        capture_output=True,
        check=False,
        env=environment,
    )
    assert finished.returncode == 0, finished.stderr
    assert b"2,359,296" in finished.stdout


def test_a_router_says_where_it_listens_and_ctrl_c_ends_it():
    pytest.importorskip("aiohttp")
    words = ["route-requests", "--decode", "http://127.0.0.1:9", "--port", "0"]
    router = subprocess.Popen(
        [*KVSTOW, *words],
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    try:
        said = router.stderr.readline()
        url = re.fullmatch(r"note: (http://127.0.0.1:\d+) \(Ctrl-C ends it\)\n", said)[1]
        with urllib.request.urlopen(f"{url}/metrics", timeout=60) as answer:
            assert answer.status == 200
        router.send_signal(signal.SIGINT)
        assert router.wait(60) == 0
    finally:
        router.kill()
        router.communicate()


def test_version_and_help_need_no_model():
    from kvstow import __version__

    assert run(*KVSTOW, "--version").stdout.strip() == __version__
    shown = run(*KVSTOW, "--help")
    assert shown.returncode == 0
    for command in ("plan", "compare", "check"):
        assert command in shown.stdout
        described = run(*KVSTOW, command, "--help")
        assert described.returncode == 0
        assert max(map(len, described.stdout.splitlines())) <= 80


def test_help_lists_every_command_in_its_section():
    from kvstow.cli import SECTIONS

    shown = run(*KVSTOW, "--help").stdout
    for section, names in SECTIONS.items():
        _, _, below = shown.partition(f"\n{section}:\n")
        lines = below.partition("\n\n")[0].splitlines()
        assert {line.split()[0] for line in lines} == set(names)


def test_the_shell_completes_names_of_models_and_gpus():
    from kvstow.cli.options import complete_model
    from kvstow.cli.size import complete_gpu

    assert complete_model("GPT") == ["gpt-oss-20b", "gpt-oss-120b"]
    assert complete_gpu("a100") == ["a100-40", "a100-80"]
    assert "--install-completion" in run(*KVSTOW, "--help").stdout


def test_a_name_that_is_no_unicode_is_shown_with_question_marks():
    finished = run(*KVSTOW, "plan", "llama-3.1-8b", "--name", "\udcff", "--json")
    assert finished.returncode == 0, finished.stderr
    assert json.loads(finished.stdout)["model"] == "?"


@pytest.mark.parametrize(
    "command", [("plan",), ("route", "MODEL"), ("simulate", "--requests", "1", "--memory", "1GiB")]
)
def test_a_page_about_a_folder_whose_name_is_no_unicode_is_written(tmp_path, command):
    folder = tmp_path / "\udcff"
    folder.mkdir()
    config = {
        "model_type": "llama",
        "hidden_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
    }
    (folder / "config.json").write_text(json.dumps(config))
    words = [str(folder) if word == "MODEL" else word for word in command[1:]]
    page = tmp_path / "page.html"
    finished = run(*KVSTOW, command[0], str(folder), *words, "--html", str(page))
    assert finished.returncode == 0, finished.stderr
    assert "</html>" in page.read_text("utf-8")
