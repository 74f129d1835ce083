"""The scheduler: queue, rows, KV blocks, prefix tree and step budget. Pure Python, no I/O."""
