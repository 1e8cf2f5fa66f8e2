"""Rows on stores that many machines reach: S3, Redis or Valkey, Mooncake.

tier       RemoteTier: look-ups, loads and stores within time limits, never a wrong row
client     what we ask of a store, and which one a URL names; s3, redis and mooncake do it, each
           with one library
objects    the bytes of a row object: header, checksums per layer and head, row
directory  who writes here: manifests, each published once
reading    rows of other layouts: which ranges of which objects make a row of ours
fetch      objects looked up in batches, fetched, verified and turned into rows
calls      time limits and the circuit breaker
writes     rows on their way out: bounded, and dropped rather than waited for
collect    what a store holds: counted, verified, collected; limits for writers
"""
