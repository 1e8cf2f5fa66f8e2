"""Which instance comes first, and which is left out."""

from kvstow.adapters.router.instances import FAULTS_TO_OPEN, Instances

A, B, C = "http://a", "http://b", "http://c"


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def made(*urls: str, clock: Clock | None = None) -> Instances:
    return Instances(urls or (A, B, C), rest=10.0, clock=clock or Clock())


def urls(instances: Instances) -> list[str]:
    return [each.url for each in instances.in_turn()]


def test_instances_take_turns():
    instances = made()
    assert [urls(instances)[0] for _ in range(4)] == [A, B, C, A]


def test_one_that_is_named_twice_is_one():
    assert [each.url for each in made(A, "http://a/", B).all] == [A, B]


def test_an_instance_that_cannot_be_reached_is_left_out_at_once():
    instances = made()
    instances.fail(instances.all[0], at_once=True)
    assert A not in urls(instances)


def test_answers_of_5xx_open_after_several_in_a_row():
    instances = made()
    first = instances.all[0]
    for _ in range(FAULTS_TO_OPEN - 1):
        instances.fail(first, at_once=False)
        assert first.open_until is None
    instances.succeed(first)
    for _ in range(FAULTS_TO_OPEN):
        assert first.open_until is None
        instances.fail(first, at_once=False)
    assert first.open_until is not None


def test_a_rest_ends_with_a_healthy_answer_and_grows_with_every_failure():
    clock = Clock()
    instances = made(A, clock=clock)
    (only,) = instances.all
    for rest in (10, 20, 40):
        instances.fail(only, at_once=True)
        clock.now += rest - 1
        assert instances.to_probe() == []
        clock.now += 1
        assert instances.to_probe() == [only]
        assert urls(instances) == []
    only.open_until = None  # as after a probe that was answered
    assert urls(instances) == [A]
    instances.fail(only, at_once=True)
    clock.now += 79
    assert instances.to_probe() == []
    instances.succeed(only)
    instances.fail(only, at_once=True)
    clock.now += 10
    assert instances.to_probe() == [only]


def test_rests_do_not_grow_without_end():
    clock = Clock()
    instances = made(A, clock=clock)
    (only,) = instances.all
    for _ in range(50):
        instances.fail(only, at_once=True)
    assert only.open_until == clock.now + 320


def test_one_that_is_being_asked_is_not_asked_twice():
    clock = Clock()
    instances = made(A, clock=clock)
    (only,) = instances.all
    instances.fail(only, at_once=True)
    clock.now += 10
    only.is_probed = True
    assert instances.to_probe() == []


def test_the_last_resort_is_who_failed_longest_ago():
    clock = Clock()
    instances = made(clock=clock)
    for each in (instances.all[2], instances.all[0], instances.all[1]):
        instances.fail(each, at_once=True)
        clock.now += 1
    assert [each.url for each in instances.last_resort()] == [C, A, B]


def test_without_instances_there_is_nobody():
    nobody = Instances([], rest=1, clock=Clock())
    assert nobody.in_turn() == []
    assert nobody.last_resort() == []
