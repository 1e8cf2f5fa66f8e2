"""Clients of remote stores. Each library is imported in one module alone.

base       what we ask of a store: five verbs, each for many names at once
s3         S3 (obstore)
redis      Redis and Valkey (redis)
mooncake   Mooncake Store (mooncake)
"""
