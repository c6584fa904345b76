"""What is a function of a case alone, kept: in memory within a process, on disk between processes and runs.

Here belong keys, the file and the eviction; not what is kept (enclosures, bounds, judgements know that themselves).
Nothing is kept unless a run opens a store (`oracle.store.kept.opened`).
"""
