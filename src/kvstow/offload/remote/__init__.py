"""Rows on stores that many machines reach: S3, Redis or Valkey, Mooncake.

tier       RemoteTier: look-ups, loads and stores within time limits, never a wrong row
url        which store a URL names, and the options it carries
clients    what we ask of a store, and how S3, Redis and Mooncake do it
objects    the bytes of a row object: header, checksums per layer and head, row
directory  who writes here: manifests, each published once
reading    rows of other layouts: which ranges of which objects make a row of ours
lookup     where rows are, asked for in batches and remembered
fetch      objects fetched, verified and turned into rows, each once
calls      time limits and the circuit breaker
writes     rows on their way out: bounded, and dropped rather than waited for
collect    limits, and the collector of old rows
inspect    what a store holds, every row verified
"""
