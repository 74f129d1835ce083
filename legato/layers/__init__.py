"""Modules shared by the architectures, and the two things every forward reads: Step and KVCache."""
