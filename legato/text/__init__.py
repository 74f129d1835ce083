"""Token ids to text: incremental detokenizing and stop strings."""
