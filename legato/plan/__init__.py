"""`legato plan`: computes whether a model fits and on how many shards, before anything is loaded."""
