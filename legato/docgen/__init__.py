"""Generates the reference pages of docs/."""
