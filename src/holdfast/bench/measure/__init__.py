"""From timed answers and samples to figures and a verdict."""
