"""Plan a model: what a block costs, how many descriptors it takes to move, what fits.

python examples/plan_a_model.py [MODEL] [MEMORY]
"""

import sys

import kvstow


def main(model: str = "gpt-oss-20b", memory: str = "20GiB") -> None:
    plan = kvstow.plan_model(model, memory=memory)
    layout = plan.layout
    print(f"{plan.model}: {len(layout.layers)} layers, slabs of {layout.slab_bytes:,} bytes")
    for g, placed in enumerate(layout.groups):
        print(
            f"  {placed.group.name:<12} {layout.row_bytes(g):>9,} bytes a block in "
            f"{len(layout.runs(g, 1))} piece, not {placed.group.num_tensors}; "
            f"{placed.rows_per_slab} rows a slab"
        )
    held, fit = plan.bytes_per_request(tokens=8192), plan.max_requests(tokens=8192)
    print(f"  a request of 8,192 tokens holds {held:,} bytes; {fit} fit at once")


if __name__ == "__main__":
    main(*sys.argv[1:])
