"""Which blocks vLLM's own manager gives a request for tokens that a connector loads.

Everything that it gives enters its prefix cache when the load is over. So all of that must be
filled, and the last token, which is computed, must see nothing that was not given.
"""

import pytest
import torch

from kvstow.adapters.vllm.cache.pages import retention_of
from kvstow.adapters.vllm.engine import stop_one_token_short
from kvstow.adapters.vllm.protocol import blocks_with_tokens
from kvstow.adapters.vllm.scheduler.parts import BlockHolds
from kvstow.plan.retention import first_seen_block, first_seen_token

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]

BLOCK = 4
WINDOWS = {"window 8": 8, "window 5": 5, "chunk 8": 8, "chunk 12": 12}


def spec_of(kind: str):
    from vllm.v1.kv_cache_interface import ChunkedLocalAttentionSpec, SlidingWindowSpec

    shape = {"block_size": BLOCK, "num_kv_heads": 1, "head_size": 8, "dtype": torch.float32}
    if kind.startswith("window"):
        return SlidingWindowSpec(**shape, sliding_window=WINDOWS[kind])
    return ChunkedLocalAttentionSpec(**shape, attention_chunk_size=WINDOWS[kind])


class Cache:
    """vLLM's manager of a model with full layers and others, and one request."""

    def __init__(self, kind: str) -> None:
        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_manager import KVCacheManager
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
        from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

        init_none_hash(sha256)
        self.spec = spec_of(kind)
        full = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=8, dtype=torch.float32)
        groups = [KVCacheGroupSpec(["w"], self.spec), KVCacheGroupSpec(["f"], full)]
        self.hasher = get_request_block_hasher(BLOCK, sha256)
        self.manager = KVCacheManager(
            KVCacheConfig(num_blocks=100, kv_cache_tensors=[], kv_cache_groups=groups),
            max_model_len=256,
            scheduler_block_size=BLOCK,
            hash_block_size=BLOCK,
        )

    def request(self, num_tokens: int):
        from vllm.v1.request import Request

        from vllm import SamplingParams

        return Request(
            request_id=f"r{num_tokens}",
            prompt_token_ids=list(range(num_tokens)),
            sampling_params=SamplingParams(max_tokens=1),
            pooling_params=None,
            block_hasher=self.hasher,
        )

    def handed_over(self, num_tokens: int) -> list[int]:
        """Blocks of that group that are left when a request ends which computed so many tokens,
        in one step, as vLLM's scheduler hands them to the connector."""
        request = self.request(num_tokens)
        assert self.manager.allocate_slots(request, num_tokens) is not None
        self.manager.remove_skipped_blocks(request.request_id, num_tokens)
        return self.manager.get_block_ids(request.request_id)[0]

    def given(self, num_tokens: int, num_loaded: int) -> list[int]:
        """Blocks of the group that is not full, after a load of so many tokens; 0 for none."""
        request = self.request(num_tokens)
        found = self.manager.allocate_slots(
            request, 0, num_external_computed_tokens=num_loaded, delay_cache_blocks=True
        )
        assert found is not None
        self.manager.cache_blocks(request, num_loaded)
        return self.manager.get_block_ids(request.request_id)[0]


