"""Which instance comes first, and which is left out."""

from kvstow.adapters.router.choice import FAULTS_TO_OPEN, Instances

A, B, C = "http://a", "http://b", "http://c"


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def made(*urls: str, clock: Clock | None = None) -> Instances:
    return Instances(urls or (A, B, C), rest=10.0, clock=clock or Clock())


def urls(instances: Instances, *about: object) -> list[str]:
    return [each.url for each in instances.ordered(*about)]  # pyright: ignore[reportArgumentType]


def test_instances_take_turns():
    instances = made()
    assert [urls(instances)[0] for _ in range(4)] == [A, B, C, A]


def test_one_that_is_named_twice_is_one():
    assert [each.url for each in made(A, "http://a/", B).all] == [A, B]


def test_the_longest_prefix_comes_first_whosever_turn_it_is():
    instances = made()
    for _ in range(3):
        assert urls(instances, 100, {B: 64, C: 32}) == [B, C, A]


def test_what_an_instance_is_busy_with_counts_against_its_prefix():
    instances = made()
    busy = instances.all[1]
    with busy.busy_with(50):
        assert urls(instances, 100, {B: 64, C: 32}) == [C, B, A]
    assert urls(instances, 100, {B: 64, C: 32})[0] == B
    assert (busy.requests, busy.tokens) == (0, 0)


def test_equal_costs_take_turns():
    instances = made()
    assert [urls(instances, 100, {})[0] for _ in range(3)] == [A, B, C]


def test_an_instance_that_cannot_be_reached_is_left_out_at_once():
    instances = made()
    instances.failed(instances.all[0], at_once=True)
    assert A not in urls(instances)
    assert urls(instances, 100, {A: 96}) != []
    assert A not in urls(instances, 100, {A: 96})


def test_answers_of_5xx_open_after_several_in_a_row():
    instances = made()
    first = instances.all[0]
    for _ in range(FAULTS_TO_OPEN - 1):
        instances.failed(first, at_once=False)
        assert not first.is_open
    instances.works(first)
    for _ in range(FAULTS_TO_OPEN):
        assert not first.is_open
        instances.failed(first, at_once=False)
    assert first.is_open


def test_a_rest_ends_with_a_healthy_answer_and_grows_with_every_failure():
    clock = Clock()
    instances = made(A, clock=clock)
    (only,) = instances.all
    for rest in (10, 20, 40):
        instances.failed(only, at_once=True)
        clock.now += rest - 1
        assert instances.to_probe() == []
        clock.now += 1
        assert instances.to_probe() == [only]
        assert urls(instances) == []
    instances.healthy(only)
    assert urls(instances) == [A]
    instances.failed(only, at_once=True)
    clock.now += 79
    assert instances.to_probe() == []
    instances.works(only)
    instances.failed(only, at_once=True)
    clock.now += 10
    assert instances.to_probe() == [only]


def test_rests_do_not_grow_without_end():
    clock = Clock()
    instances = made(A, clock=clock)
    (only,) = instances.all
    for _ in range(50):
        instances.failed(only, at_once=True)
    assert only.open_until == clock.now + 320


def test_one_that_is_being_asked_is_not_asked_twice():
    clock = Clock()
    instances = made(A, clock=clock)
    (only,) = instances.all
    instances.failed(only, at_once=True)
    clock.now += 10
    only.is_probed = True
    assert instances.to_probe() == []


def test_the_last_resort_is_who_failed_longest_ago():
    clock = Clock()
    instances = made(clock=clock)
    for each in (instances.all[2], instances.all[0], instances.all[1]):
        instances.failed(each, at_once=True)
        clock.now += 1
    assert [each.url for each in instances.last_resort()] == [C, A, B]


def test_without_instances_there_is_nobody():
    nobody = Instances([], rest=1, clock=Clock())
    assert nobody.ordered() == []
    assert nobody.last_resort() == []


def test_the_idlest_has_the_fewest_requests_and_takes_no_turn():
    instances = made()
    first, second, third = instances.all
    with first.busy_with(1), third.busy_with(1):
        assert instances.idlest() is second
        instances.failed(second, at_once=True)
        assert instances.idlest() is first
        assert instances.ordered()[0] is first
    assert Instances([], rest=1, clock=Clock()).idlest() is None
