"""In the scheduler's process, one per engine: decides, and touches no memory.

side        one engine's requests, step by step, with its sources of prefixes
parts       what the parts share: engine, pool, next step; the verbs of a source of prefixes
handovers   tickets of requests, and of peers that are asked: checked, kept alive, pulled with
early       pulls that are over before the engine plans their request
offers      tickets for requests that have ended
recall      which beginnings of requests come back, which blocks are stored
key_index   which rows the tiers of all ranks keep; keys of requests
holds       blocks that the engine gives to nobody: of failed pulls, of rows to be stored
journal     which prompts were stored, for `kvstow why`
events      what the tiers hold, in vLLM's stream of KV events
"""
