"""The connector between vLLM's calls and our two sides, under stand-ins of vLLM's base classes."""

import pickle
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from connected_engine import (
    PAGE,
    PROMPT,
    BlockPool,
    Engine,
    FullAttentionSpec,
    Role,
    Status,
    asked,
    blocks,
    cache_config,
    drained,
    found,
    loaded,
    memory,
    plan,
    request,
    taken_over,
    told,
    vllm_config,
)
from kvstow.adapters.vllm.protocol import OURS
from kvstow.transfer.tickets.ticket import Ticket


@pytest.mark.parametrize("in_process", [True, False])
def test_a_prompt_is_handed_over_through_vllms_calls(connector: ModuleType, in_process: bool):
    """An engine in one process is not stepped again once it has given its tickets out."""
    prefill = Engine(connector, in_process=in_process)
    decode = Engine(connector, in_process=in_process)
    here = [1, 2, 3, 13, 12]
    decode.decode(prefill.prefill(), here)
    results = loaded(decode) if in_process else loaded(decode, prefill)
    assert (results.finished_recving, results.failed_recving) == ({"d"}, set())
    for there, own in zip([7, 8, 9, 10, 11], here, strict=True):
        assert torch.equal(decode.views["b"][own], prefill.views["b"][there])


class SlidingWindowSpec(FullAttentionSpec):
    """By this very name vLLM declares a layer with a window."""

    sliding_window = 8


@pytest.mark.parametrize(("spec", "left"), [(FullAttentionSpec, 0), (SlidingWindowSpec, 1)])
def test_prefill_leaves_the_last_token_to_decode_where_a_window_passes_on(
    connector: ModuleType, spec: type[FullAttentionSpec], left: int
):
    """vLLM lets go of the blocks that only the last token sees before it hands them over."""
    config = cache_config()
    config.kv_cache_groups[0].kv_cache_spec = spec()
    scheduler = connector.KvstowConnector(vllm_config(), Role.SCHEDULER, config)
    given = PROMPT.copy()
    asking = request(
        "p",
        kv_transfer_params={"do_remote_decode": True},
        prompt_token_ids=given,
        num_prompt_tokens=len(PROMPT),
        max_tokens=1,
    )
    asking.all_token_ids = asking._all_token_ids = PROMPT.copy()
    for _ in ("queued", "queued again after it was preempted"):
        scheduler.on_new_request(asking)
    assert given == PROMPT
    assert asking.num_prompt_tokens == len(PROMPT) - left
    assert asking.prompt_token_ids == asking.all_token_ids == PROMPT[: len(PROMPT) - left]


def test_an_aborted_request_hands_nothing_over(connector: ModuleType):
    scheduler = connector.KvstowConnector(vllm_config(), Role.SCHEDULER, cache_config())
    asking = request(
        "p", kv_transfer_params={"do_remote_decode": True}, status=Status.FINISHED_ABORTED
    )
    assert scheduler.request_finished_all_groups(asking, ([1, 2],)) == (False, None)


@pytest.mark.parametrize("in_process", [True, False])
def test_a_prompt_is_stored_in_its_step_and_comes_back_beside_others(
    connector: ModuleType, in_process: bool
):
    """Never before a step computes: vLLM plans ahead, and cannot undo a step that used a load
    which failed."""
    engine = Engine(connector, in_process=in_process, host_bytes=1 << 20)
    there, here = [7, 8, 9, 10, 11], [1, 2, 3, 13, 12]
    kept = engine.views["b"].clone()
    engine.compute(request("p"), there)
    assert engine.pool.held == there[:4]
    drained(engine)
    engine.views["b"].zero_()
    results = asked(engine, here)
    assert (results.finished_recving, results.failed_recving) == ({"d"}, set())
    for one, other in zip(there[:4], here[:4], strict=True):
        assert torch.equal(engine.views["b"][other], kept[one])
    assert engine.worker._worker_side.rank.counts["restored_tokens"] == 16


