"""Several engine processes, each with the whole model, behind one front."""
