"""Memory of a shard: how much a step needs, how much the KV cache gets, and giving back what is not used."""
