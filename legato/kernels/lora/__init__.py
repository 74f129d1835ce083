"""LoRA adapters: their pages, and what they add to products."""
