"""When rows of failed pulls may be used again; what waits on a real engine is in test_isolation."""

from types import SimpleNamespace
from typing import Any

import pytest

from kvstow.errors import TransferError
from kvstow.plan.manifest import encode
from kvstow.transfer.channel.messages import End
from kvstow.transfer.loop import AFTER_ERROR, IDLE
from kvstow.transfer.options import Options
from kvstow.transfer.peers.endpoint import EngineReplaced
from kvstow.transfer.quarantine import HURRY, MOST_FAILED, Quarantine
from kvstow.transfer.transport.local import Fabric
from transfer_node import Node, hybrid_layout


def quarantine(endpoint: Any) -> Quarantine:
    return Quarantine(
        endpoint,
        None,
        is_moving=lambda: False,
        before_close=lambda error: None,  # type: ignore
    )


def test_a_dead_writer_needs_one_fresh_engine_and_no_more():
    """Its rows may have to wait for another writer: engine after engine was made meanwhile, and
    nobody was greeted who could have said that it had stopped."""
    gauge = SimpleNamespace(set=lambda rows: None)
    endpoint = SimpleNamespace(
        clock=lambda: 0.0, num_engines=1, metrics=SimpleNamespace(quarantined=gauge)
    )
    waiting = quarantine(endpoint)
    with waiting.case([], rows=1) as case:
        both = [waiting._engine_replaced(case) for _ in range(2)]
        for story in both:
            next(story)
        assert case.needs_engine
        endpoint.num_engines += 1
        for story in both:
            assert case.needs_engine
            with pytest.raises(StopIteration):
                next(story)
        assert not case.needs_engine


def test_upkeep_goes_on_after_an_error_of_any_kind(caplog, monkeypatch):
    """Rows would stay in quarantine for good."""
    looks: list[int] = []

    def poll() -> None:
        looks.append(1)
        if len(looks) < 3:
            raise RuntimeError("dictionary changed size during iteration")

    node = Node(encode(hybrid_layout()), Fabric(), is_started=False)
    monkeypatch.setattr(node.agent.endpoint, "poll_flights", poll)
    upkeep = node.agent.quarantine.upkeep()
    assert [next(upkeep) for _ in range(3)] == [AFTER_ERROR, AFTER_ERROR, IDLE]
    assert node.metric("kvstow_transfer_errors_total", what="quarantine") == 2
    assert len(looks) == 3
    node.close()
    assert "RuntimeError: dictionary changed size" in caplog.text


# ── what is waited for ────────────────────────────────────────────────────────────────


class World:
    """As much of an endpoint, its loop and one failed pull as the quarantine looks at: 100 rows,
    and a clock that is set by hand."""

    name = "consumer"
    options = Options(
        quarantine_seconds=60.0,
        quarantine_share=0.25,
        drain_seconds=10.0,
        contact_seconds=5.0,
        heartbeat_seconds=2.0,
    )

    def __init__(self) -> None:
        self.now = 0.0
        self.is_draining = False
        self.num_engines = 1
        self.is_moving = False
        self.gone: set[str] = set()
        self.faulty_since: float | None = None
        self.stage = SimpleNamespace(is_scarce=False)
        self.flights: list[SimpleNamespace] = []
        self.events: list[Any] = []
        self.rows_told: list[int] = []
        self.metrics = SimpleNamespace(quarantined=SimpleNamespace(set=self.rows_told.append))
        self.layout = SimpleNamespace(groups=[0, 1], num_blocks=lambda g: 50)
        self.transport = SimpleNamespace(name="engine 1")
        self.reads: list[SimpleNamespace] = []
        self.card = SimpleNamespace(engine="their engine", start="first")
        self.peer = SimpleNamespace(
            name="producer",
            card=self.card,
            state="ready",
            greet=lambda: self.events.append("greet"),
            send=self.events.append,
            lose=lambda error: self.events.append(("lost", str(error))),
        )
        self.flight = SimpleNamespace(is_quiet=True)
        self.source = SimpleNamespace(
            id=7,
            peer=self.peer,
            card=self.card,
            flights=[self.flight],
            writer_is_quiet=False,
            forget=lambda: self.events.append("forgotten"),
        )
        self.quarantine = Quarantine(
            self,  # type: ignore
            self,  # type: ignore
            is_moving=lambda: self.is_moving,
            before_close=self.events.append,
        )

    def clock(self) -> float:
        return self.now

    def start(self, name: str, routine: Any) -> SimpleNamespace:
        """The loop's: a liveness read, which ends when the test says so."""
        routine.close()
        read = SimpleNamespace(is_over=False, interrupt=lambda e: self.events.append("interrupted"))
        self.reads.append(read)
        return read

    def note(self, what: str, facts: dict[str, Any]) -> None:
        self.events.append((what, facts))

    def replace_engine(self) -> None:
        self.num_engines += 1

    def taken(self) -> list[Any]:
        """What happened since the last look."""
        events, self.events[:] = list(self.events), []
        return events

    def wait(self) -> Any:
        return self.quarantine.quiesced([self.source], rows=3)