def test_a_request_whose_rows_went_away_has_failed_to_load(connector: ModuleType):
    engine = Engine(connector, host_bytes=1 << 20)
    engine.compute(request("p"), [7, 8, 9, 10, 11])
    drained(engine)
    (tiers,) = [p for p in engine.worker._worker_side.parts if hasattr(p, "host")]
    host = tiers.host
    host.evict(0, host.keys(0)[2:3])
    results = asked(engine, [1, 2, 3, 13, 12])
    assert (results.finished_recving, results.failed_recving) == ({"d"}, {"d"})
    assert engine.worker._worker_side.rank.counts["restore_failures"] == 1


def test_a_request_that_pins_its_rows_finds_them_whatever_came_since(connector: ModuleType):
    engine = Engine(connector, host_bytes=17 * 2 * PAGE)
    hints = {"actions": [{"action_type": "kv.pin"}, {"action_type": "kv.other"}]}
    engine.compute(request("p", kv_hints=hints), [7, 8, 9, 10, 11])
    drained(engine)
    time.sleep(0.6)  # rows that were on their way are pinned with the next look
    engine.step()
    for k in range(6):
        engine.compute(request(f"o{k}", all_token_ids=[k] * len(PROMPT)), [1, 2, 3, 4, 5])
        drained(engine)
    assert found(engine) == 16
    counts = engine.scheduler._scheduler.counts
    assert (counts["hints pin"], counts["hints other"]) == (1, 1)


@pytest.mark.parametrize("in_process", [True, False])
def test_an_engine_that_has_slept_hands_over_again_and_finds_its_rows(
    connector: ModuleType, in_process: bool
):
    """The cache's memory goes and comes back empty; rows in host memory stay."""
    prefill = Engine(connector, in_process=in_process, host_bytes=1 << 20)
    decode = Engine(connector, in_process=in_process, contact_seconds=1.0)
    prefill.compute(request("p"), [7, 8, 9, 10, 11])
    drained(prefill)
    kept = prefill.views["b"].clone()
    stale = prefill.prefill()
    old = prefill.worker.get_handshake_metadata().endpoint
    for _ in range(2):  # vLLM may say so twice
        prefill.worker.unregister_kv_caches()
    for view in prefill.views.values():
        view.fill_(-7.0)
    for _ in range(2):
        prefill.worker.restore_kv_caches()
    prefill.introduce(in_process=in_process)
    new = prefill.worker.get_handshake_metadata().endpoint
    assert (new.agent, new.start != old.start) == (old.agent, True)
    assert prefill.step().finished_sending == {"p"}, "its blocks are the engine's again"
    decode.decode(stale, [1, 2, 3, 13, 12])
    assert loaded(decode, prefill).failed_recving == {"d"}, "what was offered is withdrawn"
    assert asked(prefill, [1, 2, 3, 13, 12]).failed_recving == set()
    for there, here in zip([7, 8, 9, 10], [1, 2, 3, 13], strict=True):
        assert torch.equal(prefill.views["b"][here], kept[there])
    decode.decode(prefill.prefill(), [14, 15, 16, 17, 18], id="e")
    assert loaded(decode, prefill).failed_recving == set()
    assert torch.equal(decode.views["b"][14], prefill.views["b"][7])


def test_sleep_ends_a_pull_that_is_under_way(connector: ModuleType):
    prefill, decode = (Engine(connector) for _ in range(2))
    params = prefill.prefill()
    prefill.worker.shutdown()  # so it never ends by itself
    decode.decode(params, [1, 2, 3, 13, 12])
    assert not decode.step().finished_recving
    decode.worker.unregister_kv_caches()
    decode.worker.restore_kv_caches()
    results = decode.step()
    assert (results.finished_recving, results.failed_recving) == ({"d"}, {"d"})


def test_after_a_reset_nothing_of_before_is_found_and_what_follows_is(connector: ModuleType):
    """vLLM resets before weights are changed in place: the same tokens then have another cache."""
    engine = Engine(connector, host_bytes=1 << 20)
    engine.compute(request("old"), [7, 8, 9, 10, 11])
    drained(engine)
    assert found(engine) == 16
    assert engine.scheduler.reset_cache() is True
    assert found(engine) == 0
    new = torch.rand_like(engine.views["b"])
    engine.views["b"][:] = new
    engine.compute(request("new"), [14, 15, 16, 17, 18])
    drained(engine)
    engine.views["b"].zero_()
    here = [1, 2, 3, 13, 12]
    assert asked(engine, here).failed_recving == set()
    assert torch.equal(engine.views["b"][here[:4]], new[[14, 15, 16, 17]])


