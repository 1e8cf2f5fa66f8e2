"""What an engine notes of stored prompts, as `kvstow why` and the log tell it."""

import json
import logging
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from typer.testing import CliRunner

from connected_engine import PROMPT, Engine, blocks, drained, request
from kvstow.cli import app
from kvstow.offload.disk.tier import DiskTier


def why(place: Path, tokens: Sequence[int], *arguments: str) -> dict[str, Any]:
    """What the command line says of a prompt."""
    listed = json.dumps(list(tokens))
    result = CliRunner().invoke(app, ["why", str(place), "--tokens", listed, "--json", *arguments])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


@pytest.mark.parametrize("journal", ["digests", "tokens"])
def test_kvstow_why_explains_prompts_that_the_engine_has_served(
    connector: ModuleType, tmp_path: Path, journal: str
):
    tiers = {"host_bytes": 1 << 20, "disk_path": str(tmp_path), "disk_bytes": 1 << 24}
    engine = Engine(connector, journal=journal, **tiers)
    engine.compute(request("p"), [7, 8, 9, 10, 11])
    drained(engine)
    engine.end()
    assert why(tmp_path, PROMPT)["reason"] == "found"
    changed = [*PROMPT[:9], 7, *PROMPT[10:]]
    found = why(tmp_path, changed)
    assert (found["reason"], found["found_tokens"]) == ("differs", 8)
    places = {"digests": (8, 12, None, None), "tokens": (9, 10, PROMPT[9], 7)}
    told = (found[name] for name in ("token", "token_before", "stored_token", "asked_token"))
    assert tuple(told) == places[journal]
    other = {"digests": "never stored", "tokens": "differs"}
    assert why(tmp_path, range(18))["reason"] == other[journal]
    assert why(tmp_path, PROMPT, "--salt", "me")["reason"] == "salt"
    found = why(tmp_path, PROMPT, "--adapter", "poems")
    assert found["differences"] == [{"field": "adapter", "stored": "", "asked": "poems"}]
    (rank,) = tmp_path.glob("tp*")
    tier = DiskTier(rank)
    tier.evict(0, tier.keys(0))
    tier.close()
    assert why(tmp_path, PROMPT)["reason"] == "evicted"


def test_the_log_says_at_debug_level_why_a_request_found_no_more(
    connector: ModuleType, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    caplog.set_level(logging.DEBUG, "kvstow.adapters.vllm.scheduler.journal")
    monitored = logging.getLogger("kvstow")
    monitored.addHandler(caplog.handler)
    tiers = {"host_bytes": 1 << 20, "journal_path": str(tmp_path), "journal": "tokens"}
    engine = Engine(connector, **tiers)
    engine.compute(request("p"), [7, 8, 9, 10, 11])
    drained(engine)
    changed = [*PROMPT[:9], 7, *PROMPT[10:]]
    asking = request("d", all_token_ids=changed)
    engine.scheduler.on_new_request(asking)
    assert engine.scheduler.get_num_new_matched_tokens(asking, 0) == (8, True)
    engine.scheduler.update_state_after_alloc(asking, blocks([1, 2]), 8)
    engine.end()
    monitored.removeHandler(caplog.handler)
    lines = [record.getMessage() for record in caplog.records if "tokens are found" in record.msg]
    assert lines[0].startswith("request p: 0 of 17 tokens are found: ")
    assert lines[1].startswith(
        "request d: 8 of 17 tokens are found: differs: token 9 is 7, and 509"
    )
