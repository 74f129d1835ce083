"""Logits to tokens for a whole batch at once."""
