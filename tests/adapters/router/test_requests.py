"""Requests as instances get them."""

from kvstow.adapters.router.requests import prefill_request


def test_a_prefill_request_asks_for_one_token_and_tickets():
    asked = prefill_request({"prompt": "x", "stream": True, "min_tokens": 5, "n": 3})
    assert asked == {
        "prompt": "x",
        "max_tokens": 1,
        "n": 1,
        "kv_transfer_params": {"do_remote_decode": True},
    }
