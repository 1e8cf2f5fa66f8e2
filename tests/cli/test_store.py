"""`kvstow store` on real stores, as its users run it."""

import json
from dataclasses import replace

import numpy as np
import pytest
from typer.testing import CliRunner

from kvstow.cli import app
from kvstow.errors import StoreError
from kvstow.observe import Telemetry
from kvstow.offload.disk.tier import DiskTier
from kvstow.offload.metrics import TierMetrics
from kvstow.plan.manifest import decode, encode
from offloading import hybrid, key, row_files

MIB = 1 << 20


def run(*arguments):
    return CliRunner().invoke(app, [str(a) for a in arguments])


def test_inspect_counts_rows_by_group_and_writes_nothing(directory):
    before = {file: file.stat().st_mtime_ns for file in directory.rglob("*")}
    found = json.loads(run("store", "inspect", directory, "--json").stdout)
    assert found["rows"] == 40
    assert [group["rows"] for group in found["groups"]] == [20, 20]
    assert found["model"] == "hybrid"
    assert found["writers"] == []
    assert {file: file.stat().st_mtime_ns for file in directory.rglob("*")} == before
    text = run("store", "inspect", directory)
    assert text.exit_code == 0
    assert "full" in text.stdout


def test_inspect_names_the_stores_in_a_directory_that_is_none(directory):
    directory.rename(directory.parent / "tp0of2-pp0of1")
    done = run("store", "inspect", directory.parent)
    assert done.exit_code == 2
    assert "hint: one of those in it: tp0of2-pp0of1" in done.stderr


def test_inspect_of_nothing_is_refused(tmp_path):
    done = run("store", "inspect", tmp_path)
    assert done.exit_code == 2
    assert "no store there" in done.stderr


def test_verify_finds_a_flipped_bit_and_drops_the_row(directory):
    assert run("store", "verify", directory).exit_code == 0
    file = row_files(directory)[0]
    data = bytearray(file.read_bytes())
    data[4096 + 5] ^= 1
    file.write_bytes(data)
    done = run("store", "verify", directory, "--json")
    found = json.loads(done.stdout)
    assert done.exit_code == 1
    assert found["rows"] == 40
    assert len(found["damaged"]) == 1
    assert run("store", "verify", directory).exit_code == 0


def test_prune_shrinks_to_the_size_asked_for(directory):
    done = run("store", "prune", directory, "--to", "20KiB", "--json")
    found = json.loads(done.stdout)
    assert found["bytes_after"] <= 20 << 10 < found["bytes_before"]
    used = {file.stat().st_ino: file.stat().st_size for file in row_files(directory)}
    assert sum(used.values()) == found["bytes_after"]
    assert json.loads(run("store", "inspect", directory, "--json").stdout)["rows"] > 0


def test_convert_writes_a_store_of_the_new_layout(directory, tmp_path):
    manifest = tmp_path / "new.json"
    manifest.write_bytes(encode(hybrid(order="BHLNC")))
    done = run("store", "convert", directory, "--to", tmp_path / "new", "--layout", manifest)
    assert done.exit_code == 0, done.output
    found = json.loads(run("store", "inspect", tmp_path / "new", "--json").stdout)
    assert found["rows"] == 40
    assert found["order"] == "BHLNC"
    again = run("store", "convert", directory, "--to", tmp_path / "new", "--layout", manifest)
    assert again.exit_code == 2
    assert "already" in again.stderr


def test_convert_says_how_many_rows_are_in_no_larger_block(directory, tmp_path):
    """Rows of this store have no links."""
    manifest = tmp_path / "new.json"
    manifest.write_bytes(encode(hybrid(block_tokens=8)))
    done = run("store", "convert", directory, "--to", tmp_path / "new", "--layout", manifest)
    assert done.exit_code == 0, done.output
    assert done.stdout == "0 rows written, 0 left behind\n"
    assert "40 rows of the old store are in no block of the new size" in done.stderr
    asked = ("--to", tmp_path / "again", "--layout", manifest, "--json")
    found = json.loads(run("store", "convert", directory, *asked).stdout)
    assert found == {"written": 0, "incomplete": 0, "left_out": 40, "notes": []}


def test_a_layout_without_identity_gets_that_of_the_store(directory, tmp_path):
    """`kvstow plan` does not know which weights will be served."""
    manifest = tmp_path / "new.json"
    manifest.write_bytes(encode(replace(hybrid(order="BHLNC"), identity=None)))
    done = run("store", "convert", directory, "--to", tmp_path / "new", "--layout", manifest)
    assert done.exit_code == 0, done.output
    old, new = (decode((d / "layout.json").read_bytes()) for d in (directory, tmp_path / "new"))
    assert new.identity is not None
    assert new.identity == old.identity


@pytest.mark.parametrize("exists", [False, True])
def test_a_conversion_that_fails_leaves_nothing_behind(directory, tmp_path, monkeypatch, exists):
    manifest, new = tmp_path / "new.json", tmp_path / "new"
    manifest.write_bytes(encode(hybrid(order="BHLNC")))
    if exists:
        new.mkdir()

    def failing(old, new):
        raise StoreError("no space left")

    monkeypatch.setattr("kvstow.offload.disk.convert.convert", failing)
    done = run("store", "convert", directory, "--to", new, "--layout", manifest)
    assert done.exit_code == 1
    assert "no space left" in done.stderr
    assert new.exists() == exists
    assert not exists or list(new.iterdir()) == []


def test_a_conversion_into_a_directory_with_files_is_refused_and_leaves_them(directory, tmp_path):
    manifest, new = tmp_path / "new.json", tmp_path / "new"
    manifest.write_bytes(encode(hybrid()))
    new.mkdir()
    (new / "mine").write_text("mine")
    done = run("store", "convert", directory, "--to", new, "--layout", manifest)
    assert done.exit_code == 2
    assert (new / "mine").read_text() == "mine"


@pytest.mark.parametrize("content", [None, "{}"])
def test_a_layout_that_cannot_be_read_is_refused_before_anything_is_made(
    directory, tmp_path, content
):
    manifest = tmp_path / "new.json"
    if content is not None:
        manifest.write_text(content)
    done = run("store", "convert", directory, "--to", tmp_path / "new", "--layout", manifest)
    assert done.exit_code == 2
    assert str(manifest) in done.stderr
    assert not (tmp_path / "new").exists()


def test_metrics_show_every_tier(directory):
    tier = DiskTier(directory)
    telemetry = Telemetry()
    TierMetrics(telemetry.registry, [tier])
    tier.load(
        0, [key(0, 0), b"none"], [np.zeros(tier.layout.row_bytes(0), np.uint8) for _ in range(2)]
    )
    text = telemetry.exposition().decode()
    tier.close()
    assert 'kvstow_tier_hits_total{tier="disk"} 1.0' in text
    assert 'kvstow_tier_misses_total{tier="disk"} 1.0' in text
    assert 'kvstow_tier_rows{tier="disk"} 40.0' in text
    assert 'kvstow_tier_bytes{tier="disk"}' in text
    assert 'kvstow_tier_capacity_bytes{tier="disk"}' in text
    assert "nbytes" not in text
