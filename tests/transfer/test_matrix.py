"""Every pair of servings: tp, pp, tokens per block, order, packing, hybrid groups, replicas.

All ranks of the producer fill and offer; all ranks of the consumer pull from all of them.
The expected bytes come from the address law alone.
"""

from itertools import product
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import strategies
from kvstow.plan.manifest import encode
from kvstow.plan.pack import Alignment
from kvstow.plan.retention import Chunk, Full, State, Window
from kvstow.plan.spec import DType
from kvstow.transfer.transport.local import Fabric
from strategies import Kind, Served
from transfer_node import Node, rows_for

KV = (("k", DType.BFLOAT16, 4), ("v", DType.BFLOAT16, 4))
DENSE = (Kind(Full(), 12, KV), Kind(Full(), 12, KV), Kind(Full(), 12, KV))
TWO_HEADS = (Kind(Full(), 2, KV), Kind(Full(), 2, KV))
LATENT = (Kind(Full(), 1, (("latent", DType.BFLOAT16, 6),)),) * 2
RECURRENT = Kind(State(), 4, (), parts=(4, 4, 8))
HYBRID = (Kind(Full(), 4, KV), Kind(Window(24), 4, KV), RECURRENT, Kind(Chunk(32), 4, KV))
SCALED = (Kind(Full(), 4, (*KV, ("k_scale", DType.FLOAT32, 1), ("v_scale", DType.UINT8, 1))),)


def serving(
    tp: int = 1, pp: int = 1, tokens: int = 16, order: str = "BLHNC", pack: str = "packed"
) -> Served:
    every = {kind.retention: tokens for model in (DENSE, HYBRID) for kind in model}
    return Served(tp=tp, pp=pp, states=every, order=order, pack=pack, alignment=Alignment())


FIXED = {
    "equal": (DENSE, serving(), serving()),
    "tp 1 to 2": (DENSE, serving(tp=1), serving(tp=2)),
    "tp 2 to 1": (DENSE, serving(tp=2), serving(tp=1)),
    "tp 2 to 4": (DENSE, serving(tp=2), serving(tp=4)),
    "tp 4 to 2": (DENSE, serving(tp=4), serving(tp=2)),
    "tp 3 to 2": (DENSE, serving(tp=3), serving(tp=2)),
    "tp 2 to 3": (DENSE, serving(tp=2), serving(tp=3)),
    "more ranks than heads": (TWO_HEADS, serving(tp=4), serving(tp=1)),
    "pp 1 to 2": (DENSE, serving(pp=1), serving(pp=2)),
    "pp 3 to 2": (DENSE, serving(pp=3), serving(pp=2)),
    "tp and pp": (DENSE, serving(tp=2, pp=2), serving(tp=3, pp=1)),
    "blocks of 16 to 64": (DENSE, serving(tokens=16), serving(tokens=64)),
    "blocks of 64 to 16": (DENSE, serving(tokens=64), serving(tokens=16)),
    "blocks of 16 to 24": (DENSE, serving(tokens=16), serving(tokens=24)),
    "orders": (DENSE, serving(order="BLHNC"), serving(order="LBNHC")),
    "heads outermost": (DENSE, serving(tp=2, order="BHLNC"), serving(tp=4, order="BHLNC")),
    "packed to separate": (HYBRID, serving(), serving(pack="separate")),
    "separate to union": (HYBRID, serving(pack="separate"), serving(pack="union")),
    "hybrid, tp 1 to 2": (HYBRID, serving(tp=1), serving(tp=2)),
    "hybrid, tp 4 to 2": (HYBRID, serving(tp=4), serving(tp=2)),
    "latent replicas 4 to 2": (LATENT, serving(tp=4), serving(tp=2)),
    "scales": (SCALED, serving(tp=2, tokens=16), serving(tp=1, tokens=24)),
}


def ranks(served: Served) -> list[tuple[int, int]]:
    return list(product(range(served.tp), range(served.pp)))


def run(
    make_producer: Any, make_consumer: Any, case: Any, tokens: tuple[int, int], direction: str
) -> None:
    """Offer on all ranks of the source, pull on all ranks of the destination, compare."""
    kinds, source, destination = case
    start, num_tokens = tokens
    nodes: list[Any] = []
    try:
        offered: list[str] = []
        for tp, pp in ranks(source):
            layout = source.layout(kinds, tp, pp, num_tokens)
            node = make_producer(encode(layout), f"producer-{tp}-{pp}")
            nodes.append(node)
            rows = rows_for(layout, num_tokens, seed=tp * 7 + pp)
            node.fill(rows)
            offered.append(node.offer(rows, num_tokens, readers=len(ranks(destination))))
        for tp, pp in ranks(destination):
            layout = destination.layout(kinds, tp, pp, num_tokens)
            node = make_consumer(encode(layout), f"consumer-{tp}-{pp}")
            nodes.append(node)
            rows = rows_for(layout, num_tokens, seed=100 + tp * 7 + pp)
            stats = node.pull(
                offered, rows, start_token=start, direction=direction, digest="always"
            )
            assert "error" not in stats, stats["error"]
            assert node.check(rows, start, num_tokens) == ""
            assert stats["digest"] == "passed"
    finally:
        for node in nodes:
            node.close()


@pytest.mark.parametrize("name", FIXED)
@pytest.mark.parametrize("transport", ["local", "nixl"])
def test_every_rank_gets_exactly_its_bytes(other, transport, name):
    ways = ("read", "slots", "write")
    direction = ways[(list(FIXED).index(name) + (transport == "nixl")) % len(ways)]
    if transport == "local":
        fabric = Fabric()

        def here(manifest: bytes, name: str) -> Node:
            return Node(manifest, fabric, name=name)

        run(here, here, FIXED[name], (0, 90), direction)
    else:

        def there(manifest: bytes, name: str) -> Any:
            return other.node(manifest, name)

        run(
            there, lambda manifest, name: Node(manifest, name=name), FIXED[name], (0, 90), direction
        )


@pytest.mark.parametrize("tokens", [(0, 1), (0, 16), (16, 90), (17, 18), (33, 90), (64, 90)])
@pytest.mark.parametrize("direction", ["read", "write", "slots"])
def test_only_the_rest_of_a_prefix_moves(tokens, direction):
    fabric = Fabric()

    def here(manifest: bytes, name: str) -> Node:
        return Node(manifest, fabric, name=name)

    run(here, here, (HYBRID, serving(tp=2), serving(tokens=24)), tokens, direction)


@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_random_servings_of_random_models_agree(data):
    kinds = data.draw(strategies.models(most_layers=3))
    few = st.sampled_from([1, 2, 3])
    source = data.draw(strategies.served(kinds, tps=few, most_tokens=24))
    destination = data.draw(strategies.served(kinds, tps=few, most_tokens=24))
    num_tokens = data.draw(st.integers(1, 60))
    fabric = Fabric()

    def here(manifest: bytes, name: str) -> Node:
        return Node(manifest, fabric, name=name)

    direction = data.draw(st.sampled_from(["read", "write", "slots"]))
    run(here, here, (kinds, source, destination), (0, num_tokens), direction)
