"""`kvstow check`: manifests that keep the laws, break them, or are none."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from kvstow.cli import app


def invoke(*arguments: str, stdin: bytes | None = None) -> Result:
    result = CliRunner().invoke(app, list(arguments), input=stdin)
    assert result.exception is None or isinstance(result.exception, SystemExit)
    return result


@pytest.fixture
def manifest(tmp_path: Path) -> Path:
    file = tmp_path / "layout.json"
    options = ("--num-slabs", "5", "--manifest", str(file))
    assert invoke("plan", "gpt-oss-20b", *options).exit_code == 0
    return file


def edited(manifest: Path, change) -> Path:
    document = json.loads(manifest.read_bytes())
    change(document)
    manifest.write_text(json.dumps(document))
    return manifest


def test_a_planned_layout_is_ok(manifest):
    result = invoke("check", str(manifest), "--json")
    assert result.exit_code == 0
    document = json.loads(result.stdout)
    assert document["ok"] is True
    assert document["violations"] == []
    assert document["model"] == "gpt-oss-20b"


def test_the_text_names_model_and_fingerprint(manifest):
    result = invoke("check", str(manifest))
    assert result.exit_code == 0
    assert result.stdout.startswith("ok: gpt-oss-20b, 24 layers in 2 groups, 5 slabs")
    assert result.stderr == ""


def test_a_manifest_may_come_from_stdin(manifest):
    assert invoke("check", "-", stdin=manifest.read_bytes()).exit_code == 0
    broken = invoke("check", "-", stdin=b"{}")
    assert broken.exit_code == 1
    assert "stdin" in broken.stderr


def test_every_broken_law_is_listed(manifest):
    def shrink(document):
        document["layout"]["nbytes"] = 4096

    result = invoke("check", str(edited(manifest, shrink)), "--json")
    assert result.exit_code == 1
    document = json.loads(result.stdout)
    assert document["ok"] is False
    assert len(document["violations"]) == 2  # one for each group
    assert all(line.startswith("bounds: ") for line in document["violations"])


def test_broken_laws_are_data_and_the_verdict_is_talk(manifest):
    def collide(document):
        places = document["layout"]["groups"][0]["placements"]
        places[1] = places[0]

    result = invoke("check", str(edited(manifest, collide)))
    assert result.exit_code == 1
    assert "sharing" in result.stdout
    assert result.stderr.startswith("error: ")
    assert "violation" in result.stderr


@pytest.mark.parametrize(
    ("content", "kind"),
    [
        (b"", "syntax"),
        (b"\xff\xfe", "syntax"),
        (b"[]", "shape"),
        (b'{"kvstow": 99}', "version"),
        (b'{"kvstow": 1}', "shape"),
        (b'{"kvstow": 1, "kvstow": 1}', "duplicate"),
        (b'{"kvstow": -1}', "range"),
        (b"[" * 100_000, "syntax"),
        (b" " * (16 * 2**20 + 1), "size"),
    ],
    ids=["empty", "not text", "a list", "version", "shape", "duplicate", "range", "deep", "large"],
)
def test_a_malformed_manifest_has_its_own_error(tmp_path, content, kind):
    file = tmp_path / "layout.json"
    file.write_bytes(content)
    result = invoke("check", str(file), "--json")
    assert result.exit_code == 1
    (violation,) = json.loads(result.stdout)["violations"]
    assert violation.startswith(f"{kind}: ")


def test_a_file_that_cannot_be_read_is_a_usage_error(tmp_path):
    for path, reason in ((tmp_path, "Is a directory"), (tmp_path / "none", "No such file")):
        result = invoke("check", str(path), "--json")
        assert result.exit_code == 2
        assert result.stdout == ""
        assert reason in result.stderr
        assert str(path) in result.stderr


def test_a_configuration_is_not_a_manifest(tmp_path):
    file = tmp_path / "config.json"
    file.write_text('{"model_type": "llama"}')
    result = invoke("check", str(file))
    assert result.exit_code == 1
    assert result.stdout.startswith("shape: ")
