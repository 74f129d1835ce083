"""The router process: the scheduler, and the connections to shards and HTTP workers. Never imports torch."""
