"""One request's blocks in one group, as arrays."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvstow.errors import SpecError
from kvstow.plan.view import Ints


@dataclass(frozen=True, slots=True, eq=False)
class Blocks:
    """Logical block `index[i]` of a request has id `ids[i]`; `index` ascends.

    Logical block `k` holds tokens `[k · block_tokens, (k + 1) · block_tokens)`. A window
    group lists only what it still holds. In a recurrent group index 0 is the running state.
    """

    ids: Ints
    index: Ints

    @staticmethod
    def first(ids: npt.ArrayLike) -> "Blocks":
        """Ids of the request's blocks from the first on."""
        array = np.ascontiguousarray(ids, np.int64)
        return Blocks(array, np.arange(len(array), dtype=np.int64))

    def __post_init__(self) -> None:
        if self.ids.shape != self.index.shape or self.ids.ndim != 1:
            raise SpecError(f"{self.ids.shape} ids for {self.index.shape} logical blocks")
        if len(self.index) and (self.index[0] < 0 or (np.diff(self.index) <= 0).any()):
            raise SpecError(f"logical blocks {self.index.tolist()} do not ascend from 0 or later")

    def __len__(self) -> int:
        return len(self.ids)
