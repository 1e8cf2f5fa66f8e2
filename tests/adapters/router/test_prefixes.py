"""Where events of instances are heard."""

import pytest

from kvstow.adapters.router.prefixes import EventSource
from kvstow.errors import SpecError


@pytest.mark.parametrize("text", ["", "http://a", "=tcp://x", "http://a="])
def test_events_of_nobody_or_from_nowhere_are_refused(text: str):
    with pytest.raises(SpecError, match="hint: "):
        EventSource.parse(text)


def test_events_are_named_by_instance_address_and_replay():
    assert EventSource.parse("http://a/=tcp://x:1,tcp://x:2") == EventSource(
        "http://a", "tcp://x:1", "tcp://x:2"
    )
    assert EventSource.parse("http://a=tcp://x:1") == EventSource("http://a", "tcp://x:1")
