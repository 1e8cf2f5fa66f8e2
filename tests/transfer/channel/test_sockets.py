"""The side channel under attack: garbage, replays, other versions, other layouts, other keys."""

import logging
import os
import socket
import stat
import struct
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import msgspec
import pytest
import zmq
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvstow.errors import TransferError
from kvstow.plan.group import grouped
from kvstow.plan.manifest import encode
from kvstow.plan.pack import Site, packed
from kvstow.plan.retention import Full
from kvstow.transfer.channel import framing, messages, sockets
from kvstow.transfer.channel.address import is_loopback
from kvstow.transfer.channel.curve import Keys
from kvstow.transfer.channel.sockets import SocketChannel
from kvstow.transfer.transport.local import Fabric
from transfer_node import Node, attention, hybrid_layout, rows_for
from waiting import wait_for

TOKENS = 18
LAYOUT = hybrid_layout()
SOURCE, TARGET = rows_for(LAYOUT, TOKENS, 1), rows_for(LAYOUT, TOKENS, 2)
OPTIONS = {"contact_seconds": 8.0, "transfer_seconds": 15.0}


@pytest.fixture
def fabric() -> Fabric:
    return Fabric()


@pytest.fixture
def node(fabric: Fabric) -> Iterator[Node]:
    made = Node(encode(LAYOUT), fabric, name="producer", options=OPTIONS)
    yield made
    made.close()


class Stranger:
    """A plain ZeroMQ socket that says whatever it likes."""

    def __init__(self, address: str) -> None:
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.linger = 0
        self.socket.rcvtimeo = 30_000
        self.socket.connect(address)

    def say(self, *parts: bytes) -> None:
        self.socket.send_multipart(parts)

    def answer(self) -> messages.AnyMessage:
        return framing.decode_message(self.socket.recv_multipart()[-1])

    def close(self) -> None:
        self.socket.close()
        self.context.term()

    def __enter__(self) -> "Stranger":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


@pytest.fixture
def stranger(node: Node) -> Iterator[Stranger]:
    made = Stranger(node.address)
    yield made
    made.close()


def dropped(node: Node, reason: str) -> float:
    return node.metric("kvstow_transfer_messages_total", reason=reason)


def assert_serves(node: Node, fabric: Fabric) -> None:
    consumer = Node(encode(LAYOUT), fabric, name="consumer", options=OPTIONS)
    node.fill(SOURCE)
    assert "error" not in consumer.pull([node.offer(SOURCE, TOKENS)], TARGET)
    assert consumer.check(TARGET, 0, TOKENS) == ""
    consumer.close()


# ── garbage ───────────────────────────────────────────────────────────────────────────


def test_each_kind_of_broken_frame_is_survived_and_counted(node, stranger, fabric):
    good = framing.encode_message(messages.Renew((1,)))
    skewed = good[:4] + struct.pack(">H", 9) + good[6:]
    broken = {
        "magic": b"GET / HTTP/1.1\r\nHost: agent\r\n\r\n",
        "version": skewed,
        "body": good[:6] + b"\xc1\xc1",
        "session": good,
    }
    for reason, data in broken.items():
        stranger.say(data)
        wait_for(lambda reason=reason: dropped(node, reason) >= 1)
    stranger.say(b"")
    stranger.say(b"one", b"two", b"three")
    wait_for(lambda: dropped(node, "magic") >= 2)
    wait_for(lambda: dropped(node, "body") >= 2)
    assert_serves(node, fabric)


def test_another_version_is_told_both_numbers(node, stranger):
    good = framing.encode_message(messages.AskStatus())
    stranger.say(good[:4] + struct.pack(">H", 9) + good[6:])
    message = stranger.answer()
    assert isinstance(message, messages.Refused)
    assert message.reasons == (f"version: 9, {framing.VERSION} is spoken here",)


def test_an_oversized_message_is_cut_off_and_others_are_still_heard(node, stranger, fabric):
    stranger.say(b"\0" * (framing.MAX_FRAME + 4096))
    time.sleep(0.2)
    assert_serves(node, fabric)


def test_a_raw_tcp_client_that_talks_garbage_is_survived(node, fabric):
    host, port = node.address.removeprefix("tcp://").split(":")
    for data in (b"", b"\0" * 100, b"GET / HTTP/1.0\r\n\r\n", b"\xff" * 70):
        with socket.create_connection((host, int(port))) as line:
            line.sendall(data)
    assert_serves(node, fabric)


