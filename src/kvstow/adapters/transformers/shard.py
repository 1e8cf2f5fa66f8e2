"""The part of a model's heads that one of several processes holds."""

from dataclasses import dataclass

from kvstow.plan.spec import Extent


@dataclass(frozen=True, slots=True)
class Shard:
    """The part of every layer's heads that this process holds.

    The model computes just these, or all of them (`computes_all`) and the others are dropped.
    """

    rank: int = 0
    size: int = 1
    computes_all: bool = False

    def heads(self, computed: int) -> Extent:
        """What is held, as a part of all ranks' heads, where the model computes so many.

        What cannot be shared out, a latent say, every rank holds whole.
        """
        if self.computes_all and computed % self.size:
            return Extent.whole("head", computed)
        held = computed // self.size if self.computes_all else computed
        return Extent("head", held * self.size, ((held * self.rank, held * (self.rank + 1)),))


ALL_HEADS = Shard()
"""One process holds everything."""
