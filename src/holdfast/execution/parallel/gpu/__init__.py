"""Ranks on GPUs: what they do together, over memory that they see of one another or by NCCL, and which of the two it
is."""
