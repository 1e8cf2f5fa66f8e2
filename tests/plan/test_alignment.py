"""What kernels ask of offsets and strides is met, in every order and packing."""

from itertools import product

import pytest

from kvstow.errors import PlanError
from kvstow.plan.group import grouped
from kvstow.plan.layout import ORDERS
from kvstow.plan.pack import Alignment, Demand, Site, packed, separate, union
from planning import attention


def test_a_demand_of_nothing_is_refused():
    with pytest.raises(PlanError, match=r"of '\*' is 0"):
        Demand(multiple=0)


def test_demands_on_offsets_and_strides_are_met():
    """Facts 11: a reader declares its constraints, the plan satisfies them."""
    layers = [attention(f"layers.{i}", heads=1, dim=10, tokens=3) for i in range(3)]
    demands = (Demand(layers="layers.1", multiple=1536),)
    for pack, order in product((packed, union, separate), ORDERS):
        site = Site(order=order, alignment=Alignment(demands=demands))
        (place,) = pack(grouped(layers), num_slabs=3, site=site).layers["layers.1"][2]
        assert place.offset % 1536 == 0
        assert place.block_stride % 1536 == 0


def test_alignments_that_are_no_whole_numbers_are_refused():
    with pytest.raises(PlanError, match="row alignment is 0"):
        Alignment(row=0)
    with pytest.raises(PlanError, match=r"page alignment is 2\.0"):
        Alignment(page=2.0)
