"""A small router in front of prefill and decode instances.

instances  whose turn it is, and who failed lately
server     requests over HTTP; the only module that imports aiohttp
"""
