"""A shard that embeds or classifies texts (`--task embed`)."""
