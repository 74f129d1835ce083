"""Connections of an HTTP worker: accepted, limited in size, number and time, and closed without losing an answer."""
