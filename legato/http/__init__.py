"""The HTTP workers: parse, validate, tokenize, stream. Never imports the router or torch."""
