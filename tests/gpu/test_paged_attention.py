"""Attention that reads rows in place, and generation through it, on a CUDA device."""

from itertools import product

import torch

NUM_BLOCKS = 400


def expected(query, keys, values, first, window, sinks):
    """Plain attention in float64, a mask instead of tables."""
    heads, kv_heads = query.shape[1], keys.shape[1]
    keys, values = (x.double().repeat_interleave(heads // kv_heads, 1) for x in (keys, values))
    score = query.double() @ keys.transpose(2, 3) * query.shape[3] ** -0.5
    num_queries, num_tokens = score.shape[2:]
    at = torch.arange(num_tokens - num_queries, num_tokens, device=query.device)[:, None]
    token = torch.arange(num_tokens, device=query.device)[None]
    seen = (token <= at) & (token > at - (window or num_tokens))
    seen = seen[None] & (token[None] >= first[:, None, None])
    score = score.masked_fill(~seen[:, None], -float("inf"))
    if sinks is not None:
        column = sinks.double().view(1, -1, 1, 1).expand(*score.shape[:3], 1)
        score = torch.cat([score, column], -1)
    return (score.softmax(-1).nan_to_num(0)[..., :num_tokens] @ values).transpose(1, 2)


SHAPES = [  # sequences, heads, kv heads, queries, tokens, tokens per block, dims of k and v
    (1, 1, 1, 1, 1, 1, 16, 16),
    (2, 2, 2, 2, 2, 2, 16, 16),
    (2, 8, 2, 1, 300, 16, 128, 128),
    (3, 9, 3, 70, 130, 16, 64, 64),
    (2, 4, 1, 1, 90, 32, 64, 64),
    (2, 4, 1, 33, 33, 4, 80, 48),
]


def test_rows_read_in_place_give_plain_attention():
    for dtype, window, splits, sink, shape in product(
        (torch.float32, torch.bfloat16), (None, 20), (None, 1, 4), (False, True), SHAPES
    ):
        check_attention(dtype, window, splits, sink, shape)


def check_attention(dtype, window, splits, sink, shape):
    from kvstow.memory.kernels.attention import paged_attention

    sequences, heads, kv_heads, queries, tokens, block_tokens, dim, v_dim = shape
    torch.manual_seed(0)
    device = torch.device("cuda")
    blocks = -(-tokens // block_tokens)
    pool = torch.full((NUM_BLOCKS, kv_heads, block_tokens, dim + v_dim), float("nan"))
    pool = pool.to(device, dtype)
    table = (torch.randperm(NUM_BLOCKS - 1)[: sequences * blocks] + 1).view(sequences, blocks)
    keys = torch.randn(sequences, kv_heads, tokens, dim).to(device, dtype)
    values = torch.randn(sequences, kv_heads, tokens, v_dim).to(device, dtype)
    token = torch.arange(tokens)
    where = table[:, token // block_tokens].to(device), (token % block_tokens).to(device)
    by_token = pool.transpose(1, 2)
    by_token[where[0], where[1].expand_as(where[0])] = torch.cat([keys, values], -1).transpose(1, 2)
    query = torch.randn(sequences, heads, queries, dim).to(device, dtype)
    first = torch.tensor([0, 3, 1][:sequences], dtype=torch.int32, device=device)
    sinks = torch.randn(heads).to(device, dtype) if sink else None
    first_block = 0 if window is None else max(tokens - queries - window + 1, 0) // block_tokens
    found = paged_attention(
        query,
        pool[..., :dim],
        pool[..., dim:],
        table[:, first_block:].contiguous().to(device),
        num_tokens=tokens,
        first_block=first_block,
        first_tokens=first,
        window=window,
        sinks=sinks,
        splits=splits,
    )
    tolerance = 2e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(
        found.double(),
        expected(query, keys, values, first, window, sinks),
        rtol=tolerance,
        atol=tolerance,
    )


def test_a_model_that_reads_rows_in_place_chooses_the_same_tokens():
    import transformers

    families = ["llama", "qwen3", "mistral", "gemma3_text", "gpt_oss"]
    if tuple(map(int, transformers.__version__.split(".")[:2])) >= (5, 22):
        families.append("falcon_h1")  # earlier versions keep recurrent states differently
    for family in families:
        check_generation(family)


def check_generation(family):
    from kvstow.adapters.transformers import Cache, ModelMemory
    from kvstow.testing.tiny_models import tiny_model

    model = tiny_model(family).to("cuda")
    ids = torch.randint(0, 250, (3, 40), generator=torch.Generator().manual_seed(1)).cuda()
    mask = torch.ones_like(ids)
    mask[1, :5] = 0
    wishes = {
        "attention_mask": mask,
        "max_new_tokens": 20,
        "do_sample": False,
        "prefill_chunk_size": 16,
    }
    theirs = model.generate(ids, **wishes)
    with ModelMemory.of(model, budget=4 << 20, block_tokens=4, in_place=True) as memory:
        with Cache(memory) as cache:
            ours = model.generate(ids, past_key_values=cache, **wishes)
        memory.ledger.check()
    assert torch.equal(ours, theirs), family
