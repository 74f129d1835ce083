"""Authenticated TCP links between the processes of one model on several machines. Never imports torch."""
