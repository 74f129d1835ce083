"""Legato: a text-generation server in Python."""

__version__ = "0.1.0"
