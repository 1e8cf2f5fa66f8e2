"""Prompts: which hash a prefix has, and what keeps two prompts apart."""

from collections import Counter

import numpy as np
import pytest

from block_layouts import tokens
from kvstow.blocks.prompt import Prompt
from kvstow.errors import SpecError


def test_the_hash_of_a_prefix_depends_on_all_of_it_and_nothing_else() -> None:
    ids = tokens(40)
    base = Prompt.of(ids).hashes(4)
    assert np.array_equal(Prompt.of([*ids, 1, 2]).hashes(4), base)
    for changed in (0, 17, 39):
        other = ids.copy()
        other[changed] += 1
        assert [bool(x) for x in Prompt.of(other).hashes(4) == base] == [
            block < changed // 4 for block in range(10)
        ]
    swapped = ids.copy()
    swapped[0], swapped[1] = swapped[1], swapped[0]
    assert Prompt.of(swapped).hashes(4)[0] != base[0]


def test_blocks_of_any_size_read_the_same_hashes() -> None:
    prompt = Prompt.of(tokens(24_000))
    assert np.array_equal(prompt.hashes(2)[7::8], prompt.hashes(16))
    assert prompt.hash_after(32)[0] == prompt.hashes(16)[1]


def test_extending_a_prompt_hashes_as_if_it_had_been_longer() -> None:
    ids = tokens(20_000)
    for cut in (0, 1, 8191, 8192, 8193, 19_999):
        assert np.array_equal(
            Prompt.of(ids[:cut]).extended(ids[cut:]).hashes(1), Prompt.of(ids).hashes(1)
        )


def test_salts_and_extra_content_change_what_comes_after_them() -> None:
    ids = tokens(16)
    plain = Prompt.of(ids).hashes(4)
    assert not (Prompt.of(ids, salt=b"a").hashes(4) == plain).any()
    image = Prompt.of(ids, extra=((9, b"image"),)).hashes(4)
    assert [bool(x) for x in image == plain] == [True, True, False, False]
    assert (Prompt.of(ids, extra=((9, b"other"),)).hashes(4) != image)[2:].all()


def test_hashes_of_similar_prompts_do_not_meet() -> None:
    seen: Counter[int] = Counter()
    for value in range(64):
        for place in range(64):
            ids = [0] * 64
            ids[place] = value
            seen.update({int(Prompt.of(ids).hashes(64)[0])})
    assert len(seen) == 63 * 64 + 1


@pytest.mark.parametrize("wrong", [[1.5], [-1], [1 << 31], [[1]], [1, [2]], "12", None])
def test_what_is_not_a_token_is_refused(wrong: object) -> None:
    with pytest.raises(SpecError):
        Prompt.of(wrong)
    with pytest.raises(SpecError, match="token 3 of 2"):
        Prompt.of([1, 2], extra=((3, b""),))


def test_a_batch_is_refused_with_what_to_do() -> None:
    with pytest.raises(SpecError, match=r"int64 \(1, 3\), not a list .*\n\nhint: .*tokens\[0\]"):
        Prompt.of([[1, 2, 3]])


def test_a_prompt_without_its_hashes_cannot_be_made() -> None:
    """Its tokens would be counted, and found by nobody."""
    with pytest.raises(SpecError, match=r"3 tokens with 0 hashes\n\nhint: Prompt\.of"):
        Prompt([1, 2, 3])  # pyright: ignore[reportArgumentType]


def test_extra_content_is_the_same_in_whichever_order_it_is_given() -> None:
    ids = tokens(16)
    one = Prompt.of(ids, extra=[(9, b"b"), (2, b"a"), (9, b"a")])
    two = Prompt.of(ids, extra=[(2, b"a"), (9, b"a"), (9, b"b")])
    assert one.extra == two.extra == ((2, b"a"), (9, b"a"), (9, b"b"))
    assert np.array_equal(one.hashes(4), two.hashes(4))


@pytest.mark.parametrize(
    "wrong",
    [[(0, b"")], [(0, "cat")], [(-1, b"cat")], [(4, b"cat")], [("0", b"a")], [(0.0, b"a")], [b"a"]],
)
def test_extra_content_without_a_digest_or_outside_the_prompt_is_refused(wrong: object) -> None:
    with pytest.raises(SpecError, match="extra content"):
        Prompt.of([1, 2, 3, 4], extra=wrong)


def test_a_salt_that_is_text_is_refused_with_what_to_do() -> None:
    with pytest.raises(SpecError, match=r"salt 'ü' is str\n\nhint: salt.encode\(\)"):
        Prompt.of([1, 2], salt="ü")  # pyright: ignore[reportArgumentType]
