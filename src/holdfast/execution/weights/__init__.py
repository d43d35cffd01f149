"""Weights brought into memory, as the decoder multiplies them."""
