"""A trace of requests, replayed on the block ledger under one or several packing policies.

trace    TraceRequest: requests by time of arrival, read from a file or synthetic
replay   Replay: a trace on a ledger, step by step, and the bytes that it wastes
report   SimulationReport, and a ReplayReport for every policy: times, hits, memory
"""

from kvstow.simulate.replay import Pace, Replay
from kvstow.simulate.report import ReplayReport, SimulationReport
from kvstow.simulate.trace import MIXES, TraceRequest, read_trace, synthetic, write_trace

__all__ = [
    "MIXES",
    "Pace",
    "Replay",
    "ReplayReport",
    "SimulationReport",
    "TraceRequest",
    "read_trace",
    "synthetic",
    "write_trace",
]
