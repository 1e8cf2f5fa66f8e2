"""Plan a model: what a block costs, how many descriptors it takes to move, what fits.

python examples/plan_a_model.py [MODEL] [GIB]
"""

import sys

from kvstow.plan.capacity import max_requests, request_bytes
from kvstow.plan.group import grouped
from kvstow.plan.models import load_model, model_layers
from kvstow.plan.pack import packed


def main(model: str = "gpt-oss-20b", gib: str = "20") -> None:
    layers = model_layers(load_model(model)).layers
    layout = packed(grouped(layers), budget=int(gib) << 30)
    print(f"{model}: {len(layers)} layers, slabs of {layout.slab_bytes:,} bytes")
    for g, rows in enumerate(layout.groups):
        apart = rows.group.num_tensors
        print(
            f"  {rows.group.name:<12} {layout.row_bytes(g):>9,} bytes a block in "
            f"{len(layout.runs(g, 1))} piece, not {apart}; {rows.rows_per_slab} rows a slab"
        )
    held, fit = request_bytes(layout, 8192), max_requests(layout, 8192)
    print(f"  a request of 8,192 tokens holds {held:,} bytes; {fit} fit at once")


if __name__ == "__main__":
    main(*sys.argv[1:])
