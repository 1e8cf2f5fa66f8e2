"""What is special about Redis: commands that we send and read ourselves."""

import numpy as np
import pytest

from kvstow.offload.remote.clients.base import THERE, Blob, StoreUnreachable
from kvstow.offload.remote.clients.redis import RedisClient
from kvstow.offload.remote.url import opened
from kvstow.testing.servers import Valkey


def data(n, nbytes):
    return np.random.default_rng(n).integers(0, 256, nbytes, np.uint8)


def test_many_objects_of_all_sizes_are_made_at_once_and_come_back_whole(valkey_url):
    client, _ = opened(valkey_url)
    sizes = [1, 2, 3, 5 << 20, *range(4, 500), 9 << 20]
    blobs = [Blob(f"object {n}", data(n, nbytes)) for n, nbytes in enumerate(sizes)]
    assert client.put(blobs) == {}
    found = client.get([blob.name for blob in blobs], max(sizes))
    for blob, came in zip(blobs, found, strict=True):
        assert (came == blob.data).all()
    client.close()


def test_an_object_that_is_there_stays_as_it_is(valkey_url):
    client, _ = opened(valkey_url)
    assert client.put([Blob("a", data(0, 100))]) == {}
    assert client.put([Blob("a", data(1, 50)), Blob("b", data(2, 50))]) == {"a": THERE}
    first, second = client.get(["a", "b"], 100)
    assert (first == data(0, 100)).all()
    assert (second == data(2, 50)).all()
    client.close()


def test_a_put_to_a_server_that_hangs_ends_and_later_ones_work(tmp_path):
    with Valkey(tmp_path) as server:
        client = RedisClient(server.url, "hangs", seconds=1.0)
        assert client.put([Blob("a", data(0, 100))]) == {}
        server.stop()
        try:
            with pytest.raises(StoreUnreachable):
                client.put([Blob(f"large {n}", data(n, 8 << 20)) for n in range(4)])
        finally:
            server.go_on()
        assert client.put([Blob("b", data(1, 100))]) == {}
        assert client.exists(["a", "b"]).all()
        client.close()
