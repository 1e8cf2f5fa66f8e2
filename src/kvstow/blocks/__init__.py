"""Which blocks a request has: slabs, holds, prefixes. Ids only, no memory."""
