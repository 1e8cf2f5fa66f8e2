"""What the scheduler's side knows of the rows that the workers keep."""

import pytest

from kvstow.adapters.vllm.protocol import EngineRequest
from kvstow.adapters.vllm.scheduler.key_index import KeyIndex, Level, RequestKeys
from kvstow.blocks.prompt import Prompt
from kvstow.offload.keys import block_keys
from recorded_vllm import IDENTITY

A, B, C = b"a", b"b", b"c"


def levels(*each: Level) -> bytes:
    return bytes(each)


def test_a_row_counts_at_the_level_at_which_every_rank_has_it():
    known = KeyIndex(1)
    known.expect(["0", "1"])
    known.update("0", {0: ((A, B, C), levels(Level.HOST, Level.HOST, Level.BELOW))})
    assert known.levels(0, [A, B, C]).tolist() == [0, 0, 0]
    known.update("1", {0: ((A, B), levels(Level.HOST, Level.BELOW))})
    assert known.levels(0, [A, B, C]).tolist() == [Level.HOST, Level.BELOW, Level.GONE]
    assert [known.has(0, key) for key in (A, B, C)] == [True, True, False]


def test_a_row_that_one_rank_has_given_up_is_gone():
    known = KeyIndex(1)
    known.update("0", {0: ((A,), levels(Level.HOST))})
    known.update("0", {0: ((A,), levels(Level.GONE))})
    assert not known.has(0, A)
    assert known.levels(0, [A]).tolist() == [Level.GONE]


def test_nothing_is_kept_before_any_rank_is_known():
    assert KeyIndex(1).levels(0, [A]).tolist() == [Level.GONE]
    assert not KeyIndex(1).has(0, A)


@pytest.mark.parametrize("sizes", [(4,), (4, 8), (4, 6), (16, 4, 64)])
@pytest.mark.parametrize("extra", [(), ((0, b"i"), (9, b"j"), (9, b"k"))])
def test_keys_of_growing_tokens_are_those_of_the_whole_prompt(
    sizes: tuple[int, ...], extra: tuple[tuple[int, bytes], ...]
):
    tokens = list(range(1000, 1010))
    keys = RequestKeys(IDENTITY, EngineRequest(id="r", tokens=tokens, extra=extra), sizes)
    own = IDENTITY.for_request(adapter="", salt="")
    for count in (3, 10, 11, 40, 130):
        tokens.extend(range(len(tokens), count))
        whole = Prompt.of(tokens[:count], extra=[e for e in extra if e[0] < count])
        for size in sizes:
            assert keys.of(size, count) == block_keys(own, whole, size)
