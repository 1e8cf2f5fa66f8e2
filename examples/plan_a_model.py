"""Plan a model: what a block costs, how many descriptors it takes to move, what fits.

python examples/plan_a_model.py [MODEL] [MEMORY]
"""

import sys

from kvstow.plan.deployment import plan_model


def main(model: str = "gpt-oss-20b", memory: str = "20GiB") -> None:
    plan = plan_model(model, memory=memory)
    layout = plan.layout
    print(f"{model}: {len(layout.layers)} layers, slabs of {layout.slab_bytes:,} bytes")
    for g, rows in enumerate(layout.groups):
        apart = rows.group.num_tensors
        print(
            f"  {rows.group.name:<12} {layout.row_bytes(g):>9,} bytes a block in "
            f"{len(layout.runs(g, 1))} piece, not {apart}; {rows.rows_per_slab} rows a slab"
        )
    held, fit = plan.bytes_per_request(tokens=8192), plan.max_requests(tokens=8192)
    print(f"  a request of 8,192 tokens holds {held:,} bytes; {fit} fit at once")


if __name__ == "__main__":
    main(*sys.argv[1:])
