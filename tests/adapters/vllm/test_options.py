"""Options of the connector."""

import pytest

from kvstow.adapters.vllm.options import ConnectorOptions
from kvstow.errors import SpecError


def test_an_option_that_nobody_knows_is_refused():
    with pytest.raises(SpecError, match="'lease'"):
        ConnectorOptions.of({"lease": 3})


def test_an_option_of_another_type_is_refused():
    with pytest.raises(SpecError, match="host_bytes"):
        ConnectorOptions.of({"host_bytes": "1GiB"})


def test_whole_seconds_are_seconds():
    assert ConnectorOptions.of({"lease_seconds": 3}).lease_seconds == 3


def test_times_and_digests_reach_the_agent():
    times = {"lease_seconds": 3, "transfer_seconds": 4, "contact_seconds": 2.5}
    made = ConnectorOptions.of({**times, "digest": "off"}).agent
    assert {name: getattr(made, name) for name in times} == times
    assert made.digest == "off"


def test_a_disk_without_a_host_tier_is_refused():
    with pytest.raises(SpecError, match="disk tier"):
        ConnectorOptions.of({"disk_path": "/tmp/x", "disk_bytes": 1 << 30})
