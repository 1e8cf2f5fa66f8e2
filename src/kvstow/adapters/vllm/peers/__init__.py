"""Prefixes of other engines: their rows are asked for by key, rows of the host tier are lent.

    scheduler    a prompt of which device and tiers hold too little → one question to the first rank
    first rank   every peer that is well is asked at once, within a budget → tickets, or none
    every rank   its host tier has an agent of its own, which answers while the engine sleeps

What comes back is a handover like any other: pulled, fenced, compared, and computed if it fails.

questions  in the scheduler: which requests ask, and what an answer brings
client     in the first rank: peers that are met, asked, and left alone when they do not answer
server     in every rank: an agent over the host tier
"""
