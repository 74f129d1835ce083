"""Products with quantized matrices."""
