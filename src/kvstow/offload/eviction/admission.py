"""Which rows are worth writing to disk: those that are seen a second time."""

import numpy as np
import numpy.typing as npt

from kvstow.offload.tier import Bools


class SecondTouch:
    """Lets a row pass the second time it is seen, so that what is used once is never written.

    Two Bloom filters take turns: when the young one has seen `window` rows it becomes the old
    one. A row that returns within one window is always recognised; one in about a hundred
    passes at first sight.
    """

    BITS_PER_ROW = 16
    PROBES = 4

    def __init__(self, window: int) -> None:
        self._window = window
        bits = 1 << (window * self.BITS_PER_ROW - 1).bit_length()
        self._mask = np.uint64(bits - 1)
        self._young = np.zeros(bits, bool)
        self._old = np.zeros(bits, bool)
        self._seen = 0

    def admits(self, marks: npt.NDArray[np.uint64]) -> Bools:
        """Which rows were seen before; all of them have been, from now on."""
        if self._seen + len(marks) > self._window:
            self._young, self._old = np.zeros_like(self._young), self._young
            self._seen = 0
        self._seen += len(marks)
        step = (marks >> np.uint64(32)) | np.uint64(1)
        probes = np.arange(self.PROBES, dtype=np.uint64)[:, None]
        places = (marks + probes * step) & self._mask
        known = [np.all(filter[places], axis=0) for filter in (self._young, self._old)]
        self._young[places] = True
        return np.asarray(known[0] | known[1])