def test_a_request_that_runs_through_a_reset_is_not_stored(connector: ModuleType):
    engine = Engine(connector, host_bytes=1 << 20, store_bytes_per_second=1)
    engine.compute(request("waits"), [7, 8, 9, 10, 11])
    running = request("runs", num_computed_tokens=0)
    engine.scheduler.on_new_request(running)
    assert engine.scheduler.reset_cache() is True
    waits = len(engine.pool.held)
    engine.step({"runs": len(PROMPT)}, [14, 15, 16, 17, 18])
    running.num_computed_tokens = len(PROMPT)
    engine.scheduler.request_finished_all_groups(running, ([14, 15, 16, 17, 18],))
    assert not {14, 15, 16, 17} & set(engine.pool.held)
    assert waits <= 1, "rows that waited for their turn are let go"


def test_after_a_reset_nobody_takes_over_from_the_engine_nor_it_from_others(connector: ModuleType):
    prefill, decode = (Engine(connector) for _ in range(2))
    prefill.scheduler.reset_cache()
    for one, other in ((prefill, decode), (decode, prefill)):
        asking = request("d", kv_transfer_params=one.prefill())
        other.scheduler.on_new_request(asking)
        assert other.scheduler.get_num_new_matched_tokens(asking, 0) == (0, False)
        assert other.scheduler._scheduler.counts["refused_requests"] == 1


def test_engines_whose_weights_have_the_same_name_take_over_from_each_other(connector: ModuleType):
    prefill, decode = (Engine(connector) for _ in range(2))
    prefill.scheduler.reset_cache()
    prefill.set_weight_version("step 1")
    assert not taken_over(prefill, decode)
    decode.scheduler.reset_cache()
    assert not taken_over(prefill, decode)
    decode.set_weight_version("step 1")
    assert taken_over(prefill, decode)
    decode.set_weight_version("step 2")
    assert not taken_over(prefill, decode)


def test_a_ticket_that_names_no_identity_is_refused_once_weights_have_changed(
    connector: ModuleType,
):
    """It would be compared with what the engines were started with."""
    prefill, decode = (Engine(connector) for _ in range(2))
    params: Any = prefill.prefill()
    (ticket,) = params[OURS]["tickets"]
    params[OURS]["tickets"] = [str(replace(Ticket.parse(ticket), identity=b""))]
    decode.scheduler.on_new_request(asking := request("d", kv_transfer_params=params))
    assert decode.scheduler.get_num_new_matched_tokens(asking, 0) == (len(PROMPT) - 1, True)
    decode.set_weight_version("step 1")
    decode.scheduler.on_new_request(asking := request("e", kv_transfer_params=params))
    assert decode.scheduler.get_num_new_matched_tokens(asking, 0) == (0, False)


def test_rows_of_named_weights_are_stored_and_come_back(connector: ModuleType):
    engine = Engine(connector, host_bytes=1 << 20)
    engine.compute(request("old"), [7, 8, 9, 10, 11])
    drained(engine)
    engine.set_weight_version("step 1")
    assert engine.cache.num_resets == 1, "what vLLM caches itself is of the weights before"
    assert found(engine) == 0
    engine.compute(request("new"), [7, 8, 9, 10, 11])
    drained(engine)
    assert found(engine) == 16
    engine.set_weight_version("step 1")
    assert found(engine) == 0, "what was computed under that name may be of other weights"


def test_weights_are_not_named_while_a_block_is_in_use(connector: ModuleType):
    """It may hold something of the weights before."""
    prefill, decode = (Engine(connector) for _ in range(2))
    decode.set_weight_version("step 1")
    prefill.pool.touch(prefill.pool.blocks[3:4])
    prefill.set_weight_version("step 1")
    assert not taken_over(prefill, decode)
    prefill.pool.free_blocks(prefill.pool.blocks[3:4])
    prefill.set_weight_version("step 1")
    assert taken_over(prefill, decode)


