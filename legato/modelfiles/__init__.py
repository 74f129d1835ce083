"""Model files: Hub, package index, cache, safetensors, GGUF, tokenizers."""
