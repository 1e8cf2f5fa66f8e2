"""Pipeline stages: contiguous decoder layers, as even as the engines make them."""

from kvstow.errors import ModelError


def stage(num_layers: int, *, pp: int, pp_rank: int) -> range:
    """The decoder layers of stage `pp_rank` of `pp`.

    Every stage takes `num_layers // pp`. What remains goes one each to the stages from
    the last but one backwards: the last stage has the output head to compute, and the
    first the embedding. 61 layers on 4 stages are 15, 15, 16, 15.
    """
    if type(pp) is not int or pp < 1:
        raise ModelError(f"pp is {pp!r}, not a whole number > 0")
    if type(pp_rank) is not int or not 0 <= pp_rank < pp:
        raise ModelError(f"pp rank {pp_rank!r} is not one of the {pp} stages from 0")
    if pp > num_layers:
        raise ModelError(
            f"{num_layers} layers cannot fill {pp} pipeline stages"
            f"\n\nhint: choose a pp of at most {num_layers}"
        )
    each, left = divmod(num_layers, pp)
    sizes = [each + (pp - 1 - left <= i < pp - 1) for i in range(pp)]
    start = sum(sizes[:pp_rank])
    return range(start, start + sizes[pp_rank])
