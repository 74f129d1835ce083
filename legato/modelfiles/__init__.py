"""Where model files come from and what is in them: Hub, package index, cache, safetensors, GGUF, tokenizers."""
