"""Routes of a server that embeds or classifies texts (`--task embed`): OpenAI's `/v1/embeddings`, and those of TEI.

A route reads texts (`texts.py`), has their vectors computed (`vectors.py`) and writes its API's answer.
"""
