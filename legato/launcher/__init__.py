"""Turns options into processes: download, shards, router, logs, shutdown. Never imports torch."""
