"""Offload: keep a prompt's rows on disk, lose the memory, bring them back.

python examples/offload.py [DIR]
"""

import sys
import tempfile

import torch

import kvstow

PROMPT = kvstow.Prompt.of(range(1000, 1160))

# Of a model on disk: kvstow.Identity.of(model_dir). Only random numbers are kept here.
IDENTITY = kvstow.Identity.of_tensors("qwen3-0.6b", {}, [("random", "bfloat16", b"seed 7")])


def main(place: str) -> None:
    layout = kvstow.plan_model("qwen3-0.6b", memory="64MiB").layout.identified(IDENTITY)
    layer = next(iter(layout.layers))

    arena, ledger = kvstow.Arena(layout), kvstow.Ledger(kvstow.Pool(layout))
    blocks = ledger.blocks(ledger.admit(len(PROMPT)).request)
    ids = blocks[0].ids
    arena.tensor(layer)[ids] = torch.randn(arena.tensor(layer)[ids].shape).to(torch.bfloat16)
    before = arena.tensor(layer)[ids].clone()
    with kvstow.Store(disk=place, disk_bytes="256MiB") as store:
        kept = store.save(arena, blocks, PROMPT)
    print(f"{kept} rows of {layout.row_bytes(0):,} bytes kept in {place}")
    arena.close()

    # As another process would:
    fresh, ledger = kvstow.Arena(layout), kvstow.Ledger(kvstow.Pool(layout))
    blocks = ledger.blocks(ledger.admit(len(PROMPT)).request)
    with kvstow.Store(disk=place) as store:
        tokens = store.load(fresh, PROMPT, into=blocks)
    same = torch.equal(fresh.tensor(layer)[blocks[0].ids], before)
    print(f"{tokens} tokens came back, {'identical' if same else 'DIFFERENT'}")


if __name__ == "__main__":
    if sys.argv[1:]:
        main(sys.argv[1])
    else:
        with tempfile.TemporaryDirectory() as folder:
            main(f"{folder}/store")
