"""Measures a shard or a server."""
