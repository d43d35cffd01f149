"""Ranks that compute one model together: how their sums, logits and tokens come together, and how plans reach them."""
