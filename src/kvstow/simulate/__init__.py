"""A trace of requests, replayed on the block ledger under one or several packing policies."""

from kvstow.simulate.generate import MIXES, synthetic
from kvstow.simulate.replay import Pace, Replay
from kvstow.simulate.report import Report
from kvstow.simulate.trace import Request, read_trace, write_trace

__all__ = ["MIXES", "Pace", "Replay", "Report", "Request", "read_trace", "synthetic", "write_trace"]
