"""Offload: keep a prompt's rows on disk, lose the memory, bring them back.

python examples/offload.py [DIR]
"""

import sys
import tempfile

import torch

from kvstow import Arena, Identity, Ledger, Pool, Prompt, Store, plan_model

PROMPT = Prompt.of(range(1000, 1160))

# Of a model on disk it is Identity.of(model_dir). Here nothing but random numbers is kept.
IDENTITY = Identity.of_tensors("qwen3-0.6b", {}, [("random", "bfloat16", b"seed 7")])


def main(place: str) -> None:
    layout = plan_model("qwen3-0.6b", memory="64MiB").layout.identified(IDENTITY)
    layer = next(iter(layout.layers))

    arena, ledger = Arena(layout), Ledger(Pool(layout))
    blocks = ledger.blocks(ledger.admit(len(PROMPT)).request)
    ids = blocks[0].ids
    arena.tensor(layer)[ids] = torch.randn(arena.tensor(layer)[ids].shape).to(torch.bfloat16)
    before = arena.tensor(layer)[ids].clone()
    with Store(disk=place, disk_bytes="256MiB") as store:
        kept = store.save(arena, blocks, PROMPT)
    print(f"{kept} rows of {layout.row_bytes(0):,} bytes kept in {place}")
    arena.close()

    fresh, ledger = Arena(layout), Ledger(Pool(layout))  # another process, another day
    blocks = ledger.blocks(ledger.admit(len(PROMPT)).request)
    with Store(disk=place) as store:
        tokens = store.load(fresh, PROMPT, into=blocks)
    same = torch.equal(fresh.tensor(layer)[blocks[0].ids], before)
    print(f"{tokens} tokens came back, {'identical' if same else 'DIFFERENT'}")


if __name__ == "__main__":
    if sys.argv[1:]:
        main(sys.argv[1])
    else:
        with tempfile.TemporaryDirectory() as folder:
            main(f"{folder}/store")
