"""Content that names its place: two bytes that differ in place differ in value, nearly always."""

import numpy as np
import numpy.typing as npt

from kvstow.memory.arena import Arena
from kvstow.route.blocks import Blocks

CANARY = 0xA5
"""What tests put around memory that must not change."""


def pattern(nbytes: int, seed: int) -> npt.NDArray[np.uint8]:
    """Bytes without a period, the same for the same seed."""
    return np.random.Generator(np.random.PCG64(seed)).integers(0, 256, nbytes, np.uint8)


def fill(arena: Arena, seed: int) -> None:
    """Give every byte of a host arena the pattern of the seed."""
    arena.bytes.numpy()[:] = pattern(arena.nbytes, seed)


def block_contents(arena: Arena, group: int, blocks: Blocks) -> list[bytes]:
    """What the blocks of a host arena hold, run by run."""
    memory = arena.bytes.numpy()
    return [
        b"".join(memory[run.offset : run.end].tobytes() for run in arena.layout.runs(group, block))
        for block in blocks.ids.tolist()
    ]
