"""What kernels ask of offsets and strides is met, or refused with the numbers."""

import pytest

from kvstow.errors import PlanError
from kvstow.plan.alignment import Alignment, Demand
from kvstow.plan.group import grouped
from kvstow.plan.pack import Site, packed, separate, union
from planning import attention


@pytest.mark.parametrize("demand", ["offset_multiple", "stride_multiple", "stride_limit"])
def test_a_demand_of_nothing_is_refused(demand):
    with pytest.raises(PlanError, match=r"of '\*' is 0"):
        Demand(**{demand: 0})


def test_demands_on_offsets_and_strides_are_met():
    """Facts 11: a reader declares its constraints, the plan satisfies them."""
    layers = [attention(f"layers.{i}", heads=1, dim=10, tokens=3) for i in range(3)]
    demands = (Demand(layers="layers.1", offset_multiple=512, stride_multiple=3 * 512),)
    for pack in (packed, union, separate):
        site = Site(alignment=Alignment(demands=demands))
        layout = pack(grouped(layers), num_slabs=3, site=site)
        place = layout.layers["layers.1"][2]
        assert place.offset % 512 == 0
        assert place.block_stride % 1536 == 0


def test_a_kernel_that_ignores_strides_is_refused_on_rows_and_served_by_compact_layers():
    layers = [attention(f"layers.{i}", heads=1, dim=8, tokens=2) for i in range(3)]
    page = layers[0].page_bytes
    alignment = Alignment(demands=(Demand(stride_limit=page),))
    with pytest.raises(PlanError, match=f"is above the limit of {page}"):
        packed(grouped(layers), num_slabs=3, site=Site(alignment=alignment))
    site = Site(order="LBHNC", alignment=alignment)
    assert (
        packed(grouped(layers), num_slabs=3, site=site).layers["layers.0"][2].block_stride == page
    )


def test_alignments_that_are_no_whole_numbers_are_refused():
    with pytest.raises(PlanError, match="row alignment is 0"):
        Alignment(row=0)
    with pytest.raises(PlanError, match=r"page alignment is 2\.0"):
        Alignment(page=2.0)
