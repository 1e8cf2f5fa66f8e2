"""The live page, fed by agents that really move rows."""

import threading
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
from prometheus_client import CollectorRegistry, Counter, start_http_server

pytest.importorskip("torch", reason="torch is not installed")

from kvstow.blocks.ledger import Ledger
from kvstow.blocks.pool import Pool
from kvstow.cli.dash import Watch, dashboard
from kvstow.errors import TransferError
from kvstow.memory.arena import Arena
from kvstow.observe import RouterMetrics, vllm_counter
from kvstow.plan.group import grouped
from kvstow.plan.identity import Identity
from kvstow.plan.models import model_layers
from kvstow.plan.pack import Site, packed
from kvstow.transfer.agent import Agent
from kvstow.transfer.transport.local import Fabric, LocalTransport

MODEL = "gemma-3-270m"


class Pair:
    """A producer and a consumer in this process, and requests that go from one to the other."""

    def __init__(self):
        groups = grouped(model_layers(MODEL).layers)
        layout = packed(groups, num_slabs=40, site=Site(model=MODEL))
        fabric = Fabric()
        self.pools = Pool(layout), Pool(layout)
        self.ledgers = tuple(Ledger(pool) for pool in self.pools)
        self.agents = tuple(
            Agent(
                Arena(layout),
                pool,
                transport=LocalTransport(fabric),
                identity=Identity.unverified("a page"),
                name=name,
            )
            for pool, name in zip(self.pools, ("prefill", "decode"), strict=True)
        )

    def pull(self, num_tokens, *, withdrawn=False):
        here, there = (ledger.admit(num_tokens, num_tokens=num_tokens) for ledger in self.ledgers)
        ticket = self.agents[0].offer(self.ledgers[0], here.request)
        if withdrawn:
            self.agents[0].withdraw(ticket)
        into = self.ledgers[1].blocks(there.request)
        self.agents[1].pull(ticket, into=into, deadline=20).wait()
        return there.request


@contextmanager
def watched(*agents):
    """The page's address, while the agents are asked again and again."""
    watch = Watch([agent.address for agent in agents], seconds=0.2)
    server = dashboard(watch, ("127.0.0.1", 0), key="")
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    watch.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
        watch.close()


def told(page, text, seconds=60):
    """Waits until the page says so."""
    for _ in range(10 * seconds):
        if text in page.locator("main").inner_text():
            return
        page.wait_for_timeout(100)
    pytest.fail(f"{text!r} is not in:\n{page.locator('main').inner_text()}")


@pytest.mark.parametrize("width", [360, 1200])
def test_the_page_follows_transfers_leases_failures_and_slabs(opened, width):
    pair = Pair()
    first, second = pair.agents
    with (
        first,
        second,
        watched(first, second) as url,
        opened(url, width=width, allowed=(url, "data:")) as page,
    ):
        told(page, f"{MODEL} · {pair.agents[0].address}")
        told(page, "0\ntransfers accepted")
        pair.pull(300)
        told(page, "1\ntransfers accepted")
        moved = page.locator(".tile", has_text="pulled in all").nth(1).locator("b").inner_text()
        assert moved != "0 B"
        told(page, f"{moved}\npulled from here by others")
        with pytest.raises(TransferError) as caught:
            pair.pull(200, withdrawn=True)
        told(page, "1\ntransfers failed")
        told(page, caught.value.kind)
        slabs = page.locator("canvas[aria-label*='owners of slabs']").last
        assert "full" in slabs.get_attribute("aria-label")
        assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_a_router_and_vllm_are_shown_by_what_they_count(opened):
    registry = CollectorRegistry()
    RouterMetrics(registry).requests.labels("tickets").inc(12)
    pulled, _ = vllm_counter("pulled bytes")
    Counter(pulled.family, "x", ["engine"], registry=registry).labels("0").inc(3 << 20)
    pulls, outcome = vllm_counter("pull accepted")
    made = Counter(pulls.family, "x", ["engine", pulls.label], registry=registry)
    made.labels("0", outcome).inc()
    failed, _ = vllm_counter("store failed")
    Counter(failed.family, "x", ["engine"], registry=registry).labels("0")
    server, thread = start_http_server(0, "127.0.0.1", registry)
    try:
        with (
            watched(SimpleNamespace(address=f"http://127.0.0.1:{server.server_port}/")) as url,
            opened(url, width=360, allowed=(url, "data:")) as page,
        ):
            told(page, "router requests, tickets\t12")
            told(page, "vllm pulled bytes\t3 MiB")
            told(page, "vllm pulls, accepted\t1")
            assert "store failures" not in page.inner_text("body")
            assert page.locator(".tile, canvas:visible").count() == 0
            assert page.evaluate("document.documentElement.scrollWidth") <= 360
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def test_the_page_says_when_an_agent_is_gone(opened):
    pair = Pair()
    with pair.agents[1], watched(*pair.agents) as url, opened(url, allowed=(url, "data:")) as page:
        with pair.agents[0]:
            told(page, "prefill")
        told(page, "did not answer")
