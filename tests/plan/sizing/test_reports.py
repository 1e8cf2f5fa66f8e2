"""The figures of a layout, against arithmetic written out here.

Their keys are tested with the commands.
"""

from kvstow.plan.group import grouped
from kvstow.plan.pack import packed, separate, union
from kvstow.plan.retention import Window
from kvstow.plan.sizing.plan import Deployment
from kvstow.plan.sizing.reports import (
    padding_bytes,
    padding_fractions,
    per_layer_figures,
    slab_shares,
)
from planning import attention

TINY = {
    "model_type": "gpt_oss",
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "sliding_window": 32,
    "dtype": "bfloat16",
}


def test_padding_is_what_a_group_does_not_use_of_the_slab_it_owns():
    """Rows whose lengths are as 3 to 2."""
    layers = [attention("a", dim=96), attention("b", dim=64, retention=Window(4))]
    row_bytes = [layer.page_bytes for layer in layers]
    shared = packed(grouped(layers), num_slabs=8)
    assert slab_shares(shared) == (shared.slab_bytes,) * 2
    assert padding_bytes(shared) == tuple(
        shared.slab_bytes - rows.rows_per_slab * nbytes
        for rows, nbytes in zip(shared.groups, row_bytes, strict=True)
    )
    wide = union(grouped(layers), num_slabs=8)
    assert padding_bytes(wide) == (0, row_bytes[0] - row_bytes[1])
    assert padding_fractions(wide) == (0, (row_bytes[0] - row_bytes[1]) / row_bytes[0])
    apart = separate(grouped(layers), num_slabs=8, context_tokens=4)
    assert sum(slab_shares(apart)) * 8 == apart.nbytes


def test_one_tensor_per_layer_costs_keys_and_values_apart():
    held = Deployment(model=TINY).on_rank(0)
    assert per_layer_figures(held.groups) == {
        "regions": 8,
        "descriptors_per_block": 4,
        "bytes_per_descriptor_max": 16 * 2 * 8 * 2,
    }
