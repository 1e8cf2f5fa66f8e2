"""A film of a pool: who owned which slab, moment by moment."""

from typing import Any, NamedTuple

from kvstow.blocks.pool import Pool
from kvstow.blocks.slabs import SlabMap

MAX_FRAMES = 240


class Frame(NamedTuple):
    """One moment: the slabs, and what of all prompts so far was found cached."""

    seconds: float
    slabs: SlabMap
    hit_rate: float


class Film:
    """Frames of one pool, evenly spread over a time whose end is not known beforehand."""

    def __init__(self) -> None:
        self.frames: list[Frame] = []
        self._every = 1
        self._seen = 0

    def see(self, pool: Pool, seconds: float, *, prompt_tokens: int, hit_tokens: int) -> None:
        """Take a frame, if it is time for one."""
        if self._seen % self._every == 0:
            hit_rate = hit_tokens / prompt_tokens if prompt_tokens else 0.0
            self.frames.append(Frame(seconds, pool.slab_map(), hit_rate))
        self._seen += 1
        if len(self.frames) > MAX_FRAMES:
            self.frames = self.frames[::2]
            self._every *= 2

    def record(self) -> dict[str, Any]:
        """What a page draws from."""
        first = self.frames[0].slabs if self.frames else None
        return {
            "groups": list(first.groups) if first else [],
            "num_slabs": first.num_slabs if first else 0,
            "step": first.step if first else 1,
            "seconds": [round(frame.seconds, 3) for frame in self.frames],
            "slabs": [frame.slabs.letters for frame in self.frames],
            "hit_rate": [round(frame.hit_rate, 5) for frame in self.frames],
        }
