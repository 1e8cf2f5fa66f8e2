"""What a request may carry: tickets inside vLLM's transfer parameters, good and bad ones."""

import base64
import json
import os
import tracemalloc
import zlib
from hashlib import blake2b
from pathlib import Path
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest

from kvstow.adapters.vllm.identity import AdapterNames
from kvstow.adapters.vllm.protocol import (
    MAX_TICKETS,
    EngineRequest,
    Handover,
    handover_in,
    prompt_digest,
    request_of,
)
from kvstow.errors import TransferError
from kvstow.route.blocks import Blocks
from kvstow.transfer.tickets.ticket import Ticket

TOKENS = list(range(64))


def ticket(agent: str = "a") -> Ticket:
    return Ticket(
        agent=agent,
        start="s",
        address="tcp://127.0.0.1:5",
        key="",
        lease=5,
        lease_seconds=3.0,
        fingerprint="f" * 64,
        num_tokens=64,
        blocks={0: Blocks.first([1, 2, 3, 4])},
        generations={0: np.array([0, 1, 2, 3])},
    )


def word(body: bytes) -> str:
    """A ticket's text around any body, with a checksum that holds."""
    checksum = blake2b(bytes(16) + body, digest_size=8).digest()
    data = checksum + bytes(16) + zlib.compress(body, 9)
    return "kvt3." + base64.urlsafe_b64encode(data).decode().rstrip("=")


def request(tickets: object, **changed: object) -> EngineRequest:
    carried = {
        "tickets": tickets,
        "num_tokens": 64,
        "prompt": prompt_digest(EngineRequest(id="r", tokens=TOKENS), 64),
        **changed,
    }
    params = {"do_remote_prefill": True, "kvstow": carried}
    return EngineRequest(id="r", tokens=TOKENS, params=params)


def bomb() -> str:
    """62 MiB of block lists in about 110 KiB of text."""
    count = 2_700_000
    ones = np.ones(count, "<i8")
    index = ones.copy()
    index[0] = 0
    lists = [0, ones.tobytes(), index.tobytes(), np.zeros(count, "<i8").tobytes()]
    head = ["a", "s", "tcp://127.0.0.1:5", "", 5, 3.0, "f" * 64, 64]
    return word(msgspec.msgpack.encode([*head, [lists]]))


def test_parameters_survive_json():
    given = Handover(tickets=(ticket(),), num_tokens=64, prompt="").params()["kvstow"]
    found = handover_in(request(json.loads(json.dumps(given))["tickets"]))
    assert found is not None
    assert found.tickets[0].body == ticket().body


def test_a_request_that_carries_nothing_is_no_handover():
    assert handover_in(EngineRequest(id="r", tokens=TOKENS)) is None
    assert handover_in(EngineRequest(id="r", tokens=TOKENS, params={"x": 1})) is None


@pytest.mark.parametrize(
    "tickets",
    [
        None,
        [],
        [5],
        ["kvt3.xxxx"],
        ["kvt3.\u00e9\u0661"],
        ["kvt3.\ud800"],
        [word(ticket().body.replace(b"127.0.0.1", b"\xff27.0.0.1"))],
        [str(ticket("a")), str(ticket("a"))],
        [str(ticket())] * (MAX_TICKETS + 1),
    ],
    ids=[
        "none",
        "empty",
        "number",
        "garbage",
        "not-ascii",
        "surrogate",
        "not-utf-8",
        "twice",
        "too-many",
    ],
)
def test_bad_tickets_are_a_transfer_error(tickets: object):
    with pytest.raises(TransferError):
        handover_in(request(tickets))


@pytest.mark.parametrize("num_tokens", [-1, 0, 65, 2**70])
def test_tokens_that_the_request_does_not_have_are_a_transfer_error(num_tokens: int):
    with pytest.raises(TransferError):
        handover_in(request([str(ticket())], num_tokens=num_tokens))


@pytest.mark.parametrize("copies", [1, 40])
def test_a_ticket_that_inflates_beyond_its_prompt_is_refused_before_it_is_unpacked(copies: int):
    text = bomb()
    assert len(text) < 200_000
    tracemalloc.start()
    try:
        with pytest.raises(TransferError, match="bytes"):
            handover_in(request([text] * copies))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 32 << 20


def test_the_digest_of_a_prompt_depends_on_all_that_its_cache_depends_on():
    requests = [
        EngineRequest(id="r", tokens=[1, 2, 3]),
        EngineRequest(id="r", tokens=[2, 1, 3]),
        EngineRequest(id="r", tokens=[1, 2, 3], salt="s"),
        EngineRequest(id="r", tokens=[1, 2, 3], adapter="s"),
        EngineRequest(id="r", tokens=[1, 2, 3], extra=((0, b"image"),)),
        EngineRequest(id="r", tokens=[1, 2, 3], extra=((1, b"image"),)),
        EngineRequest(id="r", tokens=[1, 2, 3], extra=((1, b"other"),)),
    ]
    digests = {prompt_digest(each, length) for each in requests for length in (2, 3)}
    assert len(digests) == 2 * len(requests)


