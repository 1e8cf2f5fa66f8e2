"""A small router in front of prefill and decode instances.

choice    which instance a request goes to: the least to compute, and not one that failed lately
prefixes  what every instance holds, heard from its events
requests  what clients ask, and what instances are asked
server    requests over HTTP; the only module that imports aiohttp
"""
