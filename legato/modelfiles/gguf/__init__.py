"""GGUF: the container, its configuration and its tokenizer."""
