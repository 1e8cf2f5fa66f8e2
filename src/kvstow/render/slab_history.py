"""Who owned which slab of a pool, moment by moment."""

from typing import Any, NamedTuple

from kvstow.blocks.pool import Pool
from kvstow.blocks.slabs import SlabMap

MAX_MOMENTS = 240


class SlabMoment(NamedTuple):
    """One moment: the slabs, and what of all prompts so far was found cached."""

    seconds: float
    slabs: SlabMap
    hit_rate: float


class SlabHistory:
    """Moments of one pool, evenly spread over a time whose end is not known beforehand."""

    def __init__(self) -> None:
        self.moments: list[SlabMoment] = []
        self._every = 1
        self._seen = 0

    def see(self, pool: Pool, seconds: float, *, prompt_tokens: int, hit_tokens: int) -> None:
        """Remember the moment, if it is time for one."""
        if self._seen % self._every == 0:
            hit_rate = hit_tokens / prompt_tokens if prompt_tokens else 0.0
            self.moments.append(SlabMoment(seconds, pool.slab_map(), hit_rate))
        self._seen += 1
        if len(self.moments) > MAX_MOMENTS:
            self.moments = self.moments[::2]
            self._every *= 2

    def record(self) -> dict[str, Any]:
        """What a page draws from."""
        first = self.moments[0].slabs if self.moments else None
        return {
            "groups": list(first.groups) if first else [],
            "num_slabs": first.num_slabs if first else 0,
            "step": first.step if first else 1,
            "seconds": [round(moment.seconds, 3) for moment in self.moments],
            "slabs": [moment.slabs.letters for moment in self.moments],
            "hit_rate": [round(moment.hit_rate, 5) for moment in self.moments],
        }
