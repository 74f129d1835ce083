"""`legato bench engine`: workloads through scheduler and shard, without HTTP."""
