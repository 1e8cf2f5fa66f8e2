"""A trace of requests, replayed on the block ledger under one or several packing policies."""

from kvstow.simulate.replay import Pace, Replay
from kvstow.simulate.report import ReplayReport
from kvstow.simulate.trace import MIXES, TraceRequest, read_trace, synthetic, write_trace

__all__ = [
    "MIXES",
    "Pace",
    "Replay",
    "ReplayReport",
    "TraceRequest",
    "read_trace",
    "synthetic",
    "write_trace",
]
