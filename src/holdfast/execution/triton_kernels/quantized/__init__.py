"""Products with quantized blocks."""
