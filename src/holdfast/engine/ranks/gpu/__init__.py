"""The same of ranks on GPUs."""