def hello(node: Node) -> messages.Hello:
    """A true hello, of another agent of the same layout."""
    return messages.Hello(msgspec.structs.replace(node.agent.endpoint.card, agent="stranger"), 1)


def test_a_line_that_has_not_said_hello_begins_nothing(node, stranger):
    stranger.say(framing.encode_message(hello(node)))
    assert isinstance(stranger.answer(), messages.Welcome)
    begin = framing.encode_message(messages.Begin(1, 2, b"", "read", None, None, 0, ()))
    stranger.say(begin)
    failed = stranger.answer()
    assert isinstance(failed, messages.Failed)
    assert "not given out here" in failed.reason
    assert stranger.answer() == messages.Stopped(1)
    with Stranger(node.address) as other:
        other.say(begin)
        assert isinstance(other.answer(), messages.UnknownSession)


MESSAGES = [
    messages.Begin(1, 2, b"x" * 16, "write", None, messages.Write((), 0, 5), 0, ()),
    messages.Begin(
        1,
        2,
        b"",
        "slots",
        (),
        messages.Write((), 0, 5),
        64,
        (messages.Sample(("layers.0",), (2, 3), 0, 9, 4, 1),),
    ),
    messages.End(1, 2, "accepted"),
    messages.End(1, 2, "failed"),
    messages.Renew((1, 2, 3)),
    messages.AskProbe(1 << 60),
    messages.Written(1, 2, 3),
    messages.Staged(1, 2, 3),
    messages.Fetched(1, 1 << 40),
    messages.TellProbe((-1.0, 1.0)),
    messages.TellDigest(1, (1, 2)),
    messages.Welcome(None, b"", "", bytes(32)),  # type: ignore[arg-type]
]


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_a_fuzzed_conversation_never_stops_the_agent(data, node, fabric):
    with Stranger(node.address) as stranger:
        if data.draw(st.booleans()):
            stranger.say(framing.encode_message(hello(node)))
            stranger.answer()
        for message in data.draw(st.lists(st.sampled_from(MESSAGES), max_size=6)):
            whole = bytearray(framing.encode_message(message))
            for _ in range(data.draw(st.integers(0, 3))):
                whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
            stranger.say(bytes(whole))
        with Stranger(node.address) as last:
            last.say(framing.encode_message(messages.AskStatus()))
            assert isinstance(last.answer(), messages.TellStatus)


# ── layouts ───────────────────────────────────────────────────────────────────────────


def test_layouts_that_do_not_fit_are_refused_with_every_difference_and_both_values(node, fabric):
    from kvstow.plan.spec import DType

    def layer(i: int, dtype: DType, heads: int) -> Any:
        spec = attention(f"layers.{i}", Full())
        fields = tuple(replace(field, dtype=dtype) for field in spec.fields)
        total = replace(spec.heads, total=heads, pieces=((0, heads),))
        return replace(spec, fields=fields, heads=total)

    theirs = packed(
        grouped([layer(0, DType.FLOAT16, 2), layer(3, DType.BFLOAT16, 3)]),
        num_slabs=6,
        site=Site(model="another"),
    )
    other = Node(encode(theirs), fabric, name="other", options=OPTIONS)
    with pytest.raises(TransferError) as caught:
        other.agent.connect(node.address)
    assert caught.value.kind == "refused"
    text = str(caught.value)
    for part in ("'hybrid'", "'another'", "bfloat16", "float16", "heads", "layers.1"):
        assert part in text, text
    assert node.check({}, 0, 0) == ""
    assert other.check({}, 0, 0) == ""
    other.close()


def test_a_manifest_that_is_none_is_refused(node, stranger):
    card = msgspec.structs.replace(node.agent.endpoint.card, manifest=b"{}")
    stranger.say(framing.encode_message(messages.Hello(card, 1)))
    message = stranger.answer()
    assert isinstance(message, messages.Refused)
    assert message.kind == "refused"


def test_a_handshake_is_as_small_for_a_million_rows_as_for_ten(fabric):
    """Descriptors are never exchanged: addresses follow from the manifest."""

    def size(num_slabs: int) -> int:
        layout = packed(grouped([attention("layers.0", Full())]), num_slabs=num_slabs)
        one = Node(encode(layout), fabric)
        data = framing.encode_message(messages.Hello(one.agent.endpoint.card, 1))
        one.close()
        return len(data)

    assert size(1_000_000) < size(10) + 100


# ── keys ──────────────────────────────────────────────────────────────────────────────


def acquainted(*pairs: Keys) -> list[Keys]:
    """The pairs, each of which knows all others."""
    return [replace(one, peers=frozenset(k.public for k in pairs if k is not one)) for one in pairs]


