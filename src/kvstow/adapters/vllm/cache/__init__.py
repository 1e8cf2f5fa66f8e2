"""vLLM's own cache, in our words.

layout      what vLLM declares of its cache → a layout; its memory, adopted
pages       what one layer's page holds: its fields, where they are in several sections
"""