def test_a_reset_has_failed_while_something_is_loaded(connector: ModuleType):
    prefill, decode = (Engine(connector) for _ in range(2))
    decode.decode(prefill.prefill(), [1, 2, 3, 13, 12])
    assert decode.scheduler.reset_cache() is False
    loaded(decode)
    decode.scheduler.update_state_after_alloc(request("d"), blocks([1, 2, 3, 13, 12]), 0)
    assert decode.scheduler.reset_cache() is True


def test_a_producer_takes_nothing_over(connector: ModuleType):
    """vLLM gives a producer's blocks away while a step still writes to them."""
    prefill = Engine(connector)
    config = vllm_config()
    config.kv_transfer_config.is_kv_consumer = False
    producer = connector.KvstowConnector(config, Role.SCHEDULER, cache_config())
    asking = request("d", kv_transfer_params=prefill.prefill())
    producer.on_new_request(asking)
    assert producer.get_num_new_matched_tokens(asking, 0) == (0, False)
    assert producer._scheduler.counts["refused_requests"] == 1


@pytest.mark.parametrize(
    ("consumer", "zeroes", "policy", "waits"),
    [
        (False, False, "fcfs", True),
        (True, True, "priority", True),
        (True, True, "fcfs", False),
        (True, False, "priority", False),
    ],
)
def test_steps_that_may_still_write_to_blocks_are_waited_for(
    connector: ModuleType, consumer: bool, zeroes: bool, policy: str, waits: bool
):
    config, caches = vllm_config(host_bytes=1 << 20), cache_config()
    config.kv_transfer_config.is_kv_consumer = consumer
    config.scheduler_config.policy = policy
    caches.needs_kv_cache_zeroing = zeroes
    worker = connector.KvstowConnector(config, Role.WORKER, caches)
    worker.register_kv_caches(memory())
    side = worker._worker_side
    tiers = next(part for part in side.parts if hasattr(part, "host"))
    assert (side.rank.after_steps, tiers._rank.after_steps) == (waits, waits)
    worker.shutdown()


def test_nothing_is_pulled_while_steps_write_to_its_blocks(
    connector: ModuleType, monkeypatch: pytest.MonkeyPatch
):
    prefill, decode = (Engine(connector) for _ in range(2))
    steps = SimpleNamespace(over=False)

    def until_steps_are_over() -> Iterator[None]:
        while not steps.over:
            yield

    pulls = decode.worker._worker_side.pulls
    monkeypatch.setattr(pulls, "_until_steps_are_over", until_steps_are_over)
    decode.decode(prefill.prefill(), [1, 2, 3, 13, 12])
    before = decode.views["b"].clone()
    for _ in range(20):
        assert not decode.step().finished_recving
    assert torch.equal(decode.views["b"], before)
    steps.over = True
    assert loaded(decode).failed_recving == set()
    assert torch.equal(decode.views["b"][1], prefill.views["b"][7])


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_loads_begin_when_the_device_computes_and_on_a_cpu_before(
    connector: ModuleType, device: str
):
    """A CPU computes within vLLM's call: what begins after it has waited for the whole step."""
    prefill, decode = (Engine(connector) for _ in range(2))
    side = decode.worker._worker_side
    assert not side._beside_steps
    side._beside_steps = device == "cuda"
    decode.decode(prefill.prefill(), [1, 2, 3, 13, 12])
    decode.worker.bind_connector_metadata(decode.scheduler.build_connector_meta(plan()))
    assert len(side.pulls) == (device == "cpu")
    decode.worker.start_load_kv(None)
    assert len(side.pulls) == 1


