"""Starts, supervises and stops the processes: download, shards, router. Never imports torch."""
