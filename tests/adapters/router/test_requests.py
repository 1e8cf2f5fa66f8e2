"""What instances are sent."""

import pytest

from kvstow.adapters.router.requests import is_one_request, prefill_request


def test_a_prefill_request_asks_for_one_token_and_tickets():
    body = {"prompt": "x", "max_tokens": 9, "n": 1, "stream": True, "min_tokens": 4}
    assert prefill_request(body) == {
        "prompt": "x",
        "max_tokens": 1,
        "n": 1,
        "kv_transfer_params": {"do_remote_decode": True},
    }


@pytest.mark.parametrize(
    ("body", "is_one"),
    [
        ({"prompt": "x"}, True),
        ({"prompt": ["x"]}, True),
        ({"prompt": [1, 2, 3]}, True),
        ({"prompt": [[1, 2]]}, True),
        ({"messages": []}, True),
        ({"prompt": "x", "n": 1, "best_of": None}, True),
        ({"prompt": "x", "n": 2}, False),
        ({"prompt": "x", "best_of": 2}, False),
        ({"messages": [], "n": 3}, False),
        ({"prompt": ["x", "y"]}, False),
        ({"prompt": [[1, 2], [3]]}, False),
    ],
)
def test_several_samples_or_prompts_are_several_requests(body: dict[str, object], is_one: bool):
    assert is_one_request(body) is is_one
