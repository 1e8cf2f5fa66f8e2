"""A small router in front of prefill and decode instances.

instances  whose turn it is, and who failed lately
requests   what clients send, and what instances are sent
metrics    what the router counts
server     requests over HTTP; the only module that imports aiohttp
"""