def test_inputs_behind_the_tokens_do_not_change_their_digest():
    plain = EngineRequest(id="r", tokens=[1, 2, 3])
    image = EngineRequest(id="r", tokens=[1, 2, 3], extra=((2, b"image"),))
    assert prompt_digest(plain, 2) == prompt_digest(image, 2)


# ── vLLM's requests ───────────────────────────────────────────────────────────────────────


def vllm_request(**changed: object) -> SimpleNamespace:
    given: dict[str, object] = {
        "request_id": "r",
        "all_token_ids": TOKENS,
        "kv_transfer_params": None,
        "lora_request": None,
        "cache_salt": None,
        "mm_features": None,
        "prompt_embeds": None,
        "resumable": False,
        "kv_hints": None,
        "block_hashes": [],
    }
    return SimpleNamespace(**given | changed)


def lora(name: str, path: str) -> SimpleNamespace:
    return SimpleNamespace(lora_name=name, lora_path=path, lora_int_id=1)


def image(digest: str, offset: int) -> SimpleNamespace:
    return SimpleNamespace(identifier=digest, mm_position=SimpleNamespace(offset=offset))


def test_requests_that_vllm_computes_otherwise_have_different_prompts():
    changes: list[dict[str, object]] = [
        {},
        {"cache_salt": "tenant"},
        {"lora_request": lora("a", "/adapters/1")},
        {"lora_request": lora("a", "/adapters/2")},
        {"lora_request": lora("b", "/adapters/1")},
        {"mm_features": [image("cat", 3)]},
        {"mm_features": [image("dog", 3)]},
        {"mm_features": [image("cat", 4)]},
    ]
    vouched = AdapterNames(vouched=True)
    made = [request_of(vllm_request(**change), vouched) for change in changes]
    assert len({prompt_digest(each, 64) for each in made}) == len(changes)
    assert all(each.shareable for each in made)


def test_a_request_with_prompt_embeddings_is_not_shareable():
    assert not request_of(vllm_request(prompt_embeds=object())).shareable


def test_a_session_that_is_given_more_while_it_runs_is_not_shareable():
    """vLLM adds tokens and images to it that were not there when its keys were begun."""
    assert not request_of(vllm_request(resumable=True)).shareable


def test_a_request_whose_adapter_lies_nowhere_is_not_shareable():
    """It may be weights in memory, which trainers give under one name again and again."""
    assert not request_of(vllm_request(lora_request=lora("a", "/nowhere"))).shareable


def test_a_request_whose_adapter_was_replaced_by_an_older_file_is_not_shareable(tmp_path: Path):
    """Copies keep their times, and clocks are set back."""
    known, weights = AdapterNames(), tmp_path / "adapter_model.bin"
    asking = vllm_request(lora_request=lora("a", str(tmp_path)))
    weights.write_bytes(b"one")
    assert [request_of(asking, known).shareable for _ in range(3)] == [True] * 3
    (tmp_path / "copy").write_bytes(b"two")
    os.utime(tmp_path / "copy", (1e9, 1e9))
    os.replace(tmp_path / "copy", weights)
    assert not request_of(asking, known).shareable


def test_an_adapter_of_the_hub_is_known_by_its_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    for snapshot in ("one", "two"):
        folder = tmp_path / snapshot
        folder.mkdir()
        (folder / "adapter_config.json").write_text("{}")
        (folder / "adapter_model.bin").write_bytes(snapshot.encode())
    found: list[str] = []
    for snapshot in ("one", "two"):
        monkeypatch.setattr(
            "kvstow.adapters.vllm.identity._in_hub", lambda name, file, at=snapshot: tmp_path / at
        )
        asking = vllm_request(lora_request=lora("a", "somebody/poems"))
        found.append(request_of(asking).adapter)
    assert found[0] != found[1]


def test_an_adapter_is_known_by_its_weights_where_they_lie_on_disk(tmp_path: Path):
    for folder in ("one", "two"):
        (tmp_path / folder / "lora").mkdir(parents=True)
        content = b"\x00" * 512 if folder == "one" else b"\x01" * 512
        (tmp_path / folder / "lora" / "adapter_model.bin").write_bytes(content)
    found = [
        request_of(vllm_request(lora_request=lora("a", str(tmp_path / folder / "lora")))).adapter
        for folder in ("one", "two")
    ]
    assert found[0] != found[1]
    assert str(tmp_path) not in found[0]


# ── numbers of leases ─────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("named", "address"),
    [
        ({"remote_host": "10.0.0.7", "remote_port": 5600}, "tcp://10.0.0.7:5600"),
        ({"remote_host": "fd00::7", "remote_port": 5600}, "tcp://[fd00::7]:5600"),
        ({"remote_host": "a b", "remote_port": 5600}, ""),
        ({"remote_host": "", "remote_port": 5600}, ""),
        ({"remote_host": "x", "remote_port": 0}, ""),
        ({"remote_host": "x", "remote_port": "5600"}, ""),
        ({"remote_host": "x"}, ""),
        ("x", ""),
        (None, ""),
    ],
)
def test_a_peer_that_a_request_names_is_an_address_or_none(named: object, address: str):
    request = EngineRequest(id="r", tokens=TOKENS, params={"remote_kv_source": named})
    assert request.load_limits.peer == address
