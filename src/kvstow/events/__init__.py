"""What an engine has cached, told to routers in vLLM's format.

format      the events and their bytes: stored, removed, all cleared
announce    Announcer: hashes that came and went → events that say which tokens they stand for
publisher   EventPublisher: numbered batches on a socket, the latest ones kept for replay
subscriber  EventSubscriber: all batches of a publisher in order, missed ones asked for again
index       InstanceIndex: which instance holds how much of a prompt, and in which tier
"""