@pytest.mark.parametrize(
    ("address", "local"),
    [
        ("tcp://127.0.0.1:5555", True),
        ("tcp://127.9.9.9:5555", True),
        ("tcp://localhost:1", True),
        ("tcp://[::1]:5555", True),
        ("ipc:///tmp/agent", True),
        ("tcp://0.0.0.0:5555", False),
        ("tcp://*:5555", False),
        ("tcp://10.0.0.1:5555", False),
        ("tcp://[::]:5555", False),
        ("tcp://eth0:5555", False),
        ("tcp://localhost.example.org:5555", False),
    ],
)
def test_what_stays_on_this_machine_is_known(address, local):
    assert is_loopback(address) == local


def test_listening_beyond_loopback_without_keys_is_refused():
    with pytest.raises(TransferError, match="no keys"):
        SocketChannel("tcp://0.0.0.0:*", None, lambda reason, detail: None)


def test_dialling_beyond_loopback_without_the_other_key_is_refused(node, fabric):
    with pytest.raises(TransferError, match="public key is not known"):
        node.agent.connect("tcp://192.0.2.1:5555")


def test_agents_that_know_each_other_pull_under_keys(fabric):
    mine, theirs = acquainted(Keys.fresh(), Keys.fresh())
    producer = Node(encode(LAYOUT), fabric, name="producer", options=OPTIONS, keys=mine)
    consumer = Node(encode(LAYOUT), fabric, name="consumer", options=OPTIONS, keys=theirs)
    producer.fill(SOURCE)
    result = consumer.pull([producer.offer(SOURCE, TOKENS)], TARGET)
    assert "error" not in result
    assert consumer.check(TARGET, 0, TOKENS) == ""
    for one in (producer, consumer):
        one.close()


def test_an_unknown_key_gets_no_answer_and_a_log_line_without_any_key(fabric, caplog):
    known, keeper, outsider = Keys.fresh(), Keys.fresh(), Keys.fresh()
    keeper = replace(keeper, peers=frozenset({known.public}))
    outsider = replace(outsider, peers=frozenset({keeper.public}))
    producer = Node(encode(LAYOUT), fabric, name="producer", options=OPTIONS, keys=keeper)
    consumer = Node(
        encode(LAYOUT),
        fabric,
        name="consumer",
        options={**OPTIONS, "contact_seconds": 0.5},
        keys=outsider,
    )
    with caplog.at_level(logging.DEBUG):
        with pytest.raises(TransferError) as caught:
            consumer.agent.connect(producer.address, key=keeper.public)
        wait_for(lambda: "not on the list" in caplog.text)
    assert caught.value.kind == "timeout"
    wait_for(lambda: dropped(producer, "session") >= 1)
    for pair in (known, keeper, outsider):
        assert pair.secret not in caplog.text
        assert pair.public not in caplog.text
        assert pair.secret not in repr(pair)
    for one in (producer, consumer):
        one.close()


def test_a_client_without_keys_is_not_heard_where_keys_are_used(fabric):
    keeper = replace(Keys.fresh(), peers=frozenset())
    producer = Node(encode(LAYOUT), fabric, name="producer", options=OPTIONS, keys=keeper)
    stranger = Stranger(producer.address)
    stranger.socket.rcvtimeo = 300
    stranger.say(framing.encode_message(messages.AskStatus()))
    with pytest.raises(zmq.Again):
        stranger.answer()
    stranger.close()
    producer.close()


# ── addresses and keys that may not be dialled ────────────────────────────────────────


@pytest.fixture
def channel() -> Iterator[SocketChannel]:
    made = SocketChannel("tcp://127.0.0.1:*", None, lambda reason, detail: None)
    yield made
    made.close()


@pytest.mark.parametrize(
    "address",
    ["", "x", "foo://127.0.0.1:5", "tcp://", "tcp://127.0.0.1", "tcp://[::1", "tcp://127.0.0.1:x",
     "tcp://127.0.0.1:0", "tcp://127.0.0.1:99999", "tcp://127.0.0.1:-1", "tcp://127.0.0.1:*",
     "tcp://127.0.0.1:5/path", "tcp://user@127.0.0.1:5", "tcp:// 127.0.0.1:5", "ipc://",
     "tcp://127.0.0.1:5\n", "tcp://127.0.0.1:5\0", "tcp://\udce4:5", "tcp://ä:5", "x" * 10_000,
     "ipc://" + "x" * 400, "pgm://127.0.0.1:5", "ws://127.0.0.1:5", "tcp://*:5"],
)  # fmt: skip
def test_an_address_that_cannot_be_dialled_is_an_error_of_that_dial_only(channel, address):
    with pytest.raises(TransferError) as caught:
        channel.dial(address, "")
    assert caught.value.kind == "refused"
    assert not list(channel.heard(0))


