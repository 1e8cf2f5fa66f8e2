"""Replays: who is admitted, preempted and completed, and what is wasted meanwhile."""

import pytest

from block_layouts import HYBRID, RECURRENT, packed_layout
from kvstow.errors import TraceError
from kvstow.plan.group import grouped
from kvstow.plan.models import model_layers
from kvstow.simulate.replay import Pace, Replay, layout_of
from kvstow.simulate.report import ReplayReport
from kvstow.simulate.trace import TraceRequest, synthetic

INF = float("inf")


def replayed(layout, trace, **pace) -> Replay:
    replay = Replay(layout, trace, Pace(**{"sample_steps": 1} | pace))
    replay.run()
    return replay


def test_every_request_is_completed_and_everything_comes_back() -> None:
    trace = [TraceRequest(i * 0.01, 3 + i % 9, 1 + i % 5) for i in range(80)]
    for layers in (HYBRID, RECURRENT):
        replay = replayed(packed_layout(layers, 30), trace, chunk_tokens=4, prefill_tokens=12)
        assert replay.record.completed == 80
        assert len(replay.ledger) == 0
        replay.ledger.check()
        assert all(replay.ledger.pool.num_held(g) == 0 for g in range(2))


def test_a_pool_too_small_for_all_preempts_and_still_completes() -> None:
    trace = [TraceRequest(0.0, 2, 12) for _ in range(12)]
    replay = replayed(packed_layout(HYBRID, 9), trace, chunk_tokens=2)
    assert replay.record.preemptions > 0
    assert replay.record.completed == 12


def test_a_request_that_can_never_fit_is_refused_at_once() -> None:
    with pytest.raises(
        TraceError, match="a request of 1,001 tokens does not fit into an empty pool"
    ):
        Replay(packed_layout(HYBRID, 9), [TraceRequest(0.0, 1000, 1)], Pace())


@pytest.mark.parametrize("name", ["prefill_tokens", "chunk_tokens", "sample_steps"])
@pytest.mark.parametrize("number", [0, -1, 1.5, "2"])
def test_a_pace_that_never_gets_on_cannot_be_made(name: str, number: object) -> None:
    with pytest.raises(TraceError, match=f"{name} is {number!r}, not a whole number"):
        Pace(**{name: number})


def test_nobody_is_admitted_before_arriving() -> None:
    trace = [TraceRequest(0.0, 4, 2), TraceRequest(10.0, 4, 2)]
    replay = replayed(packed_layout(HYBRID, 30), trace)
    assert [s.requests for s in replay.record.samples if 1.0 < s.seconds < 9.9] == []
    assert replay.seconds >= 10.0
    assert replay.record.completed == 2


def test_only_requests_that_have_arrived_are_waiting() -> None:
    trace = [TraceRequest(0.0, 4, 9), TraceRequest(50.0, 4, 9), TraceRequest(50.0, 4, 9)]
    replay = replayed(packed_layout(HYBRID, 30), trace, load=0.01)
    waiting = [(s.seconds < 50, s.waiting) for s in replay.record.samples]
    assert {count for early, count in waiting if early} == {0}
    assert {count for early, count in waiting if not early} == {0, 1}


def test_shared_beginnings_are_found_cached() -> None:
    trace = [TraceRequest(float(i), 20, 2, (("system", 16),)) for i in range(10)]
    report = ReplayReport.of(replayed(packed_layout(HYBRID, 60), trace).record)
    assert report.hit_rate == pytest.approx(9 * 16 / 200)


def test_waste_adds_up_to_the_bytes_of_the_slabs_in_use() -> None:
    """Padding, gaps, rounding and content are all that a busy slab has; nothing is cached."""
    layout = packed_layout(RECURRENT, 40)
    trace = [TraceRequest(0.0, 3 + i % 9, 20) for i in range(40)]
    replay = Replay(layout, trace, Pace(sample_steps=1))
    for _ in range(30):
        replay.step()
        pool = replay.ledger.pool
        size = [rows.rows_per_slab for rows in layout.groups]
        busy = {
            (g, int(block) // size[g])
            for run in replay._running
            for g, part in replay.ledger.blocks(run.handle).items()
            for block in part.ids
        }
        assert replay.record.samples[-1].waste.in_use == len(busy) * layout.slab_bytes
        assert pool.num_stranded(0) == sum(size[0] for g, _ in busy if g == 0) - pool.num_held(0)


def test_tight_rows_serve_more_requests_than_the_union() -> None:
    groups = grouped(model_layers("gemma-3-27b").layers)
    trace = synthetic("single", num_requests=120, rate=INF, seed=0)
    means = {}
    for policy in ("slab", "union"):
        layout = layout_of(policy, groups, budget=8 << 30)
        record = Replay(layout, trace, Pace()).run(max_steps=250)
        means[policy] = ReplayReport.of(record).mean_requests
    assert means["slab"] > 1.05 * means["union"]


def test_under_union_states_are_kept_where_attention_blocks_end() -> None:
    groups = grouped(model_layers("qwen3-next-80b").layers)
    layout = layout_of("union", groups, budget=8 << 30)
    assert len({rows.group.block_tokens for rows in layout.groups}) == 1
    assert all(rows.rows_per_slab == 1 for rows in layout.groups)
