"""Benchmarks of a shard or a server."""
