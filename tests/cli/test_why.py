"""`kvstow why`, run on a store that another process has made."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file
from typer.testing import CliRunner

from kvstow.blocks.ledger import Ledger
from kvstow.blocks.pool import Pool
from kvstow.blocks.prompt import Prompt
from kvstow.cli import app
from kvstow.memory.arena import Arena
from kvstow.offload.store import Store
from kvstow.plan.group import grouped
from kvstow.plan.identity import Identity, config_fields
from kvstow.plan.pack import packed
from kvstow.plan.retention import Full
from offloading import IDENTITY, layer

TOKENS = list(range(300, 316))


@pytest.fixture
def store(tmp_path: Path) -> Path:
    layout = packed(grouped([layer("l.0", Full())]), num_slabs=20).identified(IDENTITY)
    arena, ledger = Arena(layout), Ledger(Pool(layout))
    with Store(disk=tmp_path / "kv", disk_bytes="2MiB", journal="tokens") as made:
        made.save(arena, ledger.blocks(ledger.admit(16).request), Prompt.of(np.array(TOKENS)))
    return tmp_path / "kv"


def why(*arguments: object, stdin: str | None = None):
    return CliRunner().invoke(app, ["why", *map(str, arguments)], input=stdin)


def test_the_first_differing_token_is_said_and_printed_as_json(store: Path, tmp_path: Path):
    asked = [*TOKENS[:10], 7, *TOKENS[11:]]
    result = why(store, "--tokens", json.dumps(asked))
    assert result.exit_code == 0
    assert "8 of 16 tokens are found: differs" in result.stdout
    assert "token 10 is 7, and 310" in result.stdout
    file = tmp_path / "tokens.json"
    file.write_text(json.dumps(asked))
    for given, stdin in ((file, None), ("-", json.dumps(asked))):
        found = json.loads(why(store, "--tokens", given, "--json", stdin=stdin).stdout)
        assert (found["reason"], found["token"], found["found_tokens"]) == ("differs", 10, 8)
        assert (found["stored_token"], found["asked_token"]) == (310, 7)


def test_salt_and_adapter_of_the_request_are_compared(store: Path):
    found = json.loads(why(store, "--tokens", TOKENS, "--salt", "me", "--json").stdout)
    assert found["reason"] == "salt"
    found = json.loads(why(store, "--tokens", TOKENS, "--adapter", "poems", "--json").stdout)
    assert found["differences"] == [{"field": "adapter", "stored": "", "asked": "poems"}]


def test_text_is_tokenized_by_the_models_own_tokenizer(store: Path, tmp_path: Path):
    words = {f"w{i}": i for i in range(300, 316)}
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {"type": "Whitespace"},
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": words, "unk_token": "w300"},
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    result = why(store, "--text", " ".join(words), "--tokenizer", tmp_path)
    assert "16 of 16 tokens are found: found" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "give the prompt once"),
        (["--tokens", "[1]", "--text", "x"], "give the prompt once"),
        (["--tokens", "{}"], "cannot be read"),
        (["--tokens", "/no/such/file"], "from '/no/such/file': No such file"),
        (["--tokens", "1,2,3"], "hint: --tokens '[1, 2, 3]'"),
        (["--tokens", '["a"]'], "whole numbers"),
        (["--tokens", "[[1]]"], "whole numbers"),
        (["--tokens", "[-1]"], "not all in"),
        (["--text", "x"], "--tokenizer"),
        (["--text", "x", "--tokenizer", "/no"], "no such file"),
    ],
)
def test_a_prompt_that_is_not_one_is_refused(store: Path, arguments: list[str], said: str):
    result = why(store, *arguments)
    assert result.exit_code == 2
    assert said in result.stderr


def test_a_directory_without_a_store_is_refused(tmp_path: Path):
    result = why(tmp_path, "--tokens", "[1]")
    assert result.exit_code == 2
    assert "no store there" in result.stderr


def checkpoint(folder: Path, theta: float, weight: float) -> Path:
    folder.mkdir()
    config = {"model_type": "llama", "rope_theta": theta, "architectures": ["X"]}
    (folder / "config.json").write_text(json.dumps(config))
    save_file({"w": np.full(4, weight, np.float32)}, str(folder / "model.safetensors"))
    return folder


def test_the_identity_of_another_checkpoint_is_compared_field_by_field(tmp_path: Path):
    """As vLLM runs it: what only an engine knows of its model counts as equal."""
    own, other, other_rope = (
        checkpoint(tmp_path / name, theta, weight)
        for name, theta, weight in (("own", 1e4, 1.0), ("other", 1e4, 2.0), ("rope", 5e5, 1.0))
    )
    identity = Identity.of(own, model="m", kv_dtype="float32", interior="keys transposed")
    config = tuple(sorted([*identity.config, *config_fields({"run": {"dtype": "float32"}})]))
    layout = packed(grouped([layer("l.0", Full())]), num_slabs=20)
    layout = layout.identified(replace(identity, config=config))
    arena, ledger = Arena(layout), Ledger(Pool(layout))
    with Store(disk=tmp_path / "kv", disk_bytes="2MiB") as made:
        made.save(arena, ledger.blocks(ledger.admit(16).request), Prompt.of(np.array(TOKENS)))

    def asked(model: Path) -> dict[str, Any]:
        told = why(tmp_path / "kv", "--tokens", TOKENS, "--model", model, "--json")
        return json.loads(told.stdout)

    assert asked(own)["reason"] == "found"
    found = asked(other)
    assert (found["reason"], [each["field"] for each in found["differences"]]) == (
        "identity",
        ["weights"],
    )
    (difference,) = asked(other_rope)["differences"]
    assert (difference["stored"], difference["asked"]) == ("10000.0", "500000.0")


def test_a_store_that_a_model_in_memory_filled_is_recognised(tmp_path: Path):
    own = checkpoint(tmp_path / "own", 1e4, 1.0)
    rope = checkpoint(tmp_path / "rope", 5e5, 1.0)
    config = {"model_type": "llama", "rope_theta": 1e4, "architectures": ["X"]}
    identity = Identity.of_tensors("m", config, [("w", "f32", b"1234")], kv_dtype="float32")
    layout = packed(grouped([layer("l.0", Full())]), num_slabs=20).identified(identity)
    arena, ledger = Arena(layout), Ledger(Pool(layout))
    with Store(disk=tmp_path / "kv", disk_bytes="2MiB") as made:
        made.save(arena, ledger.blocks(ledger.admit(16).request), Prompt.of(np.array(TOKENS)))
    text = why(tmp_path / "kv", "--tokens", TOKENS, "--model", own).stdout
    assert "16 of 16 tokens are found: found" in text
    assert "cannot be compared with files" in text
    answer = json.loads(why(tmp_path / "kv", "--tokens", TOKENS, "--model", rope, "--json").stdout)
    assert [each["field"] for each in answer["differences"]] == ["config rope_theta"]
    assert answer["note"].startswith("a model in memory filled this store")
