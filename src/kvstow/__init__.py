"""Plans, packs, pages, moves and keeps KV caches for LLM inference.

Importing this package imports nothing else: ask for the part you need, as in
`from kvstow.plan import packed`.
"""

__version__ = "0.1.0.dev0"
