"""Agents that meet: ours, those we dial, those that dial us.

endpoint   our side: arena, counters, engine
flight     a post of ours, until nothing writes to its memory any more
outgoing   an agent that we dial: hello, path, renewals
layouts    layouts of peers, each decoded and compared once
probe      which way bytes go fastest between the two
"""
