"""Check an attention kernel: does it read packed rows by their strides?

python examples/check_kernel.py          # put your kernel in place of `attention`
"""

import torch

import kvstow

LAYERS = [
    kvstow.LayerSpec.attention(f"layers.{i}", heads=2, head_dim=16, dtype="float32", block_tokens=4)
    for i in range(2)
]


def attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    block_table: torch.Tensor,
    lengths: torch.Tensor,
) -> torch.Tensor:
    """query [sequence, head, dim]; keys, values [block, head, token, dim], strided views."""
    rows: list[torch.Tensor] = []
    for i, length in enumerate(lengths.tolist()):
        k, v = (
            x[block_table[i].long()].transpose(1, 2).flatten(0, 1)[:length].transpose(0, 1)
            for x in (keys, values)
        )
        out = torch.nn.functional.scaled_dot_product_attention(
            query[i][None, :, None], k[None], v[None], enable_gqa=True
        )
        rows.append(out[0, :, 0])
    return torch.stack(rows)


def flattened(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    block_table: torch.Tensor,
    lengths: torch.Tensor,
) -> torch.Tensor:
    """The usual mistake: it takes the pages of a layer to follow each other."""

    def compact(x: torch.Tensor) -> torch.Tensor:
        page = max(x.stride(1) * x.shape[1], x.stride(2) * x.shape[2])
        return x.as_strided(x.shape, (page, *x.stride()[1:]))

    return attention(query, compact(keys), compact(values), block_table, lengths)


def main() -> None:
    layout = kvstow.packed(kvstow.grouped(LAYERS), num_slabs=24)
    for kernel in (attention, flattened):
        report = kvstow.testing.check_attention(kernel, layout)
        print(f"{kernel.__name__}: {'can' if report.ok else 'CANNOT'} read packed rows\n{report}\n")


if __name__ == "__main__":
    main()
