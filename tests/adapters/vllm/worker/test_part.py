"""Tasks of a rank's parts."""

from kvstow.adapters.vllm.worker.part import Task, Tasks


def counting(to: int, seen: list[object]) -> Task:
    """A task that waits so many times."""
    try:
        for number in range(to):
            seen.append(number)
            yield
    except (RuntimeError, GeneratorExit) as error:
        seen.append(type(error))


def test_a_task_does_at_once_what_it_can_and_goes_on_when_it_is_resumed():
    tasks, seen = Tasks(), list[object]()
    tasks.begin(counting(0, seen))
    assert (len(tasks), seen) == (0, [])
    tasks.begin(counting(2, seen))
    assert (len(tasks), seen) == (1, [0])
    tasks.resume()
    assert (len(tasks), seen) == (1, [0, 1])
    tasks.resume()
    assert (len(tasks), seen) == (0, [0, 1])


def test_tasks_end_where_they_are_and_may_learn_why():
    tasks, seen = Tasks(), list[object]()
    tasks.begin(counting(2, seen))
    tasks.end()
    tasks.begin(counting(2, seen))
    tasks.end(RuntimeError("over"))
    assert (len(tasks), seen) == (0, [0, GeneratorExit, 0, RuntimeError])


def test_a_task_that_does_not_care_why_it_ends_keeps_no_other_from_ending():
    def waiting() -> Task:
        yield

    tasks, seen = Tasks(), list[object]()
    tasks.begin(waiting())
    tasks.begin(counting(2, seen))
    tasks.end(RuntimeError("over"))
    assert (len(tasks), seen) == (0, [0, RuntimeError])
