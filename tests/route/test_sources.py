"""Which peers a rank reads from: every byte from one of them, replicas by turns."""

from dataclasses import replace

import pytest

from kvstow.errors import RouteError
from kvstow.plan.sizing.plan import Deployment
from kvstow.plan.spec import Extent
from kvstow.route.sources import sources
from planning import attention, laid_out


def ranks(model, tp, **how):
    return Deployment(model=model, tp=tp, num_slabs=16, **how).on_rank(0).layouts


def test_replicas_are_shared_out_evenly_among_destination_ranks():
    peers = ranks("deepseek-v2-lite", 4)
    chosen = [sources(peers, rank)[0].index for rank in ranks("deepseek-v2-lite", 8)]
    assert sorted(chosen) == [0, 0, 1, 1, 2, 2, 3, 3]


def test_heads_on_more_ranks_than_there_are_heads_come_from_one_rank_each():
    peers = ranks("llama-3.2-1b", 16)
    for rank in ranks("llama-3.2-1b", 4):
        found = sources(peers, rank)
        assert len(found) == 2
        assert len({source.index // 2 for source in found}) == 2


def test_a_rank_with_equal_peers_reads_from_its_counterpart_alone():
    peers = ranks("bamba-9b", 2)
    for i, rank in enumerate(peers):
        assert [source.index for source in sources(peers, rank)] == [i]


def test_what_no_source_holds_is_refused_by_name():
    peers = ranks("llama-3.2-1b", 4)
    (alone,) = ranks("llama-3.2-1b", 1)
    with pytest.raises(RouteError, match=r"no source holds heads \[6, 8\)") as caught:
        sources(peers[:3], alone)
    fields = caught.value.differences[:-1]
    assert [text.split(":")[1] for text in fields] == [" field 'k'", " field 'v'"]
    assert all(text.startswith("16 layers, ") for text in fields)
    assert caught.value.differences[-1].startswith("3 of 4 ranks are there: one ticket per rank")


def test_differences_name_the_source():
    here = ranks("llama-3.2-1b", 2, kv_dtype="fp8")
    (alone,) = ranks("llama-3.2-1b", 1)
    with pytest.raises(RouteError) as caught:
        sources(here, alone)
    assert {text.split(":")[0] for text in caught.value.differences} == {"source 0, 1"}


def test_degrees_that_do_not_divide_each_other_are_joined():
    """12 heads on 6 and on 4 ranks: thirds of pairs."""

    def rank(r, tp):
        heads = Extent("head", 12, ((r * 12 // tp, (r + 1) * 12 // tp),))
        return laid_out(replace(attention("layers.0"), heads=heads), tp=(r, tp))

    found = [
        [s.index for s in sources([rank(r, 6) for r in range(6)], rank(q, 4))] for q in range(4)
    ]
    assert found == [[0, 1], [1, 2], [3, 4], [4, 5]]
