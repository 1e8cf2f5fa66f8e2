"""What a KV connector keeps in mind, whatever the engine: no engine is imported here.

Read in this order: `declared` (the engine's words → a layout), `settings`, `handover` (what
travels with a request), `messages` (what the two sides tell each other), `pins` and
`counters` (generations), `scheduler` and `worker` (the two sides).
"""
