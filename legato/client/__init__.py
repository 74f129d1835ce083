"""Python clients for the HTTP API."""
