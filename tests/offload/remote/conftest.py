"""Real servers, one of each kind per run, and an empty store for every test."""

from uuid import uuid4

import pytest

from servers import Mooncake, Seaweed, Valkey


@pytest.fixture(scope="session")
def valkey(tmp_path_factory):
    with Valkey(tmp_path_factory.mktemp("valkey")) as server:
        yield server


@pytest.fixture(scope="session")
def seaweed(tmp_path_factory):
    with Seaweed(tmp_path_factory.mktemp("seaweed")) as server:
        yield server


@pytest.fixture(scope="session")
def mooncake(tmp_path_factory):
    with Mooncake(tmp_path_factory.mktemp("mooncake")) as server:
        yield server


@pytest.fixture
def valkey_url(valkey):
    """A Valkey store that nobody has written to."""
    return f"{valkey.url}?prefix={uuid4().hex}&budget=10"


@pytest.fixture
def s3_url(seaweed):
    """An S3 store that nobody has written to."""
    return seaweed.url.replace("/rows?", f"/{uuid4().hex}?") + "&budget=10"


@pytest.fixture
def mooncake_url(mooncake):
    """A Mooncake store that nobody has written to."""
    return mooncake.url.replace("/rows?", f"/{uuid4().hex}?") + "&budget=10&stage=16MiB"


@pytest.fixture(
    params=["valkey_url", "s3_url", pytest.param("mooncake_url", marks=pytest.mark.remote)]
)
def url(request):
    """A store that nobody has written to."""
    return request.getfixturevalue(request.param)


@pytest.fixture(params=["valkey_url", "s3_url"])
def listing_url(request):
    """A store that nobody has written to and that can say what it holds."""
    return request.getfixturevalue(request.param)
