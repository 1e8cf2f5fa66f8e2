"""Law 3: slab_bytes = rows_per_slab · row_stride for every group, rows no longer than that."""

from hypothesis import given
from hypothesis import strategies as st

from kvstow.plan.group import grouped
from kvstow.plan.pack import Alignment, Site, packed, union
from kvstow.plan.slab import slab_geometry
from planning import layer_lists

ROW_ORDERS = st.sampled_from(["BLHNC", "BLNHC", "BHLNC"])
ALIGNMENTS = st.builds(
    Alignment,
    page=st.sampled_from([1, 16]),
    row=st.sampled_from([1, 8, 48, 256]),
    base=st.just(64),
)


@given(layer_lists(), ROW_ORDERS, ALIGNMENTS, st.integers(2, 5))
def test_rows_fill_slabs_exactly_in_every_group(layers, order, alignment, num_slabs):
    site = Site(order=order, alignment=alignment)
    for pack in (packed, union):
        layout = pack(grouped(layers), num_slabs=num_slabs, site=site)
        assert layout.nbytes == num_slabs * layout.slab_bytes
        for g, rows in enumerate(layout.groups):
            strides = {part.block_stride for place in rows.placements for part in place}
            assert len(strides) == 1
            (stride,) = strides
            assert rows.rows_per_slab * stride == layout.slab_bytes
            assert stride >= layout.row_bytes(g)
            assert stride % alignment.row == 0


@given(layer_lists(), ROW_ORDERS)
def test_block_b_lies_in_slab_b_div_rows_per_slab(layers, order):
    layout = packed(grouped(layers), num_slabs=3, site=Site(order=order))
    for g, rows in enumerate(layout.groups):
        last = layout.num_blocks(g) - 1
        for block in {0, 1, rows.rows_per_slab - 1, rows.rows_per_slab, last - 1, last}:
            (run,) = layout.runs(g, block)
            assert run.offset // layout.slab_bytes == block // rows.rows_per_slab
            assert (run.end - 1) // layout.slab_bytes == block // rows.rows_per_slab


@given(layer_lists())
def test_union_is_the_case_of_one_row_per_slab(layers):
    layout = union(grouped(layers), num_slabs=2)
    assert {rows.rows_per_slab for rows in layout.groups} == {1}


@given(
    st.lists(
        st.tuples(st.integers(1, 5000), st.sampled_from([1, 4, 16, 144])), min_size=1, max_size=7
    ),
    st.one_of(st.none(), st.integers(1 << 12, 1 << 24)),
)
def test_any_geometry_holds_whole_rows_of_every_group(rows, pool):
    sizes, steps = [n for n, _ in rows], [s for _, s in rows]
    geometry = slab_geometry(sizes, steps, pool_bytes=pool)
    for nbytes, step, count in zip(sizes, steps, geometry.rows_per_slab, strict=True):
        assert count >= 1
        assert geometry.slab_bytes % (count * step) == 0
        assert geometry.slab_bytes // count >= nbytes
