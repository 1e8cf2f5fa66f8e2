"""URLs of stores: what they name, what they carry, what is refused."""

import pytest

from kvstow.errors import StoreError
from kvstow.offload.remote.client import RemoteOptions, open_client, parse
from kvstow.offload.store import Store


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
