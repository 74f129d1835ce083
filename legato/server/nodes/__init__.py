"""A shard among others on several machines: collectives and pipeline stages over authenticated links."""
