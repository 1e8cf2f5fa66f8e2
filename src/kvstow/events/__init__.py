"""What an engine has cached, told to routers in vLLM's format.

format      the events and their bytes: blocks stored, blocks removed
announce    Announcer: hashes that came and went → events that say which tokens they stand for
publisher   EventPublisher: numbered batches on a socket, the latest ones kept for replay
"""