def is_over(routine: Any) -> bool:
    return next(routine, "over") == "over"


def test_rows_are_quiet_when_our_posts_have_ended_and_the_producer_has_said_so():
    world = World()
    world.flight.is_quiet = False
    waiting = world.wait()
    assert not is_over(waiting)
    assert world.quarantine.rows == 3
    world.source.writer_is_quiet = True
    assert not is_over(waiting)
    world.flight.is_quiet = True
    world.source.writer_is_quiet = False
    other = World()
    unsaid = other.wait()
    assert not is_over(unsaid)
    assert is_over(waiting)
    assert (world.quarantine.rows, other.quarantine.rows) == (0, 3)
    assert world.rows_told == [3, 0]
    assert world.taken()[-1] == "forgotten"
    assert "forgotten" not in other.taken()


def test_a_silent_producer_is_asked_once_per_heartbeat_and_looked_at_once_per_contact():
    world = World()
    waiting = world.wait()
    for now, asked, looks in [
        (0.0, True, 1),
        (1.9, False, 1),
        (2.1, True, 1),
        (4.2, True, 1),
        (5.1, False, 1),  # the look before has not ended
    ]:
        world.now = now
        assert not is_over(waiting)
        assert world.taken() == (["greet", End(7, 0, "failed")] if asked else []), now
        assert len(world.reads) == looks
    world.reads[0].is_over = True
    assert not is_over(waiting)
    assert len(world.reads) == 2
    world.source.writer_is_quiet = True
    assert is_over(waiting)
    assert world.taken() == ["interrupted", "forgotten"]


def test_a_peer_that_is_silent_while_posts_are_under_way_is_given_up_after_the_drain():
    world = World()
    world.flight.is_quiet = False
    waiting = world.wait()
    assert not is_over(waiting)
    world.now = 9.9
    assert not is_over(waiting)
    assert not any("lost" in event for event in world.taken() if isinstance(event, tuple))
    world.now = 10.1
    assert not is_over(waiting)
    (lost,) = [event for event in world.taken() if isinstance(event, tuple)]
    assert "silent for 10.0 s" in lost[1]
    world.peer.card = SimpleNamespace(engine="a fresh engine", start="first")
    assert not is_over(waiting)
    assert not [event for event in world.taken() if isinstance(event, tuple)]


@pytest.mark.parametrize("found_by", ["its memory", "its successor"])
def test_of_a_dead_producer_rows_are_quiet_after_a_fresh_engine(found_by: str):
    world = World()
    waiting = world.wait()
    assert not is_over(waiting)
    if found_by == "its memory":
        world.gone.add("their engine")
    else:
        world.peer.card = SimpleNamespace(engine="their engine", start="second")
        world.peer.state = "meeting"
        assert not is_over(waiting)
        world.now = 61.0
        assert not world.quarantine._is_due()  # a fresh engine would not help yet
        world.peer.state = "ready"
    assert not is_over(waiting)
    world.now = 61.0
    assert world.quarantine._is_due()
    world.num_engines += 1
    assert is_over(waiting)