def test_a_step_whose_loads_the_engine_has_not_called_for_loads_with_the_next(
    connector: ModuleType,
):
    prefill, decode = (Engine(connector) for _ in range(2))
    decode.worker._worker_side._beside_steps = True
    start_load_kv, decode.worker.start_load_kv = decode.worker.start_load_kv, lambda _: None
    decode.decode(prefill.prefill(), [1, 2, 3, 13, 12])
    decode.step()
    assert len(decode.worker._worker_side.pulls) == 0
    assert loaded(decode).failed_recving == set()
    decode.worker.start_load_kv = start_load_kv


def test_blocks_are_held_for_ranks_that_another_connector_hides(connector: ModuleType):
    """vLLM's MultiConnector passes on what the first of its connectors says of the workers."""
    config = vllm_config(host_bytes=1 << 20)
    config.parallel_config.tensor_parallel_size = 2
    scheduler = connector.KvstowConnector(config, Role.SCHEDULER, cache_config())
    scheduler.set_xfer_handshake_metadata_pp_aware({(0, 0): object(), (0, 1): object()})
    pool = BlockPool()
    scheduler.bind_gpu_block_pool(pool)
    running = request("p", num_computed_tokens=0)
    scheduler.on_new_request(running)
    scheduler.get_num_new_matched_tokens(running, 0)
    order = scheduler.build_connector_meta(plan({"p": 18}, [7, 8, 9, 10, 11])).step.store
    assert order is not None
    for rank, held in ((0, [7, 8, 9, 10]), (1, [])):
        report = connector.KvstowReport(connector.StepResults(stored={order.job: 1}))
        scheduler.update_connector_output(told(report))
        assert pool.held == held, rank


def test_blocks_that_a_rank_may_still_be_written_to_have_a_reference_in_vllms_pool(
    connector: ModuleType,
):
    """While they do, vLLM takes steps, so that it hears when the last rank has let go."""
    scheduler = connector.KvstowConnector(vllm_config(), Role.SCHEDULER, cache_config())
    pool = BlockPool()
    scheduler.bind_gpu_block_pool(pool)

    def tell(*reports: Any) -> None:
        first, second = (connector.KvstowReport(each) for each in reports)
        both = pickle.loads(pickle.dumps(first.aggregate(second)))
        scheduler.update_connector_output(told(both))

    report = connector.StepResults
    tell(report(held={("r0", 1): (7, 8)}), report(held={("r1", 1): (7, 8)}))
    assert (pool.held, scheduler.has_pending_push_work()) == ([7, 8], True)
    assert not scheduler.has_pending_block_frees(), "vLLM would wait for them, and not preempt"
    tell(report(released=[("r0", 1)]), report())
    assert (pool.held, scheduler.has_pending_push_work()) == ([7, 8], True)
    tell(report(), report(released=[("r1", 1)]))
    assert (pool.held, scheduler.has_pending_push_work()) == ([], False)
    assert scheduler._scheduler_side.counts == {"held_blocks": 2, "released_blocks": 2}


def test_what_was_computed_with_blocks_that_others_failed_to_load_is_not_found(
    connector: ModuleType,
):
    """vLLM takes the step back that used them; its rows were on their way by then."""
    engine = Engine(connector, host_bytes=1 << 20)
    engine.compute(request("p"), [7, 8, 9, 10, 11])
    engine.step(invalid=frozenset({8}))
    drained(engine)
    assert found(engine) == 0
    engine.compute(request("again"), [14, 15, 16, 17, 18])
    drained(engine)
    assert found(engine) == 16


def test_rows_are_stored_though_the_engine_does_not_tell_the_end_of_a_step(connector: ModuleType):
    """So vLLM does on all but the last pipeline rank, with speculative decoding."""
    engine = Engine(connector, host_bytes=1 << 20)
    wait_for_save, engine.worker.wait_for_save = engine.worker.wait_for_save, lambda: None
    engine.compute(request("p"), [7, 8, 9, 10, 11])
    drained(engine)
    engine.worker.wait_for_save = wait_for_save
    assert found(engine) == 16


def test_an_engine_that_is_stepped_by_hand_holds_no_block_after_its_last_step(
    connector: ModuleType, monkeypatch: pytest.MonkeyPatch
):
    """vLLM resets its prefix cache only while no block is in use, and no step comes by itself."""
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    engine = Engine(connector, host_bytes=1 << 20)
    asking = request("r")
    engine.compute(asking, [1, 2, 3, 4, 5])
    engine.scheduler.update_connector_output(told())
    assert engine.pool.held == []
    assert engine.cache.reset_prefix_cache()


