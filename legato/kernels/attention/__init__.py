"""Attention: a definition in torch over the paged KV cache, and kernels for prompts, chunks and decodes."""