@pytest.mark.parametrize("is_gone", [False, True])
def test_a_producer_is_connected_while_its_memory_is_looked_at(monkeypatch, is_gone: bool):
    world = World()
    world.source.ticket = SimpleNamespace(blocks={})
    world.attach = lambda card, user: world.events.append(("attach", card.engine, user))
    world.detach = lambda engine, user: world.events.append(("detach", engine, user))

    class Read:
        def __init__(self, *args: Any) -> None:
            world.events.append("read")
            if is_gone:
                raise TransferError("gone", kind="peer")

        def generations(self) -> Any:
            yield 0.0

    monkeypatch.setattr("kvstow.transfer.quarantine.CounterRead", Read)
    looking = world.quarantine._looked(world.source)  # type: ignore
    if is_gone:
        with pytest.raises(TransferError):
            next(looking)
    else:
        assert not is_over(looking)
        assert len(world.events) == 2
        assert is_over(looking)
    there = "their engine", world.source
    assert world.taken() == [("attach", *there), "read", ("detach", *there)]


# ── when the engine is replaced ───────────────────────────────────────────────────────


@pytest.mark.parametrize(("rows", "seconds"), [(25, 60.0), (26, 60.0 / HURRY)])
def test_the_engine_is_replaced_when_rows_have_waited_for_too_long_and_sooner_where_many_do(
    rows: int, seconds: float
):
    world = World()
    with world.quarantine.case([world.flight], rows):  # type: ignore
        world.now = 1000.0
        assert not world.quarantine._is_due()  # its post has ended
    world.now, world.flight.is_quiet = 0.0, False
    with world.quarantine.case([world.flight], rows):  # type: ignore
        world.now = seconds - 0.1
        with world.quarantine.case([world.flight], 0):  # type: ignore
            assert not world.quarantine._is_due()
            world.now = seconds + 0.1
            assert world.quarantine._is_due()
    assert not world.quarantine._is_due()


def test_the_engine_is_replaced_sooner_where_slots_are_scarce():
    """Rows were counted and slots were not: pulls from well peers had to wait for them."""
    world = World()
    world.flight.is_quiet = False
    with world.quarantine.case([world.flight], 1):  # type: ignore
        world.now = 60.0 / HURRY + 0.1
        assert not world.quarantine._is_due()
        world.stage.is_scarce = True
        assert world.quarantine._is_due()


def test_an_engine_that_has_not_let_go_of_a_peer_is_replaced():
    world = World()
    world.faulty_since = 5.0
    world.now = 64.9
    assert not world.quarantine._is_due()
    world.now = 65.1
    assert world.quarantine._is_due()


def test_the_engine_is_replaced_when_too_many_posts_have_failed():
    world = World()
    times = [None, *(float(n) for n in range(MOST_FAILED))]
    world.flights = [SimpleNamespace(failed_at=time) for time in reversed(times)]
    world.now = 1e6
    assert not world.quarantine._is_due()
    last = float(MOST_FAILED)
    world.flights.insert(5, SimpleNamespace(failed_at=last))
    world.now = last + 60.0 / HURRY - 0.1
    assert not world.quarantine._is_due()
    world.now = last + 60.0 / HURRY + 0.1
    assert world.quarantine._is_due()


def test_what_moves_may_end_before_the_engine_is_closed_but_not_for_long():
    for has_ended in (True, False):
        world = World()
        world.is_moving = True
        replacing = world.quarantine._replaced()
        for now in (0.0, 9.9):
            world.now = now
            assert not is_over(replacing)
            assert world.is_draining
            assert world.taken() == []
        world.is_moving = not has_ended
        world.now = 9.9 if has_ended else 10.0
        assert not is_over(replacing)
        (error,) = world.taken()
        assert isinstance(error, EngineReplaced)
        assert world.num_engines == 1
        assert is_over(replacing)
        assert world.num_engines == 2
        assert world.taken() == [("engine-replaced", {"engine": "engine 1", "rows": 0})]
        assert not world.is_draining


def test_an_engine_that_cannot_be_replaced_goes_on():
    world = World()

    def fail() -> None:
        raise RuntimeError("no memory for another")

    world.replace_engine = fail  # type: ignore
    replacing = world.quarantine._replaced()
    next(replacing)
    with pytest.raises(RuntimeError):
        next(replacing)
    assert not world.is_draining
