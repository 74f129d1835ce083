"""Drafts in a shard: which of them are right, and what it proposes itself."""
