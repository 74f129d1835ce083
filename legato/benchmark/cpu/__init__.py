"""`legato bench cpu`: four workloads in Legato and in other CPU engines, one after the other on the same machine."""
