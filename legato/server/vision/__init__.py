"""Images in the shard: pixels, encoder runs, embeddings."""
