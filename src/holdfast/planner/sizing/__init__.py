"""Bytes by term, and the limits that follow from them."""
