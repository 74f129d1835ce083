"""Speculative decoding in a shard: verification of drafts, and its own proposals."""
