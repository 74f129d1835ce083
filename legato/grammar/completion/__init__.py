"""Completes JSON before `max_tokens` runs out."""
