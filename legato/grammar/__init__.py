"""Constrained output: grammars compiled to masks over the vocabulary. Without torch, because the router imports it."""
