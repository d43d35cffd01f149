"""Products of inputs that are rounded to one byte each, as FP8 and W8A8 checkpoints want them."""