@pytest.mark.parametrize("kind", WINDOWS)
@pytest.mark.parametrize("num_tokens", range(2, 34))
def test_all_that_is_given_is_filled_and_all_that_the_last_token_sees_is_given(
    kind: str, num_tokens: int
):
    cache = Cache(kind)
    loaded = num_tokens - 1
    ids = cache.given(num_tokens, loaded)
    retention = retention_of(cache.spec)
    first = first_seen_block(retention, loaded, BLOCK)
    last = -(-loaded // BLOCK)
    assert [k for k, block in enumerate(ids) if block] == list(range(first, last))
    assert blocks_with_tokens(ids, 0, loaded, BLOCK).index.tolist() == list(range(first, last))
    seen = range(first_seen_token(retention, num_tokens - 1), num_tokens - 1)
    assert all(ids[token // BLOCK] for token in seen)


@pytest.mark.parametrize("kind", WINDOWS)
def test_prefill_that_stops_one_token_short_has_all_that_decode_is_given(kind: str):
    """One that does not has let go of a block at some lengths."""
    missing: list[int] = []
    for num_tokens in range(2, 34):
        given = [
            k for k, block in enumerate(Cache(kind).given(num_tokens, num_tokens - 1)) if block
        ]
        short, whole = (Cache(kind).handed_over(n) for n in (num_tokens - 1, num_tokens))
        assert all(short[k] for k in given)
        missing += [num_tokens] if not all(whole[k] for k in given) else []
    assert missing


def test_a_request_of_vllms_is_shortened_and_stays_whole():
    request = Cache("window 8").request(12)
    request.kv_transfer_params = {"do_remote_decode": True}
    for _ in ("queued", "queued again after it was preempted"):
        stop_one_token_short(request)
    assert (request.num_tokens, request.num_prompt_tokens, request.max_tokens) == (11, 11, 1)
    assert list(request.all_token_ids) == request.prompt_token_ids == list(range(11))


@pytest.mark.parametrize("kind", WINDOWS)
@pytest.mark.parametrize("shorter", [5, 9, 13, 17, 21, 25])
def test_a_shorter_prompt_finds_only_what_was_given(kind: str, shorter: int):
    cache = Cache(kind)
    ids = cache.given(30, 29)
    blocks, num_found, _ = cache.manager.get_computed_blocks(cache.request(shorter))
    found = [block.block_id for block in blocks.blocks[0]]
    assert num_found == len(found) * BLOCK
    given = {k for k, block in enumerate(ids) if block}
    assert {k for k, block in enumerate(found) if block} <= given
    seen = range(first_seen_token(retention_of(cache.spec), num_found), num_found)
    assert all(found[token // BLOCK] == ids[token // BLOCK] > 0 for token in seen)


def test_a_load_of_the_whole_prompt_leaves_the_last_token_without_its_chunk():
    """Why the connector leaves the last token to the engine: vLLM takes back one token of a whole
    prompt, and computes it in a chunk whose blocks it has not given."""
    assert Cache("chunk 8").given(8, 8) == [0, 0]
    assert all(Cache("chunk 8").given(8, 7))


# ── blocks that are filled before a request is planned ────────────────────────────────────


def plain_cache():
    """vLLM's manager of a model whose layers are all full, and what makes requests for it."""
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

    made = Cache("window 8")  # whose requests have the same hashes
    full = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=8, dtype=torch.float32)
    config = KVCacheConfig(
        num_blocks=20, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["f"], full)]
    )
    manager = KVCacheManager(
        config, max_model_len=256, scheduler_block_size=BLOCK, hash_block_size=BLOCK
    )
    return manager, made.request


def test_vllm_finds_blocks_that_were_filled_before_it_has_planned_a_request():
    manager, made = plain_cache()
    pool, request = BlockHolds(manager.block_pool), made(18)
    free = pool.num_free
    assert pool.cached(request.block_hashes, 4) == []
    taken = pool.take(4)
    assert (pool.num_free, len(set(taken))) == (free - 4, 4)
    pool.enter(request, taken, 0, BLOCK)
    pool.release(taken[::-1])
    assert pool.num_free == free
    blocks, num_found, *_ = manager.get_computed_blocks(request)
    assert [block.block_id for block in blocks.blocks[0]] == taken
    assert num_found == 4 * BLOCK
    longer = made(30)
    assert pool.cached(longer.block_hashes, 7) == taken
    more = pool.take(3)
    pool.enter(longer, [*taken, *more], 4, BLOCK)
    assert pool.cached(longer.block_hashes, 7) == [*taken, *more]


def test_a_prompts_end_is_given_away_before_its_beginning():
    manager, made = plain_cache()
    pool, request = BlockHolds(manager.block_pool), made(18)
    taken = pool.take(4)
    pool.enter(request, taken, 0, BLOCK)
    pool.release(taken[::-1])
    pool.take(pool.num_free - 2)
    assert pool.cached(request.block_hashes, 4) == taken[:2]
