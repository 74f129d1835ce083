"""The leaf: options, logging, errors, model files, tokenizer and text. Imports nothing else of Legato."""