def test_memory_that_is_registered_anew_takes_the_place_of_the_old(
    connector: ModuleType, monkeypatch: pytest.MonkeyPatch
):
    engine, closed = Engine(connector), list[object]()
    close = connector.WorkerSide.close
    monkeypatch.setattr(
        connector.WorkerSide, "close", lambda side: (closed.append(side), close(side))
    )
    first = engine.worker._worker_side
    engine.worker.register_kv_caches(memory())
    assert engine.worker._worker_side is not first
    assert closed == [first]


def test_blocks_that_were_offered_out_of_the_memory_before_are_the_engines_again(
    connector: ModuleType,
):
    engine = Engine(connector)
    engine.prefill()
    assert engine.step().finished_sending == set()
    engine.worker.register_kv_caches(memory())
    assert engine.step().finished_sending == {"p"}


def test_nothing_is_stored_under_an_adapter_whose_files_have_changed(
    connector: ModuleType, tmp_path: Path
):
    """What vLLM has in memory may be of before or of after, and it does not tell."""
    weights = tmp_path / "adapter_model.bin"
    weights.write_bytes(b"one")
    lora = SimpleNamespace(lora_name="a", lora_path=str(tmp_path), lora_int_id=1)
    engine = Engine(connector, host_bytes=1 << 20)
    running = request("p", lora_request=lora, num_computed_tokens=0)
    engine.scheduler.on_new_request(running)
    engine.scheduler.get_num_new_matched_tokens(running, 0)
    engine.step({"p": 8}, [7, 8, 9, 10, 11])
    drained(engine)
    weights.write_bytes(b"two")
    running.num_computed_tokens = 8
    engine.step({"p": 10}, [7, 8, 9, 10, 11])
    running.num_computed_tokens = 18
    engine.scheduler.request_finished_all_groups(running, ([7, 8, 9, 10, 11],))
    assert engine.pool.held == []
    again = request("d", lora_request=lora)
    engine.scheduler.on_new_request(again)
    assert engine.scheduler.get_num_new_matched_tokens(again, 0) == (0, False)


def test_an_adapters_files_are_looked_at_once_in_a_step(
    connector: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "adapter_model.bin").write_bytes(b"one")
    lora = SimpleNamespace(lora_name="a", lora_path=str(tmp_path), lora_int_id=1)
    engine = Engine(connector, host_bytes=1 << 20)
    for id in ("p", "q"):
        asking = request(id, lora_request=lora, num_computed_tokens=0)
        engine.scheduler.on_new_request(asking)
    looked: list[object] = []
    name = engine.scheduler._adapters.name
    monkeypatch.setattr(
        engine.scheduler._adapters, "name", lambda each: (looked.append(each), name(each))[1]
    )
    engine.step({"p": 8, "q": 8}, [7, 8, 9, 10, 11])
    assert looked == [lora]
    engine.step({"p": 3}, [7, 8, 9, 10, 11])
    assert looked == [lora], "no block is full that was not before"


def test_tables_are_not_read_while_no_more_can_be_stored(connector: ModuleType):
    """What found no room is looked at again when there is some."""
    engine = Engine(connector, host_bytes=1 << 20)
    running = request("p", num_computed_tokens=0)
    engine.scheduler.on_new_request(running)
    engine.scheduler._scheduler_side.recall.stores._max_rows = 2
    read: list[str] = []

    def get_block_ids(id: str) -> tuple[list[int]]:
        read.append(id)
        return ([7, 8, 9, 10, 11],)

    for running.num_computed_tokens in (0, 8):
        output = SimpleNamespace(
            total_num_scheduled_tokens=8,
            num_scheduled_tokens={"p": 8},
            kv_connector_block_state=SimpleNamespace(get_block_ids=get_block_ids),
        )
        engine.scheduler.build_connector_meta(output)
    assert read == ["p"]
