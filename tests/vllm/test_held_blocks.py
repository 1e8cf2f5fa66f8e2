"""vLLM's own scheduler and block pool, while a failed pull may still write to its blocks.

No worker runs: what they would tell is told by hand. Whatever vLLM does with the request, it must
give those blocks to nobody before the last rank has let go of them.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import checkpoint
from vllm_engines import LLAMA, SMALL, Prompts

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600), pytest.mark.filterwarnings("ignore")]

BLOCK, NUM_BLOCKS, LENGTH = 16, 40, 100
DRAW = Prompts(SMALL["vocab_size"])
RANKS = ("engine-0-0", "engine-0-1")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
        patch.setenv("HF_HUB_OFFLINE", "1")
        yield checkpoint(tmp_path_factory.mktemp("model"), LLAMA)


class Desk:
    """vLLM's scheduler with kvstow's connector, and what workers would tell it."""

    def __init__(
        self,
        model: Path,
        *,
        policy: str = "recompute",
        hybrid: bool = False,
        caching: bool = True,
        among_others: bool = False,
    ) -> None:
        """`among_others`: kvstow is one of the connectors of vLLM's `MultiConnector`."""
        from vllm.config import KVTransferConfig
        from vllm.engine.arg_utils import EngineArgs
        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_utils import (
            get_kv_cache_configs,
            get_request_block_hasher,
            init_none_hash,
            resolve_kv_cache_block_sizes,
        )
        from vllm.v1.core.sched.scheduler import Scheduler
        from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec
        from vllm.v1.structured_output import StructuredOutputManager

        ours = {
            "kv_connector": "KvstowConnector",
            "kv_connector_module_path": "kvstow.adapters.vllm",
            "kv_role": "kv_both",
            "kv_load_failure_policy": policy,
            "kv_connector_extra_config": {"unverified": "a test"},
        }
        several = {
            "kv_connector": "MultiConnector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": policy,
            "kv_connector_extra_config": {"connectors": [ours]},
        }
        self._among_others = among_others
        config = EngineArgs(
            model=str(model),
            skip_tokenizer_init=True,
            dtype="float32",
            enforce_eager=True,
            block_size=BLOCK,
            max_model_len=256,
            num_gpu_blocks_override=NUM_BLOCKS,
            enable_prefix_caching=caching,
            kv_transfer_config=KVTransferConfig(**(several if among_others else ours)),
        ).create_engine_config()
        config.cache_config.kv_cache_layout = "LBHNC"  # an engine asks its kernels
        shape = {"block_size": BLOCK, "num_kv_heads": 2, "head_size": 32, "dtype": torch.float32}
        full, window = FullAttentionSpec(**shape), SlidingWindowSpec(**shape, sliding_window=64)
        layers: dict[str, Any] = {f"model.layers.{i}.self_attn.attn": full for i in range(2)}
        if hybrid:
            layers["model.layers.1.self_attn.attn"] = window
        (cache,) = get_kv_cache_configs(config, [layers], [1 << 24])
        cache.kv_cache_layout = config.cache_config.kv_cache_layout
        config.cache_config.num_gpu_blocks = cache.num_blocks
        size, hashed = resolve_kv_cache_block_sizes(cache, config)
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(hashed, sha256)
        self.scheduler = Scheduler(
            vllm_config=config,
            kv_cache_config=cache,
            structured_output_manager=StructuredOutputManager(config),
            block_size=size,
            hash_block_size=hashed,
        )
        self.pool = self.scheduler.kv_cache_manager.block_pool
        assert len(cache.kv_cache_groups) == (2 if hybrid else 1)

    def tickets(self, prompt: list[int]) -> dict[str, Any]:
        """Transfer parameters as another engine of the same model would give them."""
        from kvstow.adapters.vllm.identity import EngineWeights
        from kvstow.adapters.vllm.protocol import EngineRequest, StepOrders, WorkerEndpoint
        from kvstow.adapters.vllm.scheduler.side import SchedulerSide

        connector: Any = self.scheduler.connector
        ours = (connector._connectors[0] if self._among_others else connector)._scheduler_side
        engine = ours._engine
        weights = EngineWeights(engine.weights.identity)
        producer = SchedulerSide(replace(engine, weights=weights, step=StepOrders(), workers=()))
        worker = WorkerEndpoint(
            agent="prefill-0-0",
            start="engine",
            address="tcp://127.0.0.1:9",
            key="",
            fingerprint="00" * 32,
        )
        producer.meet([worker])
        ids = tuple(range(1, 1 + -(-len(prompt) // BLOCK)))
        asked = EngineRequest(id="p", tokens=prompt, params={"do_remote_decode": True})
        _, params = producer.finished(asked, (ids,) * len(engine.groups), len(prompt) - 1)
        assert params is not None
        return params

    def add(self, id: str, prompt: list[int], params: dict[str, Any] | None = None) -> None:
        from vllm.v1.request import Request

        from vllm import SamplingParams

        extra = {"kv_transfer_params": params} if params else None
        sampling = SamplingParams(max_tokens=4, extra_args=extra)
        sampling.update_from_generation_config({}, None)
        self.scheduler.add_request(
            Request(
                request_id=id,
                prompt_token_ids=prompt,
                sampling_params=sampling,
                pooling_params=None,
                block_hasher=self._hasher,
            )
        )

    def pulls(self) -> tuple[Any, set[int]]:
        """A step that orders one pull; the step, and the blocks that the pull writes to."""
        step = self.scheduler.schedule()
        told: Any = step.kv_connector_metadata
        (pull,) = (told.metadata[0] if self._among_others else told).step.pulls
        assert pull.may_hold
        return step, {id for ids in pull.ids for id in ids} - {0}

    def told(
        self,
        step: Any,
        *,
        failed: bool = False,
        held: dict[tuple[str, int], set[int]] | None = None,
        released: tuple[tuple[str, int], ...] = (),
    ) -> Any:
        """The step's results: a token for each request that it has computed."""
        from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import (
            MultiKVConnectorWorkerMetadata,
        )
        from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

        from kvstow.adapters.vllm.connector import KvstowReport
        from kvstow.adapters.vllm.protocol import StepResults

        blocks = {key: tuple(sorted(ids)) for key, ids in (held or {}).items()}
        report = StepResults(held=blocks, released=list(released))
        meta: Any = KvstowReport(report) if report else None
        if self._among_others and meta is not None:
            meta = MultiKVConnectorWorkerMetadata(metadata=(meta,))
        over = {"d"} if failed else set[str]()
        ids = list(step.num_scheduled_tokens)
        output = ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={id: index for index, id in enumerate(ids)},
            sampled_token_ids=[[5] for _ in ids],
            kv_connector_output=KVConnectorOutput(
                finished_recving=over,
                failed_recving=over,
                kv_connector_worker_meta=meta,
            ),
        )
        return self.scheduler.update_from_output(step, output)

    def used(self) -> set[int]:
        """Blocks that the engine's requests have now."""
        manager = self.scheduler.kv_cache_manager
        ids = [manager.get_block_ids(request) for request in self.scheduler.requests]
        return {id for groups in ids for group in groups for id in group} - {0}

    def run(self, forbidden: set[int]) -> None:
        """Fill the pool with other requests, again and again; none gets a forbidden block."""
        for round in range(3):
            for k in range(4):
                self.add(f"other {round} {k}", DRAW(90))
            for _ in range(40):
                step = self.scheduler.schedule()
                assert not self.used() & forbidden
                self.told(step)
            assert not any(id.startswith("other") for id in self.scheduler.requests)

    @property
    def aborted(self) -> Any:
        from vllm.v1.request import RequestStatus

        return RequestStatus.FINISHED_ABORTED

    @property
    def num_free(self) -> int:
        return self.pool.get_num_free_blocks()


@pytest.fixture(params=["full", "hybrid"])
def hybrid(request: pytest.FixtureRequest) -> bool:
    return request.param == "hybrid"


@pytest.fixture(params=["cached", "uncached"])
def caching(request: pytest.FixtureRequest) -> bool:
    return request.param == "cached"


def held_by(ranks: tuple[str, ...], blocks: set[int]) -> dict[tuple[str, int], set[int]]:
    return {(rank, 1): blocks for rank in ranks}


def let_go(desk: Desk, blocks: set[int]) -> None:
    """Both ranks let go, one after the other, and all blocks are free in the end."""
    free = desk.num_free
    desk.told(desk.scheduler.schedule(), released=((RANKS[0], 1),))
    assert desk.num_free == free, "the other rank may still be written to"
    assert desk.scheduler.has_requests(), "vLLM steps on, and hears of the end"
    desk.told(desk.scheduler.schedule(), released=((RANKS[1], 1),))
    assert desk.num_free == free + len(blocks) == NUM_BLOCKS - 1
    assert not desk.scheduler.has_requests()
    assert desk.scheduler.reset_prefix_cache()


def test_a_request_is_computed_in_other_blocks(model: Path, hybrid: bool, caching: bool):
    desk = Desk(model, hybrid=hybrid, caching=caching)
    prompt = DRAW(LENGTH)
    desk.add("d", prompt, desk.tickets(prompt))
    step, blocks = desk.pulls()
    desk.told(step, failed=True, held=held_by(RANKS, blocks))
    step = desk.scheduler.schedule()
    assert step.num_scheduled_tokens == {"d": LENGTH}
    assert desk.used()
    assert not desk.used() & blocks
    desk.told(step)
    desk.run(blocks)
    assert "d" not in desk.scheduler.requests, "it has answered"
    assert not desk.scheduler.reset_prefix_cache(), "vLLM refuses while blocks are in use"
    let_go(desk, blocks)


def test_a_connector_among_others_holds_as_well(model: Path):
    desk = Desk(model, among_others=True)
    prompt = DRAW(LENGTH)
    desk.add("d", prompt, desk.tickets(prompt))
    step, blocks = desk.pulls()
    desk.told(step, failed=True, held=held_by(RANKS, blocks))
    desk.run(blocks)
    assert "d" not in desk.scheduler.requests, "it has answered"
    let_go(desk, blocks)


def test_a_request_that_fails_leaves_its_blocks_held(model: Path, hybrid: bool):
    """vLLM's default policy: it frees the blocks in the same pass in which it is told."""
    desk = Desk(model, policy="fail", hybrid=hybrid)
    prompt = DRAW(LENGTH)
    desk.add("d", prompt, desk.tickets(prompt))
    step, blocks = desk.pulls()
    outputs = desk.told(step, failed=True, held=held_by(RANKS, blocks))
    (output,) = outputs[0].outputs
    assert str(output.finish_reason) == "error"
    assert not desk.scheduler.requests
    desk.run(blocks)
    let_go(desk, blocks)


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_client_that_leaves_before_or_after_the_failure_leaves_its_blocks_held(
    model: Path, when: str
):
    desk = Desk(model)
    prompt = DRAW(LENGTH)
    desk.add("d", prompt, desk.tickets(prompt))
    step, blocks = desk.pulls()
    if when == "before":
        desk.scheduler.finish_requests(["d"], desk.aborted)
        assert desk.num_free == NUM_BLOCKS - 1 - len(blocks), "it waits for the load"
    desk.told(step, failed=True, held=held_by(RANKS, blocks))
    if when == "after":
        desk.scheduler.finish_requests(["d"], desk.aborted)
    desk.told(desk.scheduler.schedule())
    assert not desk.scheduler.requests
    desk.run(blocks)
    let_go(desk, blocks)


def test_a_rank_may_tell_steps_before_the_request_is_over(model: Path):
    """vLLM takes a load for over when the last rank has told."""
    desk = Desk(model)
    prompt = DRAW(LENGTH)
    desk.add("d", prompt, desk.tickets(prompt))
    step, blocks = desk.pulls()
    desk.told(step, held=held_by(RANKS[:1], blocks))
    desk.told(desk.scheduler.schedule(), released=((RANKS[0], 1),))
    assert desk.used() == blocks, "the request has not let go of them"
    desk.told(desk.scheduler.schedule(), failed=True, held=held_by(RANKS[1:], blocks))
    desk.run(blocks)
    desk.told(desk.scheduler.schedule(), released=((RANKS[1], 1),))
    assert desk.num_free == NUM_BLOCKS - 1


def test_a_step_that_was_planned_before_the_failure_is_known_takes_none_of_the_blocks(model: Path):
    """Two steps are under way, as with asynchronous scheduling."""
    desk = Desk(model)
    prompt = DRAW(LENGTH)
    desk.add("d", prompt, desk.tickets(prompt))
    step, blocks = desk.pulls()
    desk.add("other", DRAW(90))
    planned = desk.scheduler.schedule()
    desk.told(step, failed=True, held=held_by(RANKS, blocks))
    again = desk.scheduler.schedule()
    assert not (desk.used() & blocks)
    desk.told(planned)
    desk.told(again)
    desk.run(blocks)
    let_go(desk, blocks)


def test_blocks_of_a_prefix_that_others_share_are_not_held(model: Path):
    desk = Desk(model)
    shared = DRAW(3 * BLOCK)
    desk.add("other", [*shared, *DRAW(20)])
    for _ in range(6):
        desk.told(desk.scheduler.schedule())
    prompt = [*shared, *DRAW(40)]
    desk.add("d", prompt, desk.tickets(prompt))
    step = desk.scheduler.schedule()
    (pull,) = step.kv_connector_metadata.step.pulls
    assert pull.start_token == len(shared)
    written = set(pull.ids[0][3:])
    desk.told(step, failed=True, held=held_by(RANKS, written))
    step = desk.scheduler.schedule()
    assert step.num_scheduled_tokens == {"d": len(prompt) - len(shared)}, "the prefix is found"
    assert desk.used() & set(pull.ids[0][:3])
    assert not desk.used() & written
    desk.told(step)
    desk.run(written)
    let_go(desk, written)
