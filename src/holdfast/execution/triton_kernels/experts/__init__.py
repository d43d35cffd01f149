"""Products with the experts that tokens chose."""
