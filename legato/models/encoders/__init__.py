"""Embedding models and classifiers: encoders and decoders without a head, pooling, classification heads."""
