"""What several commands are shown."""

import pytest

from offloading import hybrid, key, random_rows


@pytest.fixture
def directory(tmp_path):
    """A store on disk with 20 rows in each of two groups, closed."""
    from kvstow.offload.disk.tier import DiskTier  # other commands are tested without torch

    tier = DiskTier(tmp_path / "store", hybrid(), capacity=1 << 20)
    for group in range(2):
        rows = random_rows(tier.layout.row_bytes(group), 20, group)
        tier.store(group, [key(group, i) for i in range(20)], rows)
    tier.close()
    return tmp_path / "store"
