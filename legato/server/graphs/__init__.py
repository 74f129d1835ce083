"""CUDA graphs: which sizes are captured, when, and how steps replay them."""
