"""Block keys: what they depend on, how they are made."""

from dataclasses import replace
from hashlib import blake2b

import numpy as np
import pytest

from kvstow.blocks.prompt import Prompt
from kvstow.errors import StoreError
from kvstow.offload.keys import block_keys, keys_at
from kvstow.offload.tier import known_identity
from kvstow.plan.identity import Identity
from offloading import IDENTITY, hybrid

TOKENS = 24
PROMPT = Prompt.of(np.arange(100, 100 + TOKENS), salt=b"tenant")


def test_a_key_is_the_hash_that_the_reference_says():
    prompt = Prompt.of([7, 8, 9, 10], salt=b"xy", extra=[(1, b"picture"), (3, b"sound")])

    def word(number, nbytes):
        return number.to_bytes(nbytes, "little")

    data = IDENTITY.digest + word(2, 8) + b"xy" + word(7, 4)
    data += b"\xff" * 4 + word(7, 8) + b"picture" + word(8, 4)
    first = blake2b(data, digest_size=32, person=b"kvstow block 2").digest()
    data += word(9, 4) + b"\xff" * 4 + word(5, 8) + b"sound" + word(10, 4)
    second = blake2b(data, digest_size=32, person=b"kvstow block 2").digest()
    assert block_keys(IDENTITY, prompt, 2) == [first, second]


def test_keys_name_the_prefix_whatever_the_block_size():
    small, large = block_keys(IDENTITY, PROMPT, 4), block_keys(IDENTITY, PROMPT, 12)
    assert large == small[2::3]
    assert len(set(small)) == len(small) == TOKENS // 4
    assert keys_at(IDENTITY, PROMPT, [8, 20]) == [small[1], small[4]]
    assert block_keys(IDENTITY, PROMPT, 1)[3] == small[0]


def test_keys_depend_on_salt_tokens_and_other_content():
    tokens = list(range(8))
    variants = [
        Prompt.of(tokens),
        Prompt.of(tokens, salt=b"a"),
        Prompt.of([*tokens[:7], 9]),
        Prompt.of(tokens, extra=((0, b"image"),)),
        Prompt.of(tokens, extra=((5, b"image"),)),
        Prompt.of(tokens, extra=((5, b"other"),)),
    ]
    assert len({block_keys(IDENTITY, prompt, 8)[0] for prompt in variants}) == len(variants)
    firsts = [block_keys(IDENTITY, prompt, 4)[0] for prompt in variants]
    assert firsts[0] == firsts[2] == firsts[4] == firsts[5]  # they differ from token 5 on


def test_embeddings_of_one_length_have_keys_of_their_own():
    one, other = (Prompt.of([0] * 8, extra=[(0, digest)]) for digest in (b"one", b"other"))
    assert not set(block_keys(IDENTITY, one, 4)) & set(block_keys(IDENTITY, other, 4))


@pytest.mark.parametrize(
    "change",
    [
        {"model": "another"},
        {"weights": "02" * 16},
        {"config": (("rope_theta", "10001"),)},
        {"kv_dtype": "fp8_e5m2"},
        {"interior": "transposed"},
        {"tokenizer": "03" * 16},
        {"adapter": "lora"},
        {"salt": "tenant 2"},
        {"weights": "", "unverified_because": "a test"},
    ],
    ids=lambda change: next(iter(change)),
)
def test_no_key_is_shared_by_two_computations(change):
    other = replace(IDENTITY, **change)
    assert not set(block_keys(IDENTITY, PROMPT, 4)) & set(block_keys(other, PROMPT, 4))


def test_a_length_that_the_prompt_does_not_have_is_refused():
    with pytest.raises(StoreError, match="no key after 25 of 24 tokens"):
        keys_at(IDENTITY, PROMPT, [25])
    with pytest.raises(StoreError, match="behind 8"):
        keys_at(IDENTITY, PROMPT, [8, 4])


def test_tokens_that_are_no_prompt_and_blocks_of_no_tokens_are_refused():
    with pytest.raises(StoreError, match=r"a prompt is list\n\nhint: kvstow.Prompt.of"):
        block_keys(IDENTITY, [1, 2, 3], 1)
    with pytest.raises(StoreError, match="no block has 0 tokens"):
        block_keys(IDENTITY, PROMPT, 0)


def test_an_identity_is_asked_for_and_must_be_the_only_one():
    nameless = replace(hybrid(), identity=None)
    with pytest.raises(StoreError, match=r"hint: pass identity=Identity\.of"):
        known_identity(nameless, None, "store")
    assert known_identity(nameless, IDENTITY, "store") == IDENTITY
    assert known_identity(nameless.identified(IDENTITY), None, "store") == IDENTITY
    with pytest.raises(StoreError, match="weights is"):
        known_identity(nameless.identified(IDENTITY), Identity.unverified("x"), "store")
