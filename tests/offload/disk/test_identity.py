"""Files of two stores mixed up, other computations: refused or missed, never served."""

import logging
import shutil
from dataclasses import replace

import numpy as np
import pytest

from kvstow.errors import StoreError
from kvstow.offload.disk.tier import DiskTier
from kvstow.offload.rows import row_layout
from kvstow.plan.identity import Identity
from offloading import IDENTITY, hybrid, numbered_key, numbered_row, row_files

MIB = 1 << 20
ROWS = 12


def made(path, layout, offset=0):
    """A store whose rows are numbered from `offset` on, under the keys of 0 … ROWS."""
    tier = DiskTier(path, layout, capacity=MIB)
    for group in range(2):
        rows = [numbered_row(tier, group, offset + n) for n in range(ROWS)]
        assert tier.store(group, [numbered_key(n) for n in range(ROWS)], rows).all()
    tier.close()
    return path


def served(path, layout):
    """Which stores' rows are served, 0 or 100; None where the store refuses.

    Every row is read as its tier's layout says: it must be a row of the store of that layout.
    """
    try:
        tier = DiskTier(path, layout)
    except StoreError:
        return None
    found = set()
    for group in range(2):
        rows = [np.zeros(tier.layout.row_bytes(group), np.uint8) for _ in range(ROWS)]
        mask = tier.load(group, [numbered_key(n) for n in range(ROWS)], rows)
        for n in np.flatnonzero(mask):
            right = [numbered_row(tier, group, offset + n) for offset in (0, 100)]
            found.add(0 if (rows[n] == right[0]).all() else 100)
            assert (rows[n] == right[found == {100}]).all()
    if found:
        assert found == {0 if tier.layout == row_layout(ONE) else 100}
    tier.close()
    return found


ONE = hybrid(order="BLHNC")
OTHERS = {
    "order": hybrid(order="BHLNC"),
    "model": hybrid(model="another"),
    "weights": ONE.identified(replace(IDENTITY, weights="02" * 16)),
    "cache dtype": ONE.identified(replace(IDENTITY, kv_dtype="fp8_e5m2")),
}


@pytest.mark.parametrize("what", OTHERS)
@pytest.mark.parametrize("files", ["layout.json", "rows", "layout.json and rows"])
def test_files_of_another_store_never_make_a_wrong_row(tmp_path, what, files):
    other = OTHERS[what]
    assert len({ONE.row_bytes(0), other.row_bytes(0)}) == 1
    made(tmp_path / "one", ONE)
    made(tmp_path / "other", other, offset=100)
    if "layout.json" in files:
        shutil.copy(tmp_path / "other" / "layout.json", tmp_path / "one" / "layout.json")
    if "rows" in files:
        pairs = [row_files(tmp_path / name) for name in ("one", "other")]
        for name, theirs in zip(*pairs, strict=True):
            shutil.copy(theirs, tmp_path / "new")
            (tmp_path / "new").rename(name)
    for layout in (ONE, other):
        copy = tmp_path / f"read-{layout is ONE}"
        shutil.copytree(tmp_path / "one", copy)
        assert served(copy, layout) in (None, set(), {0})


def test_rows_under_another_stores_layout_are_misses_until_their_own_is_back(tmp_path):
    made(tmp_path / "one", ONE)
    made(tmp_path / "other", OTHERS["order"], offset=100)
    before = (tmp_path / "one" / "layout.json").read_bytes()
    shutil.copy(tmp_path / "other" / "layout.json", tmp_path / "one" / "layout.json")
    for layout in (ONE, OTHERS["order"]):
        assert served(tmp_path / "one", layout) == set()
    (tmp_path / "one" / "layout.json").write_bytes(before)
    assert served(tmp_path / "one", ONE) == {0}


# ── computations ──────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("what", ["model", "weights", "cache dtype"])
def test_rows_of_another_computation_are_refused_in_words(tmp_path, what):
    made(tmp_path, ONE)
    with pytest.raises(StoreError, match=f"{what} is .* in the source, .* in the destination"):
        DiskTier(tmp_path, OTHERS[what])
    with pytest.raises(StoreError, match="two identities"):
        DiskTier(tmp_path, identity=replace(IDENTITY, weights="02" * 16))


def test_a_store_asks_which_computation_makes_its_rows(tmp_path):
    with pytest.raises(StoreError, match=r"hint: pass identity=Identity\.of\(model_dir\)"):
        DiskTier(tmp_path / "s", replace(ONE, identity=None), capacity=MIB)
    assert not (tmp_path / "s").exists()
    tier = DiskTier(tmp_path / "s", replace(ONE, identity=None), identity=IDENTITY, capacity=MIB)
    assert tier.layout.identity == IDENTITY
    tier.close()


def test_an_unverified_store_says_so(tmp_path, caplog):
    nameless = replace(ONE, identity=None)
    with caplog.at_level(logging.WARNING, "kvstow.offload"):
        identity = Identity.unverified("a test")
        DiskTier(tmp_path, nameless, identity=identity, capacity=MIB).close()
    assert [r.message for r in caplog.records if "a test" in r.message]
    with pytest.raises(StoreError, match="weights is 'unverified'"):
        DiskTier(tmp_path, ONE)
