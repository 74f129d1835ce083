"""`text-generation-benchmark`: a shard's prefill and decode, as TGI's tool measures them."""
