"""Tokenizers of models without tokenizer.json, built from older file formats."""