def test_a_listen_address_that_cannot_be_is_an_error_and_leaves_nothing_behind():
    for listen in ("tcp://127.0.0.1:bad", "ipc://" + "x" * 400, "inproc://"):
        with pytest.raises(TransferError, match="cannot listen"):
            SocketChannel(listen, None, lambda reason, detail: None)


def test_nobody_else_is_dialled_with_keys_whatever_a_ticket_says():
    friend, outsider = Keys.fresh(), Keys.fresh()
    mine = replace(Keys.fresh(), peers=frozenset({friend.public, "junk"}))
    channel = SocketChannel("tcp://127.0.0.1:*", mine, lambda reason, detail: None)
    for key in (outsider.public, "", "junk", "é" * 40):
        with pytest.raises(TransferError) as caught:
            channel.dial("tcp://127.0.0.1:9", key)
        assert caught.value.kind == "refused"
        assert outsider.public not in str(caught.value)
    channel.hang_up(channel.dial("tcp://127.0.0.1:9", friend.public))
    channel.close()


def test_a_key_for_an_agent_without_keys_is_refused(channel):
    with pytest.raises(TransferError, match="this agent has none"):
        channel.dial("tcp://127.0.0.1:9", Keys.fresh().public)


# ── floods ────────────────────────────────────────────────────────────────────────────


def test_one_turn_reads_a_bounded_number_of_messages_and_the_rest_later():
    channel = SocketChannel("inproc://flooded", None, lambda reason, detail: None)
    loud = channel._context.socket(zmq.DEALER)
    loud.linger = 0
    loud.connect("inproc://flooded")
    for _ in range(1000):
        loud.send(framing.encode_message(messages.AskStatus()))
    turns = []
    while len(turns) < 1000 and sum(turns) < 1000:
        turns.append(len(list(channel.heard(100))))
    assert sum(turns) == 1000
    assert max(turns) == sockets.TURN_COST // sockets.COST[messages.AskStatus]
    loud.close()
    channel.close()


def test_a_quiet_client_is_heard_in_the_first_turn_however_loud_another_is():
    channel = SocketChannel("inproc://fair", None, lambda reason, detail: None)
    loud, quiet = (channel._context.socket(zmq.DEALER) for _ in range(2))
    for each in (loud, quiet):
        each.linger = 0
        each.connect("inproc://fair")
    for _ in range(5000):
        loud.send(framing.encode_message(messages.AskStatus()))
    quiet.send(framing.encode_message(messages.Renew(())))
    first_turn = [message for _, message in channel.heard(100)]
    assert messages.Renew(()) in first_turn
    assert len(first_turn) < 100
    for each in (loud, quiet):
        each.close()
    channel.close()


def test_a_client_says_hello_once(node, stranger):
    stranger.say(framing.encode_message(hello(node)))
    assert isinstance(stranger.answer(), messages.Welcome)
    for _ in range(50):
        stranger.say(framing.encode_message(hello(node)))
    wait_for(lambda: dropped(node, "session") == 50)
    stranger.say(framing.encode_message(messages.Renew(())))
    assert isinstance(stranger.answer(), messages.Alive)


def test_status_is_told_from_one_document_for_a_while(node, stranger):
    for _ in range(20):
        stranger.say(framing.encode_message(messages.AskStatus()))
    told = [stranger.answer().document for _ in range(20)]
    assert len(set(told)) < 20


# ── sockets that are files ────────────────────────────────────────────────────────────


def test_a_socket_that_is_a_file_is_closed_to_other_users_and_can_be_pulled_from(fabric, tmp_path):
    before = os.umask(0)
    try:
        listen = f"ipc://{tmp_path}/agent"
        producer = Node(encode(LAYOUT), fabric, name="p", options=OPTIONS, listen=listen)
    finally:
        os.umask(before)
    assert producer.address == listen
    assert stat.S_IMODE((tmp_path / "agent").stat().st_mode) == 0o600
    consumer = Node(encode(LAYOUT), fabric, name="c", options=OPTIONS, listen=f"{listen}-2")
    producer.fill(SOURCE)
    assert "error" not in consumer.pull([producer.offer(SOURCE, TOKENS)], TARGET)
    for made in (producer, consumer):
        made.close()
