"""Simulate: the same requests with slabs, and with one row per slab as engines do it today.

python examples/simulate_load.py [MODEL] [GIB] [REQUESTS]
"""

import sys

import kvstow
from kvstow.plan.models import model_layers
from kvstow.simulate import Pace, Replay, ReplayReport, synthetic
from kvstow.simulate.replay import POLICIES, layout_of


def main(model: str = "qwen3-next-80b", gib: str = "10", requests: str = "300") -> None:
    groups = kvstow.grouped(model_layers(model).layers)
    trace = synthetic("single", num_requests=int(requests), rate=float("inf"), seed=0)
    for policy in POLICIES:
        replay = Replay(layout_of(policy, groups, budget=int(gib) << 30), trace, Pace())
        report = ReplayReport.of(replay.run())
        print(
            f"{policy:<6} {report.mean_requests:7.1f} requests at once, "
            f"{report.waste['total']:6.1%} of the bytes in use wasted, "
            f"{report.completed} completed"
        )


if __name__ == "__main__":
    main(*sys.argv[1:])
