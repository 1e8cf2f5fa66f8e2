"""Plan a model: what a block costs, how many descriptors it takes to move, what fits.

python examples/plan_a_model.py [MODEL] [GIB]
"""

import sys

from kvstow.plan.group import grouped, rows_needed_by_all
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
    groups = [rows.group for rows in layout.groups]
    needed = rows_needed_by_all(groups, 8192)
    nbytes = sum(rows * layout.row_stride(g) for g, rows in enumerate(needed))
    print(f"  a request of 8,192 tokens holds {nbytes:,} bytes; {layout.nbytes // nbytes} fit")


if __name__ == "__main__":
    main(*sys.argv[1:])
