"""URLs of stores: what they name, what they carry, what is refused."""

import importlib
import sys
from threading import Event, Thread
from time import monotonic
from types import SimpleNamespace

import numpy as np
import pytest

from kvstow.errors import StoreError
from kvstow.offload.remote.client import Blob, RemoteOptions, open_client, parse
from kvstow.offload.store import Store
from waiting import wait_for


def test_a_url_carries_the_options_of_its_store_and_of_every_store():
    parts, own, options = parse(
        "s3://bucket/a/b?endpoint=http://127.0.0.1:9000&tenant=acme&budget=0.1&queue=64MiB"
        "&max_bytes=1TiB&tenant_bytes=10GB&load=3"
    )
    assert (parts.netloc, parts.path) == ("bucket", "/a/b")
    assert own == {"endpoint": "http://127.0.0.1:9000"}
    assert options == RemoteOptions(
        tenant="acme",
        budget=0.1,
        load=3.0,
        queue=64 << 20,
        max_bytes=1 << 40,
        tenant_bytes=10**10,
    )


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("ftp://host/x", "not a store URL"),
        ("s3://", "not a store URL"),
        ("nothing", "not a store URL"),
        ("redis://h:99999/0", "Port out of range"),
        ("redis://[::1/0", "Invalid IPv6 URL"),
        ("redis://h:1/0?endpoint=x", "no option 'endpoint'"),
        ("s3://b/p?budget=soon", "option budget='soon'"),
        ("s3://b/p?budget=0", "budget=0.0 is not in"),
        ("s3://b/p?load=1e9", "load=1000000000.0 is not in"),
        ("s3://b/p?queue=much", "option queue='much'"),
        ("s3://b/p?tenant=a/b", "tenant 'a/b' is not"),
        ("s3://b/p?tenant=", "tenant '' is not"),
        ("s3://b/p?tenant=.", "tenant '.' is not"),
        ("s3://b/p?tenant=..", "tenant '..' is not"),
    ],
)
def test_a_bad_url_is_refused_when_the_store_is_made(url, message):
    with pytest.raises(StoreError, match=message):
        Store(remote=url)


def test_messages_show_no_passwords():
    with pytest.raises(StoreError) as raised:
        parse("redis://user:secret@host:1/0?what=x")
    assert "secret" not in str(raised.value)
    client, _ = open_client("redis://user:secret@host:1/0")
    assert "secret" not in client.where
    client.close()


def test_mooncake_without_a_metadata_server_is_refused_with_a_hint():
    with pytest.raises(StoreError, match="hint: …\\?metadata="):
        open_client("mooncake://127.0.0.1:1/rows")


def test_a_password_may_lie_in_a_file(tmp_path):
    (tmp_path / "password").write_text("s/ecret\n")
    client, _ = open_client(f"redis://127.0.0.1:1/0?password_file={tmp_path / 'password'}")
    assert client._redis.connection_pool.connection_kwargs["password"] == "s/ecret"
    client.close()


@pytest.mark.parametrize(("data", "reason"), [(None, "No such file"), (b"\xff\xfe", "no text")])
def test_a_password_that_cannot_be_read_is_a_store_error_that_names_its_file(
    tmp_path, data, reason
):
    file = tmp_path / "password"
    if data is not None:
        file.write_bytes(data)
    with pytest.raises(StoreError, match=f"password_file .*password: cannot be read: .*{reason}"):
        open_client(f"redis://127.0.0.1:1/0?password_file={file}")


def test_a_mooncake_client_closes_in_time_while_a_call_hangs(monkeypatch):
    may_end, closed = Event(), []

    class Hangs:
        def setup(self, *_):
            return 0

        def register_buffer(self, *_):
            return 0

        def batch_put_from(self, *_):
            may_end.wait(60)
            return [0]

        def close(self):
            closed.append(monotonic())

    name = "kvstow.offload.remote.mooncake"
    fake = SimpleNamespace(MooncakeDistributedStore=Hangs)
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "mooncake", fake)
        patch.setitem(sys.modules, "mooncake.store", fake)
        patch.delitem(sys.modules, name, raising=False)
        module = importlib.import_module(name)
        patch.setattr(module, "CLOSE_SECONDS", 0.3)
        busy, idle = (
            module.MooncakeClient("m:1", "", metadata="", stage_bytes=4096) for _ in range(2)
        )
        thread = Thread(target=lambda: busy.put([Blob("a", np.zeros(8, np.uint8))]))
        thread.start()
        wait_for(lambda: busy._stages.qsize() < module.STAGES)
        start = monotonic()
        for client in (busy, idle):
            client.close()
        assert monotonic() - start < 5
        assert len(closed) == 1  # what the hanging call writes to stays its own
        may_end.set()
        thread.join()
    sys.modules.pop(name, None)
