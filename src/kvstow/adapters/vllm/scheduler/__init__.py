"""In the scheduler's process, one per engine: decides, and touches no memory.

side        which request hands over, takes over, is stored or comes back
recall      which beginnings of requests come back, which blocks are stored
stored      which rows the tiers of all ranks keep; keys of requests
stores      rows on their way to the tiers: held, in turn, within a bandwidth
held        blocks of failed pulls that somebody may still write to
weights     what the engine computes with, while its weights are changed in place
journal     which prompts were stored, for `kvstow why`
events      what the tiers hold, in vLLM's stream of KV events
"""
