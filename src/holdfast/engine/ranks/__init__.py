"""The ranks of one engine: rank 0 runs the loop, others are its children and follow its plans."""
