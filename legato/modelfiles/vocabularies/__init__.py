"""Tokenizers of models that have no tokenizer.json: read from the files that were usual before it."""
