"""Reasoning: how models mark it, and how it is separated from the answer."""
