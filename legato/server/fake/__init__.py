"""A shard without a model: `--fake`."""
